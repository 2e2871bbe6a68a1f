"""The replicated tree: virtual hosts, users, permissions, exchanges, queues, bindings and nodes.

One Raft group (id 0) of which every node is a member. This is its machine: pure, deterministic, a
`Machine` of `replication.machine`. Inputs are METADATA commands (`metadata.commands`) and the
leader's notices about nodes and sessions; outputs are APPLIED effects with replies, GAP effects,
and `changes` for this node's watchers.

Commands are recorded, not judged: they are refused by rules about the tree only (what exists, is
equal, has an owner, is empty), which never change without a machine version. What may be asked at
all is for who proposes (`metadata.validation`, ADR 0015).

Versions (ADR 0016); `commands.FIRST_VERSIONS` has the commands that each brought:
    1: the tree of release 0.2.
    2: policies, operator policies and limits.
    3: ordered topics; transient queues go with their node (ADR 0081); a node whose directory is
       lost gets an incarnation above all that it may have had.
    4: the release of RabbitMQ whose rules a queue follows (ADR 0086).
    5: recoveries are numbered, and a node that joins begins above all incarnations before the
       newest one (ADR 0106).
    6: views of the rings of mirrored queues (ADR 0116); queues migrate to another type (ADR 0128).
    7: every node reads messages of AMQP 1.0 (ADR 0196); no rule differs.
    8: zones and processes of nodes (ADR 0220).
    9: the users that declare exchanges and queues.

Reply of an applied command: status 0 with a plain value, or status 1 with a refusal as plain
strings (`model.errors.refusal_to_builtins`). The last `REPLIES_KEPT` replies of a session stay
in the state, so that a client whose node caught up by a snapshot hears its answers.

Invariants:
    - a queue is in its virtual host's topology exactly when it has a record, with the same
      durability
    - group ids are given out once, rising
    - a topic has its exchange; queues of partitions belong to a topic
    - permissions name users and virtual hosts that exist

Running an effect twice is safe: answers carry session and seq and only the first is heard;
changes say what is now, and watchers compare with what they have. Source: ADR 0004.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import msgspec

from convoymq.kernels.batch import (
    CMD_METADATA,
    CMD_NODE_DOWN,
    CMD_NODE_UP,
    CMD_SESSION_CLOSE,
    CMD_SESSION_DOWN,
    CMD_TICK,
    command_body,
    commands,
)
from convoymq.metadata.commands import (
    FIRST_VERSIONS,
    BeginMigration,
    Bind,
    Bootstrap,
    ChangeView,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeletePermission,
    DeletePolicy,
    DeleteQueue,
    DeleteTopicPermission,
    DeleteUser,
    DeleteVhost,
    EndMigration,
    ForgetNode,
    Join,
    OwnerGone,
    PutNode,
    PutPermission,
    PutPolicy,
    PutSetting,
    PutTopicPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
    RecordRecovery,
    SetMembers,
    Unbind,
    decode_command,
)
from convoymq.metadata.migrations import Migrations
from convoymq.metadata.nodes import METADATA_KIND, Nodes
from convoymq.metadata.policies import PolicyRules
from convoymq.metadata.queues import Queues
from convoymq.metadata.records import (
    Change,
    ChangeKind,
    Joined,
    NodeRecord,
    PermissionSet,
    QueueRecord,
    TopicPermission,
    TopicRecord,
    User,
    Vhost,
)
from convoymq.metadata.sessions import Sessions
from convoymq.metadata.snapshot import FORMAT, TreeState, fill, to_builtins
from convoymq.metadata.topology import Exchanges
from convoymq.metadata.tree import Tree
from convoymq.metadata.users import Users
from convoymq.metadata.vhosts import Vhosts
from convoymq.model.errors import (
    Refused,
    StorageFault,
    UnknownCommand,
    check,
    refusal_to_builtins,
)
from convoymq.model.late_imports import import_late
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, FLAG_NODE_GONE, NEVER, Effect

if TYPE_CHECKING:
    from convoymq.metadata.topic_rules import Topics

STATUS_OK = 0
STATUS_REFUSED = 1

_COMMAND_TYPES = supported.command_table(
    (CMD_METADATA, CMD_NODE_DOWN, CMD_NODE_UP, CMD_SESSION_DOWN, CMD_SESSION_CLOSE, CMD_TICK)
)
#: Version -> the command types that it knows. What METADATA commands ask for has versions of its
#: own (`commands.FIRST_VERSIONS`).
COMMAND_TYPES = dict.fromkeys(range(1, 10), _COMMAND_TYPES)
READS_AMQP_10_SINCE = 7
"""From it on no node is left that takes a message of AMQP 1.0 for damaged."""


def owner_text(node: int, incarnation: int, connection: int) -> str:
    """Returns the form of an exclusive queue's owner in the tree."""
    return f"{node}.{incarnation}.{connection}"


class MetadataMachine(Tree):
    """The tree, and which command changes what. The rules are in `users`, `vhosts`, `topology`,
    `queues` and `nodes`."""

    KIND = METADATA_KIND
    VERSION = 9
    OLDEST_VERSION = 1

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[Effect] = []
        #: The tree keeps no times of its own.
        self.time_ms = 0
        self._sessions = Sessions()
        self._queues = Queues(self)
        self._users = Users(self)
        self._vhosts = Vhosts(self, self._queues)
        self._nodes = Nodes(self, self._queues, self._sessions)
        exchanges = Exchanges(self)
        migrations = Migrations(self, self._queues)
        policies = PolicyRules(self)
        self._topics: Topics | None = None
        #: What carries a command out, by its type.
        self._rules: dict[type[Command], Callable[..., object]] = {
            Bootstrap: self._bootstrap,
            PutVhost: self._vhosts.put,
            DeleteVhost: self._vhosts.delete,
            PutUser: self._users.put,
            DeleteUser: self._users.delete,
            PutPermission: self._users.put_permission,
            DeletePermission: self._users.delete_permission,
            PutTopicPermission: self._users.put_permission,
            DeleteTopicPermission: self._users.delete_topic_permission,
            DeclareExchange: exchanges.declare,
            DeleteExchange: exchanges.delete,
            Bind: exchanges.bind,
            Unbind: exchanges.unbind,
            DeleteQueue: self._queues.delete,
            SetMembers: self._queues.set_members,
            ChangeView: self._queues.change_view,
            EndMigration: migrations.end,
            OwnerGone: self._queues.owner_gone,
            Join: self._nodes.join,
            PutNode: self._nodes.put,
            RecordRecovery: self._nodes.record_recovery,
            ForgetNode: self._nodes.forget,
            PutSetting: self._put_setting,
            PutPolicy: policies.put,
            DeletePolicy: policies.delete,
            PutVhostLimit: policies.put_vhost_limit,
            PutUserLimit: policies.put_user_limit,
        }
        #: The same, where the time of the entry matters.
        self._timed_rules: dict[type[Command], Callable[..., object]] = {
            BeginMigration: migrations.begin,
            DeclareQueue: self._queues.declare,
        }

    # --- Machine -------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Carries out a `machine version` entry. Raises UnsupportedVersion."""
        self.version = supported.check_version(self, version)

    def command_types(self, version: int) -> bytes:
        """Returns the command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a commands entry. Raises UnknownCommand."""
        check(index > self.applied_index, f"metadata entry {index} after {self.applied_index}")
        self.applied_index = index
        if self.topic_trace is not None:
            self.topic_trace.entry = data
        for kind, flags, session_id, seq, count, arg, offset, _ in commands(data):
            if kind == CMD_METADATA:
                self._command(session_id, seq, time_ms, command_body(data, offset)[:arg])
            elif kind == CMD_NODE_DOWN:
                # Who is only suspected may have its clients still, and they their queues.
                if flags & FLAG_NODE_GONE:
                    self._nodes.gone(arg or count)
            elif kind == CMD_NODE_UP:
                incarnation = int.from_bytes(command_body(data, offset)[:8], "little")
                self._sessions.drop(arg or count, incarnation)
            elif kind == CMD_SESSION_DOWN:
                gone = int.from_bytes(command_body(data, offset)[:8], "little")
                self._sessions.close(gone)
            elif kind == CMD_SESSION_CLOSE:
                self._sessions.close(session_id)
            elif kind != CMD_TICK:
                raise UnknownCommand(f"metadata entry {index} has a command of type {kind}")

    def snapshot(self) -> bytes:
        """Returns the whole tree."""
        return msgspec.msgpack.encode(
            to_builtins(self) | {"sessions": self._sessions.to_builtins()}
        )

    def restore(self, state: bytes) -> None:
        """Replaces the tree.

        Raises:
            StorageFault: the state is of another format.
            UnsupportedVersion: this release does not know the rules that were in force.
        """
        raw: object = msgspec.msgpack.decode(state)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise StorageFault("metadata snapshot of an unknown format")
        self.clear()
        self._sessions.clear()
        self.set_version(raw["version"])
        fill(self, cast(TreeState, raw))
        self._sessions.fill(raw["sessions"])
        self.effects.clear()
        self.changes = [Change(ChangeKind.RESTORED)]
        if self.topic_trace is not None:
            self.topic_trace.restored(self.vhosts.values(), self.applied_index)

    def resend(self, session_node: int) -> None:
        """Repeats the kept answers of that node's sessions."""
        for session_id, session in self._sessions:
            if session_id >> 56 == session_node:
                for seq, status, reply in session.replies:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, status, reply))

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """Nothing: the snapshot holds everything."""
        return ()

    def session_nodes(self) -> frozenset[int]:
        """Nodes with a session: they wait for answers."""
        return self._sessions.nodes()

    def lost_with(self, node: int) -> list[QueueRecord]:
        """Returns the queues that are deleted when a node is known to have stopped."""
        return self._nodes.lost_with(node)

    def next_due_ms(self) -> int | None:
        """Nothing: no rule of the tree waits for a time."""
        return None

    def oldest_live(self) -> int:
        """All state is in memory."""
        return NEVER

    def at_rest(self) -> bool:
        """Every change is waited for."""
        return False

    def state_hash(self) -> int:
        """Equal on replicas that applied the same index."""
        return zlib.crc32(self.snapshot())

    # --- commands ------------------------------------------------------------------------

    def _command(self, session_id: int, seq: int, time_ms: int, body: bytes) -> None:
        node, incarnation = session_id >> 56, session_id >> 24 & 0xFFFFFFFF
        refusal = self._nodes.refusal_of(node, incarnation)
        if refusal is not None:
            # Told, so that it does not ask for ever; nothing of it becomes state.
            answer = refusal_to_builtins(refusal)
            self.effects.append((EFFECT_APPLIED, session_id, seq, STATUS_REFUSED, answer))
            return
        session = self._sessions.get(session_id)
        if session is None:
            if seq != 1:
                return
            session = self._sessions.open(session_id)
        if seq > session.seq + 1:
            self.effects.append((EFFECT_GAP, session_id, session.seq))
            return
        if seq <= session.seq:
            for known, status, reply in session.replies:
                if known == seq:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, status, reply))
            return
        command = decode_command(body)
        session.seq = seq
        try:
            status, result = STATUS_OK, self.carry_out(command, time_ms)
        except Refused as error:
            status, result = STATUS_REFUSED, refusal_to_builtins(error)
        session.replies.append((seq, status, result))
        self.effects.append((EFFECT_APPLIED, session_id, seq, status, result))

    def carry_out(self, command: Command, time_ms: int) -> object:
        """Changes the tree and returns the reply. Raises Refused."""
        if FIRST_VERSIONS.get(type(command), 1) > self.version:
            # Who proposes asks first: a log with this in it is not one of ours.
            raise UnknownCommand(f"{type(command).__name__} in version {self.version}")
        timed = self._timed_rules.get(type(command))
        if timed is not None:
            return timed(command, time_ms)
        rule = self._rules.get(type(command))
        return (
            rule(command) if rule is not None else self._topic_rules().carry_out(command, time_ms)
        )

    def _topic_rules(self) -> Topics:
        """Returns the rules of topics, which are loaded with the first one."""
        if self._topics is None:
            import_late("convoymq.metadata.topic_rules")
            from convoymq.metadata.topic_rules import Topics

            self._topics = Topics(self, self._queues)
        return self._topics

    def _bootstrap(self, command: Bootstrap) -> bool:
        if "bootstrapped" in self.settings:
            return False
        self.settings["bootstrapped"] = "true"
        self.settings["cluster_name"] = command.cluster_name
        self.cluster_id = command.cluster_id
        if not self.vhosts:
            self._vhosts.put(PutVhost(name=command.vhost, description="Default virtual host"))
        if not self.users:
            self._users.put(
                PutUser(
                    name=command.user,
                    password_hash=command.password_hash,
                    algorithm=command.algorithm,
                    tags=("administrator",),
                )
            )
            if command.vhost in self.vhosts:
                self._users.put_permission(
                    PutPermission(
                        user=command.user,
                        vhost=command.vhost,
                        configure=".*",
                        write=".*",
                        read=".*",
                    )
                )
        return self.changed(True)

    def _put_setting(self, command: PutSetting) -> bool:
        if command.value is None:
            self.settings.pop(command.name, None)
        else:
            self.settings[command.name] = command.value
        return self.changed(True)


supported.register(MetadataMachine)

__all__ = [
    "Change",
    "ChangeKind",
    "Joined",
    "MetadataMachine",
    "NodeRecord",
    "PermissionSet",
    "QueueRecord",
    "TopicPermission",
    "TopicRecord",
    "User",
    "Vhost",
    "owner_text",
]
