# cython: annotation_typing=False
"""Links of publishers: messages of several transfers, routes, outcomes, credit.

Most messages are one transfer to one queue, and ask for nothing: runs of them go from the input
straight into the queue's batch (`take_plain`, `kernels.amqp10_frames`), by the same rules.

A link has credit for some messages, the more the smaller they are, less those that no queue has
confirmed yet: a queue that is behind holds up its own publishers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from convoymq.broker.firehose import Origin
from convoymq.broker.publishing import Route
from convoymq.edges.amqp10.addresses import Destination, target_of
from convoymq.edges.amqp10.errors import (
    DECODE_ERROR,
    NOT_FOUND,
    PRECONDITION_FAILED,
    RESOURCE_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    Fault,
    Scope,
    condition_of,
    error_with,
    link_fault,
)
from convoymq.edges.amqp10.frames import FrameReader
from convoymq.edges.amqp10.incoming import Incoming
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Composite,
    Disposition,
    Rejected,
    Released,
    TransactionalState,
    Transfer,
    accepted,
)
from convoymq.edges.amqp10.recovery import Claim, key_of
from convoymq.edges.amqp10.serial import following, messages_ahead
from convoymq.edges.amqp10.states import LinkState
from convoymq.kernels.content import content_parts
from convoymq.messages.amqp10.message import Stored, stored_of
from convoymq.messages.amqp10.values import Symbol, Value
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import as_amqp091, content_of, names_of
from convoymq.model.errors import BrokerError, Misuse, NotFound, PeerError, PreconditionFailed
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.message_checks import (
    IMPERSONATOR,
    REPLY_PREFIX,
    CheckedMessage,
    check_message,
)
from convoymq.queues.message_properties import check_waits_nowhere, short_way_of

if TYPE_CHECKING:
    from convoymq.edges.amqp10.config import Amqp10Config
    from convoymq.edges.amqp10.session import Session

_NEVER = -1
"""No route cache version."""
_ACCEPTED = Accepted()
_RANKS: list[type[Composite]] = [Rejected, Released, Accepted]
"""Outcomes in the order in which clients are told."""


def _window_of(settings: Amqp10Config, size: int) -> int:
    return messages_ahead(settings.link_credit_large, settings.link_credit, size)


class Receiver(Incoming):
    """A publisher's link.

    Args:
        destination: None: every message says it (anonymous terminus).
        claim: of a link that may go on later.
    """

    __slots__ = ("_way", "_way_version", "claim", "clients", "destination")

    def __init__(
        self,
        session: Session,
        attach: Attach,
        destination: Destination | None,
        claim: Claim | None = None,
    ) -> None:
        super().__init__(
            session,
            attach,
            credit_max=_window_of(session.settings, 0),
            message_size_max=session.connection.message_size_max,
        )
        self.destination = destination
        self.claim = claim
        self.clients: Sequence[QueueClient] = ()
        """Streams into the queues that the last message went to."""
        self._way: _Way | None = None
        self._way_version = _NEVER

    def start(self, attach: Attach, unsettled: dict[Value, Value] | None = None) -> None:
        """See `Incoming`."""
        self.take_name(key_of(self.session, attach))
        super().start(attach, self.claim.map() if self.claim is not None else unsettled)

    def window(self) -> int:
        """See `Incoming`."""
        return _window_of(self.session.settings, self._size)

    def is_held_up(self) -> bool:
        """Returns whether nothing more is taken for now: an alarm is on, or messages wait for a
        queue."""
        session = self.session
        return session.is_alarmed or not session.flowing.isdisjoint(self.clients)

    def check_access(self) -> None:
        """Raises AccessRefused: the user may not publish there any more."""
        if self.destination is not None:
            self.session.permissions.check("write", "exchange", self.destination.exchange)

    def take_plain(self, reader: FrameReader, most: int) -> int:
        """Publishes messages from the input that need no closer look, up to the next flow of ours.
        Returns how many."""
        session = self.session
        most = min(most, self.credit)
        if self.state is not LinkState.ATTACHED or self._delivery is not None or most <= 0:
            return 0
        way = self._plain_way()
        if way is None:
            return 0
        # Settled ones use credit up, of which more is granted when half of it is gone.
        half, used = (self._credit_max + 1) // 2, self.grantable()
        waiting = reader.waiting
        count = session.publishes.publish_plain(
            self, reader, way, (most, min(most, max(1, half - used)))
        )
        self.credit -= count
        self.delivery_count = following(self.delivery_count, count)
        if count:
            self._size = (waiting - reader.waiting) // count
            self.clients = (way.client,)
            exchange, connection = way.exchange, session.connection
            session.broker.publishing.count_published(
                connection.counters, connection.vhost, exchange, (way.queue,), count
            )
        return count

    def _plain_way(self) -> _Way | None:
        """Returns where the link's messages go that say nothing of it; None: each is to be looked
        at."""
        session, destination = self.session, self.destination
        broker, vhost = session.broker, session.connection.vhost
        if (
            destination is None
            or self.claim is not None
            or vhost in broker.firehose.vhosts
            or not broker.publishing.serves_encodings
        ):
            return None
        version, way = broker.route_versions.of(vhost).value, self._way
        if self._way_version != version or (
            way is not None and session.clients.get(way.queue) is not way.client
        ):
            self._way_version = version
            way = self._way = self._find_way(destination)
        return None if way is None or way.queue.refuses_publishes else way

    def _find_way(self, destination: Destination) -> _Way | None:
        exchange, key = destination.exchange, destination.routing_key
        session = self.session
        route = _route_of(session, destination)
        if route is None or not route.queues:
            # That may change while the version stays.
            self._way_version = _NEVER
            return None
        if not route.cacheable or len(route.queues) != 1:
            return None
        client = session.client_of(route.queues[0])
        if client.target.spreads:
            return None
        client.target.serves = short_way_of(route.queues[0])
        return _Way(exchange, route.queues[0], client, names_of(exchange, key))

    # --- publishing ----------------------------------------------------------------------------

    def take(self, first: Transfer, message: bytes) -> None:
        """Publishes a message. Raises Fault."""
        if first.resume:
            self._resume(first)
            return
        try:
            stored = stored_of(message)
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
            checked = check_message(
                content, destination.routing_key, user=self.session.connection.user
            )
            if isinstance(first.state, TransactionalState):
                transactions = self.session.transactions
                transactions.post(first.state, first, destination, checked, size)
            else:
                self.session.publishes.publish(self, first, destination, checked, size)
        except BrokerError as error:
            self._refused(first, error)

    def _resume(self, first: Transfer) -> None:
        """Answers a delivery that the queue has; others are ignored."""
        tag, claim = first.delivery_tag or b"", self.claim
        if claim is not None and tag in claim.known:
            claim.known.discard(tag)
            if not first.settled:
                assert first.delivery_id is not None
                self.session.publishes.settle(first.delivery_id, Accepted())

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


def _destination_of(stored: Stored) -> Destination:
    """Returns the destination that a message says. Raises Fault."""
    address = stored.sections.properties.get("to")
    if address is None:
        raise link_fault(PRECONDITION_FAILED, "anonymous terminus requires 'to' address to be set")
    try:
        return target_of(address)
    except PreconditionFailed as error:
        raise link_fault(PRECONDITION_FAILED, f"bad 'to' address string: {error.text}") from error


def _route_of(session: Session, destination: Destination) -> Route | None:
    """Returns where messages go that say nothing of it; None: nowhere."""
    exchange, key = destination.exchange, destination.routing_key
    try:
        check_publish(session, exchange, key)
        return session.broker.publishing.route(session.connection.vhost, exchange, (key,), None)
    except BrokerError:
        return None


def only_queue(session: Session, destination: Destination | None) -> Queue | None:
    """Returns the one queue of all messages to a destination; None: there is no such queue."""
    if destination is None or destination.is_reply:
        return None
    route = _route_of(session, destination)
    if route is None or not route.cacheable or len(route.queues) != 1:
        return None
    return route.queues[0]


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


class _Way(NamedTuple):
    """Queue that messages of a link go to until the route cache version moves."""

    exchange: str
    queue: Queue
    client: QueueClient
    names: bytes
    """Begin of their records."""


@dataclass(slots=True)
class _Unconfirmed:
    """Messages with succeeding tags and delivery ids, whose outcome some queues have not told."""

    link: Receiver
    first: int
    """Of the tags that queues know them by."""
    last: int
    delivery_id: int
    """Of the first one."""
    waiting: int
    accepted: bool = False
    refused: Rejected | None = None


class Publishes:
    """The messages of one session's publishers on their way to queues, and their outcomes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_tag = 0
        self._unconfirmed: list[_Unconfirmed] = []
        """By their tags."""
        self._held: list[tuple[str, Sequence[int], PublishOutcome]] | None = None
        """Outcomes told while messages are published that are not noted yet."""
        self._outcomes: list[tuple[int, int, Composite]] = []
        """First and last delivery id."""

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
        if destination.is_reply:
            for key in message.routing_keys:
                check_publish(session, exchange, key)
            self._reply(first, destination, message)
            return
        queues = self.route(destination, message, body_size)
        counters = session.connection.counters
        assert first.delivery_id is not None
        if not queues:
            if first.settled:
                counters.dropped_unroutable += 1
            else:
                counters.returned_unroutable += 1
                self.settle(first.delivery_id, Released())
            return
        clients = [session.client_of(queue) for queue in queues]
        link.clients = clients
        tag = 0
        if not first.settled:
            tag = self._expect(link, first.delivery_id, 1, len(queues))
        parts = (names_of(exchange, destination.routing_key), message.content)
        if session.spans is not None:
            session.spans.take(*parts, tag)
        for queue, client in zip(queues, clients, strict=True):
            if queue.refuses_publishes:
                if tag:
                    self.on_published(queue.name, (tag, tag), PublishOutcome.REFUSED_LENGTH)
                continue
            claim = link.claim if tag else None
            if message.producer is not None and queue.features.drops_repeats:
                client.target.name_next(*message.producer)
            elif claim is not None and queue is claim.queue:
                client.target.name_next(*claim.name(first.delivery_tag or b""))
            client.target.publish(parts, body_size, tag, message.flags)

    def route(
        self, destination: Destination, message: CheckedMessage, body_size: int
    ) -> Sequence[Queue]:
        """Returns the queues that get a message, which counts as published. Raises BrokerError."""
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
        counters.sizes.add(body_size)
        broker.publishing.count_published(counters, vhost, exchange, route.queues)
        self._trace(exchange, message, route.queues)
        return route.queues

    def _reply(self, first: Transfer, destination: Destination, message: CheckedMessage) -> None:
        """Hands a message to a consumer of direct replies. Raises BrokerError."""
        check_waits_nowhere(message.asked)
        counters, broker = self._session.connection.counters, self._session.broker
        token = destination.routing_key.removeprefix(REPLY_PREFIX)
        names = names_of(destination.exchange, destination.routing_key)
        taken = broker.replies.publish(token, names + message.content)
        counters.published += 1
        if first.settled:
            return
        counters.confirmed += taken
        counters.returned_unroutable += not taken
        assert first.delivery_id is not None
        self.settle(first.delivery_id, _ACCEPTED if taken else Released())

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

    def publish_plain(
        self, link: Receiver, reader: FrameReader, way: _Way, most: tuple[int, int]
    ) -> int:
        """Publishes messages from the input that need no closer look: so many, or so many when they
        are settled. Returns how many."""
        session = self._session
        place = session.channel, link.handle, link.snd_settle_mode
        limits, sizes = (
            (*most, session.connection.message_size_max),
            session.connection.counters.sizes,
        )
        below = None if session.spans is None else session.spans.below
        held: list[tuple[str, Sequence[int], PublishOutcome]] = []
        self._held = held
        try:
            count, first, settled = reader.publish_plain(
                place, limits, way.names, way.client.target, self._last_tag + 1, sizes, below
            )
        finally:
            self._held = None
        if count and not settled:
            self._expect(link, first, count, 1)
        for told in held:
            self.on_published(*told)
        return count

    def _expect(self, link: Receiver, delivery_id: int, count: int, waiting: int) -> int:
        """Notes messages that wait for so many queues each, and returns the tag of the first."""
        link.unconfirmed += count
        self._session.connection.counters.published_confirm += count
        tag = self._last_tag + 1
        self._last_tag += count
        before = self._unconfirmed[-1] if self._unconfirmed else None
        if (
            before is not None
            and before.link is link
            and before.last == tag - 1
            and delivery_id == following(before.delivery_id, tag - before.first)
            and (before.waiting, before.accepted, before.refused) == (waiting, False, None)
        ):
            before.last = self._last_tag
        else:
            made = _Unconfirmed(link, tag, self._last_tag, delivery_id, waiting)
            self._unconfirmed.append(made)
        return tag

    def on_published(self, queue: str, tags: Sequence[int], outcome: PublishOutcome) -> None:
        """A queue has told the outcome of messages, by ranges of their tags."""
        if self._held is not None:
            self._held.append((queue, tags, outcome))
            return
        refused = None
        if outcome not in (PublishOutcome.ACCEPTED, PublishOutcome.DELETED):
            refused = _refusal(queue, outcome)
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            at = self._cut(first)
            end = self._cut(last + 1)
            told, waiting = self._unconfirmed[at:end], list[_Unconfirmed]()
            for found in told:
                found.accepted |= outcome is PublishOutcome.ACCEPTED
                found.refused = refused or found.refused
                found.waiting -= 1
                if found.waiting:
                    waiting.append(found)
            self._unconfirmed[at:end] = waiting
            if outcome is PublishOutcome.REFUSED_TAKEN:
                # Whoever has the name is told what has come.
                for found in told:
                    found.link.lose_name()
                continue
            for found in told:
                if not found.waiting:
                    self._told(found)

    def _cut(self, tag: int) -> int:
        """Returns where messages from a tag on are noted, apart from those before them."""
        notes = self._unconfirmed
        at = bisect_left(notes, tag, key=lambda each: each.last)
        if at < len(notes) and notes[at].first < tag:
            before = notes[at]
            delivery_id = following(before.delivery_id, tag - before.first)
            notes.insert(at + 1, replace(before, first=tag, delivery_id=delivery_id))
            before.last = tag - 1
            at += 1
        return at

    def _told(self, found: _Unconfirmed) -> None:
        count, spans = found.last - found.first + 1, self._session.spans
        if spans is not None:
            spans.confirmed(
                lambda tag: not found.first <= tag <= found.last, accepted=found.refused is None
            )
        # A queue that was deleted has taken nothing.
        taken: Composite = _ACCEPTED if found.accepted else Released()
        if found.accepted and found.refused is None:
            self._session.connection.counters.confirmed += count
        self.settle(found.delivery_id, found.refused or taken, count)
        found.link.unconfirmed -= count
        found.link.renew_credit()

    def settle(self, delivery_id: int, outcome: Composite, count: int = 1) -> None:
        """Has the client told an outcome, at the end of the round."""
        if self._session.is_over:
            return
        self._outcomes.append((delivery_id, following(delivery_id, count - 1), outcome))
        self._session.connection.want_outcomes(self._session)

    def flush(self) -> None:
        """Tells the client the outcomes so far: rejected, released, accepted."""
        outcomes, self._outcomes = self._outcomes, []
        session = self._session
        for first, last, outcome in _joined(sorted(outcomes, key=_rank)):
            if outcome is _ACCEPTED:
                session.connection.send_frame(session.channel, accepted(first, last))
                continue
            session.send(
                Disposition(
                    role=True,
                    first=first,
                    last=last if last != first else None,
                    settled=True,
                    state=outcome,
                )
            )


def _rank(told: tuple[int, int, Composite]) -> int:
    return _RANKS.index(type(told[2]))


def _joined(outcomes: Sequence[tuple[int, int, Composite]]) -> list[tuple[int, int, Composite]]:
    """Returns the outcomes of neighbouring deliveries together."""
    found: list[tuple[int, int, Composite]] = []
    for first, last, outcome in outcomes:
        if found and first == following(found[-1][1], 1) and found[-1][2] == outcome:
            found[-1] = (found[-1][0], last, outcome)
        else:
            found.append((first, last, outcome))
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
