"""The firehose: of virtual hosts that are traced, a copy of each message that clients publish and
get goes to the exchange `amq.rabbitmq.trace`, with the keys `publish.EXCHANGE` and `deliver.QUEUE`.

A copy has the body of its message; what is known of the message is in its headers, as RabbitMQ has
them. Nobody waits for copies: one that cannot be made, routed or stored is dropped. Copies of
copies are not made. See docs/adr/0096-firehose.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from convoymq.broker.publishing import Publishing
from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp091 import (
    NO_PROPERTIES,
    ContentHeader,
    Properties,
    PropertyType,
    decode_header,
)
from convoymq.messages.record import as_amqp091, with_properties
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.vhost_flags import TRACED, flagged_vhosts
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Field, Table, bytes_of, field_of, text_of
from convoymq.queues.interface import Queue

TRACE_EXCHANGE = "amq.rabbitmq.trace"
SHORT_BYTES_MAX = 255
TABLE_BYTES_MAX = 120_000
"""Of all headers of a copy: with more of them its header frame would not fit every connection."""

INT32_MAX = (1 << 31) - 1


class Origin(NamedTuple):
    """The client that published or gets a message."""

    connection: str
    channel: int
    user: str


class Copy(NamedTuple):
    """A copy, and the queues that it goes to."""

    queues: list[Queue]
    key: bytes
    """Exchange and routing key, as records begin."""
    content: bytes
    """Header frame and body frames."""
    body_size: int


class Firehose:
    """Makes the copies of one node's clients."""

    def __init__(self, tree: MetadataMachine, publishing: Publishing, node: str) -> None:
        self.vhosts: frozenset[str] = frozenset()
        """The virtual hosts that are traced; looked at for every batch, so mostly empty."""
        self._tree = tree
        self._publishing = publishing
        self._node = node
        self.follow()

    def follow(self) -> None:
        """The tree has changed."""
        self.vhosts = flagged_vhosts(self._tree.settings, self._tree.vhosts, TRACED)

    def published(
        self,
        vhost: str,
        exchange: str,
        routing_keys: Iterable[str],
        content: bytes,
        queues: Iterable[Queue],
        origin: Origin,
    ) -> Copy | None:
        """Returns the copy of a message that was published; None when nobody wants one."""
        more = {"routed_queues": [queue.name for queue in queues]}
        with suppress(BrokerError, ValueError):
            return self._copy(
                vhost,
                f"publish.{exchange}",
                bytes_of(exchange),
                routing_keys,
                content,
                origin,
                more,
            )
        return None

    def delivered(
        self, vhost: str, queue: str, record: bytes, origin: Origin, *, redelivered: bool
    ) -> Copy | None:
        """Returns the copy of a message that a client gets; None when nobody wants one, or the
        message is a copy itself."""
        more = {"redelivered": Field("I", int(redelivered))}
        with suppress(BrokerError, ValueError):
            key, content = split_record(record)
            exchange, routing_key = key[1 : 1 + key[0]], key[2 + key[0] :]
            if exchange != TRACE_EXCHANGE.encode():
                keys = [text_of(routing_key)]
                return self._copy(vhost, f"deliver.{queue}", exchange, keys, content, origin, more)
        return None

    def _copy(
        self,
        vhost: str,
        trace_key: str,
        exchange: bytes,
        routing_keys: Iterable[str],
        content: bytes,
        origin: Origin,
        more: Mapping[str, object],
    ) -> Copy | None:
        content = as_amqp091(content)
        payload, body = content_parts(content)
        properties = _properties_of(decode_header(payload).properties)
        fields: dict[str, object] = {
            "exchange_name": exchange,
            "routing_keys": [bytes_of(key) for key in routing_keys],
            "properties": properties,
            "node": self._node,
            "vhost": vhost,
            "connection": origin.connection,
            "channel": Field("I", origin.channel),
            "user": origin.user,
            **more,
        }
        if len(properties.encoded) > TABLE_BYTES_MAX:
            fields["properties"] = Table.of({})
        headers = Table.of(fields)
        found = self._publishing.route_dead_letter(
            vhost, TRACE_EXCHANGE, (trace_key,), headers, NO_PROPERTIES
        )
        queues = [queue for queue in found if not queue.refuses_publishes]
        if not queues:
            return None
        header = ContentHeader(body_size=len(body), properties=Properties(headers=headers))
        key = _short(TRACE_EXCHANGE) + _short(trace_key)
        return Copy(queues, key, with_properties(content, header), len(body))


def _short(text: str) -> bytes:
    data = text.encode("utf-8", "replace")[:SHORT_BYTES_MAX]
    return bytes((len(data),)) + data


def _properties_of(properties: Properties) -> Table:
    """Returns the properties of a message as a table."""
    found: dict[str, object] = {}
    for name, kind in Properties.FIELDS:
        value = getattr(properties, name)
        if value is None:
            continue
        if kind is PropertyType.SHORTSTR:
            value = bytes_of(value)
        elif kind is not PropertyType.TABLE:
            fits = value <= INT32_MAX
            value = Field("I", value) if fits else field_of(value % (1 << 63))
        found[name] = value
    return Table.of(found)
