"""Section of the configuration of AMQP 0-9-1. Fields without a key are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes, parse_optional_int


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpConfig(Section):
    """AMQP 0-9-1: offers to clients, and their limits."""

    NAME: ClassVar[str] = "amqp"

    heartbeat_s: int = key(
        "heartbeat", 60,
        "Heartbeat interval offered to clients; 0 = none: dead clients stay until TCP notices.",
        unit="s", low=0, high=65535,
    )  # fmt: skip
    frame_max: int = key(
        "frame_max", 131_072,
        "Largest frame offered to clients, 8 bytes of framing included.",
        parse=parse_bytes, low=8192, high=131_072,
    )  # fmt: skip
    channel_max: int = key(
        "channel_max", 2047, "Channels of a connection offered to clients.", low=1, high=65534
    )
    consumer_timeout_ms: int | None = key(
        "consumer_timeout", 1_800_000,
        """A delivery that a consumer has not acknowledged for this long is late. It returns to a
        quorum queue, and the consumer is cancelled; arguments and policies may say otherwise
        (docs/concepts.md). Any other late delivery closes its channel. `none` = never, then a
        hanging consumer keeps its messages for ever.""",
        parse=parse_optional_int, unit="ms", low=10_000, high=10**10,
    )  # fmt: skip
    consumer_max_per_channel: int = key(
        "consumer_max_per_channel", 65_535, "Consumers of one channel.", low=1, high=1_000_000
    )
    frame_max_min: int = 4096
    """Smallest frame_max a client may ask for. RabbitMQ 4.1 and later refuse below
    8192, which locks old Node.js clients out."""
    initial_frame_max: int = 8192
    """Largest frame before tuning, bytes. Bounds what comes before a login."""
    close_timeout_s: float = 5.0
    """Longest wait for close-ok after connection.close."""
    peer_close_timeout_s: float = 30.0
    """Longest time that a socket is still read after the client's connection.close was answered,
    until the client closes it; a shorter heartbeat interval shortens it."""
    channel_backlog_bytes_max: int = 1 << 20
    """Frames kept for a channel that waits for an answer; beyond, its connection is not read."""
    output_bytes_high: int = 4 << 20
    """Output at which a connection gets no more deliveries encoded and is not read."""
    output_bytes_low: int = 1 << 20
    """Output at which that ends."""
    held_bytes_max: int = 8 << 20
    """Batches kept for deliveries that a channel's client cannot take yet; beyond, queues that can
    read them again keep them."""
    clients_per_channel_max: int = 1024
    """Queues a channel keeps a command stream to; idle ones beyond are closed."""
    transaction_bytes_max: int = 64 << 20
    """Uncommitted publishes of one channel, bytes; beyond, the channel is closed."""


SECTION = AmqpConfig
