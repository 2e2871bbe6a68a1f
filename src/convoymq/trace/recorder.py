"""Recorder of a node's traced queues, for the event loop.

The machine writes decided rows straight into `QueueTrace.rows`; clients and channels report what
they did. Four times a second the rows go to the writer's thread, behind a COVERED mark that says
which entries and which time they are complete for. What no mark covers is not proved: rows that
were lost, an entry that was cut by a crash, time in which the node was away.

Who else should have recorded something is in the trace too: each segment names the queue's replicas
and their incarnations (MEMBER), so that an audit misses a node whose files are not there. A mark
also counts the rows since the one before it.

A queue's state snapshot (STATE rows and a SUMMARY) is taken when a segment ends, between two
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import structlog

from convoymq.kernels.batch import CMD_ENQUEUE, PendingCommand
from convoymq.kernels.trace import TraceRows, name_hash
from convoymq.model import trace as words
from convoymq.model.config import TraceConfig
from convoymq.trace import segments
from convoymq.trace.segments import Origin
from convoymq.trace.writer import Feed, Writer

log = structlog.get_logger()

RETRY_US = 5_000_000
"""Pause before the next file is tried after one could not be written."""
STATE_SNAPSHOT_RUNS_MAX = 100_000
"""A queue of more runs gets no state snapshot, only its totals: the loop would stand still for it.
"""
UNSIGNED = (1 << 64) - 1
METADATA_GROUP = 0
COUNT_OFFSET = 24
"""Of the number of messages in an ENQUEUE command."""


def _messages_of(command: PendingCommand) -> int:
    """Returns the number of messages of a publish command that somebody waits for: a channel, by
    tags, or the columnar protocol, by a note; 0 = nobody hears of it."""
    tags = command.tags
    if tags:
        return sum(tags[1::2]) - sum(tags[::2]) + len(tags) // 2
    if command.note is None or command.chunk.data is None:
        return 0
    return int.from_bytes(command.bytes()[COUNT_OFFSET : COUNT_OFFSET + 4], "little")


class TracedMachine(Protocol):
    """The machine of a replica that records what it decides."""

    trace: TraceRows | None


@runtime_checkable
class ListedMachine(TracedMachine, Protocol):
    """A machine that can list what is in its queue."""

    def totals(self) -> dict[str, int]:
        """Returns the messages by state, and counters."""

    def run_count(self) -> int:
        """Returns how many runs `state_snapshot` gives."""

    def state_snapshot(
        self,
    ) -> Iterable[tuple[int | None, int, int, tuple[int, int, int, int, int, int, int]]]:
        """Returns (owner or None, its number, first message id, run) of all that is in the
        queue."""


class QueueTrace:
    """One queue's trace on this node. Single threaded.

    Args:
        origin: what the rows are about.
        writer: takes them.
        directory: where the queue's files lie.
        through: entries up to here are in files of this node's earlier incarnations.
        now_us: the clock that the node's entries have.
        members: (node, its incarnation or 0, whether it has a replica) of those that record the
            queue, as this node knows them; default: this node.
    """

    def __init__(
        self,
        origin: Origin,
        writer: Writer,
        directory: Path,
        *,
        through: int,
        now_us: Callable[[], int],
        members: Callable[[], Iterable[tuple[int, int, bool]]] | None = None,
    ) -> None:
        self.origin = origin
        self._members = members or self._alone
        self._told: tuple[tuple[int, int, bool], ...] = ()
        self._handed_rows = 0
        self._confirmed_rows = 0
        self._sent_rows = 0
        self.rows = TraceRows()
        self.rows.skip_through = through
        self.rows.on_full = self._hand_over
        self.rows.on_restored = self._restored
        self.opened_us = now_us()
        self.lost = 0
        """Rows that were dropped because the thread was behind."""
        self._clock = now_us
        self._latest_us = 0
        self._machine: TracedMachine | None = None
        self._feed = Feed(origin, directory)
        self._writer = writer
        self._covered = through
        self._acts_since_us = self.opened_us
        self._rotated_us = self.opened_us
        self._lost_unmarked = 0
        self._failed_us = 0
        self._empty = True
        # What was not ended in order is ended by this incarnation, even when nothing happens.
        self._ended = through == 0
        """True if the last mark, if there is one, says that the trace ended in order."""
        writer.open(self._feed)

    def _now_us(self) -> int:
        """Returns the node's clock, never falling: acts of one node are in the order of their
        times."""
        now = self._clock()
        if now > self._latest_us:
            self._latest_us = now
        return self._latest_us

    # --- what is recorded ----------------------------------------------------------------

    def _alone(self) -> list[tuple[int, int, bool]]:
        return [(self.origin.node, self.origin.incarnation, True)]

    def attach(self, machine: TracedMachine) -> None:
        """From now on the machine of this node's replica writes what it decides."""
        self._machine = machine
        machine.trace = self.rows

    def detach(self) -> None:
        """The node is no member of the queue's group any more."""
        if self._machine is not None:
            self._machine.trace = None
            self._mark()
            self._machine = None

    def confirms(
        self, session: int, commands: Sequence[PendingCommand], *, deleted: bool = False
    ) -> None:
        """A channel is about to hear that the queue has the publishes of these commands. One row
        names all publish commands from its first seq to its last; `deleted`: they are answered
        because the queue is gone."""
        first = last = messages = 0
        for command in commands:
            if command.type != CMD_ENQUEUE:
                continue
            count = _messages_of(command)
            if count:
                messages += count
                first = first or command.seq
                last = command.seq
            elif messages:
                self._confirmed(session, first, last, messages, deleted)
                first = messages = 0
        if messages:
            self._confirmed(session, first, last, messages, deleted)

    def _confirmed(self, session: int, first: int, last: int, count: int, deleted: bool) -> None:
        flags = words.DELETED if deleted else 0
        now = self._now_us()
        self._confirmed_rows += 1
        self.rows.act(words.CONFIRMED, flags, now, 0, session, 0, first, last, count, 0, 0, 0, 0, 0)

    def sent(
        self,
        session: int,
        consumer: int,
        first_id: int,
        block: bytes,
        command: int,
        first: int,
        count: int,
        acquired: int,
        delivered: int,
    ) -> None:
        """Deliveries are in the output of the consumer's connection. The position is known where
        the block is a whole entry."""
        self._sent_rows += 1
        self.rows.act(
            words.SENT,
            words.REDELIVERED if acquired else 0,
            self._now_us(),
            0,
            session,
            consumer,
            0,
            first_id,
            count,
            int.from_bytes(block[8:16], "little") if command else 0,
            command,
            first if command else 0,
            acquired,
            delivered,
        )

    # --- partitions of ordered topics -------------------------------------------------------

    def key_hash(self, logical: int, seed: int) -> None:
        """Says to which logical partitions the order keys of messages belong."""
        self.rows.logical = logical
        self.rows.seed = seed

    def publisher(self, session: int, publisher: int) -> None:
        """A session publishes for a channel; 0: for somebody else of this node."""
        self.rows.act(
            words.PUBLISHER, 0, self._now_us(), 0, session, 0, 0, 0, 0, publisher, 0, 0, 0, 0
        )

    def tagged(self, session: int, commands: Sequence[PendingCommand], tags_end: int) -> None:
        """A channel is about to hear that these publishes are stored: a row for each range of its
        delivery tags, which are the order of publishing. Tags from `tags_end` on are nobody's."""
        now = self._now_us()
        for command in commands:
            tags = command.tags if command.type == CMD_ENQUEUE else None
            at = 0
            for first, last in zip((tags or ())[::2], (tags or ())[1::2], strict=True):
                count = last - first + 1
                if first < tags_end:
                    self.rows.act(
                        words.TAGGED, 0, now, 0, session, 0, command.seq, first, count, 0, 0, at,
                        0, 0,
                    )  # fmt: skip
                at += count

    def handed_out(
        self,
        group: str,
        member: str,
        epoch: int,
        first: int,
        count: int,
        failures: int,
        parked: tuple[bytes, int] | None = None,
        *,
        one_of_key: bool = False,
        at_settling: bool = False,
        passed_over: bool = False,
    ) -> None:
        """Messages of the partition are given to a member of a consumer group; `parked`: (key,
        created version) of the head of a parked key, which may lie in another partition.
        `one_of_key`: the member has one message of a key at a time. `at_settling`: they were given
        before, and are settled now. `passed_over`: the member's filter does not want them."""
        key, version = (0, 0) if parked is None else (name_hash(parked[0]), parked[1])
        self.rows.act(
            words.HANDED_OUT,
            (0 if parked is None else words.PARKED_HEAD)
            | (words.ONE_OF_KEY if one_of_key else 0)
            | (words.AT_SETTLING if at_settling else 0)
            | (words.PASSED_OVER if passed_over else 0),
            self._now_us(),
            0,
            name_hash(group.encode()) & UNSIGNED,
            epoch,
            name_hash(member.encode()),
            first,
            count,
            key,
            0,
            version,
            failures,
            0,
        )

    # --- marks and state snapshots --------------------------------------------------------------

    def _restored(self, index: int) -> None:
        """The machine's state came from elsewhere: the entries before are not recorded here."""
        if index > self._covered:
            self._mark()
            self._covered = max(self._covered, index)

    def _mark(self, flags: int = 0) -> None:
        """Says what the rows before are complete for."""
        now = self._now_us()
        index = max(self._covered, self.rows.index) if self._machine is not None else self._covered
        self.rows.act(
            words.COVERED,
            flags,
            now,
            index,
            0,
            0,
            0,
            self._acts_since_us,
            self._lost_unmarked,
            self._covered,
            self._confirmed_rows,
            self._sent_rows,
            self._handed_rows + self.rows.rows,
            0,
        )
        self._forget_counts()
        self._covered = index
        self._acts_since_us = now
        self._lost_unmarked = 0
        self._ended = bool(flags & words.CLOSED)

    def _forget_counts(self) -> None:
        # The mark itself is not counted.
        self._handed_rows = -self.rows.rows
        self._confirmed_rows = self._sent_rows = 0

    def cut(self, index: int) -> None:
        """The end of what is recorded went, from an index on: that is covered anew."""
        self._mark()
        self._covered = index
        self.rows.index = index

    def _tell_members(self) -> None:
        """Names who records the queue, once a segment and when it changes."""
        known = tuple(sorted(self._members()))
        if known == self._told:
            return
        self._told = known
        now = self._now_us()
        for node, incarnation, replica in known:
            flags = words.REPLICA if replica else 0
            self.rows.act(words.MEMBER, flags, now, 0, 0, node, incarnation, 0, 0, 0, 0, 0, 0, 0)

    def _hand_over(self) -> None:
        """Gives all rows to the thread, or drops them when it is too far behind."""
        rows, data = self.rows.take()
        if not rows:
            return
        if self._feed.failed or self._writer.overloaded:
            self._lose(rows)
            return
        self._empty = False
        self._handed_rows += rows
        self._writer.write(self._feed, rows, data)

    def _lose(self, rows: int) -> None:
        self.lost += rows
        self._lost_unmarked += rows
        self._told = ()
        self._forget_counts()
        # The entry that is being applied may have lost rows too: it is not covered either.
        self._covered = max(self._covered, self.rows.index)
        self._acts_since_us = self._now_us()

    def flush(self, flags: int = 0) -> None:
        """Hands over what was recorded, with its mark. Called between two entries."""
        if self._feed.failed:
            self._lose(self.rows.take()[0])
            now = self._now_us()
            if now - self._failed_us >= RETRY_US:
                self._failed_us = now
                self._writer.resume(self._feed)
            return
        if self._writer.overloaded:
            self._lose(self.rows.take()[0])
            return
        behind = self._machine is not None and self.rows.index > self._covered
        if self.rows.rows or behind or self._lost_unmarked or flags:
            self._tell_members()
            self._mark(flags)
            self._hand_over()

    def rotate_if_due(self, settings: TraceConfig) -> None:
        """Ends the segment when it is large or old enough."""
        if self._empty:
            self._rotated_us = self._now_us()
            return
        age_ms = (self._now_us() - self._rotated_us) // 1000
        if (
            self._feed.journal_bytes >= settings.segment_max_bytes
            or age_ms >= settings.segment_max_age_ms
        ):
            self.rotate()

    def rotate(self, flags: int = 0) -> None:
        """Ends the segment, with a state snapshot of the queue."""
        self._rotated_us = self._now_us()
        # The end is told of an idle queue too: its last segment was complete before.
        ends = flags & words.CLOSED and not self._ended
        if self._empty and not self.rows.rows and self.rows.index <= self._covered and not ends:
            return
        machine = self._machine
        # Of a stream there is nothing to tell: it holds what it was given, up to retention.
        if isinstance(machine, ListedMachine) and self.rows.index >= self._covered:
            self._state_snapshot(machine)
        self.flush(flags)
        if not self._empty:
            self._writer.rotate(self._feed)
        self._empty = True
        self._told = ()

    def _state_snapshot(self, machine: ListedMachine) -> None:
        now = self._now_us()
        index = self.rows.index
        facts = machine.totals()
        complete = machine.run_count() <= STATE_SNAPSHOT_RUNS_MAX
        if complete:
            for owner, number, first_id, run in machine.state_snapshot():
                flags = 0 if owner is None else words.HELD
                at, command, first, count, _size, acquired, delivered = run[:7]
                self.rows.act(
                    words.STATE,
                    flags,
                    now,
                    index,
                    owner or 0,
                    number,
                    0,
                    first_id,
                    count,
                    at,
                    command,
                    first,
                    acquired,
                    delivered,
                )
        dropped = sum(count for name, count in facts.items() if name.startswith("dropped_"))
        self.rows.act(
            words.SUMMARY,
            words.COMPLETE if complete else 0,
            now,
            index,
            0,
            0,
            facts["published"],
            facts["acked"],
            facts["ready"],
            facts["unacked"],
            dropped,
            facts["purged"],
            facts["delivered"],
            facts["returned"],
        )

    def close(self) -> None:
        """Ends the trace: the queue is gone, or the node stops."""
        self.rotate(words.CLOSED)
        if self._machine is not None:
            self._machine.trace = None
            self._machine = None
        self.rows.on_full = None
        self.rows.on_restored = None


class Traces:
    """All traces of a node. Opens its thread with the first one.

    Args:
        directory: the node's trace directory.
        now_us: the clock that the node's entries have: acts are compared with them.
    """

    def __init__(
        self,
        directory: Path,
        node: int,
        incarnation: int,
        settings: TraceConfig,
        now_us: Callable[[], int],
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._node = node
        self._incarnation = incarnation
        self._now_us = now_us
        self._writer: Writer | None = None
        self._open: dict[int, QueueTrace] = {}
        self._warned = False
        self._lost_before = 0

    @property
    def available(self) -> bool:
        """Returns whether this node can write a trace."""
        return segments.is_available()

    def wants(self, vhost: str, asked: bool) -> bool:
        """Returns whether a queue is traced: it says so, or its virtual host does."""
        return asked or vhost in self.settings.vhosts

    def open(
        self,
        vhost: str,
        queue: str,
        type: str,
        group: int,
        members: Callable[[], Iterable[tuple[int, int, bool]]] | None = None,
    ) -> QueueTrace | None:
        """Returns the trace of a queue; None when this node can't write it (logged, as it is
        wanted)."""
        if not self.available:
            if not self._warned:
                self._warned = True
                log.error("trace.unavailable", reason="pyarrow is not installed")
            return None
        if self._writer is None:
            self._writer = Writer(
                self.directory,
                retention_bytes=self.settings.retention_bytes,
                backlog_max_bytes=self.settings.backlog_max_bytes,
            )
        origin = Origin(
            vhost=vhost,
            queue=queue,
            type=type,
            group=group,
            node=self._node,
            incarnation=self._incarnation,
        )
        place = origin.directory(self.directory)
        try:
            through = segments.covered_through(place, origin)
        except OSError as error:
            log.error("trace.unreadable", vhost=vhost, queue=queue, reason=str(error))
            through = 0
        made = QueueTrace(
            origin, self._writer, place, through=through, now_us=self._now_us, members=members
        )
        self._open[group] = made
        return made

    def open_topics(
        self, members: Callable[[], Iterable[tuple[int, int, bool]]]
    ) -> QueueTrace | None:
        """Returns the trace of what the metadata group decides about topics."""
        return self.open("", words.TOPICS_QUEUE, words.TOPICS_TYPE, METADATA_GROUP, members)

    def end(self, group: int) -> None:
        """A queue is gone."""
        trace = self._open.pop(group, None)
        if trace is not None:
            trace.close()
            self._lost_before += trace.lost

    def tick(self) -> None:
        """Four times a second: hands over what was recorded."""
        for trace in self._open.values():
            trace.flush()
            trace.rotate_if_due(self.settings)

    def stop(self) -> None:
        """Closes all traces; `join` waits for their files."""
        for trace in self._open.values():
            trace.close()
        self._open.clear()

    def join(self, timeout_s: float) -> None:
        """Waits for the files; blocks for about `timeout_s` at most."""
        writer, self._writer = self._writer, None
        if writer is not None and not writer.close(timeout_s):
            log.warning("trace.unfinished", reason="segments are completed at the next start")

    @property
    def queues(self) -> int:
        """Queues that are traced here."""
        return len(self._open)

    @property
    def rows_lost(self) -> int:
        """Returns the number of rows that were dropped because their file could not take them."""
        return self._lost_before + sum(trace.lost for trace in self._open.values())

    @property
    def write_errors(self) -> int:
        """Files that could not be written, or completed."""
        return self._writer.errors if self._writer is not None else 0
