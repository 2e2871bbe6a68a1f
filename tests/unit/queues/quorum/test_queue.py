"""A node's handle of a quorum queue: deliveries to its node, leaders, what is logged and shown."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from convoymq.kernels import link_frames
from convoymq.model.errors import Unavailable
from convoymq.queues.quorum.queue import FIRST_ENTRIES
from convoymq.queues.summed_notes import NOTE_EVERY_MS
from tests.unit.queues.quorum.cluster import GROUP, NODES, Cluster, damage, publish, spec, tags


@pytest.mark.parametrize("publisher", NODES)
@pytest.mark.parametrize("consumer", NODES)
def test_every_node_publishes_and_consumes(publisher: int, consumer: int) -> None:
    cluster = Cluster()
    source, confirms = cluster.nodes[publisher].open()
    sink, deliveries = cluster.nodes[consumer].open()
    sink.subscribe(spec())
    publish(source, 1, 50)
    cluster.run()
    assert confirms.confirmed == list(range(1, 51))
    assert deliveries.heard[0] == ("subscribed", 1, None)
    assert tags(deliveries) == list(range(1, 51))
    sink.settle(1, (0, 49))
    publish(source, 51, 5)
    cluster.run()
    assert tags(deliveries) == list(range(1, 56))
    for node in (1, 2, 3):
        machine = cluster.nodes[node].own.machine  # type: ignore[union-attr]
        assert (machine.backlog.acked, machine.backlog.unacked, machine.backlog.ready()) == (
            50,
            5,
            0,
        )


def test_only_a_node_without_a_live_replica_costs_link_frames() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[2].open()
    sink.subscribe(spec())
    source, _ = cluster.nodes[3].open()
    publish(source, 1, 10)
    cluster.run()
    assert tags(deliveries) == list(range(1, 11))
    assert cluster.frames == []
    assert cluster.nodes[2].queue.delivered_local == 10


def test_the_leader_sends_while_the_replica_lags_and_repeats_are_dropped() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[2].open()
    source, _ = cluster.nodes[1].open()
    sink.subscribe(spec())
    publish(source, 1, 3)
    cluster.run()
    cluster.nodes[2].stalled = True
    publish(source, 4, 3)
    cluster.run()
    assert tags(deliveries) == [1, 2, 3, 4, 5, 6]
    sink.settle(1, (0, 5))
    cluster.run()
    cluster.nodes[2].stalled = False
    publish(source, 7, 2)
    cluster.run()
    assert tags(deliveries) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not sink.target.pending


def delivers(cluster: Cluster) -> int:
    return sum(kind == link_frames.FRAME_DELIVER for _, _, kind in cluster.frames)


def test_deliveries_wait_in_order_while_the_link_to_their_node_is_full() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, events = cluster.nodes[1].open()
    sink.subscribe(spec())
    cluster.run()
    leader = cluster.nodes[1]
    leader.full.add(4)
    before = delivers(cluster)
    for tag in range(1, 9):
        publish(source, tag, 1)
        cluster.run()
    assert events.confirmed == list(range(1, 9))
    assert deliveries.messages == []
    assert delivers(cluster) == before
    leader.make_room(4)
    publish(source, 9, 1)
    cluster.run()
    assert tags(deliveries) == list(range(1, 10))
    assert delivers(cluster) == before + 9


def test_what_waited_for_a_link_is_forgotten_with_the_leadership() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[2].open()
    sink.subscribe(spec())
    cluster.run()
    cluster.nodes[1].full.add(4)
    publish(source, 1, 2)
    cluster.run()
    cluster.elect(3)
    cluster.run()
    assert tags(deliveries) == [1, 2]
    frames = len(cluster.frames)
    cluster.nodes[1].make_room(4)
    cluster.run()
    assert len(cluster.frames) == frames


def test_what_cannot_be_read_here_is_sent_by_the_leader_and_not_skipped() -> None:
    cluster = Cluster()
    source, _ = cluster.nodes[1].open()
    for number in (1, 2, 3):
        publish(source, number, 1)
        cluster.run()
    damage(cluster, 2, len(cluster.log) - 2)
    sink, deliveries = cluster.nodes[2].open()
    sink.subscribe(spec())
    cluster.run()
    assert tags(deliveries) == [1, 2, 3]


@pytest.mark.parametrize("node", [1, 4])
def test_what_the_leader_cannot_read_is_not_said_to_be_gone(node: int) -> None:
    cluster = Cluster()
    source, _ = cluster.nodes[2].open()
    for number in (1, 2, 3):
        publish(source, number, 1)
        cluster.run()
    repair = damage(cluster, 1, len(cluster.log) - 2)
    client, events = cluster.nodes[node].open()
    client.get(no_ack=False)
    sink, deliveries = cluster.nodes[node].open()
    sink.subscribe(spec())
    cluster.run()
    assert not events.heard
    repair()
    cluster.elect(2)
    publish(source, 4, 1)
    cluster.run()
    cluster.wait(2000)
    assert [h[1][:4] for h in events.heard] == [b"\0\0\0\1"]
    assert tags(deliveries) == [2, 3, 4]


def test_a_node_that_goes_and_comes_back_keeps_its_consumer() -> None:
    cluster = Cluster(disconnect_timeout_ms=1000)
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[1].open()
    sink.subscribe(spec())
    publish(source, 1, 1)
    cluster.run()
    cluster.cut = {4}
    cluster.nodes[1].queue.on_node_down(4, definite=False)
    publish(source, 2, 1)
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.unacked, machine.backlog.ready()) == (1, 1)
    cluster.wait(1500)
    assert (machine.backlog.unacked, machine.backlog.ready()) == (0, 2)
    cluster.cut = set()
    cluster.nodes[1].queue.on_node_up(4)
    cluster.run()
    assert tags(deliveries) == [1, 1, 2]
    assert [h[2] for h in deliveries.heard if h[0] == "message"] == [0, 1, 0]
    sink.settle(1, (0, 2))
    cluster.run()
    assert (machine.backlog.acked, machine.backlog.unacked) == (2, 0)


def test_a_new_leader_tells_the_queue_who_is_away() -> None:
    cluster = Cluster()
    sink, _ = cluster.nodes[4].open()
    sink.subscribe(spec())
    cluster.run()
    cluster.cut = {4}
    cluster.elect(2)
    cluster.run()
    machine = cluster.nodes[2].own.machine  # type: ignore[union-attr]
    assert list(machine.down_nodes) == [4]
    cluster.cut = set()
    cluster.elect(3)
    cluster.run()
    assert machine.down_nodes == {}


async def test_ready_waits_for_a_leader() -> None:
    cluster = Cluster()
    await cluster.nodes[1].queue.ready(0.1)
    cluster.elect(None)
    with pytest.raises(Unavailable):
        await cluster.nodes[1].queue.ready(0.01)
    own = cluster.nodes[1].own
    assert own is not None
    # An election that waits for its turn does so no more.
    assert own.campaigns


async def test_ready_waits_for_a_leader_that_can_commit() -> None:
    cluster = Cluster()
    own = cluster.nodes[1].own
    assert own is not None
    own.can_commit = False
    with pytest.raises(Unavailable):
        await cluster.nodes[1].queue.ready(0.01)
    waiting = asyncio.ensure_future(cluster.nodes[1].queue.ready(5.0))
    await asyncio.sleep(0)
    own.can_commit = True
    await waiting


async def test_counts_and_info_come_from_the_machine() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[1].open()
    client.subscribe(spec(prefetch=2))
    publish(client, 1, 5)
    cluster.run()
    assert await cluster.nodes[1].queue.counts() == (3, 1)
    info = cluster.nodes[1].queue.info()
    assert info["messages"] == 5
    assert info["messages_unacknowledged"] == 2
    assert info["leader"] == 1
    assert cluster.nodes[4].queue.local_counts() == (0, 0)


@pytest.mark.provokes("quorum.delivery_limit")
def test_messages_over_the_limit_are_logged_by_the_leader_and_counted() -> None:
    """At once, then as a sum."""
    cluster = Cluster(delivery_limit=0)
    client, _ = cluster.nodes[2].open()
    client.subscribe(spec())
    publish(client, 1, 5)
    cluster.run()
    where = {"vhost": "/", "queue": "q", "group": GROUP}
    for message in range(5):
        client.return_(1, [message, message], failed=True)
        cluster.run()
    assert cluster.notes == [(1, "quorum.delivery_limit", {**where, "count": 1})]
    cluster.wait(NOTE_EVERY_MS)
    assert cluster.notes[1:] == [(1, "quorum.delivery_limit", {**where, "count": 4})]
    cluster.wait(2 * NOTE_EVERY_MS)
    assert len(cluster.notes) == 2
    assert cluster.nodes[1].queue.left == {("disabled", "delivery_limit"): 5}
    assert sum(node.queue.left.total() for node in cluster.nodes.values()) == 5


@pytest.mark.provokes("quorum.reservation_expired")
def test_a_reservation_that_expires_is_logged() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[2].open()
    op = {"op": "open", "reservation": "s", "owner": "me", "ttl_ms": 1000}
    client.reservation(msgspec.msgpack.encode(op), lambda reply, error: None)
    cluster.run()
    cluster.wait(2000)
    cluster.run()
    where = {"vhost": "/", "queue": "q", "group": GROUP}
    assert cluster.notes == [(1, "quorum.reservation_expired", {**where, "reservation": "s"})]


def test_a_queue_without_a_leader_does_not_run() -> None:
    cluster = Cluster()
    queue = cluster.nodes[2].queue
    assert queue.info()["state"] == "running"
    cluster.elect(None)
    assert queue.info()["state"] == "down"
    cluster.cut = {1, 3}
    assert queue.info()["state"] == "minority"
    cluster.cut = set()
    cluster.elect(3)
    assert queue.info()["state"] == "running"


@pytest.mark.parametrize(("serves", "since"), [("serves_attributes", 2), ("serves_outcomes", 6)])
def test_a_new_queue_serves_its_version_before_its_first_entries_are_here(
    serves: str, since: int
) -> None:
    """Who declared it has waited for its version on another node. A queue that was open before all
    nodes supported the version waits for the version itself."""

    class Upgraded(Cluster):
        newest = since

    for made, is_new in ((Cluster, False), (Upgraded, True)):
        cluster = made()
        node = cluster.nodes[1]
        assert getattr(node.queue, serves) == is_new
        node.newest = since
        assert getattr(node.queue, serves) == is_new
        source, _ = node.open()
        for number in range(FIRST_ENTRIES + 1):
            publish(source, number + 1, 1)
            cluster.run()
            if number == 1:
                # The version may come later than the first entries.
                assert getattr(node.queue, serves) == is_new
        # It has a log, and its version is 1.
        assert not getattr(node.queue, serves)
        assert node.queue.is_early
        # A node without a replica knows what all nodes support.
        assert getattr(cluster.nodes[4].queue, serves) == is_new


@pytest.mark.provokes("queue.client_failed")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("event", ["on_published", "on_deliver"])
def test_a_channel_that_fails_is_answered_and_keeps_others_from_nothing(
    event: str, again: bool
) -> None:
    """Also one that fails again when it is told that it failed."""
    cluster = Cluster()
    broken, heard = cluster.nodes[1].open()
    other, theirs = cluster.nodes[1].open()
    broken.subscribe(spec(prefetch=1))
    other.subscribe(spec(prefetch=1))
    cluster.run()
    real = getattr(heard, event)
    left = [1, 1, 1] if again else [1]

    def failing(*arguments: Any) -> None:
        if left:
            left.pop()
            raise KeyError("a fault of our own")
        real(*arguments)

    setattr(heard, event, failing)
    publish(broken, 1, 2)
    publish(other, 3, 2)
    cluster.run()
    (said,) = [fields for _, name, fields in cluster.notes if name == "queue.client_failed"]
    assert "KeyError" in said["reason"]
    assert theirs.confirmed == [3, 4]
    if event == "on_published" and not again:
        assert ("cancelled", 1, "lost") in heard.heard
    # What it held goes to the other one; nothing is lost.
    deadline = 100
    while len(theirs.messages) < 4 and deadline:
        deadline -= 1
        other.settle(1, (0, len(theirs.messages) - 1))
        cluster.run()
    assert len(theirs.messages) == 4
    if not again:
        publish(broken, 9, 1)
        cluster.run()
        assert 9 in heard.confirmed
