"""Transactions over three queues, with everything lost, late or dead that may be: all or nothing.

Each seed draws a run. Real machines apply logs; the real `Discharge` asks for commits and dies, or
loses answers and sessions, at any step; what the leaders of queues do is played here by its rules.
In the end every queue of a transaction has its message and has settled, or none has. Bugs that are
planted are noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.refusals import queue_subject
from convoymq.queues import transactions as commits
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.transactions import Transactions
from convoymq.queues.transactions import (
    ABORTED,
    CMD_BEGIN,
    CMD_END,
    COMMITTED,
    DECIDE,
    FORGET,
    RESOLVE,
    UNDECIDED,
    Discharge,
    State,
    TransactionRefused,
    Work,
)
from tests.unit.queues.quorum.support import Queue, replies, restored, session_id
from tests.unit.queues.visibility import as_compiled

QUEUES = 3
SEEDS = 25
PLANTED_SEEDS = 150
DEADLINE_MS = 40
LOST = Unavailable("lost")


Sent = tuple[Callable[[], None], Callable[[int, Any], None], Callable[[], None]]
"""(sends it, takes the answer, hears that nobody knows)"""


class Stream:
    """A session into one queue: what was sent is applied in its order, later, or never."""

    def __init__(self, place: Place, session: int) -> None:
        self.place = place
        self.session = session
        self.sent: deque[Sent] = deque()
        self.answers: deque[Callable[[], None]] = deque()
        self.is_dead = False

    def _send(self, *sent: Any) -> None:
        if not self.is_dead:
            self.sent.append(sent)  # type: ignore[arg-type]

    def transact(
        self,
        work: Callable[[], None],
        end: Mapping[str, Any],
        answer: Callable[[BrokerError | None], None],
    ) -> None:
        log, body = self.place.queue.log, msgspec.msgpack.encode(end)

        def tell() -> None:
            log.command(self.session, CMD_BEGIN)
            work()
            log.command(self.session, CMD_END, count=len(body), body=body)

        def heard(status: int, reply: Any) -> None:
            subject = queue_subject("/", self.place.name)
            answer(TransactionRefused(reply, subject) if status else None)

        self._send(tell, heard, lambda: answer(LOST))

    def reservation(self, op: bytes, answer: Callable[[Any, BrokerError | None], None]) -> None:
        def tell() -> None:
            command = batch.CMD_RESERVATION
            self.place.queue.log.command(self.session, command, count=len(op), body=op)

        self._send(tell, lambda _status, reply: answer(reply, None), lambda: answer(None, LOST))

    def apply(self) -> None:
        """The queue applies what was sent first."""
        tell, heard, lost = self.sent.popleft()
        tell()
        status, reply = replies(self.place.step(), self.session)[-1][1:]
        self.answers.append(lambda: heard(status, reply))
        self.lost = lost

    def end(self, rng: Random, session: int) -> None:
        """The queue ends the session; a part of what was sent arrives before. Where the client's
        node lives, nobody knows what became of the rest, nor of an answer that is lost."""
        self.is_dead = rng.random() < 0.5
        for _ in range(rng.randrange(len(self.sent) + 1)):
            self.apply()
            if rng.random() < 0.5:
                self.answers[-1] = self.lost
        self.place.queue.log.session_down(self.session)
        self.place.step()
        self.answers.extend(lost for _, _, lost in self.sent)
        self.sent.clear()
        self.session = session
        if self.is_dead:
            self.answers.clear()


class Place:
    """One queue."""

    def __init__(self, number: int) -> None:
        self.name, self.group, self.number = f"q{number}", 10 + number, number
        self.queue = Queue()
        self.queue.machine.set_version(QuorumMachine.VERSION)
        self.seen: set[int] = set()
        """Body sizes of messages that were ever there."""

    def step(self, after_ms: int = 1) -> list[Any]:
        """Applies an entry."""
        effects = self.queue.step(after_ms)
        machine = self.queue.machine
        self.seen.update(run[4] for run in machine.backlog.ready_runs())
        self.seen.update(run[4] for held in machine._held() for _, run in held.held())
        return effects

    @property
    def known(self) -> Any:
        return self.queue.machine.transactions


class Run:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.places = [Place(number) for number in range(QUEUES)]
        self.count = 0
        self.sessions = 0
        self.streams: list[Stream] = []
        self.later: list[Callable[[], None]] = []
        self.told: dict[int, State] = {}
        self.parts: dict[int, list[Place]] = {}

    def new_stream(self, place: Place) -> Stream:
        self.sessions += 1
        made = Stream(place, session_id(1, self.sessions))
        self.streams.append(made)
        return made

    def begin(self) -> None:
        """A client commits a transaction: a message to each queue, and one that it has settled."""
        self.count += 1
        number = self.count
        parts = self.rng.sample(self.places, self.rng.randrange(1, QUEUES + 1))
        self.parts[number] = parts
        works = [self._work(place, number) for place in parts]
        deadline = max(place.queue.log.time_ms for place in self.places) + DEADLINE_MS

        def done(state: State, _error: BrokerError | None) -> None:
            self.told[number] = state

        later = lambda _delay_s, call: self.later.append(call)  # noqa: E731
        discharge = Discharge(f"t{number}", works, deadline, later, done)
        discharge.start()
        if self.rng.random() < 0.1:
            self.later.append(lambda: discharge.time_out(LOST))

    def _work(self, place: Place, number: int) -> Work:
        stream, log = self.new_stream(place), place.queue.log
        log.checkout(stream.session, 1, 1)
        log.publish(session_id(2), [1])
        place.step()

        def tell() -> None:
            log.settle(stream.session, 1, 0, 0)
            log.publish(stream.session, [100 + number])

        queue = SimpleNamespace(name=place.name, group=place.group)
        return Work(queue, stream, tell, False)  # type: ignore[arg-type]

    # --- steps

    def step(self, *, calm: bool = False) -> None:
        rng = self.rng
        draw = rng.random()
        moving = [stream for stream in self.streams if stream.sent]
        heard = [stream for stream in self.streams if stream.answers]
        if draw < 0.4 and moving:
            rng.choice(moving).apply()
        elif draw < 0.7 and heard:
            rng.choice(heard).answers.popleft()()
        elif draw < 0.78 and self.later:
            self.later.pop(rng.randrange(len(self.later)))()
        elif draw < 0.86:
            self.resolve(rng.choice(self.places))
        elif draw < 0.92:
            place = rng.choice(self.places)
            place.queue.log.publish(session_id(2), [1])
            place.step(after_ms=rng.choice((1, 10, 30)))
        elif draw < 0.95:
            restored(rng.choice(self.places).queue)
        elif not calm and self.streams:
            self.break_one(rng.choice(self.streams))

    def break_one(self, stream: Stream) -> None:
        """A client's node dies, or a queue gives up its session: its answers do not come."""
        self.sessions += 1
        stream.end(self.rng, session_id(1, self.sessions))

    def resolve(self, place: Place) -> None:
        """The leader of a queue asks about what is prepared, and tells what is decided."""
        for id, prepared in list(place.known.prepared.items()):
            home = next(each for each in self.places if each.group == prepared.home[1])

            def answered(reply: Any, error: BrokerError | None, id: str = id) -> None:
                if error is None and reply["outcome"] != UNDECIDED:
                    self.ask(place, DECIDE, id, committed=reply["outcome"] == COMMITTED)

            self.ask(home, RESOLVE, id, answered, deadline=prepared.deadline_ms)
        for id, decision in list(place.known.decided.items()):
            for _, group in list(decision.left):
                target = next(each for each in self.places if each.group == group)

                def heard(
                    _reply: Any, error: BrokerError | None, id: str = id, target: Place = target
                ) -> None:
                    if error is None:
                        self.ask(place, FORGET, id, groups=[[target.name, target.group]])

                self.ask(target, DECIDE, id, heard, committed=True)

    def ask(
        self,
        place: Place,
        op: str,
        id: str,
        answer: Callable[[Any, BrokerError | None], None] = lambda *_: None,
        **fields: Any,
    ) -> None:
        body = msgspec.msgpack.encode({"op": op, "id": id, **fields})
        self.new_stream(place).reservation(body, answer)

    # --- the end

    def finish(self) -> None:
        for _ in range(3000):
            self.step(calm=True)
            if not any(stream.sent or stream.answers for stream in self.streams):
                for place in self.places:
                    place.queue.log.publish(session_id(2), [1])
                    place.step(after_ms=DEADLINE_MS)
                    self.resolve(place)
                open_ = [place for place in self.places if place.known.prepared]
                left = [d for place in self.places for d in place.known.decided.values() if d.left]
                if not open_ and not left and not self.later:
                    return
        raise AssertionError("transactions are never finished")

    def check(self) -> None:
        """Asserts that each transaction happened in all of its queues or in none."""
        for number, parts in self.parts.items():
            have = [self.has(place, number) for place in parts]
            assert len(set(have)) == 1, f"transaction {number} happened in {have}"
            told = self.told.get(number)
            if told is State.COMMITTED:
                assert all(have), f"transaction {number} was confirmed"
            elif told is State.ABORTED:
                assert not any(have), f"transaction {number} was refused"
        for place in self.places:
            mine = [n for n, parts in self.parts.items() if place in parts]
            committed = sum(self.has(place, number) for number in mine)
            assert place.queue.machine.backlog.acked == committed, "not all was settled with it"

    def has(self, place: Place, number: int) -> bool:
        return 100 + number in place.seen


def run(seed: int) -> None:
    made = Run(seed)
    for _ in range(6):
        made.begin()
        for _ in range(made.rng.randrange(40)):
            made.step()
    made.finish()
    made.check()


def test_transactions_happen_in_all_queues_or_in_none() -> None:
    for seed in range(SEEDS):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_transactions_call_only_what_compiled_machines_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transaction on an installed node stopped its replicas: it called a `cdef` method."""
    hidden = as_compiled(monkeypatch, "convoymq.queues.")
    for seed in range(SEEDS):
        run(seed)
    if "QuorumMachine._checkout" in hidden:
        queue = Queue()
        with pytest.raises(AttributeError, match="cdef method"):
            queue.machine._checkout(None, None)


def commits_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A participant that is told to commit settles, and publishes nothing."""
    publish = Transactions._publish

    def planted(self: Any, session: Any, *rest: Any, **more: Any) -> None:
        if session is not None:
            publish(self, session, *rest, **more)

    monkeypatch.setattr(Transactions, "_publish", planted)


def aborts_what_may_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A participant in doubt is told that a transaction is aborted that its home may commit."""

    def planted(self: Any, id: str, _deadline_ms: int) -> str:
        return COMMITTED if id in self.decided else ABORTED

    monkeypatch.setattr(Transactions, "_outcome", planted)


def forgets_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home forgets what it has decided before all know it."""
    monkeypatch.setattr(Transactions, "_make_room", lambda self: not self.decided.clear())


def decides_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home is asked to commit when the first of the others is prepared."""

    def planted(self: Any, error: BrokerError | None) -> None:
        if self.state is State.PREPARING and error is None:
            self._decide()

    monkeypatch.setattr(Discharge, "_on_prepared", planted)


def commits_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home commits after its deadline."""
    refusal = Transactions._refusal

    def planted(self: Any, *of: Any) -> str | None:
        found = refusal(self, *of)
        return None if found == commits.TOO_LATE else found

    monkeypatch.setattr(Transactions, "_refusal", planted)


@pytest.mark.parametrize(
    "plant",
    [
        commits_half,
        aborts_what_may_commit,
        forgets_its_decision,
        decides_too_early,
        commits_too_late,
    ],
)
def test_planted_bugs_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(PLANTED_SEEDS):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail("the bug is not noticed")
