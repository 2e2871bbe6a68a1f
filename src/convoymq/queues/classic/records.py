"""Reads the few properties of a message record that a classic queue cares about.

Layout of a record: docs/formats/entries-and-frames.md. The content header inside it is AMQP's:
class u16, weight u16, body size u64, property flags u16, then the properties that the flags
announce.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTENT_TYPE = 1 << 15
_CONTENT_ENCODING = 1 << 14
_HEADERS = 1 << 13
_DELIVERY_MODE = 1 << 12
_PRIORITY = 1 << 11
_CORRELATION_ID = 1 << 10
_REPLY_TO = 1 << 9
_EXPIRATION = 1 << 8

_FRAME_HEADER = 7
_CONTENT_HEADER = 14
PERSISTENT = 2


class Traits(NamedTuple):
    """Attributes that decide about a message's fate in a classic queue."""

    persistent: bool
    priority: int | None
    expiration_ms: int | None
    """None as well when it is no number: publishes are checked, older records may hold anything."""
    body_size: int
    whole: bool = True
    """False: the record is cut off, and nothing can be said of it."""


CUT_OFF = Traits(False, None, None, 0, whole=False)


def traits_of(record: bytes) -> Traits:
    """Returns the traits of a record, whatever its bytes are."""
    try:
        at = 1 + record[0]
        at += 1 + record[at] + _FRAME_HEADER
        body_size = int.from_bytes(record[at + 4 : at + 12], "big")
        flags = int.from_bytes(record[at + 12 : at + 14], "big")
        at += _CONTENT_HEADER
        if flags & _CONTENT_TYPE:
            at += 1 + record[at]
        if flags & _CONTENT_ENCODING:
            at += 1 + record[at]
        if flags & _HEADERS:
            at += 4 + int.from_bytes(record[at : at + 4], "big")
        persistent = False
        if flags & _DELIVERY_MODE:
            persistent = record[at] == PERSISTENT
            at += 1
        priority: int | None = None
        if flags & _PRIORITY:
            priority = record[at]
            at += 1
        if flags & _CORRELATION_ID:
            at += 1 + record[at]
        if flags & _REPLY_TO:
            at += 1 + record[at]
        expiration: int | None = None
        if flags & _EXPIRATION:
            digits = record[at + 1 : at + 1 + record[at]].removeprefix(b"+")
            at += 1 + record[at]
            expiration = int(digits) if digits.isdigit() else None
    except IndexError:
        return CUT_OFF
    if at > len(record):
        return CUT_OFF
    return Traits(persistent, priority, expiration, body_size)
