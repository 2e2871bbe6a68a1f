"""Changes of a message on its way: place, properties, headers that tell of the shovel. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from convoymq.broker.shovel_uris import without_credentials
from convoymq.broker.shovels import AMQP_10, Shovel
from convoymq.edges.shovel.ends import Message
from convoymq.messages.amqp10.encoding import sections_of
from convoymq.messages.amqp10.message import (
    ACQUIRED_COUNT,
    DELIVERY_COUNT,
    EXCHANGE,
    ROUTING_KEY,
    header_of,
)
from convoymq.messages.amqp10.sections import (
    APPLICATION_PROPERTIES,
    FIELDS,
    PROPERTIES,
    annotations_section,
    header_section,
    section,
    split,
)
from convoymq.messages.amqp10.values import Symbol, Timestamp, Value
from convoymq.model.tables import EMPTY, Field, Table

HOPS, TIME = "x-shovelled", "x-shovelled-timestamp"
_OF_THE_SOURCE = (EXCHANGE, ROUTING_KEY, ACQUIRED_COUNT, DELIVERY_COUNT)
"""Annotations by which the source's broker tells of its delivery."""


class Forwarding:
    """Changes the messages of one run of a shovel.

    Args:
        cluster: name of the cluster.
        source, destination: URIs that the run is connected to.
    """

    def __init__(self, shovel: Shovel, cluster: str, source: str, destination: str) -> None:
        self._shovel = shovel
        self._told: dict[Value, Value] = {
            "shovelled-by": cluster,
            "shovel-type": "dynamic",
            "shovel-name": shovel.name,
        }
        ends = (shovel.source.shown("src") | shovel.destination.shown("dest")).items()
        self._hop: dict[str, object] = {
            **{str(name): text for name, text in self._told.items()},
            "shovel-vhost": shovel.vhost,
            "src-uri": without_credentials(source),
            "dest-uri": without_credentials(destination),
            **{name.replace("_", "-"): text for name, text in ends},
        }

    def forwarded(self, message: Message, now_ms: int) -> Message:
        """Returns the message for the destination. Raises BrokerError: it does not fit."""
        if self._shovel.destination.protocol == AMQP_10:
            return message._replace(sections=self._sections(message, now_ms))
        end = self._shovel.destination
        exchange, key = end.exchange, end.key
        if end.queue is not None:
            exchange, key = "", end.queue
        return message._replace(
            exchange=message.exchange if exchange is None else exchange,
            routing_key=message.routing_key if key is None else key,
            properties=replace(
                message.properties,
                **self._shovel.properties,
                headers=self._headers(message.properties.headers, now_ms),
            ),
        )

    def _headers(self, headers: Table | None, now_ms: int) -> Table | None:
        shovel = self._shovel
        if shovel.forward_headers:
            headers = headers or EMPTY
            known = headers.get(HOPS)
            hops = known.value if known is not None and isinstance(known.value, tuple) else ()
            hop = Field("F", Table.of(self._hop))
            headers = headers.with_field(HOPS, Field("A", (hop, *hops)))
        if shovel.timestamp_header:
            headers = (headers or EMPTY).with_field(TIME, now_ms // 1000)
        return headers

    def _sections(self, message: Message, now_ms: int) -> bytes:
        """Returns a message of AMQP 1.0: the bare message of one that is not changed stays."""
        shovel = self._shovel
        payload = message.sections
        if not payload:
            notes, bare = sections_of(message.properties, message.body, deaths_told=False)
            payload = annotations_section(notes) + bare
        found = split(payload)
        header = header_of(message.properties, first_acquirer=False, delivery_count=0)
        notes = {k: note for k, note in found.annotations.items() if k not in _OF_THE_SOURCE}
        notes |= {Symbol(name): str(text) for name, text in shovel.annotations.items()}
        given = self._properties(found.properties, now_ms)
        application = payload[found.application_properties_at]
        own: dict[Value, Value] = {key: str(v) for key, v in shovel.application_properties.items()}
        if shovel.forward_headers:
            own |= self._told
        if own:
            known: dict[Value, Value] = dict(found.application_properties.items())
            application = section(APPLICATION_PROPERTIES, known | own)
        return b"".join(
            (
                header_section(header),
                annotations_section(notes),
                given or payload[found.properties_at],
                application,
                payload[found.body_at],
                payload[found.footer_at],
            )
        )

    def _properties(self, known: Mapping[str, Value], now_ms: int) -> bytes:
        """Returns the properties section, if it changes."""
        own: dict[str, Value] = {}
        for name, text in self._shovel.properties.items():
            value: Value = str(text)
            if name == "user_id":
                value = str(text).encode()
            elif name.startswith("content_"):
                value = Symbol(text)
            own[name.replace("_", "-")] = value
        if self._shovel.timestamp_header:
            own["creation-time"] = Timestamp(now_ms)
        if not own:
            return b""
        values = [({**known, **own}).get(name) for name in FIELDS]
        while values[-1] is None:
            values.pop()
        return section(PROPERTIES, values)
