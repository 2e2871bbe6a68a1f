"""One run: an ordered topic, its clients, and everything that goes wrong; then quiet, and the end.

**Chaos**: producers publish, groups consume, partitions split, merge and move, and faults come.
**Quiet**: everything heals; what is left must be stored, changed, advanced, acknowledged and
released from the park log within `QUIET_MS`. Then the referee reads the trace.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection

from convoymq.sim.engine import Result, Simulation
from convoymq.sim.loads import Load
from convoymq.sim.topics import events
from convoymq.sim.topics.clients import SimProducer
from convoymq.sim.topics.members import SimMember
from convoymq.sim.topics.metadata import SimMetadata
from convoymq.sim.topics.network import Network
from convoymq.sim.topics.operations import Operations
from convoymq.sim.topics.partitions import SimPartition
from convoymq.sim.topics.plan import ALL_KINDS, Plan, draw_plan
from convoymq.sim.topics.referee import find_violations
from convoymq.topics.rules import hashing
from convoymq.topics.rules.answers import ProduceAnswer
from convoymq.topics.rules.commands import Open, Produce
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.server_lease import ServerLeases

QUIET_MS = 12_000
SERVER_TTL_MS = 120
SERVER_MARGIN_MS = 10
LOSS = 0.03
REPEAT = 0.03
TAIL_LINES = 400
COUNTED = (
    "send", "stored", "published", "deliver", "ack", "park", "advance", "seek", "loss", "skipped",
    "retried",
)  # fmt: skip
"""Events whose number is printed."""


class TopicWorld(Simulation):
    """A topic under test."""

    check_every_us = 50_000

    def __init__(
        self,
        plan: Plan,
        *,
        checks_machines: bool = False,
        sink: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(plan.seed, plan.chaos_ms * 1000)
        self.plan = plan
        self.checks_machines = checks_machines
        self._sink = sink
        self.network = Network(
            self,
            loss=LOSS if plan.has("loss") else 0.0,
            repeat=REPEAT if plan.has("repeat") else 0.0,
        )
        self.trace: list[events.Event] = []
        self.faults: Counter[str] = Counter()
        self.messages: dict[tuple[int, int, int, int], int] = {}
        """By producer, epoch, logical partition and sequence."""
        self.confirmed: set[int] = set()
        self._lps: dict[bytes, int] = {}
        self._granted: dict[tuple[str, int], int] = {}
        self._sinks: dict[tuple[str, bytes], tuple[int, int, int]] = {}
        self._seen: set[tuple[str, int, int]] = set()
        self._poison: dict[tuple[str, int], int] = {}
        self._versions: dict[int, int] = {}
        self.leases = ServerLeases(SERVER_TTL_MS, SERVER_MARGIN_MS)
        self.partitions: dict[int, SimPartition] = {}
        self.unbuildable: set[int] = set()
        self.consumers: dict[str, SimMember] = {}
        route = first_route(plan.logical, plan.partitions)
        self.metadata = SimMetadata(self, route)
        self._publish_first()
        self.producers = [SimProducer(self, 1 + number) for number in range(plan.producers)]
        self.operations = Operations(self)

    def _publish_first(self) -> None:
        route = self.metadata.topic.route
        spans = tuple((span.lo, span.hi, span.pid) for span in route.spans)
        if self.plan.weak:
            self.trace.append(events.Weak(0, self.plan.retries))
        self.trace.append(events.Published(0, 0, spans, "", (), route.pids, ()))
        for span in route.spans:
            self.create_partition(span.pid, span.lo, span.hi, 0)
            partition = self.partitions[span.pid]
            partition.machine.apply(Open("", 0, 0))
            self.trace.append(events.Opened(0, span.pid, 0))
        for number, dag in enumerate(self.plan.dag):
            self.metadata.add_group(f"g{number}", Mode.DAG if dag else Mode.LINEAR)

    # Time, in ms, and draws.

    @property
    def chaos(self) -> bool:
        """Returns whether load and faults go on."""
        return not self.quiet

    @property
    def now(self) -> int:
        """Returns the simulated time."""
        return self.scheduler.now_us // 1000

    def after(self, delay: int, call: Callable[..., object], *arguments: object) -> None:
        """Calls after a delay."""
        self.scheduler.after(delay * 1000, None, call, *arguments)

    def at(self, time: int, call: Callable[..., object], *arguments: object) -> None:
        """Calls at a time."""
        self.after(time - self.now, call, *arguments)

    def draw(self, low: int, high: int) -> int:
        """Returns a whole number in [low, high]; takes a draw even when there is one only."""
        return low + int(self.scheduler.rng.random() * (high - low + 1))

    # What the simulated parts ask.

    def lp_of(self, key: bytes) -> int:
        """The logical partition of a key."""
        lp = self._lps.get(key)
        if lp is None:
            lp = self._lps[key] = hashing.logical_partition(key, self.plan.logical)
        return lp

    def message_of(self, command: Produce) -> int:
        """Returns the message that a request carries."""
        return self.messages[command.producer, command.epoch, command.lp, command.seq]

    def create_partition(self, pid: int, lo: int, hi: int, version: int) -> bool:
        """A server creates a partition; False when it does not answer."""
        if pid in self.unbuildable:
            return False
        if pid not in self.partitions:
            self.partitions[pid] = SimPartition(self, pid, lo, hi, version)
            self._versions[pid] = version
        return True

    def created_version(self, pid: int) -> int:
        """The version that created a partition."""
        return self._versions[pid]

    def answer_for_missing(self, pid: int) -> ProduceAnswer:
        """Returns the answer for a partition that was deleted, or never came to be."""
        lineage = self.metadata.topic.lineage
        known = lineage.partitions.get(pid)
        if known is not None and known.is_deleted:
            return ProduceAnswer(Code.CLOSED, to_version=lineage.latest.version)
        return ProduceAnswer(Code.STALE_ROUTE)

    def may_accept(self, partition: SimPartition) -> bool:
        """Returns whether a partition's server holds a lease from the controller."""
        now, pid = self.now, partition.pid
        if not partition.cut and not partition.dark and self.leases.answer(pid, now):
            self.leases.renewed(pid, now)
        return self.leases.holds(pid, now)

    def granted(self, group: str, pid: int, epoch: int) -> bool:
        """Returns whether this lease is in force for the first time."""
        first = epoch > self._granted.get((group, pid), 0)
        if first:
            self._granted[group, pid] = epoch
        return first

    def handling_ms(self) -> int:
        """Draws the time that a handler takes."""
        slow = self.plan.slow_handlers and self.chaos
        return self.draw(5, 60) if slow else self.draw(1, 6)

    def fails(self, group: str, msg: int) -> bool:
        """Returns whether a handler fails this time."""
        if not self.plan.has("park"):
            return False
        left = self._poison.get((group, msg))
        if left is None:
            poisoned = self.chaos and self.scheduler.chance(0.06)
            left = self._poison[group, msg] = self.draw(1, 5) if poisoned else 0
        if not left or not self.chaos:
            return False
        self._poison[group, msg] = left - 1
        return True

    def sink(self, group: str, key: bytes, msg: int, token: tuple[int, int, int]) -> None:
        """An effect arrives at the sink, which keeps the latest token of each key; that of a weak
        topic keeps what it has seen."""
        gen, version, offset = token
        if self.plan.weak or not key:
            # Tokens say nothing where what comes late is behind what is newer, or without a key.
            applied = (group, gen, msg) not in self._seen
            self._seen.add((group, gen, msg))
        else:
            applied = token > self._sinks.get((group, key), (0, 0, 0))
        if applied:
            self._sinks[group, key] = token
        now = self.now
        self.trace.append(events.Effect(now, group, gen, key, msg, version, offset, applied))

    def fault(self, kind: str, what: object) -> None:
        """Something was done to the topic."""
        self.faults[kind] += 1
        self.trace.append(events.Fault(self.now, kind, str(what)))

    # The run

    def _begin(self) -> None:
        self.operations.begin()
        self.at(0, self.metadata.tick)

    def _heal(self) -> None:
        self.network.heal()
        self.operations.heal()

    def _patience_us(self) -> int:
        return QUIET_MS * 1000

    def _give_up(self, waiting: list[str]) -> None:
        self._judge(finished=False)
        super()._give_up(waiting)

    def _final_checks(self) -> None:
        self._judge(finished=True)

    def _judge(self, *, finished: bool) -> None:
        if violations := find_violations(self.trace, finished=finished):
            raise AssertionError("; ".join(violations[:5]))

    def _unfinished(self) -> list[str]:
        waits = self._waits_for()
        return [] if waits is None else [waits]

    def _waits_for(self) -> str | None:
        """Returns something that has not come to its end; None when everything has."""
        topic = self.metadata.topic
        for producer in self.producers:
            if not producer.idle:
                return f"producer {producer.producer} has messages that are not stored"
        if topic.running is not None:
            return f"change {topic.running} is running"
        if topic.sealed_early or topic.unknown_ends():
            return "partitions were sealed, and nothing came of it"
        for name, seat in self.metadata.groups.items():
            if seat.state.cv != topic.route.version:
                return f"group {name} is at {seat.state.cv}, not at {topic.route.version}"
            if seat.state.skipped:
                return f"group {name} has not read {seat.state.skipped} yet, which it skipped"
            for pid in topic.route.pids:
                machine = self.partitions[pid].machine
                own = machine.groups.get(name)
                if own is None or own.group_epoch != seat.state.group_epoch:
                    return f"group {name} has no cursor in {pid}"
                if own.cursor.watermark != machine.end_offset or own.parked.keys:
                    return (
                        f"group {name} has read {pid} up to {own.cursor.watermark} of"
                        f" {machine.end_offset}, and has parked {sorted(own.parked.keys)}"
                    )
        return None

    def report(self, result: Result) -> None:
        result.digest = zlib.crc32(repr(self.trace).encode())
        result.faults = self.faults
        if self._sink is not None:
            for event in self.trace:
                self._sink(events.line_of(event))
        result.tail = [events.line_of(event) for event in self.trace[-TAIL_LINES:]]
        kinds = Counter(type(event).__name__.lower() for event in self.trace)
        result.workload = {word: kinds[word] for word in COUNTED}


class TopicLoad(Load):
    """An ordered topic."""

    text = "an ordered topic, its producers and its groups"
    kinds = ALL_KINDS

    def make_world(
        self, seed: int, faults: Collection[str] | None, sink: Callable[[str], None] | None
    ) -> TopicWorld:
        return TopicWorld(draw_plan(seed, faults), sink=sink)
