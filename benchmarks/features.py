"""What features of quorum queues cost: throughput with each one on, beside the plain queue's.

    python benchmarks/features.py                       everything, three rounds
    python benchmarks/features.py --case ttl --runs 5   one feature

Three nodes of ConvoyMQ on loopback. A round runs the plain queue and each case in turn; a ratio is
that of a case and of the plain queue of its round. The moves of dead letters, at least once, are
measured on RabbitMQ as well, where it is installed. Of scheduled messages it is measured how late
they fire (`firing`) and how much memory a waiting one takes (`pending`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.convoy import ConvoyCluster
from benchmarks.disk import Disk
from benchmarks.load import Load, LoadFailed, broken_promises
from benchmarks.rabbitmq import RabbitCluster
from benchmarks.scheduled import PENDING_MS, Firing, bytes_each, firing
from benchmarks.systems import LocalCluster, NotUsable, SystemMissing, connect
from convoymq.compiled_modules import build_text

QUEUE = "perf"
TARGET = "dead"
POLL_S = 0.01
MOVES_TIMEOUT_S = 300.0
PENDING = 1_000_000
FIRST_SHARE = 0.1
"""Moves are timed from this share of the messages on: the source's time limit is over by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One case: what queue and messages have that the plain ones do not.

    `arguments` are the queue's, `options` those of `convoy perf`. `prepare` is called with the
    address of the HTTP API before the run, and what it returns afterwards. `share`: of the plain
    queue's throughput that is to be reached.
    """

    name: str
    title: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    options: Mapping[str, str | int] = field(default_factory=dict)
    prepare: Callable[[str], Callable[[], None]] | None = None
    share: float = 0.8


def policy(api: str) -> Callable[[], None]:
    """A policy that says what holds without it."""
    url = f"{api}/api/policies/%2F/perf"
    body = {"pattern": f"^{QUEUE}", "definition": {"delivery-limit": 20}, "apply-to": "queues"}
    _put(url, body)
    return lambda: _delete(url)


def bindings(count: int) -> Callable[[str], Callable[[], None]]:
    """Binds the queue to an exchange that is not published to."""

    def prepare(api: str) -> Callable[[], None]:
        url = f"{api}/api/exchanges/%2F/perf-bindings"
        _put(url, {"type": "direct", "durable": True})
        _put(
            f"{api}/api/queues/%2F/perf-bound",
            {"durable": True, "arguments": {"x-queue-type": "quorum"}},
        )
        definitions = {
            "bindings": [
                {
                    "source": "perf-bindings",
                    "vhost": "/",
                    "destination": "perf-bound",
                    "destination_type": "queue",
                    "routing_key": f"key-{number}",
                    "arguments": {},
                }
                for number in range(count)
            ]
        }
        httpx.post(
            f"{api}/api/definitions", json=definitions, auth=("guest", "guest"), timeout=120
        ).raise_for_status()

        def undo() -> None:
            _delete(url)
            _delete(f"{api}/api/queues/%2F/perf-bound")

        return undo

    return prepare


def _put(url: str, body: object) -> None:
    httpx.put(url, json=body, auth=("guest", "guest"), timeout=30).raise_for_status()


def _delete(url: str) -> None:
    httpx.delete(url, auth=("guest", "guest"), timeout=30).raise_for_status()


def dead_letters(target: str) -> dict[str, str | int]:
    """Arguments by which a queue moves its dead letters to another one, at least once."""
    return {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": target,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


PLAIN = Feature(name="plain", title="plain queue")
FEATURES = (
    Feature(name="policy", title="a policy without features", prepare=policy, share=0.98),
    Feature(name="ttl", title="message TTL of the queue", arguments={"x-message-ttl": 3_600_000}),
    Feature(
        name="expiration",
        title="expiration of messages",
        options={"property": "expiration=3600000"},
    ),
    Feature(name="priority", title="priority 7", options={"property": "priority=7"}),
    Feature(
        name="limits",
        title="length limits",
        arguments={"x-max-length": 10_000_000, "x-max-length-bytes": 1 << 40},
    ),
    Feature(
        name="dead-letters",
        title="dead letters, at least once, armed",
        arguments=dead_letters(TARGET),
    ),
    Feature(
        name="deduplication",
        title="duplicate window of 100,000 message ids",
        arguments={"x-deduplication-count": 100_000},
        options={"property": "message_id=m-########"},
    ),
    Feature(
        name="groups",
        title="1,000 message groups",
        options={"header": "x-group-id=g-########", "distinct": 1_000},
    ),
    Feature(name="scheduled", title="messages delayed by 10 ms", options={"header": "x-delay=10"}),
    # The first 100,000 messages are dealt one by one: nobody has settled anything yet.
    Feature(name="consumers", title="1,000 consumers", options={"consumers": 1_000, "warmup": 5}),
    Feature(name="bindings", title="10,000 bindings in the virtual host", prepare=bindings(10_000)),
)
OTHERS = ("moves", "firing", "pending")
"""Cases that are no throughput beside the plain queue's."""


class Rounds:
    """Samples, round by round."""

    def __init__(self, features: tuple[Feature, ...], seconds: float, base_port: int) -> None:
        self.features = features
        self.seconds = seconds
        self.base_port = base_port
        self.ratios: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {}
        self.failed: list[str] = []
        self.console = Console(stderr=True)
        self.disk = Disk(Path(tempfile.gettempdir()))

    def run(self) -> None:
        """One round on a fresh cluster."""
        with ConvoyCluster(base_port=self.base_port) as cluster:
            cluster.start()
            plain = 0.0
            for number, feature in enumerate(self.features):
                # The plain queue again now and then: a ratio is of neighbours in time.
                if number % 3 == 0:
                    plain = self._rate(cluster, PLAIN)
                rate = self._rate(cluster, feature)
                if rate and plain:
                    self.ratios.setdefault(feature.name, []).append(rate / plain)

    def _rate(self, cluster: ConvoyCluster, feature: Feature) -> float:
        self.disk.rest()
        try:
            undo = feature.prepare(cluster.api) if feature.prepare is not None else None
            try:
                result = load(cluster, feature, self.seconds).run()
            finally:
                if undo is not None:
                    undo()
        except (LoadFailed, NotUsable, OSError, httpx.HTTPError) as error:
            self.failed.append(f"{feature.name}: {error}")
            self.console.print(f"[bold red]failed[/] {feature.name}: {error}", highlight=False)
            return 0.0
        for text in broken_promises(result):
            self.failed.append(f"{feature.name}: {text}")
        rate = float(min(result["confirmed_per_s"], result["consumed_per_s"]))
        self.rates.setdefault(feature.name, []).append(rate)
        self.console.print(f"{feature.name:14} {rate:12,.0f} msg/s", highlight=False)
        return rate


def declared(arguments: Mapping[str, str | int]) -> tuple[str, ...]:
    """Flags of `convoy perf` that declare a queue with arguments."""
    return tuple(f"declare-args={key}={value}" for key, value in arguments.items())


def load(cluster: LocalCluster, feature: Feature, seconds: float) -> Load:
    """The load of a feature: one queue, everything on the first node."""
    return Load(
        declare=cluster.uris[0],
        publish=[cluster.uris[0]],
        consume=[cluster.uris[0]],
        pids=cluster.pids,
        options={"queue-prefix": QUEUE, **feature.options},
        flags=("persistent", "verify", *declared(feature.arguments)),
        seconds=seconds,
    )


def moves(cluster: LocalCluster, count: int) -> float:
    """Dead letters a second that a queue moves to another one, at least once."""
    connection = connect(cluster.uris[0], timeout_s=60)
    channel = connection.channel()
    channel.queue_declare(TARGET, durable=True, arguments={"x-queue-type": "quorum"})
    arguments = dead_letters(TARGET) | {"x-queue-type": "quorum", "x-message-ttl": 10_000}
    channel.queue_declare("moving-0", durable=True, arguments=arguments)
    Load(
        declare=cluster.uris[0],
        publish=[cluster.uris[0]],
        consume=[cluster.uris[0]],
        pids=cluster.pids,
        size=200,
        options={"queue-prefix": "moving", "mode": "pub", "count": count},
        flags=("persistent", "keep", "no-delete-first", *declared(arguments)),
    ).run()
    deadline = time.monotonic() + MOVES_TIMEOUT_S
    first: tuple[float, int] | None = None
    while True:
        moved = channel.queue_declare(TARGET, passive=True).method.message_count
        now = time.monotonic()
        if first is None and moved >= FIRST_SHARE * count:
            first = (now, moved)
        if moved >= count:
            break
        if now > deadline:
            raise NotUsable(f"{moved} of {count} dead letters after {MOVES_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    channel.queue_delete("moving-0")
    channel.queue_delete(TARGET)
    connection.close()
    assert first is not None, "all came at once"
    return (count - first[1]) / max(now - first[0], POLL_S)


def compare_moves(runs: int, base_port: int, console: Console) -> dict[str, list[float]]:
    """Moves a second of both systems; what is not installed is left out, and said."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        for system in ("convoy", "rabbitmq"):
            try:
                cluster: LocalCluster = (
                    ConvoyCluster(base_port=base_port)
                    if system == "convoy"
                    else RabbitCluster(base_port=base_port + 50)
                )
            except SystemMissing as error:
                console.print(f"[yellow]skipped: {error}[/]")
                continue
            with cluster:
                cluster.start()
                rate = moves(cluster, 200_000 if system == "convoy" else 20_000)
            found.setdefault(system, []).append(rate)
            console.print(f"moves {system:9} {rate:12,.0f} msg/s", highlight=False)
    return found


def measure_scheduled(
    chosen: list[str], seconds: float, base_port: int
) -> tuple[Firing | None, dict[str, float]]:
    """Messages that wait, on a fresh cluster for each question."""
    fired: Firing | None = None
    pending: dict[str, float] = {}
    if "firing" in chosen:
        with ConvoyCluster(base_port=base_port) as cluster:
            cluster.start()
            fired = firing(cluster, seconds)
    for name, delay_ms in PENDING_MS.items() if "pending" in chosen else ():
        with ConvoyCluster(base_port=base_port) as cluster:
            cluster.start()
            pending[name] = bytes_each(cluster, PENDING, delay_ms)
    return fired, pending


def main() -> int:
    """Exit code: 0 done, 1 a run failed or a promise broke."""
    parser = argparse.ArgumentParser(description="What features of quorum queues cost")
    names = [feature.name for feature in FEATURES]
    parser.add_argument("--case", action="append", choices=[*names, *OTHERS])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--base-port", type=int, default=28600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = tuple(f for f in FEATURES if not options.case or f.name in options.case)
    rounds = Rounds(chosen, options.seconds, options.base_port)
    rounds.console.print(build_text(), highlight=False)
    for _ in range(options.runs if chosen else 0):
        rounds.run()
    moved: dict[str, list[float]] = {}
    if not options.case or "moves" in options.case:
        moved = compare_moves(options.runs, options.base_port, rounds.console)
    fired, pending = measure_scheduled(
        options.case or list(OTHERS), options.seconds, options.base_port
    )
    table = Table("case", "msg/s", "of the plain queue", "to reach")
    for feature in chosen:
        ratios = rounds.ratios.get(feature.name)
        if ratios:
            table.add_row(
                feature.title,
                f"{statistics.median(rounds.rates[feature.name]):,.0f}",
                f"{statistics.median(ratios):.1%} ({min(ratios):.0%} to {max(ratios):.0%})",
                f"≥ {feature.share:.0%}",
            )
    for system, rates in moved.items():
        table.add_row(f"dead letters moved, {system}", f"{statistics.median(rates):,.0f}", "", "")
    if fired is not None:
        late = f"p50 {fired.p50_ms:.1f} ms, p99 {fired.p99_ms:.1f} ms late"
        table.add_row("delayed by 1 s, 10,000/s", f"{fired.rate:,.0f}", late, "≤ 10 ms")
    for name, size in pending.items():
        row = f"{size:.1f} B of memory each"
        table.add_row(f"a million {name} messages", "", row, "≤ 64 B" if name == "waiting" else "")
    Console().print(table)
    if options.json is not None:
        samples = {"rates": rounds.rates, "ratios": rounds.ratios, "moves": moved}
        options.json.write_text(json.dumps(samples, indent=2))
    for text in rounds.failed:
        rounds.console.print(f"[bold red]{text}[/]", highlight=False)
    return 1 if rounds.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
