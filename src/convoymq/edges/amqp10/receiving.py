"""Links of publishers: messages of several transfers, routes, outcomes, credit.

A link has credit for `link_credit` messages, less those that no queue has confirmed yet: a queue
that is behind holds up its own publishers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from convoymq.broker.firehose import Origin
from convoymq.edges.amqp10.addresses import Destination, target_of
from convoymq.edges.amqp10.errors import (
    DECODE_ERROR,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    NOT_FOUND,
    PRECONDITION_FAILED,
    RESOURCE_LIMIT_EXCEEDED,
    TRANSFER_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    Fault,
    Scope,
    condition_of,
    error_with,
    link_fault,
    session_fault,
)
from convoymq.edges.amqp10.link import Link
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Composite,
    Detach,
    Disposition,
    Flow,
    Rejected,
    Released,
    Transfer,
)
from convoymq.edges.amqp10.serial import following
from convoymq.edges.amqp10.states import LinkState
from convoymq.kernels.content import content_parts
from convoymq.messages.amqp10.message import Stored, stored_of
from convoymq.messages.amqp10.values import Symbol, Value
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import as_amqp091, content_of, names_of
from convoymq.model.errors import BrokerError, Misuse, NotFound, PeerError, PreconditionFailed
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.message_checks import IMPERSONATOR, CheckedMessage, check_message

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

UNSETTLED, SETTLED = 0, 1
"""Of snd-settle-mode; 2 is mixed."""


class Receiver(Link):
    """A publisher's link.

    Args:
        destination: None: every message says it (anonymous terminus).
    """

    def __init__(self, session: Session, attach: Attach, destination: Destination | None) -> None:
        super().__init__(session, attach.handle, attach.name)
        self.destination = destination
        self.snd_settle_mode = attach.snd_settle_mode
        self.delivery_count = attach.initial_delivery_count or 0
        self.credit = 0
        self.unconfirmed = 0
        self.clients: set[QueueClient] = set()
        """Streams into the queues that the last message went to."""
        self._attach = attach
        self._delivery: Transfer | None = None
        """First transfer of the delivery that is under way."""
        self._parts: list[bytes] = []
        self._size = 0

    def start(self) -> None:
        """Answers the client's attach."""
        attach, session = self._attach, self.session
        session.links[self.handle] = self
        self.enter(LinkState.ATTACHED)
        session.send(
            Attach(
                name=attach.name,
                handle=attach.handle,
                role=True,
                snd_settle_mode=attach.snd_settle_mode,
                rcv_settle_mode=0,
                source=attach.source,
                target=attach.target,
                max_message_size=session.connection.message_size_max,
            )
        )
        self.renew_credit()

    # --- credit --------------------------------------------------------------------------------

    def renew_credit(self) -> None:
        """Grants more credit, unless the client has enough, or messages wait for queues."""
        session, most = self.session, self.session.settings.link_credit
        credit = most - self.unconfirmed
        if self.state is not LinkState.ATTACHED or (credit - self.credit) * 2 < most:
            return
        if session.is_alarmed or not self.clients.isdisjoint(session.flowing):
            return
        self.credit = credit
        self.send_credit()

    def send_credit(self) -> None:
        """Tells the client its credit."""
        self.session.send_flow(
            handle=self.handle, delivery_count=self.delivery_count, link_credit=self.credit
        )

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's view of the link, which changes nothing here."""
        if flow.echo:
            self.send_credit()

    # --- input ---------------------------------------------------------------------------------

    def on_transfer(self, transfer: Transfer, payload: bytes) -> None:
        """Takes a part of a message. Raises Fault."""
        first = self._delivery
        if first is None:
            first = self._begin(transfer)
        elif transfer.delivery_id not in (None, first.delivery_id):
            raise link_fault(INVALID_FIELD, "delivery-id differs within one delivery")
        elif transfer.settled not in (None, bool(first.settled)):
            raise link_fault(INVALID_FIELD, "settled differs within one delivery")
        if transfer.aborted:
            self._reset()
            self.renew_credit()
            return
        self._size += len(payload)
        most = self.session.connection.message_size_max
        if self._size > most:
            raise session_fault(
                MESSAGE_SIZE_EXCEEDED,
                f"message size ({self._size} bytes) exceeds maximum message size ({most} bytes)",
            )
        self._parts.append(payload)
        if not transfer.more:
            message = b"".join(self._parts)
            self._reset()
            self._publish(first, message)
            self.renew_credit()

    def _begin(self, transfer: Transfer) -> Transfer:
        if self.credit <= 0:
            raise link_fault(TRANSFER_LIMIT_EXCEEDED, "insufficient credit (0) for this link")
        if transfer.delivery_id is None:
            raise link_fault(INVALID_FIELD, "the first transfer of a delivery lacks a delivery-id")
        mode, settled = self.snd_settle_mode, bool(transfer.settled)
        if mode in (UNSETTLED, SETTLED) and settled is not (mode == SETTLED):
            raise link_fault(
                INVALID_FIELD,
                f"transfer settled={str(settled).lower()} on a link of snd-settle-mode {mode}",
            )
        self.credit -= 1
        self.delivery_count = following(self.delivery_count, 1)
        self._delivery = transfer
        return transfer

    def _reset(self) -> None:
        self._delivery = None
        self._parts.clear()
        self._size = 0

    # --- publishing ----------------------------------------------------------------------------

    def _publish(self, first: Transfer, payload: bytes) -> None:
        try:
            stored = stored_of(payload)
            content = content_of(stored.properties, stored.body, AMQP_10)
            size = len(stored.body)
            if not self.session.broker.publishing.serves_encodings:
                # Some nodes have an older release: they get what they know.
                content = as_amqp091(content)
                size = len(content_parts(content)[1])
        except (PeerError, Misuse, ValueError) as error:
            raise link_fault(DECODE_ERROR, f"failed to parse message: {error}") from error
        self._check_user(stored)
        try:
            destination = self.destination or _destination_of(stored)
            message = check_message(
                content, destination.routing_key, user=self.session.connection.user
            )
            self.session.publishes.publish(self, first, destination, message, size)
        except BrokerError as error:
            self._refused(first, error)

    def _check_user(self, stored: Stored) -> None:
        named, user = stored.properties.user_id, self.session.connection.user
        if named is not None and named != user.name and IMPERSONATOR not in user.tags:
            raise link_fault(
                UNAUTHORIZED_ACCESS,
                f"user_id property set to '{named}' but authenticated user was '{user.name}'",
            )

    def _refused(self, first: Transfer, error: BrokerError) -> None:
        """Refuses one message. Where its client waits for no outcome, the link ends."""
        publishes, assumed = self.session.publishes, first.delivery_id
        assert assumed is not None
        self.session.connection.counters.published += 1
        if isinstance(error, NotFound) and self.destination is not None:
            # Its exchange was deleted.
            if not first.settled:
                publishes.settle(assumed, Released())
            raise link_fault(NOT_FOUND, error.text)
        if first.settled:
            info = {"delivery-tag": first.delivery_tag or b""}
            raise Fault(Scope.LINK, condition_of(error), error.text, info)
        publishes.settle(assumed, Rejected(error=error_with(condition_of(error), error.text)))

    # --- ends ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends without a word."""
        self._reset()
        self.enter(LinkState.DETACHED)

    def on_detach(self, detach: Detach) -> None:
        """Answers the client's detach."""
        self.forget()
        if self.state is not LinkState.DETACHING:
            self.end()
            self.session.send(Detach(handle=self.handle, closed=detach.closed))


def _destination_of(stored: Stored) -> Destination:
    """Returns the destination that a message says. Raises Fault."""
    address = stored.sections.properties.get("to")
    if address is None:
        raise link_fault(PRECONDITION_FAILED, "anonymous terminus requires 'to' address to be set")
    try:
        return target_of(address)
    except PreconditionFailed as error:
        raise link_fault(PRECONDITION_FAILED, f"bad 'to' address string: {error.text}") from error


def check_publish(session: Session, exchange: str, routing_key: str | None) -> None:
    """Raises BrokerError unless there is an exchange, to which the user may publish.

    Args:
        routing_key: None: no message is there yet.
    """
    session.permissions.check("write", "exchange", exchange)
    if exchange:
        if routing_key is not None:
            session.permissions.check_topic("write", exchange, routing_key)
        session.broker.publishing.check_exchange(session.connection.vhost, exchange)


class _Unconfirmed:
    """A message whose outcome some queues have not told."""

    __slots__ = ("accepted", "delivery_id", "link", "refused", "waiting")

    def __init__(self, link: Receiver, delivery_id: int, waiting: int) -> None:
        self.link = link
        self.delivery_id = delivery_id
        self.waiting = waiting
        self.accepted = False
        self.refused: Rejected | None = None


class Publishes:
    """The messages of one session's publishers on their way to queues, and their outcomes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_tag = 0
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        """By the tag that queues know them by."""
        self._outcomes: list[tuple[int, Composite]] = []

    def publish(
        self,
        link: Receiver,
        first: Transfer,
        destination: Destination,
        message: CheckedMessage,
        body_size: int,
    ) -> None:
        """Routes a message and hands it to its queues. Raises BrokerError: none gets it."""
        session, exchange = self._session, destination.exchange
        vhost, broker = session.connection.vhost, session.broker
        for key in message.routing_keys:
            check_publish(session, exchange, key)
        route = broker.publishing.route(
            vhost,
            exchange,
            message.routing_keys,
            message.headers,
            message.asked,
            message.properties,
        )
        counters = session.connection.counters
        counters.published += 1
        broker.publishing.count(vhost, exchange, route.queues, 1)
        assert first.delivery_id is not None
        self._trace(exchange, message, route.queues)
        if not route.queues:
            if first.settled:
                counters.dropped_unroutable += 1
            else:
                counters.returned_unroutable += 1
                self.settle(first.delivery_id, Released())
            return
        clients = [session.client_of(queue) for queue in route.queues]
        link.clients = set(clients)
        tag = 0
        if not first.settled:
            self._last_tag = tag = self._last_tag + 1
            self._unconfirmed[tag] = _Unconfirmed(link, first.delivery_id, len(route.queues))
            link.unconfirmed += 1
        parts = (names_of(exchange, destination.routing_key), message.content)
        for queue, client in zip(route.queues, clients, strict=True):
            if queue.refuses_publishes:
                if tag:
                    self.on_published(queue.name, (tag, tag), PublishOutcome.REFUSED_LENGTH)
                continue
            if message.producer is not None and queue.features.drops_repeats:
                client.target.name_next(*message.producer)
            client.target.publish(parts, body_size, tag, message.flags)

    def _trace(self, exchange: str, message: CheckedMessage, queues: Sequence[Queue]) -> None:
        session = self._session
        connection, firehose = session.connection, session.broker.firehose
        if connection.vhost not in firehose.vhosts:
            return
        copy = firehose.published(
            connection.vhost,
            exchange,
            message.routing_keys,
            message.content,
            queues,
            Origin(connection.name, session.channel, connection.user.name),
        )
        if copy is not None:
            for queue in copy.queues:
                target = session.client_of(queue).target
                target.publish((copy.key, copy.content), copy.body_size, 0, 0)

    def on_published(self, queue: str, tags: Sequence[int], outcome: PublishOutcome) -> None:
        """A queue has told the outcome of messages, by ranges of their tags."""
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                found = self._unconfirmed.get(tag)
                if found is None:
                    continue
                if outcome is PublishOutcome.ACCEPTED:
                    found.accepted = True
                elif outcome is not PublishOutcome.DELETED:
                    found.refused = _refusal(queue, outcome)
                found.waiting -= 1
                if not found.waiting:
                    del self._unconfirmed[tag]
                    self._told(found)

    def _told(self, found: _Unconfirmed) -> None:
        # A queue that was deleted has taken nothing.
        taken: Composite = Accepted() if found.accepted else Released()
        if found.accepted and found.refused is None:
            self._session.connection.counters.confirmed += 1
        self.settle(found.delivery_id, found.refused or taken)
        found.link.unconfirmed -= 1
        found.link.renew_credit()

    def settle(self, delivery_id: int, outcome: Composite) -> None:
        """Has the client told an outcome, at the end of the round."""
        self._outcomes.append((delivery_id, outcome))
        self._session.connection.want_outcomes(self._session)

    def flush(self) -> None:
        """Tells the client the outcomes so far: rejected, released, accepted."""
        outcomes, self._outcomes = self._outcomes, []
        for kind in (Rejected, Released, Accepted):
            same = [each for each in outcomes if isinstance(each[1], kind)]
            for first, last, outcome in _ranges(same):
                self._session.send(
                    Disposition(
                        role=True,
                        first=first,
                        last=last if last != first else None,
                        settled=True,
                        state=outcome,
                    )
                )


def _ranges(outcomes: Sequence[tuple[int, Composite]]) -> list[tuple[int, int, Composite]]:
    """Returns the outcomes of neighbouring deliveries together."""
    found: list[tuple[int, int, Composite]] = []
    for delivery_id, outcome in outcomes:
        if found and delivery_id == following(found[-1][1], 1) and found[-1][2] == outcome:
            found[-1] = (found[-1][0], delivery_id, outcome)
        else:
            found.append((delivery_id, delivery_id, outcome))
    return found


def _refusal(queue: str, outcome: PublishOutcome) -> Rejected:
    full = outcome is PublishOutcome.REFUSED_LENGTH
    info: Mapping[str, Value] = {"queue": queue, "reason": Symbol(outcome.value)}
    error = error_with(
        RESOURCE_LIMIT_EXCEEDED if full else PRECONDITION_FAILED,
        f"queue '{queue}' exceeded maximum length" if full else f"queue '{queue}' is unavailable",
        info,
    )
    return Rejected(error=error)
