"""A node is killed in the middle of each command that changes members or leaders, under load.

The command may succeed, or fail by name; given once more it does what it says, and nothing that was
confirmed is lost, repeated without a word or out of order.
"""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.model.json import JsonObject
from tests.faults.conftest import StartCluster
from tests.faults.test_leadership import GUEST, convoy, led_by, members
from tests.faults.traffic import Traffic, connect, counter, declare, fill, in_step, name_of, until
from tests.patience import PATIENCE_S

QUEUES = [f"q{number}" for number in range(24)]
EVERY = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
Request: TypeAlias = tuple[str, str, JsonObject]
"""Method, path and body, of the HTTP API."""
PAIR = {"x-quorum-initial-group-size": 2}


def at_once() -> bool:
    """The change takes a few round trips, and the request one: the kill comes between."""
    return True


def declare_all(cluster: LocalCluster) -> None:
    connection = connect(cluster, 1)
    channel = connection.channel()
    for queue in QUEUES:
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()


@contextmanager
def killed(
    cluster: LocalCluster,
    victim: int,
    begun: Callable[[], bool],
    request: Request,
    *,
    at: int,
) -> Iterator[None]:
    """Asks a node for a change, kills a node when that has begun, and starts that again at the
    end."""
    method, path, body = request
    url = f"http://127.0.0.1:{cluster.nodes[at - 1].http_port}/api/{path}"
    headers = {"authorization": GUEST}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    sent = threading.Event()

    def ask() -> None:
        sent.set()
        with suppress(OSError), urllib.request.urlopen(asked, timeout=PATIENCE_S):
            pass

    asking = threading.Thread(target=ask)
    asking.start()
    sent.wait()
    until(begun, "the command does not begin")
    cluster.kill(victim)
    asking.join(PATIENCE_S)
    yield
    cluster.start_node(victim)


def done_at_last(cluster: LocalCluster, *words: object) -> None:
    """Gives a command until it succeeds: a queue may need longer than it is waited for."""
    until(lambda: convoy(cluster, *words, code=None).returncode == 0, "the command fails")


def sizes(cluster: LocalCluster, at: int) -> list[int]:
    return [len(row["members"]) for row in cluster.api("queues", at)]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_member_is_added(cluster: LocalCluster, victim: int) -> None:
    """Killed: the leader, the new member or another one."""
    declare(cluster, 1, "q", PAIR)
    (new,) = {1, 2, 3} - set(members(cluster, "q"))
    fill(cluster, 1, "q", 2000, 100)
    add: Request = ("POST", "queues/quorum/%2F/q/replicas/add", {"node": name_of(cluster, new)})
    with Traffic(cluster, "q", publish_at=(1, 2, 3), consume_at=EVERY, filled=2000) as traffic:
        traffic.goes_on()
        with killed(cluster, victim, at_once, add, at=1):
            pass
        cluster.wait_ready()
        traffic.goes_on()
        convoy(cluster, "queues", "add_member", "q", new)
        until(lambda: members(cluster, "q") == [1, 2, 3], "the member does not come")
        in_step(cluster)
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_member_is_deleted(cluster: LocalCluster, victim: int) -> None:
    """The leader goes: another one leads first. Killed: it, its successor, another one."""
    declare(cluster, 1, "q")
    delete: Request = (
        "DELETE",
        "queues/quorum/%2F/q/replicas/delete",
        {"node": name_of(cluster, 1)},
    )
    with Traffic(cluster, "q", publish_at=(2, 3), consume_at=EVERY) as traffic:
        traffic.goes_on()
        with killed(cluster, victim, at_once, delete, at=2):
            pass
        cluster.wait_ready()
        traffic.goes_on()
        convoy(cluster, "queues", "delete_member", "q", 1, at=3)
        until(lambda: members(cluster, "q") == [2, 3], "the member does not go")
        traffic.goes_on()
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_queues_shrink(cluster: LocalCluster, victim: int) -> None:
    """Killed: the node that is to lose its replicas, the one that was asked, another one."""
    declare_all(cluster)
    path = f"queues/quorum/replicas/on/{name_of(cluster, 1)}/shrink"
    with Traffic(cluster, "q0", publish_at=(2, 3, 1), consume_at=EVERY) as traffic:
        traffic.goes_on()
        with killed(
            cluster, victim, lambda: 2 in sizes(cluster, 3), ("DELETE", path, {}), at=2
        ):  # fmt: skip
            pass
        cluster.wait_ready()
        traffic.goes_on()
        done_at_last(cluster, "queues", "shrink", 1)
        for queue in QUEUES:
            until(lambda q=queue: members(cluster, q) == [2, 3], f"{queue} is not smaller")  # type: ignore[misc]
        traffic.goes_on()
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 3])
@pytest.mark.parametrize("command", ["grow", "grow_to_count"])
def test_queues_grow(cluster: LocalCluster, victim: int, command: str) -> None:
    """Killed: the node that leads, the one that gets replicas."""
    declare_all(cluster)
    convoy(cluster, "queues", "shrink", 3)
    assert set(sizes(cluster, 1)) == {2}
    where = name_of(cluster, 3) if command == "grow" else "3"
    path = {
        "grow": f"queues/quorum/replicas/on/{where}/grow",
        "grow_to_count": "queues/quorum/replicas/grow_to_count",
    }[command]
    with Traffic(cluster, "q0", publish_at=(2, 1), consume_at=EVERY) as traffic:
        traffic.goes_on()
        grow: Request = ("POST", path, {"strategy": "all", "count": 3})
        with killed(cluster, victim, lambda: 3 in sizes(cluster, 2), grow, at=2):
            pass
        cluster.wait_ready()
        traffic.goes_on()
        done_at_last(cluster, "queues", command, 3, "all")
        for queue in QUEUES:
            until(lambda q=queue: members(cluster, q) == [1, 2, 3], f"{queue} is not larger")  # type: ignore[misc]
        in_step(cluster)
        traffic.goes_on()
        traffic.finish()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_node_is_drained_and_revived(start_cluster: StartCluster, victim: int) -> None:
    """Killed: the node that is drained, one that gets leaders; and the first as it comes back."""
    cluster = start_cluster(3)
    declare_all(cluster)
    drain: Request = ("POST", f"convoy/nodes/{name_of(cluster, 1)}/drain", {})
    with Traffic(cluster, "q0", publish_at=(3, 2), consume_at=[(2, 3), (3, 2)]) as traffic:
        traffic.goes_on()
        begun = lambda: any(node != 1 for node in led_by(cluster, QUEUES))  # noqa: E731
        with killed(cluster, victim, begun, drain, at=3):
            traffic.goes_on()
        convoy(cluster, "upgrade", "drain", 1, at=3)
        until(lambda: counter(cluster, 1, "groups_led") == 0, "node 1 leads still")
        in_step(cluster)
        assert 1 not in led_by(cluster, QUEUES)
        convoy(cluster, "upgrade", "revive", 1, at=3)
        cluster.kill(1)
        traffic.goes_on()
        cluster.start_node(1)
        cluster.wait_ready()
        connect(cluster, 1).close()
        in_step(cluster)
        convoy(cluster, "queues", "rebalance", "all", at=3)
        assert led_by(cluster, QUEUES)[1] == len(QUEUES) // 3
        traffic.finish()


def test_the_leader_of_a_transfer_is_killed(cluster: LocalCluster) -> None:
    """The target stands still, so the transfer is surely under way when its leader dies."""
    declare(cluster, 1, "q")
    transfer: Request = (
        "POST",
        "queues/quorum/%2F/q/leader/transfer",
        {"node": name_of(cluster, 2)},
    )
    with Traffic(cluster, "q", publish_at=(3, 2), consume_at=[(3, 2), (2, 3)]) as traffic:
        traffic.goes_on()
        cluster.kill(2, signal.SIGSTOP)
        with killed(cluster, 1, at_once, transfer, at=3):
            cluster.kill(2, signal.SIGCONT)
            traffic.goes_on()
        cluster.wait_ready()
        in_step(cluster)
        if cluster.leader_of("q") != 2:
            convoy(cluster, "queues", "transfer_leadership", "q", 2)
        until(lambda: cluster.leader_of("q") == 2, "node 2 does not lead")
        traffic.finish()
