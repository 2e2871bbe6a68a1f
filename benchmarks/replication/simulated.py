"""Drives the ways through the schedules in the simulator: its worlds, referees and channels.

A run is the world of a load with one queue on three nodes. Every node has a channel that publishes
and one that consumes, both as steadily as they can; faults come by the schedule, and by nothing
else. The world's own referee judges the run as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, cast

from benchmarks.replication.faults import NODES, RUN_S, SLOW_S, Fault
from benchmarks.replication.ledger import Delivered, Key, Ledger
from convoymq.kernels import batch
from convoymq.model.config import RaftConfig
from convoymq.queues.interface import Delivery, PublishOutcome, QueueClient
from convoymq.sim.classic.referee import ClassicReferee
from convoymq.sim.classic.world import ClassicLoad, ClassicWorld
from convoymq.sim.clients import Channel, ClientConfig, Traits, Workload
from convoymq.sim.disk import DiskConfig
from convoymq.sim.engine import run_simulation
from convoymq.sim.faults import Injector, Plan
from convoymq.sim.group_world import GroupWorld
from convoymq.sim.hosted.book import QueueReferee
from convoymq.sim.hosted.tree import RECORD_US_MAX
from convoymq.sim.mirrored.world import MirroredLoad, MirroredWorld
from convoymq.sim.network import NetworkConfig
from convoymq.sim.quorum import QuorumLoad
from convoymq.sim.records import identity_of
from convoymq.sim.runner import muted
from convoymq.sim.world import ChannelKind, World

BODY_BYTES = 1024
NEVER_US = 10**15
SETTLED_US = 10_000_000
"""After the loss of a node for good, a run is over when nothing came for this long."""
TURN_US = 60_000
KEEP_US = 20_000
HAND_OVER_US = 300_000
"""From the request to hand leadership over to the end of the process, as in an orderly stop."""


def plan_of(seed: int) -> Plan:
    """A quiet plan: nothing is drawn, and nobody does what is not counted."""
    return Plan(
        seed=seed,
        nodes=len(NODES),
        groups=1,
        duration_us=int(RUN_S * 1e6),
        faults=frozenset(),
        rate=0.0,
        network=NetworkConfig(),
        disk=DiskConfig(work_max_us=2_000),
        storage=RaftConfig(wal_max_size_bytes=1 << 20),
        clients=ClientConfig(
            turn_min_us=TURN_US // 2,
            turn_max_us=TURN_US,
            publish_chance=1.0,
            burst_max=2,
            body_fixed=BODY_BYTES,
            consume_chance=1.0,
            no_ack_chance=0.0,
            priority_chance=0.0,
            settle_chance=1.0,
            reject_chance=0.0,
            requeue_chance=0.0,
            get_chance=0.0,
            cancel_chance=0.0,
            credit_chance=0.0,
            close_chance=0.0,
        ),
        channels_max=2,
        settings={"delivery_limit": 20, "disconnect_timeout_ms": 3000},
        round_us_max=200,
        hash_every=16,
    )


class Tally(Workload):
    """The counters of a world, with a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()


class Noted(Channel):
    """What channels do that tell a ledger; to be mixed with a channel of some queue."""

    _workload: Tally

    def _now_s(self) -> float:
        return self._scheduler.now_us / 1e6

    def _draw_traits(self, identity: bytes) -> Traits:
        self._workload.ledger.published[key_of(identity)] = self._now_s()
        traits = Traits(persistent=True)
        if isinstance(self._referee, QueueReferee):
            self._referee.on_sent(identity, traits)
        return traits

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `Channel`."""
        confirmed = self._workload.ledger.confirmed
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                if outcome:
                    confirmed[key_of(self.unconfirmed[tag])] = self._now_s(), self.node
        super().on_published(client, tags, outcome)

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `Channel`."""
        number, _, block, command, first, count, acquired, *_ = delivery
        self._workload.ledger.delivered.extend(
            Delivered(
                self._now_s(),
                self.node,
                self.publisher << 16 | number,
                key_of(identity_of(batch.record(block, command, first + i))),
                acquired > 0,
            )
            for i in range(count)
        )
        super().on_deliver(client, delivery)


def key_of(identity: bytes) -> Key:
    """The publisher and the number that a body begins with."""
    return int.from_bytes(identity[:4], "big"), int.from_bytes(identity[4:12], "big")


class SimSite:
    """Implements `Site`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _down(self, node: int, for_s: float, *, keep: float, refuses: bool) -> None:
        restart_us = int(for_s * 1e6) or NEVER_US
        self.world.crash(self.world.nodes[node], restart_us=restart_us, keep=keep, refuses=refuses)

    def kill(self, node: int, for_s: float) -> None:
        self._down(node, for_s, keep=1.0, refuses=bool(for_s))

    def stop(self, node: int, for_s: float) -> None:
        delay_us = cast(Measured, self.world).stop_in_order(self.world.nodes[node])
        self.world.scheduler.after(delay_us, None, self.kill, node, for_s)

    def freeze(self, node: int, for_s: float) -> None:
        process = self.world.nodes[node].process
        process.frozen_until_us = self.world.scheduler.now_us + int(for_s * 1e6)
        self.world.network.silence(node)

    def isolate(self, node: int, for_s: float) -> None:
        network, after = self.world.network, self.world.scheduler.after
        for other in set(NODES) - {node}:
            for source, target in ((node, other), (other, node)):
                network.cut(source, target, breaks=False)
                after(int(for_s * 1e6), None, network.heal, source, target)

    def slow(self, node: int, for_s: float) -> None:
        slow = self.world.nodes[node].slow
        slow[0] = int(SLOW_S * 1e6)
        self.world.scheduler.after(int(for_s * 1e6), None, slow.__setitem__, 0, 0)

    def cut_power(self, node: int, for_s: float) -> None:
        self._down(node, for_s, keep=0.0, refuses=False)


class Steps(Injector):
    """Carries a schedule out."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.site = SimSite(world)
        self.measured = cast(Measured, world)
        for step in self.measured.fault.steps:
            world.scheduler.after(int(step.at_s * 1e6), None, self._take, step)

    def _take(self, step: Any) -> None:
        world = self.world
        ledger = self.measured.workload.ledger
        if not ledger.holder:
            leading = [n for n, node in world.nodes.items() if world.leads(node)]
            ledger.holder = leading[0] if leading else NODES[0]
        for node in step.nodes(ledger.holder):
            world.trace.fault(step.action, f"node{node}")
            getattr(self.site, step.action)(node, step.for_s)


class Measured(World):
    """A world under a schedule; to be mixed with that of a load."""

    injector_class = Steps
    fault: Fault
    workload: Tally

    def _begin(self) -> None:
        self.workload = Tally()
        super()._begin()

    def channel_kind(self, group: int) -> ChannelKind:
        """See `World`."""
        kind = super().channel_kind(group)
        return cast(ChannelKind, type("NotedChannel", (Noted, kind), {}))

    def stop_in_order(self, node: Any) -> int:
        """Tells a node that it is to end; returns in how many µs it does."""
        node.host.stop()
        return 0

    def _keep_channels(self) -> None:
        self.scheduler.after(KEEP_US, None, self._keep_channels)
        self._end_channels()
        consuming = self.quiet or self.scheduler.now_us >= self.fault.consume_from_s * 1e6
        for node in self.nodes.values():
            for group in self.groups_of(node) if node.alive else ():
                mine = [c for c in self.channels if c.node == node.number and c.group == group]
                if not self.quiet and not any(c.publishes for c in mine):
                    self._open(node, group, publishes=True, consumes=False)
                if consuming and not any(c.consumes for c in mine):
                    self._open(node, group, publishes=False, consumes=True)

    def _heal(self) -> None:
        self.workload.ledger.link_bytes = self.network.bytes_sent
        super()._heal()

    def _unfinished(self) -> list[str]:
        if not self.fault.is_for_good:
            return super()._unfinished()
        delivered = self.workload.ledger.delivered
        last_us = max(RUN_S, delivered[-1].at_s if delivered else 0.0) * 1e6
        return ["more"] if self.scheduler.now_us < last_us + SETTLED_US else []

    def _final_checks(self) -> None:
        if not self.fault.is_for_good:
            super()._final_checks()


class QuietQuorum(QuorumLoad):
    """Quorum queues without policies and operations."""

    has_operations = False

    def _begin_policy(self, group: int, delivery_limit: int) -> None:
        pass

    def start(self) -> None:
        """Nothing changes."""


class MeasuredQuorum(Measured, GroupWorld):
    """See `Measured`."""

    def stop_in_order(self, node: Any) -> int:
        """See `Measured`: hands leadership over."""
        for group in self.leads(node):
            node.host.transfer_leadership(group)
        return HAND_OVER_US


class MeasuredClassic(Measured, ClassicWorld):
    """See `Measured`."""

    def _draw_queues(self, draw: Random) -> None:
        self.file_bytes_max, self.memory_target_bytes = 64 << 20, 256 << 20
        self.record_us_max = RECORD_US_MAX[0]
        referee = ClassicReferee("q1", durable=True, has_limit=False, level_max=0)
        self._add_queue(referee, draw.choice(NODES), {}, {})


class MeasuredMirrored(Measured, MirroredWorld):
    """See `Measured`."""

    policy: Mapping[str, object]

    def _draw_queues(self, draw: Random) -> None:
        self.size, self.file_bytes_max = len(NODES), 64 << 20
        self.settings = dict(self.policy)
        self._make_nodes(draw)
        # Mirrors are there, and synchronised, before the first step.
        self.record_us_max = RECORD_US_MAX[0]
        self._add_queue(1, draw.choice(NODES))


Maker = Callable[[int], Measured]
"""Returns the world of a seed."""


def quorum(fault: Fault) -> Maker:
    """Quorum queues."""
    world = type("World", (MeasuredQuorum,), {"fault": fault})
    return lambda seed: world(plan_of(seed), QuietQuorum())


def classic(fault: Fault) -> Maker:
    """Classic queues with one copy."""
    world = type("World", (MeasuredClassic,), {"fault": fault})
    return lambda seed: world(plan_of(seed), ClassicLoad())


def mirrored(policy: Mapping[str, object]) -> Callable[[Fault], Maker]:
    """Classic queues with mirrors."""

    def made(fault: Fault) -> Maker:
        world = type("World", (MeasuredMirrored,), {"fault": fault, "policy": policy})
        return lambda seed: world(plan_of(seed), MirroredLoad())

    return made


@muted()
def run(maker: Maker, seed: int) -> tuple[Ledger, str | None]:
    """Runs a seed: what clients saw, and the promise that broke."""
    world = maker(seed)
    result = run_simulation(world)
    return world.workload.ledger, result.failure
