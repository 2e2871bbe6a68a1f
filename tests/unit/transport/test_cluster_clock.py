"""The wall clock of a cluster whose nodes' clocks differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.shells.groups.group_time import GroupTime
from convoymq.transport.cluster_clock import TOLERANCE_MS, WINDOW_MS, ClusterClock

DAY_MS = 86_400_000
TRUE_MS = 1_800_000_000_000
DELAY_MS = 3
SECOND_MS = 1_000


class Node:
    """A node's clocks: the monotonic one counts from its start, the wall clock has an error."""

    def __init__(self, error_ms: int, started_ms: int = 0) -> None:
        self.error_ms = error_ms
        self.started_ms = started_ms
        self.passed = 0
        self.cluster = ClusterClock()

    def wall_ms(self) -> int:
        return TRUE_MS + self.passed + self.error_ms

    def monotonic_ms(self) -> int:
        return self.passed + self.started_ms

    def now_ms(self) -> int:
        return self.cluster.now_ms(self.wall_ms(), self.monotonic_ms())

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        raise NotImplementedError

    def random(self) -> float:
        raise NotImplementedError

    def ahead_ms(self) -> int:
        return self.now_ms() - TRUE_MS - self.passed

    def tick(self) -> bool:
        return self.cluster.tick(self.wall_ms(), self.monotonic_ms())


def cluster(*errors_ms: int) -> list[Node]:
    nodes = [Node(error, 1000 * i) for i, error in enumerate(errors_ms)]
    go_on(nodes, SECOND_MS)
    return nodes


def go_on(nodes: list[Node], ms: int) -> None:
    """Time passes; heartbeats go from everybody to everybody."""
    for node in nodes:
        node.passed += ms
    for number, node in enumerate(nodes):
        for other, peer in enumerate(nodes):
            if other != number:
                node.cluster.heard(other, peer.wall_ms() - DELAY_MS, node.monotonic_ms())


@pytest.mark.parametrize("errors_ms", [(0,), (0, 0), (0, 0, 0), (100, -100, 0, 50)])
def test_clocks_that_are_right_are_used_as_they_are(errors_ms: tuple[int, ...]) -> None:
    for node in cluster(*errors_ms):
        assert node.ahead_ms() == node.error_ms
        assert not node.tick()


@pytest.mark.parametrize("others", [2, 3, 4, 6])
@pytest.mark.parametrize("error_ms", [DAY_MS, -DAY_MS, 2 * TOLERANCE_MS])
def test_one_wrong_clock_is_held_to_the_others(others: int, error_ms: int) -> None:
    nodes = cluster(error_ms, *[0] * others)
    limit = TOLERANCE_MS if error_ms > 0 else -TOLERANCE_MS
    assert limit - DELAY_MS <= nodes[0].ahead_ms() <= limit
    assert nodes[0].tick()
    assert nodes[0].cluster.is_skewed
    assert abs(nodes[0].cluster.skew_ms - error_ms) <= DELAY_MS
    for node in nodes[1:]:
        assert node.ahead_ms() == 0
        assert not node.tick()


def test_of_two_clocks_the_earlier_counts() -> None:
    ahead, right = cluster(DAY_MS, 0)
    assert ahead.ahead_ms() == TOLERANCE_MS - DELAY_MS
    assert right.ahead_ms() == 0
    assert not right.tick()
    late, right = cluster(-DAY_MS, 0)
    assert late.ahead_ms() == -DAY_MS
    assert right.ahead_ms() == -DAY_MS + TOLERANCE_MS - DELAY_MS


def test_a_leader_a_day_ahead_stamps_entries_within_the_tolerance() -> None:
    nodes = cluster(DAY_MS, 0, 0)
    time = GroupTime(nodes[0])
    for _ in range(100):
        go_on(nodes, 100)
        ahead = time.now_ms() - TRUE_MS - nodes[0].passed
        assert 0 <= ahead <= TOLERANCE_MS
    # Nor does the next leader have to wait for its own clock.
    after = GroupTime(nodes[1])
    after.heard(time.now_ms())
    go_on(nodes, 2 * TOLERANCE_MS)
    assert after.now_ms() - TRUE_MS - nodes[1].passed == 0


def test_the_skew_is_told_once_and_when_it_is_over() -> None:
    nodes = cluster(DAY_MS, 0, 0)
    assert nodes[0].tick()
    assert not nodes[0].tick()
    nodes[0].error_ms = TOLERANCE_MS - 10
    assert not nodes[0].tick()
    nodes[0].error_ms = 0
    assert nodes[0].tick()
    assert not nodes[0].cluster.is_skewed


def test_a_node_alone_follows_a_clock_that_jumped_at_double_speed() -> None:
    (node,) = cluster(0)
    assert node.ahead_ms() == 0
    node.error_ms = 60 * SECOND_MS
    assert node.ahead_ms() == 0
    for second in range(1, 60):
        node.passed += SECOND_MS
        assert node.ahead_ms() == second * SECOND_MS
    assert node.tick()
    node.passed += SECOND_MS
    assert node.ahead_ms() == 60 * SECOND_MS
    assert node.tick()
    node.error_ms = -DAY_MS
    assert node.ahead_ms() == -DAY_MS


def test_a_node_that_is_left_alone_does_not_jump_to_its_own_clock() -> None:
    nodes = cluster(DAY_MS, 0, 0)
    before = nodes[0].ahead_ms()
    for other in (1, 2):
        nodes[0].cluster.lost(other)
    assert nodes[0].ahead_ms() == before
    nodes[0].passed += SECOND_MS
    assert nodes[0].ahead_ms() == before + SECOND_MS


def test_the_quickest_heartbeat_of_the_window_counts() -> None:
    node = Node(DAY_MS)
    for delay in (400, 2, 300):
        node.cluster.heard(2, TRUE_MS + node.passed - delay, node.monotonic_ms())
        node.passed += 100
    assert node.ahead_ms() == TOLERANCE_MS - 2


def test_a_peer_that_is_set_back_is_believed_after_two_windows() -> None:
    nodes = cluster(0, 0)
    nodes[1].error_ms = -DAY_MS
    go_on(nodes, SECOND_MS)
    assert nodes[0].ahead_ms() == 0
    for _ in range(2):
        go_on(nodes, WINDOW_MS)
    assert nodes[0].ahead_ms() == -DAY_MS + TOLERANCE_MS - DELAY_MS


@given(st.lists(st.integers(-DAY_MS, DAY_MS), min_size=1, max_size=7), st.integers(0, 200))
def test_it_lies_within_the_tolerance_of_the_lower_median(errors: list[int], delay: int) -> None:
    node = Node(errors[0])
    for number, error in enumerate(errors[1:], 2):
        node.cluster.heard(number, TRUE_MS + error - delay, node.monotonic_ms())
    ahead = node.ahead_ms()
    median = sorted(errors)[(len(errors) - 1) // 2]
    assert min(median - delay, errors[0]) - TOLERANCE_MS <= ahead <= median + TOLERANCE_MS
