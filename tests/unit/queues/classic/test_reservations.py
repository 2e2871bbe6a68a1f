"""Reservations of classic queues: at home, from another node, over a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from convoymq.model.errors import NotFound, PeerError, ReservationRefused, StorageFault, Unavailable
from convoymq.queues.reservation_reads import ReservedRun, RunsRequest
from convoymq.queues.reservations import TAKE_RUNS_MAX
from convoymq.storage.files import RealFile
from convoymq.transport.frame_kinds import KIND_RESERVATION
from tests.unit.queues.classic.support import Node, Time, body_of, queue_record, settle

T = TypeVar("T")
TTL = 60_000


@pytest.fixture
def nodes(tmp_path: Path, time: Time) -> Iterator[dict[int, Node]]:
    made: dict[int, Node] = {}
    for node in (1, 2):
        serve(Node(node, made, tmp_path, time))
    yield made
    for one in made.values():
        one.host.stop()


def serve(node: Node) -> None:
    """What the broker does with requests about reservations."""

    async def answer(_: int, body: Any) -> Any:
        group, *request = body
        queue = node.host.queues.get(group)
        if queue is None:
            raise NotFound("the queue is not here")
        return await queue.serve_reservation(request)

    node.control.handle(KIND_RESERVATION, answer)


async def until(nodes: dict[int, Node], work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    for _ in range(500):
        await asyncio.sleep(0)
        settle(nodes)
        if task.done():
            break
    return await task


class Bench:
    """One queue, used from one node."""

    def __init__(self, nodes: dict[int, Node], place: int = 1, **more: Any) -> None:
        self.nodes = nodes
        record = queue_record(durable=more.pop("durable", False))
        self.home = nodes[1].open(record, **more)
        self.queue = nodes[place].open(record, **more)
        self.channel = nodes[place].channel(self.queue)

    @property
    def machine(self) -> Any:
        return self.home.machine

    def publish(self, *bodies: bytes, **properties: Any) -> None:
        self.channel.publish(*bodies, **properties)
        settle(self.nodes)

    async def op(self, op: str, reservation: str = "s", **fields: Any) -> Any:
        try:
            request = {"op": op, "reservation": reservation, **fields}
            answer = await until(self.nodes, self.queue.reservation(request))
        except ReservationRefused as refused:
            answer = refused.reason
        self.machine.check_invariants()
        return answer

    async def open(self, reservation: str = "s", owner: str = "me") -> dict[str, int]:
        answer = await self.op("open", reservation, owner=owner, ttl_ms=TTL)
        return {"epoch": answer["epoch"], "fencing_token": answer["fencing_token"]}

    async def rows(
        self, epoch: int, offset: int, end: int | None = None, rows: int = 100, size: int = 1000
    ) -> list[tuple[int, bytes, int]]:
        """(offset, body, acquired) page by page."""
        made: list[tuple[int, bytes, int]] = []
        while True:
            work = self.queue.reservation_runs(RunsRequest("s", epoch, offset, end, rows, size))
            _, offset, runs = await until(self.nodes, work)
            made += spread(runs)
            if not runs or offset == end:
                return made


def spread(runs: list[ReservedRun]) -> list[tuple[int, bytes, int]]:
    return [
        (offset + k, body_of(block, command, first + k), acquired)
        for block, command, first, count, offset, _, acquired, _ in runs
        for k in range(count)
    ]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("place", [1, 2])
async def test_the_life_of_a_reservation(nodes: dict[int, Node], place: int, durable: bool) -> None:
    bench = Bench(nodes, place, durable=durable)
    bench.publish(b"a", b"b", b"c")
    bench.publish(b"d", b"e")
    mine = await bench.open()
    assert await bench.op("take", **mine, max=4, after=0) == {**mine, "first": 0, "next": 4}
    assert await bench.op("take", **mine, max=4, after=0) == {**mine, "first": 0, "next": 4}
    assert (bench.machine.ready_count, bench.machine.unsettled_count) == (1, 4)
    reserved = [(0, b"a", 0), (1, b"b", 0), (2, b"c", 0), (3, b"d", 0)]
    for limits in ({}, {"rows": 1}, {"rows": 3}, {"size": 1}):
        assert await bench.rows(mine["epoch"], 0, 4, **limits) == reserved
        assert await bench.rows(mine["epoch"], 1, 3, **limits) == reserved[1:3]
    assert (await bench.op("settle", **mine, upto=1))["first"] == 1
    answer = await bench.op("release", **mine, **{"from": 2}, failed=True)
    assert (answer["first"], answer["next"]) == (1, 2)
    assert answer == await bench.op("release", **mine, **{"from": 2}, failed=True)
    assert await bench.op("take", **mine, max=1, after=2) == "reservation_epoch"
    mine["epoch"] = answer["epoch"]
    await bench.op("take", **mine, max=9, after=2)
    assert await bench.rows(mine["epoch"], 1, 5) == [
        (1, b"b", 0),
        (2, b"c", 1),
        (3, b"d", 1),
        (4, b"e", 0),
    ]
    assert await bench.op("close", **mine, failed=False) == {}
    assert bench.machine.ready_count == 4
    bench.channel.consume()
    settle(nodes)
    assert bench.channel.deliveries() == [b"b", b"c", b"d", b"e"]


@pytest.mark.parametrize("place", [1, 2])
async def test_refusals_and_leases(nodes: dict[int, Node], place: int) -> None:
    bench = Bench(nodes, place)
    bench.publish(b"a", b"b", b"c")
    old = await bench.open(owner="old")
    await bench.op("take", **old, max=1, after=0)
    await bench.open(owner="new")
    assert await bench.op("settle", **old, upto=1) == "reservation_fenced"
    assert await bench.op("settle", "none", **old, upto=1) == "no_reservation"
    assert await bench.op("settle", reservation="s") == "malformed"
    lease = await bench.op("lease", "l", ttl_ms=TTL, max=5)
    assert lease["next"] == 2
    assert await bench.op("lease", "l", ttl_ms=TTL, max=5) == lease
    assert (await bench.op("settle", "l", epoch=lease["epoch"], upto=2))["first"] == 2
    for epoch, offset, end, reason in (
        (old["epoch"] + 99, 0, None, "reservation_epoch"),
        (old["epoch"], 0, 2, "reservation_range"),
        (old["epoch"], 5, None, "reservation_range"),
        (-1, 0, None, "malformed"),
    ):
        with pytest.raises(ReservationRefused) as refused:
            await until(
                nodes, bench.queue.reservation_runs(RunsRequest("s", epoch, offset, end, 10, 10))
            )
        assert refused.value.reason == reason
    with pytest.raises(ReservationRefused) as refused:
        await until(
            nodes, bench.queue.reservation_runs(RunsRequest("l", lease["epoch"], 0, None, 10, 10))
        )
    assert refused.value.reason == "reservation_settled"


async def test_a_reservation_expires_and_its_messages_come_back_to_their_places(
    nodes: dict[int, Node], time: Time
) -> None:
    bench = Bench(nodes)
    bench.publish(b"a", b"b", b"c")
    mine = await bench.open()
    await bench.op("take", **mine, max=2, after=0)
    # A read is heard of as well.
    time.pass_by(TTL - 1000)
    await bench.rows(mine["epoch"], 0, 2)
    time.pass_by(TTL - 1000)
    assert len(bench.machine.reservations) == 1
    time.pass_by(2000)
    assert len(bench.machine.reservations) == 0
    assert bench.machine.ready_count == 3
    assert await bench.op("settle", **mine, upto=2) == "no_reservation"
    bench.channel.consume()
    settle(nodes)
    assert bench.channel.got == [(1, 0, b"a", 1), (1, 1, b"b", 1), (1, 2, b"c", 0)]


async def test_a_restart_ends_reservations_and_old_epochs_are_refused(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    bench = Bench(nodes, durable=True)
    bench.publish(b"a", b"b", b"c")
    mine = await bench.open()
    await bench.op("take", **mine, max=3, after=0)
    await bench.op("settle", **mine, upto=1)
    nodes[1].host.stop()
    again = Node(1, nodes, tmp_path, time)
    again.sessions = 1 << 56 | 2 << 24
    serve(again)
    bench = Bench(nodes, durable=True)
    assert await bench.op("settle", **mine, upto=3) == "no_reservation"
    new = await bench.open()
    assert new["epoch"] > mine["epoch"]
    assert await bench.op("settle", **mine, upto=3) == "reservation_epoch"
    with pytest.raises(ReservationRefused):
        await bench.rows(mine["epoch"], 1, 3)
    await bench.op("take", **new, max=3, after=0)
    assert await bench.rows(new["epoch"], 0, 2) == [(0, b"b", 1), (1, b"c", 1)]


async def test_a_settle_of_a_durable_queue_is_answered_when_it_is_on_disk(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(nodes, durable=True)
    bench.publish(b"a", b"b")
    mine = await bench.open()
    await bench.op("take", **mine, max=2, after=0)
    op = {"op": "settle", "reservation": "s", **mine, "upto": 1}
    settling = asyncio.ensure_future(bench.queue.reservation(op))
    repeated = asyncio.ensure_future(bench.queue.reservation(op))
    await asyncio.sleep(0)
    settle(nodes, disk=False)
    await asyncio.sleep(0)
    assert not settling.done()
    assert not repeated.done()
    settle(nodes)
    assert (await settling)["first"] == (await repeated)["first"] == 1
    # And is not answered as done when the disk refused.
    settling = asyncio.ensure_future(bench.queue.reservation({**op, "upto": 2}))
    await asyncio.sleep(0)

    def refused(file: RealFile, buffers: object, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RealFile, "pwrite", refused)
    settle(nodes)
    with pytest.raises(StorageFault):
        await settling


async def test_exclusive_and_single_active_consumers(nodes: dict[int, Node]) -> None:
    bench = Bench(nodes, x_single_active_consumer=True)
    mine = await bench.open()
    assert await bench.op("open", "t", owner="me", ttl_ms=TTL) == "single_active"
    bench.channel.consume()
    bench.publish(b"a")
    assert bench.channel.deliveries() == []
    bench.channel.consume(2, exclusive=True)
    settle(nodes)
    assert bench.channel.heard[-1][:2] == ("subscribed", 2)
    assert "exclusive" in bench.channel.heard[-1][2]
    await bench.op("take", **mine, max=1, after=0)
    await bench.op("close", **mine)
    settle(nodes)
    assert bench.channel.deliveries() == [b"a"]
    assert await bench.op("open", owner="me", ttl_ms=TTL) == "single_active"
    bench.channel.client.cancel(1)
    bench.channel.consume(3, exclusive=True)
    settle(nodes)
    assert await bench.op("lease", ttl_ms=TTL, max=1) == "exclusive"


async def test_a_reservation_counts_as_a_consumer_for_who_deletes_unused_queues(
    nodes: dict[int, Node], time: Time
) -> None:
    bench = Bench(nodes, x_expires=5000)
    mine = await bench.open()
    bench.channel.consume()
    settle(nodes)
    bench.channel.client.cancel(1)
    settle(nodes)
    time.pass_by(6000)
    assert nodes[1].reports == []
    assert (await until(nodes, bench.queue.counts()))[1] == 1
    await bench.op("close", **mine)
    assert nodes[1].reports == [("unused", 1)]
    time.pass_by(6000)
    assert nodes[1].reports[1:] == [("expired", 1)]


@pytest.mark.parametrize("durable", [False, True])
async def test_reserved_messages_may_leave_memory(
    nodes: dict[int, Node], durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes[1].host.memory, "target_bytes", 10_000)
    bench = Bench(nodes, durable=durable)
    bodies = [bytes([65 + i]) * 1000 for i in range(40)]
    for body in bodies[:30]:
        bench.publish(body)
    mine = await bench.open()
    await bench.op("take", **mine, max=30, after=0)
    for body in bodies[30:]:
        bench.publish(body)
    assert bench.machine.backing.memory_bytes <= 25_000
    rows = await bench.rows(mine["epoch"], 0, 30, size=5000)
    assert [body for _, body, _ in rows] == bodies[:30]
    assert bench.machine.backing.memory_bytes <= 25_000
    await bench.op("settle", **mine, upto=30)
    await bench.op("take", **mine, max=30, after=30)
    rows = await bench.rows(mine["epoch"], 30, 40, size=5000)
    assert [body for _, body, _ in rows] == bodies[30:]


async def test_messages_that_expire_are_not_lost_while_reserved(
    nodes: dict[int, Node], time: Time
) -> None:
    bench = Bench(nodes, x_message_ttl=1000)
    bench.publish(b"a", b"b")
    mine = await bench.open()
    await bench.op("take", **mine, max=1, after=0)
    time.pass_by(5000)
    assert await bench.rows(mine["epoch"], 0, 1) == [(0, b"a", 0)]
    assert bench.machine.ready_count == 0
    await bench.op("close", **mine)
    assert bench.machine.ready_count == 0


@pytest.mark.parametrize("place", [1, 2])
async def test_browse(nodes: dict[int, Node], place: int) -> None:
    bench = Bench(nodes, place)
    bench.publish(*[bytes([97 + i]) for i in range(6)])
    mine = await bench.open()
    await bench.op("take", **mine, max=4, after=0)
    await bench.op("release", **mine, **{"from": 2})
    bench.publish(b"x", b"y")
    for rows, size in ((100, 1000), (1, 1000), (3, 1000), (100, 2)):
        seen: list[tuple[int, bytes, int]] = []
        cursor = None
        while True:
            cursor, runs = await until(nodes, bench.queue.browse(cursor, rows, size))
            seen += spread(runs)
            if cursor is None:
                break
        assert [(number, body) for number, body, _ in seen] == list(
            enumerate([b"c", b"d", b"e", b"f", b"x", b"y"])
        )
    assert bench.machine.unsettled_count == 2
    for bad in ([1], [0, -1], "xy", [0, "x"]):
        with pytest.raises(ReservationRefused):
            await until(nodes, bench.queue.browse(bad, 1, 1))


async def test_a_lost_home_and_a_deleted_queue(nodes: dict[int, Node]) -> None:
    bench = Bench(nodes, 2)
    bench.publish(b"a")
    mine = await bench.open()
    nodes[2].wire.down.add(1)
    with pytest.raises(Unavailable):
        await bench.op("take", **mine, max=1, after=0)
    nodes[2].host.on_node_down(1)
    with pytest.raises(NotFound):
        await bench.queue.reservation({"op": "touch", "reservation": "s", **mine})
    nodes[1].host.delete(1)
    with pytest.raises(NotFound):
        await bench.home.reservation({"op": "touch", "reservation": "s", **mine})
    with pytest.raises(NotFound):
        await bench.home.reservation_runs(RunsRequest("s", 1, 0, None, 1, 1))
    with pytest.raises(NotFound):
        await bench.home.browse(None, 1, 1)


async def test_one_take_moves_a_bounded_number_of_runs(nodes: dict[int, Node]) -> None:
    bench = Bench(nodes)
    other = nodes[1].channel(bench.queue)
    for _ in range(TAKE_RUNS_MAX // 2 + 5):
        # Publishers take turns, so every message is a run of its own.
        bench.channel.publish(b"a")
        other.publish(b"b")
    settle(nodes)
    mine = await bench.open()
    answer = await until(
        nodes, bench.queue.reservation({"op": "take", "reservation": "s", **mine, "max": 1 << 40})
    )
    assert answer["next"] == TAKE_RUNS_MAX
    answer = await until(
        nodes, bench.queue.reservation({"op": "take", "reservation": "s", **mine, "max": 1 << 40})
    )
    assert answer["next"] == TAKE_RUNS_MAX + 10


async def test_requests_that_are_none_are_refused(nodes: dict[int, Node]) -> None:
    bench = Bench(nodes)
    for bad in ([], ["explode"], ["runs", 1], ["op"], ["op", 7]):
        with pytest.raises(PeerError):
            await bench.home.serve_reservation(bad)
    for refused in (["op", {}], ["browse", None, -1, 1], ["runs", 7, 1, 1, 1, 1, 1]):
        assert await bench.home.serve_reservation(refused) == ["refused", "malformed"]


@pytest.mark.parametrize(("op", "more"), [("release", {"from": 0}), ("close", {})])
async def test_a_return_is_answered_when_the_disk_knows_what_was_handed_out(
    nodes: dict[int, Node], op: str, more: dict[str, int]
) -> None:
    """A migration counts on it: what its successor flags survives the process (`Copier`)."""
    bench = Bench(nodes, durable=True)
    bench.publish(b"a", b"b")
    mine = {"reservation": "s", **await bench.open()}
    took = bench.queue.reservation({"op": "take", **mine, "max": 1, "after": 0})
    assert (await took)["next"] == 1
    ending = asyncio.ensure_future(bench.queue.reservation({"op": op, **mine, **more}))
    for _ in range(5):
        await asyncio.sleep(0)
        settle(nodes, disk=False)
    assert not ending.done()
    await until(nodes, ending)
    assert bench.machine.ready_count == 2
