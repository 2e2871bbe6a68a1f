"""Finishes transactions whose client's node is gone, on the node that leads one of their queues.

    prepared here, no decision ──▶ asks the home: committed or aborted ──▶ decides here
    decided here, others may not know ──▶ tells them ──▶ forgets it here

The node that asked for the commit does both at once (`queues.transactions`), so what is new here is
left alone for a while. A participant whose queue is deleted needs to know nothing; a home that is
deleted has decided nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from convoymq.model.errors import BrokerError, NotFound, Unavailable
from convoymq.queues.dead_letter_publisher import DeadLetterRoutes
from convoymq.queues.earliest_timer import EarliestTimer
from convoymq.queues.interface import Queue, QueueClient
from convoymq.queues.null_events import NullEvents
from convoymq.queues.transactions import (
    ABORTED,
    COMMITTED,
    DECIDE,
    FORGET,
    RESOLVE,
    Target,
)

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue
    from convoymq.queues.quorum.transactions import Transaction, Transactions
    from convoymq.shells.groups.replica import Replica

PATIENCE_MS = 3_000
"""Time that the node that asked for a transaction has to finish it."""
AGAIN_MS = 1_000
"""Between two questions about one transaction."""
ASKED_MAX = 64
"""Transactions that are asked about at a time."""

Reply = dict[str, object] | None


class TransactionResolver(NullEvents):
    """Part of a `QuorumQueue`; see the module text."""

    def __init__(self, queue: QuorumQueue, routes: DeadLetterRoutes | None) -> None:
        self._queue = queue
        self._routes = routes
        self._due: dict[str, int] = {}
        """Id -> when it is looked at (monotonic)."""
        self._clients: dict[int, QueueClient] = {}
        """By group: streams to queues that were asked, this one among them."""
        self._timer = EarliestTimer(queue.clock, self._work)

    def on_leader(self, replica: Replica | None) -> None:
        """Another term; `replica`: this node leads, from now on."""
        self.stop()
        if replica is not None and replica.machine.transactions.is_open:
            self.wake()

    def wake(self) -> None:
        """Looks after a while whether something is to be finished."""
        self._timer.soon(PATIENCE_MS)

    def stop(self) -> None:
        """Ends all questions: this node does not lead, or the queue is gone."""
        self._due.clear()
        self._timer.cancel()
        self._close_clients()

    def _close_clients(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _work(self) -> None:
        queue = self._queue
        replica = queue.replica()
        if queue.deleted or replica is None or not replica.is_leader or self._routes is None:
            return
        known: Transactions = replica.machine.transactions
        decided = {id: each.left for id, each in known.decided.items() if each.left}
        waiting = known.prepared.keys() | decided.keys()
        if not waiting:
            self.stop()
            return
        now = queue.clock.monotonic_ms()
        self._due = {id: self._due.get(id, now + PATIENCE_MS) for id in sorted(waiting)}
        late = [id for id, due_ms in self._due.items() if due_ms <= now][:ASKED_MAX]
        for id in late:
            self._due[id] = now + AGAIN_MS
            prepared = known.prepared.get(id)
            if prepared is not None:
                self._ask_home(id, prepared)
            for target in decided.get(id, ()):
                self._tell(id, target)
        self._timer.soon(max(min(self._due.values()) - now, AGAIN_MS // 4))

    # --- prepared ------------------------------------------------------------------------

    def _ask_home(self, id: str, prepared: Transaction) -> None:
        def answered(reply: Reply, error: BrokerError | None) -> None:
            outcome = None if reply is None else reply.get("outcome")
            if outcome in (COMMITTED, ABORTED):
                self._decide(id, committed=outcome == COMMITTED)
            elif isinstance(error, NotFound):
                self._decide(id, committed=False)

        op = {"op": RESOLVE, "id": id, "deadline": prepared.deadline_ms}
        self._ask(prepared.home, op, answered)

    def _decide(self, id: str, *, committed: bool) -> None:
        self._queue.note("quorum.transaction_resolved", {"transaction": id, "committed": committed})
        op = {"op": DECIDE, "id": id, "committed": committed}
        self._ask((self._queue.name, self._queue.group), op, _ignore)

    # --- decided -------------------------------------------------------------------------

    def _tell(self, id: str, target: Target) -> None:
        def answered(_reply: Reply, error: BrokerError | None) -> None:
            if error is None or isinstance(error, NotFound):
                op = {"op": FORGET, "id": id, "groups": [list(target)]}
                self._ask((self._queue.name, self._queue.group), op, _ignore)

        self._ask(target, {"op": DECIDE, "id": id, "committed": True}, answered)

    # --- questions -----------------------------------------------------------------------

    def _ask(
        self,
        target: Target,
        op: Mapping[str, object],
        answered: Callable[[Reply, BrokerError | None], None],
    ) -> None:
        """Asks a queue. Without an answer the timer has it asked again."""
        assert self._routes is not None
        queue: Queue | None = self._queue
        if target[1] != self._queue.group:
            try:
                queue = self._routes.queue_of_group(self._queue.vhost, *target)
            except Unavailable:
                return
        if queue is None:
            answered(None, NotFound(f"no queue '{target[0]}'"))
            return
        client = self._clients.get(target[1])
        if client is None:
            client = self._clients[target[1]] = queue.client(self._queue.new_session(), self)
        client.reservation(msgspec.msgpack.encode(op), answered)


def _ignore(_reply: Reply, _error: BrokerError | None) -> None:
    """The timer looks again."""
