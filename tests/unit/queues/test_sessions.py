"""Producers by name, on the machine of quorum queues; the rule is the same for all machines."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch
from convoymq.queues import sessions
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_APPLIED
from tests.unit.queues.quorum.support import Log, apply, expand, session_id

A = session_id(1, 1)
B = session_id(2, 1)


def producer(log: Log, session: int, name: bytes, first: int) -> None:
    body = first.to_bytes(8, "little") + name
    log.command(session, batch.CMD_PRODUCER, count=len(name), body=body)


def produce(log: Log, session: int, name: bytes, first: int, count: int) -> None:
    producer(log, session, name, first)
    log.publish(session, [10] * count)


def run(machine: QuorumMachine, log: Log) -> list[tuple[int, ...]]:
    """Seals, applies; returns (session, seq, status, reply) of the answers."""
    effects = apply(machine, log.seal())
    check_invariants(machine)
    return [effect[1:] for effect in effects if effect[0] == EFFECT_APPLIED]


def test_repeats_are_dropped_and_counted_from_whatever_session() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 10, 5)
    assert run(machine, log) == [(A, 3, 0, None)]
    produce(log, B, b"p", 12, 5)
    assert run(machine, log) == [(B, 2, 0, None), (B, 3, 0, 3)]
    assert [run[:4] for run in machine.backlog.fresh.runs()] == [
        (1, machine.backlog.fresh.runs()[0][1], 0, 5),
        (2, machine.backlog.fresh.runs()[1][1], 3, 2),
    ]
    assert machine.backlog.ready_bytes() == 70
    produce(log, B, b"p", 14, 3)
    assert run(machine, log)[-1] == (B, 5, 0, 3)
    assert machine.backlog.ready() == 7
    assert machine.duplicates == 6


def test_gaps_are_fine_and_names_are_apart() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 1)
    produce(log, A, b"q", 0, 1)
    produce(log, A, b"p", 100, 1)
    produce(log, A, b"p", 99, 1)
    run(machine, log)
    assert machine.backlog.ready() == 3
    assert {name: last for name, (last, _) in machine.producers.items()} == {b"q": 0, b"p": 100}


def test_a_producer_counts_for_one_command_of_its_session() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 1)
    log.command(A, batch.CMD_SETTLE)
    log.publish(A, [10])
    producer(log, A, b"p", 0)
    log.publish(B, [10])
    run(machine, log)
    assert machine.backlog.ready() == 3
    log.publish(A, [10])
    assert run(machine, log) == [(A, 7, 0, 1)]
    assert machine.backlog.ready() == 3


def test_a_producer_without_its_command_lives_in_the_snapshot() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 4)
    producer(log, A, b"p", 2)
    run(machine, log)
    other = QuorumMachine()
    other.restore(machine.snapshot())
    log.publish(A, [10] * 3)
    entry = log.seal()
    assert apply(machine, entry) == apply(other, entry)
    assert machine.backlog.ready() == 5
    assert machine.snapshot() == other.snapshot()


def test_the_answer_is_kept_for_a_repeated_command() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 2)
    produce(log, A, b"p", 0, 2)
    entry = log.seal()
    apply(machine, entry)
    machine.apply(2, entry.time_ms, entry.data)
    answers = [effect[1:] for effect in machine.effects if effect[0] == EFFECT_APPLIED]
    assert (A, 5, 0, 2) in answers
    assert machine.backlog.ready() == 2


def test_silent_names_are_forgotten() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"old", 5, 1)
    run(machine, log)
    log.time_ms += sessions.PRODUCER_KEPT_MS // 2
    produce(log, A, b"new", 5, 1)
    run(machine, log)
    log.time_ms += sessions.PRODUCER_KEPT_MS // 2 + 10
    log.leader(batch.CMD_TICK)
    run(machine, log)
    assert list(machine.producers) == [b"new"]


def test_names_beyond_the_bound_push_the_longest_silent_out() -> None:
    log, machine = Log(), QuorumMachine()
    for number in range(sessions.PRODUCERS_MAX + 2):
        produce(log, A, b"%d" % number, 0, 1)
        if number == 10:
            produce(log, A, b"0", 1, 1)
    run(machine, log)
    assert len(machine.producers) == sessions.PRODUCERS_MAX
    assert b"0" in machine.producers
    assert b"1" not in machine.producers
    assert b"2" not in machine.producers


def test_a_malformed_producer_is_refused_and_harmless() -> None:
    log, machine = Log(), QuorumMachine()
    log.command(A, batch.CMD_PRODUCER, count=200, body=b"12345678name")
    log.command(A, batch.CMD_PRODUCER, count=0, body=b"12345678name")
    log.command(A, batch.CMD_PRODUCER, count=4)
    log.publish(A, [1])
    answers = run(machine, log)
    assert [answer[1:3] for answer in answers] == [(1, 0), (2, 1), (3, 1), (4, 1), (5, 0)]
    assert machine.backlog.ready() == 1
    assert len(expand(machine.backlog.fresh.runs())) == 1


# --- writers with digests ----------------------------------------------------------------------


def request(log: Log, session: int, name: bytes, first: int, count: int, digest: bytes) -> None:
    """A command of a request; the request's digest stands behind the name."""
    body = first.to_bytes(8, "little") + name + digest.ljust(sessions.DIGEST_BYTES)
    log.command(session, batch.CMD_PRODUCER, count=len(name), arg=sessions.DIGEST_BYTES, body=body)
    log.publish(session, [10] * count)


def test_a_request_that_comes_again_is_dropped_from_whatever_session() -> None:
    log, machine = Log(), QuorumMachine()
    for session in (A, B):
        request(log, session, b"w", 0, 3, b"one")
        request(log, session, b"w", 3, 2, b"two")
    run(machine, log)
    assert (machine.backlog.ready(), machine.duplicates) == (5, 5)


def test_other_rows_in_the_same_place_are_appended() -> None:
    """The order of a repeat is another one: records come twice, and all of them come."""
    log, machine = Log(), QuorumMachine()
    request(log, A, b"w", 0, 3, b"one")
    request(log, B, b"w", 0, 3, b"another")
    request(log, B, b"w", 0, 3, b"one")
    run(machine, log)
    assert (machine.backlog.ready(), machine.duplicates) == (6, 3)


def test_a_request_of_several_commands_goes_on_where_it_was_cut() -> None:
    log, machine = Log(), QuorumMachine()
    request(log, A, b"w", 10, 4, b"one")
    for first in (10, 14):
        request(log, B, b"w", first, 4, b"one")
    run(machine, log)
    assert (machine.backlog.ready(), machine.duplicates) == (8, 4)
    # Two attempts of one task, side by side: whoever is behind adds nothing.
    for session in (A, B):
        request(log, session, b"w", 18, 1, b"one")
    run(machine, log)
    assert machine.backlog.ready() == 9


def test_a_request_has_gaps_where_rows_went_to_other_targets() -> None:
    log, machine = Log(), QuorumMachine()
    for session in (A, B):
        for first in (0, 5, 7):
            request(log, session, b"w", first, 2, b"one")
    run(machine, log)
    assert (machine.backlog.ready(), machine.duplicates) == (6, 6)


def test_what_stood_before_a_forgotten_request_is_not_taken_for_known() -> None:
    log, machine = Log(), QuorumMachine()
    request(log, A, b"w", 4, 4, b"one")
    request(log, B, b"w", 0, 4, b"one")
    run(machine, log)
    assert (machine.backlog.ready(), machine.duplicates) == (8, 0)


def test_an_epoch_that_comes_late_is_still_known() -> None:
    """A task that was given up for dead, of a micro-batch long done, adds nothing."""
    log, machine = Log(), QuorumMachine()
    shift = sessions.MICRO_BATCH_SHIFT
    for epoch in range(sessions.MICRO_BATCHES_KEPT_MAX):
        request(log, A, b"w", epoch << shift, 2, b"%d" % epoch)
    request(log, B, b"w", 0, 2, b"0")
    run(machine, log)
    assert machine.duplicates == 2
    request(log, A, b"w", 99 << shift, 2, b"99")
    request(log, B, b"w", 0, 2, b"0")
    run(machine, log)
    assert machine.duplicates == 2
    assert len(machine.written[b"w"].micro_batches) == sessions.MICRO_BATCHES_KEPT_MAX


def test_requests_of_one_writer_and_of_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REQUESTS_KEPT_MAX", 16)
    monkeypatch.setattr(sessions, "REQUESTS_OF_ALL_MAX", 40)
    log, machine = Log(), QuorumMachine()
    for writer in range(5):
        for number in range(30):
            request(log, A, b"w%d" % writer, number, 1, b"%d" % number)
        run(machine, log)
        assert machine.written[b"w%d" % writer].requests <= 16
    assert list(machine.written)[-1] == b"w4"
    assert 0 < sum(each.requests for each in machine.written.values()) <= 40
    request(log, B, b"w4", 29, 1, b"29")
    run(machine, log)
    assert machine.duplicates == 1


def test_silent_writers_are_forgotten_and_snapshots_hold_the_others() -> None:
    log, machine = Log(), QuorumMachine()
    request(log, A, b"old", 0, 1, b"one")
    run(machine, log)
    log.time_ms += sessions.PRODUCER_KEPT_MS // 2
    request(log, A, b"new", 0, 2, b"one")
    body = (2).to_bytes(8, "little") + b"new" + b"two".ljust(sessions.DIGEST_BYTES)
    log.command(A, batch.CMD_PRODUCER, count=3, arg=sessions.DIGEST_BYTES, body=body)
    run(machine, log)
    other = QuorumMachine()
    other.restore(machine.snapshot())
    check_invariants(other)
    log.publish(A, [10])
    request(log, B, b"new", 2, 1, b"two")
    log.time_ms += sessions.PRODUCER_KEPT_MS // 2 + 10
    log.leader(batch.CMD_TICK)
    entry = log.seal()
    assert apply(machine, entry) == apply(other, entry)
    assert list(machine.written) == list(other.written) == [b"new"]
    assert machine.duplicates == 1
    assert machine.snapshot() == other.snapshot()


def test_a_digest_of_another_length_is_refused() -> None:
    log, machine = Log(), QuorumMachine()
    log.command(A, batch.CMD_PRODUCER, count=1, arg=8, body=bytes(32))
    log.command(A, batch.CMD_PRODUCER, count=20, arg=16, body=bytes(32))
    log.publish(A, [10])
    answers = run(machine, log)
    assert [answer[3] for answer in answers].count("malformed producer") == 2
    assert machine.backlog.ready() == 1
