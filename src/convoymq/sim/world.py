"""A simulated cluster: nodes on a network, channels at the nodes, and the faults of both.

What the nodes run, and by what it is judged, is said by a subclass: `group_world` (Raft groups),
`classic.world` (queues with a home).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from convoymq.queues.interface import Queue
from convoymq.sim.clients import ChannelParts, ChannelReferee, Workload
from convoymq.sim.engine import Result, Simulation
from convoymq.sim.faults import Injector, Plan, PlannedLoad
from convoymq.sim.network import Network
from convoymq.sim.nodes import SimNode
from convoymq.sim.trace import Trace

LIVENESS_LIMIT_US = 90_000_000
LIVENESS_MESSAGE_US = 40_000
"""More of it for every message: one consumer may have to take them one by one."""


class OpenChannel(Protocol):
    """A channel of a node into a queue."""

    node: int
    group: int
    name: str

    @property
    def is_over(self) -> bool:
        """Returns whether its handle is of no use any more."""

    def drain(self) -> None:
        """From now on only what empties the queue."""

    def end(self) -> None:
        """Ends with its handle."""

    def waits_for(self) -> str:
        """Returns what is still outstanding; empty when nothing is."""


ChannelKind = Callable[[ChannelParts], OpenChannel]


class World(Simulation):
    """A cluster under test."""

    injector_class: type[Injector] = Injector
    nodes: Mapping[int, SimNode]

    def __init__(
        self, plan: Plan, load: PlannedLoad, sink: Callable[[str], None] | None = None
    ) -> None:
        """
        Args:
            load: its kinds of faults are begun in their order, where the plan has them.
            sink: called with each line of the trace.
        """
        super().__init__(plan.seed, plan.duration_us)
        self.plan = plan
        self.load = load
        self.trace = Trace(lambda: self.scheduler.now_us, sink)
        self.network = Network(self.scheduler, self.trace, plan.network)
        self.workload = Workload()
        self.channels: list[OpenChannel] = []
        self.broken: BaseException | None = None
        """Error that a check inside of a node's code raised."""
        self._make_world()

    @abstractmethod
    def _make_world(self) -> None:
        """Makes nodes and queues."""

    # Running.

    def _begin(self) -> None:
        for node in self.nodes.values():
            self._start(node)
        self._injector = self.injector_class(self)
        self._start_care()

    def _start_care(self) -> None:
        """Starts who looks after channels, and after queues."""
        self.scheduler.after(0, None, self._keep_channels)

    def _patience_us(self) -> int:
        return LIVENESS_LIMIT_US + LIVENESS_MESSAGE_US * self.workload.published

    def _on_power_lost(self, node: int) -> None:
        self.crash(self.nodes[node], restart_us=self.scheduler.skewed(1000, 2_000_000))

    def _start(self, node: SimNode) -> None:
        if node.alive:
            return
        try:
            node.start()
        except OSError as error:
            # A disk that cannot be read or written now: production exits and is started again.
            self.trace.add(node.name, f"cannot start: {error}")
            self.crash(node, restart_us=500_000)

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        """Stops a node at once. `keep`: chance of each unsynced sector to be on the disk."""
        self._on_down(node)
        self.trace.add(node.name, f"down for {restart_us / 1e6:.3f} s")
        node.process.alive = False
        self.network.stop(node.number, refuses=refuses)
        chance = self.scheduler.chance
        node.disk.lose_power(lambda: chance(keep))
        if wipe:
            node.disk.wipe()
            self._on_wiped(node)
        self.channels = [c for c in self.channels if c.node != node.number]
        self.scheduler.after(restart_us, None, self._start, node)

    def _on_down(self, node: SimNode) -> None:
        """A node is about to stop."""

    def _on_wiped(self, node: SimNode) -> None:
        """The disk of a node is empty."""

    def _heal(self) -> None:
        self._injector.stop()
        self.trace.add("world", "quiet: everything heals")
        self.network.heal_all()
        config = self.plan.network
        config.loss_chance = config.spike_chance = 0.0
        for node in self.nodes.values():
            node.disk.operations_left = -1
            node.disk.failing = False
            node.disk.empty()
            node.slow[0] = 0
        self.plan.disk.spike_chance = 0.0
        for channel in self.channels:
            channel.drain()

    # Channels.

    @abstractmethod
    def groups_of(self, node: SimNode) -> Iterable[int]:
        """Returns the queues into which channels of a node are opened."""

    @abstractmethod
    def channel_kind(self, group: int) -> ChannelKind:
        """Returns what makes a channel into a queue."""

    @abstractmethod
    def referee_of(self, group: int) -> ChannelReferee:
        """Returns the referee of a queue."""

    def queue_at(self, node: SimNode, group: int) -> Queue:
        """Returns the handle of a queue on a node."""
        return node.queues[group]

    def _keep_channels(self) -> None:
        """Opens channels where there are too few; one by one, for ever."""
        self.scheduler.after(self.scheduler.between(5_000, 60_000), None, self._keep_channels)
        self._end_channels()
        for node in self.nodes.values():
            if not node.alive:
                continue
            for group in self.groups_of(node):
                mine = [c for c in self.channels if c.node == node.number and c.group == group]
                if len(mine) < self.plan.channels_max and self.scheduler.chance(0.3):
                    self._open_channel(node, group, bool(mine))
                    return

    def _open_channel(self, node: SimNode, group: int, second: bool) -> None:
        draw = self.scheduler.rng.random()
        consumes = draw < 0.75 or self.quiet
        publishes = not self.quiet and (draw > 0.4 or second)
        self._open(node, group, publishes=publishes, consumes=consumes)

    def _open(self, node: SimNode, group: int, *, publishes: bool, consumes: bool) -> None:
        parts = ChannelParts(
            scheduler=self.scheduler,
            trace=self.trace,
            process=node.process,
            node=node.number,
            group=group,
            queue=self.queue_at(node, group),
            session=node.new_session(),
            config=self.plan.clients,
            workload=self.workload,
            referee=self.referee_of(group),
            publishes=publishes,
            consumes=consumes,
            on_closed=self._on_closed,
        )
        channel = self.channel_kind(group)(parts)
        if self.quiet:
            channel.drain()
        self.trace.add(channel.name, f"open, publishes {publishes}, consumes {consumes}")
        self.channels.append(channel)

    def _end_channels(self) -> None:
        """Ends channels into queues that are gone: their clients were told all."""
        for channel in list(self.channels):
            if channel.is_over:
                channel.end()

    def _on_closed(self, channel: OpenChannel) -> None:
        self.channels.remove(channel)

    # What nodes report.

    def poll(self, node: SimNode) -> None:
        """After a node did something. Raises what a check inside of its code found."""
        if self.broken is not None:
            raise self.broken

    def leads(self, node: SimNode) -> list[int]:
        """Returns the queues of which this node decides."""
        return []

    # The end.

    def _waiting_channels(self) -> list[str]:
        waiting = [(channel.name, channel.waits_for()) for channel in self.channels]
        return [f"{name} waits for {waits}" for name, waits in waiting if waits]

    def _unfinished(self) -> list[str]:
        self._end_channels()
        down = [f"{node.name} is down" for node in self.nodes.values() if not node.alive]
        return down or self._waiting_channels()

    def report(self, result: Result) -> None:
        if result.failure is not None:
            self.trace.add("world", result.failure)
        load = self.workload
        result.digest = self.trace.digest
        result.faults = self.trace.faults
        result.tail = list(self.trace.tail)
        result.workload = {
            "published": load.published,
            "confirmed": load.confirmed,
            "delivered": load.delivered,
            "settled": load.settled,
            "channels": load.channels,
            "read": load.read,
            "sent_locally": load.sent_locally,
            "sent_by_leader": load.sent_by_leader,
        }


class ChannelessWorld(World):
    """A world whose load opens no channels into queues."""

    def groups_of(self, node: SimNode) -> Iterable[int]:
        """See `World`: none."""
        return ()

    def channel_kind(self, group: int) -> ChannelKind:
        """See `World`."""
        raise NotImplementedError

    def referee_of(self, group: int) -> ChannelReferee:
        """See `World`."""
        raise NotImplementedError
