"""Clients of the reservations of a classic queue, at its home node and everywhere else.

Reservations live as long as the queue's machine, that is, until its node stops: then the messages
of a durable queue are ready again. Epochs begin with the node's incarnation, so whoever comes back
with one from before is refused. An op that ends something in a durable queue is answered when that
is on disk: what was settled is gone, what was returned was handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from convoymq.model.errors import NotFound, Refused, StorageFault, Subject, Unavailable
from convoymq.queues.reservation_reads import (
    BROWSE,
    OP,
    PAGE_RUNS_MAX,
    REMOTE_BYTES_MAX,
    RUNS,
    YIELD_BLOCKS,
    YIELD_BYTES,
    Fields,
    Page,
    ReservedRun,
    Room,
    RunsRequest,
    checked_cursor,
    checked_numbers,
    decode_runs,
    no_wait,
    opened,
    serve,
)
from convoymq.queues.reservations import (
    RESERVATION_RANGE,
    Answer,
    Refusal,
    Reservation,
    checked_op,
    reservation_refused,
)

if TYPE_CHECKING:
    from convoymq.metadata.machine import QueueRecord
    from convoymq.queues.classic.host import ClassicHost
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Block

ENDS = ("settle", "release", "close")
EPOCH_MASK = (1 << 56) - 1
"""The incarnation and the counter of a session id."""
BROWSE_TRIES = 3

Place = tuple["Block", int, int, int]
"""(block, first record, count, times handed out before): a run as it was when a read began."""


class HomeReservations:
    """Reservations at the queue's home node. Part of `LocalQueue`."""

    host: ClassicHost
    machine: ClassicMachine
    durable: bool
    if TYPE_CHECKING:

        @property
        def subject(self) -> Subject: ...

    ended: Refused | None
    _reservation_epoch = 0

    def settle_round(self, now_ms: int) -> None:
        """Applies what was published before, and later carries out what an op caused."""
        raise NotImplementedError

    async def written(self) -> None:
        """Waits until what was settled so far is on disk."""
        raise NotImplementedError

    async def reservation(self, op: Mapping[str, object]) -> Answer:
        """See `Queue`."""
        return await self.local_op(op)

    async def reservation_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        """See `Queue`."""
        request.check()
        return await self.local_runs(request)

    async def browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        """See `Queue`."""
        checked_numbers(max_rows, max_bytes)
        return await self.local_browse(cursor, max_rows, max_bytes)

    async def serve_reservation(self, request: Fields, room: Room = no_wait) -> list[object]:
        """See `Queue`."""
        return await serve(self, request, room)

    def reservations(self) -> list[dict[str, object]]:
        """See `Queue`."""
        return self.machine.reservations.infos()

    async def local_op(self, op: Mapping[str, object]) -> Answer:
        """See `reservation_reads.LocalReservations`."""
        self._check()
        if not self._reservation_epoch:
            self._reservation_epoch = self.host.new_session() & EPOCH_MASK
        self._reservation_epoch += 1
        fields = checked_op(op)
        now_ms = self.host.now_ms()
        self.settle_round(now_ms)
        reason, answer = self.machine.reservation(fields, self._reservation_epoch, now_ms)
        self.settle_round(now_ms)
        if reason is not None:
            raise reservation_refused(reason, self.subject)
        assert answer is not None
        if self.durable and fields["op"] in ENDS:
            await self.written()
        return answer

    async def is_there(self, request: RunsRequest) -> bool:
        """See `reservation_reads.LocalReservations`: what is not there now does not come."""
        self._check()
        self._reading(request)
        return True

    async def local_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        """See `reservation_reads.LocalReservations`."""
        self._check()
        known = self._reading(request)
        first, after, offset = known.first, known.next, request.offset
        upto = after if request.end is None else request.end
        if max(upto, offset) > after:
            raise reservation_refused(RESERVATION_RANGE, self.subject)
        known.heard_ms = max(known.heard_ms, self.host.now_ms())
        upto = min(upto, offset + max(1, request.max_rows))
        page = Page(request.max_rows, request.max_bytes)
        places = [
            (run.block, run.first, run.count, run.acquired_count)
            for run in known.held.between(offset, upto, PAGE_RUNS_MAX)
        ]
        try:
            await self._collect(page, places, offset)
        except (OSError, StorageFault) as error:
            # Either the reservation went on meanwhile, which is told, or the disk is at fault.
            self._reading(request)
            raise StorageFault(f"reserved messages of {self.subject}: {error}") from error
        return first, offset + page.rows, page.runs

    def _reading(self, request: RunsRequest) -> Reservation:
        name, epoch, offset = request.reservation, request.epoch, request.offset
        try:
            return self.machine.reservations.reading(name, epoch, offset)
        except Refusal as refusal:
            raise reservation_refused(refusal.reason, self.subject) from None

    async def local_browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        """See `reservation_reads.LocalReservations`. A cursor is (rows seen, how far below the
        highest the priority of the next is, its position)."""
        self._check()
        seen, below, position = checked_cursor(cursor, 3)
        level_max = self.machine.backing.level_max
        self.settle_round(self.host.now_ms())
        tries = 0
        while True:
            ready, more = self._ready_from(level_max - below, position, max(1, max_rows))
            page = Page(max_rows, max_bytes)
            try:
                await self._collect(page, ready, seen)
                break
            except (OSError, StorageFault) as error:
                tries += 1
                if page.runs:
                    break
                if tries >= BROWSE_TRIES:
                    raise StorageFault(f"messages of {self.subject}: {error}") from error
        if not page.runs:
            return None, []
        block, first, count, _ = ready[len(page.runs) - 1]
        shown = page.runs[-1][3]
        if len(page.runs) == len(ready) and shown == count and not more:
            return None, page.runs
        return [
            seen + page.rows,
            level_max - block.level,
            block.position + first + shown,
        ], page.runs

    def _ready_from(self, level: int, position: int, limit: int) -> tuple[list[Place], bool]:
        """Returns the ready messages from a place on, about `limit`, and whether there are more."""
        made: list[Place] = []
        listed = 0
        for run in self.machine.backing.walk(level, position):
            skip = max(0, position - run.position) if run.block.level == level else 0
            if listed >= limit or len(made) >= PAGE_RUNS_MAX:
                return made, True
            made.append((run.block, run.first + skip, run.count - skip, run.acquired_count))
            listed += run.count - skip
        return made, False

    async def _collect(self, page: Page, places: Sequence[Place], offset: int) -> None:
        """Reads bodies into a page until it is full."""
        blocks = 0
        since = 0
        last: Block | None = None
        data, command = b"", 0
        for block, first, count, acquired_count in places:
            size = block.bytes * count // block.count
            fits = page.room(count, size)
            if not fits:
                return
            if block is not last:
                last = block
                data, command = self.machine.body_of(block)
                blocks += 1
            part = size * fits // count
            page.add(data, command, first, fits, offset, block.time_ms, acquired_count, 0, part)
            if fits < count:
                return
            offset += count
            if page.bytes - since >= YIELD_BYTES or blocks >= YIELD_BLOCKS:
                since = page.bytes
                blocks = 0
                await asyncio.sleep(0)

    def _check(self) -> None:
        if self.ended is not None:
            raise self.ended


class AwayReservations:
    """Reservations at another node, which asks the home node. Part of `RemoteQueue`."""

    host: ClassicHost
    record: QueueRecord
    ended: Refused | None
    if TYPE_CHECKING:

        @property
        def subject(self) -> Subject: ...

    async def reservation(self, op: Mapping[str, object]) -> Answer:
        """See `Queue`."""
        (answer,) = await self._ask(OP, checked_op(op))
        return dict(answer)

    async def reservation_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        """See `Queue`."""
        request.check()
        first, after, runs = await self._ask(RUNS, *request.for_link())
        return int(first), int(after), decode_runs(runs)

    async def browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        """See `Queue`."""
        checked_numbers(max_rows, max_bytes)
        rest, runs = await self._ask(BROWSE, cursor, max_rows, min(max_bytes, REMOTE_BYTES_MAX))
        return rest, decode_runs(runs)

    async def serve_reservation(self, request: Fields, room: Room = no_wait) -> list[object]:
        """Only the home node answers."""
        raise NotFound("the queue does not live here")

    async def _ask(self, *request: object) -> Fields:
        if self.ended is not None:
            raise self.ended
        try:
            answer = await self.host.ask_reservation(self.record, list(request))
        except NotFound:
            raise
        except Refused as error:
            raise Unavailable(error.text) from None
        return opened(answer, self.subject)
