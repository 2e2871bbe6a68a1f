"""A simulated physical partition: the real state machine behind a replicated log.

What a leader has appended commits a little later, all at once. When a leader is lost, a prefix of
what was not committed survives, nobody is answered, and the next leader starts from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from convoymq.sim.topics import events
from convoymq.topics.machine.partition import Outcome, PartitionMachine
from convoymq.topics.rules import coordinator as coordinating
from convoymq.topics.rules.answers import (
    AckAnswer,
    Answer,
    LossAnswer,
    ParkAnswer,
    ParkedEntry,
    ProduceAnswer,
    SealAnswer,
)
from convoymq.topics.rules.commands import (
    Ack,
    AckRanges,
    Command,
    DoneParked,
    HandOver,
    Lease,
    Open,
    OpenCursor,
    Park,
    Produce,
    Seal,
    SkipParked,
)
from convoymq.topics.rules.hashing import key_hashes
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.member import Fetched
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

Reply = Callable[[Outcome], None]
FetchReply = Callable[[Fetched], None]


class Record(NamedTuple):
    """A stored message, as an owner gets it."""

    offset: int
    lp: int
    key: bytes
    producer: int
    epoch: int
    seq: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Records:
    """Neighbouring messages; see `topics.rules.batches.Batch`."""

    offset: int
    records: tuple[Record, ...]

    @property
    def messages(self) -> int:
        """Returns how many there are."""
        return len(self.records)

    @property
    def size(self) -> int:
        """Returns a byte for each."""
        return len(self.records)

    def hashes(self) -> bytes:
        """Returns 8 bytes for each message: a hash of its key."""
        return key_hashes(record.key for record in self.records)

    def key(self, offset: int) -> bytes:
        """Returns the order key of a message."""
        return self.records[offset - self.offset].key

    def copy(self, offset: int) -> bytes:
        """Returns a message as it is parked."""
        return self.records[offset - self.offset].message


class SimPartition:
    """One physical partition and its leader."""

    def __init__(self, world: TopicWorld, pid: int, lo: int, hi: int, version: int) -> None:
        self.world = world
        self.pid = pid
        self._passed: list[tuple[str, int, int, int]] = []
        self.machine = self._machine(lo, hi, version)
        self.log: dict[int, Record] = {}
        self.up = True
        self.dark = False
        """The server is dead: nobody reaches it."""
        self.cut = False
        """The server does not reach the controller."""
        self.silent = False
        """Requests to seal it are not heard."""
        self._pending: list[tuple[Command, Reply]] = []
        self._committing = False
        self._life = 0
        self._fetches: list[tuple[Fetch, str, FetchReply]] = []
        self._reported: set[tuple[str, int]] = set()

    def _machine(self, lo: int, hi: int, version: int) -> PartitionMachine:
        made = PartitionMachine(self.pid, lo, hi, version, lp_of=self.world.lp_of)
        made.on_passed = lambda *passed: self._passed.append(passed)
        return made

    @property
    def serves(self) -> bool:
        """Returns whether somebody answers."""
        return self.up and not self.dark

    def submit(self, command: Command, reply: Reply) -> None:
        """A request to the leader arrived."""
        if not self.serves:
            return
        if isinstance(command, Produce):
            if self.blocked or not self.world.may_accept(self):
                reply(ProduceAnswer(Code.NOT_LEADER))
                return
        elif self.blocked and not isinstance(command, Seal):
            return
        self._pending.append((command, reply))
        if not self._committing:
            self._committing = True
            self.world.after(self.world.draw(1, 3), self._commit, self._life)

    def _commit(self, life: int) -> None:
        if life != self._life:
            return
        self._committing = False
        pending, self._pending = self._pending, []
        for command, reply in pending:
            reply(self._apply(command))
        self._report_drained()
        self._answer_fetches()

    def _apply(self, command: Command) -> Outcome:
        machine = self.machine
        was_open = machine.state is PartitionState.OPEN
        acked_before = self._acked_before(command)
        head = self._head(command)
        begins = self._begins(command)
        fresh = self._fresh(command)
        answer = machine.apply(command)
        if fresh and answer.code is Code.OK:
            self._trace_acks(command, fresh)
        if begins:
            self._trace_begin(command)
        if self.world.checks_machines:
            machine.check_invariants()
        self._trace(command, answer, was_open, acked_before, head)
        self._trace_passed()
        return answer

    def _trace_passed(self) -> None:
        """Second copies that a group passes over, behind the event that a message is stored."""
        passed, self._passed = self._passed, []
        for group, gen, first, count in passed:
            for offset in range(first, first + count):
                now = self.world.now
                self.world.trace.append(events.Passed(now, group, gen, self.pid, offset))

    def _acked_before(self, command: Command) -> bool:
        if isinstance(command, Ack | Park):
            own = self.machine.groups.get(command.group)
            offset = command.offsets[0] if isinstance(command, Ack) else command.offset
            return own is None or offset in own.cursor
        return False

    def _fresh(self, command: Command) -> list[int]:
        """Returns the messages that ranges acknowledge for the first time."""
        own = self.machine.groups.get(command.group) if isinstance(command, AckRanges) else None
        if own is None or not isinstance(command, AckRanges):
            return []
        ranges = command.ranges
        return [
            offset
            for first, last in zip(ranges[::2], ranges[1::2], strict=True)
            for offset in range(first, last + 1)
            if offset not in own.cursor
        ]

    def _trace_acks(self, command: Command, offsets: list[int]) -> None:
        assert isinstance(command, AckRanges)
        group, gen, epoch = command.group, command.group_epoch, command.epoch
        now, member = self.world.now, self.machine.groups[group].member
        self.world.trace.extend(
            events.Ack(now, group, gen, self.pid, offset, member, epoch) for offset in offsets
        )

    def _begins(self, command: Command) -> bool:
        """Returns whether a group begins here by its position, and not at the first offset."""
        if not isinstance(command, OpenCursor):
            return False
        own = self.machine.groups.get(command.group)
        return self.machine.state is not PartitionState.CREATING and (
            own is None or own.group_epoch < command.group_epoch
        )

    def _trace_begin(self, command: Command) -> None:
        assert isinstance(command, OpenCursor)
        start = command.start
        if not start:
            return
        gen = command.group_epoch
        first = self.machine.groups[command.group].cursor.watermark
        now = self.world.now
        self.world.trace.append(
            events.Loss(now, command.group, gen, self.pid, 0, first, "position")
        )

    def _head(self, command: Command) -> ParkedEntry | None:
        if isinstance(command, DoneParked | SkipParked):
            own = self.machine.groups.get(command.group)
            parked = own.parked.keys.get(command.key) if own is not None else None
            return parked.entries[0] if parked is not None else None
        return None

    def _trace(
        self,
        command: Command,
        answer: Outcome,
        was_open: bool,
        acked_before: bool,
        head: ParkedEntry | None,
    ) -> None:
        world, machine, now = self.world, self.machine, self.world.now
        trace = world.trace.append
        match command:
            case Produce() if isinstance(answer, ProduceAnswer):
                message = world.message_of(command)
                if answer.code is Code.OK:
                    self.log[answer.offset] = Record(
                        answer.offset,
                        command.lp,
                        command.key,
                        command.producer,
                        command.epoch,
                        command.seq,
                        b"%d" % message,
                    )
                    version = machine.created_version
                    trace(events.Stored(now, message, self.pid, version, answer.offset))
                elif answer.code is not Code.DUPLICATE:
                    trace(events.Rejected(now, message, self.pid, answer.code.value))
            case Ack() if isinstance(answer, AckAnswer):
                if answer.code is Code.OK and not acked_before:
                    for offset in command.offsets:
                        trace(
                            events.Ack(
                                now,
                                command.group,
                                command.group_epoch,
                                self.pid,
                                offset,
                                machine.groups[command.group].member,
                                command.epoch,
                            )
                        )
            case Lease() if answer.code is Code.OK:
                epoch = command.epoch
                if world.granted(command.group, self.pid, epoch):
                    trace(events.Grant(now, command.group, self.pid, command.member, epoch))
            case Seal() if isinstance(answer, SealAnswer):
                if was_open and answer.close_offset >= 0:
                    trace(events.Sealed(now, self.pid, answer.close_offset))
            case Open() if answer.code is Code.OK:
                if not was_open and machine.end_offset == 1:
                    trace(events.Opened(now, self.pid, machine.created_version))
            case Park() | DoneParked() | SkipParked() if isinstance(answer, ParkAnswer):
                self._trace_parked(command, answer, head)
            case _ if isinstance(answer, LossAnswer) and not world.plan.weak:
                for group, first, end in answer.losses:
                    gen = machine.groups[group].group_epoch
                    trace(events.Loss(now, group, gen, self.pid, first, end, "expired"))

    def _trace_parked(
        self,
        command: Park | DoneParked | SkipParked,
        answer: ParkAnswer,
        head: ParkedEntry | None,
    ) -> None:
        if answer.code is not Code.OK:
            return
        now, trace, group = self.world.now, self.world.trace.append, command.group
        gen = self.machine.groups[group].group_epoch
        if isinstance(command, Park):
            message = int(command.message)
            offset, key, epoch = command.offset, command.key, command.epoch
            trace(events.Park(now, group, gen, self.pid, offset, key, message, epoch))
        elif isinstance(command, SkipParked) or not command.failed:
            assert head is not None
            message, skipped = int(head.message), isinstance(command, SkipParked)
            trace(events.Unpark(now, group, gen, head.version, command.key, message, skipped))

    # Reads

    def fetch(self, fetch: Fetch, group: str, reply: FetchReply) -> None:
        """An owner asks for messages."""
        if self.serves and not self.blocked and not self._answer_fetch(fetch, group, reply):
            self._fetches.append((fetch, group, reply))

    def _answer_fetches(self) -> None:
        waiting, self._fetches = self._fetches, []
        for fetch, group, reply in waiting:
            if not self._answer_fetch(fetch, group, reply):
                self._fetches.append((fetch, group, reply))

    def _answer_fetch(self, fetch: Fetch, group: str, reply: FetchReply) -> bool:
        machine = self.machine
        code = machine.check_fetch(group, fetch.group_epoch, fetch.epoch)
        if code is not Code.OK:
            if code is Code.DATA_EXPIRED:
                expired = machine.groups[group].cursor.watermark
                seat = self.world.metadata.groups[group]
                self.world.network.send(
                    (self.pid, group), seat.on_expired,
                    self.pid, fetch.group_epoch, expired, machine.log_start,
                )  # fmt: skip
            reply(Fetched(code))
            return True
        own = machine.groups[group]
        view = None
        if fetch.offset < 0 or fetch.park_version < own.park_version:
            view = machine.view(group)
        offsets, next_offset = machine.unread(group, fetch.offset, fetch.count)
        if not offsets and view is None:
            return False
        neighbours = groupby(enumerate(offsets), lambda each: each[1] - each[0])
        runs = [tuple(self.log[offset] for _, offset in run) for _, run in neighbours]
        batches = [Records(run[0].offset, run) for run in runs]
        reply(Fetched(Code.OK, batches, next_offset, view))
        return True

    def ask_drained(self, group: str, group_epoch: int, whole: bool) -> None:
        """A coordinator asks."""
        if not self.serves or self.blocked:
            return
        own = self.machine.groups.get(group)
        known = own is not None and own.group_epoch == group_epoch
        drained = known and self.machine.drained(group, whole=whole)
        self.world.metadata.report_asked(self.pid, group, group_epoch, drained, whole)

    def _report_drained(self) -> None:
        for name, own in self.machine.groups.items():
            report = (name, own.group_epoch)
            if report not in self._reported and self.machine.drained(name):
                self._reported.add(report)
                self.world.metadata.report_drained(self.pid, name, own.group_epoch)

    def ask_sealed(self, reply: Callable[[SealAnswer], None]) -> None:
        """A controller asks; only a sealed partition answers."""
        machine = self.machine
        if self.serves and machine.state is PartitionState.SEALED:
            by = machine.sealed_by
            reply(SealAnswer(Code.SEALED_BY, machine.close_offset, machine.dedup.pack(), by))

    # Faults

    def crash(self, election_ms: int) -> None:
        """The leader is lost; the next one comes after an election."""
        if not self.up:
            return
        self._lose_leader()
        self.up = False
        self.world.after(election_ms, self._elect, self._life)

    def _lose_leader(self) -> None:
        kept = self.world.draw(0, len(self._pending))
        pending, self._pending = self._pending[:kept], []
        for command, _ in pending:
            self._apply(command)
        self._committing = False
        self._life += 1
        self._fetches.clear()
        self._reported.clear()

    def _elect(self, life: int) -> None:
        if life != self._life:
            return
        self.up = True
        old = self.machine
        self.machine = self._machine(old.lo, old.hi, old.created_version)
        self.machine.restore(old.snapshot())
        assert self.machine.state_hash() == old.state_hash(), "a snapshot lost state"
        self._report_drained()

    def go_dark(self) -> None:
        """The server dies for long."""
        self._lose_leader()
        self.up, self.dark = True, True

    def come_back(self) -> None:
        """The server is there again. It asks the controller before it serves: see `blocked`."""
        self.dark = self.cut = False

    @property
    def blocked(self) -> bool:
        """Returns whether the server knows that it was sealed from outside, and waits for CLOSE."""
        return not self.cut and self.pid in self.world.metadata.blocked

    def retry(self, park: Park, reply: Reply) -> None:
        """A copy goes to the retry topic, then the message is acknowledged."""
        machine = self.machine
        if not self.serves or self.blocked:
            return
        code = machine.check_owner(park.group, park.group_epoch, park.epoch)
        if code is not Code.OK:
            reply(ParkAnswer(code))
            return
        message, now = int(park.message), self.world.now
        self.world.trace.append(
            events.Retried(now, park.group, park.group_epoch, self.pid, park.offset, message)
        )

        def acknowledged(answer: Outcome) -> None:
            assert isinstance(answer, AckAnswer)
            reply(ParkAnswer(answer.code, version=-1))

        self.submit(Ack(park.group, park.group_epoch, park.epoch, (park.offset,)), acknowledged)

    def hand_over_or_ask(self, command: coordinating.Told, reply: Reply) -> None:
        """Takes commands of coordinators; a leader answers NOT_DRAINED without logging anything."""
        if isinstance(command, HandOver) and self.serves:
            own = self.machine.groups.get(command.group)
            if own is not None and not self.machine.drained(command.group):
                reply(Answer(Code.NOT_DRAINED))
                return
        self.submit(command, reply)
