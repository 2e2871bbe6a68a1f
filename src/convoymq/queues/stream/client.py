# cython: annotation_typing=False
"""One channel's consumers of a stream, and its publishes.

Publishes are those of every session (`session_client`). A consumer is a cursor with a window of
unacknowledged messages, here and nowhere else: it ends with the channel, not with the session, and
it reads the local replica, or a member's when there is none. An acknowledgement gives room in the
window back, and so do a reject and a requeue: a log takes nothing back and sends nothing twice.

| state     | leaves it by                                                             |
|-----------|--------------------------------------------------------------------------|
| RESOLVING | where to begin is known -> RUNNING, answered; not in time -> refused     |
| RUNNING   | cancel -> ENDING                                                         |
| ENDING    | last acknowledgement, close -> gone (only for consumers with a name)     |

A consumer with a name (`x-stream-consumer-name`) stores its offset: that below which everything is
acknowledged, less one. It begins behind the stored one, or, when nothing is stored, where
`x-stream-offset` says. It stores every STORE_MESSAGES messages and every STORE_MS, when it moved,
and at its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, OffsetOutOfRange, StorageFault
from convoymq.model.refusals import (
    consumer_without_prefetch,
    get_from_stream,
    invalid_argument,
    no_ack_from_stream,
    purge_of_stream,
)
from convoymq.queues.interface import (
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
)
from convoymq.queues.reservation_reads import Fields
from convoymq.queues.session_client import SessionClient
from convoymq.queues.stream.machine import CONSUMER_NAME_BYTES_MAX
from convoymq.queues.stream.offsets import Start, StartAt, parse_start
from convoymq.storage.types import EntryGone
from convoymq.streamlog.reader import ChunkReader

if TYPE_CHECKING:
    from convoymq.queues.stream.queue import Chunks, Extent, StreamQueue

NAME_ARGUMENT = "x-stream-consumer-name"
OFFSET_ARGUMENT = "x-stream-offset"

STORE_MESSAGES = 10_000
STORE_MS = 5_000
#: Window of a consumer whose limits were all taken away by basic.qos.
WINDOW_UNLIMITED = 2_000
#: Window of a consumer with credit: bounds what it may ask for.
WINDOW_CREDITED = 32_768
#: What one consumer gets in one go; then others have their turn.
TURN_BYTES = 1 << 20
#: What a node without a replica asks for at a time, and how long a member waits for it to come.
PULL_BYTES = 1 << 20
PULL_WAIT_MS = 5_000
#: Pause after a member could not be asked.
PULL_PAUSE_MS = 250

RESOLVING = 0
RUNNING = 1
ENDING = 2


class Reader:
    """One consumer."""

    __slots__ = (
        "acked", "chunks", "deadline_ms", "drains", "given", "limit", "low", "name", "number",
        "offset", "paused", "pulling", "state", "stored", "stored_ms", "unacked", "wants", "window",
    )  # fmt: skip

    def __init__(self, number: int, window: int, name: str) -> None:
        self.number = number
        self.window = window
        self.name = name
        self.state = RESOLVING
        #: Whether it wants a record; None: all.
        self.wants: Callable[[bytes], bool] | None = None
        self.deadline_ms = 0
        #: Next offset to hand over, and the place in the local log that goes with it.
        self.offset = 0
        self.chunks: ChunkReader | None = None
        self.unacked = 0
        #: Messages that it was given, and may be given in all; -1: its window alone says.
        self.given = 0
        self.limit = -1
        #: Calls of `grant` without an answer: whether each drains.
        self.drains: deque[bool] = deque()
        self.paused = False
        #: A turn is due, or a member was asked.
        self.pulling = False
        #: Everything below is acknowledged; `acked` has what is beyond, ascending and apart.
        self.low = 0
        self.acked: list[tuple[int, int]] = []
        self.stored = -1
        self.stored_ms = 0

    def acknowledge(self, first: int, last: int) -> None:
        """Offsets first … last are done with."""
        if not self.name:
            return
        acked = self.acked
        at = bisect_left(acked, (first, last))
        if at and acked[at - 1][1] + 1 >= first:
            at -= 1
            first = acked[at][0]
            last = max(last, acked[at][1])
        end = at
        while end < len(acked) and acked[end][0] <= last + 1:
            last = max(last, acked[end][1])
            end += 1
        acked[at:end] = [(first, last)]
        if acked[0][0] <= self.low:
            self.low = max(self.low, acked[0][1] + 1)
            del acked[0]


class StreamClient(SessionClient):
    """See `QueueClient`."""

    queue: StreamQueue

    def __init__(self, queue: StreamQueue, session: int, events: ClientEvents) -> None:
        super().__init__(queue, session, events)
        self._readers: dict[int, Reader] = {}

    @property
    def has_readers(self) -> bool:
        """Returns whether there is anything to serve or to store."""
        return bool(self._readers)

    @property
    def reader_count(self) -> int:
        """Consumers that were not cancelled."""
        return sum(reader.state != ENDING for reader in self._readers.values())

    # --- consumers -----------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> None:
        """Registers a consumer."""
        refusal = self._refuse(spec)
        if refusal is not None:
            self._soon(lambda: self._events.on_subscribed(self, spec.number, refusal))
            return
        name = str((spec.arguments or {}).get(NAME_ARGUMENT) or "")
        start = parse_start(spec.stream_offset, self.queue.clock.now_ms())
        assert isinstance(start, StartAt)
        reader = Reader(spec.number, WINDOW_CREDITED if spec.credited else spec.prefetch, name)
        reader.wants = spec.wants
        if spec.credited:
            reader.limit = 0
        queue = self.queue
        reader.deadline_ms = queue.clock.monotonic_ms() + queue.limits.operation_timeout_ms
        self._readers[spec.number] = reader
        self.queue.has_reader(self)
        if name:
            self._soon(lambda: self._ask_stored(reader, start))
        else:
            self._soon(lambda: self._resolve(reader, start))

    def _soon(self, answer: Callable[[], None]) -> None:
        """Answers a call that is still under way when it has returned."""
        self.queue.clock.call_later(0, lambda: None if self.closed else answer())

    def _refuse(self, spec: ConsumerSpec) -> BrokerError | None:
        subject = self.queue.subject
        if spec.prefetch <= 0 and not spec.credited:
            return consumer_without_prefetch(subject)
        if spec.no_ack:
            return no_ack_from_stream(subject)
        start = parse_start(spec.stream_offset, 0)
        if isinstance(start, str):
            return invalid_argument(OFFSET_ARGUMENT, subject, start)
        name = (spec.arguments or {}).get(NAME_ARGUMENT, "")
        if not isinstance(name, str) or len(name.encode()) > CONSUMER_NAME_BYTES_MAX:
            return invalid_argument(NAME_ARGUMENT, subject, "invalid_consumer_name")
        return None

    def _alive(self, reader: Reader) -> bool:
        return not self.closed and self._readers.get(reader.number) is reader

    def _stored(
        self, reader: Reader, start: StartAt, found: Fields | None, error: BrokerError | None
    ) -> None:
        if error is not None:
            self._again(reader, error, lambda: self._ask_stored(reader, start))
            return
        assert found is not None
        offset = found[0]
        if offset is not None:
            reader.stored = offset
            start = StartAt(Start.OFFSET, offset + 1)
        self._resolve(reader, start)

    def _ask_stored(self, reader: Reader, start: StartAt) -> None:
        self.queue.stored(
            reader.name, lambda found, error: self._stored(reader, start, found, error)
        )

    def _again(self, reader: Reader, error: BrokerError, ask: Callable[[], None]) -> None:
        """A question failed: it is repeated for as long as a consumer may wait."""
        if not self._alive(reader) or reader.state != RESOLVING:
            return
        if self.queue.clock.monotonic_ms() >= reader.deadline_ms:
            del self._readers[reader.number]
            self._events.on_subscribed(self, reader.number, error)
            return
        self.queue.clock.call_later(PULL_PAUSE_MS, lambda: ask() if self._alive(reader) else None)

    def _resolve(self, reader: Reader, start: StartAt) -> None:
        """Finds the offset to begin at."""
        if not self._alive(reader):
            return

        def at_extent(extent: Extent | None, error: BrokerError | None) -> None:
            if error is not None:
                self._again(reader, error, lambda: self._resolve(reader, start))
                return
            assert extent is not None
            offset = {
                Start.FIRST: extent.first,
                Start.LAST: max(extent.first, extent.last_chunk),
                Start.NEXT: extent.next,
                Start.TIMESTAMP: extent.next,
                Start.OFFSET: min(max(start.value, extent.first), extent.next),
            }[start.kind]
            self._begin(reader, offset)

        def at_time(found: Fields | None, error: BrokerError | None) -> None:
            if error is not None:
                self._again(reader, error, lambda: self._resolve(reader, start))
                return
            assert found is not None
            if found[0] is None:
                # Nothing is that young yet.
                self.queue.extent(at_extent)
            else:
                self._begin(reader, found[0])

        if start.kind is Start.TIMESTAMP:
            self.queue.offset_at(start.value, at_time)
        else:
            self.queue.extent(at_extent)

    def _begin(self, reader: Reader, offset: int) -> None:
        if not self._alive(reader) or reader.state != RESOLVING:
            return
        reader.state = RUNNING
        reader.offset = reader.low = offset
        reader.stored_ms = self.queue.clock.monotonic_ms()
        self._events.on_subscribed(self, reader.number, None)
        self._serve(reader)

    def cancel(self, consumer: int) -> None:
        """Ends a consumer."""
        reader = self._readers.get(consumer)
        if reader is not None:
            if reader.state == RESOLVING:
                # It was asked for first, so it is answered first.
                self._soon(lambda: self._events.on_subscribed(self, consumer, None))
                del self._readers[consumer]
            else:
                reader.state = ENDING
                self._let_go(reader)
                self._store(reader)
                if not (reader.name and reader.unacked):
                    del self._readers[consumer]
        self._soon(lambda: self._events.on_cancel_ok(self, consumer))

    def remove(self, consumer: int) -> None:
        """See `QueueClient`: a named consumer gets again what was not settled."""
        self.cancel(consumer)
        self._readers.pop(consumer, None)

    def _let_go(self, reader: Reader) -> None:
        if reader.chunks is not None:
            reader.chunks.park()
            reader.chunks = None

    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window."""
        reader = self._readers.get(consumer)
        if reader is not None:
            reader.window = credit if credit > 0 else WINDOW_UNLIMITED
            self._serve(reader)

    def grant(self, consumer: int, limit: int, *, drain: bool = False) -> None:
        """See `QueueClient`."""
        reader = self._readers.get(consumer)
        if reader is None or reader.state == ENDING:
            return
        reader.limit = limit
        reader.drains.append(drain)
        self._serve(reader)

    def _answer_grants(self, reader: Reader) -> None:
        """Answers calls of `grant`. A drain waits until there is no more, or no credit is left."""
        if self.closed or reader.state != RUNNING or reader.pulling:
            return
        machine = self.queue.machine_for(reader.offset)
        ready = 0 if machine is None else max(0, machine.next - reader.offset)
        while reader.drains:
            if reader.drains[0] and (ready or machine is None) and self._wants(reader) > 0:
                return
            if reader.drains.popleft():
                reader.limit = reader.given
            self._events.on_credit(self, reader.number, reader.given, ready)

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges: room in the window."""
        self._release(consumer, ranges, done=True)

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """A log takes nothing back: room in the window. What was not wanted is not done with: a
        named consumer stores no offset beyond it, and gets it again when it comes back."""
        self._release(consumer, ranges, done=False)

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """A log loses nothing: as `settle`."""
        self._release(consumer, ranges, done=True)

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """See `QueueClient`: acknowledgements only make room here."""
        call(True)

    def _release(self, consumer: int, ranges: Sequence[int], *, done: bool) -> None:
        reader = self._readers.get(consumer)
        if reader is None:
            return
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            reader.unacked -= last - first + 1
            if done:
                reader.acknowledge(first, last)
        reader.unacked = max(0, reader.unacked)
        if reader.state == ENDING:
            if not reader.unacked:
                self._store(reader)
                del self._readers[consumer]
            return
        if reader.name and reader.low - 1 - reader.stored >= STORE_MESSAGES:
            self._store(reader)
        self._serve(reader)

    def get(self, *, no_ack: bool) -> None:
        """Refused."""
        error = get_from_stream(self.queue.subject)
        self._soon(lambda: self._events.on_get(self, GetResult(error=error)))

    def purge(self) -> None:
        """Refused."""
        error = purge_of_stream(self.queue.subject)
        self._soon(lambda: self._events.on_purged(self, 0, error))

    def pause(self, consumer: int) -> None:
        """Nothing more until `resume`."""
        reader = self._readers.get(consumer)
        if reader is not None:
            reader.paused = True

    def resume(self, consumer: int) -> None:
        """Goes on where it was."""
        reader = self._readers.get(consumer)
        if reader is not None and reader.paused:
            reader.paused = False
            self._serve(reader)

    # --- handing over --------------------------------------------------------------------

    def on_moved(self, end: int) -> None:
        """The local replica has the offsets below `end`."""
        for reader in list(self._readers.values()):
            if reader.offset < end and not reader.pulling:
                self._serve(reader)

    def _wants(self, reader: Reader) -> int:
        """Returns how many messages a consumer may get now."""
        if self.closed or reader.state != RUNNING or reader.paused:
            return 0
        room = reader.window - reader.unacked
        return room if reader.limit < 0 else min(room, reader.limit - reader.given)

    def _serve(self, reader: Reader) -> None:
        """Hands over what the window and credit allow, a turn at a time, and answers grants."""
        if not reader.pulling and self._wants(reader) > 0:
            self._serve_turn(reader)
        if reader.drains:
            self._answer_grants(reader)

    def _serve_turn(self, reader: Reader) -> None:
        machine = self.queue.machine_for(reader.offset)
        if machine is None:
            reader.chunks = None
            self._pull(reader)
            return
        chunks = reader.chunks
        if chunks is None or chunks.machine is not machine or chunks.offset != reader.offset:
            chunks = reader.chunks = self.queue.reader(machine, reader.offset)
        # What the channel does with a delivery must not begin another turn inside of this one.
        reader.pulling = True
        turn = TURN_BYTES
        try:
            while turn > 0 and reader.offset < machine.next:
                room = self._wants(reader)
                if room <= 0:
                    break
                if reader.offset < machine.first:
                    self._skip(reader, machine.first)
                    chunks = reader.chunks = self.queue.reader(machine, reader.offset)
                run = chunks.next(room, turn)
                if run is None:
                    break
                turn -= chunks.last_bytes
                self._hand_over(reader, run.offset, run.block, run.command, run.first, run.messages)
        except (StorageFault, EntryGone):
            # The replica takes itself out and gets its log from the others.
            reader.chunks = None
        finally:
            reader.pulling = False
        if turn <= 0:
            self._later(reader, 0)
        elif reader.chunks is not None:
            self.queue.keep(reader.chunks)

    def _hand_over(
        self, reader: Reader, offset: int, block: bytes, command: int, first: int, count: int
    ) -> None:
        reader.offset = offset + count
        done = offset
        for low, high in _wanted(reader.wants, block, command, first, count):
            if reader.state != RUNNING:
                return
            at = offset + low
            # What it does not want is done with.
            self._pass_over(reader, done, at)
            done = offset + high
            reader.unacked += high - low
            reader.given += high - low
            self.queue.delivered_local += high - low
            self._events.on_deliver(
                self, Delivery(reader.number, at, block, command, first + low, high - low, 0, 0)
            )
        self._pass_over(reader, done, offset + count)

    @staticmethod
    def _pass_over(reader: Reader, first: int, end: int) -> None:
        if first < end:
            reader.acknowledge(first, end - 1)

    def _skip(self, reader: Reader, offset: int) -> None:
        """Retention was faster than the consumer."""
        if offset > reader.offset:
            reader.acknowledge(reader.offset, offset - 1)
            reader.offset = offset

    def _later(self, reader: Reader, delay_ms: int) -> None:
        reader.pulling = True
        self.queue.clock.call_later(delay_ms, self._turn, reader)

    def _turn(self, reader: Reader) -> None:
        reader.pulling = False
        if self._alive(reader):
            self._serve(reader)

    def _pull(self, reader: Reader) -> None:
        """Gets more from a member; one question at a time."""
        reader.pulling = True
        self.queue.pull(
            reader.offset,
            None,
            self._wants(reader),
            PULL_BYTES,
            0 if True in reader.drains else PULL_WAIT_MS,
            lambda chunks, error: self._pulled(reader, chunks, error),
        )

    def _pulled(self, reader: Reader, chunks: Chunks | None, error: BrokerError | None) -> None:
        reader.pulling = False
        if not self._alive(reader):
            return
        if isinstance(error, OffsetOutOfRange) and error.first > reader.offset:
            self._skip(reader, error.first)
        elif error is not None:
            self._later(reader, PULL_PAUSE_MS)
            return
        else:
            assert chunks is not None
            for run in chunks.runs:
                if reader.state != RUNNING or run.offset != reader.offset:
                    break
                # What was asked for comes, even if the channel has become slow meanwhile.
                self._hand_over(reader, run.offset, run.block, run.command, run.first, run.messages)
            if True in reader.drains and not chunks.runs:
                self._drained(reader)
        self._serve(reader)

    def _drained(self, reader: Reader) -> None:
        """A member had nothing more."""
        while reader.drains:
            if reader.drains.popleft():
                reader.limit = reader.given
            self._events.on_credit(self, reader.number, reader.given, 0)

    # --- offsets -------------------------------------------------------------------------

    def store(
        self, name: str, offset: int, done: Callable[[None, BrokerError | None], None]
    ) -> None:
        """Stores an offset for a consumer's name; `done` hears when it is safe."""
        encoded = name.encode()
        body = offset.to_bytes(8, "little") + encoded
        self._command(
            batch.CMD_STORE_OFFSET, len(encoded), 0, body, lambda _, error: done(None, error)
        )

    def _store(self, reader: Reader) -> None:
        """Stores how far a named consumer is, if it moved."""
        offset = reader.low - 1
        reader.stored_ms = self.queue.clock.monotonic_ms()
        if not reader.name or reader.state == RESOLVING or offset <= reader.stored or offset < 0:
            return
        reader.stored = offset
        name = reader.name.encode()
        self._command(batch.CMD_STORE_OFFSET, len(name), 0, offset.to_bytes(8, "little") + name)

    def tick_readers(self) -> None:
        """Every TICK_MS: stores what moved, and serves whoever was overlooked."""
        now = self.queue.clock.monotonic_ms()
        for reader in list(self._readers.values()):
            if reader.name and now - reader.stored_ms >= STORE_MS:
                self._store(reader)
            if not reader.pulling:
                self._serve(reader)

    # --- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """The channel is gone; the client stays until the queue has heard it."""
        if not self.closed:
            for reader in self._readers.values():
                self._let_go(reader)
                self._store(reader)
            self._readers.clear()
        super().close()

    def _events_end(self, error: BrokerError, *, published_ok: bool, renew: bool = False) -> None:
        super()._events_end(error, published_ok=published_ok, renew=renew)
        if renew:
            # Consumers have nothing to do with the session.
            return
        readers, self._readers = self._readers, {}
        if self.closed:
            return
        for reader in readers.values():
            if reader.state == RESOLVING:
                self._events.on_subscribed(self, reader.number, error)
            elif reader.state == RUNNING:
                self._events.on_cancelled(self, reader.number, "deleted")


def _wanted(
    wants: Callable[[bytes], bool] | None, block: bytes, command: int, first: int, count: int
) -> Iterator[tuple[int, int]]:
    """Yields the parts (from, to) of `count` records that a consumer wants."""
    if wants is None:
        yield 0, count
        return
    start = 0
    for at in range(count):
        if not wants(batch.record(block, command, first + at)):
            if start < at:
                yield start, at
            start = at + 1
    if start < count:
        yield start, count
