"""What messages that wait for a time cost: memory while they wait, and how late they fire."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import psutil

from benchmarks.load import Load
from benchmarks.systems import LocalCluster

DELAY_MS = 1_000
RATE = 10_000
IN_FLIGHT = 5_000
PENDING_MS = {"ready": 0, "waiting": 6 * 3_600_000}
"""What messages wait for whose memory is measured."""


@dataclass(frozen=True, slots=True)
class Firing:
    """How much later than its time a message reaches its consumer, in ms."""

    rate: float
    p50_ms: float
    p99_ms: float


def firing(cluster: LocalCluster, seconds: float) -> Firing:
    """Publishes at a rate, each message to be delivered a second later. The time on the way to the
    broker and from it to the consumer is counted as late too."""
    result = Load(
        declare=cluster.uris[0],
        publish=[cluster.uris[0]],
        consume=[cluster.uris[0]],
        pids=cluster.pids,
        size=200,
        seconds=seconds,
        warmup=DELAY_MS / 1000 + 1.0,
        options={
            "queue-prefix": "firing",
            "header": f"x-delay={DELAY_MS}",
            "rate": RATE,
            "in-flight": IN_FLIGHT,
            "prefetch": IN_FLIGHT,
        },
        flags=("persistent",),
    ).run()
    late = result["e2e_us"]
    return Firing(
        result["consumed_per_s"],
        late["p50"] / 1000 - DELAY_MS,
        late["p99"] / 1000 - DELAY_MS,
    )


def bytes_each(cluster: LocalCluster, count: int, delay_ms: int) -> float:
    """Bytes of memory that a message in a queue costs a node: the growth of its resident memory on
    a cluster that has done nothing else. Median of the nodes.

    Args:
        delay_ms: what the messages wait for; 0 = they are ready.
    """
    before = [_resident(pid) for pid in cluster.pids]
    Load(
        declare=cluster.uris[0],
        publish=[cluster.uris[0]],
        consume=[cluster.uris[0]],
        pids=cluster.pids,
        size=16,
        options={
            "queue-prefix": "pending",
            "mode": "pub",
            "count": count,
            **({"header": f"x-delay={delay_ms}"} if delay_ms else {}),
        },
        flags=("persistent", "keep"),
    ).run()
    grown = [_resident(pid) - b for pid, b in zip(cluster.pids, before, strict=True)]
    return median(grown) / count


def _resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
