"""What the benchmarks and the interop tests know about a local three-node cluster.

A system (ConvoyMQ, RabbitMQ) is a `LocalCluster`: real node processes on loopback, started, killed
and stopped by pid. "Usable" means the same for every system: each node takes connections, a quorum
queue can be declared, a confirmed message published on the first node can be fetched on the last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
from pika.adapters.utils.connection_workflow import (  # type: ignore[import-untyped]
    AMQPConnectorException,
)

PROBE_PAUSE_S = 0.02
PROBE_QUEUE = "usable-probe"
CONNECT_S = 60.0
USABLE_S = 600.0
"""A node that ends is noticed at once: these only end what would wait for ever."""


class SystemMissing(Exception):
    """The software to start is not installed; the text says how to install it."""


class NotUsable(Exception):
    """The cluster did not become usable in time; the text says what was still missing."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One broker process: its name, its AMQP port on loopback, and the process when it runs."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def pid(self) -> int:
        """The broker's process id. Raises RuntimeError while the node is down."""
        if self.process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self.process.pid


class NotPossible(Exception):
    """This machine does not allow a case; the text says what it needs."""


class LocalCluster(ABC):
    """Node processes of one system under one temporary directory.

    Args: `base_port`: the cluster takes ports from base_port to base_port + 40.
    """

    system: str
    nodes: list[Node]

    def __init__(self, *, base_port: int, count: int = 3) -> None:
        self.base_port = base_port
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.system}-cluster-"))
        self.nodes = [
            Node(name=self.node_name(number), port=base_port + number)
            for number in range(1, count + 1)
        ]

    @abstractmethod
    def node_name(self, number: int) -> str:
        """The name of node `number`, from 1."""

    @abstractmethod
    def version(self) -> str:
        """The version of the installed software. Raises SystemMissing."""

    @abstractmethod
    def spawn(self, index: int) -> subprocess.Popen[bytes]:
        """Start the process of node `index` (from 0) on its data, without waiting."""

    @abstractmethod
    def add_user(self, name: str, *, configure: str, write: str, read: str) -> None:
        """Make a user of vhost `/` with the password `name` and these permission patterns."""

    @abstractmethod
    def delete_user(self, name: str) -> None:
        """Remove a user."""

    @abstractmethod
    def mirror(self, pattern: str, definition: Mapping[str, str | int]) -> None:
        """Set a policy for the classic queues whose names match."""

    @abstractmethod
    def wait_synchronised(self, queue: str) -> None:
        """Wait until a classic queue of vhost `/` has a synchronised mirror."""

    @property
    def uris(self) -> list[str]:
        return [node.uri for node in self.nodes]

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self.nodes]

    def start(self) -> float:
        """Start every node and wait until the cluster is usable. Returns: seconds that it took."""
        for node in self.nodes:
            _require_free(node.port)
        began = time.monotonic()
        for index, node in enumerate(self.nodes):
            node.process = self.spawn(index)
        self.wait_usable()
        return time.monotonic() - began

    def kill(self, index: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to one node; after SIGKILL its process is reaped."""
        node = self.nodes[index]
        os.kill(node.pid, sig)
        if sig == signal.SIGKILL:
            assert node.process is not None
            node.process.wait()
            node.process = None

    def restart(self, index: int) -> None:
        """Start a killed node again on its data and wait until the cluster is usable."""
        node = self.nodes[index]
        assert node.process is None, f"{node.name} still runs"
        node.process = self.spawn(index)
        self.wait_usable()

    def wait_usable(self) -> None:
        """Wait for the cluster. Raises NotUsable when a node ends or the time is over."""
        wait_usable(self.uris, alive=self._check_alive)

    def _check_alive(self) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.poll() is not None:
                raise NotUsable(
                    f"{node.name} ended with code {node.process.returncode}:\n{self.log_tail(node)}"
                )

    def log_path(self, node: Node) -> Path:
        return self.directory / f"{node.name}.out"

    def log_tail(self, node: Node, lines: int = 20) -> str:
        """The last lines that the node wrote to its standard output and error."""
        path = self.log_path(node)
        if not path.exists():
            return "(no output)"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Kill every node and remove the data. Safe to call twice."""
        for node in self.nodes:
            if node.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    node.process.kill()
                node.process.wait()
                node.process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def keep_up(cluster: LocalCluster) -> None:
    """Run a cluster in the foreground until SIGINT or SIGTERM; start again what gets killed.

    Prints the variables by which the interop tests find it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), cluster:
        seconds = cluster.start()
        print(f"# {cluster.system} {cluster.version()} usable after {seconds:.1f} s")
        print(f"export CONVOY_TEST_URIS={','.join(cluster.uris)}")
        print(f"export CONVOY_TEST_SYSTEM={cluster.system}", flush=True)
        while True:
            for index, node in enumerate(cluster.nodes):
                if node.process is not None and node.process.poll() is not None:
                    print(f"# {node.name} ended: {node.process.returncode}", flush=True)
                    node.process = cluster.spawn(index)
            time.sleep(0.5)


def _require_free(port: int) -> None:
    """Raise NotUsable when something else listens on the port: it would be taken for ours."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        raise NotUsable(f"port {port} is in use by another process")


def connect(uri: str, *, timeout_s: float = CONNECT_S) -> pika.BlockingConnection:
    """Open a connection with bounded waits. Raises pika's AMQPConnectionError or OSError."""
    parameters = pika.URLParameters(uri)
    parameters.connection_attempts = 1
    parameters.socket_timeout = timeout_s
    parameters.stack_timeout = timeout_s
    parameters.blocked_connection_timeout = timeout_s
    try:
        return pika.BlockingConnection(parameters)
    except AMQPConnectorException as error:  # pika lets some of these through as they are
        raise pika.exceptions.AMQPConnectionError(repr(error)) from error


def wait_usable(uris: list[str], *, alive: object = None) -> None:
    """Wait until the cluster at `uris` is usable (see the module's text).

    Args: `alive`: called between attempts; raises when waiting is pointless.
    Raises: NotUsable with the last error when the time is over.
    """
    deadline = time.monotonic() + USABLE_S
    last: BaseException | None = None
    ready = 0
    while time.monotonic() < deadline:
        if callable(alive):
            alive()
        try:
            while ready < len(uris):
                connect(uris[ready]).close()
                ready += 1
            _probe(uris)
        except (pika.exceptions.AMQPError, OSError, AssertionError) as error:
            last = error
            time.sleep(PROBE_PAUSE_S)
        else:
            return
    raise NotUsable(f"after {USABLE_S:.0f} s, at {uris[min(ready, len(uris) - 1)]}: {last!r}")


def _probe(uris: list[str]) -> None:
    """Send one confirmed message through a fresh quorum queue, from the first to the last node."""
    first = connect(uris[0])
    try:
        channel = first.channel()
        channel.queue_delete(PROBE_QUEUE)
        channel.queue_declare(PROBE_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        channel.confirm_delivery()
        channel.basic_publish("", PROBE_QUEUE, b"probe", mandatory=True)
        for uri in uris[1:]:
            other = connect(uri)
            try:
                other.channel().queue_declare(PROBE_QUEUE, passive=True)
                if uri == uris[-1]:
                    method, _, body = other.channel().basic_get(PROBE_QUEUE, auto_ack=True)
                    assert method is not None, "the probe message is not visible on the last node"
                    assert body == b"probe"
            finally:
                other.close()
        channel.queue_delete(PROBE_QUEUE)
    finally:
        with contextlib.suppress(pika.exceptions.AMQPError):
            first.close()
