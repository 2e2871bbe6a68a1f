"""Parked keys for operators: which partitions are asked, what comes of it, and messages that get
another body."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.client.topic_messages import COLUMNS, contents_of
from convoymq.edges.http.messages import content_in
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_writer import ColumnWriter
from convoymq.kernels.columns import PROPERTIES
from convoymq.messages.record import names_of
from convoymq.metadata.records import User
from convoymq.model.errors import NotFound, PreconditionFailed, Unavailable
from convoymq.topics.machine.parking import ParkSet
from convoymq.topics.machine.reads import ParkedRow
from convoymq.topics.rules.answers import ParkAnswer, ParkedEntry
from convoymq.topics.rules.changes import Phase, Seal, plan_split
from convoymq.topics.rules.commands import ResumeParked, SkipParked
from convoymq.topics.rules.dedup import DedupTable
from convoymq.topics.rules.group import Advance, GroupCommand, GroupState, Skip
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code, NotParked
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import TopicState
from convoymq.topics.shell.parked import ParkedKeys, with_body

USER = User(name="ann")


def parked(body: bytes, **properties: object) -> bytes:
    """A message as it is parked."""
    properties |= {"headers": {"x-order-key": "k", "other": "kept"}, "content_type": "text/plain"}
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    target.publish((names_of("t", "route"), content_in(properties, body)), len(body), 0)
    builder.discard_unsent()
    return batch.slice_records(bytes(target.pending[0].bytes()), 0, 0, 1)


def columns(message: bytes) -> ColumnFrame:
    writer = ColumnWriter(COLUMNS | PROPERTIES, 1, 1 << 20)
    assert writer.append(message, 0, 0, 1, 7, 0) == 1
    return ColumnFrame(bytes(writer.finish(8)))


@pytest.mark.parametrize("body", [b"", b"better", b"x" * 300_000])
def test_another_body_leaves_the_rest_as_it_was(body: bytes) -> None:
    before = columns(parked(b"worse"))
    after = columns(with_body(parked(b"worse"), body, USER))
    (content,) = contents_of(after)
    assert content.body == body
    assert content.key == b"k"
    assert content.headers == contents_of(before)[0].headers
    flags = [bytes(frame.buffers(PROPERTIES)[1])[12:] for frame in (before, after)]
    assert flags[0] == flags[1]


def test_a_body_is_not_put_under_the_name_of_its_author() -> None:
    with pytest.raises(PreconditionFailed, match="user_id property set to 'bob'"):
        with_body(parked(b"pay 1", user_id="bob"), b"pay 1000", USER)
    assert with_body(parked(b"pay 1", user_id="ann"), b"pay 2", USER)


LOGICAL = 8
PLACE = ("/", "orders", "g")
ADVANCE = Advance(1, 0, 1)
SKIP = Skip(0, 1, 8)


class FakePartition:
    """The park set of one group, in pages of two. It says nothing while it is `away`."""

    def __init__(self) -> None:
        self.keys = ParkSet()
        self.asked: list[object] = []
        self.code = Code.OK
        self.away = False

    async def parked(self, _group: str, after: bytes = b"") -> list[ParkedRow]:
        self._answers()
        found = sorted(key for key in self.keys.keys if key > after or not after)[:2]
        rows = [(key, self.keys.keys[key]) for key in found]
        return [
            ParkedRow(key, each.lp, each.resuming, len(each.entries), 1, each.entries[0].token, b"")
            for key, each in rows
        ]

    async def ask(self, command: Any) -> object:
        self._answers()
        self.asked.append(command)
        if self.code is not Code.OK:
            return ParkAnswer(self.code)
        if isinstance(command, SkipParked):
            return ParkAnswer(self.keys.skip(command.key, command.token))
        assert isinstance(command, ResumeParked)
        return ParkAnswer(self.keys.resume(command.key))

    def _answers(self) -> None:
        if self.away:
            raise Unavailable("no leader")


class Topic:
    """Partition 0 was split into 2 and 3, partition 1 is as it was. The group begins before that,
    and has done `commands` since."""

    def __init__(self, *commands: GroupCommand) -> None:
        state = TopicState.first(first_route(LOGICAL, 2))
        change = plan_split(state.route, 0, (2,), 2, "c")
        seal = {0: Seal(8, DedupTable().pack())}
        state.lineage.apply(replace(change, phase=Phase.PUBLISHED, seals=seal), published_at=0)
        group = GroupState.first("g", 0, {})
        for command in commands:
            assert group.apply(command, latest=1)
        record = SimpleNamespace(
            vhost="/", name="orders", logical=LOGICAL, hash_seed=0, state=state, groups={"g": group}
        )
        vhosts = {"/": SimpleNamespace(topics={"orders": record})}
        tree: Any = SimpleNamespace(vhost=vhosts.__getitem__)
        self.lineage = state.lineage
        self.partitions: dict[int, FakePartition] = {pid: FakePartition() for pid in range(4)}
        found: Any = SimpleNamespace(get=self._get)
        self.keys = ParkedKeys(tree, found)

    def _get(self, _record: object, pid: int) -> FakePartition:
        if pid not in self.partitions:
            raise Unavailable(f"partition {pid} is not open here")
        return self.partitions[pid]

    def park(self, pid: int, key: bytes, offsets: range = range(1, 2)) -> None:
        for offset in offsets:
            entry = ParkedEntry(0, offset, pid, b"m")
            lp = logical_partition(key, LOGICAL)
            assert self.partitions[pid].keys.append(key, lp, entry, follow=False) is Code.OK


def keys_of(lps: range) -> list[bytes]:
    """Keys whose logical partition is one of these."""
    keys = (b"key-%d" % number for number in range(100))
    return [key for key in keys if logical_partition(key, LOGICAL) in lps]


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
    topic = Topic(ADVANCE)
    topic.park(0, b"handed over")
    topic.park(2, b"handed over")
    assert [row["pid"] for row in await topic.keys.list(*PLACE)] == [2]
    topic.lineage.partition(1).state = PartitionState.DELETED
    topic.park(1, b"gone")
    assert [row["pid"] for row in await topic.keys.list(*PLACE)] == [2]


async def test_a_key_without_bytes_is_listed_once() -> None:
    topic = Topic()
    topic.park(1, b"")
    assert len(await topic.keys.list(*PLACE)) == 1


async def test_a_key_is_resumed_where_it_lies() -> None:
    topic = Topic()
    key = keys_of(range(2))[0]
    topic.park(2, key)
    await topic.keys.resume(*PLACE, key)
    assert topic.partitions[2].keys.keys[key].resuming
    assert [pid for pid, each in topic.partitions.items() if each.asked] == [0, 2]


async def test_the_first_message_of_a_key_is_skipped() -> None:
    topic = Topic()
    key = keys_of(range(4, 8))[0]
    topic.park(1, key, range(1, 3))
    await topic.keys.skip(*PLACE, key)
    await topic.keys.skip(*PLACE, key)
    assert not topic.partitions[1].keys.keys
    with pytest.raises(NotParked, match="no parked messages"):
        await topic.keys.skip(*PLACE, key)


async def test_what_cannot_be() -> None:
    topic = Topic()
    key = keys_of(range(4, 8))[0]
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


async def test_parked_keys_of_what_was_skipped_are_found_when_it_answers() -> None:
    topic = Topic(SKIP, ADVANCE)
    late, live, *_ = keys_of(range(2))
    topic.park(0, late)
    topic.park(2, live)
    rows = await topic.keys.list(*PLACE)
    assert [(row["pid"], row["key"]) for row in rows] == [(2, live), (0, late)]
    await topic.keys.resume(*PLACE, late)
    assert topic.partitions[0].keys.keys[late].resuming


async def test_what_was_skipped_and_is_silent_holds_no_operator_up() -> None:
    topic = Topic(SKIP, ADVANCE)
    late, live, none, *_ = keys_of(range(2))
    topic.park(0, late)
    topic.park(2, live)
    topic.partitions[0].away = True
    rows = await topic.keys.list(*PLACE)
    assert [row["key"] for row in rows] == [live]
    await topic.keys.resume(*PLACE, live)
    assert topic.partitions[2].keys.keys[live].resuming
    # It may have the key.
    with pytest.raises(Unavailable):
        await topic.keys.resume(*PLACE, late)
    topic.partitions[0].away = False
    with pytest.raises(NotParked):
        await topic.keys.resume(*PLACE, none)
    topic.partitions[2].away = True
    with pytest.raises(Unavailable):
        await topic.keys.list(*PLACE)
