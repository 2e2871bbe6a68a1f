"""The disk space of a queue's log follows what is live in it, not what has passed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.clusters import cut_power, start_nodes
from tests.faults.conftest import StartCluster
from tests.faults.traffic import connect, declare, drain, fill, in_step, until
from tests.patience import PATIENCE_S

QUEUE = "orders-0"
"""As `convoy perf` names the first queue of the prefix `orders`."""
MESSAGES = int(os.environ.get("CONVOY_HELD_MESSAGES", "20000"))
"""Messages that pass while one is held: 5 MB, or 20 files of the write-ahead log. `make
test-disk-full` has ten million pass, with files of 64 MiB."""
FULL_SIZE = MESSAGES > 1_000_000
WAL_BYTES = 64 << 20 if FULL_SIZE else 256 << 10
SETTINGS = {"raft.wal_max_size_bytes": f"{WAL_BYTES >> 10}KiB"}
FULL_LIMIT_S = 3 * 3600
WAL_FILES = 4
"""Of a node with traffic, whatever is held: one that is written to, one that is being emptied, and
two that are prepared."""
SLACK_BYTES = 64 << 10
"""Snapshots, the metadata group, headers and tables."""
BODY = b"x" * 250
AT_ONCE = 200
DURABLE = pika.BasicProperties(delivery_mode=2)


def size_of(directory: Path) -> int:
    """Bytes of the files below a directory; some may go meanwhile."""
    found = 0
    for path in directory.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return found


def log_bytes(cluster: LocalCluster, node: int) -> int:
    """All that a node keeps on disk for its groups."""
    return size_of(cluster.data / f"node-{node}" / "data" / "log")


def kept_bytes(cluster: LocalCluster, node: int) -> int:
    """Segments and snapshots."""
    return size_of(cluster.data / f"node-{node}" / "data" / "log" / "groups")


def hold(cluster: LocalCluster, channel: Any) -> int:
    """Publishes a message and takes it; returns its bytes in the log, alone in its entry."""
    channel.basic_publish("", QUEUE, b"held", DURABLE)
    channel.tx_commit()
    method, _, body = channel.basic_get(QUEUE)
    assert method is not None
    assert body == b"held"
    return 512


def pass_through(publisher: Any, consumer: Any, count: int) -> None:
    """Publishes messages, and consumes as many, some at a time."""
    deliveries = consumer.consume(QUEUE, inactivity_timeout=PATIENCE_S)
    for _ in range(0, count, AT_ONCE):
        for _ in range(AT_ONCE):
            publisher.basic_publish("", QUEUE, BODY, DURABLE)
        publisher.tx_commit()
        for _ in range(AT_ONCE):
            method, _, body = next(deliveries)
            assert body == BODY
        consumer.basic_ack(method.delivery_tag, multiple=True)
    consumer.cancel()


def pass_by_tool(cluster: LocalCluster, count: int) -> None:
    """As `pass_through`, by the load tool: millions of messages."""
    command = [
        sys.executable, "-m", "convoymq.cli", "perf", "--uri",
        f"amqp://guest:guest@127.0.0.1:{cluster.nodes[0].amqp_port}", "--queue-prefix", "orders",
        "--size", str(len(BODY)), "--count", str(count), "--drain", "600", "--keep",
        "--no-delete-first", "--verify", "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    # What its consumer had not acknowledged when it ended came back.
    with closing(connect(cluster, 1)) as connection:
        connection.channel().queue_purge(QUEUE)


def test_one_held_message_keeps_nothing_but_itself(start_cluster: StartCluster) -> None:
    """What is kept does not depend on how many messages pass; `MESSAGES` says how many do."""
    if FULL_SIZE:
        signal.alarm(FULL_LIMIT_S)
    cluster = start_cluster(3, SETTINGS)
    declare(cluster, 1, QUEUE)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(cluster, 1))) for _ in range(3)]
        check_while_held(cluster, *(client.channel() for client in clients))
    check_after_restart(cluster)


def check_while_held(cluster: LocalCluster, holding: Any, publisher: Any, consumer: Any) -> None:
    holding.tx_select()
    publisher.tx_select()
    consumer.basic_qos(prefetch_count=2 * AT_ONCE)

    def pass_some(count: int) -> None:
        if FULL_SIZE:
            pass_by_tool(cluster, count)
        else:
            pass_through(publisher, consumer, count)

    # Nothing is held yet, and a file of the write-ahead log was full: so much a node needs anyway.
    pass_some(MESSAGES // 10)
    before = {node: log_bytes(cluster, node) for node in (1, 2, 3)}
    live = hold(cluster, holding)
    # It is held in the middle as well as in front.
    pass_some(MESSAGES // 2)
    live += hold(cluster, holding)
    growth = 2 * live + WAL_BYTES + SLACK_BYTES
    most = 2 * live + WAL_FILES * WAL_BYTES + SLACK_BYTES
    bounds = {node: min(size + growth, most) for node, size in before.items()}
    # Looked at several times: what is kept does not depend on how many passed.
    for _ in range(5):
        pass_some(MESSAGES // 10)
        for node in (1, 2, 3):
            until(
                lambda node=node: log_bytes(cluster, node) <= bounds[node],  # type: ignore[misc]
                f"node {node} keeps {log_bytes(cluster, node)} bytes for {live} that are live, "
                f"and kept {before[node]} while nothing was held",
            )
    assert cluster.messages_in(QUEUE) == 2


def check_after_restart(cluster: LocalCluster) -> None:
    """What was held is still there when all nodes were killed."""
    cut_power(cluster)
    start_nodes(cluster, 1, 2, 3)
    connection = connect(cluster, 2)
    channel = connection.channel()
    found: list[bytes] = []

    def returned() -> bool:
        method, _, body = channel.basic_get(QUEUE)
        if method is not None:
            found.append(body)
        return len(found) == 2

    until(returned, "what was held does not come back")
    assert found == [b"held", b"held"]
    connection.close()


def test_an_idle_queue_that_was_purged_gives_its_disk_space_back(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(3, SETTINGS)
    count, size = 2_000, 1_000
    declare(cluster, 1, QUEUE)
    declare(cluster, 1, "other")
    fill(cluster, 1, QUEUE, count, size)
    fill(cluster, 1, "other", 100, size)
    in_step(cluster)
    for node in (1, 2, 3):
        until(
            lambda node=node: kept_bytes(cluster, node) > count * size / 2,  # type: ignore[misc]
            "the messages do not leave the write-ahead log",
        )
    connection = connect(cluster, 2)
    connection.channel().queue_purge(QUEUE)
    connection.close()
    # Nothing is published from here on.
    live = 100 * 2 * size
    for node in (1, 2, 3):
        until(
            lambda node=node: kept_bytes(cluster, node) <= 2 * live + SLACK_BYTES,  # type: ignore[misc]
            f"node {node} keeps {kept_bytes(cluster, node)} bytes of a queue that was purged",
        )
    assert drain(cluster, 3, "other", 100, size) == list(range(100))
