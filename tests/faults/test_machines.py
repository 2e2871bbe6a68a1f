"""Machines of several processes: real nodes that are killed one by one, with their machine, and
with their supervisor, while clients publish."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster, children
from convoymq.model.errors import Unavailable
from convoymq.model.machines import node_number
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
SECOND_PORT = cluster_ports(__name__)
MACHINES = 3
PROCESSES = 2
QUEUES = [f"machines-{number}" for number in range(4)]
NODES = {node_number(m + 1, k + 1) for m in range(MACHINES) for k in range(PROCESSES)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    place = tmp_path_factory.mktemp("machines")
    settings = {"cluster.metadata_voter_away_max": "1000"}
    with LocalCluster(place, MACHINES, BASE_PORT, settings, PROCESSES) as made:
        made.wait_ready()
        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def connect(port: int) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0))


def running(cluster: LocalCluster) -> set[int]:
    with contextlib.suppress(Unavailable, LookupError):
        return {row["id"] for row in cluster.api("nodes") if row["running"]}
    return set()


class Publisher(threading.Thread):
    """Publishes with confirms to all queues, through any machine, until it is stopped."""

    def __init__(self, ports: list[int]) -> None:
        super().__init__(daemon=True)
        self.confirmed: list[str] = []
        self._ports = ports
        self._number = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            self._ports.append(self._ports.pop(0))
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                self._publish(self._ports[0])

    def _publish(self, port: int) -> None:
        connection = connect(port)
        with contextlib.closing(connection):
            channel = connection.channel()
            channel.confirm_delivery()
            while not self._stopped.is_set():
                self._number += 1
                queue = QUEUES[self._number % len(QUEUES)]
                channel.basic_publish("", queue, str(self._number).encode())
                self.confirmed.append(str(self._number))

    def more(self) -> None:
        """Waits for further confirms."""
        seen = len(self.confirmed)
        until(lambda: len(self.confirmed) > seen + 20)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@pytest.fixture
def publisher(cluster: LocalCluster, tmp_path: Path) -> Iterator[Publisher]:
    with publishing(cluster) as made:
        yield made
    for node in cluster.nodes:
        shutil.copy(cluster.log_file(node.number), tmp_path / f"node-{node.number}.log")


@contextlib.contextmanager
def publishing(cluster: LocalCluster) -> Iterator[Publisher]:
    """A publisher; in the end all that was confirmed is in the queues."""
    with contextlib.closing(connect(cluster.base_port)) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    made = Publisher([node.amqp_port for node in cluster.nodes])
    made.start()
    made.more()
    yield made
    made.more()
    made.stop()
    found = Counter[str]()
    with contextlib.closing(connect(cluster.base_port)) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                found[got[2].decode()] += 1
    missing = set(made.confirmed) - found.keys()
    assert not missing


def test_clients_and_replicas_are_spread_over_processes_and_machines(
    cluster: LocalCluster,
) -> None:
    until(lambda: running(cluster) == NODES)
    rows = {row["id"]: row for row in cluster.api("nodes")}
    assert {(row["machine"], row["process"]) for row in rows.values()} == {
        (machine, process)
        for machine in range(1, MACHINES + 1)
        for process in range(1, PROCESSES + 1)
    }
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(contextlib.closing(connect(BASE_PORT)))

        def spread() -> bool:
            nodes = Counter(row["node"] for row in cluster.api("connections"))
            return sorted(nodes.values()) == [3, 3]

        until(spread)


def voters(cluster: LocalCluster) -> dict[int, int]:
    """Machine -> its process that votes on the metadata; {} while two of one machine do."""
    with contextlib.suppress(Unavailable, LookupError):
        found = [number_of(node) for node in cluster.api("convoy/node")["metadata_voters"]]
        return dict(found) if len(dict(found)) == len(found) else {}
    return {}


def number_of(node: int) -> tuple[int, int]:
    """Returns machine and process of a node."""
    return next(
        (m, k)
        for m in range(1, MACHINES + 1)
        for k in range(1, PROCESSES + 2)
        if node_number(m, k) == node
    )


def test_a_sibling_votes_for_a_process_that_is_away(
    cluster: LocalCluster, publisher: Publisher
) -> None:
    """One process of each machine votes; when it hangs for the time, another one of the machine
    does, and it stays without a vote when it returns."""
    until(lambda: voters(cluster).keys() == {1, 2, 3})
    former = voters(cluster)[3]
    pid = cluster.nodes[2].pids()[former - 1]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: voters(cluster).get(3) == PROCESSES + 1 - former)
    publisher.more()
    os.kill(pid, signal.SIGCONT)
    until(lambda: running(cluster) == NODES)
    assert voters(cluster)[3] != former


@pytest.mark.provokes("machine.ready", "machine.process_ended")
def test_a_killed_process_comes_back_while_its_siblings_serve(
    cluster: LocalCluster, publisher: Publisher
) -> None:
    supervisor = cluster.nodes[0].pid
    assert supervisor is not None
    before = children(supervisor)
    os.kill(before[1], signal.SIGKILL)
    publisher.more()
    until(lambda: len(children(supervisor)) == PROCESSES and before[1] not in children(supervisor))
    until(lambda: running(cluster) == NODES)
    assert before[0] in children(supervisor)


def answering(cluster: LocalCluster) -> int:
    """Returns which process answers on the HTTP port of machine 1; its port never refuses."""
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/api/convoy/node"
    while True:
        # The process that has accepted the connection may be killed before it answers.
        with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
            answer = httpx.get(url, auth=("guest", "guest"), timeout=PATIENCE_S)
            return number_of(int(answer.raise_for_status().json()["id"]))[1]


def scraped(cluster: LocalCluster, path: str = "metrics") -> set[str]:
    """Returns the processes of machine 1 whose queues and links its metrics have."""
    port = cluster.nodes[0].metrics_port
    text = httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE_S).text
    named = re.findall(r'^convoy_link_sent_bytes_total\{process="(\d)"', text, re.MULTILINE)
    (identity,) = re.findall(r"^rabbitmq_identity_info\{.*\}", text, re.MULTILINE)
    assert 'rabbitmq_node="convoy-1@' in identity
    assert "process=" not in identity
    return set(named)


def test_another_process_answers_when_the_one_that_did_dies(cluster: LocalCluster) -> None:
    """A client that asks all the time is refused at no time, and the metrics have all processes
    whichever answers. A process that comes back serves when the next one dies."""
    until(lambda: running(cluster) == NODES)
    for path in ("metrics", "metrics/per-object"):
        until(lambda path=path: scraped(cluster, path) == {"1", "2"})  # type: ignore[misc]
    for _ in range(2):
        first = answering(cluster)
        rows = {(row["machine"], row["process"]): row for row in cluster.api("nodes")}
        os.kill(int(rows[1, first]["os_pid"]), signal.SIGKILL)
        until(lambda: answering(cluster) != first)  # noqa: B023
        until(lambda: scraped(cluster) == {"1", "2"})
        until(lambda: running(cluster) == NODES)
        assert answering(cluster) != first


def test_a_killed_machine_takes_no_majority_with_it(
    cluster: LocalCluster, publisher: Publisher
) -> None:
    pids = [cluster._processes[2].pid, *cluster.nodes[1].pids()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster._processes[2].wait()
    cluster.poll()
    publisher.more()
    with contextlib.closing(connect(BASE_PORT)) as connection:
        # The metadata have a majority as well.
        connection.channel().queue_declare("machines-later", durable=True)
    cluster.start_node(2)
    cluster.wait_ready()
    until(lambda: running(cluster) == NODES)


@pytest.mark.provokes("node.supervisor_gone")
def test_the_processes_of_a_killed_supervisor_end_in_order(
    cluster: LocalCluster, publisher: Publisher
) -> None:
    pids = cluster.nodes[2].pids()
    assert len(pids) == PROCESSES
    cluster.kill(3)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert cluster._logged(3).count(b'"node.stopped"') == PROCESSES
    publisher.more()
    cluster.start_node(3)
    cluster.wait_ready()
    until(lambda: running(cluster) == NODES)


def convoy(url: str, *words: str) -> None:
    """Runs the command line against the machine of an HTTP port."""
    command = [sys.executable, "-m", "convoymq.cli", *words, "--url", url]
    subprocess.run(command, check=True)


def is_refused(port: int) -> bool:
    with contextlib.suppress(OSError, pika.exceptions.AMQPError):
        connect(port).close()
        return False
    return True


def test_a_machine_is_drained_revived_forgotten_and_comes_back_empty(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each command acts on all processes of a machine, under load through the others."""
    made = LocalCluster(tmp_path_factory.mktemp("ops"), MACHINES, SECOND_PORT, {}, PROCESSES)
    with made as cluster:
        cluster.wait_ready()
        until(lambda: running(cluster) == NODES)
        first, third = cluster.nodes[0], cluster.nodes[2]
        url = f"http://127.0.0.1:{first.http_port}"
        with publishing(cluster) as publisher:
            convoy(url, "upgrade", "drain", "3", "--machine")
            until(lambda: is_refused(third.amqp_port))
            publisher.more()
            rows = {row["id"]: row for row in cluster.api("convoy/machines")}
            assert [row["nodes"] for row in rows.values()] == [[1, 33], [2, 34], [3, 35]]
            assert [row["being_drained"] for row in rows.values()] == [False, False, True]
            convoy(url, "upgrade", "revive", "3", "--machine")
            until(lambda: not is_refused(third.amqp_port))
            publisher.more()

            cluster.kill(3, signal.SIGTERM)
            cluster._processes[3].wait()
            cluster.poll()
            convoy(url, "cluster", "forget", "3", "--machine")
            publisher.more()
            assert {row["id"] for row in cluster.api("nodes")} == {1, 33, 2, 34}
            # Two machines are no three zones: three of their nodes vote.
            until(lambda: len(cluster.api("convoy/node")["metadata_voters"]) == 3)
            shutil.rmtree(cluster.data / "node-3" / "data")
            cluster._write_config(third)
            cluster.start_node(3)
            cluster.wait_ready()
            until(lambda: running(cluster) == NODES)
            until(lambda: voters(cluster).keys() == {1, 2, 3})


def restart(cluster: LocalCluster, number: int, processes: int) -> None:
    """Restarts a node with another number of processes."""
    node = cluster.nodes[number - 1]
    cluster.kill(number, signal.SIGTERM)
    cluster._processes[number].wait()
    cluster.poll()
    node.processes = processes
    cluster._write_config(node)
    cluster.start_node(number)
    cluster.wait_ready()


SEVERAL = {1: 3, 2: 2, 3: 2}
"""Machine -> its processes, when there are several."""


def is_spread(cluster: LocalCluster) -> bool:
    """Returns whether each machine has one replica of each of `QUEUES`, and its processes have
    equal shares of them."""
    names = {row["name"]: row["id"] for row in cluster.api("nodes")}
    rows = [row for row in cluster.api("queues") if row["name"] in QUEUES]
    placed = [[number_of(names[name]) for name in row["members"]] for row in rows]
    assert all(len({machine for machine, _ in places}) == MACHINES for places in placed)
    counts = Counter(place for places in placed for place in places)
    return all(
        counts[machine, k] in (len(QUEUES) // count, -(-len(QUEUES) // count))
        for machine, count in SEVERAL.items()
        for k in range(1, count + 1)
    )


@pytest.mark.long
def test_data_of_one_process_are_spread_over_several_and_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One machine after the other gets further processes, which take replicas over, and later loses
    them, under load."""
    made = LocalCluster(
        tmp_path_factory.mktemp("again"), MACHINES, SECOND_PORT, {}, max(SEVERAL.values())
    )
    for node in made.nodes:
        node.processes = 1
    with made as cluster:
        cluster.wait_ready()
        with publishing(cluster) as publisher:
            for number, count in SEVERAL.items():
                restart(cluster, number, count)
                publisher.more()
            nodes = {node_number(m, k + 1) for m, count in SEVERAL.items() for k in range(count)}
            until(lambda: running(cluster) == nodes)
            until(lambda: is_spread(cluster))
            publisher.more()
            with contextlib.closing(connect(SECOND_PORT)) as connection:
                channel = connection.channel()
                for number in range(6):
                    channel.queue_declare(f"later-{number}", durable=True)
            names = {row["name"]: row["id"] for row in cluster.api("nodes")}
            homes = {names[row["node"]] for row in cluster.api("queues")}
            assert homes >= {node_number(1, 1), node_number(1, 2)}
            for number, count in SEVERAL.items():
                url = f"http://127.0.0.1:{cluster.nodes[number % MACHINES].http_port}"
                for process in range(count, 1, -1):
                    leaving = str(node_number(number, process))
                    convoy(url, "upgrade", "drain", leaving)
                    convoy(url, "cluster", "forget", leaving, "--force")
                restart(cluster, number, 1)
                publisher.more()
            until(lambda: running(cluster) == {1, 2, 3})
