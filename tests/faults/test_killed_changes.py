"""A node is killed in the middle of each command that changes members or leaders, under load.

The command may succeed, or fail by name; given once more it does what it says, and nothing that was
confirmed is lost, repeated without a word or out of order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import StartCluster
from tests.faults.test_leadership import convoy, led_by, members
from tests.faults.traffic import Traffic, connect, counter, declare, fill, in_step, until

QUEUES = [f"q{number}" for number in range(24)]
EVERY = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
PAIR = {"x-quorum-initial-group-size": 2}


def declare_all(cluster: LocalCluster, arguments: dict[str, object] | None = None) -> None:
    connection = connect(cluster, 1)
    channel = connection.channel()
    for queue in QUEUES:
        quorum = {"x-queue-type": "quorum", **(arguments or {})}
        channel.queue_declare(queue, durable=True, arguments=quorum)
    connection.close()


@contextmanager
def killed(
    cluster: LocalCluster, victim: int, begun: Callable[[], bool], *words: object, at: int
) -> Iterator[None]:
    """Gives a command, kills a node when it has begun, and starts that node again at the end."""
    asked = threading.Thread(target=convoy, args=(cluster, *words), kwargs={"at": at, "code": None})
    asked.start()
    until(begun, "the command does not begin")
    cluster.kill(victim)
    asked.join(60)
    yield
    cluster.start_node(victim)
    cluster.wait_ready()


def sizes(cluster: LocalCluster, at: int) -> list[int]:
    return [len(row["members"]) for row in cluster.api("queues", at)]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_member_is_added(cluster: LocalCluster, victim: int) -> None:
    """The new member is stopped at first, so that the change is surely under way."""
    declare(cluster, 1, "q", PAIR)
    first = members(cluster, "q")
    new = ({1, 2, 3} - set(first)).pop()
    fill(cluster, 1, "q", 500, 100)
    with Traffic(cluster, "q", publish_at=(1, 2, 3), consume_at=EVERY, filled=500) as traffic:
        traffic.goes_on()
        cluster.kill(new, signal.SIGSTOP)
        until(lambda: cluster.leader_of("q") != new, "the stopped node leads")
        with killed(
            cluster, victim,
            lambda: new in members(cluster, "q", first[0]),
            "queues", "add_member", "q", new, at=first[0],
        ):  # fmt: skip
            if victim != new:
                cluster.kill(new, signal.SIGCONT)
        traffic.goes_on()
        convoy(cluster, "queues", "add_member", "q", new)
        until(lambda: members(cluster, "q") == [1, 2, 3], "the member does not come")
        in_step(cluster)
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_member_is_deleted(cluster: LocalCluster, victim: int) -> None:
    """The leader goes: another one leads first. Killed: it, its successor, another one."""
    declare(cluster, 1, "q")
    with Traffic(cluster, "q", publish_at=(2, 3), consume_at=EVERY) as traffic:
        traffic.goes_on()
        asked = threading.Event()

        def begun() -> bool:
            asked.set()
            return True

        with killed(cluster, victim, begun, "queues", "delete_member", "q", 1, at=2):
            traffic.goes_on()
        convoy(cluster, "queues", "delete_member", "q", 1, at=3)
        until(lambda: members(cluster, "q") == [2, 3], "the member does not go")
        traffic.goes_on()
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_queues_shrink(cluster: LocalCluster, victim: int) -> None:
    """Killed: the node that is to lose its replicas, the one that was asked, another one."""
    declare_all(cluster)
    with Traffic(cluster, "q0", publish_at=(2, 3, 1), consume_at=EVERY) as traffic:
        traffic.goes_on()
        with killed(cluster, victim, lambda: 2 in sizes(cluster, 3), "queues", "shrink", 1, at=2):
            traffic.goes_on()
        convoy(cluster, "queues", "shrink", 1)
        for queue in QUEUES:
            until(lambda q=queue: members(cluster, q) == [2, 3], f"{queue} is not smaller")  # type: ignore[misc]
        traffic.goes_on()
        traffic.finish()


@pytest.mark.parametrize("words", [("grow", 3, "all"), ("grow_to_count", 3, "all")])
@pytest.mark.parametrize("victim", [1, 3])
def test_queues_grow(cluster: LocalCluster, victim: int, words: tuple[object, ...]) -> None:
    """Killed: the node that leads, the one that gets replicas."""
    cluster_is_up_with_pairs(cluster)
    with Traffic(cluster, "q0", publish_at=(2, 1), consume_at=EVERY) as traffic:
        traffic.goes_on()
        with killed(cluster, victim, lambda: 3 in sizes(cluster, 2), "queues", *words, at=2):
            pass
        traffic.goes_on()
        convoy(cluster, "queues", *words)
        for queue in QUEUES:
            until(lambda q=queue: members(cluster, q) == [1, 2, 3], f"{queue} is not larger")  # type: ignore[misc]
        in_step(cluster)
        traffic.goes_on()
        traffic.finish()


def cluster_is_up_with_pairs(cluster: LocalCluster) -> None:
    """Declares queues with members on nodes 1 and 2."""
    declare_all(cluster)
    convoy(cluster, "queues", "shrink", 3)
    assert set(sizes(cluster, 1)) == {2}


@pytest.mark.parametrize("victim", [1, 2])
def test_a_node_is_drained_and_revived(start_cluster: StartCluster, victim: int) -> None:
    """Killed: the node that is drained, one that gets leaders."""
    cluster = start_cluster(3)
    declare_all(cluster)
    with Traffic(cluster, "q0", publish_at=(3, 2), consume_at=[(2, 3), (3, 2)]) as traffic:
        traffic.goes_on()
        with killed(
            cluster, victim,
            lambda: any(node != 1 for node in led_by(cluster, QUEUES)),
            "upgrade", "drain", 1, at=3,
        ):  # fmt: skip
            traffic.goes_on()
        convoy(cluster, "upgrade", "drain", 1, at=3)
        until(lambda: counter(cluster, 1, "groups_led") == 0, "node 1 leads still")
        in_step(cluster)
        assert 1 not in led_by(cluster, QUEUES)
        # And killed while it comes back.
        convoy(cluster, "upgrade", "revive", 1, at=3)
        cluster.kill(1)
        traffic.goes_on()
        cluster.start_node(1)
        cluster.wait_ready()
        connect(cluster, 1).close()
        convoy(cluster, "queues", "rebalance", "all", at=3)
        assert led_by(cluster, QUEUES)[1] == len(QUEUES) // 3
        traffic.finish()


def test_the_leader_of_a_transfer_is_killed(cluster: LocalCluster) -> None:
    """The target stands still, so the transfer is surely under way when its leader dies."""
    declare(cluster, 1, "q")
    with Traffic(cluster, "q", publish_at=(3, 2), consume_at=[(3, 2), (2, 3)]) as traffic:
        traffic.goes_on()
        cluster.kill(2, signal.SIGSTOP)
        with killed(cluster, 1, lambda: True, "queues", "transfer_leadership", "q", 2, at=3):
            cluster.kill(2, signal.SIGCONT)
            traffic.goes_on()
        in_step(cluster)
        if cluster.leader_of("q") != 2:
            convoy(cluster, "queues", "transfer_leadership", "q", 2)
        until(lambda: cluster.leader_of("q") == 2, "node 2 does not lead")
        traffic.finish()
