"""A stream's handle as edges use it: reading by offset on any node, waiting, stored offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.model.errors import OffsetOutOfRange, PeerError, ReplicaBehind, Unavailable
from convoymq.queues.stream.queue import BEHIND_WAIT_MS, READ_RUNS_MAX, Chunks, Extent, _decoded
from tests.unit.queues.quorum.cluster import GROUP, publish
from tests.unit.queues.stream.cluster import Result, StreamCluster

FAR = 1 << 40


def filled(count: int, per_entry: int = 1, size: int = 8, **settings: Any) -> StreamCluster:
    """Messages 1 … count; the entries are a second apart."""
    cluster = StreamCluster(**settings)
    client, _ = cluster.nodes[1].open()
    for tag in range(1, count + 1, per_entry):
        publish(client, tag, min(per_entry, count + 1 - tag), size)
        cluster.run()
        cluster.clock.time_ms += 1000
    return cluster


def run(cluster: StreamCluster, work: Coroutine[Any, Any, Any], wait_ms: int = 0) -> Any:
    """Carries out a coroutine while the cluster, and its time, go on."""

    async def main() -> Any:
        task = asyncio.ensure_future(work)
        waited = 0
        while True:
            for _ in range(5):
                await asyncio.sleep(0)
                cluster.run()
            if task.done():
                return task.result()
            assert waited < wait_ms, "not done in time"
            cluster.wait(250)
            waited += 250

    return asyncio.run(main())


def messages(chunks: Chunks) -> list[tuple[int, int, int]]:
    """(offset, tag, time in ms) of everything that a read gave."""
    return [
        (
            run.offset + i,
            int.from_bytes(batch.record(run.block, run.command, run.first + i)[:4], "big"),
            run.time_ms,
        )
        for run in chunks.runs
        for i in range(run.messages)
    ]


@pytest.mark.parametrize("node", [1, 2, 4])
def test_a_read_begins_and_ends_where_it_is_told(node: int) -> None:
    cluster = filled(9, per_entry=3)
    queue = cluster.nodes[node].queue
    chunks = run(cluster, queue.fetch_chunks(2, 7, FAR, FAR, 0))
    assert (chunks.first, chunks.high, chunks.next) == (0, 9, 7)
    assert messages(chunks) == [
        (2, 3, 1_000_000),
        (3, 4, 1_001_000),
        (4, 5, 1_001_000),
        (5, 6, 1_001_000),
        (6, 7, 1_002_000),
    ]
    assert len(messages(run(cluster, queue.fetch_chunks(0, None, FAR, FAR, 0)))) == 9
    assert len(messages(run(cluster, queue.fetch_chunks(0, None, 4, FAR, 0)))) == 4
    assert run(cluster, queue.fetch_chunks(5, 5, FAR, FAR, 0)).runs == []


@pytest.mark.parametrize("node", [2, 4])
def test_at_least_one_message_comes_however_large(node: int) -> None:
    cluster = filled(4, size=1000)
    queue = cluster.nodes[node].queue
    offset = 0
    while offset < 4:
        chunks = run(cluster, queue.fetch_chunks(offset, None, FAR, 1500, 0))
        assert len(messages(chunks)) in (1, 2)
        offset = chunks.next
    assert len(messages(run(cluster, queue.fetch_chunks(0, None, FAR, 1, 0)))) == 1


def test_reading_on_reads_no_entry_twice() -> None:
    cluster = filled(600)
    node = cluster.nodes[2]
    reads: list[int] = []
    read_span = node.read_span

    def counted(group: int, index: int, max_bytes: int) -> Any:
        found = read_span(group, index, max_bytes)
        reads.extend(entry.index for entry in found)
        return found

    node.read_span = counted  # type: ignore[method-assign]
    offset = 0
    while offset < 600:
        offset = run(cluster, node.queue.fetch_chunks(offset, None, 50, FAR, 0)).next
    # An index range's first entry may come along with the last one before it.
    assert len(reads) <= 604


def test_a_read_is_bounded_whatever_is_asked() -> None:
    cluster = StreamCluster()
    client, _ = cluster.nodes[1].open()
    for tag in range(1, READ_RUNS_MAX + 100):
        publish(client, tag, 1)
        # Each in a command of its own.
        client.target.command(batch.CMD_SETTLE, 0, 0, 0)
    cluster.run()
    chunks = run(cluster, cluster.nodes[1].queue.fetch_chunks(0, None, FAR, FAR, 0))
    assert len(chunks.runs) == READ_RUNS_MAX
    assert chunks.next == READ_RUNS_MAX


@pytest.mark.parametrize("node", [2, 4])
def test_the_end_is_waited_for(node: int) -> None:
    cluster = filled(2)
    queue = cluster.nodes[node].queue

    async def later() -> Chunks:
        task = asyncio.ensure_future(queue.fetch_chunks(2, None, FAR, FAR, 10_000))
        await asyncio.sleep(0)
        cluster.run()
        assert not task.done()
        publish(cluster.nodes[3].open()[0], 77, 2)
        cluster.run()
        return await task

    chunks = run(cluster, later())
    assert [tag for _, tag, _ in messages(chunks)] == [77, 78]
    # In time nothing comes: that is an answer too.
    chunks = run(cluster, queue.fetch_chunks(4, None, FAR, FAR, 1000), 2000)
    assert chunks == Chunks(0, 4, [])


@pytest.mark.parametrize("node", [2, 4])
def test_what_is_beyond_this_replica_is_waited_for_and_then_refused(node: int) -> None:
    cluster = filled(2)
    queue = cluster.nodes[node].queue
    for offset, end in ((3, None), (0, 5)):
        with pytest.raises(ReplicaBehind) as caught:
            run(cluster, queue.fetch_chunks(offset, end, FAR, FAR, 0), BEHIND_WAIT_MS + 1000)
        assert caught.value.high == 2


@pytest.mark.parametrize(
    ("offset", "end", "tags"), [(2, None, [3, 4]), (3, None, [4]), (1, 4, [2, 3, 4])]
)
def test_who_waits_for_a_replica_that_is_behind_is_answered_by_the_leader(
    offset: int, end: int | None, tags: list[int]
) -> None:
    """At its end, beyond it and across it."""
    cluster = filled(2)
    node = cluster.nodes[2]

    async def read() -> Chunks:
        node.stalled = True
        publish(cluster.nodes[1].open()[0], 3, 2)
        task = asyncio.ensure_future(node.queue.fetch_chunks(offset, end, FAR, FAR, 30_000))
        await asyncio.sleep(0)
        cluster.run()
        assert not task.done()
        cluster.fall_behind(2)
        return await task

    chunks = run(cluster, read())
    assert [tag for _, tag, _ in messages(chunks)] == tags
    assert cluster.asked[-1][1] == cluster.leader


@pytest.mark.parametrize("faulty", ["", "spoiled"])
def test_a_replica_that_is_behind_is_read_as_far_as_it_is(faulty: str) -> None:
    cluster = filled(2)
    node = cluster.nodes[2]
    node.stalled = True
    publish(cluster.nodes[1].open()[0], 3, 2)
    cluster.run()
    cluster.fall_behind(2)
    assert node.own is not None
    node.own.faulty = faulty
    chunks = run(cluster, node.queue.fetch_chunks(0, None, FAR, FAR, 0))
    assert [tag for _, tag, _ in messages(chunks)] == ([1, 2, 3, 4] if faulty else [1, 2])
    assert bool(cluster.asked) is bool(faulty)
    for offset, end in ((0, 3), (2, None)):
        chunks = run(cluster, node.queue.fetch_chunks(offset, end, FAR, FAR, 0))
        assert chunks.high == 4
    assert node.queue.bounds() == (0, 0)
    assert node.queue.read_descriptor(0, None) is None
    assert node.queue.info()["next_offset"] == 2
    # Others who ask it hear so at once, and go to the next one.
    refused: list[list[Any]] = []
    node.queue.serve(["read", GROUP, 2, None, FAR, FAR, 1000], refused.append)
    assert refused == [["away", "stream 'q' has no replica here"]]
    cluster.catch_up(2)
    cluster.run()
    asked = len(cluster.asked)
    assert messages(run(cluster, node.queue.fetch_chunks(0, None, FAR, FAR, 0)))[-1][1] == 4
    assert len(cluster.asked) == asked


def test_who_waits_for_a_replica_that_is_removed_asks_another_one() -> None:
    cluster = filled(2)
    node = cluster.nodes[2]

    async def read() -> Chunks:
        task = asyncio.ensure_future(node.queue.fetch_chunks(2, None, FAR, FAR, 30_000))
        await asyncio.sleep(0)
        node.own = None
        publish(cluster.nodes[1].open()[0], 3, 1)
        node.queue.on_replica_gone()
        return await task

    assert [tag for _, tag, _ in messages(run(cluster, read()))] == [3]


@pytest.mark.parametrize("node", [2, 4])
def test_what_retention_dropped_is_refused_with_what_is_kept(node: int) -> None:
    cluster = filled(20, max_bytes=40, segment_bytes=8)
    with pytest.raises(OffsetOutOfRange) as caught:
        run(cluster, cluster.nodes[node].queue.fetch_chunks(3, None, FAR, FAR, 0))
    assert (caught.value.first, caught.value.high) == (15, 20)


def test_nobody_to_ask_is_said() -> None:
    cluster = filled(1)
    cluster.cut.update((1, 2, 3))
    queue = cluster.nodes[4].queue
    with pytest.raises(Unavailable, match="no replica"):
        run(cluster, queue.fetch_chunks(0, None, FAR, FAR, 0))
    with pytest.raises(Unavailable):
        run(cluster, queue.where())
    cluster.elect(None)
    with pytest.raises(Unavailable, match="no leader"):
        run(cluster, queue.offsets("latest", None))


def test_a_damaged_log_is_said() -> None:
    cluster = filled(3)
    cluster.gone.add(2)
    for node in (2, 4):
        with pytest.raises(Unavailable, match="cannot be read"):
            run(cluster, cluster.nodes[node].queue.fetch_chunks(1, None, FAR, FAR, 0))


@pytest.mark.parametrize("node", [1, 2, 4])
def test_places(node: int) -> None:
    cluster = filled(20, max_bytes=40, segment_bytes=8)
    queue = cluster.nodes[node].queue
    assert run(cluster, queue.offsets("earliest", None)) == (15, 1_015_000)
    assert run(cluster, queue.offsets("latest", None)) == (20, None)
    assert run(cluster, queue.offsets("timestamp", 1_016_001)) == (17, 1_017_000)
    assert run(cluster, queue.offsets("timestamp", 1_017_000)) == (17, 1_017_000)
    assert run(cluster, queue.offsets("timestamp", 1)) == (15, 1_015_000)
    assert run(cluster, queue.offsets("timestamp", 1_019_001)) == (None, None)
    assert run(cluster, queue.where()) == Extent(15, 20, 40, 19)
    assert queue.bounds() == ((0, 0) if node == 4 else (15, 20))


def test_places_of_an_empty_stream() -> None:
    cluster = StreamCluster()
    queue = cluster.nodes[2].queue
    assert run(cluster, queue.offsets("earliest", None)) == (0, None)
    assert run(cluster, queue.offsets("latest", None)) == (0, None)
    assert run(cluster, queue.offsets("timestamp", 5)) == (None, None)
    assert run(cluster, queue.fetch_chunks(0, None, 1, 1, 0)) == Chunks(0, 0, [])


def test_offsets_are_stored_and_found_on_every_node() -> None:
    cluster = filled(1)
    assert run(cluster, cluster.nodes[4].queue.query_offset("spark")) is None
    for node, offset in ((4, 17), (2, 5), (4, 6)):
        run(cluster, cluster.nodes[node].queue.store_offset("spark", offset))
        for other in (1, 2, 4):
            assert run(cluster, cluster.nodes[other].queue.query_offset("spark")) == offset
    # One session serves all of a node's.
    machine = cluster.nodes[1].queue.machine()
    assert machine is not None
    assert len([s for s in machine.sessions if s >> 56 == 4]) == 1


def test_an_offset_is_stored_in_a_new_session_when_the_old_one_ended() -> None:
    cluster = filled(1)
    queue = cluster.nodes[4].queue
    run(cluster, queue.store_offset("spark", 1))
    machine = cluster.nodes[1].queue.machine()
    assert machine is not None
    (session,) = [s for s in machine.sessions if s >> 56 == 4]
    cluster.nodes[1].builder.add(
        batch.CMD_SESSION_DOWN, 0, 0, 0, 0, 0, session.to_bytes(8, "little")
    )
    cluster.run()
    with pytest.raises(Unavailable):
        run(cluster, queue.store_offset("spark", 2), 10_000)
    run(cluster, queue.store_offset("spark", 3))
    assert run(cluster, queue.query_offset("spark")) == 3


def test_deletion_ends_who_waits() -> None:
    cluster = filled(1)
    queue = cluster.nodes[2].queue

    async def deleted() -> Chunks:
        task = asyncio.ensure_future(queue.fetch_chunks(1, None, FAR, FAR, 60_000))
        await asyncio.sleep(0)
        queue.on_deleted()
        return await task

    assert run(cluster, deleted()).runs == []


def test_an_unknown_node_s_request_harms_nobody() -> None:
    queue = filled(1).nodes[1].queue
    for request in (
        ["read", 7],
        ["read", 7, "a", None, 1, 1, 0],
        ["read", 7, 0, None, "x", 1, 0],
        ["read", 7, -1, None, 1, 1, 0],
        ["read", 7, 0, -5, 1, 1, "soon"],
        ["time", 7],
        ["time", 7, []],
        ["stored", 7, 5],
        ["drop", 7],
        [5, 7],
    ):
        answers: list[Any] = []
        queue.serve(request, answers.append)
        ((kind, *_),) = answers
        assert kind in ("away", "range", "runs", "stored")
    for answer in (None, [], ["what"], ["range", "a", 1, 2], 5, ["behind"]):
        with pytest.raises(PeerError):
            _decoded(answer)


def test_info_and_counts() -> None:
    cluster = filled(20, max_bytes=40, segment_bytes=8)
    info = cluster.nodes[1].queue.info()
    assert (info["type"], info["messages"], info["message_bytes"]) == ("stream", 5, 40)
    assert (info["first_offset"], info["next_offset"], info["segments"]) == (15, 20, 5)
    assert info["totals"]["dropped_retention"] == 15
    assert cluster.nodes[4].queue.local_counts() == (0, 0)
    assert asyncio.run(cluster.nodes[1].queue.counts()) == (5, 0)
    result = Result()
    cluster.nodes[4].queue.extent(result)
    cluster.run()
    assert result.found.next == 20


def test_a_policy_reaches_the_machine_through_the_leader() -> None:
    cluster = filled(6, size=100, segment_bytes=100)
    replicas = [node for node in cluster.nodes.values() if node.own is not None]
    for node in cluster.nodes.values():
        node.queue.configure({"max-length-bytes": 250, "max-age": "7D"})
    cluster.run()
    assert all(node.own.machine.messages == 6 for node in replicas), "version 1 knows no change"
    for node in replicas:
        node.own.machine.set_version(2)
    for node in cluster.nodes.values():
        node.queue.configure({"max-length-bytes": 250, "stream-max-segment-size-bytes": 100})
    cluster.run()
    for node in replicas:
        assert node.own.machine.settings == {
            "max_bytes": 250, "max_age_ms": -1, "segment_bytes": 100,
        }  # fmt: skip
        assert node.own.machine.messages == 2
    applied = replicas[0].own.machine.index
    for node in cluster.nodes.values():
        node.queue.configure({"max-length-bytes": 250, "stream-max-segment-size-bytes": 100})
    cluster.run()
    assert replicas[0].own.machine.index == applied, "what is in force is not proposed again"
