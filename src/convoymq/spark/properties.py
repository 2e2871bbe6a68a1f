"""AMQP's message properties as a Spark struct. Opt-in: it is decoded message by message.

Source: AMQP 0-9-1, 2.3.5.2 and class basic (60). The header table is skipped: the column `headers`
has it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_PREFIX = struct.Struct(">HHQH")
_FLAG_MORE = 1
BASIC = 60
"""AMQP's class of messages."""

# In the order of their flags, highest first; None: the header table.
_PROPERTIES: tuple[tuple[str, str], ...] = (
    ("content_type", "text"),
    ("content_encoding", "text"),
    ("headers", "table"),
    ("delivery_mode", "octet"),
    ("priority", "octet"),
    ("correlation_id", "text"),
    ("reply_to", "text"),
    ("expiration", "text"),
    ("message_id", "text"),
    ("timestamp", "time"),
    ("type", "text"),
    ("user_id", "text"),
    ("app_id", "text"),
    ("cluster_id", "text"),
)

_KINDS = dict(_PROPERTIES)

PROPERTY_KINDS = {n: k for n, k in _PROPERTIES if k != "table" and n != "cluster_id"}
"""Kind (`text`, `octet`, `time`) of each property that people set, in the specification's order."""


def split_properties(header: bytes | memoryview) -> dict[str, bytes]:
    """Takes a content header payload apart.

    Returns:
        The encoded value of each property that is set, `headers` among them, in AMQP's order.

    Raises:
        ValueError: the payload ends inside a value.
    """
    data = bytes(header)
    try:
        _class, _weight, _size, flags = _PREFIX.unpack_from(data)
        position = _PREFIX.size
        if flags & _FLAG_MORE:
            raise ValueError("more flags than class basic has properties")
        found: dict[str, bytes] = {}
        for i, (name, kind) in enumerate(_PROPERTIES):
            if not flags & (1 << (15 - i)):
                continue
            if kind == "text":
                end = position + 1 + data[position]
            elif kind == "octet":
                end = position + 1
            elif kind == "time":
                end = position + 8
            else:
                end = position + 4 + struct.unpack_from(">I", data, position)[0]
            if end > len(data):
                raise ValueError("damaged message properties: a value is longer than what there is")
            found[name] = data[position:end]
            position = end
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged message properties: {error}") from None
    return found


def join_properties(values: Mapping[str, bytes]) -> bytes:
    """Returns the content header payload of encoded values; its body size is 0, which PRODUCE
    ignores."""
    flags = 0
    parts = []
    for i, (name, _) in enumerate(_PROPERTIES):
        value = values.get(name)
        if value is not None:
            flags |= 1 << (15 - i)
            parts.append(value)
    return _PREFIX.pack(BASIC, 0, 0, flags) + b"".join(parts)


def decode_properties(header: bytes | memoryview) -> dict[str, int | str | bytes]:
    """Reads a content header payload.

    Returns:
        The properties that are set; `timestamp` in µs since the epoch.

    Raises:
        ValueError: the payload ends inside a value.
    """
    return {
        name: _decode(_KINDS[name], value)
        for name, value in split_properties(header).items()
        if name != "headers"
    }


def _decode(kind: str, value: bytes) -> int | str:
    if kind == "text":
        return value[1:].decode("utf-8", "replace")
    if kind == "octet":
        return value[0]
    return int.from_bytes(value, "big") * 1_000_000
