"""Parked keys: where operators find them, and messages that get another body."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.topics.parked import ParkedKeys, with_body
from convoymq.client.topic_messages import COLUMNS, contents_of
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_writer import ColumnWriter
from convoymq.kernels.columns import PROPERTIES
from convoymq.management.messages import build_record
from convoymq.model.errors import Unavailable
from convoymq.queues.partition.reads import ParkedRow
from convoymq.topics.answers import ParkAnswer
from convoymq.topics.changes import Phase, Seal, plan_move
from convoymq.topics.commands import ResumeParked
from convoymq.topics.dedup import DedupTable
from convoymq.topics.group import Advance, GroupState, Skip
from convoymq.topics.order_token import OrderToken
from convoymq.topics.refusals import Code, NotParked
from convoymq.topics.routes import first_route
from convoymq.topics.topic import TopicState


def parked(body: bytes) -> bytes:
    """A message as it is parked."""
    properties = {"headers": {"x-order-key": "k", "other": "kept"}, "content_type": "text/plain"}
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    target.publish((build_record("t", "route", properties, body),), len(body), 0)
    builder.discard_unsent()
    return batch.slice_records(bytes(target.pending[0].bytes()), 0, 0, 1)


def columns(message: bytes) -> ColumnFrame:
    writer = ColumnWriter(COLUMNS | PROPERTIES, 1, 1 << 20)
    assert writer.append(message, 0, 0, 1, 7, 0) == 1
    return ColumnFrame(bytes(writer.finish(8)))


@pytest.mark.parametrize("body", [b"", b"better", b"x" * 300_000])
def test_another_body_leaves_the_rest_as_it_was(body: bytes) -> None:
    before = columns(parked(b"worse"))
    after = columns(with_body(parked(b"worse"), body))
    (content,) = contents_of(after)
    assert content.body == body
    assert content.key == b"k"
    assert content.headers == contents_of(before)[0].headers
    flags = [bytes(frame.buffers(PROPERTIES)[1])[12:] for frame in (before, after)]
    assert flags[0] == flags[1]


class Queue:
    """A partition with one parked key, or none. It says nothing while it is `away`."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self.away = False
        self.resumed: list[bytes] = []

    async def parked(self, group: str, after: bytes) -> list[ParkedRow]:
        if self.away:
            raise Unavailable("no leader")
        row = ParkedRow(self.key, 0, False, 1, 3, OrderToken(0, 4), b"one")
        return [row] if self.key and self.key > after else []

    async def ask(self, command: ResumeParked) -> ParkAnswer:
        if self.away:
            raise Unavailable("no leader")
        if command.key != self.key:
            return ParkAnswer(Code.NOT_PARKED)
        self.resumed.append(command.key)
        return ParkAnswer(Code.OK)


class World:
    """A group that has skipped the first of two partitions of a topic, one behind the other."""

    def __init__(self) -> None:
        topic = TopicState.first(first_route(4, 1))
        change = plan_move(topic.route, 0, 1, "c")
        seal = {0: Seal(8, DedupTable().pack())}
        topic.lineage.apply(replace(change, phase=Phase.PUBLISHED, seals=seal), published_at=0)
        group = GroupState.first("g", 0, {})
        for command in (Skip(0, 1, 8), Advance(1, 0, 1)):
            assert group.apply(command, latest=1)
        self.queues = {0: Queue(b"late"), 1: Queue(b"live")}
        record = SimpleNamespace(
            vhost="/", name="t", groups={"g": group}, logical=4, hash_seed=0, state=topic
        )
        tree: Any = SimpleNamespace(vhosts={"/": SimpleNamespace(topics={"t": record})})
        partitions: Any = SimpleNamespace(find=lambda vhost, topic, pid: self.queues[pid])
        self.parked = ParkedKeys(tree, partitions)


async def test_parked_keys_of_what_was_skipped_are_found_when_it_answers() -> None:
    world = World()
    rows = await world.parked.list("/", "t", "g")
    assert [(row["pid"], row["key"]) for row in rows] == [(1, b"live"), (0, b"late")]
    await world.parked.resume("/", "t", "g", b"late")
    assert world.queues[0].resumed == [b"late"]


async def test_what_was_skipped_and_is_silent_holds_no_operator_up() -> None:
    world = World()
    world.queues[0].away = True
    rows = await world.parked.list("/", "t", "g")
    assert [row["key"] for row in rows] == [b"live"]
    await world.parked.resume("/", "t", "g", b"live")
    assert world.queues[1].resumed == [b"live"]
    # It may have the key.
    with pytest.raises(Unavailable):
        await world.parked.resume("/", "t", "g", b"late")
    world.queues[0].away = False
    with pytest.raises(NotParked):
        await world.parked.resume("/", "t", "g", b"none")
    world.queues[1].away = True
    with pytest.raises(Unavailable):
        await world.parked.list("/", "t", "g")
