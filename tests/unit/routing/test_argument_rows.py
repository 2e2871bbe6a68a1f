"""RabbitMQ's queue arguments, one row each: what values are good, which are refused with which
reason, and which types of queues take it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from convoymq.routing.queue_arguments import ARGUMENTS
from convoymq.settings.table import DURATION_MS_MAX
from tests.unit.routing.test_queue_arguments import Q, accepted, refusal

BOTH, CLASSIC, QUORUM = ("classic", "quorum"), ("classic",), ("quorum",)
TEXT = '"expected integer, got longstr"'
NEGATIVE = (-1, "{value_negative,-1}")
NO_INTEGER = ("1", TEXT)
TOO_LONG = (DURATION_MS_MAX + 1, "{value_too_large,315360000001}")
NO_STRING = (1, "{unacceptable_type,long}")


class Row(NamedTuple):
    """An argument. `needs`: what has to be there as well; `kept`: types that store it and do
    nothing by it."""

    good: tuple[object, ...]
    bad: tuple[tuple[object, str], ...]
    takes: tuple[str, ...]
    kept: tuple[str, ...] = ()
    needs: tuple[tuple[str, object], ...] = ()


COUNT = (NEGATIVE, NO_INTEGER)
DURATION = (NEGATIVE, NO_INTEGER, TOO_LONG)
DLX = (("x-dead-letter-exchange", "x"),)
ROWS = {
    "x-message-ttl": Row((0, 1, DURATION_MS_MAX), DURATION, BOTH),
    "x-expires": Row((1, DURATION_MS_MAX), ((0, "{value_zero,0}"), *DURATION), BOTH),
    "x-max-length": Row((0, 1 << 40), COUNT, BOTH),
    "x-max-length-bytes": Row((0, 1 << 40), COUNT, BOTH),
    "x-overflow": Row(
        ("drop-head", "reject-publish", "reject-publish-dlx"),
        (("drop-tail", "invalid_overflow"), NO_STRING),
        BOTH,
    ),
    "x-dead-letter-exchange": Row(("", "x"), (NO_STRING,), BOTH),
    "x-dead-letter-routing-key": Row(("", "k"), (NO_STRING,), BOTH, needs=DLX),
    "x-dead-letter-strategy": Row(
        ("at-most-once", "at-least-once"),
        (("sometimes", "invalid_dlx_strategy"), NO_STRING),
        QUORUM,
    ),
    "x-single-active-consumer": Row(
        (True, False), (NO_STRING, ("yes", "{unacceptable_type,longstr}")), BOTH
    ),
    "x-max-priority": Row((0, 1, 255), ((256, "{max_value_exceeded,256}"), *COUNT), CLASSIC),
    "x-queue-mode": Row(
        ("default", "lazy"), (("sleepy", "invalid_queue_mode"), NO_STRING), (), kept=CLASSIC
    ),
    "x-queue-version": Row(
        (2,),
        ((1, "\"unsupported queue version '1'\""), (3, "\"unsupported queue version '3'\"")),
        (),
        kept=CLASSIC,
    ),
    "x-queue-leader-locator": Row(
        ("client-local", "balanced"),
        (("nearest", "invalid_queue_locator_arg"), NO_STRING),
        BOTH,
    ),
    "x-queue-master-locator": Row(
        ("min-masters", "client-local", "random"),
        (("nearest", "invalid_queue_locator_arg"), NO_STRING),
        CLASSIC,
    ),
    # RabbitMQ does not look at the value either.
    "x-delivery-limit": Row((-1, 0, 20, 1 << 40, "5"), (), QUORUM),
    "x-quorum-initial-group-size": Row(
        (1, 5), ((0, "{value_zero,0}"), NEGATIVE, NO_INTEGER), QUORUM
    ),
    "x-quorum-target-group-size": Row(
        (1, 5), ((0, "{value_zero,0}"), NEGATIVE, NO_INTEGER), QUORUM, kept=CLASSIC
    ),
    "x-max-in-memory-length": Row((0, 5), COUNT, (), kept=QUORUM),
    "x-max-in-memory-bytes": Row((0, 5), COUNT, (), kept=QUORUM),
    "x-consumer-timeout": Row((0, 60_000), DURATION, QUORUM),
    "x-consumer-disconnected-timeout": Row((0, 60_000), DURATION, QUORUM),
    "x-delayed-retry-type": Row(
        ("disabled", "all", "failed", "returned"),
        (("often", "invalid_delayed_retry_type"), NO_STRING),
        QUORUM,
        needs=(("x-delayed-retry-min", 1),),
    ),
    "x-delayed-retry-min": Row((0, 1_000), DURATION, QUORUM),
    "x-delayed-retry-max": Row((0, 1_000), DURATION, QUORUM),
}
OURS = {
    "x-deduplication-count", "x-deduplication-time", "x-link-resume-timeout", "x-message-expiry",
    "x-priority-mode", "x-requeue-position", "x-single-active-take-over", "x-trace",
}  # fmt: skip
OF_STREAMS = {
    "x-initial-cluster-size", "x-max-age", "x-stream-filter-size-bytes",
    "x-stream-filter", "x-stream-match-unfiltered", "x-stream-max-segment-size-bytes",
}  # fmt: skip


def test_every_argument_that_is_checked_has_a_row() -> None:
    known = {argument.name for argument in ARGUMENTS}
    assert known - {"x-queue-type"} - OURS - OF_STREAMS == ROWS.keys()


@pytest.mark.parametrize("key", ROWS)
def test_good_values_are_taken_by_the_types_that_have_it(key: str) -> None:
    row = ROWS[key]
    for queue_type in (*row.takes, *row.kept):
        for value in row.good:
            arguments = {"x-queue-type": queue_type, **dict(row.needs), key: value}
            assert accepted(arguments).value == queue_type


@pytest.mark.parametrize("key", ROWS)
def test_bad_values_are_refused_by_these(key: str) -> None:
    row = ROWS[key]
    for queue_type in (*row.takes, *row.kept):
        for value, reason in row.bad:
            arguments = {"x-queue-type": queue_type, **dict(row.needs), key: value}
            assert refusal(arguments) == f"invalid arg '{key}' for {Q}: {reason}", value


@pytest.mark.parametrize("key", ROWS)
def test_other_types_refuse_any_good_value(key: str) -> None:
    row = ROWS[key]
    for queue_type in BOTH:
        if queue_type in (*row.takes, *row.kept):
            continue
        for value in row.good or (5,):
            text = refusal({"x-queue-type": queue_type, **dict(row.needs), key: value})
            assert text.startswith(f"invalid arg '{key}' for {Q}")
            assert f"of queue type rabbit_{queue_type}_queue" in text or key == "x-max-priority"
