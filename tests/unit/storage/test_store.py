"""The whole storage on a disk in memory: what it holds while running and after losing power."""

from __future__ import annotations

import pytest

from convoymq.model.config import RaftConfig
from convoymq.storage.store import RECLAIM_EVERY_TICKS
from tests.seeds import seeds
from tests.unit.storage.disk import Node, run_until_power_loss


@pytest.mark.parametrize("seed", range(30))
def test_storage_holds_what_the_model_holds(seed: int) -> None:
    node = Node(seed)
    for at in range(150):
        node.step()
        if at % 50 == 0:
            node.check()
    node.run()
    node.check()


@pytest.mark.parametrize("seed", seeds(40))
def test_nothing_confirmed_is_lost_when_the_power_goes(seed: int) -> None:
    node = Node(seed)
    for _ in range(6):
        run_until_power_loss(node, 300, node.random.randint(1, 120))
        node.crash()
    node.run()
    node.check()


KEEP = {"nothing": lambda: False, "all": lambda: True, "some": None}


@pytest.mark.parametrize("seed", [3, 8])
@pytest.mark.parametrize("kept", ["nothing", "all", "some"])
def test_the_power_may_go_at_every_single_file_operation(seed: int, kept: str) -> None:
    operation = 1
    while True:
        node = Node(seed)
        if not run_until_power_loss(node, 90, operation):
            break
        node.crash(KEEP[kept])
        for group in list(node.groups):
            node.append(group, 1)
        node.run()
        node.check()
        operation += 1
    assert operation > 40


MANY = RaftConfig(
    wal_max_size_bytes=64 * 1024,
    segment_max_entries=64,
    segment_max_size_bytes=32 * 1024,
    mem_table_max_bytes=8 * 1024,
    read_ahead_bytes=4096,
    snapshot_min_dead_bytes=8 * 1024,
)


def pass_through(node: Node, groups: list[int], rounds: int) -> int:
    """Appends to all groups in turn; all but the first entry of each is settled at once. Returns
    the bytes that passed."""
    size = 200
    for _ in range(rounds):
        for group in groups:
            node.append(group, 1, size)
        node.run()
        for group in groups:
            model = node.models[group]
            model.applied = model.written
            model.dead = set(range(2, model.applied + 1))
    return rounds * len(groups) * size


def segment_bytes(node: Node) -> int:
    return sum(segment.size for log in node.storage.logs.values() for segment in log.segments)


@pytest.mark.parametrize("held", [1, 24])
def test_what_passes_through_many_quiet_groups_does_not_pile_up(held: int) -> None:
    """In each file of the WAL every group has less that is dead than a snapshot is worth."""
    node = Node(1, MANY)
    groups = list(range(1, held + 1))
    node.groups = groups
    passed = pass_through(node, groups, 3000 // held)
    assert node.storage.compacted_files >= 5
    share = MANY.wal_max_size_bytes // held
    live = 256
    # What may wait for a snapshot, and what a file adds before that is looked at.
    most = held * (2 * live + MANY.snapshot_min_dead_bytes + min(share, 16 * 1024))
    assert segment_bytes(node) <= most < passed
    node.check()
    node.crash(lambda: True)
    assert segment_bytes(node) <= most
    node.check()


def test_groups_with_nothing_to_give_do_not_hold_up_a_drained_one() -> None:
    node = Node(1, MANY)
    groups = list(range(1, 25))
    node.groups = groups
    for group in groups:
        node.append(group, 100, 400)
        node.run()
    pass_through(node, [100], 500)
    drained = node.models[12]
    drained.applied = drained.written
    drained.dead = set(range(1, drained.applied + 1))

    def kept() -> int:
        return sum(segment.size for segment in node.storage.logs[12].segments)

    assert kept() > 100 * 400 / 2
    for _ in range(3 * RECLAIM_EVERY_TICKS):
        node.storage.tick()
        node.run()
    # The last entries are kept for followers that lack them.
    assert kept() <= 4 * 500
    assert segment_bytes(node) > 20 * 100 * 400
    node.check()


@pytest.mark.parametrize("seed", seeds(15))
def test_what_a_killed_process_wrote_outlives_the_power(seed: int) -> None:
    """The next process finds it in the page cache, and counts on it."""
    node = Node(seed)
    for _ in range(6):
        run_until_power_loss(node, 300, node.random.randint(1, 120))
        node.restart()
        for _ in range(node.random.randrange(4)):
            node.step()
        node.crash()
    node.run()
    node.check()
