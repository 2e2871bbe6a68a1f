"""Encodings of messages: how the body of a record stands for a message (ADR 0108).

| encoding | header frame's type | body                                                           |
|----------|---------------------|----------------------------------------------------------------|
| 1        | 2                   | AMQP 0-9-1: as it was published                                |
| 2        | 130                 | AMQP 1.0: sections, as they were published                     |
| n, 2–127 | 128 + n             | bytes of the encoding                                          |

Every encoding has the content header, so brokers and queues read what concerns them in one way.
Clients of AMQP 0-9-1, HTTP and columns get the content by `messages.record.as_amqp091`, which in
encoding 1 is the content as it is. A message is converted when such a reader gets it, not before.

An encoding is a module with a value `ENCODING`, and one line of ENCODINGS. It is imported with the
first message that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from convoymq.messages.amqp091 import Properties
from convoymq.model.errors import Misuse, PeerError

AMQP_091 = 1
AMQP_10 = 2
ENCODINGS: dict[int, str] = {AMQP_10: "convoymq.messages.amqp10.encoding"}
"""Number and module of each encoding but the first."""

_HEADER_FRAME = 2
_ENCODED = 0x80


class Encoding(Protocol):
    """One encoding. Sans IO."""

    name: str

    def to_amqp091(self, properties: Properties, body: bytes) -> tuple[Properties, bytes]:
        """Returns a message as clients of AMQP 0-9-1 get it.

        Args:
            properties: of the content header; deaths among them.
            body: as it is stored.
        Raises:
            PeerError: the body is damaged.
        """


def encoding_octet(number: int) -> int:
    """Returns the type octet of header frames in an encoding. Raises Misuse: there is no such."""
    if number == AMQP_091:
        return _HEADER_FRAME
    if number not in ENCODINGS:
        raise Misuse(f"encoding {number} is not known")
    return _ENCODED | number


def encoding_of(content: bytes) -> Encoding | None:
    """Returns the encoding of a content; None = AMQP 0-9-1. Raises PeerError: it has none, or one
    that this release does not know."""
    octet = content[0] if content else 0
    if octet == _HEADER_FRAME:
        return None
    module = ENCODINGS.get(octet & ~_ENCODED)
    if not octet & _ENCODED or module is None:
        raise PeerError(f"content begins with {octet}, which is no encoding that is known here")
    encoding: Encoding = import_module(module).ENCODING
    return encoding
