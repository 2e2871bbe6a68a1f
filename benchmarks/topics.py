"""Ordered topics beside plain streams, and what a change of partitions costs its publishers.

    python benchmarks/topics.py                     everything, three rounds
    python benchmarks/topics.py --case throughput   one question

Three nodes of ConvoyMQ on loopback. `throughput`: one and eight publishers to a topic of eight
partitions, and to as many streams, in turn; ratios of rates and of the nodes' processor time for a
message; consumers of the topic have one message of a key at a time, and once more as many as their
prefetch allows. `changes`: longest waits of a publisher that waits for each confirm, in the range
that is split, moved and merged, and of one outside of it. `stalls`: the same changes with two
members of a group that have nothing else to read; longest times from the confirm of a message to
its delivery. `order`: messages out of the order of their keys when partitions are added half-way,
with a topic and with an exchange that hashes modulo the number of its queues, which must have some.
`idle`: processor time of the nodes with a thousand topics of four partitions that nobody uses, and
with none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pika
import psutil  # type: ignore[import-untyped]

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import key_order
from benchmarks.convoy import ConvoyCluster
from benchmarks.load import Load, LoadFailed
from benchmarks.systems import NotUsable, connect
from convoymq.compiled_modules import build_text
from convoymq.topics.rules.hashing import logical_partition

TOPIC = "bench"
PARTITIONS = 8
LOGICAL = 1024
KEYS = 10_000
LOADS: tuple[tuple[str, int, str, dict[str, str | int]], ...] = (
    ("8 publishers", 8, "pub", {}),
    ("8 publishers and consumers", 8, "both", {}),
    (
        "8 publishers and consumers, no limit per key",
        8,
        "both",
        {"declare-args": "x-key-in-flight=0"},
    ),
    ("1 publisher", 1, "pub", {}),
)
"""(name, publishers, mode and options of `convoy perf` for the topic)."""
SETTLE_S = 0.5
POLL_S = 0.002
CHANGE_TIMEOUT_S = 30.0
AUTH = ("guest", "guest")
CASES = ["throughput", "changes", "stalls", "order", "idle"]
GROUP = f"{TOPIC}/readers"
PREFETCH = 100
IDLE_PARTITIONS = 4
IDLE_CREATORS = 8
IDLE_SETTLE_S = 20.0


@dataclass(slots=True)
class Samples:
    """Measured values by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Adds a value."""
        self.values.setdefault(name, []).append(value)


@dataclass(slots=True)
class Publishing:
    """A publisher of one key that waits for each confirm; times in seconds."""

    uri: str
    key: str
    confirms: list[tuple[float, float]] = field(default_factory=list)
    """(publish, confirm)."""
    error: str = ""
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Publishes until it is stopped."""
        try:
            connection = connect(self.uri, timeout_s=30)
            channel = connection.channel()
            channel.confirm_delivery()
            properties = pika.BasicProperties(delivery_mode=2)
            while not self._stopped.is_set():
                begin = time.monotonic()
                body = b"%-100d" % len(self.confirms)
                channel.basic_publish(TOPIC, self.key, body, properties)
                self.confirms.append((begin, time.monotonic()))
            connection.close()
        except (pika.exceptions.AMQPError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Ends `run` after the publish that is under way."""
        self._stopped.set()

    def longest_ms(self, since: float, until: float) -> float:
        """Longest wait for a confirm of what was published, or under way, in a time."""
        waits = [end - begin for begin, end in self.confirms if end >= since and begin <= until]
        return max(waits, default=0.0) * 1000

    def longest_stall_ms(self, arrivals: dict[int, float], since: float, until: float) -> float:
        """Longest time from a confirm in a time, or its end, to the delivery of the message.
        `arrivals`: number of the message -> time of its first delivery."""
        stalls = [
            arrivals[number] - end
            for number, (begin, end) in enumerate(self.confirms)
            if number in arrivals and arrivals[number] >= since and begin <= until
        ]
        return max(stalls, default=0.0) * 1000

    def typical_ms(self) -> float:
        """Median wait for a confirm."""
        return statistics.median(end - begin for begin, end in self.confirms) * 1000


def consume(uri: str, ends: Connection) -> None:
    """A member of the group, in a process of its own: acknowledges each message, and at the end,
    which `ends` says, sends the (key, number, time of the first delivery) of all."""
    arrived: dict[tuple[str, int], float] = {}
    connection = connect(uri, timeout_s=30)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)

    def take(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        arrived.setdefault((method.routing_key, int(body)), time.monotonic())
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(GROUP, take)
    while not ends.poll():
        connection.process_data_events(0.05)
    connection.close()
    ends.send([(*place, at) for place, at in arrived.items()])


class Members:
    """Members of the group; times are those of one machine's monotonic clock."""

    def __init__(self, uris: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in uris]
        self._ends = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=consume, args=(uri, theirs), daemon=True)
            for uri, (_, theirs) in zip(uris, pipes, strict=True)
        ]
        for process in self._processes:
            process.start()

    def stop(self) -> dict[str, dict[int, float]]:
        """Ends them; returns key -> number of the message -> time of its first delivery."""
        found: dict[str, dict[int, float]] = {}
        for end in self._ends:
            end.send(None)
        for end in self._ends:
            for key, number, at in end.recv():
                of_key = found.setdefault(key, {})
                of_key[number] = min(at, of_key.get(number, at))
        for process in self._processes:
            process.join()
        return found


def key_in(seed: int, lo: int, hi: int) -> str:
    """Returns a key whose logical partition lies in a range."""
    return next(
        key
        for key in (f"key-{number}" for number in range(1_000_000))
        if lo <= logical_partition(key.encode(), LOGICAL, seed) < hi
    )


class Topics:
    """The HTTP API of topics."""

    def __init__(self, api: str, name: str = TOPIC) -> None:
        self._url = f"{api}/api/topics/%2F/{name}"

    def create(self, partitions: int) -> None:
        """Creates the topic."""
        body = {"partitions": partitions, "logical": LOGICAL}
        httpx.put(self._url, json=body, auth=AUTH, timeout=60).raise_for_status()

    def delete(self) -> None:
        """Deletes the topic."""
        httpx.delete(self._url, auth=AUTH, timeout=60).raise_for_status()

    def seed(self) -> int:
        """Seed of the topic's hash."""
        found = httpx.get(self._url, auth=AUTH, timeout=30).raise_for_status().json()
        return int(found["hash_seed"])

    def route(self) -> list[dict[str, object]]:
        """Returns the partitions of the newest version."""
        found = httpx.get(f"{self._url}/route", auth=AUTH, timeout=30).raise_for_status().json()
        rows: list[dict[str, object]] = found
        return rows

    def run_change(self, kind: str, body: object) -> tuple[float, float]:
        """Carries a change out, and waits for its end; returns when it began and ended."""
        begin = time.monotonic()
        url = f"{self._url}/{kind}"
        found = httpx.post(url, json=body, auth=AUTH, timeout=30).raise_for_status().json()
        url = f"{self._url}/changes/{found['change_id']}"
        while not found["is_finished"]:
            if time.monotonic() > begin + CHANGE_TIMEOUT_S:
                raise NotUsable(f"{kind} is in phase {found['phase']} for {CHANGE_TIMEOUT_S} s")
            time.sleep(POLL_S)
            found = httpx.get(url, auth=AUTH, timeout=30).raise_for_status().json()
        return begin, time.monotonic()


def to_topic(
    cluster: ConvoyCluster,
    publishers: int,
    seconds: float,
    mode: str,
    options: dict[str, str | int],
) -> dict[str, float]:
    """Publishes to a fresh topic of eight partitions."""
    topics = Topics(cluster.api)
    topics.create(PARTITIONS)
    try:
        return _load(
            cluster,
            publishers,
            seconds,
            mode,
            {"queue-type": "topic", "queue-prefix": TOPIC, "distinct": KEYS, **options},
        )
    finally:
        topics.delete()


def to_streams(
    cluster: ConvoyCluster, publishers: int, seconds: float, mode: str
) -> dict[str, float]:
    """Publishes to streams, as many as publishers."""
    options = {"queue-type": "stream", "queues": publishers, "queue-prefix": "plain"}
    return _load(cluster, publishers, seconds, mode, options)


def _load(
    cluster: ConvoyCluster,
    publishers: int,
    seconds: float,
    mode: str,
    options: dict[str, str | int],
) -> dict[str, float]:
    result = Load(
        declare=cluster.uris[0],
        publish=cluster.uris,
        consume=cluster.uris,
        pids=cluster.pids,
        size=1024,
        seconds=seconds,
        options={"publishers": publishers, "consumers": publishers, "mode": mode, **options},
        flags=("persistent",),
    ).run()
    rate = result["confirmed_per_s"]
    if mode == "both":
        rate = min(rate, result["consumed_per_s"])
    return {"rate": rate, "cpu": result["broker_cpu_s_per_1M"]}


def throughput(cluster: ConvoyCluster, seconds: float, found: Samples) -> None:
    """Rates and processor time of a topic and of streams, in turn."""
    for name, publishers, mode, options in LOADS:
        streams = to_streams(cluster, publishers, seconds, mode)
        topic = to_topic(cluster, publishers, seconds, mode, options)
        for measure in ("rate", "cpu"):
            found.add(f"{name}: {measure}", topic[measure] / streams[measure])
        print(f"{name}: streams {streams}, topic {topic}", file=sys.stderr, flush=True)


def stalls(cluster: ConvoyCluster, count: int, found: Samples) -> None:
    """Waits of two members of a group while a partition is split, moved and merged."""
    topics = Topics(cluster.api)
    topics.create(2)
    members = Members(cluster.uris[1:])
    try:
        publishing, timed = _while_publishing(topics, cluster, count)
    finally:
        arrivals = members.stop()
        topics.delete()
    for name, each in publishing.items():
        arrived = arrivals.get(each.key, {})
        missing = len(each.confirms) - len(arrived)
        if missing > 0:
            raise NotUsable(f"{missing} of {len(each.confirms)} messages {name} did not arrive")
        for kind, begin, end in timed:
            # A group follows a change when it is done.
            stall = each.longest_stall_ms(arrived, begin, end + SETTLE_S)
            found.add(f"{kind}: stall {name}, ms", stall)


def changes(cluster: ConvoyCluster, count: int, found: Samples) -> None:
    """Waits of publishers while a partition is split, moved and merged."""
    topics = Topics(cluster.api)
    topics.create(2)
    try:
        publishing, timed = _while_publishing(topics, cluster, count)
    finally:
        topics.delete()
    for kind, begin, end in timed:
        found.add(f"{kind}: ms", (end - begin) * 1000)
        for name, each in publishing.items():
            found.add(f"{kind}: {name}, ms", each.longest_ms(begin, end))
    for name, each in publishing.items():
        found.add(f"typical confirm, {name}, ms", each.typical_ms())


def _while_publishing(
    topics: Topics, cluster: ConvoyCluster, count: int
) -> tuple[dict[str, Publishing], list[tuple[str, float, float]]]:
    """Carries changes out while one publishes inside of the range and one outside of it; returns
    both, and (kind, begin, end) of each change."""
    timed: list[tuple[str, float, float]] = []
    seed = topics.seed()
    inside = Publishing(cluster.uris[0], key_in(seed, 0, LOGICAL // 4))
    outside = Publishing(cluster.uris[0], key_in(seed, LOGICAL // 2, LOGICAL))
    threads = [threading.Thread(target=each.run) for each in (inside, outside)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(SETTLE_S)
        for _ in range(count):
            for kind in ("split", "move", "merge"):
                begin, end = topics.run_change(kind, _body(topics, cluster, kind))
                time.sleep(SETTLE_S)
                timed.append((kind, begin, end))
    finally:
        for each in (inside, outside):
            each.stop()
        for thread in threads:
            thread.join()
        # What is confirmed last is delivered as well.
        time.sleep(SETTLE_S)
    for each in (inside, outside):
        if each.error:
            raise NotUsable(each.error)
    return {"inside": inside, "outside": outside}, timed


def _body(topics: Topics, cluster: ConvoyCluster, kind: str) -> dict[str, object]:
    """Body of the next change: what lies in the lower half is split, moved and merged again."""
    rows = sorted(
        (row for row in topics.route() if int(str(row["lo"])) < LOGICAL // 2),
        key=lambda row: int(str(row["lo"])),
    )
    pid = rows[0]["pid"]
    if kind == "split":
        return {"pid": pid}
    if kind == "merge":
        return {"pids": [row["pid"] for row in rows[:2]]}
    others = [n for n in range(1, 4) if cluster.node_name(n) != rows[0]["node"]]
    return {"pid": pid, "node": cluster.node_name(others[0])}


def order(cluster: ConvoyCluster, found: Samples) -> None:
    """Messages out of order, of `key_order.MESSAGES`. Raises NotUsable when the topic has some, or
    the exchange has none: then the load proves nothing."""
    topics = Topics(cluster.api)
    topics.create(key_order.QUEUES[0])
    try:
        kept = key_order.through_topic(
            cluster.uris[0],
            TOPIC,
            lambda: topics.run_change("split", _body(topics, cluster, "split")),
        )
    finally:
        topics.delete()
    broken = key_order.through_modulo(cluster.uris[0])
    found.add("out of order, topic that is split", kept)
    found.add("out of order, hash modulo 2 and then 3 queues", broken)
    if kept or not broken:
        raise NotUsable(f"{kept} messages of the topic are out of order, {broken} modulo queues")


def idle(cluster: ConvoyCluster, count: int, seconds: float, found: Samples) -> None:
    """Cores that the nodes use while nobody uses them, without topics and with many."""
    found.add("idle, no topics: % of a core", _cores(cluster, seconds) * 100)
    begin = time.monotonic()
    with ThreadPoolExecutor(IDLE_CREATORS) as pool:
        made = [
            pool.submit(Topics(cluster.api, f"idle-{number}").create, IDLE_PARTITIONS)
            for number in range(count)
        ]
        for each in made:
            each.result()
    found.add("idle: creation of a topic, ms", (time.monotonic() - begin) * 1000 / count)
    time.sleep(IDLE_SETTLE_S)
    found.add(f"idle, {count} topics: % of a core", _cores(cluster, seconds) * 100)
    memory = sum(psutil.Process(pid).memory_info().rss for pid in cluster.pids)
    found.add(f"idle, {count} topics: MiB of a node", memory / len(cluster.pids) / (1 << 20))


def _cores(cluster: ConvoyCluster, seconds: float) -> float:
    """Processor time of the nodes for each second of a time."""
    processes = [psutil.Process(pid) for pid in cluster.pids]
    before = [process.cpu_times() for process in processes]
    time.sleep(seconds)
    after = [process.cpu_times() for process in processes]
    pairs = zip(before, after, strict=True)
    return sum(b.user + b.system - a.user - a.system for a, b in pairs) / seconds


def main() -> int:
    """Exit code: 0 done, 1 a run failed."""
    parser = argparse.ArgumentParser(description="Ordered topics beside plain streams")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--changes", type=int, default=10, help="of each kind, a round")
    parser.add_argument("--topics", type=int, default=1000, help="that nobody uses")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--base-port", type=int, default=28600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = options.case or CASES
    found = Samples()
    console = Console(stderr=True)
    console.print(build_text(), highlight=False)
    try:
        for _ in range(options.runs):
            with ConvoyCluster(base_port=options.base_port) as cluster:
                cluster.start()
                if "throughput" in cases:
                    throughput(cluster, options.seconds, found)
                if "changes" in cases:
                    changes(cluster, options.changes, found)
                if "stalls" in cases:
                    stalls(cluster, options.changes, found)
                if "order" in cases:
                    order(cluster, found)
            if "idle" in cases:
                with ConvoyCluster(base_port=options.base_port) as cluster:
                    cluster.start()
                    idle(cluster, options.topics, options.idle_seconds, found)
    except (LoadFailed, NotUsable, OSError, httpx.HTTPError) as error:
        console.print(f"[bold red]{error}[/]", highlight=False)
        return 1
    table = Table("measure", "median", "p99", "largest", "samples")
    for name, samples in found.values.items():
        ordered = sorted(samples)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        table.add_row(
            name,
            f"{statistics.median(ordered):,.2f}",
            f"{p99:,.2f}",
            f"{ordered[-1]:,.2f}",
            str(len(ordered)),
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found.values, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
