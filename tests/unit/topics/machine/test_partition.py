"""The state machine of a partition: its table of outcomes, and a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.machine.partition import Outcome, PartitionMachine
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import (
    AckAnswer,
    CursorAnswer,
    HandOverAnswer,
    ParkAnswer,
    ProducerAnswer,
    SealAnswer,
)
from convoymq.topics.rules.dedup import UNANSWERED_MAX, SourceSeal, seed_of
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span

SEAL = c.Seal("change", 1, 4, (Span(0, 4, 7), Span(4, 8, 8)), term=1)


def machine(*, opened: bool = True) -> PartitionMachine:
    made = PartitionMachine(3, 0, 8, 2)
    if opened:
        made.apply(c.Open("creation", 2, 1))
    return made


def produce(of: PartitionMachine, seq: int, lp: int = 0, key: bytes = b"k") -> Outcome:
    return of.apply(c.Produce(1, 1, lp, seq, key))


def with_reader(messages: int) -> PartitionMachine:
    made = machine()
    made.apply(c.OpenCursor("g", 1))
    made.apply(c.Lease("g", 1, 1, "m"))
    for seq in range(1, messages + 1):
        produce(made, seq)
    return made


def code_of(outcome: Outcome) -> Code:
    return outcome.code


def test_messages_begin_behind_open_and_end_before_close() -> None:
    made = machine(opened=False)
    assert code_of(produce(made, 1)) is Code.NOT_OPEN
    assert code_of(made.apply(SEAL)) is Code.NOT_OPEN
    made.apply(c.Open("creation", 2, 1))
    assert produce(made, 1).offset == 1  # type: ignore[union-attr]
    sealed = made.apply(SEAL)
    assert isinstance(sealed, SealAnswer)
    assert (sealed.code, sealed.close_offset, made.end_offset) == (Code.OK, 2, 3)


def test_what_is_queued_behind_close_is_closed_and_told_where_to_go() -> None:
    made = machine()
    made.apply(SEAL)
    answer = produce(made, 1)
    assert code_of(answer) is Code.CLOSED
    assert answer.targets == SEAL.targets  # type: ignore[union-attr]
    assert made.end_offset == made.close_offset + 1


def test_a_seal_is_answered_again_and_another_change_hears_by_whom() -> None:
    made = machine()
    first = made.apply(SEAL)
    assert made.apply(SEAL) == first
    other = made.apply(c.Seal("other", 1, 5, (Span(0, 8, 9),), term=1))
    assert isinstance(other, SealAnswer)
    assert (other.code, other.by, other.close_offset) == (Code.SEALED_BY, "change", 1)
    assert made.targets == SEAL.targets


def test_an_older_controller_is_refused() -> None:
    made = machine()
    made.apply(c.Open("creation", 2, term=5))
    assert code_of(made.apply(SEAL)) is Code.STALE_TERM
    assert code_of(produce(made, 1)) is Code.OK


def test_range_comes_before_hash_and_hash_before_sequence() -> None:
    made = PartitionMachine(3, 0, 8, 2, lp_of=lambda key: 5)
    made.apply(c.Open("creation", 2, 1))
    assert code_of(produce(made, 9, lp=8)) is Code.WRONG_RANGE
    assert code_of(produce(made, 9, lp=4)) is Code.BAD_HASH
    assert code_of(produce(made, 9, lp=5)) is Code.OUT_OF_SEQ


def test_the_seed_of_open_refuses_what_the_source_has() -> None:
    source = machine()
    produce(source, 1)
    seal = source.apply(SEAL)
    assert isinstance(seal, SealAnswer)
    target = machine(opened=False)
    target.apply(c.Open("change", 4, 1, seal.dedup))
    assert code_of(produce(target, 1)) is Code.DUPLICATE
    assert code_of(produce(target, 2)) is Code.OK


def test_a_new_session_hears_what_is_stored_and_fences_the_old_one() -> None:
    made = machine()
    made.apply(c.Produce(1, 1, 3, 1, b"k", source_pos=b"at 9"))
    opened = made.apply(c.OpenProducer(1, 2))
    assert opened.stored == ((3, 1, b"at 9"),)  # type: ignore[union-attr]
    assert code_of(made.apply(c.Produce(1, 1, 3, 2, b"k"))) is Code.PRODUCER_FENCED
    assert code_of(made.apply(c.Produce(1, 2, 3, 1, b"k"))) is Code.OK


def test_only_the_lease_in_force_acknowledges() -> None:
    made = with_reader(2)
    made.apply(c.Lease("g", 1, 2, "n"))
    assert code_of(made.apply(c.Ack("g", 1, 1, (1,)))) is Code.LEASE_FENCED
    assert code_of(made.apply(c.Ack("g", 0, 2, (1,)))) is Code.NOT_VISIBLE
    assert made.apply(c.Ack("g", 1, 2, (1, 0, 99))) == AckAnswer(Code.OK, drained=False)
    assert made.groups["g"].cursor.watermark == 2
    assert code_of(made.apply(c.Lease("g", 1, 1, "m"))) is Code.LEASE_FENCED


def test_runs_acknowledge_messages_and_never_a_control_entry() -> None:
    made = with_reader(4)
    assert code_of(made.apply(c.AckRanges("g", 1, 0, (1, 1)))) is Code.LEASE_FENCED
    assert made.apply(c.AckRanges("g", 1, 1, (0, 1, 3, 90))) == AckAnswer(Code.OK)
    assert made.groups["g"].cursor.pack() == [2, 3, 5]
    made.apply(SEAL)
    assert made.apply(c.AckRanges("g", 1, 1, (2, 2, 5, 5))) == AckAnswer(Code.OK, drained=True)


def test_a_group_has_drained_when_all_up_to_close_is_acknowledged_or_parked() -> None:
    made = with_reader(2)
    made.apply(SEAL)
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.NOT_DRAINED
    made.apply(c.Ack("g", 1, 1, (1,)))
    parked = made.apply(c.Park("g", 1, 1, 2, b"k", 0, b"two", follow=False))
    assert code_of(parked) is Code.OK
    assert made.drained("g")


def test_an_empty_partition_is_drained_by_a_group_only_once_its_cursor_is_open() -> None:
    made = machine()
    made.apply(SEAL)
    assert not made.drained("g")
    made.apply(c.OpenCursor("g", 1))
    assert made.drained("g")


def test_a_hand_over_takes_parked_keys_to_the_target_of_their_range() -> None:
    made = with_two_parked_keys()
    first = made.apply(c.HandOver("g", 1))
    assert isinstance(first, HandOverAnswer)
    assert made.apply(c.HandOver("g", 1)) == first
    assert code_of(made.apply(c.ResumeParked("g", b"left"))) is Code.NOT_VISIBLE
    target = PartitionMachine(8, 4, 8, 4)
    target.apply(c.Open("change", 4, 1))
    target.apply(c.OpenCursor("g", 1, 0, (first.state,)))
    assert list(target.groups["g"].parked.keys) == [b"right"]
    assert target.groups["g"].parked.keys[b"right"].entries[0].token == OrderToken(2, 2)


def with_two_parked_keys() -> PartitionMachine:
    made = with_reader(0)
    made.apply(c.Produce(1, 1, 1, 1, b"left"))
    made.apply(c.Produce(1, 1, 6, 1, b"right"))
    made.apply(c.Park("g", 1, 1, 1, b"left", 1, b"L", follow=False))
    made.apply(c.Park("g", 1, 1, 2, b"right", 6, b"R", follow=False))
    made.apply(SEAL)
    return made


def test_what_was_skipped_has_again_what_no_target_began_with() -> None:
    """Its hand-over was heard by one that opened the left target; another one skipped it."""
    made = with_two_parked_keys()
    handed = made.apply(c.HandOver("g", 1))
    assert isinstance(handed, HandOverAnswer)
    left, right = PartitionMachine(7, 0, 4, 4), PartitionMachine(8, 4, 8, 4)
    for target, states in ((left, (handed.state,)), (right, ())):
        target.apply(c.Open("change", 4, 1))
        without = () if states else (3,)
        opened = c.OpenCursor("g", 1, 0, states, without)
        assert target.apply(opened) == CursorAnswer(Code.OK, without)
        # What opened it first counts, also behind a snapshot.
        target.restore(target.snapshot())
        assert target.apply(c.OpenCursor("g", 1, 0, (), (3, 9))) == CursorAnswer(Code.OK, without)
    assert code_of(made.apply(c.Lease("g", 1, 2, "m"))) is Code.NOT_VISIBLE
    before = made.groups["g"].park_version
    assert made.apply(c.OpenCursor("g", 1)) == CursorAnswer(Code.OK)
    assert made.groups["g"].handed_over
    assert made.apply(c.OpenCursor("g", 1, taken=((0, 4),))) == CursorAnswer(Code.OK)
    assert list(made.groups["g"].parked.keys) == [b"right"]
    assert made.groups["g"].park_version > before
    assert code_of(made.apply(c.Lease("g", 1, 2, "m"))) is Code.OK
    # A hand-over that comes late freezes nothing that is parked; a repeat takes nothing away.
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.NOT_DRAINED
    made.apply(c.OpenCursor("g", 1, taken=((0, 8),)))
    made.restore(made.snapshot())
    made.apply(c.ResumeParked("g", b"right"))
    done = made.apply(c.DoneParked("g", 1, 2, b"right", OrderToken(2, 2)))
    assert code_of(done) is Code.OK
    assert made.drained("g", whole=True)
    made.check_invariants()
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.OK


def test_what_was_skipped_before_it_was_handed_over_keeps_what_is_parked() -> None:
    made = with_two_parked_keys()
    made.apply(c.OpenCursor("g", 1, taken=((0, 4), (4, 8))))
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.NOT_DRAINED
    assert list(made.groups["g"].parked.keys) == [b"left", b"right"]


def test_a_resumed_key_becomes_live_when_its_park_log_is_empty() -> None:
    made = with_reader(3)
    for offset in (1, 2):
        made.apply(c.Park("g", 1, 1, offset, b"k", 0, b"%d" % offset, follow=offset > 1))
    done = c.DoneParked("g", 1, 1, b"k", OrderToken(2, 1))
    assert code_of(made.apply(done)) is Code.NOT_PARKED
    made.apply(c.ResumeParked("g", b"k"))
    answer = made.apply(done)
    assert isinstance(answer, ParkAnswer)
    assert (answer.live, answer.head and answer.head.message) == (False, b"2")
    last = made.apply(c.DoneParked("g", 1, 1, b"k", OrderToken(2, 2)))
    assert isinstance(last, ParkAnswer)
    assert last.live
    follow = made.apply(c.Park("g", 1, 1, 3, b"k", 0, b"3", follow=True))
    assert code_of(follow) is Code.NOT_PARKED


def test_what_expired_unread_stops_a_group_until_the_loss_is_accepted() -> None:
    strict, weak = with_reader(4), with_reader(4)
    strict.apply(c.Trim(3))
    assert strict.check_fetch("g", 1, 1) is Code.DATA_EXPIRED
    assert strict.apply(c.AcceptLoss("g")).losses == (("g", 1, 3),)  # type: ignore[union-attr]
    assert strict.unread("g", 0, 10) == ([3, 4], 5)
    # A weak topic accepts what it has recorded; what expires meanwhile waits for the next record.
    weak.apply(c.Trim(3))
    weak.apply(c.Trim(4))
    recorded = c.AcceptLoss("g", 3, 1)
    assert weak.apply(c.AcceptLoss("g", 3, 2)).code is Code.NOT_VISIBLE
    assert weak.apply(recorded).losses == (("g", 1, 3),)  # type: ignore[union-attr]
    weak.apply(c.Lease("g", 1, 2, "m"))
    assert weak.check_fetch("g", 1, 2) is Code.DATA_EXPIRED
    weak.apply(c.AcceptLoss("g", 4, 1))
    weak.apply(c.Lease("g", 1, 3, "m"))
    assert weak.check_fetch("g", 1, 3) is Code.OK
    assert weak.unread("g", -1, 9) == ([4], 5)


def test_after_a_loss_nothing_follows_until_the_owner_of_that_time_has_gone() -> None:
    """It may hold what was lost: the group stays, and its lease counts no more."""
    made = with_reader(2)
    made.apply(SEAL)
    made.apply(c.Trim(3))
    made.apply(c.AcceptLoss("g"))
    assert not made.drained("g")
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.NOT_DRAINED
    assert code_of(made.apply(c.Ack("g", 1, 1, (1,)))) is Code.LEASE_FENCED
    assert made.check_fetch("g", 1, 1) is Code.LEASE_FENCED
    assert code_of(made.apply(c.Lease("g", 1, 1, "m"))) is Code.LEASE_FENCED
    restored = machine(opened=False)
    restored.restore(made.snapshot())
    assert restored.state_hash() == made.state_hash()
    assert not restored.drained("g")
    assert code_of(made.apply(c.Lease("g", 1, 2, "n"))) is Code.OK
    assert made.drained("g")
    assert code_of(made.apply(c.HandOver("g", 1))) is Code.OK


def test_a_loss_that_nobody_can_have_fetched_fences_nobody() -> None:
    made = machine()
    made.apply(c.OpenCursor("g", 1))
    produce(made, 1)
    made.apply(SEAL)
    made.apply(c.Trim(2))
    made.apply(c.AcceptLoss("g"))
    assert made.drained("g")


def test_a_leader_that_has_not_applied_a_lease_does_not_end_it() -> None:
    made = with_reader(1)
    assert made.check_fetch("g", 1, 2) is Code.NOT_VISIBLE
    made.apply(c.Lease("g", 1, 3, "n"))
    assert made.check_fetch("g", 1, 2) is Code.LEASE_FENCED


def test_a_seek_begins_anew_whatever_was_there() -> None:
    made = with_reader(2)
    made.apply(c.Ack("g", 1, 1, (1,)))
    made.apply(c.Park("g", 1, 1, 2, b"k", 0, b"2", follow=False))
    assert made.apply(c.OpenCursor("g", 2, c.EARLIEST)) == CursorAnswer(Code.OK)
    own = made.groups["g"]
    assert (own.cursor.watermark, own.parked.keys, own.lease_epoch) == (1, {}, 1)
    assert code_of(made.apply(c.OpenCursor("g", 1))) is Code.NOT_VISIBLE


def test_late_external_close_hands_over_what_may_be_stored_twice() -> None:
    made = with_reader(2)
    made.apply(c.Seal("change", 0, 4, SEAL.targets, 1, external=True))
    made.apply(c.Ack("g", 1, 1, (1, 2)))
    handed = made.apply(c.HandOver("g", 1))
    assert isinstance(handed, HandOverAnswer)
    target = PartitionMachine(7, 0, 4, 4)
    target.apply(c.OpenCursor("g", 1, 0, (handed.state,)))
    assert target.groups["g"].filter == {(1, 1, 0): 2}


def behind_external_seal() -> PartitionMachine:
    """A target whose source was sealed from outside, and has messages 1 and 2 of producer 1."""
    target = PartitionMachine(7, 0, 4, 4)
    target.apply(c.Open("change", 4, 1, seed_of(0, 4, [SourceSeal(0, 4, None)])))
    return target


def drained_source() -> bytes:
    made = with_reader(2)
    made.apply(c.Seal("change", 0, 4, SEAL.targets, 1, external=True))
    made.apply(c.Ack("g", 1, 1, (1, 2)))
    handed = made.apply(c.HandOver("g", 1))
    assert isinstance(handed, HandOverAnswer)
    return handed.state


def test_what_a_second_external_close_hands_over_takes_nothing_back() -> None:
    """A session had repeated there a part of what is stored in the first one, and is read."""
    first, second = machine(), PartitionMachine(4, 0, 8, 3)
    second.apply(c.Open("change", 3, 1))
    states: tuple[bytes, ...] = ()
    for of, messages in ((first, 4), (second, 3)):
        of.apply(c.OpenCursor("g", 1, 0, states))
        of.apply(c.Lease("g", 1, 1, "m"))
        for seq in range(1, messages + 1):
            of.apply(c.Produce(1, 1, 0, seq, b"k", base=1))
        of.apply(c.Seal("change", 1, 4, SEAL.targets, term=1, external=True))
        of.apply(c.AckRanges("g", 1, 1, (1, messages)))
        handed = of.apply(c.HandOver("g", 1))
        assert isinstance(handed, HandOverAnswer)
        states = (handed.state,)
    third = PartitionMachine(7, 0, 4, 4)
    third.apply(c.OpenCursor("g", 1, 0, states))
    assert third.groups["g"].filter == {(1, 1, 0): 4}


def test_second_copies_count_as_acknowledged_when_the_cursor_is_opened() -> None:
    target = behind_external_seal()
    passed: list[tuple[str, int, int, int]] = []
    target.on_passed = lambda *found: passed.append(found)
    runs = (c.ProducedRun(0, 2, 2, base=2), c.ProducedRun(1, 1, 1, base=1))
    target.apply(c.ProduceRuns(1, 1, runs))
    target.apply(c.OpenCursor("g", 1, 0, (drained_source(),)))
    # Sequence 2 is stored in the source too; 3 is new, and so is what nobody numbered there.
    assert passed == [("g", 1, 1, 1)]
    assert target.groups["g"].cursor.pack() == [2]
    target.apply(c.OpenCursor("later", 1, 0))
    assert target.groups["later"].cursor.pack() == [1]
    again = PartitionMachine(7, 0, 4, 4)
    again.restore(target.snapshot())
    assert again.snapshot() == target.snapshot()


def test_second_copies_that_come_late_count_as_acknowledged() -> None:
    target = behind_external_seal()
    target.apply(c.OpenCursor("g", 1, 0, (drained_source(),)))
    target.apply(c.OpenCursor("later", 1, 0))
    version = target.groups["g"].park_version
    target.apply(c.ProduceRuns(1, 1, (c.ProducedRun(0, 1, 3, base=1),)))
    own, later = target.groups["g"], target.groups["later"]
    assert (own.cursor.pack(), later.cursor.pack()) == ([3], [1])
    # Its owner gets another view, or it would hand out what it fetches.
    assert (own.park_version, later.park_version) == (version + 1, 0)


def test_sessions_that_begin_behind_an_external_seal_have_numbers_of_their_own() -> None:
    target = behind_external_seal()
    known = target.apply(c.OpenProducer(1, 0))
    assert isinstance(known, ProducerAnswer)
    epoch = known.epoch + 1
    assert epoch > 4 << 32
    target.apply(c.OpenProducer(1, epoch))
    target.apply(c.ProduceRuns(1, epoch, (c.ProducedRun(0, 1, 2, base=1),)))
    target.apply(c.OpenCursor("g", 1, 0, (drained_source(),)))
    assert target.groups["g"].cursor.pack() == [1]
    assert not target.doubtful


def test_what_may_be_stored_twice_is_bounded() -> None:
    target = behind_external_seal()
    for first in (1, 801, 1601):
        target.apply(c.ProduceRuns(1, 1, (c.ProducedRun(0, first, 800, base=max(1, first - 99)),)))
    (noted,) = target.doubtful.values()
    assert noted.runs == [(1, UNANSWERED_MAX, 1)]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "produce",
                "ack",
                "lease",
                "park",
                "resume",
                "done",
                "seal",
                "trim",
                "accept",
                "hand",
                "skip",
            )
        ),
        st.integers(0, 3),
        st.integers(1, 6),
    ),
    max_size=50,
)


def _command(made: PartitionMachine, kind: str, lp: int, number: int) -> c.Command:
    key = b"%d" % lp
    parked = made.groups["g"].parked.keys.get(key)
    token = parked.entries[0].token if parked is not None else OrderToken(0, 0)
    epoch = made.groups["g"].lease_epoch
    return {
        "produce": c.Produce(1, 1, lp, made.dedup.last_seq(1, 1, lp) + number % 3, key),
        "ack": c.Ack("g", 1, epoch, (number,)),
        "lease": c.Lease("g", 1, number, "m"),
        "park": c.Park("g", 1, epoch, number, key, lp, b"x", follow=False),
        "resume": c.ResumeParked("g", key),
        "done": c.DoneParked("g", 1, epoch, key, token),
        "seal": SEAL,
        "trim": c.Trim(number // 2),
        "accept": c.AcceptLoss("g"),
        "hand": c.HandOver("g", 1),
        "skip": c.OpenCursor("g", 1, taken=((0, number),)),
    }[kind]


@given(OPERATIONS)
def test_a_snapshot_at_any_point_answers_as_the_original(
    operations: list[tuple[str, int, int]],
) -> None:
    made = with_reader(0)
    stored: list[tuple[int, int]] = []
    settled: set[int] = set()
    for kind, lp, number in operations:
        command = _command(made, kind, lp, number)
        copy = PartitionMachine(3, 0, 8, 2)
        copy.restore(made.snapshot())
        assert copy.state_hash() == made.state_hash()
        was_open = made.close_offset < 0
        answer = made.apply(command)
        assert copy.apply(command) == answer
        assert copy.snapshot() == made.snapshot()
        made.check_invariants()
        # The naive model: a list of messages, and a set of offsets that nobody waits for.
        if isinstance(command, c.Produce) and command.seq and answer.code is Code.OK:
            assert was_open
            stored.append((command.lp, command.seq))
        if isinstance(command, c.Ack | c.Park) and answer.code is Code.OK:
            offsets = command.offsets if isinstance(command, c.Ack) else (command.offset,)
            # What is not there yet is not settled by an acknowledgement.
            settled.update(offset for offset in offsets if offset < made.end_offset)
    for lp in range(4):
        seqs = [seq for of, seq in stored if of == lp]
        assert seqs == list(range(1, len(seqs) + 1))
    own = made.groups["g"]
    for offset in range(1, made.end_offset if made.close_offset < 0 else made.close_offset):
        passed = offset < made.log_start and not own.expired
        assert (offset in own.cursor) == (offset in settled or passed)
