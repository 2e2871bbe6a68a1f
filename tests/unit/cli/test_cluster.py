"""The local cluster's bookkeeping, without processes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import cluster_ports

from convoymq.cli.app import Sampler
from convoymq.cli.cluster import LocalCluster, _metric, read_state
from convoymq.edges.configuration import load
from convoymq.model.errors import Misuse, Unavailable
from convoymq.model.machine_checks import machine_memory_bytes
from convoymq.node.resources import memory_limit

BASE_PORT = cluster_ports(__name__)


def test_ports_follow_the_base_port(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 3, 5672)
    assert [n.amqp_port for n in cluster.nodes] == [5672, 5673, 5674]
    assert [n.http_port for n in cluster.nodes] == [15672, 15673, 15674]
    assert [n.metrics_port for n in cluster.nodes] == [15692, 15693, 15694]
    assert [n.link_port for n in cluster.nodes] == [25672, 25673, 25674]
    high = LocalCluster(tmp_path, 64, 65_000)
    ports = {p for n in high.nodes for p in (n.amqp_port, n.http_port, n.metrics_port, n.link_port)}
    assert len(ports) == 4 * 64
    assert max(ports) < 65_536


@pytest.mark.parametrize(("nodes", "port"), [(0, 5672), (65, 5672), (3, 1023), (3, 65_001)])
def test_sizes_and_ports_out_of_bounds_are_refused(tmp_path: Path, nodes: int, port: int) -> None:
    with pytest.raises(Misuse):
        LocalCluster(tmp_path, nodes, port)


def test_written_configuration_is_accepted_by_a_node(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 3, BASE_PORT, {"raft.wal_max_size_bytes": "64MiB"})
    for node in cluster.nodes:
        cluster._write_config(node)
        made = load(cluster._config(node))
        assert made.node.id == node.number
        assert made.listeners.tcp[0].port == node.amqp_port
        assert made.raft.wal_max_size_bytes == 64 << 20
        assert [peer.node for peer in made.cluster.peers] == [1, 2, 3]
        assert made.link_address.port == node.link_port
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_each_node_has_a_tls_port_of_its_own(tmp_path: Path) -> None:
    settings = {"listeners.ssl.default": f"127.0.0.1:{BASE_PORT + 50}"}
    cluster = LocalCluster(tmp_path, 3, BASE_PORT, settings)
    for node in cluster.nodes:
        cluster._write_config(node)
        text = cluster._config(node).read_text()
        line = f"listeners.ssl.default = 127.0.0.1:{BASE_PORT + 49 + node.number}\n"
        assert text.count("listeners.ssl.default") == 1
        assert line in text
    with socket.create_server(("127.0.0.1", BASE_PORT + 52)):
        taken = rf"port {BASE_PORT + 52} \(listeners.ssl.default of node 3\) is in use"
        with pytest.raises(Misuse, match=taken):
            cluster.start()


@pytest.mark.parametrize("key", ["management.tcp.port", "listeners.tcp.default"])
def test_a_port_that_all_nodes_would_share_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(Misuse, match=f"{key} would be the same of all nodes"):
        LocalCluster(tmp_path, 3, BASE_PORT, {key: "7"})
    LocalCluster(tmp_path, 1, BASE_PORT, {key: "7"})


def test_state_file_lists_pids_and_forgets_dead_ones(tmp_path: Path) -> None:
    assert read_state(tmp_path) == []
    cluster = LocalCluster(tmp_path, 2, BASE_PORT)
    cluster.nodes[0].pid = os.getpid()
    cluster.nodes[1].pid = 2**22 + 1
    cluster._save()
    nodes = read_state(tmp_path)
    assert [node.pid for node in nodes] == [os.getpid(), None]
    assert [node.amqp_port for node in nodes] == [BASE_PORT, BASE_PORT + 1]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [{"x": 1}]}))
    assert read_state(tmp_path) == []


def test_nodes_that_wait_for_a_cluster_are_told_apart(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 3, BASE_PORT)
    wait = {"event": "cluster.waiting", "reason": "node 3 is not linked yet"}
    former = json.dumps({**wait, "reason": "of a former life"}) + "\n"
    for node in cluster.nodes[:2]:
        node.pid = os.getpid()
        cluster.log_file(node.number).parent.mkdir()
        cluster.log_file(node.number).write_text(former)
        cluster._log_begins[node.number] = len(former)
    assert cluster.waiting() == {}
    for node in cluster.nodes[:2]:
        with open(cluster.log_file(node.number), "a") as log:
            log.write(json.dumps(wait) + "\n not JSON\n")
    assert cluster.waiting() == {1: wait["reason"], 2: wait["reason"]}
    with open(cluster.log_file(1), "a") as log:
        log.write(json.dumps({"event": "cluster.forming"}) + "\n")
    cluster.nodes[1].pid = None
    assert cluster.waiting() == {}


@pytest.mark.parametrize("count", [1, 3])
def test_nodes_of_one_machine_share_its_memory(tmp_path: Path, count: int) -> None:
    """Each took 60 % of the machine for itself: three of them 180 %."""
    cluster = LocalCluster(tmp_path, count, BASE_PORT)
    for node in cluster.nodes:
        cluster._write_config(node)
    limits = [memory_limit(load(cluster._config(node))) for node in cluster.nodes]
    assert 0.59 <= sum(limits) / machine_memory_bytes() <= 0.6
    chosen = LocalCluster(tmp_path, 1, BASE_PORT, {"vm_memory_high_watermark": "0.4"})
    chosen._write_config(chosen.nodes[0])
    assert load(chosen._config(chosen.nodes[0])).alarms.memory_relative == 0.4


def test_a_directory_holds_one_running_cluster(tmp_path: Path) -> None:
    first, second = LocalCluster(tmp_path, 1, BASE_PORT), LocalCluster(tmp_path, 1, BASE_PORT)
    first._spawn = lambda node: None  # type: ignore[method-assign]
    first.start()
    with pytest.raises(Misuse, match="already runs"):
        second.start()
    with pytest.raises(Unavailable, match="no node"):
        first.api("overview")
    first.stop()


def test_nodes_that_do_not_end_are_killed_in_time(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 1, BASE_PORT)
    # It ignores SIGTERM, and says so when it does.
    program = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    stubborn = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline() == b"\n"
    cluster._processes[1] = stubborn
    cluster.nodes[0].pid = stubborn.pid
    cluster.stop(0.1)
    stubborn.stdout.close()
    assert stubborn.wait(0) == -signal.SIGKILL
    assert cluster.pids() == []


def test_rates_need_two_samples_and_survive_a_restart() -> None:
    sampler = Sampler()
    assert sampler.rate("a", 10) is None
    assert sampler.rate("a", 20) is not None
    assert sampler.rate("a", 5) is None


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a b\nconvoy_x_total{node="1"} 4.0\nconvoy_x_total{node="2"} 3\nconvoy_xy 9\n'
    assert _metric(text, "convoy_x_total") == 7


@pytest.mark.parametrize("use", ["AMQP", "HTTP", "metrics", "cluster"])
def test_a_port_in_use_is_named_whatever_for(tmp_path: Path, use: str) -> None:
    cluster = LocalCluster(tmp_path, 2, BASE_PORT)
    port = cluster.nodes[1].ports()[use]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(Misuse, match=rf"port {port} \({use} of node 2\) is in use"):
            cluster.start()
    assert cluster.pids() == []
    # Nothing stays locked.
    fcntl.flock(os.open(tmp_path / "lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_somebody_else_on_its_port_does_not_make_a_node_ready(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 1, BASE_PORT)
    node = cluster.nodes[0]
    cluster.log_file(1).parent.mkdir()
    cluster.log_file(1).write_text("")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", node.amqp_port))
        other.listen()
        assert not cluster._is_ready(node)
        cluster.log_file(1).write_text('{"event": "node.ready"}\n')
        assert cluster._is_ready(node)
    assert not cluster._is_ready(node)
