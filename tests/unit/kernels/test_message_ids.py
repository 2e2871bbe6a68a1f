"""The window of message-ids: exact, bounded, and the same as a list that is searched through."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.message_ids import ID_HEAD_BYTES, MessageIdWindow
from tests.unit.queues.quorum.support import with_attributes

ROOM = 1 << 20
DEAD_LETTER = b"\x02\xff\xff"


def command(*ids: bytes | None, size: int = 7) -> bytes:
    """An entry's commands: one ENQUEUE with a record for each id."""
    return of_records(*(with_attributes(size, None, None, each)[0] for each in ids))


def of_records(*records: bytes) -> bytes:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56 | 1 << 24 | 1, None)
    for record in records:
        target.publish([record], 7, 0)
    data: bytes = builder.take_entry(7, 1, 1, 1000).data
    return data


def offset_of(data: bytes) -> int:
    return next(each[6] for each in batch.commands(data) if each[0] == batch.CMD_ENQUEUE)


def taken(window: MessageIdWindow, data: bytes, count: int, time_ms: int = 0) -> list[int] | None:
    return window.new_runs(data, offset_of(data), 0, count, time_ms)


def test_runs_are_cut_around_repeats() -> None:
    window = MessageIdWindow(10, ROOM)
    assert taken(window, command(b"a", b"b", None), 3) is None
    found = taken(window, command(b"c", b"a", None, b"d", b"b", b"d", b"e"), 7)
    assert found == [0, 1, 7, 2, 2, 14, 6, 1, 7]
    assert taken(window, command(b"e"), 1) == []
    assert len(window) == 5


def test_of_two_in_one_command_the_first_wins() -> None:
    window = MessageIdWindow(10, ROOM)
    assert taken(window, command(b"a", b"a", b"a"), 3) == [0, 1, 7]


def test_a_record_without_an_id_or_with_an_empty_one_is_no_repeat() -> None:
    window = MessageIdWindow(10, ROOM)
    for _ in range(2):
        assert taken(window, command(None, b"", None), 3) is None
    assert len(window) == 0


def test_a_record_of_a_dead_lettering_queue_is_no_repeat_and_is_not_remembered() -> None:
    record, _ = with_attributes(7, None, None, b"a")
    dead = record[:3] + DEAD_LETTER + record[6:]
    assert record[3:6] == b"\x02\x00\x01"
    window = MessageIdWindow(10, ROOM)
    for _ in range(2):
        assert taken(window, of_records(dead, dead), 2) is None
    assert len(window) == 0
    assert taken(window, of_records(record, dead, record), 3) == [0, 2, 14]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_record_that_cannot_be_read_has_no_id(cut: int) -> None:
    record, _ = with_attributes(7, 3, "100", b"some-identifier")
    window = MessageIdWindow(10, ROOM)
    data = of_records(record[:cut], record[:cut])
    assert taken(window, data, 2) is None
    assert len(window) == 0


def test_records_outside_of_the_command_are_refused() -> None:
    window = MessageIdWindow(10, ROOM)
    data = command(b"a")
    for offset, first, count in ((0, 0, 1), (offset_of(data), 1, 1), (offset_of(data), -1, 1)):
        with pytest.raises(ValueError, match="outside"):
            window.new_runs(data, offset, first, count, 0)


def test_only_the_latest_ids_are_known() -> None:
    window = MessageIdWindow(2, ROOM)
    assert taken(window, command(b"a", b"b", b"c"), 3) is None
    assert len(window) == 2
    # Forgotten, and so known anew in the place of b.
    assert taken(window, command(b"a"), 1) is None
    assert taken(window, command(b"c", b"b"), 2) == [1, 1, 7]


def test_bytes_bound_the_window_too() -> None:
    window = MessageIdWindow(1000, 290)
    for number in range(100):
        assert taken(window, command(b"%020d" % number), 1) is None
        assert window.size_bytes() <= 290
    assert len(window) == 290 // (20 + ID_HEAD_BYTES)
    assert taken(window, command(b"z" * 255), 1) is None
    assert len(window) == 1


def test_ids_are_forgotten_by_their_time() -> None:
    window = MessageIdWindow(10, ROOM)
    assert window.oldest_ms() is None
    for time_ms in (5, 6, 6, 9):
        assert taken(window, command(b"%d" % len(window)), 1, time_ms) is None
    window.forget_until(4)
    assert (len(window), window.oldest_ms()) == (4, 5)
    window.forget_until(6)
    assert (len(window), window.oldest_ms()) == (1, 9)
    window.forget_until(9)
    assert (len(window), window.oldest_ms()) == (0, None)
    assert taken(window, command(b"0"), 1, 10) is None


def test_memory_follows_what_is_known() -> None:
    window = MessageIdWindow(100_000, 64 << 20)
    assert window.memory_bytes() == 0
    rng = Random(3)
    for _ in range(300):
        data = command(*(rng.randbytes(36) for _ in range(1000)))
        assert taken(window, data, 1000, 1) is None
    assert len(window) == 100_000
    assert window.size_bytes() == 100_000 * (36 + ID_HEAD_BYTES)
    assert window.memory_bytes() < 130 * 100_000
    window.forget_until(1)
    assert window.memory_bytes() == 0


def test_a_window_without_room_is_refused() -> None:
    for known, size in ((0, ROOM), (-1, ROOM), (1, 263), (1, 1 << 31)):
        with pytest.raises(ValueError, match="room"):
            MessageIdWindow(known, size)


def test_packed_ids_come_back() -> None:
    window = MessageIdWindow(4, ROOM)
    assert taken(window, command(b"a", b"b" * 255, b"c", b"d", b"e"), 5, 77) is None
    packed = window.pack()
    copy = MessageIdWindow(4, ROOM)
    assert taken(copy, command(b"x"), 1) is None
    copy.unpack(packed)
    assert (copy.pack(), len(copy), copy.oldest_ms()) == (packed, 4, 77)
    assert taken(copy, command(b"b" * 255, b"e", b"x"), 3, 78) == [2, 1, 7]
    smaller = MessageIdWindow(2, ROOM)
    smaller.unpack(packed)
    assert taken(smaller, command(b"d", b"e"), 2, 78) == []
    empty = MessageIdWindow(2, ROOM)
    empty.unpack(MessageIdWindow(1, ROOM).pack())
    assert len(empty) == 0


def test_damaged_packed_ids_are_refused() -> None:
    def packed(time_ms: int, each: bytes) -> bytes:
        return time_ms.to_bytes(8, "little") + bytes([len(each)]) + each

    good = packed(5, b"ab")
    for broken in (
        good[:-1],
        good + b"\0",
        good[:4],
        packed(5, b""),
        good + packed(4, b"c"),
        good + good,
    ):
        with pytest.raises(ValueError, match=r"damaged|twice"):
            MessageIdWindow(9, ROOM).unpack(broken)


class Naive:
    """A list of (id, time), searched from its begin."""

    def __init__(self, known_max: int) -> None:
        self.known_max = known_max
        self.known: list[tuple[bytes, int]] = []

    def is_repeat(self, each: bytes | None, time_ms: int) -> bool:
        if not each:
            return False
        if any(known == each for known, _ in self.known):
            return True
        self.known.append((each, time_ms))
        while len(self.known) > self.known_max:
            self.known.pop(0)
        return False


ids = st.one_of(
    st.none(), st.binary(max_size=2), st.integers(0, 40).map(lambda n: b"%d" % n * (1 + n % 9))
)


@given(
    known_max=st.integers(1, 30),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 8), st.lists(ids, min_size=1, max_size=30)),
        max_size=12,
    ),
    copies=st.booleans(),
)
def test_a_window_is_as_a_list_of_ids(
    known_max: int, steps: list[tuple[int, int, list[bytes | None]]], copies: bool
) -> None:
    window, naive, now = MessageIdWindow(known_max, ROOM), Naive(known_max), 0
    for passed, age, batch_ids in steps:
        now += passed
        if now > age:
            window.forget_until(now - age)
            naive.known = [(each, came) for each, came in naive.known if came > now - age]
        repeats = [naive.is_repeat(each, now) for each in batch_ids]
        kept = taken(window, command(*batch_ids), len(batch_ids), now)
        if kept is None:
            assert not any(repeats)
        else:
            assert any(repeats)
            new = [
                i for at in range(0, len(kept), 3) for i in range(kept[at], sum(kept[at : at + 2]))
            ]
            assert new == [i for i, repeat in enumerate(repeats) if not repeat]
            assert kept[2::3] == [7 * count for count in kept[1::3]]
        expected = [
            came.to_bytes(8, "little") + bytes([len(each)]) + each for each, came in naive.known
        ]
        assert window.pack() == b"".join(expected)
        if copies:
            copy = MessageIdWindow(known_max, ROOM)
            copy.unpack(window.pack())
            window = copy
