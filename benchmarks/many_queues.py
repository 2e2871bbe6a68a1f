"""What thousands of quorum queues cost: declaring, listing, draining, starting or losing a node.

`python benchmarks/many_queues.py --queues 4000` runs three nodes on loopback and prints a figure a
line. While a phase runs, a probe publishes one message after the other and waits for each confirm:
its longest wait is how long the phase stopped others. `--phases drain` runs only that one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.convoy import ConvoyCluster
from convoymq.compiled_modules import build_text

PROBE_PAUSE_S = 0.002
TIMEOUT_S = 120.0
QUORUM = b"\x0cx-queue-typeS" + struct.pack(">I", 6) + b"quorum"
PROBE_QUEUE = "probe"
LED_PROBES = 4
"""Probes of queues that the drained node leads: each meets the change of one leader."""
POLL_S = 0.02
PHASES = ("list", "drain", "lose", "stop")


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data


class Client:
    """One AMQP connection with one channel in confirm mode, as cheap as Python allows: what is
    measured shares its processors."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._published = 0
        try:
            self._open()
        except BaseException:
            self._socket.close()
            raise

    def _open(self) -> None:
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(10, 10)
        plain = b"\0guest\0guest"
        body = struct.pack(">I", 0) + _short("PLAIN") + struct.pack(">I", len(plain)) + plain
        self._send(0, 10, 11, body + _short("en_US"))
        channels, frame, _ = struct.unpack(">HIH", self._expect(10, 30)[:8])
        self._send(0, 10, 31, struct.pack(">HIH", channels, frame, 0))
        self._send(0, 10, 40, _short("/") + _short("") + b"\0")
        self._expect(10, 41)
        self._send(1, 20, 10, _short(""))
        self._expect(20, 11)
        self._send(1, 85, 10, b"\0")
        self._expect(85, 11)

    def _send(self, channel: int, class_id: int, method: int, body: bytes) -> None:
        self._socket.sendall(_frame(1, channel, struct.pack(">HH", class_id, method) + body))

    def _expect(self, class_id: int, method: int) -> bytes:
        while True:
            while len(self._buffer) < 7:
                self._receive()
            kind, _, size = struct.unpack(">BHI", self._buffer[:7])
            while len(self._buffer) < size + 8:
                self._receive()
            payload, self._buffer = self._buffer[7 : 7 + size], self._buffer[size + 8 :]
            if kind != 1:
                continue
            if payload[:4] != struct.pack(">HH", class_id, method):
                raise ConnectionError(f"answer {payload[:120]!r}")
            return payload[4:]

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("closed")
        self._buffer += data

    def declare(self, name: str) -> None:
        """Declares a quorum queue and waits for the answer."""
        table = struct.pack(">I", len(QUORUM)) + QUORUM
        self._send(1, 50, 10, b"\0\0" + _short(name) + b"\x02" + table)
        self._expect(50, 11)

    def publish(self, name: str) -> None:
        """Publishes a message of 16 bytes and waits for its confirm."""
        method = struct.pack(">HHH", 60, 40, 0) + _short("") + _short(name) + b"\0"
        header = struct.pack(">HHQH", 60, 0, 16, 0)
        self._socket.sendall(
            _frame(1, 1, method) + _frame(2, 1, header) + _frame(3, 1, b"0123456789abcdef")
        )
        self._expect(60, 80)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


class Probe:
    """Publishes confirmed messages, one after the other, in a thread of its own."""

    def __init__(self, port: int, queue: str = PROBE_QUEUE) -> None:
        self.waits: list[float] = []
        self.failure: Exception | None = None
        self.queue = queue
        self._client = Client(port)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop:
                began = time.monotonic()
                self._client.publish(self.queue)
                self.waits.append(time.monotonic() - began)
                time.sleep(PROBE_PAUSE_S)
        except (OSError, ConnectionError) as error:
            self.failure = error

    def stop(self) -> float:
        """Returns the longest wait, ms."""
        self._stop = True
        self._thread.join(TIMEOUT_S)
        self._client.close()
        if self.failure is not None:
            raise self.failure
        return max(self.waits, default=0.0) * 1000


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        return self.cluster.nodes[index].port

    @contextlib.contextmanager
    def phase(self, name: str, probed: int | None = 1) -> Iterator[None]:
        """Measures processor time of the nodes that run throughout, and the probe's waits."""
        pids = [node.process.pid for node in self.cluster.nodes if node.process is not None]
        before = {pid: cpu_s(pid) for pid in pids}
        probe = Probe(self.port(probed)) if probed is not None else None
        began = time.monotonic()
        yield
        self.note(f"{name}: wall", time.monotonic() - began, "s")
        if probe is not None:
            self.note(f"{name}: longest confirm of others", probe.stop(), "ms")
        used = 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                used += cpu_s(pid) - before[pid]
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

    def _declare_some(self, names: list[str]) -> None:
        with Client(self.port(0)) as client:
            for name in names:
                client.declare(name)

    def list(self) -> None:
        """The HTTP API's list, whole and by the page, and its overview."""
        api = f"http://127.0.0.1:{self.cluster.base_port + 22}"
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
        self.note("start: processor time of that node", cpu_s(self.cluster.nodes[0].pid), "s")

    def stop_all(self) -> None:
        """All nodes die at once, and start."""
        for index in range(3):
            self.cluster.kill(index, signal.SIGKILL)
        began = time.monotonic()
        for index in range(3):
            self.cluster.nodes[index].process = self.cluster.spawn(index)
        self._usable(0, self.names[0])
        self.note("start of all: usable", time.monotonic() - began, "s")
        self._usable(1, self.names[0])
        with Client(self.port(1)) as client:
            for name in random.Random(3).sample(self.names, min(100, len(self.names))):
                client.publish(name)
        self.note("start of all: 100 queues confirm", time.monotonic() - began, "s")
        used = sum(cpu_s(node.pid) for node in self.cluster.nodes)
        self.note("start of all: processor time", used, "s")

    def run(self, phases: list[str]) -> None:
        """The phases, behind the one that declares."""
        self.declare()
        for node in self.cluster.nodes:
            rss = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * 4096 / 1e6
            self.note(f"memory of {node.name}", rss, "MB")
        time.sleep(self.pause_s)
        steps = (self.list, self.drain, self.lose, self.stop_all)
        for name, phase in zip(PHASES, steps, strict=True):
            if name in phases:
                phase()


def main() -> None:
    """Runs the phases once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=4000)
    parser.add_argument("--base-port", type=int, default=5800)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds of rest after a phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    print(
        f"{options.queues} queues, load {os.getloadavg()[0]:.1f} at the start, {build_text()}",
        flush=True,
    )
    with ConvoyCluster(base_port=options.base_port) as cluster:
        cluster.start()
        bench = Bench(cluster, options.queues, options.pause)
        try:
            bench.run(options.phases)
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
