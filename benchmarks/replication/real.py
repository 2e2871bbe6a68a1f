"""Drives the ways through the schedules with real nodes: three processes on loopback.

Links go through proxies, so that a node can be cut off. Every node has a publisher and a consumer,
which stay with it. A slow disk comes from a library that stands before the C library's syncs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tests.clusters import call, wait_http
from tests.faults.proxies import ProxiedCluster, Proxies
from tests.faults.traffic import Consumer, Publisher, connect, until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

from benchmarks.replication.faults import NODES, RUN_S, SLOW_S, Fault, Step
from benchmarks.replication.ledger import Delivered, Key, Ledger
from convoymq.cli.cluster import LocalNode

QUEUE = "orders"
BASE_PORT = cluster_ports(__name__)
BODY_BYTES = 1024
PER_TICK = 1
"""Messages that a publisher publishes every 10 ms."""
SETTLED_S = 15.0
"""After the faults, a run is over when nothing came for this long."""
SETTINGS = {"raft.wal_max_size_bytes": "16MiB"}
SLOW_SYNC = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait_if_slow(void) {
    const char *name = getenv("SLOW_DISK_FILE");
    char text[16] = {0};
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    if (read(file, text, sizeof text - 1) > 0) usleep((useconds_t)atol(text));
    close(file);
}
int fsync(int file) { wait_if_slow(); return (int)syscall(SYS_fsync, file); }
int fdatasync(int file) { wait_if_slow(); return (int)syscall(SYS_fdatasync, file); }
"""


def build_slow_sync(directory: Path) -> Path | None:
    """The library that makes syncs slow; None = there is no C compiler, or one is in use."""
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None or "LD_PRELOAD" in os.environ:
        return None
    source, made = directory / "slow_sync.c", directory / "slow_sync.so"
    source.write_text(SLOW_SYNC)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


Runner: TypeAlias = Callable[[Fault, Path | None], Ledger]
"""Runs a schedule, with the library for slow disks or without it: what clients saw."""


class Outages:
    """Processes that are ended, and started again later; to be mixed with what starts them."""

    data: Path
    proxies: Proxies
    library: Path | None

    def __init__(self) -> None:
        self.starting: set[int] = set()
        """Nodes that will be started again."""

    def start_node(self, number: int) -> None:
        """Starts a process."""
        raise NotImplementedError

    def kill(self, number: int, sign: int = signal.SIGKILL) -> None:
        """Sends a process a signal."""
        raise NotImplementedError

    def kill_process(self, node: int, sign: int) -> None:
        """Ends a process, and waits for that."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Waits until all that run serve."""
        raise NotImplementedError

    def leader_of(self, name: str) -> int:
        """Returns the node that decides for a queue."""
        raise NotImplementedError

    def link_bytes(self) -> int:
        """Returns what all nodes have sent each other."""
        raise NotImplementedError

    def slow_file(self, node: int) -> Path:
        """Returns the file that makes a node's disk slow."""
        return self.data / f"node-{node}" / "slow"

    def preloaded(self, node: int) -> dict[str, str]:
        """Returns the environment that makes a node heed its file."""
        if self.library is None:
            return {}
        return {"LD_PRELOAD": str(self.library), "SLOW_DISK_FILE": str(self.slow_file(node))}

    def later(self, for_s: float, call_: Callable[[], object]) -> None:
        """Calls back after so long; 0 = never."""
        if for_s:
            timer = threading.Timer(for_s, call_)
            timer.daemon = True
            timer.start()

    def end(self, node: int, sign: int, for_s: float) -> None:
        """Ends a process; it is started again after so long."""
        if for_s:
            self.starting.add(node)
        self.kill_process(node, sign)
        self.later(for_s, lambda: self.start_again(node))

    def start_again(self, node: int) -> None:
        """Starts a node that was ended."""
        self.start_node(node)
        self.starting.discard(node)


class FaultyCluster(ProxiedCluster, Outages):
    """Three nodes that faults come to."""

    def __init__(self, data: Path, library: Path | None) -> None:
        Outages.__init__(self)
        ProxiedCluster.__init__(self, data, len(NODES), BASE_PORT, SETTINGS)
        self.library = library
        self.link_bytes_gone = 0
        """That processes had sent which are no more."""

    def _environment(self, node: LocalNode) -> dict[str, str]:
        return super()._environment(node) | self.preloaded(node.number)

    def link_bytes(self) -> int:
        """See `Outages`."""
        return self.link_bytes_gone + self.traffic().link_bytes

    def kill_process(self, node: int, sign: int) -> None:
        """See `Outages`."""
        before = self.traffic().link_bytes
        self.kill(node, sign)
        until(lambda: not self._running(node), f"node {node} does not end")
        self.poll()
        self.link_bytes_gone += before - self.traffic().link_bytes


class RealSite:
    """Implements `Site`."""

    def __init__(self, cluster: Outages) -> None:
        self.cluster = cluster

    def kill(self, node: int, for_s: float) -> None:
        self.cluster.end(node, signal.SIGKILL, for_s)

    def stop(self, node: int, for_s: float) -> None:
        self.cluster.end(node, signal.SIGTERM, for_s)

    def freeze(self, node: int, for_s: float) -> None:
        self.cluster.kill(node, signal.SIGSTOP)
        self.cluster.later(for_s, lambda: self.cluster.kill(node, signal.SIGCONT))

    def isolate(self, node: int, for_s: float) -> None:
        proxies = self.cluster.proxies
        for other in set(NODES) - {node}:
            proxies.cut(node, other, "silent")
            self.cluster.later(for_s, lambda other=other: proxies.heal(node, other))  # type: ignore[misc]

    def slow(self, node: int, for_s: float) -> None:
        file = self.cluster.slow_file(node)
        file.write_text(str(int(SLOW_S * 1e6)))
        self.cluster.later(for_s, file.unlink)


class Clock:
    """Seconds since the begin of a run."""

    began = 0.0

    def now_s(self) -> float:
        """See above."""
        return time.monotonic() - self.began


class NotedPublisher(Publisher):
    """Publishes steadily, everything once, at one node, and tells a ledger."""

    def __init__(self, node: int, port: int, ledger: Ledger, clock: Clock) -> None:
        super().__init__([port], QUEUE, BODY_BYTES, window=300)
        self.node = node
        self.ledger = ledger
        self.clock = clock
        self.next = node * 1_000_000

    def key(self, number: int) -> Key:
        """Publisher and number."""
        return number // 1_000_000, number

    @property
    def waits(self) -> bool:
        """See `Publishing`."""
        return bool(self.unconfirmed)

    def on_confirm(self, frame: Any) -> None:
        """See `Publisher`."""
        before = set(self.unconfirmed.values())
        super().on_confirm(frame)
        for number in before.difference(self.unconfirmed.values()) & self.confirmed:
            self.ledger.confirmed[self.key(number)] = self.clock.now_s(), self.node

    def on_tick(self) -> None:
        """See `Publisher`: a few at a time, and none again."""
        self.again.clear()
        if self.channel is None or not self.channel.is_open or self.blocked or self.ending:
            return
        for _ in range(PER_TICK):
            if len(self.unconfirmed) >= self.window:
                return
            number, self.next = self.next, self.next + 1
            self.tag += 1
            self.unconfirmed[self.tag] = number
            self.ledger.published[self.key(number)] = self.clock.now_s()
            self.publish(number)


class NotedConsumer(Consumer):
    """Consumes at one node, and tells a ledger."""

    def __init__(self, node: int, port: int, ledger: Ledger, clock: Clock) -> None:
        super().__init__([port], QUEUE, BODY_BYTES, prefetch=20)
        self.node = node
        self.ledger = ledger
        self.clock = clock

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """See `Consumer`."""
        super().on_message(channel, method, properties, body)
        number = int(body)
        self.ledger.delivered.append(
            Delivered(
                self.clock.now_s(),
                self.node,
                # A consumer that comes back is another one.
                self.node << 16 | self.attempt,
                (number // 1_000_000, number),
                bool(method.redelivered),
            )
        )


def declare(
    cluster: FaultyCluster, arguments: Mapping[str, object], policy: Mapping[str, object]
) -> None:
    """Declares the queue, and waits until it has all the copies that it is to have."""
    if policy:
        body = {"pattern": f"^{QUEUE}$", "definition": dict(policy), "apply-to": "queues"}
        until(lambda: call(cluster, "PUT", "policies/%2F/way", body)[0] < 300, "no policy")
    connection = connect(cluster, 1)
    connection.channel().queue_declare(QUEUE, durable=True, arguments=dict(arguments))
    connection.close()
    if policy:
        synchronised = "synchronised_slave_nodes"
        until(
            lambda: len(cluster.api(f"queues/%2F/{QUEUE}", 1).get(synchronised, ())) == 2,
            "no synchronised mirrors",
        )


@contextmanager
def cluster_of(library: Path | None) -> Iterator[FaultyCluster]:
    """A cluster that is ready."""
    directory = Path(tempfile.mkdtemp(prefix="replication-"))
    try:
        with FaultyCluster(directory / "cluster", library) as cluster:
            cluster.wait_ready()
            wait_http(cluster)
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Party(Protocol):
    """A client in a thread of its own."""

    stopping: bool
    failure: BaseException | None

    @property
    def ident(self) -> int | None:
        """Returns None before the start."""

    def start(self) -> None:
        """Begins."""

    def join(self, timeout: float | None) -> None:
        """Waits for the end."""


class Publishing(Party, Protocol):
    """A client that publishes; `ending`: no more."""

    ending: bool

    @property
    def waits(self) -> bool:
        """Returns whether confirms are still to come."""


def queue(arguments: Mapping[str, object], policy: Mapping[str, object]) -> Runner:
    """Runs a queue that is declared with arguments, under a policy."""

    def run(fault: Fault, library: Path | None) -> Ledger:
        ledger, clock = Ledger(), Clock()
        with cluster_of(library) as cluster:
            declare(cluster, arguments, policy)
            ports = {node.number: node.amqp_port for node in cluster.nodes}
            publishers = [NotedPublisher(n, ports[n], ledger, clock) for n in NODES]
            consumers = [NotedConsumer(n, ports[n], ledger, clock) for n in NODES]
            carry_out(cluster, fault, ledger, clock, publishers, consumers)
        return ledger

    return run


def carry_out(
    cluster: Outages,
    fault: Fault,
    ledger: Ledger,
    clock: Clock,
    publishers: Sequence[Publishing],
    consumers: Sequence[Party],
) -> None:
    """Runs clients under a schedule, until what is left has been consumed."""
    bytes_before = cluster.link_bytes()
    clock.began = time.monotonic()
    clients: list[Party] = [*publishers, *consumers]
    try:
        for client in clients if not fault.consume_from_s else publishers:
            client.start()
        _take_steps(cluster, fault, ledger, clock)
        _sleep_until(RUN_S, clock)
        ledger.link_bytes = cluster.link_bytes() - bytes_before
        for publisher in publishers:
            publisher.ending = True
        _await_restarts(cluster)
        if fault.consume_from_s:
            for consumer in consumers:
                consumer.start()
        _drain(ledger, publishers)
    finally:
        for client in clients:
            client.stopping = True
        for client in clients:
            if client.ident is not None:
                client.join(2.0)
    failures = [client.failure for client in clients if client.failure]
    assert not failures, failures


def _take_steps(cluster: Outages, fault: Fault, ledger: Ledger, clock: Clock) -> None:
    site = RealSite(cluster)
    for step in fault.steps:
        _sleep_until(step.at_s, clock)
        # One after the other: on a busy machine a start takes longer than the schedule has.
        _await_restarts(cluster)
        _take(site, step, cluster, ledger)


def _await_restarts(cluster: Outages) -> None:
    until(lambda: not cluster.starting, "a node is not started again")
    cluster.wait_ready()


def _take(site: RealSite, step: Step, cluster: Outages, ledger: Ledger) -> None:
    if not ledger.holder:
        ledger.holder = cluster.leader_of(QUEUE)
    for node in step.nodes(ledger.holder):
        getattr(site, step.action)(node, step.for_s)


def _sleep_until(at_s: float, clock: Clock) -> None:
    time.sleep(max(0.0, at_s - clock.now_s()))


def _drain(ledger: Ledger, publishers: Sequence[Publishing]) -> None:
    """Waits until all that is confirmed was delivered and nobody waits for a confirm, or nothing
    has come for a while."""
    deadline = time.monotonic() + PATIENCE_S
    seen, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        came = len(ledger.delivered) + len(ledger.confirmed)
        if came != seen:
            seen, since = came, time.monotonic()
        waiting = any(publisher.waits for publisher in publishers)
        delivered = {each.key for each in list(ledger.delivered)}
        done = not waiting and not set(ledger.confirmed) - delivered
        quiet_s = time.monotonic() - since
        # A moment longer: repeats may follow.
        if quiet_s > (1.0 if done else SETTLED_S):
            return
        time.sleep(0.1)
