"""Time limits, lengths and priorities of quorum queues while leaders are killed, by pika."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_administration import connect
from tests.faults.test_policies import length
from tests.faults.traffic import until
from tests.interop.helpers import fetch_all
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

Open: TypeAlias = Callable[[int], Any]
BASE_PORT = cluster_ports(__name__)
QUORUM = {"x-queue-type": "quorum"}
FAILURES = (pika.exceptions.AMQPError, OSError)
LEADER = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path / "cluster", BASE_PORT, policies=True) as made:
        yield made


@contextmanager
def opening(cluster: LocalCluster) -> Iterator[Open]:
    """A channel with confirms on a node; connections are closed at the end."""
    made: list[Any] = []

    def channel(node: int) -> Any:
        made.append(connect(cluster, "guest", node=node))
        found = made[-1].channel()
        found.confirm_delivery()
        return found

    yield channel
    for connection in made:
        try:
            connection.close()
        except FAILURES:
            continue


@pytest.fixture
def opened(cluster: LocalCluster) -> Iterator[Open]:
    with opening(cluster) as channel:
        yield channel


def publish(channel: Any, queue: str, body: bytes, **properties: Any) -> None:
    channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2, **properties))


def is_refused(channel: Any, queue: str) -> bool:
    try:
        publish(channel, queue, b"x")
    except pika.exceptions.NackError:
        return True
    return False


def row(cluster: LocalCluster, queue: str, node: int = 1) -> dict[str, Any]:
    status, found = call(cluster, "GET", f"queues/%2F/{queue}", node=node)
    assert status == 200
    assert isinstance(found, dict)
    return found


def leader_of(cluster: LocalCluster, queue: str, node: int = 1) -> str:
    try:
        return str(row(cluster, queue, node).get("leader") or "")
    except (OSError, AssertionError):
        return ""


def test_a_new_leader_keeps_times_and_priorities(cluster: LocalCluster, opened: Open) -> None:
    """What was to expire expires, what was not stays, in the order of its priorities."""
    channel = opened(LEADER)
    channel.queue_declare("q", durable=True, arguments={**QUORUM, "x-priority-mode": "strict"})
    for priority in (1, 9, 5):
        publish(channel, "q", b"p%d" % priority, priority=priority)
    publish(channel, "q", b"expires", priority=30, expiration="4000")
    publish(channel, "q", b"stays", priority=20, expiration="600000")
    before = leader_of(cluster, "q")
    assert before
    cluster.kill(LEADER)
    until(lambda: leader_of(cluster, "q") not in ("", before))
    other = opened(1)
    until(lambda: length(other, "q") == 4)
    assert row(cluster, "q")["messages_by_priority"] == {"1": 1, "5": 1, "9": 1, "20": 1}
    assert fetch_all(other, "q") == [b"stays", b"p9", b"p5", b"p1"]
    cluster.start_node(LEADER)


def test_a_full_queue_stays_full_under_a_new_leader(cluster: LocalCluster, opened: Open) -> None:
    """Publishers of every node are refused before and after, until there is room."""
    channel = opened(LEADER)
    limits = {"x-max-length": 5, "x-overflow": "reject-publish"}
    channel.queue_declare("q", durable=True, arguments={**QUORUM, **limits})
    until(lambda: is_refused(channel, "q"))
    others = [opened(1), opened(3)]
    for other in others:
        until(lambda other=other: is_refused(other, "q"))  # type: ignore[misc]
    before = leader_of(cluster, "q")
    cluster.kill(LEADER)
    until(lambda: leader_of(cluster, "q") not in ("", before))
    full = length(others[0], "q")
    for other in (*others, opened(1), opened(3)):
        until(lambda other=other: is_refused(other, "q"))  # type: ignore[misc]
    assert length(others[0], "q") >= full >= 6
    taken = 0
    while length(others[0], "q") > 4:
        others[0].basic_get("q", auto_ack=True)
        taken += 1
    assert taken >= 2
    until(lambda: not is_refused(others[1], "q"))
    cluster.start_node(LEADER)


@pytest.mark.provokes("quorum.overflow_unserved")
def test_policies_limit_a_live_queue(cluster: LocalCluster, opened: Open) -> None:
    channel = opened(1)
    channel.queue_declare("work", durable=True, arguments=QUORUM)
    for number in range(10):
        publish(channel, "work", b"%d" % number)

    def put(**definition: object) -> None:
        named = {name.replace("_", "-"): value for name, value in definition.items()}
        policy = {"pattern": "^work$", "definition": named, "apply-to": "quorum_queues"}
        assert call(cluster, "PUT", "policies/%2F/p", policy)[0] in (201, 204)

    put(max_length=4, overflow="reject-publish-dlx")
    until(lambda: length(channel, "work") == 4)
    put(message_ttl=100)

    def expires() -> bool:
        publish(channel, "work", b"short", priority=9)
        return any(body != b"short" for body in fetch_all(channel, "work"))

    until(expires)
    publish(channel, "work", b"short")
    until(lambda: length(channel, "work") == 0)
    put(expires=300)

    def is_gone() -> bool:
        return call(cluster, "GET", "queues/%2F/work")[0] == 404

    until(is_gone)


def test_limits_act_while_a_member_is_away(cluster: LocalCluster, opened: Open) -> None:
    """Nobody can come back with an older release, so nobody is waited for."""
    cluster.kill(3)
    channel = opened(1)
    arguments = {**QUORUM, "x-max-length": 2, "x-priority-mode": "strict"}
    channel.queue_declare("q", durable=True, arguments=arguments)
    for number in range(5):
        publish(channel, "q", b"%d" % number)
    until(lambda: length(channel, "q") == 2)
    assert fetch_all(channel, "q") == [b"3", b"4"]
    for body, priority in ((b"low", 1), (b"high", 9)):
        publish(channel, "q", body, priority=priority)
    assert fetch_all(channel, "q") == [b"high", b"low"]
    cluster.start_node(3)
