"""Producers by name, on the machine of quorum queues; the rule is the same for all machines."""

from __future__ import annotations

from convoymq.cluster.interfaces import EFFECT_APPLIED
from convoymq.kernels import batch
from convoymq.queues import sessions
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
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
    assert [run[:4] for run in machine.fresh.runs()] == [
        (1, machine.fresh.runs()[0][1], 0, 5),
        (2, machine.fresh.runs()[1][1], 3, 2),
    ]
    assert machine.ready_bytes == 70
    produce(log, B, b"p", 14, 3)
    assert run(machine, log)[-1] == (B, 5, 0, 3)
    assert machine.ready == 7
    assert machine.duplicates == 6


def test_gaps_are_fine_and_names_are_apart() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 1)
    produce(log, A, b"q", 0, 1)
    produce(log, A, b"p", 100, 1)
    produce(log, A, b"p", 99, 1)
    run(machine, log)
    assert machine.ready == 3
    assert {name: last for name, (last, _) in machine.producers.items()} == {b"q": 0, b"p": 100}


def test_a_producer_counts_for_one_command_of_its_session() -> None:
    log, machine = Log(), QuorumMachine()
    produce(log, A, b"p", 0, 1)
    log.command(A, batch.CMD_SETTLE)
    log.publish(A, [10])
    producer(log, A, b"p", 0)
    log.publish(B, [10])
    run(machine, log)
    assert machine.ready == 3
    log.publish(A, [10])
    assert run(machine, log) == [(A, 7, 0, 1)]
    assert machine.ready == 3


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
    assert machine.ready == 5
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
    assert machine.ready == 2


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
    assert machine.ready == 1
    assert len(expand(machine.fresh.runs())) == 1
