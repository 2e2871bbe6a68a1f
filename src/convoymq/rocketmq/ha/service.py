"""Replication of one broker: carries out the decisions of `replication/group`.

A master listens for slaves. It begins to take writes (`begin`) when the broker is online, and is
compared with its slaves before (`compare_with`). A master that cannot begin yet compares with each
slave that asks it for a comparison.
A slave follows the master that it is told (`set_master`): compares, connects, appends, reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import structlog

from convoymq.model.errors import BrokerError, PeerError
from convoymq.model.tasks import Tasks
from convoymq.replication.group.lives import Book
from convoymq.replication.group.master import Forked, Master
from convoymq.replication.group.slave import Slave
from convoymq.replication.group.tails import whole_end
from convoymq.replication.group.types import (
    Ask,
    Fetch,
    GroupSettings,
    Life,
    SlaveState,
    Tail,
    Verdict,
)
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.settings import SYNC_MASTER
from convoymq.rocketmq.ha.links import MasterLink, SlaveLink
from convoymq.rocketmq.ha.log import StoreLog
from convoymq.rocketmq.ha.requests import (
    NoComparison,
    answer_fetch,
    answer_tail,
    ask_of,
    question_of,
    reply_of,
)
from convoymq.rocketmq.ha.status import HaStatus
from convoymq.rocketmq.machine import Listening, Machine
from convoymq.rocketmq.remoting.client import RemotingClient, split_address
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.remoting.values import MASTER_ID
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.types import PutStatus, StoreReport

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()
R = TypeVar("R")

TICK_S = 0.05
CONNECT_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 3.0
UNFLUSHED_BYTES_MAX = 64 << 20
"""Of what a slave has received; beyond that it does not read."""
_STATUS = {
    Verdict.OK: PutStatus.PUT_OK,
    Verdict.SLAVE_TIMEOUT: PutStatus.FLUSH_SLAVE_TIMEOUT,
    Verdict.NOT_ENOUGH: PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH,
    Verdict.NOT_ONLINE: PutStatus.SERVICE_NOT_AVAILABLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaveView:
    """A slave that is connected, as administration shows it. `slave`: its broker id, None for one
    of RocketMQ's, which does not say; nor does that say its address."""

    link: int
    host: str
    address: str
    slave: int | None
    acked: int
    sent: int
    in_sync: bool
    silent_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The broker, for those that it asks. `address`: where it answers."""

    name: str
    id: int
    address: str
    host: str = "0.0.0.0"

    def fields(self) -> dict[str, str]:
        """Returns fields of a request."""
        return {"brokerName": self.name, "brokerId": str(self.id), "brokerAddr": self.address}


class GroupReplication:
    """See the module text: the other replicas of this broker.

    Args:
        file: what is persisted beside the log.
        is_intact: the log lost nothing that was acknowledged, as far as recovery can tell.
        register: has requests answered (`Broker.register`).
    """

    def __init__(
        self,
        own: Identity,
        settings: GroupSettings,
        commit_log: StoreLog,
        remoting: RemotingClient,
        register: Callable[[int, Handler], object],
        *,
        file: ConfigFile,
        machine: Machine,
        is_intact: bool,
    ) -> None:
        self._own = own
        self._settings = settings
        self._log = commit_log
        self._remoting = remoting
        self._tasks = Tasks()
        self._file = file
        self._machine = machine
        self._steady_ms = machine.steady_ms
        self._servers: list[Listening] = []
        self._sockets: dict[SlaveLink, None] = {}
        """In the order in which they came."""
        self._comparing = asyncio.Lock()
        self._begins = False
        self.ha_address: str | None = None
        """Address that this slave copies from."""
        self._master_address: str | None = None
        self._link: MasterLink | None = None
        self._wakes = asyncio.Event()
        self._pumps = False
        self.failures = 0
        """Times that a life could not be persisted."""
        self.on_life: list[Callable[[Life], None]] = []
        """Called when a life of this master began."""
        self.on_cut: Callable[[], None] = lambda: None
        """Called when the end of this slave's log was cut. May raise StorageFault."""
        self.port = 0
        """The port for slaves, of a master that has begun."""
        book = self._load()
        session = self._machine.wall_ms()
        self.master: Master | None = None
        self.slave: Slave | None = None
        if own.id == MASTER_ID:
            self.master = Master(
                settings, commit_log, book or Book(is_whole=is_intact), self._save,
                is_intact=is_intact, session=session,
            )  # fmt: skip
        else:
            self.slave = Slave(
                own.id, settings, commit_log, book or Book(), self._save, session=session
            )
        register(Request.COMPARE_LOGS, self._on_compare)
        register(Request.FETCH_LOG, self._on_fetch)
        self._status = HaStatus(self)
        register(Request.GET_BROKER_HA_STATUS, self._status.on_status)

    def _load(self) -> Book | None:
        try:
            content = self._file.read_bytes()
            return Book.decode(content) if content else None
        except (OSError, PeerError) as error:
            log.error("ha.book_unreadable", file=self._file.name, reason=str(error))
            return Book()

    def _save(self, book: Book) -> None:
        self._file.write_bytes(book.encode())

    # --- the broker's side ------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Returns the state of the link to the master; a master is in TRANSFER."""
        return self.slave.state.value if self.slave else SlaveState.TRANSFER.value

    async def start(self, port: int) -> int:
        """Begins; a master listens on a port and returns it. Raises OSError."""
        if self.master is not None:
            servers, port = await self._machine.listen(self._accept, self._own.host, port)
            self._servers += servers
        self.port = port
        self._tasks.spawn(self._run())
        return port

    async def stop(self) -> None:
        """Ends links and tasks."""
        for server in self._servers:
            server.close()
        if self.slave is not None:
            self.slave.shut_down()
        self._end_link("this broker stops")
        for each in list(self._sockets):
            each.abort()
        await self._tasks.stop()

    def refusal(self) -> PutStatus | None:
        """Returns why nothing may be appended now."""
        if self.master is None:
            return PutStatus.SERVICE_NOT_AVAILABLE
        verdict = self.master.refusal(self._steady_ms())
        return None if verdict is None else _STATUS[verdict]

    def when_copied(self, offset: int, timeout_s: float, call: Callable[[PutStatus], None]) -> None:
        """Calls once: when enough replicas have the log up to an offset, or the time is over."""
        if self.master is None:
            call(PutStatus.SERVICE_NOT_AVAILABLE)
        else:
            self.master.wait(
                offset,
                self._steady_ms(),
                int(timeout_s * 1000),
                lambda verdict: call(_STATUS[verdict]),
            )

    def on_appended(self) -> None:
        """Sends appended messages to slaves when they are stored; those of one turn of the loop
        together."""
        if not self._pumps and self._sockets:
            self._pumps = True
            asyncio.get_running_loop().call_soon(self._await_stored)

    def links(self) -> Sequence[SlaveView]:
        """Returns the slaves that are connected."""
        if self.master is None:
            return ()
        now, least = self._steady_ms(), self._log.max_offset - self._settings.gap_bytes_max
        return [
            SlaveView(link=each.number, host=each.host, address=each.address, slave=each.slave,
                      acked=each.acked, sent=each.next, in_sync=each.acked > least,
                      silent_ms=now - each.heard_ms)
            for each in self.master.links.values() if each.is_known
        ]  # fmt: skip

    def master_silent_ms(self) -> int | None:
        """Returns how long ago this slave heard of its master; None: it transfers nothing."""
        return self.slave.silent_ms(self._steady_ms()) if self.slave else None

    def master_times_ms(self) -> tuple[int, int]:
        """Returns by the wall clock when this slave heard of its master, and reported to it."""
        assert self.slave is not None
        ahead_ms = self._machine.wall_ms() - self._steady_ms()
        return tuple(ms and ms + ahead_ms for ms in self.slave.times_ms)  # type: ignore[return-value]

    # --- for pre-online --------------------------------------------

    def begin(self) -> bool:
        """Takes writes, now or as soon as enough slaves were compared. Returns whether now."""
        self._begins = True
        return self._begin()

    def _begin(self) -> bool:
        master = self.master
        if master is None or not self._begins:
            return False
        try:
            began = not master.takes_writes and master.begin(self._machine.wall_ms())
        except OSError as error:
            self.failures += 1
            log.error("ha.not_persisted", reason=str(error))
            return False
        if began:
            life = master.book.lives[-1]
            log.info("ha.life_began", life=life.number, begin=life.begin, proven=life.is_proven)
            for call in self.on_life:
                call(life)
            self.on_appended()
        return master.takes_writes

    @property
    def end(self) -> int:
        """Returns the end of the log."""
        return self._log.max_offset

    @property
    def whole_end(self) -> int:
        """Returns the end of the last whole message."""
        return whole_end(self._log)

    @property
    def lives(self) -> tuple[Life, ...]:
        """Returns the lives of masters that wrote the log."""
        member = self.master or self.slave
        assert member is not None
        return member.book.lives

    def step_down(self) -> None:
        """Another broker has this one's id: a master's life ends, a slave leaves its master."""
        self.set_master(None)
        if self.master is not None and self.master.takes_writes:
            self._begins = False
            try:
                self.master.step_down()
            except OSError as error:
                self.failures += 1
                log.error("ha.not_persisted", reason=str(error))
            self._end_links()

    def check_master(self, address: str) -> None:
        """Raises Refusal while this slave is linked with a master at another address."""
        slave, linked = self.slave, self._master_address
        is_linked = slave is not None and slave.state is SlaveState.TRANSFER
        if is_linked and linked not in (None, address):
            raise Refusal(
                Answer.SERVICE_NOT_AVAILABLE,
                f"broker {self._own.name} has a live master at {linked}: {address} has its id",
            )

    def set_alive(self, count: int | None) -> None:
        """Says how many replicas name servers list, this one among them."""
        if self.master is not None:
            self.master.alive = count

    def set_master(self, ha_address: str | None, address: str | None = None) -> None:
        """Names the master that this slave copies; None: nobody.

        Args:
            address: where the master answers requests. Without one nothing is compared.
        """
        if self.slave is None:
            return
        same = (ha_address, address) == (self.ha_address, self._master_address)
        if same and self.slave.state is SlaveState.TRANSFER:
            return
        self.ha_address, self._master_address = ha_address, address
        self._end_link("another master is to be followed")
        if ha_address is None:
            self.slave.shut_down()
        else:
            self.slave.follow(self._steady_ms())
        self._wakes.set()

    async def compare_with(self, address: str) -> bool:
        """Compares this master's log with a slave's, and fetches missing messages. Returns
        False when that has to be tried again; True also for a slave of RocketMQ's."""
        master = self.master
        if master is None:
            return True
        async with self._comparing:
            end = self._log.max_offset
            try:
                await self._carry(master.compare(), address)
            except NoComparison:
                master.on_no_comparison(address)
            except Forked as error:
                log.error("ha.forked", peer=address, reason=error.text)
                return False
            except (BrokerError, OSError) as error:
                log.warning("ha.comparison_failed", peer=address, reason=str(error))
                return False
            if self._log.max_offset != end:
                log.info("ha.fetched", peer=address, bytes=self._log.max_offset - end)
        self._begin()
        return True

    async def _carry(
        self,
        steps: Generator[Ask | Fetch, Tail | bytes, R] | Generator[Ask, Tail, R],
        address: str,
    ) -> R:
        """Asks another broker what a comparison wants to know; returns what that comes to. Raises
        NoComparison, Unavailable, PeerError."""
        try:
            question = next(steps)
            while True:
                connection = await self._remoting.connected(address, ASK_TIMEOUT_S)
                command = question_of(question, self._own.fields())
                answer = await connection.request(command, ASK_TIMEOUT_S)
                question = steps.send(reply_of(question, answer))  # type: ignore[arg-type]
        except StopIteration as ended:
            result: R = ended.value
            return result

    # --- requests ---------------------------------------------------------------------------

    def _on_compare(self, _connection: Connection, command: Command) -> Command:
        if command.needed("brokerName") != self._own.name:
            text = f"this is {self._own.name}"
            return command.answer(Answer.SYSTEM_ERROR, remark=text)
        ask = ask_of(command)
        if self.master is None:
            assert self.slave is not None
            if command.number("brokerId") == MASTER_ID:
                self.check_master(command.needed("brokerAddr"))
            return answer_tail(command, self.slave.tail(ask))
        slave, address = command.number("brokerId"), command.needed("brokerAddr")
        return answer_tail(command, self.master.tail(ask, slave, address))

    def _compare_back(self, master: Master) -> None:
        """Compares with a slave that asked, while the life cannot begin."""
        if self._begins and not self._comparing.locked():
            address = master.next_to_compare(self._steady_ms())
            if address is not None:
                self._tasks.spawn(self._compared(address))

    async def _compared(self, address: str) -> None:
        await self.compare_with(address)

    def _on_fetch(self, _connection: Connection, command: Command) -> Command:
        return answer_fetch(command, self._log)

    # --- a master's links ---------------------------------------------------------------------

    def _accept(self) -> asyncio.BaseProtocol:
        assert self.master is not None
        made = SlaveLink(self.master, self._steady_ms, self._on_heard, self._on_left)
        self._sockets[made] = None
        return made

    def _on_heard(self, sender: SlaveLink) -> None:
        self._end_links()
        self._begin()
        sender.pump()

    def _on_left(self, sender: SlaveLink) -> None:
        self._sockets.pop(sender, None)
        log.info("ha.slave_left", peer=sender.host)

    def _end_links(self) -> None:
        """Closes the links that the core has ended."""
        assert self.master is not None
        while self.master.ended:
            link, reason = self.master.ended.popleft()
            log.warning("ha.slave_refused", peer=link.host, slave=link.slave, reason=reason)
            for each in [each for each in self._sockets if each.link is link]:
                each.abort()

    def _await_stored(self) -> None:
        self._log.when_flushed(self._log.max_offset, self._on_stored)

    def _on_stored(self, error: BaseException | None = None) -> None:
        self._pumps = False
        self._pump()
        if error is None and self._log.stored < self._log.max_offset:
            self.on_appended()

    def _pump(self) -> None:
        for each in list(self._sockets):
            each.pump()

    # --- a slave's link -----------------------------------------------------------------------

    async def _follow(self, slave: Slave) -> None:
        ha_address = self.ha_address
        if ha_address is None or not slave.is_due(self._steady_ms()):
            return
        try:
            if not await self._compare(slave) or ha_address != self.ha_address:
                return
            host, port = split_address(ha_address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, self._link = await asyncio.get_running_loop().create_connection(
                    lambda: MasterLink(slave, self._steady_ms, self._received, self._on_ended),
                    host, int(port),
                )  # fmt: skip
            log.info("ha.connected", peer=ha_address, end=self._log.max_offset)
        except (BrokerError, OSError, TimeoutError, ValueError) as error:
            slave.on_disconnected(str(error), self._steady_ms())
            log.info("ha.not_connected", peer=ha_address, reason=str(error))

    async def _compare(self, slave: Slave) -> bool:
        address = self._master_address
        if address is None:
            slave.on_no_comparison()
            return True
        cut_bytes = slave.cut_bytes
        try:
            agreed = await self._carry(slave.compare(self._steady_ms(), address), address)
        except NoComparison:
            slave.on_no_comparison()
            return True
        if slave.cut_bytes != cut_bytes:
            log.warning("ha.cut", peer=address, bytes=slave.cut_bytes - cut_bytes,
                        end=self._log.max_offset)  # fmt: skip
            self.on_cut()
        if slave.state is SlaveState.SUSPEND:
            log.error("ha.forked", peer=address, reason=slave.reason)
        return agreed

    def _received(self) -> None:
        link, end = self._link, self._log.max_offset
        if link is None:
            return
        if not self._settings.flushes:
            link.report()
        elif end > self._log.flushed:
            self._log.when_flushed(end, self._on_flushed)
        if end - self._log.flushed > UNFLUSHED_BYTES_MAX:
            link.hold(is_held=True)

    def _on_flushed(self, _error: BaseException | None = None) -> None:
        if self._link is not None:
            self._link.report()
            if self._log.max_offset - self._log.flushed <= UNFLUSHED_BYTES_MAX:
                self._link.hold(is_held=False)

    def _on_ended(self, link: MasterLink, reason: str) -> None:
        if link is self._link:
            self._link = None
            assert self.slave is not None
            if self.slave.state is SlaveState.TRANSFER:
                self.slave.on_disconnected(reason, self._steady_ms())
                log.info("ha.disconnected", peer=self.ha_address, reason=reason)

    def _end_link(self, reason: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end(reason)

    # --- time -------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._status.look(self._steady_ms())
            if self.master is not None:
                self.master.tick(self._steady_ms())
                self._end_links()
                if not self._begin():
                    self._compare_back(self.master)
                self._pump()
            elif self.slave is not None:
                if self._link is not None and self.slave.is_silent(self._steady_ms()):
                    self._end_link("the master is silent")
                    self.slave.on_disconnected("the master is silent", self._steady_ms())
                self._on_flushed()
                await self._follow(self.slave)
            self._wakes.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wakes.wait()
            except TimeoutError:
                pass


def open_replication(parts: Broker, report: StoreReport, machine: Machine) -> GroupReplication:
    """Returns the replication of a broker whose store is open."""
    own, role = parts.settings, parts.role
    store = parts.section(StoreSettings)
    settings = replace(
        parts.section(GroupSettings),
        replicas=parts.section(ActingSettings).replicas,
        is_synchronous=own.role == SYNC_MASTER,
        refuses=own.acting_master,
        flushes=store.is_sync,
    )
    is_intact = (
        not report.is_fresh and not report.damages and (store.is_sync or not report.was_aborted)
    )
    return GroupReplication(
        Identity(name=role.name, id=role.id, address=role.address, host=own.host),
        settings, StoreLog(parts.store, store.log_file_bytes), parts.remoting, parts.register,
        file=parts.file("groupLives.json"), machine=machine, is_intact=is_intact,
    )  # fmt: skip
