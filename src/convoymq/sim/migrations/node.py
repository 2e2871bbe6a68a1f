"""A simulated node whose queues are migrated: groups, classic queues, what opens and ends both by
the tree, and `broker.migrations`, all of production, on a simulated loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from convoymq.broker.alarms import Alarms
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.migrations import Migrations
from convoymq.broker.queue_questions import QueueAnswers, QueueQuestions
from convoymq.broker.registry import Counters
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.commands import Command, PutNode
from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, QueueRecord
from convoymq.metadata.validation import validated
from convoymq.model.config import DefaultsConfig, RaftConfig
from convoymq.model.errors import BrokerError
from convoymq.queues.driver import HostParts
from convoymq.queues.group_queue import TICK_MS, GroupQueue
from convoymq.queues.interface import Queue
from convoymq.queues.mirrored.host import MirroredHost
from convoymq.queues.placement import Placement
from convoymq.replication import versions as supported
from convoymq.shells.groups.host import ReplicaHost
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimDisk, SimFlusher, SimWorker
from convoymq.sim.group_node import AUDIT_MS, HOST_TICK_MS, STORAGE_TICK_MS
from convoymq.sim.loop import LoopTasks, SimLoop
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import SimNode
from convoymq.storage.store import Storage
from convoymq.storage.types import Directory, File
from convoymq.transport.control import ControlPlane
from convoymq.transport.dispatch import FrameDispatch

if TYPE_CHECKING:
    from convoymq.sim.migrations.world import MigrationWorld

Done = Callable[[object, BrokerError | None], None]


class Folder:
    """A folder of a simulated disk, as a `Directory`."""

    def __init__(self, disk: SimDisk, name: str) -> None:
        self._disk = disk
        self._name = name
        disk.make(name)

    def _at(self, path: str) -> str:
        return f"{self._name}/{path}" if path else self._name

    def list(self, path: str = "") -> list[str]:
        """See `Directory`."""
        return self._disk.list(self._at(path))

    def exists(self, path: str) -> bool:
        """See `Directory`."""
        return self._disk.exists(self._at(path))

    def make(self, path: str) -> None:
        """See `Directory`."""
        self._disk.make(self._at(path))

    def open(self, path: str, *, create: bool = False) -> File:
        """See `Directory`."""
        return self._disk.open(self._at(path), create=create)

    def remove(self, path: str) -> None:
        """See `Directory`."""
        self._disk.remove(self._at(path))

    def rename(self, old: str, new: str) -> None:
        """See `Directory`."""
        self._disk.rename(self._at(old), self._at(new))

    def sync(self, path: str = "") -> None:
        """See `Directory`."""
        self._disk.sync(self._at(path))

    def sync_all(self) -> None:
        """See `Directory`."""
        self._disk.sync_all()


class TreeAccess:
    """A node's copy of the tree, and its way to change the tree: as `AsyncMetadataStore`. Commands
    of a process are carried out in their order, whatever becomes of who waits for them."""

    def __init__(self, node: MigrationNode) -> None:
        self.tree = MetadataMachine()
        self.tree.set_version(MetadataMachine.VERSION)
        self.answers: dict[int, tuple[Done, object, BrokerError | None]] = {}
        """Index of an entry of this process -> its answer, which comes when it is applied here."""
        self._node = node

    async def execute(self, command: Command, timeout: float) -> object:
        """See `AsyncMetadataStore`."""
        node = self._node
        begin = partial(node.world.submit, node, validated(command, self.tree))
        reply, error = await node.loop.wait(begin, timeout)
        if error is not None:
            raise error
        return reply

    def apply(self, entries: list[tuple[Command, int]]) -> list[Change]:
        """Applies entries of the tree's log, and returns the changes."""
        tree = self.tree
        for command, time_ms in entries:
            tree.applied_index += 1
            try:
                tree.carry_out(command, time_ms)
            except BrokerError:
                continue
        changes, tree.changes = list(tree.changes), []
        return changes


class MigrationNode(SimNode):
    """One node of a `MigrationWorld`. Implements `Reports`."""

    world: MigrationWorld
    local: LocalQueues
    migrations: Migrations

    def __init__(self, world: MigrationWorld, number: int) -> None:
        super().__init__(world, number)
        self.known = 0
        """Entries of the tree's log that the node has had, over its lives."""

    @property
    def queues(self) -> dict[int, Queue]:  # type: ignore[override]
        """Returns the handles that are open here."""
        return {queue.group: queue for queue in self.local.handles()}

    def _open(self) -> Receiver:
        world, scheduler, plan = self.world, self.world.scheduler, self.world.plan
        self.loop = SimLoop(scheduler, self.process)
        self.transport = self._make_transport()
        self.control = ControlPlane(self.number, self.transport)
        self.incarnations = {self.number: self.incarnation}
        self._reconciling = False
        worker = SimWorker(scheduler, self.process, plan.disk, self.slow, self.wake)
        flusher = SimFlusher(scheduler, self.process, plan.disk, self.slow, self.wake)
        self.storage = Storage(self._folder("raft"), flusher, worker, plan.storage)
        self.storage.recover()
        self.host = ReplicaHost(
            node=self.number,
            incarnation=self.incarnation,
            storage=self.storage,
            transport=self.transport,
            clock=self.clock,
            config=RaftConfig(lag_entries_max=plan.lag_entries_max),
            on_dirty=self.wake,
        )
        self.host.on_stopped = self._on_stopped
        self.host.on_note = self._on_host_note
        self.frames = FrameDispatch(_raise)
        self.frames.own("control", self.control.on_frame)
        self.frames.own("shells.groups", self.host.on_frame)
        self.classic = MirroredHost(
            HostParts(
                node_id=self.number,
                incarnation=self.incarnation,
                open_directory=self._folder,
                clock=self.clock,
                control=self.control,
                reports=self,
                new_session=self.new_session,
                node_name_of=lambda node: f"node{node}",
                on_routes=lambda: None,
                call_soon=self._soon,
                wanted=self.wake,
                await_room=self.host.await_room,
                record_members=_no_views,
                has_majority=partial(world.has_majority, self.number),
                running_nodes=lambda: sorted(world.nodes),
                incarnation_of=lambda node: world.nodes[node].incarnation,
                load=dict,
                read_tree=lambda answer: answer(True, None),
                settings=DefaultsConfig(partition_handling="ignore"),
                note=self.on_note,
                memory_target_bytes=world.memory_target_bytes,
            ),
            SimWorker(scheduler, self.process, plan.disk, self.slow, self.wake),
        )
        self.classic.file_bytes_max = world.file_bytes_max
        self.access = TreeAccess(self)
        put = PutNode(
            id=self.number,
            name=self.name,
            incarnation=self.incarnation,
            supports=supported.supports(),
        )
        world.record(put)
        self.access.apply(world.entries[: self.known])
        self._open_broker()
        self.follow()
        for period_ms, tick in (
            (HOST_TICK_MS, self._tick_host),
            (STORAGE_TICK_MS, self._tick_storage),
            (TICK_MS, self._tick_queues),
        ):
            scheduler.after(scheduler.between(0, period_ms * 1000), self.process, tick)
        return self

    def _folder(self, name: str) -> Directory:
        return Folder(self.disk, name)

    def _open_broker(self) -> None:
        tree, tasks = self.access.tree, LoopTasks(self.loop)
        questions = QueueQuestions(self.control, tasks)
        self.local = LocalQueues(
            node=self.number,
            host=self.host,
            tree=tree,
            transport=self.transport,
            clock=self.clock,
            incarnations=self.incarnations,
            new_session=self.new_session,
            hosts={"classic": self.classic},
            ask=questions.of_groups(),
            ask_sessions=questions.ask_sessions,
            audit_interval_ms=AUDIT_MS,
            stored_groups=lambda: self.storage.logs,
        )
        QueueAnswers(self.control, self.local, self.clock)
        nodes = ClusterNodes(self.number, self.incarnation, tree, self.transport)
        self.migrations = Migrations(
            nodes=nodes,
            metadata=cast(AsyncMetadataStore, self.access),
            local=self.local,
            placement=Placement(self.number, tree, self.local.leader_of),
            alarms=Alarms(nodes, self.control),
            control=self.control,
            clock=self.clock,
            settings=DefaultsConfig(operation_timeout_ms=self.world.timeout_ms),
            counters=Counters(),
            tasks=tasks,
        )
        self.loop.enter(self._reconcile)

    # The tree.

    def follow(self) -> None:
        """Applies what the tree's log has, as far as this node has heard of it."""
        tree, entries = self.access.tree, self.world.entries
        begin = tree.applied_index
        end = self.world.scheduler.between(begin, len(entries)) if begin < self.known else None
        changes = self.access.apply(entries[begin:end])
        self.known = max(self.known, tree.applied_index)
        self.loop.enter(self._on_changes, changes)
        answers = self.access.answers
        for index in [index for index in answers if index <= tree.applied_index]:
            done, reply, error = answers.pop(index)
            self.loop.enter(done, reply, error)
        if tree.applied_index < len(entries):
            self.world.tell(self)
        self.wake()

    def rebuild_tree(self) -> None:
        """The tree's log is damaged: it is built anew."""
        self.access.tree.restore(self.world.empty_tree)
        self.access.tree.changes.clear()
        self.loop.enter(self._on_changes, [Change(ChangeKind.RESTORED)])
        self.world.tell(self)

    def _on_changes(self, changes: list[Change]) -> None:
        for change in changes:
            due = self.local.on_change(change)
            self.migrations.on_change(change)
            self.local.open_new(change)
            if due and not self._reconciling:
                self._reconciling = True
                self._soon(self._reconcile)

    def _reconcile(self) -> None:
        self._reconciling = self.local.reconcile()
        if self._reconciling:
            self._soon(self._reconcile)
        self.wake()

    # Queues.

    def handle(self, name: str) -> Queue | None:
        """Returns the handle of a queue that can be used."""
        place = self.access.tree.vhosts.get("/")
        record = place.queues.get(name) if place is not None else None
        found = self.local.find(record) if record is not None else None
        if found is None or found.ended is not None:
            return None
        return None if isinstance(found, GroupQueue) and found.deleted else found

    def migrate(self, name: str, to: str, rate: int) -> None:
        """An operator asks for a migration here."""

        def done(found: object, error: BrokerError | None) -> None:
            self.world.trace.add(self.name, f"migration of {name} to {to}: {error or found}")

        self.loop.start(self.migrations.begin("/", name, to, rate=rate), done)

    # Rounds.

    def _soon(self, call: Callable[[], None]) -> None:
        self.world.scheduler.after(0, self.process, self.loop.enter, call)

    def end_of_round(self) -> None:
        """See `SimNode`."""
        self.loop.enter(self._end)

    def _end(self) -> None:
        self.classic.end_of_round()
        self.host.end_of_round()
        if self.host.deferred.release_due:
            self.host.deferred.release()

    def _tick_host(self) -> None:
        self.world.scheduler.after(HOST_TICK_MS * 1000, self.process, self._tick_host)
        self.loop.enter(self.host.tick)

    def _tick_storage(self) -> None:
        self.world.scheduler.after(STORAGE_TICK_MS * 1000, self.process, self._tick_storage)
        self.storage.tick()

    def _tick_queues(self) -> None:
        self.world.scheduler.after(TICK_MS * 1000, self.process, self._tick_queues)
        self.loop.enter(self.local.tick)
        self.loop.enter(self.migrations.tick)

    # What queues report.

    def on_note(self, event: str, **fields: object) -> None:
        """Something for the log file: a queue that crashed without a failing disk is a bug."""
        self.world.trace.add(self.name, f"{event} {fields.get('queue')} {fields.get('reason', '')}")
        failed = event in ("queue.crashed", "queue.client_failed")
        if failed and not str(fields.get("reason")).startswith(("OSError", "[Errno")):
            raise InvariantBroken(f"{self.name}: {event} {fields}")
        if failed:
            self.world.disturb()

    def _on_host_note(self, event: str, fields: dict[str, object]) -> None:
        if event in ("raft.watch_failed", "queue.client_failed"):
            raise InvariantBroken(f"{self.name}: {event} {fields}")

    def _on_stopped(self, group: int, reason: str) -> None:
        raise InvariantBroken(f"{self.name} stops its replica of group {group}: {reason}")

    def on_unused(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_expired(self, record: QueueRecord) -> None:
        """See `Reports`."""

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """See `Reports`."""
        self.world.trace.add(self.name, f"disk: {error}")

    # What the network says.

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self.loop.enter(self.frames.on_frame, peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self.incarnations[peer] = incarnation
        self.host.on_link_up(peer, incarnation, supported.supports())
        self.loop.enter(self.local.on_node_up, peer)
        self.wake()

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self.world.disturb()
        self.loop.enter(self._on_link_down, peer, definite)
        self.wake()

    def _on_link_down(self, peer: int, definite: bool) -> None:
        self.control.on_node_down(peer)
        self.host.on_link_down(peer, definite=definite)
        self.local.on_node_down(peer, definite=definite)

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self.loop.enter(self.host.on_room, peer)
        self.wake()

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a linked peer."""
        if suspected:
            self.host.on_suspect(peer)
            self.loop.enter(self.local.on_suspect, peer)
        else:
            self.host.on_unsuspect(peer)
            self.loop.enter(self.local.on_node_up, peer)
        self.wake()


def _raise(_node: int, _data: bytes, error: Exception) -> None:
    """A fault that a real node contains is a bug here."""
    raise error


def _no_views(command: Command, _answer: Done) -> None:
    """No queue is mirrored here."""
    raise InvariantBroken(f"no queue has mirrors, and {command}")
