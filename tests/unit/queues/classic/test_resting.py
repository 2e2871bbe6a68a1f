"""A queue that has nothing to do is not ticked (ADR 0211)."""

from __future__ import annotations

import pytest

from convoymq.queues.classic.host import TICK_MS
from convoymq.queues.classic.queue import LocalQueue
from tests.unit.queues.classic.support import Node, Time, queue_record, settle


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups of the queues that were ticked."""
    found: list[int] = []
    tick = LocalQueue.tick

    def noted(queue: LocalQueue, now_ms: int) -> None:
        found.append(queue.group)
        tick(queue, now_ms)

    monkeypatch.setattr(LocalQueue, "tick", noted)
    return found


def test_a_queue_is_ticked_once_for_what_it_did(
    nodes: dict[int, Node], time: Time, ticks: list[int]
) -> None:
    channel = nodes[1].channel(nodes[1].open(queue_record()))
    nodes[1].open(queue_record("other", group=2))
    time.pass_by(TICK_MS)
    assert ticks == []
    channel.publish(b"a")
    settle(nodes)
    for _ in range(5):
        time.pass_by(TICK_MS)
    assert ticks == [1]


def test_a_resting_queue_has_falling_rates(nodes: dict[int, Node], time: Time) -> None:
    queue = nodes[1].open(queue_record())
    channel = nodes[1].channel(queue)

    def ingress() -> float:
        status = queue.info()["backing_queue_status"]
        assert isinstance(status, dict)
        return float(status["avg_ingress_rate"])

    def burst() -> float:
        channel.publish(*[b"m"] * 10)
        settle(nodes)
        time.pass_by(TICK_MS)
        return ingress()

    first = burst()
    assert first == pytest.approx(3.0)
    time.pass_by(TICK_MS)
    assert ingress() == pytest.approx(first * 0.7)
    for _ in range(60):
        time.pass_by(TICK_MS)
    assert ingress() < 1e-6
    # It counts as that of one second, although the last tick of the queue was long ago.
    assert burst() == pytest.approx(first, rel=1e-3)


@pytest.mark.parametrize(
    ("why", "arguments"),
    [
        ("message that expires", {"x_message_ttl": 60_000}),
        ("expiry of an unused queue that is due", {"x_expires": 1000}),
    ],
)
def test_a_queue_with_work_for_ticks_does_not_rest(
    nodes: dict[int, Node], time: Time, ticks: list[int], why: str, arguments: dict[str, int]
) -> None:
    queue = nodes[1].open(queue_record(), **arguments)
    nodes[1].channel(queue).publish(b"a")
    settle(nodes)
    for _ in range(4):
        time.pass_by(TICK_MS)
    assert len(ticks) == 4, why


def test_what_was_handed_over_without_a_flush_is_flushed_before_the_queue_rests(
    nodes: dict[int, Node], time: Time, ticks: list[int]
) -> None:
    queue = nodes[1].open(queue_record(durable=True))
    channel = nodes[1].channel(queue)
    channel.consume(prefetch=1)
    channel.publish(b"a", tag=1)
    settle(nodes)
    channel.client.settle(1, [0, 0])
    settle(nodes)
    assert not queue.log.is_settled
    for _ in range(4):
        time.pass_by(TICK_MS)
        settle(nodes)
    assert queue.log.is_settled
    assert 1 <= len(ticks) < 4


def test_an_unused_queue_rests_until_it_expires(
    nodes: dict[int, Node], time: Time, ticks: list[int]
) -> None:
    queue = nodes[1].open(queue_record(), x_expires=100_000)
    channel = nodes[1].channel(queue)
    for _ in range(50):
        time.pass_by(TICK_MS)
        channel.publish(b"a")
        settle(nodes)
    assert len(ticks) == 49
    assert len(nodes[1].host.ticked._due) == 1
    channel.client.get(no_ack=True)
    settle(nodes)
    time.pass_by(TICK_MS)
    ticks.clear()
    for _ in range(98):
        time.pass_by(TICK_MS)
    assert nodes[1].reports == []
    assert len(ticks) <= 1
    time.pass_by(TICK_MS)
    assert nodes[1].reports == [("expired", 1)]


def test_short_memory_wakes_queues_that_may_page_out(
    nodes: dict[int, Node], time: Time, ticks: list[int]
) -> None:
    host = nodes[1].host
    channel = nodes[1].channel(nodes[1].open(queue_record()))
    channel.publish(*[bytes(4096)] * 8)
    nodes[1].channel(nodes[1].open(queue_record("other", group=2))).publish(b"small")
    settle(nodes)
    time.pass_by(TICK_MS)
    time.pass_by(TICK_MS)
    ticks.clear()
    host.memory.target_bytes = 1000
    time.pass_by(TICK_MS)
    assert ticks == [1]


def test_a_deleted_queue_is_forgotten(nodes: dict[int, Node], time: Time) -> None:
    nodes[1].channel(nodes[1].open(queue_record())).publish(b"a")
    settle(nodes)
    nodes[1].host.delete(1)
    time.pass_by(TICK_MS)
    assert not nodes[1].host.ticked._awake
