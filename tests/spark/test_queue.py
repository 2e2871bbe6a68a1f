"""Reads of queues against a broker in memory that has the broker's own rules of reservations."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pytest

from convoymq.spark.errors import ReservationLost, SourceError
from convoymq.spark.queue import IDLE_TTL_MS
from tests.patience import PATIENCE_S
from tests.spark.fakes import FakeBroker, FakeQueue
from tests.spark.support import Query, batch_rows, numbered, queue_source, tasks_rows


def query(queue: str = "q", **options: Any) -> Query:
    data_source = queue_source(queue=queue, **{"convoymq.pollInterval": "0ms", **options})
    return Query(lambda: data_source.stream_reader(data_source.schema()))


def test_a_batch_looks_and_takes_nothing(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    rows = batch_rows(queue_source(queue="q", **{"convoymq.fetch.maxRows": 3}))
    assert [row["value"] for row in rows] == numbered(0, 10)
    assert {row["queue"] for row in rows} == {"q"}
    assert len(queue.ready) == 10
    assert batch_rows(queue_source(queue=broker.queue("empty") and "empty")) == []


# --- mode reservation
# ------------------------------------------------------------------------------


def test_each_message_comes_once_and_is_settled(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    running = query()
    running.start()
    running.run()
    queue.add(*numbered(10, 15))
    running.run()
    assert running.values == numbered(0, 15)
    (reservation,) = queue.reservations.by_name.values()
    assert (reservation.first, reservation.next, queue.ready) == (15, 15, [])


def test_nothing_is_settled_before_its_batch_is_committed(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query()
    running.start()
    running.step(crash="sunk")
    (reservation,) = queue.reservations.by_name.values()
    assert (reservation.first, reservation.next) == (0, 4)
    running.start()
    assert reservation.first == 0
    running.run()
    assert reservation.first == 4


@pytest.mark.parametrize("crash", ["planned", "sunk"])
def test_a_driver_that_dies_at_any_time_repeats_and_skips_nothing(
    broker: FakeBroker, crash: str
) -> None:
    queue = broker.queue("q", *numbered(0, 7))
    running = query(maxOffsetsPerTrigger=5, minPartitions=2)
    running.start()
    for i in range(7, 60, 6):
        queue.add(*numbered(i, i + 6))
        running.step(crash=crash if i % 4 else "")
        running.start()
    running.run()
    assert running.values == numbered(0, 61)
    assert not queue.ready


def test_a_driver_that_dies_before_its_plan_is_written_takes_the_same_messages(
    broker: FakeBroker,
) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query()
    running.start()
    reader = running.reader
    first = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    queue.add(*numbered(4, 6))
    running.start()
    reader = running.reader
    assert reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit()) == first
    running.run()
    assert running.values == numbered(0, 6)


def test_the_newer_of_two_owners_fences_the_older(broker: FakeBroker) -> None:
    queue = broker.queue("q", b"a")
    old = query()
    old.start()
    old.run()
    new = query()
    new.wal, new.commits = list(old.wal), old.commits
    new.start()
    queue.add(b"b")
    new.run()
    queue.add(b"c")
    with pytest.raises(ReservationLost, match=r"another query .*option reservation"):
        old.step()
    assert new.values == [b"b"]


def test_queries_with_reservations_of_their_own_share_the_queue(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    one, two = query(reservation="one", maxOffsetsPerTrigger=3), query(reservation="two")
    one.start()
    two.start()
    one.step()
    two.run()
    queue.add(*numbered(10, 12))
    one.run()
    assert one.values == [*numbered(0, 3), *numbered(10, 12)]
    assert two.values == numbered(3, 10)


def test_an_expired_reservation_is_told_and_not_a_silent_gap(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query(reservationTtl="10s")
    running.start()
    running.step(crash="planned")
    queue.expire(10_001)
    assert [m.delivered for m in queue.ready] == [1] * 4
    with pytest.raises(ReservationLost, match="messages 0 to 3 of spark can't be read any more"):
        running.start()


def test_an_expired_reservation_may_be_passed_by(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query(reservationTtl="10s", failOnDataLoss="false")
    running.start()
    running.step(crash="planned")
    queue.expire(10_001)
    running.start()
    assert running.values == []
    running.run()
    assert running.values == numbered(0, 4)


def test_a_reservation_that_expired_after_its_batch_was_sunk_is_told(broker: FakeBroker) -> None:
    """What was committed but not settled comes again: not exactly once, so an error."""
    queue = broker.queue("q", *numbered(0, 4))
    for flag in ("true", "false"):
        running = query(reservationTtl="10s", failOnDataLoss=flag)
        running.start()
        running.step()
        queue.expire(10_001)
        running.start()
        if flag == "true":
            with pytest.raises(ReservationLost, match="may come once more"):
                running.step()
        else:
            running.run()
            assert running.values == numbered(0, 4) * 2


def test_a_query_that_was_idle_may_come_back_late(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query(reservationTtl="10s")
    running.start()
    running.run()
    running.step()
    running.step()
    queue.expire(IDLE_TTL_MS - 1)
    running.start()
    queue.add(b"4")
    running.step()
    (reservation,) = queue.reservations.by_name.values()
    assert reservation.ttl_ms == 10_000
    running.run()
    assert running.values == numbered(0, 5)


def test_an_idle_reservation_of_a_single_active_queue_ends_in_time(broker: FakeBroker) -> None:
    queue = broker.queue("q", b"a")
    queue.arguments["x-single-active-consumer"] = True
    running = query(reservationTtl="10s")
    running.start()
    running.run()
    running.step()
    running.step()
    (reservation,) = queue.reservations.by_name.values()
    assert reservation.ttl_ms == 10_000


def test_an_idle_query_costs_no_log_entries(broker: FakeBroker) -> None:
    queue = broker.queue("q", b"a")
    running = query()
    running.start()
    running.run()
    for _ in range(3):
        running.step()
    before = len(queue.commands)
    for _ in range(10):
        assert not running.step()
    assert len(queue.commands) == before


def test_available_now_takes_what_is_there_and_gives_the_reservation_back(
    broker: FakeBroker,
) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    running = query(maxOffsetsPerTrigger=4)
    running.start(available_now=True)
    assert running.step()
    queue.add(*numbered(10, 12))
    running.run()
    assert running.values == numbered(0, 10)
    assert not queue.reservations.by_name
    assert len(queue.ready) == 2
    running.start(available_now=True)
    running.run()
    assert running.values == numbered(0, 12)
    assert not queue.reservations.by_name


def test_available_now_after_any_pause_and_with_an_empty_queue(broker: FakeBroker) -> None:
    queue = broker.queue("q")
    running = query(reservationTtl="10s")
    for i in range(3):
        running.start(available_now=True)
        running.run()
        queue.expire(100_000_000)
        queue.add(b"%d" % i)
    running.start(available_now=True)
    running.run()
    assert running.values == numbered(0, 3)


def test_available_now_with_a_crash_in_between(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    running = query(maxOffsetsPerTrigger=4)
    running.start(available_now=True)
    running.step(crash="planned")
    queue.add(*numbered(10, 12))
    running.start(available_now=True)
    running.run()
    assert running.values == numbered(0, 12)


@pytest.mark.parametrize("written", [False, True])
def test_available_now_after_a_death_at_its_end(broker: FakeBroker, written: bool) -> None:
    """All is settled; the driver dies before, or just after, the offset that says so is written."""
    queue = broker.queue("q", *numbered(0, 3))
    running = query()
    running.start(available_now=True)
    running.step()
    if written:
        running.step()
    else:
        reader = running.reader
        end = reader.latestOffset(json.loads(running.wal[-1]), reader.getDefaultReadLimit())
        assert end["closed"]
    queue.add(*numbered(3, 5))
    running.start(available_now=True)
    running.run()
    assert running.values == numbered(0, 5)
    assert not queue.reservations.by_name


@pytest.mark.parametrize("mode", ["reservation", "lease"])
def test_a_long_batch_that_is_repeated_after_a_restart_does_not_expire(
    broker: FakeBroker, mode: str
) -> None:
    # Of a name of its own: other tests' queries may still beat.
    queue = broker.queue("long", *numbered(0, 3))
    running = query("long", mode=mode, reservationTtl="1s")
    running.start()
    running.step(crash="planned")
    running.start()
    until_heard(queue)
    queue.expire(999)
    running.run()
    assert running.values == numbered(0, 3)
    assert not queue.ready
    running.die()


def test_a_repeated_batch_whose_reservation_is_gone_opens_no_other(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 3))
    running = query(reservationTtl="10s")
    running.start()
    running.step(crash="planned")
    queue.expire(10_001)
    with pytest.raises(ReservationLost, match="can't be read any more"):
        running.start()
    assert not queue.reservations.by_name
    assert len(queue.ready) == 3


def until_heard(queue: FakeQueue) -> None:
    """Waits for a heartbeat of the one reservation."""
    queue.time_ms += 500
    (reservation,) = queue.reservations.by_name.values()
    deadline = time.monotonic() + PATIENCE_S
    while reservation.heard_ms < queue.time_ms:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["reservation", "lease"])
def test_a_long_batch_keeps_what_it_reads(broker: FakeBroker, mode: str) -> None:
    queue = broker.queue("held", b"a")
    running = query("held", mode=mode, reservationTtl="1s")
    running.start()
    running.step()
    until_heard(queue)
    running.die()


def test_the_tasks_instance_is_pickled_without_the_reservation(broker: FakeBroker) -> None:
    broker.queue("q", b"a")
    running = query()
    running.start()
    running.step()
    there = pickle.loads(pickle.dumps(running.reader))
    assert there._held is None


def test_a_checkpoint_of_another_queue_is_refused(broker: FakeBroker) -> None:
    broker.queue("q", b"a")
    broker.queue("p", b"b")
    running = query()
    running.start()
    running.run()
    for other in (query("p"), query(mode="lease")):
        other.wal, other.commits = list(running.wal), running.commits
        other.start()
        with pytest.raises(SourceError, match="not one of queue"):
            other.step()


# --- mode lease ------------------------------------------------------------------------------


def test_leases_are_settled_by_the_next_trigger(broker: FakeBroker) -> None:
    queue = broker.queue("q", *numbered(0, 10))
    running = query(mode="lease", maxOffsetsPerTrigger=4)
    running.start()
    running.step()
    assert len(queue.reservations.by_name) == 1
    running.run()
    assert running.values == numbered(0, 10)
    assert not queue.reservations.by_name
    assert not queue.ready


@pytest.mark.parametrize("crash", ["planned", "sunk"])
def test_a_lease_outlives_its_driver(broker: FakeBroker, crash: str) -> None:
    queue = broker.queue("q", *numbered(0, 4))
    running = query(mode="lease")
    running.start()
    running.step(crash=crash)
    running.start()
    queue.add(*numbered(4, 6))
    running.run()
    assert running.values == numbered(0, 6)


def test_an_expired_lease_fails_or_is_skipped(broker: FakeBroker) -> None:
    for option, expected in (("fail", None), ("skip", numbered(0, 4))):
        queue = broker.queue("q", *numbered(0, 4))
        running = query(mode="lease", reservationTtl="10s", onExpired=option)
        running.start()
        running.step(crash="planned")
        queue.expire(10_001)
        if expected is None:
            with pytest.raises(ReservationLost, match="can't be read any more"):
                running.start()
        else:
            running.start()
            running.run()
            assert running.values == expected


def test_a_lease_that_expired_after_its_batch_comes_again(broker: FakeBroker) -> None:
    """At least once: that is this mode's promise, so no error."""
    queue = broker.queue("q", *numbered(0, 3))
    running = query(mode="lease", reservationTtl="10s")
    running.start()
    running.step()
    queue.expire(10_001)
    running.run()
    assert running.values == numbered(0, 3) * 2


def test_a_settled_lease_that_is_settled_again_is_no_error(broker: FakeBroker) -> None:
    broker.queue("q", *numbered(0, 3))
    running = query(mode="lease")
    running.start()
    running.run()
    running.start()
    running.run()
    assert running.values == numbered(0, 3)


def test_redelivered_messages_say_so(broker: FakeBroker) -> None:
    queue = broker.queue("q", b"a")
    running = query(mode="lease", reservationTtl="10s")
    running.start()
    running.step()
    queue.expire(10_001)
    running.step()
    assert [(r["delivery_count"], r["redelivered"]) for r in running.rows] == [(0, 0), (1, 1)]


def test_split_reservations_are_read_in_parts(broker: FakeBroker) -> None:
    broker.queue("q", *numbered(0, 10))
    data_source = queue_source(queue="q", minPartitions=3, **{"convoymq.fetch.maxRows": 2})
    reader = data_source.stream_reader(data_source.schema())
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    partitions = reader.partitions(start, end)
    assert len(partitions) == 3
    assert [row["value"] for row in tasks_rows(reader, partitions)] == numbered(0, 10)
