"""Classic queues with priorities (ADR 0127)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.queues.classic.support import Channel, Node, Time, message, queue_record
from tests.unit.queues.classic.support import settle as settled

PRIORITY = 2
"""Flag of a command with priorities."""


def publish(channel: Channel, *bodies: tuple[bytes, int | None], **properties: Any) -> None:
    for body, priority in bodies:
        record = message(body, priority=priority, **properties)
        channel.client.target.publish([record], len(body), 0, PRIORITY)


def opened(node: Node, **arguments: Any) -> tuple[Any, Channel]:
    queue = node.open(queue_record(durable=True), x_max_priority=5, **arguments)
    return queue, node.channel(queue)


def test_higher_priorities_come_first_and_each_keeps_its_order(nodes: dict[int, Node]) -> None:
    queue, channel = opened(nodes[1])
    publish(channel, (b"a", 0), (b"b", 5), (b"c", None), (b"d", 5), (b"e", 9), (b"f", 1))
    settled(nodes)
    queue.machine.check_invariants()
    channel.consume(prefetch=10)
    settled(nodes)
    # Above the highest is the highest; without one it is the lowest.
    assert channel.deliveries() == [b"b", b"d", b"e", b"f", b"a", b"c"]


def test_a_returned_message_goes_to_its_place_in_its_priority(nodes: dict[int, Node]) -> None:
    queue, channel = opened(nodes[1])
    publish(channel, (b"a", 1), (b"b", 1), (b"c", 1), (b"x", 0), (b"y", 0))
    settled(nodes)
    channel.consume(prefetch=2)
    channel.consume(2, prefetch=2)
    settled(nodes)
    held = {body: (number, key) for number, key, body, _ in channel.got}
    other = nodes[1].channel(queue)
    for body in (b"x", b"b", b"a", b"c"):
        number, key = held[body]
        channel.client.cancel(number)
        channel.client.return_(number, [key, key], failed=False)
        settled(nodes)
    queue.machine.check_invariants()
    other.consume(prefetch=10)
    settled(nodes)
    assert other.deliveries() == [b"a", b"b", b"c", b"x", b"y"]


def test_a_limit_drops_the_oldest_of_the_lowest_priority(nodes: dict[int, Node]) -> None:
    _, channel = opened(nodes[1], x_max_length=3)
    publish(channel, (b"a", 5), (b"b", 0), (b"c", 1), (b"d", 0), (b"e", 5))
    settled(nodes)
    channel.consume(prefetch=10)
    settled(nodes)
    assert channel.deliveries() == [b"a", b"e", b"c"]


def test_priorities_outlive_a_restart(nodes: dict[int, Node], tmp_path: Path, time: Time) -> None:
    _, channel = opened(nodes[1])
    publish(channel, (b"low", 0), (b"high", 5), (b"middle", 3), (b"high2", 5))
    settled(nodes)
    channel.consume(prefetch=1)
    settled(nodes)
    assert channel.deliveries() == [b"high"]
    nodes[1].host.stop()
    again = Node(1, {}, tmp_path, time)
    _, reader = opened(again)
    reader.consume(prefetch=10)
    settled(again.nodes)
    # Of the lowest none was handed out, though a later message was.
    got = [(body, acquired) for _, _, body, acquired in reader.got]
    assert got == [(b"high", 1), (b"high2", 0), (b"middle", 0), (b"low", 0)]
    again.host.stop()


@pytest.mark.parametrize("number", [1, 255])
def test_each_number_of_levels_is_served(nodes: dict[int, Node], number: int) -> None:
    queue = nodes[1].open(queue_record(), x_max_priority=number)
    channel = nodes[1].channel(queue)
    publish(channel, *((b"%03d" % n, n) for n in range(0, 256, 5)))
    settled(nodes)
    channel.consume(prefetch=100)
    settled(nodes)
    expected = sorted(range(0, 256, 5), key=lambda n: (-min(n, number), n))
    assert channel.deliveries() == [b"%03d" % n for n in expected]


def test_expired_messages_leave_the_head_of_each_priority(
    nodes: dict[int, Node], time: Time
) -> None:
    queue, channel = opened(nodes[1])
    flags = PRIORITY | 4
    for body, priority, expiration in ((b"a", 0, "10"), (b"b", 5, "10"), (b"c", 5, "5000")):
        made = message(body, priority=priority, expiration=expiration)
        channel.client.target.publish([made], len(body), 0, flags)
    settled(nodes)
    time.pass_by(1_000)
    settled(nodes)
    assert queue.machine.ready_count == 1
    channel.client.get(no_ack=False)
    settled(nodes)
    (got,) = [heard for heard in channel.heard if heard[0] == "got"]
    assert got[1] == b"c"


def test_what_comes_later_with_a_higher_priority_is_next(nodes: dict[int, Node]) -> None:
    _, channel = opened(nodes[1])
    publish(channel, (b"a", 0), (b"b", 0))
    settled(nodes)
    channel.consume(prefetch=1)
    settled(nodes)
    publish(channel, (b"c", 2))
    settled(nodes)
    channel.client.settle(1, [0, 0])
    settled(nodes)
    assert channel.deliveries() == [b"a", b"c"]
