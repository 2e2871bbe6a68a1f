"""Messages that wait, against a naive model that keeps a list entry per message and sorts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.delayed import CANCEL_SCHEDULED
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER
from tests.unit.queues.quorum.support import expand
from tests.unit.queues.quorum.test_delayed import A, B, Queue

Place = tuple[int, int, int]


@dataclass
class Message:
    place: Place
    expires: int | None
    ready_at: int = 0
    acquired: int = 0
    failed: int = 0
    held: int | None = None
    """Its message id."""


class Naive:
    """One consumer of the default level; everything is a search through a list."""

    def __init__(self) -> None:
        self.now = 0
        self.kind = 0
        self.limit = 20
        self.length = -1
        self.window: int | None = None
        self.next_id = 0
        self.front: list[Message] = []
        self.tail: list[Message] = []
        self.waiting: list[Message] = []
        self.held: list[Message] = []
        self.given: list[tuple[Place, int, int]] = []
        self.left = {"expired": 0, "maxlen": 0, "delivery_limit": 0, "purged": 0}

    def publish(self, message: Message, delay: int) -> None:
        if delay > 0:
            message.ready_at = self.now + delay
            self.waiting.append(message)
        else:
            self.tail.append(message)

    def advance(self, now: int) -> None:
        self.now = now
        due = sorted(
            (m for m in self.waiting if m.ready_at <= now), key=lambda m: (m.ready_at, m.place)
        )
        for message in due:
            self.waiting.remove(message)
            (self.front if message.acquired else self.tail).append(message)
        if due:
            self.settle_down()
        self.expire()

    def expire(self) -> None:
        for line in (self.front, self.tail):
            while line and line[0].expires is not None and line[0].expires <= self.now:
                line.pop(0)
                self.left["expired"] += 1

    def settle_down(self) -> None:
        self.expire()
        while self.window and len(self.held) < self.window and (self.front or self.tail):
            message = (self.front or self.tail).pop(0)
            message.held = self.next_id
            self.next_id += 1
            self.given.append((message.place, message.held, message.acquired))
            self.held.append(message)
            self.expire()
        while 0 <= self.length < len(self.front) + len(self.tail) + len(self.waiting):
            if self.front or self.tail:
                (self.front or self.tail).pop(0)
            else:
                self.waiting.remove(min(self.waiting, key=lambda m: (m.ready_at, m.place)))
            self.left["maxlen"] += 1
            self.expire()

    def come_back(self, message: Message, failed: bool) -> None:
        self.held.remove(message)
        message.acquired += 1
        message.failed += failed
        if not failed and self.limit < 0:
            self.tail.append(message)
        elif 0 <= self.limit < message.failed:
            self.left["delivery_limit"] += 1
        elif self.kind == 1 or self.kind == (2 if failed else 3):
            message.ready_at = self.now + min(10 * max(1, message.failed), 25)
            self.waiting.append(message)
        else:
            self.front.append(message)


delays = st.sampled_from((None, None, -5, 0, 1, 7, 7, 30, 200))
messages = st.tuples(delays, st.sampled_from((None, None, None, 5, 100)))
steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(messages, min_size=1, max_size=6)),
    st.tuples(st.just("window"), st.integers(0, 6)),
    st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 4)),
    st.tuples(st.just("back"), st.integers(0, 30), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("config"), st.just("delayed_retry"), st.integers(0, 3)),
    st.tuples(st.just("config"), st.just("max_length"), st.sampled_from((-1, 0, 2, 5))),
    st.tuples(st.just("config"), st.just("delivery_limit"), st.sampled_from((-1, 1, 20))),
    st.tuples(st.just("time"), st.sampled_from((1, 6, 25, 190))),
    st.tuples(st.just("cancel"), st.lists(st.integers(0, 20), max_size=4)),
    st.tuples(st.just("purge")),
    st.tuples(st.just("restore")),
)


class Bench:
    """A machine and the model."""

    def __init__(self) -> None:
        self.queue = Queue(delayed_retry_min_ms=10, delayed_retry_max_ms=25)
        self.naive = Naive()
        self.given: list[tuple[Place, int, int]] = []

    def seal(self, after_ms: int = 1) -> Any:
        entry = self.queue.step(after_ms)
        self.naive.advance(entry.time_ms)
        self.given += [
            ((e[4], e[5], e[6] + k), e[3] + k, e[8])
            for e in self.queue.effects
            if e[0] == EFFECT_DELIVER
            for k in range(e[7])
        ]
        return entry

    def _publish(self, batch_of: list[tuple[int | None, int | None]]) -> None:
        for delay, expiration in batch_of:
            given = {} if expiration is None else {"expiration": str(expiration)}
            self.queue.publish(delay, **given)
        entry = self.seal()
        ((offset, count),) = (
            (offset, count)
            for kind, _, _, _, count, _, offset, _ in batch.commands(entry.data)
            if kind == batch.CMD_ENQUEUE
        )
        assert count == len(batch_of)
        for i, (delay, expiration) in enumerate(batch_of):
            expires = None if expiration is None else entry.time_ms + expiration
            message = Message((entry.index, offset, i), expires)
            self.naive.publish(message, delay or 0)

    def _window(self, window: int) -> None:
        if self.naive.window is None:
            self.queue.log.checkout(B, 1, window)
            window = window or 2000
        else:
            self.queue.log.credit(B, 1, window)
        self.seal()
        self.naive.window = window

    def _chosen(self, first: int, more: int) -> list[Message]:
        held = sorted(self.naive.held, key=lambda m: m.held or 0)
        return [m for m in held if first <= (m.held or 0) <= first + more]

    def _settle(self, first: int, more: int) -> None:
        if self.naive.window is not None:
            self.queue.log.settle(B, 1, first, first + more)
            self.seal()
            for message in self._chosen(first, more):
                self.naive.held.remove(message)

    def _back(self, first: int, more: int, failed: bool) -> None:
        if self.naive.window is not None:
            self.queue.log.return_(B, 1, first, first + more, failed=failed)
            self.seal()
            for message in self._chosen(first, more):
                self.naive.come_back(message, failed)

    def _config(self, name: str, value: int) -> None:
        self.queue.log.configure(**{name: value})
        self.seal()
        names = {"delayed_retry": "kind", "max_length": "length", "delivery_limit": "limit"}
        setattr(self.naive, names[name], value)

    def _time(self, passed: int) -> None:
        self.queue.log.leader(batch.CMD_TICK)
        self.seal(passed)

    def _cancel(self, numbers: list[int]) -> None:
        known = sorted(self.naive.waiting, key=lambda m: (m.ready_at, m.place))
        chosen = [known[i] for i in numbers if i < len(known)]
        named = [[m.ready_at, *m.place] for m in chosen]
        self.queue.log.reservation(B, CANCEL_SCHEDULED, messages=named)
        self.seal()
        for message in chosen:
            if message in self.naive.waiting:
                self.naive.waiting.remove(message)
                self.naive.left["purged"] += 1

    def _purge(self) -> None:
        self.queue.log.command(A, batch.CMD_PURGE)
        self.seal()
        for line in (self.naive.front, self.naive.tail, self.naive.waiting):
            self.naive.left["purged"] += len(line)
            line.clear()

    def _restore(self) -> None:
        copy = QuorumMachine()
        copy.restore(self.queue.machine.snapshot())
        assert copy.snapshot() == self.queue.machine.snapshot()
        self.queue.machine = copy

    def step(self, kind: str, *arguments: Any) -> None:
        getattr(self, "_" + kind)(*arguments)
        self.naive.settle_down()
        self.check()

    def check(self) -> None:
        machine, naive = self.queue.machine, self.naive
        check_invariants(machine)
        assert self.given == naive.given
        self.given, naive.given = [], []
        waits = [(due, place) for due, run in machine.waiting.rows() for place in expand([run])]
        assert waits == sorted((m.ready_at, m.place) for m in naive.waiting)
        backlog = machine.backlog
        assert expand(backlog.returned.runs()) == [m.place for m in naive.front]
        assert expand(list(backlog.in_order())) == [m.place for m in (*naive.front, *naive.tail)]
        totals = machine.totals()
        for reason in ("expired", "maxlen", "delivery_limit"):
            assert totals["dropped_" + reason] == naive.left[reason]
        assert totals["purged"] == naive.left["purged"]
        due = machine.next_due_ms()
        if naive.waiting:
            assert due is not None
            assert due <= min(m.ready_at for m in naive.waiting)


@settings(max_examples=100)
@given(st.lists(steps, max_size=40))
def test_the_machine_does_what_the_rules_say(taken: list[tuple[Any, ...]]) -> None:
    bench = Bench()
    for step in taken:
        bench.step(*step)
    bench.step("config", "max_length", -1)
    bench.step("config", "delayed_retry", 0)
    bench.step("window", 6)
    bench.step("time", 300)
    for _ in range(60):
        bench.step("settle", 0, 10_000)
    assert not bench.naive.waiting
    assert not bench.naive.tail
