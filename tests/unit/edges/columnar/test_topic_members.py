"""Requests of groups' members, on a node whose topics are real and whose groups are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from convoymq.client.topic_messages import COLUMNS, contents_of
from convoymq.client.topic_rows import TopicRow, frame_of_rows
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.model.config import TraceConfig
from convoymq.model.trace import AT_SETTLING, HANDED_OUT, ONE_OF_KEY
from convoymq.topics.rules.hashing import logical_partition
from convoymq.trace.recorder import Traces
from tests.patience import PATIENCE_S
from tests.unit.edges.columnar.support import Peer, Rig, reader
from tests.unit.trace.support import rows_of, wall_clock_us

GROUP = {"topic": "orders", "group": "g"}
BODIES = (b"1", b"2", b"3", b"4")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as made:
        made.cluster.raise_versions()
        settings = TraceConfig(vhosts=("/",))
        traces = Traces(tmp_path / "trace", 1, 1, settings, wall_clock_us)
        made.broker.traces = made.broker.local.traces = traces
        await made.broker.topics.create("/", "orders", partitions=1, logical=8)
        yield made


async def produce(client: Peer, *bodies: bytes) -> None:
    """All have one key."""
    runs = [[logical_partition(b"k", 8), 1, len(bodies), 1, b""]]
    frame = frame_of_rows([TopicRow(b"k", body) for body in bodies])
    fields = {"topic": "orders", "pid": 0, "producer": 7, "epoch": 1, "runs": runs}
    answer = await client.ask(Op.TOPIC_PRODUCE, frame, **fields)
    assert answer.status == 0, answer.map


class Member:
    """A member of the group `g`, request by request."""

    def __init__(self, client: Peer) -> None:
        self.client = client
        self.name = ""
        self.sent_ms = 0
        self.epoch = 0

    async def join(self, **more: object) -> None:
        answer = await self.client.ask(Op.GROUP_JOIN, **GROUP, **more)
        assert answer.status == 0, answer.map
        self.name = str(answer.map["member"])
        assert (answer.map["logical"], answer.map["hash_seed"]) == (8, 0)

    async def beat(self, *held: int, leaves: bool = False, released: tuple[int, ...] = ()) -> Frame:
        self.sent_ms += 1
        fields = {"held": list(held), "released": list(released), "leaves": leaves}
        return await self.client.ask(
            Op.GROUP_HEARTBEAT,
            **GROUP,
            member=self.name,
            sent_ms=self.sent_ms,
            group_epoch=1,
            **fields,
        )

    async def own(self) -> None:
        """Waits until it has the partition."""
        async with asyncio.timeout(PATIENCE_S):
            while not (leases := (await self.beat()).map.get("leases")):
                await asyncio.sleep(0.01)
        assert isinstance(leases, list)
        self.epoch = leases[1]

    async def fetch(self, **more: object) -> Frame:
        fields = {"pid": 0, "group_epoch": 1, "epoch": self.epoch, "columns": COLUMNS}
        answer = await self.client.ask(Op.GROUP_FETCH, **GROUP, **{**fields, **more})
        assert answer.status == 0, answer.map
        return answer

    async def settle(self, kind: str, **more: object) -> Frame:
        fields = {"pid": 0, "group_epoch": 1, "epoch": self.epoch, "columns": COLUMNS}
        return await self.client.ask(Op.GROUP_SETTLE, **GROUP, kind=kind, **{**fields, **more})


@pytest.fixture
async def member(rig: Rig, client: Peer) -> Member:
    await produce(client, *BODIES)
    made = Member(client)
    await made.join()
    await made.own()
    return made


def bodies(frame: Frame) -> list[bytes]:
    return [content.body for content in contents_of(ColumnFrame(frame.payload))]


async def test_an_owner_reads_on_behind_what_it_has(member: Member) -> None:
    first = await member.fetch(max_rows=3)
    assert bodies(first) == [b"1", b"2", b"3"]
    assert list(ColumnFrame(first.payload).offsets()) == [1, 2, 3]
    told = {name: first.map[name] for name in ("code", "next", "close", "version")}
    assert told == {"code": "OK", "next": 4, "close": -1, "version": 0}
    assert first.map["view"] == {"acked": [1], "parked": [], "park_version": 0}
    rest = await member.fetch(offset=4, park_version=0)
    assert bodies(rest) == [b"4"]
    assert (rest.map["next"], "view" in rest.map) == (5, False)


async def test_acknowledgements_are_checked_by_the_lease(member: Member) -> None:
    answer = await member.settle("ack", ranges=[1, 2])
    assert answer.map == {"code": "OK", "drained": False}
    assert bodies(await member.fetch()) == [b"3", b"4"]
    answer = await member.settle("ack", ranges=[3, 3], epoch=member.epoch - 1)
    assert answer.map["code"] == "LEASE_FENCED"
    assert (await member.fetch(epoch=member.epoch - 1)).map == {"code": "LEASE_FENCED"}
    answer = await member.settle("ack", ranges=[3])
    assert (answer.status, answer.map["text"]) == (
        ErrorCode.PRECONDITION_FAILED,
        "GROUP_SETTLE: a range has a first and a last offset",
    )


async def test_what_a_member_had_is_traced_as_it_settles(
    rig: Rig, member: Member, tmp_path: Path
) -> None:
    for kind, more in (
        ("ack", {"ranges": [1, 2]}),
        # The answer was lost, and the member asks again for more.
        ("ack", {"ranges": [1, 3]}),
        ("park", {"offset": 4, "key": b"k"}),
    ):
        answer = await member.settle(kind, **more)
        assert answer.map["code"] == "OK"
    rig.broker.traces.stop()
    rig.broker.traces.join(PATIENCE_S)
    given = [row for row in rows_of(tmp_path / "trace") if row["kind"] == HANDED_OUT]
    assert [(row["first_id"], row["count"], row["flags"]) for row in given] == [
        (1, 2, AT_SETTLING | ONE_OF_KEY),
        (3, 1, AT_SETTLING | ONE_OF_KEY),
        (4, 1, AT_SETTLING | ONE_OF_KEY),
    ]


async def test_a_message_is_parked_as_the_log_has_it(rig: Rig, member: Member) -> None:
    answer = await member.settle("park", offset=1, key=b"k")
    assert answer.map == {"code": "OK", "live": False, "park_version": 1, "head": None}
    # The answer was lost: nothing is parked twice.
    answer = await member.settle("park", offset=1, key=b"k")
    assert answer.map == {"code": "DUPLICATE", "live": False, "park_version": 1, "head": None}
    answer = await member.settle("park", offset=2, key=b"k", follow=True)
    assert answer.map["code"] == "OK"
    (row,) = await rig.broker.topics.parked.list("/", "orders", "g")
    assert (row["key"], row["messages"], row["lp"]) == (b"k", 2, logical_partition(b"k", 8))
    await rig.broker.topics.parked.resume("/", "orders", "g", b"k")
    answer = await member.fetch(offset=3, park_version=2)
    assert answer.map["view"] == {
        "acked": [3], "parked": [[b"k", [0, 1, 0]]], "park_version": 3,
    }  # fmt: skip
    # Heads come alone: what is read next comes with the next answer.
    assert (bodies(answer), answer.map["next"]) == ([b"1"], 3)
    answer = await member.settle("done", version=0, offset=1, key=b"k", failed=False)
    assert (answer.map["code"], answer.map["head"]) == ("OK", [0, 2, 0])
    assert bodies(answer) == [b"2"]
    answer = await member.settle("done", version=0, offset=2, key=b"k", failed=False)
    assert answer.map == {"code": "OK", "live": True, "park_version": 5, "head": None}
    assert bodies(await member.fetch(offset=3, park_version=5)) == [b"3", b"4"]


@pytest.mark.provokes("topics.park_full")
async def test_a_partition_without_room_for_parked_keys_is_named(rig: Rig, member: Member) -> None:
    record = rig.broker.metadata.tree.vhosts["/"].topics["orders"]
    machine = rig.broker.topic_parts.partitions.get(record, 0).machine()
    assert machine is not None
    machine.state.groups["g"].parked.keys_max = 0
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            answer = await member.settle("park", offset=1, key=b"k")
            assert answer.map["code"] == "PARK_FULL"
    (said,) = [each for each in logs if each["event"] == "topics.park_full"]
    assert (said["topic"], said["group"], said["partition"]) == ("orders", "g", 0)
    machine.state.groups["g"].parked.keys_max = 1
    assert (await member.settle("park", offset=1, key=b"k")).map["code"] == "OK"


async def test_a_fetch_waits_for_messages(rig: Rig, member: Member) -> None:
    fields = {"pid": 0, "group_epoch": 1, "epoch": member.epoch, "columns": COLUMNS}
    waits = {"offset": 5, "park_version": 0, "wait_ms": 10_000}
    number = member.client.send(Op.GROUP_FETCH, {**GROUP, **fields, **waits})
    runs = [[logical_partition(b"k", 8), 5, 1, 1, b""]]
    produced = {"topic": "orders", "pid": 0, "producer": 7, "epoch": 1, "runs": runs}
    other = await rig.client()
    frame = frame_of_rows([TopicRow(b"k", b"5")])
    assert (await other.ask(Op.TOPIC_PRODUCE, frame, **produced)).status == 0
    async with asyncio.timeout(PATIENCE_S):
        while (found := member.client.answer_to(number)) is None:
            await asyncio.sleep(0.005)
    assert bodies(found) == [b"5"]


async def test_a_member_is_woken_when_it_gets_a_partition(rig: Rig, member: Member) -> None:
    other = Member(await rig.client())
    await other.join()
    assert (await other.beat()).map["leases"] == []
    wake = {**GROUP, "member": other.name}
    answer = await other.client.ask(Op.GROUP_WAKE, **wake, wait_ms=1)
    assert answer.status == 0, answer.map
    number = other.client.send(Op.GROUP_WAKE, {**wake, "wait_ms": 10_000})
    await member.beat(leaves=True, released=(0, member.epoch))
    async with asyncio.timeout(PATIENCE_S):
        while (found := other.client.answer_to(number)) is None:
            await asyncio.sleep(0.005)
    assert found.map == {"woken": True}
    await other.own()
    assert other.epoch > member.epoch
    parts = rig.broker.topic_parts.groups.parts
    assert other.name in parts.members
    other.client.transport.close()
    async with asyncio.timeout(PATIENCE_S):
        while other.name in parts.members:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("op", "fields", "status", "text"),
    [
        (Op.GROUP_JOIN, {"topic": "none"}, ErrorCode.NOT_FOUND, "no topic 'none'"),
        (Op.GROUP_JOIN, {"start": "middle"}, ErrorCode.PRECONDITION_FAILED, "GROUPJOIN"),
        (
            Op.GROUP_JOIN,
            {"start": [[0, 1], [0, 2]]},
            ErrorCode.PRECONDITION_FAILED,
            "a partition twice",
        ),
        (Op.GROUP_JOIN, {"start": [[9, 1]]}, ErrorCode.PRECONDITION_FAILED, "no partition 9"),
        (Op.GROUP_SEEK, {"position": "latest"}, ErrorCode.NOT_FOUND, "no group 'g'"),
        (
            Op.GROUP_HEARTBEAT,
            {"member": "m", "sent_ms": 1, "group_epoch": 0, "held": [], "released": []},
            ErrorCode.NOT_FOUND,
            "no group 'g'",
        ),
        (
            Op.GROUP_FETCH,
            {"pid": 9, "group_epoch": 1, "epoch": 1},
            ErrorCode.PRECONDITION_FAILED,
            "no partition 9",
        ),
    ],
)
async def test_what_is_not_there_or_cannot_be_is_refused(
    rig: Rig, client: Peer, op: Op, fields: dict[str, object], status: ErrorCode, text: str
) -> None:
    answer = await client.ask(op, **{**GROUP, **fields})
    assert answer.status == status, answer.map
    assert text in str(answer.map["text"])


async def test_a_group_with_members_is_not_sought(member: Member) -> None:
    answer = await member.client.ask(Op.GROUP_SEEK, **GROUP, position="earliest")
    assert (answer.status, answer.map["topic_code"]) == (
        ErrorCode.PRECONDITION_FAILED,
        "GROUP_LIVE",
    )


async def test_members_need_the_permission_to_read_the_group(rig: Rig) -> None:
    peer = await reader(rig, read="^orders/mine$")
    answer = await peer.ask(Op.GROUP_JOIN, topic="orders", group="mine")
    assert answer.status == 0, answer.map
    answer = await peer.ask(Op.GROUP_JOIN, **GROUP)
    assert answer.status == ErrorCode.ACCESS_REFUSED
