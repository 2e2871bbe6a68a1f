# cython: annotation_typing=False
"""A node's handle of a stream: publishers' answers, readers of this node, and reads for other
nodes.

Reads never enter the log. A node with a replica reads its own applied prefix. A node without one
asks a member, and one whose replica is behind asks the leader; the answer has the chunks in the
same form, so readers see one source. What only the leader knows for sure (where the stream ends
now, what a consumer stored) is asked of the leader.

Requests between nodes (CONTROL frames of kind KIND_STREAM), each a list:

| request                                               | answer                                 |
|-------------------------------------------------------|----------------------------------------|
| read · group, offset, end, max rows, max bytes, wait  | runs · first, high, runs               |
| extent · group                                        | extent · first, next, bytes, last chunk|
| time · group, ms                                      | time · offset, ms (both nil: none yet) |
| stored · group, name                                  | stored · offset or nil                 |
| any of them                                           | range · first, high, offset            |
| any of them                                           | behind · high                          |
| any of them                                           | away · text                            |

A run is (ENQUEUE command with just these records, messages, stream offset, time in ms).

Requests and their answers are callbacks, so that the simulator runs this code too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from convoymq.kernels import batch
from convoymq.kernels.entries import Entry
from convoymq.model.clock import Timer
from convoymq.model.errors import (
    BrokerError,
    OffsetOutOfRange,
    PeerError,
    ReplicaBehind,
    StorageFault,
    Unavailable,
)
from convoymq.queues.copying import PAGE_BYTES, CopiedPage, page_of
from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.interface import ClientEvents, QueueFeatures, Row, StoredRun
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.null_events import NullEvents
from convoymq.queues.reservation_reads import Fields
from convoymq.queues.stream.client import StreamClient
from convoymq.queues.stream.machine import DEFAULTS, StreamMachine
from convoymq.replication.machine import Effect
from convoymq.routing.queue_arguments import FILTER_ARGUMENTS
from convoymq.settings.table import STREAM, machine_settings
from convoymq.storage.types import EntryGone
from convoymq.streamlog.read_descriptor import ReadDescriptor, describe_read
from convoymq.streamlog.reader import ChunkReader, Run, offset_at

if TYPE_CHECKING:
    from convoymq.queues.driver import GroupOptions
    from convoymq.shells.groups.replica import Replica

Found = TypeVar("Found")
Answer = Callable[["Found | None", "BrokerError | None"], None]
"""Gets what was asked for, or why it does not come; called once."""
AskNode = Callable[[int, list[object], int, "Answer[object]"], None]
"""(node, request, how long to wait in ms, answer): asks a node; see the table above."""

#: Bounds of one read, whatever the reader asks for; the rest comes with the next.
READ_ROWS_MAX = 1_000_000
READ_BYTES_MAX = 64 << 20
READ_RUNS_MAX = 16_384
#: What a node asks another for at a time: other traffic shares the link.
REMOTE_BYTES_MAX = 4 << 20
#: After so many body bytes a long read lets others run.
YIELD_BYTES = 1 << 20
#: How long a read waits at least for what a replica does not have yet and others may.
BEHIND_WAIT_MS = 5_000
ASK_TIMEOUT_MS = 5_000
#: Consumers' places that keep what was read along with them (SPAN_BYTES, or one large entry).
KEPT_MAX = 32
ANSWER_KINDS = frozenset(("runs", "extent", "time", "stored"))
"""Answers that say what was asked for."""
#: Places in the log that are remembered for who reads on where the last read ended.
PLACES_MAX = 16


class Chunks(NamedTuple):
    """Result of a read. `first` and `high`: the kept range as known to who answered."""

    first: int
    high: int
    runs: list[Run]

    @property
    def next(self) -> int | None:
        """Returns the offset to read on from; None when nothing was read."""
        return self.runs[-1].offset + self.runs[-1].messages if self.runs else None

    def __repr__(self) -> str:
        """In short: event loops print what tasks return."""
        return f"Chunks(first={self.first}, high={self.high}, next={self.next})"


class Extent(NamedTuple):
    """The kept range of a stream."""

    first: int
    next: int
    bytes: int
    last_chunk: int


class _Waiter:
    """Somebody who waits for an offset to be there."""

    __slots__ = ("done", "offset", "timer")

    def __init__(self, offset: int, done: Callable[[], None]) -> None:
        self.offset = offset
        self.done = done
        self.timer: Timer | None = None

    def end(self) -> None:
        """Stops the timer."""
        if self.timer is not None:
            self.timer.cancel()


class StreamQueue(GroupQueue):
    """A stream on this node; see the module text and `GroupQueue`.

    Args:
        ask_node: sends a request to another node.
        answers: when other nodes get what they read here.
    """

    type = "stream"
    answer_kinds = ANSWER_KINDS
    features = QueueFeatures(
        drops_repeats=True,
        reads_by_offset=True,
        filters=True,
        consumer_arguments=frozenset(("x-stream-offset", "x-stream-consumer-name")),
        unserved_consumer_arguments=frozenset(FILTER_ARGUMENTS),
    )

    def __init__(
        self, *, ask_node: AskNode, answers: LargeAnswers, **common: Unpack[GroupOptions]
    ) -> None:
        super().__init__(**common)
        self._ask_node = ask_node
        self._answers = answers
        self._waiters: list[_Waiter] = []
        #: Clients that have, or had a moment ago, consumers; in the order in which they came.
        self._reading: dict[StreamClient, None] = {}
        #: Offset → the reader that ended there.
        self._places: dict[int, ChunkReader] = {}
        #: Places that hold entries, the one that was used last at the end.
        self._kept: dict[ChunkReader, None] = {}
        #: The member that answers this node's reads, as far as it does.
        self._preferred: int | None = None
        #: This node's own session, for offsets that edges store.
        self._offset_session: StreamClient | None = None

    # --- clients -------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> StreamClient:
        made = super().client(session, events)
        assert isinstance(made, StreamClient)
        return made

    def _new_client(self, session: int, events: ClientEvents) -> StreamClient:
        return StreamClient(self, session, events)

    @property
    def reader_count(self) -> int:
        """Consumers of this node's channels."""
        return sum(client.reader_count for client in self._reading)

    def has_reader(self, client: StreamClient) -> None:
        """The client has a consumer from now on."""
        self._reading[client] = None

    # --- the local replica ---------------------------------------------------------------

    def machine(self) -> StreamMachine | None:
        """Returns the machine of this node's replica, if it has one to read from: not one that is
        behind, where readers would wait for as long as it takes to catch up."""
        replica = self._host.replica(self.group)
        if replica is None or replica.is_behind:
            return None
        found: StreamMachine = replica.machine
        return found

    def machine_for(self, offset: int) -> StreamMachine | None:
        """Returns the machine of this node's replica, if it is to be read from, or has the offset:
        what is here need not cross the link that the replica itself waits for."""
        replica = self._host.replica(self.group)
        if replica is None:
            return None
        found: StreamMachine = replica.machine
        if replica.is_behind and (replica.faulty or not found.first <= offset < found.next):
            return None
        return found

    def _own_machine(self) -> StreamMachine | None:
        """Returns the machine of this node's replica, however far it is."""
        replica = self._host.replica(self.group)
        if replica is None:
            return None
        found: StreamMachine = replica.machine
        return found

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """See `GroupQueue`; who waits for a replica that is behind from now on asks elsewhere.
        Consumers do so with the next `tick`."""
        super().on_leader(group, leader, term)
        if self._waiters and self.machine() is None:
            self._end_waits()

    def on_replica_gone(self) -> None:
        """See `EffectSink`."""
        super().on_replica_gone()
        self._end_waits()

    def _span(self, index: int, max_bytes: int) -> list[Entry]:
        return self._host.read_span(self.group, index, max_bytes)

    def reader(self, machine: StreamMachine, offset: int) -> ChunkReader:
        """Returns a place in the local log."""
        return ChunkReader(machine, self._span, offset)

    def keep(self, reader: ChunkReader) -> None:
        """A consumer's place stays open for its next turn, as long as not too many do."""
        self._kept.pop(reader, None)
        self._kept[reader] = None
        if len(self._kept) > KEPT_MAX:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            oldest.park()

    def on_effects(self, effects: Sequence[Effect], replica: Replica) -> None:
        """Answers publishers, then serves who reads."""
        super().on_effects(effects, replica)
        self._moved(replica.machine)

    def on_restored(self) -> None:
        """The replica took its state from a snapshot."""
        machine = self.machine()
        if machine is not None:
            self._moved(machine)

    def _moved(self, machine: StreamMachine) -> None:
        end = machine.next
        for client in list(self._reading):
            client.on_moved(end)
        if self._waiters:
            due = [waiter for waiter in self._waiters if waiter.offset < end]
            if due:
                self._waiters = [waiter for waiter in self._waiters if waiter.offset >= end]
                for waiter in due:
                    waiter.end()
                    waiter.done()

    def when_there(self, offset: int, wait_ms: int, done: Callable[[], None]) -> None:
        """Calls back once the local replica has applied a message at the offset, or in time."""
        machine = self.machine()
        if wait_ms <= 0 or machine is None or offset < machine.next:
            done()
            return
        waiter = _Waiter(offset, done)
        waiter.timer = self.clock.call_later(wait_ms, self._waited, waiter)
        self._waiters.append(waiter)

    def _end_waits(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.end()
            waiter.done()

    def _waited(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.done()

    # --- reading here --------------------------------------------------------------------

    def _begin(self, machine: StreamMachine, offset: int, end: int | None) -> ChunkReader:
        """Returns a place to read from now. Raises OffsetOutOfRange, ReplicaBehind."""
        high = machine.next
        if offset < machine.first:
            raise OffsetOutOfRange(machine.first, high, offset)
        if offset > high or (end is not None and end > high):
            raise ReplicaBehind(high)
        reader = self._place(offset)
        if reader is None or reader.machine is not machine or reader.offset != offset:
            reader = self.reader(machine, offset)
        reader.mark()
        return reader

    def _place(self, offset: int) -> ChunkReader | None:
        """Returns a place that is remembered for the offset: where a read ended, or went by, if its
        reader had no room for all of it."""
        found = self._places.pop(offset, None)
        if found is not None:
            return found
        for end, reader in self._places.items():
            if reader.go_back(offset):
                del self._places[end]
                return reader
        return None

    def _collect(
        self, reader: ChunkReader, end: int, rows: int, size: int, runs: list[Run]
    ) -> tuple[int, int]:
        """Reads about YIELD_BYTES more; returns the rows and bytes that are left, (0, 0) when
        all was read. Raises StorageFault as Unavailable."""
        read = 0
        try:
            while rows > 0 and size > 0 and reader.offset < end and read < YIELD_BYTES:
                if len(runs) >= READ_RUNS_MAX:
                    return (0, 0)
                run = reader.next(min(rows, end - reader.offset), size)
                if run is None:
                    return (0, 0)
                runs.append(run)
                rows -= run.messages
                size -= reader.last_bytes
                # Bodies may be empty; the rest of a message costs time too.
                read += reader.last_bytes + 64 * run.messages
        except (StorageFault, EntryGone) as error:
            raise Unavailable(f"stream '{self.name}' cannot be read here: {error}") from error
        return (rows, size) if read >= YIELD_BYTES else (0, 0)

    def _keep_place(self, reader: ChunkReader) -> None:
        reader.release()
        self._places[reader.offset] = reader
        if len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]

    def read_now(
        self, offset: int, end: int | None, max_rows: int, max_bytes: int
    ) -> tuple[Chunks, ChunkReader]:
        """Reads from the local replica what is there, in one go.

        Raises:
            OffsetOutOfRange, ReplicaBehind, Unavailable
        """
        machine = self.machine()
        if machine is None:
            raise Unavailable(f"stream '{self.name}' has no replica here")
        reader = self._begin(machine, offset, end)
        left = (min(max_rows, READ_ROWS_MAX), min(max_bytes, READ_BYTES_MAX))
        runs: list[Run] = []
        stop = machine.next if end is None else end
        while left[0] > 0 and left[1] > 0:
            left = self._collect(reader, stop, left[0], left[1], runs)
        return Chunks(machine.first, machine.next, runs), reader

    # --- for other nodes -----------------------------------------------------------------

    def serve(
        self,
        request: Fields,
        answer: Callable[[list[object]], None],
        node: int | None = None,
    ) -> None:
        """Answers another node's request (module text); bad ones with `away`. What it reads is read
        when the link to `node` has room for it, and not at all when that comes too late."""

        def now() -> None:
            try:
                answer(self._serve(request))
            except OffsetOutOfRange as error:
                answer(["range", error.first, error.high, error.offset])
            except ReplicaBehind as error:
                answer(["behind", error.high])
            except BrokerError as error:
                answer(["away", error.text])
            except (TypeError, ValueError, IndexError) as error:
                answer(["away", f"malformed request: {error}"])

        machine = self.machine()
        if machine is None:
            now()
            return
        wait_ms = 0
        wanted = -1
        there = now
        try:
            if request[0] == "read":
                _, _, offset, end, _, _, wait_ms = request
                wanted = max(offset, (end or 0) - 1)
                # As long as `pull` waits for the answer.
                timeout_ms = max(wait_ms, BEHIND_WAIT_MS) + ASK_TIMEOUT_MS
                if end is not None or offset != machine.next:
                    wait_ms = max(wait_ms, BEHIND_WAIT_MS)
                if node is not None:
                    until_ms = self.clock.monotonic_ms() + timeout_ms
                    there = partial(self._answers.when_room, node, now, until_ms)
        except (TypeError, ValueError, IndexError) as error:
            answer(["away", f"malformed request: {error}"])
            return
        self.when_there(wanted, wait_ms, there)

    def _serve(self, request: Fields) -> list[object]:
        kind = request[0]
        if kind == "read":
            _, _, offset, end, rows, size, _ = request
            found, reader = self.read_now(offset, end, rows, min(size, REMOTE_BYTES_MAX))
            self._keep_place(reader)
            runs = [
                [
                    batch.slice_records(run.block, run.command, run.first, run.messages),
                    run.messages,
                    run.offset,
                    run.time_ms,
                ]
                for run in found.runs
            ]
            return ["runs", found.first, found.high, runs]
        machine = self.machine()
        if machine is None:
            raise Unavailable(f"stream '{self.name}' has no replica here")
        if kind == "extent":
            return ["extent", *_extent(machine)]
        if kind == "time":
            found_at = self._offset_at(machine, request[2])
            return ["time", *(found_at or (None, None))]
        if kind == "stored":
            return ["stored", machine.stored_offset(str(request[2]))]
        raise ValueError(f"unknown request {kind!r}")

    def _offset_at(self, machine: StreamMachine, time_ms: int) -> tuple[int, int] | None:
        try:
            return offset_at(machine, self._span, time_ms)
        except (StorageFault, EntryGone) as error:
            raise Unavailable(f"stream '{self.name}' cannot be read here: {error}") from error

    # --- asking --------------------------------------------------------------------------

    def _ask_member(
        self,
        request: list[object],
        answer: Answer[Fields],
        *,
        leader: bool = False,
        wait_ms: int = 0,
    ) -> None:
        """Asks the leader, or a member near by; `answer` gets the decoded answer's fields.

        Errors: OffsetOutOfRange, ReplicaBehind, Unavailable.
        """
        node = self.known_leader if leader else self._member()
        if node is None:
            what = "leader" if leader else "replica that can be reached"
            answer(None, Unavailable(f"stream '{self.name}' has no {what}"))
            return

        def answered(reply: object, error: BrokerError | None) -> None:
            if error is None:
                try:
                    answer(_decoded(reply, self.answer_kinds), None)
                    return
                except BrokerError as refusal:
                    error = refusal
            if self._preferred == node:
                # Another one may be better off.
                self._preferred = None
            answer(None, error)

        if node == self.node:
            self.serve(request, lambda reply: answered(reply, None))
        else:
            self._ask_node(node, request, wait_ms + ASK_TIMEOUT_MS, answered)

    def _member(self) -> int | None:
        """Returns a member to read from: this node, the leader while this node's replica is behind,
        else one that stays the same while it answers."""
        if self.machine() is not None:
            return self.node
        if self._own_machine() is not None:
            leader = self.known_leader
            if leader is not None and self._transport.is_connected(leader):
                return leader
        preferred = self._preferred
        if (
            preferred is not None
            and preferred in self.members
            and self._transport.is_connected(preferred)
        ):
            return preferred
        up = [n for n in self.members if n != self.node and self._transport.is_connected(n)]
        if not up:
            return None
        # Spread over the members; the next try goes to another one.
        choice = up[int(self.clock.random() * len(up)) % len(up)]
        self._preferred = choice
        return choice

    def pull(
        self,
        offset: int,
        end: int | None,
        max_rows: int,
        max_bytes: int,
        wait_ms: int,
        done: Answer[Chunks],
    ) -> None:
        """Reads from another node's replica; `done` gets `Chunks`."""

        def answered(fields: Fields | None, error: BrokerError | None) -> None:
            if error is not None:
                done(None, error)
                return
            assert fields is not None
            first, high, packed = fields
            runs = [
                Run(block, 0, 0, messages, start, time_ms)
                for block, messages, start, time_ms in packed
            ]
            done(Chunks(first, high, runs), None)

        request: list[object] = ["read", self.group, offset, end, max_rows, max_bytes, wait_ms]
        self._ask_member(request, answered, wait_ms=max(wait_ms, BEHIND_WAIT_MS))

    def extent(self, done: Answer[Extent]) -> None:
        """`done` gets the `Extent` as the leader knows it, or else a member near by."""
        request: list[object] = ["extent", self.group]
        self._ask_best(
            request,
            lambda fields, error: done(None if fields is None else Extent(*fields), error),
        )

    def offset_at(self, time_ms: int, done: Answer[Fields]) -> None:
        """`done` gets (offset, time) of the first message at or after a time, or (None, None)."""
        self._ask_best(["time", self.group, time_ms], done)

    def stored(self, name: str, done: Answer[Fields]) -> None:
        """`done` gets [offset or None]: what a consumer stored."""
        # A member that is behind may not have the offset: the consumer would begin anew.
        self._ask_member(["stored", self.group, name], done, leader=True)

    def _ask_best(self, request: list[object], done: Answer[Fields]) -> None:
        """Asks the leader; when it cannot be asked, a member that may be behind."""

        def answered(fields: Fields | None, error: BrokerError | None) -> None:
            if error is not None and self.known_leader != self.node:
                self._ask_member(request, done)
            else:
                done(fields, error)

        self._ask_member(request, answered, leader=True)

    # --- for protocol edges ---------------------------------------------------------------

    def bounds(self) -> tuple[int, int]:
        """Returns (first kept offset, next offset) of the local replica; (0, 0) without one."""
        machine = self.machine()
        return (0, 0) if machine is None else (machine.first, machine.next)

    async def where(self) -> Extent:
        """Returns the kept range, on any node. Raises Unavailable."""
        found: Extent = await awaited(self.extent)
        return found

    def read_descriptor(self, offset: int, end: int | None) -> ReadDescriptor | None:
        """Returns the messages from `offset` on, for a reader on this machine that goes to their
        file; None when they are not in one, or too few."""
        machine = self.machine()
        if machine is None or not machine.first <= offset < machine.next:
            return None
        chunks = machine.chunks
        found = self._host.segment_at(self.group, chunks.indexes[chunks.find(offset)])
        if found is None:
            return None
        segment, place = found
        return describe_read(segment, place, self.group, chunks, offset, end)

    async def fetch_chunks(
        self, offset: int, end: int | None, max_rows: int, max_bytes: int, wait_ms: int
    ) -> Chunks:
        """Reads from `offset` on, to below `end` or to the committed end.

        At the end it waits up to `wait_ms` for more and then returns no runs. At least one message
        comes, however large. Works on any node.

        Raises:
            OffsetOutOfRange: dropped by retention.
            ReplicaBehind: the replica that was asked does not have it after some seconds.
            Unavailable: nobody can be asked, or its disk is damaged.
        """
        if end is not None and end <= offset:
            first, high = self.bounds()
            return Chunks(first, high, [])
        wanted = max(offset, (end or 0) - 1)
        machine = self.machine_for(wanted)
        pull_wait_ms = wait_ms
        if machine is not None and wanted >= machine.next:
            tail = end is None and offset == machine.next
            wait = wait_ms if tail else max(wait_ms, BEHIND_WAIT_MS)
            await awaited(lambda done: self.when_there(wanted, wait, lambda: done(None, None)))
            # The replica may be behind by now: the leader is asked, who does not wait again.
            machine = self.machine_for(wanted)
            pull_wait_ms = 0
        if machine is None:
            size = min(max_bytes, REMOTE_BYTES_MAX)
            pulled: Chunks = await awaited(
                lambda done: self.pull(offset, end, max_rows, size, pull_wait_ms, done)
            )
            return pulled
        reader = self._begin(machine, offset, end)
        stop = machine.next if end is None else end
        left = (min(max_rows, READ_ROWS_MAX), min(max_bytes, READ_BYTES_MAX))
        runs: list[Run] = []
        while left[0] > 0 and left[1] > 0:
            left = self._collect(reader, stop, left[0], left[1], runs)
            if left[0]:
                await asyncio.sleep(0)
        self._keep_place(reader)
        return Chunks(machine.first, machine.next, runs)

    async def copy_page(self, after: int, upto: int) -> CopiedPage:
        """See `Queue`. Messages that retention dropped meanwhile are left out."""
        replica = self._host.replica(self.group)
        if replica is None or replica.established_leader != self.node:
            raise Unavailable(f"{self.subject} is led elsewhere")
        machine: StreamMachine = replica.machine
        if upto >= machine.next:
            raise Unavailable("the replica is behind")
        if upto < 0:
            upto = machine.next - 1
        first = max(after + 1, machine.first)
        chunks = await self.fetch_chunks(first, upto + 1, READ_ROWS_MAX, PAGE_BYTES, 0)
        runs = (StoredRun(*run[:4], 0, run.offset, spreads=True) for run in chunks.runs)
        found = page_of(runs, after, upto)._replace(first=machine.first)
        if found.is_last and chunks.next is not None and chunks.next <= upto:
            return found._replace(after=chunks.next - 1, is_last=False)
        return found

    async def offsets(self, what: str, time_ms: int | None) -> tuple[int | None, int | None]:
        """Returns (offset, time in ms) of a place; either is None where it does not exist.

        Args:
            what: `earliest` (the first kept message), `latest` (the next offset, from the leader:
                it never goes back while one leads), or `timestamp` (the first message at or after
                `time_ms`).
        Raises:
            Unavailable
        """
        if what == "latest":
            request: list[object] = ["extent", self.group]
            fields: Fields = await awaited(
                lambda done: self._ask_member(request, done, leader=True)
            )
            return (Extent(*fields).next, None)
        if what == "earliest":
            near: Extent = await awaited(self.extent)
            if near.first == near.next:
                return (near.first, None)
            time_ms = 0
        sought = time_ms or 0
        place: Fields = await awaited(lambda done: self.offset_at(sought, done))
        offset, ms = place
        return (offset, ms)

    async def store_offset(self, name: str, offset: int) -> None:
        """Stores a consumer's offset, replicated. Raises Unavailable, NotFound (deleted)."""
        client = self._offset_session
        if client is None or client.session not in self._clients:
            client = self._offset_session = self.client(self.new_session(), NullEvents())
        store = client.store
        try:
            async with asyncio.timeout(self.limits.operation_timeout_ms / 1000):
                await awaited(lambda done: store(name, offset, done))
        except TimeoutError:
            raise Unavailable(f"stream '{self.name}' did not answer in time") from None

    async def query_offset(self, name: str) -> int | None:
        """Returns the offset that a consumer stored; None = nothing. Raises Unavailable."""
        found: Fields = await awaited(lambda done: self.stored(name, done))
        offset: int | None = found[0]
        return offset

    # --- time, looking at it -------------------------------------------------------------

    def tick(self) -> None:
        """Every TICK_MS: also consumers' offsets, and places nobody came back to."""
        super().tick()
        self._places.clear()
        for client in list(self._reading):
            if client.has_readers:
                client.tick_readers()
            else:
                del self._reading[client]

    def on_deleted(self) -> None:
        """The metadata say that the stream is gone."""
        self._end_waits()
        self._places.clear()
        super().on_deleted()

    def local_counts(self) -> tuple[int, int]:
        """Returns (messages, consumers of this node)."""
        machine = self._own_machine()
        return (0 if machine is None else machine.messages, self.reader_count)

    def _machine_settings(self, settings: Mapping[str, object]) -> dict[str, int]:
        return {**DEFAULTS, **machine_settings(STREAM, settings)}

    def figures(self) -> tuple[int, ...] | None:
        """See `Queue`."""
        found = super().figures()
        return found and (*found[:4], self.reader_count, *found[5:])

    def info(self) -> Row:
        """Returns the fields that the management API shows, from local knowledge."""
        made = super().info()
        machine = self._own_machine()
        if machine is not None:
            made["messages_ready"] = made["messages"] = machine.messages
            made["messages_unacknowledged"] = 0
            made["message_bytes_ready"] = made["message_bytes"] = machine.bytes
            made["message_bytes_unacknowledged"] = 0
            made["consumers"] = self.reader_count
            made["memory"] = made["index_bytes"] = machine.memory_bytes()
            made["first_offset"] = machine.first
            made["next_offset"] = machine.next
            made["committed_offset"] = machine.next - 1
            made["segments"] = len(machine.segments) + (machine.messages > 0)
            made["totals"] = machine.totals()
        return made


def _extent(machine: StreamMachine) -> Extent:
    return Extent(machine.first, machine.next, machine.bytes, machine.last_chunk)


def _decoded(reply: object, kinds: Collection[str] = ANSWER_KINDS) -> Fields:
    """Returns the fields of an answer. Raises what it says."""
    match reply:
        case [str(kind), *fields] if kind in kinds:
            return fields
        case ["range", int(first), int(high), int(offset)]:
            raise OffsetOutOfRange(first, high, offset)
        case ["behind", int(high)]:
            raise ReplicaBehind(high)
        case ["away", text]:
            raise Unavailable(str(text))
        case _:
            raise PeerError("malformed answer about a stream")


async def awaited(ask: Callable[[Answer[Found]], None]) -> Found:
    """Awaits what a callback gets. Raises its error."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(result: Found | None, error: BrokerError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    ask(done)
    found: Found = await future
    return found
