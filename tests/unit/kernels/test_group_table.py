"""The table of message groups, against lists that are searched through; and the heap of places."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.group_table import KEY_BYTES_MAX, GroupTable
from convoymq.kernels.place_heap import PlaceHeap
from convoymq.queues.quorum.levels import LEVEL_DEFAULT, mark_of
from tests.unit.queues.quorum.support import expand
from tests.unit.queues.quorum.test_groups import record_in

SIZE = 10
NOW_MS = 1000
Message = tuple[int, int, int]
NAMES = (b"", b"a", b"b", b"fifteen bytes..", b"sixteen bytes...", b"c" * 64, b"d" * 65, b"d" * 66)


def command_of(names: tuple[bytes | None, ...], expiration: str | None) -> tuple[bytes, int]:
    """An entry with one ENQUEUE, a record in each group, and where the command begins."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56 | 1 << 24 | 1, None)
    for name in names:
        record, flags = record_in(name, SIZE, expiration=expiration)
        target.publish([record], SIZE, 0, flags | 8)
    data: bytes = builder.take_entry(7, 1, 1, 1000).data
    return data, next(each[6] for each in batch.commands(data) if each[0] == batch.CMD_ENQUEUE)


class Naive:
    """Every message of every group, in order; what is not the first of its group is blocked."""

    def __init__(self) -> None:
        self.groups: dict[bytes, list[Message]] = {}
        self.marks: dict[Message, int] = {}
        self.blocking: list[bytes] = []

    def enter(self, name: bytes, message: Message, mark: int) -> bool:
        waiting = self.groups.setdefault(name, [])
        waiting.append(message)
        self.marks[message] = mark
        if len(waiting) == 2:
            self.blocking.append(name)
        return len(waiting) == 1

    def heads(self) -> list[Message]:
        return sorted(waiting[0] for waiting in self.groups.values())

    def blocked(self) -> list[Message]:
        return [message for name in self.blocking for message in self.groups[name][1:]]

    def leave(self, message: Message) -> Message | None:
        for name, waiting in self.groups.items():
            if waiting[0] == message:
                waiting.pop(0)
                self._after(name)
                return waiting[0] if waiting else None
        return None

    def take_blocked(self, count: int) -> list[Message]:
        name = self.blocking[0]
        taken = self.groups[name][1 : 1 + count]
        del self.groups[name][1 : 1 + count]
        self._after(name)
        return taken

    def _after(self, name: bytes) -> None:
        if len(self.groups[name]) < 2 and name in self.blocking:
            self.blocking.remove(name)
        if not self.groups[name]:
            del self.groups[name]


def check(table: GroupTable, naive: Naive) -> None:
    assert (table.heads, table.messages) == (len(naive.groups), len(naive.blocked()))
    assert table.size == SIZE * table.messages
    runs = table.blocked_runs()
    assert expand(runs) == naive.blocked()
    assert all(run[4] == SIZE * run[3] for run in runs)
    for run in runs:
        assert {naive.marks[message] for message in expand([run])} == {run[7]}
    heads = [(index, place >> 32, place & 0xFFFFFFFF) for index, place in sorted(table.keys())]
    assert heads == naive.heads()
    assert table.indexes() == {message[0] for message in naive.blocked()}
    if naive.blocking:
        assert table.oldest_index() == naive.blocked()[0][0]
    else:
        assert table.oldest_index() is None
    assert (table.memory_bytes() > 0) or not table.heads


def again(table: GroupTable) -> GroupTable:
    """A table that was restored from what this one says of itself."""
    made = GroupTable()
    heads = [[*place, key] for place, key in sorted(table.keys().items())]
    made.restore(heads, list(table.blocked_by_key().items()))
    return made


@given(st.integers(0, 1 << 32), st.sampled_from((1, 2, 8)), st.booleans())
def test_a_table_is_as_lists_that_are_searched_through(seed: int, names: int, marked: bool) -> None:
    """Publishing, leaving in any order, what is too long, purges and snapshots."""
    random = Random(seed)
    table, naive, index = GroupTable(), Naive(), 0
    for _ in range(40):
        what = random.random()
        if what < 0.4:
            index += 1
            chosen = tuple(
                random.choice((None, *NAMES[:names])) for _ in range(random.randint(1, 12))
            )
            expires = marked and random.random() < 0.5
            mark = mark_of(LEVEL_DEFAULT, NOW_MS + 50) if expires else 0
            data, offset = command_of(chosen, "50" if expires else None)
            first = random.randint(0, len(chosen) - 1)
            found = table.enqueue(data, index, offset, first, len(chosen) - first, NOW_MS, -1)
            ready = []
            for record in range(first, len(chosen)):
                name, message = chosen[record], (index, offset, record)
                if name is None or naive.enter(name, message, mark):
                    ready.append(message)
            given = [(0, index, offset, *found[at + 1 : at + 4]) for at in range(0, len(found), 5)]
            assert expand([run[1:] for run in given]) == ready
            assert sum(found[3::5]) == SIZE * len(ready)
            assert set(found[4::5]) <= {mark}
        elif what < 0.8 and naive.groups:
            head = random.choice(naive.heads())
            count = random.randint(1, 6)
            gone = [(head[0], head[1], head[2] + i) for i in range(count)]
            expected = [message for each in gone if (message := naive.leave(each)) is not None]
            assert expand(table.leave((*head, count, SIZE * count, 0, 0, 0))) == expected
        elif what < 0.9 and naive.blocking:
            amount = table.blocked_amount()
            run = table.take_blocked(random.randint(1, 3))
            assert run[3] <= amount[0]
            assert expand([run]) == naive.take_blocked(run[3])
        elif what < 0.93:
            held = [message for message in naive.heads() if random.random() < 0.5]
            blocked = len(naive.blocked())
            assert table.purge([(*each, 1, SIZE, 0, 0, 0) for each in held]) == blocked
            naive.groups = {n: g[:1] for n, g in naive.groups.items() if g[0] in held}
            naive.blocking = []
        else:
            table = again(table)
        check(table, naive)


def test_followers_that_lie_together_come_in_one_run() -> None:
    table = GroupTable()
    names = tuple(str(i).encode() for i in range(100))
    data, offset = command_of((*names, *names), None)
    assert table.enqueue(data, 1, offset, 0, 200, NOW_MS, -1) == [0, 0, 100, 100 * SIZE, 0]
    left = table.leave((1, offset, 10, 50, 50 * SIZE, 0, 0, 0))
    assert left == [(1, offset, 110, 50, 50 * SIZE, 0, 0, 0)]
    assert table.parts((1, offset, 100, 100, 100 * SIZE, 0, 0, 0)) == [
        ((1, offset, 100, 10, 10 * SIZE, 0, 0, 0), False),
        ((1, offset, 110, 50, 50 * SIZE, 0, 0, 0), True),
        ((1, offset, 160, 40, 40 * SIZE, 0, 0, 0), False),
    ]


def test_a_group_takes_less_than_a_hundred_bytes_and_none_when_it_is_gone() -> None:
    table, count = GroupTable(), 50_000
    for index in range(1, 51):
        names = tuple(f"group-{index}-{i}".encode() for i in range(1_000))
        data, offset = command_of(names, None)
        table.enqueue(data, index, offset, 0, 1_000, NOW_MS, -1)
        table.enqueue(data, 100 + index, offset, 0, 1_000, NOW_MS, -1)
    assert (table.heads, table.messages) == (count, count)
    assert table.run_count() == 2 * count
    assert table.memory_bytes() <= count * (100 + 36)
    for index in range(1, 51):
        assert table.leave((index, offset, 0, 1_000, 1, 0, 0, 0))
        assert not table.leave((100 + index, offset, 0, 1_000, 1, 0, 0, 0))
    assert table.run_count() == table.memory_bytes() == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="two heads"):
        GroupTable().restore([[1, 2, b"a"], [1, 3, b"a"]], [])
    with pytest.raises(ValueError, match="too long"):
        GroupTable().restore([[1, 2, bytes(KEY_BYTES_MAX + 1)]], [])
    with pytest.raises(ValueError, match="without a head"):
        GroupTable().restore([], [(b"a", [(1, 2, 0, 1, 1, 0, 0, 0)])])
    table = GroupTable()
    table.restore([[1, 2, b"a"]], [])
    with pytest.raises(ValueError, match="over others"):
        table.restore([[1, 2, b"a"]], [])
    with pytest.raises(ValueError, match="blocked"):
        GroupTable().take_blocked(1)
    with pytest.raises(ValueError, match="blocked"):
        GroupTable().blocked_amount()
    with pytest.raises(ValueError, match="nothing"):
        PlaceHeap().take(1)
    with pytest.raises(ValueError, match="without messages"):
        PlaceHeap().add((1, 2, 3, 0, 0, 0, 0, 0))


@given(st.integers(0, 1 << 32))
def test_a_heap_joins_what_follows_each_other(seed: int) -> None:
    """Messages of one command come one by one, in any order."""
    random = Random(seed)
    heap = PlaceHeap()
    left: list[tuple[int, int, int, int]] = []
    coming = [(index, record) for index in (1, 2) for record in range(30)]
    random.shuffle(coming)
    while coming or left:
        if coming and random.random() < 0.7:
            index, record = coming.pop()
            counts = int(random.random() < 0.1)
            heap.add((index, 40, record, 1, SIZE, counts, 0, 0))
            left.append((index, 40, record, counts))
        elif left:
            left.sort()
            limit = random.randint(1, 10)
            taken = [left[0]]
            for following in left[1:limit]:
                if following != (*taken[-1][:2], taken[-1][2] + 1, taken[-1][3]):
                    break
                taken.append(following)
            assert heap.head() == (*left[0][:3], 1, SIZE, left[0][3], 0, 0)
            run = heap.take(limit)
            assert run == (*taken[0][:3], len(taken), len(taken) * SIZE, taken[0][3], 0, 0)
            del left[: len(taken)]
        assert expand(heap.runs()) == sorted(each[:3] for each in left)
        assert heap.messages == len(heap) == len(left)
    assert heap.head() is None
