"""What is shown of a quorum queue's machine: totals, and its content for the trace."""

from __future__ import annotations

from convoymq.queues.quorum.tracing import reservation_session
from tests.unit.queues.quorum.support import A, B, Queue


def filled() -> Queue:
    """Eight messages: one is reserved, one acknowledged, one dropped, three checked out, two
    ready."""
    queue = Queue()
    queue.log.publish(A, [10] * 8)
    queue.log.reservation(A, "lease", owner="me", max=1, ttl_ms=60_000)
    queue.log.checkout(B, 1, 5)
    queue.log.credit(B, 1, 3)
    queue.log.settle(B, 1, 0, 0)
    queue.log.discard(B, 1, 1, 1)
    queue.step()
    return queue


def test_totals_add_up_to_what_was_published() -> None:
    totals = filled().machine.totals()
    assert (totals["published"], totals["acked"], totals["dropped_rejected"]) == (8, 1, 1)
    assert (totals["ready"], totals["unacked"]) == (2, 4)
    assert (totals["ready_bytes"], totals["unacked_bytes"]) == (20, 40)
    assert (totals["delivered"], totals["redelivered"]) == (6, 0)
    # The reservation counts as one.
    assert totals["consumers"] == 2


def test_a_state_snapshot_names_who_has_what() -> None:
    places = filled().machine.state_snapshot()
    assert [(session, number, first) for session, number, first, _ in places] == [
        (None, 0, 0),
        (B, 1, 2),
        (reservation_session("s"), 0, 0),
    ]
    assert [run[2:4] for _, _, _, run in places] == [(6, 2), (3, 3), (0, 1)]
