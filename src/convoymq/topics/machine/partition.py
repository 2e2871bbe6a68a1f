"""The state machine of one physical partition. Every outcome is decided when a command is applied.

    CREATING --Open--> OPEN --Seal--> SEALED

| command      | CREATING | OPEN                                   | SEALED                      |
|--------------|----------|----------------------------------------|-----------------------------|
| Produce      | NOT_OPEN | appended, by range, epoch and sequence | CLOSED with the targets     |
| ProduceRuns  | NOT_OPEN | the same, by run                       | CLOSED with the targets     |
| OpenProducer | NOT_OPEN | fences older sessions                  | CLOSED                      |
| Open         | opens    | OK, changes nothing                    | OK, changes nothing         |
| Seal         | NOT_OPEN | appends CLOSE                          | the same answer; SEALED_BY  |
| HandOver     | refused  | NOT_DRAINED                            | when the group has drained  |
| others       | as OPEN  | by group epoch and lease epoch         | as OPEN                     |

Data offsets: OPEN is 0, messages follow, CLOSE is the last. Acknowledgements, leases and parked
keys have no data offset: they go on after CLOSE. Control entries count as acknowledged as soon as
everything before them is.

A group has drained the partition when it is sealed, the watermark of the group's cursor is at
CLOSE, no parked key is being delivered again, and nobody may have fetched what the group goes on
without: after a loss the owner is fenced until the next one has the lease, which comes when the
former one has given it back. A cursor is opened only when all parents are
drained, with what they handed over, so that drained is recursive: a group without a cursor has not
drained even an empty partition.

A group of a weak topic may have skipped the partition when it is to be handed over, or before the
answer to that is heard. Its targets say which of them began without what it has. That is read here,
late, and what is parked stays: what was handed over, and no target began with, comes back.

Behind a partition that was sealed from outside, a producer stores again what it had no answer to.
What a group has read there already counts as acknowledged here: when its cursor is opened, and when
more of it is appended.

Invariants: at most one CLOSE, behind it no data offset; sequences of a (producer, logical
partition) are contiguous; lease epochs never fall; a cursor that was handed over never changes,
unless it comes back once.

Source: ordered topics, sections 1.2, 3, 4, 6.1, 6.3, 9.3, 10.3 and 12.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from convoymq.topics.machine.parking import ParkSet
from convoymq.topics.rules.answers import (
    AckAnswer,
    Answer,
    CursorAnswer,
    GroupView,
    HandOverAnswer,
    LossAnswer,
    ParkAnswer,
    ParkedEntry,
    ProduceAnswer,
    ProducerAnswer,
    RunAnswer,
    RunsAnswer,
    SealAnswer,
)
from convoymq.topics.rules.commands import (
    EARLIEST,
    LATEST,
    AcceptLoss,
    Ack,
    AckRanges,
    Command,
    DoneParked,
    DropGroup,
    ExpireProducers,
    HandOver,
    Lease,
    Open,
    OpenCursor,
    OpenProducer,
    Park,
    Produce,
    ProducedRun,
    ProduceRuns,
    ReplaceParked,
    ResumeParked,
    Seal,
    SkipParked,
    Trim,
)
from convoymq.topics.rules.cursor import Cursor
from convoymq.topics.rules.dedup import UNANSWERED_MAX, DedupTable, first_epoch
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span

OPEN_OFFSET = 0
Outcome = (
    Answer
    | ProduceAnswer
    | ProducerAnswer
    | RunsAnswer
    | SealAnswer
    | CursorAnswer
    | HandOverAnswer
    | AckAnswer
    | ParkAnswer
    | LossAnswer
)
FilterKey = tuple[int, int, int]
"""Producer, producer epoch, logical partition."""


@dataclass(slots=True)
class Doubtful:
    """Messages of a session that may be stored in a partition which was sealed from outside, too:
    those from `base` on that its producer had no answer to."""

    base: int
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    """(first sequence, messages, first offset)."""

    def add(self, seq: int, count: int, offset: int) -> None:
        """More of it was appended."""
        if self.runs:
            first, known, at = self.runs[-1]
            if first + known == seq and at + known == offset:
                self.runs[-1] = (first, known + count, at)
                return
        self.runs.append((seq, count, offset))


@dataclass(slots=True)
class GroupCursor:
    """State of one group in this partition."""

    group_epoch: int
    cursor: Cursor
    lease_epoch: int = 0
    member: str = ""
    parked: ParkSet = field(default_factory=ParkSet)
    park_version: int = 0
    """Rises with every change of what is parked, or passed over while there is an owner."""
    filter: dict[FilterKey, int] = field(default_factory=dict)
    """Last sequences that were read from partitions which were sealed from outside. What is stored
    here again counts as acknowledged."""
    expired: bool = False
    handed_over: bool = False
    fenced: bool = False
    """The lease in force counts no more: its owner may have fetched what the group goes on without.
    The next lease ends this."""
    without: tuple[int, ...] = ()
    """Parents that the group had skipped when the cursor was opened."""
    skipped: bool = False
    """The group has skipped this partition: what is parked here is handed over no more."""


class PartitionMachine:
    """One physical partition. Construct, then `apply` committed commands in order."""

    def __init__(
        self,
        pid: int,
        lo: int,
        hi: int,
        created_version: int,
        *,
        lp_of: Callable[[bytes], int] | None = None,
    ) -> None:
        assert 0 <= lo < hi
        self.pid = pid
        self.lo = lo
        self.hi = hi
        self.created_version = created_version
        self.lp_of = lp_of
        self.state = PartitionState.CREATING
        self.end_offset = 0
        """The next data offset."""
        self.log_start = 0
        self.close_offset = -1
        self.sealed_by = ""
        self.to_version = 0
        self.targets: tuple[Span, ...] = ()
        self.external = False
        self.term = 0
        """The highest term of a controller that was heard."""
        self.last_time_ms = 0
        self.dedup = DedupTable()
        self.doubtful: dict[FilterKey, Doubtful] = {}
        self.groups: dict[str, GroupCursor] = {}
        self.on_passed: Callable[[str, int, int, int], None] | None = None
        """Hears of second copies that count as acknowledged: (group, its epoch, first offset,
        messages)."""

    def apply(self, command: Command) -> Outcome:
        """Applies a committed command; the answer is the same on every replica."""
        outcome: Outcome = getattr(self, _METHODS[type(command)])(command)
        return outcome

    # Messages

    def produce(self, command: Produce) -> ProduceAnswer:
        """State, range, hash, epoch and sequence, in this order."""
        code = self.refusal(command)
        if code is Code.CLOSED:
            return ProduceAnswer(code, to_version=self.to_version, targets=self.targets)
        if code is not Code.OK:
            return ProduceAnswer(code)
        producer, epoch, lp, seq = command.producer, command.epoch, command.lp, command.seq
        if not seq:
            # From a producer without sequences: nothing tells a repeat.
            return ProduceAnswer(Code.OK, self._next_offset(command))
        code, expected = self.dedup.decide(producer, epoch, lp, seq, command.base)
        if code is not Code.OK:
            return ProduceAnswer(code, expected=expected)
        offset = self._next_offset(command)
        self.dedup.record(producer, epoch, lp, seq, self.last_time_ms, command.source_pos)
        if self.dedup.seedless:
            self._note_doubtful((producer, epoch, lp), command.base, seq, 1, offset)
        return ProduceAnswer(Code.OK, offset)

    def produce_runs(self, command: ProduceRuns) -> RunsAnswer:
        """As `produce` of every message of the runs, in order, in steps of whole runs. Hashes are
        the sender's to check."""
        if self.state is not PartitionState.OPEN:
            creating = self.state is PartitionState.CREATING
            refused = RunAnswer(Code.NOT_OPEN if creating else Code.CLOSED)
            return RunsAnswer((refused,) * len(command.runs), self.to_version, self.targets)
        answers = tuple([self._produce_run(command, run) for run in command.runs])
        return RunsAnswer(answers)

    def _produce_run(self, command: ProduceRuns, run: ProducedRun) -> RunAnswer:
        lp, seq, count, base, source_pos = run
        if not self.lo <= lp < self.hi:
            return RunAnswer(Code.WRONG_RANGE)
        dedup, producer, epoch = self.dedup, command.producer, command.epoch
        code, expected = dedup.decide(producer, epoch, lp, seq, base)
        if code is Code.PRODUCER_FENCED or code is Code.OUT_OF_SEQ:
            return RunAnswer(code, expected=expected)
        # What comes before `expected` is stored already.
        stored = seq + count - expected
        if stored <= 0:
            return RunAnswer(Code.DUPLICATE, expected=expected)
        offset = self.end_offset
        self.end_offset = offset + stored
        self.last_time_ms = max(self.last_time_ms, command.time_ms)
        dedup.record(producer, epoch, lp, seq + count - 1, self.last_time_ms, source_pos)
        if dedup.seedless:
            self._note_doubtful((producer, epoch, lp), base, seq + count - stored, stored, offset)
        return RunAnswer(Code.OK, offset, stored, seq + count)

    def _note_doubtful(self, key: FilterKey, base: int, seq: int, count: int, offset: int) -> None:
        """A run was appended that may be stored before, in a partition sealed from outside."""
        _, epoch, lp = key
        if epoch > first_epoch(self.created_version) or not self.dedup.is_seedless(lp):
            # A session that began here has sent nothing to a partition before.
            return
        noted = self.doubtful.get(key)
        if noted is None:
            noted = self.doubtful[key] = Doubtful(base)
        count = min(count, noted.base + UNANSWERED_MAX - seq)
        if count <= 0:
            return
        noted.add(seq, count, offset)
        for group, own in self.groups.items():
            if self._pass_repeats(group, own, key, [(seq, count, offset)]):
                own.park_version += 1

    def _pass_repeats(
        self, group: str, own: GroupCursor, key: FilterKey, runs: Iterable[tuple[int, int, int]]
    ) -> bool:
        """Acknowledges what the group has read in another partition; True when there was
        something."""
        read = own.filter.get(key, 0)
        found = False
        for seq, count, offset in runs:
            again = min(count, read - seq + 1)
            if again > 0:
                found = True
                own.cursor.ack_range(offset, offset + again)
                if self.on_passed is not None:
                    self.on_passed(group, own.group_epoch, offset, again)
        return found

    def _next_offset(self, command: Produce) -> int:
        offset = self.end_offset
        self.end_offset = offset + 1
        self.last_time_ms = max(self.last_time_ms, command.time_ms)
        return offset

    def append_until(self, end_offset: int, time_ms: int) -> None:
        """Messages of producers without sequences were appended up to `end_offset` (exclusive)."""
        assert self.state is PartitionState.OPEN
        assert end_offset >= self.end_offset
        self.end_offset = end_offset
        self.last_time_ms = max(self.last_time_ms, time_ms)

    def refusal(self, command: Produce) -> Code:
        """Returns the refusal that needs no log; OK when the sequence decides."""
        if self.state is PartitionState.CREATING:
            return Code.NOT_OPEN
        if self.state is not PartitionState.OPEN:
            return Code.CLOSED
        if not self.lo <= command.lp < self.hi:
            return Code.WRONG_RANGE
        if self.lp_of is not None and self.lp_of(command.key) != command.lp:
            return Code.BAD_HASH
        return Code.OK

    def open_producer(self, command: OpenProducer) -> ProducerAnswer:
        """Fences older sessions and says what is stored."""
        if self.state is not PartitionState.OPEN:
            creating = self.state is PartitionState.CREATING
            return ProducerAnswer(Code.NOT_OPEN if creating else Code.CLOSED)
        known = self.dedup.epochs.get(command.producer, 0)
        if self.dedup.seedless:
            known = max(known, first_epoch(self.created_version))
        if command.epoch and not self.dedup.fence(command.producer, command.epoch):
            return ProducerAnswer(Code.PRODUCER_FENCED, epoch=known)
        stored = sorted(
            (lp, row.last_seq, row.source_pos)
            for (producer, lp), row in self.dedup.rows.items()
            if producer == command.producer
        )
        return ProducerAnswer(Code.OK, tuple(stored), max(known, command.epoch))

    def expire_producers(self, command: ExpireProducers) -> Answer:
        """Not while a change may be about to read the table, and not what becomes its seed."""
        if self.state is not PartitionState.OPEN:
            return Answer(Code.CLOSED)
        if command.before_ms:
            self.dedup.expire(command.before_ms, command.now_ms)
        return Answer(Code.OK)

    # Control entries

    def open(self, command: Open) -> Answer:
        """OPEN with the seed; a repeat changes nothing."""
        if not self._heard_term(command.term):
            return Answer(Code.STALE_TERM)
        if self.state is PartitionState.CREATING:
            self.state = PartitionState.OPEN
            self.end_offset = OPEN_OFFSET + 1
            self.last_time_ms = command.time_floor_ms
            self.dedup = DedupTable.load(command.dedup_seed)
            for own in self.groups.values():
                self._pass_open(own.cursor)
        return Answer(Code.OK)

    def seal(self, command: Seal) -> SealAnswer:
        """CLOSE, once. What another change sealed stays sealed, and its CLOSE stands."""
        if not self._heard_term(command.term):
            return SealAnswer(Code.STALE_TERM)
        if self.state is PartitionState.CREATING:
            return SealAnswer(Code.NOT_OPEN)
        if self.state is PartitionState.OPEN:
            self.state = PartitionState.SEALED
            self.close_offset = self.end_offset
            self.end_offset += 1
            self.sealed_by = command.change_id
            self.to_version, self.targets = command.to_version, command.targets
        elif self.sealed_by == command.change_id or command.external:
            # An amended or a late seal: other targets than those in CLOSE.
            self.to_version, self.targets = command.to_version, command.targets
        self.external = self.external or command.external
        code = Code.OK if self.sealed_by == command.change_id else Code.SEALED_BY
        return SealAnswer(code, self.close_offset, self.dedup.pack(), self.sealed_by, self.external)

    def _heard_term(self, term: int) -> bool:
        if term < self.term:
            return False
        self.term = term
        return True

    # Groups

    def open_cursor(self, command: OpenCursor) -> CursorAnswer:
        """Opens a cursor, once per group epoch; an older group epoch is refused."""
        own = self.groups.get(command.group)
        if own is None or own.group_epoch < command.group_epoch:
            own = self.groups[command.group] = self._fresh_cursor(own, command)
        elif own.group_epoch > command.group_epoch:
            return CursorAnswer(Code.NOT_VISIBLE)
        if command.taken is not None and not own.skipped:
            own.skipped = True
            self._come_back(own, command.taken)
        return CursorAnswer(Code.OK, own.without)

    def _fresh_cursor(self, own: GroupCursor | None, command: OpenCursor) -> GroupCursor:
        cursor = Cursor(self._start_of(command.start))
        fresh = GroupCursor(command.group_epoch, cursor, without=command.without)
        if own is not None:
            fresh.lease_epoch = own.lease_epoch
        for packed in command.states:
            self._take_over(fresh, packed)
        self._pass_open(cursor)
        for key in fresh.filter.keys() & self.doubtful.keys():
            self._pass_repeats(command.group, fresh, key, self.doubtful[key].runs)
        fresh.expired = cursor.watermark < self.log_start
        return fresh

    @staticmethod
    def _come_back(own: GroupCursor, taken: tuple[tuple[int, int], ...]) -> None:
        """Takes back what was handed over, but for what targets began with."""
        if own.handed_over:
            own.handed_over = False
            for lo, hi in taken:
                own.parked.drop(lo, hi)
            own.park_version += 1

    def _start_of(self, start: int) -> int:
        if start == EARLIEST:
            return self.log_start
        end = self.end_offset if self.close_offset < 0 else self.close_offset
        return end if start == LATEST else min(start, end)

    def _pass_open(self, cursor: Cursor) -> None:
        if self.state is not PartitionState.CREATING and cursor.watermark == OPEN_OFFSET:
            cursor.advance(OPEN_OFFSET + 1)

    def _take_over(self, own: GroupCursor, packed: bytes) -> None:
        parked, filtered = json.loads(packed)
        own.parked.merge(parked, self.lo, self.hi)
        for producer, epoch, lp, seq in filtered:
            if self.lo <= lp < self.hi:
                own.filter[producer, epoch, lp] = seq

    def lease(self, command: Lease) -> Answer:
        """A new owner; an older epoch is refused."""
        own = self._own(command.group, command.group_epoch)
        if own is None:
            return Answer(Code.NOT_VISIBLE)
        known = own.lease_epoch
        if command.epoch < known or (own.fenced and command.epoch == known):
            return Answer(Code.LEASE_FENCED)
        own.lease_epoch, own.member, own.fenced = command.epoch, command.member, False
        return Answer(Code.OK)

    def _own(self, group: str, group_epoch: int) -> GroupCursor | None:
        own = self.groups.get(group)
        if own is None or own.group_epoch != group_epoch or own.handed_over:
            return None
        return own

    def check_owner(self, group: str, group_epoch: int, epoch: int) -> Code:
        """OK for the owner under the lease epoch in force."""
        own = self._own(group, group_epoch)
        if own is None:
            return Code.NOT_VISIBLE
        return Code.OK if self.holds_lease(own, epoch) else Code.LEASE_FENCED

    @staticmethod
    def holds_lease(own: GroupCursor, epoch: int) -> bool:
        """True for the lease epoch in force."""
        return own.lease_epoch == epoch and not own.fenced

    def ack(self, command: Ack) -> AckAnswer:
        """Acknowledges offsets for the owner."""
        code = self.check_owner(command.group, command.group_epoch, command.epoch)
        if code is not Code.OK:
            return AckAnswer(code)
        cursor = self.groups[command.group].cursor
        for offset in command.offsets:
            if self.is_message(offset):
                cursor.ack(offset)
        return AckAnswer(Code.OK, self.drained(command.group))

    def ack_ranges(self, command: AckRanges) -> AckAnswer:
        """Acknowledges ranges of offsets for the owner."""
        code = self.check_owner(command.group, command.group_epoch, command.epoch)
        if code is not Code.OK:
            return AckAnswer(code)
        cursor = self.groups[command.group].cursor
        ranges = command.ranges
        end = self.end_offset if self.close_offset < 0 else self.close_offset
        for first, last in zip(ranges[::2], ranges[1::2], strict=False):
            cursor.ack_range(max(first, OPEN_OFFSET + 1), min(last + 1, end))
        return AckAnswer(Code.OK, self.drained(command.group))

    def is_message(self, offset: int) -> bool:
        """True for the offsets of messages."""
        return OPEN_OFFSET < offset < self.end_offset and offset != self.close_offset

    def drained(self, group: str, *, whole: bool = False) -> bool:
        """True when the group has acknowledged or parked everything up to CLOSE; `whole`: and has
        nothing parked."""
        own = self.groups.get(group)
        if own is None or self.state is not PartitionState.SEALED:
            return False
        if own.expired or own.fenced or any(key.resuming for key in own.parked.keys.values()):
            return False
        if whole and own.parked.keys:
            return False
        return own.cursor.watermark >= self.close_offset

    def hand_over(self, command: HandOver) -> HandOverAnswer:
        """Freezes what the group has here, and gives it to the targets; repeats answer the same."""
        own = self.groups.get(command.group)
        if own is None or own.group_epoch != command.group_epoch:
            return HandOverAnswer(Code.NOT_VISIBLE)
        if not self.drained(command.group, whole=own.skipped):
            return HandOverAnswer(Code.NOT_DRAINED)
        own.handed_over = True
        return HandOverAnswer(Code.OK, self._packed_state(own))

    def _packed_state(self, own: GroupCursor) -> bytes:
        merged: dict[FilterKey, int] = {}
        for (producer, epoch, lp), seq in own.filter.items():
            # A session that stored something newer here repeats nothing older any more.
            if self.dedup.last_seq(producer, epoch, lp) < seq:
                merged[producer, epoch, lp] = seq
        if self.external:
            for (producer, lp), row in self.dedup.rows.items():
                key = (producer, row.epoch, lp)
                # It may have been sealed before all was repeated that is stored elsewhere, too.
                merged[key] = max(row.last_seq, merged.get(key, 0))
        filtered = sorted([*key, seq] for key, seq in merged.items())
        return json.dumps([own.parked.pack(), filtered], separators=(",", ":")).encode()

    # Parked keys

    def park(self, command: Park) -> ParkAnswer:
        """Copies a message to the park log and acknowledges it, in one."""
        code = self.check_owner(command.group, command.group_epoch, command.epoch)
        if code is not Code.OK:
            return ParkAnswer(code)
        own = self.groups[command.group]
        parked, key = own.parked, command.key
        if not self.is_message(command.offset) or command.offset in own.cursor:
            return self._parked_answer(own, key, Code.DUPLICATE)
        entry = ParkedEntry(self.created_version, command.offset, self.pid, command.message)
        # A message without a key, or of another range, belongs here: what is parked goes the way of
        # its logical partition.
        lp = command.lp if self.lo <= command.lp < self.hi else self.lo
        code = parked.append(key, lp, entry, follow=command.follow)
        if code is Code.OK:
            own.cursor.ack(command.offset)
        return self._parked_answer(own, key, code)

    @staticmethod
    def _parked_answer(own: GroupCursor, key: bytes, code: Code) -> ParkAnswer:
        if code is Code.OK:
            own.park_version += 1
        left = own.parked.keys.get(key)
        head = left.entries[0] if left is not None and left.resuming else None
        return ParkAnswer(code, left is None, head, own.park_version)

    def done_parked(self, command: DoneParked) -> ParkAnswer:
        """The head of a resuming key leaves; a repeat finds another head."""
        code = self.check_owner(command.group, command.group_epoch, command.epoch)
        if code is not Code.OK:
            return ParkAnswer(code)
        own = self.groups[command.group]
        change = own.parked.stop if command.failed else own.parked.done
        return self._parked_answer(own, command.key, change(command.key, command.token))

    def resume_parked(self, command: ResumeParked) -> ParkAnswer:
        """An operator resumes a key."""
        own = self.groups.get(command.group)
        if own is None or own.handed_over:
            return ParkAnswer(Code.NOT_VISIBLE)
        return self._parked_answer(
            own, command.key, own.parked.resume(command.key, once=command.once)
        )

    def skip_parked(self, command: SkipParked) -> ParkAnswer:
        """An operator skips a head."""
        own = self.groups.get(command.group)
        if own is None or own.handed_over:
            return ParkAnswer(Code.NOT_VISIBLE)
        code = own.parked.skip(command.key, command.token)
        return self._parked_answer(own, command.key, code)

    def replace_parked(self, command: ReplaceParked) -> ParkAnswer:
        """An operator replaces a head."""
        own = self.groups.get(command.group)
        if own is None or own.handed_over:
            return ParkAnswer(Code.NOT_VISIBLE)
        code = own.parked.replace(command.key, command.token, command.message)
        return self._parked_answer(own, command.key, code)

    def check_fetch(self, group: str, group_epoch: int, epoch: int) -> Code:
        """Returns OK when the owner may read now, LEASE_FENCED when it never may again."""
        code = self.check_owner(group, group_epoch, epoch)
        if code is Code.LEASE_FENCED and self.groups[group].lease_epoch < epoch:
            # Of a leader that has not applied this lease yet.
            return Code.NOT_VISIBLE
        if code is Code.OK and self.groups[group].expired:
            return Code.DATA_EXPIRED
        return code

    def unread(self, group: str, offset: int, count: int) -> tuple[list[int], int]:
        """The next offsets that an owner has to get from `offset` on, and the offset behind them.
        What was acknowledged by an earlier owner, or has expired, is passed over."""
        cursor = self.groups[group].cursor
        end = self.end_offset if self.close_offset < 0 else self.close_offset
        at = max(offset, cursor.watermark, OPEN_OFFSET + 1)
        found: list[int] = []
        while at < end and len(found) < count:
            if at not in cursor:
                found.append(at)
            at += 1
        return found, at

    def view(self, group: str) -> GroupView:
        """Returns the state that an owner begins with."""
        own = self.groups[group]
        parked = {
            key: each.entries[0] if each.resuming else None for key, each in own.parked.keys.items()
        }
        return GroupView(tuple(own.cursor.pack()), parked, own.park_version)

    # Retention

    def trim(self, command: Trim) -> Answer:
        """Moves the start of the log; groups below it stop."""
        end = self.end_offset if self.close_offset < 0 else self.close_offset
        self.log_start = max(self.log_start, min(command.log_start, end))
        for own in self.groups.values():
            if not own.handed_over and own.cursor.watermark < self.log_start:
                own.expired = True
        return Answer(Code.OK)

    def accept_loss(self, command: AcceptLoss) -> LossAnswer:
        """After DATA_EXPIRED: the operator's decision, or what a weak topic has recorded. What has
        expired since that record was made still stops the group."""
        own = self.groups.get(command.group)
        if own is None or not own.expired or command.group_epoch not in (0, own.group_epoch):
            return LossAnswer(Code.NOT_VISIBLE)
        first = own.cursor.watermark
        end = self.log_start if command.end < 0 else min(command.end, self.log_start)
        own.cursor.advance(end)
        own.expired = own.cursor.watermark < self.log_start
        own.fenced = own.fenced or (end > first and own.lease_epoch > 0)
        return LossAnswer(Code.OK, ((command.group, first, max(first, end)),))

    def drop_group(self, command: DropGroup) -> Answer:
        """Forgets a group."""
        self.groups.pop(command.group, None)
        return Answer(Code.OK)

    # State

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        groups = [
            [
                name,
                own.group_epoch,
                own.cursor.pack(),
                own.lease_epoch,
                own.member,
                own.parked.pack(),
                own.park_version,
                sorted([*key, seq] for key, seq in own.filter.items()),
                own.expired,
                own.handed_over,
                own.fenced,
                own.without,
                own.skipped,
            ]
            for name, own in sorted(self.groups.items())
        ]
        life = [self.state.name, self.end_offset, self.log_start, self.close_offset]
        seal = [self.sealed_by, self.to_version, self.external]
        targets = [[span.lo, span.hi, span.pid] for span in self.targets]
        times = [self.term, self.last_time_ms]
        dedup = self.dedup.pack().decode()
        doubtful = sorted([*key, each.base, each.runs] for key, each in self.doubtful.items())
        return json.dumps([life, seal, targets, times, dedup, doubtful, groups]).encode()

    def restore(self, snapshot: bytes) -> None:
        """Replaces the state by that of a snapshot."""
        life, seal, targets, times, dedup, doubtful, groups = json.loads(snapshot)
        self.state = PartitionState[life[0]]
        self.end_offset, self.log_start, self.close_offset = life[1:]
        self.sealed_by, self.to_version, self.external = seal
        self.targets = tuple(Span(lo, hi, pid) for lo, hi, pid in targets)
        self.term, self.last_time_ms = times
        self.dedup = DedupTable.load(dedup.encode())
        self.doubtful = {
            (producer, epoch, lp): Doubtful(base, [tuple(run) for run in runs])
            for producer, epoch, lp, base, runs in doubtful
        }
        self.groups = {}
        for name, group_epoch, cursor, lease, member, parked, version, filtered, *flags in groups:
            own = GroupCursor(group_epoch, Cursor.load(cursor), lease, member)
            own.parked.merge(parked, self.lo, self.hi)
            own.park_version = version
            own.filter = {(p, epoch, lp): seq for p, epoch, lp, seq in filtered}
            own.expired, own.handed_over, own.fenced, without, own.skipped = flags
            own.without = tuple(without)
            self.groups[name] = own

    def state_hash(self) -> int:
        """Equal for equal states."""
        return zlib.crc32(self.snapshot())

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of the module's docstring is broken."""
        sealed = self.state is PartitionState.SEALED
        assert sealed == (self.close_offset >= 0)
        assert not sealed or self.end_offset == self.close_offset + 1
        assert (self.state is PartitionState.CREATING) == (self.end_offset == 0)
        for (_, lp), row in self.dedup.rows.items():
            assert self.lo <= lp < self.hi
            assert row.last_seq > 0
        for own in self.groups.values():
            own.cursor.check_invariants()
            own.parked.check_invariants()
            assert own.cursor.watermark <= max(self.end_offset, self.log_start)


_METHODS: dict[type, str] = {
    Produce: "produce",
    ProduceRuns: "produce_runs",
    OpenProducer: "open_producer",
    ExpireProducers: "expire_producers",
    Open: "open",
    Seal: "seal",
    OpenCursor: "open_cursor",
    Lease: "lease",
    Ack: "ack",
    AckRanges: "ack_ranges",
    Park: "park",
    DoneParked: "done_parked",
    ResumeParked: "resume_parked",
    SkipParked: "skip_parked",
    ReplaceParked: "replace_parked",
    HandOver: "hand_over",
    Trim: "trim",
    AcceptLoss: "accept_loss",
    DropGroup: "drop_group",
}
