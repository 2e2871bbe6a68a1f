"""A simulated broker: the cores of replication, the real store on a simulated disk, and what
`rocketmq/ha/service.py` does around them, on simulated links.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from convoymq.model.errors import BrokerError, PeerError, StorageFault
from convoymq.replication.group.lives import Book
from convoymq.replication.group.master import Forked, Link, Master
from convoymq.replication.group.slave import Slave
from convoymq.replication.group.types import Ask, Fetch, SlaveState, Tail, Verdict
from convoymq.rocketmq.ha.log import StoreLog
from convoymq.rocketmq.ha.requests import (
    answer_fetch,
    answer_tail,
    ask_of,
    question_of,
    reply_of,
)
from convoymq.rocketmq.remoting.codes import Request
from convoymq.rocketmq.remoting.command import Command, CommandReader, encode
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Draft, PutStatus
from convoymq.sim.disk import SimWorker
from convoymq.sim.network import Receiver
from convoymq.sim.nodes import SimNode

if TYPE_CHECKING:
    from convoymq.sim.broker_group.world import BrokerGroupWorld

TICK_US_MAX = 60_000
ASK_TIMEOUT_US = 400_000
BOOK = "config/groupLives.json"
SERVED_BYTES_MAX = 64 << 10
"""Of what is under way to a slave."""
_HEAD = struct.Struct(">cQ")
_ASK, _REPLY, _TO_MASTER, _TO_SLAVE, _CLOSE = b"Q", b"R", b"M", b"S", b"X"
_MASTER = 1
"""Node with broker id 0."""


Comparing: TypeAlias = Generator[Ask | Fetch, Tail | bytes, object] | Generator[Ask, Tail, object]


@dataclass(slots=True)
class _Asking:
    """A comparison that waits for an answer."""

    steps: Comparing
    question: Ask | Fetch
    peer: int
    done: Callable[[object, Exception | None], None]


class BrokerNode(SimNode):
    """One broker of a `BrokerGroupWorld`."""

    world: BrokerGroupWorld
    store: MessageStore
    queues = {}  # noqa: RUF012

    @property
    def is_master(self) -> bool:
        """Returns whether it has broker id 0."""
        return self.number == _MASTER

    @property
    def copied(self) -> int:
        """Returns up to where it has the log, on its disk if messages are flushed."""
        if not hasattr(self, "store"):
            return -1
        is_sync = self.world.store_settings.is_sync
        return self.store.flushed if is_sync else self.store.max_offset

    def _open(self) -> Receiver:
        world = self.world
        scheduler = world.scheduler
        self.transport = self._make_transport()
        worker = SimWorker(scheduler, self.process, world.plan.disk, self.slow, self.wake)
        self.store = MessageStore(
            self.disk, world.store_settings, worker, clock=self.clock.now_ms,
            store_host=bytes((10, 0, 0, self.number, 0, 0, 0, 1)),
        )  # fmt: skip
        try:
            report = self.store.open()
        except StorageFault as error:
            raise OSError(error.text) from None
        is_intact = not report.is_fresh and not report.damages and (
            world.store_settings.is_sync or not report.was_aborted
        )  # fmt: skip
        self.log = StoreLog(self.store, world.store_settings.log_file_bytes)
        self._asks = 0
        self._asking: dict[int, _Asking] = {}
        self._compares = False
        self._begins = False
        self._links: dict[tuple[int, int], Link] = {}
        """(peer, connection) -> link of a slave."""
        self._connection = 0
        self._is_connected = False
        self.master: Master | None = None
        self.slave: Slave | None = None
        book = self._load()
        if self.is_master:
            self.master = Master(
                world.settings, self.log, book or Book(is_whole=is_intact), self._save,
                is_intact=is_intact, session=self.incarnation << 20,
            )  # fmt: skip
            delay_us = scheduler.between(0, 300_000)
            scheduler.after(delay_us, self.process, self._get_online)
        else:
            self.slave = Slave(
                self.number - 1, world.settings, self.log, book or Book(), self._save,
                session=self.incarnation,
            )  # fmt: skip
            self.slave.follow(0)
        world.trace.add(self.name, f"log {self.store.min_offset}-{self.store.max_offset} {report}")
        world.on_opened(self)
        self._tick()
        return self

    # --- the book ---------------------------------------------------------------------------

    def _load(self) -> Book | None:
        if not self.disk.exists(BOOK):
            return None
        file = self.disk.open(BOOK)
        return Book.decode(file.pread(file.size(), 0))

    def _save(self, book: Book) -> None:
        data = book.encode()
        file = self.disk.open(BOOK + ".new", create=True)
        file.truncate(0)
        file.pwrite([data], 0)
        file.sync()
        self.disk.rename(BOOK + ".new", BOOK)
        self.disk.sync("config")
        self.world.trace.add(self.name, f"book {data.decode()}")

    # --- time -------------------------------------------------------------------------------

    def _now(self) -> int:
        return self.clock.monotonic_ms()

    def _tick(self) -> None:
        scheduler = self.world.scheduler
        scheduler.after(scheduler.between(1_000, TICK_US_MAX), self.process, self._tick)
        self.store.tick(self._now())
        if self.master is not None:
            self.master.tick(self._now())
            self._after_input()
            if self._begins and not self._compares:
                peer = self.master.next_to_compare(self._now())
                if peer is not None:
                    self._compare_with([int(peer)])
        elif self.slave is not None:
            self._look_after_link(self.slave)
        self.wake()

    def end_of_round(self) -> None:
        """See `SimNode`."""
        self.store.kick()
        self._pump()

    # --- frames -----------------------------------------------------------------------------

    def _send(self, peer: int, kind: bytes, number: int, *body: bytes | memoryview) -> None:
        self.transport.send(peer, _HEAD.pack(kind, number), [bytes(part) for part in body])

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        kind, number = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if kind == _ASK:
            (command,) = CommandReader().feed(body)
            self._send(peer, _REPLY, number, encode(self._answer(peer, command)))
        elif kind == _REPLY:
            self._on_reply(number, body)
        elif kind == _TO_MASTER:
            self._on_slave_data(peer, number, body)
        elif kind == _TO_SLAVE:
            self._on_master_data(number, body)
        elif (link := self._links.pop((peer, number), None)) is not None and self.master:
            self.master.on_closed(link)
        elif number == self._connection:
            self._on_link_ended("closed")
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked: connections to it are gone."""
        for number in [n for n, each in self._asking.items() if each.peer == peer]:
            self._fail(number, PeerError("the connection ended"))
        for key in [key for key in self._links if key[0] == peer]:
            link = self._links.pop(key)
            if self.master is not None:
                self.master.on_closed(link)
        if peer == _MASTER:
            self._on_link_ended("the connection ended")

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""
        self.wake()

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict, which nobody asks for here."""

    # --- questions --------------------------------------------------------------------------

    def _answer(self, peer: int, command: Command) -> Command:
        if command.code == Request.FETCH_LOG:
            return answer_fetch(command, self.log)
        ask = ask_of(command)
        if self.master is None:
            assert self.slave is not None
            return answer_tail(command, self.slave.tail(ask))
        return answer_tail(command, self.master.tail(ask, peer - 1, str(peer)))

    def _carry(
        self,
        steps: Comparing,
        peer: int,
        done: Callable[[object, Exception | None], None],
    ) -> None:
        try:
            question = next(steps)
        except (BrokerError, OSError) as error:
            done(None, error)
            return
        self._ask(_Asking(steps, question, peer, done))

    def _ask(self, asking: _Asking) -> None:
        self._asks += 1
        number = self._asks
        self._asking[number] = asking
        command = question_of(asking.question, {"brokerName": "group"})
        self._send(asking.peer, _ASK, number, encode(command))
        self.world.scheduler.after(
            ASK_TIMEOUT_US, self.process, self._fail, number, PeerError("no answer in time")
        )

    def _fail(self, number: int, error: Exception) -> None:
        asking = self._asking.pop(number, None)
        if asking is not None:
            asking.done(None, error)

    def _on_reply(self, number: int, body: bytes) -> None:
        asking = self._asking.pop(number, None)
        if asking is None:
            return
        (answer,) = CommandReader().feed(body)
        try:
            reply = reply_of(asking.question, answer)
            asking.question = asking.steps.send(reply)  # type: ignore[arg-type]
        except StopIteration as ended:
            asking.done(ended.value, None)
        except (BrokerError, OSError) as error:
            asking.done(None, error)
        else:
            self._ask(asking)

    # --- a master ---------------------------------------------------------------------------

    def _get_online(self) -> None:
        """As pre-online: compares with those slaves that are listed now, then wants to begin."""
        listed = [peer for peer in self.world.replicas if peer != self.number]
        self._compare_with([peer for peer in listed if self.transport.is_connected(peer)])

    def _compare_with(self, peers: list[int]) -> None:
        assert self.master is not None
        if not peers:
            self._begins = True
            self._after_input()
        else:
            self._compares = True
            self._carry(self.master.compare(), peers[0], partial(self._compared, peers))

    def _compared(self, peers: list[int], result: object, error: Exception | None) -> None:
        self._compares = False
        self.world.trace.add(self.name, f"compared with {peers[0]}: {result} {error or ''}")
        if isinstance(error, Forked):
            self.world.on_forked(self, error.text)
        if error is None or self._begins or not self.transport.is_connected(peers[0]):
            peers = peers[1:]
        if not self._begins or peers:
            self.world.scheduler.after(
                self.world.scheduler.between(1_000, 100_000),
                self.process,
                self._compare_with,
                peers,
            )
        self._after_input()

    def _after_input(self) -> None:
        master = self.master
        assert master is not None
        may_begin = self._begins and not master.takes_writes and not self._compares
        try:
            if may_begin and master.begin(self.clock.now_ms()):
                self.world.trace.add(self.name, f"life begins at {self.store.max_offset}")
        except OSError as error:
            # A full disk: the next input tries again.
            self.world.trace.add(self.name, f"no life begins: {error}")
        while master.ended:
            link, reason = master.ended.popleft()
            for key in [key for key, each in self._links.items() if each is link]:
                del self._links[key]
                self.world.trace.add(self.name, f"ends the link of {key[0]}: {reason}")
                self._send(key[0], _CLOSE, key[1])
        self._pump()

    def _on_slave_data(self, peer: int, number: int, body: bytes) -> None:
        if self.master is None:
            return
        link = self._links.get((peer, number))
        if link is None:
            if number == 0 or not body:
                return
            if body[0] < 0x80:
                # The rest of a connection that was ended here.
                self._send(peer, _CLOSE, number)
                return
            link = self.master.on_connected(f"10.0.0.{peer}", self._now())
            assert link is not None
            self._links[(peer, number)] = link
        self.master.on_data(link, body, self._now())
        self._after_input()

    def _pump(self) -> None:
        if self.master is None:
            return
        for (peer, number), link in list(self._links.items()):
            while self.transport.backlog_bytes(peer) < SERVED_BYTES_MAX:
                parts = self.master.next_block(link, self._now())
                if not parts:
                    break
                self._send(peer, _TO_SLAVE, number, *parts)

    # --- a slave ----------------------------------------------------------------------------

    def _look_after_link(self, slave: Slave) -> None:
        if self._is_connected and slave.is_silent(self._now()):
            self._on_link_ended("silence")
        self._report(slave)
        if not self._compares and slave.is_due(self._now()):
            self._compares = True
            self._carry(slave.compare(self._now(), str(_MASTER)), _MASTER, self._slave_compared)

    def _slave_compared(self, agreed: object, error: Exception | None) -> None:
        slave = self.slave
        assert slave is not None
        self._compares = False
        if slave.state is SlaveState.SUSPEND:
            self.world.on_forked(self, slave.reason)
        if error is not None:
            slave.on_disconnected(str(error), self._now())
        elif agreed and self.transport.is_connected(_MASTER):
            self._connection = self.incarnation << 20 | (self._asks + 1)
            self._is_connected = True
            self._send(_MASTER, _TO_MASTER, self._connection, slave.on_connected(self._now()))
            self.world.trace.add(self.name, f"connects at {self.store.max_offset}")
        elif agreed:
            slave.on_disconnected("not connected", self._now())

    def _on_master_data(self, number: int, body: bytes) -> None:
        slave = self.slave
        if slave is None or not self._is_connected or number != self._connection:
            return
        try:
            slave.on_data(body, self._now())
        except (BrokerError, OSError) as error:
            self.world.trace.add(self.name, f"refuses a block: {error}")
            self._send(_MASTER, _CLOSE, number)
            self._on_link_ended(str(error))
            return
        self._report(slave)
        self.store.when_flushed(self.store.max_offset, lambda _error: self._report(slave))
        self.wake()

    def _report(self, slave: Slave) -> None:
        data = slave.report(self._now()) if self._is_connected else None
        if data is not None:
            self._send(_MASTER, _TO_MASTER, self._connection, data)

    def _on_link_ended(self, reason: str) -> None:
        if self._is_connected and self.slave is not None:
            self._is_connected = False
            self._connection = 0
            self.slave.on_disconnected(reason, self._now())

    # --- clients ----------------------------------------------------------------------------

    @property
    def own_link(self) -> object:
        """Returns the number of a slave's connection to its master, None without one."""
        return (self.number, self._connection) if self.alive and self._is_connected else None

    @property
    def slave_links(self) -> Collection[object]:
        """Returns the numbers of connections of slaves to this master."""
        return self._links

    def put(
        self,
        messages: list[tuple[int, Draft]],
        done: Callable[[int, int, int, PutStatus], None],
    ) -> None:
        """Takes numbered messages of a client; calls back with number, queue offset, end in the
        log and status of each."""
        master = self.master
        if master is None or master.refusal(self._now()) is not None:
            for number, _ in messages:
                done(number, 0, 0, PutStatus.SERVICE_NOT_AVAILABLE)
            return
        drafts = [draft for _, draft in messages]
        for (number, _), placed in zip(
            messages, self.store.put(drafts, self.clock.now_ms()), strict=True
        ):
            end = placed.physical + placed.size
            if placed.status is PutStatus.PUT_OK:
                answer = Answer(partial(done, number, placed.queue_offset, end))
                self.store.when_flushed(end, answer.on_flushed)
                master.wait(end, self._now(), self.world.settings.timeout_ms, answer.on_verdict)
            else:
                done(number, 0, 0, placed.status)
        self.wake()


class Answer:
    """Answer to one message: it waits for the disk and for slaves."""

    def __init__(self, done: Callable[[PutStatus], None]) -> None:
        self._done = done
        self._waits = 2
        self._status = PutStatus.PUT_OK

    def on_flushed(self, error: BaseException | None) -> None:
        """The disk has it, or failed."""
        self._part(PutStatus.PUT_OK if error is None else PutStatus.UNKNOWN_ERROR)

    def on_verdict(self, verdict: Verdict) -> None:
        """Slaves have it, or not in time."""
        is_ok = verdict is Verdict.OK
        self._part(PutStatus.PUT_OK if is_ok else PutStatus.FLUSH_SLAVE_TIMEOUT)

    def _part(self, status: PutStatus) -> None:
        self._waits -= 1
        if status is not PutStatus.PUT_OK:
            self._status = status
        if not self._waits:
            self._done(self._status)
