"""Faults that a run injects: their kinds, their rates, and the injecting.

Swarm testing: every seed draws a subset of the kinds of faults and their rates, so that no kind
hides another and combinations that a fixed mixture would never reach occur.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

from convoymq.model.config import RaftConfig
from convoymq.sim.clients import ClientConfig
from convoymq.sim.disk import DiskConfig
from convoymq.sim.loads import Load
from convoymq.sim.network import NetworkConfig

if TYPE_CHECKING:
    from convoymq.sim.nodes import SimNode
    from convoymq.sim.world import World

NETWORK = ("delay", "loss", "stale", "break", "partition", "oneway", "isolate", "suspect")
NODES = ("crash", "torn", "midway", "kill", "freeze", "blackout", "wipe")
DISKS = ("slow", "spike", "full", "errors", "rot")
OTHERS = ("clock", "membership", "transfer")
LOGS = ("rot_page", "lose_wal_file")
RELAYS = ("cutoff",)
KINDS = NETWORK + NODES + DISKS + OTHERS + LOGS + RELAYS
RATES = {
    **dict.fromkeys(("blackout", "wipe", "rot", *LOGS, "lost_majority"), 0.25),
    # Most come while the last one is under way, and are put off.
    "membership": 4.0,
    "leave": 2.0,
    "replica_move": 8.0,
}
"""Rate of a kind, as a share of the plan's; others come as often as the plan says."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """All that a seed decides beforehand."""

    seed: int
    nodes: int
    groups: int
    duration_us: int
    faults: frozenset[str]
    rate: float
    """Faults a simulated second, of each kind that happens at moments."""
    network: NetworkConfig
    disk: DiskConfig
    storage: RaftConfig
    clients: ClientConfig
    channels_max: int
    """Channels a node and group."""
    settings: dict[str, int]
    """Of the queue machines."""
    round_us_max: int
    hash_every: int
    turn_chance: float = 0.0
    """Chance that a tick of a storage ends the WAL file, so that it is emptied while short."""
    lag_entries_max: int = 10_000
    """Committed entries that a replica may lack and still count as live."""
    churn: bool = False
    """Channels open and close by hundreds into one queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Parts of a plan that only some loads have."""

    kinds: frozenset[str] = frozenset()
    """More kinds of faults."""
    overtake: bool = False
    """Urgent frames overtake bulk."""
    churn: bool = False
    """See `Plan`."""


class PlannedLoad(Load):
    """A load whose runs are planned by `draw_plan`."""

    world_class: ClassVar[type[World]]

    def make_world(
        self, seed: int, faults: Collection[str] | None, sink: Callable[[str], None] | None
    ) -> World:
        """See `Load`."""
        return self.world_class(self.make_plan(seed, faults), self, sink)

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """Draws the plan of a seed."""
        return draw_plan(seed, faults, self)

    def vary(self, seed: int, share: float) -> Variation:
        """Draws what the plans of this load have beyond the others'.

        Args:
            share: probability of each kind of fault.
        """
        return Variation()

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Returns the behaviour of channels."""
        return clients

    def draw_settings(self, rng: Random, settings: dict[str, int]) -> dict[str, int]:
        """Returns the settings of queues; `settings` are those of quorum queues."""
        return settings


def _kinds(rng: Random, seed: int, share: float) -> frozenset[str]:
    """Kinds of faults that every load has."""
    later = LOGS + RELAYS
    faults = frozenset(kind for kind in KINDS if kind not in later and rng.random() < share)
    # Apart, so that what seeds drew before these kinds stays.
    logs = Random(seed ^ 0xD15C)
    faults |= {kind for kind in LOGS if logs.random() < share}
    relays = Random(seed ^ 0x2E1A)
    return faults | {kind for kind in RELAYS if relays.random() < share}


def _network(rng: Random, seed: int, faults: Collection[str], overtake: bool) -> NetworkConfig:
    return NetworkConfig(
        delay_min_us=rng.choice((20, 50, 500)),
        delay_max_us=rng.choice((300, 1000, 5000)),
        spike_chance=rng.choice((0.01, 0.05)) if "delay" in faults else 0.0,
        spike_max_us=rng.choice((20_000, 200_000)),
        loss_chance=rng.choice((0.0005, 0.003)) if "loss" in faults else 0.0,
        stale_chance=rng.choice((0.1, 0.5)) if "stale" in faults else 0.0,
        reconnect_max_us=rng.choice((20_000, 300_000)),
        overtake=overtake,
        # Drawn apart, like the kinds above.
        window_bytes=Random(seed ^ 0xF1).choice((0, 0, 1_000, 20_000)),
        relays="cutoff" in faults,
    )


def _disk(rng: Random, faults: Collection[str]) -> DiskConfig:
    return DiskConfig(
        flush_max_us=rng.choice((200, 1000, 5000)),
        spike_chance=rng.choice((0.005, 0.05)) if "spike" in faults else 0.0,
        work_max_us=rng.choice((1000, 50_000)),
    )


def _storage(rng: Random, seed: int) -> RaftConfig:
    return RaftConfig(
        wal_max_size_bytes=rng.choice((64 * 1024, 64 * 1024, 256 * 1024)),
        wal_preallocate=rng.random() < 0.7,
        segment_max_entries=rng.choice((16, 256, 4096)),
        segment_max_size_bytes=rng.choice((16_384, 64_000_000)),
        mem_table_max_bytes=rng.choice((0, 16_384, 1 << 20)),
        read_ahead_bytes=4096,
        snapshot_min_dead_bytes=rng.choice((0, 4096, 65_536)),
        # Drawn apart, so that what seeds drew before stays.
        pack_below_bytes=Random(seed ^ 0x9AC4).choice((0, 1024, 4096, 32_768)),
    )


def _clients(rng: Random, seed: int, busy: float) -> ClientConfig:
    return ClientConfig(
        turn_min_us=2_000,
        turn_max_us=int(60_000 / busy),
        publish_chance=rng.choice((0.3, 0.6)),
        burst_max=rng.choice((1, 4, 12)),
        unconfirmed_max=rng.choice((4, 40)),
        body_large_chance=rng.choice((0.0, 0.02, 0.2)),
        prefetch_max=rng.choice((1, 5, 50)),
        consume_chance=rng.choice((0.2, 0.6)),
        no_ack_chance=rng.choice((0.0, 0.2)),
        settle_chance=rng.choice((0.2, 0.8)),
        reject_chance=rng.choice((0.0, 0.05)),
        requeue_chance=rng.choice((0.0, 0.1, 0.3)),
        get_chance=rng.choice((0.0, 0.05)),
        purge_chance=rng.choice((0.0, 0.0, 0.0, 0.002)),
        close_chance=rng.choice((0.0, 0.005, 0.03)),
        attribute_chance=Random(seed ^ 0xA77).choice((0.0, 0.0, 0.2, 0.6)),
        delay_chance=Random(seed ^ 0xDE1A).choice((0.0, 0.0, 0.1, 0.5)),
        pause_chance=Random(seed ^ 0x9A5E).choice((0.0, 0.0, 0.05)),
        repeat_chance=Random(seed ^ 0xDED).choice((0.0, 0.0, 0.1, 0.4)),
        lose_chance=Random(seed ^ 0x105E).choice((0.0, 0.0, 0.3)),
        outcome_chance=Random(seed ^ 48).choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.3)),
        late_chance=Random(seed ^ 0x1A7E).choice((0.0, 0.0, 0.0, 0.02)),
        body_fixed=Random(seed ^ 0xB0D1).choice((-1, -1, -1, 30)),
    )


def _settings(rng: Random, seed: int) -> dict[str, int]:
    """Returns the settings of quorum queues."""
    return {
        "delivery_limit": rng.choice((20, 20, 2, -1)),
        "disconnect_timeout_ms": rng.choice((500, 3000)),
        "single_active": rng.random() < 0.25,
        "single_active_strict": Random(seed ^ 0x57A1).random() < 0.75,
    }


def draw_plan(seed: int, only: Collection[str] | None, load: PlannedLoad) -> Plan:
    """Returns the plan of a seed. `only` replaces the drawn kinds of faults."""
    rng = Random(seed ^ 0x5EED)
    share = rng.choice((0.15, 0.3, 0.5, 0.7))
    faults = _kinds(rng, seed, share) & frozenset(load.kinds)
    variation = load.vary(seed, share)
    faults = faults | variation.kinds if only is None else frozenset(only)
    nodes = rng.choice((3, 3, 3, 5))
    busy = rng.choice((0.3, 1.0, 2.0))
    network = _network(rng, seed, faults, variation.overtake)
    disk = _disk(rng, faults)
    storage = _storage(rng, seed)
    clients = load.adapt_clients(_clients(rng, seed, busy))
    settings = load.draw_settings(rng, _settings(rng, seed))
    if variation.churn:
        clients = replace(clients, turn_max_us=20_000, close_chance=0.5)
    return Plan(
        churn=variation.churn,
        seed=seed,
        nodes=nodes,
        groups=rng.choice((1, 1, 2)),
        duration_us=int(rng.choice((2, 4, 8)) * 1e6),
        faults=faults,
        rate=rng.choice((0.2, 0.5, 1.0)),
        network=network,
        disk=disk,
        storage=storage,
        clients=clients,
        channels_max=12 if variation.churn else rng.choice((1, 2)),
        settings=settings,
        round_us_max=rng.choice((0, 50, 2000)),
        hash_every=rng.choice((1, 4, 16)),
        turn_chance=Random(seed ^ 0x7042).choice((0.0, 0.0, 0.03, 0.2)),
        lag_entries_max=Random(seed ^ 0x1A6).choice((10_000, 10_000, 30, 3)),
    )


class Injector:
    """Injects the planned faults into a world until it is stopped."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopped = False
        moments = self.moments()
        for kind in world.load.kinds:
            if kind in world.plan.faults and kind in moments:
                self._later(kind, moments[kind])

    def moments(self) -> dict[str, Callable[[], None]]:
        """Returns what injects each kind of fault that happens at moments."""
        return {
            "break": self._break,
            "partition": self._partition,
            "oneway": self._oneway,
            "isolate": self._isolate,
            "suspect": self._suspect,
            "cutoff": self._cutoff,
            "crash": self._crash,
            "torn": self._torn,
            "midway": self._midway,
            "kill": self._kill,
            "freeze": self._freeze,
            "blackout": self._blackout,
            "slow": self._slow,
            "full": self._full,
            "errors": self._errors,
            "clock": self._clock,
        }

    def stop(self) -> None:
        """No more faults."""
        self.stopped = True

    def _later(self, kind: str, inject: Callable[[], None]) -> None:
        scheduler = self.world.scheduler
        rate = self.world.plan.rate
        rate *= RATES.get(kind, 1.0)
        delay_us = int(scheduler.rng.expovariate(rate) * 1e6)
        scheduler.after(delay_us, None, self._now, kind, inject)

    def _now(self, kind: str, inject: Callable[[], None]) -> None:
        if not self.stopped:
            inject()
            self._later(kind, inject)

    def _node(self) -> SimNode | None:
        """Returns a running node; half of the time one that leads a group."""
        world = self.world
        running = [node for node in world.nodes.values() if node.alive]
        if world.scheduler.chance(0.5):
            leading = [node for node in running if world.leads(node)]
            running = leading or running
        return world.scheduler.rng.choice(running) if running else None

    def _outage_us(self) -> int:
        return self.world.scheduler.skewed(1_000, 3_000_000)

    # Network.

    def _break(self) -> None:
        links = self.world.network.links()
        if links:
            a, b = self.world.scheduler.rng.choice(links)
            self.world.trace.fault("break", f"{a}-{b}")
            self.world.network.break_link(a, b)

    def _cut(self, kind: str, pairs: list[tuple[int, int]], duration_us: int = 0) -> None:
        world = self.world
        breaks = world.scheduler.chance(0.5)
        duration_us = duration_us or self._outage_us()
        pairs = [p for p in pairs if not world.network.is_cut(*p)]
        world.trace.fault(kind, "network", f"{pairs} for {duration_us / 1e6:.3f} s")
        for source, target in pairs:
            world.network.cut(source, target, breaks=breaks)
            world.scheduler.after(duration_us, None, world.network.heal, source, target)

    def _partition(self) -> None:
        nodes = sorted(self.world.nodes)
        side = [n for n in nodes if self.world.scheduler.chance(0.5)]
        if side and len(side) < len(nodes):
            pairs = [(a, b) for a in nodes for b in nodes if (a in side) != (b in side)]
            self._cut("partition", pairs)

    def _oneway(self) -> None:
        nodes = sorted(self.world.nodes)
        source, target = self.world.scheduler.rng.sample(nodes, 2)
        self._cut("oneway", [(source, target)])

    def _cutoff(self) -> None:
        """Two nodes do not hear each other, all others hear both."""
        a, b = self.world.scheduler.rng.sample(sorted(self.world.nodes), 2)
        self._cut("cutoff", [(a, b), (b, a)], self.world.scheduler.between(100_000, 6_000_000))

    def _isolate(self) -> None:
        node = self._node()
        if node is not None:
            others = [n for n in sorted(self.world.nodes) if n != node.number]
            pairs = [(node.number, n) for n in others] + [(n, node.number) for n in others]
            if self.world.scheduler.chance(0.3):
                pairs = pairs[: len(others)]
            self._cut("isolate", pairs)

    def _suspect(self) -> None:
        links = self.world.network.links()
        if links:
            a, b = self.world.scheduler.rng.choice(links)
            self.world.trace.fault("suspect", f"{a}->{b}")
            self.world.network.suspect_falsely(a, b, self.world.scheduler.skewed(1000, 400_000))

    # Nodes.

    def _down(self, kind: str, node: SimNode, *, keep: float, refuses: bool = False) -> None:
        self.world.trace.fault(kind, node.name)
        self.world.crash(node, restart_us=self._outage_us(), keep=keep, refuses=refuses)

    def _crash(self) -> None:
        node = self._node()
        if node is not None:
            self._down("crash", node, keep=0.0)

    def _torn(self) -> None:
        node = self._node()
        if node is not None:
            self._down("torn", node, keep=self.world.scheduler.rng.choice((0.1, 0.5, 0.9)))

    def _kill(self) -> None:
        node = self._node()
        if node is not None:
            self._down("kill", node, keep=1.0, refuses=True)

    def _midway(self) -> None:
        node = self._node()
        if node is not None:
            self.world.trace.fault("midway", node.name)
            node.disk.operations_left = self.world.scheduler.skewed(0, 60)

    def _blackout(self) -> None:
        self.world.trace.fault("blackout", "all")
        keep = self.world.scheduler.rng.choice((0.0, 0.5))
        for node in list(self.world.nodes.values()):
            if node.alive:
                self.world.crash(node, restart_us=self._outage_us(), keep=keep)

    def _freeze(self) -> None:
        node = self._node()
        if node is not None:
            duration_us = self._outage_us()
            self.world.trace.fault("freeze", node.name, f"for {duration_us / 1e6:.3f} s")
            node.process.frozen_until_us = self.world.scheduler.now_us + duration_us
            self.world.network.silence(node.number)

    # Disks.

    def _slow(self) -> None:
        node = self._node()
        if node is not None:
            extra_us = self.world.scheduler.skewed(1000, 300_000)
            self.world.trace.fault("slow", node.name, f"{extra_us} us a flush")
            node.slow[0] = extra_us
            self.world.scheduler.after(self._outage_us(), None, self._fast, node)

    def _fast(self, node: SimNode) -> None:
        node.slow[0] = 0

    def _full(self) -> None:
        node = self._node()
        if node is not None:
            self.world.trace.fault("full", node.name)
            node.disk.fill(self.world.scheduler.skewed(0, 100_000))
            self.world.scheduler.after(self._outage_us(), None, node.disk.empty)

    def _errors(self) -> None:
        node = self._node()
        if node is not None:
            self.world.trace.fault("errors", node.name)
            node.disk.failing = True
            self.world.scheduler.after(self._outage_us(), None, self._works, node)

    def _works(self, node: SimNode) -> None:
        node.disk.failing = False

    # The rest.

    def _clock(self) -> None:
        node = self._node()
        if node is not None:
            jump_ms = self.world.scheduler.rng.choice((-1, 1)) * self.world.scheduler.skewed(
                1, 3_600_000
            )
            self.world.trace.fault("clock", node.name, f"{jump_ms} ms")
            node.wall_offset_ms += jump_ms
            node.process.wall_offset_ms += jump_ms
