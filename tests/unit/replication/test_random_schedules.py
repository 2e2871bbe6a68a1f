"""Three to five cores under random schedules: elections, crashes, broken links, lost disks."""

from __future__ import annotations

import pytest

from convoymq.replication.raft import types
from tests.unit.replication.support import Cluster


def step(cluster: Cluster, damage: bool) -> None:
    """One random event."""
    chance = cluster.random.random()
    nodes = sorted(cluster.logs)
    node = cluster.random.choice(nodes)
    other = cluster.random.choice(nodes)
    if chance < 0.55:
        links = sorted(link for link, queue in cluster.links.items() if queue)
        if links:
            cluster.deliver(*cluster.random.choice(links))
    elif chance < 0.72:
        cluster.flush(node, cluster.random.randint(1, 4))
    elif chance < 0.82:
        cluster.propose(node)
    elif chance < 0.86:
        if cluster.timers:
            cluster.fire(cluster.random.choice(sorted(cluster.timers)))
    elif chance < 0.88:
        cluster.disconnect(node, other)
    elif chance < 0.93:
        if node != other:
            cluster.connect(node, other)
    elif chance < 0.94:
        if node in cluster.cores:
            cluster.crash(node)
        else:
            cluster.start(node)
    elif chance < 0.96:
        if node not in cluster.cores:
            cluster.start(node)
    elif chance < 0.97:
        cluster.retry()
    elif chance < 0.98:
        core = cluster.cores.get(node)
        if core is not None and core.role == types.LEADER:
            core.transfer(other)
            core.abort_transfer() if cluster.random.random() < 0.5 else None
            cluster.drain(node)
    elif chance < 0.99:
        core = cluster.cores.get(node)
        if core is not None and core.role == types.LEADER:
            members = core.members
            if other in members.nodes:
                if len(members.voters) > 2:
                    cluster.propose(node, members.without(other))
            elif core is cluster.leader and core.members_index <= core.commit_index:
                if cluster.random.random() < 0.5:
                    cluster.forget(other)
                cluster.propose(node, members.with_learner(core.changes.new_learner(other)))
    elif (
        damage
        and node in cluster.cores
        and not any(
            log.voted_for in (types.QUARANTINED, types.LOST_STATE) for log in cluster.logs.values()
        )
    ):
        # One at a time: with two lost logs out of three nobody can promise anything.
        core = cluster.cores[node]
        core.lost_data.quarantine(False)
        cluster.drain(node)
        cluster.flush(node)
        cluster.logs[node].wipe()
        core.lost_data.on_log_lost()
        cluster.drain(node)


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_breaks_safety_and_quiet_brings_a_leader(seed: int) -> None:
    cluster = Cluster(3 + seed % 3, seed, founder=seed % 2)
    for _ in range(1500):
        step(cluster, damage=False)
    quiet(cluster)


@pytest.mark.parametrize("seed", range(40))
def test_lost_logs_never_cost_a_committed_entry(seed: int) -> None:
    cluster = Cluster(3, 1000 + seed, founder=seed % 2)
    for _ in range(1500):
        step(cluster, damage=True)


def quiet(cluster: Cluster) -> None:
    """Faults end: a leader is found, takes an entry, and every member has it."""
    nodes = sorted(cluster.logs)
    for node in nodes:
        if node not in cluster.cores:
            cluster.start(node)
    for a in nodes:
        for b in nodes:
            if a != b:
                cluster.disconnect(a, b)
                cluster.connect(a, b)
    for _ in range(60):
        cluster.settle()
        for node in sorted(cluster.timers):
            # One after the other, as random delays have it: together they only split the votes.
            if node in cluster.timers:
                cluster.fire(node)
                cluster.settle()
        cluster.retry()
        cluster.settle()
        leader = cluster.leader
        if leader is not None and leader.commit_index >= leader.term_start:
            break
    leader = cluster.leader
    assert leader is not None
    item = cluster.propose(leader.node)
    assert item is not None
    cluster.settle()
    assert leader.commit_index >= item.index
    cluster.spread_commit()
    for node in leader.members.nodes:
        assert (
            cluster.logs[node].items[: item.index] == cluster.logs[leader.node].items[: item.index]
        )
