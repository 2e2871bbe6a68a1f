"""Agreement before a connection is open: headers, AMQPLAIN and limits, sans IO."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq import __version__
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.sasl import Credentials, user_name
from convoymq.messages.record import DEATH_CHANNEL
from convoymq.model.compatibility import COMPATIBLE_PRODUCT, COMPATIBLE_VERSION
from convoymq.model.errors import NotAllowed, SyntaxFault
from convoymq.model.refusals import tune_too_high, tune_too_low
from convoymq.model.tables import Table, decode_body

PROTOCOL_HEADERS = (spec.PROTOCOL_HEADER, b"AMQP\x01\x01\x00\x09")
"""Headers of 0-9-1: the specification's, and the older form of 0-9 that old clients send."""
CHANNEL_NUMBER_MAX = DEATH_CHANNEL - 1
"""Records know by the number above that their deaths are the cluster's."""
FRAME_BYTES_MAX = 131072


@dataclass(frozen=True, slots=True)
class Tuned:
    """Limits of one connection; `channel_max` and `frame_max` are never 0, `heartbeat_s` may be."""

    channel_max: int
    frame_max: int
    heartbeat_s: int


def amqplain(response: bytes) -> Credentials:
    """Reads the response of AMQPLAIN, a table. Raises SyntaxFault."""
    table: Table = decode_body(response)
    login, password = table.get("LOGIN"), table.get("PASSWORD")
    if login is None or password is None:
        raise SyntaxFault("AMQPLAIN response lacks LOGIN or PASSWORD")
    if not isinstance(login.value, bytes) or not isinstance(password.value, bytes):
        raise SyntaxFault("AMQPLAIN LOGIN and PASSWORD have to be strings")
    return Credentials(user_name(login.value), password.value)


def tuned(settings: AmqpConfig, channel_max: int, frame_max: int, heartbeat_s: int) -> Tuned:
    """Checks what the client answers in connection.tune-ok.

    0 means "no limit" and is refused where the server has one.

    Raises:
        NotAllowed: a value above what was offered, or a frame size below the minimum.
    """
    offered_channels = settings.channel_max
    if offered_channels:
        if channel_max == 0:
            raise NotAllowed(
                "negotiated channel_max = 0 (no limit) is higher than the maximum allowed value "
                f"({offered_channels})"
            )
        if channel_max > offered_channels:
            raise tune_too_high("channel_max", channel_max, offered_channels)
    if settings.frame_max:
        if frame_max == 0 or frame_max > settings.frame_max:
            raise tune_too_high("frame_max", frame_max, settings.frame_max)
        if frame_max < settings.frame_max_min:
            raise tune_too_low("frame_max", frame_max, settings.frame_max_min)
    elif 0 < frame_max < settings.frame_max_min:
        raise tune_too_low("frame_max", frame_max, settings.frame_max_min)
    return Tuned(
        channel_max=channel_max or CHANNEL_NUMBER_MAX,
        frame_max=min(frame_max or FRAME_BYTES_MAX, FRAME_BYTES_MAX),
        heartbeat_s=heartbeat_s,
    )


SERVER_CAPABILITIES = (
    "publisher_confirms", "exchange_exchange_bindings", "basic.nack", "consumer_cancel_notify",
    "connection.blocked", "consumer_priorities", "authentication_failure_close", "per_consumer_qos",
    "direct_reply_to",
)  # fmt: skip


def server_properties(cluster_name: str) -> Table:
    """Returns what connection.start says of this broker."""
    return Table.of(
        {
            "capabilities": Table.of(dict.fromkeys(SERVER_CAPABILITIES, True)),
            "cluster_name": cluster_name,
            "copyright": "The ConvoyMQ authors",
            "information": f"ConvoyMQ {__version__}, licensed under Apache-2.0",
            "platform": "Python",
            "product": COMPATIBLE_PRODUCT,
            "version": COMPATIBLE_VERSION,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCapabilities:
    """Capabilities that the client announced; absent means false."""

    authentication_failure_close: bool = False
    consumer_cancel_notify: bool = False
    connection_blocked: bool = False
    basic_nack: bool = False
    publisher_confirms: bool = False
    exchange_exchange_bindings: bool = False

    @classmethod
    def of(cls, properties: Table) -> ClientCapabilities:
        """Reads the capabilities out of the client properties."""
        field = properties.get("capabilities")
        table = field.value if field is not None else None
        if not isinstance(table, Table):
            return cls()

        def has(key: str) -> bool:
            found = table.get(key)
            return found is not None and found.value is True

        return cls(
            authentication_failure_close=has("authentication_failure_close"),
            consumer_cancel_notify=has("consumer_cancel_notify"),
            connection_blocked=has("connection.blocked"),
            basic_nack=has("basic.nack"),
            publisher_confirms=has("publisher_confirms"),
            exchange_exchange_bindings=has("exchange_exchange_bindings"),
        )


def text_of(properties: Table, key: str) -> str:
    """Returns a client property as text; empty when it is absent or no string."""
    field = properties.get(key)
    if field is None or not isinstance(field.value, bytes):
        return ""
    return field.value.decode("utf-8", "replace")


__all__ = [
    "SERVER_CAPABILITIES",
    "ClientCapabilities",
    "Tuned",
    "amqplain",
    "server_properties",
    "text_of",
    "tuned",
]
