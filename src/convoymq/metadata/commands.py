"""The commands of the metadata machine: what can be asked of the replicated tree.

They travel as msgpack in METADATA commands (docs/formats/entries-and-frames.md), one tagged map
each; `arg` of the command header holds the length of the map, because bodies are padded. Fields
are only ever added, with defaults, so older entries stay readable. A command or a field that this
release does not know is never skipped: `decode_command` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

import msgspec

from convoymq.model.errors import PreconditionFailed, UnknownCommand
from convoymq.replication.ring.views import RingView


class _Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="op",
):
    pass


class Bootstrap(_Command, frozen=True, tag="bootstrap"):
    """The first start: one virtual host and one administrator, unless the tree was ever filled."""

    vhost: str
    user: str
    password_hash: str
    algorithm: str
    cluster_name: str
    cluster_id: str = ""


class PutVhost(_Command, frozen=True, tag="vhost_put"):
    """Creates a virtual host or changes its properties. `compatibility`: since version 4."""

    name: str
    description: str = ""
    tags: tuple[str, ...] = ()
    default_queue_type: str = ""
    compatibility: str = ""


class DeleteVhost(_Command, frozen=True, tag="vhost_delete"):
    """Deletes a virtual host with all in it."""

    name: str


class PutUser(_Command, frozen=True, tag="user_put"):
    """Creates a user or replaces hash and tags. An empty hash admits no password."""

    name: str
    password_hash: str = ""
    algorithm: str = ""
    tags: tuple[str, ...] = ()


class DeleteUser(_Command, frozen=True, tag="user_delete"):
    """Deletes a user and its permissions."""

    name: str


class PutPermission(_Command, frozen=True, tag="permission_put"):
    """Sets the three patterns of a user in a virtual host."""

    user: str
    vhost: str
    configure: str
    write: str
    read: str


class DeletePermission(_Command, frozen=True, tag="permission_delete"):
    """Takes a user's access to a virtual host."""

    user: str
    vhost: str


class PutTopicPermission(_Command, frozen=True, tag="topic_permission_put"):
    """Sets the routing key patterns of a user for one topic exchange."""

    user: str
    vhost: str
    exchange: str
    write: str
    read: str


class DeleteTopicPermission(_Command, frozen=True, tag="topic_permission_delete"):
    """Removes topic permissions: of one exchange, or of all when `exchange` is None."""

    user: str
    vhost: str
    exchange: str | None = None


class DeclareExchange(_Command, frozen=True, tag="exchange_declare"):
    """Declares an exchange; equal ones are fine. `user`: as in `DeclareQueue`."""

    vhost: str
    name: str
    type: str
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: bytes = b""
    user: str = ""


class DeleteExchange(_Command, frozen=True, tag="exchange_delete"):
    """Deletes an exchange."""

    vhost: str
    name: str
    if_unused: bool = False


class DeclareQueue(_Command, frozen=True, tag="queue_declare"):
    """Declares a queue; the group id is given out when it is new.

    `members`: nodes that shall hold it, the designated leader (or the home node) first. `owner`:
    the connection of an exclusive queue. `type` follows from the arguments; who proposes fills it
    in (`metadata.validation`). `compatibility` and `type_given`: see `QueueRecord`; since version
    4, before that who proposes takes them away. `user`: who asked for it, since version 9 likewise.
    """

    vhost: str
    name: str
    members: tuple[int, ...]
    type: str = ""
    durable: bool = False
    owner: str | None = None
    auto_delete: bool = False
    arguments: bytes = b""
    server_named: bool = False
    compatibility: str = ""
    type_given: bool = False
    user: str = ""


class DeleteQueue(_Command, frozen=True, tag="queue_delete"):
    """Deletes a queue, if it is still the one with this group id (0 = whatever has the name)."""

    vhost: str
    name: str
    group: int = 0
    owner: str | None = None


class BeginMigration(_Command, frozen=True, tag="queue_migrate"):
    """Begins to migrate a queue to another type: creates the queue that shall take its place, with
    a group of its own, which nothing is routed to. Since version 6.

    `type` follows from the arguments; who proposes fills it in.
    """

    vhost: str
    name: str
    group: int
    members: tuple[int, ...]
    type: str = ""
    arguments: bytes = b""


class EndMigration(_Command, frozen=True, tag="queue_migrated"):
    """Ends the migration of a queue: the successor takes its name and its bindings (`switched`), or
    is deleted. Since version 6."""

    vhost: str
    name: str
    group: int
    successor: int
    switched: bool = False


class SetMembers(_Command, frozen=True, tag="queue_members"):
    """Records the members of a queue's group after they changed.

    `config`: term and index of the group's entry that made them members. What is not newer than the
    recorded one is ignored.
    """

    vhost: str
    name: str
    group: int
    members: tuple[int, ...]
    config: tuple[int, int]


class ChangeView(_Command, frozen=True, tag="queue_view"):
    """Records the next view of a mirrored queue's ring. Since version 6.

    The reply is False, and nothing is recorded, unless the view's version is the recorded one + 1
    (of a queue without a ring: 1): another change came first.
    """

    vhost: str
    name: str
    group: int
    view: RingView


class Bind(_Command, frozen=True, tag="bind"):
    """Binds a queue or an exchange to an exchange. `kind`: `queue` or `exchange`."""

    vhost: str
    source: str
    kind: str
    destination: str
    routing_key: str = ""
    arguments: bytes = b""
    owner: str | None = None


class Unbind(_Command, frozen=True, tag="unbind"):
    """Removes a binding."""

    vhost: str
    source: str
    kind: str
    destination: str
    routing_key: str = ""
    arguments: bytes = b""
    owner: str | None = None


class OwnerGone(_Command, frozen=True, tag="owner_gone"):
    """A connection ended: its exclusive queues go."""

    owner: str


class Join(_Command, frozen=True, tag="node_join"):
    """A node with an empty log asks to be let in. The leader of group 0 proposes it.

    `members`: the configuration of group 0. `supports`: lowest and highest version that the node
    knows, per kind of machine. `reachable`: another node answers under this number now.
    """

    id: int
    directory: str
    incarnation: int
    supports: dict[str, tuple[int, int]]
    members: tuple[int, ...]
    reachable: bool = False


class PutNode(_Command, frozen=True, tag="node_put"):
    """A node of the cluster started, or told its addresses.

    A higher incarnation than the known one means a restart: what lived only in that node's
    memory is gone. `zone`, `machine` (0: the node is one) and `process`: see `NodeRecord`;
    since version 8, before that who proposes takes them away.
    """

    id: int
    name: str
    incarnation: int
    addresses: dict[str, str] = {}
    directory: str = ""
    release: str = ""
    supports: dict[str, tuple[int, int]] = {}
    zone: str = ""
    machine: int = 0
    process: int = 1


class ForgetNode(_Command, frozen=True, tag="node_forget"):
    """A node leaves the cluster for ever; classic queues that only it had go with it."""

    id: int


class RecordRecovery(_Command, frozen=True, tag="recovery"):
    """The cluster goes on after its majority was lost, under another id.

    `groups`: one row of plain values per group, as the administrator was shown it.
    """

    cluster_id: str
    former_id: str
    lost_nodes: tuple[int, ...]
    time_ms: int
    groups: tuple[dict[str, Any], ...] = ()


class PutPolicy(_Command, frozen=True, tag="policy_put"):
    """Sets a policy, or an operator policy, of a virtual host. Since version 2; one of mirroring
    since version 6."""

    vhost: str
    name: str
    pattern: str
    definition: dict[str, bool | int | str | tuple[str, ...]]
    apply_to: str = "all"
    priority: int = 0
    operator: bool = False


class DeletePolicy(_Command, frozen=True, tag="policy_delete"):
    """Removes a policy, or an operator policy. Since version 2."""

    vhost: str
    name: str
    operator: bool = False


class PutVhostLimit(_Command, frozen=True, tag="vhost_limit_put"):
    """Sets a limit of a virtual host; None removes it. Since version 2."""

    vhost: str
    name: str
    value: int | None = None


class PutUserLimit(_Command, frozen=True, tag="user_limit_put"):
    """Sets a limit of a user; None removes it. Since version 2."""

    user: str
    name: str
    value: int | None = None


class NewPartition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The queue of a partition, as who proposes it has placed it."""

    members: tuple[int, ...]
    """The designated leader first."""
    arguments: bytes


class CreateTopic(_Command, frozen=True, tag="topic_create"):
    """Creates an ordered topic: its exchange, and the queues of its first partitions, in the order
    of their ranges. Since version 3."""

    vhost: str
    name: str
    logical: int
    mode: str
    hash_id: int
    partitions: tuple[NewPartition, ...]
    hash_seed: int = 0
    settings: dict[str, bool | int | str] = {}
    """As `metadata.topic_settings` has them."""


class DeleteTopic(_Command, frozen=True, tag="topic_delete"):
    """Deletes a topic with its exchange and its partitions. Since version 3."""

    vhost: str
    name: str


class SetTopic(_Command, frozen=True, tag="topic_set"):
    """Replaces settings of a topic's autoscaler; None takes one away. Since version 3."""

    vhost: str
    name: str
    settings: dict[str, bool | int | str | None]


class ChangeTopic(_Command, frozen=True, tag="topic_change"):
    """Changes the state of a topic; the reply is the code of the refusal, or empty. Since version
    3.

    `command`: a packed `topics.rules.topic.TopicCommand` (`metadata.topic_codec`). `places`:
    partition -> node that shall lead it, of a change that begins.
    """

    vhost: str
    name: str
    command: bytes
    places: dict[int, int] = {}


class CreatePartition(_Command, frozen=True, tag="topic_partition"):
    """Creates the queue of a target of the running change; one that exists is fine. Since version
    3."""

    vhost: str
    topic: str
    pid: int
    partition: NewPartition


class CreateGroup(_Command, frozen=True, tag="topic_group_create"):
    """Creates a consumer group that begins at a route version; one of that name is fine. Since
    version 3.

    `starts`: offsets in partitions of that version.
    """

    vhost: str
    name: str
    group: str
    version: int
    starts: dict[int, int] = {}
    mode: str = "linear"


class DeleteGroup(_Command, frozen=True, tag="topic_group_delete"):
    """Deletes a consumer group. Since version 3."""

    vhost: str
    name: str
    group: str


class ChangeGroup(_Command, frozen=True, tag="topic_group_change"):
    """Changes the state of a consumer group; the reply says whether it was in time. Since version
    3.

    `command`: a packed `topics.rules.group.GroupCommand` (`metadata.topic_codec`).
    """

    vhost: str
    name: str
    group: str
    command: bytes


class PutSetting(_Command, frozen=True, tag="setting_put"):
    """Sets a cluster-wide setting; None removes it."""

    name: str
    value: str | None = None


TopicCommand: TypeAlias = (
    CreateTopic
    | DeleteTopic
    | SetTopic
    | ChangeTopic
    | CreatePartition
    | CreateGroup
    | DeleteGroup
    | ChangeGroup
)
TOPIC_COMMANDS: tuple[type[TopicCommand], ...] = get_args(TopicCommand)

Command: TypeAlias = (
    Bootstrap
    | PutVhost
    | DeleteVhost
    | PutUser
    | DeleteUser
    | PutPermission
    | DeletePermission
    | PutTopicPermission
    | DeleteTopicPermission
    | DeclareExchange
    | DeleteExchange
    | DeclareQueue
    | DeleteQueue
    | SetMembers
    | ChangeView
    | BeginMigration
    | EndMigration
    | Bind
    | Unbind
    | OwnerGone
    | Join
    | PutNode
    | RecordRecovery
    | ForgetNode
    | PutSetting
    | PutPolicy
    | DeletePolicy
    | PutVhostLimit
    | PutUserLimit
    | TopicCommand
)

FIRST_VERSIONS: Mapping[type[Command], int] = {
    PutPolicy: 2,
    DeletePolicy: 2,
    PutVhostLimit: 2,
    PutUserLimit: 2,
    **dict.fromkeys(TOPIC_COMMANDS, 3),
    ChangeView: 6,
    BeginMigration: 6,
    EndMigration: 6,
}
"""The version of the metadata machine that brought a command, where it is not the first."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    """Returns the map that goes into a METADATA command.

    Raises:
        PreconditionFailed: a string in it is no text.
    """
    try:
        return _ENCODER.encode(command)
    except UnicodeEncodeError as error:
        raise PreconditionFailed(f"not text: {error.object!r}") from error


def decode_command(body: bytes) -> Command:
    """Returns the command. Raises UnknownCommand when it is malformed or unknown."""
    try:
        decoded: Command = _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnknownCommand(f"not a metadata command of this release: {error}") from error
    return decoded
