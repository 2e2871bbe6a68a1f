"""Repeats by message-id (ADR 0052): the machine, and a naive model of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.trace import TraceRows
from convoymq.model import trace as words
from convoymq.queues.quorum.backlog import EXPIRED, OVER_LENGTH
from convoymq.queues.quorum.deduplication import COUNT_MAX
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.settings import machine_settings
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DEDUPLICATED
from tests.unit.queues.quorum.support import (
    A,
    B,
    Queue,
    apply,
    expand,
    places,
    restored,
    session_id,
)


def deduplicating(**changed: int) -> Queue:
    """A queue of version 2 that remembers message-ids."""
    queue = Queue()
    queue.machine.set_version(2)
    queue.log.configure(**(changed or {"deduplication_count": 100}))
    queue.step()
    return queue


def publish(queue: Queue, *ids: bytes | None, session: int = A, after_ms: int = 1) -> list[Any]:
    for each in ids:
        queue.log.publish_as(session, 10, message_id=each)
    return queue.step(after_ms)


def ready(queue: Queue) -> list[tuple[int, int]]:
    """(entry, record) of all that is ready."""
    return [(index, record) for index, _, record in expand(queue.machine.backlog.ready_runs())]


def dropped(queue: Queue) -> int:
    return queue.machine.totals()["deduplicated"]


def test_a_repeat_is_confirmed_counted_and_dropped() -> None:
    queue = deduplicating()
    publish(queue, b"a", b"b")
    effects = publish(queue, b"c", b"b", None, b"d")
    assert ready(queue) == [(2, 0), (2, 1), (3, 0), (3, 2), (3, 3)]
    assert [effect for effect in effects if effect[0] == EFFECT_DEDUPLICATED] == [
        (EFFECT_DEDUPLICATED, 1)
    ]
    told = [effect for effect in effects if effect[0] == EFFECT_APPLIED]
    assert told == [(EFFECT_APPLIED, A, queue.machine.sessions[A].seq, 0, None)]
    assert dropped(queue) == 1
    assert queue.machine.totals()["published"] == 5
    assert queue.machine.backlog.ready_bytes() == 50


def test_another_session_repeats_too() -> None:
    queue = deduplicating()
    publish(queue, b"a", b"a")
    queue.log.close(A)
    publish(queue, b"a", session=session_id(2, incarnation=9))
    queue.log.builder.add(batch.CMD_TICK, 0, 0, 0, 0, 0, b"")
    queue.step()
    assert len(ready(queue)) == 1
    assert dropped(queue) == 2


def test_nothing_that_becomes_of_a_message_makes_its_id_forgotten() -> None:
    queue = deduplicating(deduplication_count=100, message_ttl_ms=50, max_length=2)
    publish(queue, b"purged")
    queue.log.command(A, batch.CMD_PURGE)
    publish(queue, b"expired")
    queue.log.leader(batch.CMD_TICK)
    queue.step(100)
    queue.log.checkout(B, 1, 2)
    publish(queue, b"settled", b"rejected")
    queue.log.settle(B, 1, 0, 0)
    queue.log.discard(B, 1, 1, 1)
    queue.log.cancel(B, 1)
    publish(queue, b"over", b"e", b"f")
    counts = queue.machine.backlog.dropped
    assert (counts[EXPIRED], counts[OVER_LENGTH], queue.machine.backlog.purged) == (1, 1, 1)
    restored(queue)
    again = (b"purged", b"expired", b"settled", b"rejected", b"over", b"e", b"f")
    before = ready(queue)
    publish(queue, *again)
    assert ready(queue) == before
    assert dropped(queue) == len(again)


def test_a_repeat_reaches_no_consumer() -> None:
    queue = deduplicating()
    queue.log.checkout(B, 1, 9)
    effects = publish(queue, b"a", b"a", b"b")
    assert places(queue, effects, B) == [2, 2]
    assert publish(queue, b"b", b"a")[-1][0] != EFFECT_DEDUPLICATED
    assert queue.machine.backlog.unacked == 2


def test_marked_messages_are_dropped_as_well() -> None:
    queue = deduplicating()
    for priority, expiration, each in (
        (9, None, b"a"),
        (None, "100", b"b"),
        (9, None, b"a"),
        (1, "50", b"c"),
        (0, "10", b"b"),
    ):
        queue.log.publish_as(A, 10, priority, expiration, each)
    queue.step()
    assert sorted(ready(queue)) == [(2, 0), (2, 1), (2, 3)]
    assert queue.machine.backlog.levels.with_messages() == [9, 1]
    assert dropped(queue) == 2


def test_a_producers_repeats_come_before_those_by_id() -> None:
    queue = deduplicating()
    queue.machine.trace = TraceRows()
    target = queue.log._target(A)
    for first, ids in ((0, (b"a", b"b")), (1, (b"b", b"c", b"a", b"d"))):
        for number, each in enumerate(ids):
            target.name_next(b"writer", first + number)
            record = b"\0\1q\x02\0\1" + _header(each) + b"\xce"
            target.publish([record], 0, 0)
        effects = queue.step()
    assert ready(queue) == [(2, 0), (2, 1), (3, 1), (3, 3)]
    # In the order of the records, whoever found the repeat.
    assert [row[2:] for row in _rows(queue)] == [(0, 2), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert (queue.machine.duplicates, dropped(queue)) == (1, 1)
    # The producer hears of its own repeats only.
    told = [effect[4] for effect in effects if effect[0] == EFFECT_APPLIED]
    assert told[-1] == 1


def _header(message_id: bytes) -> bytes:
    payload = bytes(2) + bytes(2) + bytes(8) + (1 << 7).to_bytes(2, "big")
    payload += bytes([len(message_id)]) + message_id
    return len(payload).to_bytes(4, "big") + payload


# Settings.


def test_the_count_bounds_what_is_remembered() -> None:
    queue = deduplicating(deduplication_count=2)
    publish(queue, b"a", b"b", b"c", b"a")
    assert len(ready(queue)) == 4
    publish(queue, b"c", b"a")
    assert dropped(queue) == 2


def test_the_time_bounds_what_is_remembered() -> None:
    queue = deduplicating(deduplication_time_ms=100)
    publish(queue, b"a")
    publish(queue, b"a", after_ms=99)
    assert dropped(queue) == 1
    # A repeat does not begin the time anew.
    publish(queue, b"a", after_ms=1)
    assert (dropped(queue), len(ready(queue))) == (1, 2)


def test_with_both_bounds_the_first_one_counts() -> None:
    queue = deduplicating(deduplication_time_ms=100, deduplication_count=1)
    publish(queue, b"a", b"b", b"a")
    assert (dropped(queue), len(ready(queue))) == (0, 3)
    publish(queue, b"a", after_ms=100)
    assert (dropped(queue), len(ready(queue))) == (0, 4)


@pytest.mark.parametrize(
    "off",
    [
        {"deduplication_count": 0},
        {"deduplication_time_ms": 0},
        {"deduplication_count": -1, "deduplication_time_ms": -1},
        {"deduplication_count": 0, "deduplication_time_ms": 500},
    ],
)
def test_a_window_that_is_switched_off_is_forgotten(off: dict[str, int]) -> None:
    queue = deduplicating(deduplication_count=5)
    publish(queue, b"a", b"a")
    queue.log.configure(**off)
    publish(queue, b"a")
    assert queue.machine.deduplication.count() == 0
    assert queue.machine.deduplication.memory_bytes() == 0
    restored(queue)
    queue.log.configure(deduplication_count=5, deduplication_time_ms=-1)
    publish(queue, b"a", b"a")
    assert (len(ready(queue)), dropped(queue)) == (3, 2)


def test_a_smaller_window_forgets_the_oldest_and_a_larger_one_nothing() -> None:
    queue = deduplicating(deduplication_count=5)
    publish(queue, b"a", b"b", b"c")
    queue.log.configure(deduplication_count=2)
    queue.step()
    assert queue.machine.deduplication.count() == 2
    queue.log.configure(deduplication_count=1000)
    publish(queue, b"b", b"c", b"a")
    assert (len(ready(queue)), dropped(queue)) == (4, 2)
    queue.log.configure(deduplication_time_ms=10)
    queue.step(10)
    assert queue.machine.deduplication.count() == 0


def test_policies_become_settings() -> None:
    made = machine_settings({"deduplication-count": 7, "deduplication-time": 0})
    assert (made["deduplication_count"], made["deduplication_time_ms"]) == (7, 0)
    made = machine_settings({})
    assert (made["deduplication_count"], made["deduplication_time_ms"]) == (-1, -1)


def test_a_time_alone_has_a_count_of_its_own() -> None:
    queue = deduplicating(deduplication_time_ms=1_000_000)
    assert queue.machine.deduplication._count_max == COUNT_MAX


def test_version_1_looks_at_no_ids() -> None:
    queue = Queue()
    publish(queue, b"a", b"a")
    queue.machine.set_version(2)
    publish(queue, b"a", b"a")
    assert (len(ready(queue)), dropped(queue)) == (4, 0)
    assert b"deduplication" not in Queue().machine.snapshot()


def test_what_is_remembered_is_memory_of_the_queue() -> None:
    queue = deduplicating()
    before = queue.machine.memory_bytes()
    publish(queue, *(b"%036d" % number for number in range(50)))
    queue.log.command(A, batch.CMD_PURGE)
    queue.step()
    assert queue.machine.memory_bytes() - before > 50 * 36
    assert queue.machine.deduplication.count() == 50


def test_a_damaged_snapshot_is_refused() -> None:
    queue = deduplicating()
    publish(queue, b"abc")
    with pytest.raises(ValueError, match="message-ids"):
        QuorumMachine().restore(queue.machine.snapshot().replace(b"\x03abc", b"\x04abc"))


def test_the_trace_names_repeats() -> None:
    queue = deduplicating()
    publish(queue, b"a")
    queue.machine.trace = TraceRows(100)
    publish(queue, b"a", b"b", b"c", b"a", b"d", b"c")
    rows = _rows(queue)
    assert rows == [
        (words.DUPLICATE, -1, 0, 1),
        (0, 1, 1, 2),
        (words.DUPLICATE, -1, 3, 1),
        (0, 3, 4, 1),
        (words.DUPLICATE, -1, 5, 1),
    ]


def _rows(queue: Queue) -> list[tuple[int, ...]]:
    """(reason, number, first record, count) of rows of published messages."""
    rows = queue.machine.trace
    assert rows is not None
    count, data = rows.take()
    flat = memoryview(data).cast("q")
    names = ("kind", "reason", "first_id", "position_first", "count")
    columns = [flat[words.ROW_COLUMNS.index(name) * count :][:count] for name in names]
    return [tuple(row[1:]) for row in zip(*columns, strict=True) if row[0] == words.PUBLISHED]


# A naive model.

ids = st.sampled_from((None, b"", *(b"%d" % number for number in range(9))))
steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(ids, min_size=1, max_size=8), st.integers(0, 1)),
    st.tuples(st.just("marked"), st.lists(ids, min_size=1, max_size=8), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.integers(1, 60)),
    st.tuples(st.just("count"), st.sampled_from((-1, 0, 1, 3, 6, 50))),
    st.tuples(st.just("time"), st.sampled_from((-1, 0, 1, 20, 90))),
    st.tuples(st.sampled_from(("purge", "restore", "consume"))),
)


class Naive:
    """Remembers ids as a list of (id, when), and looks through all of it."""

    def __init__(self) -> None:
        self.count = self.time = -1
        self.known: list[tuple[bytes, int]] = []
        self.entered: list[tuple[int, bytes | None]] = []
        self.repeats = 0

    def forget(self, now: int) -> None:
        if 0 in (self.count, self.time) or self.count == self.time == -1:
            self.known = []
        if self.time > 0:
            self.known = [(each, came) for each, came in self.known if now - came < self.time]
        if self.count > 0:
            self.known = self.known[-self.count :]

    def publish(self, index: int, each: bytes | None, now: int) -> None:
        self.forget(now)
        if each and each in [known for known, _ in self.known]:
            self.repeats += 1
            return
        self.entered.append((index, each))
        if each:
            self.known.append((each, now))
        self.forget(now)


@given(st.lists(steps, max_size=30))
def test_the_machine_is_as_the_model(chosen: list[Any]) -> None:
    queue, naive = Queue(), Naive()
    queue.machine.set_version(2)
    entered: list[tuple[int, int]] = []
    for name, *values in chosen:
        waited = 1
        match name:
            case "publish" | "marked":
                for each in values[0]:
                    priority = 7 if name == "marked" else None
                    queue.log.publish_as((A, B)[values[1]], 10, priority, None, each)
                now, index = queue.log.time_ms + 1, len(queue.log.entries) + 1
                for each in values[0]:
                    naive.publish(index, each, now)
            case "wait":
                waited = values[0]
            case "count":
                queue.log.configure(deduplication_count=values[0])
                naive.forget(queue.log.time_ms + 1)
                naive.count = values[0]
            case "time":
                queue.log.configure(deduplication_time_ms=values[0])
                # By the settings before: the entry has a time, too.
                naive.forget(queue.log.time_ms + 1)
                naive.time = values[0]
            case "purge":
                queue.log.command(A, batch.CMD_PURGE)
            case "consume":
                queue.log.get(A, settled=True)
            case _:
                restored(queue)
        before = Counter(ready(queue))
        queue.step(waited)
        naive.forget(queue.log.time_ms)
        if name in ("publish", "marked"):
            entered += sorted((Counter(ready(queue)) - before).elements())
        assert [index for index, _ in entered] == [index for index, _ in naive.entered]
        assert dropped(queue) == naive.repeats
        assert queue.machine.deduplication.count() == len(naive.known)
        assert queue.machine.totals()["published"] == len(naive.entered)


def test_a_replica_that_applies_again_comes_to_the_same() -> None:
    queue = deduplicating(deduplication_count=3, deduplication_time_ms=40)
    for turn in range(30):
        ids_of_turn = [b"%d" % (turn * step % 7) for step in range(1, 5)]
        publish(queue, *ids_of_turn, after_ms=turn % 9)
    other = QuorumMachine()
    for position, entry in enumerate(queue.log.entries):
        if position == 0:
            other.set_version(2)
        if position == 12:
            copy = QuorumMachine()
            copy.restore(other.snapshot())
            other = copy
        apply(other, entry)
    assert other.snapshot() == queue.machine.snapshot()
