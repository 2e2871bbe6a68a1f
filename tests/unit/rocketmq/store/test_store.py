"""A store: put, dispatch, read, recovery, and the log as another broker has it."""

from __future__ import annotations

import random

import pytest

from convoymq.kernels.rocketmq_records import BODY, is_record
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.consume_queues import ENTRY
from convoymq.rocketmq.store.jobs import Interrupted
from convoymq.rocketmq.store.types import (
    Boundary,
    Draft,
    GetStatus,
    Message,
    PutStatus,
    Run,
    encode_properties,
)
from tests.unit.rocketmq.store.stores import HOST, Opened

MODES = pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])


def drafts(count: int, topic: str = "a", queues: int = 3, size: int = 50) -> list[Draft]:
    return [Draft(topic, i % queues, f"{i} ".encode() * (size // 3)) for i in range(count)]


def test_a_message_is_found_by_queue_and_by_place() -> None:
    opened = Opened()
    properties = encode_properties({"TAGS": "blue", "KEYS": "k1 k2"})
    draft = Draft(
        "orders", 2, b"body", properties, flag=7, born_ms=5, born_host=bytes(range(20)),
        reconsume_times=3, prepared_offset=99,
    )  # fmt: skip
    (placed,) = opened.put(draft)
    assert placed.message_id == HOST.hex().upper() + "0" * 16
    found = opened.store.message_at(placed.physical)
    assert found is not None
    assert (found.topic, found.queue_id, found.queue_offset, found.size) == (
        "orders", 2, 0, placed.size,
    )  # fmt: skip
    assert found.properties == {"TAGS": "blue", "KEYS": "k1 k2"}
    assert (found.message_id, found.stored_ms) == (placed.message_id, opened.now)
    assert found.store_host == HOST
    draft.sys_flag = 0x10
    assert found.draft() == draft
    assert opened.store.message_at(placed.physical + 1) is None
    got = opened.store.get("orders", 2, 0, 5)
    assert (got.status, got.next, got.records) == (GetStatus.FOUND, 1, [found.record])


@MODES
def test_messages_are_there_after_an_orderly_end(flush: str) -> None:
    """Over several files of log and queues."""
    opened = Opened(flush=flush)
    put = drafts(300)
    for start in range(0, 300, 7):
        opened.put(*put[start : start + 7])
    again = Opened(opened.close(), flush=flush)
    assert not again.report.was_aborted
    assert again.report.damages == []
    for queue in range(3):
        assert again.bodies("a", queue) == [d.body for d in put[queue::3]]
    assert again.put(Draft("a", 1, b"next"))[0].queue_offset == 100
    assert again.store.max_offset > 4 * 8192


@MODES
def test_a_message_is_readable_when_it_is_stored(flush: str) -> None:
    opened = Opened(flush=flush)
    told: list[object] = []
    opened.store.on_dispatched.append(lambda message: told.append(message.queue_offset))
    opened.store.on_run.append(lambda run: told.append((run.queue_offset, run.count)))
    (placed,) = opened.store.put([Draft("a", 0, b"x")], 0)
    opened.store.when_flushed(placed.physical + placed.size, told.append)
    assert (told, opened.store.queue_max("a", 0)) == ([], 0)
    opened.settle()
    assert told == [(0, 1), 0, None]
    assert opened.store.queue_max("a", 0) == 1
    opened.store.when_flushed(placed.physical + placed.size, told.append)
    assert told[-1] is None


def test_a_run_is_as_long_as_neighbours_of_a_queue_are() -> None:
    opened = Opened()
    runs: list[Run] = []
    opened.store.on_run.append(runs.append)
    tagged = Draft("a", 0, b"x", encode_properties({"TAGS": "t"}))
    opened.put(tagged, tagged, Draft("a", 1, b"x"), tagged, Draft("b", 1, b"x"))
    assert [(run.topic, run.queue_id, run.queue_offset, run.count) for run in runs] == [
        ("a", 0, 0, 2), ("a", 1, 0, 1), ("a", 0, 2, 1), ("b", 1, 0, 1),
    ]  # fmt: skip
    assert [code for _, _, code in ENTRY.iter_unpack(runs[0].entries)] == [ord("t")] * 2


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
        (3, GetStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
    ],
)
def test_offsets_outside_a_queue_have_a_status(
    offset: int, status: GetStatus, next_offset: int
) -> None:
    opened = Opened()
    opened.put(*drafts(3, queues=1))
    got = opened.store.get("a", 0, offset, 5)
    assert (got.status, got.next, got.min, got.max) == (status, next_offset, 0, 3)
    assert opened.store.get("a", 9, 0, 5).status is GetStatus.NO_MATCHED_LOGIC_QUEUE


def test_a_filter_is_asked_with_the_code_first() -> None:
    opened = Opened()
    red, blue = (Draft("a", 0, b"x", encode_properties({"TAGS": t})) for t in ("red", "blue"))
    opened.put(*[red] * 40, blue)
    code = Message(opened.store.get("a", 0, 40, 1).records[0]).tags_code
    got = opened.store.get("a", 0, 0, 8, matches=lambda found, _message: found == code)
    assert (got.status, got.next, len(got.records)) == (GetStatus.FOUND, 41, 1)
    got = opened.store.get("a", 0, 0, 8, matches=lambda _found, message: message is None)
    assert (got.status, got.next) == (GetStatus.NO_MATCHED_MESSAGE, 41)


def test_what_cannot_be_stored_is_refused_alone() -> None:
    opened = Opened(message_bytes_max=2000)
    placed = opened.store.put(
        [
            Draft("a/../b", 0, b"x"), Draft("", 0, b"x"), Draft("a", -1, b"x"),
            Draft("a", 0, bytes(2001)), Draft("a", 0, b"x", bytes(0x8000)),
            Draft("a", 0, b"x", is_batch=True), Draft("a", 0, b"good"),
        ],
        0,
    )  # fmt: skip
    opened.settle()
    assert [one.status for one in placed] == [
        *[PutStatus.MESSAGE_ILLEGAL] * 4, PutStatus.PROPERTIES_SIZE_EXCEEDED,
        PutStatus.MESSAGE_ILLEGAL, PutStatus.PUT_OK,
    ]  # fmt: skip
    assert opened.bodies("a") == [b"good"]


def test_a_time_stands_for_a_message() -> None:
    opened = Opened()
    for ms in (10, 20, 20, 30):
        opened.now = ms
        opened.put(Draft("a", 0, b"x"))
    at = opened.store.offset_at
    assert [at("a", 0, ms) for ms in (5, 10, 15, 20, 30, 31)] == [0, 0, 1, 1, 3, 4]
    assert [at("a", 0, ms, Boundary.UPPER) for ms in (5, 10, 15, 20, 31)] == [0, 0, 0, 2, 3]
    assert opened.store.earliest_time("a", 0) == 10
    assert opened.store.store_time("a", 0, 3) == 30
    assert opened.store.store_time("a", 0, 4) == -1


@pytest.mark.parametrize("seed", range(5))
def test_a_log_is_taken_over_in_parts(seed: int) -> None:
    """A slave has the same bytes and the same queues, however they were cut."""
    random_ = random.Random(seed)
    master, slave = Opened(), Opened()
    messages: list[tuple[str, int]] = []
    slave.store.on_dispatched.append(lambda m: messages.append((m.topic, m.queue_offset)))
    master.put(*drafts(200, size=300))
    while slave.store.max_offset < master.store.max_offset:
        part = master.store.read_raw(slave.store.max_offset, random_.randrange(1, 900))
        slave.store.append_raw(slave.store.max_offset, bytes(part))
        if random_.random() < 0.5:
            slave.settle()
    slave.settle()
    assert [slave.bodies("a", q) for q in range(3)] == [master.bodies("a", q) for q in range(3)]
    assert messages == [("a", i // 3) for i in range(200)]
    end = slave.store.max_offset
    assert slave.store.checksum(end, end) == master.store.checksum(end, end)
    assert slave.put(Draft("a", 0, b"x"))[0].queue_offset == 67


def test_a_log_may_begin_in_the_middle() -> None:
    """A slave that is empty gets the last file only: its queues begin where that does."""
    master, slave = Opened(), Opened()
    master.put(*drafts(200, size=300))
    start = (master.store.max_offset // 8192 - 1) * 8192
    while part := master.store.read_raw(max(start, slave.store.max_offset), 1000):
        slave.store.append_raw(max(start, slave.store.max_offset), bytes(part))
    slave.settle()
    assert slave.store.min_offset == start
    first = slave.store.queue_min("a", 0)
    assert first > 0
    assert slave.bodies("a", 0, first) == master.bodies("a", 0, first)
    again = Opened(slave.close())
    assert (again.store.queue_min("a", 0), again.store.queue_max("a", 0)) == (first, 67)


def test_foreign_bytes_are_refused() -> None:
    opened = Opened()
    opened.put(*drafts(3))
    end = opened.store.max_offset
    for offset, block in ((end + 1, b"x"), (end, b"no record at all" * 8), (end, bytes(100))):
        with pytest.raises(StorageFault):
            opened.store.append_raw(offset, block)
    assert opened.store.max_offset == end


def test_the_end_of_a_log_is_cut() -> None:
    opened = Opened()
    placed = opened.put(*drafts(200, size=300))
    opened.store.truncate(placed[60].physical)
    assert [opened.store.queue_max("a", q) for q in range(3)] == [20, 20, 20]
    assert opened.put(Draft("a", 2, b"after"))[0].queue_offset == 20
    again = Opened(opened.close())
    assert again.bodies("a", 2)[19:] == [drafts(200, size=300)[59].body, b"after"]


def test_those_who_wait_for_what_is_cut_hear_of_it() -> None:
    """Whoever waits for less goes on, in the order of offsets."""
    opened = Opened(flush="SYNC_FLUSH")
    placed = opened.store.put(drafts(4), 0)
    ends = [one.physical + one.size for one in placed]
    told: list[tuple[int, type]] = []
    for number in (3, 1, 0, 2):
        opened.store.when_flushed(
            ends[number], lambda error, number=number: told.append((number, type(error)))
        )
    opened.store.truncate(ends[1])
    assert sorted(told) == [(2, Interrupted), (3, Interrupted)]
    opened.settle()
    assert told[2:] == [(0, type(None)), (1, type(None))]


def test_a_listener_that_fails_keeps_nothing_from_the_others() -> None:
    opened = Opened()
    told: list[int] = []

    def fail(_message: Message) -> None:
        raise ValueError("planted")

    opened.store.on_dispatched += [fail, lambda message: told.append(message.queue_offset)]
    (placed,) = opened.store.put([Draft("a", 0, b"x")], 0)
    opened.store.when_flushed(placed.physical + placed.size, lambda _error: told.append(-1))
    with pytest.raises(ValueError, match="planted"):
        opened.store.kick()
    assert told == [0, -1]
    assert opened.bodies("a") == [b"x"]


def test_a_topic_whose_end_is_a_lost_sector_is_damage() -> None:
    """Seed 2888 of the load `group`: recovery took such a record for whole, with another topic."""
    opened = Opened()
    opened.put(Draft("t", 0, bytes(326)))
    (placed,) = opened.put(Draft("orders", 0, b"xy"))
    record = bytearray(opened.store.read_raw(placed.physical, placed.size))
    lost = 512 - placed.physical
    assert placed.size - 8 < lost < placed.size
    assert is_record(memoryview(bytes(record)), placed.physical, BODY)
    record[lost:] = bytes(placed.size - lost)
    assert not is_record(memoryview(bytes(record)), placed.physical, BODY)
