"""Drivers of queue types, and their registry.

Nothing outside of a driver asks for the name of a type. A new type is a driver of its own and a
line that registers it (`broker/drivers.py`; tests/examples has worked examples). Its rules say the
placement: its queues are Raft groups (`GroupDriver`), or a host of the type's own keeps them
(`HostedDriver`), on one node each (`HomeDriver`) or on a view of nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypedDict

from convoymq.kernels.batch import PendingBudget
from convoymq.metadata.commands import ChangeView, SetMembers
from convoymq.metadata.machine import QueueRecord
from convoymq.metadata.placement import Places
from convoymq.model.clock import Clock
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table
from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.queues.group_queue import GroupQueue, group_state
from convoymq.queues.interface import Queue, Row
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.mirrored.policy import CopyAge
from convoymq.queues.reservation_reads import Ask
from convoymq.replication.machine import Machine
from convoymq.routing.queue_types import PlacementKind, TypeRules, add_type
from convoymq.shells.capacity import Waiting
from convoymq.storage.types import Directory
from convoymq.trace.recorder import TracedMachine
from convoymq.transport.control import ControlPlane
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.shells.groups.host import ReplicaHost

Answer = Callable[[object, "BrokerError | None"], None]
"""Gets what was asked for, or why it does not come; called once."""
MEMORY_TARGET_BYTES = 256 << 20
AskNode = Callable[[int, "list[object]", int, Answer], None]
"""(node, request, how long to wait in ms, answer): asks a node."""


class GroupOptions(TypedDict):
    """Options that every `GroupQueue` is made with."""

    vhost: str
    name: str
    group: int
    node: int
    host: ReplicaHost
    transport: Transport
    clock: Clock
    incarnations: Mapping[int, int]
    members: Sequence[int]
    new_session: Callable[[], int]
    is_forgotten: Callable[[int], bool]
    ask_counts: Callable[[int, int], Awaitable[tuple[int, int]]] | None
    on_routes: Callable[[], None] | None
    on_unused: Callable[[], None] | None
    limits: DefaultsConfig | None
    budget: PendingBudget | None
    served: dict[int, GroupQueue] | None
    changed: set[int] | None


class Fence(Protocol):
    """Says which replicas of this node may append what clients send, while they lead."""

    def follow(self, queue: GroupQueue) -> None:
        """Called when this node has a replica of the group, or knows another leader of it."""

    def forget(self, queue: GroupQueue) -> None:
        """The queue is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuestions:
    """Requests of groups' handles to other nodes; None: there is no way."""

    counts: Callable[[int, int], Awaitable[tuple[int, int]]] | None = None
    """(node that leads, group): its (ready, consumers)."""
    reservation: Ask | None = None
    """Answered by `Queue.serve_reservation`."""
    dead_letters: DeadLetterOptions | None = None
    """Options by which dead letters are published."""
    node: AskNode | None = None
    """Answered by `GroupQueue.serve`."""
    fence: Fence | None = None
    """Asked by types whose leaders append under a lease of their node."""


class QueueMachine(Machine, TracedMachine, Protocol):
    """The state machine of a queue that is a group."""

    settings: dict[str, int]


class Reports(Protocol):
    """Reports of hosted queues to their node's broker."""

    def on_unused(self, record: QueueRecord) -> None:
        """The last consumer left a queue."""

    def on_expired(self, record: QueueRecord) -> None:
        """A queue was unused for too long."""

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """A queue's files cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """Parts that a `QueueHost` is made with."""

    node_id: int
    incarnation: int
    """Counts the starts of the node."""
    open_directory: Callable[[str], Directory]
    """Returns a folder of that name, where the node keeps its data."""
    clock: Clock
    control: ControlPlane
    reports: Reports
    new_session: Callable[[], int]
    """Numbers a session of this node."""
    node_name_of: Callable[[int], str]
    """Name of a node, for texts."""
    on_routes: Callable[[], None]
    """Edges are to forget the routes that they remember: the handles of queues have changed."""
    call_soon: Callable[[Callable[[], None]], None]
    """Runs a callback on the loop; may be called from any thread."""
    wanted: Callable[[], None]
    """To be called when there is work for `end_of_round`."""
    await_room: Callable[[int, Waiting], None]
    """`ReplicaHost.await_room`."""
    record_members: Callable[[SetMembers | ChangeView, Answer], object]
    """Has other members of a queue recorded in the tree."""
    has_majority: Callable[[], bool]
    """Returns whether more than half of the cluster's nodes can be reached."""
    running_nodes: Callable[[], list[int]]
    """Returns the nodes that may get copies of queues: they run, and are not drained."""
    incarnation_of: Callable[[int], int]
    """Returns the latest incarnation of a node that is known of; 0 = none."""
    load: Callable[[], Mapping[int, int]]
    """Returns node -> queues that it has."""
    places: Callable[[], Places] = dict
    """Returns node -> zone and machine."""
    note: Callable[..., None]
    """(event, fields by name): logs an event of a queue."""
    read_tree: Callable[[Answer], object]
    """Calls back when this node's tree has all that was recorded before the call."""
    lost_groups: Callable[[], int] = int
    """Returns the last group whose data the node may have lost with its disk."""
    dead_letters: DeadLetterOptions | None = None
    """Options by which dead letters are published; None: they are not."""
    memory_target_bytes: int = MEMORY_TARGET_BYTES
    """Memory for the messages of all queues of a type that pages them out."""
    mirror_sync_bytes_per_s: Callable[[], int] = int
    """Returns the rate of a synchronisation at most, as it is now; 0 = it has no limit."""
    settings: DefaultsConfig = field(default_factory=DefaultsConfig)
    """The node's configuration of queues."""
    changed: set[int] = field(default_factory=set)
    """Groups whose rows in lists may have changed: the host puts them in."""


class QueueHost(Protocol):
    """One node's queues of a type that is no Raft group, and its handles of those elsewhere."""

    @property
    def crashed(self) -> Iterable[int]:
        """Returns the group ids of queues of this node that were stopped by an error, or could not
        be opened."""

    def due(self) -> Iterable[int]:
        """Returns those of them that `open` is to be called for again now."""

    def open(self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]) -> Queue:
        """Opens a queue on one of its members, with its effective settings (`Queue.configure`); one
        that has ended when that fails."""

    def find(self, record: QueueRecord, arguments: Table) -> Queue | None:
        """Returns this node's handle of a queue. Opens no queue: a handle of one that lives
        elsewhere may be made, which nobody else notices."""

    def follow(self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]) -> None:
        """The tree may have a newer record of a queue; also of one that is not open here."""

    def get(self, group: int) -> Queue | None:
        """Returns the handle with that group id, if there is one."""

    def handles(self) -> Iterable[Queue]:
        """Returns all handles of this node."""

    def delete(self, group: int) -> None:
        """The queue is gone from the tree; maybe it was none of this type."""

    def copy_of(self, group: int) -> CopyAge:
        """Returns which copy of a mirrored queue this node has."""

    def leader_rows(self) -> Iterator[Row]:
        """Yields what rebalancing must know of the mirrored queues with their master here
        (`LocalQueues.leader_rows`)."""

    def hand_over(self, group: int, node: int) -> None:
        """Begins to hand a mirrored queue to another node; it is done when the tree says so.

        Raises:
            PreconditionFailed: the master is not here, or that node has no synchronised mirror, or
                none that may be the master.
        """

    def remove_orphans(self, known: set[int]) -> None:
        """Deletes data of queues that the tree does not have any more."""

    def on_node_up(self, node: int) -> None:
        """Another node is linked, or speaks again."""

    def on_node_down(self, node: int) -> None:
        """The link to another node broke."""

    def on_suspect(self, node: int) -> None:
        """Another linked node is silent: it may have ended, or stand still."""

    def rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """Yields the rows for management of the queues that this node leads, or is the home of;
        `groups`: of these alone."""

    def sessions(self) -> Iterable[int]:
        """Sessions of this node's clients."""

    def backlog_bytes(self) -> int:
        """Returns the bytes that wait for the disk."""

    def dead_lettered(self) -> Counter[tuple[str, str]]:
        """Returns (strategy, reason) -> messages that left queues unacknowledged since the node
        started; strategies and reasons as metrics name them."""

    def end_of_round(self) -> None:
        """Carries out what clients appended in this round."""

    def stop(self) -> None:
        """Writes what waits and closes files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLocation:
    """Location of a queue, as far as one node knows it."""

    members: tuple[int, ...]
    """Nodes that have the queue, as its record says."""
    online: tuple[int, ...]
    """Members that can be reached."""
    leader: int | None
    """Leader, master or home; None: none is known."""
    state: str
    """`running`, or why the queue does not serve: `down`, or `minority` of a Raft group."""


class QueueDriver(ABC):
    """Driver of a queue type."""

    rules: TypeRules
    """Name, placement, and what may be declared."""
    heeds_conditions = True
    """The conditions matter; otherwise they are taken and not looked at."""

    @abstractmethod
    def size(self, arguments: Table, default: int) -> int:
        """Returns the number of members that a queue begins with. `default`: of one whose
        declaration does not say it."""

    def locate(
        self, record: QueueRecord, leader: int | None, is_up: Callable[[int], bool]
    ) -> QueueLocation:
        """Returns the location of a queue.

        Args:
            leader: the leader, master or home, if one is known.
            is_up: whether a node can be reached.
        """
        online = tuple(node for node in record.members if is_up(node))
        return QueueLocation(
            members=record.members,
            online=online,
            leader=leader,
            state=self.state(leader, len(online), len(record.members)),
        )

    def state(self, leader: int | None, online: int, members: int) -> str:
        """Returns the state of a queue with that leader and so many members."""
        return "running" if leader is not None and online else "down"


class GroupDriver(QueueDriver):
    """A type whose queues are Raft groups."""

    group_size_argument: str
    """Argument for the number of members that a queue begins with."""

    def size(self, arguments: Table, default: int) -> int:
        size = arguments.get(self.group_size_argument)
        if size is not None and isinstance(size.value, int) and size.value > 0:
            return size.value
        return default

    def state(self, leader: int | None, online: int, members: int) -> str:
        return group_state(leader, online, members)

    @abstractmethod
    def make_machine(self, arguments: Table, release: str) -> QueueMachine:
        """Returns the state machine of a declared queue.

        Args:
            release: the release of RabbitMQ whose rules the queue follows; "": none is recorded.
        """

    @abstractmethod
    def make_handle(
        self, options: GroupOptions, ask: GroupQuestions, answers: LargeAnswers
    ) -> GroupQueue:
        """Returns a node's handle of a queue, which is also its group's effect sink."""


class HostedDriver(QueueDriver):
    """A type whose queues are kept by hosts of its own: one for each node."""

    @abstractmethod
    def make_host(self, parts: HostParts) -> QueueHost:
        """Returns the host of a node."""


class HomeDriver(HostedDriver):
    """A type whose queues are kept on one node each."""

    def size(self, arguments: Table, default: int) -> int:
        return 1


_DRIVERS: dict[str, QueueDriver] = {}


def register(driver: QueueDriver) -> None:
    """Makes a type known, before a node starts."""
    is_group = driver.rules.placement is PlacementKind.RAFT
    assert is_group == isinstance(driver, GroupDriver), "a Raft group needs a group's driver"
    add_type(driver.rules)
    _DRIVERS[driver.rules.name] = driver


def driver_of(name: str) -> QueueDriver | None:
    """Returns the driver of a type; None for one that is not served."""
    return _DRIVERS.get(name)


def group_driver_of(name: str) -> GroupDriver:
    """Returns the driver of a type whose queues are groups."""
    driver = _DRIVERS[name]
    assert isinstance(driver, GroupDriver)
    return driver


def hosted_drivers() -> list[HostedDriver]:
    """Returns the drivers of types whose queues are no Raft groups."""
    return [driver for driver in _DRIVERS.values() if isinstance(driver, HostedDriver)]
