"""Limits of the AMQP edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpSettings:
    """Offers and bounds of a listener. Names in brackets are the configuration keys."""

    frame_max: int = 131072
    """[frame_max] Largest frame offered, bytes, framing included; 8192..131072. Small costs CPU."""
    frame_max_min: int = 4096
    """Smallest frame_max a client may ask for. RabbitMQ 4.1 and later refuse below
    8192, which locks old Node.js clients out."""
    initial_frame_max: int = 8192
    """Largest frame before tuning, bytes. Bounds what comes before a login."""
    channel_max: int = 2047
    """[channel_max] Channels per connection; 0 = 65535."""
    heartbeat_s: int = 60
    """[heartbeat] Interval offered, seconds; 0 = off: dead peers are then found by TCP only."""
    handshake_timeout_s: float = 10.0
    """[handshake_timeout] Until connection.open is through; then the socket is closed."""
    close_timeout_s: float = 5.0
    """Longest wait for close-ok after connection.close."""
    peer_close_timeout_s: float = 30.0
    """Longest time that a socket is still read after the client's connection.close was answered,
    until the client closes it; a shorter heartbeat interval shortens it."""
    max_message_size_bytes: int = 16 << 20
    """[max_message_size] Body limit, bytes; at most 512 MiB. A message is held in memory whole."""
    consumer_timeout_ms: int | None = 1_800_000
    """[consumer_timeout] How long a delivery may stay unacknowledged where neither consumer nor
    queue say otherwise."""
    permit_global_qos: bool = True
    """[deprecated_features.permit.global_qos] basic.qos with global=true sets a limit that all
    consumers of a channel share; otherwise it does what global=false does."""
    consumers_per_channel_max: int = 65535
    """[consumer_max_per_channel] Consumers of one channel."""
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
    mechanisms: tuple[str, ...] = ("PLAIN", "AMQPLAIN", "ANONYMOUS")
    """[auth_mechanisms] SASL mechanisms offered; EXTERNAL needs TLS with client certificates."""
    cert_login_from: str = "distinguished_name"
    """[ssl_cert_login_from] What names the user of EXTERNAL: that, `common_name`, or
    `subject_alternative_name`."""
    cert_login_san_type: str = "dns"
    """[ssl_cert_login_san_type] Kind of the alternative names that count."""
    cert_login_san_index: int = 0
    """[ssl_cert_login_san_index] Which of them."""
    anonymous_user: str = "guest"
    """User of ANONYMOUS."""
    anonymous_password: str = "guest"
    """Password of ANONYMOUS; loopback rules apply."""
    failed_login_delay_s: float = 3.0
    """Silence before the socket of a client is closed that does not understand the refusal."""
