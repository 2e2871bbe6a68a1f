"""A simulated node with replicas of Raft groups: the real host, storage and queues on simulated
disk, clock and network. It does what `node` does in production: hands events in, ends rounds and
ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from convoymq.kernels.link_frames import FRAME_CONTROL, HEADER_SIZE, frame, frame_header
from convoymq.model.config import RaftConfig
from convoymq.model.errors import Unavailable
from convoymq.queues.driver import GroupOptions
from convoymq.queues.group_queue import TICK_MS, GroupQueue
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.session_audit import SessionWatch
from convoymq.queues.stream.queue import Answer, StreamQueue
from convoymq.replication import versions as supported
from convoymq.replication.machine import Machine
from convoymq.shells.groups.host import ReplicaHost
from convoymq.sim.clock import Timer
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimFlusher, SimWorker
from convoymq.sim.invariants import observe_log
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import FIRST_INCARNATION, SimNode
from convoymq.sim.referee import IndexedMachine
from convoymq.sim.relays import RelayedLinks
from convoymq.storage.log import GroupLog
from convoymq.storage.store import Storage
from convoymq.transport.dispatch import FrameDispatch
from convoymq.transport.frame_kinds import FLAG_ANSWER, KIND_SESSIONS, KIND_STREAM
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.sim.group_world import GroupWorld

__all__ = ["FIRST_INCARNATION", "GroupNode", "watch"]

Watched = TypeVar("Watched", bound=IndexedMachine)

HOST_TICK_MS = 100
STORAGE_TICK_MS = 250
AUDIT_MS = 2_000


class _Reporting:
    """Part of the class of a machine that reports what it applies and restores. A subclass, because
    methods of compiled machines cannot be replaced."""

    _place: tuple[GroupNode, int]

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        machine, (node, group) = cast(IndexedMachine, self), self._place
        before = len(machine.effects)
        super().apply(index, time_ms, data)  # type: ignore[misc]
        node.world.on_applied(node, group, machine, data, machine.effects[before:])

    def restore(self, state: bytes) -> None:
        machine, (node, group) = cast(IndexedMachine, self), self._place
        super().restore(state)  # type: ignore[misc]
        if machine.index:
            node.world.on_restored(node, group, machine)


@cache
def _reporting(machine_class: Callable[..., object]) -> Callable[..., object]:
    watched = cast(type[object], machine_class)
    return type(watched.__name__, (_Reporting, watched), {})


def watch(
    machine_class: Callable[..., Watched], node: GroupNode, group: int, *arguments: object
) -> Watched:
    """Makes the machine of a replica, which reports what it applies and restores."""
    made = cast(Watched, _reporting(machine_class)(*arguments))
    made._place = (node, group)  # type: ignore[attr-defined]
    return made


class WatchedStorage(Storage):
    """Storage whose logs report to the checkers, those that are opened later too."""

    def __init__(self, node: GroupNode, flusher: SimFlusher, worker: SimWorker) -> None:
        super().__init__(node.disk, flusher, worker, node.world.plan.storage)
        self._node = node
        self.recovered = False

    def open_group(self, group: int) -> GroupLog:
        """Opens, and watches what is new."""
        new = group not in self.logs
        log = super().open_group(group)
        if new and self.recovered:
            self._node.watch_log(group, log)
        return log

    def remove_group(self, group: int) -> None:
        """Removes, and reports."""
        if group in self.logs:
            self._node.on_log_removed(group)
        super().remove_group(group)


class GroupNode(SimNode):
    """One node of a `GroupWorld`."""

    world: GroupWorld

    def __init__(self, world: GroupWorld, number: int) -> None:
        super().__init__(world, number)
        self.incarnations: dict[int, int] = {}
        self.queues: dict[int, GroupQueue] = {}
        self.wiped: set[int] = set()
        """Groups whose data this node lost, and does not know yet that it did."""

    # Start.

    def _open(self) -> Receiver:
        world = self.world
        scheduler = world.scheduler
        disk_config = world.plan.disk
        self.flusher = SimFlusher(scheduler, self.process, disk_config, self.slow, self.wake)
        worker = SimWorker(scheduler, self.process, disk_config, self.slow, self.wake)
        self.incarnations = {self.number: self.incarnation}
        self.queues = {}
        self.watch: SessionWatch | None = None
        self._asked = self.incarnation << 32
        #: number -> (node, who waits, timer)
        self._questions: dict[int, tuple[int, Answer[object], Timer]] = {}
        self.relays: RelayedLinks | None = None
        if world.relay_book is not None:
            self.relays = RelayedLinks(self, world.network, world.relay_book)
        self.transport: Transport = self.relays or self._make_transport()
        self.storage = WatchedStorage(self, self.flusher, worker)
        self._name_storage()
        report = self.storage.recover()
        self.storage.recovered = True
        for damage in report.damages:
            world.trace.add(self.name, f"damage: {damage}")
        for group, log in sorted(self.storage.logs.items()):
            # A damaged record may name a group that there is not.
            if group in world.checkers:
                self.watch_log(group, log)
        self.host = ReplicaHost(
            node=self.number,
            incarnation=self.incarnation,
            storage=self.storage,
            transport=self.transport,
            clock=self.clock,
            config=RaftConfig(lag_entries_max=world.plan.lag_entries_max),
            on_dirty=self.wake,
        )
        self.frames = FrameDispatch(_raise)
        self.frames.own("control", self._on_control)
        self.frames.own("shells.groups", self.host.on_frame)
        self.host.on_stopped = self.on_replica_stopped
        self.host.on_note = self.on_note
        self.answers = LargeAnswers(self.transport, self.host.await_room, self.clock)
        self._open_groups()
        self._watch_sessions()
        scheduler.after(scheduler.between(0, HOST_TICK_MS * 1000), self.process, self._tick_host)
        scheduler.after(
            scheduler.between(0, STORAGE_TICK_MS * 1000), self.process, self._tick_storage
        )
        scheduler.after(scheduler.between(0, TICK_MS * 1000), self.process, self._tick_queues)
        return self.relays or self

    def _watch_sessions(self) -> None:
        self.watch = SessionWatch(
            node=self.number,
            queues=self.queues,
            host=self.host,
            clock=self.clock,
            ask=self.ask_sessions,
            note=lambda event, fields: self.world.trace.add(self.name, f"{event} {fields}"),
            interval_ms=AUDIT_MS,
        )

    def _name_storage(self) -> None:
        """Tells the storage whose it is."""

    def _open_groups(self) -> None:
        for group in sorted(self.world.places):
            self.open_group(group)

    def on_note(self, event: str, fields: dict[str, object]) -> None:
        """Something for the log file: a fault that a real node contains is a bug here."""
        if event in ("raft.watch_failed", "queue.client_failed"):
            raise InvariantBroken(f"{self.name}: {event} {fields}")

    def on_replica_stopped(self, group: int, reason: str) -> None:
        """A replica stopped for good: what the referee raised inside of it, or a bug."""
        raise InvariantBroken(f"{self.name} stops its replica of group {group}: {reason}")

    def on_log_removed(self, group: int) -> None:
        """The storage is about to remove a log."""

    def say(self) -> bytes:
        """Returns what a node to be relayed to hears of this one."""
        return msgspec.msgpack.encode([self.number, self.incarnation])

    def judge(self, peer: int, said: bytes) -> int:
        """Returns the incarnation of a node that wants to be relayed; 0 = it is not accepted."""
        number, incarnation = msgspec.msgpack.decode(said)
        return int(incarnation) if number == peer else 0

    def open_group(self, group: int) -> None:
        """Becomes what the metadata say: a member of the group, or one who watches."""
        known = self.world.places[group]
        queue = self.queues.get(group)
        if queue is None:
            queue = self.queues[group] = self._new_queue(group, sorted(known.members))
        queue.members = tuple(sorted(known.members))
        self.world.load.configure(group, queue)
        if not known.has_replica(self.number):
            if group in self.storage.logs:
                # It was removed while this node was down.
                self.world.checkers[group].on_removed(self.number)
                self.host.remove_group(group)
            self.host.watch_group(group, sorted(known.members), queue)
            return
        if group in self.host.groups:
            return
        log = self.storage.logs.get(group)
        if log is not None and (log.last_index or log.snapshot_index or log.voted_for):
            self.wiped.discard(group)
        members, joins = known.began[self.number]
        self.host.create_group(
            group,
            sorted(members),
            self.make_machine(dict(known.settings), group),
            queue,
            leader_hint=known.hint,
            founder=known.founder,
            learner=joins,
            wiped=group in self.wiped,
        )

    def _new_queue(self, group: int, members: list[int]) -> GroupQueue:
        parts = GroupOptions(
            vhost="/",
            name=f"q{group}",
            group=group,
            node=self.number,
            host=self.host,
            transport=self.transport,
            clock=self.clock,
            incarnations=self.incarnations,
            members=members,
            new_session=self.new_session,
            is_forgotten=lambda _node: False,
            ask_counts=None,
            on_routes=None,
            on_unused=None,
            limits=None,
            budget=None,
            served=None,
            changed=None,
        )
        return self.world.load.make_queue(self, parts)

    def make_machine(self, settings: Mapping[str, int], group: int) -> Machine:
        """Returns the machine of a replica on this node."""
        return watch(self.world.load.machine_class, self, group, settings)

    def supports_of(self, _peer: int) -> dict[str, tuple[int, int]]:
        """Returns what HELLO says of a peer's machine versions."""
        return supported.supports()

    def close_group(self, group: int) -> None:
        """Is no member any more: deletes its data, and watches."""
        self.wiped.discard(group)
        self.world.checkers[group].on_removed(self.number)
        if group in self.host.groups:
            self.host.leave_group(group, sorted(self.world.places[group].members))
        else:
            self.open_group(group)

    def members_changed(self, group: int) -> None:
        """The metadata name other members: a node that watches asks those for the leader."""
        known = self.world.places[group]
        self.queues[group].members = tuple(sorted(known.members))
        if group in self.host.watched:
            self.host.watch_group(group, sorted(known.members), self.queues[group])

    def watch_log(self, group: int, log: GroupLog) -> None:
        """Has the group's checker follow this log."""
        checker = self.world.checkers[group]
        checker.on_recovered(self.number, log)
        observe_log(checker, self.number, log)

    def full_wal_files(self) -> set[str]:
        """WAL files behind which a younger one has begun, durably."""
        wal = self.storage.wal
        begun = [
            file.generation
            for file in wal.files.values()
            if file.started and not file.recovered and file.first_sequence <= wal.written_sequence
        ]
        newest = max(begun, default=0)
        return {file.name for file in wal.files.values() if file.generation < newest}

    # Rounds.

    def end_of_round(self) -> None:
        self.host.end_of_round()
        if self.host.deferred.release_due:
            self.host.deferred.release()

    def _tick_host(self) -> None:
        self.world.scheduler.after(HOST_TICK_MS * 1000, self.process, self._tick_host)
        self.host.tick()
        self.world.poll(self)

    def _tick_storage(self) -> None:
        self.world.scheduler.after(STORAGE_TICK_MS * 1000, self.process, self._tick_storage)
        chance = self.world.plan.turn_chance
        if chance and self.world.scheduler.chance(chance):
            self.storage.turn_wal()
        self.storage.tick()

    def _tick_queues(self) -> None:
        self.world.scheduler.after(TICK_MS * 1000, self.process, self._tick_queues)
        for queue in self.queues.values():
            queue.tick()
        if self.watch is not None:
            self.watch.tick()

    # Questions about streams, as the control plane carries them in production.

    def ask_node(
        self, node: int, request: list[object], wait_ms: int, answer: Answer[object]
    ) -> None:
        self.ask(node, KIND_STREAM, request, wait_ms, answer)

    def ask_sessions(
        self, node: int, request: list[object], wait_ms: int, answer: Answer[object]
    ) -> None:
        """Asks a node which of its sessions are not live (`queues.session_audit`)."""
        self.ask(node, KIND_SESSIONS, request, wait_ms, answer)

    def ask(
        self, node: int, kind: int, request: object, wait_ms: int, answer: Answer[object]
    ) -> None:
        """Sends a request to another node; `answer` hears what it says, or why it does not."""
        self._asked += 1
        number = self._asked
        timer = self.clock.call_later(wait_ms, self._give_up, number)
        self._questions[number] = (node, answer, timer)
        if not self.transport.is_connected(node):
            self.clock.call_later(0, self._give_up, number)
            return
        body = msgspec.msgpack.encode(request)
        self.transport.send(node, frame(FRAME_CONTROL, 0, 0, number, kind, 0, 0, body))

    def _give_up(self, number: int) -> None:
        asked = self._questions.pop(number, None)
        if asked is not None:
            asked[2].cancel()
            asked[1](None, Unavailable("no answer in time"))

    def _on_control(self, peer: int, data: bytes) -> None:
        _, _, flags, _, number, kind, _, _ = frame_header(data)
        body = msgspec.msgpack.decode(data[HEADER_SIZE:])
        if flags & FLAG_ANSWER:
            asked = self._questions.get(number)
            # Others are stale: answers to who this node was, or to what was given up.
            if asked is not None and asked[0] == peer:
                del self._questions[number]
                asked[2].cancel()
                asked[1](body, None)
            return

        def reply(found: object) -> None:
            made = msgspec.msgpack.encode(found)
            self.transport.send(
                peer, frame(FRAME_CONTROL, FLAG_ANSWER, 0, number, kind, 0, 0, made)
            )

        self.on_request(peer, kind, body, reply)

    def on_request(
        self, peer: int, kind: int, body: object, reply: Callable[[object], None]
    ) -> None:
        """Another node asks something."""
        if kind == KIND_STREAM:
            assert isinstance(body, list)
            queue = self.queues.get(body[1])
            if isinstance(queue, StreamQueue):
                queue.serve(body, reply, peer)
        elif kind == KIND_SESSIONS and self.watch is not None:
            reply(self.watch.serve(body))

    # What the network says.

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self.frames.on_frame(peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self.incarnations[peer] = incarnation
        self.host.on_link_up(peer, incarnation, self.supports_of(peer))
        for queue in list(self.queues.values()):
            queue.on_node_up(peer)

    def on_relayed(self, peer: int, incarnation: int, _said: bytes) -> None:
        """A peer is reached through another one."""
        self.on_link_up(peer, incarnation)

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self.host.on_link_down(peer, definite=definite)
        for number in [n for n, asked in self._questions.items() if asked[0] == peer]:
            self._give_up(number)
        for queue in list(self.queues.values()):
            queue.on_node_down(peer, definite=definite)

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self.host.on_room(peer)

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a linked peer."""
        if suspected:
            self.host.on_suspect(peer)
            for queue in list(self.queues.values()):
                queue.on_node_down(peer, definite=False)
        else:
            self.host.on_unsuspect(peer)
            for queue in list(self.queues.values()):
                queue.on_node_up(peer)


def _raise(_node: int, _data: bytes, error: Exception) -> None:
    """A fault that a real node contains is a bug here."""
    raise error
