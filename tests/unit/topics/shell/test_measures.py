"""What changes of topics cost, as nodes measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convoymq.edges.http.metrics import render
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.changes import Change, Phase, plan_split
from convoymq.topics.rules.commands import ProducedRun
from convoymq.topics.rules.routes import first_route
from convoymq.topics.shell.measures import ChangePhases, GroupStalls, PartitionCounts
from tests.unit.queues.fake_cluster import FakeCluster, until
from tests.unit.topics.machine.support import enqueue_of


async def metrics(cluster: FakeCluster) -> dict[str, float]:
    broker = cluster.nodes[1].broker
    text = await render(broker)
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith("convoy_topic"))
    return {name: float(value) for name, _, value in rows}


@pytest.mark.moves("convoy_topic_acks_fenced_total", "convoy_topic_duplicates_refused_total")
async def test_fenced_acks_and_refused_duplicates_count_where_a_partition_is_led(
    tmp_path: Path,
) -> None:
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        before = await metrics(cluster)
        cluster.raise_versions()
        broker = cluster.nodes[1].broker
        await broker.topics.create("/", "orders", partitions=3, logical=3)
        record = cluster.nodes[1].machine.vhosts["/"].topics["orders"]
        partitions = broker.topic_parts.partitions
        (pid,) = [pid for pid in record.state.route.pids if partitions.leader(record, pid) == 1]
        queue = partitions.get(record, pid)
        for command in (
            c.OpenCursor("g", 1),
            c.Lease("g", 1, 2, "m"),
            c.AckRanges("g", 1, 1, (1, 1)),
        ):
            await queue.ask(command)
        client = queue.client(broker.local.new_session(), Silent())
        told: list[Any] = []
        run = ProducedRun(record.state.route.span_of(pid).lo, 1, 2, 1, b"")
        for _ in range(2):
            client.produce(5, 1, [run], enqueue_of([run]), lambda *answer: told.append(answer))
        await until(lambda: len(told) == 2)
        after = await metrics(cluster)
        assert after["convoy_topic_acks_fenced_total"] == 1
        assert after["convoy_topic_duplicates_refused_total"] == 2
        assert before["convoy_topic_acks_fenced_total"] == 0
        # What other replicas count is theirs.
        others = PartitionCounts()
        others.look([cluster.nodes[2].broker.topic_parts.partitions.get(record, pid)])
        assert (others.fenced, others.duplicates) == (0, 0)
        assert (await metrics(cluster))["convoy_topic_acks_fenced_total"] == 1


class Silent:
    """Of a publisher that hears nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *of: None


def change(phase: Phase, id: str = "c1") -> Change:
    planned = plan_split(first_route(8, 1), 0, (4,), 1, id)
    object.__setattr__(planned, "phase", phase)
    return planned


def test_a_phase_lasts_until_the_next_one_is_seen() -> None:
    phases = ChangePhases()
    for phase, now_ms in ((Phase.PREPARED, 0), (Phase.PREPARED, 5), (Phase.SEALING, 20)):
        phases.look("t", change(phase), now_ms)
    phases.look("t", change(Phase.DONE), 50)
    phases.look("t", change(Phase.DONE), 90)
    assert phases.seconds[Phase.PREPARED].total_ms == 20
    assert phases.seconds[Phase.SEALING].total_ms == 30
    assert phases.ended == {"split": 1}
    phases.look("t", change(Phase.PREPARED, "c2"), 100)
    phases.look("t", change(Phase.ABORTED, "c2"), 130)
    assert phases.ended == {"split": 1, "aborted": 1}


def test_who_takes_over_measures_from_its_first_look_and_counts_no_end_twice() -> None:
    phases = ChangePhases()
    phases.look("t", None, 0)
    phases.look("t", change(Phase.DONE), 10)
    assert phases.ended == {}
    phases.look("t", change(Phase.SEALING, "c2"), 20)
    phases.forget()
    phases.look("t", change(Phase.DONE, "c2"), 60)
    assert phases.ended == {}
    assert all(each.count == 0 for each in phases.seconds.values())


def test_stalls_of_many_groups_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoymq.topics.shell.measures.GROUPS_MAX", 2)
    stalls = GroupStalls()
    for name in ("a", "b", "c", "a"):
        stalls.add(("/", "t", name), 10)
    assert stalls.all.count == 4
    assert {name[2]: each.total_ms for name, each in stalls.by_group.items()} == {"a": 20, "b": 10}
