"""How far two logs agree, and what a member does about the difference."""

from __future__ import annotations

import random

import pytest

from convoymq.model.errors import PeerError
from convoymq.replication.group.lives import (
    LIVES_MAX,
    Book,
    decode_lives,
    encode_lives,
    life_at,
    next_life,
    with_life,
)
from convoymq.replication.group.member import tail_of
from convoymq.replication.group.tails import (
    Common,
    Step,
    common_end,
    master_step,
    slave_step,
    whole_end,
)
from convoymq.replication.group.types import Ask, Life, Tail
from tests.unit.replication.group.logs import MemoryLog, carry


def lives(*rows: tuple[int, int, bool]) -> tuple[Life, ...]:
    return tuple(Life(number=n, begin=b, is_proven=p) for n, b, p in rows)


def compared(one: MemoryLog, other: MemoryLog) -> tuple[Common, int]:
    return carry(
        common_end(one),
        lambda ask: tail_of(other, ask, 1, 1, Book(), takes_writes=False),
        other,
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_last_common_message_is_found_in_few_questions(seed: int) -> None:
    draw = random.Random(seed)
    one, other = MemoryLog(), MemoryLog()
    common = draw.choice((0, 1, 3, 400))
    for _ in range(common):
        body = bytes(draw.choice((0, 5, 2000)))
        one.put(body)
        other.put(body)
    end = one.max_offset
    for log, life in ((one, 1), (other, 2)):
        for _ in range(draw.choice((0, 1, 2, 300))):
            log.put(bytes(draw.choice((0, 5, 2000))), life)
    found, questions = compared(one, other)
    assert (found.end, found.is_known) == (end, True)
    assert questions <= 2 + 2 * (one.max_offset + 2).bit_length()


def test_what_a_log_gets_meanwhile_is_no_surplus() -> None:
    """Found by seed 21: a slave was sent the log while its master compared with it."""
    one, other = MemoryLog(), MemoryLog()
    for _ in range(40):
        one.put(b"")
    other.append_raw(0, one.read_raw(0, 440))

    def grows(ask: Ask) -> Tail:
        found = tail_of(other, ask, 1, 1, Book(), takes_writes=False)
        other.append_raw(other.max_offset, one.read_raw(other.max_offset, 44))
        return found

    found, _ = carry(common_end(one), grows, other)
    assert master_step(one, (), found) is Step.NOTHING


def test_bodies_of_equal_bytes_are_no_agreement() -> None:
    """Behind the fork both have a body of the same megabyte: only whole messages are compared."""
    one, other = MemoryLog(), MemoryLog()
    for life, log in ((1, one), (2, other)):
        log.put(b"same")
        log.put(bytes(1 << 20), life)
    assert compared(one, other)[0].end == 48


def test_logs_that_begin_apart_and_share_nothing_are_unrelated() -> None:
    one, other = MemoryLog(), MemoryLog(begin=1000)
    for _ in range(40):
        one.put(b"a")
        other.put(b"b", 7)
    found, _ = compared(one, other)
    assert not found.is_known
    assert slave_step(one, (), found) is Step.UNRELATED
    assert master_step(one, (), found) is Step.UNRELATED


def test_a_part_of_a_message_is_not_its_end() -> None:
    log = MemoryLog()
    log.put(b"whole")
    log.append_raw(log.max_offset, b"\0\0\0\x2cpart")
    assert whole_end(log) == 49
    assert whole_end(MemoryLog(begin=5)) == 5


def tail(end: int, its: tuple[Life, ...], *, writes: bool) -> Tail:
    return Tail(min_offset=0, max_offset=end, member=0, session=1, takes_writes=writes,
                lives=its, checksum=None)  # fmt: skip


OLD = lives((10, 0, True))
NEXT = lives((10, 0, True), (20, 44, True))
UNPROVEN = lives((10, 0, True), (20, 44, False))


@pytest.mark.parametrize(
    ("own", "its", "writes", "step"),
    [
        (OLD, OLD, False, Step.WAIT),
        (OLD, NEXT, True, Step.CUT),
        (OLD, UNPROVEN, True, Step.FORKED),
        # A later proven life proves what it began with, not what an earlier one left out.
        (OLD, (*UNPROVEN, Life(number=30, begin=99, is_proven=True)), True, Step.FORKED),
        (NEXT, OLD, True, Step.FORKED),
        ((), (), True, Step.FORKED),
    ],
)
def test_a_slaves_surplus_is_cut_only_if_nobody_acknowledged_it(
    own: tuple[Life, ...], its: tuple[Life, ...], writes: bool, step: Step
) -> None:
    log = MemoryLog()
    log.put(b"")
    log.put(b"", 1)
    assert slave_step(log, own, Common(end=44, other=tail(44, its, writes=writes))) is step
    assert slave_step(log, own, Common(end=88, other=tail(99, its, writes=writes))) is Step.STREAM


@pytest.mark.parametrize(
    ("end", "slave_end", "own", "its", "step"),
    [
        (88, 88, OLD, OLD, Step.NOTHING),
        (88, 132, OLD, OLD, Step.FETCH),
        (44, 44, OLD, OLD, Step.NOTHING),
        (44, 132, OLD, NEXT, Step.CUT),
        (44, 132, NEXT, OLD, Step.NOTHING),
        (44, 132, OLD, UNPROVEN, Step.FORKED),
        (44, 132, UNPROVEN, OLD, Step.FORKED),
        (44, 132, OLD, OLD, Step.FORKED),
    ],
)
def test_a_returning_master_takes_the_later_proven_life(
    end: int, slave_end: int, own: tuple[Life, ...], its: tuple[Life, ...], step: Step
) -> None:
    log = MemoryLog()
    log.put(b"")
    log.put(b"", 1)
    assert master_step(log, own, Common(end=end, other=tail(slave_end, its, writes=False))) is step


def test_lives_are_kept_in_order_and_bounded() -> None:
    known: tuple[Life, ...] = ()
    for number in range(LIVES_MAX + 5):
        known = with_life(known, next_life(known, 7, 10 * number, True))
    assert len(known) == LIVES_MAX
    assert [each.number for each in known[-2:]] == [known[-1].number - 1, known[-1].number]
    assert life_at(known, known[-1].begin).number == known[-1].number
    assert life_at(known, known[-1].begin - 1).number == known[-2].number
    assert decode_lives(encode_lives(known)) == known
    # A life that wrote nothing leaves no trace.
    again = with_life(known, next_life(known, 0, known[-1].begin, False))
    assert [each.begin for each in again][-2:] == [known[-2].begin, known[-1].begin]
    book = Book(lives=NEXT, is_whole=True)
    assert Book.decode(book.encode()) == book


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[[2,0,true],[1,0,true]]", b"[[1,9,true],[2,3,true]]"]
)
def test_a_broken_list_of_lives_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_lives(data)
    with pytest.raises(PeerError):
        Book.decode(data)
