"""The broker as protocol edges see it: one part for each subject.

Reading is synchronous and local; every change goes through the replicated tree and returns when
this node has applied it. The broker follows the tree: the queues of this node are opened and ended
by comparing what should be with what is, so it does not matter which changes it missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.absent_nodes import AbsentNodes
from convoymq.broker.access import Access
from convoymq.broker.alarms import Alarms
from convoymq.broker.audit import AuditLog, Output
from convoymq.broker.browse import Browsing
from convoymq.broker.cluster_queries import ClusterQueries
from convoymq.broker.copies import Copies
from convoymq.broker.declarations import Declarations
from convoymq.broker.firehose import Firehose
from convoymq.broker.group_requests import GroupRequests
from convoymq.broker.identity.chain import make_chain
from convoymq.broker.ignored_arguments import IgnoredArguments
from convoymq.broker.leadership import Leadership, Rebalancer
from convoymq.broker.limits import ClientLimits
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.local_topics import LocalTopics
from convoymq.broker.locations import QueueLocations
from convoymq.broker.maintenance import Maintenance
from convoymq.broker.membership import QueueMembership
from convoymq.broker.migrations import Migrations
from convoymq.broker.node_view import NodeView
from convoymq.broker.peek import Peeking
from convoymq.broker.publishing import Publishing
from convoymq.broker.queue_admin import QueueAdmin
from convoymq.broker.queue_logs import QueueLogs
from convoymq.broker.queue_questions import QueueAnswers, QueueQuestions
from convoymq.broker.quorum_checks import QuorumChecks
from convoymq.broker.reconciliation import MembershipReconciliation
from convoymq.broker.registry import ConnectionRegistry, Counters
from convoymq.broker.replica_moves import ReplicaMoves
from convoymq.broker.replica_views import ReplicaViews
from convoymq.broker.replies import ReplyRoutes
from convoymq.broker.ring_recovery import RingRecovery
from convoymq.broker.route_counts import RouteCounts
from convoymq.broker.route_versions import RouteVersions
from convoymq.broker.scheduled import Scheduled
from convoymq.broker.tree import TreeView
from convoymq.kernels.batch import PendingBudget
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.global_parameters import SYNC_THROUGHPUT, size_in
from convoymq.metadata.machine import Change, ChangeKind, QueueRecord
from convoymq.metadata.members import MembershipManager
from convoymq.metadata.reads import MetadataReads
from convoymq.model.clock import Clock, Timer
from convoymq.model.config import DefaultsConfig, IdentityConfig, ReconciliationConfig
from convoymq.model.late_imports import import_late
from convoymq.model.rounds import pass_on, run_each
from convoymq.model.tasks import Tasks
from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.queues.driver import MEMORY_TARGET_BYTES, HostParts, QueueHost, hosted_drivers
from convoymq.queues.group_queue import TICK_MS, GroupQueue
from convoymq.queues.placement import Placement
from convoymq.shells.groups.host import ReplicaHost
from convoymq.storage.types import Directory
from convoymq.trace.recorder import Traces
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_TOPIC_GROUP, KIND_TOPIC_SCALING

if TYPE_CHECKING:
    from convoymq.broker.spans import Spans
    from convoymq.broker.topic_parts import TopicParts
    from convoymq.kernels.route_cache import RouteCacheVersion
    from convoymq.topics.shell.admin import TopicAdmin

CLASSIC_MEMORY_SHARE = 0.25
"""Part of the memory alarm's limit that is the memory target of classic queues."""
log = structlog.get_logger()


class Broker:
    """See the module text. One per node; single threaded."""

    spans: Spans | None = None
    """Gets spans of sampled messages; None: there are none."""

    def __init__(
        self,
        *,
        node_id: int,
        incarnation: int,
        host: ReplicaHost,
        control: ControlPlane,
        metadata: AsyncMetadataStore,
        make_route_version: Callable[[], RouteCacheVersion],
        clock: Clock,
        open_directory: Callable[[str], Directory],
        new_session: Callable[[], int],
        wake: Callable[[], None],
        settings: DefaultsConfig | None = None,
        reconciliation: ReconciliationConfig | None = None,
        reply_backlog_max_bytes: int = 128 << 20,
        node: NodeView | None = None,
        make_members: Callable[[Broker], MembershipManager] | None = None,
        stored_groups: Callable[[], Collection[int]] = tuple,
        traces: Traces | None = None,
        identity: IdentityConfig | None = None,
        audit: Output | None = None,
    ) -> None:
        """
        Args:
            make_route_version: see `RouteVersions`.
            open_directory: returns a folder of that name, where the node keeps its data.
            new_session: numbers a session of this node.
            wake: asks for an `end_of_round`, which is called if `round_due` is set.
            reply_backlog_max_bytes: direct replies to a node are dropped while more waits to be
                written to it.
            make_members: makes what records members and forgets nodes; called at the end of
                `start`.
            stored_groups: groups with data on this node's disk.
            identity: who users are, and what decides what they may; None: the tree.
            audit: file of administrative acts; None: they are not recorded.
            traces: who writes what queues with `x-trace` did; None = nobody.
        """
        self.node_id = node_id
        self.settings = settings = settings or DefaultsConfig()
        self.metadata = metadata
        self.host = host
        self.control = control
        self.tree = TreeView(metadata)
        self.route_versions = RouteVersions(make_route_version, self._used_vhosts)
        self.route_counts = RouteCounts(metadata.tree)
        self.counters = Counters()
        self.new_session = new_session
        self.now_ms = clock.now_ms
        self.traces = traces
        self._make_members = make_members
        self._reply_backlog_max_bytes = reply_backlog_max_bytes
        self._reconciliation = reconciliation or ReconciliationConfig()
        self._clock = clock
        self._incarnations: dict[int, int] = {node_id: incarnation}
        self._ended: dict[int, int] = {}
        """Node -> the latest incarnation whose process is known to have ended."""
        self._timer: Timer | None = None
        self._reconciling = False
        self._closing_revoked = False
        self._topic_parts: TopicParts | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()
        self._chain = make_chain(metadata.tree, identity or IdentityConfig())
        self._make_parts(incarnation, stored_groups, node or NodeView())
        self.audit = AuditLog(audit, lambda: self.node_name)
        self._wake = wake
        self.round_due = False
        """A queue that is kept on one node has work for `end_of_round`."""
        self._hosts = self.local.hosts = self._make_hosts(open_directory)

    def _make_parts(
        self, incarnation: int, stored_groups: Callable[[], Collection[int]], node: NodeView
    ) -> None:
        node_id, control, host = self.node_id, self.control, self.host
        metadata, settings, clock = self.metadata, self.settings, self._clock
        tree = metadata.tree
        self.connections = ConnectionRegistry()
        self.ignored_arguments = IgnoredArguments(clock)
        self.nodes = ClusterNodes(node_id, incarnation, tree, control.transport)
        control.is_older = self.nodes.is_older
        self.local = self._make_local(stored_groups)
        self.placement = Placement(node_id, tree, self.local.leader_of, settings.quorum_group_size)
        self.locations = QueueLocations(self.nodes, tree, self.local)
        self.replicas = ReplicaViews(host, tree)
        self.access = Access(
            tree, settings, self.connections, self.counters, self._chain, self._tasks
        )
        self.local_topics = LocalTopics(tree, self.local)
        self.alarms = Alarms(self.nodes, control)
        publishing = self.publishing = Publishing(
            tree,
            self.local,
            self.access,
            clock,
            self.route_versions,
            self.alarms,
            self.route_counts,
            self.local_topics,
        )
        self.firehose = Firehose(tree, publishing, self.nodes.own_name)
        dead_letters = DeadLetterOptions(
            routes=publishing,
            prefetch=settings.dead_letter_prefetch,
            confirm_timeout_ms=settings.dead_letter_confirm_timeout_ms,
        )
        self.local.ask = replace(self.local.ask, dead_letters=dead_letters, fence=_TopicFence(self))
        self.queue_admin = QueueAdmin(
            metadata, self.local, self.nodes, settings, self.counters, self._tasks
        )
        self.declarations = Declarations(
            metadata=metadata,
            local=self.local,
            placement=self.placement,
            nodes=self.nodes,
            queue_admin=self.queue_admin,
            settings=settings,
            counters=self.counters,
            ignored=self.ignored_arguments,
        )
        backlog_max = self._reply_backlog_max_bytes
        self.replies = ReplyRoutes(control, incarnation, backlog_max, self.counters)
        self.cluster = ClusterQueries(
            nodes=self.nodes,
            control=control,
            local=self.local,
            alarms=self.alarms,
            connections=self.connections,
            counters=self.counters,
            route_counts=self.route_counts,
            clock=clock,
            node=node,
            tasks=self._tasks,
        )
        self._make_admin()
        for kind in (KIND_TOPIC_GROUP, KIND_TOPIC_SCALING):
            control.handle_late(kind, lambda: self.topic_parts)
        self.metadata_reads = MetadataReads(node_id, control, host)
        self._absent_nodes = AbsentNodes(
            self.nodes, tree, host, clock, settings.disconnect_timeout_ms
        )

    def _make_admin(self) -> None:
        """Creates the parts by which operators manage groups and nodes."""
        tree, host = self.metadata.tree, self.host
        QueueAnswers(self.control, self.local, self._clock)
        self.limits = ClientLimits(tree, self.cluster)
        requests = GroupRequests(self.nodes, tree, self.control, host, self._clock)
        self.leadership = Leadership(requests, self.local)
        self.rings = RingRecovery(requests, self.local, self.metadata)
        self.membership = QueueMembership(requests, self.leadership, self.rings)
        self.peeking = Peeking(self.local, requests)
        self.scheduled = Scheduled(self.local, requests)
        self.browsing = Browsing(self.local, requests)
        self.copies = Copies(self.local, requests, self.alarms)
        self.queue_logs = QueueLogs(requests)
        self.quorum_checks = QuorumChecks(requests, self.cluster)
        self.rebalancer = Rebalancer(requests, self.leadership, self.cluster, self._tasks)
        self.migrations = Migrations(
            nodes=self.nodes,
            metadata=self.metadata,
            local=self.local,
            placement=self.placement,
            alarms=self.alarms,
            control=self.control,
            clock=self._clock,
            settings=self.settings,
            counters=self.counters,
            tasks=self._tasks,
        )
        self.maintenance = Maintenance(
            self.nodes, self.metadata, host, self.leadership, self.connections, self._tasks
        )
        self.moves = ReplicaMoves(requests, self.membership, self._tasks)
        self.reconciliation = MembershipReconciliation(
            requests,
            settings=self._reconciliation,
            membership=self.membership,
            tasks=self._tasks,
        )

    def _make_local(self, stored_groups: Callable[[], Collection[int]]) -> LocalQueues:
        questions = QueueQuestions(self.control, self._tasks)
        settings = self.settings
        return LocalQueues(
            node=self.node_id,
            host=self.host,
            tree=self.metadata.tree,
            transport=self.control.transport,
            clock=self._clock,
            incarnations=self._incarnations,
            new_session=self.new_session,
            limits=settings,
            budget=PendingBudget(settings.publish_pending_max_bytes),
            ask=questions.of_groups(),
            ask_sessions=questions.ask_sessions,
            on_routes=self.route_versions.bump,
            on_unused=lambda record: self.queue_admin.on_expired(record),
            note=lambda event, fields: log.info(event, **fields),
            stored_groups=stored_groups,
            traces=self.traces,
        )

    def _make_hosts(self, open_directory: Callable[[str], Directory]) -> dict[str, QueueHost]:
        parts = HostParts(
            node_id=self.node_id,
            incarnation=self._incarnations[self.node_id],
            open_directory=open_directory,
            clock=self._clock,
            control=self.control,
            reports=self.queue_admin,
            new_session=self.new_session,
            node_name_of=self.nodes.name_of,
            call_soon=self._call_soon,
            on_routes=self.route_versions.bump,
            wanted=self._want_round,
            await_room=self.host.await_room,
            record_members=self.metadata.submit,
            has_majority=self.nodes.has_majority,
            running_nodes=self.nodes.for_placement,
            incarnation_of=self._incarnation_of,
            load=lambda: self.metadata.tree.queue_index.replicas,
            places=self.metadata.tree.places,
            note=self.host.note,
            read_tree=self.metadata.read,
            changed=self.local.changed,
            lost_groups=lambda: self.local.lost_groups,
            settings=self.settings,
            dead_letters=self.local.ask.dead_letters,
            memory_target_bytes=self._memory_target_bytes(),
            mirror_sync_bytes_per_s=lambda: size_in(
                self.metadata.tree.settings,
                SYNC_THROUGHPUT,
                self.settings.mirror_sync_bytes_per_s,
            ),
        )
        return {driver.rules.name: driver.make_host(parts) for driver in hosted_drivers()}

    def _memory_target_bytes(self) -> int:
        given, watermarks = self.settings.classic_memory_target_bytes, self.node.watermarks
        share = 0 if watermarks is None else int(watermarks.memory * CLASSIC_MEMORY_SHARE)
        return given or share or MEMORY_TARGET_BYTES

    # --- what this node and its cluster are ------------------------------------------------

    @property
    def node(self) -> NodeView:
        """Returns the facts of this node beside its broker."""
        return self.cluster.node

    @property
    def node_name(self) -> str:
        """Returns the name of this node."""
        return self.nodes.own_name

    def node_name_of(self, node: int) -> str:
        """Returns a node's name, for texts and lists."""
        return self.nodes.name_of(node)

    @property
    def cluster_name(self) -> str:
        """Returns the cluster's name."""
        return self.metadata.tree.settings.get("cluster_name", "convoy")

    def running_nodes(self) -> list[int]:
        """Nodes of the cluster that can be reached, this one included."""
        return self.nodes.running()

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""
        return self.nodes.is_up(node)

    def group_size_of(self, record: QueueRecord) -> int:
        """Returns how many members a queue should have, by its declaration or the settings."""
        return self.placement.group_size_of(record)

    def placement_nodes(self) -> list[int]:
        """Nodes that may get leaders and replicas."""
        return self.nodes.for_placement()

    def live_sessions(self) -> list[int]:
        """Sessions of this node's channels, and of closed ones that a queue has not heard of."""
        found = [session for c in self.connections.all() for session in c.sessions()]
        return found + self.local.sessions()

    # --- ordered topics --------------------------------------------------------------------

    @property
    def topic_parts(self) -> TopicParts:
        """Returns the parts that serve ordered topics; made for the first that asks."""
        if self._topic_parts is None:
            import_late("convoymq.broker.topic_parts")
            from convoymq.broker.topic_parts import TopicParts

            self._topic_parts = TopicParts(
                self, self._clock, self._loop.call_soon, self._tasks.spawn
            )
        return self._topic_parts

    @property
    def known_topic_parts(self) -> TopicParts | None:
        """Returns the parts that serve ordered topics; None as long as nobody needed them."""
        return self._topic_parts

    def topic_seals(self) -> tuple[int, int]:
        """Returns how many partitions this node had sealed from outside, and how many partitions
        have not said where they end."""
        if self._topic_parts is None:
            return 0, 0
        topics = (topic for v in self.metadata.tree.vhosts.values() for topic in v.topics.values())
        unknown = sum(len(topic.state.unknown_ends()) for topic in topics)
        return self._topic_parts.controller.external_seals, unknown

    @property
    def topics(self) -> TopicAdmin:
        """Returns the administration of ordered topics."""
        return self.topic_parts.admin

    def _has_topics(self) -> bool:
        return any(vhost.topics for vhost in self.metadata.tree.vhosts.values())

    # --- start, rounds, stop ---------------------------------------------------------------

    async def start(self) -> None:
        """Opens the queues that the tree knows, and follows it from now on."""
        # Also of nodes that are linked and will be in the tree in a moment.
        self._incarnations |= self.host.incarnations
        self.metadata.watch(self._on_change)
        if self._has_topics():
            self.topic_parts.on_change(Change(ChangeKind.RESTORED))
        self._reconcile()
        while self._reconciling:
            await asyncio.sleep(0)
        self._tick()
        self._tasks.spawn(self.cluster.learn_alarms())
        if self._make_members is not None:
            self.membership.manager = self._make_members(self)

    async def stop(self, traces_timeout_s: float = 3.0) -> None:
        """Ends what runs; edges have closed their connections. Waits for the files of traces."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        run_each(self._hosts.values(), lambda host: host.stop(), pass_on)
        if self.traces is not None:
            self.traces.stop()
            await self._loop.run_in_executor(None, self.traces.join, traces_timeout_s)

    def _want_round(self) -> None:
        self.round_due = True
        self._wake()

    def end_of_round(self) -> None:
        """Seals the open batches of queues that are kept on one node."""
        self.round_due = False
        run_each(self._hosts.values(), lambda host: host.end_of_round(), pass_on)

    def _tick(self) -> None:
        self._timer = self._clock.call_later(TICK_MS, self._tick)
        self.local.tick()
        self.cluster.sampler.tick()
        if self.traces is not None:
            self.traces.tick()
        self._absent_nodes.tick()
        self.access.tick()
        self.maintenance.tick()
        self.reconciliation.tick()
        self.moves.tick()
        self.migrations.tick()
        if self._topic_parts is not None:
            self._topic_parts.tick()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(callback)

    # --- other nodes -----------------------------------------------------------------------

    def _incarnation_of(self, node: int) -> int:
        # A restart may be known by its link before it is in the tree; without a link, by the tree.
        tree = self.metadata.tree.incarnations
        return max(tree.get(node, 0), self._incarnations.get(node, 0))

    def on_node_up(self, node: int, incarnation: int) -> None:
        """Another node is linked."""
        self._incarnations[node] = max(incarnation, self._incarnations.get(node, 0))
        self._absent_nodes.on_node_up(node)
        self.local.on_node_up(node)
        self.route_versions.bump()
        self.alarms.on_node_up(node)
        self.cluster.sampler.on_node_up(node)
        self.reconciliation.trigger()

    def on_node_down(self, node: int, *, definite: bool = False) -> None:
        """Another node is not linked any more; `definite`: its process is known to be gone."""
        self.local.on_node_down(node, definite=definite)
        self.route_versions.bump()
        self.alarms.on_node_down(node)
        self.cluster.sampler.on_node_down(node, definite=definite)
        self.reconciliation.trigger()
        if definite:
            self._absent_nodes.on_node_gone(node)
            # What was linked last: a later process would not be known yet.
            self._ended[node] = self.host.incarnation_of(node)
            if self._topic_parts is not None:
                self._topic_parts.coordinators.look_for_dead()

    def has_ended(self, node: int, incarnation: int) -> bool:
        """Returns whether a node's process of an incarnation is known to have ended: a later one is
        in the tree, or it said goodbye, or ran on this machine and does not any more."""
        later = self.metadata.tree.incarnations.get(node, 0)
        return incarnation < later or incarnation <= self._ended.get(node, 0)

    def on_suspect(self, node: int) -> None:
        """Another node is silent: its consumers get nothing new."""
        self.local.on_suspect(node)

    def on_unsuspect(self, node: int) -> None:
        """Another node speaks again, and nothing was lost."""
        self.local.on_node_up(node)
        self.route_versions.bump()

    def _used_vhosts(self) -> set[str]:
        return {*self.metadata.tree.vhosts, *(each.vhost for each in self.connections.all())}

    # --- following the tree ----------------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        self.route_versions.on_change(change)
        self.route_counts.on_change(change)
        due = self.local.on_change(change)
        self.reconciliation.on_change(change)
        self.migrations.on_change(change)
        if change.kind is ChangeKind.TOPIC or (
            change.kind in (ChangeKind.RESTORED, ChangeKind.POLICIES) and self._has_topics()
        ):
            self.topic_parts.on_change(change)
        if change.kind in (ChangeKind.OTHER, ChangeKind.RESTORED):
            self.maintenance.tick()
            self.firehose.follow()
        # Whoever hears of a queue may look it up at once, and look-ups open nothing.
        self.local.open_new(change)
        self.local_topics.on_change(change)
        # What changes within a virtual host revokes no connection: bindings come and go.
        may_revoke = change.kind in (ChangeKind.OTHER, ChangeKind.RESTORED)
        may_revoke = may_revoke and change.vhost not in self.metadata.tree.vhosts
        if may_revoke and not self._closing_revoked:
            self._closing_revoked = True
            self._loop.call_soon(self._close_revoked_connections)
        if due and not self._reconciling:
            self._reconciling = True
            self._loop.call_soon(self._reconcile)

    def _close_revoked_connections(self) -> None:
        self._closing_revoked = False
        if not self.local.is_behind:
            self.access.close_revoked_connections()

    def _reconcile(self) -> None:
        """Makes this node's queues be what the tree says."""
        self._reconciling = False
        if self.local.reconcile() and not self._reconciling:
            self._reconciling = True
            self._loop.call_soon(self._reconcile)


class _TopicFence:
    """See `queues.driver.Fence`. The parts that serve topics are made with the first of them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def follow(self, queue: GroupQueue) -> None:
        """See `Fence`."""
        self._broker.topic_parts.fence.follow(queue)

    def forget(self, queue: GroupQueue) -> None:
        """See `Fence`."""
        self._broker.topic_parts.fence.forget(queue)


__all__ = ["Broker"]
