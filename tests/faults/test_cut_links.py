"""The link of one pair of nodes is cut: clients of both go on, through the third node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import BASE_PORT
from tests.faults.proxies import ProxiedCluster
from tests.faults.traffic import Traffic, declare, log_has, until

QUEUE = "orders"
SETTINGS = {"raft.wal_max_size_bytes": "16MiB"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(tmp_path / "cluster", 3, BASE_PORT, SETTINGS) as made:
        made.wait_ready()
        yield made


@pytest.mark.provokes("link.relayed", "link.relay_lost")
@pytest.mark.parametrize("how", ["broken", "silent"])
def test_clients_of_a_node_that_is_cut_off_from_the_leader_go_on(
    cluster: ProxiedCluster, how: str
) -> None:
    declare(cluster, 1, QUEUE)
    leader = cluster.leader_of(QUEUE)
    victim = leader % 3 + 1
    with Traffic(
        cluster, QUEUE, publish_at=(victim,), consume_at=((victim,), (leader,))
    ) as traffic:
        traffic.goes_on(300)
        cluster.proxies.cut(leader, victim, how)
        for one, other in ((leader, victim), (victim, leader)):
            until(
                lambda at=one, peer=other: log_has(cluster, at, "link.relayed", f'"peer": {peer}'),
                f"node {one} does not reach node {other}",
            )
        traffic.goes_on(500)
        traffic.all_consume()
        rows = {row["node"]: row for row in cluster.api("convoy/node", victim)["links"]}
        assert rows[leader]["up"]
        assert rows[leader]["relayed_by"] == 6 - leader - victim
        cluster.proxies.heal(leader, victim)
        until(
            lambda: log_has(cluster, victim, "link.relay_lost"),
            "the direct link does not take over",
        )
        traffic.goes_on(300)
        traffic.all_consume()
        traffic.finish()


def test_the_relay_is_killed_and_comes_back(cluster: ProxiedCluster) -> None:
    declare(cluster, 1, QUEUE)
    leader = cluster.leader_of(QUEUE)
    victim, third = leader % 3 + 1, (leader + 1) % 3 + 1
    every = [(victim, third, leader), (leader, victim, third)]
    with Traffic(cluster, QUEUE, publish_at=(victim,), consume_at=every) as traffic:
        traffic.goes_on(300)
        cluster.proxies.cut(leader, victim, "broken")
        until(lambda: log_has(cluster, victim, "link.relayed"), "not relayed")
        traffic.goes_on(300)
        cluster.kill(third)
        until(lambda: log_has(cluster, victim, "link.relay_lost"), "still relayed")
        cluster.start_node(third)
        traffic.goes_on(300)
        cluster.proxies.heal(leader, victim)
        traffic.goes_on(300)
        traffic.finish()
