"""Compaction of segments beside truncations that are not durable, and beside itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoymq.storage.store import RECLAIM_EVERY_TICKS
from tests.unit.storage.disk import SMALL, Node, emptied

SPARSE = replace(SMALL, pack_below_bytes=0, snapshot_min_dead_bytes=1 << 20)
GROUP = 1


def with_cut_segment() -> Node:
    """A log whose segment ends with entries that are truncated; the truncation is not durable. All
    that is applied is dead, so the segment is due to be rewritten."""
    node = Node(1, SPARSE)
    node.groups = [GROUP]
    node.append(GROUP, 12)
    emptied(node)
    model = node.models[GROUP]
    model.applied = 9
    model.dead = set(range(1, 10))
    node.truncate(GROUP, 11)
    assert [segment.stale for segment in node.storage.logs[GROUP].segments] == [True]
    return node


def reclaim(node: Node) -> None:
    """Lets the storage look for what is dead, and its worker work; the WAL's flush hangs."""
    for _ in range(2 * RECLAIM_EVERY_TICKS):
        node.storage.tick()
        while node.worker.run():
            pass


@pytest.mark.parametrize("survives", [False, True])
def test_a_segment_keeps_truncated_entries_until_the_truncation_is_durable(survives: bool) -> None:
    """The WAL that comes back after a power cut still says that the log ends where it did."""
    node = with_cut_segment()
    node.storage.kick()
    reclaim(node)
    if survives:
        node.run()
    node.crash(lambda: False)
    assert node.storage.logs[GROUP].last_index == (11 if survives else 12)
    node.check()


def test_a_cut_segment_is_rewritten_once_the_truncation_is_durable() -> None:
    node = with_cut_segment()
    node.run()
    before = sum(segment.size for segment in node.storage.logs[GROUP].segments)
    reclaim(node)
    assert sum(segment.size for segment in node.storage.logs[GROUP].segments) < before
    node.crash(lambda: False)
    node.check()


def test_a_cut_segment_is_not_rewritten_twice_at_a_time() -> None:
    """Both rewrites have the last segment's name: the later one would take what the first joined.

    A join is in flight when a WAL file is emptied in which nothing of the log counts any more.
    """
    node = Node(1, SPARSE)
    node.groups = [GROUP]
    for count in (6, 12):
        node.append(GROUP, count)
        emptied(node)
    model, storage = node.models[GROUP], node.storage
    model.applied = 16
    model.dead = set(range(1, 16)) - {6}
    node.append(GROUP, 2)
    node.truncate(GROUP, 18)
    storage.kick()
    assert node.flusher.run()
    for _ in range(2 * RECLAIM_EVERY_TICKS):
        storage.tick()
    while not storage.logs[GROUP].compacting:
        assert node.worker.run()  # a snapshot first
    generation = storage.turn_wal()
    node.truncate(GROUP, 18)
    storage.kick()
    while node.flusher.run():
        pass
    storage.tick()
    for _ in range(4):
        node.run()
        storage.tick()
    assert storage.has_emptied(generation)
    node.check()
    node.crash(lambda: False)
    node.check()
