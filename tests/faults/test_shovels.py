"""Shovels on three nodes: both protocols at both ends, kills, and the life of their parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, start_nodes
from tests.faults.traffic import connect, declare, drain, fill, log_has, until

SIZE = 20
ENDS = {
    "amqp091": ({"src-queue": "from"}, {"dest-queue": "to"}),
    "amqp10": ({"src-address": "/queues/from"}, {"dest-address": "/queues/to"}),
}
Ask = Callable[..., Any]


@pytest.fixture
def ask(cluster: LocalCluster) -> Ask:
    """Sends a request of the HTTP API to the first node that answers; raises when it is refused."""

    def asked(method: str, path: str, body: object = None, expected: int = 299) -> Any:
        status, answer = call(cluster, method, path, body)
        assert status <= expected, f"{method} {path}: {status} {answer}"
        return answer

    return asked


def put(ask: Ask, value: dict[str, Any], name: str = "s") -> None:
    ask("PUT", f"parameters/shovel/%2F/{name}", {"value": value})


def local(*ends: str, **more: Any) -> dict[str, Any]:
    """The parameter of a shovel from one queue of the cluster to another; AMQP 0-9-1 by default."""
    source, destination = (*ends, "amqp091", "amqp091")[:2]
    return {
        "src-protocol": source, "src-uri": "amqp://", **ENDS[source][0],
        "dest-protocol": destination, "dest-uri": "amqp://", **ENDS[destination][1],
        "reconnect-delay": 0.1, **more,
    }  # fmt: skip


def row(ask: Ask) -> dict[str, Any]:
    (found,) = ask("GET", "shovels")
    return dict(found)


def leader(cluster: LocalCluster, ask: Ask) -> int:
    """The node that runs the shovel."""
    names = {str(each["name"]): int(each["id"]) for each in ask("GET", "nodes")}
    return names[row(ask)["node"]]


@pytest.mark.provokes("shovel.running", "shovel.finished")
@pytest.mark.parametrize(("source", "destination"), [*itertools.product(ENDS, ENDS)])
def test_a_shovel_moves_between_both_protocols(
    cluster: LocalCluster, ask: Ask, source: str, destination: str
) -> None:
    """Large messages too, from the cluster over a real socket and within it."""
    for queue in ("from", "to"):
        declare(cluster, 1, queue)
    fill(cluster, 2, "from", 50, SIZE)
    fill(cluster, 2, "from", 1, 400_000, first=50)
    remote = f"amqp://guest:guest@127.0.0.1:{cluster.nodes[2].amqp_port}"
    put(ask, local(source, destination, **{"dest-uri": ["amqp://127.0.0.1:1", remote],
                                           "src-delete-after": 51}))  # fmt: skip
    until(lambda: ask("GET", "shovels") == [], "the shovel has not done its work")
    assert ask("GET", "parameters/shovel") == []
    connection = connect(cluster, 1)
    channel = connection.channel()
    until(lambda: channel.queue_declare("to", passive=True).method.message_count == 51)
    bodies = [channel.basic_get("to", auto_ack=True)[2] for _ in range(51)]
    assert [int(body) for body in bodies] == list(range(51))
    assert len(bodies[50]) == 400_000
    until(lambda: channel.queue_declare("from", passive=True).method.message_count == 0)
    connection.close()


@pytest.mark.parametrize("ends", [("amqp091", "amqp091"), ("amqp10", "amqp10")])
def test_kills_of_the_node_that_runs_a_shovel_lose_nothing(
    cluster: LocalCluster, ask: Ask, ends: tuple[str, str]
) -> None:
    """Every message arrives at least once, with on-confirm, whoever dies meanwhile."""
    count = 3000
    for queue in ("from", "to"):
        declare(cluster, 1, queue)
    fill(cluster, 1, "from", count, SIZE)
    put(ask, local(*ends, **{"src-prefetch-count": 50}))
    for kill in range(2):
        until(lambda: row(ask).get("forwarded", 0) > 100 or cluster.messages_in("from") == 0)
        victim = leader(cluster, ask)
        cluster.kill(victim)
        until(lambda: row(ask).get("node") and leader(cluster, ask) != victim,  # noqa: B023
              f"nobody took over after kill {kill + 1}")  # fmt: skip
        start_nodes(cluster, victim)
    found: Counter[int] = Counter()
    until(lambda: cluster.messages_in("from") == 0, "the source is not empty")
    found.update(drain(cluster, 1, "to", count, SIZE))
    assert set(found) == set(range(count))
    assert row(ask)["state"] == "running"


def test_a_shovel_of_a_queue_s_length_ends_and_leaves_later_messages(
    cluster: LocalCluster, ask: Ask
) -> None:
    declare(cluster, 1, "from")
    fill(cluster, 1, "from", 500, SIZE)
    put(ask, local(**{"src-delete-after": "queue-length", "ack-mode": "no-ack",
                      "dest-queue-args": {"x-queue-type": "quorum"}}))  # fmt: skip
    until(lambda: ask("GET", "shovels") == [], "the shovel has not done its work")
    fill(cluster, 1, "from", 5, SIZE)
    assert sorted(drain(cluster, 1, "to", 500, SIZE)) == list(range(500))
    assert sorted(drain(cluster, 1, "from", 5, SIZE)) == list(range(5))
    # A queue without messages is done at once.
    put(ask, local(**{"src-delete-after": "queue-length"}))
    until(lambda: ask("GET", "shovels") == [])


@pytest.mark.provokes("shovel.failed")
def test_a_shovel_says_why_it_does_not_run_and_tries_again(cluster: LocalCluster, ask: Ask) -> None:
    declare(cluster, 1, "from")
    fill(cluster, 1, "from", 3, SIZE)
    put(ask, local(**{"dest-predeclared": True}))
    until(lambda: row(ask)["state"] == "terminated" or "reason" in row(ask))
    assert "NOT_FOUND - no queue 'to' in vhost '/'" in row(ask)["reason"]
    declare(cluster, 2, "to")
    assert sorted(drain(cluster, 2, "to", 3, SIZE)) == [0, 1, 2]
    until(lambda: row(ask)["state"] == "running")
    assert "reason" not in row(ask)
    # A destination that goes away takes nothing with it.
    connection = connect(cluster, 1)
    with contextlib.closing(connection):
        connection.channel().queue_delete("to")
        fill(cluster, 1, "from", 3, SIZE, first=3)
        until(lambda: "queue 'to' is gone" in str(row(ask).get("reason"))
              or "NOT_FOUND" in str(row(ask).get("reason")))  # fmt: skip
        declare(cluster, 2, "to")
        assert sorted(drain(cluster, 2, "to", 3, SIZE)) == [3, 4, 5]
    wrong = f"amqp://guest:wrong@127.0.0.1:{cluster.nodes[0].amqp_port}"
    put(ask, local(**{"src-uri": wrong}))
    until(lambda: "ACCESS_REFUSED" in str(row(ask).get("reason")))
    assert "wrong" not in str(row(ask))
    put(ask, local("amqp10", **{"src-uri": wrong}))
    until(lambda: "refuses the log-in" in str(row(ask).get("reason")))
    # Not a broker at all.
    put(ask, local(**{"src-uri": f"amqp://127.0.0.1:{cluster.nodes[0].http_port}"}))
    until(lambda: "connection lost" in str(row(ask).get("reason"))
          or "does not speak" in str(row(ask).get("reason")))  # fmt: skip


def test_what_a_destination_refuses_comes_again(cluster: LocalCluster, ask: Ask) -> None:
    declare(cluster, 1, "from")
    declare(cluster, 1, "to", {"x-max-length": 5, "x-overflow": "reject-publish"})
    fill(cluster, 1, "from", 20, SIZE)
    put(ask, local())
    found: set[int] = set()
    while len(found) < 20:
        found.update(drain(cluster, 1, "to", 1, SIZE))
    assert found == set(range(20))


def test_an_exchange_is_a_source(cluster: LocalCluster, ask: Ask) -> None:
    declare(cluster, 1, "to")
    value = local(**{"src-exchange": "amq.topic", "src-exchange-key": "a.*"})
    del value["src-queue"]
    put(ask, value)
    until(lambda: row(ask)["state"] == "running")
    connection = connect(cluster, 2)
    channel = connection.channel()
    for key in ("a.1", "b.1", "a.2"):
        channel.basic_publish("amq.topic", key, key.encode())
    until(lambda: channel.queue_declare("to", passive=True).method.message_count == 2)
    connection.close()


def test_restart_delete_and_deletion_of_the_virtual_host(cluster: LocalCluster, ask: Ask) -> None:
    ask("PUT", "vhosts/v")
    value = local(**{"src-uri": "amqp:///v", "dest-uri": "amqp:///v"})
    ask("PUT", "parameters/shovel/v/s", {"value": value})
    until(lambda: row(ask)["state"] == "running")
    until(lambda: [each["user_provided_name"] for each in ask("GET", "connections")]
          == ["Shovel s", "Shovel s"])  # fmt: skip
    node = leader(cluster, ask)
    lines = "shovel.running"
    assert log_has(cluster, node, lines)
    before = cluster.log_file(node).read_text().count(lines)
    ask("DELETE", "shovels/vhost/v/s/restart")
    until(lambda: cluster.log_file(node).read_text().count(lines) > before, "no restart")
    assert ask("GET", "shovels/vhost/v/s")["value"] == value
    assert call(cluster, "DELETE", "shovels/vhost/v/none/restart")[0] == 404
    ask("DELETE", "vhosts/v")
    assert ask("GET", "parameters/shovel") == []
    until(lambda: ask("GET", "connections") == [], "the shovel still runs")
    ask("PUT", "vhosts/v")
    assert ask("GET", "shovels") == []
    status, answer = call(cluster, "PUT", "parameters/shovel/v/s", {
        "value": local(**{"src-uri": "amqp:///nope"})
    })  # fmt: skip
    assert (status, answer["reason"]) == (
        400, 'Validation failed\n\nuser "guest" may not connect to vhost "nope"'
    )  # fmt: skip
