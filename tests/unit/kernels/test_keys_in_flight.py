"""Messages in flight by key, against lists that are searched through."""

from __future__ import annotations

import struct
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.keys_in_flight import KeysInFlight
from convoymq.kernels.ordered_runs import key_hashes
from convoymq.topics.rules import hashing
from tests.unit.kernels.records import record_of

BATCH = 100


class Naive:
    """Every key's messages in order; the first may be in flight."""

    def __init__(self) -> None:
        self.keys: dict[int, list[int]] = {}
        self.flying: set[int] = set()

    def admit(self, hash: int, offset: int) -> bool:
        if not hash:
            return True
        of_key = self.keys.setdefault(hash, [])
        of_key.append(offset)
        if len(of_key) == 1:
            self.flying.add(offset)
        return len(of_key) == 1

    @property
    def heads(self) -> list[int]:
        return sorted(of_key[0] for of_key in self.keys.values())

    @property
    def ready(self) -> list[int]:
        return [offset for offset in self.heads if offset not in self.flying]

    @property
    def waiting(self) -> int:
        return sum(len(of_key) - 1 for of_key in self.keys.values())

    def release(self, offset: int) -> None:
        if offset in self.flying:
            self.flying.discard(offset)
            hash = next(key for key, of_key in self.keys.items() if of_key[0] == offset)
            self.keys[hash].pop(0)
            if not self.keys[hash]:
                del self.keys[hash]


def expand(flat: list[int]) -> list[int]:
    return [
        offset
        for first, end in zip(flat[::2], flat[1::2], strict=True)
        for offset in range(first, end)
    ]


@settings(max_examples=200)
@given(st.integers(0, 1 << 32), st.sampled_from((1, 3, 40, 1 << 40)))
def test_one_message_of_a_key_is_in_flight(seed: int, keys: int) -> None:
    random = Random(seed)
    table, naive = KeysInFlight(), Naive()
    hashes = [random.randrange(keys) for _ in range(2000)]
    packed = struct.pack(f"<{len(hashes)}Q", *hashes)
    next_offset, waiting_max = 0, random.choice((5, 50, 10_000))
    for _ in range(random.randint(5, 60)):
        what = random.random()
        if what < 0.4:
            room, end = random.randrange(150), min(next_offset + random.randint(1, 150), 2000)
            start = next_offset // BATCH * BATCH
            stop, *runs = table.admit(
                start, packed[8 * start :], next_offset - start, next_offset, end, room, waiting_max
            )
            given = []
            while next_offset < end and len(given) < room:
                waits = hashes[next_offset] in naive.keys
                if waits and naive.waiting >= waiting_max:
                    break
                if naive.admit(hashes[next_offset], next_offset):
                    given.append(next_offset)
                next_offset += 1
            assert stop == next_offset
            assert expand(runs) == given
        elif what < 0.6:
            room = random.randrange(60)
            taken = table.take(room)
            expected = naive.ready[:room]
            naive.flying.update(expected)
            assert expand([n for at, n in enumerate(taken) if at % 3]) == expected
        else:
            first = random.choice(sorted(naive.flying) or [0]) - random.randrange(2)
            last = first + random.choice((0, 0, 3, 50))
            table.release(first, last)
            for offset in range(first, last + 1):
                naive.release(offset)
        assert (table.heads, table.waiting) == (len(naive.keys), naive.waiting)
        assert table.ready == len(naive.ready)


def test_messages_without_a_key_are_in_flight_at_once_and_not_kept() -> None:
    table = KeysInFlight()
    keys = struct.pack("<7Q", 0, 0, 5, 0, 5, 0, 0)
    assert table.admit(0, keys, 0, 10, 17, 5, 9) == [16, 10, 14, 15, 16]
    assert (table.heads, table.waiting, table.ready) == (1, 1, 0)
    table.release(10, 11)
    assert (table.heads, table.waiting, table.ready) == (1, 1, 0)
    table.release(12, 16)
    assert table.take(9) == [0, 14, 15]
    # The bound of those that wait stops nothing that has no key.
    assert table.admit(1, bytes(16), 0, 17, 19, 9, 0) == [19, 17, 19]


def test_ready_messages_that_lie_together_come_in_one_run_of_each_batch() -> None:
    table = KeysInFlight()
    keys = struct.pack("<6Q", 1, 2, 3, 1, 2, 3)
    assert table.admit(0, keys, 0, 10, 15, 9, 9) == [15, 10, 13]
    assert table.admit(1, keys, 5, 15, 16, 9, 9) == [16]
    table.release(10, 12)
    assert table.take(9) == [0, 13, 15, 1, 15, 16]
    table.release(13, 15)
    assert (table.heads, table.waiting, table.ready) == (0, 0, 0)


def test_a_ready_message_is_not_released() -> None:
    table = KeysInFlight()
    table.admit(0, struct.pack("<3Q", 7, 7, 7), 0, 0, 3, 9, 9)
    table.release(0, 2)
    assert (table.heads, table.waiting, table.ready) == (1, 1, 1)
    assert table.take(9) == [0, 1, 2]


def test_messages_without_a_hash_are_refused() -> None:
    for at, first, end in ((0, 0, 3), (1, 0, 2), (-1, 0, 1), (0, 1, 0), (1 << 62, 0, 1)):
        with pytest.raises(ValueError, match="without a hash"):
            KeysInFlight().admit(0, bytes(16), at, first, end, 9, 9)


def test_hashes_of_records_are_those_of_their_keys() -> None:
    keys = [b"", b"a", b"account-7", b"x" * 200]
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56 | 1 << 24 | 1, None)
    for key in keys:
        target.publish([record_of("orders", key.decode(), b"body")], 4, 0, 8)
    block: bytes = builder.take_entry(7, 1, 1, 1000).data
    (command,) = (each[6] for each in batch.commands(block) if each[0] == batch.CMD_ENQUEUE)
    assert key_hashes(block, command, 0, 4) == hashing.key_hashes(keys)
    assert key_hashes(block, command, 1, 2) == hashing.key_hashes(keys[1:3])
    first, *others = struct.unpack("<4Q", hashing.key_hashes(keys))
    assert first == 0
    assert all(each >> 63 for each in others)
    with pytest.raises(ValueError, match="outside"):
        key_hashes(block, command, 2, 3)
