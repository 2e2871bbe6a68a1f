"""The classic queue's rules against a naive model that keeps one object per message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from convoymq.kernels.batch import (
    CMD_CANCEL,
    CMD_CHECKOUT,
    CMD_GET,
    CMD_PURGE,
    CMD_RETURN,
    CMD_SESSION_CLOSE,
    CMD_SETTLE,
    CommandBuilder,
    PublishTarget,
    pack_ranges,
)
from convoymq.queues.classic.limits import REJECT_PUBLISH
from convoymq.queues.classic.machine import (
    APPLIED,
    DELIVER,
    GAP,
    GOT,
    PURGED,
    Block,
    ClassicMachine,
    Effect,
    Limits,
)
from convoymq.queues.classic.runs import Session
from tests.unit.queues.classic.support import body_of, message

SESSIONS = [1 << 56 | 1, 1 << 56 | 2]


def no_loading(block: Block) -> tuple[bytes, int]:
    raise AssertionError("nothing was taken out of memory")


RESERVATION = (-1, 0)
"""Who holds what is reserved."""


class Model(RuleBasedStateMachine):
    """Every message is in exactly one of: ready (ascending), held by a consumer, gone."""

    @initialize()
    def begin(self) -> None:
        self.machine = ClassicMachine(Limits(), no_loading)
        self.builder = CommandBuilder()
        self.targets = {s: PublishTarget(self.builder, s, None) for s in SESSIONS}
        self.ready: dict[int, int] = {}
        """position -> times handed out"""
        self.held: dict[tuple[int, int], dict[int, int]] = {}
        """(session, consumer) -> message id -> position"""
        self.counts: dict[int, int] = {}
        self.published = 0
        self.consumers: dict[tuple[int, int], int] = {}
        self.next_consumer = 0
        self.epoch = 0
        self.reserved = {"epoch": 0, "fencing_token": 0, "first": 0, "next": 0}
        """What the reservation's owner heard last; epoch 0 = it has none."""

    def run_batch(self) -> list[Effect]:
        self.machine.apply(self.builder.take_forward(1, 0), 1000)
        return self.hear()

    def hear(self) -> list[Effect]:
        effects, self.machine.effects = self.machine.effects, []
        for effect in effects:
            if effect[0] == DELIVER:
                _, session, consumer, first_id, (data, command), first, count, acquired = effect
                for i in range(count):
                    position = int(body_of(data, command, first + i))
                    self.take(session, consumer, first_id + i, position, acquired)
            elif effect[0] == GOT and effect[2] is not None:
                _, session, (data, command), index, number, acquired, _ = effect
                position = int(body_of(data, command, index))
                self.take(session, 0, number, position, acquired)
        return effects

    def take(self, session: int, consumer: int, number: int, position: int, acquired: int) -> None:
        assert position == min(self.ready), "delivery out of order"
        assert self.counts.get(position, 0) == acquired
        del self.ready[position]
        self.held.setdefault((session, consumer), {})[number] = position

    def give_back(self, positions: list[int]) -> None:
        for position in positions:
            self.counts[position] = self.counts.get(position, 0) + 1
            self.ready[position] = 1

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(1, 6))
    def publish(self, session: int, count: int) -> None:
        for _ in range(count):
            body = str(self.published).encode()
            self.targets[session].publish([message(body)], len(body), 0)
            self.ready[self.published] = 0
            self.published += 1
        self.run_batch()

    @rule(session=st.sampled_from(SESSIONS), prefetch=st.integers(1, 4), priority=st.integers(0, 1))
    def consume(self, session: int, prefetch: int, priority: int) -> None:
        self.next_consumer += 1
        body = msgspec.msgpack.encode({"prefetch": prefetch, "priority": priority, "tag": "t"})
        self.consumers[session, self.next_consumer] = prefetch
        self.targets[session].command(CMD_CHECKOUT, 0, len(body), self.next_consumer, body)
        self.run_batch()

    @rule(data=st.data(), requeue=st.booleans())
    def settle(self, data: st.DataObject, requeue: bool) -> None:
        holders = [key for key, ids in self.held.items() if ids and key != RESERVATION]
        if not holders:
            return
        session, consumer = data.draw(st.sampled_from(sorted(holders)))
        ids = self.held[session, consumer]
        first = data.draw(st.sampled_from(sorted(ids)))
        last = data.draw(st.sampled_from(sorted(n for n in ids if n >= first)))
        gone = [ids.pop(n) for n in sorted(ids) if first <= n <= last]
        if requeue:
            self.give_back(gone)
        kind = CMD_RETURN if requeue else CMD_SETTLE
        self.targets[session].command(kind, 0, 1, consumer, pack_ranges([first, last]))
        self.run_batch()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.consumers:
            session, consumer = data.draw(st.sampled_from(sorted(self.consumers)))
            del self.consumers[session, consumer]
            self.targets[session].command(CMD_CANCEL, 0, 0, consumer)
            self.run_batch()

    @rule(session=st.sampled_from(SESSIONS))
    def get(self, session: int) -> None:
        expected = bool(self.ready)
        self.targets[session].command(CMD_GET, 0, 0, 0)
        (got,) = [effect for effect in self.run_batch() if effect[0] == GOT]
        assert (got[2] is not None) == expected

    @rule(session=st.sampled_from(SESSIONS))
    def purge(self, session: int) -> None:
        count = len(self.ready)
        self.ready.clear()
        self.targets[session].command(CMD_PURGE, 0, 0, 0)
        (purged,) = [effect for effect in self.run_batch() if effect[0] == PURGED]
        assert purged[2] == count

    @rule(session=st.sampled_from(SESSIONS))
    def close(self, session: int) -> None:
        for key in [key for key in self.held if key[0] == session]:
            self.give_back(list(self.held.pop(key).values()))
        self.consumers = {key: n for key, n in self.consumers.items() if key[0] != session}
        self.targets[session].command(CMD_SESSION_CLOSE, 0, 0, 0)
        self.run_batch()
        # Nodes use no number of a session again, the model does.
        self.machine.ended.clear()
        self.targets[session] = PublishTarget(self.builder, session, None)

    def op(self, op: str, **fields: Any) -> dict[str, int]:
        """An op of the reservation's owner, which is never refused."""
        self.epoch += 1
        mine = {"epoch": self.reserved["epoch"], "fencing_token": self.reserved["fencing_token"]}
        request = {"op": op, "reservation": "s", "owner": "o", "ttl_ms": 1000, **mine, **fields}
        reason, answer = self.machine.reservation(request, self.epoch, 1000)
        assert reason is None
        assert answer is not None
        return answer

    @rule(count=st.integers(0, 8))
    def reservation(self, count: int) -> None:
        if not self.reserved["epoch"]:
            self.reserved = self.op("open")
        held = self.held.setdefault(RESERVATION, {})
        first = self.reserved["next"]
        expected = sorted(self.ready)[:count]
        self.reserved = self.op("take", max=count, after=first)
        assert self.reserved["next"] == first + len(expected)
        for offset, position in enumerate(expected, first):
            del self.ready[position]
            held[offset] = position
        if expected:
            # A repeat takes nothing.
            assert self.op("take", max=count + 1, after=first) == self.reserved

    @rule(data=st.data(), kind=st.sampled_from(["settle", "settle", "release", "close"]))
    def end_reservation(self, data: st.DataObject, kind: str) -> None:
        if not self.reserved["epoch"]:
            return
        held = self.held.setdefault(RESERVATION, {})
        at = data.draw(st.integers(self.reserved["first"], self.reserved["next"]))
        if kind == "settle":
            self.reserved = self.op("settle", upto=at)
            for offset in [o for o in held if o < at]:
                del held[offset]
        else:
            if kind == "close":
                at = 0
            self.give_back([held.pop(o) for o in sorted(held) if o >= at])
            answer = self.op(kind, **{"from": at, "failed": True})
            self.reserved = answer or {"epoch": 0, "fencing_token": 0, "first": 0, "next": 0}
            self.hear()

    @invariant()
    def reservation_agrees(self) -> None:
        known = self.machine.reservations.by_name.get("s")
        assert (known is not None) == bool(self.reserved["epoch"])
        if known is not None:
            held = self.held.get(RESERVATION, {})
            assert known.answer() == self.reserved
            assert sorted(held) == list(range(known.first, known.next))
            runs = known.held.between(known.first, known.next, 1000)
            positions = [run.position + k for run in runs for k in range(run.count)]
            assert positions == [held[o] for o in sorted(held)]

    @invariant()
    def agrees(self) -> None:
        self.machine.check_invariants()
        assert self.machine.ready_count == len(self.ready)
        assert self.machine.unsettled_count == sum(len(ids) for ids in self.held.values())
        for key, prefetch in self.consumers.items():
            assert len(self.held.get(key, ())) <= prefetch
            if self.ready:
                assert len(self.held.get(key, ())) == prefetch, "a free consumer beside messages"


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=50)


def test_a_repeated_batch_is_answered_and_not_applied_again() -> None:
    machine = ClassicMachine(Limits(), no_loading)
    target = PublishTarget(CommandBuilder(), SESSIONS[0], None)
    target.publish([message(b"a")], 1, 1)
    batch = target.builder.take_forward(1, 0)
    machine.apply(batch, 1)
    machine.effects.clear()
    machine.apply(batch, 1)
    assert machine.effects == [(APPLIED, SESSIONS[0], 1, ())]
    assert machine.ready_count == 1


def test_what_may_have_been_refused_before_is_not_confirmed_when_it_comes_again() -> None:
    """A former master refused the second of three messages, and nobody heard of it."""
    machine = ClassicMachine(Limits(length_max=1, overflow=REJECT_PUBLISH), no_loading)
    session = machine.sessions[SESSIONS[0]] = Session()
    session.published_seq, session.refused_seq = 3, 2
    target = PublishTarget(CommandBuilder(), SESSIONS[0], None)
    for name in (b"a", b"b", b"c"):
        target.publish([message(name)], 1, 1)
        machine.apply(target.builder.take_forward(1, 0), 1)
    session_id = SESSIONS[0]
    assert machine.effects == [
        (APPLIED, session_id, 1, (1,)),
        (APPLIED, session_id, 2, (2,)),
        (APPLIED, session_id, 3, ()),
    ]
    assert machine.ready_count == 0


def test_a_session_knows_what_was_refused_last() -> None:
    machine = ClassicMachine(Limits(length_max=1, overflow=REJECT_PUBLISH), no_loading)
    target = PublishTarget(CommandBuilder(), SESSIONS[0], None)
    for name in (b"a", b"b"):
        target.publish([message(name)], 1, 1)
        machine.apply(target.builder.take_forward(1, 0), 1)
    assert machine.effects == [(APPLIED, SESSIONS[0], 1, ()), (APPLIED, SESSIONS[0], 2, (2,))]
    assert machine.sessions[SESSIONS[0]].refused_seq == 2


def test_a_repeated_batch_begins_no_session_anew_that_has_ended() -> None:
    machine = ClassicMachine(Limits(), no_loading)
    target = PublishTarget(CommandBuilder(), SESSIONS[0], None)
    target.publish([message(b"a")], 1, 1)
    target.command(CMD_SESSION_CLOSE, 0, 0, 0)
    batch = target.builder.take_forward(1, 0)
    machine.apply(batch, 1)
    machine.apply(batch, 1)
    assert machine.ready_count == 1
    assert machine.sessions == {}


@pytest.mark.parametrize("seqs", [(2, 1), (1, 3, 1)])
def test_a_session_that_ended_by_a_gap_does_not_begin_anew(seqs: tuple[int, ...]) -> None:
    machine = ClassicMachine(Limits(), no_loading)
    for seq in seqs:
        builder = CommandBuilder()
        builder.add(CMD_GET, 0, SESSIONS[0], seq, 0, 0)
        machine.apply(builder.take_forward(1, 0), 1)
    assert machine.sessions == {}
    assert (GAP, SESSIONS[0]) in machine.effects
    assert [effect for effect in machine.effects if effect[0] == GOT][len(seqs) - 2 :] == []


def test_an_unknown_session_in_the_middle_of_its_stream_is_told_that_it_is_over() -> None:
    machine = ClassicMachine(Limits(), no_loading)
    builder = CommandBuilder()
    builder.add(CMD_PURGE, 0, SESSIONS[0], 5, 0, 0)
    builder.add(CMD_PURGE, 0, SESSIONS[0], 6, 0, 0)
    builder.add(CMD_SESSION_CLOSE, 0, SESSIONS[1], 5, 0, 0)
    machine.apply(builder.take_forward(1, 0), 1)
    assert machine.effects == [(GAP, SESSIONS[0])]


@pytest.mark.parametrize("kind", [CMD_PURGE, CMD_SESSION_CLOSE])
def test_a_gap_in_a_session_ends_it_and_returns_what_it_holds(kind: int) -> None:
    machine = ClassicMachine(Limits(), no_loading)
    builder = CommandBuilder()
    PublishTarget(builder, SESSIONS[1], None).publish([message(b"a")], 1, 0)
    builder.add(CMD_GET, 0, SESSIONS[0], 1, 0, 0)
    machine.apply(builder.take_forward(1, 0), 1)
    assert machine.unsettled_count == 1
    machine.effects.clear()
    builder.add(kind, 0, SESSIONS[0], 3, 0, 0)
    machine.apply(builder.take_forward(1, 0), 1)
    # Who closes a session expects no answer.
    assert machine.effects == ([(GAP, SESSIONS[0])] if kind == CMD_PURGE else [])
    assert (machine.unsettled_count, machine.ready_count) == (0, 1)
    assert list(machine.sessions) == [SESSIONS[1]]
    machine.check_invariants()
