"""Cores of one queue in the simulator: its clock, network and faults, and a tree of one record."""

from __future__ import annotations

import msgspec

from convoymq.sim.clock import Process, Scheduler
from convoymq.sim.network import Network, NetworkConfig, NodeTransport, Receiver
from convoymq.sim.trace import Trace
from tests.examples.copies.core import Copies, Message

NODES = 6
CHAOS_US = 8_000_000
LIMIT_US = 60_000_000
TICK_US = 200_000
EVENTS_MAX = 2_000_000
EMPTY_HEADER = bytes(48)


class Numbers:
    """A store of op numbers and values."""

    def __init__(self) -> None:
        self.ops: dict[int, bytes] = {}

    def apply(self, number: int, op: bytes) -> None:
        assert number not in self.ops
        self.ops[number] = op

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.ops)

    def restore(self, state: bytes) -> None:
        self.ops = msgspec.msgpack.decode(state, type=dict[int, bytes])


class SimulatedNode:
    """One run of a node, from its start to its end. Implements `Receiver`."""

    incarnation = 1

    def __init__(self, world: World, number: int, *, is_founder: bool) -> None:
        self.world = world
        self.number = number
        self.process = Process(f"node{number}")
        self.store = Numbers()
        self.core = world.core_class(number, self.store, is_founder=is_founder)
        self.transport = NodeTransport(world.network, number, self.process)

    def step(self) -> None:
        """Carries out the effects of the core."""
        while self.core.effects:
            kind, *arguments = self.core.effects.popleft()
            if kind == "send":
                node, message = arguments
                self.transport.send(node, EMPTY_HEADER, (msgspec.msgpack.encode(message),))
            elif kind == "confirmed":
                self.world.on_confirmed(self, *arguments)
            elif kind == "lead":
                self.world.on_lead(self)

    def tick(self) -> None:
        """Proposes a view, if there is need."""
        self.world.scheduler.after(TICK_US, self.process, self.tick)
        proposal = self.core.proposal(waited=self.world.scheduler.chance(0.5))
        if proposal is not None:
            self.world.propose(*proposal)

    def take_view(self, view: int, members: tuple[int, ...]) -> None:
        """The tree has a view."""
        away = [n for n in members if n != self.number and not self.transport.is_connected(n)]
        self.core.take_view(view, members, away)
        self.step()

    # --- Receiver ----------------------------------------------------------------------------

    def may_link(self, peer: Receiver) -> bool:
        return True

    def on_frame(self, peer: int, data: bytes) -> None:
        self.core.on_message(peer, msgspec.msgpack.decode(data[48:], type=Message))
        self.step()

    def on_link_up(self, peer: int, incarnation: int) -> None:
        pass

    def on_link_down(self, peer: int, definite: bool) -> None:
        self.core.on_lost(peer)
        self.step()

    def on_room(self, peer: int) -> None:
        pass

    def on_suspected(self, peer: int, suspected: bool) -> None:
        if suspected:
            self.on_link_down(peer, False)


class World:
    """A cluster with one queue, under faults of the network, crashes and starts of nodes."""

    def __init__(self, seed: int, core_class: type[Copies] = Copies) -> None:
        self.core_class = core_class
        self.scheduler = Scheduler(seed)
        config = NetworkConfig(
            loss_chance=0.0001, stale_chance=0.5, spike_chance=0.02, reconnect_max_us=50_000
        )
        self.network = Network(self.scheduler, Trace(lambda: self.scheduler.now_us), config)
        self.nodes: dict[int, SimulatedNode] = {}
        self.view, self.members = 0, tuple(range(1, NODES + 1))
        self.under_way = 0
        """Proposals that the tree has not seen yet."""
        self.values = 0
        self.confirmed: dict[int, bytes] = {}
        self.taken_over = self.crashes = 0
        self.quiet = False
        for number in self.members:
            self._start(number, is_founder=number == 1)

    # --- the tree ----------------------------------------------------------------------------

    def propose(self, view: int, members: tuple[int, ...]) -> None:
        """A proposal is on its way to the tree."""
        self.under_way += 1
        self.scheduler.after(
            self.scheduler.skewed(1_000, 400_000), None, self._record, view, members
        )

    def _record(self, view: int, members: tuple[int, ...]) -> None:
        self.under_way -= 1
        if view <= self.view:
            return
        self.view, self.members = view, members
        for node in self.nodes.values():
            self._tell(node)

    def _tell(self, node: SimulatedNode) -> None:
        delay_us = self.scheduler.skewed(100, 500_000)
        self.scheduler.after(delay_us, node.process, node.take_view, self.view, self.members)

    # --- nodes -------------------------------------------------------------------------------

    def _start(self, number: int, *, is_founder: bool = False) -> None:
        node = self.nodes[number] = SimulatedNode(self, number, is_founder=is_founder)
        self.network.start(number, node)
        self.scheduler.after(20_000, node.process, self._tell, node)
        self.scheduler.after(TICK_US, node.process, node.tick)

    def _crash(self) -> None:
        """Ends a node that the queue can do without, now and when the tree has seen everything."""
        alive = [n for n in self.members if n in self.nodes and self.nodes[n].core.leads]
        copies = [n for n in self.members if n in self.nodes and self.nodes[n].core.is_whole]
        whole = sorted({*alive, *copies})
        if self.under_way or len(whole) < 2:
            return
        number = self.scheduler.rng.choice(whole)
        self.crashes += 1
        self.nodes.pop(number).process.alive = False
        self.network.stop(number, refuses=True)
        if self.scheduler.chance(0.5):
            self.scheduler.after(self.scheduler.skewed(1_000, 2_000_000), None, self._start, number)

    def _disturb(self) -> None:
        if self.quiet:
            return
        self.scheduler.after(self.scheduler.between(100_000, 2_000_000), None, self._disturb)
        links = self.network.links()
        if self.scheduler.chance(0.3):
            self._crash()
        elif links and self.scheduler.chance(0.3):
            self.network.break_link(*self.scheduler.rng.choice(links))
        elif links:
            source, target = self.scheduler.rng.choice(links)
            self.network.cut(source, target, breaks=self.scheduler.chance(0.5))
            delay_us = self.scheduler.between(1_000, 2_000_000)
            self.scheduler.after(delay_us, None, self.network.heal, source, target)

    # --- what must hold ----------------------------------------------------------------------

    def _submit(self) -> None:
        if self.quiet:
            return
        self.scheduler.after(self.scheduler.between(500, 20_000), None, self._submit)
        for node in self.nodes.values():
            if node.core.leads:
                self.values += 1
                node.core.submit(b"%d" % self.values)
                node.step()

    def on_confirmed(self, node: SimulatedNode, number: int) -> None:
        """A client gets an answer."""
        value = node.store.ops[number]
        assert self.confirmed.setdefault(number, value) == value, "confirmed twice, differently"

    def on_lead(self, node: SimulatedNode) -> None:
        """A node has become the primary: nothing confirmed is missing."""
        self.taken_over += node.core.view > 0
        self._check(node)

    def _check(self, node: SimulatedNode) -> None:
        lost = {n: v for n, v in self.confirmed.items() if node.store.ops.get(n) != v}
        assert not lost, f"node {node.number} of view {node.core.view} lacks {len(lost)}"

    def run(self) -> None:
        """Runs the world: chaos, then quiet. Raises AssertionError."""
        self._submit()
        self._disturb()
        assert self.scheduler.run(CHAOS_US, EVENTS_MAX)
        self.quiet = True
        self.network.heal_all()
        while not self._is_settled():
            assert self.scheduler.now_us < LIMIT_US, "not in step in time"
            assert self.scheduler.run(self.scheduler.now_us + TICK_US, EVENTS_MAX)
        for number in self.members:
            self._check(self.nodes[number])

    def _is_settled(self) -> bool:
        if self.under_way or not all(n in self.nodes for n in self.members):
            return False
        cores = [self.nodes[n].core for n in self.members]
        stores = [self.nodes[n].store.ops for n in self.members]
        return (
            cores[0].leads
            and {core.view for core in cores} == {self.view}
            and cores[0].is_idle
            and all(store == stores[0] for store in stores)
        )
