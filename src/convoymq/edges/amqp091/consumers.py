"""The methods of the class basic that have to do with taking messages: consumers, get, replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from convoymq.broker.declarations import generated_name
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.timeouts import consumer_timeout_ms, is_timed
from convoymq.kernels import channel_codec
from convoymq.kernels.channel_codec import ConsumerDeliveries
from convoymq.model import refusals
from convoymq.model.errors import BrokerError, as_broker_error
from convoymq.model.refusals import queue_subject
from convoymq.model.tables import Field, Table
from convoymq.queues.interface import (
    NO_MODIFICATION,
    PRIORITY_ARGUMENT,
    TIMEOUT_ARGUMENT,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    Queue,
    QueueClient,
)
from convoymq.queues.message_checks import REPLY_QUEUE
from convoymq.routing.queue_arguments import FILTER_ARGUMENTS

if TYPE_CHECKING:
    from convoymq.edges.amqp091.channel import Channel

TYPED_ARGUMENTS = (
    "x-stream-offset",
    "x-stream-consumer-name",
    *FILTER_ARGUMENTS,
    TIMEOUT_ARGUMENT,
)
"""Arguments of a consumer that not all queue types have."""


FIRST = Field("S", b"first")
"""Offset at which a consumer begins whose queue became a stream."""


class _Nowhere:
    """Takes what clients say of deliveries of a queue that was migrated."""

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Does nothing."""

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Does nothing."""

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Does nothing."""

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """Calls back at once."""
        call(True)


NOWHERE = _Nowhere()


class Consumer:
    """A consumer of this channel. States: subscribing → active → cancelling → gone."""

    __slots__ = (
        "active",
        "arguments",
        "cancelling",
        "client",
        "deliveries",
        "exclusive",
        "number",
        "paused",
        "prefetch",
        "queue",
        "tag",
    )

    def __init__(
        self,
        tag: str,
        number: int,
        queue: Queue,
        client: QueueClient,
        deliveries: ConsumerDeliveries,
        method: spec.BasicConsume,
        prefetch: int,
    ) -> None:
        self.tag = tag
        self.number = number
        self.queue = queue
        self.client = client
        self.deliveries = deliveries
        self.exclusive = method.exclusive
        self.arguments = method.arguments
        self.prefetch = prefetch
        self.active = False
        self.cancelling = False
        self.paused = False


class Replies:
    """The consumer of direct replies of a channel: it has no queue."""

    __slots__ = ("_channel", "deliveries", "tag", "token")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.token: str | None = None
        self.tag = ""
        self.deliveries: ConsumerDeliveries | None = None

    def consume(self, method: spec.BasicConsume) -> None:
        """Takes replies from now on. Raises Refused."""
        if not method.no_ack:
            raise refusals.reply_consumer(refusals.REPLY_CANNOT_ACKNOWLEDGE)
        if self.token is not None:
            raise refusals.reply_consumer(refusals.REPLY_ALREADY_SET)
        tag = method.consumer_tag or generated_name("amq.ctag-")
        if tag in self._channel.consumers:
            raise refusals.consumer_tag_in_use(tag)
        self.token = self._channel.broker.replies.register(self._on_reply)
        self.tag = tag
        self.deliveries = self._channel.codec.add_consumer(None, 0, tag.encode(), True)
        if not method.nowait:
            self._channel.send(spec.BasicConsumeOk(consumer_tag=tag))

    def _on_reply(self, record: bytes) -> None:
        deliveries = self.deliveries
        # Nobody keeps replies: what a client does not read in time is dropped.
        if (
            deliveries is None
            or self._channel.codec.state == channel_codec.CHANNEL_CLOSING
            or self._channel.connection.output_full()
        ):
            self._channel.broker.counters.dropped_replies += 1
            return
        self._channel.codec.deliver_record(deliveries, bytes(record), False)

    def end(self) -> None:
        """Takes no more replies."""
        if self.token is not None:
            self._channel.broker.replies.unregister(self.token)
            if self.deliveries is not None and not self._channel.closed:
                self._channel.codec.remove_consumer(self.deliveries)
        self.token = None
        self.deliveries = None
        self.tag = ""


def qos(channel: Channel, method: spec.BasicQos) -> None:
    """Sets how many deliveries may be unacknowledged. Raises Refused."""
    if method.prefetch_size:
        raise refusals.prefetch_size(method.prefetch_size)
    if method.global_ and channel.broker.settings.permit_global_qos:
        channel.global_prefetch = method.prefetch_count
        for consumer in channel.consumers.values():
            if not consumer.deliveries.no_ack:
                consumer.client.set_credit(consumer.number, channel.window(consumer.prefetch))
        channel.deliveries.release()
    else:
        channel.prefetch = method.prefetch_count
    channel.send(spec.BasicQosOk())


def consume(channel: Channel, method: spec.BasicConsume) -> None:
    """Begins a consumer. Raises BrokerError."""
    if method.queue == REPLY_QUEUE:
        channel.replies.consume(method)
        return
    name = channel.queue_name(method.queue)
    channel.permissions.check("read", "queue", name)
    tag = method.consumer_tag or generated_name("amq.ctag-")
    if tag in channel.consumers or tag == channel.replies.tag:
        raise refusals.consumer_tag_in_use(tag)
    limit = channel.connection.settings.consumer_max_per_channel
    if len(channel.consumers) >= limit:
        raise refusals.too_many_consumers(limit)
    queue = channel.find_queue(name)
    _check_arguments(method.arguments, queue)
    ignored = ignored_arguments(method.arguments, queue)
    channel.broker.ignored_arguments.warn("consumer", queue.vhost, name, ignored)
    stream = queue.features.reads_by_offset
    limited = stream and channel.prefetch and not method.no_ack
    if channel.global_prefetch and (limited or queue.refuses_global_qos):
        raise refusals.global_qos_unserved(queue_subject(queue.vhost, queue.name))
    priority = _priority_of(method.arguments, queue)
    asked_ms = consumer_timeout_ms(method.arguments, queue)
    client = channel.client_of(queue)
    channel.last_number += 1
    deliveries = channel.codec.add_consumer(
        client,
        channel.last_number,
        tag.encode(),
        method.no_ack,
        queue.features.counts_failed_deliveries,
        stream,
    )
    deliveries.places = client.places_of(channel.last_number)
    consumer = Consumer(
        tag, channel.last_number, queue, client, deliveries, method, channel.prefetch
    )
    channel.consumers[tag] = consumer
    channel.by_number[consumer.number] = consumer

    def subscribed(error: Exception | None) -> None:
        if error is not None:
            drop_consumer(channel, consumer)
            raise as_broker_error(error)
        consumer.active = True
        if is_timed(consumer.deliveries, consumer.queue):
            channel.timeouts.watch(consumer, asked_ms)
        if not method.nowait:
            channel.send(spec.BasicConsumeOk(consumer_tag=tag))

    channel.wait_for(subscribed)
    client.subscribe(_spec_of(channel, consumer, priority))


def _spec_of(channel: Channel, consumer: Consumer, priority: int) -> ConsumerSpec:
    no_ack, arguments = consumer.deliveries.no_ack, consumer.arguments
    prefetch = 0 if no_ack else channel.window(consumer.prefetch)
    if consumer.queue.features.reads_by_offset:
        # It needs a limit of its own; with one, it refuses to go without acknowledgements.
        prefetch = consumer.prefetch
    return ConsumerSpec(
        number=consumer.number,
        tag=consumer.tag,
        prefetch=prefetch,
        no_ack=no_ack,
        exclusive=consumer.exclusive,
        priority=priority,
        arguments=arguments.to_plain(),
        hears_cancel=channel.connection.capabilities.consumer_cancel_notify,
        stream_offset=arguments.get("x-stream-offset"),
    )


def consume_again(channel: Channel, consumer: Consumer, queue: Queue, client: QueueClient) -> None:
    """Subscribes a consumer to the queue that took the place of its own (ADR 0128). One that the
    new type refuses is cancelled."""
    old = consumer.deliveries
    channel.deliveries.take_back(consumer)
    settle_nowhere(channel, old)
    if consumer.cancelling:
        return
    stream = queue.features.reads_by_offset
    consumer.queue, consumer.client, consumer.paused = queue, client, False
    consumer.deliveries = channel.codec.add_consumer(
        client,
        consumer.number,
        consumer.tag.encode(),
        old.no_ack,
        queue.features.counts_failed_deliveries,
        stream,
    )
    consumer.deliveries.places = client.places_of(consumer.number)
    try:
        _check_arguments(consumer.arguments, queue)
        priority = _priority_of(consumer.arguments, queue)
        spec_ = _spec_of(channel, consumer, priority)
    except BrokerError as error:
        channel.on_subscribed(client, consumer.number, error)
        return
    if stream and spec_.stream_offset is None:
        # What the queue had is all that the consumer has not acknowledged.
        spec_ = replace(spec_, stream_offset=FIRST)
    if consumer.active and is_timed(consumer.deliveries, queue):
        asked_ms = consumer_timeout_ms(consumer.arguments, queue)
        channel.timeouts.watch(consumer, asked_ms)
    client.subscribe(spec_)


def settle_nowhere(channel: Channel, deliveries: ConsumerDeliveries) -> None:
    """Keeps what is outstanding of a queue that was migrated, for the client to acknowledge: the
    new queue delivers it again."""
    deliveries.client = NOWHERE
    channel.leaving.append(deliveries)


def cancel(channel: Channel, method: spec.BasicCancel) -> None:
    """Ends a consumer."""
    tag = method.consumer_tag
    done = None if method.nowait else spec.BasicCancelOk(consumer_tag=tag)
    consumer = channel.consumers.get(tag)
    if consumer is None:
        if tag == channel.replies.tag:
            channel.replies.end()
        if done is not None:
            channel.send(done)
        return

    def cancelled() -> None:
        drop_consumer(channel, consumer)
        if done is not None:
            channel.send(done)

    consumer.cancelling = True
    channel.wait_for(cancelled)
    consumer.client.cancel(consumer.number)


def drop_consumer(channel: Channel, consumer: Consumer) -> None:
    """Forgets a consumer; its outstanding deliveries can still be acknowledged."""
    consumer.active = False
    if channel.consumers.get(consumer.tag) is consumer:
        del channel.consumers[consumer.tag]
    channel.by_number.pop(consumer.number, None)
    channel.deliveries.take_back(consumer)
    channel.leaving.append(consumer.deliveries)
    channel.codec.flush_settles()
    forget_settled_consumers(channel)


def forget_settled_consumers(channel: Channel) -> None:
    """Removes what is left of consumers that are gone, once nothing of theirs is outstanding."""
    kept = []
    for deliveries in channel.leaving:
        if deliveries.unacked or (channel.transaction is not None and not deliveries.no_ack):
            kept.append(deliveries)
        else:
            # Settles what a client that does not read was sent without acknowledgements.
            channel.codec.remove_consumer(deliveries)
    channel.leaving = kept


def get(channel: Channel, method: spec.BasicGet) -> None:
    """Takes one message. Raises BrokerError."""
    name = channel.queue_name(method.queue)
    channel.permissions.check("read", "queue", name)
    queue = channel.find_queue(name)
    client = channel.client_of(queue)

    def got(client: QueueClient, result: GetResult) -> None:
        block, command, record, get_id, acquired_count, failed, ready, error = result
        if error is not None:
            raise as_broker_error(error)
        if block is None:
            channel.tally("get_empty", 1, queue)
            channel.send(spec.BasicGetEmpty())
            return
        deliveries = channel.get_deliveries.get(client)
        if deliveries is None:
            counted = client.queue.features.counts_failed_deliveries
            deliveries = channel.codec.add_consumer(client, 0, b"", False, counted)
            channel.get_deliveries[client] = deliveries
        channel.tally("get_no_ack" if method.no_ack else "get", 1, queue)
        channel.codec.send_get(
            deliveries, block, command, record, get_id, acquired_count, failed, ready, method.no_ack
        )
        if channel.spans is not None:
            taken = Delivery(0, get_id, block, command, record, 1, acquired_count, failed)
            channel.spans.delivered(client, taken, settles=not method.no_ack)
        if channel.is_traced:
            channel.trace_deliveries(name, block, command, record, 1, acquired_count)

    channel.wait_for(got)
    client.get(no_ack=method.no_ack)


def recover(channel: Channel, method: spec.BasicRecover | spec.BasicRecoverAsync) -> None:
    """Returns everything that is unacknowledged. Raises Refused."""
    if not method.requeue:
        raise refusals.recover_without_requeue()
    channel.codec.acknowledge(channel_codec.RETURN, 0, True)
    channel.codec.flush_settles()
    if isinstance(method, spec.BasicRecover):
        channel.send(spec.BasicRecoverOk())


def _check_arguments(arguments: Table, queue: Queue) -> None:
    """Refuses consumer arguments that only other queue types know, and those not served yet."""
    subject = queue_subject(queue.vhost, queue.name)
    for name in TYPED_ARGUMENTS:
        if name not in arguments or name in queue.features.consumer_arguments:
            continue
        if name in queue.features.unserved_consumer_arguments:
            raise refusals.unserved_argument(name, subject, queue.type)
        raise refusals.foreign_argument(name, subject, queue.type)


def ignored_arguments(arguments: Table, queue: Queue) -> list[str]:
    """Returns the arguments of a consumer that have no effect, in alphabetical order."""
    return sorted(name for name in arguments if name not in queue.features.consumer_arguments)


def _priority_of(arguments: Table, queue: Queue) -> int:
    field = arguments.get(PRIORITY_ARGUMENT)
    if field is None:
        return 0
    if not isinstance(field.value, int) or isinstance(field.value, bool):
        raise refusals.invalid_argument(
            PRIORITY_ARGUMENT,
            queue_subject(queue.vhost, queue.name),
            f'"expected integer, got {field.type_name}"',
        )
    return field.value


HANDLERS: dict[type[spec.Method], Callable[..., None]] = {
    spec.BasicQos: qos,
    spec.BasicConsume: consume,
    spec.BasicCancel: cancel,
    spec.BasicGet: get,
    spec.BasicRecover: recover,
    spec.BasicRecoverAsync: recover,
}
