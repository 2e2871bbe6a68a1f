"""The cluster under test: ConvoyMQ by default, RabbitMQ to prove that the tests test AMQP.

`CONVOY_TEST_SYSTEM=rabbitmq` starts RabbitMQ from Debian's package instead of ConvoyMQ.
`CONVOY_TEST_URIS=amqp://…,amqp://…` uses a running cluster of that system; it must start killed
nodes again by itself, as `python benchmarks/rabbitmq.py` and `convoy up` do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import pytest
from benchmarks.convoy import add_user, convoy_cluster, delete_user
from benchmarks.rabbitmq import RabbitCluster, installed_version
from benchmarks.systems import LocalCluster, SystemMissing, wait_usable

from tests.ports import cluster_ports

BASE_PORT = int(os.environ.get("CONVOY_TEST_BASE_PORT") or cluster_ports())


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
            process.wait(timeout=30)

    def restart(self, index: int) -> None:
        wait_usable(self.uris, timeout_s=120)

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
    return convoy_cluster(base_port=BASE_PORT)


@contextmanager
def cluster_under_test() -> Iterator[Cluster]:
    """A usable three-node cluster for as long as the context lasts."""
    uris = os.environ.get("CONVOY_TEST_URIS")
    if uris:
        running = RunningCluster(
            os.environ.get("CONVOY_TEST_SYSTEM", "convoy"), [uri.strip() for uri in uris.split(",")]
        )
        wait_usable(running.uris, timeout_s=120)
        yield running
        return
    with start_cluster() as cluster:
        cluster.start()
        yield cluster


def version_tuple(text: str) -> tuple[int, ...]:
    """`"3.10.8"` → (3, 10, 8)."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())
