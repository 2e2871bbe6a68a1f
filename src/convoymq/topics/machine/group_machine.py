# cython: annotation_typing=False
"""A physical partition of an ordered topic as a replicated queue: the log of a stream, and the
state machine of `topics.machine.partition` that says what may be appended and who may read.

Messages come as ENQUEUE commands and get the stream's offsets; the offset within the partition is
one more, because OPEN is 0. Everything else that `topics.rules.commands` has comes in PARTITION
commands of sessions, each answered with its packed outcome.

| the partition is | ENQUEUE of a session     | behind PRODUCE      | PARTITION           |
|------------------|--------------------------|---------------------|---------------------|
| CREATING         | refused, NOT_OPEN        | NOT_OPEN            | `topics.machine.partition`  |
| OPEN             | appended as a whole      | appended, by run    | `topics.machine.partition`  |
| SEALED           | refused, CLOSED          | CLOSED              | `topics.machine.partition`  |

PRODUCE names the producer of the session's next ENQUEUE, and its runs: records of one logical
partition with sequences in succession. The ENQUEUE is answered with the outcome of each run. What
is a repeat, or refused, gets no offset; the rest lies in index ranges of its own. Sequences tell
what overtook, so that a refusal means nothing to later commands.

A refusal holds for the session: every later ENQUEUE of it is refused too, with the same code.
Otherwise what a publisher had under way behind a refused message could overtake it when the
partition opens. Who is refused goes on in a new session. From the first refusal on, every plain
answer to the session says from which command on it was refused, so that one answer that is lost
loses nothing.

The range of a message is its sender's to get right, who routes by a published route: the range of
a partition never changes. Range, hash and sequence are not looked at per message here; ranges and
sequences of a producer's runs are.

Retention drops closed segments as in a stream, and the start of the partition follows: a group that
has not read them stops (`DATA_EXPIRED`), or in a weak topic goes on with a recorded loss. TRIM
drops the segments below its offset.

Invariants: those of both parts; the partition's next data offset is one beyond the stream's, and
one more behind CLOSE; sessions with a refusal, or with runs before their
ENQUEUE, are known sessions.

Versions (ADR 0016):
    1: everything here.

Source: ordered topics, sections 1.2 and 3; ADR 0062.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from convoymq.kernels import batch
from convoymq.kernels.load_counter import LoadCounter
from convoymq.model import trace as words
from convoymq.queues.sessions import (
    APPLIED_OK,
    APPLIED_REJECTED,
    Packed,
    Session,
    decode_map,
)
from convoymq.queues.stream.machine import COMMAND_TYPES as STREAM_COMMAND_TYPES
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_APPLIED
from convoymq.topics.machine import tracing
from convoymq.topics.machine.codec import (
    CMD_PARTITION,
    CMD_PRODUCE,
    decode_command,
    decode_runs,
    encode_outcome,
)
from convoymq.topics.machine.partition import Outcome, PartitionMachine
from convoymq.topics.machine.versions import PartitionRules
from convoymq.topics.rules.commands import Ack, AckRanges, Command, Open, ProduceRuns, Trim
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code

FIRST_OFFSET = 1
"""Offset within the partition of the stream's first message."""
OPEN = PartitionState.OPEN
CREATION = "creation"
"""Change that opens the partitions with which a topic begins."""
Refusal = list[object]
"""As the answer to a session: [code, seq of the first refused ENQUEUE, version of the route in
which the targets are, targets as [lo, hi, pid]]."""

_STREAM_COMMANDS = [
    type for type in range(256) if STREAM_COMMAND_TYPES[2][type >> 3] >> (type & 7) & 1
]
COMMAND_TYPES = {
    1: supported.command_table((*_STREAM_COMMANDS, CMD_PARTITION, CMD_PRODUCE)),
}


class PartitionGroupMachine(StreamMachine):
    """State of one physical partition. See the module docstring.

    Args of the constructor: settings that all replicas agree on: those of a stream, and `pid`,
    `lo`, `hi` (range of logical partitions), `created_version`. A partition of version 0, with
    which the topic begins, is open from the start.
    """

    KIND = PartitionRules.KIND
    VERSION = PartitionRules.VERSION
    OLDEST_VERSION = PartitionRules.OLDEST_VERSION
    SNAPSHOT_FORMAT = 1

    def __init__(self, settings: Mapping[str, int] | None = None) -> None:
        super().__init__(settings)
        #: Counts what is appended, while somebody wants to know.
        self.load: LoadCounter | None = None
        #: Acknowledgements of owners whose lease was over, since this replica was opened.
        self.fenced = 0

    def _clear(self) -> None:
        super()._clear()
        settings = self.settings
        version = settings["created_version"]
        self.state = PartitionMachine(settings["pid"], settings["lo"], settings["hi"], version)
        if version == 0:
            self.state.open(Open(CREATION, version, 0))
        #: Session -> (seq of its first refused ENQUEUE, code).
        self.refused: dict[int, tuple[int, Code]] = {}
        #: Session -> body of the PRODUCE that came last, until its ENQUEUE.
        self.announced: dict[int, bytes] = {}
        #: Within an entry: the stream has messages that `state` was not told of.
        self._is_behind = False

    # ---------------------------------------------------------------- messages

    def _enqueue(
        self, session: Session | None, index: int, count: int, data: bytes, offset: int
    ) -> None:
        if self.announced and session is not None and session.id in self.announced:
            self._produce(session, index, count, data, offset)
            return
        state = self.state
        if state.state is not OPEN or (
            self.refused and session is not None and session.id in self.refused
        ):
            self._refuse(session)
            return
        before = self.next
        # Not by super(): in the compiled build it finds no methods of C.
        StreamMachine._enqueue(self, session, index, count, data, offset)
        # Once for all commands of an entry, unless another one looks at it.
        self._is_behind = True
        if self.load is not None:
            new = self.next - before
            self.load.count(data, offset, count - new, new)
        if self.trace is not None:
            new = self.next - before
            self.trace.keys(
                words.KEYED, data, index, offset, count - new, new, before + FIRST_OFFSET
            )

    def _produce(self, session: Session, index: int, count: int, data: bytes, offset: int) -> None:
        """An ENQUEUE behind PRODUCE: what is stored of it, by run."""
        session.producer = None
        if self._is_behind:
            self._follow()
        producer, epoch, runs = decode_runs(self.announced.pop(session.id))
        if sum([run.messages for run in runs]) != count:
            self._broken = True
            self._reply(session, APPLIED_REJECTED, "runs and messages do not fit")
            return
        if self.trace is not None:
            self.state.on_passed = partial(tracing.note_passed, self.trace)
        answer = self.state.produce_runs(ProduceRuns(producer, epoch, tuple(runs), self.time_ms))
        size = batch.enqueue_bytes(data, offset)
        first = end = begin = 0
        for run, its in zip(runs, answer.runs, strict=True):
            end += run.messages
            if self.trace is not None and its.stored:
                self.trace.add(
                    words.PRODUCED, 0, 0, producer, epoch, run.seq + run.messages - its.stored,
                    run.lp, its.stored, index, offset, its.offset, 0, 0,
                )  # fmt: skip
            if its.stored < run.messages:
                self._append_part(session, index, data, offset, first, begin - first, size, count)
                first = end - its.stored
                self.duplicates += run.messages - its.stored if its.expected >= run.seq else 0
            begin = end
        self._append_part(session, index, data, offset, first, end - first, size, count)
        if self.trace is not None:
            stored = sum([its.stored for its in answer.runs])
            if stored < count:
                left = count - stored
                self._trace_published(words.DUPLICATE, session, left, index, offset, stored)
        self._reply(session, APPLIED_OK, encode_outcome(answer))

    def _append_part(
        self,
        session: Session,
        index: int,
        data: bytes,
        command: int,
        first: int,
        part: int,
        size: int,
        count: int,
    ) -> None:
        """Appends records of an ENQUEUE with `count` records of `size` bytes."""
        if part:
            self._broken = self._broken or first > 0
            self._trace_published(0, session, part, index, command, first)
            if self.trace is not None:
                at = self.next + FIRST_OFFSET
                self.trace.keys(words.KEYED, data, index, command, first, part, at)
            if self.load is not None:
                self.load.count(data, command, first, part)
            self._append(index, command, first, part, size * part // count)
        if first + part < count:
            self._broken = True

    def _refuse(self, session: Session | None) -> None:
        """Answers an ENQUEUE that is not appended."""
        self._broken = True
        if session is None:
            return
        session.producer = None
        if session.id not in self.refused:
            creating = self.state.state is PartitionState.CREATING
            code = Code.NOT_OPEN if creating else Code.CLOSED
            self.refused[session.id] = (session.seq, code)
        self._answer(session)

    def _follow(self) -> None:
        """The partition's offsets follow the stream's."""
        self._is_behind = False
        # Of a command in runs the state may have counted what comes next.
        end = max(self.next + FIRST_OFFSET, self.state.end_offset)
        self.state.append_until(end, self.time_ms)

    def _end_entry(self) -> None:
        if self._is_behind:
            self._follow()
        StreamMachine._end_entry(self)

    def refusal_of(self, session_id: int) -> Refusal | None:
        """Returns what a session is told with every answer; None: nothing of it was refused."""
        known = self.refused.get(session_id)
        if known is None:
            return None
        seq, code = known
        if code is not Code.CLOSED:
            return [code.value, seq, 0, []]
        state = self.state
        targets = [[span.lo, span.hi, span.pid] for span in state.targets]
        return [code.value, seq, state.to_version, targets]

    def _answer(self, session: Session) -> None:
        refusal = self.refusal_of(session.id) if self.refused else None
        if refusal is None:
            StreamMachine._answer(self, session)
            return
        effect = (EFFECT_APPLIED, session.id, session.seq, APPLIED_REJECTED, refusal)
        if session.applied_at >= 0:
            self.effects[session.applied_at] = effect
        else:
            session.applied_at = len(self.effects)
            self.effects.append(effect)
            self._touched.append(session)

    def _resend_answers(self, session: Session) -> None:
        refusal = self.refusal_of(session.id)
        if refusal is None:
            super()._resend_answers(session)
            return
        self.effects.append((EFFECT_APPLIED, session.id, session.seq, APPLIED_REJECTED, refusal))

    def _remove_session(self, session: Session) -> None:
        super()._remove_session(session)
        self.refused.pop(session.id, None)
        self.announced.pop(session.id, None)

    # ---------------------------------------------------------------- commands

    def _session_command(
        self, session: Session, kind: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == CMD_PRODUCE:
            self.announced[session.id] = batch.command_body(data, offset)[:arg]
            self._answer(session)
            return
        if kind != CMD_PARTITION:
            super()._session_command(session, kind, count, arg, data, offset)
            return
        if self._is_behind:
            self._follow()
        outcome = self._carry_out(decode_command(batch.command_body(data, offset)[:arg]))
        self._reply(session, APPLIED_OK, encode_outcome(outcome))

    def _carry_out(self, command: Command) -> Outcome:
        if self.trace is None:
            outcome = self.state.apply(command)
        else:
            self.state.on_passed = partial(tracing.note_passed, self.trace)
            outcome = tracing.applied(self.trace, self.state, command)
        if isinstance(command, Ack | AckRanges) and outcome.code is Code.LEASE_FENCED:
            self.fenced += 1
        if isinstance(command, Trim):
            self._drop_below(self.state.log_start - FIRST_OFFSET)
        return outcome

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_CONFIG:
            self._configure(decode_map(batch.command_body(data, offset), count))
        elif kind == CMD_PARTITION:
            # CLOSE of a partition that was sealed from outside.
            self._carry_out(decode_command(batch.command_body(data, offset)[:arg]))
        else:
            super()._leader_command(kind, flags, count, arg, data, offset)

    @property
    def configurable(self) -> bool:
        return True

    def command_types(self, version: int) -> bytes:
        """Returns the command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    # ---------------------------------------------------------------- retention

    def _retain(self) -> None:
        super()._retain()
        start = self.first + FIRST_OFFSET
        if self.truncated and start > self.state.log_start:
            if self.state.state is OPEN:
                self._follow()
            self.state.trim(Trim(start))

    def _drop_below(self, offset: int) -> None:
        """Drops the closed segments that end at or below a stream's offset."""
        while self.segments and self.segments[0][0] <= offset:
            self._drop_segment()

    # ---------------------------------------------------------------- looking at it

    def check_invariants(self) -> None:
        """Asserts what the module docstring promises. Cost: O(index ranges + state)."""
        super().check_invariants()
        state = self.state
        state.check_invariants()
        if state.state is PartitionState.CREATING:
            assert self.next == 0
        else:
            closed = state.state is not OPEN
            assert state.end_offset == self.next + FIRST_OFFSET + closed
        assert not self.truncated or self.first + FIRST_OFFSET <= state.log_start
        assert self.refused.keys() <= self.sessions.keys()
        assert self.announced.keys() <= self.sessions.keys()

    # ---------------------------------------------------------------- snapshots

    def _pack(self) -> dict[str, object]:
        refused = [(session, seq, code.value) for session, (seq, code) in self.refused.items()]
        return {
            **super()._pack(),
            "partition": self.state.snapshot(),
            "refused": refused,
            "announced": list(self.announced.items()),
        }

    def _restore(self, known: Packed) -> None:
        super()._restore(known)
        self.state.restore(known["partition"])
        self.refused = {session: (seq, Code(code)) for session, seq, code in known["refused"]}
        self.announced = dict(known["announced"])
