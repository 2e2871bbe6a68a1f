"""Links, confirmations, and the life of a master."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from convoymq.model.errors import InvariantViolated
from convoymq.replication.group.lives import Book, life_at
from convoymq.replication.group.master import LINKS_MAX, Forked, Link, Master
from convoymq.replication.group.stream import hello
from convoymq.replication.group.tails import Step
from convoymq.replication.group.types import Ask, GroupSettings, Tail, Verdict
from tests.unit.replication.group.logs import BLANK, MemoryLog, carry

SETTINGS = GroupSettings(replicas=3, in_sync=2)


def word(*values: int) -> bytes:
    return b"".join(struct.pack(">q", value) for value in values)


class Bed:
    """A master whose life has begun."""

    def __init__(self, settings: GroupSettings = SETTINGS, messages: int = 1) -> None:
        self.log = MemoryLog()
        for _ in range(messages):
            self.log.put(b"")
        self.saved: list[Book] = []
        self.master = Master(
            settings, self.log, Book(is_whole=True), self.saved.append, is_intact=True, session=5
        )
        assert self.master.begin(1_000)
        self.verdicts: list[Verdict] = []

    def link(self, slave: int | None = None, at: int = 0, now_ms: int = 0) -> Link:
        link = self.master.on_connected("10.0.0.1", now_ms)
        assert link is not None
        first = b"" if slave is None else hello(slave, self.master.session)
        self.master.on_data(link, first + word(at), now_ms)
        return link

    def put(self, now_ms: int = 0, timeout_ms: int = 3_000) -> int:
        end = self.log.put(b"")
        self.master.wait(end, now_ms, timeout_ms, self.verdicts.append)
        return end


def test_a_send_is_confirmed_by_as_many_different_slaves_as_it_needs() -> None:
    bed = Bed(replace(SETTINGS, in_sync=3))
    one, other = bed.link(1), bed.link(2)
    end = bed.put()
    bed.master.on_data(one, word(end), 1)
    assert bed.verdicts == []
    # The same slave on another connection is no other slave.
    bed.link(1, end)
    assert bed.verdicts == []
    assert not one.is_open
    bed.master.on_data(other, word(end)[:5], 1)
    assert bed.verdicts == []
    bed.master.on_data(other, word(end)[5:], 1)
    assert bed.verdicts == [Verdict.OK]
    assert bed.master.pushed == end


def test_a_report_counts_only_as_long_as_its_link_stands() -> None:
    bed = Bed()
    link = bed.link(1)
    bed.master.on_data(link, word(bed.log.max_offset), 1)
    bed.master.on_closed(link)
    bed.master.wait(bed.log.max_offset, 1, 3_000, bed.verdicts.append)
    assert bed.verdicts == []
    bed.master.on_data(link, word(bed.log.max_offset), 1)
    assert bed.verdicts == []


def test_sends_that_nobody_confirms_end_in_time_and_others_do_not() -> None:
    bed = Bed()
    link = bed.link(1)
    first = bed.put(now_ms=0)
    bed.put(now_ms=1_000)
    bed.master.tick(2_999)
    assert bed.verdicts == []
    bed.master.tick(3_000)
    assert bed.verdicts == [Verdict.SLAVE_TIMEOUT]
    bed.master.on_data(link, word(first), 3_001)
    assert len(bed.verdicts) == 1
    bed.master.on_data(link, word(bed.log.max_offset), 3_002)
    assert bed.verdicts == [Verdict.SLAVE_TIMEOUT, Verdict.OK]


def test_as_many_sends_as_may_wait_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoymq.replication.group.master.WAITING_MAX", 3)
    bed = Bed()
    bed.link(1)
    end = bed.log.put(b"")
    for _ in range(3):
        bed.master.wait(end, 0, 3_000, bed.verdicts.append)
    assert bed.verdicts == []
    bed.master.wait(end, 0, 3_000, bed.verdicts.append)
    assert bed.verdicts == [Verdict.SLAVE_TIMEOUT]


def test_replicas_in_sync_are_those_that_are_heard_and_near() -> None:
    bed = Bed(replace(SETTINGS, gap_bytes_max=100), messages=4)
    assert bed.master.refusal(0) is Verdict.NOT_ENOUGH
    far, near = bed.link(1, 76), bed.link(2, 77)
    assert bed.log.max_offset == 176
    assert bed.master.in_sync(0) == 2
    bed.master.on_data(far, word(77), 0)
    assert bed.master.in_sync(0) == 3
    bed.master.on_data(near, word(77), 10_000)
    assert bed.master.in_sync(20_000) == 2
    bed.master.tick(20_000)
    assert [(link, reason) for link, reason in bed.master.ended] == [(far, "it is silent")]
    bed.master.alive = 1
    assert bed.master.refusal(20_000) is Verdict.NOT_ENOUGH


@pytest.mark.parametrize(
    ("settings", "slaves", "refusal", "needs"),
    [
        (replace(SETTINGS, in_sync=3, auto=True), 1, None, 2),
        (replace(SETTINGS, in_sync=3, auto=True, in_sync_min=3), 1, Verdict.NOT_ENOUGH, 3),
        (replace(SETTINGS, in_sync=3, auto=True), 0, None, 1),
        (replace(SETTINGS, refuses=False), 0, None, 2),
        (replace(SETTINGS, is_synchronous=False), 0, None, 1),
        (replace(SETTINGS, in_sync=1), 0, None, 1),
    ],
)
def test_how_many_copies_a_send_needs(
    settings: GroupSettings, slaves: int, refusal: Verdict | None, needs: int
) -> None:
    bed = Bed(settings)
    for number in range(slaves):
        bed.link(number + 1)
    assert bed.master.refusal(0) is refusal
    bed.put()
    assert bed.verdicts == ([Verdict.OK] if needs == 1 else [])
    for count, link in enumerate(list(bed.master.links.values()), 2):
        bed.master.on_data(link, word(bed.log.max_offset), 0)
        assert bed.verdicts == ([Verdict.OK] if count >= needs else [])


def test_rocketmqs_slaves_start_at_the_last_file_and_ours_at_the_first() -> None:
    bed = Bed(messages=30)
    assert bed.log.max_offset == 1320
    assert bed.link().next == 1000
    assert bed.link(at=44).next == 44
    assert bed.link(1).next == 0


def test_blocks_heartbeats_and_lives() -> None:
    bed = Bed(messages=2)
    ours, other = bed.link(1, 44), bed.link(at=44)
    lives = bed.master.next_block(ours, 0)
    assert struct.unpack(">qi", lives[0]) == (44, -len(lives[1]))
    for link in (ours, other):
        header, block = bed.master.next_block(link, 0)
        assert (struct.unpack(">qi", header), len(block)) == ((44, 44), 44)
        assert bed.master.next_block(link, 4_999) == []
        assert bed.master.next_block(link, 5_000) == [struct.pack(">qi", 88, 0)]
        assert bed.master.next_block(link, 5_001) == []
    bed.master.on_closed(ours)
    bed.log.put(b"")
    assert bed.master.next_block(ours, 5_001) == []


@pytest.mark.parametrize("slave", [1, None], ids=["ours", "RocketMQ's"])
def test_a_slave_is_sent_what_is_stored_and_the_rest_later(slave: int | None) -> None:
    bed = Bed()
    link = bed.link(slave, 44)
    if slave is not None:
        bed.master.next_block(link, 0)
    bed.log.flushed = 44
    bed.put()
    bed.put()
    assert bed.master.next_block(link, 0) == []
    for flushed in (88, 132):
        bed.log.flushed = flushed
        header, block = bed.master.next_block(link, 0)
        assert (struct.unpack(">qi", header), len(block)) == ((flushed - 44, 44), 44)
        assert bed.master.next_block(link, 0) == []


def test_a_slave_of_rocketmqs_with_a_longer_log_is_refused_until_it_is_emptied() -> None:
    """Upstream: the master idles at the slave's offset, and once its own log has grown past it
    sends bytes from there on: a fork, served in mid-record."""
    bed = Bed()
    assert not bed.link(at=100).is_open
    while bed.log.max_offset < 200:
        bed.log.put(b"")
    assert not bed.link(at=100).is_open
    assert [reason for _, reason in bed.master.ended][-1].startswith("its log ends at 100")
    assert bed.link(at=0).is_open
    assert bed.link(at=100).is_open


def test_what_a_link_may_not_say() -> None:
    bed = Bed()
    for data in (word(-1 - 1, 6, 0), word(-1 - 1, 5, 45), word(-1 - 1, 5, -2), word(44, -1)):
        link = bed.master.on_connected("h", 0)
        assert link is not None
        bed.master.on_data(link, data, 0)
        assert not link.is_open
    for _ in range(LINKS_MAX):
        assert bed.master.on_connected("h", 0) is not None
    assert bed.master.on_connected("h", 0) is None


class Slave:
    """A slave's log and lives, as it answers a master."""

    def __init__(self, number: int, log: MemoryLog, book: Book) -> None:
        self.number, self.log, self.book = number, log, book

    def tail(self, ask: Ask) -> Tail:
        from convoymq.replication.group.member import tail_of

        return tail_of(self.log, ask, self.number, 1, self.book, takes_writes=False)


def returning(log: MemoryLog, book: Book, settings: GroupSettings = SETTINGS) -> Master:
    return Master(settings, log, book, lambda _book: None, is_intact=False, session=1)


def test_a_master_that_may_lack_messages_fetches_them_before_it_takes_writes() -> None:
    own, full, short = MemoryLog(), MemoryLog(), MemoryLog()
    for log, count in ((own, 1), (full, 3), (short, 2)):
        for _ in range(count):
            log.put(b"")
    master = returning(own, Book(is_whole=True))
    assert not master.book.is_whole
    book = Book(lives=master.book.lives)
    assert not master.begin(1)
    assert master.refusal(0) is Verdict.NOT_ONLINE
    slave = Slave(1, short, book)
    assert carry(master.compare(), slave.tail, short)[0] is Step.FETCH
    # One of the two others may have what this one lacks.
    assert not master.begin(1)
    slave = Slave(2, full, book)
    assert carry(master.compare(), slave.tail, full)[0] is Step.FETCH
    assert own.data == full.data
    assert master.begin(1)
    life = life_at(master.book.lives, own.max_offset)
    assert (life.begin, life.is_proven, master.book.is_whole) == (132, True, True)
    assert carry(master.compare(), slave.tail, full)[0] is Step.NOTHING


def test_slaves_that_asked_are_compared_with_until_a_life_begins() -> None:
    """Found by seed 121: both were linked while another was asked, and none asked again."""
    master = returning(MemoryLog(), Book())
    for slave in (1, 2):
        master.tail(Ask(start=0, end=0), slave, f"h:{slave}")
    link = master.on_connected("h", 0)
    assert link is not None
    master.on_data(link, hello(1, 1) + word(0), 0)
    assert master.next_to_compare(0) == "h:1"
    assert master.next_to_compare(1) is None
    assert master.next_to_compare(500) == "h:2"
    assert master.next_to_compare(1_000) == "h:1"
    # The other one has no link: it will ask again.
    assert master.next_to_compare(1_500) == "h:1"
    carry(master.compare(), Slave(1, MemoryLog(), Book()).tail, MemoryLog())
    assert master.next_to_compare(2_000) is None


def test_a_slave_that_was_asked_before_its_link_stood_is_asked_again() -> None:
    """Found by seed 910489: the answer was lost, and a linked slave asks nothing itself."""
    master = returning(MemoryLog(), Book())
    master.tail(Ask(start=0, end=0), 1, "h:1")
    assert master.next_to_compare(0) == "h:1"
    link = master.on_connected("h", 0)
    assert link is not None
    master.on_data(link, hello(1, 1), 0)
    assert master.next_to_compare(500) == "h:1"


@pytest.mark.parametrize("flushes", [True, False])
def test_a_life_begins_when_what_was_fetched_is_stored(flushes: bool) -> None:
    """With ASYNC_FLUSH as well, where the disk may be full: readers see what is stored."""
    own, full = MemoryLog(), MemoryLog()
    full.put(b"")
    master = returning(own, Book(), GroupSettings(replicas=2, in_sync=2, flushes=flushes))
    own.flushed = 0
    carry(master.compare(), Slave(1, full, Book()).tail, full)
    assert not master.begin(1)
    own.flushed = own.max_offset
    assert master.begin(1)


def test_without_a_promise_a_life_begins_alone_and_says_so() -> None:
    master = returning(MemoryLog(), Book(), GroupSettings(replicas=2))
    assert master.begin(1)
    assert not master.book.lives[-1].is_proven
    assert not master.book.is_whole


def test_a_master_cuts_what_a_later_life_went_on_without() -> None:
    own, other = MemoryLog(), MemoryLog()
    for log in (own, other):
        log.put(b"")
    own.put(b"", 1)
    other.put(b"", 2)
    other.put(b"", 2)
    first = Book(lives=Bed().master.book.lives)
    master = returning(own, first)
    later = first.lives[-1]
    its = Book(lives=(*first.lives, replace(later, number=later.number + 1)))
    link = master.on_connected("h", 0)
    assert link is not None
    assert carry(master.compare(), Slave(1, other, its).tail, other)[0] is Step.FETCH
    assert own.data == other.data
    assert master.book.lives == its.lives
    assert not link.is_open
    assert master.session == 2
    unproven = Book(lives=(*first.lives, replace(its.lives[-1], is_proven=False)))
    third = MemoryLog()
    third.put(b"")
    third.put(b"", 3)
    with pytest.raises(Forked, match="may have acknowledged"):
        carry(returning(third, first).compare(), Slave(1, other, unproven).tail, other)


def test_what_fills_up_a_file_is_no_surplus() -> None:
    """Found by seed 1123: the log ended with it after a crash, and the slave's went on behind."""
    own, full = MemoryLog(), MemoryLog()
    for log in (own, full):
        log.put(b"")
        log.append_raw(44, struct.pack(">II92x", 100, BLANK))
    full.put(b"")
    master = returning(own, Book())
    assert carry(master.compare(), Slave(1, full, Book()).tail, full)[0] is Step.FETCH
    assert own.data == full.data


def test_a_log_is_not_cut_in_a_life() -> None:
    bed = Bed()
    with pytest.raises(InvariantViolated):
        bed.master._cut(0)


def test_a_slave_that_compares_nothing_counts_as_compared() -> None:
    master = returning(MemoryLog(), Book())
    for host in ("a", "b"):
        link = master.on_connected(host, 0)
        assert link is not None
        assert not master.begin(1)
        master.on_data(link, word(0), 0)
    assert master.begin(1)
