"""Puts one node together on one loop, and takes it apart.

Made in this order: data directory, storage (recovered), links, control plane, replicas, entry into
the cluster; then, with a leader of the metadata group, the registration, the broker, the edges and
their ports. `Node._tie` has what runs in rounds and ticks (`rounds`), and who calls whom back.
Closed in this order (`Node._close`): leaderships, edges, broker, control plane, storage, links.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.registry import import_edges
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.members import MembershipManager
from convoymq.metadata.store import MetadataSink
from convoymq.metadata.voters import MetadataVoters
from convoymq.model.config import Config
from convoymq.model.errors import (
    BrokerError,
    InvariantViolated,
    ReplicaStopped,
)
from convoymq.node import logs
from convoymq.node.admin_socket import AdminSocket
from convoymq.node.cluster_entry import ClusterEntry
from convoymq.node.data_directory import DataDirectory
from convoymq.node.frozen_heap import FrozenHeap
from convoymq.node.idle_memory import IdleMemory
from convoymq.node.live_settings import LiveSettings
from convoymq.node.loop_clock import LoopClock
from convoymq.node.notes import log_note
from convoymq.node.operator_access import OperatorAccess
from convoymq.node.peers import Peers
from convoymq.node.process_info import node_info, place_of
from convoymq.node.recovery import Recovery
from convoymq.node.resources import ResourceWatch, watermarks
from convoymq.node.rounds import Rounds, Ticks
from convoymq.node.served_edges import ServedEdges
from convoymq.node.service_manager import ServiceManager
from convoymq.node.storage_shell import open_storage
from convoymq.replication import versions as supported
from convoymq.shells.groups.host import ReplicaHost
from convoymq.shells.groups.sessions import SessionNumbers
from convoymq.storage.files import RealDirectory
from convoymq.storage.types import StorageFault
from convoymq.transport.clocks import wall_and_boot_ms
from convoymq.transport.control import ControlPlane
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.links import Links

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.broker.spans import Spans
    from convoymq.edges.edge import Edge
    from convoymq.node.supervised import Supervised
    from convoymq.queues.interface import Row
    from convoymq.trace.recorder import Traces

STORAGE_TICKS = 3
CLOCK_TICKS = 10
MEMBER_TICKS = 2
CERTIFICATE_TICKS = 100
CLIENTS_LEAVE_S = 1.0
"""Longest time that a stopping node waits for its clients to answer its close."""
TRACES_SHARE = 0.6
"""Of the time of an orderly stop. Files of traces that are not complete then are completed at the
next start."""
CONGESTED_SHARE = 4
"""Other nodes are asked to send less while more waits for the disk than that part of what a link
may queue."""


class Node:
    """One node. `await run()` starts it, serves until `stop()` or a signal, and closes it."""

    def __init__(
        self,
        config: Config,
        output: logs.LogOutput | None = None,
        supervised: Supervised | None = None,
        load: Callable[[], Config] | None = None,
    ) -> None:
        """
        Args:
            supervised: what the node has in common with other processes of its machine.
            load: reads the configuration again, from where it came.
        """
        self.config = config
        self._supervised = supervised
        self.id = config.node.id
        self.log = structlog.get_logger().bind(node=self.id)
        self.started_ms = 0
        self.ready = asyncio.Event()
        """Set when clients are served."""
        self.usable = False
        self._stop = asyncio.Event()
        self._failure: BrokerError | None = None
        """Reason why the node ends by itself."""
        self.heap = FrozenHeap()
        self.memory = IdleMemory()
        self.resources: ResourceWatch | None = None
        self.served: ServedEdges | None = None
        self.edges: tuple[Edge, ...] = ()
        self.broker: Broker | None = None
        self.watermarks = watermarks(config)
        self.live = LiveSettings(
            config,
            load,
            marks=self.watermarks,
            output=output or logs.LogOutput(),
            admission=lambda: self.links.admission,
        )
        self.manager = ServiceManager(channel=supervised.channel if supervised else None)

    # -- start and end ----------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until told to stop.

        Raises:
            BrokerError, OSError: the node cannot start; the text says why.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_fault)
        self.rounds = Rounds(self._loop, self.log, self.fail)
        self.ticks = Ticks(self._loop, self.log, self.rounds.run_input)
        self.peers = Peers(self.log, self.rounds.wake, self.fail, self._loop.call_soon)
        self.clock = LoopClock(self._loop)
        self.started_ms = self.clock.now_ms()
        self.data = DataDirectory(self.config.node.data_dir, self.id, supported.announced())
        try:
            self._watch_signals()
            if self.config.log.audit_file:
                self.live.audit = logs.LogOutput(self.config.log.audit_file)
            self._shell, self.storage = open_storage(
                self._loop, self.config.raft, self.data, self.rounds.wake, self.log
            )
            await self._serve()
        finally:
            if self.live.audit is not None:
                with contextlib.suppress(OSError):  # What a full disk did not take is lost.
                    self.live.audit.close()
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

    async def force_boot(self) -> list[Row]:
        """Has mirrored queues go on without masters that do not run; a row for each."""
        assert self.broker is not None
        return await self.broker.membership.force_boot()

    def stop(self) -> None:
        """Asks for an orderly end."""
        self._stop.set()

    def fail(self, error: BrokerError) -> None:
        """Ends the node, which cannot go on; `run` raises the error."""
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Logs an error that a callback raised."""
        logs.report_fault(self.log, context.get("message"), context.get("exception"))

    def _watch_signals(self) -> None:
        actions = {
            signal.SIGTERM: self._stop.set,
            signal.SIGINT: self._stop.set,
            signal.SIGHUP: self.live.on_hangup,
        }
        for number, action in actions.items():
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                self._loop.add_signal_handler(number, action)
        if self._supervised is not None:
            # The supervisor says nothing: its channel is readable when it has ended.
            channel = self._supervised.channel.fileno()
            self._loop.add_reader(channel, self._on_supervisor_gone, channel)

    def _on_supervisor_gone(self, channel: int) -> None:
        self._loop.remove_reader(channel)
        self.log.warning("node.supervisor_gone")
        self.stop()

    async def _serve(self) -> None:
        config = self.config
        self.links = Links(
            config.cluster,
            config.link_address,
            self.data.identity,
            self.peers,
            self.rounds.wake,
            self.log,
            self.rounds.run_input,
            supports=supported.announced(),
            backlog=config.listeners.backlog,
        )
        self.control = ControlPlane(self.id, self.links)
        self.host = ReplicaHost(
            node=self.id,
            incarnation=self.data.incarnation,
            storage=self.storage,
            transport=self.links,
            clock=self.clock,
            config=config.raft,
            on_dirty=self.rounds.wake,
        )
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
        self._tie()
        self.recovery = Recovery(self)
        self.operator = OperatorAccess(self, self.control)
        admin = AdminSocket(
            self.data.path,
            {
                "recover.plan": self.recovery.plan,
                "recover.execute": self.recovery.execute,
                "recover.history": self.recovery.history,
                **self.operator.handlers,
            },
        )
        import_edges()
        self.ticks.tick()
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
            if isinstance(failure, Exception | InvariantViolated):
                raise failure

    def _tie(self) -> None:
        """Ties the parts that call each other back, and says what runs in rounds and ticks.

        Below them `ReplicaHost` ties the storage (`__init__`) and open batches (`_follow`), and
        each `Replica` its log (`__init__`).
        """
        self.storage.on_blocked = self._on_storage_blocked
        self.links.is_congested = self._is_congested
        self.clock.cluster = self.links.clock
        host = self.host
        # Entries leave for the followers before anything is applied: they flush meanwhile.
        host.after_seal = self.links.flush
        host.on_note = self._on_note
        host.on_stopped = self._on_replica_stopped
        host.on_version = self.data.raise_version
        host.versions = dict(self.data.versions)
        self.peers.attach(self.links, self.control, host, self.entry)
        self.rounds.carry_out(host, self.links)
        every = self.ticks.every
        every(1, self.clock.settle)
        every(1, host.tick)
        every(1, self.manager.beat)
        every(STORAGE_TICKS, self.storage.tick)
        every(STORAGE_TICKS, self._watch_heap)
        every(CLOCK_TICKS, self._watch_clock)
        every(CLOCK_TICKS, self.entry.leader_watch.tick)
        every(CLOCK_TICKS, self._watch_memory)
        every(CERTIFICATE_TICKS, self.live.renew_tls)
        every(MEMBER_TICKS, self._watch_members)

    def _is_congested(self) -> bool:
        """Returns whether so much waits for the disk that other nodes should send less."""
        waiting = self.storage.backlog_bytes
        if self.broker is not None:
            waiting += self.broker.local.backlog_bytes()
        return waiting > self.config.cluster.link_backlog_max_bytes // CONGESTED_SHARE

    async def _start_and_wait(self) -> None:
        self.manager.starting("Looks for the other nodes")
        await self._form()
        self.manager.starting("Opens queues")
        await self._open_broker()
        assert self.broker is not None
        self.served = ServedEdges(
            self.config, self.broker, self.rounds, self._activity, self._supervised
        )
        self.edges = self.served.all
        self.rounds.carry_out(self.host, self.links, self.broker, self.edges)
        await self.broker.maintenance.attach(
            await self.served.begin(), revive=self.config.node.revive_at_start
        )
        self.usable = True
        self.heap.begin()
        self.ready.set()
        self.manager.ready()
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
        await self.served.begin_late()
        self.memory.release()
        await self._stop.wait()

    async def _close(self) -> None:
        self.log.info("node.stopping")
        self.manager.stopping()
        self.usable = False
        timeout_s = max(0.1, self.config.node.stop_timeout_ms / 1000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # Leaderships move first, so that clients that reconnect find every queue served.
                self.host.transfer_all()
                self.rounds.end()
                await self._until(lambda: not self._leads_with_others(), 1.0)
                if self.served is not None:
                    await self.served.end_late()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(CLIENTS_LEAVE_S):
                            await self.served.end()
                if self.broker is not None:
                    await self.broker.stop(TRACES_SHARE * timeout_s)
                    if self._spans is not None:
                        await asyncio.to_thread(self._spans.close)
                await self.control.close()
                self.rounds.end()
                closed = asyncio.Event()
                self.storage.close(closed.set)
                await closed.wait()
        self.rounds.close()
        self.peers.frames.close()
        self.entry.close()
        self.ticks.close()
        if self.resources is not None:
            self.resources.stop()
        # The last step: other nodes take this process for ended.
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

    # -- watching ---------------------------------------------------------------------------

    def _watch_heap(self) -> None:
        if self.usable:
            self.heap.watch(len(self.host.groups), self.host.removals)

    def _watch_clock(self) -> None:
        clock = self.links.clock
        if clock.tick(*wall_and_boot_ms()):
            log = self.log.error if clock.is_skewed else self.log.info
            log("clock.skewed" if clock.is_skewed else "clock.in_step", skew_ms=clock.skew_ms)

    def _watch_memory(self) -> None:
        self.memory.watch(self._activity())

    def _watch_members(self) -> None:
        if self.broker is not None:
            self.broker.membership.tick()

    def _on_note(self, event: str, fields: dict[str, object]) -> None:
        log_note(self.log, event, fields)

    def _on_replica_stopped(self, group: int, reason: str) -> None:
        """Ends the node when its replica of the tree has stopped: it can serve no client."""
        if group == 0:
            self.fail(ReplicaStopped(f"the replica of the metadata group has stopped: {reason}"))

    # -- the cluster ------------------------------------------------------------------------

    async def _form(self) -> None:
        """Opens the metadata group: recovered, newly formed with the peers, or joined."""
        self.machine = MetadataMachine()
        self._traces = self._make_traces()
        self._spans = self._make_spans()
        self._sink = MetadataSink()
        await self.entry.enter()
        self._new_session = SessionNumbers(self.id, self.data.incarnation, self._live_sessions)
        self.store = AsyncMetadataStore(
            self.machine, self.host.builder_of(0), self._new_session(), self.clock
        )
        self._sink.attach(self.store)
        self.entry.desk.store = self.store
        self.rounds.wake()

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
        # Takes the rules of passwords with it: a joining node does not load them before.
        from convoymq.node.registration import Registration

        await Registration(self.config, self.data, self.machine, self.store, self.log).run(
            self.entry
        )
        self.broker = self.peers.broker = self._make_broker()
        self.broker.spans = self._spans
        self.broker.local.lost_groups = self.data.lost_groups
        self.rounds.carry_out(self.host, self.links, self.broker)
        self.storage.limit_suspects(self.machine.next_group - 1)
        await self.broker.start()
        self.peers.frames.open()

    def _make_broker(self) -> Broker:
        from convoymq.broker.facade import Broker
        from convoymq.broker.node_view import NodeView
        from convoymq.kernels.route_cache import RouteCacheVersion

        config = self.config
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
            wake=self.rounds.wake,
            settings=config.defaults,
            reconciliation=config.reconciliation,
            identity=config.identity,
            audit=self.live.audit,
            reply_backlog_max_bytes=config.cluster.link_backlog_max_bytes // 2,
            stored_groups=lambda: self.storage.logs,
            traces=self._traces,
            node=NodeView(
                info=node_info(config, self.data.path, self.watermarks, self._shell.flusher),
                links=self.links.info,
                clock_skew=self.links.clock_skew,
                watermarks=self.watermarks,
                reload=self.live.reload,
                set_log_level=self.live.set_log_level,
                reopen_log=self.live.reopen_log,
            ),
            make_members=self._make_members,
        )

    def _make_members(self, broker: Broker) -> MembershipManager:
        return MembershipManager(
            broker,
            self.host,
            self.store,
            self.links,
            self._stop.set,
            self.data.identity.directory,
            place_of(self.config),
            MetadataVoters(
                self.host,
                self.store.tree,
                self.clock,
                count=self.config.cluster.metadata_voters,
                away_max_ms=self.config.cluster.voter_away_max_ms,
            ),
        )

    def _make_traces(self) -> Traces:
        from convoymq.broker.traces import make_traces

        data, now_us = self.data, self.clock.now_us
        return make_traces(self.config, data.path, self.id, data.incarnation, self.machine, now_us)

    def _make_spans(self) -> Spans | None:
        if not self.config.otlp.endpoint:
            return None
        from convoymq import __version__
        from convoymq.broker.spans import Spans

        return Spans(self.config.otlp, self.config.node_name, __version__)

    def _activity(self) -> int:
        # Clients of other nodes are here as what this node logs for them.
        clients = self.served.activity() if self.served is not None else 0
        return self.storage.wal.bytes_written + clients

    # -- resources --------------------------------------------------------------------------

    def _on_storage_blocked(self, fault: StorageFault | None) -> None:
        if fault is not None:
            self.log.error("storage.blocked", reason=str(fault))
        else:
            self.log.info("storage.unblocked")
        if self.broker is not None:
            self.broker.alarms.set("disk", fault is not None)
