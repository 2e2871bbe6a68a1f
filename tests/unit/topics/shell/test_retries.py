"""Copies of messages that a group of a weak topic could not process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.topics.shell.group_messages import GroupName
from convoymq.topics.shell.retries import UNROUTED_MS, Retries
from tests.unit.kernels import reference
from tests.unit.queues.quorum.test_groups import record_in


@pytest.mark.provokes("topics.retry_unroutable")
@pytest.mark.parametrize(
    ("route", "reason"),
    [((), "no route"), ((SimpleNamespace(refuses_publishes=True),), "refused by a queue")],
)
def test_a_copy_that_has_no_place_is_given_back_later(route: tuple[Any, ...], reason: str) -> None:
    """So its message is not acknowledged, and comes again."""
    calls: list[tuple[int, Any, tuple[Any, ...]]] = []
    clock: Any = SimpleNamespace(
        now_ms=lambda: 5_000,
        monotonic_ms=lambda: 5_000,
        call_later=lambda ms, done, *more: calls.append((ms, done, more)),
    )
    routes: Any = SimpleNamespace(route_dead_letter=lambda *asked: route)
    retries = Retries(clock, lambda: 1, DeadLetterOptions(routes=routes))
    record, flags = record_in(b"g")
    message = reference.enqueue(1, 1, [record], [len(record)], flags)
    stored: list[bool] = []
    with structlog.testing.capture_logs() as logs:
        retries.publish(GroupName("/", "orders", "g"), "retry", message, stored.append)
    assert [(each["exchange"], each["group"], each["reason"]) for each in logs] == [
        ("retry", "orders/g", reason)
    ]
    ((after_ms, done, arguments),) = calls
    assert not stored
    done(*arguments)
    assert (after_ms, stored) == (UNROUTED_MS, [False])
