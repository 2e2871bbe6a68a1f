"""Records of the replicated tree, and the changes that its watchers get."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from convoymq.replication.ring.views import RingView
from convoymq.routing.policies import Policies, topic_settings
from convoymq.routing.queue_types import PlacementKind
from convoymq.routing.topology import Topology
from convoymq.routing.types import Queue, QueueType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from convoymq.settings.values import Setting
    from convoymq.topics.rules.group import GroupState
    from convoymq.topics.rules.topic import TopicState

JOIN_FOUNDER = "founder"
"""A member that never ran: nothing of it can be missing."""
JOIN_LEARNER = "learner"
"""Not a member yet: it gets a vote when it has caught up."""
JOIN_WIPED = "wiped"
"""A member that has lost its data: it has no say before the leader has taken it in anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody who may connect."""

    name: str
    password_hash: str = ""
    algorithm: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionSet:
    """Permissions of a user to configure, write and read in one virtual host: three patterns."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPermission:
    """Routing keys of a topic exchange that a user may write and read: two patterns."""

    write: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """Placement of a queue; its properties are in the virtual host's topology."""

    vhost: str
    name: str
    group: int
    type: QueueType
    durable: bool
    members: tuple[int, ...]
    """Nodes that have the queue: the designated leader, the master, or the home first."""
    owner: str | None
    created_ms: int
    joined: tuple[int, ...] = ()
    """Members that came later: they start without a vote."""
    config: tuple[int, int] = (0, 0)
    """Term and index of the membership entry that `members` are from; (0, 0) = the first."""
    founder: tuple[int, int] = (0, 0)
    """Node and incarnation that lead the first term of the group without an election (ADR 0026)."""
    compatibility: str = ""
    """Release of RabbitMQ whose rules the queue follows (ADR 0086); "" = none was recorded."""
    type_given: bool = False
    """The declaration said the type."""
    view: RingView | None = None
    """The ring of a mirrored queue (ADR 0116); `members` are the nodes of its live members."""
    predecessor: int = 0
    """Group of the queue whose place this one takes, or took; 0 = it was not migrated."""

    @property
    def placement(self) -> PlacementKind:
        """Returns where the queue is, and what decides which of its members serves."""
        return self.type.placement if self.view is None else PlacementKind.RING

    @property
    def home(self) -> int:
        """Returns the node that shall lead at first, or the only one."""
        return self.members[0]

    @property
    def is_fleeting(self) -> bool:
        """Returns whether what the queue holds is gone with the process of its home."""
        kept = self.durable and self.owner is None
        return not kept and self.placement is PlacementKind.HOME


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A queue that shall take the place of one that is being migrated to its type (ADR 0128)."""

    record: QueueRecord
    declared: Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of the cluster."""

    id: int
    name: str
    incarnation: int
    addresses: dict[str, str] = field(default_factory=dict)
    release: str = ""
    supports: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Lowest and highest machine version that it knows, per kind of machine."""
    zone: str = ""
    """Failure domain of the node; "" = not recorded. Since version 8."""
    machine: int
    """Number of its machine: that of the node which is its process 1."""
    process: int = 1
    """Number among the processes of its machine. Since version 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The latest answer to a node that asked to be let in. Who asks twice in one incarnation,
    because an answer was lost or late, gets the same one."""

    directory: str
    asked: int
    """The incarnation that it asked with."""
    granted: int
    """The one that it goes on with."""
    role: str


class Recovery(TypedDict):
    """Record of a recovery from a lost majority."""

    cluster_id: str
    former_id: str
    lost_nodes: list[int]
    time_ms: int
    groups: list[dict[str, Any]]
    """Outcome for each group; see `groups.recovery_plan`."""
    number: NotRequired[int]
    """Counts the recoveries of the cluster from 1. Since version 5."""


@dataclass(slots=True, kw_only=True)
class TopicRecord:
    """An ordered topic. Its exchange has its name, its partitions are queues
    (`topics.partition_queue_name`)."""

    vhost: str
    name: str
    mode: str
    """`strict` or `weak`."""
    hash_id: int
    hash_seed: int
    created_ms: int
    state: TopicState
    groups: dict[str, GroupState] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    """Target of the latest change -> node that shall lead it, where somebody asked for one."""
    settings: dict[str, bool | int | str] = field(default_factory=dict)
    """Settings of its creation (`topic_settings`)."""

    @property
    def logical(self) -> int:
        """Returns the number of logical partitions."""
        return self.state.route.logical

    @property
    def held_versions(self) -> list[int]:
        """Returns the versions of the groups that hold partitions back."""
        lineage = self.state.lineage
        return [each.held_version(lineage) for each in self.groups.values() if not each.expired]

    @property
    def expired_versions(self) -> list[int]:
        """Returns the versions of the groups that hold nothing back."""
        return [group.cv for group in self.groups.values() if group.expired]


@dataclass(slots=True)
class Vhost:
    """One virtual host."""

    name: str
    topology: Topology
    description: str = ""
    tags: tuple[str, ...] = ()
    default_queue_type: str = ""
    compatibility: str = ""
    """Release of RabbitMQ whose rules new queues follow; "" = what the cluster says."""
    queues: dict[str, QueueRecord] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    """`max-connections`, `max-queues`; negative: none."""
    topics: dict[str, TopicRecord] = field(default_factory=dict)
    successors: dict[str, Successor] = field(default_factory=dict)
    """Queue that is being migrated -> the one that shall take its place."""

    def replace_record(self, changed: QueueRecord) -> None:
        """Replaces the record of a queue or of a successor, by its group."""
        successor = self.successors.get(changed.name)
        if successor is not None and successor.record.group == changed.group:
            self.successors[changed.name] = replace(successor, record=changed)
        else:
            self.queues[changed.name] = changed

    def declared(self, record: QueueRecord) -> Queue | None:
        """Returns the properties of a queue, or of a successor."""
        successor = self.successors.get(record.name)
        if successor is not None and successor.record.group == record.group:
            return successor.declared
        return self.topology.find_queue(record.name)

    @property
    def policies(self) -> Policies:
        """Policies and operator policies; routing looks at them as well."""
        return self.topology.policies

    def settings_of(self, topic: TopicRecord) -> Mapping[str, Setting]:
        """Returns what acts in one of its topics now: policies, and settings of its creation."""
        return topic_settings(topic.name, topic.settings, self.policies)


class ChangeKind(Enum):
    """Changes that watchers get."""

    QUEUE_CREATED = "queue_created"
    QUEUE_DELETED = "queue_deleted"
    QUEUE_MEMBERS = "queue_members"
    POLICIES = "policies"
    TOPIC = "topic"
    NODE = "node"
    NODE_FORGOTTEN = "node_forgotten"
    OTHER = "other"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Change:
    """Something changed; `record` for queues, `node` for nodes, `topic` for a topic and its groups,
    `vhost` where it is about one."""

    kind: ChangeKind
    record: QueueRecord | None = None
    node: int = 0
    vhost: str = ""
    topic: str = ""
