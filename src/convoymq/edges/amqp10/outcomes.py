# cython: annotation_typing=False
"""Dispositions of consumers: outcomes of deliveries, as queues know them.

| outcome                        | queue                                                      |
|--------------------------------|------------------------------------------------------------|
| accepted                       | settle                                                     |
| rejected                       | discard, failed; the error is kept on the dead letter      |
| released                       | return, not failed                                         |
| modified                       | return, failed if delivery-failed, with what it says       |
| modified, undeliverable-here   | return to other consumers; a type without that: discard    |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.errors import INVALID_FIELD, session_fault
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Composite,
    Disposition,
    Modified,
    Rejected,
    Released,
    TransactionalState,
    composite_of,
)
from convoymq.edges.amqp10.serial import following
from convoymq.kernels.channel_codec import DISCARD, RETURN, RETURN_FAILED, SETTLE
from convoymq.messages.amqp10.values import Described, Symbol, Value, decode, encode
from convoymq.queues.interface import Modification

if TYPE_CHECKING:
    from convoymq.edges.amqp10.sending import Sender
    from convoymq.edges.amqp10.session import Session

DELIVERY_TIME = "x-opt-delivery-time"
"""Annotation of `modified`: ms since 1970 until which the message waits."""
DUE_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""

Settle = Callable[["Sender", Sequence[int]], None]
"""Tells a link's queue the outcome of messages, by ranges of their ids."""


def on_disposition(session: Session, disposition: Disposition) -> None:
    """Tells queues the outcomes of deliveries. Raises Fault."""
    if not disposition.role:
        # A publisher that waits for no outcome any more gets it nevertheless.
        return
    state = disposition.state
    first = disposition.first
    last = first if disposition.last is None else disposition.last
    if isinstance(state, TransactionalState):
        _retire(session, state, first, last, settled=disposition.settled)
        return
    if _settle(session, ((first, last),), state) and not disposition.settled:
        session.send(
            Disposition(
                role=False,
                first=first,
                last=disposition.last,
                settled=True,
                state=state,
            )
        )
    session.pump()


def settle_ranges(session: Session, ranges: Sequence[tuple[int, int]], outcome: bytes) -> None:
    """Does the same for ranges of deliveries that their client has settled.

    Args:
        outcome: as it was sent; without annotations and errors.
    """
    _settle(session, ranges, _state_of(outcome))


@lru_cache(maxsize=64)
def _state_of(outcome: bytes) -> Value:
    described, _ = decode(outcome, 0, len(outcome))
    assert isinstance(described, Described)
    return composite_of(described)


def _settle(session: Session, ranges: Sequence[tuple[int, int]], state: Value) -> bool:
    """Tells queues one outcome of deliveries. Returns whether there were any. Raises Fault."""
    settle = settle_of(state)
    if settle is None:
        raise session_fault(INVALID_FIELD, f"unexpected delivery state in DISPOSITION: {state}")
    found = [run for first, last in ranges for run in session.unsettled.take(first, last)]
    by_link: dict[Sender, list[tuple[int, int]]] = {}
    for run in found:
        by_link.setdefault(run.link, []).append(run.message_ids)
    for link, ids in by_link.items():
        told = ranges_of(ids)
        if session.spans is not None:
            session.spans.settled(link.client, link.number, told, span_outcome(state))
        settle(link, told)
    if isinstance(state, Accepted):
        session.connection.counters.acknowledged += sum(run.count for run in found)
    return bool(found)


def _retire(
    session: Session, state: TransactionalState, first: int, last: int, *, settled: bool
) -> None:
    by_link: dict[Sender, list[tuple[int, int]]] = {}
    for run in session.unsettled.take(first, last):
        by_link.setdefault(run.link, []).extend(
            (following(run.first, each), run.message_id + each) for each in range(run.count)
        )
    if session.spans is not None:
        for link, retired in by_link.items():
            ranges = ranges_of((each, each) for _, each in retired)
            session.spans.settled(link.client, link.number, ranges, span_outcome(state))
    session.transactions.retire(state, by_link, settled=settled)
    session.pump()


def span_outcome(state: Value) -> int:
    """Returns the outcome that spans show for a state."""
    match state:
        case Rejected():
            return DISCARD
        case Modified(delivery_failed=True):
            return RETURN_FAILED
        case Released() | Modified():
            return RETURN
        case TransactionalState():
            return span_outcome(state.outcome)
    return SETTLE


def ranges_of(ids: Iterable[tuple[int, int]]) -> list[int]:
    """Returns ranges of ids in ascending order (first, last, …), as few as possible."""
    found: list[int] = []
    for first, last in sorted(ids):
        if found and first == found[-1] + 1:
            found[-1] = last
        else:
            found += (first, last)
    return found


def settle_of(state: Value) -> Settle | None:
    """Returns how a queue is told an outcome; None: it is none."""
    match state:
        case Accepted():
            return lambda link, ids: link.client.settle(link.number, ids)
        case Rejected():
            error = state.error.encoded() if isinstance(state.error, Composite) else b""
            return lambda link, ids: link.client.discard(link.number, ids, failed=True, error=error)
        case Released():
            return lambda link, ids: link.client.return_(
                link.number, ids, failed=False, untried=True
            )
        case Modified():
            return _modify(state)
    return None


def _modify(modified: Modified) -> Settle:
    annotations = modified.message_annotations or {}
    for key in annotations:
        if not isinstance(key, Symbol) or not key.startswith("x-"):
            raise session_fault(
                INVALID_FIELD, f"annotation {str(key)[:255]!r} of modified does not begin with x-"
            )
    due_ms = annotations.get(DELIVERY_TIME)
    kept = {key: value for key, value in annotations.items() if key != DELIVERY_TIME}
    failed = modified.delivery_failed
    modification = Modification(
        undeliverable=modified.undeliverable_here,
        due_ms=min(max(due_ms, 0), DUE_MS_MAX) if isinstance(due_ms, int) else 0,
        annotations=encode(kept) if kept else b"",
    )

    def settle(link: Sender, ids: Sequence[int]) -> None:
        if modified.undeliverable_here and not link.queue.features.modifies:
            link.client.discard(link.number, ids, failed=failed)
            return
        link.client.return_(
            link.number, ids, failed=failed, untried=not failed, modification=modification
        )

    return settle
