"""Who is let into a cluster of real nodes, and who is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.traffic import Traffic, declare, log_has

DEADLINE_S = 30.0
QUEUE = "orders"


def config_of_a_second(cluster: LocalCluster, number: int) -> Path:
    """Writes the configuration of another node with that number, its own directory and ports."""
    text = (cluster.data / f"node-{number}" / "convoy.conf").read_text()
    home = cluster.data / "second"
    home.mkdir()
    node = cluster.nodes[number - 1]
    for port in (node.amqp_port, node.http_port, node.metrics_port):
        text = text.replace(f"= 127.0.0.1:{port}\n", f"= 127.0.0.1:{port + 50}\n")
    text = text.replace(
        f"cluster.listen = 127.0.0.1:{node.link_port}",
        f"cluster.listen = 127.0.0.1:{node.link_port + 50}",
    )
    text = text.replace(str(cluster.data / f"node-{number}" / "data"), str(home / "data"))
    (home / "convoy.conf").write_text(text)
    return home / "convoy.conf"


@pytest.mark.parametrize("number", [1, 3])
def test_the_second_node_with_a_number_ends_and_the_first_serves_on(
    cluster: LocalCluster, number: int
) -> None:
    declare(cluster, 1, QUEUE)
    config = config_of_a_second(cluster, number)
    address = f"127.0.0.1:{cluster.nodes[number - 1].link_port}"
    with Traffic(cluster, QUEUE, publish_at=(number,), consume_at=((number,),)) as traffic:
        traffic.goes_on()
        connections = traffic.publisher.attempt
        second = subprocess.Popen(
            [sys.executable, "-m", "convoymq.cli.serve", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said = second.communicate(timeout=DEADLINE_S)[0].decode()
        finally:
            second.kill()
            second.communicate()
        assert second.returncode == 1, said
        words = f"number {number} is in use: the node at {address} has it and is alive"
        assert words in said.splitlines()[-1]
        traffic.goes_on()
        assert traffic.publisher.attempt == connections
        traffic.finish()
    others = [node.number for node in cluster.nodes if node.number != number]
    for other in others:
        assert log_has(cluster, other, "link.refused", words)
        assert not log_has(cluster, other, "link.down", f'"peer": {number}')


def test_a_node_that_was_killed_is_let_in_at_once(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        for _ in range(2):
            traffic.goes_on()
            cluster.kill(3)
            cluster.start_node(3)
            cluster.wait_ready()
        traffic.all_consume()
        traffic.finish()
    for number in (1, 2):
        assert not log_has(cluster, number, "is in use")
