"""Who is active after each event of a single active consumer queue: RabbitMQ's table, and what the
strict rule, which is the default, makes of it.

Two consumers: A on node 1 is active, B on node 2 waits. In half of the rows A holds a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.unit.queues.quorum.support import A, B, C, Queue, deliveries, session_id

LATER = session_id(3, 2)


@dataclass(frozen=True)
class Row:
    """An event, and the activity of A and B after it: None = the consumer is not there."""

    event: Callable[[Queue], None]
    a: str | None
    b: str | None
    ready: int = 0
    """Messages that are back in the queue and nobody's."""
    held_by_b: int = 0


def cancelled(queue: Queue) -> None:
    queue.log.cancel(A, 1)


def channel_closed(queue: Queue) -> None:
    queue.log.close(A)


def node_suspected(queue: Queue) -> None:
    queue.log.node_down(1)


def node_gone(queue: Queue) -> None:
    queue.log.node_down(1, gone=True)


def node_restarted(queue: Queue) -> None:
    queue.log.node_up(1, incarnation=2)


def node_suspected_and_back(queue: Queue) -> None:
    queue.log.node_down(1)
    queue.log.node_up(1)


def higher_priority_comes(queue: Queue) -> None:
    queue.log.checkout(LATER, 1, 1, priority=5)


def equal_priority_comes(queue: Queue) -> None:
    queue.log.checkout(LATER, 1, 1)


def waiting_one_goes(queue: Queue) -> None:
    queue.log.close(B)


ACTIVE, WAITS = "single_active", "waiting"

NOTHING_HELD = [
    Row(cancelled, None, ACTIVE),
    Row(channel_closed, None, ACTIVE),
    Row(node_suspected, "suspected_down", ACTIVE),
    Row(node_gone, None, ACTIVE),
    Row(node_restarted, None, ACTIVE),
    Row(node_suspected_and_back, WAITS, ACTIVE),
    Row(higher_priority_comes, WAITS, WAITS),
    Row(equal_priority_comes, ACTIVE, WAITS),
    Row(waiting_one_goes, ACTIVE, None),
]
#: RabbitMQ's rule: the next one begins at once, whatever the one before it holds.
HELD_IMMEDIATE = [
    Row(cancelled, "cancelled", ACTIVE),
    Row(channel_closed, None, ACTIVE, held_by_b=1),
    Row(node_suspected, "suspected_down", ACTIVE),
    Row(node_gone, None, ACTIVE, held_by_b=1),
    Row(node_restarted, None, ACTIVE, held_by_b=1),
    Row(node_suspected_and_back, WAITS, ACTIVE),
    Row(higher_priority_comes, "quiescing", WAITS),
    Row(equal_priority_comes, ACTIVE, WAITS),
    Row(waiting_one_goes, ACTIVE, None),
]
#: The strict rule: not before what it holds is settled or back.
HELD_STRICT = [
    Row(cancelled, "cancelled", WAITS),
    Row(channel_closed, None, ACTIVE, held_by_b=1),
    Row(node_suspected, "suspected_down", WAITS),
    Row(node_gone, None, ACTIVE, held_by_b=1),
    Row(node_restarted, None, ACTIVE, held_by_b=1),
    Row(node_suspected_and_back, ACTIVE, WAITS),
    Row(higher_priority_comes, "quiescing", WAITS),
    Row(equal_priority_comes, ACTIVE, WAITS),
    Row(waiting_one_goes, ACTIVE, None),
]


def named(rows: list[Row]) -> list[object]:
    return [pytest.param(row, id=row.event.__name__) for row in rows]


def queue_with(*, strict: bool, held: bool) -> Queue:
    queue = Queue(single_active=True, single_active_strict=strict)
    queue.log.checkout(A, 1, 1)
    queue.log.checkout(B, 1, 1)
    if held:
        queue.log.publish(C, [1])
    queue.step()
    assert queue.status() == {A: ACTIVE, B: WAITS}
    assert queue.machine.backlog.unacked == int(held)
    return queue


def holds(queue: Queue, session: int) -> int:
    return sum(run[3] for _, run in queue.machine.deliveries.holds(session, 1))


def check(queue: Queue, row: Row) -> None:
    row.event(queue)
    queue.step()
    status = queue.status()
    assert (status.get(A), status.get(B)) == (row.a, row.b)
    assert (queue.machine.backlog.ready(), holds(queue, B)) == (row.ready, row.held_by_b)
    assert list(status.values()).count(ACTIVE) <= 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("row", named(NOTHING_HELD))
def test_an_active_consumer_that_holds_nothing(row: Row, strict: bool) -> None:
    check(queue_with(strict=strict, held=False), row)


@pytest.mark.parametrize("row", named(HELD_IMMEDIATE))
def test_an_active_consumer_that_holds_a_message_by_rabbitmqs_rule(row: Row) -> None:
    check(queue_with(strict=False, held=True), row)


@pytest.mark.parametrize("row", named(HELD_STRICT))
def test_an_active_consumer_that_holds_a_message_by_the_strict_rule(row: Row) -> None:
    check(queue_with(strict=True, held=True), row)


@pytest.mark.parametrize("strict", [True, False])
def test_a_quiescing_consumer_gets_nothing_new_and_is_followed_at_its_last_settle(
    strict: bool,
) -> None:
    queue = queue_with(strict=strict, held=True)
    queue.log.checkout(LATER, 1, 1, priority=5)
    queue.log.publish(C, [1])
    assert deliveries(queue.step(), A, 1) == []
    queue.log.settle(A, 1, 0, 0)
    assert len(deliveries(queue.step(), LATER, 1)) == 1
    assert queue.status() == {A: WAITS, B: WAITS, LATER: ACTIVE}


@pytest.mark.parametrize("strict", [True, False])
def test_those_who_wait_are_taken_by_priority_then_arrival_and_not_from_suspected_nodes(
    strict: bool,
) -> None:
    queue = queue_with(strict=strict, held=False)
    first, second = session_id(4), session_id(5)
    for session in (first, second):
        queue.log.checkout(session, 1, 1)
    queue.log.node_down(2)
    queue.log.cancel(A, 1)
    queue.step()
    assert queue.status() == {B: "suspected_down", first: ACTIVE, second: WAITS}
    queue.log.node_up(2)
    queue.log.close(first)
    queue.step()
    assert queue.status() == {B: ACTIVE, second: WAITS}
