"""Real nodes that join, leave, and are forgotten, while clients go on."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pika
import pytest

from convoymq.cli.api import delete
from convoymq.cli.cluster import LocalCluster
from convoymq.model.errors import BrokerError, Misuse
from tests.clusters import stop_nodes
from tests.faults.traffic import connect, until
from tests.forked_nodes import ForkedCluster
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
QUEUE = "orders"


class GrowingCluster(ForkedCluster):
    """Three nodes at first; node 4 knows the address of node 1 and nothing else."""

    def start(self) -> None:
        late = self.nodes.pop()
        super().start()
        self.nodes.append(late)
        self._write_config(late)
        config = self._config(late)
        keys = [
            f"cluster.peers = 127.0.0.1:{self.nodes[0].link_port}"
            if line.startswith("cluster.peers")
            else line
            for line in config.read_text().splitlines()
        ]
        config.write_text("\n".join(keys) + "\n")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with GrowingCluster(tmp_path, 4, BASE_PORT) as made:
        made.wait_ready()
        until(lambda: all(facts(made, number) for number in (1, 2, 3)), "the HTTP API is away")
        yield made


def publish(cluster: LocalCluster, number: int, first: int, count: int, queue: str = QUEUE) -> None:
    with closing(connect(cluster, number)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        for i in range(first, first + count):
            channel.basic_publish("", queue, b"%d" % i, pika.BasicProperties(delivery_mode=2))


def consume(cluster: LocalCluster, number: int, count: int, queue: str = QUEUE) -> list[int]:
    found: list[int] = []
    with closing(connect(cluster, number)) as connection:
        channel = connection.channel()
        for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
            assert method is not None, f"only {len(found)} messages came"
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
        channel.cancel()
    return found


def numbers(names: list[str]) -> list[int]:
    """Node ids in names like convoy-3@host, or convoy@3 when the node is not known any more."""
    return sorted(int(number) for name in names for number in re.findall(r"^\w+[-@](\d+)", name))


def members_of(cluster: LocalCluster, node: int, queue: str = QUEUE) -> list[int]:
    return numbers(cluster.api(f"queues/%2F/{queue}", node)["members"])


def nodes_known(cluster: LocalCluster, node: int) -> list[int]:
    return numbers([row["name"] for row in cluster.api("nodes", node)])


def facts(cluster: LocalCluster, node: int) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api("convoy/node", node)
    return found


def forget(cluster: LocalCluster, number: int, at: int) -> None:
    """By the command, which waits until no group has the node any more."""
    url = f"http://127.0.0.1:{cluster.nodes[at - 1].http_port}"
    command = [sys.executable, "-m", "convoymq.cli", "cluster", "forget", str(number)]
    done = subprocess.run(
        [*command, "--url", url], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def join_fourth(cluster: LocalCluster) -> None:
    cluster.start_node(4)
    cluster.wait_ready()


def test_a_node_with_a_seed_address_joins(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 20)
    join_fourth(cluster)
    until(lambda: nodes_known(cluster, 1) == [1, 2, 3, 4], "node 1 does not know its nodes")
    until(lambda: facts(cluster, 4)["groups_followed"] >= 1, "node 4 has no replica of the tree")
    assert members_of(cluster, 4) == [1, 2, 3]
    publish(cluster, 4, 0, 20, "fresh")
    assert 4 in members_of(cluster, 2, "fresh")
    assert cluster.leader_of("fresh") == 4
    # It has a vote: with two of four nodes gone there is no majority, with one there is.
    cluster.kill(3)
    publish(cluster, 4, 20, 20, "fresh")
    assert consume(cluster, 4, 20) == list(range(20))
    assert consume(cluster, 1, 40, "fresh") == list(range(40))


def test_a_joined_node_can_restart(cluster: LocalCluster) -> None:
    join_fourth(cluster)
    publish(cluster, 4, 0, 20)
    stop_nodes(cluster, 4)
    cluster.start_node(4)
    cluster.wait_ready()
    until(lambda: nodes_known(cluster, 4) == [1, 2, 3, 4], "node 4 does not know its nodes")
    assert consume(cluster, 4, 20) == list(range(20))


def test_a_running_node_is_not_forgotten(cluster: LocalCluster) -> None:
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/convoy/nodes/"
    with pytest.raises(Misuse, match="is running"):
        delete(url + "3")
    with pytest.raises(Misuse, match="cannot forget itself"):
        delete(url + "1")
    with pytest.raises(LookupError):
        delete(url + "9")
    until(lambda: nodes_known(cluster, 1) == [1, 2, 3], "node 1 does not know its nodes")


def test_another_node_takes_the_place_of_a_forgotten_one(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 50)
    join_fourth(cluster)
    with closing(connect(cluster, 4)) as connection:
        # Clients of a node that becomes a member keep their channels.
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", QUEUE, b"50", pika.BasicProperties(delivery_mode=2))
        stop_nodes(cluster, 3)
        forget(cluster, 3, 2)
        until(lambda: members_of(cluster, 1) == [1, 2, 4], "node 4 does not take over")
        until(
            lambda: sum(facts(cluster, n)["replicas_behind"] for n in (1, 2, 4)) == 0,
            "the new replica gets no vote",
        )
        channel.basic_publish("", QUEUE, b"51", pika.BasicProperties(delivery_mode=2))
    until(lambda: nodes_known(cluster, 4) == [1, 2, 4], "node 4 does not know its nodes")
    # The new member counts: with it and one of the old ones nothing is lost and all goes on.
    cluster.kill(1)
    assert consume(cluster, 4, 52) == list(range(52))


def test_a_forgotten_node_is_refused_with_its_old_data(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 20)
    stop_nodes(cluster, 3)
    forget(cluster, 3, 1)
    assert members_of(cluster, 1) == [1, 2]
    leader = cluster.leader_of(QUEUE)
    cluster.start_node(3)
    text = "node 3 was removed from the cluster"
    until(lambda: text in cluster.log_file(3).read_text(), "node 3 does not say why")
    until(lambda: text in cluster.log_file(1).read_text(), "node 1 does not say why")
    publish(cluster, 2, 20, 20)
    assert cluster.leader_of(QUEUE) == leader
    until(lambda: nodes_known(cluster, 1) == [1, 2], "node 1 does not know its nodes")
    assert consume(cluster, 1, 40) == list(range(40))


def test_a_forgotten_node_joins_anew_with_an_empty_directory(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 20)
    stop_nodes(cluster, 3)
    forget(cluster, 3, 1)
    shutil.rmtree(cluster.data / "node-3" / "data")
    cluster.start_node(3)
    cluster.wait_ready()
    until(lambda: nodes_known(cluster, 1) == [1, 2, 3], "node 1 does not know its nodes")
    assert members_of(cluster, 3) == [1, 2]
    publish(cluster, 3, 0, 5, "fresh")
    assert members_of(cluster, 1, "fresh") == [1, 2, 3]
    assert consume(cluster, 3, 20) == list(range(20))


@pytest.mark.parametrize("victim", [1, 3])
def test_a_running_node_can_be_forgotten_by_force(cluster: LocalCluster, victim: int) -> None:
    publish(cluster, 1, 0, 20)
    at = 2
    url = f"http://127.0.0.1:{cluster.nodes[at - 1].http_port}/api/convoy/nodes/{victim}"
    delete(url + "?force=true", PATIENCE_S)
    others = [number for number in (1, 2, 3) if number != victim]
    for number in others:
        until(lambda n=number: nodes_known(cluster, n) == others, "the node is still known")
        until(lambda n=number: members_of(cluster, n) == others, "the queue still has the node")
    text = "was removed from the cluster"
    until(lambda: text in cluster.log_file(victim).read_text(), "the node is not told")
    publish(cluster, at, 20, 20)
    assert consume(cluster, at, 40) == list(range(40))


def test_what_consumers_on_a_forgotten_node_held_goes_to_others(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 5)
    held = connect(cluster, 3)
    channel = held.channel()
    channel.basic_qos(prefetch_count=5)
    for _, _, body in channel.consume(QUEUE, inactivity_timeout=PATIENCE_S):
        if body == b"4":
            break
    # Silent, not gone: without the command its messages would stay with it for a minute.
    cluster.kill(3, signal.SIGSTOP)
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/convoy/nodes/3"
    delete(url + "?force=true", PATIENCE_S)
    with closing(connect(cluster, 1)) as connection:
        other = connection.channel()
        found = []
        for method, _, body in other.consume(QUEUE, inactivity_timeout=PATIENCE_S):
            assert method is not None, f"only {found} came back"
            assert method.redelivered
            found.append(int(body))
            other.basic_ack(method.delivery_tag)
            if len(found) == 5:
                break
        other.cancel()
    assert found == list(range(5))
    logs = "".join(cluster.log_file(number).read_text() for number in (1, 2))
    assert "queue.session_ended" in logs
    cluster.kill(3)
    # Deliveries end a call too; the lost connection ends the last one.
    with suppress(pika.exceptions.AMQPConnectionError):
        while held.is_open:
            held.process_data_events(PATIENCE_S)


def test_queues_let_go_of_a_node_before_it_is_forgotten(cluster: LocalCluster) -> None:
    """Whoever forgets it dies in the middle, and the command is given again elsewhere."""
    queues = [f"q{number}" for number in range(30)]
    with closing(connect(cluster, 1)) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    publish(cluster, 1, 0, 20)
    queues.append(QUEUE)
    join_fourth(cluster)
    stop_nodes(cluster, 3)
    early: list[str] = []
    watching = True

    def watch() -> None:
        # First the nodes, then the queues: what is seen later may only be newer.
        while watching:
            with suppress(BrokerError, LookupError):
                gone = 3 not in nodes_known(cluster, 1)
                rows = cluster.api("queues", 1)
                early.extend(r["name"] for r in rows if gone and 3 in numbers(r["members"]))

    def ask(at: int) -> None:
        url = f"http://127.0.0.1:{cluster.nodes[at - 1].http_port}/api/convoy/nodes/3"
        with suppress(BrokerError):
            delete(url, 60)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        asked = threading.Thread(target=ask, args=(2,))
        asked.start()
        until(lambda: any(3 not in members_of(cluster, 1, q) for q in queues), "no queue lets go")
        cluster.kill(2)
        asked.join(60)
        cluster.start_node(2)
        cluster.wait_ready()
        if 3 in nodes_known(cluster, 1):
            forget(cluster, 3, 4)
        until(lambda: nodes_known(cluster, 1) == [1, 2, 4], "the node is still known")
    finally:
        watching = False
        watcher.join(60)
    assert not early
    for queue in queues:
        until(lambda q=queue: members_of(cluster, 1, q) == [1, 2, 4], f"the members of {queue}")  # type: ignore[misc]
    assert consume(cluster, 4, 20) == list(range(20))


def test_a_node_is_not_forgotten_while_a_queue_cannot_let_go(cluster: LocalCluster) -> None:
    with closing(connect(cluster, 3)) as connection:
        connection.channel().queue_declare(
            "pair", durable=True,
            arguments={"x-queue-type": "quorum", "x-quorum-initial-group-size": 2},
        )  # fmt: skip
    assert 3 in members_of(cluster, 1, "pair")
    assert cluster.leader_of("pair") == 3
    # Killed: in an orderly stop it would hand over, and a leader alone can remove the other member.
    cluster.kill(3)
    until(
        lambda: [row["running"] for row in cluster.api("nodes", 1)] == [True, True, False],
        "node 1 takes node 3 for running",
    )
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/convoy/nodes/3"
    with pytest.raises(Misuse, match="still a member of 1 queues, of queue 'pair'"):
        delete(url, 60)
    assert nodes_known(cluster, 1) == [1, 2, 3]
    delete(url + "?force=true", 60)
    until(lambda: nodes_known(cluster, 1) == [1, 2], "the node is still known")
