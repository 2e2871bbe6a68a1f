"""The cases of classic and mirrored queues beside RabbitMQ's (`benchmarks/compare.py` runs them).

`replies` and `fifty-million` take minutes and concern ConvoyMQ alone: `--case replies`.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.amqp import EXCLUSIVE, PROBE_QUEUE, TIMEOUT_S, Client, Probe
from benchmarks.cases import (
    Case,
    Figure,
    Run,
    Setup,
    cpu_seconds,
    rate_figure,
    throughput,
)
from benchmarks.reply_queues import use_reply_queues
from benchmarks.systems import NotPossible

MIB = 1 << 20
ONE_NODE = Setup(nodes=1)
PAGED = Setup(nodes=1, memory_bytes=256 * MIB)
POLL_S = 0.1
CLIENTS = 8
REST_S = 3.0
"""How long another queue is watched before a mirror is synchronised."""
PEEK_PAUSE_S = 0.005
REPLY_QUEUES = 10
"""Queues of a connection."""
SPARE_DESCRIPTORS = 500


class Resident:
    """Looks at the resident memory of processes; `peak` in bytes."""

    def __init__(self, pids: list[int]) -> None:
        self._files = [Path(f"/proc/{pid}/statm") for pid in pids]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak = 0

    def _look(self) -> None:
        while not self._done.wait(POLL_S):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Returns the resident bytes of this moment."""
        return sum(int(file.read_text().split()[1]) * 4096 for file in self._files)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()


def load(run: Run, *flags: str, **options: Any) -> dict[str, Any]:
    """Runs the load tool on classic queues."""
    chosen = ("persistent", "verify", *flags)
    return run.load(flags=chosen, queue_type="classic", **options)


def mirrored(run: Run) -> dict[str, float]:
    """Everything on the first node; the others have mirrors."""
    run.cluster.mirror("^mirrored-", {"ha-mode": "all"})
    return throughput(load(run, queue_prefix="mirrored"))


def durable(run: Run) -> dict[str, float]:
    return throughput(load(run, queue_prefix="durable"))


def transient(run: Run) -> dict[str, float]:
    return throughput(run.load(flags=("verify",), queue_type="classic", queue_prefix="transient"))


def levels(run: Run) -> dict[str, float]:
    """A queue with ten levels beside a plain one, in turns."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "levels": []}
    arguments = {"plain": (), "levels": ("declare-args=x-max-priority=9",)}
    for name in ("plain", "levels", "levels", "plain"):
        result = load(
            run,
            *arguments[name],
            queue_prefix=name,
            property="priority=7",
            seconds=run.scale.seconds / 2,
        )
        found[name].append(throughput(result))

    def mean(name: str, figure: str) -> float:
        return statistics.mean(one[figure] for one in found[name])

    return {
        "rate": mean("levels", "rate"),
        "cpu": mean("levels", "cpu"),
        "share": 100 * mean("levels", "rate") / mean("plain", "rate"),
        "cpu_share": 100 * mean("levels", "cpu") / mean("plain", "cpu"),
    }


def backlog(run: Run) -> dict[str, float]:
    """Fills a queue under a memory target, looks at its head meanwhile, and drains it."""
    return _backlog(run, run.scale.deep_backlog, 100)


def fifty_million(run: Run) -> dict[str, float]:
    """As `backlog`, five times as many, of 16 bytes."""
    return _backlog(run, 5 * run.scale.deep_backlog, 16)


def _backlog(run: Run, count: int, size: int) -> dict[str, float]:
    common = {"size": size, "count": count, "seconds": 3600.0, "queue_prefix": "deep"}
    port = run.cluster.nodes[0].port
    with Resident(run.cluster.pids) as memory:
        with Head(port, "deep-0") as head:
            filled = load(run, "keep", "no-delete-first", mode="pub", **common)
        drained = load(run, "no-delete-first", mode="cons", **common)
    return {
        "in": filled["confirmed_per_s"],
        "out": drained["consumed_per_s"],
        "cpu_in": filled["broker_cpu_s_per_1M"],
        "cpu_out": drained["broker_cpu_s_per_1M"],
        "memory": memory.peak / MIB,
        **head.figures(),
    }


class Head:
    """Gets the first message of a queue again and again, in turn with one from a queue that is
    empty otherwise, and gives both back."""

    def __init__(self, port: int, queue: str) -> None:
        self._port = port
        self._queue = queue
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._waits: dict[str, list[float]] = {queue: [], PROBE_QUEUE: []}
        self._failure: Exception | None = None

    def _look(self) -> None:
        try:
            with Client(self._port) as client:
                while not self._done.wait(PEEK_PAUSE_S):
                    for name, waits in self._waits.items():
                        began = time.monotonic()
                        if client.peek(name):
                            waits.append(time.monotonic() - began)
                client.delete(PROBE_QUEUE)
        except (OSError, ConnectionError) as error:
            self._failure = error

    def figures(self) -> dict[str, float]:
        """Returns the latency of the head in ms, and its ratio to that of the other queue."""
        if self._failure is not None:
            raise self._failure
        deep, empty = (sorted(self._waits[name]) for name in (self._queue, PROBE_QUEUE))
        if not deep or not empty:
            return {}
        return {
            "head": statistics.median(deep) * 1000,
            "head_ratio": statistics.median(deep) / statistics.median(empty),
            "head_p99_ratio": _p99(deep) / _p99(empty),
        }

    def __enter__(self) -> Head:
        with Client(self._port) as client:
            client.declare(self._queue, kind="classic")
            client.declare(PROBE_QUEUE, kind="classic")
            client.publish(PROBE_QUEUE)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join(TIMEOUT_S)


def _p99(waits: list[float]) -> float:
    return sorted(waits)[len(waits) * 99 // 100]


def synchronise(run: Run) -> dict[str, float]:
    """A queue of its master alone gets a mirror; another queue is published to meanwhile."""
    cluster = run.cluster
    count = run.scale.sync_bytes // 1024
    common = {"count": count, "queue_prefix": "sync", "seconds": 3600.0}
    load(run, "keep", mode="pub", **common)
    with Client(cluster.nodes[0].port) as client:
        client.declare(PROBE_QUEUE, kind="classic")
    probe = Probe(cluster.nodes[0].port)
    time.sleep(REST_S)
    waiting = threading.Thread(target=cluster.wait_synchronised, args=("sync-0",), daemon=True)
    waiting.start()
    before = len(probe.waits)
    cluster.mirror("^sync-", {"ha-mode": "exactly", "ha-params": 2, "ha-sync-mode": "automatic"})
    used, began, first = _cpu(cluster.pids), time.monotonic(), len(probe.waits)
    waiting.join()
    seconds, last = time.monotonic() - began, len(probe.waits)
    used = _cpu(cluster.pids) - used
    probe.stop()
    load(run, "no-delete-first", mode="cons", **common)
    return {
        "rate": run.scale.sync_bytes / 1e6 / seconds,
        "cpu": used / (run.scale.sync_bytes / 1e9),
        "p99": _p99(probe.waits[first : last + 1]) * 1000,
        "p99_ratio": _p99(probe.waits[first : last + 1]) / _p99(probe.waits[:before]),
    }


def _cpu(pids: list[int]) -> float:
    return sum(cpu_seconds(pid) for pid in pids)


def churn(run: Run) -> dict[str, float]:
    """Short-lived queues of eight connections: each is declared, bound, published to, consumed
    from and deleted."""
    port = run.cluster.nodes[0].port

    def use(count: int) -> None:
        with Client(port, confirms=False) as client:
            for _ in range(count):
                name = client.declare("", kind="classic", flags=EXCLUSIVE)
                client.bind(name, "amq.direct")
                client.send(name, "amq.direct")
                client.consume_one(name)
                client.delete(name)

    each = run.scale.churned // CLIENTS
    use(each // 10)
    used, began = _cpu(run.cluster.pids), time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(use, [each] * CLIENTS))
    seconds = time.monotonic() - began
    count = each * CLIENTS
    return {"rate": count / seconds, "cpu": (_cpu(run.cluster.pids) - used) / count * 1e6}


def replies(run: Run) -> dict[str, float]:
    """100,000 exclusive queues of 10,000 connections, three times: what is left behind?"""
    clients = run.scale.reply_clients
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit < clients + SPARE_DESCRIPTORS:
        raise NotPossible(
            f"{clients} connections need {clients + SPARE_DESCRIPTORS} open files in a "
            f"process, of the load and of the node; the limit is {limit} (ulimit -Hn)"
        )
    return use_reply_queues(run.cluster, connections=clients, queues=REPLY_QUEUES)


def _cpu_figure(**more: Any) -> Figure:
    return Figure(
        **({"name": "cpu", "title": "broker CPU per million messages", "unit": "s"} | more)
    )


def _memory_figure(**more: Any) -> Figure:
    return Figure(**({"name": "memory", "title": "resident memory", "unit": "MB"} | more))


def _backlog_figures(most_mib: int, **kinds: Any) -> tuple[Figure, ...]:
    return (
        Figure(name="in", title="in", unit="msg/s", **(kinds or {"kind": "faster", "must": 10})),
        Figure(name="out", title="out", unit="msg/s", **(kinds or {"kind": "faster", "must": 5})),
        _cpu_figure(name="cpu_in", title="broker CPU per million in", kind="shown"),
        _cpu_figure(name="cpu_out", title="broker CPU per million out", kind="shown"),
        _memory_figure(title="highest resident memory", unit="MiB", kind="bound", must=most_mib),
        Figure(name="head", title="get at the head meanwhile", unit="ms", kind="shown"),
        Figure(
            name="head_ratio",
            title="the same, of a get from an empty queue",
            unit="×",
            kind="bound",
            must=2,
        ),
        Figure(name="head_p99_ratio", title="the same, p99", unit="×", kind="shown"),
    )


CASES = (
    Case(
        name="mirrored",
        title="mirrored on three nodes, 1 KiB, durable",
        measure=mirrored,
        figures=(
            rate_figure(10, None),
            _cpu_figure(kind="less", must=1 / 10),
            _memory_figure(title="resident memory of three nodes", kind="shown"),
        ),
    ),
    Case(
        name="synchronise",
        title="a new mirror of 1 GB in messages of 1 KiB",
        measure=synchronise,
        figures=(
            Figure(name="rate", title="synchronised", unit="MB/s", kind="faster", must=5),
            _cpu_figure(title="broker CPU per GB", kind="shown"),
            Figure(name="p99", title="confirm p99 of another queue", unit="ms", kind="shown"),
            Figure(name="p99_ratio", title="the same, of before", unit="×", kind="bound", must=2),
        ),
    ),
    Case(
        name="durable",
        title="classic queue, 1 KiB, durable",
        measure=durable,
        figures=(
            rate_figure(10, None),
            _cpu_figure(kind="shown"),
            _memory_figure(kind="shown"),
        ),
        setup=ONE_NODE,
    ),
    Case(
        name="transient",
        title="classic queue, 1 KiB, transient messages",
        measure=transient,
        figures=(rate_figure(5, None), _cpu_figure(kind="shown"), _memory_figure(kind="shown")),
        setup=ONE_NODE,
    ),
    Case(
        name="levels",
        title="classic queue of ten priorities, 1 KiB, durable",
        measure=levels,
        figures=(
            Figure(name="rate", title="throughput", unit="msg/s", kind="shown"),
            _cpu_figure(kind="shown"),
            Figure(name="share", title="of the plain queue", unit="%", kind="share", must=80),
            Figure(name="cpu_share", title="CPU, of the plain queue", unit="%", kind="shown"),
        ),
        setup=ONE_NODE,
    ),
    Case(
        name="churn",
        title="short-lived queues of eight connections",
        measure=churn,
        figures=(
            Figure(name="rate", title="used and deleted", unit="/s", kind="faster", must=5),
            _cpu_figure(title="broker CPU per million", kind="shown"),
        ),
        setup=ONE_NODE,
    ),
    Case(
        name="deep-backlog",
        title="backlog of 100 B under a target of 256 MiB",
        measure=backlog,
        figures=_backlog_figures(PAGED.memory_bytes * 5 // 4 // MIB),
        setup=PAGED,
        disturbs=True,
    ),
    Case(
        name="fifty-million",
        title="backlog of 16 B, five times as many",
        measure=fifty_million,
        figures=_backlog_figures(1024, kind="shown"),
        setup=PAGED,
        disturbs=True,
        extra=True,
    ),
    Case(
        name="replies",
        title="100,000 exclusive queues of 10,000 connections",
        measure=replies,
        figures=(
            Figure(name="rate", title="used and dropped", unit="/s", kind="shown"),
            Figure(name="queues", title="queues left behind", unit="", kind="bound"),
            Figure(name="bindings", title="bindings left behind", unit="", kind="bound"),
            Figure(name="rows", title="metrics left behind", unit="", kind="bound"),
            Figure(name="files", title="files left behind", unit="", kind="bound", must=8),
            _memory_figure(
                name="growth",
                title="memory, third time beside the first",
                unit="MiB",
                kind="bound",
                must=64,
            ),
        ),
        setup=ONE_NODE,
        extra=True,
    ),
)
