"""Durable subscriptions: a queue for each client and link that outlives both, bound to an exchange.

    source                                    queue
    /exchanges/EXCHANGE/KEY, durable, never   stays until its link is closed
    the same, another expiry policy           goes when no link has it for the source's timeout
    none                                      that of this name, for a client that ends it

A client is known by its container id, a link by its name. A link that is detached, or whose session
or connection ends, may come back; a detach with `closed` deletes the queue.
Source: OASIS AMQP 1.0 part 3 section 3.5, JMS mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from convoymq.edges.amqp10.addresses import exchange_address, target_of
from convoymq.edges.amqp10.errors import INVALID_FIELD, link_fault
from convoymq.edges.amqp10.link import attach_later
from convoymq.edges.amqp10.performatives import Attach, Source
from convoymq.edges.declaring import Declaring
from convoymq.messages.amqp10.values import Symbol
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import EMPTY, Field, Table
from convoymq.routing.types import Binding, Destination, DestinationKind

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

Consume = Callable[["Session", Attach, str], None]
"""Attaches a link to a queue by its name."""

PREFIX = "subscription."
NEVER = "never"
"""Expiry policy."""
DURABLE = 2
"""Of a terminus with its unsettled state."""
EXPIRES_LEAST_MS = 60_000
"""Shortest time that a subscription outlives its link."""
EXPIRES_MOST_MS = (1 << 32) - 1
NAME_BYTES_MAX = 255


def wants_subscription(attach: Attach) -> bool:
    """Returns whether a receiver's attach asks for a durable subscription."""
    source = attach.source
    if source is None:
        return attach.role
    address = source.address if isinstance(source, Source) else None
    return (
        isinstance(source, Source)
        and source.durable > 0
        and isinstance(address, str)
        and address.startswith("/exchanges/")
    )


def attach_subscription(session: Session, attach: Attach, consume: Consume) -> None:
    """Attaches a link to the queue of its subscription, which is made if need be. Raises
    BrokerError: there is none of this name, or the address is none."""
    name = _name(session, attach)
    source = attach.source
    if source is None:
        found = [each for each in _bindings(session, name) if each.source]
        session.find_queue(name)
        address = exchange_address(found[0].source, found[0].routing_key) if found else None
        known = Source(address=address, durable=DURABLE, expiry_policy=Symbol(NEVER))
        session.subscriptions[attach.handle] = name
        consume(session, replace(attach, source=known), name)
        return
    assert isinstance(source, Source)
    try:
        exchange, key = target_of(source.address)
    except PreconditionFailed as error:
        raise link_fault(INVALID_FIELD, f"Attach refused: {error.text}") from error

    def then() -> None:
        session.subscriptions[attach.handle] = name
        consume(session, attach, name)

    attach_later(
        session, attach, _subscribe(session, name, exchange, key, _arguments(source)), then
    )


async def _subscribe(
    session: Session, name: str, exchange: str, key: str, arguments: Table
) -> None:
    """Declares the queue, and binds it as the link says now."""
    declaring = Declaring(session.connection, session.permissions)
    session.permissions.check("read", "queue", name)
    destination = Destination(DestinationKind.QUEUE, name)
    declaring.check_bind(exchange, destination, key)
    await declaring.queue(
        name, durable=True, exclusive=False, auto_delete=False, arguments=arguments
    )
    await declaring.bind(exchange, destination, key, EMPTY)
    for each in _bindings(session, name):
        if each.source and (each.source, each.routing_key) != (exchange, key):
            await declaring.unbind(each.source, destination, each.routing_key, each.arguments)


def _bindings(session: Session, name: str) -> list[Binding]:
    topology = session.broker.tree.vhosts.get(session.connection.vhost).topology
    return topology.bindings(destination=Destination(DestinationKind.QUEUE, name))


def _arguments(source: Source) -> Table:
    fields = [("x-queue-type", Field("S", b"quorum"))]
    if source.expiry_policy != NEVER:
        expires_ms = min(max(source.timeout * 1000, EXPIRES_LEAST_MS), EXPIRES_MOST_MS)
        fields.append(("x-expires", Field("l", expires_ms)))
    return Table.from_fields(fields)


def _name(session: Session, attach: Attach) -> str:
    """Returns the name of the queue. Raises Fault: it is too long."""
    opened = session.connection.peer_open
    container = opened.container_id if opened is not None else ""
    name = f"{PREFIX}{quote(container, safe='')}:{quote(attach.name, safe='')}"
    if len(name) > NAME_BYTES_MAX:
        raise link_fault(
            INVALID_FIELD,
            "Attach refused: container id and link name are too long for a durable subscription",
        )
    return name
