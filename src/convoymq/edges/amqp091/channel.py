"""One AMQP channel: its state, publishes, and what queues tell. The other methods are served by
`declarations`, `consumers` and `transactions`; deliveries that wait are in `deliveries`.

States: open → (busy ⇄ open)* → closing → gone. While an answer is being worked on (the broker or a
queue was asked) the channel codec is busy and keeps the channel's further frames, so that answers
keep their order; other channels go on. After an error the channel closes: it hears only close and
close-ok.

Publishes, acknowledgements and deliveries go through `kernels.channel_codec.ChannelCodec`; what
arrives here is control, and messages that need a closer look. Source: RabbitMQ 4.3 behaviour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.access import AMQP
from convoymq.broker.firehose import Copy, Origin
from convoymq.broker.publishing import Route
from convoymq.broker.route_counts import ChannelRoutes
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import consumers, declarations, transactions
from convoymq.edges.amqp091.consumers import (
    Consumer,
    Replies,
    consume_again,
    drop_consumer,
    forget_settled_consumers,
    ignored_arguments,
    settle_nowhere,
)
from convoymq.edges.amqp091.deliveries import Deliveries
from convoymq.edges.amqp091.publishing import names_of
from convoymq.edges.amqp091.timeouts import AcknowledgementTimeouts
from convoymq.edges.amqp091.transactions import Transaction
from convoymq.edges.permissions import Permissions
from convoymq.edges.queue_streams import QueueStreams
from convoymq.kernels import channel_codec
from convoymq.kernels.batch import PublishTarget, record
from convoymq.kernels.channel_codec import CHANNEL_CLOSING, ChannelCodec, ConsumerDeliveries
from convoymq.kernels.route_cache import RouteCount
from convoymq.model import refusals
from convoymq.model.errors import (
    BrokerError,
    ChannelFault,
    CommandFault,
    PreconditionFailed,
    as_broker_error,
)
from convoymq.model.refusals import queue_subject
from convoymq.queues.interface import (
    Delivery,
    GetResult,
    PublishOutcome,
    Queue,
    QueueClient,
)
from convoymq.queues.message_checks import REPLY_PREFIX, CheckedMessage, check_message
from convoymq.queues.message_properties import check_waits_nowhere, short_way_of
from convoymq.queues.outcomes import with_headers

if TYPE_CHECKING:
    from convoymq.edges.amqp091.connection import Connection

log = structlog.get_logger()

QUEUES_COUNTED_MAX = 1024
"""Queues of which a channel counts apart what they deliver."""


class Channel(QueueStreams):
    """A channel's rules. Implements `ChannelCodecOwner` and `ClientEvents`; nothing here blocks."""

    VERSION = "0.9.1"

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.broker = connection.broker
        self.number = number
        super().__init__(self.broker, connection, connection.settings.clients_per_channel_max)
        self.codec: ChannelCodec = connection.buffer.open_codec(
            number, self, self.broker.route_versions.of(connection.vhost)
        )
        self.codec.spans = self.spans
        self.consumers: dict[str, Consumer] = {}
        self.global_prefetch = 0
        self.closed = False
        self.prefetch = 0
        self.last_queue: str | None = None
        self.get_deliveries: dict[QueueClient, ConsumerDeliveries] = {}
        self.by_number: dict[int, Consumer] = {}
        self.last_number = 0
        self.leaving: list[ConsumerDeliveries] = []
        self.permissions = Permissions(connection)
        self.deliveries = Deliveries(self)
        self.replies = Replies(self)
        self.transaction: Transaction | None = None
        self.flowing: set[QueueClient] = set()
        self.asked: Callable[..., None] | None = None
        #: The queue that is being deleted, and cancels of its consumers: delete-ok goes first.
        self.deleting: tuple[str, list[spec.BasicCancel]] | None = None
        self._node_counters = self.broker.counters.of(AMQP)
        self._node_counters.counting.add(self._count)
        self._counted = [0, 0, 0]
        self._tally: Counter[str] = Counter()
        self._routes = ChannelRoutes(self.broker.route_counts, connection.vhost, RouteCount)
        self._delivered_from: dict[str, Counter[str]] = {}
        """Queue -> what was delivered from it."""
        self.timeouts = AcknowledgementTimeouts(self)

    # --- methods -------------------------------------------------------------------------

    def handle(self, method: spec.Method) -> None:
        """Serve one method.

        Raises:
            BrokerError: the method is refused; the caller closes channel or connection.
        """
        handler = _HANDLERS.get(type(method))
        if handler is None:
            raise CommandFault("unimplemented method")
        handler(self, method)

    def send(self, method: spec.Method) -> None:
        """Appends a method to the output, unless the channel is closed meanwhile."""
        if not self.closed:
            self.connection.send(self.number, method)

    def refuse(self, error: BrokerError, class_id: int, method_id: int) -> None:
        """Closes this channel, not one that has taken its number since."""
        if not self.closed:
            self.connection.refuse(error, self.number, class_id, method_id)

    def ask(self, work: Coroutine[object, object, None], method: spec.Method) -> None:
        """Let `work` finish before the channel's next frame is looked at."""
        self.codec.state = channel_codec.CHANNEL_BUSY

        async def run() -> None:
            try:
                await work
            except BrokerError as error:
                self.refuse(error, method.CLASS_ID, method.METHOD_ID)
            except Exception:
                log.exception("amqp.method_failed", method=method.NAME)
                self.refuse(BrokerError("internal error"), method.CLASS_ID, method.METHOD_ID)
            self.go_on()

        self.connection.spawn(run())

    def wait_for(self, then: Callable[..., None]) -> None:
        """Be busy until a queue answers; `then` gets the answer."""
        self.codec.state = channel_codec.CHANNEL_BUSY
        self.asked = then

    def answer(self, method_id: int, *answer: object, class_id: int = spec.BASIC) -> None:
        """Hands a queue's answer to who waits for it."""
        then, self.asked = self.asked, None
        if then is None or self.closed:
            return
        try:
            then(*answer)
        except BrokerError as error:
            self.refuse(error, class_id, method_id)
        self.go_on()

    def go_on(self) -> None:
        """Look at the frames that were kept while the channel was busy."""
        if not self.closed:
            self.codec.resume()
        self.connection.codec_resumed()

    def _open_again(self, _method: spec.ChannelOpen) -> None:
        raise ChannelFault("second 'channel.open' seen")

    def _flow(self, method: spec.ChannelFlow) -> None:
        if not method.active:
            raise refusals.channel_flow_off()
        self.send(spec.ChannelFlowOk(active=True))

    def _close(self, _method: spec.ChannelClose) -> None:
        crossing = self.closed
        self.terminate()
        self.connection.send(self.number, spec.ChannelCloseOk())
        if not crossing:
            self.connection.forget_channel(self)

    def _close_ok(self, _method: spec.ChannelCloseOk) -> None:
        if not self.closed:
            raise CommandFault("unimplemented method")
        self.connection.forget_channel(self)

    def _access(self, _method: spec.AccessRequest) -> None:
        self.send(spec.AccessRequestOk(ticket=1))

    # --- checks on occasion --------------------------------------------------------------

    def check_again(self) -> None:
        """Asks again for every permission; a consumer that lost its own closes the
        channel, as any method without permission does."""
        self.permissions.forget()
        self.codec.forget_routes()
        try:
            for consumer in self.consumers.values():
                self.permissions.check("read", "queue", consumer.queue.name)
        except BrokerError as error:
            self.refuse(error, spec.BASIC, spec.BasicConsume.METHOD_ID)

    # --- queues --------------------------------------------------------------------------

    def queue_name(self, name: str) -> str:
        """Returns the name, or that of the queue declared last. Raises Refused."""
        if name:
            return name
        if self.last_queue is None:
            raise refusals.no_previous_queue()
        return self.last_queue

    def clients_in_use(self) -> set[QueueClient]:
        """See `QueueStreams`. Routes are looked up again, which opens streams that are needed."""
        used = {consumer.client for consumer in self.consumers.values()}
        used |= {each.client for each in self.codec.consumers if each is not None and each.unacked}
        if self.transaction is not None:
            taken = (each for _, acks in self.transaction.acks for each in acks)
            used |= {deliveries.client for _, _, deliveries, _ in taken}
        self.codec.forget_routes()
        return used

    def on_idle(self, client: QueueClient) -> None:
        """See `QueueStreams`."""
        deliveries = self.get_deliveries.pop(client, None)
        if deliveries is not None:
            self.codec.remove_consumer(deliveries)

    def window(self, prefetch: int) -> int:
        """Returns how many messages a queue may hand to one consumer: its own limit, never more
        than the shared one."""
        limits = [limit for limit in (prefetch, self.global_prefetch) if limit]
        return min(limits, default=0)

    # --- acknowledgements ----------------------------------------------------------------

    def on_unknown_tag(self, tag: int, method_id: int) -> None:
        """An acknowledgement for nothing that is outstanding."""
        self.refuse(refusals.unknown_delivery_tag(tag), spec.BASIC, method_id)

    def on_settled(self) -> None:
        """Acknowledgements were handed on: there may be room under the shared limit."""
        if self.deliveries.held:
            self.deliveries.release()
        if self.leaving:
            forget_settled_consumers(self)

    def _count(self) -> None:
        """Adds what the kernel has done since the last time to the node's counters."""
        codec, counters, seen = self.codec, self._node_counters, self._counted
        is_quiet = seen[:2] == [codec.acknowledged, codec.published]
        if is_quiet and codec.mode != channel_codec.MODE_TX:
            return
        counters.acknowledged += codec.acknowledged - seen[0]
        published = codec.published - seen[1]
        counters.published += published
        if codec.mode == channel_codec.MODE_CONFIRM:
            counters.published_confirm += published
        self._routes.fold()
        counters.routed += self._routes.routed - seen[2]
        seen[:] = codec.acknowledged, codec.published, self._routes.routed

    def tally(self, name: str, count: int, queue: Queue | None = None) -> None:
        """Adds to a counter (`MessageCounters`) of the node, of the channel, and of what it gets
        from a queue."""
        counters = self._node_counters
        setattr(counters, name, getattr(counters, name) + count)
        self._tally[name] += count
        if queue is not None:
            known = self._delivered_from.get(queue.name)
            if known is None and len(self._delivered_from) < QUEUES_COUNTED_MAX:
                known = self._delivered_from[queue.name] = Counter()
            if known is not None:
                known[name] += count

    # --- modes ---------------------------------------------------------------------------

    def _confirm_select(self, method: spec.ConfirmSelect) -> None:
        if self.transaction is not None:
            raise refusals.mode_switch("tx", "confirm")
        self._count()
        self.codec.select_confirms()
        if not method.nowait:
            self.send(spec.ConfirmSelectOk())

    # --- publishing ----------------------------------------------------------------------

    def resolve_route(self, key: bytes) -> tuple[PublishTarget, ...] | None:
        """Returns the queues that an exchange and routing key lead to; see `ChannelCodecOwner`."""
        try:
            exchange, routing_key = names_of(key)
            if not exchange and routing_key.startswith(REPLY_PREFIX):
                return None
            if self.is_traced:
                # Each message is looked at, until a change of the tree moves the route cache.
                return None
            self.may_publish(exchange, routing_key)
            route = self.broker.publishing.route(
                self.connection.vhost,
                exchange,
                (routing_key,),
                None,
                keyed=self.codec.has_order_key,
            )
            every_key = route.every_key and not self.permissions.depend_on_keys()
            if not (route.cacheable or every_key) or any(
                queue.refuses_publishes for queue in route.queues
            ):
                return None
            if not (exchange or route.queues) and not self.broker.route_versions.remember_missing(
                self.connection.vhost, routing_key
            ):
                return None
            targets = tuple(self.client_of(queue).target for queue in route.queues)
            for queue, target in zip(route.queues, targets, strict=True):
                target.serves = short_way_of(queue)
            self.codec.every_key = every_key
            self.codec.route_count = self._route_count(exchange, route.queues)
            return targets
        except BrokerError as error:
            self.refuse(error, spec.BASIC, spec.BasicPublish.METHOD_ID)
            return None

    def _route_count(self, exchange: str, queues: Sequence[Queue]) -> RouteCount:
        if self._routes.is_full:
            self._routes.clear()
            self.codec.forget_routes()
        return self._routes.count_of(exchange, queues)

    def on_dropped(self) -> None:
        """A message has no queue to go to, and nobody wants it back; see `ChannelCodecOwner`."""
        self.tally("dropped_unroutable", 1)

    def may_publish(self, exchange: str, routing_key: str) -> None:
        """Raises AccessRefused unless the user may publish so."""
        self.permissions.check("write", "exchange", exchange)
        if exchange:
            self.permissions.check_topic("write", exchange, routing_key)

    def on_publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        """A message that needs a closer look; see `ChannelCodecOwner`."""
        try:
            if bits & 2:
                raise refusals.immediate_publish()
            transaction = self.transaction
            if transaction is None:
                self.publish(key, bits, content, body_size, flags, tag)
                return
            # Better now than in the middle of a commit.
            self._checked(key, content)
            transaction.bytes += len(content)
            if transaction.bytes > self.connection.settings.transaction_bytes_max:
                raise PreconditionFailed("transaction is larger than configured max size")
            transaction.publishes.append((key, bits, content, body_size, flags))
        except BrokerError as error:
            self.refuse(error, spec.BASIC, spec.BasicPublish.METHOD_ID)

    def publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        """Checks, routes and appends one message. `tag` 0: nobody waits for the outcome."""
        message, route = self._checked(key, content)
        if route is None:
            token = message.routing_keys[0][len(REPLY_PREFIX) :]
            self.broker.replies.publish(token, key + message.content)
            self._expect(tag, 0)
            return
        exchange, _ = names_of(key)
        if self.is_traced:
            self._append_copy(
                self.broker.firehose.published(
                    self.connection.vhost,
                    exchange,
                    message.routing_keys,
                    message.content,
                    route.queues,
                    self._origin(),
                )
            )
        self._route_count(exchange, route.queues).messages += 1
        if not route.queues:
            if bits & 1:
                self.tally("returned_unroutable", 1)
                self.codec.send_return(spec.NO_ROUTE, b"NO_ROUTE", key, message.content)
            else:
                self.on_dropped()
            self._expect(tag, 0)
            return
        targets = [self.client_of(queue).target for queue in route.queues]
        self._expect(tag, len(targets))
        for queue, target in zip(route.queues, targets, strict=True):
            if queue.refuses_publishes:
                self._refused(tag)
                continue
            if message.producer is not None and queue.features.drops_repeats:
                target.name_next(*message.producer)
            self.codec.append(target, key, message.content, body_size, flags, tag)

    @property
    def is_traced(self) -> bool:
        """Returns whether the firehose gets what passes this channel."""
        return self.connection.vhost in self.broker.firehose.vhosts

    def trace_deliveries(
        self, queue: str, block: bytes, command: int, first: int, count: int, acquired_count: int
    ) -> None:
        """Appends copies of messages that the client gets to the queues of the firehose."""
        firehose, vhost, origin = self.broker.firehose, self.connection.vhost, self._origin()
        for number in range(first, first + count):
            data = record(block, command, number)
            copy = firehose.delivered(vhost, queue, data, origin, redelivered=acquired_count > 0)
            self._append_copy(copy)

    def _origin(self) -> Origin:
        return Origin(self.connection.name, self.number, self.connection.user.name)

    def _append_copy(self, copy: Copy | None) -> None:
        if copy is None or self.closed:
            return
        for queue in copy.queues:
            # What a traced message meets is not for a copy of it to decide.
            with suppress(BrokerError):
                target = self.client_of(queue).target
                self.codec.append(target, copy.key, copy.content, copy.body_size, 0, 0)

    def _checked(self, key: bytes, content: bytes) -> tuple[CheckedMessage, Route | None]:
        """Returns a message after its checks, and its route; None: to a consumer of direct
        replies. Raises BrokerError."""
        exchange, routing_key = names_of(key)
        connection = self.connection
        message = check_message(
            content, routing_key, user=connection.user, reply_token=self.replies.token
        )
        if not exchange and routing_key.startswith(REPLY_PREFIX):
            check_waits_nowhere(message.asked)
            return message, None
        for each in message.routing_keys:
            self.may_publish(exchange, each)
        return message, self.broker.publishing.route(
            connection.vhost,
            exchange,
            message.routing_keys,
            message.headers,
            message.asked,
            message.properties,
        )

    def _expect(self, tag: int, count: int) -> None:
        if not tag:
            return
        if self.transaction is not None:
            if count:
                self.transaction.waiting[tag] = count
        else:
            self.codec.expect_confirms(tag, count)

    def _refused(self, tag: int) -> None:
        """A queue that is full does not get the message: RabbitMQ drops it in silence where nobody
        waits for the outcome."""
        if self.transaction is not None:
            self.transaction.on_published((tag, tag), ok=False)
        elif tag:
            self.codec.resolve((tag, tag), False)

    def on_too_big(self, size: int) -> None:
        """A body above the limit was announced."""
        limit = self.connection.message_size_max
        self.refuse(refusals.message_too_big(size, limit), spec.BASIC, spec.BasicPublish.METHOD_ID)

    # --- what the queues say ---------------------------------------------------------------

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `ClientEvents`."""
        if self.closed:
            return
        transaction = self.transaction
        if transaction is None:
            self.tally("confirmed", self.codec.resolve(tags, bool(outcome)))
            if self.spans is not None:
                self.spans.confirmed(self.codec.awaits, accepted=bool(outcome))
            return
        transaction.on_published(tags, ok=bool(outcome))
        if transaction.is_done():
            self.answer(spec.TxCommit.METHOD_ID, class_id=spec.TX)

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        if delivery.annotations:
            for one in with_headers(delivery):
                self.on_deliver(client, one)
            return
        consumer, _, _, _, _, count, acquired_count, *_ = delivery
        found = self.by_number.get(consumer)
        if self.closed or found is None or self.codec.state == CHANNEL_CLOSING:
            return
        name, queue = "delivered_no_ack" if found.deliveries.no_ack else "delivered", found.queue
        self.tally(name, count, queue)
        if acquired_count:
            self.tally("redelivered", count, queue)
        deliveries = self.deliveries
        overtakes = deliveries.held and any(held[0] is found for held in deliveries.held)
        if not overtakes and deliveries.room(found) >= count:
            deliveries.deliver(found, delivery)
            return
        if not deliveries.held or deliveries.held[-1][1].block is not delivery.block:
            deliveries.held_bytes += len(delivery.block)
        deliveries.held.append((found, delivery))
        deliveries.release()
        if deliveries.held_bytes > self.connection.settings.held_bytes_max and not found.paused:
            found.paused = True
            client.pause(delivery.consumer)

    def on_output_drained(self) -> None:
        """The client reads again."""
        self.deliveries.release()

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`. Consumers go on under their tags."""
        if self.closed or self.codec.state == CHANNEL_CLOSING:
            return None
        self.codec.forget_routes()
        self.forget_client(client)
        deliveries = self.get_deliveries.pop(client, None)
        if deliveries is not None:
            settle_nowhere(self, deliveries)
        if client in self.flowing:
            self.on_flow(client, False)
        other = self.client_of(successor)
        for consumer in list(self.consumers.values()):
            if consumer.client is client:
                consume_again(self, consumer, successor, other)
        forget_settled_consumers(self)
        return other

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        found = self.by_number.get(consumer)
        if found is not None and found.active:
            # Nobody asked: its queue was migrated.
            if error is not None:
                self.on_cancelled(client, consumer, str(error))
            return
        self.answer(spec.BasicConsume.METHOD_ID, error)

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """See `ClientEvents`."""
        self.answer(spec.BasicCancel.METHOD_ID)

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        found = self.by_number.get(consumer)
        if found is None or self.closed:
            return
        if found.cancelling:
            self.answer(spec.BasicCancel.METHOD_ID)
            return
        waiting = self.asked is not None and not found.active
        drop_consumer(self, found)
        if waiting:
            # The queue went away instead of answering.
            error = refusals.missing(queue_subject(found.queue.vhost, found.queue.name))
            self.asked = None
            self.refuse(error, spec.BASIC, spec.BasicConsume.METHOD_ID)
            self.go_on()
            return
        if self.connection.capabilities.consumer_cancel_notify:
            cancel = spec.BasicCancel(consumer_tag=found.tag, nowait=True)
            if self.deleting is not None and self.deleting[0] == found.queue.name:
                self.deleting[1].append(cancel)
            else:
                self.send(cancel)

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """See `ClientEvents`."""
        self.answer(spec.BasicGet.METHOD_ID, client, result)

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self.answer(
            spec.QueuePurge.METHOD_ID,
            count,
            None if error is None else as_broker_error(error),
            class_id=spec.QUEUE,
        )

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """See `ClientEvents`."""
        if blocked:
            self.flowing.add(client)
        else:
            self.flowing.discard(client)
        self.connection.set_flow(self.number, bool(self.flowing))

    # --- end -----------------------------------------------------------------------------

    def terminate(self) -> None:
        """Gives everything back: consumers go, what they hold returns. Safe to call twice."""
        if self.closed:
            return
        self.codec.flush_settles()
        self._node_counters.counting.discard(self._count)
        self._count()
        self._routes.clear()
        self.replies.end()
        self.closed = True
        self.codec.close()
        self.deliveries.held.clear()
        self.asked = None
        self.transaction = None
        self.consumers.clear()
        self.by_number.clear()
        self.close_clients()
        self.flowing.clear()
        self.connection.set_flow(self.number, False)
        self.broker.counters.channels_closed += 1

    def info(self) -> dict[str, object]:
        """Returns one row of /api/channels."""
        connection = self.connection
        return {
            "name": f"{connection.name} ({self.number})",
            "number": self.number,
            "node": self.broker.node_name,
            "user": connection.user.name,
            "vhost": connection.vhost,
            "confirm": self.codec.mode == channel_codec.MODE_CONFIRM,
            "transactional": self.codec.mode == channel_codec.MODE_TX,
            "consumer_count": len(self.consumers),
            "prefetch_count": self.prefetch,
            "global_prefetch_count": self.global_prefetch,
            "messages_unacknowledged": self.codec.unacked,
            "messages_unconfirmed": self.codec.confirm_next - self.codec.confirm_low,
            "state": "flow" if self.flowing else "running",
            "connection_details": connection.details(),
            "counters": {
                **self._tally,
                "published": self.codec.published,
                "acknowledged": self.codec.acknowledged,
            },
            "published_to": self._routes.published(),
            "delivered_from": {queue: dict(known) for queue, known in self._delivered_from.items()},
        }

    def set_prefetch(self, queue: str, tag: str, prefetch: int) -> bool:
        """Changes the prefetch of a running consumer; False when there is none, or it takes all
        there is because it acknowledges nothing."""
        consumer = self.consumers.get(tag)
        if consumer is None or consumer.queue.name != queue or not consumer.active:
            return False
        if consumer.deliveries.no_ack:
            return False
        consumer.prefetch = prefetch
        consumer.client.set_credit(consumer.number, self.window(prefetch))
        return True

    def consumer_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/consumers, with the session and number by which queues know
        them."""
        details = self.connection.channel_details(self.number)
        return [
            {
                "consumer_tag": consumer.tag,
                "queue": {"name": consumer.queue.name, "vhost": consumer.queue.vhost},
                "channel_details": details,
                "session": consumer.client.session,
                "number": consumer.number,
                "ack_required": not consumer.deliveries.no_ack,
                "prefetch_count": consumer.prefetch,
                "exclusive": consumer.exclusive,
                "active": consumer.active,
                "consumer_timeout": self.timeouts.of(consumer.number),
                "activity_status": "up",
                "arguments": consumer.arguments.to_plain(),
                "ignored_arguments": ignored_arguments(consumer.arguments, consumer.queue),
            }
            for consumer in self.consumers.values()
        ]


_HANDLERS: dict[type[spec.Method], Callable[..., None]] = {
    spec.ChannelOpen: Channel._open_again,
    spec.ChannelFlow: Channel._flow,
    spec.ChannelClose: Channel._close,
    spec.ChannelCloseOk: Channel._close_ok,
    spec.AccessRequest: Channel._access,
    spec.ConfirmSelect: Channel._confirm_select,
    **declarations.HANDLERS,
    **consumers.HANDLERS,
    **transactions.HANDLERS,
}
"""Functions that serve a method, called with the channel and the method."""
