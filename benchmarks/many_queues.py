"""What thousands of quorum queues cost: declaring, resting, listing, metrics, emptying the WAL,
draining, starting or losing a node.

`python benchmarks/many_queues.py --queues 4000` runs three nodes on loopback, `--nodes 1` one node
with queues of one replica, and prints a figure a line, then a table of those that have an aim
(docs/scale.md). While a phase runs, a probe publishes one message after the other and waits for
each confirm: its longest wait is how long the phase stopped others. `--phases drain` runs only that
one. Processor time is steady on a busy machine; rates and waits are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.amqp import PROBE_QUEUE, TIMEOUT_S, Client, Probe
from benchmarks.cases import cpu_seconds
from benchmarks.convoy import ConvoyCluster
from convoymq.compiled_modules import build_text

LED_PROBES = 4
"""Probes of queues that the drained node leads: each meets the change of one leader."""
POLL_S = 0.02
IDLE_S = 10.0
WAL_MESSAGES = 5000
PHASES = ("idle", "list", "metrics", "wal", "drain", "lose", "stop")
OF_SEVERAL = frozenset(("drain", "lose"))
"""Phases that need other nodes."""
SCRAPES = 3
WAL_FILE_BYTES = 1 << 20
"""Small files, so that some are emptied."""
AIMS = {
    "declare, 8 connections": (1500, "/s at least"),
    "declare: processor time of nodes a queue": (None, "ms"),
    "memory a replica": (12, "KB"),
    "idle: processor of a node": (1, "% of a core"),
    "metrics: a scrape": (200, "ms"),
    "wal: longest confirm of others": (20, "ms"),
    "wal: files behind, at most": (2, ""),
    "kill: confirms in queues in use": (2, "s"),
    "start of all: processor time a replica": (0.5, "ms"),
}
"""Figure -> its aim (issue 33) and unit; None: there is none."""


class Bench:
    """The phases. Every figure is printed and kept in `figures`."""

    def __init__(self, cluster: ConvoyCluster, queues: int, pause_s: float) -> None:
        self.cluster = cluster
        self.queues = queues
        self.pause_s = pause_s
        self.figures: dict[str, float] = {}
        self.names = [f"q{number}" for number in range(queues)]

    def note(self, name: str, value: float, unit: str) -> None:
        self.figures[name] = round(value, 3)
        print(f"{name:46s} {value:10.2f} {unit}", flush=True)

    def port(self, index: int) -> int:
        return self.cluster.nodes[index % len(self.cluster.nodes)].port

    def resident_kb(self) -> float:
        """Memory of all nodes."""
        pages = (
            int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
            for node in self.cluster.nodes
        )
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1000

    def replicas(self) -> int:
        """Replicas of all queues."""
        return self.queues * len(self.cluster.nodes)

    @contextlib.contextmanager
    def phase(self, name: str, probed: int | None = 1) -> Iterator[None]:
        """Measures processor time of the nodes that run throughout, and the probe's waits."""
        pids = [node.process.pid for node in self.cluster.nodes if node.process is not None]
        before = {pid: cpu_seconds(pid) for pid in pids}
        probe = Probe(self.port(probed)) if probed is not None else None
        began = time.monotonic()
        yield
        self.note(f"{name}: wall", time.monotonic() - began, "s")
        if probe is not None:
            self.note(f"{name}: longest confirm of others", probe.stop(), "ms")
        used = 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                used += cpu_seconds(pid) - before[pid]
        self.note(f"{name}: processor time of nodes", used, "s")

    def declare(self) -> None:
        """A quarter by one connection, the rest by eight."""
        with Client(self.port(1)) as client:
            client.declare(PROBE_QUEUE)
        quarter = self.names[: self.queues // 4]
        with self.phase("declare, 1 connection"), Client(self.port(0)) as client:
            for name in quarter:
                client.declare(name)
        seconds = self.figures["declare, 1 connection: wall"]
        self.note("declare, 1 connection", len(quarter) / seconds, "/s")
        rest = self.names[self.queues // 4 :]
        with self.phase("declare, 8 connections"):
            threads = [
                threading.Thread(target=self._declare_some, args=(rest[turn::8],))
                for turn in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        seconds = self.figures["declare, 8 connections: wall"]
        self.note("declare, 8 connections", len(rest) / seconds, "/s")
        used = self.figures["declare, 8 connections: processor time of nodes"]
        self.note("declare: processor time of nodes a queue", 1000 * used / len(rest), "ms")

    def idle(self) -> None:
        """Nobody does anything."""
        with self.phase("idle", probed=None):
            time.sleep(IDLE_S)
        used = self.figures["idle: processor time of nodes"] / len(self.cluster.nodes)
        self.note("idle: processor of a node", 100 * used / IDLE_S, "% of a core")

    def metrics(self) -> None:
        """Prometheus reads the metrics of a node, after a first time."""
        url = f"http://127.0.0.1:{self.cluster.base_port + 31}/metrics"
        httpx.get(url, timeout=TIMEOUT_S)
        with self.phase("metrics"):
            for _ in range(SCRAPES):
                httpx.get(url, timeout=TIMEOUT_S).raise_for_status()
        used = self.figures["metrics: processor time of nodes"]
        self.note("metrics: processor time a scrape", 1000 * used / SCRAPES, "ms")
        self.note("metrics: a scrape", 1000 * self.figures["metrics: wall"] / SCRAPES, "ms")

    def _wal_files(self) -> int:
        url = f"http://127.0.0.1:{self.cluster.base_port + 31}/metrics"
        text = httpx.get(url, timeout=TIMEOUT_S).text
        return int(text.split("\nrabbitmq_raft_wal_files ", 1)[1].split(None, 1)[0])

    def wal(self) -> None:
        """Each queue gets a message, then others fill WAL files: what is alive is moved."""
        most = 0
        with Client(self.port(0)) as client:
            for name in self.names:
                client.publish(name)
        with self.phase("wal"), Client(self.port(0)) as client:
            for turn in range(WAL_MESSAGES):
                client.publish(self.names[turn % len(self.names)])
                if turn % 500 == 0:
                    most = max(most, self._wal_files())
        began = time.monotonic()
        while self._wal_files() > 1 and time.monotonic() - began < TIMEOUT_S:
            time.sleep(POLL_S)
        self.note("wal: files behind, at most", most, "")
        self.note("wal: emptied after", time.monotonic() - began, "s")

    def _declare_some(self, names: list[str]) -> None:
        with Client(self.port(0)) as client:
            for name in names:
                client.declare(name)

    def list(self) -> None:
        """The HTTP API's list, whole and by the page, and its overview."""
        api = f"http://127.0.0.1:{self.cluster.base_port + 21 + 1 % len(self.cluster.nodes)}"
        with httpx.Client(base_url=api, auth=("guest", "guest"), timeout=TIMEOUT_S) as http:
            for name, path in (
                ("list all", "/api/queues"),
                ("list a page", "/api/queues?page=2&page_size=100"),
                ("overview", "/api/overview"),
            ):
                with self.phase(name):
                    for _ in range(3):
                        answer = http.get(path)
                        answer.raise_for_status()

    def _http(self, index: int) -> httpx.Client:
        api = f"http://127.0.0.1:{self.cluster.base_port + 21 + index}"
        return httpx.Client(base_url=api, auth=("guest", "guest"), timeout=TIMEOUT_S)

    def _led(self, index: int) -> int:
        with self._http(index) as http:
            answer = http.get("/api/convoy/node")
            answer.raise_for_status()
            return int(answer.json()["groups_led"])

    def _drain(self, index: int) -> float:
        """Seconds until a node leads nothing."""
        began = time.monotonic()
        with self._http((index + 1) % 3) as http:
            http.post(f"/api/convoy/nodes/{index + 1}/drain").raise_for_status()
        while self._led(index):
            if time.monotonic() - began > TIMEOUT_S:
                raise TimeoutError(f"node {index} is not drained")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _revive(self, index: int) -> None:
        with self._http(index) as http:
            http.post(f"/api/convoy/nodes/{index + 1}/revive").raise_for_status()

    def drain(self) -> None:
        """The node that leads all queues is drained; then it gets them back, as the others are."""
        self.note("drain: groups led", self._led(0), "")
        rest = random.Random(4).sample(self.names, min(LED_PROBES, len(self.names)))
        time.sleep(self.pause_s)
        with self.phase("drain"):
            led = [Probe(self.port(2), name) for name in rest]
            self.note("drain: leads nothing after", self._drain(0), "s")
            for probe in led:
                self.note(f"drain: longest confirm in {probe.queue}", probe.stop(), "ms")
        self._revive(0)
        time.sleep(self.pause_s)
        for index in (1, 2):
            groups = self._led(index)
            seconds = self._drain(index)
            self.note(f"drain of node {index + 1} with {groups} groups", seconds, "s")
        for index in (1, 2):
            self._revive(index)
        time.sleep(self.pause_s)

    def _usable(self, index: int, queue: str) -> float:
        """Seconds until a node serves a publish to a queue of its own."""
        began = time.monotonic()
        while time.monotonic() - began < TIMEOUT_S:
            try:
                with Client(self.port(index)) as client:
                    client.publish(queue)
                    return time.monotonic() - began
            except (OSError, ConnectionError):
                time.sleep(0.01)
        raise TimeoutError(f"node {index} is not usable")

    def lose(self) -> None:
        """The node that leads most queues dies, and comes back."""
        sample = random.Random(1).sample(self.names, min(20, len(self.names)))
        used = [Client(self.port(1)) for _ in sample]
        for client, name in zip(used, sample, strict=True):
            client.publish(name)
        idle = random.Random(2).sample(self.names, min(20, len(self.names)))
        time.sleep(self.pause_s)
        with self.phase("kill"):
            self.cluster.kill(0, signal.SIGKILL)
            began = time.monotonic()
            for client, name in zip(used, sample, strict=True):
                client.publish(name)
            self.note("kill: confirms in queues in use", time.monotonic() - began, "s")
            with Client(self.port(2)) as client:
                for name in idle:
                    client.publish(name)
            self.note("kill: confirms in idle queues", time.monotonic() - began, "s")
            time.sleep(self.pause_s)
        for client in used:
            client.close()
        with self.phase("start"):
            began = time.monotonic()
            self.cluster.nodes[0].process = self.cluster.spawn(0)
            self._usable(0, self.names[-1])
            self.note("start: usable", time.monotonic() - began, "s")
            time.sleep(self.pause_s)
        self.note("start: processor time of that node", cpu_seconds(self.cluster.nodes[0].pid), "s")

    def stop_all(self) -> None:
        """All nodes die at once, and start."""
        count = len(self.cluster.nodes)
        for index in range(count):
            self.cluster.kill(index, signal.SIGKILL)
        began = time.monotonic()
        for index in range(count):
            self.cluster.nodes[index].process = self.cluster.spawn(index)
        self._usable(0, self.names[0])
        self.note("start of all: usable", time.monotonic() - began, "s")
        self._usable(1, self.names[0])
        with Client(self.port(1)) as client:
            for name in random.Random(3).sample(self.names, min(100, len(self.names))):
                client.publish(name)
        self.note("start of all: 100 queues confirm", time.monotonic() - began, "s")
        used = sum(cpu_seconds(node.pid) for node in self.cluster.nodes)
        self.note("start of all: processor time", used, "s")
        self.note("start of all: processor time a replica", 1000 * used / self.replicas(), "ms")

    def run(self, phases: list[str]) -> None:
        """The phases, behind the one that declares."""
        before_kb = self.resident_kb()
        self.declare()
        self.note("memory a replica", (self.resident_kb() - before_kb) / self.replicas(), "KB")
        time.sleep(self.pause_s)
        steps = (
            *(self.idle, self.list, self.metrics, self.wal),
            *(self.drain, self.lose, self.stop_all),
        )
        for name, phase in zip(PHASES, steps, strict=True):
            if name in phases and (len(self.cluster.nodes) > 1 or name not in OF_SEVERAL):
                phase()

    def show_aims(self) -> None:
        """Prints the figures that have an aim."""
        table = Table("figure", "result", "aim", title=build_text())
        for name, (aim, unit) in AIMS.items():
            if name in self.figures:
                table.add_row(
                    name, f"{self.figures[name]:g}", f"{'' if aim is None else aim} {unit}"
                )
        Console().print(table)


def main() -> None:
    """Runs the phases once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=4000)
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=3)
    parser.add_argument("--base-port", type=int, default=5800)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds of rest after a phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    print(
        f"{options.queues} queues, load {os.getloadavg()[0]:.1f} at the start, {build_text()}",
        flush=True,
    )
    settings = {"raft.wal_max_size_bytes": str(WAL_FILE_BYTES)}
    count, base_port = options.nodes, options.base_port
    with ConvoyCluster(base_port=base_port, count=count, settings=settings) as cluster:
        cluster.start()
        bench = Bench(cluster, options.queues, options.pause)
        try:
            bench.run(options.phases)
            bench.show_aims()
        except BaseException:
            for node in cluster.nodes:
                print(cluster.log_tail(node, 5), file=sys.stderr)
            raise
        finally:
            if options.json:
                options.json.write_text(json.dumps(bench.figures, indent=1) + "\n")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
