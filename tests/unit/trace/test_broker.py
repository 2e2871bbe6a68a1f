"""Who is traced: by argument, by virtual host, and who is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.broker.traces import make_traces
from convoymq.metadata.machine import MetadataMachine
from convoymq.model import trace as words
from convoymq.model.config import Config, TraceConfig
from convoymq.model.errors import PreconditionFailed
from convoymq.trace import segments
from convoymq.trace.recorder import Traces
from tests.patience import PATIENCE_S
from tests.unit.queues.classic.support import Channel, message
from tests.unit.queues.fake_cluster import FakeCluster, until

from .support import rows_of, wall_clock_us

TRACED = {"x-queue-type": "quorum", "x-trace": True}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        for number, node in made.nodes.items():
            settings = TraceConfig(vhosts=("all",))
            traces = Traces(tmp_path / f"trace-{number}", number, 1, settings, wall_clock_us)
            node.broker.traces = node.broker.local.traces = traces
        yield made


async def test_a_queue_that_asks_is_traced_on_every_member(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    await cluster.queue(1, "q", arguments=TRACED)
    await cluster.queue(1, "other")
    await until(lambda: all(node.broker.traces.queues == 1 for node in cluster.nodes.values()))
    user = Channel()
    broker = cluster.nodes[1].broker
    user.client = broker.queue_admin.find_queue("/", "q").client(
        cluster.nodes[1].new_session(), user
    )
    for tag in (1, 2, 3):
        user.client.target.publish([message(b"x")], 1, tag)
    await until(lambda: ("published", [1, 3], True) in user.heard)
    for node in cluster.nodes.values():
        node.broker.traces.stop()
        node.broker.traces.join(PATIENCE_S)
    for number in cluster.nodes:
        kinds = {row["kind"] for row in rows_of(tmp_path / f"trace-{number}")}
        assert words.PUBLISHED in kinds
        assert (words.CONFIRMED in kinds) == (number == 1), "only the publisher's node confirms"


async def test_the_argument_is_part_of_equivalence(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q", arguments=TRACED)
    with pytest.raises(PreconditionFailed, match="inequivalent arg 'x-trace'"):
        await cluster.queue(1, "q", arguments={"x-queue-type": "quorum"})
    with pytest.raises(PreconditionFailed, match="x-trace"):
        await cluster.queue(1, "bad", arguments={"x-queue-type": "quorum", "x-trace": "yes"})


async def test_without_pyarrow_a_traced_queue_is_refused(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "is_available", lambda: False)
    with pytest.raises(PreconditionFailed, match="pyarrow is not installed"):
        await cluster.queue(1, "q", arguments=TRACED)
    await cluster.queue(1, "q", arguments={"x-queue-type": "quorum", "x-trace": False})
    assert cluster.nodes[1].broker.traces.queues == 0


async def test_a_deleted_queue_ends_its_trace(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q", arguments=TRACED)
    broker = cluster.nodes[1].broker
    assert broker.traces.queues == 1
    await broker.queue_admin.delete_queue("/", "q")
    await until(lambda: broker.traces.queues == 0)


async def test_acts_have_the_clock_of_entries(tmp_path: Path) -> None:
    """It is held to those of the other nodes; the machine's own may be far from it."""
    made = make_traces(Config(), tmp_path, 1, 1, MetadataMachine(), lambda: 7_000)
    trace = made.open("/", "orders", "partition", 1)
    assert trace is not None
    trace.handed_out("billing", "1-1-5-1", 1, 0, 1, 0)
    made.stop()
    made.join(PATIENCE_S)
    assert [row["time_us"] for row in rows_of(tmp_path) if row["kind"] == words.HANDED_OUT] == [
        7_000
    ]
