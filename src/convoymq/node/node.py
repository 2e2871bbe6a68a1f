"""Puts one node together: storage, replicas, links, the broker and its edges, on one loop.

A round is one turn of the event loop that had work: readable sockets are parsed, then
`_end_of_round` seals and replicates entries, applies what is committed, and writes what came of it
(ADR 0001).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from operator import call
from typing import TYPE_CHECKING

import structlog

from convoymq import __version__
from convoymq.edges.acceptor import SharedPorts
from convoymq.edges.edge import NodeParts
from convoymq.edges.registry import import_edges, open_edges
from convoymq.groups.host import ReplicaHost
from convoymq.groups.sessions import SessionNumbers
from convoymq.groups.settings import host_config
from convoymq.kernels.sockets import trim_malloc
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.members import MembershipManager
from convoymq.metadata.store import MetadataSink
from convoymq.model.config import Address, Config
from convoymq.model.errors import (
    BrokerError,
    InvariantViolated,
    Misuse,
    ReplicaStopped,
    Unavailable,
)
from convoymq.model.rounds import run_each
from convoymq.node import logs
from convoymq.node.admin_socket import AdminSocket, Progress
from convoymq.node.cluster_entry import ClusterEntry
from convoymq.node.data_directory import DataDirectory
from convoymq.node.frozen_heap import FrozenHeap
from convoymq.node.idle_memory import IdleMemory
from convoymq.node.loop_clock import LoopClock
from convoymq.node.notes import log_note
from convoymq.node.operator_access import OperatorAccess
from convoymq.node.recovery import Recovery
from convoymq.node.resources import ResourceWatch, watermarks
from convoymq.node.storage_shell import StorageShell
from convoymq.replication import versions as supported
from convoymq.storage.files import RealDirectory
from convoymq.storage.store import Storage
from convoymq.storage.threads import DiskPace
from convoymq.storage.types import StorageConfig, StorageFault, SyncMethod
from convoymq.transport.clocks import until_beat, wall_and_boot_ms
from convoymq.transport.control import ControlPlane
from convoymq.transport.dispatch import FrameDispatch
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.links import Links
from convoymq.transport.listening import addresses_of

if TYPE_CHECKING:
    import ssl

    from convoymq.broker.facade import Broker
    from convoymq.edges.edge import Edge
    from convoymq.metadata.commands import Command
    from convoymq.trace.recorder import Traces

TICK_S = 0.1
SLEPT_NS = 15_000
"""A round that begins so long after the one before was waited for."""
STORAGE_TICKS = 3
CLOCK_TICKS = 10
MEMBER_TICKS = 2
REGISTER_TIMEOUT_S = 10.0
CLIENTS_LEAVE_S = 1.0
"""Longest time that a stopping node waits for its clients to answer its close."""
TRACES_SHARE = 0.6
"""Of the time of an orderly stop. Files of traces that are not complete then are completed at the
next start."""
EXIT_FAULT = 70
CONGESTED_SHARE = 4
"""Other nodes are asked to send less while more waits for the disk than that part of what a link
may queue."""


class Node:
    """One node. `await run()` starts it, serves until `stop()` or a signal, and closes it."""

    def __init__(self, config: Config, output: logs.LogOutput | None = None) -> None:
        self.config = config
        self._output = output or logs.LogOutput()
        self.id = config.node.id
        self.log = structlog.get_logger().bind(node=self.id)
        self.started_ms = 0
        self.ready = asyncio.Event()
        """Set when clients are served."""
        self.usable = False
        self._stop = asyncio.Event()
        self._failure: BrokerError | None = None
        """Reason why the node ends by itself."""
        self._scheduled = False
        self._reading = False
        """A connection is being read, which ends the round itself."""
        self._ended_ns = 0
        self._closed = False
        self._ticks = 0
        self.heap = FrozenHeap()
        self.memory = IdleMemory()
        self._timer: asyncio.TimerHandle | None = None
        self.resources: ResourceWatch | None = None
        self.edges: tuple[Edge, ...] = ()
        self.ports: SharedPorts | None = None
        self._steps: tuple[Callable[[], None], ...] = ()
        """Steps of every round, in order."""
        self.broker: Broker | None = None
        self.watermarks = watermarks(config)
        self.frames = FrameDispatch(self._on_frame_failed, self._drop_link, holding=True)
        self.on_frame = self.frames.on_frame

    # -- start and end ----------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until told to stop.

        Raises:
            BrokerError, OSError: the node cannot start; the text says why.
        """
        self._loop = asyncio.get_running_loop()
        # Looked up once: they are used in every round.
        self._call_soon = self._loop.call_soon
        self._round = self._end_of_round
        self._loop.set_exception_handler(self._on_fault)
        self.clock = LoopClock(self._loop)
        self.started_ms = self.clock.now_ms()
        self.data = DataDirectory(self.config.node.data_dir, self.id, supported.announced())
        try:
            self._watch_signals()
            self._open_storage()
            await self._serve()
        finally:
            self.data.close()

    @property
    def identity(self) -> NodeIdentity:
        """Returns the identity of this node."""
        return self.data.identity

    @property
    def shown_name(self) -> str:
        """Returns the node's name for people."""
        return self.config.node_name

    def switch_cluster(self, cluster: str, delay_s: float) -> None:
        """Gives the cluster another id, after a recovery; links are made anew after the delay."""
        former = self.data.identity
        self.data.recover(cluster, (*former.former, former.cluster))
        self.storage.set_identity(cluster, self.data.identity.former)
        self._loop.call_later(delay_s, lambda: self.links.set_identity(self.data.identity))

    async def _describe_groups(
        self, _request: dict[str, object], _progress: Progress
    ) -> list[dict[str, object]]:
        """Returns a row for each replica on this node, with the hash of its state."""
        found = []
        for group, replica in sorted({**self.host.groups, **self.host.stopped}.items()):
            status = self.host.status(group)
            found.append(
                {
                    "group": group,
                    "role": status.role,
                    "leader": status.leader,
                    "term": status.term,
                    "applied": status.last_applied,
                    "last": status.last_index,
                    "voters": status.voters,
                    "learners": status.learners,
                    "kind": replica.machine.KIND,
                    "version": replica.machine.version,
                    "hash": replica.machine.state_hash(),
                    "stopped": status.stopped,
                }
            )
        return found

    def stop(self) -> None:
        """Asks for an orderly end."""
        self._stop.set()

    def fail(self, error: BrokerError) -> None:
        """Ends the node, which cannot go on; `run` raises the error."""
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """An error in a callback that nobody expected."""
        error = context.get("exception")
        self.log.error("node.fault", message=context.get("message"), exc_info=error)
        if isinstance(error, InvariantViolated):
            # What this node believes is wrong: the others must not hear more of it.
            os._exit(EXIT_FAULT)

    def _watch_signals(self) -> None:
        actions = {
            signal.SIGTERM: self._stop.set,
            signal.SIGINT: self._stop.set,
            signal.SIGHUP: self._reopen_log,
        }
        for number, action in actions.items():
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                self._loop.add_signal_handler(number, action)

    def _reopen_log(self) -> None:
        """The log file was moved away: goes on in a new one under its name."""
        try:
            self._output.reopen()
        except OSError as error:
            self.log.error("log.not_reopened", file=self._output.path, reason=str(error))
            return
        self.log.info("log.reopened", file=self._output.path)

    def _open_storage(self) -> None:
        raft = self.config.raft
        storage_config = StorageConfig(
            wal_max_size_bytes=raft.wal_max_size_bytes,
            wal_sync_method=SyncMethod(raft.wal_sync_method),
            wal_preallocate=raft.wal_preallocate,
            segment_max_entries=raft.segment_max_entries,
            mem_table_max_bytes=raft.mem_table_max_bytes,
        )
        directory = RealDirectory(self.data.path / "log")
        self._shell = StorageShell(
            self._loop,
            storage_config.wal_sync_method,
            self.wake,
            inline=raft.wal_inline_flush,
        )
        self.storage = Storage(directory, self._shell.flusher, self._shell.worker, storage_config)
        wal = self.storage.wal
        self.storage.pace = DiskPace(
            self._shell.worker,
            logged=lambda: wal.bytes_written,
            pressed=lambda: self.storage.wal_files_waiting > 1,
        )
        self.storage.set_identity(self.data.cluster, self.data.identity.former)
        report = self.storage.recover()
        self.storage.give_back = trim_malloc
        self.storage.on_blocked = self._on_storage_blocked
        for damage in report.damages:
            self.log.error("storage.damaged", file=damage.file, offset=damage.offset,
                           group=damage.group, reason=damage.reason)  # fmt: skip
        for note in report.notes:
            self.log.warning("storage.repaired", note=note)
        if report.torn_tail is not None:
            self.log.info("storage.torn_tail", file=report.torn_tail[0], offset=report.torn_tail[1])
        self.log.info("storage.recovered", groups=report.groups, entries=report.entries)

    async def _serve(self) -> None:
        config = self.config
        self.links = Links(
            config.cluster,
            config.link_address,
            self.data.identity,
            self,
            self.wake,
            self.log,
            self.run_input,
            supports=supported.announced(),
            backlog=config.listeners.backlog,
        )
        self.links.is_congested = self._is_congested
        self.clock.cluster = self.links.clock
        self.control = ControlPlane(self.id, self.links)
        self.frames.own("control", self.control.on_frame)
        self.host = ReplicaHost(
            node=self.id,
            incarnation=self.data.incarnation,
            storage=self.storage,
            transport=self.links,
            clock=self.clock,
            config=host_config(config),
            on_dirty=self.wake,
        )
        self.frames.own("groups", self.host.on_frame, self.host.on_frame_failed)
        # Entries leave for the followers before anything is applied: they flush meanwhile.
        self.host.after_seal = self.links.flush
        self._list_steps()
        self.host.on_note = self._on_note
        self.host.on_stopped = self._on_replica_stopped
        self.host.versions = dict(self.data.versions)
        self.host.on_version = self.data.raise_version
        self.entry = ClusterEntry(
            config=config.cluster,
            data=self.data,
            storage=self.storage,
            links=self.links,
            control=self.control,
            host=self.host,
            clock=self.clock,
            log=self.log,
            open_group=self._open_metadata,
            fail=self.fail,
        )
        self.recovery = Recovery(self)
        self.operator = OperatorAccess(self, self.control)
        admin = AdminSocket(
            self.data.path,
            {
                "groups": self._describe_groups,
                "recover.plan": self.recovery.plan,
                "recover.execute": self.recovery.execute,
                "recover.history": self.recovery.history,
                **self.operator.handlers,
            },
        )
        import_edges()
        self._tick()
        async with self.links, admin:
            work = asyncio.ensure_future(self._start_and_wait())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            work.cancel()
            (failure,) = await asyncio.gather(work, return_exceptions=True)
            await self._close()
            if self._failure is not None:
                raise self._failure
            if isinstance(failure, Exception):
                raise failure

    def _is_congested(self) -> bool:
        """Returns whether so much waits for the disk that other nodes should send less."""
        waiting = self.storage.backlog_bytes
        if self.broker is not None:
            waiting += self.broker.local.backlog_bytes()
        return waiting > self.config.cluster.link_backlog_max_bytes // CONGESTED_SHARE

    async def _start_and_wait(self) -> None:
        await self._form()
        await self._open_broker()
        self._open_edges()
        await self._listen()
        assert self.broker is not None
        assert self.ports is not None
        await self.broker.maintenance.attach(self.ports)
        self.usable = True
        self.heap.begin()
        self.ready.set()
        after_ms = self.clock.now_ms() - self.started_ms
        self.log.info("node.ready", name=self.config.node_name, after_ms=after_ms)
        self.resources = ResourceWatch(
            config=self.config,
            broker=self.broker,
            path=self.data.path,
            watermarks=self.watermarks,
            is_storage_blocked=lambda: self.storage.blocked is not None,
            log=self.log,
        )
        self.resources.look()
        await self._start_edges(after_ready=True)
        self.memory.release()
        await self._stop.wait()

    async def _close(self) -> None:
        self.log.info("node.stopping")
        self.usable = False
        timeout_s = max(0.1, self.config.node.stop_timeout_ms / 1000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # Leaders elsewhere first: clients that reconnect shall find everything served.
                self.host.transfer_all()
                self._end_of_round()
                await self._until(lambda: not self._leads_with_others(), 1.0)
                await self._stop_edges(after_ready=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLIENTS_LEAVE_S):
                        if self.ports is not None:
                            self.ports.stop()
                        await self._stop_edges(after_ready=False)
                if self.broker is not None:
                    await self.broker.stop(TRACES_SHARE * timeout_s)
                await self.control.close()
                self._end_of_round()
                closed = asyncio.Event()
                self.storage.close(closed.set)
                await closed.wait()
        self._closed = True
        self.frames.close()
        self.entry.close()
        if self._timer is not None:
            self._timer.cancel()
        if self.resources is not None:
            self.resources.stop()
        # Only now: what this process answers for is closed.
        await self.links.goodbye()
        self._shell.close()
        self.log.info("node.stopped")

    def _leads_with_others(self) -> bool:
        return any(
            replica.is_leader and any(self.links.is_connected(m) for m in replica.members)
            for replica in self.host.groups.values()
        )

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = self._loop.time() + seconds
        while not condition():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    # -- rounds -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Somebody has work for the end of this round."""
        if not self._scheduled:
            self._scheduled = True
            if not self._reading:
                self._call_soon(self._round)

    def run_input(self, read: Callable[[], None]) -> None:
        """Reads a connection, or does what a timer is for. When the loop has slept before, nothing
        else is likely to be ready: the round ends here instead of in a turn of the loop of its
        own."""
        due = self._scheduled
        if due:
            read()
            return
        self._reading = True
        try:
            read()
        finally:
            self._reading = False
            if self._scheduled:
                if time.monotonic_ns() - self._ended_ns > SLEPT_NS:
                    self._end_of_round()
                else:
                    self._call_soon(self._round)

    def _list_steps(self) -> None:
        """Queues with a home first: what they send leaves with the same flush of the links."""
        broker = () if self.broker is None else (self.broker.end_of_round,)
        flushes = [edge.flush for edge in self.edges if edge.flush is not None]
        replicas = (self.host.end_of_round, self.links.flush)
        self._steps = (*broker, *replicas, *flushes, self._release_deferred)

    def _end_of_round(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        run_each(self._steps, call, self._on_step_failed)
        self._ended_ns = time.monotonic_ns()

    def _release_deferred(self) -> None:
        if self.host.deferred.release_due:
            self.host.deferred.release()
            self.links.flush()

    def _on_step_failed(self, step: Callable[[], None], error: Exception) -> None:
        """A step of a round failed outside of its members, which are contained one by one."""
        self.log.error("node.fault", message=f"in {step!r}", exc_info=error)
        if step == self.host.end_of_round:
            # The storage, or a replica that could not be stopped: the others must take over.
            self.fail(ReplicaStopped(f"a fault of this node in its replicas: {error!r}"))

    def _tick(self) -> None:
        delay_s = until_beat(self._loop.time(), TICK_S)
        self._timer = self._loop.call_later(delay_s, self.run_input, self._tick)
        self.clock.settle()
        self.host.tick()
        self._ticks += 1
        if self._ticks % STORAGE_TICKS == 0:
            self.storage.tick()
            if self.usable:
                self.heap.watch(len(self.host.groups), self.host.removals)
        if self._ticks % CLOCK_TICKS == 0:
            self._watch_clock()
            self.entry.leader_watch.tick()
            self.memory.watch(self._activity())
        if self._ticks % MEMBER_TICKS == 0 and self.broker is not None:
            manager = self.broker.membership_manager
            if manager is not None:
                manager.tick()

    def _watch_clock(self) -> None:
        clock = self.links.clock
        if clock.tick(*wall_and_boot_ms()):
            log = self.log.error if clock.is_skewed else self.log.info
            log("clock.skewed" if clock.is_skewed else "clock.in_step", skew_ms=clock.skew_ms)

    def _on_note(self, event: str, fields: dict[str, object]) -> None:
        log_note(self.log, event, fields)

    def _on_replica_stopped(self, group: int, reason: str) -> None:
        """Without the tree of users and queues a node can serve nobody."""
        if group == 0:
            self.fail(ReplicaStopped(f"the replica of the metadata group has stopped: {reason}"))

    # -- links ------------------------------------------------------------------------------

    def _drop_link(self, node: int, reason: str) -> None:
        self._call_soon(self.links.drop, self.links.peers[node], reason)

    def _on_frame_failed(self, node: int, data: bytes, error: Exception) -> None:
        if isinstance(error, BrokerError | ValueError):
            self.log.error("link.bad_frame", peer=node, type=data[4], reason=str(error))
        else:
            self.log.error("node.fault", message=f"in a frame of node {node}", exc_info=error)

    def on_up(self, node: int, incarnation: int) -> None:
        """Another node is linked."""
        hello = self.links.hello_of(node)
        self.entry.poke()
        self.host.on_link_up(node, incarnation, hello.supports if hello is not None else None)
        if self.broker is not None:
            self.broker.on_node_up(node, incarnation)
        self.wake()

    def on_down(self, node: int, definite: bool) -> None:
        """Another node is not linked any more."""
        self.host.on_link_down(node, definite=definite)
        self.frames.on_node_down(node)
        self.control.on_node_down(node)
        if self.broker is not None:
            self.broker.on_node_down(node, definite=definite)
        self.wake()

    def on_room(self, node: int) -> None:
        """The link to another node takes bulk again."""
        self.host.on_room(node)
        self.wake()

    def on_suspect(self, node: int) -> None:
        """Another node is silent."""
        self.host.on_suspect(node)
        if self.broker is not None:
            self.broker.on_suspect(node)
        self.wake()

    def on_unsuspect(self, node: int) -> None:
        """Another node speaks again."""
        self.host.on_unsuspect(node)
        if self.broker is not None:
            self.broker.on_unsuspect(node)
        self.wake()

    def on_rejected(self, text: str) -> None:
        """Another process has this node's number."""
        self.fail(Misuse(text))

    # -- the cluster ------------------------------------------------------------------------

    async def _form(self) -> None:
        """Opens the metadata group: recovered, newly formed with the peers, or joined."""
        self.machine = MetadataMachine()
        self._traces = self._make_traces()
        self._sink = MetadataSink()
        await self.entry.enter()
        self._new_session = SessionNumbers(self.id, self.data.incarnation, self._live_sessions)
        self.store = AsyncMetadataStore(
            self.machine, self.host.builder_of(0), self._new_session(), self.clock
        )
        self._sink.attach(self.store)
        self.entry.desk.store = self.store
        self.wake()

    def _open_metadata(
        self, members: tuple[int, ...], *, hint: int = 0, learner: bool = False, wiped: bool = False
    ) -> None:
        self.host.create_group(
            0,
            sorted(members),
            self.machine,
            self._sink,
            leader_hint=hint,
            learner=learner,
            wiped=wiped,
        )

    def _live_sessions(self) -> list[int]:
        broker = self.broker
        return [self.store.session, *(broker.live_sessions() if broker is not None else [])]

    # -- the broker -------------------------------------------------------------------------

    async def _open_broker(self) -> None:
        from convoymq.metadata.access import SHA256, hash_sha256
        from convoymq.metadata.commands import Bootstrap, PutNode

        await self.store.wait_for_leader(600.0)
        defaults = self.config.defaults
        bootstrap = Bootstrap(
            vhost=defaults.vhost,
            user=defaults.user,
            password_hash=hash_sha256(defaults.password.encode()),
            algorithm=SHA256,
            cluster_name=self.config.cluster.name,
            cluster_id=self.data.cluster,
        )
        if not self.machine.vhosts and self.store.leader == self.id:
            await self._persist(bootstrap)
        identity = self.data.identity
        is_newest = await self._persist(
            PutNode(
                id=self.id,
                name=self.config.node_name,
                incarnation=identity.incarnation,
                addresses=self._addresses(),
                directory=identity.directory,
                release=__version__,
                supports=supported.announced(),
            )
        )
        if not is_newest:
            raise Misuse(
                f"{self.data.path} is an older copy: the cluster knows a later incarnation of node "
                f"{self.id} than {identity.incarnation}; empty the directory"
            )
        self.entry.registered()
        if not self.machine.vhosts:
            await self._persist(bootstrap)
        if self.machine.cluster_id not in (identity.cluster, *identity.former):
            raise Misuse(
                f"{self.data.path} belongs to cluster {identity.cluster}, but its log to cluster "
                f"{self.machine.cluster_id}"
            )
        self.broker = self._make_broker()
        self.broker.local.lost_groups = self.data.lost_groups
        self._list_steps()
        self.storage.limit_suspects(self.machine.next_group - 1)
        await self.broker.start()
        self.frames.open()
        self.broker.follow_members(
            MembershipManager(
                self.broker,
                self.host,
                self.store,
                self.links,
                self._stop.set,
                self.data.identity.directory,
            )
        )

    async def _persist(self, command: Command) -> object:
        while True:
            try:
                return await self.store.execute(command, REGISTER_TIMEOUT_S)
            except Unavailable as error:
                self.log.warning("cluster.not_usable", reason=str(error))

    def _addresses(self) -> dict[str, str]:
        config = self.config
        found = {"link": config.cluster.advertise or str(config.link_address)}
        for name, addresses in (
            ("amqp", config.listeners.tcp),
            ("amqps", config.listeners.ssl),
            ("http", config.management.tcp),
            ("metrics", config.management.prometheus),
        ):
            if addresses:
                first = addresses[0]
                found[name] = str(Address(addresses_of(first.host)[0], first.port))
        return found

    def _make_broker(self) -> Broker:
        from convoymq.broker.facade import Broker
        from convoymq.broker.settings import BrokerSettings, ReconciliationSettings
        from convoymq.kernels.route_cache import RouteCacheVersion

        defaults, reconciliation = self.config.defaults, self.config.reconciliation
        settings = BrokerSettings(
            compatibility=defaults.compatibility,
            default_queue_type=defaults.queue_type,
            quorum_group_size=defaults.quorum_group_size,
            leader_locator=defaults.leader_locator,
            operation_timeout_ms=defaults.operation_timeout_ms,
            publish_register_timeout_ms=defaults.publish_register_timeout_ms,
            leaderless_publish_timeout_ms=defaults.leaderless_publish_timeout_ms,
            leaderless_consumer_timeout_ms=defaults.leaderless_consumer_timeout_ms,
            relaxed_redeclaration=defaults.relaxed_redeclaration,
            permit_transient_queues=defaults.permit_transient_queues,
            permit_global_qos=defaults.permit_global_qos,
            cluster_queues_max=defaults.cluster_queues_max,
            cluster_exchanges_max=defaults.cluster_exchanges_max,
            topic_group_ttl_ms=defaults.topic_group_ttl_ms,
            topic_producer_ttl_ms=defaults.topic_producer_ttl_ms,
            connections_max=self.config.listeners.connections_max,
            certificate_file=self.config.ssl.certfile,
            publish_pending_max_bytes=defaults.publish_pending_max_bytes,
            publish_pending_messages=defaults.publish_pending_messages,
            publish_pending_commands=defaults.publish_pending_commands,
            dead_letter_prefetch=defaults.dead_letter_prefetch,
            dead_letter_confirm_timeout_ms=defaults.dead_letter_confirm_timeout_ms,
            reply_backlog_max_bytes=self.config.cluster.link_backlog_max_bytes // 2,
            loopback_users=self.config.amqp.loopback_users,
            cluster_size_target=self.config.cluster.size_hint,
            reconciliation=ReconciliationSettings(
                enabled=reconciliation.enabled,
                target_group_size=reconciliation.target_group_size or 0,
                auto_remove=reconciliation.auto_remove,
                interval_ms=reconciliation.interval_ms,
                trigger_interval_ms=reconciliation.trigger_interval_ms,
            ),
        )
        return Broker(
            node_id=self.id,
            incarnation=self.data.incarnation,
            host=self.host,
            control=self.control,
            metadata=self.store,
            make_route_version=RouteCacheVersion,
            clock=self.clock,
            open_directory=lambda name: RealDirectory(self.data.path / name),
            new_session=self._new_session,
            wake=self.wake,
            settings=settings,
            stored_groups=lambda: self.storage.logs,
            traces=self._traces,
        )

    def _make_traces(self) -> Traces:
        from convoymq.broker.traces import make_traces

        data, now_us = self.data, self.clock.now_us
        return make_traces(self.config, data.path, self.id, data.incarnation, self.machine, now_us)

    def _open_edges(self) -> None:
        assert self.broker is not None
        parts = NodeParts(
            config=self.config,
            broker=self.broker,
            links=self.links,
            data=self.data,
            watermarks=self.watermarks,
            wake=self.wake,
            run_input=self.run_input,
            activity=self._activity,
        )
        self.edges = tuple(open_edges(parts))
        self._list_steps()
        self.broker.edge_metrics = lambda: [row for edge in self.edges for row in edge.metrics()]

    def _activity(self) -> int:
        # Clients of other nodes are here as what this node logs for them.
        return self.storage.wal.bytes_written + sum(edge.activity() for edge in self.edges)

    async def _listen(self) -> None:
        config = self.config
        await self._start_edges(after_ready=False)
        self.ports = SharedPorts(
            self.edges,
            connections_max=config.listeners.connections_max,
            handshake_timeout_s=config.listeners.handshake_timeout_ms / 1000,
            backlog=config.listeners.backlog,
            run_input=self.run_input,
        )
        context = self._client_tls()
        for addresses, tls in ((config.listeners.tcp, None), (config.listeners.ssl, context)):
            for address in addresses:
                self.ports.add(address.host, address.port, tls)

    def _client_tls(self) -> ssl.SSLContext | None:
        if not self.config.listeners.ssl:
            return None
        # Takes OpenSSL with it, which a node without TLS does not load.
        from convoymq.edges.tls import client_tls

        return client_tls(self.config)

    async def _start_edges(self, *, after_ready: bool) -> None:
        for edge in self.edges:
            if edge.after_ready == after_ready:
                await edge.start()

    async def _stop_edges(self, *, after_ready: bool) -> None:
        await asyncio.gather(
            *(edge.stop() for edge in self.edges if edge.after_ready == after_ready)
        )

    # -- resources --------------------------------------------------------------------------

    def _on_storage_blocked(self, fault: StorageFault | None) -> None:
        if fault is not None:
            self.log.error("storage.blocked", reason=str(fault))
        else:
            self.log.info("storage.unblocked")
        if self.broker is not None:
            self.broker.alarms.set("disk", fault is not None)
