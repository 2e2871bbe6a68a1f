"""Fixtures of the interop tests: the cluster, connections, and names that are cleaned up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from benchmarks.systems import connect

from tests.clusters import Cluster, cluster_under_test, version_tuple
from tests.interop.helpers import api, eventually, set_policy
from tests.raw_amqp import RawPeer

HERE = Path(__file__).parent
CLASSIC = {"x-queue-type": "classic"}
MIRRORING = "policies/%2F/interop-mirroring"
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rabbitmq_since(release): what this test asserts is older RabbitMQ's future"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The three-node cluster that all interop tests share; whoever kills a node restarts it.

    It ends with the last of these tests: an idle cluster takes time of the tests that follow.
    """
    with cluster_under_test() as running:
        yield running


@pytest.fixture(autouse=True)
def skip_where_the_release_differs(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `rabbitmq_since("4.3")` on a RabbitMQ older than that release."""
    marker = request.node.get_closest_marker("rabbitmq_since")
    if marker is not None:
        cluster: Cluster = request.getfixturevalue("cluster")
        if cluster.system == "rabbitmq" and version_tuple(cluster.version()) < version_tuple(
            marker.args[0]
        ):
            pytest.skip(f"RabbitMQ does this since {marker.args[0]}, this is {cluster.version()}")


class Names:
    """Gives names that no other test uses, and deletes what has them at the end."""

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self.queues: list[str] = []
        self.exchanges: list[str] = []

    def queue(self, name: str = "q") -> str:
        self.queues.append(f"{self._stem}.{name}")
        return self.queues[-1]

    def exchange(self, name: str = "x") -> str:
        self.exchanges.append(f"{self._stem}.{name}")
        return self.exchanges[-1]


@contextmanager
def given_names(cluster: Cluster) -> Iterator[Names]:
    """Names for as long as the context lasts."""
    given = Names(f"interop-{next(_numbers)}")
    yield given
    if given.queues or given.exchanges:
        connection = connect(cluster.uris[0])
        channel = connection.channel()
        for queue in given.queues:
            try:
                channel.queue_delete(queue)
            except pika.exceptions.ChannelClosedByBroker:
                channel = connection.channel()
        for exchange in given.exchanges:
            channel.exchange_delete(exchange)
        connection.close()


@pytest.fixture
def names(cluster: Cluster) -> Iterator[Names]:
    with given_names(cluster) as given:
        yield given


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[Any]:
    """A pika connection to the first node."""
    opened = connect(cluster.uris[0])
    yield opened
    try:
        opened.close()
    except pika.exceptions.ConnectionWrongStateError:
        pass
    except pika.exceptions.ConnectionClosedByBroker:
        # RabbitMQ 3.10's channel process may crash on unacknowledged messages of a deleted queue.
        if cluster.system != "rabbitmq":
            raise


@pytest.fixture
def channel(connection: Any) -> Any:
    return connection.channel()


@pytest.fixture
def open_connection(cluster: Cluster) -> Iterator[Callable[[int], Any]]:
    """Opens more pika connections: `open_connection(node)`."""
    opened: list[Any] = []

    def open_one(node: int = 0) -> Any:
        opened.append(connect(cluster.uris[node]))
        return opened[-1]

    yield open_one
    for one in opened:
        with suppress(pika.exceptions.AMQPError):
            one.close()


@pytest.fixture
def peer(cluster: Cluster) -> Iterator[RawPeer]:
    """A raw peer of the first node, connected but silent."""
    with RawPeer(cluster.uris[0]) as opened:
        yield opened


@pytest.fixture
def raw_channel(peer: RawPeer) -> RawPeer:
    """A raw peer with an open connection and channel 1."""
    return peer.handshake().open_channel(1)


@pytest.fixture
def declare(channel: Any, names: Names) -> Callable[..., str]:
    """Declares a durable classic queue at the first node: `declare("q", x_max_length=1)`."""

    def made(stem: str = "q", **arguments: object) -> str:
        queue = names.queue(stem)
        spelt = {name.replace("_", "-"): value for name, value in arguments.items()}
        channel.queue_declare(queue, durable=True, arguments={**CLASSIC, **spelt})
        return queue

    return made


@pytest.fixture(scope="module")
def mirroring(cluster: Cluster) -> Iterator[None]:
    """Queues whose stem begins with `mirrored-` have mirrors on all nodes."""
    pattern = r"^interop-\d+\.mirrored-"
    definition = {"ha-mode": "all"}
    if cluster.system == "convoy":
        set_policy(cluster, MIRRORING, {"pattern": pattern, "definition": definition})
    yield
    if cluster.system == "convoy":
        set_policy(cluster, MIRRORING, None)


@pytest.fixture(params=["plain", "mirrored"])
def declare_classic(
    request: pytest.FixtureRequest, cluster: Cluster, declare: Callable[..., str], mirroring: None
) -> Callable[..., str]:
    """As `declare`; in one case with synchronised mirrors on the other nodes."""
    if request.param == "mirrored" and cluster.system != "convoy":
        pytest.skip("policies are set by ConvoyMQ's HTTP API")

    def made(stem: str = "q", **arguments: object) -> str:
        if request.param == "plain":
            return declare(stem, **arguments)
        queue = declare(f"mirrored-{stem}", **arguments)
        path = f"queues/%2F/{queue}"
        eventually(lambda: len(api(cluster, "GET", path).get("synchronised_slave_nodes", ())) == 2)
        return queue

    return made
