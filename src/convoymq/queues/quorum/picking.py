"""Picks messages of a quorum queue for consumers with a filter (ADR 0216), on their node.

    credit ─▶ scan a replica ─▶ PICK in the consumer's session ─▶ its deliveries
                 ▲   nothing: wait until the replica goes on        │
                 └──────────────────── credit is left ◀─────────────┘

The replica of this node is scanned; without one that is up to date, another member's. Others may
have taken what was found before it is picked: then the same places are scanned again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from convoymq.messages.amqp10.filters import Wanted, wanted_by
from convoymq.model.errors import BrokerError, NotFound, PeerError, Unavailable
from convoymq.model.tasks import Tasks
from convoymq.queues.quorum.filtering import (
    PICK,
    ROOM_MAX,
    Cursor,
    Found,
    cursor_of,
    find,
    found_of,
)
from convoymq.queues.reservation_reads import OK, Fields

if TYPE_CHECKING:
    from convoymq.queues.quorum.client import QuorumClient
    from convoymq.queues.quorum.queue import QuorumQueue
    from convoymq.queues.quorum.reservation_client import ReservationClient
    from convoymq.queues.reservations import Answer

FIND = "find"
"""Request to another member: filters, cursor, room, whether it waits for messages."""
SERVE_WAIT_S = 1.0
"""Longest wait of another member for messages."""
RETRY_S = 0.1
FILTERS_MAX = 64
"""Filters that are kept in their compiled form."""


class FilterReader:
    """Scans replicas of a queue. Part of a `QuorumQueue`."""

    def __init__(self, queue: QuorumQueue, reads: ReservationClient) -> None:
        self._queue = queue
        self._reads = reads
        self._wanted: dict[bytes, Wanted] = {}
        self.tasks = Tasks()
        """Pickers at work."""

    async def find(self, filters: bytes, cursor: Cursor, room: int, *, wait: bool) -> Found:
        """Returns messages that are wanted, at least one if it `waits` and some come within about a
        second. Raises Unavailable, NotFound."""
        found = await self._local_find(filters, cursor, room, 0.0)
        if found is None:
            request = [FIND, filters, list(cursor), room, wait]
            return found_of(await self._reads.ask_members(request))
        if not found.messages and found.is_complete and wait:
            await self._until_changed(found.cursor.seen)
        return found

    async def _local_find(
        self, filters: bytes, cursor: Cursor, room: int, wait_s: float
    ) -> Found | None:
        """As `find`, from this node's replica; None when it cannot tell."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            machine = self._reads.machine()
            if machine is None:
                return None
            found = await find(machine, self._queue.entry, self._wants(filters), cursor, room)
            if found.messages or not found.is_complete or loop.time() >= deadline:
                return found
            cursor = found.cursor
            await self._until_changed(cursor.seen)

    async def _until_changed(self, index: int) -> None:
        """Waits until the replica has applied more than the entries up to an index."""
        machine = self._reads.machine()
        if machine is None or machine.index == index:
            await self._reads.until_applied(SERVE_WAIT_S)

    def _wants(self, filters: bytes) -> Wanted:
        """Raises PeerError."""
        wanted = self._wanted.get(filters)
        if wanted is None:
            if len(self._wanted) >= FILTERS_MAX:
                self._wanted.clear()
            wanted = self._wanted[filters] = wanted_by(filters, self._queue.clock.now_ms)
        return wanted

    async def serve(self, request: Fields) -> list[object]:
        """Answers another node's FIND. Raises PeerError, NotFound, Unavailable."""
        try:
            filters, cursor, room, wait = request
        except ValueError as error:
            raise PeerError(f"malformed request for messages: {error}") from error
        if not isinstance(filters, bytes) or type(room) is not int:
            raise PeerError("malformed request for messages")
        wait_s = SERVE_WAIT_S if wait else 0.0
        found = await self._local_find(filters, cursor_of(cursor), room, wait_s)
        if found is None:
            raise Unavailable("this node has no current replica")
        return [OK, *msgspec.to_builtins(found)]


class Picker:
    """Picks the messages of one consumer.

    Args:
        drained: called with consumer and limit of a drain that has got all that there was.
    """

    def __init__(
        self, client: QuorumClient, number: int, filters: bytes, drained: Callable[[int, int], None]
    ) -> None:
        self._client = client
        self._number = number
        self._filters = filters
        self._drained = drained
        self._cursor = Cursor()
        self._next_id = 0
        self._limit = 0
        self._drains = False
        self._task: asyncio.Task[None] | None = None

    def start(self, next_id: int) -> None:
        """The queue has the consumer, whose next message id this is."""
        self._next_id = next_id

    def grant(self, limit: int, *, drain: bool) -> None:
        """Lets the consumer have messages below an id; a drain gets what there is now."""
        self._limit = limit
        self._drains = drain
        if self._task is None or self._task.done():
            self._task = self._client.queue.filter_reader.tasks.spawn(self._run())

    def stop(self) -> None:
        """The consumer has ended."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._limit > self._next_id or self._drains:
            try:
                await self._step()
            except NotFound:
                return
            except BrokerError:
                await asyncio.sleep(RETRY_S)

    async def _step(self) -> None:
        drains = self._drains
        if drains:
            # The replica here has what was in the queue when the client asked.
            await self._pick([])
        room = min(self._limit - self._next_id, ROOM_MAX)
        if room > 0:
            find = self._client.queue.filter_reader.find
            found = await find(self._filters, self._cursor, room, wait=not drains)
            before = self._next_id
            if found.messages:
                await self._pick(found.ranges)
                if self._next_id == before:
                    await asyncio.sleep(RETRY_S)
            if self._next_id - before == found.messages:
                self._cursor = found.cursor
            if found.messages or not found.is_complete:
                return
        if drains and self._drains:
            limit, self._drains, self._limit = self._limit, False, self._next_id
            self._drained(self._number, limit)

    async def _pick(self, ranges: list[int]) -> None:
        """Raises BrokerError: nobody knows what was picked."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answer(reply: Answer | None, error: BrokerError | None) -> None:
            if reply is not None and isinstance(reply.get("next"), int):
                self._next_id = max(self._next_id, reply["next"])
            if not answered.done():
                if error is not None:
                    answered.set_exception(error)
                else:
                    answered.set_result(None)

        op = {"op": PICK, "consumer": self._number, "ranges": ranges}
        self._client.reservation(msgspec.msgpack.encode(op), answer)
        await answered
