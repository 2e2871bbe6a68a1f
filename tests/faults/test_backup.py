"""`convoy backup` of three nodes under load, and `convoy restore` into one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.traffic import connect
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

TARGET_PORT = cluster_ports(__name__)
TYPES = ("quorum", "classic", "stream")
MESSAGES = 300
STREAM_MESSAGES = 20_000
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LocalCluster]:
    """A new cluster, of one node."""
    with serving_cluster(tmp_path / "target", TARGET_PORT, {}, nodes=1) as made:
        yield made


def convoy(cluster: LocalCluster | None, *words: str) -> tuple[int, Any, str]:
    """Runs a command; returns its exit code, its JSON, and what it says beside that."""
    place = ["--url", f"127.0.0.1:{cluster.nodes[-1].http_port}"] if cluster else []
    done = subprocess.run(
        [sys.executable, "-m", "convoymq.cli", *words, *place, "--format", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    try:
        content = json.loads(done.stdout)
    except ValueError:
        content = None
    return done.returncode, content, done.stdout + done.stderr


def fill(cluster: LocalCluster) -> None:
    assert call(cluster, "PUT", "policies/%2F/ha", {
        "pattern": "^mirrored$", "definition": {"ha-mode": "all", "ha-sync-mode": "automatic"},
    })[0] < 300  # fmt: skip
    made = {"partitions": 2, "logical": 16}
    assert call(cluster, "PUT", "topics/%2F/orders", made)[0] < 300
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for name in (*TYPES, "mirrored"):
        kind = "classic" if name == "mirrored" else name
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
        for number in range(MESSAGES):
            channel.basic_publish("", name, b"%d" % number, PERSISTENT)
    channel.exchange_declare("sales", "fanout", durable=True)
    channel.queue_bind("quorum", "sales")
    channel.exchange_bind("orders", "sales")
    channel.queue_declare("waiting", durable=True, arguments={"x-queue-type": "quorum"})
    due = {"x-deliver-at": int(time.time() * 1000) + 3_600_000}
    channel.basic_publish("", "waiting", b"later", pika.BasicProperties(headers=due))
    channel.queue_declare("fleeting", durable=False)
    for number in range(MESSAGES):
        channel.basic_publish("orders", f"key-{number % 7}", b"%d" % number, PERSISTENT)
    plain = connection.channel()
    for number in range(STREAM_MESSAGES):
        plain.basic_publish("", "stream", b"%d" % (MESSAGES + number), PERSISTENT)
    channel.basic_publish("", "stream", b"%d" % (MESSAGES + STREAM_MESSAGES), PERSISTENT)
    connection.close()


def take(cluster: LocalCluster, name: str, count: int) -> list[bytes]:
    """Consumes so many messages."""
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1000)
    arguments = {"x-stream-offset": "first"} if name == "stream" else {}
    found: list[bytes] = []
    if count:
        for method, _, body in channel.consume(name, arguments=arguments):
            found.append(body)
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
    connection.close()
    return found


def test_every_type_comes_back_in_order_and_unchanged_parts_are_not_copied_again(
    cluster: LocalCluster, target: LocalCluster, tmp_path: Path
) -> None:
    fill(cluster)
    assert call(cluster, "POST", "topics/%2F/orders/split", {"pid": 0})[0] < 300
    store = str(tmp_path / "backups")
    holder = connect(cluster, 2)
    held = holder.channel()
    held.basic_qos(prefetch_count=10)
    deliveries = held.consume("quorum")
    next(deliveries)
    stop = threading.Event()

    def load() -> None:
        connection = connect(cluster, 3)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("load", durable=True, arguments={"x-queue-type": "quorum"})
        number = 0
        while not stop.is_set():
            channel.basic_publish("", "load", b"%d" % number, PERSISTENT)
            number += 1
        connection.close()

    busy = threading.Thread(target=load)
    busy.start()
    try:
        code, first, said = convoy(cluster, "backup", store)
        assert code == 0, said
        code, second, said = convoy(cluster, "backup", store)
        assert code == 0, said
    finally:
        stop.set()
        busy.join()
    holder.close()
    assert [row["queue"] if "queue" in row else row["name"] for row in second["left_out"]] == [
        "fleeting"
    ]
    assert second["chunks_copied"] < second["chunks"], second
    code, content, said = convoy(None, "restore", store, "--check")
    assert code == 0, said
    manifest = json.loads(
        (tmp_path / "backups/backups" / second["id"]).read_text().partition("\n")[2]
    )
    upto = {copy["name"]: copy["messages"] for copy in manifest["queues"]}

    code, content, said = convoy(target, "restore", store)
    assert code == 0, said
    assert content["messages"] == second["messages"]
    numbers = [b"%d" % number for number in range(MESSAGES)]
    for name in ("quorum", "classic", "mirrored"):
        assert take(target, name, MESSAGES) == numbers, name
    total = MESSAGES + STREAM_MESSAGES + 1
    assert take(target, "stream", total) == [b"%d" % number for number in range(total)]
    assert take(target, "load", upto["load"]) == [b"%d" % number for number in range(upto["load"])]
    by_key: dict[int, list[int]] = {}
    for body in take(target, "orders/readers", MESSAGES):
        by_key.setdefault(int(body) % 7, []).append(int(body))
    for key, found in by_key.items():
        assert found == list(range(key, MESSAGES, 7))
    status, row = call(target, "GET", "queues/%2F/waiting")
    assert (status, row["messages_delayed"]) == (200, 1)
    status, bindings = call(target, "GET", "exchanges/%2F/sales/bindings/source")
    assert {each["destination"] for each in bindings} == {"quorum", "orders"}

    # A second restore finds messages, and changes nothing.
    code, _, said = convoy(target, "restore", store)
    assert code == 1
    assert "not empty" in said
    code, content, said = convoy(target, "restore", store, "--backup", first["id"], "--replace")
    assert code == 0, said
    assert take(target, "classic", MESSAGES) == numbers
