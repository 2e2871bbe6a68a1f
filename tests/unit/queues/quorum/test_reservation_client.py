"""A node's client of reservations: ops through the log, reads from any node, browsing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import pytest

from convoymq.kernels import batch, link_frames
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import NotFound, ReservationRefused, Unavailable
from convoymq.queues.quorum import reservation_client
from convoymq.queues.reservation_reads import ReservedRun, RunsRequest
from tests.unit.queues.quorum.cluster import GROUP, NODES, Cluster, publish, spec, tags

T = TypeVar("T")
TTL = 60_000
LIMITS = DefaultsConfig(operation_timeout_ms=2000)


class Reserved(Cluster):
    """A cluster whose nodes ask each other, as over the control plane."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(limits=LIMITS, **settings)
        self.asked: list[tuple[int, int]] = []
        for node in self.nodes.values():
            node.queue._reservation_client._ask_node = self.asker(node.id)

    def asker(self, source: int) -> Any:
        async def ask(node: int, request: Any) -> Any:
            self.asked.append((source, node))
            if {source, node} & self.cut:
                raise Unavailable(f"node {node} is not connected")
            group, *rest = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
            assert group == GROUP
            answer = await self.nodes[node].queue.serve_reservation(rest)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))

        return ask

    async def until(self, work: Awaitable[T]) -> T:
        """Runs the cluster and the loop until the work is done."""
        task = asyncio.ensure_future(work)
        for _ in range(2000):
            await asyncio.sleep(0)
            self.run()
            if task.done():
                break
        return await task

    async def op(self, node: int, op: str, reservation: str = "s", **fields: Any) -> dict[str, Any]:
        request = {"op": op, "reservation": reservation, **fields}
        return await self.until(self.nodes[node].queue.reservation(request))

    async def open(
        self, node: int = 1, reservation: str = "s", owner: str = "me"
    ) -> dict[str, Any]:
        answer = await self.op(node, "open", reservation, owner=owner, ttl_ms=TTL)
        return {"epoch": answer["epoch"], "fencing_token": answer["fencing_token"]}

    async def publish(self, count: int, first: int = 1, size: int = 8) -> None:
        client, _ = self.nodes[1].open()
        publish(client, first, count, size)
        self.run()

    async def rows(
        self, node: int, epoch: int, offset: int = 0, end: int | None = None, **more: Any
    ) -> list[tuple[int, int]]:
        """(offset, tag) of the rows of a reservation, page by page."""
        rows: list[tuple[int, int]] = []
        while True:
            _, after, runs = await self.nodes[node].queue.reservation_runs(
                RunsRequest(
                    more.get("reservation", "s"),
                    epoch,
                    offset,
                    end,
                    more.get("max_rows", 1000),
                    more.get("max_bytes", 1 << 20),
                )
            )
            rows += spread(runs)
            if not runs:
                return rows
            assert after == rows[-1][0] + 1
            offset = after
            if offset == end:
                return rows


def spread(runs: list[ReservedRun]) -> list[tuple[int, int]]:
    return [
        (offset + k, int.from_bytes(batch.record(block, command, first + k)[:4], "big"))
        for block, command, first, count, offset, *_ in runs
        for k in range(count)
    ]


@pytest.mark.parametrize("node", NODES)
async def test_every_node_takes_ops_and_reads_the_same_rows(node: int) -> None:
    cluster = Reserved()
    await cluster.publish(10)
    mine = await cluster.open(node)
    answer = await cluster.op(node, "take", **mine, max=6, after=0)
    assert (answer["first"], answer["next"]) == (0, 6)
    for reader in NODES:
        rows = await cluster.rows(reader, mine["epoch"], 0, 6)
        assert rows == [(i, i + 1) for i in range(6)]
        assert await cluster.rows(reader, mine["epoch"], 2, 5) == rows[2:5]
    answer = await cluster.op(node, "settle", **mine, upto=6)
    assert answer["first"] == 6


async def test_pages_are_cut_by_rows_and_bytes_and_carry_counts_and_times() -> None:
    cluster = Reserved()
    await cluster.publish(3, size=100)
    await cluster.publish(7, first=4, size=100)
    mine = await cluster.open(reservation="x")
    await cluster.op(1, "take", "x", **mine, max=2, after=0)
    await cluster.op(1, "close", "x", **mine, failed=True)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=10, after=0)
    expected = [(i, i + 1) for i in range(10)]
    for limits in ({"max_rows": 1}, {"max_rows": 3}, {"max_bytes": 250}, {"max_bytes": 0}):
        for node in (1, 4):
            assert await cluster.rows(node, mine["epoch"], 0, 10, **limits) == expected
    _, after, runs = await cluster.nodes[4].queue.reservation_runs(
        RunsRequest("s", mine["epoch"], 0, 10, 10, 250)
    )
    assert after == 2
    assert [(run[3], run[6], run[7]) for run in runs] == [(2, 1, 1)]
    assert all(run[5] == cluster.log[0].time_ms for run in runs)


async def test_refusals_name_their_reason_on_every_node() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    old = await cluster.open(owner="old")
    await cluster.op(1, "take", **old, max=4, after=0)
    await cluster.op(1, "settle", **old, upto=1)
    new = await cluster.open(owner="new")
    for node in NODES:
        with pytest.raises(ReservationRefused) as refused:
            await cluster.op(node, "settle", **old, upto=2)
        assert refused.value.reason == "reservation_fenced"
        assert "another owner" in refused.value.text
        for epoch, offset, reason in (
            (new["epoch"], 0, "reservation_settled"),
            (new["epoch"] - 1, 1, "reservation_epoch"),
        ):
            with pytest.raises(ReservationRefused) as refused:
                await cluster.nodes[node].queue.reservation_runs(
                    RunsRequest("s", epoch, offset, None, 10, 1000)
                )
            assert refused.value.reason == reason
        with pytest.raises(ReservationRefused) as refused:
            await cluster.nodes[node].queue.reservation_runs(
                RunsRequest("none", new["epoch"], 0, None, 10, 1000)
            )
        assert refused.value.reason == "no_reservation"
    for bad in (
        {},
        {"op": "open", "reservation": 5},
        {"op": "take", "reservation": "s", "max": "many"},
    ):
        with pytest.raises(ReservationRefused) as refused:
            await cluster.until(cluster.nodes[1].queue.reservation(bad))
        assert refused.value.reason == "malformed"


async def test_after_a_release_reads_of_the_old_epoch_are_refused() -> None:
    cluster = Reserved()
    await cluster.publish(6)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=6, after=0)
    answer = await cluster.op(2, "release", **mine, **{"from": 2}, failed=False)
    for node in NODES:
        with pytest.raises(ReservationRefused) as refused:
            await cluster.rows(node, mine["epoch"], 0, 6)
        assert refused.value.reason == "reservation_epoch"
    mine["epoch"] = answer["epoch"]
    await cluster.op(1, "take", **mine, max=6, after=2)
    assert await cluster.rows(4, mine["epoch"], 0, 6) == [(i, i + 1) for i in range(6)]


async def test_a_read_waits_until_the_replica_has_applied_the_take() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    cluster.nodes[2].stalled = True
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    reading = asyncio.ensure_future(
        cluster.nodes[2].queue.reservation_runs(RunsRequest("s", mine["epoch"], 0, 4, 10, 1000))
    )
    await asyncio.sleep(0)
    assert not reading.done()
    cluster.nodes[2].stalled = False
    first, after, runs = await cluster.until(reading)
    assert (first, after) == (0, 4)
    assert len(spread(runs)) == 4
    assert not cluster.asked


async def test_a_replica_that_stays_behind_asks_another_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reservation_client, "LOCAL_WAIT_S", 0.01)
    cluster = Reserved()
    await cluster.publish(4)
    cluster.nodes[2].stalled = True
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    assert len(await cluster.rows(2, mine["epoch"], 0, 4)) == 4
    assert cluster.asked == [(2, 1)]
    # The leader is away: the next member is asked, and without one there is an error.
    cluster.cut = {1}
    assert len(await cluster.rows(2, mine["epoch"], 0, 4)) == 4
    assert cluster.asked[1:] == [(2, 1), (2, 3)]
    cluster.cut = {1, 3}
    with pytest.raises(Unavailable):
        await cluster.rows(2, mine["epoch"], 0, 4)


async def test_an_end_that_nobody_took_is_no_silent_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation_client, "LOCAL_WAIT_S", 0.01)
    monkeypatch.setattr(reservation_client, "SERVE_WAIT_S", 0.01)
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=2, after=0)
    for node in NODES:
        with pytest.raises(Unavailable):
            await cluster.nodes[node].queue.reservation_runs(
                RunsRequest("s", mine["epoch"], 0, 3, 10, 1000)
            )
        found = await cluster.nodes[node].queue.reservation_runs(
            RunsRequest("s", mine["epoch"], 2, None, 10, 1000)
        )
        assert found == (0, 2, [])


async def test_ops_wait_for_a_leader_and_are_given_up_in_time() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open(2)
    cluster.elect(None)
    taking = asyncio.ensure_future(
        cluster.nodes[2].queue.reservation(
            {"op": "take", "reservation": "s", **mine, "max": 2, "after": 0}
        )
    )
    await asyncio.sleep(0)
    cluster.run()
    assert not taking.done()
    cluster.elect(3)
    answer = await cluster.until(taking)
    assert answer["next"] == 2
    cluster.elect(None)
    lost = asyncio.ensure_future(
        cluster.nodes[2].queue.reservation(
            {"op": "take", "reservation": "s", **mine, "max": 2, "after": 2}
        )
    )
    await asyncio.sleep(0)
    cluster.wait(2500)
    # The deadline of the question by the cluster's clock, that of the client by the loop's.
    for _ in range(100):
        cluster.wait(250)
        if lost.done():
            break
        await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await lost


async def test_an_answer_that_got_lost_is_asked_for_again() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open(4)
    cluster.drop_frames = {link_frames.FRAME_APPLIED}
    taking = asyncio.ensure_future(
        cluster.nodes[4].queue.reservation(
            {"op": "take", "reservation": "s", **mine, "max": 2, "after": 0}
        )
    )
    await asyncio.sleep(0)
    cluster.run()
    assert not taking.done()
    cluster.drop_frames = set()
    for _ in range(10):
        cluster.wait(250)
        await asyncio.sleep(0)
    assert (await taking)["next"] == 2


async def test_an_op_whose_session_was_ended_is_asked_in_the_next() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open(4)
    # The queue gives the node up, and with it the session of its client.
    cluster.nodes[1].builder.add(batch.CMD_NODE_DOWN, 1, 0, 0, 0, 4, b"")
    cluster.run()
    taking = asyncio.ensure_future(
        cluster.nodes[4].queue.reservation(
            {"op": "take", "reservation": "s", **mine, "max": 2, "after": 0}
        )
    )
    for _ in range(40):
        cluster.wait(250)
        await asyncio.sleep(0.01)
        if taking.done():
            break
    assert (await taking)["next"] == 2
    assert len(cluster.nodes[4].queue.sessions()) == 1


async def test_giving_up_harms_nobody() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open()
    op = {"op": "take", "reservation": "s", **mine, "max": 2, "after": 0}
    taking = asyncio.ensure_future(cluster.nodes[2].queue.reservation(op))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    cluster.run()
    assert (await cluster.op(2, "take", **mine, max=2, after=0))["next"] == 2
    assert cluster.nodes[2].queue._reservation_client._open == 0


async def test_the_session_of_the_client_is_closed_when_nobody_uses_it() -> None:
    cluster = Reserved()
    await cluster.op(4, "open", owner="me", ttl_ms=2 * reservation_client.IDLE_MS)
    assert cluster.nodes[4].queue.has_clients
    cluster.wait(reservation_client.IDLE_MS + 500)
    assert not cluster.nodes[4].queue.has_clients
    own = cluster.nodes[1].own
    assert own is not None
    assert not [s for s in own.machine.sessions if s >> 56 == 4]
    assert "s" in own.machine.reservations.by_name
    await cluster.open(4)


async def test_reads_keep_a_reservation_alive_with_few_touches() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    before = len(cluster.log)
    for _ in range(40):
        cluster.wait(TTL // 10)
        await cluster.rows(4, mine["epoch"], 0, 4)
        cluster.run()
    own = cluster.nodes[1].own
    assert own is not None
    assert "s" in own.machine.reservations.by_name
    touches = [
        command
        for entry in cluster.log[before:]
        for command in batch.commands(entry.data)
        if command[0] == batch.CMD_RESERVATION
    ]
    assert 10 <= len(touches) <= 20


async def test_reads_are_heard_of_when_the_log_is_ahead_of_the_clock() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    ahead = 3_600_000
    cluster.clock.time_ms += ahead
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    for node in cluster.nodes.values():
        if node.own is not None:
            node.own.time.heard(cluster.log[-1].time_ms)
    cluster.clock.time_ms -= ahead
    cluster.clock.passed_ms = ahead + TTL
    before = len(cluster.log)
    await cluster.rows(1, mine["epoch"], 0, 4)
    cluster.run()
    assert len(cluster.log) == before + 1


async def test_without_reads_it_expires_by_the_leader_s_timer() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    cluster.wait(TTL + 1000)
    with pytest.raises(ReservationRefused) as refused:
        await cluster.op(4, "settle", **mine, upto=4)
    assert refused.value.reason == "no_reservation"
    own = cluster.nodes[1].own
    assert own is not None
    assert own.machine.backlog.ready() == 4


async def test_a_new_leader_gives_owners_time_to_be_heard_of() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    cluster.elect(None)
    cluster.clock.advance(TTL * 2)
    cluster.elect(2)
    cluster.wait(1000)
    assert (await cluster.op(3, "touch", **mine))["next"] == 4
    cluster.wait(TTL - 2000)
    assert (await cluster.op(3, "settle", **mine, upto=4))["first"] == 4
    cluster.wait(2 * TTL)
    with pytest.raises(ReservationRefused):
        await cluster.op(3, "settle", **mine, upto=4)


async def test_reservations_survive_a_snapshot_on_the_way_to_a_replica() -> None:
    cluster = Reserved()
    await cluster.publish(6)
    cluster.nodes[3].stalled = True
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=6, after=0)
    cluster.install_snapshot(3)
    assert len(await cluster.rows(3, mine["epoch"], 0, 6)) == 6
    assert not cluster.asked


async def test_browse_shows_what_is_ready_once_in_the_order_of_the_log_and_takes_nothing() -> None:
    cluster = Reserved()
    await cluster.publish(6, size=100)
    await cluster.publish(6, first=7, size=100)
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=5, after=0)
    await cluster.op(1, "settle", **mine, upto=2)
    await cluster.op(1, "release", **mine, **{"from": 4}, failed=False)
    expected = [5, 6, 7, 8, 9, 10, 11, 12]
    for node in NODES:
        for max_rows, max_bytes in ((100, 10000), (1, 10000), (3, 10000), (100, 150)):
            seen: list[tuple[int, int]] = []
            cursor = None
            while True:
                cursor, runs = await cluster.nodes[node].queue.browse(cursor, max_rows, max_bytes)
                seen += spread(runs)
                if cursor is None:
                    break
            assert seen == list(enumerate(expected))
    own = cluster.nodes[1].own
    assert own is not None
    assert (own.machine.backlog.ready(), own.machine.backlog.unacked) == (8, 2)


async def test_who_browses_beside_a_replica_that_is_behind_sees_what_the_leader_has() -> None:
    cluster = Reserved()
    await cluster.publish(2)
    node = cluster.nodes[2]
    node.stalled = True
    await cluster.publish(2, first=3)
    assert node.own is not None
    node.own.is_behind = True
    _, runs = await node.queue.browse(None, 10, 1000)
    assert [tag for _, tag in spread(runs)] == [1, 2, 3, 4]
    mine = await cluster.open()
    await cluster.op(1, "take", **mine, max=4, after=0)
    assert await cluster.rows(2, mine["epoch"], 0, 4) == [(i, i + 1) for i in range(4)]
    assert cluster.asked
    assert {asked for _, asked in cluster.asked} == {cluster.leader}


async def test_browsing_goes_on_while_messages_come_and_go() -> None:
    cluster = Reserved()
    await cluster.publish(10)
    browse = cluster.nodes[1].queue.browse
    cursor, runs = await browse(None, 4, 1000)
    seen = spread(runs)
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(prefetch=6))
    cluster.run()
    assert tags(events) == [1, 2, 3, 4, 5, 6]
    # 1 … 3 and 5 come back: 5 is still ahead of the reader, 6 is gone.
    client.cancel(1)
    client.return_(1, [4, 4, 0, 2], failed=False)
    client.settle(1, [5, 5])
    cluster.run()
    await cluster.publish(2, first=11)
    while cursor is not None:
        cursor, runs = await browse(cursor, 3, 1000)
        seen += spread(runs)
    assert [tag for _, tag in seen] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert [number for number, _ in seen] == list(range(11))


@pytest.mark.parametrize("cursor", [[1], [0, 0, 0, -1], "abc", [0, 0, 0, "x"], [0, 0, 0, 1 << 63]])
async def test_a_cursor_that_nobody_gave_out_is_refused(cursor: Any) -> None:
    cluster = Reserved()
    with pytest.raises(ReservationRefused):
        await cluster.nodes[1].queue.browse(cursor, 1, 1)


async def test_a_deleted_queue_refuses() -> None:
    cluster = Reserved()
    await cluster.publish(4)
    mine = await cluster.open(2)
    await cluster.op(2, "take", **mine, max=4, after=0)
    waiting = asyncio.ensure_future(
        cluster.nodes[2].queue.reservation({"op": "touch", "reservation": "s", **mine})
    )
    await asyncio.sleep(0)
    for node in cluster.nodes.values():
        node.queue.on_deleted()
    with pytest.raises(NotFound):
        await waiting
    for node in NODES:
        with pytest.raises(NotFound):
            await cluster.nodes[node].queue.reservation({"op": "touch", "reservation": "s", **mine})
        with pytest.raises(NotFound):
            await cluster.nodes[node].queue.reservation_runs(
                RunsRequest("s", mine["epoch"], 0, None, 10, 1000)
            )
        with pytest.raises(NotFound):
            await cluster.nodes[node].queue.browse(None, 10, 1000)
