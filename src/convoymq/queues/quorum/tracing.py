# cython: annotation_typing=False
"""Rows of a quorum queue's trace (ADR 0009): what the machine tells of what it decides."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from convoymq.kernels.trace import TraceRows
from convoymq.model import trace as words
from convoymq.queues.quorum import runs

if TYPE_CHECKING:
    from convoymq.queues.quorum.consumers import Consumer, QueueSession

    class Reserving(Protocol):
        """A reservation, or an operation on chosen messages."""

        @property
        def name(self) -> str:
            """Under which it is traced."""

        next: int


def reservation_session(name: str) -> int:
    """Returns the number under which a reservation appears among sessions; no node has it."""
    return zlib.crc32(name.encode())


def published(
    rows: TraceRows,
    session: QueueSession | None,
    repeated: int,
    count: int,
    number: int,
    index: int,
    offset: int,
) -> None:
    """Records what an ENQUEUE brought: `repeated` messages that its producer has sent before, and
    `count` new ones, of which `number` messages were published before."""
    origin, seq = (0, 0) if session is None else (session.id, session.seq)
    if repeated:
        rows.add(
            words.PUBLISHED, 0, words.DUPLICATE, origin, 0, seq, -1, repeated, index, offset,
            0, 0, 0,
        )  # fmt: skip
    if count:
        rows.add(
            words.PUBLISHED, 0, 0, origin, 0, seq, number, count, index, offset, repeated, 0, 0
        )


def deduplicated(
    rows: TraceRows,
    session: QueueSession | None,
    kept: list[int],
    end: int,
    number: int,
    index: int,
    offset: int,
) -> None:
    """Records what an ENQUEUE of `end` records brought: the runs `kept` (first, count, body bytes),
    of which `number` messages were published before; all others are repeats."""
    origin, seq = (0, 0) if session is None else (session.id, session.seq)
    at = 0
    for i in range(0, len(kept) + 1, 3):
        low, fresh = (kept[i], kept[i + 1]) if i < len(kept) else (end, 0)
        if low > at:
            rows.add(
                words.PUBLISHED, 0, words.DUPLICATE, origin, 0, seq, -1, low - at, index, offset,
                at, 0, 0,
            )  # fmt: skip
        if fresh:
            rows.add(words.PUBLISHED, 0, 0, origin, 0, seq, number, fresh, index, offset, low, 0, 0)
        number += fresh
        at = low + fresh


def delivered(
    rows: TraceRows, flags: int, session: int, number: int, message_id: int, run: runs.Run
) -> None:
    """A run was handed to consumer `number` of `session`."""
    index, offset, first, count, _size, acquired_count, failed_delivery_count, _mark = run
    if acquired_count:
        flags |= words.REDELIVERED
    rows.add(
        words.DELIVERED, flags, 0, session, number, 0, message_id, count, index, offset, first,
        acquired_count, failed_delivery_count,
    )  # fmt: skip


def left(
    rows: TraceRows, kind: int, flags: int, reason: int, session: int, number: int, run: runs.Run
) -> None:
    """Records what became of a run that consumer `number` of `session` had; 0, 0 = it was ready."""
    index, offset, first, count, _size, acquired_count, failed_delivery_count, _mark = run
    rows.add(
        kind, flags, reason, session, number, 0, 0, count, index, offset, first, acquired_count,
        failed_delivery_count,
    )  # fmt: skip


def owner(rows: TraceRows | None, flags: int, consumer: Consumer) -> None:
    """A consumer may be served from now on (CAME), or no more (GONE)."""
    if rows is None:
        return
    if consumer.no_ack:
        flags |= words.NO_ACK
    rows.add(
        words.OWNER, flags, 0, consumer.session.id, consumer.number, 0, consumer.next_id,
        0, 0, 0, 0, consumer.window, 0,
    )  # fmt: skip


def reservation(rows: TraceRows | None, flags: int, reservation: Reserving) -> None:
    """A reservation may take messages from now on (CAME), or is no more (GONE)."""
    if rows is not None:
        session = reservation_session(reservation.name)
        rows.add(
            words.OWNER, flags | words.BY_RESERVATION, 0, session, 0, 0, reservation.next,
            0, 0, 0, 0, 0, 0,
        )  # fmt: skip
