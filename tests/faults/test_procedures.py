"""docs/procedures.md, carried out on three nodes under load."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster, LocalNode
from tests.clusters import serving_cluster
from tests.faults.conftest import StartCluster
from tests.faults.traffic import Traffic, connect, declare, in_step, until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

PAGE = Path(__file__).parents[2] / "docs" / "procedures.md"
OTHER_PORT = cluster_ports(__name__)
SERVICE = re.compile(r"systemctl (start|stop) convoy\s+# on 10\.0\.0\.(\d)")


def blocks(title: str) -> list[str]:
    """Returns the commands of a section."""
    (section,) = re.findall(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S
    )
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", section, re.S)
        for line in block.splitlines()
    ]


class Operator:
    """Carries out the commands of the page."""

    def __init__(self, cluster: LocalCluster, store: Path) -> None:
        self.cluster = cluster
        self.other: LocalCluster | None = None
        self._store = store

    def follow(self, title: str) -> list[str]:
        """Carries out a section; returns what its commands print."""
        lines = blocks(title)
        assert lines, title
        return [self._run(line) for line in lines]

    def _run(self, line: str) -> str:
        service = SERVICE.fullmatch(line)
        if service:
            number = int(service[2])
            self._start(number) if service[1] == "start" else self._stop(number)
            return ""
        words = line.split()
        assert words[0] == "convoy", line
        for node in self.cluster.nodes:
            words = [
                w.replace(f"10.0.0.{node.number}:15672", f"127.0.0.1:{node.http_port}")
                for w in words
            ]
        if self.other is not None:
            port = self.other.nodes[0].http_port
            words = [word.replace("10.1.0.1:15672", f"127.0.0.1:{port}") for word in words]
        words = [word.replace("/var/backups/convoy", str(self._store)) for word in words]
        assert "15672" not in " ".join(words), line
        done = subprocess.run(
            [sys.executable, "-m", "convoymq.cli", *words[1:]],
            capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, number: int) -> None:
        cluster = self.cluster
        if number > len(cluster.nodes):
            first = cluster.nodes[0]
            ports = [each + number - 1 for each in first.ports().values()]
            cluster.nodes.append(LocalNode(number, *ports))
            cluster._write_config(cluster.nodes[-1])
            config = cluster._config(cluster.nodes[-1])
            peers = f"cluster.peers = 127.0.0.1:{first.link_port}"
            text = re.sub(r"cluster\.peers = .*", peers, config.read_text())
            config.write_text(text)
        cluster.start_node(number)
        cluster.wait_ready()
        until(lambda: cluster.api("overview", number) is not None, "no answer")

    def _stop(self, number: int) -> None:
        self.cluster.kill(number, signal.SIGTERM)
        until(
            lambda: number in self.cluster.poll() or not self.cluster._running(number), "it stays"
        )


@pytest.fixture
def operator(start_cluster: StartCluster, tmp_path: Path) -> Operator:
    return Operator(start_cluster(), tmp_path / "backups")


def test_nodes_are_restarted_added_and_replaced_under_load(operator: Operator) -> None:
    cluster = operator.cluster
    declare(cluster, 1, "q")
    declare(cluster, 2, "other")
    with Traffic(cluster, "q", publish_at=(1, 2, 3), consume_at=((1, 2), (2, 3))) as traffic:
        traffic.goes_on()
        operator.follow("Restart one node after the other")
        traffic.goes_on()
        operator.follow("Add a node and spread leaders")
        members = cluster.api("queues/%2F/q")["members"]
        assert len(members) == 4, members
        traffic.goes_on()
        in_step(cluster)
        operator.follow("Replace a node")
        assert len(cluster.api("nodes")) == 3
        traffic.goes_on()
        traffic.finish()


def test_everything_is_lost_and_restored(operator: Operator, tmp_path: Path) -> None:
    cluster = operator.cluster
    declare(cluster, 1, "q")
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(100):
        channel.basic_publish("", "q", b"%d" % number)
    connection.close()
    declare(cluster, 2, "busy")
    with (
        serving_cluster(tmp_path / "other", OTHER_PORT, {}, nodes=1) as other,
        Traffic(cluster, "busy", publish_at=(1, 2, 3), consume_at=((1, 2, 3),)) as traffic,
    ):
        operator.other = other
        traffic.goes_on()
        said = operator.follow("Back up, lose everything, restore")
        traffic.goes_on()
        assert "is whole" in said[1]
        connection = connect(other, 1)
        found = [connection.channel().basic_get("q", auto_ack=True)[2] for _ in range(100)]
        connection.close()
        assert found == [b"%d" % number for number in range(100)]
