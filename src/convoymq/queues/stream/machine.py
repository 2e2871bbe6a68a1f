# cython: annotation_typing=False
"""The stream: a replicated append-only log of messages with absolute offsets.

Every accepted record of an ENQUEUE gets the next offset, in the order of the log; offset 0 is the
first message ever, and none is used twice. Readers are no part of the state: they take nothing
away (ADR 0007).

Segments: | open   | gets what is published; closes when it is full and the next chunk comes      |
          | closed | goes, oldest first, when retention says so, with all its messages            |
Retention is looked at when a segment closes and at TICK: closed segments go while the stream holds
more than `max_bytes`, or when their newest message is older than `max_age_ms`. The open segment
stays, so a stream that ever had a message keeps its newest ones. Time is the entries' time: every
replica drops the same.

Commands of readers (STORE_OFFSET) and of producers (PRODUCER, `sessions`) are sessions' commands;
what has no meaning for a log (SETTLE and its kin) is applied without effect, what would need an
answer from it (CHECKOUT, GET, PURGE) is refused.

Invariants: offsets of the index ranges ascend from `first` to below `next`; `bytes` is the sum over
segments and over index ranges; every segment begins with an index range; the open segment is empty
only when the stream is.

Versions (ADR 0016). An ENQUEUE's flags for priority and expiration (2, 4) mean nothing, for ever.
    1: everything here but CONFIG.
    2: CONFIG, by which the leader changes the settings while the stream is in use. Retention is
       looked at when it is applied.

Effects may be carried out twice: APPLIED and GAP by the rule of sessions, TIMER asks for a TICK,
which decides by the state.

Source: ADR 0007; RabbitMQ's streams for the meaning of the retention arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from convoymq.kernels import batch
from convoymq.kernels.command_walk import CommandWalk
from convoymq.model import trace as words
from convoymq.model.errors import UnknownCommand
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.sessions import (
    APPLIED_OK,
    APPLIED_REJECTED,
    Packed,
    Session,
    check_openings,
    check_written,
    decode_map,
)
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_TIMER, NEVER
from convoymq.streamlog.chunks import ChunkIndex

ENQUEUE = batch.CMD_ENQUEUE

SEGMENT_BYTES_DEFAULT = 500_000_000
NO_LIMIT = -1
DEFAULTS = {
    "max_age_ms": NO_LIMIT,
    "max_bytes": NO_LIMIT,
    "segment_bytes": SEGMENT_BYTES_DEFAULT,
}
"""Settings of a stream that says none."""
#: Consumers whose offsets are kept; the ones that stored longest ago go first.
STORED_MAX = 65_536
CONSUMER_NAME_BYTES_MAX = 255

#: Commands of channels that mean something to queues and nothing to a log.
WITHOUT_EFFECT = frozenset(
    (batch.CMD_SETTLE, batch.CMD_RETURN, batch.CMD_DISCARD, batch.CMD_CREDIT, batch.CMD_CANCEL)
)

#: Commands that would need an answer which a log does not have.
REFUSED = frozenset((batch.CMD_CHECKOUT, batch.CMD_GET, batch.CMD_PURGE))

#: Version -> the command types that it knows.
_SINCE_VERSION_1 = (
    ENQUEUE, *WITHOUT_EFFECT, *REFUSED, batch.CMD_SESSION_CLOSE, batch.CMD_SESSION_DOWN,
    batch.CMD_NODE_DOWN, batch.CMD_NODE_UP, batch.CMD_TICK, batch.CMD_PRODUCER,
    batch.CMD_STORE_OFFSET, batch.CMD_SESSION_OPEN,
)  # fmt: skip
COMMAND_TYPES = {
    1: supported.command_table(_SINCE_VERSION_1),
    2: supported.command_table((*_SINCE_VERSION_1, batch.CMD_CONFIG)),
}
SETTINGS = frozenset(("max_age_ms", "max_bytes", "segment_bytes"))


class StreamMachine(GroupMachine):
    """State of one stream. See the module docstring.

    Args of the constructor: settings that all replicas agree on: `max_bytes` and `max_age_ms`
    (-1 = keep everything), `segment_bytes` (body bytes at which a segment is full).
    """

    KIND = "stream"
    VERSION = 2
    OLDEST_VERSION = 1
    SNAPSHOT_FORMAT = 2

    def __init__(self, settings: Mapping[str, int] | None = None) -> None:
        super().__init__({**DEFAULTS, **(settings or {})})

    def _clear(self) -> None:
        super()._clear()
        self.chunks = ChunkIndex()
        #: Offset of the next message; the first kept one is `first`.
        self.next = 0
        #: Offset of the newest chunk's first message.
        self.last_chunk = 0
        self.bytes = 0
        self.open_bytes = 0
        #: Closed segments, oldest first: (offset behind the last message, bytes, its time in ms).
        self.segments: deque[tuple[int, int, int]] = deque()
        #: Consumer name -> offset; the one that stored longest ago first.
        self.stored: dict[bytes, int] = {}
        #: The next chunk must open an index range: something that looks like one lies before it.
        self._broken = False
        self._newest_ms = 0
        self.published = 0
        self.truncated = 0

    # ---------------------------------------------------------------- the log

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a `commands` entry; appends to `effects`. Raises ValueError if malformed, and
        UnknownCommand."""
        if index != self.index + 1:
            # Entries without commands lie between; they need not be there for a reader.
            self._broken = True
        self.index = index
        if time_ms > self.time_ms:
            self.time_ms = time_ms
        if self.trace is not None:
            self.trace.begin_entry(data)
        walk = CommandWalk(data)
        while walk.next():
            kind, flags, count, arg, offset = (
                walk.type, walk.flags, walk.count, walk.arg, walk.offset,
            )  # fmt: skip
            session_id = walk.session
            session: Session | None = None
            if session_id:
                session = self._accept(session_id, walk.seq, kind, count, arg)
                if session is None:
                    if kind == ENQUEUE:
                        self._broken = True
                    continue
            if kind == ENQUEUE:
                if count:
                    self._enqueue(session, index, count, data, offset)
                else:
                    self._applied(session)
            elif session is not None:
                self._session_command(session, kind, count, arg, data, offset)
            else:
                self._leader_command(kind, flags, count, arg, data, offset)
        self._end_entry()

    def _enqueue(
        self, session: Session | None, index: int, count: int, data: bytes, offset: int
    ) -> None:
        """A chunk: its records get the next offsets."""
        size = batch.enqueue_bytes(data, offset)
        repeated = 0
        if session is not None and session.producer is not None:
            repeated = self._repeated(session, count)
            if repeated:
                self._broken = True
                self._trace_published(words.DUPLICATE, session, repeated, index, offset, 0)
                size -= size * repeated // count
        if repeated < count:
            self._trace_published(0, session, count - repeated, index, offset, repeated)
            self._append(index, offset, repeated, count - repeated, size)
        if repeated:
            self._reply(session, APPLIED_OK, repeated)
        else:
            self._applied(session)

    def _trace_published(
        self, reason: int, session: Session | None, count: int, index: int, offset: int, first: int
    ) -> None:
        """Messages that a command brought; with a `reason` they got no offsets."""
        if self.trace is not None:
            number = -1 if reason else self.next
            origin = (0, 0) if session is None else (session.id, session.seq)
            self.trace.add(
                words.PUBLISHED, 0, reason, origin[0], 0, origin[1], number, count, index, offset,
                first, 0, 0,
            )  # fmt: skip

    def _append(self, index: int, command: int, first: int, count: int, size: int) -> None:
        chunks = self.chunks
        start = self.next
        closes = self.open_bytes >= self.settings["segment_bytes"] and len(chunks) > 0
        if closes:
            self.segments.append((start, self.open_bytes, self._newest_ms))
            self.open_bytes = 0
        if closes or self._broken or not chunks.continues(index, start):
            chunks.begin(index, command, first, start, size, self.time_ms)
            self._broken = False
        else:
            chunks.grow(size)
        self.next = start + count
        self.last_chunk = start
        self.bytes += size
        self.open_bytes += size
        self.published += count
        self._newest_ms = self.time_ms
        if closes:
            self._retain()
            if len(self.segments) == 1:
                self._arm()

    def _session_command(
        self, session: Session, kind: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_PRODUCER:
            self._producer(session, count, arg, data, offset)
        elif kind == batch.CMD_STORE_OFFSET:
            self._store_offset(session, count, data, offset)
        elif kind in WITHOUT_EFFECT:
            self._applied(session)
        elif kind == batch.CMD_SESSION_CLOSE:
            self._applied(session)
            self._remove_session(session)
        elif kind == batch.CMD_SESSION_OPEN:
            self._applied(session)
        elif kind in REFUSED:
            self._reply(session, APPLIED_REJECTED, f"a stream has no answer to command {kind}")
        else:
            raise UnknownCommand(f"a session's command of type {kind} is not known")

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_CONFIG and self.version >= 2:
            self._configure(decode_map(batch.command_body(data, offset), count))
        else:
            super()._leader_command(kind, flags, count, arg, data, offset)

    @property
    def configurable(self) -> bool:
        return self.version >= 2

    def _configure(self, settings: Mapping[str, int]) -> None:
        """CONFIG: these settings are other ones from now on. Raises ValueError."""
        for name, value in settings.items():
            if name not in SETTINGS or not isinstance(value, int):
                raise ValueError(f"a stream cannot change its setting '{name}' to {value!r}")
        self.settings.update(settings)
        self._retain()
        self._arm()

    def _tick(self) -> None:
        self._forget_producers()
        self._retain()
        self._arm()

    def _end_sessions(self, sessions: Iterable[Session], *, failed: bool) -> None:
        for session in sessions:
            self._remove_session(session)

    def _node_down(self, node: int, gone: bool) -> None:
        """Nodes are never suspected here: nothing is handed out that would have to come back."""
        if gone:
            self._end_sessions(self._sessions_of(node), failed=True)

    def _node_up(self, node: int, incarnation: int) -> None:
        self._hear_of(node, incarnation)
        self._end_sessions(self._older_sessions(node, incarnation), failed=True)

    def _store_offset(self, session: Session, count: int, data: bytes, offset: int) -> None:
        body = batch.command_body(data, offset)
        if not 0 < count <= min(CONSUMER_NAME_BYTES_MAX, len(body) - 8):
            self._reply(session, APPLIED_REJECTED, "malformed consumer name")
            return
        stored = self.stored
        name = body[8 : 8 + count]
        stored.pop(name, None)
        stored[name] = int.from_bytes(body[:8], "little")
        if len(stored) > STORED_MAX:
            del stored[next(iter(stored))]
        self._answer(session)

    # ---------------------------------------------------------------- retention

    def _retain(self) -> None:
        """Drops the closed segments that need not be kept, oldest first."""
        max_bytes: int = self.settings["max_bytes"]
        max_age_ms: int = self.settings["max_age_ms"]
        while self.segments:
            _, _, newest_ms = self.segments[0]
            too_many = 0 <= max_bytes < self.bytes
            too_old = max_age_ms >= 0 and newest_ms + max_age_ms < self.time_ms
            if not (too_many or too_old):
                return
            self._drop_segment()

    def _drop_segment(self) -> None:
        """Drops the oldest closed segment with all its messages."""
        end, size, _ = self.segments.popleft()
        self.bytes -= size
        if self.trace is not None:
            self.trace.add(
                words.DROPPED, 0, words.RETENTION, 0, 0, 0, self.first, end - self.first,
                0, 0, 0, 0, 0,
            )  # fmt: skip
        self.truncated += end - self.first
        self.chunks.drop_before(end)

    def _arm(self) -> None:
        due = self.next_due_ms()
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def next_due_ms(self) -> int | None:
        """Returns when the leader must propose TICK (logged time, ms); None = nothing waits for
        time."""
        max_age_ms: int = self.settings["max_age_ms"]
        if max_age_ms < 0 or not self.segments:
            return None
        return self.segments[0][2] + max_age_ms + 1

    def command_types(self, version: int) -> bytes:
        """Returns the command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    # ---------------------------------------------------------------- looking at it

    @property
    def first(self) -> int:
        """Offset of the first message that is kept; `next` when there is none."""
        offsets = self.chunks.offsets
        return offsets[0] if offsets else self.next

    @property
    def messages(self) -> int:
        """Returns the number of messages that are kept."""
        return self.next - self.first

    def stored_offset(self, name: str) -> int | None:
        """Returns the offset that a named consumer stored; None when nothing is known of it."""
        return self.stored.get(name.encode())

    def totals(self) -> dict[str, int]:
        """Counters and gauges for metrics."""
        return {
            "ready": self.messages,
            "ready_bytes": self.bytes,
            "published": self.published,
            "duplicates": self.duplicates,
            "dropped_retention": self.truncated,
            "segments": len(self.segments) + (len(self.chunks) > 0),
        }

    def figures(self) -> tuple[int, ...]:
        """Returns the numbers `queues.interface.FIGURES`, without consumers, which the leader's
        handle knows."""
        return (self.messages, 0, self.bytes, 0, 0, self.memory_bytes(), self.published, 0, 0, 0)

    def memory_bytes(self) -> int:
        """Returns the number of bytes of the packed index."""
        return self.chunks.memory_bytes()

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """One range: from the first kept chunk's entry to the last entry."""
        if not len(self.chunks):
            return []
        return [(self.chunks.indexes[0], self.index)]

    def oldest_live(self) -> int:
        """Returns the index of the oldest entry that may be read: of all that is kept."""
        return self.chunks.indexes[0] if len(self.chunks) else NEVER

    def check_invariants(self) -> None:
        """Asserts what the module docstring promises. Cost: O(index ranges)."""
        chunks = self.chunks
        offsets = list(chunks.offsets)
        assert offsets == sorted(set(offsets))
        assert not offsets or self.first == offsets[0] <= self.last_chunk < self.next
        assert list(chunks.times) == sorted(chunks.times)
        assert list(chunks.indexes) == sorted(chunks.indexes)
        assert sum(chunks.sizes) == self.bytes
        assert self.open_bytes + sum(size for _, size, _ in self.segments) == self.bytes
        ends = [end for end, _, _ in self.segments]
        assert ends == sorted(ends)
        assert set(ends) <= set(offsets)
        assert self.first == self.truncated
        assert self.published == self.next
        for session in self.sessions.values():
            assert session.applied_at == -1
        check_openings(self)
        check_written(self)

    # ---------------------------------------------------------------- snapshots

    def _pack(self) -> dict[str, object]:
        return {
            "format": self.SNAPSHOT_FORMAT,
            "version": self.version,
            "settings": dict(sorted(self.settings.items())),
            "index": self.index,
            "time_ms": self.time_ms,
            "chunks": self.chunks.pack(),
            "next": self.next,
            "last_chunk": self.last_chunk,
            "open_bytes": self.open_bytes,
            "segments": list(self.segments),
            "broken": self._broken,
            "newest_ms": self._newest_ms,
            "stored": list(self.stored.items()),
            "sessions": [
                [s.id, s.seq, list(s.replies), s.producer] for s in self.sessions.values()
            ],
            "openings": self._pack_openings(),
            "producers": self._pack_producers(),
            "totals": [self.published, self.duplicates, self.truncated],
            "written": self._pack_written(),
        }

    def _restore(self, known: Packed) -> None:
        self.set_version(known["version"])
        self.settings = known["settings"]
        self._clear()
        self.index = known["index"]
        self.time_ms = known["time_ms"]
        self.chunks.unpack(known["chunks"])
        self.next = known["next"]
        self.last_chunk = known["last_chunk"]
        self.bytes = sum(self.chunks.sizes)
        self.open_bytes = known["open_bytes"]
        self.segments.extend((end, size, newest) for end, size, newest in known["segments"])
        self._broken = known["broken"]
        self._newest_ms = known["newest_ms"]
        self.stored = dict(known["stored"])
        for session_id, seq, replies, producer in known["sessions"]:
            session = Session(session_id)
            session.seq = seq
            session.replies.extend((reply[0], reply[1], reply[2]) for reply in replies)
            session.producer = tuple(producer) if producer else None
            self.sessions[session_id] = session
        self._unpack_openings(known["openings"])
        self._unpack_producers(known["producers"])
        self._unpack_written(known["written"])
        self.published, self.duplicates, self.truncated = known["totals"]

    def at_rest(self) -> bool:
        """Settles mean nothing to a log; nothing is gained by letting them wait."""
        return False


supported.register(StreamMachine)
