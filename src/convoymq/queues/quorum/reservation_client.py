"""A node's client of the reservations of a quorum queue: ops through the log, reads beside it.

Ops go through one session of the node, opened when it is first needed and closed when it has been
idle for a while; the client of that session resends after a change of leader. Every op may be
repeated, so one that got lost with its session is simply asked again until the deadline.

Reads come from this node's replica once it has applied what the reader knows of; otherwise, or
without a replica, from another member. A read keeps the reservation alive: the node that serves it
sends `touch`, at most once per quarter of the time to live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from convoymq.kernels.entries import Entry
from convoymq.model.clock import Timer
from convoymq.model.errors import (
    BrokerError,
    Refused,
    Subject,
    Unavailable,
)
from convoymq.model.refusals import missing, queue_subject
from convoymq.queues.null_events import NullEvents
from convoymq.queues.quorum.picking import FIND, FilterReader
from convoymq.queues.reservation_reads import (
    BROWSE,
    PAGE_RUNS_MAX,
    REMOTE_BYTES_MAX,
    RUNS,
    YIELD_BLOCKS,
    YIELD_BYTES,
    Ask,
    Fields,
    Page,
    ReservedRun,
    Room,
    RunsRequest,
    checked_cursor,
    checked_numbers,
    decode_runs,
    opened,
    serve,
)
from convoymq.queues.reservations import (
    Answer,
    Refusal,
    Reservation,
    checked_op,
    reservation_refused,
)

if TYPE_CHECKING:
    from convoymq.queues.quorum.client import QuorumClient
    from convoymq.queues.quorum.machine import QuorumMachine
    from convoymq.queues.quorum.queue import QuorumQueue

IDLE_MS = 60_000
"""A session that nobody used for so long is closed."""
RETRY_S = 0.1
LOCAL_WAIT_S = 2.0
"""Longest wait of a read for the own replica before another member is asked …"""
SERVE_WAIT_S = 5.0
"""… and how long that one waits for its own."""
WAIT_STEP_S = 0.25
BROWSE_TRIES = 3
TOUCHED_MAX = 2048


class ReservationClient(NullEvents):
    """See the module docstring. Part of a `QuorumQueue`; its client's events end here."""

    def __init__(self, queue: QuorumQueue, ask: Ask | None) -> None:
        self._queue = queue
        self._ask_node = ask
        self._client: QuorumClient | None = None
        self._open = 0
        """Ops that wait for an answer."""
        self._used_ms = 0
        self._timer: Timer | None = None
        self.waiters: list[asyncio.Future[None]] = []
        """Readers that wait for the replica; `on_applied` wakes them."""
        self._touched: dict[str, tuple[int, int]] = {}
        self._filter_reader: FilterReader | None = None

    @property
    def _subject(self) -> Subject:
        return queue_subject(self._queue.vhost, self._queue.name)

    # --- ops -----------------------------------------------------------------------------

    async def op(self, op: Mapping[str, object]) -> Answer:
        """Proposes an op and returns its answer. Raises ReservationRefused, NotFound,
        Unavailable."""
        return await self.ask(checked_op(op))

    async def ask(self, op: Mapping[str, object]) -> Answer:
        """Proposes what a RESERVATION command may carry, as `op`."""
        encoded = msgspec.msgpack.encode(op)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._queue.limits.operation_timeout_ms / 1000
        while True:
            try:
                answer = await self._propose(encoded)
                assert answer is not None
                return answer
            except Unavailable:
                # The session may have ended with the op under way: it is asked in the next one.
                if loop.time() + RETRY_S >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    def _propose(self, encoded: bytes) -> asyncio.Future[Answer | None]:
        queue = self._queue
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        if queue.deleted:
            future.set_exception(missing(self._subject))
            return future
        client = self._client
        if client is None:
            client = queue.client(queue.new_session(), self)
            self._client = client
            if self._timer is None:
                self._timer = queue.clock.call_later(IDLE_MS, self._close_idle)
        self._open += 1
        self._used_ms = queue.clock.monotonic_ms()

        def answer(reply: Answer | None, error: BrokerError | None) -> None:
            self._open -= 1
            self._used_ms = queue.clock.monotonic_ms()
            # Who asked may have given up meanwhile.
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(reply)

        client.reservation(encoded, answer)
        return future

    def _close_idle(self) -> None:
        self._timer = None
        client, queue = self._client, self._queue
        if client is None or queue.deleted:
            return
        if self._open or queue.clock.monotonic_ms() - self._used_ms < IDLE_MS:
            self._timer = queue.clock.call_later(IDLE_MS, self._close_idle)
            return
        self._client = None
        client.close()

    def on_deleted(self) -> None:
        """The queue is gone; its clients have heard it."""
        self._client = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._filter_reader is not None:
            self._filter_reader.tasks.cancel()
        self.on_applied()

    @property
    def filter_reader(self) -> FilterReader:
        """Returns what scans replicas for consumers with a filter."""
        if self._filter_reader is None:
            self._filter_reader = FilterReader(self._queue, self)
        return self._filter_reader

    # --- reads ---------------------------------------------------------------------------

    async def runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        """Returns (first unsettled, where to go on, runs) of a reservation.

        Raises:
            ReservationRefused: not what the reservation is any more.
            Unavailable: no member that can be asked has got so far.
        """
        request.check()
        found = await self._local_runs(request, LOCAL_WAIT_S)
        if found is not None:
            return found
        first, after, encoded = await self.ask_members([RUNS, *request.for_link()])
        return int(first), int(after), decode_runs(encoded)

    async def browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        """Returns (cursor of the rest or None, runs) of what is ready, in the order of the log.
        Offsets count from 0. What stays ready while somebody pages through is seen exactly once."""
        checked_numbers(max_rows, max_bytes)
        checked_cursor(cursor, 4)
        found = await self._local_browse(cursor, max_rows, max_bytes)
        if found is not None:
            return found
        request: list[object] = [BROWSE, cursor, max_rows, min(max_bytes, REMOTE_BYTES_MAX)]
        rest, encoded = await self.ask_members(request)
        return rest, decode_runs(encoded)

    async def serve(self, request: Fields, room: Room) -> list[object]:
        """Answers another node's request; see `reservation_reads.serve`."""
        if request[:1] == [FIND]:
            return await self.filter_reader.serve(request[1:])
        return await serve(self, request, room)

    async def local_op(self, op: Mapping[str, object]) -> Answer:
        """See `reservation_reads.LocalReservations`."""
        return await self.op(op)

    async def is_there(self, request: RunsRequest) -> bool:
        """See `reservation_reads.LocalReservations`."""
        return await self._local_reservation(request, SERVE_WAIT_S) is not None

    async def local_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]] | None:
        """See `reservation_reads.LocalReservations`."""
        return await self._local_runs(request, 0.0)

    async def local_browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]] | None:
        """See `reservation_reads.LocalReservations`."""
        return await self._local_browse(cursor, max_rows, max_bytes)

    async def ask_members(self, request: list[object]) -> Fields:
        """Returns the first answer of another member, the leader first."""
        queue = self._queue
        if queue.deleted:
            raise missing(self._subject)
        others = sorted(n for n in queue.members if n != queue.node)
        if queue.leader in others:
            others.remove(queue.leader)
            others.insert(0, queue.leader)
        last = "none of its other members can be asked"
        if self._ask_node is None:
            others = []
        for node in others:
            assert self._ask_node is not None
            try:
                answer = await self._ask_node(node, [queue.group, *request])
            except (Unavailable, Refused) as error:
                last = error.text
                continue
            return opened(answer, self._subject)
        raise Unavailable(f"{self._subject} cannot be read here: {last}")

    async def _local_runs(
        self, request: RunsRequest, wait_s: float
    ) -> tuple[int, int, list[ReservedRun]] | None:
        """As `runs`, from this node's replica; None when it cannot tell (in time)."""
        reservation = await self._local_reservation(request, wait_s)
        if reservation is None:
            return None
        self._touch(reservation)
        first = reservation.first
        offset, end = request.offset, request.end
        upto = reservation.next if end is None else min(end, reservation.next)
        page = Page(request.max_rows, request.max_bytes)
        # The runs as they are now: a settle or release meanwhile must not change this answer.
        held = held_runs(reservation, offset, upto, request.max_rows)
        if not await self._collect(page, held):
            # An entry is gone: either the reservation has moved on, which is told, or the disk
            # lied.
            await self._local_reservation(request, 0.0)
            return None
        return first, offset + page.rows, page.runs

    async def _local_reservation(self, request: RunsRequest, wait_s: float) -> Reservation | None:
        """Returns the reservation once this replica has applied what the reader knows of."""
        name, epoch, offset = request.reservation, request.epoch, request.offset
        end = offset if request.end is None else request.end
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            machine = self.machine()
            if machine is None:
                return None
            if machine.index >= epoch:
                # An epoch is the index of the entry that began it, so nothing older is seen here.
                try:
                    reservation = machine.reservations.reading(name, epoch, offset)
                except Refusal as refusal:
                    raise reservation_refused(refusal.reason, self._subject) from None
                if reservation.next >= end:
                    return reservation
            left = deadline - loop.time()
            if left <= 0:
                return None
            await self.until_applied(min(left, WAIT_STEP_S))

    async def until_applied(self, timeout: float) -> None:
        """Waits until the replica here has applied an entry, for a time at most."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            pass
        finally:
            if waiter in self.waiters:
                self.waiters.remove(waiter)

    def on_applied(self) -> None:
        """The replica went on: readers that wait for it look again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _local_browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]] | None:
        machine = self.machine()
        if machine is None:
            return None
        seen, *place = checked_cursor(cursor, 4)
        for _ in range(BROWSE_TRIES):
            page = Page(max_rows, max_bytes)
            ready = ready_runs(machine, (place[0], place[1], place[2]), seen, max_rows)
            if await self._collect(page, ready) or page.runs:
                break
            # The first one was settled while it was read.
        else:
            return None
        if not page.runs:
            return None, []
        _, last = ready[len(page.runs) - 1]
        _, _, _, count, offset, *_ = page.runs[-1]
        part = len(page.runs) < len(ready) or count < last[3]
        more = part or page.rows >= max_rows or len(ready) >= PAGE_RUNS_MAX
        rest = [offset + count, last[0], last[1], last[2] + count]
        return rest if more else None, page.runs

    async def _collect(self, page: Page, runs: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
        """Reads bodies into a page until it is full; False when an entry cannot be read here."""
        blocks = 0
        since = 0
        entry: Entry | None = None
        for offset, (index, command, first, count, size, acquired_count, failed, _mark) in runs:
            fits = page.room(count, size)
            if not fits:
                return True
            if entry is None or entry.index != index:
                entry = self._queue.entry(index)
                if entry is None:
                    return False
                blocks += 1
            part = size * fits // count
            page.add(
                entry.data,
                command,
                first,
                fits,
                offset,
                entry.time_ms,
                acquired_count,
                failed,
                part,
            )
            if fits < count:
                return True
            if page.bytes - since >= YIELD_BYTES or blocks >= YIELD_BLOCKS:
                since = page.bytes
                blocks = 0
                await asyncio.sleep(0)
        return True

    def machine(self) -> QuorumMachine | None:
        """Returns that of the replica here, if it is up to date. Raises NotFound."""
        replica = self._queue.replica()
        if replica is None:
            return None
        if self._queue.deleted:
            raise missing(self._subject)
        if replica.is_behind:
            return None
        machine: QuorumMachine = replica.machine
        return machine

    def _touch(self, reservation: Reservation) -> None:
        """Lets the queue hear of a reservation that is read, now and then."""
        replica = self._queue.replica()
        if replica is None:
            return
        now = self._queue.clock.monotonic_ms()
        epoch, sent = self._touched.get(reservation.name, (0, 0))
        quiet = replica.time.now_ms() - reservation.heard_ms
        if quiet * 4 < reservation.ttl_ms or (
            epoch == reservation.epoch and (now - sent) * 4 < reservation.ttl_ms
        ):
            return
        if len(self._touched) >= TOUCHED_MAX:
            self._touched.clear()
        self._touched[reservation.name] = (reservation.epoch, now)
        op = {"op": "touch", "reservation": reservation.name, "epoch": reservation.epoch}
        # Nobody waits for it; what it may be refused with, the reader hears by itself.
        self._propose(msgspec.msgpack.encode(op)).add_done_callback(_drop)


def _drop(future: asyncio.Future[Answer | None]) -> None:
    if not future.cancelled():
        future.exception()


def held_runs(
    reservation: Reservation, offset: int, upto: int, limit: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (offset, run) of what is reserved from `offset` up to `upto`, at most `limit`
    messages."""
    upto = min(upto, offset + max(1, limit))
    return list(reservation.held.between(offset, upto, PAGE_RUNS_MAX)) if offset < upto else []


def ready_runs(
    machine: QuorumMachine, place: tuple[int, int, int], seen: int, limit: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (number, run) of ready messages from a place (entry, command, record) in the log on,
    in its order, numbered from `seen`; at least one and about `limit` messages.

    What is fresh lies behind all that came back, since messages are taken from its front; priority
    levels are merged. Cost: O(runs that came back) + O(runs listed)."""
    made: list[tuple[int, tuple[int, ...]]] = []
    returned = machine.backlog.returned.runs_after(*place, PAGE_RUNS_MAX)
    if machine.backlog.requeued.messages:
        returned += machine.backlog.requeued.runs_after(*place, PAGE_RUNS_MAX)
        returned.sort()
    listed = 0
    fresh = machine.backlog.fresh.runs_from(*place, max(1, limit), PAGE_RUNS_MAX)
    sources = [returned, fresh]
    if machine.backlog.levels.messages or machine.backlog.groups.messages:
        beside = [
            run
            for fifo in machine.backlog.levels.fifos()
            for run in fifo.runs_from(*place, max(1, limit), PAGE_RUNS_MAX)
        ]
        beside += machine.backlog.levels.restored.all_runs()
        beside += machine.backlog.groups.blocked_runs()
        sources = [sorted([*returned, *fresh, *beside])]
    for source in sources:
        for run in source:
            if listed >= max(1, limit) or len(made) >= PAGE_RUNS_MAX:
                return made
            cut = run_after(run, place)
            if cut is not None:
                made.append((seen + listed, cut))
                listed += cut[3]
    return made


def run_after(run: tuple[int, ...], place: tuple[int, int, int]) -> tuple[int, ...] | None:
    """Returns the part of a run that lies at or behind a place in the log."""
    index, command, first, count, size, acquired_count, failed, mark = run
    if (index, command) < place[:2]:
        return None
    skip = place[2] - first if (index, command) == place[:2] else 0
    if skip <= 0:
        return run
    if skip >= count:
        return None
    left = size - size * skip // count
    return (index, command, first + skip, count - skip, left, acquired_count, failed, mark)
