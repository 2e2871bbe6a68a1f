"""kill -9 under traffic: of the leader, of a follower, of every node in turn, of all at once."""

from __future__ import annotations

import signal

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes, stop_nodes
from tests.faults.traffic import Traffic, counter, declare, drain, until

QUEUE = "orders"


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_node_is_killed_and_comes_back_under_traffic(cluster: LocalCluster, role: str) -> None:
    declare(cluster, 1, QUEUE)
    victim = 1 if role == "leader" else 3
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        traffic.all_consume()
        cluster.kill(victim)
        traffic.goes_on(500)
        cluster.start_node(victim)
        cluster.wait_ready()
        # Its consumer is back as well and gets its share.
        traffic.all_consume()
        traffic.finish()


def test_every_node_serves_its_consumer_itself(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(3,)) as traffic:
        traffic.goes_on(500)
        traffic.finish()
        for number in (1, 2, 3):
            local = counter(cluster, number, "deliveries_local")
            assert local == len(traffic.consumers[number - 1].deliveries), traffic


def test_all_three_are_killed_in_turn(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    every = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3), consume_at=every) as traffic:
        for victim in (1, 2, 3):
            traffic.goes_on()
            cluster.kill(victim)
            traffic.goes_on()
            cluster.start_node(victim)
            cluster.wait_ready()
        traffic.finish()


def test_the_leader_is_killed_again_and_again(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    every = [(1, 2, 3), (2, 3, 1)]
    with Traffic(cluster, QUEUE, publish_at=(1, 2, 3), consume_at=every) as traffic:
        for _ in range(5):
            traffic.goes_on()
            victim = cluster.leader_of(QUEUE)
            cluster.kill(victim)
            traffic.goes_on()
            cluster.start_node(victim)
            cluster.wait_ready()
        traffic.finish()


def test_what_is_confirmed_survives_the_end_of_all_nodes(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=()) as traffic:
        traffic.goes_on(500)
        cut_power(cluster)
        confirmed = set(traffic.publisher.confirmed)
        traffic.publisher.stopping = True
        start_nodes(cluster, 3, 1, 2)
    found = drain(cluster, 3, QUEUE, len(confirmed), 100)
    assert confirmed <= set(found)
    assert found == sorted(found)
    assert len(found) == len(set(found))


def test_an_orderly_restart_of_each_node_stops_nobody(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    every = [(1, 2, 3), (3, 1, 2)]
    with Traffic(cluster, QUEUE, publish_at=(2, 3, 1), consume_at=every) as traffic:
        for number in (1, 2, 3):
            traffic.goes_on()
            stop_nodes(cluster, number)
            traffic.goes_on()
            cluster.start_node(number)
            cluster.wait_ready()
        traffic.finish()


def test_a_stopped_leader_is_replaced_and_follows_when_it_wakes(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        traffic.goes_on(300)
        cluster.kill(1, signal.SIGSTOP)
        traffic.goes_on(500)
        cluster.kill(1, signal.SIGCONT)
        until(lambda: cluster.leader_of(QUEUE) != 1, "the old leader still leads")
        until(
            lambda: (
                cluster.api(f"queues/%2F/{QUEUE}", 1)["leader"].startswith("convoy-1@") is False
            ),
            "the old leader does not follow",
        )
        seen = len(traffic.consumers[2].deliveries)
        until(lambda: len(traffic.consumers[2].deliveries) > seen + 50, f"starves: {traffic}")
        traffic.finish()
