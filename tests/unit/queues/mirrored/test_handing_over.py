"""A master that hands over to a chosen mirror: rebalancing, drained nodes, lists of policies."""

from __future__ import annotations

import pytest

from convoymq.model.errors import PreconditionFailed
from tests.unit.queues.mirrored.support import Cluster

GROUP = 1


def rows(cluster: Cluster, node: int) -> list[dict[str, object]]:
    return list(cluster.nodes[node].host.leader_rows())


def test_a_chosen_mirror_follows_with_all_messages_while_clients_stay(cluster: Cluster) -> None:
    cluster.declare()
    channel = cluster.channel(2)
    for tag, body in enumerate((b"a", b"b", b"c"), 1):
        channel.publish(body, tag=tag)
    cluster.settle()
    assert rows(cluster, 1) == [
        {"group": GROUP, "leader": 1, "targets": (2, 3), "log_entries": 3, "messages": 3}
    ]
    assert rows(cluster, 2) == rows(cluster, 3) == []
    cluster.nodes[1].host.hand_over(GROUP, 3)
    channel.publish(b"d", tag=4)
    cluster.until(lambda: cluster.queue.home == 3)
    cluster.until(lambda: len(cluster.master.member.view.live) == 3)
    assert cluster.master.member.view.next_master == 0
    channel.consume()
    cluster.pass_by(10_000)
    assert channel.deliveries() == [b"a", b"b", b"c", b"d"]
    assert [each for kind, each, *_ in channel.heard if kind == "published"] == [[1, 3], [4, 4]]
    assert [row["leader"] for node in cluster.nodes for row in rows(cluster, node)] == [3]


def test_only_a_synchronised_mirror_is_handed_the_master(cluster: Cluster) -> None:
    cluster.declare()
    cluster.channel(2).publish(b"a", tag=1)
    cluster.settle()
    cluster.nodes[1].host.hand_over(GROUP, 3)
    cluster.until(lambda: cluster.queue.home == 3)
    cluster.until(lambda: cluster.queue.view.live_at(1) is not None)
    # Node 1 has begun anew, without the message.
    assert rows(cluster, 3)[0]["targets"] == (2,)
    for node, told in ((3, 1), (3, 3), (3, 9), (2, 1)):
        with pytest.raises(PreconditionFailed, match=f"node.*{told} has no mirror that may follow"):
            cluster.nodes[node].host.hand_over(GROUP, told)
    cluster.pass_by(5_000)
    assert cluster.queue.home == 3


def test_another_mirror_follows_when_the_chosen_one_fails_before(cluster: Cluster) -> None:
    cluster.declare()
    cluster.channel(2).publish(b"a", tag=1)
    cluster.settle()
    cluster.nodes[1].host.hand_over(GROUP, 3)
    node = cluster.nodes.pop(3)
    node.own_time.runs = False
    for other in cluster.nodes.values():
        other.wire.down.add(3)
        other.host.on_node_down(3)
    cluster.until(lambda: cluster.queue.home == 2)
    channel = cluster.channel(1)
    channel.consume()
    cluster.pass_by(10_000)
    assert channel.deliveries() == [b"a"]
    node.host.stop()


def test_of_mirrors_that_may_have_the_master_the_oldest_follows(cluster: Cluster) -> None:
    """The oldest of all is on a node that is not in the list."""
    cluster.declare()
    name = cluster.master.host.node_name(3)
    cluster.settings = {**cluster.settings, "ha-mode": "nodes", "ha-params": [name]}
    for node in cluster.nodes.values():
        queue = node.host.queues[GROUP]
        queue.configure(cluster.settings)
    homes = []

    def is_moved() -> bool:
        homes.append(cluster.queue.home)
        return homes[-1] == 3

    cluster.until(is_moved)
    assert 2 not in homes
