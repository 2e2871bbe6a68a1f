"""AMQP's message properties as a Spark struct. Opt-in: it is decoded message by message.

Source: AMQP 0-9-1, 2.3.5.2 and class basic (60). The header table is skipped: the column `headers`
has it.
"""

from __future__ import annotations

import struct

_PREFIX = struct.Struct(">HHQH")
_FLAG_MORE = 1

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

PROPERTY_KINDS = {n: k for n, k in _PROPERTIES if k != "table" and n != "cluster_id"}
"""Kind (`text`, `octet`, `time`) of each property that people set, in the specification's order."""


def decode_properties(header: bytes | memoryview) -> dict[str, int | str | bytes]:
    """Reads a content header payload.

    Returns:
        The properties that are set; `timestamp` in µs since the epoch.

    Raises:
        ValueError: the payload ends inside a value.
    """
    data = bytes(header)
    try:
        _class, _weight, _size, flags = _PREFIX.unpack_from(data)
        position = _PREFIX.size
        if flags & _FLAG_MORE:
            raise ValueError("more flags than class basic has properties")
        found: dict[str, int | str | bytes] = {}
        for i, (name, kind) in enumerate(_PROPERTIES):
            if not flags & (1 << (15 - i)):
                continue
            if kind == "text":
                end = position + 1 + data[position]
                _inside(end, data)
                found[name] = data[position + 1 : end].decode("utf-8", "replace")
                position = end
            elif kind == "octet":
                found[name] = data[position]
                position += 1
            elif kind == "time":
                found[name] = struct.unpack_from(">Q", data, position)[0] * 1_000_000
                position += 8
            else:
                position += 4 + struct.unpack_from(">I", data, position)[0]
                _inside(position, data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged message properties: {error}") from None
    return found


def _inside(end: int, data: bytes) -> None:
    if end > len(data):
        raise ValueError("damaged message properties: a value is longer than what there is")
