"""A slave's link, and both sides together."""

from __future__ import annotations

import random
import struct

import pytest

from convoymq.model.errors import PeerError, Refused
from convoymq.replication.group.lives import Book
from convoymq.replication.group.master import Link, Master
from convoymq.replication.group.slave import Slave
from convoymq.replication.group.stream import BLOCK_BYTES_MAX
from convoymq.replication.group.types import Ask, GroupSettings, Life, SlaveState, Tail
from tests.unit.replication.group.logs import MemoryLog, carry, record

SETTINGS = GroupSettings(replicas=2, in_sync=2)
MASTER = "h:0"


def block(offset: int, data: bytes) -> bytes:
    return struct.pack(">qi", offset, len(data)) + data


def unchecked(log: MemoryLog, settings: GroupSettings = SETTINGS) -> Slave:
    slave = Slave(1, settings, log, Book(), lambda _book: None, session=9)
    slave.follow(0)
    slave.on_no_comparison()
    return slave


def test_it_reports_at_once_after_each_append_and_every_five_seconds() -> None:
    log = MemoryLog()
    log.put(b"")
    slave = unchecked(log)
    assert slave.is_due(0)
    assert slave.on_connected(0) == struct.pack(">q", 44)
    assert slave.state is SlaveState.TRANSFER
    assert slave.report(0) is None
    data = block(44, record(44, b"abc"))
    for at in range(len(data)):
        assert slave.report(1) is None
        slave.on_data(data[at : at + 1], 1)
    assert slave.report(1) == struct.pack(">q", 91)
    slave.on_data(block(91, b""), 2)
    assert slave.report(5_000) is None
    assert slave.report(5_001) == struct.pack(">q", 91)
    assert not slave.is_silent(20_001)
    assert slave.is_silent(20_002)
    slave.on_disconnected("silence", 20_002)
    assert not slave.is_due(20_002 + SETTINGS.retry_ms - 1)
    assert slave.is_due(20_002 + SETTINGS.retry_ms)
    assert slave.report(99_999) is None


def test_what_its_disk_may_lose_is_not_reported() -> None:
    log = MemoryLog()
    log.put(b"")
    log.flushed = 0
    slave = unchecked(log, GroupSettings(flushes=True))
    assert not slave.is_due(0)
    log.flushed = 44
    assert slave.is_due(0)
    slave.on_connected(0)
    slave.on_data(block(44, record(44, b"")), 1)
    assert slave.report(1) is None
    log.flushed = 88
    assert slave.report(1) == struct.pack(">q", 88)


@pytest.mark.parametrize(
    "data",
    [
        block(43, b""),
        block(45, record(45, b"")),
        block(44, record(45, b"")),
        block(44, b"in the middle of a body, after a fork, as RocketMQ sends it"),
        struct.pack(">qi", 44, BLOCK_BYTES_MAX + 1),
        struct.pack(">qi", -1, 0),
        struct.pack(">qi", 44, -2) + b"[]",
    ],
)
def test_a_block_that_does_not_belong_at_the_end_ends_the_link(data: bytes) -> None:
    log = MemoryLog()
    log.put(b"")
    slave = unchecked(log)
    slave.on_connected(0)
    with pytest.raises(PeerError):
        slave.on_data(data, 1)
    assert log.max_offset == 44


def test_a_message_that_came_in_part_is_gone_on_with() -> None:
    log = MemoryLog()
    slave = unchecked(log)
    slave.on_connected(0)
    whole = record(1000, b"abc")
    slave.on_data(block(1000, whole[:20]), 1)
    slave.on_disconnected("", 1)
    slave.on_connected(2)
    slave.on_data(block(1020, whole[20:]), 2)
    assert (log.min_offset, log.record_before(2000)) == (1000, (1000, 1047))


def test_the_state_follows_the_master_that_is_named() -> None:
    slave = unchecked(MemoryLog())
    slave.on_disconnected("refused", 0)
    assert not slave.is_due(1)
    slave.follow(1)
    assert slave.is_due(1)
    slave.shut_down()
    assert slave.state is SlaveState.SHUTDOWN
    slave.on_disconnected("closed", 2)
    assert slave.state is SlaveState.SHUTDOWN


class Pair:
    """A master and a slave of ours."""

    def __init__(self, own: MemoryLog, copy: MemoryLog, book: Book, slave_book: Book) -> None:
        self.master = Master(SETTINGS, own, book, lambda _book: None, is_intact=True, session=3)
        self.slave = Slave(1, SETTINGS, copy, slave_book, lambda _book: None, session=4)
        self.slave.follow(0)
        self.link: Link | None = None

    def asks(self, ask: Ask) -> Tail:
        return self.master.tail(ask, 1, "h:1")

    def connect(self, now_ms: int = 0) -> bool:
        if not carry(self.slave.compare(now_ms, MASTER), self.asks, MemoryLog())[0]:
            return False
        self.link = self.master.on_connected("h", now_ms)
        assert self.link is not None
        self.master.on_data(self.link, self.slave.on_connected(now_ms), now_ms)
        return True

    def move(self, draw: random.Random, now_ms: int = 0) -> None:
        assert self.link is not None
        while parts := self.master.next_block(self.link, now_ms):
            data = b"".join(parts)
            cut = draw.randint(0, len(data))
            self.slave.on_data(data[:cut], now_ms)
            self.slave.on_data(data[cut:], now_ms)
            self.master.on_data(self.link, self.slave.report(now_ms) or b"", now_ms)


def test_a_log_is_copied_whole_from_its_first_file_on() -> None:
    own, copy = MemoryLog(), MemoryLog()
    for size in range(60):
        own.put(bytes(size * 20))
    pair = Pair(own, copy, Book(is_whole=True), Book())
    draw = random.Random(1)
    assert pair.connect()
    pair.move(draw)
    assert pair.master.begin(7)
    own.put(b"new")
    pair.move(draw)
    assert copy.data == own.data
    assert pair.slave.book.lives == pair.master.book.lives
    assert pair.link is not None
    assert pair.link.acked == own.max_offset


def test_a_slave_waits_for_a_master_to_fetch_and_then_cuts_what_is_left() -> None:
    own, copy = MemoryLog(), MemoryLog()
    for log in (own, copy):
        log.put(b"")
    copy.put(b"surplus", 1)
    lives = Book(lives=Pair(own, copy, Book(), Book()).master.book.lives)
    pair = Pair(own, copy, Book(is_whole=True), lives)
    assert not pair.connect()
    assert not pair.slave.is_due(SETTINGS.wait_ms - 1)
    assert pair.slave.is_due(SETTINGS.wait_ms)
    assert pair.master.begin(9)
    assert pair.connect()
    assert pair.slave.cut_bytes == 51
    assert copy.data == own.data


def test_a_slave_with_messages_that_may_be_acknowledged_stops_and_says_so() -> None:
    own, copy = MemoryLog(), MemoryLog()
    copy.put(b"acknowledged")
    settings = GroupSettings(replicas=2)
    master = Master(settings, own, Book(), lambda _book: None, is_intact=False, session=3)
    slave = Slave(1, settings, copy, Book(), lambda _book: None, session=4)
    slave.follow(0)
    assert master.begin(1)
    own.put(b"another", 1)
    assert not carry(slave.compare(0, MASTER), lambda ask: master.tail(ask, 1, "h:1"), own)[0]
    assert slave.state is SlaveState.SUSPEND
    assert "may have acknowledged" in slave.reason
    assert copy.max_offset == 56


def test_a_slave_cuts_nothing_that_another_master_wrote() -> None:
    """Two brokers have the master's id. The first returns with a log that is whole as far as it can
    tell, and lacks what the second one wrote; its life would have that cut."""
    own, copy = MemoryLog(), MemoryLog()
    for log in (own, copy):
        log.put(b"")
    copy.put(b"of another", 1)
    wrote = Life(number=5, begin=44, is_proven=True)
    pair = Pair(own, copy, Book(is_whole=True), Book(lives=(wrote,), master="h:other"))
    assert pair.master.begin(9)
    assert not pair.connect()
    assert pair.slave.state is SlaveState.SUSPEND
    assert copy.max_offset > own.max_offset


def test_one_of_two_slaves_with_an_id_is_linked() -> None:
    """RocketMQ's master counts both."""
    own = MemoryLog()
    pair = Pair(own, MemoryLog(), Book(is_whole=True), Book())
    assert pair.connect()
    with pytest.raises(Refused, match="slave 1 is linked from h:1: h:other has its id"):
        pair.master.tail(Ask(start=0, end=0), 1, "h:other")
    assert pair.connect()
    assert pair.link is not None
    pair.master.on_closed(pair.link)
    pair.master.tail(Ask(start=0, end=0), 1, "h:other")


def test_a_master_that_is_displaced_compares_before_it_goes_on() -> None:
    own = MemoryLog()
    own.put(b"")
    pair = Pair(own, MemoryLog(), Book(is_whole=True), Book())
    assert pair.connect()
    assert pair.master.begin(1)
    pair.master.step_down()
    assert not pair.master.links
    assert not pair.master.takes_writes
    assert not pair.master.book.is_whole
    assert not pair.master.begin(2)


def test_both_answer_what_they_have() -> None:
    own = MemoryLog()
    own.put(b"")
    pair = Pair(own, own, Book(), Book())
    answers = [ask(Ask(start=0, end=44)) for ask in (pair.asks, pair.slave.tail)]
    assert [each.member for each in answers] == [0, 1]
    assert answers[0].checksum == answers[1].checksum is not None
    assert pair.slave.tail(Ask(start=0, end=45)).checksum is None
