"""The trace of a broker: runs of messages that it stored, confirmed and handed out (ADR 0192).

One trace for all queues of the group, as there is one log. A message is named by topic, queue,
queue offset and the *life* of the master that took it: after a master that lost its end, another
message may have that offset. Rows: docs/formats/trace.md.

Its marks cover physical offsets of the log. What a broker stored and had not written down when it
was killed is read from its log when it starts again. What was read, committed or confirmed in its
last quarter of a second is not known; the audit says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoymq.kernels.trace import name_hash
from convoymq.model import trace as words
from convoymq.model.config import TraceConfig
from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes
from convoymq.replication.group.types import Life
from convoymq.rocketmq.store.consume_queues import ENTRY
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Draft, Message, Placed, PutStatus, Run
from convoymq.trace.recorder import UNSIGNED, Traces

FLUSH_S = 0.25
JOIN_S = 60.0
CAUGHT_UP_BYTES_MAX = 256 << 20
"""Of the log that is read at the start; more than that is a gap in the trace."""
NAMES_MAX = 100_000
"""Names whose hash is kept; then they are written down anew."""
_GROUP_BITS = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings(Section):
    """Settings of the trace for `convoy pipeline audit`."""

    enabled: bool = key(
        "auditTraceEnable", False, "Runs of messages are recorded in `trace` below "
        "storePathRootDir, for `convoy pipeline audit`. Needs the extra `trace`.",
    )  # fmt: skip
    segment_max_age_ms: int = key(
        "auditTraceSegmentMaxAge", 60_000, "A segment is completed after this time, and then "
        "readable for the audit.", unit="ms", low=100, high=86_400_000,
    )  # fmt: skip
    retention_bytes: int = key(
        "auditTraceRetentionBytes", 10 << 30, "Segments that are kept; the oldest go first.",
        parse=parse_bytes, low=1 << 20, high=1 << 50,
    )  # fmt: skip


def node_of(broker_id: int) -> int:
    """Returns the number of a replica in a trace: 0 is nobody there."""
    return broker_id + 1


def group_of(cluster: str, broker: str) -> int:
    """Returns the number of a broker group in a trace."""
    return name_hash(f"{cluster}\0{broker}".encode()) & _GROUP_BITS


@dataclass(slots=True)
class _Run:
    """Neighbours of a queue; `end`: the physical offset behind them."""

    first: int
    count: int
    physical: int
    end: int
    life: int


class GroupTrace:
    """See the module text. Nothing is written before `start`.

    Args:
        directory: where traces go.
        broker: its name, and that of its cluster.
        lives: of the log, as replication knows them.
        members: ids of the other replicas.
    """

    def __init__(
        self,
        directory: Path,
        settings: TraceSettings,
        store: MessageStore,
        *,
        cluster: str,
        broker: str,
        broker_id: int,
        lives: Callable[[], Sequence[Life]],
        members: Callable[[], Iterable[int]] = tuple,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._store = store
        self._lives = lives
        self._members = members
        self._wall_us = wall_us
        self._latest_us = 0
        self._node = node_of(broker_id)
        self._incarnation = self._now_us()
        self._hashes: dict[str, int] = {}
        self._ends: dict[tuple[str, int], int] = {}
        """Queue offsets behind what the trace has, by queue."""
        self._stored_end = 0
        self._runs: dict[tuple[int, tuple[str, int]], _Run] = {}
        """By kind and queue: what is not yet a row."""
        config = TraceConfig(
            segment_max_age_ms=settings.segment_max_age_ms, retention_bytes=settings.retention_bytes
        )
        self._traces = Traces(directory, self._node, self._incarnation, config, self._now_us)
        trace = self._traces.open(
            cluster, broker, words.BROKER_GROUP_TYPE, group_of(cluster, broker), self._known
        )
        self._trace = trace
        self.trace = None if trace is None else trace.rows
        """As `TracedMachine`: this is what decides up to where the log is covered."""

    @property
    def is_open(self) -> bool:
        """Returns whether traces can be written here."""
        return self._trace is not None

    def _known(self) -> Iterator[tuple[int, int, bool]]:
        yield self._node, self._incarnation, True
        yield from ((node_of(each), 0, True) for each in self._members())

    def _now_us(self) -> int:
        """Returns the wall clock, always rising: a replica's rows have the order of their times."""
        self._latest_us = max(self._latest_us + 1, self._wall_us())
        return self._latest_us

    # --- begin and end -------------------------------------------------------------------

    def start(self) -> None:
        """Begins, with what the log has and the trace lacks."""
        trace, store = self._trace, self._store
        if trace is None:
            return
        through = trace.rows.skip_through
        trace.attach(self)
        begin, end = max(through, store.min_offset), store.dispatched
        trace.rows.index = begin if through else 0
        if end < through:
            self._cut_all(end)
        elif through and through == begin and end - through <= CAUGHT_UP_BYTES_MAX:
            for run in store.runs(through, end):
                self.stored(run)
        elif end:
            trace.rows.restored(end)
        trace.rows.index = end
        store.on_run.append(self.stored)
        store.on_truncated.append(lambda: self._cut_all(store.dispatched))
        store.on_deleted.append(self._deleted)

    async def run(self) -> None:
        """Hands rows to the writer, as long as it runs."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flush()

    def flush(self) -> None:
        """Hands over what was recorded."""
        if self._trace is not None:
            self._write_all()
            self._trace.rows.index = self._store.dispatched
            self._traces.tick()

    def stop(self) -> None:
        """Ends in order; waits for the files."""
        if self._trace is not None:
            self._write_all()
            self._trace.rows.index = self._store.dispatched
            self._traces.stop()
            self._traces.join(JOIN_S)

    # --- rows ----------------------------------------------------------------------------

    def _row(
        self, kind: int, topic: str, queue: int, seq: int = 0, first: int = 0, count: int = 0, *,
        flags: int = 0, index: int = 0, physical: int = 0, life: int = 0, asked: int = 0,
        next_offset: int = 0,
    ) -> None:  # fmt: skip
        assert self._trace is not None
        number = self._number(topic) if topic else 0
        self._trace.rows.act(
            kind, flags, self._now_us(), index, number & UNSIGNED, queue, seq, first, count,
            physical, life, asked, 0, next_offset,
        )  # fmt: skip

    def _number(self, name: str) -> int:
        """Returns a name's hash, and has it in the trace."""
        known = self._hashes.get(name)
        if known is None:
            if len(self._hashes) >= NAMES_MAX:
                self._hashes.clear()
            known = self._hashes[name] = name_hash(name.encode())
            columns = words.name_words(name.encode())
            assert self._trace is not None
            self._trace.rows.act(words.NAME, 0, self._now_us(), 0, known & UNSIGNED, *columns)
        return known

    def _life_at(self, physical: int) -> int:
        """Returns the number of the life that wrote a place of the log; mostly the last one."""
        found = (life.number for life in reversed(self._lives()) if life.begin <= physical)
        return next(found, 0)

    def stored(self, run: Run) -> None:
        """Records that messages of a queue can be read here."""
        physical = ENTRY.unpack_from(run.entries)[0]
        last, size, _ = ENTRY.unpack(run.entries[-ENTRY.size :])
        place = run.topic, run.queue_id
        self._stored_end = last + size
        self._ends[place] = run.queue_offset + run.count
        self._extend(words.STORED, place, run.queue_offset, run.count, physical, last + size)

    def _extend(
        self, kind: int, place: tuple[str, int], first: int, count: int, physical: int, end: int
    ) -> None:
        """Adds messages to the run of their queue, which is written with the next mark at last."""
        life = self._life_at(physical)
        run = self._runs.get((kind, place))
        if run is not None and (run.first + run.count, run.life) == (first, life):
            run.count += count
            run.end = end
            return
        self._write(kind, place)
        self._runs[kind, place] = _Run(first, count, physical, end, life)

    def _write(self, kind: int, place: tuple[str, int]) -> None:
        run = self._runs.pop((kind, place), None)
        if run is not None:
            self._row(
                kind, *place, 0, run.first, run.count, index=run.end, physical=run.physical,
                life=run.life,
            )  # fmt: skip

    def _write_all(self) -> None:
        for kind, place in list(self._runs):
            self._write(kind, place)

    def _cut_all(self, end: int) -> None:
        """The log ends earlier than it did."""
        assert self._trace is not None
        self._write_all()
        self._trace.rows.index = max(self._trace.rows.index, self._stored_end)
        self._trace.cut(end)
        self._stored_end = end
        for topic, queue in self._store.places():
            self._ends.setdefault((topic, queue), -1)
        for (topic, queue), known in self._ends.items():
            left = self._store.queue_max(topic, queue)
            if known != left:
                self._ends[topic, queue] = left
                self._row(words.CUT, topic, queue, 0, left, physical=end)

    def _deleted(self, topic: str, queue: int) -> None:
        self._write_all()
        self._ends.pop((topic, queue), None)
        self._row(words.CUT, topic, queue, flags=words.DELETED)

    def confirmed(self, done: Iterable[tuple[Draft, Placed]]) -> None:
        """Records that producers get confirms of messages with PUT_OK."""
        for draft, placed in done:
            if placed.status is PutStatus.PUT_OK and placed.queue_offset >= 0:
                self._extend(
                    words.ACCEPTED, (draft.topic, draft.queue_id), placed.queue_offset,
                    placed.count, placed.physical, placed.physical + placed.size,
                )  # fmt: skip

    def read(
        self, group: str, topic: str, queue: int, asked: int, next_offset: int,
        records: Sequence[memoryview], *, again: bool,
    ) -> None:  # fmt: skip
        """Records an answer to a consumer; `again`: its group had committed a higher offset."""
        self._write(words.STORED, (topic, queue))
        first, last = Message(records[0]), Message(records[-1])
        self._row(
            words.READ, topic, queue, self._number(group), first.queue_offset, len(records),
            flags=words.REDELIVERED if again else 0, physical=first.physical, asked=asked,
            index=last.queue_offset + 1, life=self._life_at(first.physical),
            next_offset=next_offset,
        )  # fmt: skip

    def committed(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Records the offset that a group goes on from."""
        self._row(words.COMMITTED, topic, queue, self._number(group), offset)

    def escaped(self, topic: str, escape_key: object, target: str) -> None:
        """Records that another broker has stored a message of this group."""
        self._row(
            words.ESCAPED, topic, 0, name_hash(str(escape_key).encode()),
            physical=self._number(target),
        )  # fmt: skip

    def taken(self, draft: Draft, placed: Placed | None, escape_key: object) -> None:
        """Records a message of another group that is stored here; None: it was already."""
        count, offset = (0, 0) if placed is None else (placed.count, placed.queue_offset)
        self._row(
            words.TAKEN, draft.topic, draft.queue_id, name_hash(str(escape_key).encode()), offset,
            count,
        )  # fmt: skip

    def life_began(self, life: Life) -> None:
        """Records that this master takes messages from now on."""
        self._row(words.LIFE, "", 0, life=life.number, physical=life.begin)

    def acting(self, *, begins: bool) -> None:
        """Records that this slave begins or ends to act as master."""
        self._row(words.ACTING, "", 0, flags=words.CAME if begins else words.GONE)
