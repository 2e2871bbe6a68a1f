"""Transactions of a session: links to the coordinator, what is collected, and how it ends.

A client declares a transaction on a link whose target is a coordinator, names it in the states of
transfers and dispositions, and discharges it. Until then nothing of it goes to a queue: messages
wait here, and deliveries stay with their client. `queues.transactions` commits.

| a transaction is  | until                                                                   |
|-------------------|-------------------------------------------------------------------------|
| open              | discharge; its time is over, or something in it is refused: broken      |
| broken            | discharge, which is rejected                                            |
| being discharged  | its queues have answered                                                |

What rolls it back: a discharge with `fail`, the end of the coordinator's link, of the session, or
of the connection. Deliveries that the client has not settled are then as before; those that it has
settled go back to their queue. A commit that fails releases both. Source: OASIS AMQP 1.0 part 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from convoymq.edges.amqp10 import outcomes
from convoymq.edges.amqp10.errors import (
    DECODE_ERROR,
    INTERNAL_ERROR,
    INVALID_FIELD,
    NOT_IMPLEMENTED,
    TRANSACTION_ROLLBACK,
    TRANSACTION_TIMEOUT,
    TRANSACTION_UNKNOWN_ID,
    Fault,
    Scope,
    condition_of,
    error_with,
    fault_of,
    link_fault,
)
from convoymq.edges.amqp10.incoming import Incoming
from convoymq.edges.amqp10.link import SETTLED
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Composite,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Disposition,
    Rejected,
    Released,
    Source,
    TransactionalState,
    Transfer,
    composite_of,
)
from convoymq.edges.amqp10.states import LinkState, SessionState
from convoymq.messages.amqp10.sections import VALUE, section_at, skip
from convoymq.messages.amqp10.values import Value, decode
from convoymq.messages.record import names_of
from convoymq.model.errors import BrokerError, NotServed, PeerError, ResourceExhausted
from convoymq.queues import transactions as commits
from convoymq.queues.interface import Queue, QueueClient
from convoymq.queues.message_checks import CheckedMessage

if TYPE_CHECKING:
    from convoymq.edges.amqp10.addresses import Destination
    from convoymq.edges.amqp10.sending import Sender
    from convoymq.edges.amqp10.session import Session
    from convoymq.model.clock import Timer

CAPABILITIES = ("amqp:local-transactions", "amqp:multi-txns-per-ssn")
COMMIT_TIMEOUT_S = 20
"""Longest wait for queues to be prepared."""
DEADLINE_MS = 30_000
"""Longer: then queues give up what they were not told to commit."""
FLAG_HEADERS = 8
"""Of a message: it has a group, or waits for a time (`batch.pyi`)."""


class Retired(NamedTuple):
    """Deliveries of one link that a disposition of the transaction is about."""

    link: Sender
    deliveries: list[tuple[int, int]]
    """(delivery id, message id) of each."""
    outcome: Composite
    settled: bool
    """The client has forgotten them."""

    @property
    def ranges(self) -> list[int]:
        """Returns the ids of the messages."""
        return outcomes.ranges_of((each, each) for _, each in self.deliveries)


class Work:
    """Part of a transaction in one queue."""

    def __init__(self, queue: Queue, client: QueueClient) -> None:
        self.queue = queue
        self.client = client
        self.messages: list[tuple[tuple[bytes, bytes], int, int]] = []
        """(parts, body size, flags) of what is published."""
        self.retired: list[Retired] = []

    def tell(self) -> None:
        """Tells the queue all of it."""
        for retired in self.retired:
            settle = outcomes.settle_of(retired.outcome)
            assert settle is not None
            settle(retired.link, retired.ranges)
        for parts, size, flags in self.messages:
            self.client.target.publish(parts, size, 0, flags)

    @property
    def is_ordered(self) -> bool:
        """Returns whether a message has a group, or waits."""
        return any(flags & FLAG_HEADERS for _, _, flags in self.messages)

    def is_lost(self, session: Session) -> bool:
        """Returns whether a delivery is back in the queue, as its link is gone."""
        links = {retired.link for retired in self.retired}
        return any(
            session.by_number.get(link.number) is not link or link.client is not self.client
            for link in links
        )


class Transaction:
    """A transaction that a client has declared."""

    def __init__(self, id: bytes, link: CoordinatorLink) -> None:
        self.id = id
        self.link = link
        self.works: dict[Queue, Work] = {}
        self.messages = 0
        self.bytes = 0
        self.broken: Fault | None = None
        """Reason why it cannot be committed any more."""
        self.timer: Timer | None = None

    def retired(self) -> list[Retired]:
        """Returns all deliveries that it settles."""
        return [each for work in self.works.values() for each in work.retired]


class Transactions:
    """Transactions of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0
        self.open: dict[bytes, Transaction] = {}
        self.discharging: dict[bytes, Transaction] = {}

    # --- the coordinator -----------------------------------------------------------------------

    def declare(self, link: CoordinatorLink) -> Transaction:
        """Begins a transaction. Raises ResourceExhausted."""
        session = self._session
        sessions = session.connection.sessions_open.values()
        most = session.settings.transactions_max
        count = sum(len(s.transactions.open) + len(s.transactions.discharging) for s in sessions)
        if count >= most:
            raise ResourceExhausted(f"a connection has at most {most} transactions at a time")
        self._count += 1
        id = f"{session.queue_session:x}-{self._count}".encode()
        made = self.open[id] = Transaction(id, link)
        timeout_ms = session.settings.transaction_timeout_ms
        if timeout_ms:
            shell = session.connection.shell
            made.timer = shell.call_later(timeout_ms / 1000, partial(self._on_time_out, made))
        return made

    def _on_time_out(self, transaction: Transaction) -> None:
        timeout_ms = self._session.settings.transaction_timeout_ms
        text = f"transaction not discharged within {timeout_ms} ms"
        self._break(transaction, Fault(Scope.LINK, TRANSACTION_TIMEOUT, text))

    def discharge(self, id: bytes, *, fail: bool, answer: Callable[[Composite], None]) -> None:
        """Ends a transaction; `answer` gets the outcome."""
        transaction = self._find(id)
        del self.open[id]
        self._stop_timer(transaction)
        for work in transaction.works.values():
            # An idle stream may have been closed meanwhile.
            work.client = self._session.client_of(work.queue)
            if work.is_lost(self._session) and transaction.broken is None:
                text = f"{work.queue.subject}: a delivery of the transaction went back to it"
                transaction.broken = Fault(Scope.LINK, TRANSACTION_ROLLBACK, text)
        if fail or transaction.broken is not None:
            self._roll_back(transaction)
            broken = None if fail else transaction.broken
            answer(Accepted() if broken is None else Rejected(error=broken.error()))
        elif not transaction.works:
            answer(Accepted())
        else:
            self._commit(transaction, answer)

    def _commit(self, transaction: Transaction, answer: Callable[[Composite], None]) -> None:
        session, shell = self._session, self._session.connection.shell
        works = [
            commits.Work(work.queue, work.client, work.tell, work.is_ordered)
            for work in transaction.works.values()
        ]
        done = partial(self._on_done, transaction, answer)
        deadline_ms = session.broker.now_ms() + DEADLINE_MS
        made = commits.Discharge(
            transaction.id.decode(), works, deadline_ms, shell.call_later, done
        )
        self.discharging[transaction.id] = transaction
        late = Fault(Scope.LINK, TRANSACTION_TIMEOUT, "queues do not answer")
        transaction.timer = shell.call_later(COMMIT_TIMEOUT_S, partial(made.time_out, late))
        made.start()

    def _on_done(
        self,
        transaction: Transaction,
        answer: Callable[[Composite], None],
        state: commits.State,
        error: BrokerError | None,
    ) -> None:
        self._stop_timer(transaction)
        self.discharging.pop(transaction.id, None)
        session = self._session
        if session.state is not SessionState.MAPPED:
            return
        if state is commits.State.COMMITTED:
            self._tell_committed(transaction)
            answer(Accepted())
        elif state is commits.State.ABORTED:
            self._release(transaction)
            answer(Rejected(error=_failure(error).error()))
        else:
            text = error.text if error is not None else ""
            fault = link_fault(INTERNAL_ERROR, f"outcome of a transaction not known: {text}")
            transaction.link.fail(fault)
        session.pump()

    def _tell_committed(self, transaction: Transaction) -> None:
        counters = self._session.connection.counters
        for work in transaction.works.values():
            counters.confirmed += len(work.messages)
        for retired in transaction.retired():
            if isinstance(retired.outcome, Accepted):
                counters.acknowledged += len(retired.deliveries)
            self._tell_settled(retired, retired.outcome)

    def _release(self, transaction: Transaction) -> None:
        """A commit has failed: what is with the client goes back. Of what was prepared it has."""
        for retired in transaction.retired():
            link = retired.link
            link.client.return_(link.number, retired.ranges, failed=False, untried=True)
            self._tell_settled(retired, Released())

    def _tell_settled(self, retired: Retired, outcome: Composite) -> None:
        if retired.settled:
            return
        for delivery_id, _ in retired.deliveries:
            said = Disposition(role=False, first=delivery_id, settled=True, state=outcome)
            self._session.send(said)

    def _roll_back(self, transaction: Transaction) -> None:
        """Nothing has reached a queue: deliveries are as before."""
        session = self._session
        for retired in transaction.retired():
            link = retired.link
            if session.by_number.get(link.number) is not link:
                continue
            if retired.settled:
                link.client.return_(link.number, retired.ranges, failed=False, untried=True)
            else:
                _put_back(session, link, retired.deliveries)
        transaction.works.clear()
        session.pump()

    def _stop_timer(self, transaction: Transaction) -> None:
        if transaction.timer is not None:
            transaction.timer.cancel()
            transaction.timer = None

    def link_ended(self, link: CoordinatorLink) -> None:
        """Rolls back what was declared on a link that is gone, and is not being committed."""
        for transaction in [each for each in self.open.values() if each.link is link]:
            del self.open[transaction.id]
            self._stop_timer(transaction)
            self._roll_back(transaction)

    def close(self) -> None:
        """The session is over; queues get back what it had by themselves."""
        for transaction in (*self.open.values(), *self.discharging.values()):
            self._stop_timer(transaction)
        self.open.clear()
        self.discharging.clear()

    # --- what belongs to a transaction ---------------------------------------------------------

    def _find(self, id: bytes) -> Transaction:
        """Returns an open transaction. Raises Fault."""
        found = self.open.get(id)
        if found is None:
            name = id[:64].decode("ascii", "replace")
            raise link_fault(TRANSACTION_UNKNOWN_ID, f"unknown transaction '{name}'")
        return found

    def _break(self, transaction: Transaction, fault: Fault) -> None:
        """Has a transaction end by a rollback; what it has collected is let go."""
        if transaction.broken is None and transaction.id in self.open:
            transaction.broken = fault
            for work in transaction.works.values():
                work.messages.clear()
            transaction.bytes = 0

    def post(
        self,
        state: TransactionalState,
        first: Transfer,
        destination: Destination,
        message: CheckedMessage,
        body_size: int,
    ) -> None:
        """Collects a message. Raises Fault: its transaction is unknown, or the client waits for no
        outcome."""
        transaction = self._find(state.txn_id)
        try:
            if transaction.broken is not None:
                raise transaction.broken
            outcome = self._collect(transaction, destination, message, body_size)
        except BrokerError as error:
            fault = fault_of(error, Scope.LINK)
            self._break(transaction, _broken_by(fault))
            if first.settled:
                raise fault from error
            outcome = Rejected(error=error_with(fault.condition, fault.text))
        if not first.settled:
            assert first.delivery_id is not None
            said = TransactionalState(txn_id=state.txn_id, outcome=outcome)
            self._session.send(
                Disposition(role=True, first=first.delivery_id, settled=True, state=said)
            )

    def _collect(
        self,
        transaction: Transaction,
        destination: Destination,
        message: CheckedMessage,
        body_size: int,
    ) -> Composite:
        """Adds a message to the work of its queues; returns the outcome that it is going to have.
        Raises BrokerError."""
        session = self._session
        if destination.is_reply:
            raise NotServed("direct replies take no part in transactions")
        if message.producer is not None:
            raise NotServed(commits.TEXTS[commits.NAMED])
        queues = session.publishes.route(destination, message, body_size)
        session.connection.counters.published_confirm += 1
        if not queues:
            text = "a message of the transaction reaches no queue"
            self._break(transaction, Fault(Scope.LINK, TRANSACTION_ROLLBACK, text))
            return Released()
        for queue in queues:
            _check_serves(queue)
        parts = (names_of(destination.exchange, destination.routing_key), message.content)
        self._count_in(transaction, 1, len(message.content))
        works = [self._work_of(transaction, queue) for queue in queues]
        for work in works:
            work.messages.append((parts, body_size, message.flags))
        return Accepted()

    def _work_of(self, transaction: Transaction, queue: Queue) -> Work:
        work = transaction.works.get(queue)
        if work is None:
            if len(transaction.works) >= commits.PARTICIPANTS_MAX:
                most = commits.PARTICIPANTS_MAX
                raise ResourceExhausted(f"a transaction has at most {most} queues")
            work = Work(queue, self._session.client_of(queue))
            transaction.works[queue] = work
        return work

    def _count_in(self, transaction: Transaction, messages: int, size: int) -> None:
        settings = self._session.settings
        of_all = self.open.values()
        if sum(each.messages for each in of_all) + messages > settings.transaction_messages_max:
            most = settings.transaction_messages_max
            raise ResourceExhausted(f"transactions of a session have at most {most} messages")
        if sum(each.bytes for each in of_all) + size > settings.transaction_bytes_max:
            most = settings.transaction_bytes_max
            raise ResourceExhausted(f"transactions of a session hold at most {most} bytes")
        transaction.messages += messages
        transaction.bytes += size

    def retire(
        self,
        state: TransactionalState,
        by_link: dict[Sender, list[tuple[int, int]]],
        *,
        settled: bool,
    ) -> None:
        """Collects the outcome of deliveries, which are with their client. Raises Fault."""
        session = self._session
        outcome = state.outcome
        if not isinstance(outcome, Composite) or outcomes.settle_of(outcome) is None:
            raise Fault(Scope.SESSION, INVALID_FIELD, f"unexpected outcome {outcome}")
        for link, deliveries in by_link.items():
            try:
                transaction = self._find(state.txn_id)
                try:
                    if transaction.broken is None:
                        _check_serves(link.queue)
                        self._count_in(transaction, len(deliveries), 0)
                    work = self._work_of(transaction, link.queue)
                except BrokerError as error:
                    self._break(transaction, _broken_by(fault_of(error, Scope.LINK)))
                    raise
            except BrokerError as error:
                _put_back(session, link, deliveries)
                link.fail(fault_of(error, Scope.LINK))
                continue
            work.retired.append(Retired(link, deliveries, outcome, settled))


class CoordinatorLink(Incoming):
    """A link on which a client declares and discharges transactions."""

    def __init__(self, session: Session, attach: Attach) -> None:
        super().__init__(
            session,
            attach,
            credit_max=session.settings.transactions_max,
            message_size_max=session.settings.request_bytes_max,
        )
        source = attach.source
        named = source.outcomes if isinstance(source, Source) else ()
        self._hears_rejections = not named or "amqp:rejected:list" in named

    def is_held_up(self) -> bool:
        """Returns False: during an alarm, too, transactions may end."""
        return False

    def take(self, first: Transfer, message: bytes) -> None:
        """Takes a request. Raises Fault."""
        if first.settled:
            raise link_fault(INVALID_FIELD, "requests to a coordinator have to be sent unsettled")
        assert first.delivery_id is not None
        answer = partial(self._answer, first.delivery_id)
        try:
            request = composite_of(_body_of(message))
        except (PeerError, ValueError) as error:
            raise link_fault(DECODE_ERROR, f"failed to parse request: {error}") from error
        self.unconfirmed += 1
        try:
            if isinstance(request, Declare):
                if request.global_id is not None:
                    raise link_fault(NOT_IMPLEMENTED, "Distributed transactions not supported")
                answer(Declared(txn_id=self.session.transactions.declare(self).id))
            elif isinstance(request, Discharge):
                self.session.transactions.discharge(
                    request.txn_id, fail=request.fail, answer=answer
                )
            else:
                raise link_fault(NOT_IMPLEMENTED, f"a coordinator does not know {request.NAME}")
        except BrokerError as error:
            answer(Rejected(error=error_with(condition_of(error), error.text)))

    def _answer(self, delivery_id: int, outcome: Composite) -> None:
        if self.state is not LinkState.ATTACHED:
            return
        self.unconfirmed -= 1
        if isinstance(outcome, Rejected) and not self._hears_rejections:
            error = outcome.error
            assert isinstance(error, Composite)
            self.fail(Fault(Scope.LINK, error.condition, error.description))  # type: ignore[attr-defined]
            return
        self.session.publishes.flush()
        self.session.send(Disposition(role=True, first=delivery_id, settled=True, state=outcome))
        self.renew_credit()

    def give_back(self) -> None:
        """Rolls back what is open."""
        super().give_back()
        self.session.transactions.link_ended(self)

    def end(self) -> None:
        """Ends without a word."""
        super().end()
        self.session.transactions.link_ended(self)


def attach_coordinator(session: Session, attach: Attach) -> None:
    """Attaches a link to the coordinator. Raises Fault."""
    if attach.role:
        raise link_fault(INVALID_FIELD, "Attach refused: a coordinator is a target of senders only")
    if attach.snd_settle_mode == SETTLED:
        raise link_fault(INVALID_FIELD, "requests to a coordinator have to be sent unsettled")
    if attach.initial_delivery_count is None:
        raise link_fault(
            INVALID_FIELD, "Attach refused: a sender's attach lacks its initial-delivery-count"
        )
    answered = replace(attach, target=Coordinator(capabilities=CAPABILITIES))
    CoordinatorLink(session, attach).start(answered)


def _put_back(session: Session, link: Sender, deliveries: Sequence[tuple[int, int]]) -> None:
    for delivery_id, message_id in deliveries:
        session.unsettled.add(delivery_id, link, message_id)


def _check_serves(queue: Queue) -> None:
    if not queue.serves_transactions:
        raise NotServed(f"{queue.subject} of type {queue.type} takes no part in transactions")


def _broken_by(fault: Fault) -> Fault:
    """Returns the reason of a rollback after something in a transaction was refused."""
    if fault.condition in (TRANSACTION_ROLLBACK, TRANSACTION_TIMEOUT):
        return fault
    return Fault(Scope.LINK, TRANSACTION_ROLLBACK, fault.text)


def _failure(error: BrokerError | None) -> Fault:
    """Returns the error of a commit that did not succeed."""
    if isinstance(error, Fault):
        return error
    late = isinstance(error, commits.TransactionRefused) and error.reason == commits.TOO_LATE
    text = "rolled back" if error is None else error.text
    return Fault(Scope.LINK, TRANSACTION_TIMEOUT if late else TRANSACTION_ROLLBACK, text)


def _body_of(message: bytes) -> Value:
    """Returns the value that a message has as its body. Raises PeerError."""
    at, end = 0, len(message)
    while at < end:
        code, start = section_at(message, at, end)
        at = skip(message, start, end)
        if code == VALUE:
            return decode(message, start, at)[0]
    raise PeerError("a request without an amqp-value")
