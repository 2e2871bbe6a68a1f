"""The replicated machine of a partition: its part of the rules, and that the rest is as in
`topics.machine.partition`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.entries import HEADER_SIZE
from convoymq.kernels.trace import TraceRows
from convoymq.model import trace as words
from convoymq.model.errors import UnknownCommand
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import EFFECT_APPLIED
from convoymq.topics.machine.codec import CMD_PRODUCE, decode_outcome, encode_runs
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import (
    AckAnswer,
    Answer,
    LossAnswer,
    ProducerAnswer,
    RunAnswer,
    RunsAnswer,
    SealAnswer,
)
from convoymq.topics.rules.commands import ProducedRun as Run
from convoymq.topics.rules.dedup import DedupTable, SourceSeal, seed_of
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code
from tests.unit.queues.quorum.support import Log, apply
from tests.unit.topics.machine.support import (
    OPEN,
    SEAL,
    SETTINGS,
    TELLER,
    A,
    B,
    Bench,
    bodies_of,
    produce,
    tell,
)

TARGETS = [[0, 4, 7], [4, 8, 8]]


def test_messages_lie_between_open_and_close() -> None:
    bench = Bench()
    bench.publish(1, 2, 3)
    assert (bench.machine.next, bench.machine.state.end_offset) == (3, 4)
    sealed = bench.ask(SEAL)
    assert isinstance(sealed, SealAnswer)
    assert (sealed.code, sealed.close_offset) == (Code.OK, 4)


def test_the_first_partitions_of_a_topic_are_open_from_the_start() -> None:
    bench = Bench(opened=False, created_version=0)
    assert bench.machine.state.state is PartitionState.OPEN
    assert bench.publish(1)[-1][3:] == (APPLIED_OK, None)


def test_a_message_that_is_refused_gets_no_offset_and_its_session_hears_where_to_go() -> None:
    bench = Bench()
    bench.publish(1)
    tell(bench.log, SEAL)
    bench.log.publish(A, [2, 3])
    bench.log.publish(B, [4])
    answers = {e[1]: e for e in bench.seal()}
    # The session's second command was stored, its third was not.
    assert answers[A] == (
        EFFECT_APPLIED, A, 3, APPLIED_REJECTED, ["CLOSED", 3, 4, TARGETS],
    )  # fmt: skip
    assert answers[B][3:] == (APPLIED_REJECTED, ["CLOSED", 2, 4, TARGETS])
    assert bench.machine.next == 1


def test_every_later_answer_says_what_was_refused_so_a_lost_one_does_no_harm() -> None:
    bench = Bench()
    bench.publish(1)
    bench.ask(SEAL)
    bench.publish(2)
    assert bench.publish(3)[-1][2:] == (4, APPLIED_REJECTED, ["CLOSED", 3, 4, TARGETS])
    bench.machine.resend(A >> 56)
    answer = next(e for e in bench.machine.effects if e[1] == A)
    assert answer[2:] == (4, APPLIED_REJECTED, ["CLOSED", 3, 4, TARGETS])
    # An older command comes again.
    bench.machine.effects.clear()
    data = bench.log.entries[-1].data
    bench.log.builder.adopt(data, HEADER_SIZE, len(data))
    assert bench.seal()[-1][2:] == (4, APPLIED_REJECTED, ["CLOSED", 3, 4, TARGETS])


def test_a_session_that_was_refused_once_stays_so_when_the_partition_opens() -> None:
    bench = Bench(opened=False)
    assert bench.publish(1)[-1][3:] == (APPLIED_REJECTED, ["NOT_OPEN", 2, 0, []])
    bench.ask(OPEN)
    assert bench.publish(2)[-1][3:] == (APPLIED_REJECTED, ["NOT_OPEN", 2, 0, []])
    assert bench.publish(3, session=B)[-1][3:] == (APPLIED_OK, None)
    assert bench.machine.next == 1
    bench.log.command(A, batch.CMD_SESSION_CLOSE, count=bench.log.openings[A])
    bench.seal()
    assert not bench.machine.refused


def test_readers_of_the_log_find_what_was_stored_and_nothing_else() -> None:
    from convoymq.streamlog.reader import ChunkReader

    bench = Bench(opened=False)
    bench.publish(1)
    bench.ask(OPEN)
    bench.log.publish(A, [2])
    bench.log.publish(B, [3, 4])
    bench.log.publish(A, [5])
    bench.seal()
    reader = ChunkReader(bench.machine, lambda i, _: [bench.log.entries[i - 1]], 0)
    found = []
    while (run := reader.next(1, 1 << 30)) is not None:
        found.append(len(batch.record(run.block, run.command, run.first)) - 4)
    assert found == [3, 4]


def test_runs_of_a_producer_are_stored_once_and_without_gaps() -> None:
    bench = Bench()
    assert bench.produce(Run(1, 1, 2), Run(6, 1, 1)) == RunsAnswer(
        (RunAnswer(Code.OK, 1, 2, 3), RunAnswer(Code.OK, 3, 1, 2))
    )
    # One repeat, one in part, one that overtook another, one of elsewhere, one that is new.
    answer = bench.produce(
        Run(1, 1, 2), Run(6, 1, 3), Run(2, 2, 2), Run(9, 1, 1), Run(3, 1, 1), session=B
    )
    assert answer == RunsAnswer(
        (
            RunAnswer(Code.DUPLICATE, expected=3),
            RunAnswer(Code.OK, 4, 2, 4),
            RunAnswer(Code.OUT_OF_SEQ, expected=1),
            RunAnswer(Code.WRONG_RANGE),
            RunAnswer(Code.OK, 6, 1, 2),
        )
    )
    bench.publish(2)
    assert bench.produce(Run(3, 2, 1), epoch=2).runs[0].code is Code.OUT_OF_SEQ
    assert bench.produce(Run(3, 1, 1), epoch=2).runs[0].code is Code.OK
    assert bench.produce(Run(1, 3, 1)).runs[0].code is Code.PRODUCER_FENCED
    pairs = [(1, 1), (1, 2), (6, 1), (6, 2), (6, 3), (3, 1), (0, 0), (3, 1)]
    assert bench.bodies() == [bytes(pair) for pair in pairs]
    assert bench.machine.duplicates == 3


def test_runs_go_on_where_the_partition_opens_and_hear_where_it_went() -> None:
    bench = Bench(opened=False)
    assert bench.produce(Run(1, 1, 1)).runs == (RunAnswer(Code.NOT_OPEN),)
    bench.ask(OPEN)
    assert bench.produce(Run(1, 1, 1)).runs == (RunAnswer(Code.OK, 1, 1, 2),)
    sealed = bench.ask(SEAL)
    assert isinstance(sealed, SealAnswer)
    answer = bench.produce(Run(1, 2, 1), Run(1, 3, 1))
    assert [run.code for run in answer.runs] == [Code.CLOSED] * 2
    assert (answer.to_version, answer.targets) == (4, SEAL.targets)
    # What comes after the split knows what was before.
    table = DedupTable.load(seed_of(0, 4, [SourceSeal(0, 8, sealed.dedup)]))
    assert table.decide(5, 1, 1, 1, 1) == (Code.DUPLICATE, 2)
    assert not bench.machine.refused


def test_the_answer_to_runs_is_kept_for_repeats_and_snapshots_lie_between() -> None:
    bench = Bench()
    produce(bench.log, [Run(1, 1, 1)])
    bench.seal()
    entry = bench.log.entries[-1]
    bench.log.builder.adopt(entry.data, HEADER_SIZE, len(entry.data))
    (reply,) = [e[4] for e in bench.seal() if e[4] is not None]
    assert decode_outcome(reply) == RunsAnswer((RunAnswer(Code.OK, 1, 1, 2),))
    # The two commands may come in two entries.
    body = encode_runs(5, 1, [Run(1, 2, 1)])
    bench.log.command(A, CMD_PRODUCE, len(body), body=body)
    bench.seal()
    assert bench.machine.announced == bench.copy().announced == {A: body}
    bench.publish(2)
    assert bench.machine.announced == {}
    assert bench.machine.state.dedup.last_seq(5, 1, 1) == 2


def test_what_a_producer_has_stored_is_in_the_trace() -> None:
    bench = Bench()
    rows = bench.machine.trace = TraceRows()
    rows.logical = 8
    bench.produce(Run(1, 1, 2), Run(2, 2, 1))
    bench.produce(Run(1, 2, 2))
    count, data = rows.take()
    columns = memoryview(data).cast("q")
    names = ("kind", "session", "consumer", "seq", "first_id", "count", "position_first")
    found = zip(
        *(columns[words.ROW_COLUMNS.index(name) * count :][:count] for name in names), strict=True
    )
    produced = [row[1:] for row in found if row[0] == words.PRODUCED]
    # Producer, session, first sequence, logical partition, messages, offset.
    assert produced == [(5, 1, 1, 1, 2, 1), (5, 1, 3, 1, 1, 3)]
    kinds = list(columns[words.ROW_COLUMNS.index("kind") * count :][:count])
    assert words.KEYED in kinds
    assert words.PUBLISHED in kinds


def test_runs_that_do_not_fit_their_messages_store_nothing() -> None:
    bench = Bench()
    produce(bench.log, [Run(1, 1, 2)], messages=1)
    assert bench.seal()[-1][3:] == (APPLIED_REJECTED, "runs and messages do not fit")
    assert bench.produce(Run(1, 1, 2)).runs[0].code is Code.OK
    body = encode_runs(5, 1, [Run(1, 3, 1)])
    bench.log.command(A, CMD_PRODUCE, len(body), body=body)
    bench.log.command(A, batch.CMD_SESSION_CLOSE, count=bench.log.openings[A])
    bench.seal()
    assert bench.machine.announced == {}


def test_retention_goes_on_in_the_middle_of_runs() -> None:
    bench = Bench(segment_bytes=2, max_bytes=4)
    for seq in range(1, 9, 2):
        bench.produce(Run(1, seq, 2), Run(2, seq, 1), Run(3, (seq + 1) // 2, 1))
    assert bench.machine.state.log_start == bench.machine.first + 1 > 1


def test_a_new_session_of_a_producer_learns_what_is_stored() -> None:
    bench = Bench()
    bench.produce(Run(1, 1, 2, 1, b"at 2"), Run(4, 1, 1, 1, b"at 3"), epoch=3)
    stored = ((1, 2, b"at 2"), (4, 1, b"at 3"))
    assert bench.ask(c.OpenProducer(5, 0)) == ProducerAnswer(Code.OK, stored, 3)
    assert bench.ask(c.OpenProducer(6, 0)) == ProducerAnswer(Code.OK, (), 0)
    assert bench.ask(c.OpenProducer(5, 4)) == ProducerAnswer(Code.OK, stored, 4)
    assert bench.ask(c.OpenProducer(5, 3)) == ProducerAnswer(Code.PRODUCER_FENCED, epoch=4)
    assert bench.produce(Run(1, 3, 1), epoch=3).runs[0].code is Code.PRODUCER_FENCED


def test_acknowledged_ranges_never_reach_beyond_what_is_there() -> None:
    bench = Bench()
    bench.publish(*[1] * 9)
    bench.ask(c.OpenCursor("g", 1))
    bench.ask(c.Lease("g", 1, 1, "m"))
    assert bench.ask(c.AckRanges("g", 1, 2, (1, 4))) == AckAnswer(Code.LEASE_FENCED)
    assert bench.ask(c.AckRanges("g", 1, 1, (0, 2, 6, 7, 9, 99))) == AckAnswer(Code.OK)
    assert bench.machine.state.groups["g"].cursor.pack() == [3, 6, 8, 9, 10]
    bench.ask(SEAL)
    assert bench.ask(c.AckRanges("g", 1, 1, (3, 5, 8, 99))) == AckAnswer(Code.OK, drained=True)


def test_retention_moves_the_start_and_stops_who_has_not_read() -> None:
    bench = Bench(segment_bytes=10, max_bytes=20)
    bench.ask(c.OpenCursor("g", 1))
    for _ in range(5):
        bench.publish(10)
    state = bench.machine.state
    assert bench.machine.first > 0
    assert state.log_start == bench.machine.first + 1
    assert state.groups["g"].expired
    lost = bench.ask(c.AcceptLoss("g"))
    assert lost == LossAnswer(Code.OK, (("g", 1, state.log_start),))


def test_a_trim_drops_the_segments_below_it() -> None:
    bench = Bench(segment_bytes=10)
    for _ in range(5):
        bench.publish(10)
    # A segment closes with the chunk behind it.
    assert bench.ask(c.Trim(4)) == Answer(Code.OK)
    assert (bench.machine.first, bench.machine.state.log_start) == (3, 4)
    bench.ask(SEAL)
    bench.ask(c.Trim(99))
    assert (bench.machine.first, bench.machine.messages) == (4, 1)


def test_settings_change_by_the_log() -> None:
    bench = Bench(segment_bytes=10)
    for _ in range(5):
        bench.publish(10)
    bench.log.configure(max_bytes=20)
    bench.seal()
    assert bench.machine.state.log_start == bench.machine.first + 1 > 1
    bench.log.configure(pid=4)
    with pytest.raises(ValueError, match="cannot change"):
        bench.seal()


def test_a_command_that_is_not_known_stops_the_replica() -> None:
    bench = Bench()
    bench.log.command(A, 99)
    with pytest.raises(UnknownCommand):
        bench.seal()


def test_a_snapshot_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        PartitionGroupMachine(SETTINGS).restore(b"\x81\xa6format\x01")


GROUPS = st.sampled_from(["g", "h"])
SMALL = st.integers(0, 12)
KEYS = st.sampled_from([b"k", b"l"])
COMMANDS = st.one_of(
    st.just(OPEN),
    st.just(SEAL),
    st.builds(c.OpenCursor, GROUPS, st.integers(1, 2), st.integers(-2, 6)),
    st.builds(c.OpenCursor, GROUPS, st.just(1), taken=st.sampled_from([(), ((0, 2),)])),
    st.builds(c.Lease, GROUPS, st.integers(1, 2), st.integers(0, 3), st.just("m")),
    st.builds(c.Ack, GROUPS, st.just(1), st.integers(0, 3), st.lists(SMALL, max_size=4).map(tuple)),
    st.builds(
        c.AckRanges,
        GROUPS,
        st.just(1),
        st.integers(0, 3),
        st.tuples(SMALL, SMALL),
    ),
    st.builds(
        c.Park,
        GROUPS,
        st.just(1),
        st.integers(0, 3),
        SMALL,
        KEYS,
        st.integers(0, 7),
        st.just(b"m"),
        st.booleans(),
    ),
    st.builds(c.ResumeParked, GROUPS, KEYS),
    st.builds(c.HandOver, GROUPS, st.integers(1, 2)),
    st.builds(c.DropGroup, GROUPS),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from([A, B]), st.integers(1, 3)),
        st.tuples(st.just("tell"), COMMANDS),
        st.tuples(
            st.just("produce"),
            st.sampled_from([A, B]),
            st.integers(1, 2),
            st.lists(
                st.builds(
                    Run,
                    st.integers(0, 8),
                    st.integers(1, 4),
                    st.integers(1, 3),
                    st.integers(0, 2),
                    st.sampled_from([b"", b"p"]),
                ),
                min_size=1,
                max_size=4,
            ),
        ),
        st.tuples(st.just("tell"), st.sampled_from([OPEN, OPEN, SEAL])),
        st.just(("seal",)),
        st.just(("repeat",)),
    ),
    max_size=40,
)


class Model:
    """The pure machine, driven with the same commands, and which sessions were refused."""

    def __init__(self) -> None:
        self.pure = PartitionMachine(3, 0, 8, 2)
        self.refused: set[int] = set()
        self.outcomes: list[Any] = []
        self.waiting: list[tuple[Any, ...]] = []
        self.stored: list[bytes] = []

    def end_entry(self, time_ms: int) -> None:
        for step in self.waiting:
            if step[0] == "tell":
                self.outcomes.append(self.pure.apply(step[1]))
                continue
            if step[0] == "produce":
                self.produce(step, time_ms)
                continue
            for _ in range(step[2]):
                if step[1] in self.refused:
                    continue
                produce = c.Produce(0, 0, 0, 0, b"k", time_ms=time_ms)
                answer = self.pure.apply(produce)
                if answer.code is not Code.OK:
                    self.refused.add(step[1])
        self.waiting.clear()

    def produce(self, step: tuple[Any, ...], time_ms: int) -> None:
        """Message by message; a run ends with its source position."""
        _, _, epoch, runs = step
        for lp, seq, count, base, source_pos in runs:
            if self.pure.refusal(c.Produce(5, epoch, lp, seq, b"")) is not Code.OK:
                continue
            for i in range(count):
                position = source_pos if i == count - 1 else b""
                message = c.Produce(5, epoch, lp, seq + i, b"", base, time_ms, position)
                if self.pure.apply(message).code is Code.OK:
                    self.stored.append(bytes((lp, seq + i)))


def play(log: Log, step: tuple[Any, ...]) -> None:
    if step[0] == "publish":
        log.publish(step[1], [2] * step[2])
    elif step[0] == "produce":
        produce(log, step[3], epoch=step[2], session=step[1])
    elif step[0] == "tell":
        tell(log, step[1])
    elif step[0] == "repeat" and log.entries:
        data = log.entries[-1].data
        if len(data) > HEADER_SIZE:
            log.builder.adopt(data, HEADER_SIZE, len(data))


@given(STEPS)
def test_the_machine_equals_the_pure_one_and_snapshots_go_on(steps: list[tuple[Any, ...]]) -> None:
    log, model = Log(), Model()
    machine, other = PartitionGroupMachine(SETTINGS), PartitionGroupMachine(SETTINGS)
    outcomes: dict[int, Any] = {}
    for step in [*steps, ("seal",)]:
        if step[0] != "seal":
            play(log, step)
            if step[0] != "repeat":
                model.waiting.append(step)
            continue
        entry = log.seal()
        effects = apply(machine, entry)
        machine.check_invariants()
        assert apply(other, entry) == effects
        state = other.snapshot()
        other = PartitionGroupMachine(SETTINGS)
        other.restore(state)
        assert other.state_hash() == machine.state_hash()
        model.end_entry(entry.time_ms)
        assert machine.state.snapshot() == model.pure.snapshot()
        assert machine.refused.keys() == model.refused
        for effect in effects:
            if effect[0] == EFFECT_APPLIED and effect[1] == TELLER and effect[4] is not None:
                outcome = decode_outcome(effect[4])
                assert outcomes.setdefault(effect[2], outcome) == outcome
    assert list(outcomes.values()) == model.outcomes
    found = bodies_of(machine, log)
    assert [body for body in found if body != bytes(2)] == model.stored
