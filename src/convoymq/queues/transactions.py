"""Transactions over queues: what a client publishes and settles counts together or not at all.

Work of a transaction is collected at its client's node, and goes to the queues when it is to be
committed (`Discharge`). One queue decides alone, by one entry of its log. Of several, one is the
`home`; the others are prepared first (ADR 0204):

| state      | hears                            | then                                            |
|------------|----------------------------------|-------------------------------------------------|
| PREPARING  | all others are prepared          | DECIDING: the home is asked to commit           |
|            | one refuses, is lost, or is late | ABORTED: those that may be prepared undo it     |
| DECIDING   | the home has committed           | COMMITTED: the others hear it                   |
|            | it refuses                       | ABORTED, as above                               |
|            | its answer is lost               | ASKING: until it says what it knows             |
| ASKING     | committed, aborted               | COMMITTED, ABORTED                              |
|            | undecided, or no answer          | asked again                                     |
|            | nothing can be found out         | UNKNOWN                                         |

`done` is called once, with the last state. A committed transaction is in the logs of majorities of
all its queues by then. What a dead node leaves behind the queues finish among themselves
(`quorum.transaction_resolver`).

| command | count, arg      | body                                                               |
|---------|-----------------|--------------------------------------------------------------------|
| BEGIN   | –               | –                                                                  |
| END     | body length / – | msgpack map: op (`commit`, `prepare`), id, deadline (ms); `left`:  |
|         |                 | [name, group] of the others, or `home`: that of the home           |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from convoymq.kernels.batch import PendingCommand
from convoymq.model.errors import BrokerError, NotFound, Refused, Subject
from convoymq.queues.interface import QueueClient

CMD_BEGIN = 26
CMD_END = 27

COMMIT = "commit"
PREPARE = "prepare"
RESOLVE = "resolve_transaction"
DECIDE = "decide_transaction"
FORGET = "forget_transaction"
OPS = frozenset((RESOLVE, DECIDE, FORGET))

COMMITTED = "committed"
ABORTED = "aborted"
UNDECIDED = "undecided"

NOT_HELD = "transaction_not_held"
FULL = "transaction_full"
TOO_LATE = "transaction_timeout"
TOO_MANY = "transaction_limit"
ORDERED = "transaction_ordered"
NAMED = "transaction_producer"

TEXTS = {
    NOT_HELD: "a message that the transaction settles is not held by its consumer any more",
    FULL: "the queue is full",
    TOO_LATE: "the time of the transaction is over",
    TOO_MANY: "too many transactions, or too much in one",
    ORDERED: "messages with a group or a delay go to one queue of a transaction only",
    NAMED: "messages of named producers take no part in transactions",
}
ENDLESS_MS = (1 << 62) - 2
"""Deadline of a transaction that one queue decides."""
PARTICIPANTS_MAX = 128
ASK_AGAIN_S = 1.0
ASKS_MAX = 600
"""So often the home is asked what became of a transaction."""

Target: TypeAlias = tuple[str, int]
"""(name of a queue, its group)"""
Answered: TypeAlias = Callable[[BrokerError | None], None]
Later: TypeAlias = Callable[[float, Callable[[], None]], object]
"""Calls something after so many seconds."""
Command = TypeVar("Command", bound=PendingCommand)


class TransactionRefused(Refused):
    """A queue does not commit; nothing has changed there."""

    def __init__(self, reason: str, subject: Subject) -> None:
        super().__init__(f"{subject}: {TEXTS.get(reason, reason)}", subject=subject)
        self.reason = reason


class State(Enum):
    """State of a discharge; see the module text."""

    PREPARING = "preparing"
    DECIDING = "deciding"
    ASKING = "asking"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Named(Protocol):
    """A queue."""

    name: str
    group: int


class Work(NamedTuple):
    """Part of a transaction in one queue."""

    queue: Named
    client: QueueClient
    tell: Callable[[], None]
    """Tells the client all of it."""
    is_ordered: bool
    """Some of its messages may go to the home only."""


Done: TypeAlias = Callable[[State, BrokerError | None], None]


class Discharge:
    """Commits one transaction.

    Args:
        id: unique for ever.
        works: of each queue, at least one.
        deadline_ms: of the wall clock; what is not committed by then is not.
    """

    def __init__(
        self, id: str, works: Sequence[Work], deadline_ms: int, later: Later, done: Done
    ) -> None:
        assert works, "a transaction without work needs no queue"
        self.state = State.PREPARING
        self._id = id
        ordered = [each for each in works if each.is_ordered]
        self._home = (ordered or list(works))[0]
        self._others = [each for each in works if each is not self._home]
        self._deadline_ms = deadline_ms if self._others else ENDLESS_MS
        self._waiting = len(self._others)
        self._later = later
        self._done = done
        self._asks = 0

    def start(self) -> None:
        """Begins."""
        home = [self._home.queue.name, self._home.queue.group]
        end = {"op": PREPARE, "id": self._id, "deadline": self._deadline_ms, "home": home}
        for work in self._others:
            work.client.transact(work.tell, end, self._on_prepared)
        if not self._others:
            self._decide()

    def time_out(self, error: BrokerError) -> None:
        """The client has waited for long enough: nobody asks the home any more to commit."""
        if self.state is State.PREPARING:
            self._abort(error)

    def _on_prepared(self, error: BrokerError | None) -> None:
        if self.state is not State.PREPARING:
            return
        if error is not None:
            self._abort(error)
            return
        self._waiting -= 1
        if not self._waiting:
            self._decide()

    def _decide(self) -> None:
        self.state = State.DECIDING
        left = [[each.queue.name, each.queue.group] for each in self._others]
        end = {"op": COMMIT, "id": self._id, "deadline": self._deadline_ms, "left": left}
        self._home.client.transact(self._home.tell, end, self._on_decided)

    def _on_decided(self, error: BrokerError | None) -> None:
        assert self.state is State.DECIDING
        if error is None:
            self._commit()
        elif isinstance(error, TransactionRefused):
            self._abort(error)
        elif self._others:
            self.state = State.ASKING
            self._ask()
        else:
            self._finish(State.UNKNOWN, error)

    def _ask(self) -> None:
        self._asks += 1
        op = {"op": RESOLVE, "id": self._id, "deadline": self._deadline_ms}
        self._home.client.reservation(msgspec.msgpack.encode(op), self._on_resolved)

    def _on_resolved(self, reply: dict[str, object] | None, error: BrokerError | None) -> None:
        outcome = None if reply is None else reply.get("outcome")
        if outcome == COMMITTED:
            self._commit()
        elif outcome == ABORTED or isinstance(error, NotFound):
            self._abort(error)
        elif self._asks < ASKS_MAX:
            self._later(ASK_AGAIN_S, self._ask)
        else:
            self._finish(State.UNKNOWN, error)

    def _commit(self) -> None:
        self._tell_others(committed=True)
        self._finish(State.COMMITTED, None)

    def _abort(self, error: BrokerError | None) -> None:
        self._tell_others(committed=False)
        self._finish(State.ABORTED, error)

    def _tell_others(self, *, committed: bool) -> None:
        told: list[list[object]] = []
        op = msgspec.msgpack.encode({"op": DECIDE, "id": self._id, "committed": committed})
        for work in self._others:
            named: list[object] = [work.queue.name, work.queue.group]

            def heard(
                _reply: object, error: BrokerError | None, named: list[object] = named
            ) -> None:
                if error is not None and not isinstance(error, NotFound):
                    return
                told.append(named)
                if committed and len(told) == len(self._others):
                    self._forget(told)

            work.client.reservation(op, heard)

    def _forget(self, told: list[list[object]]) -> None:
        op = {"op": FORGET, "id": self._id, "groups": told, "heard": True}
        self._home.client.reservation(msgspec.msgpack.encode(op), _ignore)

    def _finish(self, state: State, error: BrokerError | None) -> None:
        self.state = state
        self._done(state, error)


def _ignore(_reply: object, _error: BrokerError | None) -> None:
    """The queues find out among themselves."""


def outside_transactions(commands: Iterable[Command]) -> list[Command]:
    """Returns pending commands of a session without those of transactions that have not ended."""
    kept: list[Command] = []
    inside = False
    for command in reversed(list(commands)):
        if command.type == CMD_END:
            inside = True
        elif command.type == CMD_BEGIN:
            inside = False
        elif not inside:
            kept.append(command)
    kept.reverse()
    return kept
