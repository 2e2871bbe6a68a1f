"""The machine against a naive model that keeps a list entry per message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import convoymq.queues.quorum.runs as compiled_runs
from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER
from tests.unit.queues.interpreted import interpreted
from tests.unit.queues.quorum.support import Log, apply, expand, session_id

SESSIONS = [session_id(1, 1), session_id(1, 2), session_id(2, 1), session_id(3, 1)]


@dataclass
class Message:
    place: tuple[int, int, int]
    acquired: int = 0
    delivered: int = 0


@dataclass
class Taker:
    session: int
    number: int
    window: int
    priority: int = 0
    cancelled: bool = False
    next_id: int = 0
    held: dict[int, Message] = field(default_factory=dict)


class Naive:
    """Every rule of a queue without single active consumer, a message at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fresh: list[Message] = []
        self.returned: list[Message] = []
        self.takers: dict[tuple[int, int], Taker] = {}
        self.service: list[Taker] = []
        self.down: dict[int, list[int]] = {}
        self.dropped = 0
        self.deliveries: list[tuple[int, int, int, tuple[int, int, int], int, int]] = []

    def may(self, taker: Taker) -> bool:
        return (
            taker.number > 0
            and not taker.cancelled
            and taker.session >> 56 not in self.down
            and len(taker.held) < taker.window
        )

    def settle_service(self) -> None:
        self.service = [t for t in self.service if self.may(t)]
        for taker in self.takers.values():
            if self.may(taker) and taker not in self.service:
                self.service.append(taker)

    def give(self, taker: Taker) -> None:
        message = (self.returned or self.fresh).pop(0)
        self.deliveries.append(
            (
                taker.session,
                taker.number,
                taker.next_id,
                message.place,
                message.acquired,
                message.delivered,
            )
        )
        taker.held[taker.next_id] = message
        taker.next_id += 1

    def assign(self) -> None:
        self.settle_service()
        while self.service and (self.returned or self.fresh):
            top = max(t.priority for t in self.service)
            level = [t for t in self.service if t.priority == top]
            taker = level[0]
            self.service.remove(taker)
            ready = len(self.returned) + len(self.fresh)
            turn = taker.window - len(taker.held)
            if len(level) > 1:
                turn = min(turn, max(1, min(256, ready // (16 * len(level)))))
            for _ in range(min(turn, ready)):
                self.give(taker)
            if self.may(taker):
                self.service.append(taker)

    def take_back(self, message: Message, failed: bool) -> None:
        message.acquired += 1
        message.delivered += failed
        if 0 <= self.limit < message.delivered:
            self.dropped += 1
        else:
            self.returned.append(message)

    def requeue(self, message: Message) -> None:
        """Without a limit, what a client gives back unfailed goes to the tail."""
        message.acquired += 1
        self.fresh.append(message)

    def forget(self, taker: Taker) -> None:
        if taker.cancelled and not taker.held:
            self.takers.pop((taker.session, taker.number), None)

    def end(self, session: int) -> None:
        for key in [key for key in self.takers if key[0] == session]:
            taker = self.takers.pop(key)
            for message_id in sorted(taker.held):
                self.take_back(taker.held[message_id], True)
            taker.held.clear()
            taker.cancelled = True


numbers = st.integers(1, 3)
sessions = st.integers(0, len(SESSIONS) - 1)
spans = st.tuples(st.integers(0, 30), st.integers(0, 12))
commands = st.one_of(
    st.tuples(st.just("publish"), sessions, st.lists(st.integers(0, 9), min_size=1, max_size=70)),
    st.tuples(st.just("publish"), sessions, st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("checkout"), sessions, numbers, st.integers(0, 40), st.integers(0, 1)),
    st.tuples(st.sampled_from(["settle", "return", "fail", "discard"]), sessions, numbers, spans),
    st.tuples(st.sampled_from(["settle", "fail"]), sessions, st.just(0), spans),
    st.tuples(st.just("cancel"), sessions, numbers),
    st.tuples(st.just("credit"), sessions, numbers, st.integers(0, 20)),
    st.tuples(st.just("get"), sessions, st.booleans()),
    st.tuples(st.just("purge"), sessions),
    st.tuples(st.just("down"), sessions),
    st.tuples(st.just("node_down"), st.integers(1, 3)),
    st.tuples(st.just("node_up"), st.integers(1, 3)),
    st.tuples(
        st.just("tick"),
    ),
    st.tuples(st.just("seal"), st.sampled_from([1, 1, 30_000, 61_000])),
)


class Run:
    """Feeds the same commands to a log and to the naive model."""

    def __init__(self, limit: int) -> None:
        self.log = Log()
        self.naive = Naive(limit)
        self.generation = dict.fromkeys(range(len(SESSIONS)), 0)
        self.open: list[tuple[Any, ...]] = []
        self.session_order: list[int] = []

    def session(self, i: int) -> int:
        return SESSIONS[i] + self.generation[i] * 16

    def write(self, command: tuple[Any, ...]) -> None:
        """Appends to the log what one command of the strategy means."""
        name, log = command[0], self.log
        if name == "publish":
            log.publish(self.session(command[1]), command[2])
        elif name == "checkout":
            _, i, number, prefetch, priority = command
            log.checkout(self.session(i), number, prefetch, priority=priority)
        elif name in ("settle", "return", "fail", "discard"):
            session, (first, more) = self.session(command[1]), command[3]
            if name == "settle":
                log.settle(session, command[2], first, first + more)
            elif name == "discard":
                log.discard(session, command[2], first, first + more)
            else:
                log.return_(session, command[2], first, first + more, failed=name == "fail")
        elif name == "cancel":
            log.cancel(self.session(command[1]), command[2])
        elif name == "credit":
            log.credit(self.session(command[1]), command[2], command[3])
        elif name == "get":
            log.get(self.session(command[1]), settled=command[2])
        elif name == "purge":
            log.command(self.session(command[1]), batch.CMD_PURGE)
        elif name == "down":
            log.session_down(self.session(command[1]))
        elif name == "node_down":
            log.node_down(command[1])
        elif name == "node_up":
            log.node_up(command[1])
        elif name == "tick":
            log.leader(batch.CMD_TICK)
        self.open.append((*command, self.session(command[1])) if len(command) > 1 else command)
        if name == "down":
            # The session is over: the next command of this channel comes from a new one.
            self.generation[command[1]] += 1

    def replay(self, entry: Any) -> None:
        """Lets the naive model do what the entry holds, command by command."""
        enqueues: dict[int, list[tuple[int, int]]] = {}
        for kind, _, session, _, count, _, offset, _ in batch.commands(entry.data):
            if kind == batch.CMD_ENQUEUE:
                enqueues.setdefault(session, []).append((offset, count))
        self.merge_publishes(entry, enqueues)
        self.open = []

    def merge_publishes(self, entry: Any, enqueues: dict[int, list[tuple[int, int]]]) -> None:
        order = list(self.open)
        naive = self.naive
        position = 0
        for kind, flags, session, _, count, arg, offset, _ in batch.commands(entry.data):
            if kind == batch.CMD_ENQUEUE:
                naive.fresh += [Message((entry.index, offset, k)) for k in range(count)]
            elif kind != batch.CMD_SESSION_OPEN:
                while order[position][0] in ("publish", "seal"):
                    position += 1
                self.step(order[position], session, flags, arg, entry.time_ms)
                position += 1
            naive.assign()

    def step(
        self, command: tuple[Any, ...], session: int, flags: int, arg: int, time_ms: int
    ) -> None:
        name, naive = command[0], self.naive
        taker = naive.takers.get((session, arg))
        if name == "checkout":
            if taker is None:
                window = command[3] or 2000
                taker = Taker(session, arg, window, command[4])
                naive.takers[session, arg] = taker
        elif name in ("settle", "return", "fail", "discard"):
            first, more = command[3]
            if taker is not None:
                for message_id in range(first, first + more + 1):
                    message = taker.held.pop(message_id, None)
                    if message is not None and name == "return" and naive.limit < 0:
                        naive.requeue(message)
                    elif message is not None and name in ("return", "fail"):
                        naive.take_back(message, name == "fail")
                    elif message is not None and name == "discard":
                        naive.dropped += 1
                naive.forget(taker)
        elif name == "cancel" and taker is not None:
            taker.cancelled = True
            naive.forget(taker)
        elif name == "credit" and taker is not None and not taker.cancelled:
            taker.window = command[3]
        elif name == "get":
            if naive.returned or naive.fresh:
                poller = naive.takers.setdefault((session, 0), Taker(session, 0, 0))
                naive.give(poller)
                if flags:
                    poller.held.pop(poller.next_id - 1)
        elif name == "purge":
            naive.fresh.clear()
            naive.returned.clear()
        elif name == "down":
            naive.end(command[-1])
        elif name == "node_down":
            naive.down.setdefault(command[1], [time_ms, 0])
        elif name == "node_up":
            naive.down.pop(command[1], None)
            self.serve_all_of(command[1])
        elif name == "tick":
            for node, state in naive.down.items():
                if state[1] or time_ms < state[0] + 60_000:
                    continue
                state[1] = 1
                self.return_all_of(node)

    def takers_of(self, node: int) -> list[Taker]:
        """By the begin of their sessions, not by their own."""
        order = dict.fromkeys(s for s in self.session_order if s >> 56 == node)
        takers = list(self.naive.takers.values())
        return [taker for session in order for taker in takers if taker.session == session]

    def serve_all_of(self, node: int) -> None:
        naive = self.naive
        for taker in self.takers_of(node):
            if naive.may(taker) and taker not in naive.service:
                naive.service.append(taker)

    def return_all_of(self, node: int) -> None:
        naive = self.naive
        for taker in self.takers_of(node):
            for message_id in sorted(taker.held):
                naive.take_back(taker.held[message_id], False)
            taker.held.clear()
            naive.forget(taker)


def tail_of(machine: Any) -> list[tuple[tuple[int, int, int], int, int]]:
    """What is fresh, and what came back to the tail, in the order of their turns."""
    line = [(place, 0, 0) for place in expand(machine.backlog.fresh.runs())]
    runs, (_, groups) = machine.backlog.requeued.runs(), machine.backlog.requeued.pack_tail()
    back = [(place, run[5], run[6]) for run in runs for place in expand([run])]
    left = machine.backlog.published - machine.backlog.fresh.messages
    for entered, count in reversed(groups):
        line[max(0, entered - left) : max(0, entered - left)] = back[len(back) - count :]
        back = back[: len(back) - count]
    return line


def compare(machine: Any, naive: Naive, effects: list[Any]) -> None:
    assert tail_of(machine) == [(m.place, m.acquired, m.delivered) for m in naive.fresh]
    returned = [(p, r[5], r[6]) for r in machine.backlog.returned.runs() for p in expand([r])]
    assert returned == [(m.place, m.acquired, m.delivered) for m in naive.returned]
    held = {
        (session.id, number, first + k): (place, run[5], run[6])
        for session in machine.sessions.values()
        for number, consumer in session.consumers.items()
        for first, run in consumer.checked_out.held()
        for k, place in enumerate(expand([run]))
    }
    assert held == {
        (t.session, t.number, i): (m.place, m.acquired, m.delivered)
        for t in naive.takers.values()
        for i, m in t.held.items()
    }
    by_level = sorted(naive.service, key=lambda t: -t.priority)
    assert machine.consumers.service_queue() == [(t.session, t.number) for t in by_level]
    assert sum(machine.backlog.dropped.values()) == naive.dropped
    sent = [
        (e[1], e[2], e[3] + k, (e[4], e[5], e[6] + k), e[8], e[9])
        for e in effects
        if e[0] == EFFECT_DELIVER
        for k in range(e[7])
    ]
    assert sent == naive.deliveries
    naive.deliveries.clear()


def play(steps: list[tuple[Any, ...]], limit: int, machine: Any) -> Log:
    run = Run(limit)
    for step in [*steps, ("seal", 1)]:
        if step[0] != "seal":
            run.write(step)
            continue
        entry = run.log.seal(step[1])
        run.session_order = session_order(machine, entry)
        effects = apply(machine, entry)
        run.replay(entry)
        check_invariants(machine)
        compare(machine, run.naive, effects)
    return run.log


def session_order(machine: Any, entry: Any) -> list[int]:
    """Sessions by first command, as far as this entry."""
    known = list(machine.sessions)
    return known + [c[2] for c in batch.commands(entry.data) if c[2] and c[2] not in known]


@given(st.lists(commands, min_size=30, max_size=90), st.sampled_from([-1, 0, 1, 20]))
def test_machine_equals_a_list_of_messages(steps: list[tuple[Any, ...]], limit: int) -> None:
    play(steps, limit, QuorumMachine({"delivery_limit": limit}))


def test_consumers_of_a_node_that_is_back_are_served_by_the_begin_of_their_sessions() -> None:
    """The second session has the first consumer."""
    steps: list[tuple[Any, ...]] = [
        ("publish", 1, [0]),
        ("node_down", 1),
        ("checkout", 0, 3, 1, 1),
        ("checkout", 1, 1, 1, 1),
        ("node_up", 1),
    ]
    play(steps, 2, QuorumMachine({"delivery_limit": 2}))


@given(
    st.lists(commands, min_size=30, max_size=90),
    st.booleans(),
    st.integers(0, 50),
    st.sampled_from([-1, 2]),
)
def test_snapshot_and_rest_equal_the_whole_log(
    steps: list[tuple[Any, ...]], single_active: bool, split: int, limit: int
) -> None:
    config = {"single_active": single_active, "delivery_limit": limit}
    run = Run(limit)
    for step in [*steps, ("seal", 1)]:
        run.log.seal(step[1]) if step[0] == "seal" else run.write(step)
    whole = QuorumMachine(config)
    other = QuorumMachine(config)
    for i, entry in enumerate(run.log.entries):
        effects = apply(whole, entry)
        if i == split % len(run.log.entries):
            taken = other
            other = QuorumMachine(config)
            other.restore(taken.snapshot())
            assert other.snapshot() == taken.snapshot()
        assert apply(other, entry) == effects
        check_invariants(whole)
        check_invariants(other)
        assert other.state_hash() == whole.state_hash()


PLAIN = interpreted(
    [
        "convoymq.queues.sessions",
        "convoymq.queues.group_machine",
        *(
            f"convoymq.queues.quorum.{name}"
            for name in (
                "runs", "tracing", "restored", "levels", "groups", "order", "waiting", "delayed",
                "backlog", "consumers", "deliveries", "reservation_holder", "snapshot", "views",
                "machine",
            )
        ),
    ]
)  # fmt: skip


@given(st.lists(commands, min_size=30, max_size=90), st.booleans(), st.sampled_from([-1, 1]))
def test_interpreted_equals_compiled(
    steps: list[tuple[Any, ...]], single_active: bool, limit: int
) -> None:
    config = {"single_active": single_active, "delivery_limit": limit}
    run = Run(limit)
    for step in [*steps, ("seal", 1)]:
        run.log.seal(step[1]) if step[0] == "seal" else run.write(step)
    compiled = QuorumMachine(config)
    plain = PLAIN.QuorumMachine(config)
    for entry in run.log.entries:
        assert apply(plain, entry) == apply(compiled, entry)
        assert plain.snapshot() == compiled.snapshot()
        assert list(plain.live_ranges()) == list(compiled.live_ranges())


def test_the_two_builds_are_really_two() -> None:
    assert str(PLAIN.__file__).endswith(".py")
    assert PLAIN.runs.Fifo is not compiled_runs.Fifo
