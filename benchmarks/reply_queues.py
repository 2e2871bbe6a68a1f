"""Exclusive reply queues of many connections: declared, used and dropped; what do they leave?

A reply queue is published to through `amq.direct` and consumed from. Half of the connections delete
theirs, the others just end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.amqp import EXCLUSIVE, TIMEOUT_S, Client
from benchmarks.convoy import ConvoyCluster
from benchmarks.systems import LocalCluster, NotUsable

WORKERS = 16
ROUNDS = 3
POLL_S = 0.05
RESIDENT_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Left:
    """What a node has."""

    queues: int
    bindings: int
    connections: int
    metric_rows: int
    files: int
    memory_bytes: int


def left_by(cluster: ConvoyCluster, http: httpx.Client) -> Left:
    """Returns what the first node has."""
    node = cluster.nodes[0]
    metrics = f"http://127.0.0.1:{cluster.base_port + 31}/metrics/per-object"
    memory = Path(f"/proc/{node.pid}/statm").read_text().split()[1]
    return Left(
        queues=len(http.get("/api/queues").json()),
        bindings=len(http.get("/api/bindings").json()),
        connections=len(http.get("/api/connections").json()),
        metric_rows=len(http.get(metrics).text.splitlines()),
        files=sum(1 for _ in (cluster.directory / node.name).rglob("*")),
        memory_bytes=int(memory) * RESIDENT_PAGE,
    )


def use_reply_queues(cluster: LocalCluster, *, connections: int, queues: int) -> dict[str, float]:
    """Has every connection use so many queues at once, three times. Returns queues a second, and
    what the second and third time left behind."""
    assert isinstance(cluster, ConvoyCluster)
    spent = 0.0
    with cluster.http() as http:
        for turn in range(ROUNDS):
            began = time.monotonic()
            _use(cluster.nodes[0].port, connections, queues)
            spent += time.monotonic() - began
            found = _when_dropped(cluster, http)
            if not turn:
                first = found
    return {
        "rate": ROUNDS * connections * queues / spent,
        "queues": found.queues - first.queues,
        "bindings": found.bindings - first.bindings,
        "rows": found.metric_rows - first.metric_rows,
        "files": found.files - first.files,
        "growth": (found.memory_bytes - first.memory_bytes) / (1 << 20),
    }


def _use(port: int, connections: int, queues: int) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        clients = list(pool.map(lambda _: _open(port, queues), range(connections)))
        list(pool.map(_drop, clients, (turn % 2 == 0 for turn in range(connections))))


def _open(port: int, queues: int) -> tuple[Client, Sequence[str]]:
    client = Client(port, confirms=False)
    names = [client.declare("", kind="classic", flags=EXCLUSIVE) for _ in range(queues)]
    for name in names:
        client.bind(name, "amq.direct")
        client.send(name, "amq.direct")
        client.consume_one(name)
    return client, names


def _drop(opened: tuple[Client, Sequence[str]], deletes: bool) -> None:
    client, names = opened
    for name in names if deletes else ():
        client.delete(name)
    client.close()


def _when_dropped(cluster: ConvoyCluster, http: httpx.Client) -> Left:
    """Waits until the connections and their queues are gone."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = left_by(cluster, http)
        if not found.connections and not found.queues:
            return found
        time.sleep(POLL_S)
    raise NotUsable(f"after {TIMEOUT_S:.0f} s: {found}")
