"""Parked keys for operators: which partitions are asked, and what comes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.topics.parked import ParkedKeys
from convoymq.model.errors import NotFound, Unavailable
from convoymq.queues.partition.reads import ParkedRow
from convoymq.topics.answers import ParkAnswer, ParkedEntry
from convoymq.topics.commands import ResumeParked, SkipParked
from convoymq.topics.hashing import logical_partition
from convoymq.topics.lineage import Partition, PartitionState
from convoymq.topics.parking import ParkSet
from convoymq.topics.refusals import Code, NotParked

LOGICAL = 8
PLACE = ("/", "orders", "g")


class FakePartition:
    """The park set of one group, in pages of two."""

    def __init__(self) -> None:
        self.keys = ParkSet()
        self.asked: list[object] = []
        self.code = Code.OK

    async def parked(self, _group: str, after: bytes = b"") -> list[ParkedRow]:
        found = sorted(key for key in self.keys.keys if key > after or not after)[:2]
        rows = [(key, self.keys.keys[key]) for key in found]
        return [
            ParkedRow(key, each.lp, each.resuming, len(each.entries), 1, each.entries[0].token, b"")
            for key, each in rows
        ]

    async def ask(self, command: Any) -> object:
        self.asked.append(command)
        if self.code is not Code.OK:
            return ParkAnswer(self.code)
        if isinstance(command, SkipParked):
            return ParkAnswer(self.keys.skip(command.key, command.token))
        assert isinstance(command, ResumeParked)
        return ParkAnswer(self.keys.resume(command.key))


class Topic:
    """Partition 0 was split into 2 and 3, partition 1 is as it was; `cv` is that of a group."""

    def __init__(self, cv: int = 0) -> None:
        sealed = PartitionState.SEALED
        lines = [
            Partition(0, 0, 4, 0, sealed_version=1, children=(2, 3), state=sealed),
            Partition(1, 4, 8, 0),
            Partition(2, 0, 2, 1, parents=(0,)),
            Partition(3, 2, 4, 1, parents=(0,)),
        ]
        lineage = SimpleNamespace(partitions={line.pid: line for line in lines})
        record = SimpleNamespace(
            vhost="/",
            name="orders",
            logical=LOGICAL,
            hash_seed=0,
            state=SimpleNamespace(lineage=lineage),
            groups={"g": SimpleNamespace(cv=cv)},
        )
        tree: Any = SimpleNamespace(
            vhosts={"/": SimpleNamespace(topics={"orders": record}, name="/")}
        )
        self.lines = lines
        self.partitions: dict[int, FakePartition] = {pid: FakePartition() for pid in range(4)}
        found: Any = SimpleNamespace(find=lambda _vhost, _name, pid: self.partitions.get(pid))
        self.keys = ParkedKeys(tree, found)

    def park(self, pid: int, key: bytes, offsets: range = range(1, 2)) -> None:
        for offset in offsets:
            entry = ParkedEntry(0, offset, pid, b"m")
            lp = logical_partition(key, LOGICAL)
            assert self.partitions[pid].keys.append(key, lp, entry, follow=False) is Code.OK


def key_of(lps: range) -> bytes:
    """A key whose logical partition is one of these."""
    return next(
        key
        for key in (b"key-%d" % number for number in range(100))
        if logical_partition(key, LOGICAL) in lps
    )


async def test_keys_of_all_partitions_that_the_group_has_before_it_are_listed() -> None:
    topic = Topic()
    for number in range(5):
        topic.park(0, b"k%d" % number, range(1, 3))
    topic.park(1, b"other")
    rows = await topic.keys.list(*PLACE)
    assert [(row["pid"], row["key"]) for row in rows] == [
        (0, b"k0"), (0, b"k1"), (0, b"k2"), (0, b"k3"), (0, b"k4"), (1, b"other")
    ]  # fmt: skip
    assert (rows[0]["messages"], rows[0]["resuming"]) == (2, False)
    assert rows[0]["order_token"] == "0000000000000000-0000000000000001"


async def test_what_the_group_has_left_behind_is_not_asked() -> None:
    topic = Topic(cv=1)
    topic.park(0, b"handed over")
    topic.park(2, b"handed over")
    assert [row["pid"] for row in await topic.keys.list(*PLACE)] == [2]
    topic.lines[1].state = PartitionState.DELETED
    topic.park(1, b"gone")
    assert [row["pid"] for row in await topic.keys.list(*PLACE)] == [2]


async def test_a_key_without_bytes_is_listed_once() -> None:
    topic = Topic()
    topic.park(1, b"")
    assert len(await topic.keys.list(*PLACE)) == 1


async def test_a_key_is_resumed_where_it_lies() -> None:
    topic = Topic()
    key = key_of(range(2))
    topic.park(2, key)
    await topic.keys.resume(*PLACE, key)
    assert topic.partitions[2].keys.keys[key].resuming
    assert [pid for pid, each in topic.partitions.items() if each.asked] == [0, 2]


async def test_the_first_message_of_a_key_is_skipped() -> None:
    topic = Topic()
    key = key_of(range(4, 8))
    topic.park(1, key, range(1, 3))
    await topic.keys.skip(*PLACE, key)
    await topic.keys.skip(*PLACE, key)
    assert not topic.partitions[1].keys.keys
    with pytest.raises(NotParked, match="no parked messages"):
        await topic.keys.skip(*PLACE, key)


async def test_what_cannot_be() -> None:
    topic = Topic()
    key = key_of(range(4, 8))
    with pytest.raises(NotParked):
        await topic.keys.resume(*PLACE, key)
    with pytest.raises(NotFound, match="no topic 'none'"):
        await topic.keys.list("/", "none", "g")
    with pytest.raises(NotFound, match="no group 'h'"):
        await topic.keys.list("/", "orders", "h")
    topic.partitions[1].code = Code.STALE_TERM
    with pytest.raises(Unavailable, match="STALE_TERM"):
        await topic.keys.resume(*PLACE, key)
    del topic.partitions[1]
    with pytest.raises(Unavailable, match="not open here"):
        await topic.keys.resume(*PLACE, key)
