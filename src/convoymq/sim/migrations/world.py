"""Queues that are migrated among classic, quorum and stream in the simulator, under publishers and
consumers, while nodes, disks and the network fail.

What is real: `broker.migrations`, `broker.local_queues`, classic and quorum queues, groups, storage
and control frames. The tree is a log of the world, which a node reads and writes late, while it
reaches a majority; what a node sends is carried out in its order, and answered when the node has
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from convoymq.broker import drivers as _registered  # noqa: F401
from convoymq.metadata.commands import Command, DeclareQueue, PutVhost
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table
from convoymq.queues.interface import Queue
from convoymq.sim.clients import ClientConfig
from convoymq.sim.clock import EPOCH_MS, Process
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.faults import DISKS, NETWORK, NODES, Injector, PlannedLoad, Variation
from convoymq.sim.hosted.tree import RECORD_US_MAX, LateWorld
from convoymq.sim.migrations.channel import Book, MigratedChannel
from convoymq.sim.migrations.node import Done, MigrationNode
from convoymq.sim.nodes import SimNode
from convoymq.sim.world import ChannelKind

TYPES = ("classic", "quorum")
STREAM = "stream"
"""Queues stay what they are when they have become one."""
QUEUES_MAX = 3
RETRY_US = 50_000
PAUSE_US = (100_000, 1_500_000)
"""Shortest and longest time between two requests for a migration."""
TIMEOUTS_MS = (300, 2_000, 15_000)
"""Longest wait of an operation: the shortest is over before many an answer of the tree."""
RATES = (0, 0, 0, 100, 1_000)


class Proposal(NamedTuple):
    """A command on its way into the tree."""

    command: Command
    done: Done


class MigrationInjector(Injector):
    """Injects faults into a `MigrationWorld`."""

    world: MigrationWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {**super().moments(), "rebuild": self._rebuild}

    def _rebuild(self) -> None:
        node = self._node()
        if isinstance(node, MigrationNode):
            self.world.trace.fault("rebuild", node.name)
            node.rebuild_tree()


class MigrationWorld(LateWorld):
    """A cluster whose queues change their type."""

    injector_class = MigrationInjector
    nodes: dict[int, MigrationNode]

    def _make_world(self) -> None:
        plan = self.plan
        draw = self.own_rng(0x316A)
        self.file_bytes_max = draw.choice((4_096, 65_536))
        self.memory_target_bytes = draw.choice((20_000, 256 << 20))
        self.record_us_max = draw.choice(RECORD_US_MAX)
        self.timeout_ms = draw.choice(TIMEOUTS_MS)
        self.tree = MetadataMachine()
        self.tree.set_version(MetadataMachine.VERSION)
        self.empty_tree = self.tree.snapshot()
        self.entries: list[tuple[Command, int]] = []
        self._lines: dict[Process, deque[Proposal]] = {}
        self.nodes = {n: MigrationNode(self, n) for n in range(1, plan.nodes + 1)}
        self.record(PutVhost(name="/"))
        self.books: dict[int, Book] = {}
        numbers = sorted(self.nodes)
        for key in range(1, draw.randint(1, QUEUES_MAX) + 1):
            type = draw.choice(TYPES)
            members = tuple(draw.sample(numbers, 1 if type == "classic" else 3))
            self.record(
                DeclareQueue(
                    vhost="/",
                    name=f"q{key}",
                    type=type,
                    members=members,
                    durable=True,
                    arguments=Table.of({"x-queue-type": type}).encoded,
                )
            )
            self.books[key] = Book(f"q{key}")
            self.trace.add("world", f"q{key} is {type} at {members}")
        self.trace.add("world", f"nodes {plan.nodes} faults {' '.join(sorted(plan.faults))}")

    def _start_care(self) -> None:
        super()._start_care()
        self.scheduler.after(500_000, None, self._migrate)

    def _migrate(self) -> None:
        """Asks some node to migrate some queue, again and again."""
        if self.quiet:
            return
        self.scheduler.after(self.scheduler.between(*PAUSE_US), None, self._migrate)
        rng = self.scheduler.rng
        alive = [node for node in self.nodes.values() if node.alive]
        name = f"q{rng.choice(sorted(self.books))}"
        if alive:
            to = rng.choice((*TYPES, *TYPES, STREAM))
            rng.choice(alive).migrate(name, to, rng.choice(RATES))

    def disturb(self) -> None:
        """Something happened by which a queue may forget what it has handed out."""
        self.workload.channels_disturbed += 1

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        self.disturb()
        if node.alive:
            assert isinstance(node, MigrationNode)
            node.loop.end()
        super().crash(node, restart_us=restart_us, keep=keep, refuses=refuses, wipe=wipe)

    # The tree.

    def record(self, command: Command) -> object:
        """Adds a command to the tree's log. Raises Refused."""
        time_ms = EPOCH_MS + self.scheduler.now_us // 1000
        self.entries.append((command, time_ms))
        self.tree.applied_index += 1
        try:
            return self.tree.carry_out(command, time_ms)
        finally:
            self.tree.changes.clear()
            for node in self.nodes.values():
                if node.alive:
                    self.tell(node)

    def submit(self, node: MigrationNode, command: Command, done: Done) -> None:
        """A command of a node is on its way."""
        line = self._lines.setdefault(node.process, deque())
        line.append(Proposal(command, done))
        if len(line) == 1:
            self._later(None, self._carry_out, node, node.process)

    def _carry_out(self, node: MigrationNode, process: Process) -> None:
        line = self._lines[process]
        if process.alive and not self.has_majority(node.number):
            self.scheduler.after(RETRY_US, None, self._carry_out, node, process)
            return
        if not process.alive and self.scheduler.chance(0.5):
            # It has not left the node.
            del self._lines[process]
            return
        proposal = line.popleft()
        reply, error = None, None
        try:
            reply = self.record(proposal.command)
        except BrokerError as refusal:
            error = refusal
        self.trace.add("tree", f"{proposal.command}: {error or reply}")
        if process.alive:
            node.access.answers[len(self.entries)] = proposal.done, reply, error
        if line:
            self._later(None, self._carry_out, node, process)

    def tell(self, node: SimNode, group: int = 0) -> None:
        """A node will apply what the tree has then."""
        assert isinstance(node, MigrationNode)
        self._later(node.process, self._follow, node)

    def _follow(self, node: MigrationNode) -> None:
        if self.has_majority(node.number):
            node.follow()
        else:
            self.scheduler.after(RETRY_US, node.process, self._follow, node)

    # Channels.

    def groups_of(self, node: SimNode) -> Iterable[int]:
        assert isinstance(node, MigrationNode)
        return [key for key in self.books if node.handle(f"q{key}") is not None]

    def queue_at(self, node: SimNode, group: int) -> Queue:
        assert isinstance(node, MigrationNode)
        found = node.handle(f"q{group}")
        assert found is not None
        return found

    def channel_kind(self, group: int) -> ChannelKind:
        return MigratedChannel

    def referee_of(self, group: int) -> Book:
        return self.books[group]

    # The end.

    def _unfinished(self) -> list[str]:
        waiting = super()._unfinished()
        if waiting:
            return waiting
        waiting = [text for book in self.books.values() if (text := book.waits_for())]
        index = self.tree.queue_index
        waiting += [f"group {group} is migrated" for group in index.successors]
        for node in self.nodes.values():
            if node.access.tree.applied_index < len(self.entries):
                waiting.append(f"{node.name} does not have the tree")
                continue
            waiting += [f"{node.name}: {text}" for text in self._left_over(node)]
        return waiting

    def _left_over(self, node: MigrationNode) -> Iterable[str]:
        """Yields what a node has and should not have, or lacks."""
        index = self.tree.queue_index
        for group in node.storage.logs:
            record = index.by_group.get(group)
            if record is None or node.number not in record.members:
                yield f"has the log of group {group}"
        for name in node.classic._directory.list():
            if name.isdigit() and int(name) not in index.by_group:
                yield f"has the files of queue {name}"
        for queue in node.local.handles():
            if queue.group not in index.by_group:
                yield f"has the queue {queue.group}"
            elif queue.frozen or queue.known_seqs[0]:
                yield f"has queue {queue.group} frozen"
        if node.migrations._running:
            yield f"migrates {node.migrations._running}"

    def _final_checks(self) -> None:
        names = sorted(record.name for record in self.tree.queue_index.by_group.values())
        if names != sorted(book.name for book in self.books.values()):
            raise InvariantBroken(f"there are the queues {names}")
        for node in self.nodes.values():
            if node.access.tree.state_hash() != self.tree.state_hash():
                raise InvariantBroken(f"{node.name} has another tree")


class MigrationLoad(PlannedLoad):
    """Queues that are migrated."""

    text = "queues that are migrated among classic, quorum and stream under their clients"
    kinds = (
        *NETWORK,
        *(kind for kind in NODES if kind != "wipe"),
        *(kind for kind in DISKS if kind not in ("rot",)),
        "clock",
        "rebuild",
    )

    world_class = MigrationWorld

    def vary(self, seed: int, share: float) -> Variation:
        """Draws whether trees are built anew."""
        return Variation(kinds=frozenset({"rebuild"}) if seed % 3 == 0 else frozenset())

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """Leaves out what a book of messages cannot follow."""
        return replace(
            clients,
            late_chance=0.0,
            outcome_chance=0.0,
            lose_chance=0.0,
            delay_chance=0.0,
            repeat_chance=0.0,
            purge_chance=0.0,
            pause_chance=0.0,
            no_ack_chance=0.0,
            get_no_ack_chance=0.0,
        )
