"""The one door for edges: who may do what, what exists, where messages go, and the queues
themselves.

Reading is synchronous and local; every change goes through the replicated tree and returns when
this node has applied it. The broker follows the tree: it opens and ends the handles of queues on
this node, and the replicas of quorum queues that this node is a member of, by comparing what
should be with what is, so it does not matter which changes it missed.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import structlog

from convoymq.kernels.batch import CMD_NODE_DOWN, PendingBudget
from convoymq.metadata import access
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.commands import (
    Bind,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeleteQueue,
    OwnerGone,
    Unbind,
)
from convoymq.metadata.machine import (
    Change,
    ChangeKind,
    QueueRecord,
    User,
    Vhost,
    owner_text,
)
from convoymq.metadata.members import MemberKeeper
from convoymq.metadata.placement import CLIENT_LOCAL
from convoymq.metadata.reads import MetadataReads
from convoymq.model.clock import Clock
from convoymq.model.errors import (
    BrokerError,
    NotFound,
    PeerError,
    PreconditionFailed,
    Refused,
    Unavailable,
)
from convoymq.model.refusals import (
    conditional_delete,
    exchange_subject,
    home_node_down,
    in_use,
    login_refused,
    not_empty,
    permission_missing,
    queue_subject,
    topic_permission_missing,
    unserved_queue_type,
    vhost_missing,
    vhost_refused,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.classic.host import ClassicHost
from convoymq.queues.classic.queue import ClassicQueue, LocalQueue, RemoteQueue
from convoymq.queues.group_queue import TICK_MS, FlowLimits
from convoymq.queues.interface import SINGLE_ACTIVE, Queue
from convoymq.queues.local_queues import TRACE_ARGUMENT, GroupHost, LocalQueues, Questions
from convoymq.queues.quorum.settings import DISCONNECT_TIMEOUT_MS_DEFAULT
from convoymq.queues.registry import ConnectionRegistry, Counters
from convoymq.queues.replies import ReplyRoutes
from convoymq.queues.slices import in_slices
from convoymq.queues.stream.queue import Answer, StreamQueue
from convoymq.replication.machine import FLAG_NODE_GONE
from convoymq.routing.declarations import check_exchange, check_queue
from convoymq.routing.default_type import with_default_type
from convoymq.routing.types import Destination, DestinationKind, Exchange, ExchangeType, QueueType
from convoymq.storage.types import Directory
from convoymq.trace.recorder import Traces
from convoymq.transport.control import (
    KIND_ALARM,
    KIND_CLOSE_CONNECTION,
    KIND_LIST,
    KIND_QUEUE_COUNTS,
    KIND_RESERVATION,
    KIND_SESSIONS,
    KIND_STREAM,
    ControlPlane,
    Reply,
)

log = structlog.get_logger()

LIST_TIMEOUT_S = 1.0
LIST_QUEUES_TIMEOUT_S = 5.0
COUNTS_TIMEOUT_S = 2.0
RESERVATION_TIMEOUT_S = 15.0
HOME_POLL_S = 0.02
NAME_BYTES_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """What the broker does where nobody said otherwise. Names in brackets are configuration
    keys."""

    default_queue_type: str = "auto"
    """[default_queue_type] `auto` and `quorum`: quorum where properties fit; `classic`."""
    quorum_group_size: int = 3
    """[quorum_queue.initial_cluster_size] Members of a new quorum queue."""
    leader_locator: str = CLIENT_LOCAL
    """[queue_leader_locator] Who leads a new queue."""
    operation_timeout_ms: int = 30_000
    """[operation_timeout] How long a change, or a question to a queue, may take before it is
    refused."""
    publish_register_timeout_ms: int = 65_000
    """[quorum_queue.publish_register_timeout] How long the first publishes of a channel wait for a
    quorum queue that does not answer."""
    publish_pending_max_bytes: int = 128 << 20
    """[publish_pending_max] What this node's publishers may have under way together."""
    reply_backlog_max_bytes: int = 128 << 20
    """Direct replies to a node are dropped while more waits to be written to it: half of
    [cluster.link_backlog_max]."""
    publish_pending_messages: int = 1024
    """[publish_pending_messages] What one channel may have under way into one queue."""
    loopback_users: tuple[str, ...] = ("guest",)
    """[loopback_users] Who may only come from this machine."""
    cluster_size_target: int = 0
    """[cluster_formation.target_cluster_size_hint] How many nodes should run; 0 = all known."""
    disconnect_timeout_ms: int = DISCONNECT_TIMEOUT_MS_DEFAULT
    """How long a node may be away before its exclusive queues end. Sooner when its process is known
    to be gone."""


class Route(NamedTuple):
    """Where a message goes."""

    queues: tuple[Queue, ...]
    cacheable: bool
    """The same exchange and key lead there until the topology epoch moves."""


class Epoch(Protocol):
    """A number that moves when remembered routes and permissions must be forgotten."""

    def bump(self) -> None:
        """Moves it."""


class Broker:
    """See the module text. One per node; single threaded."""

    def __init__(
        self,
        *,
        node_id: int,
        incarnation: int,
        host: GroupHost,
        control: ControlPlane,
        metadata: AsyncMetadataStore,
        epoch: Epoch,
        clock: Clock,
        directory: Directory,
        new_session: Callable[[], int],
        wake: Callable[[], None],
        settings: BrokerSettings | None = None,
        stored_groups: Callable[[], Iterable[int]] = tuple,
        traces: Traces | None = None,
    ) -> None:
        """
        Args:
            directory: where classic queues keep their files.
            wake: asks for an `end_of_round`.
            stored_groups: groups with data on this node's disk.
            traces: who writes what queues with `x-trace` did; None = nobody.
        """
        self.node_id = node_id
        self.incarnation = incarnation
        self.metadata = metadata
        self.topology: Any = epoch
        self.settings = settings or BrokerSettings()
        self.connections = ConnectionRegistry()
        self.counters = Counters()
        self.alarms: frozenset[str] = frozenset()
        self.on_alarms: list[Callable[[frozenset[str]], None]] = []
        self.new_session = new_session
        self.control = control
        self.host = host
        self.started_ms = clock.now_ms()
        self.node_info: Callable[[], dict[str, Any]] = dict
        """Resources of this process; set by who knows them."""
        self.link_info: Callable[[], list[dict[str, Any]]] = list
        """One row per link to another node; set by who knows them."""
        self.clock_skew: Callable[[], tuple[int, bool]] = lambda: (0, False)
        """How far this node's wall clock is ahead (ms), and whether too far; set by who knows."""
        self.edge_metrics: Callable[[], list[tuple[str, str, dict[str, str], int]]] = list
        """(kind, name, labels, value) of an edge's own counts; set by who opens the edge."""
        self.keeper: MemberKeeper | None = None
        """Who forgets nodes; set by who knows the links."""
        self._clock = clock
        self.traces = traces
        self._alarms_by_node: dict[int, frozenset[str]] = {}
        self._incarnations: dict[int, int] = {node_id: incarnation}
        #: Quorum queues and streams.
        self.local = LocalQueues(
            node=node_id,
            host=host,
            tree=metadata.tree,
            transport=control.transport,
            clock=clock,
            incarnations=self._incarnations,
            new_session=new_session,
            group_size=self.settings.quorum_group_size,
            limits=FlowLimits(
                question_timeout_ms=self.settings.operation_timeout_ms,
                register_timeout_ms=self.settings.publish_register_timeout_ms,
                pending_messages_max=self.settings.publish_pending_messages,
                budget=PendingBudget(self.settings.publish_pending_max_bytes),
            ),
            ask=Questions(
                counts=self._ask_quorum_counts,
                reservation=self._ask_reservation,
                stream=self._ask_stream,
                sessions=self._ask_sessions,
            ),
            note=lambda event, fields: log.info(event, **fields),
            stored_groups=stored_groups,
            traces=traces,
        )
        self._groups = self.local.queues
        self._gone: set[int] = set()
        #: Since when nodes are away by the monotonic clock; None = their queues have been ended.
        self._away: dict[int, int | None] = {}
        self._reconciling = False
        self._closing_revoked = False
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Queues whose deletion is under way because nobody uses them any more.
        self._going: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._timer: Any = None
        self._replies = ReplyRoutes(
            control, incarnation, self.settings.reply_backlog_max_bytes, self.counters
        )
        self._loop = asyncio.get_running_loop()
        self.classic = ClassicHost(
            node_id=node_id,
            directory=directory,
            clock=clock,
            control=control,
            owner=self,
            call_soon=self._call_soon,
            wanted=wake,
            await_room=host.await_room,
        )
        self.metadata_reads = MetadataReads(node_id, control, host)
        control.handle_replying(KIND_LIST, self._on_list)
        control.handle(KIND_CLOSE_CONNECTION, self._on_close_connection)
        control.handle(KIND_ALARM, self._on_alarm)
        control.handle(KIND_QUEUE_COUNTS, self._on_quorum_counts)
        control.handle_replying(KIND_RESERVATION, self._on_reservation)
        control.handle_replying(KIND_STREAM, self._on_stream)
        control.handle(KIND_SESSIONS, self._on_sessions)

    # --- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens the queues that the tree knows, and follows it from now on."""
        for node in self.running_nodes():
            if node != self.node_id:
                self._incarnations[node] = self.host.incarnation_of(node)
        self.metadata.watch(self._on_change)
        self._reconcile()
        while self._reconciling:
            await asyncio.sleep(0)
        self._tick()
        self.spawn(self._learn_alarms())

    async def stop(self, traces_timeout_s: float = 3.0) -> None:
        """Ends what runs; edges have closed their connections. Waits for the files of traces."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.classic.stop()
        if self.traces is not None:
            self.traces.stop()
            await self._loop.run_in_executor(None, self.traces.join, traces_timeout_s)

    def end_of_round(self) -> None:
        """Seals the open batches of classic queues."""
        self.classic.end_of_round()

    def on_node_up(self, node: int, incarnation: int) -> None:
        """Another node is linked."""
        self._incarnations[node] = max(incarnation, self._incarnations.get(node, 0))
        self._gone.discard(node)
        self.local.on_node_up(node)
        self._reopen_faces(node)
        mine = self._alarms_by_node.get(self.node_id)
        if mine:
            self.control.tell(node, KIND_ALARM, sorted(mine))

    def on_node_down(self, node: int, *, definite: bool = False) -> None:
        """Another node is not linked any more; `definite`: its process is known to be gone."""
        self.local.on_node_down(node, definite=definite)
        self.classic.on_node_down(node)
        self.topology.bump()
        self._set_node_alarms(node, frozenset())
        if definite:
            self._gone.add(node)
            self._release_exclusive_queues()

    def _release_exclusive_queues(self) -> None:
        """As the tree's leader, ends the exclusive queues of nodes whose processes are gone."""
        # Kept until it is done: the process that is gone may have been the leader.
        held = {record.home for record in self.metadata.tree.queue_index.owned()}
        tree = self.host.replica(0)
        if tree is not None and tree.is_leader:
            for node in sorted(self._gone & held):
                tree.propose(CMD_NODE_DOWN, FLAG_NODE_GONE, 0, node, b"")
        self._gone &= held

    def on_suspect(self, node: int) -> None:
        """Another node is silent: its consumers get nothing new."""
        self.local.on_node_down(node, definite=False)

    def on_unsuspect(self, node: int) -> None:
        """Another node speaks again, and nothing was lost."""
        self.local.on_node_up(node)
        self._reopen_faces(node)

    def _reopen_faces(self, node: int) -> None:
        # Faces of queues whose home was away refuse everything: they are made anew on demand.
        for group, handle in list(self.classic.queues.items()):
            if isinstance(handle, RemoteQueue) and handle.record.home == node and handle.ended:
                del self.classic.queues[group]
        self.topology.bump()

    def _tick(self) -> None:
        self._timer = self._clock.call_later(TICK_MS, self._tick)
        self.local.tick()
        if self.traces is not None:
            self.traces.tick()
        self._watch_away()
        if self._gone:
            self._release_exclusive_queues()

    def _watch_away(self) -> None:
        """Takes nodes that have been away for too long for gone: nobody may ever know more."""
        now = self._clock.monotonic_ms()
        for node in self.metadata.tree.nodes:
            if self.is_up(node):
                self._away.pop(node, None)
                self._gone.discard(node)
                continue
            since = self._away.setdefault(node, now)
            if since is not None and now - since >= self.settings.disconnect_timeout_ms:
                self._away[node] = None
                self._gone.add(node)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(callback)

    # --- names and places ----------------------------------------------------------------

    @property
    def node_name(self) -> str:
        """This node's name."""
        return self.node_name_of(self.node_id)

    def node_name_of(self, node: int) -> str:
        """A node's name, for texts and lists."""
        record = self.metadata.tree.nodes.get(node)
        return record.name if record is not None else f"convoy@{node}"

    @property
    def cluster_name(self) -> str:
        """The cluster's name."""
        return self.metadata.tree.settings.get("cluster_name", "convoy")

    def running_nodes(self) -> list[int]:
        """Nodes of the cluster that can be reached, this one included."""
        nodes = set(self.metadata.tree.nodes) | {self.node_id}
        return sorted(n for n in nodes if n == self.node_id or self.is_up(n))

    def is_up(self, node: int) -> bool:
        """Whether a node can be reached."""
        return node == self.node_id or self.control.transport.is_connected(node)

    def default_queue_type(self, vhost: str) -> str:
        """Type of queues that do not say which."""
        known = self.metadata.tree.vhosts.get(vhost)
        chosen = (known.default_queue_type if known else "") or self.settings.default_queue_type
        return "classic" if chosen == "classic" else "quorum"

    def _vhost(self, name: str) -> Vhost:
        vhost = self.metadata.tree.vhosts.get(name)
        if vhost is None:
            raise vhost_missing(name)
        return vhost

    def _owner(self, owner: int | None) -> str | None:
        return None if owner is None else owner_text(self.node_id, self.incarnation, owner)

    # --- users and permissions -----------------------------------------------------------

    async def authenticate(
        self, user: str, password: bytes, peer_host: str, mechanism: str = "PLAIN"
    ) -> User:
        """Returns the user when the password is right. Raises AccessRefused."""
        self.counters.auth_attempts += 1
        known = self.metadata.tree.users.get(user)
        good = False
        if known is not None and self._may_come_from(user, peer_host):
            if known.algorithm == access.ARGON2:
                good = await self._loop.run_in_executor(
                    None, access.verify, password, known.password_hash, known.algorithm
                )
            else:
                good = access.verify(password, known.password_hash, known.algorithm)
        if not good or known is None:
            self.counters.auth_failed += 1
            raise login_refused(mechanism)
        self.counters.auth_succeeded += 1
        return known

    def external_user(self, name: str) -> User:
        """Returns a user whose identity a certificate proved. Raises AccessRefused."""
        self.counters.auth_attempts += 1
        known = self.metadata.tree.users.get(name)
        if known is None:
            self.counters.auth_failed += 1
            raise login_refused("EXTERNAL")
        self.counters.auth_succeeded += 1
        return known

    def _may_come_from(self, user: str, peer_host: str) -> bool:
        if user not in self.settings.loopback_users:
            return True
        try:
            address = ipaddress.ip_address(peer_host.split("%")[0])
        except ValueError:
            # A Unix socket or a name: only local peers have no address.
            return peer_host in ("", "localhost")
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def open_vhost(self, user: User, vhost: str) -> None:
        """Admits a connection to a virtual host. Raises NotAllowed."""
        if vhost not in self.metadata.tree.vhosts:
            raise vhost_missing(vhost)
        if (user.name, vhost) not in self.metadata.tree.permissions:
            raise vhost_refused(vhost, user.name)

    def close_vhost(self, user: User, vhost: str) -> None:
        """A connection has left its virtual host."""

    def check_permission(
        self, user: User, vhost: str, permission: str, kind: str, name: str
    ) -> None:
        """Raises AccessRefused unless the user may configure, write or read it."""
        rules = self.metadata.tree.permissions.get((user.name, vhost))
        if kind == "exchange":
            name = name or access.DEFAULT_EXCHANGE_ALIAS
        if rules is not None:
            pattern = getattr(rules, permission)
            if access.allows(pattern, name):
                return
        subject = (exchange_subject if kind == "exchange" else queue_subject)(vhost, name)
        raise permission_missing(permission, subject, user.name)

    def has_topic_permissions(self, user: User, vhost: str) -> bool:
        """Whether `check_topic_permission` can refuse anything."""
        return (user.name, vhost) in self.metadata.tree.topic_permissions

    def check_topic_permission(
        self, user: User, vhost: str, permission: str, exchange: str, routing_key: str
    ) -> None:
        """Raises AccessRefused when a rule for this topic exchange does not cover the key."""
        rules = self.metadata.tree.topic_permissions.get((user.name, vhost))
        rule = rules.get(exchange) if rules else None
        if rule is None:
            return
        known = self._vhost(vhost).topology.exchange(exchange)
        if known.type is not ExchangeType.TOPIC:
            return
        pattern = rule.write if permission == "write" else rule.read
        if not access.topic_allows(pattern, routing_key, user=user.name, vhost=vhost):
            subject = exchange_subject(vhost, exchange)
            raise topic_permission_missing(permission, routing_key, subject, user.name)

    # --- looking things up ---------------------------------------------------------------

    def route(
        self, vhost: str, exchange: str, routing_keys: Sequence[str], headers: Table | None
    ) -> Route:
        """Returns where a message goes. Raises NotFound, or AccessRefused (internal exchange)."""
        place = self._vhost(vhost)
        topology = place.topology
        topology.exchange_for_publish(exchange)
        names = topology.route(exchange, routing_keys[0], headers or EMPTY, routing_keys[1:])
        queues = [self._handle(place.queues[name]) for name in names]
        cacheable = not topology.depends_on_headers(exchange)
        return Route(tuple(queue for queue in queues if queue is not None), cacheable)

    def find_queue(self, vhost: str, name: str, owner: int | None = None) -> Queue:
        """Returns a queue that the connection may use.

        Raises:
            NotFound: there is none, or its home node is away.
            ResourceLocked: it belongs to another connection.
        """
        place = self._vhost(vhost)
        place.topology.queue(name, self._owner(owner))
        record = place.queues[name]
        queue = self._handle(record)
        if queue is None and not record.type.is_served:
            raise unserved_queue_type(queue_subject(vhost, name), record.type.value)
        if queue is None:
            raise NotFound(
                f"{queue_subject(vhost, name)} has crashed and failed to restart",
                subject=queue_subject(vhost, name),
            )
        if isinstance(queue, ClassicQueue) and queue.ended is not None:
            raise queue.ended
        return queue

    def passive_declare_exchange(self, vhost: str, name: str) -> Exchange:
        """Returns an exchange. Raises NotFound."""
        return self._vhost(vhost).topology.passive_exchange(name)

    async def passive_declare(
        self, vhost: str, name: str, owner: int | None = None
    ) -> tuple[str, int, int]:
        """Returns (name, ready messages, consumers). Raises NotFound, ResourceLocked."""
        await self._until_gone(vhost, name)
        messages, consumers = await self.find_queue(vhost, name, owner).counts()
        return name, messages, consumers

    # --- exchanges -----------------------------------------------------------------------

    async def declare_exchange(
        self,
        vhost: str,
        name: str,
        type: str,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Table = EMPTY,
        user: User | None = None,
    ) -> bool:
        """Declares an exchange; False when an equal one exists."""
        _check_length(name)
        topology = self._vhost(vhost).topology
        properties: dict[str, Any] = {
            "durable": durable,
            "auto_delete": auto_delete,
            "internal": internal,
        }
        if topology.find_exchange(name) is not None:
            # It exists: nobody else has to be asked.
            check_exchange(topology, name, type, arguments=arguments, **properties)
            return False
        try:
            created = await self._change(
                DeclareExchange(
                    vhost=vhost, name=name, type=type, arguments=arguments.encoded, **properties
                )
            )
        except Refused:
            # Somebody else may have been first, with one that counts as equal.
            topology = self._vhost(vhost).topology
            if topology.find_exchange(name) is None:
                raise
            check_exchange(topology, name, type, arguments=arguments, **properties)
            return False
        return bool(created)

    async def delete_exchange(self, vhost: str, name: str, *, if_unused: bool = False) -> None:
        """Deletes an exchange; one that does not exist is fine."""
        self._vhost(vhost)
        await self._change(DeleteExchange(vhost=vhost, name=name, if_unused=if_unused))

    # --- bindings ------------------------------------------------------------------------

    async def bind_queue(
        self,
        vhost: str,
        queue: str,
        exchange: str,
        routing_key: str,
        arguments: Table = EMPTY,
        owner: int | None = None,
    ) -> bool:
        """Binds a queue to an exchange; False when it is bound so already."""
        destination = Destination(DestinationKind.QUEUE, queue)
        return await self._bind(vhost, exchange, destination, routing_key, arguments, owner)

    async def unbind_queue(
        self,
        vhost: str,
        queue: str,
        exchange: str,
        routing_key: str,
        arguments: Table = EMPTY,
        owner: int | None = None,
    ) -> None:
        """Removes a binding; one that does not exist is fine."""
        destination = Destination(DestinationKind.QUEUE, queue)
        await self._unbind(vhost, exchange, destination, routing_key, arguments, owner)

    async def bind_exchange(
        self,
        vhost: str,
        destination: str,
        source: str,
        routing_key: str,
        arguments: Table = EMPTY,
    ) -> bool:
        """Binds an exchange to an exchange; False when it is bound so already."""
        end = Destination(DestinationKind.EXCHANGE, destination)
        return await self._bind(vhost, source, end, routing_key, arguments, None)

    async def unbind_exchange(
        self,
        vhost: str,
        destination: str,
        source: str,
        routing_key: str,
        arguments: Table = EMPTY,
    ) -> None:
        """Removes a binding; one that does not exist is fine."""
        end = Destination(DestinationKind.EXCHANGE, destination)
        await self._unbind(vhost, source, end, routing_key, arguments, None)

    async def _bind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        routing_key: str,
        arguments: Table,
        owner: int | None,
    ) -> bool:
        _check_length(routing_key)
        self._vhost(vhost)
        made = await self._change(
            Bind(
                vhost=vhost,
                source=source,
                kind=destination.kind.value,
                destination=destination.name,
                routing_key=routing_key,
                arguments=arguments.encoded,
                owner=self._owner(owner),
            )
        )
        return bool(made)

    async def _unbind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        routing_key: str,
        arguments: Table,
        owner: int | None,
    ) -> None:
        self._vhost(vhost)
        await self._change(
            Unbind(
                vhost=vhost,
                source=source,
                kind=destination.kind.value,
                destination=destination.name,
                routing_key=routing_key,
                arguments=arguments.encoded,
                owner=self._owner(owner),
            )
        )

    # --- queues --------------------------------------------------------------------------

    async def declare_queue(
        self,
        vhost: str,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Table = EMPTY,
        owner: int | None = None,
        user: User | None = None,
        generated: str = "",
    ) -> tuple[str, int, int]:
        """Declares a queue and waits until it can serve.

        Args:
            generated: the name to take when `name` is empty; empty: one is made.
        Returns:
            Name, ready messages, consumers.
        Raises:
            PreconditionFailed: a different one exists, or it cannot be made so.
            ResourceLocked: it belongs to another connection.
            AccessRefused: a new name with the reserved prefix.
            Unavailable: no majority in time; nothing is left behind.
        """
        self.counters.queues_declared += 1
        _check_length(name)
        place = self._vhost(vhost)
        server_named = not name
        arguments = with_default_type(
            arguments,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            server_named=server_named,
            vhost_default=QueueType(place.default_queue_type) if place.default_queue_type else None,
            node_default=QueueType(self.default_queue_type("")),
        )
        if server_named:
            name = generated or generated_name("amq.gen-")
        owner_name = self._owner(owner) if exclusive else None
        await self._until_gone(vhost, name)
        properties: dict[str, Any] = {
            "durable": durable,
            "auto_delete": auto_delete,
            "server_named": server_named,
        }

        def exists() -> bool:
            topology = self._vhost(vhost).topology
            if topology.find_queue(name) is None:
                return False
            check_queue(
                topology, name, exclusive_owner=owner_name, arguments=arguments, **properties
            )
            return True

        created = False
        if not exists():
            self._check_trace(vhost, name, arguments)
            command = DeclareQueue(
                vhost=vhost,
                name=name,
                members=self._members_for(arguments, exclusive=exclusive),
                owner=owner_name,
                arguments=arguments.encoded,
                **properties,
            )
            try:
                reply = await self._change(command)
            except Refused:
                # Somebody else may have been first, with one that counts as equal.
                if not exists():
                    raise
            else:
                created = reply["created"]
        if not created:
            queue = self.find_queue(vhost, name, owner)
            await queue.ready(self._timeout_s)
            return (name, *await queue.counts())
        self.counters.queues_created += 1
        try:
            await self._wait_until_served(vhost, name, owner, reply["group"])
        except BrokerError:
            # A queue that nobody serves must not stay: its name would be taken for nothing.
            await self._change(DeleteQueue(vhost=vhost, name=name, group=reply["group"]))
            raise
        return name, 0, 0

    async def delete_queue(
        self,
        vhost: str,
        name: str,
        *,
        if_unused: bool = False,
        if_empty: bool = False,
        owner: int | None = None,
        user: User | None = None,
    ) -> int:
        """Deletes a queue and returns how many ready messages it had; 0 when there is none.

        Raises:
            PreconditionFailed: in use, or not empty.
            NotServed: a condition on a quorum queue.
            ResourceLocked: it belongs to another connection.
        """
        place = self._vhost(vhost)
        record = place.queues.get(name)
        if record is None:
            return 0
        place.topology.queue(name, self._owner(owner))
        subject = queue_subject(vhost, name)
        if record.type is QueueType.QUORUM and (if_unused or if_empty):
            raise conditional_delete("if-unused" if if_unused else "if-empty", subject)
        messages = consumers = 0
        handle = self._handle(record)
        if handle is not None:
            try:
                async with asyncio.timeout(COUNTS_TIMEOUT_S):
                    messages, consumers = await handle.counts()
            except TimeoutError:
                if if_unused or if_empty:
                    raise Unavailable(f"{subject} did not answer in time") from None
            except (Refused, Unavailable):
                # Without an answer a condition cannot be judged; plain deletion goes on.
                if if_unused or if_empty:
                    raise
        # Streams take no notice of the conditions, as in RabbitMQ.
        if if_unused and consumers and record.type is not QueueType.STREAM:
            raise in_use(subject)
        if if_empty and messages and record.type is not QueueType.STREAM:
            raise not_empty(subject)
        await self._change(DeleteQueue(vhost=vhost, name=name, group=record.group))
        self.counters.queues_deleted += 1
        return messages

    async def connection_closed(self, owner: int) -> None:
        """Deletes the exclusive queues of a connection that is gone."""
        name = self._owner(owner)
        assert name is not None
        if self.metadata.tree.queue_index.owned_by(name):
            await self._change(OwnerGone(owner=name))

    async def _change(self, command: Command) -> Any:
        return await self.metadata.execute(command, self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return self.settings.operation_timeout_ms / 1000

    def _members_for(self, arguments: Table, *, exclusive: bool) -> tuple[int, ...]:
        """Nodes for a new queue, the designated leader or home first."""
        if exclusive:
            return (self.node_id,)
        return self.local.members_for(arguments, self.running_nodes(), self.settings.leader_locator)

    async def _wait_until_served(
        self, vhost: str, name: str, owner: int | None, group: int
    ) -> None:
        queue = self.find_queue(vhost, name, owner)
        if isinstance(queue, RemoteQueue):
            await self._wait_for_home(queue)
        await queue.ready(self._timeout_s)

    async def _wait_for_home(self, queue: RemoteQueue) -> None:
        # The home node may be a few milliseconds behind; commands must not reach it before.
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        await queue.counts()
                        return
                    except NotFound:
                        if not self.is_up(queue.record.home):
                            raise
                        await asyncio.sleep(HOME_POLL_S)
        except TimeoutError:
            raise Unavailable(f"{queue.subject} was not opened in time") from None

    # --- following the tree --------------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        self.topology.bump()
        due = self.local.on_change(change)
        if change.kind in (ChangeKind.OTHER, ChangeKind.RESTORED) and not self._closing_revoked:
            self._closing_revoked = True
            self._loop.call_soon(self._close_revoked_connections)
        if due and not self._reconciling:
            self._reconciling = True
            self._loop.call_soon(self._reconcile)

    def _close_revoked_connections(self) -> None:
        """Closes the connections whose virtual host or user is gone."""
        self._closing_revoked = False
        if self.local.is_behind:
            return
        tree = self.metadata.tree
        for connection in self.connections.all():
            user = connection.user.name
            if connection.vhost not in tree.vhosts:
                connection.close(f"vhost '{connection.vhost}' is deleted")
            elif user not in tree.users:
                connection.close(f"user '{user}' is deleted")

    def _reconcile(self) -> None:
        """Makes this node's queues be what the tree says."""
        self._reconciling = False
        followed = self.local.reconcile()
        touched = followed.touched
        if followed.everything:
            touched = {*touched, *self.classic.queues}
            self.classic.remove_orphans(set(followed.records))
        for group in sorted(touched):
            record = followed.records.get(group)
            if record is None:
                self.classic.delete(group)
            elif not record.type.is_replicated and record.home == self.node_id:
                self._handle(record)
        if followed.more and not self._reconciling:
            self._reconciling = True
            self._loop.call_soon(self._reconcile)

    def _handle(self, record: QueueRecord) -> Queue | None:
        """This node's handle of a queue; None when its files are damaged, or its type not
        served."""
        if record.type.is_replicated:
            return self.local.handle(record)
        known = self.classic.queues.get(record.group)
        if known is not None:
            return known
        if record.group in self.classic.damaged or not record.type.is_served:
            return None
        declared = self.metadata.tree.vhosts[record.vhost].topology.find_queue(record.name)
        assert declared is not None
        handle = self.classic.open(record, declared.arguments)
        if isinstance(handle, RemoteQueue) and not self.is_up(record.home):
            error = home_node_down(handle.subject, self.node_name_of(record.home))
            handle.end(error, published_ok=False)
        return handle

    def group_size_of(self, record: QueueRecord) -> int:
        """How many members a queue should have: what its declaration or the settings say."""
        return self.local.group_size_of(record)

    # --- the trace -----------------------------------------------------------------------

    def _check_trace(self, vhost: str, name: str, arguments: Table) -> None:
        """Raises PreconditionFailed for a queue that wants a trace which this node can't write."""
        wish = arguments.get(TRACE_ARGUMENT)
        if wish is None or wish.value is not True or self.traces is None:
            return
        if not self.traces.available:
            subject = queue_subject(vhost, name)
            raise PreconditionFailed(
                f"invalid arg '{TRACE_ARGUMENT}' for {subject}: this node can't write traces, "
                "pyarrow is not installed (pip install convoymq[trace])",
                subject=subject,
            )

    # --- what classic queues report ------------------------------------------------------

    def on_unused(self, record: QueueRecord) -> None:
        """The last consumer left: an auto-delete queue goes."""
        place = self.metadata.tree.vhosts.get(record.vhost)
        declared = place.topology.find_queue(record.name) if place is not None else None
        if declared is not None and declared.auto_delete:
            self._delete_later(record)

    def on_expired(self, record: QueueRecord) -> None:
        """Unused for longer than `x-expires`."""
        self._delete_later(record)

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """A queue's files cannot be read or written."""
        log.error("classic.disk_error", vhost=record.vhost, queue=record.name, reason=str(error))

    def _delete_later(self, record: QueueRecord) -> None:
        async def work() -> None:
            try:
                await self._change(
                    DeleteQueue(vhost=record.vhost, name=record.name, group=record.group)
                )
            except BrokerError as error:
                log.warning("queue.not_deleted", queue=record.name, reason=error.text)

        key = (record.vhost, record.name)
        task = self._going[key] = self.spawn(work())
        task.add_done_callback(lambda done: self._forget_going(key, done))

    def _forget_going(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._going.get(key) is task:
            del self._going[key]

    async def _until_gone(self, vhost: str, name: str) -> None:
        """A queue that lost its last consumer is as good as gone: a declare gets a new one."""
        going = self._going.get((vhost, name))
        if going is not None:
            await asyncio.wait({going}, timeout=self._timeout_s)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Runs a coroutine that `stop` cancels and awaits."""
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- direct reply-to -----------------------------------------------------------------

    def register_reply(self, deliver: Callable[[bytes], None]) -> str:
        """Returns a token under which records reach `deliver`."""
        return self._replies.register(deliver)

    def unregister_reply(self, token: str) -> None:
        """The reply consumer is gone."""
        self._replies.unregister(token)

    def publish_reply(self, token: str, record: bytes) -> bool:
        """Sends a record to a reply consumer; False when it is known to be gone."""
        return self._replies.publish(token, record)

    async def reply_exists(self, token: str) -> bool:
        """Whether the reply consumer is there."""
        return await self._replies.exists(token)

    # --- alarms --------------------------------------------------------------------------

    def set_alarm(self, name: str, on: bool) -> None:
        """This node is short of `memory` or `disk`, or not any more."""
        mine = self._alarms_by_node.get(self.node_id, frozenset())
        changed = mine | {name} if on else mine - {name}
        if changed == mine:
            return
        self._set_node_alarms(self.node_id, changed)
        for node in self.running_nodes():
            if node != self.node_id:
                self.control.tell(node, KIND_ALARM, sorted(changed))

    def alarms_of(self, node: int) -> frozenset[str]:
        """What a node is short of."""
        return self._alarms_by_node.get(node, frozenset())

    def _set_node_alarms(self, node: int, alarms: frozenset[str]) -> None:
        self._alarms_by_node[node] = alarms
        effective = frozenset[str]().union(*self._alarms_by_node.values())
        if effective != self.alarms:
            self.alarms = effective
            for listener in list(self.on_alarms):
                listener(effective)

    async def _learn_alarms(self) -> None:
        # Nodes announce changes only; what began before this node started has to be asked for.
        for row in await self._gather("node"):
            # A node that has spoken meanwhile has said something newer.
            if row["id"] not in self._alarms_by_node and row["id"] != self.node_id:
                names = (("memory", row["mem_alarm"]), ("disk", row["disk_free_alarm"]))
                self._set_node_alarms(row["id"], frozenset(name for name, on in names if on))

    async def _on_alarm(self, node: int, body: Any) -> None:
        self._set_node_alarms(node, frozenset(str(name) for name in body))

    # --- lists over the cluster ----------------------------------------------------------

    async def list_connections(self) -> list[dict[str, Any]]:
        """Rows of all nodes."""
        return await self._gather("connections")

    async def list_channels(self) -> list[dict[str, Any]]:
        """Rows of all nodes."""
        return await self._gather("channels")

    async def list_consumers(self) -> list[dict[str, Any]]:
        """Rows of all nodes. Which consumer of a queue is active is known where the queue is
        decided about."""
        rows: list[dict[str, Any]] = []
        told: dict[tuple[int, int], str] = {}
        for row in await self._gather("consumers"):
            if "activity_of" in row:
                session, number = row["activity_of"]
                told[session, number] = row["activity_status"]
            else:
                rows.append(row)
        for row in rows:
            status = told.get((row.pop("session", 0), row.pop("number", 0)))
            if status is not None:
                row["activity_status"] = status
                row["active"] = status == SINGLE_ACTIVE
        return rows

    async def list_nodes(self) -> dict[str, dict[str, Any]]:
        """Resources of the nodes that answer, by name."""
        rows = await self._gather("node")
        return {str(row["name"]): row for row in rows}

    async def queue_infos(self) -> dict[int, dict[str, Any]]:
        """What the leading, or only, node of each queue says of it, by group id."""
        rows = await self._gather("queues")
        found: dict[int, dict[str, Any]] = {}
        notes = []
        async for row in in_slices(rows):
            if "readers" in row or "stopped" in row:
                notes.append(row)
            else:
                found[row["group"]] = row
        for row in notes:
            if "stopped" in row and row["group"] in found:
                found[row["group"]].setdefault("stopped_members", {})[row["node"]] = row["stopped"]
            # Streams are read on every node; their leader knows of its own readers only.
            if "readers" in row and row["group"] in found:
                found[row["group"]]["consumers"] += row["readers"]
        return found

    async def replicas_behind(self) -> set[tuple[int, int]]:
        """(group, node) of replicas that could not replace another one now: they stopped, lack
        something for longer than a moment, or have no vote."""
        return {(row["group"], row["node"]) for row in await self._gather("behind")}

    async def close_connection(self, name: str, reason: str) -> bool:
        """Closes a client's connection, on whatever node; False when there is none."""
        for node in self.running_nodes():
            try:
                if await self.control.request(
                    node, KIND_CLOSE_CONNECTION, [name, reason], LIST_TIMEOUT_S
                ):
                    return True
            except BrokerError:
                continue
        return False

    async def _gather(self, what: str) -> list[dict[str, Any]]:
        timeout_s = _list_timeout_s(what)

        async def ask(node: int) -> list[dict[str, Any]]:
            try:
                return list(await self.control.request(node, KIND_LIST, what, timeout_s))
            except BrokerError:
                # A node that does not answer in time has no rows; the list still comes.
                return []

        found = await asyncio.gather(*(ask(node) for node in self.running_nodes()))
        return [row for rows in found for row in rows]

    @property
    def uptime_ms(self) -> int:
        """Time since the broker was made."""
        return self._clock.now_ms() - self.started_ms

    async def _on_list(self, node: int, what: Any, reply: Reply) -> None:
        if node == self.node_id or what == "node":
            reply(await self._rows(what))
            return
        until_ms = self._clock.monotonic_ms() + int(_list_timeout_s(what) * 1000)
        answers = self.local.answers
        async with answers.room(node, until_ms):
            # Nothing is made for a link that is full.
            pass
        # Other answers need not wait while rows are made in slices.
        rows = await self._rows(what)
        async with answers.room(node, until_ms):
            reply(rows)

    async def _rows(self, what: Any) -> list[dict[str, Any]]:
        match what:
            case "connections":
                return [{**c.info(), "node": self.node_name} for c in self.connections.all()]
            case "channels":
                return [row for c in self.connections.all() for row in c.channel_infos()]
            case "consumers":
                rows = [row for c in self.connections.all() for row in c.consumer_infos()]
                return rows + self._reservation_rows() + self._activity_rows()
            case "queues":
                rows = [row async for row in in_slices(self.local_rows())]
                return rows + self._far_readers() + self.stopped_replicas()
            case "behind":
                return [row async for row in in_slices(self._replicas_behind())]
            case "node":
                alarms = self.alarms_of(self.node_id)
                return [
                    {
                        **self.node_info(),
                        "name": self.node_name,
                        "id": self.node_id,
                        "mem_alarm": "memory" in alarms,
                        "disk_free_alarm": "disk" in alarms,
                        "connections": len(self.connections),
                        "uptime": self.uptime_ms,
                        "counters": self.counters.as_dict(),
                    }
                ]
            case _:
                return []

    def _reservation_rows(self) -> list[dict[str, Any]]:
        """Reservations and leases as rows of /api/consumers, of queues that this node decides
        about."""
        return [
            {
                "consumer_tag": reservation["reservation"],
                "queue": {"name": queue.name, "vhost": queue.vhost},
                "channel_details": {"node": self.node_name},
                "ack_required": True,
                "prefetch_count": 0,
                "exclusive": False,
                "active": True,
                "activity_status": "up",
                "arguments": {},
                **reservation,
            }
            for queue in [*self._groups.values(), *self.classic.queues.values()]
            for reservation in queue.reservations()
        ]

    def _activity_rows(self) -> list[dict[str, Any]]:
        """What `list_consumers` hears of consumers, on any node, of queues that this node decides
        about."""
        return [
            {"activity_of": [session, number], "activity_status": status}
            for queue in [*self._groups.values(), *self.classic.queues.values()]
            for session, number, status in queue.activity()
        ]

    def live_sessions(self) -> list[int]:
        """Sessions of this node's channels, and of closed ones that a queue has not heard of."""
        found = [session for c in self.connections.all() for session in c.sessions()]
        found += self.local.sessions()
        for handle in self.classic.queues.values():
            found += handle.clients
        return found

    def local_rows(self) -> Iterator[dict[str, Any]]:
        """Queues that this node leads or is the home of, one by one."""
        # Copies: between two rows queues may come and go.
        for group, queue in list(self._groups.items()):
            replica = self.host.replica(group)
            if replica is not None and replica.is_leader:
                yield {**queue.info(), "group": group}
        for group, handle in list(self.classic.queues.items()):
            if isinstance(handle, LocalQueue):
                yield {**handle.info(), "group": group}

    def stopped_replicas(self) -> list[dict[str, Any]]:
        """Replicas of this node that stopped because of something in their log."""
        return [
            {"group": group, "node": self.node_id, "stopped": replica.stopped}
            for group, replica in self.host.stopped.items()
        ]

    def _replicas_behind(self) -> Iterator[dict[str, Any]]:
        """What this node knows of `replicas_behind`: its own ones, and as leader the others'."""
        for group in list(self.host.stopped):
            yield {"group": group, "node": self.node_id}
        for group, replica in list(self.host.groups.items()):
            core = replica.core
            if replica.is_behind or replica.faulty or core.lost_state or core.quarantined:
                yield {"group": group, "node": self.node_id}
            if replica.is_leader:
                for peer in core.progress.values():
                    if peer.silent or not peer.voter:
                        yield {"group": group, "node": peer.node}

    def _far_readers(self) -> list[dict[str, Any]]:
        """How many consumers read streams here that other nodes lead."""
        return [
            {"group": group, "readers": queue.reader_count}
            for group, queue in self._groups.items()
            if isinstance(queue, StreamQueue)
            and queue.leader != self.node_id
            and queue.reader_count
        ]

    async def _on_close_connection(self, node: int, body: Any) -> bool:
        name, reason = body
        for connection in self.connections.all():
            if connection.name == name:
                connection.close(str(reason))
                return True
        return False

    async def _ask_quorum_counts(self, leader: int, group: int) -> tuple[int, int]:
        found = await self.control.request(leader, KIND_QUEUE_COUNTS, group, COUNTS_TIMEOUT_S)
        return int(found[0]), int(found[1])

    async def _ask_reservation(self, node: int, request: Any) -> Any:
        return await self.control.request(node, KIND_RESERVATION, request, RESERVATION_TIMEOUT_S)

    async def _on_reservation(self, node: int, body: Any, reply: Reply) -> None:
        if not isinstance(body, list) or not body or not isinstance(body[0], int):
            raise PeerError(f"malformed request about a reservation from node {node}")
        group, *request = body
        queue = self._groups.get(group) or self.classic.queues.get(group)
        if queue is None or isinstance(queue, StreamQueue):
            raise NotFound("the queue is not here")
        until_ms = self._clock.monotonic_ms() + int(RESERVATION_TIMEOUT_S * 1000)
        async with AsyncExitStack() as turn:
            room = self.local.answers.room(node, until_ms)
            reply(await queue.serve_reservation(request, lambda: turn.enter_async_context(room)))

    def _ask_stream(self, node: int, request: list[Any], wait_ms: int, answer: Answer) -> None:
        self._ask_node(node, KIND_STREAM, request, wait_ms, answer)

    def _ask_sessions(self, node: int, request: list[Any], wait_ms: int, answer: Answer) -> None:
        self._ask_node(node, KIND_SESSIONS, request, wait_ms, answer)

    def _ask_node(
        self, node: int, kind: int, request: list[Any], wait_ms: int, answer: Answer
    ) -> None:
        async def ask() -> None:
            try:
                reply = await self.control.request(node, kind, request, wait_ms / 1000)
            except BrokerError as error:
                answer(None, error)
            else:
                answer(reply, None)

        self.spawn(ask())

    async def _on_sessions(self, node: int, body: Any) -> Any:
        assert self.local.watch is not None
        return self.local.watch.serve(body)

    async def _on_stream(self, node: int, body: Any, reply: Reply) -> None:
        if not isinstance(body, list) or len(body) < 2 or not isinstance(body[1], int):
            raise PeerError(f"malformed request about a stream from node {node}")
        queue = self._groups.get(body[1])
        if not isinstance(queue, StreamQueue):
            raise NotFound("the stream is not here")
        queue.serve(body, reply, node)

    async def _on_quorum_counts(self, node: int, group: Any) -> tuple[int, int]:
        queue = self._groups.get(group)
        if queue is None:
            raise NotFound("the queue is not here")
        return queue.local_counts()

    # --- for management ------------------------------------------------------------------

    def deliveries(self) -> tuple[int, int]:
        """Messages of quorum queues that this node handed to its own clients, and that it sent, as
        leader, to nodes without a live replica."""
        return self.local.deliveries()

    def dropped_over_limit(self) -> int:
        """Messages over the delivery limit that were dropped while this node led their queues."""
        return self.local.dropped_over_limit()


def generated_name(prefix: str) -> str:
    """Returns a name that nobody else has: the prefix and 22 characters."""
    return prefix + base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")


def _list_timeout_s(what: object) -> float:
    # Rows of thousands of queues are made in slices.
    return LIST_QUEUES_TIMEOUT_S if what == "queues" else LIST_TIMEOUT_S


def _check_length(name: str) -> None:
    if len(name.encode()) > NAME_BYTES_MAX:
        raise PreconditionFailed(f"name of more than {NAME_BYTES_MAX} bytes")


__all__ = ["Broker", "BrokerSettings", "Route", "User", "generated_name"]
