"""Messages of ordered topics, as consumers and readers get them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convoymq.client.rows import headers_of, routing_keys_of, times_of, values_of
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.columns import HEADERS, OFFSET, ROUTING_KEY, TIMESTAMP, VALUE
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken

COLUMNS = OFFSET | TIMESTAMP | VALUE | HEADERS | ROUTING_KEY
"""Columns that `contents_of` needs."""
KEY_HEADER = "x-order-key"


@dataclass(frozen=True, slots=True)
class Hashing:
    """Function of a topic from keys to logical partitions."""

    logical: int
    seed: int


@dataclass(frozen=True, slots=True)
class Content:
    """One message, without its place."""

    key: bytes
    """Order key."""
    body: bytes | None
    """None: a tombstone."""
    headers: dict[str, bytes | None]
    """Strings and byte arrays as their bytes, other values as the text that JSON has for them."""
    time_ms: int
    """Time at which it was stored, ms since the epoch; 0 for one that was parked."""


@dataclass(slots=True, eq=False)
class TopicMessage:
    """A message and its place in the topic."""

    content: Content
    pid: int
    """The partition that it was stored in."""
    offset: int
    route_version: int
    """The route version that created the partition."""
    hashing: Hashing
    late: bool = False
    """Of a weak topic: the group had gone on without its partition, and newer messages of the key
    may have come before."""

    @property
    def key(self) -> bytes:
        """Returns the order key."""
        return self.content.key

    @property
    def body(self) -> bytes | None:
        """Returns the body; None of a tombstone."""
        return self.content.body

    @property
    def headers(self) -> dict[str, bytes | None]:
        """Returns the headers; see `Content`."""
        return self.content.headers

    @property
    def time_ms(self) -> int:
        """Returns when it was stored; see `Content`."""
        return self.content.time_ms

    @property
    def lp(self) -> int:
        """Returns the logical partition of the key; -1 without a key."""
        if not self.content.key:
            return -1
        return logical_partition(self.content.key, self.hashing.logical, self.hashing.seed)

    @property
    def order_token(self) -> OrderToken:
        """Returns the place in the history of the key: tokens of a key grow, whatever changes its
        partitions go through."""
        return OrderToken(self.route_version, self.offset)


def order_keys_of(frame: ColumnFrame) -> list[bytes]:
    """Returns the order keys of a frame's messages. Raises ValueError without headers and routing
    keys."""
    return [
        headers.get(KEY_HEADER) or routing_key
        for routing_key, headers in zip(routing_keys_of(frame), headers_of(frame), strict=True)
    ]


def contents_of(frame: ColumnFrame) -> list[Content]:
    """Returns the messages of a frame. Raises ValueError without `COLUMNS`."""
    rows: Iterable[tuple[bytes, bytes | None, dict[str, bytes | None], int]] = zip(
        routing_keys_of(frame), values_of(frame), headers_of(frame), times_of(frame), strict=True
    )
    return [
        Content(headers.get(KEY_HEADER) or routing_key, body, headers, time_ms)
        for routing_key, body, headers, time_ms in rows
    ]
