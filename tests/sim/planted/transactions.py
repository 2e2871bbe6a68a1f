"""Bugs of transactions over quorum queues."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

_transactions = late("convoymq.queues.quorum.transactions:Transactions")
_discharge = late("convoymq.queues.transactions:Discharge")
_resolver = late("convoymq.queues.quorum.transaction_resolver:TransactionResolver")
_state = late("convoymq.queues.transactions:State")
plant = planting("transactions")


@plant("a participant that is told to commit settles, and publishes nothing", "none")
def commits_half() -> None:
    found = _transactions()
    publish = found._publish

    def planted(self: Any, session: Any, *rest: Any, **more: Any) -> None:
        if session is not None:
            publish(self, session, *rest, **more)

    found._publish = planted


@plant("the home forgets what it has decided before all know it", "break,crash,kill")
def forgets_its_decision() -> None:
    _transactions()._make_room = lambda self: not self.decided.clear()


@plant("the home is asked to commit when the first of the others is prepared", "break,crash,kill")
def decides_too_early() -> None:
    def planted(self: Any, error: Any) -> None:
        if self.state is _state().PREPARING and error is None:
            self._decide()

    _discharge()._on_prepared = planted


@plant("nobody finishes what a client's node leaves behind", "crash,kill")
def left_in_doubt() -> None:
    _resolver()._work = lambda self: None
