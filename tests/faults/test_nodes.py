"""Three real nodes: they form, survive the loss of one, take it back, with and without its data."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pika
import pika.exceptions
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.model.errors import Unavailable
from tests.clusters import start_nodes, stop_nodes
from tests.faults.traffic import connect, until
from tests.forked_nodes import ForkedCluster
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
QUEUE = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with ForkedCluster(tmp_path, 3, BASE_PORT) as made:
        made.wait_ready()
        yield made


def publish(cluster: LocalCluster, number: int, first: int, count: int) -> None:
    with closing(connect(cluster, number)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        for i in range(first, first + count):
            channel.basic_publish("", QUEUE, b"%d" % i, pika.BasicProperties(delivery_mode=2))


def consume(cluster: LocalCluster, number: int, count: int) -> list[int]:
    found: list[int] = []
    with closing(connect(cluster, number)) as connection:
        channel = connection.channel()
        for method, _, body in channel.consume(QUEUE, inactivity_timeout=PATIENCE_S):
            assert method is not None, f"only {len(found)} messages came"
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
        channel.cancel()
    return found


def test_a_message_goes_in_at_one_node_and_out_at_another(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 50)
    publish(cluster, 2, 50, 50)
    assert consume(cluster, 3, 100) == list(range(100))


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_nothing_is_lost_when_a_node_is_killed(cluster: LocalCluster, victim: int) -> None:
    publish(cluster, 1, 0, 50)
    cluster.kill(victim, signal.SIGKILL)
    other = victim % 3 + 1
    publish(cluster, other, 50, 50)
    cluster.start_node(victim)
    cluster.wait_ready()
    assert consume(cluster, victim, 100) == list(range(100))


def test_a_stopped_leader_is_replaced(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 10)
    cluster.kill(1, signal.SIGSTOP)
    publish(cluster, 2, 10, 10)
    cluster.kill(1, signal.SIGCONT)
    assert consume(cluster, 3, 20) == list(range(20))


def test_the_whole_cluster_can_be_stopped_and_started(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 20)
    stop_nodes(cluster)
    start_nodes(cluster, 3, 2, 1)
    assert consume(cluster, 2, 20) == list(range(20))


def test_a_node_without_its_data_is_taken_back(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 20)
    cluster.kill(3, signal.SIGKILL)
    shutil.rmtree(cluster.data / "node-3" / "data")
    cluster.start_node(3)
    cluster.wait_ready()
    assert consume(cluster, 3, 20) == list(range(20))


def test_sighup_goes_on_in_a_new_log_file(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    with LocalCluster(tmp_path / "c", 1, BASE_PORT, {"log.file": str(path)}) as cluster:
        cluster.wait_ready()
        moved = path.rename(tmp_path / "node.log.1")
        cluster.kill(1, signal.SIGHUP)
        until(lambda: path.exists() and "log.reopened" in path.read_text(), "nothing is reopened")
        assert "node.ready" in moved.read_text()
        # A directory cannot be opened as a file: the node says so and goes on in the old one.
        again = path.rename(tmp_path / "node.log.2")
        path.mkdir()
        cluster.kill(1, signal.SIGHUP)
        until(lambda: "log.not_reopened" in again.read_text(), "nothing is said")
        publish(cluster, 1, 0, 3)
        assert consume(cluster, 1, 3) == [0, 1, 2]
    assert "node.stopped" in again.read_text()


def test_a_node_reports_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", "3000")
        with LocalCluster(tmp_path / "c", 1, BASE_PORT) as cluster:
            cluster.wait_ready()
            heard: list[str] = []
            while heard[-1:] != ["WATCHDOG=1"] or not any("READY=1" in text for text in heard):
                heard.append(manager.recv(4096).decode())
            cluster.kill(1, signal.SIGTERM)
            while not heard[-1].startswith("STOPPING=1"):
                heard.append(manager.recv(4096).decode())


def test_what_a_node_writes_is_not_for_everybody(cluster: LocalCluster) -> None:
    publish(cluster, 1, 0, 3)
    for node in cluster.nodes:
        data = cluster.data / f"node-{node.number}" / "data"
        assert data.stat().st_mode & 0o077 == 0
        assert [path for path in data.rglob("*") if path.stat().st_mode & 0o007] == []


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o644)
    settings = {"cluster.secret_file": str(secret)}
    with (
        LocalCluster(tmp_path / "c", 1, BASE_PORT, settings) as cluster,
        pytest.raises(Unavailable, match=r"others may read .* \(mode 0644\)"),
    ):
        cluster.wait_ready()
