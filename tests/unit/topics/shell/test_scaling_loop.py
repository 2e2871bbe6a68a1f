"""Topics that scale by themselves, as the metadata leader carries it out."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from convoymq.metadata.commands import ChangeGroup, PutPolicy
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topic_codec import pack_command
from convoymq.model.errors import NotFound, PreconditionFailed, Unavailable, ValidationFailed
from convoymq.settings.definitions import checked_definition
from convoymq.topics.machine.load import GroupLag, LoadQuestion, LoadReport
from convoymq.topics.rules.group import Join, Owner
from convoymq.topics.rules.refusals import BadTopic
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.scaling_facts import policy_of
from convoymq.topics.shell.scaling_loop import REPORT_LOOKS, ScalingLoop
from tests.unit.queues.fake_cluster import FakeCluster, until

UNIT_MS = 1_000
LOGICAL = 8
IDLE = (0.0,) * 4


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        yield made


class Bench:
    """A loop whose time and loads are what a test says."""

    def __init__(self, cluster: FakeCluster, node: int = 1) -> None:
        self.cluster = cluster
        self.loop: ScalingLoop = cluster.nodes[node].broker.topic_parts.scaling
        self.clock = self.loop._clock
        self.loop._clock = self  # type: ignore[assignment]
        self.loop._partitions = self  # type: ignore[assignment]
        self.partitions = cluster.nodes[node].broker.topic_parts.partitions
        self.ahead_ms = 0
        self.loads: dict[int, LoadReport] = {}
        self.questions: dict[int, LoadQuestion] = {}
        self.loop._term = -1
        controller = cluster.nodes[node].broker.topic_parts.controller
        controller._now_ms = self.now_ms  # type: ignore[method-assign]

    def now_ms(self) -> int:
        return int(self.clock.now_ms()) + self.ahead_ms

    def find(self, vhost: str, topic: str, pid: int) -> Any:
        bench = self

        class Partition:
            def load(self, question: LoadQuestion, done: Any) -> None:
                bench.questions[pid] = question
                report = bench.loads.get(pid)
                if report is None:
                    done(None, Unavailable("it does not answer"))
                    return
                weights = report.lp_messages if question.with_weights else b""
                keys = {lp: report.top_keys.get(lp, []) for lp in question.hot}
                done(report._replace(lp_messages=weights, lp_bytes=weights, top_keys=keys), None)

        return Partition()

    def leader(self, topic: TopicRecord, pid: int) -> int:
        return self.partitions.leader(topic, pid)

    def has(self, pid: int, messages: float, **more: Any) -> None:
        """The load of a partition, the same over all windows."""
        lo, hi = self.span(pid)
        weights = array("f", more.pop("weights", [1.0] * (hi - lo))).tobytes()
        known_ms = more.pop("known_ms", 100 * UNIT_MS)
        fields: dict[str, Any] = {"is_replicated": True, "groups": {}, **more}
        self.loads[pid] = LoadReport(
            known_ms, IDLE, (messages,) * 4, lp_messages=weights, lp_bytes=weights, **fields
        )

    def span(self, pid: int) -> tuple[int, int]:
        span = self.record.state.route.span_of(pid)
        return span.lo, span.hi

    @property
    def record(self) -> TopicRecord:
        return self.cluster.nodes[1].machine.vhosts["/"].topics["orders"]

    async def look(self, times: int = 1, every_ms: int = UNIT_MS) -> None:
        """Lets time pass, with a look after each step, and what it begins go on."""
        for _ in range(times):
            self.ahead_ms += every_ms
            self.loop.tick()
            await until(lambda: self.record.state.running is None and not self.is_acting)

    @property
    def is_acting(self) -> bool:
        return any(seat.is_acting for seat in self.loop._seats.values())

    @property
    def pids(self) -> tuple[int, ...]:
        return self.record.state.route.pids

    def explained(self) -> Any:
        return self.loop.explain(self.record)

    @property
    def held(self) -> str:
        return str(self.explained()["held"])


async def made(cluster: FakeCluster, partitions: int = 1, **settings: Any) -> Bench:
    """A topic that scales by itself, a while after it was created."""
    named = {f"autoscale-{name.replace('_', '-')}": value for name, value in settings.items()}
    own = {"autoscale": "on", "autoscale-unit": UNIT_MS, "autoscale-target-messages": 10, **named}
    await cluster.nodes[3].broker.topics.create(
        "/", "orders", partitions=partitions, logical=LOGICAL, settings=own
    )
    bench = Bench(cluster)
    # A look as the new leader, and the time for which that one changes nothing.
    bench.loop.tick()
    bench.ahead_ms += 40 * UNIT_MS
    return bench


@pytest.mark.provokes("topics.autoscaled")
async def test_a_busy_partition_is_split_at_the_median_of_its_load(cluster: FakeCluster) -> None:
    bench = await made(cluster)
    bench.has(0, 30.0, weights=[4, 1, 1, 1, 1, 0, 0, 0])
    with structlog.testing.capture_logs() as logs:
        await bench.look(4)
    assert bench.pids == (1, 2)
    assert bench.span(1) == (0, 1)
    (said,) = [each for each in logs if each["event"] == "topics.autoscaled"]
    assert said["rule"] == "load_5"
    published = bench.record.state.lineage.published[1]
    assert published.change_id == said["change"]
    assert published.change_id.startswith("auto-split-")
    assert bench.loop.counters.decisions == {("split", "load_5"): 1}
    (done,) = bench.explained()["history"]
    assert done["change_id"] == published.change_id
    assert done["decision"] == "split of partition 0 at 1"


async def test_weights_are_asked_for_when_a_split_is_wanted(cluster: FakeCluster) -> None:
    bench = await made(cluster)
    bench.has(0, 5.0)
    await bench.look(2)
    assert not bench.questions[0].with_weights
    bench.has(0, 30.0)
    await bench.look(2)
    assert bench.questions[0].with_weights
    assert bench.questions[0].unit_ms == UNIT_MS
    assert bench.questions[0].logical == LOGICAL


async def test_two_idle_neighbours_are_merged_and_a_third_waits(cluster: FakeCluster) -> None:
    bench = await made(cluster, partitions=3)
    for pid in bench.pids:
        bench.has(pid, 0.5)
    await bench.look(2)
    assert len(bench.pids) == 2
    assert bench.loop.counters.decisions == {("merge", "both_small"): 1}
    for pid in bench.pids:
        bench.has(pid, 0.5)
    await bench.look(3)
    assert len(bench.pids) == 2
    await bench.look(30)
    assert len(bench.pids) == 1


async def test_the_busiest_server_gives_a_partition_away(cluster: FakeCluster) -> None:
    bench = await made(cluster, partitions=3)
    leaders = [bench.leader(bench.record, pid) for pid in bench.pids]
    assert sorted(leaders) == [1, 2, 3]
    other = bench.pids[0]
    row = await cluster.nodes[1].broker.topics.move("/", "orders", other, leaders[1])
    await cluster.nodes[1].broker.topics.wait_change("/", "orders", row["change_id"], 10)
    bench.ahead_ms += 10 * UNIT_MS
    for pid in bench.pids:
        bench.has(pid, 8.0)
    await bench.look(2)
    assert bench.loop.counters.decisions == {("move", "server_busy"): 1}
    assert sorted(bench.leader(bench.record, pid) for pid in bench.pids) == [1, 2, 3]


# --- guards ----------------------------------------------------------------------------------


async def busy(cluster: FakeCluster, **settings: Any) -> Bench:
    """A topic that would be split at the next looks."""
    bench = await made(cluster, **settings)
    bench.has(0, 30.0)
    return bench


async def test_a_new_metadata_leader_waits_two_units(cluster: FakeCluster) -> None:
    bench = await busy(cluster)
    bench.loop._term = -1
    await bench.look(2, UNIT_MS // 2)
    assert bench.held == "the controller has just changed"
    assert bench.pids == (0,)
    await bench.look(4)
    assert bench.pids == (1, 2)


async def test_a_replica_that_is_behind_holds_changes_back(cluster: FakeCluster) -> None:
    bench = await busy(cluster)
    bench.has(0, 30.0, is_replicated=False)
    await bench.look(4)
    assert bench.held == "partition 0 is under-replicated"
    assert bench.pids == (0,)


async def test_a_partition_that_does_not_answer_holds_changes_back(cluster: FakeCluster) -> None:
    bench = await made(cluster, partitions=2)
    bench.has(0, 30.0)
    await bench.look(4)
    assert bench.held == "partition 1 is under-replicated"
    assert bench.pids == (0, 1)


async def test_a_group_with_members_that_is_versions_behind_holds_changes_back(
    cluster: FakeCluster,
) -> None:
    bench = await busy(cluster)
    broker = cluster.nodes[1].broker
    await broker.topics.create_group("/", "orders", "readers")
    pid = 0
    for _ in range(5):
        row = await broker.topics.move("/", "orders", pid, 1 + bench.leader(bench.record, pid) % 3)
        done = await broker.topics.wait_change("/", "orders", row["change_id"], 10)
        pid = done["targets"][0]["pid"]
    bench.ahead_ms += 40 * UNIT_MS
    bench.has(pid, 30.0)
    command = pack_command(Join("m"))
    await broker.metadata.execute(
        ChangeGroup(vhost="/", name="orders", group="readers", command=command)
    )
    await bench.look(3)
    assert bench.held == "group 'readers' is at version 0"
    assert bench.pids == (pid,)


async def test_manual_changes_count_within_the_hour_under_any_leader(cluster: FakeCluster) -> None:
    bench = await busy(cluster, changes_per_hour=1)
    broker = cluster.nodes[1].broker
    row = await broker.topics.move("/", "orders", 0, 1 + bench.leader(bench.record, 0) % 3)
    await broker.topics.wait_change("/", "orders", row["change_id"], 10)
    bench.ahead_ms += 40 * UNIT_MS
    bench.has(1, 30.0)
    # A leader that has done nothing itself yet.
    bench.loop._term = -1
    await bench.look(6)
    assert bench.held == "1 changes within an hour"
    assert bench.pids == (1,)
    bench.ahead_ms += 3_600_000
    await bench.look(3)
    assert len(bench.pids) == 2


async def test_a_rate_counts_for_no_longer_than_it_was_measured(cluster: FakeCluster) -> None:
    """The partition's leader has changed: it has measured for one unit only."""
    bench = await made(cluster)
    bench.has(0, 30.0, known_ms=UNIT_MS)
    await bench.look(4)
    assert bench.pids == (0,)
    assert bench.explained()["partitions"][0]["age_units"] == pytest.approx(1.0, abs=0.1)


async def test_no_more_partitions_than_the_policy_says(cluster: FakeCluster) -> None:
    bench = await busy(cluster, partitions_max=1)
    await bench.look(4)
    assert bench.pids == (0,)
    (considered,) = bench.explained()["considered"]
    assert considered["outcome"] == "held back: the topic has as many partitions as it may"


@pytest.mark.provokes("topics.autoscale_refused")
async def test_a_refusal_is_told_and_tried_again_later(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await busy(cluster)

    async def refuse(*of: Any, **more: Any) -> Any:
        raise PreconditionFailed("the cluster has too many queues")

    with monkeypatch.context() as patched:
        patched.setattr(TopicAdmin, "split", refuse)
        await bench.look(3)
    history = bench.explained()["history"]
    assert history[-1]["error"] == "the cluster has too many queues"
    assert bench.loop.counters.decisions == {}
    await bench.look(3)
    assert bench.pids == (1, 2)


# --- reports ---------------------------------------------------------------------------------


@pytest.mark.provokes("topics.hot_logical_partition")
async def test_a_hot_key_is_isolated_and_then_reported_with_its_name(cluster: FakeCluster) -> None:
    bench = await busy(cluster)
    bench.has(0, 30.0, weights=[2, 0, 9, 2, 0, 0, 0, 0])
    await bench.look(3)
    assert [bench.span(pid) for pid in bench.pids] == [(0, 2), (2, 3), (3, 8)]
    hot = bench.pids[1]
    for pid in bench.pids:
        bench.has(pid, 30.0 if pid == hot else 0.0)
    bench.has(hot, 30.0, top_keys={2: [(b"customer-7", 900), (b"\xff", 1)]})
    bench.ahead_ms += 10 * UNIT_MS
    with structlog.testing.capture_logs() as logs:
        await bench.look(REPORT_LOOKS + 3)
    (said,) = [each for each in logs if each["event"] == "topics.hot_logical_partition"]
    assert (said["lp"], said["keys"]) == (2, ["customer-7", "\\xff"])
    assert bench.explained()["hot"] == [{"pid": hot, "lp": 2, "keys": ["customer-7", "\\xff"]}]
    assert bench.loop.counters.decisions["hot_lp", "load_5"] == 1
    assert bench.loop.hot == 1
    bench.has(hot, 5.0)
    await bench.look(8)
    assert bench.explained()["hot"] == []
    assert bench.questions[hot].hot == []


@pytest.mark.provokes("topics.group_needs_help")
async def test_a_group_that_more_members_would_help_is_reported(cluster: FakeCluster) -> None:
    bench = await made(cluster)
    broker = cluster.nodes[1].broker
    await broker.topics.create_group("/", "orders", "readers")
    command = pack_command(Join("m"))
    await broker.metadata.execute(
        ChangeGroup(vhost="/", name="orders", group="readers", command=command)
    )
    group = bench.record.groups["readers"]
    group.lease_epochs[0] = 1
    group.owners[0] = Owner("m", 1, group.group_epoch)
    bench.has(0, 8.0, groups={"readers": GroupLag(500, 90.0, 4.0)})
    with structlog.testing.capture_logs() as logs:
        await bench.look(REPORT_LOOKS + 2)
    (said,) = [each for each in logs if each["event"] == "topics.group_needs_help"]
    assert (said["group"], said["advised"]) == ("readers", "add consumers")
    (row,) = bench.explained()["groups"]
    assert row["lag_s"] == {"0": 90.0}


# --- policies --------------------------------------------------------------------------------


async def test_it_is_off_until_a_policy_or_a_setting_says_so(cluster: FakeCluster) -> None:
    await cluster.nodes[3].broker.topics.create("/", "orders", partitions=1, logical=LOGICAL)
    bench = Bench(cluster)
    bench.has(0, 1e9)
    await bench.look(3)
    assert bench.questions == {}
    assert bench.explained()["policy"]["autoscale"] == "off"
    definition = {"autoscale": "on", "autoscale-unit": UNIT_MS}
    await cluster.nodes[1].broker.metadata.execute(
        PutPolicy(
            vhost="/",
            name="grow",
            pattern="^orders$",
            apply_to="topics",
            definition=definition,
            priority=0,
        )
    )
    await bench.look(1)
    assert bench.questions[0].unit_ms == UNIT_MS
    topics = cluster.nodes[2].broker.topics
    await topics.set_autoscale("/", "orders", {"autoscale": "off"})
    bench.questions.clear()
    await bench.look(2)
    assert bench.questions == {}
    await topics.set_autoscale("/", "orders", {"autoscale": None, "autoscale-unit": 200})
    await bench.look(1)
    assert bench.questions[0].unit_ms == 200


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"autoscale": True}, "true is not a valid autoscale"),
        ({"autoscale": "yes"}, '<<"yes">> is not a valid autoscale'),
        ({"autoscale-target-messages": 0}, "0 is not a valid autoscale-target-messages"),
        ({"autoscale-target-messages": "9"}, '<<"9">> is not a valid autoscale-target-messages'),
        ({"autoscale-target-bytes": -1}, "-1 is not a valid autoscale-target-bytes"),
        ({"autoscale-partitions-min": 0}, "0 is not a valid autoscale-partitions-min"),
        ({"autoscale-partitions-max": 1025}, "1025 is not a valid autoscale-partitions-max"),
        ({"autoscale-changes-per-hour": 0}, "0 is not a valid autoscale-changes-per-hour"),
        ({"autoscale-unit": 99}, "99 is not a valid autoscale-unit"),
        ({"autoscale-unit": 3_600_001}, "3600001 is not a valid autoscale-unit"),
        (
            {"autoscale-partitions-min": 5, "autoscale-partitions-max": 4},
            "autoscale-partitions-max is less than autoscale-partitions-min",
        ),
    ],
)
async def test_a_value_that_is_none_is_refused_by_name(
    cluster: FakeCluster, settings: dict[str, Any], text: str
) -> None:
    topics = cluster.nodes[3].broker.topics
    with pytest.raises(BadTopic, match=text.split(" of ")[0]):
        await topics.create("/", "orders", partitions=1, logical=LOGICAL, settings=settings)
    await topics.create("/", "orders", partitions=1, logical=LOGICAL)
    with pytest.raises(PreconditionFailed, match=text.split(" of ")[0]):
        await topics.set_autoscale("/", "orders", settings)
    with pytest.raises(ValidationFailed):
        checked_definition(settings)


async def test_other_settings_are_not_for_the_autoscaler_to_set(cluster: FakeCluster) -> None:
    topics = cluster.nodes[3].broker.topics
    await topics.create("/", "orders", partitions=1, logical=LOGICAL)
    with pytest.raises(PreconditionFailed, match="is not a setting of the autoscaler"):
        await topics.set_autoscale("/", "orders", {"max-age": "1D"})
    with pytest.raises(NotFound):
        await topics.set_autoscale("/", "others", {"autoscale": "on"})


def test_bounds_of_different_sources_go_together() -> None:
    made = policy_of({"autoscale-partitions-min": 9, "autoscale-partitions-max": 4})
    assert (made.partitions_min, made.partitions_max) == (4, 4)


async def test_any_node_explains_by_asking_the_leader(cluster: FakeCluster) -> None:
    bench = await busy(cluster)
    await bench.look(2)
    for node in (1, 2):
        row = await cluster.nodes[node].broker.topic_parts.explain_scaling("/", "orders")
        assert row["at_ms"] is not None
        assert row["policy"]["target_messages"] == 10.0
    with pytest.raises(NotFound):
        await cluster.nodes[2].broker.topic_parts.explain_scaling("/", "others")
