"""Pages of messages that are read from a queue without being delivered: reserved, or browsed.

A page is a list of runs, each records [first, first + count) of the ENQUEUE command at byte
`command` of `block`. On the way between nodes a run's block is an ENQUEUE command with just its
records.

Requests between nodes (CONTROL frames of kind KIND_RESERVATION; the group comes in front):

| request                                                | answer                          |
|--------------------------------------------------------|---------------------------------|
| op · map of the op                                     | ok · map                        |
| runs · reservation, epoch, offset, end, max rows, max bytes  | ok · first, next, runs          |
| browse · cursor, max rows, max bytes                   | ok · cursor, runs               |
| any of them                                            | refused · reason                |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from convoymq.kernels import batch
from convoymq.model.errors import PeerError, ReservationRefused, Subject, Unavailable
from convoymq.queues.reservations import MALFORMED, Answer, reservation_refused

ReservedRun = tuple[bytes, int, int, int, int, int, int, int]
"""(block, command, first record, count, offset of the first, time in ms, times handed out before,
failed ones of these)."""

#: Bounds of one page, whatever the reader asks for; the rest comes with the next.
PAGE_RUNS_MAX = 4096
PAGE_ROWS_MAX = 1_000_000
PAGE_BYTES_MAX = 64 << 20
#: What a node asks another for at a time: other traffic shares the link.
REMOTE_BYTES_MAX = 4 << 20
#: After this many bytes or blocks a reader lets others run.
YIELD_BYTES = 1 << 20
YIELD_BLOCKS = 64


class RunsRequest(NamedTuple):
    """Request for messages of a reservation."""

    reservation: str
    epoch: int
    offset: int
    end: int | None
    """Exclusive; None = all that the asked node knows of."""
    max_rows: int
    max_bytes: int

    def check(self) -> None:
        """Raises ReservationRefused unless the fields have values that a log knows."""
        if type(self.reservation) is not str:
            raise reservation_refused(MALFORMED)
        last = self.offset if self.end is None else self.end
        checked_numbers(self.epoch, self.offset, last, self.max_rows, self.max_bytes)

    def for_link(self) -> RunsRequest:
        """Returns the request as it is sent to another node: other traffic shares the link."""
        return self._replace(max_bytes=min(self.max_bytes, REMOTE_BYTES_MAX))


class Page:
    """Runs that were collected, up to a number of rows and bytes; the first message always fits."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.runs: list[ReservedRun] = []
        self.rows = 0
        self.bytes = 0
        self._max_rows = max(1, min(max_rows, PAGE_ROWS_MAX))
        self._max_bytes = min(max_bytes, PAGE_BYTES_MAX)

    def room(self, count: int, size: int) -> int:
        """Returns how many of the next run's `count` messages with `size` body bytes fit; 0 =
        full."""
        left = self._max_bytes - self.bytes
        if len(self.runs) >= PAGE_RUNS_MAX or (self.rows and left <= 0):
            return 0
        fits = min(count, self._max_rows - self.rows)
        if size * fits > left * count:
            fits = max(0, left) * count // size
        return fits if fits or self.rows else 1

    def add(
        self,
        block: bytes,
        command: int,
        first: int,
        count: int,
        offset: int,
        time_ms: int,
        acquired_count: int,
        failed_delivery_count: int,
        size: int,
    ) -> None:
        """Appends a run. What is a small part of its block is copied: pages must not hold much more
        than they show."""
        assert count > 0
        if size * 2 < len(block):
            block = batch.slice_records(block, command, first, count)
            command = first = 0
            size = max(size, len(block))
        self.runs.append(
            (block, command, first, count, offset, time_ms, acquired_count, failed_delivery_count)
        )
        self.rows += count
        self.bytes += size


Fields = list[Any]
"""A request or an answer as it comes from another node, or what is behind its first field; what a
field is depends on the request."""

Room = Callable[[], Awaitable[object]]
"""Waits until there is room for a large answer, and it is this one's turn."""
Ask = Callable[[int, list[object]], Awaitable[object]]
"""Asks a node: (node, [group, request …]) → answer, as `serve` gives it."""

OP = "op"
RUNS = "runs"
BROWSE = "browse"
OK = "ok"
REFUSED = "refused"


class LocalReservations(Protocol):
    """Reservations that are answered on a node, without asking another one."""

    async def local_op(self, op: Mapping[str, object]) -> Answer:
        """Returns the answer of an op."""

    async def is_there(self, request: RunsRequest) -> bool:
        """Waits for what `local_runs` needs; False when it does not come in time."""

    async def local_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]] | None:
        """Returns (first, next, runs) as they are now; None when this node cannot tell."""

    async def local_browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]] | None:
        """Returns (cursor, runs); None when this node cannot tell."""


async def no_wait() -> None:
    """A `Room` that is always there."""


async def serve(local: LocalReservations, request: Fields, room: Room = no_wait) -> list[object]:
    """Answers another node's request. Raises what `local` and `room` raise but ReservationRefused,
    Unavailable when this node cannot tell, and PeerError for what is no request.

    Args:
        room: awaited once before messages are read, never while something else is waited for.
    """
    try:
        verb, *rest = request
        if verb == OP:
            (op,) = rest
            return [OK, await local.local_op(op)]
        if verb == RUNS:
            wanted = RunsRequest(*rest)
            wanted.check()
            found = None
            if await local.is_there(wanted):
                await room()
                found = await local.local_runs(wanted.for_link())
            if found is not None:
                return [OK, found[0], found[1], encode_runs(found[2])]
        elif verb == BROWSE:
            cursor, max_rows, max_bytes = rest
            checked_numbers(max_rows, max_bytes)
            await room()
            browsed = await local.local_browse(cursor, max_rows, min(max_bytes, REMOTE_BYTES_MAX))
            if browsed is not None:
                return [OK, browsed[0], encode_runs(browsed[1])]
        else:
            raise PeerError(f"unknown request about a reservation: {verb!r}")
    except ReservationRefused as refused:
        return [REFUSED, refused.reason]
    except (ValueError, TypeError, AttributeError) as error:
        raise PeerError(f"malformed request about a reservation: {error}") from error
    raise Unavailable("this node has no current replica")


def opened(answer: object, subject: Subject) -> Fields:
    """Returns what another node answered. Raises ReservationRefused, and PeerError for what is no
    answer."""
    try:
        if not isinstance(answer, Iterable):
            raise TypeError(f"cannot unpack non-iterable {type(answer).__name__} object")
        status, *rest = answer
        if status == REFUSED:
            raise reservation_refused(str(rest[0]), subject)
        if status == OK:
            return list(rest)
    except (ValueError, TypeError, IndexError) as error:
        raise PeerError(f"malformed answer about a reservation: {error}") from error
    raise PeerError("malformed answer about a reservation")


def encode_runs(runs: Sequence[ReservedRun]) -> list[list[object]]:
    """Runs as plain values for another node."""
    return [
        [batch.slice_records(block, command, first, count), count, offset, *rest]
        for block, command, first, count, offset, *rest in runs
    ]


def decode_runs(encoded: object) -> list[ReservedRun]:
    """Returns the runs of `encode_runs`. Raises PeerError."""
    try:
        if not isinstance(encoded, Iterable):
            raise TypeError(f"'{type(encoded).__name__}' object is not iterable")
        return [
            (block, 0, 0, count, offset, time_ms, acquired_count, failed_delivery_count)
            for block, count, offset, time_ms, acquired_count, failed_delivery_count in encoded
        ]
    except (TypeError, ValueError) as error:
        raise PeerError(f"malformed runs from another node: {error}") from error


def checked_numbers(*values: object) -> None:
    """Raises ReservationRefused unless all are numbers that a log knows."""
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise reservation_refused(MALFORMED)


def checked_cursor(cursor: object, length: int) -> list[int]:
    """Returns the numbers of a browse cursor; zeros for None. Raises ReservationRefused."""
    if cursor is None:
        return [0] * length
    if not isinstance(cursor, list | tuple) or len(cursor) != length:
        raise reservation_refused(MALFORMED)
    checked_numbers(*cursor)
    return list(cursor)
