"""Policies and limits in a cluster of three nodes, by clients as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, serving_cluster, start_nodes
from tests.faults.test_administration import add_user, connect
from tests.faults.traffic import until
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

Clients: TypeAlias = Callable[[str, int], Any]
BASE_PORT = cluster_ports(__name__)
CLASSIC = {"x-queue-type": "classic"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)
SHORT = {"pattern": "^short", "definition": {"max-length": 3}, "apply-to": "queues"}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("policies"), BASE_PORT, policies=True) as made:
        yield made


@pytest.fixture
def clients(cluster: LocalCluster) -> Iterator[Clients]:
    """Connects as a user to a node; what is open at the end is closed."""
    made: list[Any] = []

    def client(user: str, node: int) -> Any:
        made.append(connect(cluster, user, node=node))
        return made[-1]

    yield client
    for connection in made:
        if connection.is_open:
            connection.close()


def length(channel: Any, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def fill(channel: Any, queue: str, count: int, exchange: str = "") -> None:
    for number in range(count):
        channel.basic_publish(exchange, queue, b"%d" % number, PERSISTENT)


def test_a_policy_changes_live_queues_and_survives_restarts(
    cluster: LocalCluster, clients: Clients
) -> None:
    """Set on node 1, it acts in a queue of node 2 and in routing on node 3, also after all nodes
    were restarted, until it is removed."""
    channel = clients("guest", 2).channel()
    channel.confirm_delivery()
    channel.queue_declare("short", durable=True, arguments=CLASSIC)
    channel.queue_declare("spare", durable=True, arguments=CLASSIC)
    channel.exchange_declare("orders", "direct", durable=True)
    channel.exchange_declare("unrouted", "fanout", durable=True)
    channel.queue_bind("spare", "unrouted")
    fill(channel, "short", 10)
    assert length(channel, "short") == 10
    assert call(cluster, "PUT", "policies/%2F/p", SHORT)[0] == 201
    alternate = {"pattern": "^orders$", "definition": {"alternate-exchange": "unrouted"}}
    assert call(cluster, "PUT", "policies/%2F/ae", alternate)[0] == 201
    until(lambda: length(channel, "short") == 3)
    other = clients("guest", 3).channel()
    other.confirm_delivery()

    def routed() -> bool:
        fill(other, "nowhere", 1, "orders")
        return length(channel, "spare") > 0

    until(routed)
    for client in (channel, other):
        client.connection.close()
    cut_power(cluster)
    start_nodes(cluster, 1, 2, 3)
    until(lambda: cluster.api("overview"))
    row = call(cluster, "GET", "queues/%2F/short")[1]
    assert (row["policy"], row["effective_policy_definition"]) == ("p", {"max-length": 3})
    channel = clients("guest", 1).channel()
    channel.confirm_delivery()
    until(lambda: length(channel, "short") == 3)
    fill(channel, "short", 5)
    assert length(channel, "short") == 3
    spare = length(channel, "spare")
    fill(channel, "nowhere", 1, "orders")
    assert length(channel, "spare") == spare + 1
    assert call(cluster, "DELETE", "policies/%2F/p", node=3)[0] == 204

    def grows() -> bool:
        fill(channel, "short", 2)
        return length(channel, "short") > 4

    until(grows)


def test_limits_refuse_queues_connections_and_channels(
    cluster: LocalCluster, clients: Clients
) -> None:
    add_user(cluster, "few")
    assert call(cluster, "PUT", "user-limits/few/max-connections", {"value": 2})[0] == 204
    assert call(cluster, "PUT", "user-limits/few/max-channels", {"value": 2})[0] == 204
    first = clients("few", 1)
    second = clients("few", 2)
    with pytest.raises(
        pika.exceptions.ProbableAccessDeniedError,
        match=r"\(530\) .*user 'few': user connection limit \(2\) is reached",
    ):
        clients("few", 3)
    first.channel()
    second.channel()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as caught:
        second.channel()
    assert caught.value.reply_code == 530
    assert caught.value.reply_text == (
        "NOT_ALLOWED - number of channels opened for user 'few' has reached the maximum allowed "
        "user limit of (2)"
    )
    guest = clients("guest", 1)
    assert call(cluster, "PUT", "vhost-limits/%2F/max-connections", {"value": 1})[0] == 204
    with pytest.raises(
        pika.exceptions.ProbableAccessDeniedError,
        match=r"\(530\) .*access to vhost '/' refused for user 'guest': connection limit \(1\)",
    ):
        clients("guest", 1)
    assert call(cluster, "DELETE", "vhost-limits/%2F/max-connections")[0] == 204
    assert call(cluster, "PUT", "vhost-limits/%2F/max-queues", {"value": 1})[0] == 204
    channel = guest.channel()
    channel.queue_declare("a", durable=True)
    channel.queue_declare("a", durable=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        channel.queue_declare("b", durable=True)
    assert (closed.value.reply_code, closed.value.reply_text) == (
        406,
        "PRECONDITION_FAILED - cannot declare queue 'b': queue limit in vhost '/' (1) is reached",
    )


def test_a_delivery_limit_by_policy_acts_in_a_live_quorum_queue(
    cluster: LocalCluster, clients: Clients
) -> None:
    """Failures before the policy count. It is in the queue's log: it also acts after a restart."""
    policy = {"pattern": "^work", "definition": {"delivery-limit": 2}, "apply-to": "quorum_queues"}
    channel = clients("guest", 2).channel()
    channel.confirm_delivery()
    channel.queue_declare("work", durable=True)
    fill(channel, "work", 1)
    assert [fail(channel, "work") for _ in range(5)] == [True] * 5
    assert call(cluster, "PUT", "policies/%2F/limit", policy)[0] == 201
    until(lambda: not fail(channel, "work") and length(channel, "work") == 0)
    channel.connection.close()
    cut_power(cluster)
    start_nodes(cluster, 1, 2, 3)
    until(lambda: cluster.api("overview"))
    channel = clients("guest", 3).channel()
    channel.confirm_delivery()
    fill(channel, "work", 1)
    assert [fail(channel, "work") for _ in range(4)] == [True, True, True, False]
    assert call(cluster, "DELETE", "policies/%2F/limit", node=3)[0] == 204

    def survives() -> bool:
        channel.queue_purge("work")
        fill(channel, "work", 1)
        return all(fail(channel, "work") for _ in range(6))

    until(survives)


def fail(channel: Any, queue: str) -> bool:
    """Takes a message and gives it back as failed; False when there is none."""
    method, _, _ = channel.basic_get(queue)
    if method is None:
        return False
    channel.basic_reject(method.delivery_tag, requeue=True)
    return True
