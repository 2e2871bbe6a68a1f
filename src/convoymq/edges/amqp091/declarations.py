"""The methods of the classes exchange and queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.broker.declarations import generated_name
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.declaring import Declaring
from convoymq.model import refusals
from convoymq.model.errors import BrokerError
from convoymq.model.refusals import queue_subject
from convoymq.queues.message_checks import REPLY_PREFIX, REPLY_QUEUE
from convoymq.routing.types import Destination, DestinationKind

if TYPE_CHECKING:
    from convoymq.edges.amqp091.channel import Channel


def _stripped(name: str) -> str:
    return name.replace("\r", "").replace("\n", "")


def _declaring(channel: Channel) -> Declaring:
    return Declaring(channel.connection, channel.permissions)


def exchange_declare(channel: Channel, method: spec.ExchangeDeclare) -> None:
    """Declares an exchange. Raises BrokerError."""
    name = _stripped(method.exchange)

    async def work() -> None:
        if method.passive:
            if not name:
                raise refusals.default_exchange_untouchable()
            channel.broker.declarations.passive_declare_exchange(channel.connection.vhost, name)
        else:
            await _declaring(channel).exchange(
                name,
                method.type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=method.arguments,
            )
        if not method.nowait:
            channel.send(spec.ExchangeDeclareOk())

    channel.ask(work(), method)


def exchange_delete(channel: Channel, method: spec.ExchangeDelete) -> None:
    """Deletes an exchange. Raises BrokerError."""

    async def work() -> None:
        name = _stripped(method.exchange)
        await _declaring(channel).delete_exchange(name, if_unused=method.if_unused)
        if not method.nowait:
            channel.send(spec.ExchangeDeleteOk())

    channel.ask(work(), method)


def exchange_bind(channel: Channel, method: spec.ExchangeBind | spec.ExchangeUnbind) -> None:
    """Bind an exchange to another, or unbind it. Raises BrokerError."""
    bind = isinstance(method, spec.ExchangeBind)
    declaring = _declaring(channel)
    call = declaring.bind if bind else declaring.unbind
    destination = Destination(DestinationKind.EXCHANGE, method.destination)

    async def work() -> None:
        await call(method.source, destination, method.routing_key, method.arguments)
        if not method.nowait:
            channel.send(spec.ExchangeBindOk() if bind else spec.ExchangeUnbindOk())

    channel.ask(work(), method)


def queue_declare(channel: Channel, method: spec.QueueDeclare) -> None:
    """Declares a queue. Raises BrokerError."""
    name = _stripped(method.queue)
    vhost = channel.connection.vhost
    if name == REPLY_QUEUE or name.startswith(REPLY_PREFIX):
        channel.ask(_declare_reply(channel, name, method.nowait), method)
        return

    async def work() -> None:
        if method.passive:
            declared = await channel.broker.declarations.passive_declare(
                vhost, name, channel.connection.id
            )
        else:
            declared = await _declaring(channel).queue(
                name,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
                arguments=method.arguments,
                generated="" if name else generated_name("amq.gen-"),
            )
        channel.last_queue = declared[0]
        if not method.nowait:
            channel.send(
                spec.QueueDeclareOk(
                    queue=declared[0], message_count=declared[1], consumer_count=declared[2]
                )
            )

    channel.ask(work(), method)


async def _declare_reply(channel: Channel, name: str, nowait: bool) -> None:
    token = name[len(REPLY_PREFIX) :]
    if token and not await channel.broker.replies.exists(token):
        raise refusals.missing(queue_subject(channel.connection.vhost, name))
    if not nowait:
        channel.send(spec.QueueDeclareOk(queue=name, message_count=0, consumer_count=1))


def queue_bind(channel: Channel, method: spec.QueueBind | spec.QueueUnbind) -> None:
    """Bind a queue, or unbind it. Raises BrokerError."""
    queue = channel.queue_name(method.queue)
    routing_key = method.routing_key
    if not method.queue and not routing_key:
        routing_key = queue
    bind = isinstance(method, spec.QueueBind)
    declaring = _declaring(channel)
    call = declaring.bind if bind else declaring.unbind
    silent = isinstance(method, spec.QueueBind) and method.nowait

    async def work() -> None:
        destination = Destination(DestinationKind.QUEUE, queue)
        await call(method.exchange, destination, routing_key, method.arguments)
        if not silent:
            channel.send(spec.QueueBindOk() if bind else spec.QueueUnbindOk())

    channel.ask(work(), method)


def queue_purge(channel: Channel, method: spec.QueuePurge) -> None:
    """Drops the ready messages of a queue. Raises BrokerError."""
    name = channel.queue_name(method.queue)
    channel.permissions.check("read", "queue", name)
    client = channel.client_of(channel.find_queue(name))

    def purged(count: int, error: BrokerError | None) -> None:
        if error is not None:
            raise error
        if not method.nowait:
            channel.send(spec.QueuePurgeOk(message_count=count))

    channel.wait_for(purged)
    client.purge()


def queue_delete(channel: Channel, method: spec.QueueDelete) -> None:
    """Deletes a queue. Raises BrokerError."""
    name = channel.queue_name(method.queue)

    async def work() -> None:
        held: list[spec.BasicCancel] = []
        channel.deleting = (name, held)
        try:
            count = await _declaring(channel).delete_queue(
                name, if_unused=method.if_unused, if_empty=method.if_empty
            )
            if not method.nowait:
                channel.send(spec.QueueDeleteOk(message_count=count))
        finally:
            channel.deleting = None
            for cancel in held:
                channel.send(cancel)

    channel.ask(work(), method)


HANDLERS: dict[type[spec.Method], Callable[..., None]] = {
    spec.ExchangeDeclare: exchange_declare,
    spec.ExchangeDelete: exchange_delete,
    spec.ExchangeBind: exchange_bind,
    spec.ExchangeUnbind: exchange_bind,
    spec.QueueDeclare: queue_declare,
    spec.QueueBind: queue_bind,
    spec.QueueUnbind: queue_bind,
    spec.QueuePurge: queue_purge,
    spec.QueueDelete: queue_delete,
}
