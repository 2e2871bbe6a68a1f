"""Brokers and name servers of production on simulated machines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from convoymq.model.errors import StorageFault
from convoymq.replication.group.master import Master
from convoymq.replication.group.slave import Slave
from convoymq.replication.group.types import GroupSettings, SlaveState
from convoymq.rocketmq.acting.escape import GENERATION_FIELD, KEY_FIELD
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.configuration import Configuration
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.broker.values import GroupConfig
from convoymq.rocketmq.ha.log import StoreLog
from convoymq.rocketmq.ha.service import GroupReplication
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.connection import Answered, Connection, Handler
from convoymq.rocketmq.remoting.values import MASTER_ID, EscapeKeys, TopicConfig
from convoymq.rocketmq.special.service import SpecialServices
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Draft, PutStatus
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.network import Receiver
from convoymq.sim.sockets import SocketNode, host_of, node_of

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_world import ActingWorld

T = TypeVar("T")
CLUSTER = "c"
PORT, HA_PORT, NAME_PORT = 10911, 10912, 9876
HEARTBEAT_MS = 150
SILENCE_MS = 1_500
POLL_MS = 300
SCAN_MS = 100
START_AGAIN_US = 500_000
ANSWERED_US = 200_000
GROUP = "g"
POP_TOPIC, POP_GROUP = "pops", "poppers"
TOPICS = {"orders": 2, "later": 2, "deals": 2}
DELAYS = "1s 2s"


class ProductionNode(SocketNode):
    """A node whose process is one of production's."""

    world: ActingWorld

    def _start_process(self, start: Coroutine[object, object, object]) -> None:
        """Runs the start of the process: one that fails ends it, and is tried again."""

        def ended(task: asyncio.Task[object]) -> None:
            error = task.exception()
            if isinstance(error, OSError | StorageFault):
                self.world.trace.add(self.name, f"cannot start: {error}")
                self.world.crash(self, restart_us=START_AGAIN_US)
            elif error is not None:
                raise error

        self.loop.create_task(start).add_done_callback(ended)


class NameServerNode(ProductionNode):
    """A name server."""

    def _open(self) -> Receiver:
        self._open_loop()
        self.knows_us = self.world.scheduler.now_us + 1000 * SILENCE_MS
        """Time from which on it has heard of all that are there: it starts with nothing."""
        self.is_mute = False
        """True while notifications of this server are lost."""
        self.loop.enter(self._make)
        return self

    def _make(self) -> None:
        settings = NamesrvSettings(
            port=NAME_PORT, scan_ms=SCAN_MS, support_acting_master=True, kv_path="/nowhere/kv.json"
        )
        self.server = _Watched(self, settings)
        tell = self.server._tell_one

        async def told(address: str, fields: dict[str, str | None]) -> None:
            if not self.is_mute:
                await tell(address, fields)

        self.server._tell_one = told  # type: ignore[method-assign]
        self._start_process(self.server.start())

    @property
    def address(self) -> str:
        """Returns its address."""
        return f"{host_of(self.number)}:{NAME_PORT}"


class _Watched(NameServer):
    """A name server, of which all requests are answered at once: whom it notifies meanwhile does
    not matter."""

    def __init__(self, node: NameServerNode, settings: NamesrvSettings) -> None:
        self._node = node
        super().__init__(settings, node.steady_ms, node)

    def _handlers(self) -> dict[int, Handler]:
        return {code: partial(self._watch, each) for code, each in super()._handlers().items()}

    def _watch(self, handler: Handler, connection: Connection, command: Command) -> Answered:
        answer = handler(connection, command)
        return self._await(answer) if inspect.isawaitable(answer) else answer

    async def _await(self, answer: Awaitable[Command | None]) -> Command | None:
        node, begun_us = self._node, self._node.world.scheduler.now_us
        found = await answer
        took_us = node.world.scheduler.now_us - max(begun_us, node.process.frozen_until_us)
        if took_us > ANSWERED_US:
            node.world.broken = InvariantBroken(f"{node.name} answered after {took_us} us")
        return found


class ActingNode(ProductionNode):
    """One replica of broker `a`, or the only one of another broker.

    Args:
        twin_of: the replica whose id this one has.
    """

    broker: Broker

    def __init__(
        self, world: ActingWorld, number: int, settings: GroupSettings,
        store_settings: StoreSettings, *, twin_of: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world, number)
        self.settings = settings
        self.store_settings = store_settings
        self.is_ready = False
        """True once the broker serves."""
        self.broker_name = "a" if settings.replicas > 1 else f"b{number}"
        self.id = MASTER_ID if settings.replicas == 1 else twin_of - 1 if twin_of else number - 1
        self.address = f"{host_of(number)}:{PORT}"

    def _open(self) -> Receiver:
        self._open_loop()
        self.is_ready = False
        self.transfers_ms: int | None = None
        """Time since when it transfers while it is isolated."""
        self.loop.enter(self._make)
        return self

    def _pairs(self) -> dict[str, object]:
        chosen, store = self.settings, self.store_settings
        is_group = chosen.replicas > 1
        host = host_of(self.number)
        return {
            "brokerName": self.broker_name, "brokerClusterName": CLUSTER, "brokerId": self.id,
            "brokerRole": "SLAVE" if self.id else "SYNC_MASTER",
            "brokerIP1": host, "brokerIP2": host, "listenPort": PORT, "haListenPort": HA_PORT,
            "namesrvAddr": ";".join(each.address for each in self.world.name_servers),
            "compatibleWithOldNameSrv": self.world.is_old_compatible,
            "enableSlaveActingMaster": is_group, "enableRemoteEscape": True,
            "lockInStrictMode": True, "slaveReadEnable": True, "totalReplicas": chosen.replicas,
            "brokerHeartbeatInterval": HEARTBEAT_MS, "brokerNotActiveTimeoutMillis": SILENCE_MS,
            "syncBrokerMemberGroupPeriod": POLL_MS, "registerNameServerPeriod": 10_000,
            "inSyncReplicas": chosen.in_sync, "minInSyncReplicas": chosen.in_sync_min,
            "enableAutoInSyncReplicas": chosen.auto, "haMaxGapNotInSync": chosen.gap_bytes_max,
            "haSendHeartbeatInterval": chosen.heartbeat_ms,
            "haHousekeepingInterval": chosen.silence_ms, "slaveTimeout": chosen.timeout_ms,
            "flushDiskType": store.flush, "mappedFileSizeCommitLog": store.log_file_bytes,
            "mappedFileSizeConsumeQueue": store.queue_file_bytes, "maxHashSlotNum": 50,
            "maxIndexNum": 200,
            "flushConsumerOffsetInterval": 1000, "messageDelayLevel": DELAYS,
            "transactionTimeOut": 600, "transactionCheckInterval": 500,
            "transactionCheckMax": 10_000, "storePathRootDir": "/simulated",
        }  # fmt: skip

    def _make(self) -> None:
        pairs = [(name, _text(value), "simulation") for name, value in self._pairs().items()]
        self.broker = Broker(Configuration(pairs), self)
        self.broker.groups.update([GroupConfig(GROUP)])
        for name, queues in TOPICS.items():
            self.broker.topics.create(TopicConfig(name, queues, queues))
        if self.world.plan.faults & {"pops", "ahead"}:
            self.broker.topics.create(TopicConfig(POP_TOPIC, 2, 2))
            self.broker.groups.update([GroupConfig(POP_GROUP)])
        self._start_process(self._serve())

    async def _serve(self) -> None:
        await self.broker.start()
        self.log = StoreLog(self.store, self.store_settings.log_file_bytes)
        for code in (Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2):
            handler = self.broker.register(code, self._on_send)
            assert handler is not None
            self._send = handler
        keys = self.broker.register(Request.GET_ESCAPE_KEYS, self._on_keys)
        assert keys is not None
        self._keys = keys
        metadata = self.broker.group._metadata
        self._take_over_from = metadata.take_over
        metadata.take_over = self._take_over  # type: ignore[method-assign]
        self._persist_offsets = self.broker.offsets.persist
        self.broker.offsets.persist = self._persist  # type: ignore[method-assign]
        self.is_ready = True
        self.world.on_opened(self)

    # --- what referees look at ----------------------------------------------------------------

    @property
    def store(self) -> MessageStore:
        """Returns its store."""
        return self.broker.store

    @property
    def replication(self) -> GroupReplication:
        """Returns its replication."""
        found = self.broker.replication
        assert isinstance(found, GroupReplication)
        return found

    @property
    def special(self) -> SpecialServices:
        """Returns its special services."""
        (found,) = self.broker.specials
        assert isinstance(found, SpecialServices)
        return found

    @property
    def is_master(self) -> bool:
        """Returns whether it has broker id 0."""
        return self.id == MASTER_ID

    @property
    def master(self) -> Master | None:
        """Returns the core of a master's replication."""
        return self.replication.master if self.is_ready else None

    @property
    def slave(self) -> Slave | None:
        """Returns the core of a slave's replication."""
        return self.replication.slave if self.is_ready else None

    @property
    def copied(self) -> int:
        """Returns up to where it has the log, on its disk if messages are flushed."""
        if not hasattr(self, "broker") or not hasattr(self.broker, "store"):
            return -1
        return self.store.flushed if self.store_settings.is_sync else self.store.max_offset

    @property
    def state(self) -> State:
        """Returns its role."""
        return self.broker.group.state if self.alive and self.is_ready else State.ISOLATED

    @property
    def serves(self) -> bool:
        """Returns whether clients of the group find it."""
        return self.state in (State.MASTER, State.ACTING)

    @property
    def runs_special(self) -> bool:
        """Returns whether its special services run."""
        return self.alive and self.is_ready and self.special.state.is_running

    @property
    def own_link(self) -> object:
        """Returns the number of a slave's connection to its master, None without one."""
        link = self.replication._link if self.alive and self.is_ready else None
        if link is None or self.replication.state != SlaveState.TRANSFER.value:
            return None
        return link._transport and link._transport.get_extra_info("number")

    @property
    def slave_links(self) -> Collection[object]:
        """Returns the numbers of connections of slaves to this master."""
        return [
            socket._transport.get_extra_info("number")
            for socket in (self.replication._sockets if self.is_ready else ())
            if socket._transport is not None and socket.link is not None and socket.link.is_known
        ]

    # --- what the world hears -----------------------------------------------------------------

    def _on_send(self, connection: Connection, command: Command) -> Answered:
        if KEY_FIELD in command.fields:
            number = node_of(connection.remote[0])
            sender = self.world.replicas.get(number) or self.world.twins.get(number)
            if sender is not None and sender.is_ready:
                self.world.on_escape(bytes(command.body), sender.store.dispatched)
                generation = command.number(GENERATION_FIELD, 0)
                if self.world.on_attempt(self, sender, generation):
                    return self._has_to_refuse(connection, command)
        return self._send(connection, command)

    async def _has_to_refuse(self, connection: Connection, command: Command) -> Command | None:
        answer = self._send(connection, command)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is not None and answer.code == Answer.SUCCESS:
            self.world.broken = InvariantBroken(
                f"{self.name} takes an attempt of a replica that was superseded"
            )
        return answer

    def _on_keys(self, connection: Connection, command: Command) -> Answered:
        answer = self._keys(connection, command)
        if isinstance(answer, Command) and command.needed("brokerName") == "a":
            self.world.on_told(self, json.loads(answer.body, EscapeKeys).generation)
        return answer

    def _persist(self) -> None:
        self._persist_offsets()
        if self.broker_name == "a":
            offsets = self.broker.offsets
            self.world.on_persisted(self, offsets.table if self.is_master else offsets.unsent)

    async def _take_over(self, member: str, end: Callable[[str, int], int] | None = None) -> bool:
        peer = self.world.nodes[node_of(member.partition(":")[0])]
        assert isinstance(peer, ActingNode)
        found = peer.broker
        offsets = {key: dict(table) for key, table in found.offsets.table.items()}
        known = set(found.topics.table), set(found.groups.table)
        is_taken = await self._take_over_from(member, end)
        if is_taken and end is None:
            self.world.on_taken_over(self, peer, offsets, *known)
        return is_taken

    # --- clients ------------------------------------------------------------------------------

    def put(
        self,
        messages: list[tuple[int, Draft]],
        done: Callable[[int, int, int, PutStatus], None],
    ) -> None:
        """Takes numbered messages of a client; calls back with number, queue offset, end in the
        log and status of each."""
        if not self.is_ready:
            for number, _ in messages:
                done(number, 0, 0, PutStatus.SERVICE_NOT_AVAILABLE)
        else:
            self.loop.enter(self._put, messages, done)

    def _put(
        self,
        messages: list[tuple[int, Draft]],
        done: Callable[[int, int, int, PutStatus], None],
    ) -> None:
        placed = self.broker.put_now([draft for _, draft in messages])
        for (number, _), found in zip(messages, placed, strict=True):
            if found.status is PutStatus.PUT_OK:
                end = found.physical + found.size
                answer = partial(done, number, found.queue_offset, end)
                self.broker.when_confirmed(end, answer)
            else:
                done(number, 0, 0, found.status)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def running(nodes: Iterable[ActingNode], now_us: int) -> list[ActingNode]:
    """Returns the nodes whose special services run now."""
    return [node for node in nodes if node.runs_special and node.process.frozen_until_us <= now_us]
