"""The commit of a transaction over queues, as who asks for it sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, NotFound, Unavailable
from convoymq.model.refusals import queue_subject
from convoymq.queues.transactions import (
    ABORTED,
    ASKS_MAX,
    CMD_BEGIN,
    CMD_END,
    COMMIT,
    COMMITTED,
    DECIDE,
    ENDLESS_MS,
    FORGET,
    NOT_HELD,
    PREPARE,
    RESOLVE,
    UNDECIDED,
    Discharge,
    State,
    TransactionRefused,
    Work,
    outside_transactions,
)

LOST = Unavailable("lost")
REFUSED = TransactionRefused(NOT_HELD, queue_subject("/", "q"))


class FakeClient:
    """A stream into a queue, which answers when it is told to."""

    def __init__(self) -> None:
        self.ends: list[tuple[dict[str, Any], Callable[[BrokerError | None], None]]] = []
        self.asked: list[dict[str, Any]] = []
        self.answers: list[Callable[[Any, BrokerError | None], None]] = []

    def transact(
        self, work: Callable[[], None], end: Mapping[str, Any], answer: Callable[..., None]
    ) -> None:
        work()
        self.ends.append((dict(end), answer))

    def reservation(self, op: bytes, answer: Callable[..., None]) -> None:
        self.asked.append(msgspec.msgpack.decode(op))
        self.answers.append(answer)


class Committing:
    """A discharge over so many queues; queue 0 is the home unless another one needs it."""

    def __init__(self, count: int, ordered: int = -1) -> None:
        self.clients = [FakeClient() for _ in range(count)]
        self.told: list[int] = []
        self.later: list[Callable[[], None]] = []
        self.done: list[tuple[State, BrokerError | None]] = []
        works = [
            Work(
                SimpleNamespace(name=f"q{i}", group=10 + i),
                client,  # type: ignore[arg-type]
                lambda i=i: self.told.append(i),
                i == ordered,
            )
            for i, client in enumerate(self.clients)
        ]
        self.discharge = Discharge(
            "1-1",
            works,
            5_000,
            lambda _delay_s, call: self.later.append(call),
            lambda state, error: self.done.append((state, error)),
        )
        self.discharge.start()

    def end(self, queue: int, error: BrokerError | None = None) -> dict[str, Any]:
        """A queue answers its END; returns what that said."""
        said, answer = self.clients[queue].ends.pop(0)
        answer(error)
        return said

    def asked(self, queue: int) -> list[dict[str, Any]]:
        asked, self.clients[queue].asked = self.clients[queue].asked, []
        return asked

    def answer(self, queue: int, reply: Any = None, error: BrokerError | None = None) -> None:
        self.clients[queue].answers.pop(0)(reply, error)


def test_one_queue_decides_alone() -> None:
    made = Committing(1)
    assert made.end(0) == {"op": COMMIT, "id": "1-1", "deadline": ENDLESS_MS, "left": []}
    assert made.done == [(State.COMMITTED, None)]
    assert made.asked(0) == []


def test_of_several_the_home_is_asked_when_the_others_are_prepared() -> None:
    made = Committing(3)
    assert made.told == [1, 2]
    prepared = {"op": PREPARE, "id": "1-1", "deadline": 5_000, "home": ["q0", 10]}
    assert made.end(2) == prepared
    assert not made.clients[0].ends
    assert made.end(1) == prepared
    left = [["q1", 11], ["q2", 12]]
    assert made.end(0) == {"op": COMMIT, "id": "1-1", "deadline": 5_000, "left": left}
    assert made.done == [(State.COMMITTED, None)]
    decided = {"op": DECIDE, "id": "1-1", "committed": True}
    assert made.asked(1) == made.asked(2) == [decided]
    made.answer(1, {})
    assert made.asked(0) == []
    made.answer(2, None, NotFound("deleted"))
    assert made.asked(0) == [{"op": FORGET, "id": "1-1", "groups": left, "heard": True}]


def test_a_participant_that_does_not_answer_keeps_the_decision() -> None:
    made = Committing(2)
    made.end(1)
    made.end(0)
    made.answer(1, None, LOST)
    assert made.asked(0) == []


def test_the_queue_that_needs_it_is_the_home() -> None:
    made = Committing(2, ordered=1)
    assert made.end(0)["home"] == ["q1", 11]
    assert made.end(1)["op"] == COMMIT


@pytest.mark.parametrize("error", [REFUSED, LOST])
def test_one_that_is_not_prepared_aborts_all(error: BrokerError) -> None:
    made = Committing(3)
    made.end(1)
    made.end(2, error)
    assert made.done == [(State.ABORTED, error)]
    assert not made.clients[0].ends
    undo = {"op": DECIDE, "id": "1-1", "committed": False}
    assert made.asked(1) == made.asked(2) == [undo]
    assert made.asked(0) == []


def test_an_answer_after_the_abort_changes_nothing() -> None:
    made = Committing(3)
    made.discharge.time_out(LOST)
    made.end(1)
    made.end(2)
    assert made.done == [(State.ABORTED, LOST)]
    assert not made.clients[0].ends


def test_a_home_that_was_asked_is_waited_for() -> None:
    made = Committing(2)
    made.end(1)
    made.discharge.time_out(LOST)
    assert made.done == []
    made.end(0, REFUSED)
    assert made.done == [(State.ABORTED, REFUSED)]


@pytest.mark.parametrize(
    ("outcome", "state"), [(COMMITTED, State.COMMITTED), (ABORTED, State.ABORTED)]
)
def test_a_lost_decision_is_asked_for(outcome: str, state: State) -> None:
    made = Committing(2)
    made.end(1)
    made.end(0, LOST)
    assert made.done == []
    resolve = {"op": RESOLVE, "id": "1-1", "deadline": 5_000}
    assert made.asked(0) == [resolve]
    made.answer(0, {"outcome": UNDECIDED})
    made.later.pop()()
    made.answer(0, None, LOST)
    made.later.pop()()
    assert made.asked(0) == [resolve] * 2
    made.answer(0, {"outcome": outcome})
    assert [each for each, _ in made.done] == [state]
    assert made.asked(1)[0]["committed"] is (state is State.COMMITTED)


def test_a_home_that_is_deleted_has_decided_nothing() -> None:
    made = Committing(2)
    made.end(1)
    made.end(0, LOST)
    made.answer(0, None, NotFound("deleted"))
    assert [each for each, _ in made.done] == [State.ABORTED]


def test_what_cannot_be_found_out_is_said() -> None:
    made = Committing(2)
    made.end(1)
    made.end(0, LOST)
    for _ in range(ASKS_MAX - 1):
        made.answer(0, None, LOST)
        made.later.pop()()
    made.answer(0, None, LOST)
    assert made.done == [(State.UNKNOWN, LOST)]
    # Nobody may be told to abort.
    assert made.asked(1) == []


def test_one_queue_without_an_answer_is_unknown() -> None:
    made = Committing(1)
    made.end(0, LOST)
    assert made.done == [(State.UNKNOWN, LOST)]


def test_publishes_of_a_transaction_are_not_handed_over() -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56 | 1, None)

    def publish() -> None:
        target.publish([b"\0\1q", b"h"], 1, 0, 0)

    def transaction() -> None:
        target.command(CMD_BEGIN, 0, 0, 0)
        publish()
        target.command(CMD_END, 0, 0, 0)

    publish()
    transaction()
    publish()
    transaction()
    target.command(batch.CMD_SETTLE, 0, 0, 0)
    pending = list(target.pending)
    kept = [command.type for command in outside_transactions(pending)]
    assert kept == [batch.CMD_ENQUEUE, batch.CMD_ENQUEUE, batch.CMD_SETTLE]
    # The beginning of the first is known to be applied.
    kept = [command.type for command in outside_transactions(pending[2:])]
    assert kept == [batch.CMD_ENQUEUE, batch.CMD_SETTLE]
