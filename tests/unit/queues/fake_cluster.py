"""A cluster without sockets, disks of logs and elections: every commit is immediate.

Brokers, metadata stores, queue machines and classic queues are the real ones; only replication is
replaced, by applying each batch on all members in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog

from convoymq.broker.facade import Broker
from convoymq.kernels.batch import CommandBuilder
from convoymq.kernels.entries import Entry
from convoymq.kernels.link_frames import FRAME_CONTROL, HEADER_SIZE, frame_header
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.commands import Bootstrap, PutNode
from convoymq.metadata.machine import MetadataMachine, User
from convoymq.model.config import DefaultsConfig
from convoymq.model.tables import Table
from convoymq.node.notes import log_note
from convoymq.replication.raft.membership import Membership
from convoymq.routing.types import Destination, DestinationKind
from convoymq.shells.groups.group_time import GroupTime
from convoymq.shells.groups.status import GroupStatus, HostCounters
from convoymq.storage.files import RealDirectory
from convoymq.transport.control import ControlPlane
from tests.patience import PATIENCE_S

INCARNATION = 7


def queue_end(name: str) -> Destination:
    """A queue as the end of a binding."""
    return Destination(DestinationKind.QUEUE, name)


def exchange_end(name: str) -> Destination:
    """An exchange as the end of a binding."""
    return Destination(DestinationKind.EXCHANGE, name)


class Epoch:
    def __init__(self) -> None:
        self.value = 0

    def bump(self) -> None:
        self.value += 1


class LoopClock:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def now_ms(self) -> int:
        return 1_000_000 + int(self.loop.time() * 1000)

    def monotonic_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_ms / 1000, callback, *arguments)

    def random(self) -> float:
        return 0.5


class Group:
    """One group: its log, leader and members' machines."""

    def __init__(self, group: int, leader: int) -> None:
        self.group = group
        self.leader = leader
        self.entries: list[Entry] = []
        self.replicas: dict[int, Any] = {}
        self.sinks: dict[int, Any] = {}


class FakeHost:
    """The part of a replica host that the broker uses."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node
        self.builders: dict[int, CommandBuilder] = {}
        self.groups: dict[int, Any] = {}
        self.stopped: dict[int, Any] = {}
        self.incarnations: dict[int, int] = {}
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.storage = SimpleNamespace(
            turn_wal=lambda: 0, has_emptied=lambda _: True, release_memory=lambda _: None,
            wal=SimpleNamespace(generation=1), memory_bytes=0, cache_bytes=0,
        )  # fmt: skip
        self.counters = HostCounters()
        self.incarnations: dict[int, int] = {}
        self.lines: dict[int, list[Any]] = {}
        """Node -> who waits for room on the link to it."""

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))
        log_note(structlog.get_logger(), event, fields)

    def create_group(
        self, group: int, members: Sequence[int], machine: Any, sink: Any, *,
        leader_hint: int = 0, founder: tuple[int, int] = (0, 0), learner: bool = False,
        wiped: bool = False,
    ) -> Any:  # fmt: skip
        known = self.cluster.groups.setdefault(group, Group(group, leader_hint or members[0]))
        replica = SimpleNamespace(machine=machine, is_leader=known.leader == self.node)
        replica.members = tuple(members)
        replica.log = SimpleNamespace(last_index=0, snapshot_index=0, written_index=0, segments=[])
        replica.applying = SimpleNamespace(commit_latency_ms=0)
        replica.open_term = lambda: None
        replica.is_live = lambda node: node in known.replicas
        replica.last_applied = 0
        replica.faulty, replica.is_behind = "", False
        replica.can_commit = True
        replica.dead, replica.fence, replica.established_leader = False, None, 0
        replica.time = GroupTime(LoopClock())
        replica.election_timer = SimpleNamespace(campaign=lambda: None)
        replica.core = SimpleNamespace(
            lost_state=False, quarantined=False, term=1, progress={}, commit_index=0, peers=[],
            transfer_target=0, role=0, members=Membership(frozenset(members)),
            changes=SimpleNamespace(refusal_of=lambda _members: "members do not change here"),
        )  # fmt: skip
        replica.propose = lambda *command: self.builder_of(group).add(
            command[0], command[1], 0, 0, command[2], command[3], command[4]
        )
        if group and self.cluster.raised:
            machine.set_version(machine.VERSION)
        for entry in known.entries:
            machine.apply(entry.index, entry.time_ms, entry.data)
        machine.effects.clear()
        known.replicas[self.node] = self.groups[group] = replica
        self.watch_group(group, members, sink)
        return replica

    def status(self, group: int) -> GroupStatus:
        """As of the real host; nothing is in the log."""
        replica, known = self.groups[group], self.cluster.groups[group]
        stopped = self.stopped[group].stopped if group in self.stopped else ""
        role = "leader" if known.leader == self.node else "follower"
        return GroupStatus(
            group=group, role="stopped" if stopped else role, leader=known.leader, term=1,
            commit_index=0, last_applied=0, last_index=0, written_index=0, snapshot_index=0,
            voters=replica.members, learners=(), match={}, version=replica.machine.version,
            stopped=stopped,
        )  # fmt: skip

    def watch_group(self, group: int, members: Sequence[int], sink: Any) -> None:
        known = self.cluster.groups.setdefault(group, Group(group, members[0]))
        known.sinks[self.node] = sink
        self.cluster.loop.call_soon(self._announce, group)

    def _announce(self, group: int) -> None:
        known = self.cluster.groups.get(group)
        if known is None or not self.cluster.has_leaders:
            return
        leader = known.replicas.get(known.leader)
        sink = known.sinks.get(self.node)
        if leader is not None and sink is not None:
            sink.on_leader(group, known.leader, 1)

    def wake(self) -> None:
        pass

    def plan(self, group: int) -> None:
        return None

    def member_refusal(self, group: int, node: int) -> str:
        return "members do not change here"

    def transfer_leadership(self, group: int, to: int = 0) -> bool:
        return False

    def unwatch_group(self, group: int) -> None:
        pass

    def remove_group(self, group: int) -> None:
        self.groups.pop(group, None)
        self.cluster.groups.pop(group, None)

    def replica(self, group: int) -> Any:
        return self.groups.get(group)

    def leader_of(self, group: int) -> int | None:
        known = self.cluster.groups.get(group)
        return known.leader if known and self.cluster.has_leaders else None

    def builder_of(self, group: int) -> CommandBuilder:
        if group not in self.builders:
            self.builders[group] = CommandBuilder(self.cluster.wake)
        return self.builders[group]

    def floor_of(self, kind: str) -> int:
        return 1

    def newest_of(self, kind: str, nodes: Any) -> int:
        return 1

    def is_replica_live(self, group: int, node: int) -> bool:
        return node in self.cluster.groups[group].replicas

    def read_entry(self, group: int, index: int) -> Entry:
        return self.cluster.groups[group].entries[index - 1]

    def read_span(self, group: int, index: int, max_bytes: int) -> list[Entry]:
        return [self.read_entry(group, index)]

    def await_room(self, node: int, item: Any) -> None:
        line = self.lines.setdefault(node, [])
        if item not in line:
            line.append(item)

    def make_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        self.cluster.nodes[self.node].control.transport.full.discard(node)
        for item in self.lines.pop(node, []):
            item.on_room(node)

    def lose(self, node: int) -> None:
        """A node does not answer; those that wait for room on its link hear so."""
        self.cluster.down.add(node)
        self.cluster.nodes[self.node].control.transport.full.discard(node)
        for item in self.lines.pop(node, []):
            item.on_lost(node)

    def segment_at(self, group: int, index: int) -> None:
        return None

    def incarnation_of(self, node: int) -> int:
        return INCARNATION

    def on_frame(self, node: int, data: bytes) -> None:
        _, kind, _, group, a, b, c, d = frame_header(data)
        sink = self.cluster.groups[group].sinks[self.node]
        sink.on_link_frame(node, kind, group, a, b, c, d, data[HEADER_SIZE:])


class FakeTransport:
    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.full: set[int] = set()
        self.cluster = cluster
        self.node = node

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        if self.is_connected(node):
            self.cluster.frames.append((self.node, node, b"".join([frame, *body])))
            self.cluster.wake()

    def is_connected(self, node: int) -> bool:
        return node in self.cluster.nodes and node not in self.cluster.down

    def backlog_bytes(self, node: int) -> int:
        return 0


class FakeNode:
    def __init__(self, cluster: FakeCluster, node: int, settings: DefaultsConfig) -> None:
        self.id = node
        self.sessions = 0
        self.host = FakeHost(cluster, node)
        self.control = ControlPlane(node, FakeTransport(cluster, node))
        clock = LoopClock()
        self.machine = MetadataMachine()
        self.store = AsyncMetadataStore(
            self.machine, self.host.builder_of(0), self.new_session(), clock
        )
        self.host.create_group(
            0, tuple(range(1, cluster.size + 1)), self.machine, self.store, leader_hint=1
        )
        self.broker = Broker(
            node_id=node,
            incarnation=INCARNATION,
            host=self.host,  # type: ignore[arg-type]
            control=self.control,
            metadata=self.store,
            make_route_version=Epoch,  # type: ignore[arg-type]
            clock=clock,
            open_directory=lambda _name: RealDirectory(cluster.directory / f"node-{node}"),
            new_session=self.new_session,
            wake=cluster.wake,
            settings=settings,
        )

    def new_session(self) -> int:
        self.sessions += 1
        return self.id << 56 | INCARNATION << 24 | self.sessions


class FakeCluster:
    """`async with FakeCluster(directory, nodes=3) as cluster`."""

    def __init__(
        self, directory: Path, nodes: int = 1, settings: DefaultsConfig | None = None
    ) -> None:
        self.directory = directory
        self.size = nodes
        self.settings = settings or DefaultsConfig()
        self.nodes: dict[int, FakeNode] = {}
        self.groups: dict[int, Group] = {}
        self.frames: list[tuple[int, int, bytes]] = []
        self.down: set[int] = set()
        self.has_leaders = True
        self.raised = False
        self._woken = False

    async def __aenter__(self) -> FakeCluster:
        self.loop = asyncio.get_running_loop()
        for node in range(1, self.size + 1):
            self.nodes[node] = FakeNode(self, node, self.settings)
        await self.nodes[1].store.execute(
            Bootstrap(
                vhost="/",
                user="guest",
                password_hash=hash_sha256(b"guest"),
                algorithm=SHA256,
                cluster_name="fake",
            )
        )
        for node, made in self.nodes.items():
            await made.store.execute(PutNode(id=node, name=f"n{node}", incarnation=INCARNATION))
            await made.broker.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for node in self.nodes.values():
            await node.control.close()
            await node.broker.stop()

    @property
    def guest(self) -> User:
        return self.nodes[1].machine.users["guest"]

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self.round)

    def raise_versions(self) -> None:
        """The newest rules are in force: in the tree, and in queues that are declared now."""
        self.raised = True
        for node in self.nodes.values():
            node.machine.set_version(node.machine.VERSION)

    def round(self) -> None:
        self._woken = False
        for node in self.nodes.values():
            node.broker.end_of_round()
        frames, self.frames = self.frames, []
        for sender, receiver, data in frames:
            if sender in self.down or receiver in self.down:
                continue
            target = self.nodes[receiver]
            if frame_header(data)[1] == FRAME_CONTROL:
                target.control.on_frame(sender, data)
            else:
                target.host.on_frame(sender, data)
        if self.has_leaders:
            for group in list(self.groups.values()):
                self._commit(group)
        if self.frames:
            self.wake()

    def _commit(self, group: Group) -> None:
        if group.leader not in group.replicas:
            return
        for node in self.nodes.values():
            builder = node.host.builders.get(group.group)
            if builder is None or not builder.used or node.id in self.down:
                continue
            index = len(group.entries) + 1
            entry = builder.take_entry(group.group, index, 1, LoopClock().now_ms())
            group.entries.append(entry)
            for member, replica in list(group.replicas.items()):
                if member in self.down:
                    continue
                machine = replica.machine
                machine.apply(entry.index, entry.time_ms, entry.data)
                effects, machine.effects = list(machine.effects), []
                group.sinks[member].on_effects(effects, replica)

    async def tell(self) -> None:
        """Has every node tell the others of its queues and connections, as it does each second."""
        clusters = {n: node.broker.cluster for n, node in self.nodes.items() if n not in self.down}
        began_ms = LoopClock().monotonic_ms()
        for cluster in clusters.values():
            await cluster.sampler.exchange()
        await until(
            lambda: all(
                cluster.model.part(other).heard_ms >= began_ms
                for cluster in clusters.values()
                for other in clusters
            )
        )

    async def queue(self, node: int, name: str, **more: Any) -> tuple[str, int, int]:
        """Declares a durable queue."""
        arguments = Table.of(more.pop("arguments", {}))
        properties = {"durable": True, "exclusive": False, "auto_delete": False, **more}
        return await self.nodes[node].broker.declarations.declare_queue(
            "/", name, arguments=arguments, **properties
        )


class FakeConnection:
    """A connection that lists show; tests say what of it."""

    id, name, vhost = 1, "client", "/"
    user = User(name="guest")

    def info(self) -> dict[str, Any]:
        return {"name": self.name}

    def traffic(self) -> int:
        return 0

    def channel_infos(self) -> list[dict[str, Any]]:
        return []

    def consumer_infos(self) -> list[dict[str, Any]]:
        return []

    def sessions(self) -> list[int]:
        return []


async def until(condition: Any, seconds: float = PATIENCE_S) -> None:
    """Waits for a condition with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
