"""Section of the configuration of AMQP 1.0. Fields without a key are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.config.keys import Section, key


@dataclass(frozen=True, slots=True, kw_only=True)
class Amqp10Config(Section):
    """AMQP 1.0: limits of connections, sessions and links."""

    NAME: ClassVar[str] = "amqp10"

    session_max: int = key(
        "session_max_per_connection", 64,
        "Sessions of one AMQP 1.0 connection.",
        low=1, high=65_535,
    )  # fmt: skip
    link_max: int = key(
        "link_max_per_session", 256,
        "Links of one AMQP 1.0 session.",
        low=1, high=1_000_000,
    )  # fmt: skip
    link_credit: int = key(
        "max_link_credit", 2000,
        """Messages of one AMQP 1.0 publisher that may be under way or unconfirmed. Of messages
        larger than 2 KiB fewer may be, down to 170. A larger number is faster, and takes more
        memory of a node that is behind.""",
        low=1, high=100_000,
    )  # fmt: skip
    idle_timeout_ms: int = key(
        "amqp10.idle_timeout", 60_000,
        """An AMQP 1.0 client that has sent nothing for twice this time is disconnected; half of it
        is announced as the idle time-out. 0 = never.""",
        unit="ms", low=0, high=4_000_000_000,
    )  # fmt: skip
    transaction_timeout_ms: int = key(
        "amqp10.transaction_timeout", 120_000,
        """A transaction of AMQP 1.0 that is not discharged so long after it was declared is rolled
        back. 0 = never.""",
        unit="ms", low=0, high=86_400_000,
    )  # fmt: skip
    transactions_max: int = 64
    """Transactions of one connection that have not ended."""
    transaction_messages_max: int = 10_000
    """Messages of a session in transactions, published and settled."""
    transaction_bytes_max: int = 32 << 20
    """Messages of a session that wait for the end of their transactions."""
    frame_max: int = 131_072
    """Largest frame that is announced, bytes."""
    initial_frame_max: int = 8192
    """Largest frame before open, bytes."""
    frame_max_least: int = 512
    """Smallest limit that a client may announce, bytes: the standard's."""
    client_idle_timeout_least_ms: int = 1000
    """Shortest idle time-out that a client may ask for."""
    incoming_window: int = 2048
    """Transfers that a client may send in a session before it hears again."""
    link_credit_large: int = 170
    """The same when messages are large."""
    queue_credit: int = 2048
    """Messages that a queue may hand out to one link ahead of what was sent."""
    queue_credit_large: int = 256
    """The same when messages are large."""
    unsettled_max: int = 262_144
    """Deliveries of one session that its client has not settled; beyond, nothing more is asked of
    queues."""
    request_bytes_max: int = 131_072
    """Of a request to the node /management."""
    close_timeout_s: float = 5.0
    """Longest wait for the client's close."""
    peer_close_timeout_s: float = 30.0
    """Longest time until a client closes the socket whose close was answered."""
    output_bytes_high: int = 4 << 20
    """Output at which a connection gets no more deliveries encoded and is not read."""
    output_bytes_low: int = 1 << 20
    """Output at which that ends."""
    unfinished_max: int = 4
    """Messages of the largest size that a connection may have sent without their last transfers."""
    waiting_max: int = 4
    """Performatives that wait until the link that had their handle is detached."""
    clients_max: int = 1024
    """Queues that a session keeps a command stream to; idle ones beyond are closed."""


SECTION = Amqp10Config
