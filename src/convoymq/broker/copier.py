"""Copies stored messages into a queue: those of a queue that is migrated, or of a backup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from convoymq.kernels.batch import slice_records
from convoymq.model.errors import Refused, Unavailable
from convoymq.queues.dead_letter_publisher import is_gone
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.null_events import NullEvents
from convoymq.queues.reservations import Answer

WINDOW_MESSAGES = 2048
"""Copied messages without a confirm."""
SLICE_MESSAGES = 256
"""So many are copied before others have their turn."""
CONFIRM_TIMEOUT_S = 60.0
"""Longest wait for the target to confirm anything."""
RESERVATION = "convoy.migration"
"""Name of the reservation that takes and returns what was handed out before."""
MARK_TRIES = 10
RETRY_S = 0.5
FLAG_HEADERS = 8
"""Of ENQUEUE: records carry headers that queues act on."""
PRIORITY_FLAG = 2
"""Of ENQUEUE: records carry a priority."""
ELSEWHERE = "the queue was deleted, or another node leads it"


class Copier(NullEvents):
    """Publishes records of one queue, as they are, into another."""

    def __init__(
        self,
        target: Queue,
        session: int,
        rate: int,
        check: Callable[[], None],
        moved: Callable[[int], None],
    ) -> None:
        """
        Args:
            rate: messages a second, at most; 0 = any number.
            check: raises Unavailable while nothing is to be published.
            moved: called with the number of messages that the target has confirmed.
        """
        self._target = target
        self._client = target.client(session, self)
        self._rate = rate
        self._slice_messages = min(rate or SLICE_MESSAGES, SLICE_MESSAGES)
        """No pause is longer than a second."""
        self._began: float | None = None
        self._check = check
        self._on_moved = moved
        self.copied = 0
        self._sent = 0
        self._failed = ""
        self._is_blocked = False
        self._moved = asyncio.Event()

    def close(self) -> None:
        """Ends the stream into the successor."""
        self._client.close()

    async def copy(self, source: Queue) -> None:
        """Copies everything of a frozen queue, and returns when it is confirmed. Raises
        Unavailable."""
        handed_out, has_priorities = 0, False
        frozen = source.frozen
        for run in source.stored_runs():
            first = 0
            while first < run.messages:
                if source.frozen != frozen or source.ended is not None:
                    raise Unavailable(ELSEWHERE)
                count = min(run.messages - first, self._slice_messages)
                records = slice_records(run.block, run.command, run.first + first, count)
                if not source.serves_delays:
                    # In classic queues they mean nothing, and several of a group are out.
                    records = records[:5] + bytes((records[5] & ~FLAG_HEADERS,)) + records[6:]
                await self.publish(records, count)
                first += count
                has_priorities |= bool(records[5] & PRIORITY_FLAG)
            if run.acquired_count:
                handed_out = self._sent
        await self.confirmed()
        if handed_out and not self._target.features.reads_by_offset:
            # Another order than that of the log decides who comes first.
            await self._mark(self._sent if has_priorities else handed_out)

    async def publish(self, records: bytes, count: int) -> None:
        """Publishes an ENQUEUE command of `count` records, and waits until there is room for more.
        Raises Unavailable, ValueError: it is none."""
        if is_gone(self._client):
            raise Unavailable(ELSEWHERE)
        self._check()
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        self._client.target.publish_records(records, count, self._sent + 1)
        self._sent += count
        await asyncio.sleep(self._pause())
        await self._until(self._may_send)

    async def confirmed(self) -> None:
        """Waits until everything is confirmed. Raises Unavailable."""
        await self._until(lambda: self.copied == self._sent)

    def _may_send(self) -> bool:
        return not self._is_blocked and self._sent - self.copied <= WINDOW_MESSAGES

    def _pause(self) -> float:
        if not self._rate or self._began is None:
            return 0.0
        now = asyncio.get_running_loop().time()
        return max(0.0, self._began + self._sent / self._rate - now)

    async def _mark(self, count: int) -> None:
        """Takes the first messages and returns them: they were handed out before. A reservation
        does it, since its end is on disk when it is answered. Raises Unavailable."""
        opened = await self._reserve(op="open", owner=RESERVATION)
        owned = {key: opened[key] for key in ("epoch", "fencing_token")}
        taken = 0
        while taken < count:
            found = await self._reserve(op="take", max=count - taken, after=taken, **owned)
            if found["next"] == taken:
                raise Unavailable("the successor lost what was copied")
            taken = found["next"]
        await self._reserve(op="close", **owned)

    async def _reserve(self, **op: object) -> Answer:
        """Carries out an op on the reservation; all of them may be repeated."""
        asked = {"reservation": RESERVATION, **op}
        tries = MARK_TRIES
        while True:
            tries -= 1
            try:
                return await self._target.reservation(asked)
            except Unavailable:
                if not tries:
                    raise
            except Refused as error:
                raise Unavailable(error.text) from error
            await asyncio.sleep(RETRY_S)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failed:
                raise Unavailable(self._failed)
            self._moved.clear()
            try:
                async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                    await self._moved.wait()
            except TimeoutError:
                raise Unavailable("the queue does not take messages") from None

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        self._moved.set()

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`."""
        if not outcome:
            self._fail("the queue refused a message")
        pairs = zip(tags[::2], tags[1::2], strict=True)
        self.copied += sum(last - first + 1 for first, last in pairs)
        self._on_moved(self.copied)
        self._moved.set()

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """See `PublisherEvents`: the bound of bytes without a confirm is that of any client."""
        self._is_blocked = blocked
        self._moved.set()
