"""The load of a partition, as its leader measures it while somebody asks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.model.errors import Unavailable
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.load import (
    IDLE_MS_MIN,
    SAMPLES_MAX,
    LoadMeter,
    LoadQuestion,
    LoadReport,
    mean_since,
)
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.hashing import logical_partition
from tests.unit.kernels.records import record_of
from tests.unit.queues.stream.cluster import Result
from tests.unit.topics.machine.cluster import PartitionCluster
from tests.unit.topics.machine.support import SETTINGS

UNIT_MS = 1_000
LOGICAL = 64


def publish(cluster: PartitionCluster, client: Any, keys: list[str]) -> None:
    for key in keys:
        record = record_of("orders", key, b"body")
        client.target.publish([record], len(record), client.target.seq + 1)
    cluster.run()


def asked(cluster: PartitionCluster, node: int = 1, **more: Any) -> Any:
    result = Result()
    question = LoadQuestion(UNIT_MS, LOGICAL, 0)._replace(**more)
    cluster.nodes[node].queue.load(question, result)
    cluster.run()
    return result.error or result.found


def machine_of(cluster: PartitionCluster, node: int = 1) -> PartitionGroupMachine:
    found: PartitionGroupMachine = cluster.nodes[node].queue.machine()
    return found


@given(
    steps=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=20),
    window_ms=st.integers(1, 600),
)
def test_a_mean_is_that_of_a_total_which_grows_evenly(
    steps: list[tuple[int, int]], window_ms: int
) -> None:
    """Each step is (ms, messages in each of them): the naive model has a total for every ms."""
    times, totals, naive = [0], [0], [0]
    for ms, each in steps:
        naive += [naive[-1] + each * (n + 1) for n in range(ms)]
        times.append(times[-1] + ms)
        totals.append(naive[-1])
    now_ms = times.pop()
    total = totals.pop()
    begin_ms = max(0, now_ms - window_ms)
    expected = (naive[-1] - naive[begin_ms]) * 1000 / (now_ms - begin_ms)
    assert mean_since(times, totals, now_ms, total, window_ms) == pytest.approx(expected)


def test_nothing_is_counted_before_somebody_asks_and_long_after() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    client, _ = cluster.nodes[2].open()
    assert machine_of(cluster).load is None
    publish(cluster, client, ["a"] * 5)
    found = asked(cluster, node=3)
    assert isinstance(found, LoadReport)
    assert (found.known_ms, found.message_rates) == (0, (0.0,) * 4)
    assert machine_of(cluster).load is not None
    assert machine_of(cluster, 2).load is None
    publish(cluster, client, ["a"] * 10)
    cluster.clock.advance(UNIT_MS)
    assert asked(cluster).message_rates == (10.0,) * 4
    for _ in range(3):
        cluster.clock.advance(IDLE_MS_MIN)
    assert machine_of(cluster).load is None


def test_the_means_are_over_their_windows() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    client, _ = cluster.nodes[1].open()
    asked(cluster)
    for second in range(20):
        publish(cluster, client, ["a"] * (20 if second >= 18 else 2))
        cluster.clock.advance(UNIT_MS)
        found = asked(cluster)
    assert found.known_ms == 20 * UNIT_MS
    assert found.message_rates == pytest.approx((20.0, 46 / 5, 56 / 10, 76 / 20))
    assert found.is_replicated


def test_the_weights_are_those_of_the_logical_partitions_and_fade() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    client, _ = cluster.nodes[1].open()
    asked(cluster)
    publish(cluster, client, ["a"] * 30 + ["b"] * 10)
    found = asked(cluster, node=2, with_weights=True)
    weights = array("f", found.lp_messages)
    assert len(weights) == len(array("f", found.lp_bytes)) == LOGICAL
    places = [logical_partition(key, LOGICAL, 0) for key in (b"a", b"b")]
    assert [weights[place] for place in places] == [30.0, 10.0]
    for _ in range(10):
        cluster.clock.advance(UNIT_MS)
        found = asked(cluster, with_weights=True)
    faded = array("f", found.lp_messages)
    assert [faded[place] / weights[place] for place in places] == pytest.approx([0.135] * 2, 0.01)
    assert asked(cluster).lp_messages == b""


def test_of_a_hot_logical_partition_the_largest_keys_are_known() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    client, _ = cluster.nodes[1].open()
    hot = [logical_partition(b"a", LOGICAL, 0)]
    assert asked(cluster, hot=hot).top_keys == {hot[0]: []}
    publish(cluster, client, ["a"] * 3 + ["b"])
    assert asked(cluster, node=4, hot=hot).top_keys == {hot[0]: [(b"a", 3)]}
    assert asked(cluster).top_keys == {}


def test_what_is_produced_with_sequences_counts_and_a_repeat_does_not() -> None:
    machine = PartitionGroupMachine({**SETTINGS, "created_version": 0, "lo": 0, "hi": LOGICAL})
    meter = LoadMeter(machine, LOGICAL, 0, 0)
    records = [record_of("orders", "a", b"x")] * 3
    target = batch.PublishTarget(batch.CommandBuilder(), 1 << 56, None)
    for number, record in enumerate(records):
        target.publish([record], len(record), number + 1)
    target.builder.discard_unsent()
    (command,) = target.applied(target.seq)
    assert command.chunk.data is not None
    machine._append_part(None, 1, command.chunk.data, command.offset, 2, 1, 10, 3)  # type: ignore[attr-defined]
    assert meter.counter.messages == 1
    meter.close()
    assert machine.load is None


def test_groups_lag_by_messages_and_seconds_and_a_busy_owner_has_a_rate() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    cluster.tell(c.OpenCursor("g", 1))
    cluster.tell(c.Lease("g", 1, 1, "m"))
    client, _ = cluster.nodes[1].open()
    asked(cluster)
    publish(cluster, client, ["a"] * 100)
    lag = asked(cluster).groups["g"]
    assert (lag.messages, lag.drain_rate) == (100, -1.0)
    for acked in range(10, 90, 10):
        cluster.clock.advance(UNIT_MS)
        cluster.tell(c.AckRanges("g", 1, 1, (acked - 9, acked)))
        lag = asked(cluster).groups["g"]
    assert lag.messages == 20
    assert lag.seconds == pytest.approx(8.0, abs=0.5)
    assert lag.drain_rate == pytest.approx(10.0)
    cluster.tell(c.AckRanges("g", 1, 1, (81, 100)))
    assert asked(cluster).groups["g"] == (0, 0.0, -1.0)


def test_who_leads_no_more_counts_no_more() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    asked(cluster)
    cluster.elect(2)
    assert machine_of(cluster).load is None
    assert asked(cluster).known_ms == 0
    assert machine_of(cluster, 2).load is not None
    cluster.elect(None)
    assert isinstance(asked(cluster), Unavailable)


def test_a_replica_that_is_cut_off_is_told_of() -> None:
    cluster = PartitionCluster(lo=0, hi=LOGICAL)
    assert asked(cluster).is_replicated
    cluster.nodes[3].stalled = True
    assert not asked(cluster).is_replicated


def test_the_samples_are_bounded() -> None:
    machine = PartitionGroupMachine({**SETTINGS, "created_version": 0})
    meter = LoadMeter(machine, LOGICAL, 0, 0)
    question = LoadQuestion(UNIT_MS, LOGICAL, 0)
    for time_ms in range(0, 60 * UNIT_MS, 100):
        found = meter.report(question, time_ms, is_replicated=True)
    assert len(meter._samples) == SAMPLES_MAX
    assert found.known_ms >= 20 * UNIT_MS
