"""RocketMQ's own broker and tools with this name server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.processes import Server
from tests.rocketmq.upstream import broker, mqadmin, needs_rocketmq


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.process.poll() is None:
        made.stop()


@pytest.mark.provokes("role.ready", "role.stopped", "role.settings_passed_over")
def test_the_process_serves_until_it_is_told_to_stop(server: Server) -> None:
    (found,) = server.wait_for("role.settings_passed_over")
    assert found["keys"] == ["serverWorkerThreads"]
    server.stop()
    server.wait_for("role.stopped")


@pytest.mark.provokes("role.failed")
def test_a_port_that_is_taken_is_said(server: Server, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "convoymq.cli", "namesrv", "--set", f"listenPort={server.port}",
         "--set", "bindAddress=127.0.0.1", "--set", f"kvConfigPath={tmp_path / 'other.json'}"],
        capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False,
    )  # fmt: skip
    (tmp_path / "second.log").write_text(done.stderr)
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("listenPort=x", "listenPort = x: not a whole number"),
        ("listenPort=65536", "must lie between 0 and 65535"),
        ("listenPrt=1", "unknown key listenPrt; did you mean listenPort?"),
        ("listenPort", "not a line of the form key = value"),
    ],
)
def test_a_wrong_setting_is_one_line(flag: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "convoymq.cli", "namesrv", "--set", flag],
        capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("convoy namesrv: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@needs_rocketmq
@pytest.mark.optional
def test_rocketmqs_brokers_register_and_a_slave_acts(server: Server, tmp_path: Path) -> None:
    """Real brokers: a master and its slave. The master is killed: routes name the slave at once.
    A broker has a second port, two below the one that it is told."""
    ports = [single_port() for _ in range(6)]
    common = {"brokerName": "n", "namesrvAddr": server.address, "enableSlaveActingMaster": "true"}
    slave = tmp_path / "slave"
    with (
        broker(tmp_path / "master", brokerId=0, listenPort=ports[2], haListenPort=ports[1],
               brokerRole="ASYNC_MASTER", **common) as master,
        broker(slave, brokerId=1, listenPort=ports[5], haListenPort=ports[4],
               brokerRole="SLAVE", **common),
    ):  # fmt: skip
        admin = tmp_path / "admin"
        for _ in range(60):
            listed = mqadmin(admin, "clusterList", "-n", server.address)
            rows = [line.split() for line in listed.splitlines() if " n " in line]
            if len(rows) == 2:
                break
            time.sleep(1)
        assert [row[:3] for row in rows] == [["c", "n", "0"], ["c", "n", "1"]]
        mqadmin(admin, "updateTopic", "-n", server.address, "-c", "c", "-t", "orders")
        assert '"perm":6' in mqadmin(admin, "topicRoute", "-n", server.address, "-t", "orders")
        master.kill()
        server.wait_for("namesrv.min_id_changed")
        route = mqadmin(admin, "topicRoute", "-n", server.address, "-t", "orders")
        assert '"perm":4' in route
        assert '{0:"127.0.0.1:' in route
        mqadmin(admin, "updateKvConfig", "-n", server.address, "-s", "ns", "-k", "k", "-v", "v")
        mqadmin(admin, "deleteKvConfig", "-n", server.address, "-s", "ns", "-k", "k")
        assert "supportActingMaster" in mqadmin(admin, "getNamesrvConfig", "-n", server.address)
