"""Tries an installed package: three nodes, a quorum queue, a confirmed message, as a user would.

Run it outside the sources. Exit code 0: a message went in through one node and out through another.
With the path of another environment's Python, that one runs try_client.py against the same nodes:
convoymq-client alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pika

import convoymq
from convoymq.cli.cluster import LocalCluster
from convoymq.kernels import batch

BASE_PORT = 12500
"""Links listen 20,000 above: below the ports that systems choose for outgoing connections."""


def publish_and_consume(cluster: LocalCluster, client_python: str) -> None:
    """In through one node, out through another; then the other environment's turn."""
    one, three = (pika.BlockingConnection(pika.URLParameters(cluster.nodes[k].uri)) for k in (0, 2))
    channel = one.channel()
    channel.queue_declare("orders", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "orders", b"hello")
    reader = three.channel()
    found = next(reader.consume("orders", inactivity_timeout=30))
    assert found[2] == b"hello", found
    reader.basic_ack(found[0].delivery_tag)
    if client_python:
        channel.queue_declare("log", durable=True, arguments={"x-queue-type": "stream"})
        servers = [f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes]
        subprocess.run([client_python, "try_client.py", *servers], check=True)
    one.close()
    three.close()


def main(client_python: str = "") -> int:
    """Publishes and consumes; returns the exit code."""
    for module in (convoymq, batch):
        assert "site-packages" in str(module.__file__), f"{module.__file__} is not installed"
    assert not str(batch.__file__).endswith(".py"), "the kernels are not compiled"
    with (
        tempfile.TemporaryDirectory() as data,
        LocalCluster(Path(data), 3, BASE_PORT) as cluster,
    ):
        cluster.wait_ready()
        try:
            publish_and_consume(cluster, client_python)
        except BaseException:
            for node in cluster.nodes:
                print(f"node {node.number}: {cluster.last_words(node.number)}", file=sys.stderr)
            raise
    print(f"convoymq {convoymq.__version__} works: Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
