"""The firehose: of virtual hosts that are traced, a copy of each message that clients publish and
get goes to the exchange `amq.rabbitmq.trace`, with the keys `publish.EXCHANGE` and `deliver.QUEUE`.

A copy has the body of its message; what is known of the message is in its headers, as RabbitMQ has
them. Nobody waits for copies: one that cannot be routed or stored is dropped. Copies of copies are
not made. See docs/adr/0096-firehose.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from convoymq.broker.publishing import NodePublishing
from convoymq.kernels.content import content_parts, replace_header, split_record
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.traced_vhosts import traced_vhosts
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Field, Table, decode_table, encode_table, field_of
from convoymq.queues.interface import Queue
from convoymq.routing.choosing import NO_PROPERTIES

TRACE_EXCHANGE = "amq.rabbitmq.trace"
SHORT_BYTES_MAX = 255
TABLE_BYTES_MAX = 120_000
"""Of all headers of a copy: with more of them its header frame would not fit every connection."""

#: Properties in the order of their flags, with the form of their values: short string, octet, table
#: or time.
_PROPERTIES = (
    ("content_type", "s"), ("content_encoding", "s"), ("headers", "F"), ("delivery_mode", "o"),
    ("priority", "o"), ("correlation_id", "s"), ("reply_to", "s"), ("expiration", "s"),
    ("message_id", "s"), ("timestamp", "T"), ("type", "s"), ("user_id", "s"), ("app_id", "s"),
    ("cluster_id", "s"),
)  # fmt: skip
_HEAD = struct.Struct(">HHQH")
CLASS_BASIC = 60
HEADERS_FLAG = 1 << 13
MORE_FLAGS = 1
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

    def __init__(self, tree: MetadataMachine, publishing: NodePublishing, node: str) -> None:
        self.vhosts: frozenset[str] = frozenset()
        """The virtual hosts that are traced; looked at for every batch, so mostly empty."""
        self._tree = tree
        self._publishing = publishing
        self._node = node
        self.follow()

    def follow(self) -> None:
        """The tree has changed."""
        self.vhosts = traced_vhosts(self._tree.settings, self._tree.vhosts)

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
        return self._copy(
            vhost, f"publish.{exchange}", exchange.encode(), routing_keys, content, origin, more
        )

    def delivered(
        self, vhost: str, queue: str, record: bytes, origin: Origin, *, redelivered: bool
    ) -> Copy | None:
        """Returns the copy of a message that a client gets; None when nobody wants one, or the
        message is a copy itself."""
        key, content = split_record(record)
        exchange, routing_key = key[1 : 1 + key[0]], key[2 + key[0] :]
        if exchange == TRACE_EXCHANGE.encode():
            return None
        keys = [routing_key.decode("utf-8", "replace")]
        more = {"redelivered": Field("I", int(redelivered))}
        return self._copy(vhost, f"deliver.{queue}", exchange, keys, content, origin, more)

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
        header, body = content_parts(content)
        properties = _properties_of(header)
        fields: dict[str, object] = {
            "exchange_name": exchange,
            "routing_keys": [key.encode() for key in routing_keys],
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
        try:
            found = self._publishing.route_dead_letter(
                vhost, TRACE_EXCHANGE, (trace_key,), headers, NO_PROPERTIES
            )
        except BrokerError:
            # A queue is not open yet, or the virtual host is gone.
            return None
        queues = [queue for queue in found if not queue.refuses_publishes]
        if not queues:
            return None
        made = _HEAD.pack(CLASS_BASIC, 0, len(body), HEADERS_FLAG) + encode_table(headers)
        key = _short(TRACE_EXCHANGE) + _short(trace_key)
        return Copy(queues, key, replace_header(content, made), len(body))


def _short(text: str) -> bytes:
    data = text.encode("utf-8", "replace")[:SHORT_BYTES_MAX]
    return bytes((len(data),)) + data


def _properties_of(header: bytes) -> Table:
    """Returns the properties in a content header's payload, which was checked when its message was
    published, as a table. Text is not looked at: it may be any bytes."""
    at = _HEAD.size - 2
    flags = int.from_bytes(header[at : at + 2], "big")
    more = flags
    while more & MORE_FLAGS:
        at += 2
        more = int.from_bytes(header[at : at + 2], "big")
    at += 2
    found: dict[str, object] = {}
    for index, (name, form) in enumerate(_PROPERTIES):
        if not flags & 1 << (15 - index):
            continue
        match form:
            case "s":
                end = at + 1 + header[at]
                found[name] = header[at + 1 : end]
            case "o":
                end = at + 1
                found[name] = Field("I", header[at])
            case "T":
                end = at + 8
                time = int.from_bytes(header[at:end], "big")
                found[name] = Field("I", time) if time <= INT32_MAX else field_of(time % (1 << 63))
            case _:
                end = at + 4 + int.from_bytes(header[at : at + 4], "big")
                found[name] = _headers_of(header, at, end)
        at = end
    return Table.of(found)


def _headers_of(header: bytes, at: int, end: int) -> Field:
    try:
        return Field("F", decode_table(header, at, end)[0])
    except BrokerError:
        # Names that are not UTF-8: the fields go on as they are.
        return Field("F", Table(header[at + 4 : end], ()))
