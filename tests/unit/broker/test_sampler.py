"""The read model of each node: what nodes tell each other, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker import sampler
from convoymq.broker.read_model import PACKED
from convoymq.edges.http.metrics import render
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PeerError
from tests.unit.broker.test_broker import channel
from tests.unit.queues.fake_cluster import FakeCluster, FakeConnection, until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        yield made


async def declared(cluster: FakeCluster, name: str, kind: str = "quorum") -> QueueRecord:
    await cluster.queue(1, name, arguments={"x-queue-type": kind})
    await until(lambda: name in cluster.nodes[3].machine.vhosts["/"].queues)
    record: QueueRecord = cluster.nodes[3].machine.vhosts["/"].queues[name]
    return record


async def publish(cluster: FakeCluster, queue: str, *bodies: bytes) -> None:
    sender = channel(cluster, 1, queue)
    sender.publish(*bodies, tag=1)
    await until(lambda: any(what[0] == "published" for what in sender.heard))


def messages(cluster: FakeCluster, node: int, record: QueueRecord) -> Any:
    known = cluster.nodes[node].broker.cluster.queue(record)
    return known.row["messages"] if known is not None else None


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_lengths_are_known_here_at_once_and_elsewhere_when_they_are_told(
    cluster: FakeCluster, kind: str
) -> None:
    record = await declared(cluster, "q", kind)
    await cluster.tell()
    await publish(cluster, "q", b"a", b"bc")
    assert messages(cluster, record.home, record) == 2
    others = [node for node in cluster.nodes if node != record.home]
    assert [messages(cluster, node, record) for node in others] == [0, 0]
    await cluster.tell()
    assert [messages(cluster, node, record) for node in others] == [2, 2]
    (series,) = cluster.nodes[others[0]].broker.cluster.totals({"/"})
    totals = series.numbers(series.track.data)
    assert (totals["messages_ready"], totals["message_bytes_ready"], totals["publish"]) == (2, 3, 2)
    assert cluster.nodes[others[0]].broker.cluster.totals({"other"}) == []


@pytest.mark.moves("convoy_read_model_entries", "convoy_read_model_histories")
async def test_the_size_of_the_model_is_a_metric(cluster: FakeCluster) -> None:
    await cluster.tell()
    before = await render(cluster.nodes[2].broker)
    await declared(cluster, "q")
    await cluster.tell()
    after = await render(cluster.nodes[2].broker)
    for name in ("entries", "histories"):
        small, large = (
            float(text.split(f"\nconvoy_read_model_{name} ")[1].split("\n")[0])
            for text in (before, after)
        )
        assert small < large


async def test_only_what_has_changed_is_sent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [await declared(cluster, f"q{number}") for number in range(4)]
    for _ in range(2):
        await cluster.tell()
    sent: list[Any] = []
    control = cluster.nodes[1].control
    monkeypatch.setattr(control, "tell", lambda node, _kind, body: sent.append((node, body)))
    await publish(cluster, "q2", b"a")
    await cluster.nodes[1].broker.cluster.sampler.exchange()
    assert [node for node, _ in sent] == [2, 3]
    begins, complete, sections = sent[0][1]
    assert (begins, complete) == (False, True)
    told = {section: [key for key, _ in values] for section, values, _ in sections}
    assert told["figures"] == told["facts"] == [records[2].group]
    assert told["totals"] == ["/"]


async def test_what_is_gone_is_gone_everywhere(cluster: FakeCluster) -> None:
    record = await declared(cluster, "q")
    cluster.nodes[1].broker.connections.add(FakeConnection())  # type: ignore[arg-type]
    await cluster.tell()
    model = cluster.nodes[2].broker.cluster.model
    assert model.find(1, "figures", record.group) is not None
    assert len(await cluster.nodes[2].broker.cluster.connections()) == 1
    await cluster.nodes[1].broker.queue_admin.delete_queue("/", "q")
    cluster.nodes[1].broker.connections.remove(FakeConnection())  # type: ignore[arg-type]
    await cluster.tell()
    for section in ("figures", "facts"):
        assert model.find(1, section, record.group) is None
    assert await cluster.nodes[2].broker.cluster.connections() == []


async def test_a_full_link_gets_what_it_missed_later(cluster: FakeCluster) -> None:
    record = await declared(cluster, "q")
    await cluster.tell()
    own, other = cluster.nodes[1].broker.cluster, cluster.nodes[2].broker.cluster
    full = cluster.nodes[1].control.transport.full
    full.add(2)
    await publish(cluster, "q", b"a")
    await own.sampler.exchange()
    await asyncio.sleep(0)
    assert messages(cluster, 2, record) == 0
    full.clear()
    await cluster.tell()
    assert messages(cluster, 2, record) == 1
    assert other.model.part(1).complete


async def test_a_large_part_is_told_in_several_frames(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list asks a node directly until its part is complete."""
    monkeypatch.setattr(sampler, "FRAME_BYTES_MAX", 500)
    for number in range(4):
        await declared(cluster, f"q{number}")
    cluster.nodes[1].broker.connections.add(FakeConnection())  # type: ignore[arg-type]
    part = cluster.nodes[2].broker.cluster.model.part(1)
    frames = 0
    while not part.complete:
        assert len(await cluster.nodes[2].broker.cluster.connections()) == 1
        await cluster.tell()
        part = cluster.nodes[2].broker.cluster.model.part(1)
        frames += 1
    assert frames > 3
    assert len(await cluster.nodes[2].broker.cluster.connections()) == 1


async def test_rows_of_a_node_that_cannot_be_reached_have_an_age(cluster: FakeCluster) -> None:
    record = await declared(cluster, "q", "classic")
    await publish(cluster, "q", b"a")
    cluster.nodes[1].broker.connections.add(FakeConnection())  # type: ignore[arg-type]
    await cluster.tell()
    asker = cluster.nodes[2].broker
    cluster.down.add(1)
    known = asker.cluster.queue(record)
    assert known is not None
    assert known.row["messages"] == 1
    assert known.row["stale_ms"] >= 0
    (connection,) = await asker.cluster.connections()
    assert connection.row["stale_ms"] >= 0
    assert asker.cluster.totals({"/"}) == []
    # Its process has ended: its connections with it.
    asker.on_node_down(1, definite=True)
    assert await asker.cluster.connections() == []
    assert asker.cluster.queue(record) is not None


async def test_a_node_that_is_linked_again_tells_all(cluster: FakeCluster) -> None:
    record = await declared(cluster, "q")
    await cluster.tell()
    model = cluster.nodes[2].broker.cluster.model
    model.forget(1)
    cluster.nodes[1].broker.cluster.sampler.on_node_up(2)
    await cluster.tell()
    assert model.find(1, "figures", record.group) is not None


@pytest.mark.parametrize(
    "body",
    [
        None, [], [True, True], [True, True, 5], [True, True, [["figures", [[1, b"short"]], []]]],
        [True, True, [["figures", [[[], bytes(PACKED.size)]], []]]],
        [True, True, [["facts", [[1, 10**12]], []]]],
    ],
)  # fmt: skip
async def test_malformed_frames_are_refused(cluster: FakeCluster, body: object) -> None:
    with pytest.raises(PeerError):
        await cluster.nodes[1].broker.cluster.sampler._on_frame(2, body)


async def test_sections_of_later_releases_are_passed_over(cluster: FakeCluster) -> None:
    asker = cluster.nodes[1].broker.cluster
    await asker.sampler._on_frame(2, [True, True, [["later", [["k", b""]], []]]])
    assert asker.model.part(2).complete


async def test_rows_have_a_budget_of_time(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await declared(cluster, f"q{number}")
    own = cluster.nodes[1].broker.cluster
    monkeypatch.setattr(sampler, "BUDGET_NS", 1)
    monkeypatch.setattr(sampler, "SWEPT", 0)
    read: list[int] = []
    monkeypatch.setattr(own.sampler, "read_row", read.append)
    await own.sampler.exchange()
    # One row costs more than the budget, and is made up for.
    assert len(read) == 1
    for _ in range(3):
        await own.sampler.exchange()
    assert len(read) == 1
    own.sampler._debt_ns = 0
    await own.sampler.exchange()
    assert len(read) == 2
    # A request reads all.
    await own.sampler.read_due_rows()
    assert sorted(read) == sorted(set(read))
    assert len(read) == 5


async def test_a_connection_without_traffic_is_read_seldom(cluster: FakeCluster) -> None:
    class Counted(FakeConnection):
        reads, octets = 0, 0

        def traffic(self) -> int:
            return self.octets

        def info(self) -> dict[str, Any]:
            self.reads += 1
            return {"name": self.name}

    connection = Counted()
    own = cluster.nodes[1].broker
    own.connections.add(connection)  # type: ignore[arg-type]
    for _ in range(3):
        await own.cluster.sampler.read_connections()
    assert connection.reads == 1
    connection.octets = 7
    await own.cluster.sampler.read_connections()
    assert connection.reads == 2
