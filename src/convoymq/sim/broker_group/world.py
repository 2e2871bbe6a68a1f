"""A broker group in the simulator: a master and one or two slaves, of which any may fail.

What is real: the cores of replication, their requests and the byte stream, the store with its
files. Simulated: sockets, and what brings a master online, which asks the slaves that it reaches.

Promise: with `inSyncReplicas` of 2 or more nothing that was acknowledged is lost. With ASYNC_FLUSH
a broker that loses power loses what was not flushed: only one at a time does, until it has all of
it back; the same holds for brokers that come back with an empty disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import ClassVar

from convoymq.replication.group.types import GroupSettings
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.types import Draft, PutStatus
from convoymq.sim.broker_group.node import BrokerNode
from convoymq.sim.broker_group.referee import TOPIC, BrokerGroupReferee, Replica
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.engine import Result
from convoymq.sim.faults import NETWORK, Injector, Plan, PlannedLoad
from convoymq.sim.nodes import SimNode
from convoymq.sim.world import ChannelessWorld

QUEUES = 2
FILE_BYTES = (4096, 16_384, 262_144)
BODY_MAX = 1500
PRODUCERS_MAX = 3
SILENCE_MS = 1_000
POWER = ("crash", "torn", "midway", "blackout")


def is_linked(master: Replica, slave: Replica) -> bool:
    """Returns whether a slave's link with its master stands at both ends."""
    link = slave.own_link
    return link is not None and link in master.slave_links


class BrokerGroupInjector(Injector):
    """Injects faults into a `BrokerGroupWorld`."""

    world: BrokerGroupWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        """See `Injector`."""
        found = {**super().moments(), "wipe": self._wipe}
        if not self.world.store_settings.is_sync:
            for kind in POWER:
                found[kind] = self._one_at_a_time(found[kind])
        return found

    def _one_at_a_time(self, inject: Callable[[], None]) -> Callable[[], None]:
        def injected() -> None:
            if not self.world.owes_any():
                inject()

        return injected

    def _wipe(self) -> None:
        node = self._node()
        if node is not None and not self.world.owes_any():
            self.world.trace.fault("wipe", node.name)
            self.world.crash(node, restart_us=self._outage_us(), wipe=True)


class Producer:
    """A client that sends to one queue, one call after the other."""

    def __init__(self, world: BrokerGroupWorld, producer: int, queue: int, draw: Random) -> None:
        self.world = world
        self._last = producer << 32
        self.queue = queue
        self.pause_us = draw.choice(world.pauses_us)
        self.burst = draw.choice((1, 3, 12))
        self._open: set[int] = set()
        """Numbers that wait for their answer."""
        self._asked: object = None
        """Process of the master that has them."""
        self._later()

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _later(self) -> None:
        scheduler = self.world.scheduler
        scheduler.after(scheduler.between(500, self.pause_us), None, self._send)

    def _send(self) -> None:
        world = self.world
        if world.quiet:
            return
        self._later()
        master = world.replicas[1]
        if not master.alive or (self._open and self._asked is master.process):
            return
        numbers = [self._number() for _ in range(world.scheduler.between(1, self.burst))]
        messages = [(number, world.draft(number, self.queue)) for number in numbers]
        self._open, self._asked = set(numbers), master.process
        world.workload.published += len(numbers)
        delay_us = world.scheduler.between(50, 2_000)
        world.scheduler.after(delay_us, master.process, master.put, messages, self._answered)

    def _answered(self, number: int, offset: int, end: int, status: PutStatus) -> None:
        self._open.discard(number)
        self.world.on_answer(number, self.queue, offset, end, status)


class BrokerGroupWorld(ChannelessWorld):
    """A broker group under test."""

    injector_class = BrokerGroupInjector
    pauses_us: tuple[int, ...] = (5_000, 50_000, 300_000)
    """Longest times between two calls of a producer, of which each draws one."""
    nodes: Mapping[int, SimNode]
    replicas: Mapping[int, Replica]

    def _make_world(self) -> None:
        draw = self.own_rng(0xB60)
        plan = self.plan
        plan.nodes = draw.choice((2, 3, 3))
        copies = draw.choice((2, 2, plan.nodes))
        is_sync = draw.random() < 0.6
        if not is_sync:
            plan.faults -= {"midway", "blackout"}
        auto = plan.nodes == 3 and draw.random() < 0.3
        self.settings = GroupSettings(
            replicas=plan.nodes,
            in_sync=3 if auto else copies,
            in_sync_min=2,
            auto=auto,
            refuses=draw.random() < 0.8,
            flushes=is_sync,
            gap_bytes_max=draw.choice((2_000, 256 << 20)),
            timeout_ms=draw.choice((50, 300, 3_000)),
            heartbeat_ms=100,
            silence_ms=SILENCE_MS,
            retry_ms=draw.choice((20, 300)),
            wait_ms=30,
        )
        self.store_settings = StoreSettings(
            log_file_bytes=draw.choice(FILE_BYTES),
            queue_file_bytes=20 * draw.choice((5, 1_000)),
            flush="SYNC_FLUSH" if is_sync else "ASYNC_FLUSH",
        )
        self._make_nodes(plan.nodes)
        self.referee = BrokerGroupReferee()
        self.debts: dict[int, int] = {}
        """Node that lost what had been acknowledged -> end of what it has to have again."""
        self._draw = draw
        self.trace.add("world", f"{self.settings} {self.store_settings}")
        self.trace.add("world", f"faults {' '.join(sorted(plan.faults))}")

    def _make_nodes(self, replicas: int) -> None:
        self.nodes = made = {n: BrokerNode(self, n) for n in range(1, replicas + 1)}
        self.replicas = made

    def _start_care(self) -> None:
        draw = self._draw
        for producer in range(draw.randint(1, PRODUCERS_MAX)):
            Producer(self, producer, draw.randrange(QUEUES), draw)
        self.scheduler.after(0, None, self._read)

    # Clients.

    def draft(self, number: int, queue: int) -> Draft:
        """Returns a message."""
        size = self.scheduler.skewed(0, BODY_MAX)
        return Draft(TOPIC, queue, number.to_bytes(8, "big") + bytes(size))

    def on_answer(self, number: int, queue: int, offset: int, end: int, status: PutStatus) -> None:
        """A client has its answer."""
        self.trace.add("client", f"{number} at {queue}:{offset} to {end}: {status.name}")
        if status is PutStatus.PUT_OK:
            self.workload.confirmed += 1
            self.referee.on_acknowledged(number, queue, offset, end)
            has = self.copies()
            if sum(each >= end for each in has) < self.settings.copies_min:
                raise InvariantBroken(f"{number} was acknowledged up to {end}, brokers have {has}")

    def copies(self) -> list[int]:
        """Returns up to where each broker has the log."""
        return [node.copied for node in self.replicas.values()]

    def _read(self) -> None:
        scheduler = self.scheduler
        scheduler.after(scheduler.between(2_000, 60_000), None, self._read)
        master = self.replicas[1]
        if not master.alive:
            return
        serving = [n for n in self.replicas.values() if n is not master and is_linked(master, n)]
        if master.master is not None and master.master.takes_writes:
            for slave in serving:
                self.referee.compare(master, slave)
            serving.append(master)
        if serving:
            queue = scheduler.between(0, QUEUES - 1)
            node = scheduler.rng.choice(serving)
            offset = scheduler.between(0, max(0, node.store.queue_max(TOPIC, queue)))
            self.referee.read(node, queue, offset)

    # Faults.

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        """See `World`."""
        if wipe or (keep < 1 and not self.store_settings.is_sync):
            self.debts[node.number] = self.referee.end
        super().crash(node, restart_us=restart_us, keep=keep, refuses=refuses, wipe=wipe)

    def owes_any(self) -> bool:
        """Returns whether a broker lacks something that it once had, or may."""
        for number, end in list(self.debts.items()):
            node, master = self.replicas[number], self.replicas[1]
            if not node.alive or not master.alive or node.store.flushed < end:
                continue
            serves = node.master.takes_writes if node.master else is_linked(master, node)
            if serves:
                del self.debts[number]
        return bool(self.debts)

    def on_forked(self, node: Replica, reason: str) -> None:
        """A broker stopped, since two may have acknowledged messages at one place."""
        self.broken = InvariantBroken(f"{node.name}: {reason}")

    def on_opened(self, node: Replica) -> None:
        """A broker has recovered its log."""
        is_safe = self.store_settings.is_sync and node.number not in self.debts
        if is_safe and node.is_master and node.store.max_offset < self.referee.end:
            raise InvariantBroken(
                f"{node.name} has the log up to {node.store.max_offset}, and {self.referee.end}"
                " was flushed and acknowledged"
            )

    def leads(self, node: SimNode) -> list[int]:
        """See `World`: half of the faults hit the master."""
        return [1] if node.number == 1 else []

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = super()._unfinished()
        master = self.replicas[1]
        if waiting or master.master is None:
            return waiting
        if not master.master.takes_writes:
            return ["the master is not online"]
        for node in self.replicas.values():
            if node is master:
                continue
            if not is_linked(master, node):
                waiting.append(f"{node.name} is not linked: {node.slave and node.slave.state}")
            elif node.store.flushed < master.store.max_offset:
                waiting.append(f"{node.name} has {node.store.flushed} of {master.store.max_offset}")
        if master.store.flushed < master.store.max_offset:
            waiting.append("the master flushes")
        return waiting

    def _final_checks(self) -> None:
        self.referee.check_at_rest(list(self.replicas.values()))

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload = {
            "sent": self.workload.published,
            "acknowledged": self.workload.confirmed,
            "reads": self.referee.reads,
        }


class BrokerGroupLoad(PlannedLoad):
    """Broker groups."""

    text = "broker groups: a master and its slaves on RocketMQ's files, clients that send and read"
    kinds: ClassVar[tuple[str, ...]] = (
        *NETWORK, "crash", "torn", "midway", "kill", "freeze", "blackout", "wipe", "slow", "spike",
        "full", "clock",
    )  # fmt: skip

    world_class = BrokerGroupWorld

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`."""
        plan = super().make_plan(seed, faults)
        plan.rate *= 2
        return plan
