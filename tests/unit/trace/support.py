"""Queues whose trace is written to real files, without a cluster: logs that a machine applies."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from convoymq.kernels import batch
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER
from convoymq.trace import segments
from convoymq.trace.recorder import QueueTrace
from convoymq.trace.segments import Origin
from convoymq.trace.writer import Writer
from tests.unit.queues.quorum.support import Log, session_id

GROUP = 7


def wall_clock_us() -> int:
    """The clock of a node that nothing holds."""
    return time.time_ns() // 1000


class Recording:
    """One node's replica of a queue, and its trace below `root`."""

    def __init__(
        self,
        root: Path,
        node: int = 1,
        incarnation: int = 1,
        *,
        queue: str = "orders",
        group: int = GROUP,
        backlog_max_bytes: int = 64 << 20,
        replicas: tuple[int, ...] = (),
        **settings: Any,
    ) -> None:
        self.root = root
        self.now_us = 1_000_000_000
        self.writer = Writer(root, retention_bytes=1 << 40, backlog_max_bytes=backlog_max_bytes)
        self.origin = Origin(
            vhost="/",
            queue=queue,
            type="quorum",
            group=group,
            node=node,
            incarnation=incarnation,
        )
        self.directory = self.origin.directory(root)
        self.trace = QueueTrace(
            self.origin,
            self.writer,
            self.directory,
            through=segments.covered_through(self.directory, self.origin),
            now_us=self.clock,
            members=lambda: [(each, 1, True) for each in replicas or (node,)],
        )
        self.machine = QuorumMachine(settings)
        self.trace.attach(self.machine)

    def clock(self) -> int:
        self.now_us += 1
        return self.now_us

    def apply(
        self, entries: list[Any], log: Log | None = None, every: list[Any] | None = None
    ) -> None:
        """Applies entries as a replica does; with `log` also does what its node's clients do:
        confirms and sends. `every`: all entries of the log, when `entries` is a part of it."""
        blocks = entries if every is None else every
        for entry in entries:
            self.now_us = max(self.now_us, entry.time_ms * 1000)
            self.machine.apply(entry.index, entry.time_ms, entry.data)
            effects, self.machine.effects = self.machine.effects, []
            for effect in effects:
                if log is None or effect[0] > EFFECT_DELIVER:
                    continue
                session = effect[1]
                if session >> 56 != self.origin.node:
                    continue
                if effect[0] == EFFECT_DELIVER:
                    _, _, consumer, first_id, _, command, first, count, acquired, failed = effect
                    block = blocks[effect[4] - 1].data
                    self.trace.sent(
                        session, consumer, first_id, block, command, first, count, acquired, failed
                    )
                else:
                    self.trace.confirms(session, log.targets[session].applied(effect[2]))

    def close(self) -> None:
        """An orderly end."""
        self.trace.close()
        assert self.writer.close(30)

    def kill(self) -> None:
        """The process dies: what was handed over is in the journal, the rest is gone."""
        assert self.writer.close(30)
        self.machine.trace = None
        segment = self.trace._feed.segment
        if segment is not None and segment._file is not None:
            segment._file.close()


def rows_of(root: Path) -> list[dict[str, Any]]:
    """All rows of all segments, as plain dicts, file by file."""
    found: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*.parquet")):
        found += pq.read_table(path, partitioning=None).to_pylist()
    return found


class ConfirmedLog(Log):
    """A log whose publishes ask for confirms."""

    tag = 0

    def publish(self, session: int, sizes: Iterable[int]) -> None:
        for size in sizes:
            self.tag += 1
            self._target(session).publish([b"\0\1q", b"h", bytes(size)], size, self.tag)


def random_log(seed: int, entries: int = 60, *, purge: bool = True) -> Log:
    """Publishes, acknowledgements, returns, rejections, gets, a purge, a reservation, a lost
    node."""
    rng = random.Random(seed)
    log = ConfirmedLog()
    publishers = [session_id(node, 1) for node in (1, 2)]
    consumers = [(session_id(node, 9), number) for node in (1, 2, 3) for number in (1, 2)]
    for session, number in consumers:
        log.checkout(session, number, prefetch=rng.randint(1, 8))
    log.seal()
    epoch = len(log.entries) + 1
    log.reservation(publishers[0], "open", owner="o", ttl_ms=60_000)
    log.seal()
    reserved = 0
    for _ in range(entries):
        for publisher in publishers:
            log.publish(publisher, [rng.randint(1, 50)] * rng.randint(0, 12))
        for session, number in consumers:
            first = rng.randint(0, 40)
            match rng.randint(0, 5):
                case 0 | 1 | 2:
                    log.settle(session, number, first, first + 6)
                case 3:
                    log.return_(session, number, first, first + 1, failed=rng.random() < 0.5)
                case 4:
                    log.discard(session, number, first, first)
        if rng.random() < 0.2:
            log.get(publishers[1])
        if rng.random() < 0.1:
            reserved += 3
            log.reservation(
                publishers[0], "take", epoch=epoch, fencing_token=1, max=3, after=reserved - 3
            )
        log.seal()
    log.node_down(3, gone=True)
    log.seal()
    if purge:
        log.command(publishers[0], batch.CMD_PURGE)
        log.seal()
    return log
