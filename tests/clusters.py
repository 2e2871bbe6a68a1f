"""The cluster under test: ConvoyMQ by default, RabbitMQ to prove that the tests test AMQP.

`CONVOY_TEST_SYSTEM=rabbitmq` starts RabbitMQ from Debian's package instead of ConvoyMQ.
`CONVOY_TEST_URIS=amqp://…,amqp://…` uses a running cluster of that system; it must start killed
nodes again by itself, as `python benchmarks/rabbitmq.py` and `convoy up` do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import pytest
from benchmarks.convoy import ConvoyCluster, add_user, delete_user
from benchmarks.rabbitmq import RabbitCluster, installed_version
from benchmarks.systems import LocalCluster, SystemMissing, wait_usable

from convoymq.cli import cluster as cli
from tests.faults.traffic import until
from tests.forked_nodes import ForkedCluster, fork_node
from tests.patience import PATIENCE_S
from tests.ports import lasting_ports

BASE_PORT = int(os.environ.get("CONVOY_TEST_BASE_PORT") or lasting_ports())


class Cluster(Protocol):
    """What a test may ask of the cluster."""

    @property
    def system(self) -> str: ...

    @property
    def uris(self) -> list[str]: ...

    def version(self) -> str: ...

    def kill(self, index: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to node `index`."""

    def restart(self, index: int) -> None:
        """Bring a killed node back; returns when the whole cluster is usable."""

    def add_user(self, name: str, *, configure: str, write: str, read: str) -> None:
        """Make a user of vhost `/` with the password `name` and these permission patterns."""

    def delete_user(self, name: str) -> None:
        """Remove a user."""


class RunningCluster:
    """A cluster that somebody else started and keeps alive."""

    def __init__(self, system: str, uris: list[str]) -> None:
        self.system = system
        self.uris = uris

    def version(self) -> str:
        return installed_version() if self.system == "rabbitmq" else "0"

    def kill(self, index: int, sig: int = signal.SIGKILL) -> None:
        process = psutil.Process(listening_pid(self.uris[index]))
        process.send_signal(sig)
        if sig == signal.SIGKILL:
            process.wait(timeout=PATIENCE_S)

    def restart(self, index: int) -> None:
        wait_usable(self.uris)

    @property
    def api(self) -> str:
        """ConvoyMQ's HTTP API lies 20 above the AMQP port in `benchmarks/convoy.py`'s clusters."""
        if self.system == "rabbitmq":
            pytest.skip("a running RabbitMQ without its HTTP API can't be given users")
        return f"http://127.0.0.1:{(urlsplit(self.uris[0]).port or 0) + 20}"

    def add_user(self, name: str, *, configure: str, write: str, read: str) -> None:
        add_user(self.api, name, configure=configure, write=write, read=read)

    def delete_user(self, name: str) -> None:
        delete_user(self.api, name)


class ForkedConvoyCluster(ConvoyCluster):
    """Its nodes are forked."""

    def spawn(self, index: int) -> subprocess.Popen[bytes]:
        node = self.nodes[index]
        config = self.directory / f"{node.name}.conf"
        return fork_node(index, config, self.log_path(node), os.environ)


def listening_pid(uri: str) -> int:
    """The process that listens on the uri's port. Raises LookupError when there is none."""
    port = urlsplit(uri).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return int(connection.pid)
    raise LookupError(f"nothing listens on port {port}")


def start_cluster() -> LocalCluster:
    """Make the cluster that the environment asks for, not yet started."""
    if os.environ.get("CONVOY_TEST_SYSTEM", "convoy") == "rabbitmq":
        try:
            return RabbitCluster(base_port=BASE_PORT)
        except SystemMissing as error:
            pytest.skip(str(error))
    return ForkedConvoyCluster(base_port=BASE_PORT)


@contextmanager
def cluster_under_test() -> Iterator[Cluster]:
    """A usable three-node cluster for as long as the context lasts."""
    uris = os.environ.get("CONVOY_TEST_URIS")
    if uris:
        running = RunningCluster(
            os.environ.get("CONVOY_TEST_SYSTEM", "convoy"), [uri.strip() for uri in uris.split(",")]
        )
        wait_usable(running.uris)
        yield running
        return
    with start_cluster() as cluster:
        cluster.start()
        yield cluster


def version_tuple(text: str) -> tuple[int, ...]:
    """`"3.10.8"` → (3, 10, 8)."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


@contextmanager
def serving_cluster(
    directory: Path,
    base_port: int,
    settings: Mapping[str, str] | None = None,
    *,
    nodes: int = 3,
    policies: bool = False,
) -> Iterator[cli.LocalCluster]:
    """Nodes of ConvoyMQ that serve AMQP and HTTP for as long as the context lasts.

    Args:
        policies: policies are served, too: the second version of the machines is in force.
    """
    with ForkedCluster(directory, nodes, base_port, dict(settings or {})) as made:
        made.wait_ready()
        wait_http(made)
        until(lambda: made.api("overview"), "the HTTP API does not answer")
        if policies:
            until(lambda: serves_policies(made), "policies are not served")
        yield made


def cut_power(cluster: cli.LocalCluster, *numbers: int) -> None:
    """Ends nodes at once, as a power cut does; none named = all that run. A node that is killed
    after another would act on its death."""
    numbers = numbers or running(cluster)
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for number in numbers:
            cluster.kill(number, sign)


def stop_nodes(cluster: cli.LocalCluster, *numbers: int) -> None:
    """Stops nodes in an orderly way; none named = all that run."""
    numbers = numbers or running(cluster)
    for number in numbers:
        cluster.kill(number, signal.SIGTERM)

    def have_ended() -> bool:
        cluster.poll()
        return not {*numbers} & {*running(cluster)}

    until(have_ended, "a node does not stop")


def start_nodes(cluster: cli.LocalCluster, *numbers: int) -> None:
    """Starts nodes in this order, and waits until all serve."""
    for number in numbers:
        cluster.start_node(number)
    cluster.wait_ready()


def running(cluster: cli.LocalCluster) -> tuple[int, ...]:
    """Returns the numbers of the nodes that run."""
    return tuple(node.number for node in cluster.nodes if node.pid is not None)


def wait_http(cluster: cli.LocalCluster) -> None:
    """Waits until every running node has opened its HTTP port, which it does when it is ready."""
    for port in [node.http_port for node in cluster.nodes if node.pid is not None]:
        until(lambda port=port: is_open(port), f"port {port} is not open")


def is_open(port: int) -> bool:
    """Returns whether a connection to a port of this machine is taken; raises OSError if not."""
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return True


def serves_policies(cluster: cli.LocalCluster) -> bool:
    """The second version of the tree's rules is in force a moment after the nodes are linked."""
    policy = {"pattern": "^probe$", "definition": {"delivery-limit": 1}, "apply-to": "queues"}
    status, _ = call(cluster, "PUT", "policies/%2F/probe", policy)
    return status < 300 and call(cluster, "DELETE", "policies/%2F/probe")[0] == 204


def call(
    cluster: cli.LocalCluster, method: str, path: str, body: object = None, node: int = 0
) -> tuple[int, Any]:
    """Status and JSON of a request to the HTTP API of a node; 0 = the first one that runs."""
    asked = next(n for n in cluster.nodes if n.number == node or (not node and n.pid is not None))
    request = urllib.request.Request(
        f"http://127.0.0.1:{asked.http_port}/api/{path}",
        data=json.dumps(body).encode() if body is not None else None,
        method=method,
        headers={"content-type": "application/json", "authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    try:
        with answered(request) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def answered(request: urllib.request.Request) -> Any:
    """The answer to a request, as of `urlopen`.

    A node opens its HTTP port after its AMQP port: a refused connection is tried again.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
