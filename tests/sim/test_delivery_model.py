"""The model of a queue and the machine agree on any log; and each stops at what the other lacks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.delivery_parts import Place
from convoymq.sim.referee import Referee
from tests.unit.queues.quorum.support import Log, apply, session_id

NODES = (1, 2, 3)
A, B, C = session_id(1), session_id(2), session_id(3)

lines = st.integers(0, 4)
numbers = st.integers(1, 3)
spans = st.tuples(st.integers(0, 40), st.integers(0, 12))
nodes = st.sampled_from(NODES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), lines, st.integers(1, 80)),
        st.tuples(st.just("publish"), lines, st.integers(1, 4)),
        st.tuples(st.just("checkout"), lines, numbers, st.integers(0, 40), st.integers(0, 2)),
        st.tuples(st.just("checkout"), lines, numbers, st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.sampled_from(["settle", "return", "fail", "discard"]), lines, numbers, spans),
        st.tuples(st.sampled_from(["settle", "fail"]), lines, st.just(0), spans),
        st.tuples(st.just("cancel"), lines, numbers),
        st.tuples(st.just("credit"), lines, numbers, st.integers(0, 20)),
        st.tuples(st.just("get"), lines, st.booleans()),
        st.tuples(st.just("purge"), lines),
        st.tuples(st.sampled_from(["close", "down"]), lines),
        st.tuples(st.just("node_down"), nodes, st.booleans()),
        st.tuples(st.just("node_up"), nodes, st.integers(1, 2)),
        st.tuples(st.just("outage"), nodes),
        st.tuples(st.just("seal"), st.sampled_from([1, 1, 30_000])),
        st.tuples(st.just("seal"), st.just(1)),
    ),
    # Without a least size most lists have few steps.
    min_size=60,
    max_size=160,
)


class Watched:
    """A log, the machine that applies it, and the referee that compares."""

    def __init__(self, **settings: Any) -> None:
        self.log = Log()
        self.machine = QuorumMachine(settings)
        self.referee = Referee(1, settings)
        self.published = 0
        self.lives = [0, 0, 0, 0, 0]

    def publish(self, session: int, count: int) -> None:
        self.log.publish(session, [12] * count)

    def seal(self, after_ms: int = 1) -> list[Any]:
        entry = self.log.seal(after_ms)
        effects = apply(self.machine, entry)
        self.referee.on_entry(entry.index, entry.data, effects)
        self.referee.check_machine(self.machine)
        return effects

    def session(self, line: int) -> int:
        """The present session of a channel; two channels are on nodes 1 and 2."""
        return session_id(line % 3 + 1, 1 + line + 16 * self.lives[line])

    def step(self, step: tuple[Any, ...]) -> None:
        name, log = step[0], self.log
        if name == "seal":
            self.seal(step[1])
        elif name == "node_down":
            log.node_down(step[1], gone=step[2])
        elif name == "node_up":
            log.node_up(step[1], step[2])
        elif name == "outage":
            log.node_down(step[1])
            self.seal()
            log.leader(batch.CMD_TICK)
            self.seal(61_000)
        else:
            self.ask(name, self.session(step[1]), *step[2:])
            if name in ("close", "down"):
                self.lives[step[1]] += 1

    def ask(self, name: str, session: int, *rest: Any) -> None:
        log = self.log
        if name == "publish":
            self.publish(session, rest[0])
        elif name == "checkout":
            log.checkout(session, rest[0], rest[1], priority=rest[2])
        elif name in ("settle", "return", "fail", "discard"):
            number, (first, more) = rest
            kind = {"settle": batch.CMD_SETTLE, "discard": batch.CMD_DISCARD}
            ranges = [first, first + more]
            log.ranges(
                session, kind.get(name, batch.CMD_RETURN), number, ranges, int(name == "fail")
            )
        elif name == "cancel":
            log.cancel(session, rest[0])
        elif name == "credit":
            log.credit(session, rest[0], rest[1])
        elif name == "get":
            log.get(session, settled=rest[0])
        elif name == "purge":
            log.command(session, batch.CMD_PURGE)
        elif name == "close":
            log.close(session)
        else:
            log.session_down(session)


@settings(max_examples=150)
@given(
    steps=steps,
    single_active=st.booleans(),
    strict=st.booleans(),
    limit=st.sampled_from([-1, 0, 2, 20]),
)
def test_the_machine_gives_what_the_model_gives(
    steps: list[tuple[Any, ...]], single_active: bool, strict: bool, limit: int
) -> None:
    # Bodies of these tests are alike; what is published twice is for the simulator to find.
    watched = Watched(
        single_active=single_active, single_active_strict=strict, delivery_limit=limit
    )
    watched.referee.model.names_messages = False
    for step in steps:
        watched.step(step)
    watched.seal()


def shared(watched: Watched) -> list[Any]:
    """Two consumers with equal rights get four messages."""
    watched.log.checkout(B, 1, 10)
    watched.log.checkout(C, 1, 10)
    watched.seal()
    watched.publish(A, 1)
    entry = watched.log.seal()
    effects = apply(watched.machine, entry)
    watched.entry = entry  # type: ignore[attr-defined]
    return effects


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (1, C, "hand-out 0 of 1"),
        (3, 1, "hand-out 0 of 1"),
        (6, 1, "hand-out 0 of 1"),
        (8, 1, "hand-out 0 of 1"),
        (9, 1, "hand-out 0 of 1"),
        (7, 2, "hand-out 1 of 1"),
    ],
    ids=["receiver", "message id", "message", "acquired", "failed", "count"],
)
def test_a_delivery_that_differs_stops_the_run(field: int, value: int, said: str) -> None:
    watched = Watched()
    watched.referee.model.names_messages = False
    effects = [
        tuple(value if i == field else part for i, part in enumerate(effect))
        if effect[0] == EFFECT_DELIVER
        else effect
        for effect in shared(watched)
    ]
    entry = watched.entry  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken, match=said):
        watched.referee.on_entry(entry.index, entry.data, effects)


def test_an_answer_that_is_missing_stops_the_run() -> None:
    watched = Watched()
    watched.referee.model.names_messages = False
    watched.log.get(A)
    entry = watched.log.seal()
    effects = [e for e in apply(watched.machine, entry) if e[0] != EFFECT_APPLIED]
    with pytest.raises(InvariantBroken, match="is answered"):
        watched.referee.on_entry(entry.index, entry.data, effects)


class Received(Watched):
    """One message that a client of node 2 is to receive."""

    def __init__(self) -> None:
        super().__init__()
        self.referee = Referee(1, {}, clients=True)
        self.publish(A, 1)
        self.log.checkout(B, 1)
        self.seal()
        (self.message,) = self.referee.messages.values()

    def arrive(self, message_id: int = 0, acquired: int = 0, delivered: int = 0) -> None:
        identity = self.message.identity
        self.referee.on_received(B, 1, message_id, identity, acquired, delivered)


def test_a_client_gets_what_the_log_gave_it_once() -> None:
    watched = Received()
    with pytest.raises(InvariantBroken, match="which no committed entry gave"):
        watched.arrive(message_id=1)
    with pytest.raises(InvariantBroken, match="returned 1 times"):
        watched.arrive(acquired=1)
    with pytest.raises(InvariantBroken, match="returned 0 times \\(2 failed\\)"):
        watched.arrive(delivered=2)
    watched.arrive()
    with pytest.raises(InvariantBroken, match="twice"):
        watched.arrive()


def test_a_client_may_skip_only_what_it_does_not_hold() -> None:
    watched = Received()
    with pytest.raises(InvariantBroken, match="its client skipped it"):
        watched.referee.on_skipped(B, 1, 0, 0)
    watched.log.return_(B, 1, 0, 0)
    watched.seal()
    watched.referee.on_skipped(B, 1, 0, 0)


def test_what_was_not_received_is_not_settled() -> None:
    watched = Received()
    watched.log.settle(B, 1, 0, 0)
    with pytest.raises(InvariantBroken, match="did not get it"):
        watched.seal()


def test_nobody_is_passed_over_twice() -> None:
    watched = Watched()
    watched.referee.model.names_messages = False
    watched.log.checkout(B, 1, 10)
    watched.log.checkout(C, 1, 10)
    watched.seal()
    model = watched.referee.model
    first, second = model.consumers()
    model._check_turn(first, 1, 8, 0)
    with pytest.raises(InvariantBroken, match="saw two turns"):
        model._check_turn(first, 1, 8, 0)
    second.passed.clear()
    with pytest.raises(InvariantBroken, match="got 4 of 8 at once"):
        model._check_turn(first, 4, 8, 0)


def test_who_has_priority_and_credit_goes_first() -> None:
    watched = Watched()
    watched.log.checkout(B, 1, 10)
    watched.log.checkout(C, 1, 10, priority=1)
    watched.seal()
    first, _ = watched.referee.model.consumers()
    with pytest.raises(InvariantBroken, match="has priority and credit"):
        watched.referee.model._check_turn(first, 1, 8, 0)


def test_one_consumer_is_active_at_a_time() -> None:
    watched = Watched(single_active=True)
    watched.publish(A, 1)
    watched.log.checkout(B, 1, 10)
    watched.log.checkout(C, 1, 10)
    watched.seal()
    model = watched.referee.model
    _, second = model.consumers()
    model.waiting.remove(second)
    with pytest.raises(InvariantBroken, match="still holds 1"):
        model._check_activation(second)


def test_with_strict_single_active_consumer_the_cancelled_one_is_waited_for() -> None:
    watched = Watched(single_active=True)
    watched.publish(A, 1)
    watched.log.checkout(B, 1, 1)
    watched.log.checkout(C, 1, 1)
    watched.seal()
    watched.log.cancel(B, 1)
    watched.seal()
    model = watched.referee.model
    _, second = model.consumers()
    model.waiting.remove(second)
    with pytest.raises(InvariantBroken, match="still holds 1"):
        model._check_activation(second)


def test_with_prefetch_1_everywhere_messages_are_given_in_the_order_of_the_log() -> None:
    watched = Watched(single_active=True)
    model = watched.referee.model
    model.names_messages = False
    watched.log.checkout(B, 1, 1)
    watched.publish(A, 3)
    watched.seal()
    assert model.in_order
    with pytest.raises(InvariantBroken, match="the one before it is not settled"):
        model._check_order()
    watched.log.settle(B, 1, 0, 0)
    watched.log.node_down(2)
    watched.seal()
    (second,) = (held for consumer in model.consumers() for held in consumer.held.values())
    model._move(second, Place.READY)
    model.returned.append(model.fresh.pop())
    model.fresh.append(second)
    with pytest.raises(InvariantBroken, match="is given before"):
        model._check_order()
    watched.log.checkout(C, 1, 2)
    entry = watched.log.seal()
    model.apply(entry.index, entry.data)
    assert not model.in_order
