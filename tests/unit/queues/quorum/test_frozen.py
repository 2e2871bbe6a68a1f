"""A quorum queue that is being migrated stands still, on all its replicas."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import (
    EFFECT_APPLIED,
    EFFECT_DEAD_LETTERS,
    EFFECT_DELIVER,
    EFFECT_TIMER,
)
from tests.unit.queues.quorum.support import Log, apply, session_id

S, OTHER = session_id(1), session_id(2)


@pytest.fixture
def machine() -> QuorumMachine:
    made = QuorumMachine()
    made.set_version(5)
    return made


@pytest.fixture
def log(machine: QuorumMachine) -> Log:
    """Two of three messages are checked out; the queue is frozen."""
    made = Log()
    made.publish(S, [1, 1, 1])
    made.checkout(OTHER, 1, prefetch=2)
    apply(machine, made.seal())
    made.configure(frozen=7)
    apply(machine, made.seal())
    return made


def state(machine: QuorumMachine) -> dict[str, Any]:
    known = machine._pack()
    return {name: known[name] for name in known if name not in ("index", "time")}


def kinds(effects: list[Any]) -> set[int]:
    return {effect[0] for effect in effects}


def test_nothing_of_a_session_is_applied_or_answered(machine: QuorumMachine, log: Log) -> None:
    assert machine.is_frozen
    before = machine.totals()
    log.publish(S, [1])
    log.settle(OTHER, 1, 0, 0)
    log.get(S)
    log.checkout(S, 2)
    log.close(OTHER)
    assert apply(machine, log.seal()) == []
    assert machine.totals() == before
    assert {session.id: session.seq for session in machine.sessions.values()} == {S: 2, OTHER: 2}


def test_neither_time_nor_nodes_change_it(machine: QuorumMachine, log: Log) -> None:
    before = machine.totals()
    log.leader(batch.CMD_TICK)
    log.node_down(2, gone=True)
    log.session_down(OTHER)
    assert apply(machine, log.seal(after_ms=10_000_000)) == []
    assert machine.totals() == before
    assert len(machine.sessions) == 2


def test_what_was_sent_meanwhile_counts_when_it_is_sent_again(
    machine: QuorumMachine, log: Log
) -> None:
    log.publish(S, [1])
    lost = log.seal()
    apply(machine, lost)
    log.configure(frozen=0)
    assert kinds(apply(machine, log.seal())) == {EFFECT_TIMER}
    assert not machine.is_frozen
    log.targets[S].resend(0)
    log.settle(OTHER, 1, 0, 1)
    found = apply(machine, log.seal())
    assert kinds(found) == {EFFECT_APPLIED, EFFECT_DELIVER}
    assert machine.totals()["published"] == 4


def test_a_snapshot_of_a_frozen_queue_is_frozen(machine: QuorumMachine, log: Log) -> None:
    other = QuorumMachine()
    other.restore(machine.snapshot())
    assert other.is_frozen
    assert other.settings["frozen"] == 7
    log.publish(S, [1])
    entry = log.seal()
    assert apply(machine, entry) == apply(other, entry) == []
    assert other.state_hash() == machine.state_hash()


def test_nothing_expires_in_a_successor_until_it_serves(machine: QuorumMachine) -> None:
    log = Log()
    log.configure(keeps_all=1, dead_letters=1)
    apply(machine, log.seal())
    log.publish_as(S, 1, expiration="50")
    log.publish_as(S, 1)
    apply(machine, log.seal())
    log.leader(batch.CMD_TICK)
    assert apply(machine, log.seal(after_ms=100_000)) == []
    assert machine.backlog.stored() == 2
    assert machine.next_due_ms() is None
    other = QuorumMachine()
    other.restore(machine.snapshot())
    log.configure(keeps_all=0)
    entry = log.seal()
    found = apply(machine, entry)
    assert EFFECT_DEAD_LETTERS in kinds(found)
    assert machine.backlog.stored() == 1
    assert apply(other, entry) == found
