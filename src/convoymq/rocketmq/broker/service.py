"""A broker: puts its parts together, listens, and looks after what takes its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from convoymq.edges.http.exposition import Text
from convoymq.model.errors import StorageFault, SyntaxFault
from convoymq.model.tasks import Tasks
from convoymq.rocketmq.acting.bridge import Intake
from convoymq.rocketmq.acting.locks import LockTable
from convoymq.rocketmq.acting.service import Group
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.broker.acl import Accounts, read_signer
from convoymq.rocketmq.broker.broker_requests import BrokerRequests
from convoymq.rocketmq.broker.client_requests import ClientRequests, tell_members
from convoymq.rocketmq.broker.clients import Clients
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.configuration import Configuration, S
from convoymq.rocketmq.broker.group_requests import GroupRequests
from convoymq.rocketmq.broker.groups import Groups
from convoymq.rocketmq.broker.metrics import HELP, faults_of, write_broker
from convoymq.rocketmq.broker.offsets import Offsets
from convoymq.rocketmq.broker.pull import Puller
from convoymq.rocketmq.broker.registering import Registrar
from convoymq.rocketmq.broker.send import Sender, host_bytes
from convoymq.rocketmq.broker.settings import SYNC_MASTER, BrokerSettings, own_address
from convoymq.rocketmq.broker.stats import Stats
from convoymq.rocketmq.broker.topic_requests import TopicRequests
from convoymq.rocketmq.broker.topics import Topics
from convoymq.rocketmq.broker.tracing import GroupTrace, TraceSettings
from convoymq.rocketmq.broker.types import (
    BeforePut,
    Escape,
    LocalEscape,
    Role,
)
from convoymq.rocketmq.broker.user_requests import UserRequests
from convoymq.rocketmq.broker.users import Users
from convoymq.rocketmq.exposition import Exposition
from convoymq.rocketmq.ha.service import GroupReplication, open_replication
from convoymq.rocketmq.machine import MACHINE, Machine
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.connection import Answered, Connection, Handler, dispatch
from convoymq.rocketmq.remoting.server import RemotingServer
from convoymq.rocketmq.remoting.tls import ServerTls
from convoymq.rocketmq.remoting.values import MASTER_ID
from convoymq.rocketmq.special.service import SpecialServices
from convoymq.rocketmq.special.settings import SpecialSettings
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Damage, Draft, Placed, PutStatus

log = structlog.get_logger()

SECOND_PORT_BELOW = 2
"""The second port: nothing that waits is served there, so that it stays quick."""
NOT_ON_SECOND_PORT = frozenset((
    Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE, Request.POP_MESSAGE,
    Request.PEEK_MESSAGE, Request.NOTIFICATION, Request.POLLING_INFO,
))  # fmt: skip
TICK_S = 0.1
SCAN_S = 10.0
DELAY, TIMER, HALF = b"DELAY\x01", b"TIMER_", b"TRAN_MSG\x01true"
"""Properties of messages that special services look after."""


class Both:
    """An answer that waits for the disk and for slaves: the first failure is its status."""

    def __init__(self, call: Callable[[PutStatus], None]) -> None:
        self._call = call
        self._status: PutStatus | None = None

    def part(self, status: PutStatus) -> None:
        """One of the two is known."""
        if self._status is None:
            self._status = status
        else:
            self._call(status if self._status is PutStatus.PUT_OK else self._status)


class Broker:
    """See the module text. It is made inside a running loop.

    Args:
        machine: the one that it runs on.
        neighbours: other brokers of this process, where messages may escape to.
    """

    def __init__(
        self,
        configuration: Configuration,
        machine: Machine = MACHINE,
        neighbours: Callable[[], Sequence[Intake]] = tuple,
    ) -> None:
        self.configuration = configuration
        self.neighbours = neighbours
        settings = self.settings = configuration.section(BrokerSettings)
        self._machine = machine
        now_ms = self.now_ms = machine.wall_ms
        self.role = Role(settings.id, settings.name, settings.cluster)
        self.tasks = Tasks()
        self._handlers: dict[int, Handler] = {}
        self._dispatch = dispatch(self._handlers)
        self.remoting = RemotingClient(self._dispatch, tls=settings.client_tls())
        self.locks = LockTable()
        self.clients = Clients(tell_members)
        self.stats = Stats(now_ms, settings.cluster)
        root = Path(settings.root) if settings.root else Path.home() / "store"
        self.config_path = root / "config"
        self._directory = machine.directory(root)
        self.topics = Topics(lambda: self.settings, self.file("topics.json"), now_ms)
        self.groups = Groups(lambda: self.settings, self.file("subscriptionGroup.json"), now_ms)
        step = settings.offset_version_step
        self.offsets = Offsets(
            self.file("consumerOffset.json"), step, now_ms, is_slave=settings.id != MASTER_ID
        )
        self.users = Users(lambda: self.settings, self.file("users.json"), now_ms)
        self._worker, self._slow_worker = machine.worker(), machine.worker()
        self._own_address = settings.address or own_address()
        store_settings = configuration.section(StoreSettings)
        self.message_bytes_max = store_settings.message_bytes_max
        self._store_settings = store_settings
        self._root = root
        self.before_put: list[BeforePut] = []
        self.specials: list[SpecialServices] = []
        self.on_closed: list[Callable[[Connection], None]] = []
        self.replication: GroupReplication
        self.trace: GroupTrace | None = None
        """None: nothing is recorded."""
        self.escape: Escape = LocalEscape(self)
        self.servers: list[RemotingServer] = []
        self.persist_failures = 0
        self.damages = 0
        """Damaged records that were found."""
        self.refused: Counter[int] = Counter()
        """Answers other than success, by code."""
        self.exposition = Exposition(settings, self._render, lambda: faults_of(self))
        self._accounts: Accounts | None = None
        self._accounts_at = 0
        """Time at which their file was written."""
        self.accounts_read = 0

    def section(self, kind: type[S]) -> S:
        """Returns a section of the configuration."""
        return self.configuration.section(kind)

    def file(self, name: str) -> ConfigFile:
        """Returns a file of the directory `config`."""
        return ConfigFile(self._directory, f"config/{name}")

    def steady_ms(self) -> int:
        """Returns milliseconds of a clock that never jumps, for time-outs."""
        return self._machine.steady_ms()

    def register(self, code: int, handler: Handler) -> Handler | None:
        """Has requests with a code answered by a handler from now on; returns the one before."""
        before = self._handlers.get(code)
        self._handlers[code] = handler
        return before

    # --- messages ------------------------------------------------------------------------

    def prepared(self, draft: Draft) -> Draft:
        """Returns a draft as special services change it. Raises Refusal."""
        found = draft.properties
        if DELAY in found or TIMER in found or HALF in found:
            for change in self.before_put:
                draft = change(draft)
        return draft

    def put_now(self, drafts: Sequence[Draft]) -> list[Placed]:
        """Appends prepared messages, which are stored soon."""
        refusal = self.replication.refusal()
        if not self.role.is_master:
            refusal = PutStatus.SERVICE_NOT_AVAILABLE
        if refusal is not None:
            return [Placed(refusal) for _ in drafts]
        placed = self.store.put(drafts, self.now_ms())
        self.store.kick()
        self.replication.on_appended()
        return placed

    def when_confirmed(self, offset: int, call: Callable[[PutStatus], None]) -> None:
        """Calls when the log is stored and copied up to an offset as the settings demand."""
        if self.settings.role == SYNC_MASTER:
            call = Both(call).part
            self.replication.when_copied(offset, self.settings.slave_timeout_ms / 1000, call)
        self._when_stored(offset, call)

    def _when_stored(self, offset: int, call: Callable[[PutStatus], None]) -> None:
        """Calls once: when the log is stored, or when that takes too long."""
        waiting = [call]

        def done(status: PutStatus) -> None:
            timer.cancel()
            if waiting:
                waiting.pop()(status)

        def stored(error: BaseException | None) -> None:
            done(PutStatus.PUT_OK if error is None else PutStatus.UNKNOWN_ERROR)

        timeout_s = self.settings.flush_timeout_ms / 1000
        timer = asyncio.get_running_loop().call_later(
            timeout_s, partial(done, PutStatus.FLUSH_DISK_TIMEOUT)
        )
        self.store.when_flushed(offset, stored)

    async def put(self, drafts: Sequence[Draft]) -> list[Placed]:
        """Prepares and appends messages, and waits until they are confirmed. Raises Refusal."""
        drafts = [self.prepared(draft) for draft in drafts]
        placed = self.put_now(drafts)
        ends = [p.physical + p.size for p in placed if p.status is PutStatus.PUT_OK]
        if ends:
            confirmed: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
            self.when_confirmed(max(ends), confirmed.set_result)
            status = await confirmed
            for found in placed:
                if found.status is PutStatus.PUT_OK:
                    found.status = status
            if self.trace is not None:
                self.trace.confirmed(zip(drafts, placed, strict=True))
        return placed

    def wake_pulls(self) -> None:
        """Answers all pulls that wait."""
        self.puller.wake_all()

    # --- begin and end -------------------------------------------------------------------

    async def start(self) -> int:
        """Begins to serve; returns the port. Raises OSError, StorageFault."""
        try:
            return await self._start()
        except BaseException:
            for server in self.servers:
                await server.stop()
            await self.exposition.stop()
            if self.trace is not None:
                self.trace.stop()
            self._worker.close()
            raise

    def _read_accounts(self) -> None:
        """Reads the file of accounts if it was written since. Raises OSError, SyntaxFault."""
        directory = Path(self.settings.home) / "conf"
        path, own = directory / "plain_acl.yml", directory / "tools.yml"
        if not self.settings.inner_account:
            self.remoting.sign = read_signer(own.read_text("utf-8")) if own.exists() else None
        written = path.stat().st_mtime_ns
        if written != self._accounts_at:
            self._accounts = Accounts(path.read_text("utf-8"))
            self._accounts_at = written
            self.accounts_read += 1
            log.info("rocketmq.accounts_read", path=str(path))

    async def _start(self) -> int:
        settings = self.settings
        self.remoting.sign = self.users.begin()
        if settings.acl:
            self._read_accounts()
        port = await self._listen(settings.port, frozenset())
        self.role.address = f"{self._own_address}:{port}"
        self._open_store(port)
        self.sender, self.puller = Sender(self), Puller(self)
        self.on_closed += (self.sender.closed, self.clients.closed)
        ClientRequests(self)
        services = self.services = SpecialServices(
            self, self.configuration.section(SpecialSettings), self._store_settings
        )
        self.specials.append(services)
        self.tasks.spawn(services.run())
        TopicRequests(self)
        GroupRequests(self)
        UserRequests(self)
        modes, root = self.file("messageRequestMode.json"), self._root
        BrokerRequests(self, lambda: self.configuration, self._configure, modes, root)
        if port > SECOND_PORT_BELOW and settings.port:
            await self._listen(port - SECOND_PORT_BELOW, NOT_ON_SECOND_PORT)
        ha_port = await self.replication.start(settings.ha_port)
        ha_address = f"{settings.ha_address or self._own_address}:{ha_port}"
        self.registrar = Registrar(
            lambda: self.settings, self.role, self.topics, self.remoting, ha_address
        )
        self.group = Group(
            self, self.configuration.section(ActingSettings), services, self.neighbours
        )
        self._open_trace()
        for work in (self.registrar.run, self.puller.sweep, self._tick, self._scan, self._persist):
            self.tasks.spawn(work())
        if settings.acting_master:
            self.tasks.spawn(self.registrar.beat())
        self.group.start()
        self.exposition.start()
        return port

    def _configure(self, configuration: Configuration) -> None:
        """Uses other settings; what is read at the start only stays as it is."""
        self.configuration = configuration
        self.settings = configuration.section(BrokerSettings)

    async def _listen(self, port: int, without: frozenset[int]) -> int:
        refuse = dispatch({})

        def handle(connection: Connection, command: Command) -> Answered:
            self.users.check(connection.remote[0], command, self._accounts)
            chosen = refuse if command.code in without else self._dispatch
            return chosen(connection, command)

        server = RemotingServer(
            handle, self._closed, idle_s=self.settings.idle_s, tls=ServerTls(self.settings),
            refused=self.refused, machine=self._machine,
        )  # fmt: skip
        self.servers.append(server)
        return await server.listen(self.settings.host, port)

    def _open_store(self, port: int) -> None:
        log_path, root = self._store_settings.log_path, self._root
        self.store = MessageStore(
            self._directory, self._store_settings, self._worker, clock=self.now_ms,
            log_directory=self._machine.directory(log_path) if log_path else None,
            store_host=host_bytes((self._own_address, port)), background=self._slow_worker,
            disk_used=partial(self._machine.disk_used, root),
        )  # fmt: skip
        report = self.store.open()
        self.replication = open_replication(self, report, self._machine)
        self.replication.on_life.append(lambda life: self.topics.begin_life(life.begin))
        self.topics.forget, self.groups.forget = self._forget_topic, self.offsets.delete_group
        self.store.on_damage.append(self._damaged)
        for damage in report.damages:
            self._damaged(damage)
        log.info("rocketmq.store_open", root=str(self._root), was_aborted=report.was_aborted,
                 records=report.records_checked, end=self.store.max_offset)  # fmt: skip

    def _forget_topic(self, topic: str, log_end: int) -> None:
        self.offsets.delete_topic(topic)
        self.store.delete_topic(topic, log_end)

    def _open_trace(self) -> None:
        settings = self.configuration.section(TraceSettings)
        if not settings.enabled:
            return
        replication = self.replication
        trace = GroupTrace(
            self._root / "trace", settings, self.store, cluster=self.role.cluster,
            broker=self.role.name, broker_id=self.role.id, lives=lambda: replication.lives,
            members=lambda: self.group.members,
        )  # fmt: skip
        if trace.is_open:
            trace.start()
            self.trace = trace
            self.offsets.on_commit = trace.committed
            replication.on_life.append(trace.life_began)
            self.tasks.spawn(trace.run())

    def _closed(self, connection: Connection) -> None:
        for call in self.on_closed:
            call(connection)

    async def stop(self) -> None:
        """Ends in order."""
        await self.exposition.stop()
        await self.registrar.stop()
        for special in self.specials:
            await special.stop()
        for server in self.servers:
            await server.stop()
        await self.tasks.stop()
        await self.replication.stop()
        await self.remoting.stop()
        self.persist()
        if self.trace is not None:
            self.trace.stop()
        self._worker.close()
        self._slow_worker.close()
        self.store.close()

    # --- what is done again and again ----------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self.store.tick(self.now_ms())
            self.stats.tick()
            await asyncio.sleep(TICK_S)

    async def _scan(self) -> None:
        """Forgets clients that are silent."""
        while True:
            await asyncio.sleep(min(SCAN_S, self.settings.client_timeout_ms / 4000))
            if self.settings.acl:
                try:
                    self._read_accounts()
                except (OSError, SyntaxFault) as error:
                    log.error("rocketmq.accounts_unreadable", reason=str(error))
            for channel in self.clients.silent(self.steady_ms() - self.settings.client_timeout_ms):
                if isinstance(channel, Connection):
                    log.info("rocketmq.client_silent", peer=channel.name)
                    channel.close()

    async def _persist(self) -> None:
        while True:
            await asyncio.sleep(self.settings.persist_offsets_ms / 1000)
            self.persist()

    def persist(self) -> None:
        """Writes files of what changed since the last time."""
        self.topics.file.flush()
        self.groups.file.flush()
        try:
            self.offsets.persist()
            self.group.persist()
        except StorageFault as error:
            self.persist_failures += 1
            log.error("rocketmq.not_persisted", reason=error.text)
        for special in self.specials:
            special.persist()

    def _damaged(self, damage: Damage) -> None:
        self.damages += 1
        log.warning(
            "rocketmq.damaged", file=damage.file, offset=damage.offset, reason=damage.reason
        )

    async def _render(self, *, per_object: bool, open_metrics: bool) -> str:
        text = Text(HELP, open_metrics=open_metrics)
        await write_broker(text, self, per_object=per_object)
        return text.render()
