"""A node's replicated queues: what the tree says, opened, joined, left and ended on this node.

The only creator of replicas of queues. It compares what should be with what is, so it does not
matter which changes it missed. It never waits: who owns it calls `on_change` with every change of
the tree, and `reconcile` soon after when that returned True.

Invariants:
    - a group in `member_of` has a replica in the host, opened with the settings of its declaration
    - nothing is ended or left by a tree that is older than the one that was followed before
    - a group is opened only as the queue that the tree names; numbers are never given out twice,
      so data of a lower number without a queue is that of a deleted one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, QueueRecord
from convoymq.metadata.placement import (
    BALANCED,
    CLIENT_LOCAL,
    LOCATORS,
    choose_leader,
    choose_members,
)
from convoymq.model.clock import Clock
from convoymq.model.durations import duration_ms
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.group_queue import FlowLimits, GroupQueue
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.queues.reservation_reads import Ask
from convoymq.queues.session_audit import INTERVAL_MS, SessionWatch
from convoymq.queues.session_audit import Ask as AskSessions
from convoymq.queues.stream.machine import NO_LIMIT, StreamMachine
from convoymq.queues.stream.queue import AskNode, StreamQueue
from convoymq.routing.queue_arguments import takes_over_strictly
from convoymq.routing.types import QueueType
from convoymq.trace.recorder import QueueTrace, Traces
from convoymq.transport.interfaces import Transport

TRACE_ARGUMENT = "x-trace"
COUNT_SHARE = 64
"""Leaders per node are counted anew with every 64th part of the queues that is added."""
SLICE_QUEUES = 64
"""Queues that one `reconcile` opens, ends or looks at: a node that starts with thousands serves its
links and clients in between."""


class GroupHost(Protocol):
    """What is needed of `groups.host.ReplicaHost`."""

    groups: Any
    stopped: Any

    def create_group(
        self,
        group: int,
        members: Sequence[int],
        machine: Any,
        sink: Any,
        *,
        leader_hint: int = 0,
        founder: tuple[int, int] = (0, 0),
        learner: bool = False,
        wiped: bool = False,
    ) -> Any:
        """Starts this node's replica of a group."""  # fmt: skip

    def watch_group(self, group: int, members: Sequence[int], sink: Any) -> None:
        """Follows a group that this node is no member of."""

    def unwatch_group(self, group: int) -> None:
        """Stops following."""

    def leave_group(self, group: int, members: Sequence[int]) -> None:
        """Deletes this node's replica and follows the group from now on."""

    def remove_group(self, group: int) -> None:
        """Deletes this node's replica."""

    def replica(self, group: int) -> Any:
        """The local replica, if any."""

    def leader_of(self, group: int) -> int | None:
        """Who leads, as far as known."""

    def builder_of(self, group: int) -> Any:
        """The open batch of a group."""

    def await_room(self, node: int, item: Any) -> None:
        """Has `item.on_room(node)` called when the link to the node takes bulk again."""

    def is_replica_live(self, group: int, node: int) -> bool:
        """Whether a node carries out effects itself."""

    def read_entry(self, group: int, index: int) -> Any:
        """An entry of the local log."""

    def read_span(self, group: int, index: int, max_bytes: int) -> Any:
        """An entry of the local log and some that follow it."""

    def segment_at(self, group: int, index: int) -> Any:
        """(segment, its file) where an entry lies in one; None elsewhere."""

    def incarnation_of(self, node: int) -> int:
        """Incarnation of a linked node; 0 when it is not known."""


@dataclass(slots=True, kw_only=True)
class Questions:
    """How queues ask other nodes; the edge of a node that has none leaves them out."""

    counts: Any = None
    reservation: Ask | None = None
    stream: AskNode | None = None
    sessions: AskSessions | None = None


@dataclass(frozen=True, slots=True)
class Followed:
    """What `LocalQueues.reconcile` looked at."""

    records: dict[int, QueueRecord]
    """Group -> queue, of all that the tree has."""
    touched: set[int]
    everything: bool = False
    """Changes may have been missed: what no record names was deleted."""
    more: bool = False
    """Not all that is due was done: `reconcile` is to be called again soon."""


def make_machine(record: QueueRecord, arguments: Table) -> QuorumMachine | StreamMachine:
    """Returns the machine of a declared queue."""
    if record.type is QueueType.STREAM:
        return StreamMachine(stream_settings(arguments))
    return QuorumMachine(machine_settings(arguments))


@dataclass(kw_only=True)
class LocalQueues:
    """See the module text. One per node; single threaded."""

    node: int
    host: GroupHost
    tree: MetadataMachine
    transport: Transport
    clock: Clock
    incarnations: dict[int, int]
    """Node -> latest incarnation known here."""
    new_session: Callable[[], int]
    group_size: int = 3
    """Members of a queue whose declaration does not say."""
    limits: FlowLimits | None = None
    ask: Questions = field(default_factory=Questions)
    stored_groups: Callable[[], Iterable[int]] = tuple
    """Groups with data on this node's disk."""
    traces: Traces | None = None
    machine_for: Callable[[QueueRecord, Table], Any] = make_machine
    lost_groups: int = 0
    """Groups up to this number that have nothing on disk here were lost with the disk."""
    note: Callable[[str, dict[str, Any]], None] | None = None
    """Something for the log file."""
    audit_interval_ms: int = INTERVAL_MS
    queues: dict[int, GroupQueue] = field(default_factory=dict)
    """Faces of the queues, with and without a replica here."""
    member_of: set[int] = field(default_factory=set)
    _touched: set[int] | None = None
    """None = everything has to be looked at."""
    _line: deque[int] = field(default_factory=deque)
    """Groups that wait for their turn to be looked at; twice is no harm."""
    _ended: tuple[int, int] = (0, 0)
    _ended_over_limit: int = 0
    _leaders: dict[int, int] = field(default_factory=dict)
    _placed: int = 0
    """Queues placed by `_leaders` since they were counted."""
    _followed: int = 0
    """Index of the tree that was looked at last."""
    watch: SessionWatch | None = None
    """Who ends sessions that were left behind; None without a way to ask."""
    answers: LargeAnswers = field(init=False)

    def __post_init__(self) -> None:
        self.answers = LargeAnswers(self.transport, self.host.await_room, self.clock)
        if self.ask.sessions is not None:
            self.watch = SessionWatch(
                node=self.node,
                queues=self.queues,
                host=self.host,
                clock=self.clock,
                ask=self.ask.sessions,
                forgotten=lambda: self.tree.forgotten,
                note=self.note,
                interval_ms=self.audit_interval_ms,
            )

    # --- following the tree --------------------------------------------------------------

    def on_change(self, change: Change) -> bool:
        """Takes note of a change of the tree; True when `reconcile` is due."""
        if change.kind is ChangeKind.RESTORED:
            self._touched = None
            return True
        if change.kind is ChangeKind.NODE_FORGOTTEN and self.watch is not None:
            self.watch.forget(change.node)
        if change.record is None:
            return False
        if self._touched is not None:
            self._touched.add(change.record.group)
        return True

    def reconcile(self) -> Followed:
        """Makes this node's replicated queues be what the tree says, some at a time."""
        if self.is_behind:
            self._touched = None
            return Followed({}, set())
        self._followed = self.tree.applied_index
        touched, self._touched = self._touched, set()
        wanted = self.tree.queue_index.by_group
        everything = touched is None
        if touched is None:
            touched = {*wanted, *self.queues}
            self._remove_orphans(set(wanted))
            self._line.clear()
        line = self._line
        line.extend(sorted(touched))
        order = [line.popleft() for _ in range(min(len(line), SLICE_QUEUES))]
        for group in order:
            record = wanted.get(group)
            if record is None:
                self._end_queue(group)
            elif record.type.is_replicated:
                self._follow_members(record)
        return Followed(wanted, set(order), everything, bool(line))

    @property
    def is_behind(self) -> bool:
        """Whether the tree is being rebuilt, because its log was damaged: what it does not have
        yet is not gone, and members are those of long ago."""
        return self.tree.applied_index < self._followed

    def _remove_orphans(self, known: set[int]) -> None:
        for group in list(self.stored_groups()):
            # Ids are never given out twice: what is below the next one and unknown was deleted.
            if group and group < self.tree.next_group and group not in known:
                self.host.remove_group(group)

    def _end_queue(self, group: int) -> None:
        queue = self.queues.pop(group, None)
        if queue is not None:
            local, proxied = self._ended
            self._ended = (local + queue.delivered_local, proxied + queue.delivered_forwarded)
            self._ended_over_limit += queue.dropped_over_limit
            queue.on_deleted()
            if group in self.member_of:
                self.host.remove_group(group)
            else:
                self.host.unwatch_group(group)
            if self.traces is not None:
                self.traces.end(group)
        self.member_of.discard(group)

    def _follow_members(self, record: QueueRecord) -> None:
        """Opens, joins or leaves the group of a queue, as its record says."""
        group = record.group
        queue = self.queues.get(group)
        if queue is not None:
            queue.members = record.members
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

    def handle(self, record: QueueRecord) -> GroupQueue:
        """This node's handle of a replicated queue."""
        found = self.queues.get(record.group)
        return found if found is not None else self._open_group(record)

    def _open_group(self, record: QueueRecord) -> GroupQueue:
        common: dict[str, Any] = {
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
            "limits": self.limits,
        }
        queue: GroupQueue
        if record.type is QueueType.STREAM:
            assert self.ask.stream is not None
            queue = StreamQueue(ask_node=self.ask.stream, answers=self.answers, **common)
        else:
            queue = QuorumQueue(ask_node=self.ask.reservation, **common)
        queue.trace = self._open_trace(record, queue)
        self.queues[record.group] = queue
        if self.node in record.members:
            self._become_member(record, queue)
        else:
            self.host.watch_group(record.group, record.members, queue)
        return queue

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

    def _open_trace(self, record: QueueRecord, queue: GroupQueue) -> QueueTrace | None:
        """The trace of a queue that asks for one, by argument or virtual host."""
        if self.traces is None:
            return None
        wish = self._arguments(record).get(TRACE_ARGUMENT)
        if not self.traces.wants(record.vhost, wish is not None and wish.value is True):
            return None
        return self.traces.open(
            record.vhost,
            record.name,
            record.type.value,
            record.group,
            partial(self._recorders, queue),
        )

    def _recorders(self, queue: GroupQueue) -> list[tuple[int, int, bool]]:
        """(node, incarnation, whether it has a replica) of the nodes that record a queue, as far as
        this one knows: clients elsewhere are known by their sessions."""
        known = self.incarnations
        return [
            (node, known.get(node, 0), node in queue.members)
            for node in {self.node, *queue.members}
        ]

    def _arguments(self, record: QueueRecord) -> Table:
        declared = self.tree.vhosts[record.vhost].topology.find_queue(record.name)
        assert declared is not None
        return declared.arguments

    # --- other nodes ---------------------------------------------------------------------

    def on_node_up(self, node: int) -> None:
        """Another node is linked, or speaks again."""
        for queue in list(self.queues.values()):
            queue.on_node_up(node)

    def on_node_down(self, node: int, *, definite: bool) -> None:
        """Another node is silent or not linked; `definite`: its process is known to be gone."""
        for queue in list(self.queues.values()):
            queue.on_node_down(node, definite=definite)

    def tick(self) -> None:
        """Looks after the queues with clients here; to be called every `group_queue.TICK_MS`."""
        for queue in [queue for queue in self.queues.values() if queue.has_clients]:
            queue.tick()
        if self.watch is not None:
            self.watch.tick()

    # --- numbers -------------------------------------------------------------------------

    def sessions(self) -> list[int]:
        """Sessions of this node that a queue may still hear of."""
        return [session for queue in self.queues.values() for session in queue.sessions()]

    def deliveries(self) -> tuple[int, int]:
        """Messages that this node handed to its own clients, and that it sent, as leader, to nodes
        without a live replica; those of ended queues included."""
        local, proxied = self._ended
        for queue in self.queues.values():
            local += queue.delivered_local
            proxied += queue.delivered_forwarded
        return local, proxied

    def dropped_over_limit(self) -> int:
        """Messages over the delivery limit that were dropped while this node led their queues."""
        return self._ended_over_limit + sum(q.dropped_over_limit for q in self.queues.values())

    # --- places --------------------------------------------------------------------------

    def group_size_of(self, record: QueueRecord) -> int:
        """How many members a queue should have: what its declaration or the settings say."""
        declared = self.tree.vhosts[record.vhost].topology.find_queue(record.name)
        return self.group_size_for(declared.arguments if declared is not None else EMPTY)

    def group_size_for(self, arguments: Table) -> int:
        """The same, for a declaration."""
        # A queue can only have the argument of its own type.
        for name in ("x-quorum-initial-group-size", "x-initial-cluster-size"):
            size = arguments.get(name)
            if size is not None and isinstance(size.value, int) and size.value > 0:
                return size.value
        return self.group_size

    def members_for(
        self, arguments: Table, running: Sequence[int], default_locator: str = CLIENT_LOCAL
    ) -> tuple[int, ...]:
        """Returns nodes for a new queue, the designated leader or home first.

        Args:
            running: nodes that are up, this one included.
        """
        kind = arguments.get("x-queue-type")
        classic = kind is None or kind.term() == QueueType.CLASSIC.value
        wish = arguments.get("x-queue-leader-locator")
        locator = LOCATORS.get(wish.term() if wish is not None else default_locator, CLIENT_LOCAL)
        leaders: dict[int, int] = {}
        if locator == BALANCED and len(running) > 1:
            leaders = self._count_leaders()
        leader = choose_leader(locator, client_node=self.node, running=running, leaders=leaders)
        leaders[leader] = leaders.get(leader, 0) + 1
        if classic:
            return (leader,)
        return choose_members(
            self.group_size_for(arguments),
            leader=leader,
            nodes=set(self.tree.nodes) | {self.node},
            running=running,
            replicas=self.tree.queue_index.replicas,
        )

    def _count_leaders(self) -> dict[int, int]:
        """Leaders and homes per node. Counted anew when so many were added that it may matter, or
        each declaration would look at all queues."""
        records = self.tree.queue_index.by_group
        self._placed += 1
        if self._placed * COUNT_SHARE > len(records):
            self._placed = 0
            leaders = self._leaders = {}
            for record in records.values():
                # Where nobody is known to lead, the designated leader is expected to.
                node = self.host.leader_of(record.group) if record.type.is_replicated else None
                node = node or record.home
                leaders[node] = leaders.get(node, 0) + 1
        return self._leaders


def machine_settings(arguments: Table) -> dict[str, Any]:
    """Returns what the machine of a quorum queue takes from its declaration."""
    settings: dict[str, Any] = {}
    limit = arguments.get("x-delivery-limit")
    if limit is not None and isinstance(limit.value, int):
        settings["delivery_limit"] = limit.value
    single = arguments.get("x-single-active-consumer")
    if single is not None:
        settings["single_active"] = bool(single.value)
    if not takes_over_strictly(arguments):
        settings["single_active_strict"] = False
    return settings


def stream_settings(arguments: Table) -> dict[str, Any]:
    """Returns what the machine of a stream takes from its declaration."""
    settings: dict[str, Any] = {}
    for name, argument in (
        ("max_bytes", "x-max-length-bytes"),
        ("segment_bytes", "x-stream-max-segment-size-bytes"),
    ):
        limit = arguments.get(argument)
        if limit is not None and isinstance(limit.value, int):
            settings[name] = limit.value
    age = arguments.get("x-max-age")
    if age is not None:
        settings["max_age_ms"] = duration_ms(age.term()) or NO_LIMIT
    return settings


__all__ = ["Followed", "GroupHost", "LocalQueues", "Questions", "make_machine"]
