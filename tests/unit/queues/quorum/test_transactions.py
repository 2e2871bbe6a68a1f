"""Transactions in a quorum queue (ADR 0204): staged, prepared, decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.outcomes import (
    CMD_MODIFY,
    FLAG_FAILED,
    FLAG_UNTRIED,
    pack_modified,
)
from convoymq.queues.quorum import transactions
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.transactions import (
    ABORTED,
    CMD_BEGIN,
    CMD_END,
    COMMIT,
    COMMITTED,
    DECIDE,
    ENDLESS_MS,
    FORGET,
    FULL,
    NAMED,
    NOT_HELD,
    ORDERED,
    PREPARE,
    RESOLVE,
    TOO_LATE,
    TOO_MANY,
    UNDECIDED,
)
from tests.unit.queues.quorum.support import Queue, deliveries, replies, restored, session_id

A, B, C = session_id(1), session_id(2), session_id(3)
ID = "1-1"
HOME = ["home", 7]


class Transacted(Queue):
    """A queue at the newest version, and transactions in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.machine.set_version(QuorumMachine.VERSION)

    def begin(self, session: int) -> None:
        self.log.command(session, CMD_BEGIN)

    def end(self, session: int, op: str, id: str = ID, **fields: Any) -> None:
        fields = {"deadline": ENDLESS_MS, **fields}
        if op == COMMIT:
            fields = {"left": [], **fields}
        elif op == PREPARE:
            fields = {"home": HOME, **fields}
        body = msgspec.msgpack.encode({"op": op, "id": id, **fields})
        self.log.command(session, CMD_END, count=len(body), body=body)

    def ask(self, session: int, op: str, id: str = ID, **fields: Any) -> Any:
        """Asks an op in an entry of its own, and returns its answer."""
        body = msgspec.msgpack.encode({"op": op, "id": id, **fields})
        self.log.command(session, batch.CMD_RESERVATION, count=len(body), body=body)
        return replies(self.step(), session)[-1][1:]

    def held(self, count: int) -> None:
        """Consumer 1 of A holds so many messages, ids 0 …"""
        self.log.checkout(A, 1, 100)
        self.log.publish(B, [1] * count)
        self.step()

    @property
    def counts(self) -> tuple[int, int]:
        """(ready, held)"""
        backlog = self.machine.backlog
        return backlog.stored(), backlog.unacked


def answer(effects: list[Any], session: int = A) -> Any:
    """Returns (status, reply) of the last command of a session that was answered with more."""
    return [each[1:] for each in replies(effects, session) if each[2] is not None][-1]


COMMITS = (0, {})


# One queue


def test_one_entry_commits_publishes_and_settlements() -> None:
    queue = Transacted()
    queue.held(3)
    queue.begin(A)
    queue.log.publish(A, [5, 5])
    queue.log.settle(A, 1, 0, 1)
    queue.log.return_(A, 1, 2, 2, failed=True)
    queue.end(A, COMMIT)
    effects = queue.step()
    assert answer(effects) == COMMITS
    # What it has published and returned goes to the consumer at once.
    assert [id for id, _ in deliveries(effects, A, 1)] == [3, 4, 5]
    assert queue.counts == (0, 3)
    assert queue.machine.backlog.acked == 2
    assert not queue.machine.transactions.is_open


def test_what_is_staged_is_not_in_the_queue() -> None:
    queue = Transacted()
    queue.held(2)
    queue.begin(A)
    queue.log.publish(A, [5])
    queue.log.settle(A, 1, 0, 0)
    assert deliveries(queue.step(), A, 1) == []
    assert queue.counts == (0, 2)
    restored(queue)
    queue.log.publish(B, [1])
    queue.end(A, COMMIT)
    # The other message was first.
    effects = queue.step()
    assert [entry for _, entry in deliveries(effects, A, 1)] == [3, 2]
    assert queue.counts == (0, 3)


def test_the_end_of_a_session_forgets_what_it_has_staged() -> None:
    queue = Transacted()
    queue.held(2)
    queue.begin(A)
    queue.log.publish(A, [5])
    queue.log.settle(A, 1, 0, 1)
    queue.step()
    queue.log.session_down(A)
    queue.step()
    assert queue.counts == (2, 0)
    assert not queue.machine.transactions.is_open


@pytest.mark.parametrize("kind", [COMMIT, PREPARE])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda queue: queue.log.settle(A, 1, 5, 5), NOT_HELD),
        (lambda queue: queue.log.settle(A, 1, 0, 0), NOT_HELD),
        (lambda queue: queue.log.settle(A, 2, 0, 0), NOT_HELD),
        (lambda queue: queue.log.settle(A, 1, 1, 0), NOT_HELD),
        (lambda queue: queue.log.command(A, batch.CMD_PRODUCER, 0, 0, 1, bytes(8) + b"p"), NAMED),
    ],
)
def test_a_refused_end_changes_nothing(
    kind: str, spoil: Callable[[Transacted], None], reason: str
) -> None:
    queue = Transacted()
    queue.held(2)
    before = queue.machine.backlog.published
    queue.begin(A)
    queue.log.publish(A, [5])
    queue.log.settle(A, 1, 0, 0)
    spoil(queue)
    queue.end(A, kind)
    assert answer(queue.step()) == (1, reason)
    assert (queue.counts, queue.machine.backlog.published) == ((0, 2), before)
    assert not queue.machine.transactions.is_open


def test_what_a_queue_has_taken_back_cannot_be_committed() -> None:
    queue = Transacted()
    queue.held(2)
    queue.log.cancel(A, 1)
    queue.log.return_(A, 1, 1, 1)
    queue.step()
    queue.begin(A)
    queue.log.settle(A, 1, 0, 1)
    queue.end(A, COMMIT)
    assert answer(queue.step()) == (1, NOT_HELD)
    assert queue.counts == (1, 1)


def test_a_full_queue_refuses() -> None:
    queue = Transacted()
    queue.log.configure(max_length=1, reject_publish=1)
    queue.log.publish(B, [1, 1])
    queue.step()
    queue.begin(A)
    queue.log.publish(A, [5])
    queue.end(A, COMMIT)
    assert answer(queue.step()) == (1, FULL)
    assert queue.counts == (2, 0)


def test_an_end_without_a_beginning_or_of_no_known_kind_is_refused() -> None:
    queue = Transacted()
    queue.end(A, COMMIT)
    assert answer(queue.step()) == (1, "malformed")
    queue.begin(A)
    queue.end(A, "guess")
    assert answer(queue.step()) == (1, "malformed")
    queue.begin(A)
    queue.end(A, COMMIT, deadline=-1)
    assert answer(queue.step()) == (1, "malformed")


def test_a_transaction_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "COMMANDS_MAX", 2)
    queue = Transacted()
    queue.begin(A)
    queue.log.publish(A, [1])
    queue.log.settle(A, 1, 0, 0)
    queue.log.publish(A, [1])
    assert queue.step() is not None
    queue.end(A, COMMIT)
    assert answer(queue.step()) == (1, TOO_MANY)


def test_priorities_and_expirations_count_when_it_commits() -> None:
    queue = Transacted()
    queue.begin(A)
    queue.log.publish_as(A, 4, priority=9)
    queue.log.publish_as(A, 4, expiration="50")
    queue.step()
    queue.end(A, COMMIT)
    queue.step(after_ms=100)
    # Its time begins when it enters.
    assert queue.counts == (2, 0)
    queue.log.checkout(C, 1, 1)
    assert deliveries(queue.step(after_ms=10), C, 1) == [(0, 1)]
    queue.log.leader(batch.CMD_TICK)
    queue.step(after_ms=100)
    assert queue.counts == (0, 1)


def test_before_version_6_nobody_knows_of_transactions() -> None:
    queue = Queue()
    queue.machine.set_version(5)
    assert not queue.machine.command_types(5)[CMD_BEGIN // 8] & 1 << CMD_BEGIN % 8
    body = msgspec.msgpack.encode({"op": RESOLVE, "id": ID, "deadline": 1})
    queue.log.command(A, batch.CMD_RESERVATION, count=len(body), body=body)
    assert answer(queue.step()) == (1, "malformed")


# Prepared


def prepared(queue: Transacted, **fields: Any) -> None:
    """A has published a message and settled ids 0 and 1 of three."""
    queue.held(3)
    queue.begin(A)
    queue.log.publish(A, [5])
    queue.log.settle(A, 1, 0, 1)
    queue.end(A, PREPARE, **fields)
    assert answer(queue.step()) == COMMITS
    assert queue.counts == (0, 3)
    restored(queue)


def test_prepared_work_waits_for_its_decision() -> None:
    queue = Transacted()
    prepared(queue)
    queue.log.publish(B, [1])
    effects = queue.step()
    assert [id for id, _ in deliveries(effects, A, 1)] == [3]
    body = msgspec.msgpack.encode({"op": DECIDE, "id": ID, "committed": True})
    queue.log.command(C, batch.CMD_RESERVATION, count=len(body), body=body)
    effects = queue.step()
    # Behind what was published meanwhile.
    assert deliveries(effects, A, 1) == [(4, 2)]
    assert queue.counts == (0, 3)
    assert queue.machine.backlog.acked == 2
    assert queue.ask(C, DECIDE, committed=False) == COMMITS
    assert queue.counts == (0, 3)


def test_an_aborted_transaction_leaves_no_trace() -> None:
    queue = Transacted()
    prepared(queue)
    published = queue.machine.backlog.published
    effects_before = queue.machine.backlog.returns
    assert queue.ask(C, DECIDE, committed=False) == COMMITS
    assert queue.machine.backlog.published == published
    assert queue.machine.backlog.returns == effects_before + 2
    assert queue.counts == (0, 3)
    assert not queue.machine.transactions.is_open
    # They were handed out again, and nothing says that they failed.
    assert all(run[6] == 0 for held in queue.machine._held() for _, run in held.held())


def test_prepared_work_survives_its_session_and_its_consumer() -> None:
    queue = Transacted()
    prepared(queue)
    queue.log.node_down(1, gone=True)
    queue.step()
    restored(queue)
    assert queue.counts == (1, 2)
    assert queue.ask(C, DECIDE, committed=True) == COMMITS
    assert queue.counts == (2, 0)
    assert queue.machine.backlog.acked == 2


def test_prepared_work_of_every_outcome_is_carried_out() -> None:
    queue = Transacted()
    queue.held(5)
    queue.begin(A)
    queue.log.discard(A, 1, 0, 0)
    queue.log.return_(A, 1, 1, 1, failed=True)
    body = pack_modified([2, 2], 0, b"noted")
    queue.log.command(A, CMD_MODIFY, 1, FLAG_FAILED, 1, body)
    queue.log.ranges(A, batch.CMD_RETURN, 1, [3, 3], FLAG_UNTRIED)
    queue.log.settle(A, 1, 4, 4)
    queue.end(A, PREPARE)
    assert answer(queue.step()) == COMMITS
    restored(queue)
    queue.log.node_down(1, gone=True)
    queue.step()
    assert queue.ask(C, DECIDE, committed=True) == COMMITS
    backlog = queue.machine.backlog
    assert (backlog.acked, backlog.dropped["rejected"], backlog.returns) == (1, 1, 3)
    assert sorted((run[6], run[3]) for run in backlog.ready_runs()) == [(0, 1), (1, 2)]
    assert [note[0] for note in backlog.notes.by_place.values()] == [b"noted"]


def test_messages_that_need_their_order_are_not_prepared() -> None:
    queue = Transacted()
    queue.begin(A)
    queue.log._target(A).publish([b"\0\1q", b"h"], 1, 0, transactions.FLAG_HEADERS)
    queue.end(A, PREPARE)
    assert answer(queue.step()) == (1, ORDERED)


def test_so_many_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "PREPARED_MAX", 1)
    queue = Transacted()
    prepared(queue)
    queue.begin(A)
    queue.log.publish(A, [1])
    queue.end(A, PREPARE, "1-2")
    assert answer(queue.step()) == (1, TOO_MANY)


# The home


def test_the_home_remembers_its_decision_until_all_know_it() -> None:
    queue = Transacted()
    queue.begin(A)
    queue.log.publish(A, [1])
    queue.end(A, COMMIT, left=[["b", 8], ["c", 9]], deadline=queue.log.time_ms + 100)
    assert answer(queue.step()) == COMMITS
    restored(queue)
    assert queue.ask(C, RESOLVE, deadline=0) == (0, {"outcome": COMMITTED})
    queue.ask(C, FORGET, groups=[["b", 8]])
    assert queue.machine.transactions.decided[ID].left == [("c", 9)]
    queue.ask(C, FORGET, groups=[["c", 9]])
    # Who asked for it may ask again.
    assert queue.ask(C, RESOLVE, deadline=0) == (0, {"outcome": COMMITTED})
    queue.ask(C, FORGET, groups=[], heard=True)
    assert not queue.machine.transactions.is_open


def test_the_home_forgets_after_a_while_what_nobody_asks_for() -> None:
    queue = Transacted()
    queue.begin(A)
    queue.log.publish(A, [1])
    queue.end(A, COMMIT, left=[["b", 8]], deadline=queue.log.time_ms + 100)
    queue.step()
    queue.ask(C, FORGET, groups=[["b", 8]])
    queue.log.publish(B, [1])
    queue.step(after_ms=transactions.KEPT_MS + 200)
    queue.ask(C, FORGET, groups=[])
    assert not queue.machine.transactions.is_open


def test_what_the_home_does_not_know_is_aborted_when_its_time_is_over() -> None:
    queue = Transacted()
    queue.held(1)
    deadline = queue.log.time_ms + 100
    assert queue.ask(C, RESOLVE, deadline=deadline) == (0, {"outcome": UNDECIDED})
    queue.log.publish(B, [1])
    queue.step(after_ms=200)
    assert queue.ask(C, RESOLVE, deadline=deadline) == (0, {"outcome": ABORTED})
    # From now on it cannot be committed.
    queue.begin(A)
    queue.log.settle(A, 1, 0, 0)
    queue.end(A, COMMIT, left=[["b", 8]], deadline=deadline)
    assert answer(queue.step()) == (1, TOO_LATE)
    assert queue.counts == (0, 2)


def test_an_op_that_lacks_a_field_is_refused() -> None:
    queue = Transacted()
    for op in ({"op": RESOLVE}, {"op": DECIDE, "id": ID}, {"op": FORGET, "id": ID, "groups": [1]}):
        id = str(op.get("id", ""))
        fields = {name: value for name, value in op.items() if name not in ("op", "id")}
        assert queue.ask(A, str(op["op"]), id, **fields) == (1, "malformed")


# The queue itself


def test_a_queue_with_transactions_does_not_stand_still() -> None:
    queue = Transacted()
    prepared(queue)
    queue.log.configure(frozen=9)
    queue.step()
    assert not queue.machine.is_frozen
    queue.ask(C, DECIDE, committed=True)
    queue.begin(A)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.configure(frozen=9)
    queue.step()
    assert queue.machine.is_frozen
    assert not queue.machine.transactions.is_open


def test_a_queue_with_transactions_is_in_use() -> None:
    queue = Transacted()
    queue.log.configure(expires_ms=10)
    prepared(queue)
    queue.log.node_down(1, gone=True)
    queue.step(after_ms=1000)
    assert queue.machine._unused_due_ms() is None
    queue.ask(C, DECIDE, committed=True)
    assert queue.machine._unused_due_ms() is not None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("publish", "begin", "stage", "settle", "commit", "prepare", "decide",
                         "abort", "down", "snapshot")),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=40,
)  # fmt: skip


@given(STEPS)
def test_whatever_happens_messages_are_in_one_place(steps: list[tuple[str, int]]) -> None:
    """`check_invariants` looks after every entry; a snapshot and the rest of the log equal all."""
    queue = Transacted()
    sessions = [session_id(1, 1), session_id(1, 2)]
    for session in sessions:
        queue.log.checkout(session, 1, 4)
    count = 0
    next_session = 3
    for what, number in steps:
        which = number % len(sessions)
        session = sessions[which]
        if what == "publish":
            queue.log.publish(B, [1] * (number + 1))
        elif what == "begin":
            queue.begin(session)
        elif what == "stage":
            queue.log.publish_as(session, 3, priority=number if number % 2 else None)
        elif what == "settle":
            queue.log.settle(session, 1, number, number + number % 2)
        elif what in (COMMIT, PREPARE):
            count += 1
            queue.end(session, what, f"t{count}")
        elif what in ("decide", "abort"):
            committed = what == "decide"
            op = {"op": DECIDE, "id": f"t{number}", "committed": committed}
            body = msgspec.msgpack.encode(op)
            queue.log.command(B, batch.CMD_RESERVATION, count=len(body), body=body)
        elif what == "down":
            queue.log.session_down(session)
            sessions[which] = session_id(1, next_session)
            next_session += 1
            queue.log.checkout(sessions[which], 1, 4)
        else:
            restored(queue)
        queue.step()
    copy = QuorumMachine()
    copy.set_version(QuorumMachine.VERSION)
    for entry in queue.log.entries:
        copy.apply(entry.index, entry.time_ms, entry.data)
    assert copy.state_hash() == queue.machine.state_hash()
