"""docs/procedures.md, carried out from the page on three nodes under load.

One cluster goes through all sections in their order. A drained node does not open its AMQP port
before it is revived, so a start waits for the HTTP API alone.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster, LocalNode
from convoymq.cli.ctl.tools import commands_of
from tests.clusters import is_open, serving_cluster, stop_nodes
from tests.faults.conftest import StartCluster
from tests.faults.traffic import Traffic, connect, declare, in_step, until
from tests.ports import cluster_ports
from tests.tool_processes import ToolProcesses

PAGE = (Path(__file__).parents[2] / "docs" / "procedures.md").read_text()
OTHER_PORT = cluster_ports(__name__)
SERVICE = re.compile(r"systemctl (start|stop) convoy\s+# on 10\.0\.0\.(\d)")
WITHOUT_NAMES = ("backup", "restore", "cluster")
"""Commands of `convoy` that are no tools of RabbitMQ's kind."""
STORE = "/var/backups/convoy"
KEPT = [b"%d" % number for number in range(100)]


def commands(title: str) -> list[str]:
    """Returns the commands of a section."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    blocks = re.findall(r"```sh\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


class Operator:
    """Carries out the commands of the page, with the addresses of this machine."""

    def __init__(self, cluster: LocalCluster, other: LocalCluster, store: Path) -> None:
        self.cluster = cluster
        self._tools = ToolProcesses(store, {})
        self._addresses = {STORE: str(store / "copies")}
        self._know(other.nodes[0], "10.1.0")
        for node in cluster.nodes:
            self._know(node)
        self.done: list[str] = []

    def _know(self, node: LocalNode, network: str = "10.0.0") -> None:
        self._addresses[f"{network}.{node.number}:15672"] = f"127.0.0.1:{node.http_port}"

    def follow(self, title: str) -> list[str]:
        """Carries out a section; returns what its commands print."""
        with self._tools:
            return [self._run(line) for line in commands(title)]

    def _run(self, line: str) -> str:
        self.done.append(line)
        if service := SERVICE.fullmatch(line):
            number = int(service[2])
            self._start(number) if service[1] == "start" else stop_nodes(self.cluster, number)
            return ""
        for address, here in self._addresses.items():
            line = line.replace(address, here)
        program, *words = shlex.split(line)
        assert program == "convoy", line
        ended = self._tools.run(*words)
        assert ended.code == 0, f"{line}\n{ended.out}{ended.err}"
        return ended.out

    def _start(self, number: int) -> None:
        cluster = self.cluster
        if number > len(cluster.nodes):
            self._add_node(number)
        cluster.start_node(number)
        port = cluster.nodes[number - 1].http_port
        until(lambda: is_open(port) and cluster.api("overview", number), "a node does not start")

    def _add_node(self, number: int) -> None:
        """Writes the configuration of a new node, as docs/operations.md says."""
        cluster, first = self.cluster, self.cluster.nodes[0]
        made = LocalNode(number, *(port + number - 1 for port in first.ports().values()))
        cluster.nodes.append(made)
        cluster._write_config(made)
        config = cluster._config(made)
        peers = f"cluster.peers = 127.0.0.1:{first.link_port}"
        config.write_text(re.sub(r"cluster\.peers = .*", peers, config.read_text()))
        self._know(made)


def test_commands_of_the_page_exist() -> None:
    for line in re.findall(r"^convoy .*$", PAGE, re.MULTILINE):
        _, tool, name, *_ = shlex.split(line)
        assert tool in WITHOUT_NAMES or name in commands_of(tool), line


@pytest.mark.skipif(
    "CONVOY_TEST_PROCEDURES" not in os.environ, reason="`make test-procedures` carries out the page"
)
def test_procedures_are_carried_out_under_load(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster()
    for number, queue in enumerate(("q", "kept"), start=1):
        declare(cluster, number, queue)
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for body in KEPT:
        channel.basic_publish("", "kept", body)
    connection.close()
    with (
        serving_cluster(tmp_path / "other", OTHER_PORT, nodes=1) as other,
        Traffic(cluster, "q", publish_at=(1, 2, 3), consume_at=((1, 2), (2, 3))) as traffic,
    ):
        operator = Operator(cluster, other, tmp_path)
        traffic.goes_on()
        operator.follow("Restart one node after the other")
        traffic.goes_on()
        operator.follow("Add a node and spread leaders")
        assert len(cluster.api("queues/%2F/q")["members"]) == 4
        traffic.goes_on()
        in_step(cluster)
        operator.follow("Replace a node")
        assert len(cluster.api("nodes")) == 3
        traffic.goes_on()
        said = operator.follow("Back up, lose everything, restore")
        assert any("is whole" in text for text in said), said
        traffic.finish()
        connection = connect(other, 1)
        channel = connection.channel()
        found = [channel.basic_get("kept", auto_ack=True)[2] for _ in KEPT]
        connection.close()
    assert found == KEPT
    assert operator.done == [
        line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]  # fmt: skip
