"""Time limits, lengths and priorities against a naive model that keeps a list entry per message.

The model is written from the rules of ADR 0043: it sorts, where the machine has levels, and looks
at every message, where the machine looks at heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.backlog import FRONT, ORIGINAL, TAIL
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER, EFFECT_REFUSING
from tests.unit.queues.quorum.support import Log, apply, expand, session_id
from tests.unit.queues.quorum.test_groups import record_in

A, B = session_id(1), session_id(2)
SIZE = 10


@dataclass(order=True)
class Message:
    number: int
    level: int
    due: int | None
    acquired: int = 0
    failed: int = 0
    at_tail: bool = False
    at_place: bool = False
    group: bytes | None = None


@dataclass
class Taker:
    window: int
    next_id: int = 0
    held: dict[int, Message] = field(default_factory=dict)


class Naive:
    """One consumer for each of two priorities, who takes all that it may."""

    def __init__(self) -> None:
        self.now = 0
        self.ttl = self.length = self.bytes = -1
        self.limit = 20
        self.position = 0
        self.classes = False
        self.turn = 0
        self.rejects = self.refusing = False
        self.by_due = False
        self.swept = 0
        self.published = 0
        self.returned: list[Message] = []
        self.waiting: list[Message] = []
        #: Behind another one of their groups, group by group.
        self.blocked: list[Message] = []
        self.takers: dict[int, Taker] = {}
        self.expired: list[int] = []
        self.over: list[int] = []
        self.failed = 0
        self.given: list[tuple[int, int, int, int]] = []

    def ready(self) -> list[Message]:
        """In the order in which they would be delivered."""
        if not self.classes:
            return self.returned + sorted(self.waiting, key=lambda message: -message.level)
        lines = [[m for m in self.waiting if m.level == level] for level in range(32)]
        made, turn = list(self.returned), self.turn
        while any(lines):
            high = sorted((line[0].number, line) for line in lines[5:] if line)
            normal = sorted((line[0].number, line) for line in lines[:5] if line)
            both = high[:1] + normal[:1]
            # Two of the higher class, then the older of both.
            line = both[0][1] if turn < 2 else min(both)[1]
            made.append(line.pop(0))
            turn = (turn + 1) % 3
        return made

    def publish(
        self, priority: int | None, expiration: int | None, group: bytes | None = None
    ) -> None:
        level = 4 if priority is None else min(priority, 31)
        times = [t for t in (self.ttl, -1 if expiration is None else expiration) if t >= 0]
        due = self.now + max(1, min(times)) if times else None
        self.published += 1
        message = Message(self.published, level, due, group=group)
        held = [m for taker in self.takers.values() for m in taker.held.values()]
        if group and any(m.group == group for m in (*self.returned, *self.waiting, *held)):
            same = [i for i, m in enumerate(self.blocked) if m.group == group]
            self.blocked.insert(same[-1] + 1 if same else len(self.blocked), message)
        else:
            self.waiting.append(message)

    def make_way(self, message: Message) -> None:
        """A message is gone; another one of its group may be next."""
        for other in self.blocked:
            if other.group == message.group:
                self.blocked.remove(other)
                self.restore(other)
                return

    def take_next(self) -> Message:
        message = self.ready()[0]
        if self.classes and message not in self.returned:
            self.turn = (self.turn + 1) % 3
        self.remove(message)
        return message

    def remove(self, message: Message) -> None:
        (self.returned if message in self.returned else self.waiting).remove(message)

    def expire(self) -> None:
        while True:
            heads = self.returned[:1]
            seen: set[int] = set()
            for message in self.waiting:
                if message.level not in seen:
                    seen.add(message.level)
                    heads.append(message)
            late = [m for m in heads if m.due is not None and m.due <= self.now]
            if not late:
                return
            first = min(late, key=lambda m: (m not in self.returned, m.level == 4, -m.level))
            self.remove(first)
            self.expired.append(first.number)
            self.make_way(first)

    def sweep(self) -> None:
        """What has expired leaves wherever it stands, not more often than every 100 ms."""
        everywhere = (self.blocked, self.returned, self.waiting)
        late = [m for line in everywhere for m in line if m.due is not None and m.due <= self.now]
        if not self.by_due or not late or self.now < self.swept + 100:
            return
        self.swept = self.now
        for line in everywhere:
            line[:] = [message for message in line if message not in late]
        # What went to the tail divides the others: without it they are in the order of the log.
        again = [message for message in self.waiting if message.at_place]
        self.waiting = [message for message in self.waiting if not message.at_place]
        for message in sorted(again):
            self.restore(message)
        for message in late:
            self.expired.append(message.number)
            held = [m for taker in self.takers.values() for m in taker.held.values()]
            there = [*self.returned, *self.waiting, *held]
            if message.group and not any(m.group == message.group for m in there):
                self.make_way(message)
        self.expire()

    def settle_down(self) -> None:
        self.expire()
        for priority in sorted(self.takers, reverse=True):
            taker = self.takers[priority]
            while self.ready() and len(taker.held) < taker.window:
                self.give(priority)
        if self.rejects:
            if self.too_long():
                self.refusing = True
            elif self.has_room():
                self.refusing = False
        else:
            self.refusing = False
            while self.too_long():
                if not self.ready():
                    self.over.append(self.blocked.pop(0).number)
                    continue
                message = self.take_next()
                self.make_way(message)
                self.over.append(message.number)
                self.expire()

    def too_long(self) -> bool:
        count = len(self.ready()) + len(self.blocked)
        return 0 <= self.length < count or 0 <= self.bytes < count * SIZE

    def has_room(self) -> bool:
        count = len(self.ready()) + len(self.blocked)
        fits = self.length < 0 or count <= self.length * 0.8
        return fits and (self.bytes < 0 or count * SIZE <= self.bytes * 0.8)

    def give(self, priority: int) -> None:
        message = self.take_next()
        taker = self.takers[priority]
        self.given.append((priority, taker.next_id, message.number, message.acquired))
        taker.held[taker.next_id] = message
        taker.next_id += 1
        self.expire()

    def come_back(self, batch_of: list[Message], failed: bool) -> None:
        """What one command brings back."""
        kept: list[Message] = []
        for message in batch_of:
            message.acquired += 1
            message.failed += failed
            if 0 <= self.limit < message.failed:
                self.failed += 1
                self.make_way(message)
            elif message.group:
                self.restore(message)
            else:
                kept.append(message)
        if self.position == TAIL or (not self.position and not failed and self.limit < 0):
            for message in kept:
                message.level, message.at_tail, message.at_place = 4, True, False
            self.waiting += kept
        elif self.position == FRONT:
            self.returned = sorted(kept, key=lambda message: message.number) + self.returned
        elif self.position == ORIGINAL:
            for message in kept:
                self.restore(message)
        else:
            self.returned += kept

    def restore(self, message: Message) -> None:
        """Before the first of its level that was published later, or went to the tail."""
        message.at_tail, message.at_place = False, True
        later = [
            i
            for i, other in enumerate(self.waiting)
            if other.level == message.level and (other.at_tail or other.number > message.number)
        ]
        self.waiting.insert(later[0] if later else len(self.waiting), message)


messages = st.tuples(
    st.sampled_from((None, None, 0, 3, 4, 5, 31, 99)),
    st.sampled_from((None, None, 0, 5, 40, 300)),
    st.sampled_from((None, None, b"a", b"b")),
)
limits = st.sampled_from((-1, 0, 1, 3, 8))
steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(messages, min_size=1, max_size=6)),
    st.tuples(st.just("publish"), st.lists(st.just((None, None, None)), min_size=1, max_size=6)),
    st.tuples(st.just("checkout"), st.integers(1, 2), st.integers(1, 6)),
    st.tuples(st.just("credit"), st.integers(1, 2), st.integers(0, 6)),
    st.tuples(
        st.sampled_from(("settle", "return", "fail")), st.integers(1, 2),
        st.integers(0, 30), st.integers(0, 4),
    ),
    st.tuples(st.just("config"), st.just("message_ttl_ms"), st.sampled_from((-1, 0, 20, 200))),
    st.tuples(st.just("config"), st.just("max_length"), limits),
    st.tuples(st.just("config"), st.just("max_length_bytes"), st.sampled_from((-1, 5, 35, 90))),
    st.tuples(st.just("config"), st.just("reject_publish"), st.sampled_from((-1, 1))),
    st.tuples(st.just("config"), st.just("delivery_limit"), st.sampled_from((-1, 1, 20))),
    st.tuples(st.just("config"), st.just("requeue_position"), st.sampled_from((0, 1, 1, 2, 3))),
    st.tuples(st.just("config"), st.just("two_priority_classes"), st.sampled_from((0, 1, 1))),
    st.tuples(st.just("config"), st.just("expire_by_due"), st.sampled_from((0, 1, 1))),
    st.tuples(st.just("time"), st.sampled_from((1, 1, 4, 30, 250))),
    st.tuples(st.just("restore")),
)  # fmt: skip


class Bench:
    """A machine and the model, one command an entry."""

    def __init__(self) -> None:
        self.machine, self.log, self.naive = QuorumMachine(), Log(), Naive()
        self.machine.set_version(2)
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.refusing = False

    def step(self, kind: str, *arguments: Any) -> None:
        getattr(self, "_" + kind)(*arguments)
        self.check()

    def seal(self, after_ms: int = 1) -> None:
        """Time passes first."""
        entry = self.log.seal(after_ms)
        self.naive.now = entry.time_ms
        self.naive.expire()
        self.naive.sweep()
        self.effects = apply(self.machine, entry)
        self.entry = entry

    def _publish(self, batch_of: list[tuple[int | None, int | None, bytes | None]]) -> None:
        for priority, expiration, group in batch_of:
            text = None if expiration is None else str(expiration)
            record, flags = record_in(group, SIZE, priority, text)
            self.log._target(A).publish([record], SIZE, 0, flags)
        self.seal()
        places = [
            (self.entry.index, offset, i)
            for kind, _, _, _, count, _, offset, _ in batch.commands(self.entry.data)
            if kind == batch.CMD_ENQUEUE
            for i in range(count)
        ]
        # One ENQUEUE for each set of flags: consumers are served after each.
        flags = [(p is not None, e is not None, g is not None) for p, e, g in batch_of]
        for i, (priority, expiration, group) in enumerate(batch_of):
            self.naive.publish(priority, expiration, group)
            self.numbers[places[i]] = self.naive.published
            command = places[i][1]
            if i + 1 == len(batch_of) or places[i + 1][1] != command:
                self.naive.settle_down()
        assert len(places) == len(flags)

    def _checkout(self, number: int, window: int) -> None:
        if number not in self.naive.takers:
            self.log.checkout(B, number, window, priority=number)
            self.seal()
            self.naive.takers[number] = Taker(window)
            self.naive.settle_down()

    def _credit(self, number: int, window: int) -> None:
        if number in self.naive.takers:
            self.log.credit(B, number, window)
            self.seal()
            self.naive.takers[number].window = window
            self.naive.settle_down()

    def _back(self, number: int, first: int, more: int) -> list[Message]:
        held = self.naive.takers[number].held
        return [held.pop(i) for i in sorted(held) if first <= i <= first + more]

    def _settle(self, number: int, first: int, more: int) -> None:
        if number in self.naive.takers:
            self.log.settle(B, number, first, first + more)
            self.seal()
            for message in self._back(number, first, more):
                self.naive.make_way(message)
            self.naive.settle_down()

    def _return(self, number: int, first: int, more: int, *, failed: bool = False) -> None:
        if number in self.naive.takers:
            self.log.return_(B, number, first, first + more, failed=failed)
            self.seal()
            self.naive.come_back(self._back(number, first, more), failed)
            self.naive.settle_down()

    def _fail(self, number: int, first: int, more: int) -> None:
        self._return(number, first, more, failed=True)

    def _config(self, name: str, value: int) -> None:
        self.log.configure(**{name: value})
        self.seal()
        naive = self.naive
        if name == "message_ttl_ms":
            naive.ttl = value
        elif name == "max_length":
            naive.length = value
        elif name == "max_length_bytes":
            naive.bytes = value
        elif name == "reject_publish":
            naive.rejects = value > 0
        elif name == "requeue_position":
            naive.position = value
        elif name == "two_priority_classes":
            naive.turn = naive.turn if naive.classes == bool(value) else 0
            naive.classes = bool(value)
        elif name == "expire_by_due":
            naive.swept = naive.swept if naive.by_due and value else 0
            naive.by_due = value > 0
        else:
            naive.limit = value
        naive.settle_down()

    def _time(self, passed: int) -> None:
        self.log.leader(batch.CMD_TICK)
        self.seal(passed)
        self.naive.settle_down()

    def _restore(self) -> None:
        self.seal()
        copy = QuorumMachine()
        copy.restore(self.machine.snapshot())
        assert copy.snapshot() == self.machine.snapshot()
        self.machine = copy

    def check(self) -> None:
        machine, naive = self.machine, self.naive
        check_invariants(machine)
        given = [
            (effect[2], effect[3] + k, self.numbers[effect[4], effect[5], effect[6] + k], effect[8])
            for effect in self.effects
            if effect[0] == EFFECT_DELIVER
            for k in range(effect[7])
        ]
        assert given == naive.given
        naive.given.clear()
        backlog = machine.backlog
        returned = [self.numbers[place] for place in expand(backlog.returned.runs())]
        assert returned == [message.number for message in naive.returned]
        order = [self.numbers[place] for place in expand(backlog.in_order())]
        assert order[: backlog.ready()] == [message.number for message in naive.ready()]
        assert order[backlog.ready() :] == [message.number for message in naive.blocked]
        ready = [self.numbers[place] for place in expand(backlog.ready_runs())]
        expected = [*naive.ready(), *naive.blocked]
        assert sorted(ready) == sorted(message.number for message in expected)
        totals = machine.totals()
        assert totals["dropped_expired"] == len(naive.expired)
        assert totals["dropped_maxlen"] == len(naive.over)
        assert totals["dropped_delivery_limit"] == naive.failed
        told = [effect[1] for effect in self.effects if effect[0] == EFFECT_REFUSING]
        self.refusing = told[-1] if told else self.refusing
        assert self.refusing == backlog.refusing == naive.refusing
        self.effects = []


@settings(max_examples=100)
@given(st.lists(steps, min_size=25, max_size=60))
def test_the_machine_does_what_the_rules_say(taken: list[tuple[Any, ...]]) -> None:
    bench = Bench()
    for step in taken:
        bench.effects = []
        bench.step(*step)
    bench.effects = []
    # All that is left comes in the order that the rules name.
    bench.step("checkout", 1, 6)
    for _ in range(40):
        bench.effects = []
        bench.step("settle", 1, 0, 10_000)
