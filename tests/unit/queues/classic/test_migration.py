"""A classic queue that is being migrated stands still; its clients go on in the successor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from convoymq.model.errors import Unavailable
from convoymq.queues.interface import LETTERS_LEAVE, Queue, QueueClient
from tests.unit.queues.classic.support import Channel, Node, Time, body_of, queue_record, settle

SUCCESSOR = 9


class Moving(Channel):
    """A channel that goes on in a successor."""

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        self.heard.append(("replaced", successor.group))
        self.client = successor.client(client.session, self)
        return self.client


def channel_at(node: Node, queue: Any, kind: type[Channel] = Moving) -> Any:
    made = kind()
    made.client = queue.client(node.new_session(), made)
    return made


def bodies(queue: Any) -> list[tuple[bytes, bool]]:
    return [
        (body_of(run.block, run.command, run.first + i), run.acquired_count > 0)
        for run in queue.stored_runs()
        for i in range(run.messages)
    ]


def hold(nodes: dict[int, Node], queue: Any) -> None:
    """What the node that migrates a queue tells every node."""
    seqs = queue.applied_seqs()
    for node in nodes.values():
        own = {session: seq for session, seq in seqs.items() if session >> 56 == node.id}
        node.open(queue.record).hold(SUCCESSOR, own)


def freeze(nodes: dict[int, Node], queue: Any) -> None:
    async def work() -> None:
        freezing = asyncio.ensure_future(queue.freeze(SUCCESSOR, 10))
        while not freezing.done():
            await asyncio.sleep(0)
            settle(nodes)
        await freezing

    asyncio.run(work())


def confirms(channel: Channel) -> list[tuple[Any, ...]]:
    return [each[1:] for each in channel.heard if each[0] == "published"]


def test_a_frozen_queue_takes_and_confirms_nothing_until_it_thaws(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    here = channel_at(nodes[1], queue)
    there = channel_at(nodes[2], nodes[2].open(record))
    there.consume(prefetch=1)
    here.publish(b"a", b"b", tag=1)
    settle(nodes)
    assert confirms(here) == [([1, 2], True)]
    freeze(nodes, queue)
    here.publish(b"c", tag=3)
    there.publish(b"d", tag=1)
    there.client.settle(1, [0, 0])
    settle(nodes)
    assert confirms(here) == [([1, 2], True)]
    assert confirms(there) == []
    assert bodies(queue) == [(b"a", True), (b"b", False)]
    queue.thaw()
    settle(nodes)
    assert confirms(here) == [([1, 2], True), ([3, 3], True)]
    assert confirms(there) == [([1, 1], True)]
    assert [body for body, _ in bodies(queue)] == [b"b", b"c", b"d"]


def test_a_queue_is_frozen_after_a_restart(nodes: dict[int, Node], tmp_path: Path) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channel_at(nodes[1], queue).publish(b"a", tag=1)
    settle(nodes)
    freeze(nodes, queue)
    nodes[1].host.stop()
    Node(1, nodes, tmp_path, Time())
    again = nodes[1].open(record)
    assert again.frozen == SUCCESSOR
    assert bodies(again) == [(b"a", False)]
    again.thaw()
    nodes[1].host.stop()
    Node(1, nodes, tmp_path, Time())
    assert nodes[1].open(record).frozen == 0


def test_clients_of_all_nodes_go_on_in_the_successor_in_their_order(
    nodes: dict[int, Node],
) -> None:
    record, other = queue_record(durable=True), queue_record(group=SUCCESSOR, durable=True)
    queue = nodes[1].open(record)
    here = channel_at(nodes[1], queue)
    there = channel_at(nodes[2], nodes[2].open(record))
    here.publish(b"a", tag=1)
    there.publish(b"x", tag=1)
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    here.publish(b"b", b"c", tag=2)
    there.publish(b"y", tag=2)
    there.client.get(no_ack=True)
    settle(nodes)
    assert ("flow", True) in here.heard
    assert ("flow", True) in there.heard
    successors = {number: node.open(other) for number, node in nodes.items()}
    for number, node in nodes.items():
        node.host.queues[1].replace(successors[number])
    here.publish(b"d", tag=4)
    settle(nodes)
    assert confirms(here) == [([1, 1], True), ([2, 4], True)]
    assert confirms(there) == [([1, 1], True), ([2, 2], True)]
    taken = next(each[1] for each in there.heard if each[0] == "got")
    left = [body for body, _ in bodies(successors[1])]
    assert sorted([taken, *left]) == [b"b", b"c", b"d", b"y"]
    assert [body for body in [taken, *left] if body != b"y"] == [b"b", b"c", b"d"]
    nodes[1].host.delete(1)
    settle(nodes)
    assert not [each for each in (*here.heard, *there.heard) if each[0] == "cancelled"]


def test_a_node_that_was_not_told_refuses_what_is_pending(nodes: dict[int, Node]) -> None:
    record, other = queue_record(durable=True), queue_record(group=SUCCESSOR, durable=True)
    queue = nodes[1].open(record)
    there = channel_at(nodes[2], nodes[2].open(record))
    freeze(nodes, queue)
    there.publish(b"x", tag=1)
    settle(nodes)
    nodes[1].open(other)
    nodes[2].host.queues[1].replace(nodes[2].open(other))
    settle(nodes)
    assert confirms(there) == [([1, 1], False)]


def test_publishers_of_a_held_queue_whose_home_is_lost_go_on(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    there = channel_at(nodes[2], nodes[2].open(record))
    there.publish(b"x", tag=1)
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    there.publish(b"y", tag=2)
    settle(nodes)
    nodes[2].host.on_node_down(1)
    assert confirms(there) == [([1, 1], True), ([2, 2], False)]
    assert there.heard.count(("flow", True)) == there.heard.count(("flow", False)) == 1


def test_neither_disk_nor_link_lets_publishers_of_a_held_queue_go_on(
    nodes: dict[int, Node],
) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    here = channel_at(nodes[1], queue)
    there = channel_at(nodes[2], nodes[2].open(record))
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    for channel in (here, there):
        channel.client.on_flow(True)
        channel.client.on_flow(False)
        assert ("flow", True) in channel.heard
        assert ("flow", False) not in channel.heard


def test_an_undone_migration_lets_clients_go_on(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    there = channel_at(nodes[2], nodes[2].open(record))
    there.consume()
    there.publish(b"x", tag=1)
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    there.publish(b"y", tag=2)
    settle(nodes)
    for node in nodes.values():
        node.host.queues[1].release()
    queue.thaw()
    settle(nodes)
    assert confirms(there) == [([1, 1], True), ([2, 2], True)]
    assert there.deliveries() == [b"x", b"y"]
    assert there.heard.count(("flow", True)) == there.heard.count(("flow", False)) == 1


def test_a_queue_with_a_client_that_does_not_go_on_cancels_its_consumers(
    nodes: dict[int, Node],
) -> None:
    class Staying(Channel):
        def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
            return None

    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channel = channel_at(nodes[1], queue, Staying)
    channel.consume()
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    channel.publish(b"x", tag=1)
    queue.replace(nodes[1].open(queue_record(group=SUCCESSOR, durable=True)))
    assert confirms(channel) == [([1, 1], False)]
    assert ("cancelled", 1, "migrated") in channel.heard


def test_what_a_closed_channel_left_behind_is_published_in_the_successor(
    nodes: dict[int, Node],
) -> None:
    record, other = queue_record(durable=True), queue_record(group=SUCCESSOR, durable=True)
    queue = nodes[1].open(record)
    channels = [channel_at(node, node.open(record)) for node in nodes.values()]
    for channel in channels:
        channel.publish(b"a", tag=1)
    settle(nodes)
    freeze(nodes, queue)
    hold(nodes, queue)
    channels[1].publish(b"b", tag=2)
    # One whose whole life passes meanwhile, and one that was over before.
    brief = channel_at(nodes[2], nodes[2].open(record))
    brief.publish(b"b", tag=1)
    over = channel_at(nodes[1], queue)
    over.client.held_for = 0
    over.publish(b"c", tag=1)
    for channel in (*channels, brief, over):
        channel.client.close()
    settle(nodes)
    successors = {number: node.open(other) for number, node in nodes.items()}
    for number, node in nodes.items():
        node.host.queues[1].replace(successors[number])
    settle(nodes)
    assert [body for body, _ in bodies(successors[1])] == [b"b", b"b"]
    assert [confirms(channel) for channel in channels] == [[([1, 1], True)]] * len(channels)


def test_closed_channels_of_an_undone_migration_are_forgotten(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channels = [channel_at(node, node.open(record)) for node in nodes.values()]
    freeze(nodes, queue)
    hold(nodes, queue)
    for channel in channels:
        channel.publish(b"b", tag=1)
        channel.client.close()
    for node in nodes.values():
        node.host.queues[1].release()
    queue.thaw()
    settle(nodes)
    assert [body for body, _ in bodies(queue)] == [b"b"] * len(channels)
    assert not any(node.host.queues[1].clients for node in nodes.values())
    assert not queue.machine.sessions


def test_dead_letters_leave_a_frozen_queue(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channel = channel_at(nodes[1], queue)
    channel.publish(b"a", b"b", tag=1)
    settle(nodes)
    queue.configure({"dead-letter-exchange": "", "max-length": 1})
    assert queue.migration_obstacle() == LETTERS_LEAVE
    freeze(nodes, queue)
    queue._sender._work()
    settle(nodes)
    assert queue.ended is None
    assert queue.migration_obstacle() == ""
    assert bodies(queue) == [(b"b", False)]


def test_a_disk_that_fails_neither_freezes_a_queue_nor_keeps_it_frozen(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = nodes[1].open(queue_record(durable=True))
    channel = channel_at(nodes[1], queue)
    channel.publish(b"a", tag=1)
    settle(nodes)

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(queue._directory, "sync", fail)
        full.setattr(queue._directory, "remove", fail)
        with pytest.raises(Unavailable, match=r"cannot be frozen.*No space left"):
            freeze(nodes, queue)
        queue.thaw()
        settle(nodes)
    channel.publish(b"b", tag=2)
    settle(nodes)
    assert queue.frozen == 0
    assert confirms(channel) == [([1, 1], True), ([2, 2], True)]
