"""The replicated tree: virtual hosts, users, permissions, exchanges, queues, bindings and nodes.

One Raft group (id 0) of which every node is a member. This is its machine: pure, deterministic, a
`Machine` of `replication.machine`. Inputs are METADATA commands (`metadata.commands`) and the
leader's notices about nodes and sessions; outputs are APPLIED effects with replies, GAP effects,
and `changes` for this node's watchers.

Commands are recorded, not judged: they are refused by rules about the tree only (what exists, is
equal, has an owner, is empty), which never change without a machine version. What may be asked at
all is for who proposes (`metadata.validation`, ADR 0015).

Reply of an applied command: status 0 with a plain value, or status 1 with a refusal as plain
strings (`model.errors.refusal_to_builtins`). The last `REPLIES_KEPT` replies of a session stay
in the state, so that a client whose node caught up by a snapshot hears its answers.

Invariants:
    - a queue is in its virtual host's topology exactly when it has a record, with the same
    durability - group ids are given out once, rising
    - permissions name users and virtual hosts that exist

Running an effect twice is safe: answers carry session and seq and only the first is heard;
changes say what is now, and watchers compare with what they have. Source: ADR 0004.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

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
    Bind,
    Bootstrap,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeletePermission,
    DeleteQueue,
    DeleteTopicPermission,
    DeleteUser,
    DeleteVhost,
    ForgetNode,
    Join,
    OwnerGone,
    PutNode,
    PutPermission,
    PutSetting,
    PutTopicPermission,
    PutUser,
    PutVhost,
    RecordRecovery,
    SetMembers,
    Unbind,
    decode_command,
)
from convoymq.metadata.index import QueueIndex
from convoymq.metadata.records import (
    Change,
    ChangeKind,
    Joined,
    NodeRecord,
    PermissionSet,
    QueueRecord,
    TopicPermission,
    User,
    Vhost,
)
from convoymq.metadata.snapshot import FORMAT, fill, to_builtins
from convoymq.model.errors import (
    NotFound,
    PeerError,
    PreconditionFailed,
    Refused,
    StorageFault,
    UnknownCommand,
    check,
    refusal_to_builtins,
)
from convoymq.model.tables import Table, decode_body
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, FLAG_NODE_GONE, NEVER, Effect
from convoymq.routing.topology import Topology
from convoymq.routing.types import (
    Destination,
    DestinationKind,
    ExchangeType,
    QueueType,
    Removed,
)

REPLIES_KEPT = 64
"""More than a client may have outstanding (`metadata_store.WINDOW`), so no answer is ever lost."""
RECOVERIES_KEPT = 8
"""Recoveries from a lost majority that the tree remembers: the newest. Queues that an older one cut
short are not filled up by themselves any more."""
LIVES_UNSEEN = 1 << 16
"""So many times at most may a node have started in what a lost majority took with it."""
STATUS_OK = 0
STATUS_REFUSED = 1

#: Version -> the command types that it knows.
COMMAND_TYPES = {
    1: supported.command_table(
        (CMD_METADATA, CMD_NODE_DOWN, CMD_NODE_UP, CMD_SESSION_DOWN, CMD_SESSION_CLOSE, CMD_TICK)
    ),
}

JOIN_FOUNDER = "founder"
"""A member that never ran: nothing of it can be missing."""
JOIN_LEARNER = "learner"
"""Not a member yet: it gets a vote when it has caught up."""
JOIN_WIPED = "wiped"
"""A member that has lost its data: it has no say before the leader has taken it in anew."""


class _Session:
    __slots__ = ("replies", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.replies: deque[tuple[int, int, Any]] = deque(maxlen=REPLIES_KEPT)


def owner_text(node: int, incarnation: int, connection: int) -> str:
    """How the owner of an exclusive queue is written in the tree."""
    return f"{node}.{incarnation}.{connection}"


class MetadataMachine:
    """State and rules of the tree."""

    KIND = "metadata"
    VERSION = 1
    OLDEST_VERSION = 1

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        #: The tree keeps no times of its own.
        self.time_ms = 0
        self.changes: list[Change] = []
        self._clear()

    def _clear(self) -> None:
        self.vhosts: dict[str, Vhost] = {}
        self.queue_index = QueueIndex()
        self.users: dict[str, User] = {}
        self.permissions: dict[tuple[str, str], PermissionSet] = {}
        self.topic_permissions: dict[tuple[str, str], dict[str, TopicPermission]] = {}
        self.nodes: dict[int, NodeRecord] = {}
        self.forgotten: set[int] = set()
        """Nodes that were removed; refused until they come back with nothing."""
        self.directories: dict[int, str] = {}
        """The data directory that each node number belongs to."""
        self.joins: dict[int, Joined] = {}
        self.incarnations: dict[int, int] = {}
        """The highest of each node number, also of forgotten ones: what is older is ignored."""
        self.cluster_id = ""
        self.recoveries: list[dict[str, Any]] = []
        """What is known of losses of the majority that were recovered from, oldest first."""
        self.settings: dict[str, str] = {}
        self.next_group = 1
        self.applied_index = 0
        self.version = 1
        """The machine version in force."""
        self.change_count = 0
        self._sessions: dict[int, _Session] = {}

    # --- Machine -------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Carries out a `machine version` entry. Raises UnsupportedVersion."""
        self.version = supported.check_version(self, version)

    def command_types(self, version: int) -> bytes:
        """The command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a commands entry. Raises UnknownCommand."""
        check(index > self.applied_index, f"metadata entry {index} after {self.applied_index}")
        self.applied_index = index
        for kind, flags, session_id, seq, count, arg, offset, _ in commands(data):
            if kind == CMD_METADATA:
                self._command(session_id, seq, time_ms, command_body(data, offset)[:arg])
            elif kind == CMD_NODE_DOWN:
                # Who is only suspected may have its clients still, and they their queues.
                if flags & FLAG_NODE_GONE:
                    self._node_gone(arg or count)
            elif kind == CMD_NODE_UP:
                incarnation = int.from_bytes(command_body(data, offset)[:8], "little")
                self._drop_sessions(arg or count, incarnation)
            elif kind == CMD_SESSION_DOWN:
                gone = int.from_bytes(command_body(data, offset)[:8], "little")
                self._sessions.pop(gone, None)
            elif kind == CMD_SESSION_CLOSE:
                self._sessions.pop(session_id, None)
            elif kind != CMD_TICK:
                raise UnknownCommand(f"metadata entry {index} has a command of type {kind}")

    def snapshot(self) -> bytes:
        """The whole tree."""
        sessions = [
            [session, state.seq, list(state.replies)]
            for session, state in sorted(self._sessions.items())
        ]
        return msgspec.msgpack.encode(to_builtins(self) | {"sessions": sessions})

    def restore(self, state: bytes) -> None:
        """Replaces the tree.

        Raises:
            StorageFault: the state is of another format.
            UnsupportedVersion: this release does not know the rules that were in force.
        """
        raw = msgspec.msgpack.decode(state)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise StorageFault("metadata snapshot of an unknown format")
        self._clear()
        self.set_version(raw["version"])
        fill(self, raw)
        for session_id, seq, replies in raw["sessions"]:
            session = self._sessions[session_id] = _Session()
            session.seq = seq
            session.replies.extend(tuple(reply) for reply in replies)
        self.effects.clear()
        self.changes = [Change(ChangeKind.RESTORED)]

    def resend(self, session_node: int) -> None:
        """Repeats the kept answers of that node's sessions."""
        for session_id, session in self._sessions.items():
            if session_id >> 56 == session_node:
                for seq, status, reply in session.replies:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, status, reply))

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """Nothing: the snapshot holds everything."""
        return ()

    def session_nodes(self) -> frozenset[int]:
        """Nodes with a session: they wait for answers."""
        return frozenset(session >> 56 for session in self._sessions)

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

    # --- reading -------------------------------------------------------------------------

    def records(self) -> Iterator[QueueRecord]:
        """All queues of all virtual hosts."""
        for vhost in self.vhosts.values():
            yield from vhost.queues.values()

    def vhost(self, name: str) -> Vhost:
        """A virtual host. Raises NotFound."""
        vhost = self.vhosts.get(name)
        if vhost is None:
            raise NotFound(f"vhost {name} not found")
        return vhost

    def check_access(self, user: str, vhost: str) -> None:
        """Raises NotFound unless both exist."""
        if user not in self.users:
            raise NotFound(f"user '{user}' not found")
        self.vhost(vhost)

    def check_invariants(self) -> None:
        """Asserts what the module text promises. Cost: O(everything)."""
        groups: set[int] = set()
        for vhost in self.vhosts.values():
            vhost.topology.check_invariants()
            assert {queue.name for queue in vhost.topology.queues()} == set(vhost.queues)
            for record in vhost.queues.values():
                assert 0 < record.group < self.next_group
                assert record.group not in groups
                groups.add(record.group)
        self.queue_index.check_invariants(list(self.records()))
        for user, where in (*self.permissions, *self.topic_permissions):
            assert user in self.users
            assert where in self.vhosts

    # --- sessions ------------------------------------------------------------------------

    def _command(self, session_id: int, seq: int, time_ms: int, body: bytes) -> None:
        node, incarnation = session_id >> 56, session_id >> 24 & 0xFFFFFFFF
        refusal = self._refuse_life(node, incarnation)
        if refusal is not None:
            # Told, so that it does not ask for ever; nothing of it becomes state.
            answer = refusal_to_builtins(refusal)
            self.effects.append((EFFECT_APPLIED, session_id, seq, STATUS_REFUSED, answer))
            return
        session = self._sessions.get(session_id)
        if session is None:
            if seq != 1:
                return
            session = self._sessions[session_id] = _Session()
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
            status, result = STATUS_OK, self._execute(command, time_ms)
        except Refused as error:
            status, result = STATUS_REFUSED, refusal_to_builtins(error)
        session.replies.append((seq, status, result))
        self.effects.append((EFFECT_APPLIED, session_id, seq, status, result))

    def _refuse_life(self, node: int, incarnation: int) -> Refused | None:
        if node in self.forgotten:
            return PreconditionFailed(f"node {node} was removed from the cluster")
        known = self.incarnations.get(node, 0)
        if incarnation < known:
            return PreconditionFailed(
                f"node {node} has a later incarnation: {known}, this is {incarnation}"
            )
        return None

    def _drop_sessions(self, node: int, below_incarnation: int) -> None:
        for session in list(self._sessions):
            if session >> 56 == node and (session >> 24) & 0xFFFFFFFF < below_incarnation:
                del self._sessions[session]

    def _node_gone(self, node: int) -> None:
        # Its connections are gone for everybody who could ask: names of exclusive queues get free.
        self._delete_all([record for record in self.queue_index.owned() if record.home == node])

    # --- commands ------------------------------------------------------------------------

    def _execute(self, command: Command, time_ms: int) -> Any:
        match command:
            case Bootstrap():
                return self._bootstrap(command)
            case PutVhost():
                return self._put_vhost(command)
            case DeleteVhost():
                return self._delete_vhost(command.name)
            case PutUser():
                return self._put_user(command)
            case DeleteUser():
                return self._delete_user(command.name)
            case PutPermission() | PutTopicPermission():
                return self._put_permission(command)
            case DeletePermission():
                gone = self.permissions.pop((command.user, command.vhost), None)
                return self._changed(gone is not None, command.vhost)
            case DeleteTopicPermission():
                return self._delete_topic_permission(command)
            case DeclareExchange():
                topology = self.vhost(command.vhost).topology
                created = topology.declare_exchange(
                    command.name,
                    ExchangeType(command.type),
                    durable=command.durable,
                    auto_delete=command.auto_delete,
                    internal=command.internal,
                    arguments=_arguments(command),
                )
                return self._changed(created, command.vhost)
            case DeleteExchange():
                topology = self.vhost(command.vhost).topology
                removed = topology.delete_exchange(command.name, if_unused=command.if_unused)
                return self._changed(bool(removed), command.vhost)
            case DeclareQueue():
                return self._declare_queue(command, time_ms)
            case DeleteQueue():
                return self._delete_queue(command)
            case SetMembers():
                return self._set_members(command)
            case Bind():
                made = self.vhost(command.vhost).topology.bind(
                    command.source,
                    _destination(command),
                    command.routing_key,
                    _arguments(command),
                    owner=command.owner,
                )
                return self._changed(made, command.vhost)
            case Unbind():
                removed = self.vhost(command.vhost).topology.unbind(
                    command.source,
                    _destination(command),
                    command.routing_key,
                    _arguments(command),
                    owner=command.owner,
                )
                return self._changed(bool(removed), command.vhost)
            case OwnerGone():
                return self._delete_all(self.queue_index.owned_by(command.owner))
            case Join():
                return self._join(command)
            case PutNode():
                return self._put_node(command)
            case RecordRecovery():
                return self._record_recovery(command)
            case ForgetNode():
                return self._forget_node(command.id)
            case PutSetting():
                if command.value is None:
                    self.settings.pop(command.name, None)
                else:
                    self.settings[command.name] = command.value
                return self._changed(True)
            case _:
                assert_never(command)

    def _changed(self, changed: bool, vhost: str = "") -> bool:
        if changed:
            self._note(Change(ChangeKind.OTHER, vhost=vhost))
        return changed

    def _note(self, change: Change) -> None:
        self.change_count += 1
        self.changes.append(change)

    def _bootstrap(self, command: Bootstrap) -> bool:
        if "bootstrapped" in self.settings:
            return False
        self.settings["bootstrapped"] = "true"
        self.settings["cluster_name"] = command.cluster_name
        self.cluster_id = command.cluster_id
        if not self.vhosts:
            self._put_vhost(PutVhost(name=command.vhost, description="Default virtual host"))
        if not self.users:
            self._put_user(
                PutUser(
                    name=command.user,
                    password_hash=command.password_hash,
                    algorithm=command.algorithm,
                    tags=("administrator",),
                )
            )
            if command.vhost in self.vhosts:
                self._put_permission(
                    PutPermission(
                        user=command.user,
                        vhost=command.vhost,
                        configure=".*",
                        write=".*",
                        read=".*",
                    )
                )
        return self._changed(True)

    def _put_vhost(self, command: PutVhost) -> bool:
        vhost = self.vhosts.get(command.name)
        created = vhost is None
        if vhost is None:
            vhost = self.vhosts[command.name] = Vhost(command.name, Topology(command.name))
        vhost.description = command.description
        vhost.tags = command.tags
        vhost.default_queue_type = command.default_queue_type
        self._changed(True, command.name)
        return created

    def _delete_vhost(self, name: str) -> bool:
        if name not in self.vhosts:
            return False
        self._delete_where(lambda record: record.vhost == name)
        del self.vhosts[name]
        for table in (self.permissions, self.topic_permissions):
            for key in [key for key in table if key[1] == name]:
                del table[key]
        return self._changed(True, name)

    def _put_user(self, command: PutUser) -> bool:
        created = command.name not in self.users
        self.users[command.name] = User(
            name=command.name,
            password_hash=command.password_hash,
            algorithm=command.algorithm,
            tags=command.tags,
        )
        self._changed(True)
        return created

    def _delete_user(self, name: str) -> bool:
        if self.users.pop(name, None) is None:
            return False
        for table in (self.permissions, self.topic_permissions):
            for key in [key for key in table if key[0] == name]:
                del table[key]
        return self._changed(True)

    def _put_permission(self, command: PutPermission | PutTopicPermission) -> bool:
        self.check_access(command.user, command.vhost)
        key = (command.user, command.vhost)
        if isinstance(command, PutPermission):
            created = key not in self.permissions
            self.permissions[key] = PermissionSet(
                configure=command.configure, write=command.write, read=command.read
            )
        else:
            rules = self.topic_permissions.setdefault(key, {})
            created = command.exchange not in rules
            rules[command.exchange] = TopicPermission(write=command.write, read=command.read)
        self._changed(True, command.vhost)
        return created

    def _delete_topic_permission(self, command: DeleteTopicPermission) -> bool:
        key = (command.user, command.vhost)
        rules = self.topic_permissions.get(key)
        if rules is None:
            return False
        if command.exchange is None:
            del self.topic_permissions[key]
            return self._changed(True, command.vhost)
        gone = rules.pop(command.exchange, None) is not None
        if not rules:
            del self.topic_permissions[key]
        return self._changed(gone, command.vhost)

    # --- queues --------------------------------------------------------------------------

    def _declare_queue(self, command: DeclareQueue, time_ms: int) -> dict[str, Any]:
        vhost = self.vhost(command.vhost)
        if not command.members:
            raise PreconditionFailed("a queue needs a node")
        created = vhost.topology.declare_queue(
            command.name,
            QueueType(command.type),
            durable=command.durable,
            exclusive_owner=command.owner,
            auto_delete=command.auto_delete,
            arguments=_arguments(command),
        )
        if created:
            record = QueueRecord(
                vhost=command.vhost,
                name=command.name,
                group=self.next_group,
                type=QueueType(command.type),
                durable=command.durable,
                members=command.members,
                owner=command.owner,
                created_ms=time_ms,
                # Who starts again does not know whether it has led before.
                founder=(command.members[0], self.incarnations.get(command.members[0], 0)),
            )
            self.next_group += 1
            vhost.queues[command.name] = record
            self.queue_index.put(record)
            self._note(Change(ChangeKind.QUEUE_CREATED, record, vhost=command.vhost))
        record = vhost.queues[command.name]
        return {"created": created, "group": record.group}

    def _delete_queue(self, command: DeleteQueue) -> bool:
        vhost = self.vhost(command.vhost)
        record = vhost.queues.get(command.name)
        if record is None or command.group not in (0, record.group):
            return False
        vhost.topology.queue(command.name, command.owner if command.group == 0 else record.owner)
        self._remove_record(vhost, record)
        return True

    def _remove_record(self, vhost: Vhost, record: QueueRecord) -> Removed:
        removed = vhost.topology.delete_queue(record.name)
        del vhost.queues[record.name]
        self.queue_index.drop(record)
        self._note(Change(ChangeKind.QUEUE_DELETED, record, vhost=vhost.name))
        return removed

    def _delete_where(self, condition: Callable[[QueueRecord], bool]) -> int:
        return self._delete_all([record for record in self.records() if condition(record)])

    def _delete_all(self, found: Sequence[QueueRecord]) -> int:
        for record in sorted(found, key=lambda record: record.group):
            self._remove_record(self.vhosts[record.vhost], record)
        return len(found)

    def _set_members(self, command: SetMembers) -> bool:
        vhost = self.vhost(command.vhost)
        record = vhost.queues.get(command.name)
        if record is None or record.group != command.group or not command.members:
            return False
        if command.config <= record.config:
            return False
        joined = {*record.joined, *command.members} - {
            member for member in record.members if member not in record.joined
        }
        changed = replace(
            record,
            members=command.members,
            config=command.config,
            joined=tuple(member for member in command.members if member in joined),
        )
        vhost.queues[command.name] = changed
        self.queue_index.put(changed)
        self._note(Change(ChangeKind.QUEUE_MEMBERS, changed, vhost=vhost.name))
        return True

    # --- nodes ---------------------------------------------------------------------------

    def _join(self, command: Join) -> dict[str, Any]:
        """Lets a node with an empty log in, and says as what."""
        node = command.id
        if not supported.is_supported(command.supports, self.KIND, self.version):
            raise PreconditionFailed(
                f"node {node} cannot join: its release does not support version {self.version} of "
                "the metadata machine, which is in force"
            )
        if command.reachable and self.directories.get(node, "") not in ("", command.directory):
            raise PreconditionFailed(
                f"node {node} cannot join: another process with this number is running"
            )
        if node in self.forgotten:
            held = any(node in record.members for record in self.records())
            if held or node in command.members:
                # Groups that count on its former data must have let go of it.
                raise PreconditionFailed(
                    f"node {node} cannot join yet: groups still have the node that was removed"
                )
            self.forgotten.discard(node)
        known = self.joins.get(node)
        if known is None or known.directory != command.directory:
            known = None
        elif command.incarnation < known.asked:
            raise PreconditionFailed(f"node {node} was started again since it asked to join")
        if known is None or known.asked != command.incarnation:
            # Votes and entries that a member once promised to keep are gone.
            role = JOIN_WIPED if node in self.incarnations else JOIN_FOUNDER
            known = Joined(
                directory=command.directory,
                asked=command.incarnation,
                granted=max(command.incarnation, self.incarnations.get(node, 0) + 1),
                role=role if node in command.members else JOIN_LEARNER,
            )
            self.joins[node] = known
            self.directories[node] = command.directory
            self._live(node, known.granted)
        role = known.role if node in command.members else JOIN_LEARNER
        self._note(Change(ChangeKind.NODE, node=node))
        return {
            "role": role,
            "members": sorted(command.members),
            "groups": self.next_group - 1,
            "incarnation": known.granted,
            "cluster_id": self.cluster_id,
        }

    def _live(self, node: int, incarnation: int) -> None:
        """Ends what earlier lives of a node left behind."""
        self.incarnations[node] = incarnation
        self._drop_sessions(node, incarnation)

    def _put_node(self, command: PutNode) -> bool:
        if command.id in self.forgotten:
            raise PreconditionFailed(f"node {command.id} was removed from the cluster")
        admitted = self.directories.get(command.id, command.directory)
        if admitted != command.directory:
            raise PreconditionFailed(
                f"node {command.id} has another data directory: {admitted or 'unnamed'}"
            )
        if command.incarnation < self.incarnations.get(command.id, 0):
            return False
        known = self.nodes.get(command.id)
        self.directories[command.id] = command.directory
        self.nodes[command.id] = NodeRecord(
            id=command.id,
            name=command.name,
            incarnation=command.incarnation,
            addresses=dict(command.addresses),
            release=command.release,
            supports=dict(command.supports),
        )
        if known is None or command.incarnation > known.incarnation:
            self._live(command.id, command.incarnation)
            self._delete_where(
                lambda record: (
                    record.type is QueueType.CLASSIC
                    and record.home == command.id
                    and (not record.durable or record.owner is not None)
                    and _incarnation(record) != command.incarnation
                )
            )
        self._note(Change(ChangeKind.NODE, node=command.id))
        return True

    def _forget_node(self, node: int) -> bool:
        if self.nodes.pop(node, None) is None:
            return False
        self.forgotten.add(node)
        self.directories.pop(node, None)
        self.joins.pop(node, None)
        self._drop_sessions(node, 1 << 32)
        # What only that node has is lost.
        self._delete_where(lambda record: record.members == (node,))
        self._note(Change(ChangeKind.NODE_FORGOTTEN, node=node))
        return True

    def _record_recovery(self, command: RecordRecovery) -> bool:
        if command.cluster_id == self.cluster_id:
            return False
        if command.former_id != self.cluster_id:
            raise PreconditionFailed(
                f"the cluster has the id {self.cluster_id}, not {command.former_id}"
            )
        self.cluster_id = command.cluster_id
        for node in command.lost_nodes:
            # Nobody knows how often it was started since this log was cut off.
            self.incarnations[node] = self.incarnations.get(node, 0) + LIVES_UNSEEN
            self._forget_node(node)
        self.recoveries.append(
            {
                "cluster_id": command.cluster_id,
                "former_id": command.former_id,
                "lost_nodes": list(command.lost_nodes),
                "time_ms": command.time_ms,
                "groups": list(command.groups),
            }
        )
        del self.recoveries[:-RECOVERIES_KEPT]
        return self._changed(True)


def _incarnation(record: QueueRecord) -> int:
    """Incarnation of the node at which an exclusive queue was declared; -1 for others."""
    return int(record.owner.split(".")[1]) if record.owner is not None else -1


def _arguments(command: DeclareQueue | DeclareExchange | Bind | Unbind) -> Table:
    try:
        return decode_body(command.arguments)
    except PeerError as error:
        raise UnknownCommand(f"arguments that this release cannot decode: {error.text}") from error


def _destination(command: Bind | Unbind) -> Destination:
    try:
        return Destination(DestinationKind(command.kind), command.destination)
    except ValueError:
        raise UnknownCommand(f"a binding to a {command.kind}") from None


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
    "User",
    "Vhost",
    "owner_text",
]
