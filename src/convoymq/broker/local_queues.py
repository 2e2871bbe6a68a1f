"""A node's queues: what the tree says, opened, joined, left and ended on this node.

The only creator of queues and of their replicas. It compares what should be with what is, so it
does not matter which changes it missed. It never waits: who owns it calls `on_change` with every
change of the tree, and `reconcile` soon after when that returned True. A broker, whose clients may
ask for a queue right after the change, calls `open_new` as well.

Invariants:
    - a group in `member_of` has a replica in the host, opened with the settings of its declaration
    - nothing is ended or left by a tree that is older than the one that was followed before
    - a group is opened only as the queue that the tree names; numbers are never given out twice,
      so data of a lower number without a queue is that of a deleted one
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from convoymq.broker import drivers as _registered  # noqa: F401
from convoymq.kernels.batch import PendingBudget
from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, QueueRecord
from convoymq.model.clock import Clock
from convoymq.model.compatibility import COMPATIBILITY, TYPE_GIVEN
from convoymq.model.config import DefaultsConfig
from convoymq.model.rounds import pass_on, run_each
from convoymq.model.tables import Table
from convoymq.queues.dead_letter_publisher import AT_LEAST_ONCE_NAME, STRATEGIES
from convoymq.queues.driver import (
    GroupOptions,
    GroupQuestions,
    QueueHost,
    QueueMachine,
    group_driver_of,
)
from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.handing_over import KEEPS_ALL
from convoymq.queues.interface import Queue, Row
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.mirrored.policy import CopyAge
from convoymq.queues.session_audit import INTERVAL_MS, SessionWatch
from convoymq.queues.session_audit import Ask as AskSessions
from convoymq.routing.policies import effective_settings
from convoymq.routing.queue_types import PlacementKind
from convoymq.routing.types import Queue as DeclaredQueue
from convoymq.settings.values import Setting
from convoymq.shells.groups.host import ReplicaHost
from convoymq.shells.groups.replica import Replica
from convoymq.topics.machine.driver import TOPIC_ARGUMENT
from convoymq.trace.recorder import QueueTrace, Traces
from convoymq.transport.interfaces import Transport

TRACE_ARGUMENT = "x-trace"
SLICE_QUEUES = 64
"""Queues that one `reconcile` opens, ends or looks at: a node that starts with thousands serves its
links and clients in between."""


def successors(host: ReplicaHost, replica: Replica) -> list[int]:
    """Voters to which this leader could hand over now: linked, and not behind."""
    return [
        peer.node
        for peer in replica.core.peers
        if peer.voter and not peer.voteless and replica.is_live(peer.node)
    ]


def make_machine(record: QueueRecord, arguments: Table) -> QueueMachine:
    """Returns the machine of a declared queue."""
    return group_driver_of(record.type.value).make_machine(arguments, record.compatibility)


@dataclass(kw_only=True)
class LocalQueues:
    """See the module text. One per node; single threaded."""

    node: int
    host: ReplicaHost
    tree: MetadataMachine
    transport: Transport
    clock: Clock
    incarnations: dict[int, int]
    """Node -> latest incarnation known here."""
    new_session: Callable[[], int]
    hosts: Mapping[str, QueueHost] = field(default_factory=dict)
    """Type -> host of its queues, where they are no Raft groups."""
    limits: DefaultsConfig = field(default_factory=DefaultsConfig)
    budget: PendingBudget = field(default_factory=PendingBudget)
    ask: GroupQuestions = field(default_factory=GroupQuestions)
    ask_sessions: AskSessions | None = None
    stored_groups: Callable[[], Collection[int]] = tuple
    """Groups with data on this node's disk."""
    traces: Traces | None = None
    machine_for: Callable[[QueueRecord, Table], QueueMachine] = make_machine
    lost_groups: int = 0
    """Groups up to this number that have nothing on disk here were lost with the disk."""
    on_routes: Callable[[], None] | None = None
    """Edges are to forget the routes that they remember."""
    on_unused: Callable[[QueueRecord], None] | None = None
    """A queue was not used for as long as it may be: it is to be deleted."""
    note: Callable[[str, Row], None] | None = None
    """Something for the log file."""
    audit_interval_ms: int = INTERVAL_MS
    queues: dict[int, GroupQueue] = field(default_factory=dict)
    """Local handles of queues that are groups, with and without a replica here."""
    member_of: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    """Groups whose rows in lists may have changed since somebody emptied this."""
    _served: dict[int, GroupQueue] = field(default_factory=dict)
    """The handles that have, or had until a moment ago, clients here."""
    _touched: set[int] | None = None
    """None = everything has to be looked at."""
    _line: deque[int] = field(default_factory=deque)
    """Groups that wait for their turn to be looked at; twice is no harm."""
    _ended: tuple[int, int] = (0, 0)
    _ended_left: Counter[tuple[str, str]] = field(default_factory=Counter)
    _ended_moved: int = 0
    _ended_deduplicated: int = 0
    _followed: int = 0
    """Index of the tree that was looked at last."""
    watch: SessionWatch | None = None
    """Ends sessions that were left behind; None without a way to ask."""
    answers: LargeAnswers = field(init=False)

    def __post_init__(self) -> None:
        self.answers = LargeAnswers(self.transport, self.host.await_room, self.clock)
        if self.ask_sessions is not None:
            self.watch = SessionWatch(
                node=self.node,
                queues=self.queues,
                host=self.host,
                clock=self.clock,
                ask=self.ask_sessions,
                forgotten=lambda: self.tree.forgotten,
                note=self.note,
                interval_ms=self.audit_interval_ms,
            )

    # --- following the tree --------------------------------------------------------------

    def on_change(self, change: Change) -> bool:
        """Takes note of a change of the tree; True when `reconcile` is due."""
        if change.kind is ChangeKind.RESTORED:
            self._touched = None
            if not self.is_behind:
                self._hand_over_all()
            return True
        if change.kind is ChangeKind.POLICIES:
            vhost = self.tree.vhosts.get(change.vhost)
            if self._touched is not None and vhost is not None:
                self._touched.update(record.group for record in vhost.queues.values())
            return True
        if change.kind is ChangeKind.NODE_FORGOTTEN and self.watch is not None:
            self.watch.forget(change.node)
        if change.record is None:
            return False
        if change.kind is ChangeKind.QUEUE_DELETED and not self.is_behind:
            # At once: what clients publish from now on goes to the successor, behind that.
            self._hand_over(change.record.group)
        self.changed.add(change.record.group)
        if self._touched is not None:
            self._touched.add(change.record.group)
        return True

    def open_new(self, change: Change) -> None:
        """Opens what a change of the tree brought to this node. It may be gone already: changes
        come in batches, and the tree is that after the last of them."""
        if self.is_behind:
            return
        records = self.tree.queue_index.by_group
        if change.kind is ChangeKind.RESTORED:
            for record in records.values():
                self._open_own(record)
        elif change.record is not None:
            found = records.get(change.record.group)
            if found is not None:
                self._open_own(found)

    def reconcile(self) -> bool:
        """Makes this node's queues be what the tree says, some at a time. Returns whether more is
        due: it is to be called again soon."""
        if self.is_behind:
            self._touched = None
            return False
        self._followed = self.tree.applied_index
        touched, self._touched = self._touched, set()
        wanted = self.tree.queue_index.by_group
        if touched is None:
            kept = (queue.group for host in self.hosts.values() for queue in host.handles())
            touched = {*wanted, *self.queues, *kept}
            self._hand_over_all()
            self._remove_orphans(set(wanted))
            self._line.clear()
        line = self._line
        line.extend(sorted(touched))
        order = [line.popleft() for _ in range(min(len(line), SLICE_QUEUES))]
        run_each(order, self._reconcile_one, pass_on)
        return bool(line)

    def _reconcile_one(self, group: int) -> None:
        record = self.tree.queue_index.by_group.get(group)
        if record is None:
            # The tree may have been behind when it was migrated.
            self._hand_over(group)
            self._end_queue(group)
            return
        queue = self.get(group)
        if queue is not None:
            queue.follow_members(record.members, record.config)
        is_group = record.placement is PlacementKind.RAFT
        settings = {} if is_group and queue is None else self.settings_of(record)
        if is_group:
            self._follow_members(record)
        else:
            self._open_own(record)
            host = self.hosts.get(record.type.value)
            if host is not None:
                host.follow(record, self._arguments(record), settings)
        if queue is not None:
            self._configure(record, settings)

    def copy_of(self, group: int) -> CopyAge:
        """See `QueueHost.copy_of`."""
        return max((host.copy_of(group) for host in self.hosts.values()), default=CopyAge())

    def hand_over(self, record: QueueRecord, node: int) -> None:
        """See `QueueHost.hand_over`."""
        self.hosts[record.type.value].hand_over(record.group, node)

    @property
    def is_behind(self) -> bool:
        """Returns whether the tree is being rebuilt, because its log was damaged: what it does not
        have yet is not gone, and members are those of long ago."""
        return self.tree.applied_index < self._followed

    def _remove_orphans(self, known: set[int]) -> None:
        """Deletes data of queues that the tree does not have any more."""
        for host in self.hosts.values():
            host.remove_orphans(known)
        for group in list(self.stored_groups()):
            # Ids are never given out twice: what is below the next one and unknown was deleted.
            is_known = group in known
            was_deleted = bool(group) and group < self.tree.next_group and not is_known
            if was_deleted or (is_known and self._was_removed(group)):
                self.host.remove_group(group)

    def _was_removed(self, group: int) -> bool:
        """Returns whether this node was removed from a group while it was away. Nobody counts on
        its old data: a new member begins without a vote."""
        members = self.tree.queue_index.by_group[group].members
        return self.node not in members and group not in self.host.groups

    def _hand_over_all(self) -> None:
        for queue in list(self.handles()):
            self._hand_over(queue.group)

    def _hand_over(self, group: int) -> None:
        """Has the clients of a queue that was migrated go on in its successor."""
        queue = self.get(group)
        if queue is None or group in self.tree.queue_index.by_group:
            return
        place = self.tree.vhosts.get(queue.vhost)
        record = place.queues.get(queue.name) if place is not None else None
        if record is None or record.predecessor < group:
            # Beyond it: migrated twice since this node looked.
            return
        self._open_own(record)
        successor = self.find(record)
        if successor is not None:
            self._configure(record, self.settings_of(record))
            queue.replace(successor)

    def _end_queue(self, group: int) -> None:
        queue = self.queues.pop(group, None)
        if queue is not None:
            local, proxied = self._ended
            self._ended = (local + queue.delivered_local, proxied + queue.delivered_forwarded)
            self._ended_left += queue.left
            self._ended_moved += queue.moved
            self._ended_deduplicated += queue.deduplicated
            queue.on_deleted()
            if group in self.member_of:
                self.host.remove_group(group)
            else:
                self.host.unwatch_group(group)
            if self.traces is not None:
                self.traces.end(group)
        self.member_of.discard(group)
        for host in self.hosts.values():
            host.delete(group)

    def _follow_members(self, record: QueueRecord) -> None:
        """Opens, joins or leaves the group of a queue, as its record says."""
        group = record.group
        queue = self.queues.get(group)
        if self.node in record.members:
            if queue is None:
                self._open_group(record)
            elif group not in self.member_of:
                self._become_member(record, queue)
        elif group in self.member_of:
            self.member_of.discard(group)
            if queue is not None and queue.trace is not None:
                queue.trace.detach()
            self.host.leave_group(group, record.members)
        elif queue is not None:
            self.host.watch_group(group, record.members, queue)

    # --- handles -------------------------------------------------------------------------

    def find(self, record: QueueRecord) -> Queue | None:
        """Returns this node's handle of a queue, or None. Creates no replica and no file; only the
        handle of a queue on other nodes is made when it is first asked for.

        Returns:
            None when the queue should be here and is not open: its type is not served, or this
            node's tree is behind.
        """
        known = self.get(record.group)
        if known is not None:
            return known
        if record.placement is PlacementKind.RAFT:
            return None if self.node in record.members else self._open_group(record)
        host = self.hosts.get(record.type.value)
        return host.find(record, self._arguments(record)) if host is not None else None

    def leader_of(self, record: QueueRecord) -> int | None:
        """Returns the leader, master or home of a queue, as far as this node knows."""
        if record.placement is PlacementKind.HOME:
            return record.home
        queue = self.get(record.group)
        return queue.known_leader if queue is not None else None

    def may_open(self, record: QueueRecord) -> bool:
        """Returns whether a queue that `find` does not have may be open later: the tree is
        behind."""
        return record.type.is_served

    def get(self, group: int) -> Queue | None:
        """Returns the open handle with that group id, whatever its type."""
        queue = self.queues.get(group)
        if queue is not None:
            return queue
        for host in self.hosts.values():
            found = host.get(group)
            if found is not None:
                return found
        return None

    def led(self, group: int) -> GroupQueue | None:
        """Returns the queue of a group that this node leads; None = it does not."""
        replica = self.host.replica(group)
        return self.queues.get(group) if replica is not None and replica.is_leader else None

    def handles(self) -> Iterator[Queue]:
        """Yields all handles of this node."""
        yield from self.queues.values()
        for host in self.hosts.values():
            yield from host.handles()

    def broken(self) -> set[int]:
        """Groups of queues on this node that have crashed, or whose replica was stopped."""
        found = set(self.host.stopped)
        return found.union(*(host.crashed for host in self.hosts.values()))

    def open(self, record: QueueRecord) -> None:
        """Opens a queue on this node, with a replica or without, if it is not open."""
        if self.get(record.group) is not None:
            return
        if record.placement is PlacementKind.RAFT:
            self._open_group(record)
            return
        host = self.hosts.get(record.type.value)
        if host is not None:
            host.open(record, self._arguments(record), self.settings_of(record))

    def _open_own(self, record: QueueRecord) -> None:
        """Opens a queue of which this node is a member, or the home."""
        if self.node in record.members:
            self.open(record)

    def _open_group(self, record: QueueRecord) -> GroupQueue:
        options: GroupOptions = {
            "vhost": record.vhost,
            "name": record.name,
            "group": record.group,
            "node": self.node,
            "host": self.host,
            "transport": self.transport,
            "clock": self.clock,
            "incarnations": self.incarnations,
            "members": record.members,
            "new_session": self.new_session,
            "is_forgotten": lambda node: node in self.tree.forgotten,
            "ask_counts": self.ask.counts,
            "on_routes": self.on_routes,
            "on_unused": partial(self._unused, record.group),
            "limits": self.limits,
            "budget": self.budget,
            "served": self._served,
            "changed": self.changed,
        }
        driver = group_driver_of(record.type.value)
        queue = driver.make_handle(options, self.ask, self.answers)
        queue.trace = self._open_trace(record, queue)
        self.queues[record.group] = queue
        if self.node in record.members:
            self._become_member(record, queue)
        else:
            self.host.watch_group(record.group, record.members, queue)
        self._configure(record, self.settings_of(record))
        return queue

    def _unused(self, group: int) -> None:
        """The leader's machine says that nobody uses a queue."""
        record = self.tree.queue_index.by_group.get(group)
        if record is not None and self.on_unused is not None:
            self.on_unused(record)

    def _become_member(self, record: QueueRecord, queue: GroupQueue) -> None:
        self.member_of.add(record.group)
        wiped = record.group <= self.lost_groups and record.group not in self.stored_groups()
        machine = self.machine_for(record, self._arguments(record))
        if queue.trace is not None:
            queue.trace.attach(machine)
        self.host.create_group(
            record.group,
            record.members,
            machine,
            queue,
            leader_hint=record.home,
            founder=record.founder,
            learner=self.node in record.joined and not wiped,
            wiped=wiped,
        )
        queue.on_member()

    def _open_trace(self, record: QueueRecord, queue: GroupQueue) -> QueueTrace | None:
        """Returns the trace of a queue that asks for one, by argument or virtual host."""
        if self.traces is None:
            return None
        requested = self._arguments(record).get(TRACE_ARGUMENT)
        if not self.traces.wants(record.vhost, requested is not None and requested.value is True):
            return None
        trace = self.traces.open(
            record.vhost,
            record.name,
            record.type.value,
            record.group,
            partial(self._recorders, queue),
        )
        name = self._arguments(record).get(TOPIC_ARGUMENT)
        if trace is not None and name is not None:
            topic = self.tree.vhosts[record.vhost].topics.get(name.term())
            if topic is not None:
                trace.key_hash(topic.logical, topic.hash_seed)
        return trace

    def _recorders(self, queue: GroupQueue) -> list[tuple[int, int, bool]]:
        """Returns (node, incarnation, whether it has a replica) of the nodes that record a queue,
        as far as this one knows: clients elsewhere are known by their sessions."""
        known = self.incarnations
        return [
            (node, known.get(node, 0), node in queue.members)
            for node in {self.node, *queue.members}
        ]

    def _configure(self, record: QueueRecord, settings: Mapping[str, Setting]) -> None:
        """Tells the handle of a queue, if it is open, what its arguments and policies come to."""
        queue = self.get(record.group)
        if queue is not None:
            queue.configure(settings)

    def settings_of(self, record: QueueRecord) -> Mapping[str, Setting]:
        """Returns what the arguments and policies of a queue come to."""
        policies = self.tree.vhosts[record.vhost].policies
        settings = effective_settings(self._declared(record), policies)
        if record.predecessor in self.tree.queue_index.by_group:
            # A successor keeps all that it gets, until it takes the place of the queue. What is
            # rejected then, before its leader follows the tree, is a dead letter.
            kept = ("dead-letter", "overflow")
            settings = {key: settings[key] for key in settings if key.startswith(kept)}
            settings[KEEPS_ALL] = True
        if not record.compatibility:
            return settings
        release: dict[str, Setting] = {
            COMPATIBILITY: record.compatibility,
            TYPE_GIVEN: record.type_given,
        }
        return {**settings, **release}

    def _arguments(self, record: QueueRecord) -> Table:
        return self._declared(record).arguments

    def _declared(self, record: QueueRecord) -> DeclaredQueue:
        declared = self.tree.vhosts[record.vhost].declared(record)
        assert declared is not None
        return declared

    # --- other nodes ---------------------------------------------------------------------

    def on_node_up(self, node: int) -> None:
        """Another node is linked, or speaks again."""
        run_each(list(self.queues.values()), lambda queue: queue.on_node_up(node), pass_on)
        run_each(self.hosts.values(), lambda host: host.on_node_up(node), pass_on)

    def on_node_down(self, node: int, *, definite: bool) -> None:
        """Another node is not linked; `definite`: its process is known to be gone."""
        run_each(self.hosts.values(), lambda host: host.on_node_down(node), pass_on)
        self.on_suspect(node, definite=definite)

    def on_suspect(self, node: int, *, definite: bool = False) -> None:
        """Another node is silent: its consumers get nothing new."""
        run_each(self.hosts.values(), lambda host: host.on_suspect(node), pass_on)
        queues = list(self.queues.values())
        run_each(queues, lambda queue: queue.on_node_down(node, definite=definite), pass_on)

    def tick(self) -> None:
        """Looks after the queues with clients here; to be called every `group_queue.TICK_MS`."""

        def tick(queue: GroupQueue) -> None:
            if queue.has_clients and self.queues.get(queue.group) is queue:
                queue.tick()
            else:
                del self._served[queue.group]

        run_each(list(self._served.values()), tick, pass_on)
        for host in self.hosts.values():
            for group in list(host.due()):
                self._open_again(host, group)
        if self.watch is not None:
            self.watch.tick()

    def _open_again(self, host: QueueHost, group: int) -> None:
        record = self.tree.queue_index.by_group.get(group)
        if record is not None:
            host.open(record, self._arguments(record), self.settings_of(record))

    # --- numbers -------------------------------------------------------------------------

    def sessions(self) -> list[int]:
        """Sessions of this node that a queue may still hear of."""
        found = [session for queue in self.queues.values() for session in queue.sessions()]
        for host in self.hosts.values():
            found += host.sessions()
        return found

    def rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """Yields the rows for management of the queues that this node leads or is the home of;
        `groups`: of these alone."""
        # A copy: between two rows queues may come and go.
        for group in list(self.queues if groups is None else groups):
            queue, replica = self.queues.get(group), self.host.replica(group)
            if queue is not None and replica is not None and replica.is_leader:
                yield {**queue.info(), "group": group}
        for host in self.hosts.values():
            yield from host.rows(groups)

    def other_rows(self, groups: Collection[int] | None = None) -> list[Row]:
        """Returns what this node knows of queues that it does not lead."""
        rows = self.reader_rows() + self.stopped_rows()
        return rows if groups is None else [row for row in rows if row["group"] in groups]

    def readers_of(self, group: int) -> int:
        """Returns the number of consumers here of a queue whose leader does not know them."""
        queue = self.queues.get(group)
        return queue.reader_count if queue is not None and queue.leader != self.node else 0

    def why(self, group: int) -> str:
        """Returns why this node's replica of a group stopped; "" = it has none that did."""
        replica = self.host.stopped.get(group)
        return replica.stopped if replica is not None else ""

    def stopped_rows(self) -> list[Row]:
        """Replicas of this node that stopped because of something in their log."""
        return [
            {"group": group, "node": self.node, "stopped": replica.stopped}
            for group, replica in self.host.stopped.items()
        ]

    def behind_rows(self) -> Iterator[Row]:
        """Yields the replicas that could not replace another one now, as far as this node knows:
        its own ones, and as leader the others'."""
        for group in list(self.host.stopped):
            yield {"group": group, "node": self.node}
        for group, replica in list(self.host.groups.items()):
            core = replica.core
            if replica.is_behind or replica.faulty or core.lost_state or core.quarantined:
                yield {"group": group, "node": self.node}
            if replica.is_leader:
                for peer in core.progress.values():
                    if peer.silent or not peer.voter:
                        yield {"group": group, "node": peer.node, "voter": peer.voter}

    def leader_rows(self) -> Iterator[Row]:
        """Yields what rebalancing must know of the replicated queues that this node leads."""
        for host in self.hosts.values():
            yield from host.leader_rows()
        for group, replica in list(self.host.groups.items()):
            if group and replica.is_leader and group in self.queues:
                yield {
                    "group": group,
                    "leader": self.node,
                    "targets": successors(self.host, replica),
                    "log_entries": replica.log.last_index - replica.log.snapshot_index,
                    "messages": self.queues[group].messages_handled(),
                }

    def reader_rows(self) -> list[Row]:
        """Returns the number of consumers here of queues that other nodes lead, where those don't
        know it."""
        return [
            {"group": group, "readers": queue.reader_count}
            for group, queue in self._served.items()
            if queue.leader != self.node and queue.reader_count
        ]

    def backlog_bytes(self) -> int:
        """Returns the bytes that hosted queues have waiting for the disk."""
        return sum(host.backlog_bytes() for host in self.hosts.values())

    def deliveries(self) -> tuple[int, int]:
        """Returns the messages that this node handed to its own clients, and that it sent, as
        leader, to nodes without a live replica; those of ended queues included."""
        local, proxied = self._ended
        for queue in self.queues.values():
            local += queue.delivered_local
            proxied += queue.delivered_forwarded
        return local, proxied

    def dead_lettered(self) -> Counter[tuple[str, str]]:
        """Returns (strategy, reason) -> messages that left quorum queues unacknowledged while this
        node led them."""
        return sum((queue.left for queue in self.queues.values()), Counter(self._ended_left))

    def dead_letters_by_type(self) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
        """Yields (type of queues, (strategy, reason) -> messages that left them
        unacknowledged)."""
        yield "quorum", self.dead_lettered()
        for name, host in self.hosts.items():
            yield name, host.dead_lettered()

    def dead_letters_moved(self) -> int:
        """Dead letters that every queue of their route has confirmed to this node."""
        return self._ended_moved + sum(queue.moved for queue in self.queues.values())

    def deduplicated(self) -> int:
        """Repeats by message-id that quorum queues dropped while this node led them."""
        ended = self._ended_deduplicated
        return ended + sum(queue.deduplicated for queue in self.queues.values())


__all__ = ["AT_LEAST_ONCE_NAME", "STRATEGIES", "LocalQueues", "make_machine"]
