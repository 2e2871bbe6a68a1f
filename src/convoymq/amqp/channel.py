"""One AMQP channel: every method of the classes channel, exchange, queue, basic, confirm and tx.

States: open → (busy ⇄ open)* → closing → gone. While an answer is being worked on (the broker or a
queue was asked) the channel codec is busy and keeps the channel's further frames, so that answers
keep their order; other channels go on. After an error the channel closes: it hears only close and
close-ok.

Publishes, acknowledgements and deliveries go through `kernels.frames.ChannelCodec`; what arrives
here is control, and messages that need a closer look. Source: RabbitMQ 4.3 behaviour.
"""

from __future__ import annotations

import base64
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from convoymq.amqp import _spec as spec
from convoymq.amqp.codec import decode_header
from convoymq.amqp.publishing import REPLY_PREFIX, REPLY_QUEUE, inspect, names_of
from convoymq.kernels import frames
from convoymq.kernels.batch import PublishTarget
from convoymq.kernels.frames import ChannelCodec, ConsumerDeliveries, content_parts
from convoymq.model import refusals
from convoymq.model.errors import BrokerError, ChannelFault, CommandFault, PreconditionFailed
from convoymq.model.refusals import exchange_subject, queue_subject
from convoymq.model.tables import Table
from convoymq.queues.interface import ConsumerSpec, Delivery, GetResult, Queue, QueueClient
from convoymq.queues.message_properties import asked_property, check_served
from convoymq.routing.queue_arguments import FILTER_ARGUMENTS

if TYPE_CHECKING:
    from convoymq.amqp.connection import Connection

log = structlog.get_logger()

DEFAULT_EXCHANGE_RESOURCE = "amq.default"
COUNTED_TYPES = frozenset(("quorum",))
#: Whose machines drop what a named producer repeats.
PRODUCER_TYPES = frozenset(("quorum", "stream"))


def generated_name(prefix: str) -> str:
    """A fresh name: prefix and 22 characters of the base64url alphabet."""
    return prefix + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")


def _stripped(name: str) -> str:
    return name.replace("\r", "").replace("\n", "")


class Consumer:
    """A consumer of this channel. States: subscribing → active → cancelling → gone."""

    __slots__ = (
        "active",
        "arguments",
        "cancelling",
        "client",
        "exclusive",
        "number",
        "paused",
        "prefetch",
        "queue",
        "slot",
        "tag",
    )

    def __init__(
        self,
        tag: str,
        number: int,
        queue: Queue,
        client: QueueClient,
        slot: ConsumerDeliveries,
        method: spec.BasicConsume,
        prefetch: int,
    ) -> None:
        self.tag = tag
        self.number = number
        self.queue = queue
        self.client = client
        self.slot = slot
        self.exclusive = method.exclusive
        self.arguments = method.arguments
        self.prefetch = prefetch
        self.active = False
        self.cancelling = False
        self.paused = False


class _Transaction:
    """What tx.commit will do."""

    __slots__ = ("acks", "bytes", "publishes", "refused", "settling", "waiting")

    def __init__(self) -> None:
        self.publishes: list[tuple[bytes, int, bytes, int, int]] = []
        self.acks: list[tuple[int, list[tuple[int, int, ConsumerDeliveries, int]]]] = []
        self.bytes = 0
        # tag -> answers that are due, while a commit is on its way
        self.waiting: dict[int, int] = {}
        # queues that have not applied their acknowledgements yet
        self.settling = 0
        # a queue did not take one of the publishes, or was lost with acknowledgements
        self.refused = False

    def is_done(self) -> bool:
        """Whether every queue has answered."""
        return not self.waiting and not self.settling


#: A delivery that the client cannot take yet.
_Held = tuple[Consumer, Delivery]


class Channel:
    """A channel's rules. Implements `LaneOwner` and `ClientEvents`; nothing here blocks."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.broker = connection.broker
        self.number = number
        self.session = self.broker.new_session()
        self.codec: ChannelCodec = connection.buffer.open_codec(number, self, self.broker.topology)
        self.consumers: dict[str, Consumer] = {}
        self.global_prefetch = 0
        self.closed = False
        self._prefetch = 0
        self._last_queue: str | None = None
        self._clients: dict[Queue, QueueClient] = {}
        self._idle_seqs: dict[Queue, int] = {}
        self._get_slots: dict[QueueClient, ConsumerDeliveries] = {}
        self._by_number: dict[int, Consumer] = {}
        self._number = 0
        self._leaving: list[ConsumerDeliveries] = []
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._transaction: _Transaction | None = None
        self._transaction_tag = 0
        self._reply_token: str | None = None
        self._reply_tag = ""
        self._reply_slot: ConsumerDeliveries | None = None
        self._flowing: set[QueueClient] = set()
        self._asked: Callable[..., None] | None = None
        #: The queue that is being deleted, and cancels of its consumers: delete-ok goes first.
        self._deleting: tuple[str, list[spec.BasicCancel]] | None = None
        self._permitted: set[tuple[str, str, str]] = set()
        self._permitted_epoch = 0
        self._counted = [0, 0]
        #: The next delivery tag at each of the latest scans for late acknowledgements.
        self._tag_marks: deque[int] = deque()

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
        """Append a method to the output, unless the channel is closed meanwhile."""
        if not self.closed:
            self.connection.send(self.number, method)

    def _refuse(self, error: BrokerError, class_id: int, method_id: int) -> None:
        """Close this channel, not one that has taken its number since."""
        if not self.closed:
            self.connection.refuse(error, self.number, class_id, method_id)

    def _ask(self, work: Coroutine[Any, Any, None], method: spec.Method) -> None:
        """Let `work` finish before the channel's next frame is looked at."""
        self.codec.state = frames.CHANNEL_BUSY

        async def run() -> None:
            try:
                await work
            except BrokerError as error:
                self._refuse(error, method.CLASS_ID, method.METHOD_ID)
            except Exception:
                log.exception("amqp.method_failed", method=method.NAME)
                self._refuse(BrokerError("internal error"), method.CLASS_ID, method.METHOD_ID)
            self._go_on()

        self.connection.spawn(run())

    def _await(self, then: Callable[..., None]) -> None:
        """Be busy until a queue answers; `then` gets the answer."""
        self.codec.state = frames.CHANNEL_BUSY
        self._asked = then

    def _answer(self, method_id: int, *answer: Any, class_id: int = spec.BASIC) -> None:
        then, self._asked = self._asked, None
        if then is None or self.closed:
            return
        try:
            then(*answer)
        except BrokerError as error:
            self._refuse(error, class_id, method_id)
        self._go_on()

    def _go_on(self) -> None:
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

    # --- permissions ---------------------------------------------------------------------

    def _check(self, permission: str, kind: str, name: str) -> None:
        """Raise AccessRefused unless the user may; what was granted is remembered for a while."""
        value = self.broker.topology.value
        if value != self._permitted_epoch:
            self._permitted_epoch = value
            self._permitted.clear()
        key = (permission, kind, name)
        if key in self._permitted:
            return
        if kind == "exchange" and not name:
            name = DEFAULT_EXCHANGE_RESOURCE
        connection = self.connection
        self.broker.check_permission(connection.user, connection.vhost, permission, kind, name)
        if len(self._permitted) >= 4096:
            self._permitted.clear()
        self._permitted.add(key)

    def _check_topic(self, permission: str, exchange: str, routing_key: str) -> None:
        connection = self.connection
        if self.broker.has_topic_permissions(connection.user, connection.vhost):
            self.broker.check_topic_permission(
                connection.user, connection.vhost, permission, exchange, routing_key
            )

    def check_acknowledged(self, scans: int, timeout_ms: int) -> None:
        """One scan for late acknowledgements: closes the channel when a delivery is older than
        `scans` scans. Marking the next tag at each scan costs nothing per message."""
        if self.closed:
            return
        self._tag_marks.append(self.codec.next_tag)
        if len(self._tag_marks) > scans and (
            0 < self.codec.oldest_unacked < self._tag_marks.popleft()
        ):
            self._refuse(refusals.acknowledgement_late(self.number, timeout_ms), 0, 0)

    def check_again(self) -> None:
        """Ask again for every permission (update-secret); a consumer that lost its own closes the
        channel, as any method without permission does."""
        self._permitted.clear()
        self.codec.forget_routes()
        try:
            for consumer in self.consumers.values():
                self._check("read", "queue", consumer.queue.name)
        except BrokerError as error:
            self._refuse(error, spec.BASIC, spec.BasicConsume.METHOD_ID)

    # --- exchanges -----------------------------------------------------------------------

    def _exchange_declare(self, method: spec.ExchangeDeclare) -> None:
        name = _stripped(method.exchange)
        if not name:
            raise refusals.default_exchange_untouchable()
        if method.passive:
            self.broker.passive_declare_exchange(self.connection.vhost, name)
            if not method.nowait:
                self.send(spec.ExchangeDeclareOk())
            return
        self._check("configure", "exchange", name)
        alternate = method.arguments.get("alternate-exchange")
        if alternate is not None and isinstance(alternate.value, bytes):
            self._check("read", "exchange", name)
            self._check("write", "exchange", alternate.value.decode("utf-8", "replace"))

        async def work() -> None:
            await self.broker.declare_exchange(
                self.connection.vhost,
                name,
                method.type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=method.arguments,
                user=self.connection.user,
            )
            if not method.nowait:
                self.send(spec.ExchangeDeclareOk())

        self._ask(work(), method)

    def _exchange_delete(self, method: spec.ExchangeDelete) -> None:
        name = _stripped(method.exchange)
        if not name:
            raise refusals.default_exchange_untouchable()
        if name.startswith("amq."):
            raise refusals.system_exchange_deletion(exchange_subject(self.connection.vhost, name))
        self._check("configure", "exchange", name)

        async def work() -> None:
            await self.broker.delete_exchange(
                self.connection.vhost, name, if_unused=method.if_unused
            )
            if not method.nowait:
                self.send(spec.ExchangeDeleteOk())

        self._ask(work(), method)

    def _exchange_bind(self, method: spec.ExchangeBind | spec.ExchangeUnbind) -> None:
        if not method.destination or not method.source:
            raise refusals.default_exchange_untouchable()
        self._check("write", "exchange", method.destination)
        self._check("read", "exchange", method.source)
        self._check_topic("read", method.source, method.routing_key)
        bind = isinstance(method, spec.ExchangeBind)
        call = self.broker.bind_exchange if bind else self.broker.unbind_exchange

        async def work() -> None:
            await call(
                self.connection.vhost,
                method.destination,
                method.source,
                method.routing_key,
                method.arguments,
            )
            if not method.nowait:
                self.send(spec.ExchangeBindOk() if bind else spec.ExchangeUnbindOk())

        self._ask(work(), method)

    # --- queues --------------------------------------------------------------------------

    def _queue_name(self, name: str) -> str:
        if name:
            return name
        if self._last_queue is None:
            raise refusals.no_previous_queue()
        return self._last_queue

    def _queue_declare(self, method: spec.QueueDeclare) -> None:
        name = _stripped(method.queue)
        vhost = self.connection.vhost
        if name == REPLY_QUEUE or name.startswith(REPLY_PREFIX):
            self._ask(self._declare_reply(name, method.nowait), method)
            return
        generated = ""
        if not method.passive:
            if not name:
                generated = generated_name("amq.gen-")
            self._check("configure", "queue", name or generated)
            target = method.arguments.get("x-dead-letter-exchange")
            if target is not None and isinstance(target.value, bytes):
                self._check("read", "queue", name or generated)
                self._check("write", "exchange", target.value.decode("utf-8", "replace"))

        async def work() -> None:
            if method.passive:
                declared = await self.broker.passive_declare(vhost, name, self.connection.id)
            else:
                declared = await self.broker.declare_queue(
                    vhost,
                    name,
                    durable=method.durable,
                    exclusive=method.exclusive,
                    auto_delete=method.auto_delete,
                    arguments=method.arguments,
                    owner=self.connection.id,
                    user=self.connection.user,
                    generated=generated,
                )
            self._last_queue = declared[0]
            if not method.nowait:
                self.send(
                    spec.QueueDeclareOk(
                        queue=declared[0], message_count=declared[1], consumer_count=declared[2]
                    )
                )

        self._ask(work(), method)

    async def _declare_reply(self, name: str, nowait: bool) -> None:
        token = name[len(REPLY_PREFIX) :]
        if token and not await self.broker.reply_exists(token):
            raise refusals.missing(queue_subject(self.connection.vhost, name))
        if not nowait:
            self.send(spec.QueueDeclareOk(queue=name, message_count=0, consumer_count=1))

    def _queue_bind(self, method: spec.QueueBind | spec.QueueUnbind) -> None:
        queue = self._queue_name(method.queue)
        routing_key = method.routing_key
        if not method.queue and not routing_key:
            routing_key = queue
        if not method.exchange:
            raise refusals.default_exchange_untouchable()
        self._check("write", "queue", queue)
        self._check("read", "exchange", method.exchange)
        self._check_topic("read", method.exchange, routing_key)
        bind = isinstance(method, spec.QueueBind)
        call = self.broker.bind_queue if bind else self.broker.unbind_queue
        silent = isinstance(method, spec.QueueBind) and method.nowait

        async def work() -> None:
            await call(
                self.connection.vhost,
                queue,
                method.exchange,
                routing_key,
                method.arguments,
                self.connection.id,
            )
            if not silent:
                self.send(spec.QueueBindOk() if bind else spec.QueueUnbindOk())

        self._ask(work(), method)

    def _queue_purge(self, method: spec.QueuePurge) -> None:
        name = self._queue_name(method.queue)
        self._check("read", "queue", name)
        client = self._client(self._find(name))

        def purged(count: int, error: BrokerError | None) -> None:
            if error is not None:
                raise error
            if not method.nowait:
                self.send(spec.QueuePurgeOk(message_count=count))

        self._await(purged)
        client.purge()

    def _queue_delete(self, method: spec.QueueDelete) -> None:
        name = self._queue_name(method.queue)
        self._check("configure", "queue", name)

        async def work() -> None:
            held: list[spec.BasicCancel] = []
            self._deleting = (name, held)
            try:
                count = await self.broker.delete_queue(
                    self.connection.vhost,
                    name,
                    if_unused=method.if_unused,
                    if_empty=method.if_empty,
                    owner=self.connection.id,
                    user=self.connection.user,
                )
                if not method.nowait:
                    self.send(spec.QueueDeleteOk(message_count=count))
            finally:
                self._deleting = None
                for cancel in held:
                    self.send(cancel)

        self._ask(work(), method)

    def _find(self, name: str) -> Queue:
        queue: Queue = self.broker.find_queue(self.connection.vhost, name, self.connection.id)
        return queue

    def _client(self, queue: Queue) -> QueueClient:
        """This channel's command stream into the queue."""
        client = self._clients.get(queue)
        if client is None:
            if len(self._clients) >= self.connection.settings.clients_per_channel_max:
                self._close_idle_clients()
            client = self._clients[queue] = queue.client(self.session, self)
        return client

    def _close_idle_clients(self) -> None:
        """Close streams that nothing has gone through since this was last called."""
        used = {consumer.client for consumer in self.consumers.values()}
        used |= {slot.client for slot in self.codec.slots if slot is not None and slot.unacked}
        if self._transaction is not None:
            taken = (each for _, acks in self._transaction.acks for each in acks)
            used |= {slot.client for _, _, slot, _ in taken}
        self.codec.forget_routes()
        seen, self._idle_seqs = self._idle_seqs, {}
        for queue, client in list(self._clients.items()):
            if client in used:
                continue
            target = client.target
            if target.pending:
                continue
            if seen.get(queue) == target.seq:
                slot = self._get_slots.pop(client, None)
                if slot is not None:
                    self.codec.remove_slot(slot)
                del self._clients[queue]
                client.close()
                # A later stream into that queue must not be taken for the closed one.
                self.session = self.broker.new_session()
            else:
                self._idle_seqs[queue] = target.seq

    # --- consuming -----------------------------------------------------------------------

    def _qos(self, method: spec.BasicQos) -> None:
        if method.prefetch_size:
            raise refusals.prefetch_size(method.prefetch_size)
        if method.global_:
            self.global_prefetch = method.prefetch_count
            for consumer in self.consumers.values():
                if not consumer.slot.no_ack:
                    consumer.client.set_credit(consumer.number, self._window(consumer.prefetch))
            self._release_held()
        else:
            self._prefetch = method.prefetch_count
        self.send(spec.BasicQosOk())

    def _window(self, prefetch: int) -> int:
        """What a queue may hand to one consumer: its own limit, never more than the shared one."""
        limits = [limit for limit in (prefetch, self.global_prefetch) if limit]
        return min(limits, default=0)

    def _consume(self, method: spec.BasicConsume) -> None:
        if method.queue == REPLY_QUEUE:
            self._consume_replies(method)
            return
        name = self._queue_name(method.queue)
        self._check("read", "queue", name)
        tag = method.consumer_tag or generated_name("amq.ctag-")
        if tag in self.consumers or tag == self._reply_tag:
            raise refusals.consumer_tag_in_use(tag)
        limit = self.connection.settings.consumers_per_channel_max
        if len(self.consumers) >= limit:
            raise refusals.too_many_consumers(limit)
        queue = self._find(name)
        _check_arguments(method.arguments, queue)
        stream = queue.type == "stream"
        if stream and self.global_prefetch and self._prefetch and not method.no_ack:
            raise refusals.global_qos_on_stream(queue_subject(queue.vhost, queue.name))
        priority = _priority_of(method.arguments, queue)
        client = self._client(queue)
        self._number += 1
        slot = self.codec.add_slot(
            client,
            self._number,
            tag.encode(),
            method.no_ack,
            queue.type in COUNTED_TYPES,
            stream,
        )
        consumer = Consumer(tag, self._number, queue, client, slot, method, self._prefetch)
        self.consumers[tag] = consumer
        self._by_number[consumer.number] = consumer

        prefetch = 0 if method.no_ack else self._window(consumer.prefetch)
        if stream:
            # It needs a limit of its own; with one, it refuses to go without acknowledgements.
            prefetch = consumer.prefetch

        def subscribed(error: Exception | None) -> None:
            if error is not None:
                self._drop_consumer(consumer)
                raise _as_broker_error(error)
            consumer.active = True
            if not method.nowait:
                self.send(spec.BasicConsumeOk(consumer_tag=tag))

        self._await(subscribed)
        client.subscribe(
            ConsumerSpec(
                number=consumer.number,
                tag=tag,
                prefetch=prefetch,
                no_ack=method.no_ack,
                exclusive=method.exclusive,
                priority=priority,
                arguments=method.arguments.to_plain(),
                stream_offset=method.arguments.get("x-stream-offset"),
            )
        )

    def _consume_replies(self, method: spec.BasicConsume) -> None:
        if not method.no_ack:
            raise refusals.reply_consumer(refusals.REPLY_CANNOT_ACKNOWLEDGE)
        if self._reply_token is not None:
            raise refusals.reply_consumer(refusals.REPLY_ALREADY_SET)
        tag = method.consumer_tag or generated_name("amq.ctag-")
        if tag in self.consumers:
            raise refusals.consumer_tag_in_use(tag)
        self._reply_token = self.broker.register_reply(self._on_reply)
        self._reply_tag = tag
        self._reply_slot = self.codec.add_slot(None, 0, tag.encode(), True)
        if not method.nowait:
            self.send(spec.BasicConsumeOk(consumer_tag=tag))

    def _on_reply(self, record: bytes) -> None:
        slot = self._reply_slot
        # Nobody keeps replies: what a client does not read in time is dropped.
        if (
            slot is None
            or self.codec.state == frames.CHANNEL_CLOSING
            or self.connection.output_full()
        ):
            self.broker.counters.dropped_replies += 1
            return
        self.codec.deliver_record(slot, bytes(record), False)

    def _end_replies(self) -> None:
        if self._reply_token is not None:
            self.broker.unregister_reply(self._reply_token)
            if self._reply_slot is not None and not self.closed:
                self.codec.remove_slot(self._reply_slot)
        self._reply_token = None
        self._reply_slot = None
        self._reply_tag = ""

    def _cancel(self, method: spec.BasicCancel) -> None:
        tag = method.consumer_tag
        done = None if method.nowait else spec.BasicCancelOk(consumer_tag=tag)
        consumer = self.consumers.get(tag)
        if consumer is None:
            if tag == self._reply_tag:
                self._end_replies()
            if done is not None:
                self.send(done)
            return

        def cancelled() -> None:
            self._drop_consumer(consumer)
            if done is not None:
                self.send(done)

        consumer.cancelling = True
        self._await(cancelled)
        consumer.client.cancel(consumer.number)

    def _drop_consumer(self, consumer: Consumer) -> None:
        """Forget a consumer; its outstanding deliveries can still be acknowledged."""
        consumer.active = False
        if self.consumers.get(consumer.tag) is consumer:
            del self.consumers[consumer.tag]
        self._by_number.pop(consumer.number, None)
        kept: deque[_Held] = deque()
        for held in self._held:
            if held[0] is consumer:
                self._return_held(held)
            else:
                kept.append(held)
        self._held = kept
        if self._held_bytes:
            self._release_held()
        self._leaving.append(consumer.slot)
        self.codec.flush_settles()
        self._forget_empty_slots()

    def _return_held(self, held: _Held) -> None:
        """The client never saw these: they go back, without acknowledgements too, where only what
        was sent counts as consumed."""
        consumer, delivery = held
        first_id = delivery.first_id
        self.codec.note(consumer.slot, frames.RETURN, first_id, first_id + delivery.messages - 1)

    def _forget_empty_slots(self) -> None:
        kept = []
        for slot in self._leaving:
            if slot.unacked or (self._transaction is not None and not slot.no_ack):
                kept.append(slot)
            else:
                # Settles what a client that does not read was sent without acknowledgements.
                self.codec.remove_slot(slot)
        self._leaving = kept

    def _get(self, method: spec.BasicGet) -> None:
        name = self._queue_name(method.queue)
        self._check("read", "queue", name)
        queue = self._find(name)
        client = self._client(queue)
        slot = self._get_slots.get(client)
        if slot is None:
            slot = self.codec.add_slot(client, 0, b"", False, queue.type in COUNTED_TYPES)
            self._get_slots[client] = slot

        def got(result: GetResult) -> None:
            counters = self.broker.counters
            block, command, record, get_id, acquired, failed, ready, error = result
            if error is not None:
                raise _as_broker_error(error)
            if block is None:
                counters.get_empty += 1
                self.send(spec.BasicGetEmpty())
                return
            if method.no_ack:
                counters.get_no_ack += 1
            else:
                counters.get += 1
            self.codec.send_get(
                slot, block, command, record, get_id, acquired, failed, ready, method.no_ack
            )

        self._await(got)
        client.get(no_ack=method.no_ack)

    def _recover(self, method: spec.BasicRecover | spec.BasicRecoverAsync) -> None:
        if not method.requeue:
            raise refusals.recover_without_requeue()
        self.codec.acknowledge(frames.RETURN, 0, True)
        self.codec.flush_settles()
        if isinstance(method, spec.BasicRecover):
            self.send(spec.BasicRecoverOk())

    # --- acknowledgements (only in transactions; the kernel serves the others) ------------

    def _acknowledge(self, method: spec.BasicAck | spec.BasicNack | spec.BasicReject) -> None:
        match method:
            case spec.BasicAck():
                kind, multiple = frames.SETTLE, method.multiple
            case spec.BasicNack():
                kind = frames.RETURN if method.requeue else frames.DISCARD
                multiple = method.multiple
            case spec.BasicReject():
                kind = frames.RETURN_FAILED if method.requeue else frames.DISCARD
                multiple = False
        transaction = self._transaction
        if transaction is None:
            if not self.codec.acknowledge(kind, method.delivery_tag, multiple):
                raise refusals.unknown_delivery_tag(method.delivery_tag)
            self.codec.flush_settles()
            return
        taken = self.codec.take(method.delivery_tag, multiple)
        if taken is None:
            raise refusals.unknown_delivery_tag(method.delivery_tag)
        transaction.acks.append((kind, taken))

    def on_unknown_tag(self, tag: int, method_id: int) -> None:
        """An acknowledgement for nothing that is outstanding."""
        self._refuse(refusals.unknown_delivery_tag(tag), spec.BASIC, method_id)

    def on_settled(self) -> None:
        """Acknowledgements were handed on: there may be room under the shared limit."""
        self._count()
        if self._held:
            self._release_held()
        if self._leaving:
            self._forget_empty_slots()

    def _count(self) -> None:
        """Add what the kernel has done since the last time to the node's counters."""
        codec, counters, seen = self.codec, self.broker.counters, self._counted
        counters.acknowledged += codec.acknowledged - seen[0]
        counters.published += codec.published - seen[1]
        seen[0], seen[1] = codec.acknowledged, codec.published

    # --- modes ---------------------------------------------------------------------------

    def _confirm_select(self, method: spec.ConfirmSelect) -> None:
        if self._transaction is not None:
            raise refusals.mode_switch("tx", "confirm")
        self.codec.select_confirms()
        if not method.nowait:
            self.send(spec.ConfirmSelectOk())

    def _tx_select(self, _method: spec.TxSelect) -> None:
        if self.codec.mode == frames.MODE_CONFIRM:
            raise refusals.mode_switch("confirm", "tx")
        if self._transaction is None:
            self._transaction = _Transaction()
        self.codec.mode = frames.MODE_TX
        self.send(spec.TxSelectOk())

    def _tx_commit(self, _method: spec.TxCommit) -> None:
        transaction = self._transaction
        if transaction is None:
            raise refusals.not_transactional()
        publishes, transaction.publishes = transaction.publishes, []
        acks, transaction.acks = transaction.acks, []
        transaction.bytes = 0
        transaction.refused = False
        for message in publishes:
            self._transaction_tag += 1
            self._publish(*message, self._transaction_tag)
            if self.closed or self.codec.state == frames.CHANNEL_CLOSING:
                return
        settled: dict[QueueClient, None] = {}
        for kind, taken in acks:
            self.codec.settle_taken(kind, taken)
            settled.update((slot.client, None) for _, _, slot, _ in taken)
        self.codec.flush_settles()
        transaction.settling = len(settled)
        for client in settled:
            client.when_settled(self._on_committed)

        def committed() -> None:
            if transaction.refused:
                raise refusals.partial_commit()
            self.send(spec.TxCommitOk())

        if transaction.is_done():
            committed()
        else:
            self._await(committed)

    def _on_committed(self, ok: bool) -> None:
        """A queue has applied its acknowledgements of the commit under way, or was lost."""
        transaction = self._transaction
        if transaction is None:
            return
        transaction.settling -= 1
        transaction.refused |= not ok
        if transaction.is_done():
            self._answer(spec.TxCommit.METHOD_ID, class_id=spec.TX)

    def _tx_rollback(self, _method: spec.TxRollback) -> None:
        transaction = self._transaction
        if transaction is None:
            raise refusals.not_transactional()
        transaction.publishes.clear()
        transaction.bytes = 0
        for _, taken in transaction.acks:
            self.codec.put_back(taken)
        transaction.acks.clear()
        self.send(spec.TxRollbackOk())

    # --- publishing ----------------------------------------------------------------------

    def resolve_route(self, key: bytes) -> tuple[PublishTarget, ...] | None:
        """Where messages with this exchange and routing key go; see `LaneOwner`."""
        try:
            exchange, routing_key = names_of(key)
            if not exchange and routing_key.startswith(REPLY_PREFIX):
                return None
            self._may_publish(exchange, routing_key)
            route = self.broker.route(self.connection.vhost, exchange, (routing_key,), None)
            if not route.cacheable:
                return None
            return tuple(self._client(queue).target for queue in route.queues)
        except BrokerError as error:
            self._refuse(error, spec.BASIC, spec.BasicPublish.METHOD_ID)
            return None

    def on_dropped(self) -> None:
        """A message has no queue to go to, and nobody wants it back; see `LaneOwner`."""
        self.broker.counters.dropped_unroutable += 1

    def _may_publish(self, exchange: str, routing_key: str) -> None:
        self._check("write", "exchange", exchange)
        if exchange:
            self._check_topic("write", exchange, routing_key)

    def on_publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        """A message that needs a closer look; see `LaneOwner`."""
        try:
            if bits & 2:
                raise refusals.immediate_publish()
            transaction = self._transaction
            if transaction is None:
                self._publish(key, bits, content, body_size, flags, tag)
                return
            exchange, routing_key = names_of(key)
            if exchange or not routing_key.startswith(REPLY_PREFIX):
                self._may_publish(exchange, routing_key)
                route = self.broker.route(self.connection.vhost, exchange, (routing_key,), None)
                # Better now than in the middle of a commit.
                properties = decode_header(content_parts(content)[0]).properties
                asked = asked_property(properties.expiration, properties.priority)
                check_served(asked, route.queues)
            transaction.bytes += len(content)
            if transaction.bytes > self.connection.settings.transaction_bytes_max:
                raise PreconditionFailed("transaction is larger than configured max size")
            transaction.publishes.append((key, bits, content, body_size, flags))
        except BrokerError as error:
            self._refuse(error, spec.BASIC, spec.BasicPublish.METHOD_ID)

    def _publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        """Check, route and append one message. `tag` 0: nobody waits for the outcome."""
        exchange, routing_key = names_of(key)
        connection = self.connection
        message = inspect(
            content,
            routing_key,
            user=connection.user.name,
            tags=tuple(connection.user.tags),
            reply_token=self._reply_token,
        )
        if not exchange and routing_key.startswith(REPLY_PREFIX):
            self.broker.publish_reply(routing_key[len(REPLY_PREFIX) :], key + message.content)
            self._expect(tag, 0)
            return
        for each in message.routing_keys:
            self._may_publish(exchange, each)
        route = self.broker.route(connection.vhost, exchange, message.routing_keys, message.headers)
        if not route.queues:
            if bits & 1:
                self.broker.counters.returned_unroutable += 1
                self.codec.send_return(spec.NO_ROUTE, b"NO_ROUTE", key, message.content)
            else:
                self.on_dropped()
            self._expect(tag, 0)
            return
        check_served(message.asked, route.queues)
        targets = [self._client(queue).target for queue in route.queues]
        self._expect(tag, len(targets))
        for queue, target in zip(route.queues, targets, strict=True):
            if message.producer is not None and queue.type in PRODUCER_TYPES:
                target.name_next(*message.producer)
            self.codec.append(target, key, message.content, body_size, flags, tag)

    def _expect(self, tag: int, count: int) -> None:
        if not tag:
            return
        if self._transaction is not None:
            if count:
                self._transaction.waiting[tag] = count
        else:
            self.codec.expect_confirms(tag, count)

    def on_too_big(self, size: int) -> None:
        """A body above the limit was announced."""
        limit = self.connection.settings.max_message_size_bytes
        self._refuse(refusals.message_too_big(size, limit), spec.BASIC, spec.BasicPublish.METHOD_ID)

    # --- what the queues say ---------------------------------------------------------------

    def on_published(self, client: QueueClient, tags: Sequence[int], ok: bool) -> None:
        """See `ClientEvents`."""
        if self.closed:
            return
        transaction = self._transaction
        if transaction is None:
            self.codec.resolve(tags, ok)
            self.broker.counters.confirmed += sum(tags[1::2]) - sum(tags[::2]) + len(tags) // 2
            self._count()
            return
        waiting = transaction.waiting
        transaction.refused |= not ok
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                left = waiting.get(tag, 0) - 1
                if left > 0:
                    waiting[tag] = left
                else:
                    waiting.pop(tag, None)
        if transaction.is_done():
            self._answer(spec.TxCommit.METHOD_ID, class_id=spec.TX)

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        found = self._by_number.get(delivery.consumer)
        if self.closed or found is None or self.codec.state == frames.CHANNEL_CLOSING:
            return
        counters = self.broker.counters
        count = delivery.messages
        if found.slot.no_ack:
            counters.delivered_no_ack += count
        else:
            counters.delivered += count
        if delivery.acquired_count:
            counters.redelivered += count
        overtakes = any(held[0] is found for held in self._held)
        if not overtakes and self._room(found) >= count:
            self._deliver(found, delivery)
            return
        if not self._held or self._held[-1][1].block is not delivery.block:
            self._held_bytes += len(delivery.block)
        self._held.append((found, delivery))
        self._release_held()
        if self._held_bytes > self.connection.settings.held_bytes_max and not found.paused:
            found.paused = True
            client.pause(delivery.consumer)

    def _room(self, consumer: Consumer) -> int:
        """How many deliveries may be encoded for the consumer now."""
        if self.connection.output_full():
            self.codec.buffer.holding = True
            return 0
        if self.global_prefetch and not consumer.slot.no_ack:
            return max(0, self.global_prefetch - self.codec.unacked)
        return 1 << 30

    def _release_held(self) -> None:
        """Encode held deliveries as far as there is room, each consumer's in their order."""
        waiting, self._held = self._held, deque()
        blocked: set[Consumer] = set()
        while waiting and not self.closed:
            consumer, delivery = waiting.popleft()
            count = delivery.messages
            room = 0 if consumer in blocked else min(count, self._room(consumer))
            if room < count:
                blocked.add(consumer)
                self._held.append((consumer, delivery.without(room)))
            if room:
                self._deliver(consumer, delivery.upto(room))
        blocks = [delivery.block for _, delivery in self._held]
        self._held_bytes = sum(
            len(block) for k, block in enumerate(blocks) if not k or blocks[k - 1] is not block
        )
        if self._held_bytes * 2 <= self.connection.settings.held_bytes_max:
            self._resume_consumers()

    def _resume_consumers(self) -> None:
        for consumer in list(self.consumers.values()):
            if consumer.paused:
                consumer.paused = False
                consumer.client.resume(consumer.number)

    def _deliver(self, consumer: Consumer, delivery: Delivery) -> None:
        _, first_id, block, command, first, count, acquired, failed = delivery
        try:
            self.codec.deliver(
                consumer.slot, first_id, block, command, first, count, acquired, failed
            )
        except ValueError as error:
            log.error("amqp.batch_damaged", queue=consumer.queue.name, reason=str(error))
            self._refuse(BrokerError("stored message is damaged"), spec.BASIC, 60)
            return
        trace = consumer.queue.trace
        if trace is not None:
            trace.sent(consumer.client.session, *delivery)

    def on_output_drained(self) -> None:
        """The client reads again."""
        self._release_held()

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self._answer(spec.BasicConsume.METHOD_ID, error)

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """See `ClientEvents`."""
        self._answer(spec.BasicCancel.METHOD_ID)

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        found = self._by_number.get(consumer)
        if found is None or self.closed:
            return
        if found.cancelling:
            self._answer(spec.BasicCancel.METHOD_ID)
            return
        waiting = self._asked is not None and not found.active
        self._drop_consumer(found)
        if waiting:
            # The queue went away instead of answering.
            error = refusals.missing(queue_subject(found.queue.vhost, found.queue.name))
            self._asked = None
            self._refuse(error, spec.BASIC, spec.BasicConsume.METHOD_ID)
            self._go_on()
            return
        if self.connection.capabilities.consumer_cancel_notify:
            cancel = spec.BasicCancel(consumer_tag=found.tag, nowait=True)
            if self._deleting is not None and self._deleting[0] == found.queue.name:
                self._deleting[1].append(cancel)
            else:
                self.send(cancel)

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """See `ClientEvents`."""
        self._answer(spec.BasicGet.METHOD_ID, result)

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self._answer(
            spec.QueuePurge.METHOD_ID,
            count,
            None if error is None else _as_broker_error(error),
            class_id=spec.QUEUE,
        )

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """See `ClientEvents`."""
        if blocked:
            self._flowing.add(client)
        else:
            self._flowing.discard(client)
        self.connection.set_flow(self.number, bool(self._flowing))

    # --- end -----------------------------------------------------------------------------

    def terminate(self) -> None:
        """Give everything back: consumers go, what they hold returns. Safe to call twice."""
        if self.closed:
            return
        self.codec.flush_settles()
        self._count()
        self._end_replies()
        self.closed = True
        self.codec.close()
        self._held.clear()
        self._asked = None
        self._transaction = None
        self.consumers.clear()
        self._by_number.clear()
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
        self._flowing.clear()
        self.connection.set_flow(self.number, False)
        self.broker.counters.channels_closed += 1

    def info(self) -> dict[str, Any]:
        """One row of /api/channels."""
        connection = self.connection
        return {
            "name": f"{connection.name} ({self.number})",
            "number": self.number,
            "node": self.broker.node_name,
            "user": connection.user.name,
            "vhost": connection.vhost,
            "confirm": self.codec.mode == frames.MODE_CONFIRM,
            "transactional": self.codec.mode == frames.MODE_TX,
            "consumer_count": len(self.consumers),
            "prefetch_count": self._prefetch,
            "global_prefetch_count": self.global_prefetch,
            "messages_unacknowledged": self.codec.unacked,
            "messages_unconfirmed": self.codec.confirm_next - self.codec.confirm_low,
            "state": "flow" if self._flowing else "running",
            "connection_details": connection.details(),
        }

    def consumer_infos(self) -> list[dict[str, Any]]:
        """Rows of /api/consumers, with the session and number by which queues know them."""
        details = {
            "name": f"{self.connection.name} ({self.number})",
            "number": self.number,
            "connection_name": self.connection.name,
            "node": self.broker.node_name,
            "peer_host": self.connection.peer[0],
            "peer_port": self.connection.peer[1],
            "user": self.connection.user.name,
        }
        return [
            {
                "consumer_tag": consumer.tag,
                "queue": {"name": consumer.queue.name, "vhost": consumer.queue.vhost},
                "channel_details": details,
                "session": consumer.client.session,
                "number": consumer.number,
                "ack_required": not consumer.slot.no_ack,
                "prefetch_count": consumer.prefetch,
                "exclusive": consumer.exclusive,
                "active": consumer.active,
                "activity_status": "up",
                "arguments": consumer.arguments.to_plain(),
            }
            for consumer in self.consumers.values()
        ]


def _as_broker_error(error: Exception) -> BrokerError:
    return error if isinstance(error, BrokerError) else BrokerError(str(error))


def _check_arguments(arguments: Table, queue: Queue) -> None:
    """Refuse consumer arguments that only other queue types know, and those not served yet."""
    subject = queue_subject(queue.vhost, queue.name)
    for key in ("x-stream-offset", "x-stream-consumer-name", *FILTER_ARGUMENTS):
        if key in arguments and queue.type != "stream":
            raise refusals.foreign_argument(key, subject, queue.type)
    for key in FILTER_ARGUMENTS:
        if key in arguments:
            raise refusals.unserved_argument(key, subject, queue.type)
    if "x-consumer-timeout" in arguments:
        if queue.type == "quorum":
            raise refusals.unserved_argument("x-consumer-timeout", subject, queue.type)
        raise refusals.foreign_argument("x-consumer-timeout", subject, queue.type)


def _priority_of(arguments: Table, queue: Queue) -> int:
    field = arguments.get("x-priority")
    if field is None:
        return 0
    if not isinstance(field.value, int) or isinstance(field.value, bool):
        raise refusals.invalid_argument(
            "x-priority",
            queue_subject(queue.vhost, queue.name),
            f'"expected integer, got {field.type_name}"',
        )
    return field.value


_HANDLERS: dict[type[spec.Method], Callable[[Channel, Any], None]] = {
    spec.ChannelOpen: Channel._open_again,
    spec.ChannelFlow: Channel._flow,
    spec.ChannelClose: Channel._close,
    spec.ChannelCloseOk: Channel._close_ok,
    spec.AccessRequest: Channel._access,
    spec.ExchangeDeclare: Channel._exchange_declare,
    spec.ExchangeDelete: Channel._exchange_delete,
    spec.ExchangeBind: Channel._exchange_bind,
    spec.ExchangeUnbind: Channel._exchange_bind,
    spec.QueueDeclare: Channel._queue_declare,
    spec.QueueBind: Channel._queue_bind,
    spec.QueueUnbind: Channel._queue_bind,
    spec.QueuePurge: Channel._queue_purge,
    spec.QueueDelete: Channel._queue_delete,
    spec.BasicQos: Channel._qos,
    spec.BasicConsume: Channel._consume,
    spec.BasicCancel: Channel._cancel,
    spec.BasicGet: Channel._get,
    spec.BasicRecover: Channel._recover,
    spec.BasicRecoverAsync: Channel._recover,
    spec.BasicAck: Channel._acknowledge,
    spec.BasicNack: Channel._acknowledge,
    spec.BasicReject: Channel._acknowledge,
    spec.ConfirmSelect: Channel._confirm_select,
    spec.TxSelect: Channel._tx_select,
    spec.TxCommit: Channel._tx_commit,
    spec.TxRollback: Channel._tx_rollback,
}
