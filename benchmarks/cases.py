"""The cases of the comparison: what is run, what is read from it, and what is to be reached."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.load import Load, broken_promises
from benchmarks.systems import LocalCluster, connect

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a case and its targets.

    `kind`: "faster" and "less" compare ConvoyMQ with RabbitMQ as a ratio (at least, at most);
    "bound" and "share" are ConvoyMQ's own number (at most, at least); "shown" has no target.
    """

    name: str
    title: str
    unit: str
    kind: Literal["faster", "less", "bound", "share", "shown"]
    must: float = 0.0
    aim: float | None = None


@dataclass(slots=True)
class Scale:
    """How long and how large the runs are."""

    seconds: float = 8.0
    warmup: float = 2.0
    backlog: int = 1_000_000
    idle_queues: int = 1000
    idle_seconds: float = 15.0
    deep_backlog: int = 10_000_000
    sync_bytes: int = 1_000_000_000
    churned: int = 4000
    reply_clients: int = 10_000
    connections: int = 500


QUICK = Scale(
    seconds=3.0,
    warmup=1.0,
    backlog=100_000,
    idle_queues=100,
    idle_seconds=5.0,
    deep_backlog=200_000,
    sync_bytes=50_000_000,
    churned=400,
    reply_clients=500,
    connections=100,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a case needs of a cluster.

    `memory_bytes`: what the messages of classic queues may take in memory; 0 = as installed.
    `plugins`: of RabbitMQ.
    """

    nodes: int = 3
    memory_bytes: int = 0
    plugins: tuple[str, ...] = ()


@dataclass(slots=True)
class Run:
    """What a case has at hand: a usable cluster, the scale, and where to report broken promises."""

    cluster: LocalCluster
    scale: Scale
    startup_s: float
    broken: list[str]

    def load(
        self,
        *,
        publish: tuple[int, ...] = (0,),
        consume: tuple[int, ...] = (0,),
        size: int = 1024,
        flags: tuple[str, ...] = ("persistent", "verify"),
        seconds: float | None = None,
        **options: str | int | float,
    ) -> dict[str, Any]:
        """Run the load tool; the queue's leader is on the first node."""
        uris = self.cluster.uris
        result = Load(
            declare=uris[0],
            publish=[uris[index] for index in publish],
            consume=[uris[index] for index in consume],
            pids=self.cluster.pids,
            size=size,
            seconds=self.scale.seconds if seconds is None else seconds,
            warmup=self.scale.warmup,
            options={name.replace("_", "-"): value for name, value in options.items()},
            flags=flags,
        ).run()
        self.broken += broken_promises(result)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named measurement. `disturbs`: the next case needs a fresh cluster. `extra`: it takes long
    and concerns ConvoyMQ alone, and runs only when it is named."""

    name: str
    title: str
    measure: Callable[[Run], dict[str, float]]
    figures: tuple[Figure, ...]
    disturbs: bool = False
    setup: Setup = Setup()
    extra: bool = False


def throughput(result: dict[str, Any]) -> dict[str, float]:
    return {
        "rate": min(result["confirmed_per_s"], result["consumed_per_s"]),
        "cpu": result["broker_cpu_s_per_1M"],
        "memory": result["broker_rss_mb"],
        "p50": result["confirm_us"]["p50"] / 1000,
        "p99": result["confirm_us"]["p99"] / 1000,
    }


def startup(run: Run) -> dict[str, float]:
    """From starting the processes to a confirmed message that went through all nodes."""
    return {"seconds": run.startup_s}


def local(size: int) -> Callable[[Run], dict[str, float]]:
    """One queue; publisher, consumer and leader on one node."""
    return lambda run: throughput(run.load(size=size))


def ten_queues(run: Run) -> dict[str, float]:
    return throughput(run.load(queues=10, publishers=10, consumers=10))


def spread(run: Run) -> dict[str, float]:
    """Leader on the first node, publisher on the second, consumer on the third."""
    return throughput(run.load(publish=(1,), consume=(2,)))


def one_at_a_time(run: Run) -> dict[str, float]:
    return throughput(run.load(in_flight=1))


def steady(run: Run) -> dict[str, float]:
    """1,000 messages a second, evenly."""
    result = run.load(rate=1000)
    return throughput(result) | {"cores": result["broker_cpu_cores"]}


def backlog(run: Run) -> dict[str, float]:
    """Fill a queue, look at its index, drain it."""

    def step(mode: str, *flags: str) -> dict[str, Any]:
        return run.load(
            size=100,
            flags=("persistent", *flags),
            mode=mode,
            count=run.scale.backlog,
            queue_prefix="backlog",
        )

    filled = step("pub", "keep")
    index = _index_bytes(run.cluster, "backlog-0")
    drained = step("cons", "verify", "no-delete-first")
    figures = {"in": filled["confirmed_per_s"], "out": drained["consumed_per_s"]}
    if index is not None:
        figures["index"] = index / run.scale.backlog
    return figures


def _index_bytes(cluster: LocalCluster, queue: str) -> float | None:
    """What the queue's index takes in memory, where the system tells it."""
    if cluster.system != "convoy":
        return None
    url = f"http://127.0.0.1:{cluster.base_port + 21}/api/queues/%2F/{queue}"
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        return float(httpx.get(url, auth=("guest", "guest"), timeout=30).json()["index_bytes"])
    return None


def kill_leader(run: Run) -> dict[str, float]:
    """`kill -9` of the leader at 1,000 msg/s; the clients are on the other two nodes."""
    result = _disturbed(run, signal.SIGKILL)
    return {"gap": result["max_confirm_gap_ms"], "deliver": result["max_deliver_gap_ms"]}


def stop_leader(run: Run) -> dict[str, float]:
    """SIGSTOP of the leader: it goes silent while its connections stay open."""
    result = _disturbed(run, signal.SIGSTOP)
    return {"gap": result["max_confirm_gap_ms"] / 1000}


def _disturbed(run: Run, sig: signal.Signals) -> dict[str, Any]:
    at = run.scale.warmup + 2.0
    return run.load(
        publish=(1, 2),
        consume=(2, 1),
        seconds=18.0 if sig == signal.SIGSTOP else 8.0,
        rate=1000,
        kill_pid=run.cluster.pids[0],
        kill_at=at,
        kill_sig=int(sig),
        drain=60,
    )


def idle(run: Run) -> dict[str, float]:
    """Many quorum queues that nobody uses: CPU of the busiest node, in % of a core."""
    connections = [connect(uri, timeout_s=60) for uri in run.cluster.uris]
    channels = [connection.channel() for connection in connections]
    for number in range(run.scale.idle_queues):
        channels[number % len(channels)].queue_declare(
            f"idle-{number}", durable=True, arguments={"x-queue-type": "quorum"}
        )
    for connection in connections:
        connection.close()
    time.sleep(SETTLE_S)
    before = [cpu_seconds(pid) for pid in run.cluster.pids]
    began = time.monotonic()
    time.sleep(run.scale.idle_seconds)
    wall = time.monotonic() - began
    after = [cpu_seconds(pid) for pid in run.cluster.pids]
    busiest = max(late - early for early, late in zip(before, after, strict=True))
    return {"cpu": busiest / wall * 100}


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rate_figure(must: float, aim: float | None) -> Figure:
    return Figure(name="rate", title="throughput", unit="msg/s", kind="faster", must=must, aim=aim)


CASES = (
    Case(
        name="startup",
        title="three nodes usable after start",
        measure=startup,
        figures=(Figure(name="seconds", title="time", unit="s", kind="bound", must=3.0, aim=1.5),),
    ),
    Case(
        name="local-1k",
        title="1 KiB, one queue, local",
        measure=local(1024),
        figures=(
            rate_figure(10, 25),
            Figure(
                name="cpu",
                title="broker CPU per million messages",
                unit="s",
                kind="less",
                must=1 / 12,
                aim=1 / 30,
            ),
            Figure(
                name="memory",
                title="resident memory of three nodes under load",
                unit="MB",
                kind="less",
                must=1 / 3,
                aim=1 / 8,
            ),
        ),
    ),
    Case(name="local-16", title="16 B", measure=local(16), figures=(rate_figure(15, 40),)),
    Case(name="local-10k", title="10 KiB", measure=local(10240), figures=(rate_figure(2, None),)),
    Case(
        name="ten-queues",
        title="ten queues, publishers and consumers",
        measure=ten_queues,
        figures=(rate_figure(8, 20),),
    ),
    Case(
        name="spread",
        title="publisher, leader, consumer on three nodes",
        measure=spread,
        figures=(rate_figure(10, 25),),
    ),
    Case(
        name="one-at-a-time",
        title="one message at a time",
        measure=one_at_a_time,
        figures=(
            Figure(name="p50", title="confirm p50", unit="ms", kind="less", must=0.5, aim=0.35),
        ),
    ),
    Case(
        name="steady",
        title="1,000 msg/s",
        measure=steady,
        figures=(
            Figure(name="p99", title="confirm p99", unit="ms", kind="less", must=0.4, aim=0.25),
            Figure(
                name="cores",
                title="busy cores of three nodes",
                unit="cores",
                kind="less",
                must=0.4,
                aim=0.2,
            ),
        ),
    ),
    Case(
        name="backlog",
        title="backlog of 100 B messages",
        measure=backlog,
        figures=(
            Figure(name="in", title="in", unit="msg/s", kind="faster", must=10, aim=30),
            Figure(name="out", title="out", unit="msg/s", kind="faster", must=3, aim=10),
            Figure(name="index", title="index memory", unit="B/msg", kind="bound", must=4, aim=0.5),
        ),
    ),
    Case(
        name="kill-leader",
        title="kill -9 of the leader",
        measure=kill_leader,
        figures=(
            Figure(
                name="gap", title="longest confirm gap", unit="ms", kind="less", must=1, aim=0.3
            ),
        ),
        disturbs=True,
    ),
    Case(
        name="stop-leader",
        title="leader stopped with SIGSTOP",
        measure=stop_leader,
        figures=(
            Figure(
                name="gap", title="confirms resume after", unit="s", kind="bound", must=2, aim=1
            ),
        ),
        disturbs=True,
    ),
    Case(
        name="idle",
        title="idle quorum queues",
        measure=idle,
        figures=(
            Figure(name="cpu", title="CPU of a node", unit="% core", kind="bound", must=1, aim=0.1),
        ),
        disturbs=True,
    ),
)
