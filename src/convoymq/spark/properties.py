"""AMQP's message properties as a Spark struct. Opt-in: it is decoded message by message.

Senders choose these values, and a broker carries them as they are, so no value may stop a read. One
rule for each type: a time that Spark can't hold is NULL, bytes that are not UTF-8 are U+FFFD in a
text, and of a damaged header nothing is known. Each of them is counted in a `Mended`.

Source: AMQP 0-9-1, 2.3.5.2 and class basic (60). The header table is skipped: the column `headers`
has it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from typing import Final

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

Mended = Counter[str]
"""Values that are not shown as their senders sent them, by name."""
_MICROSECONDS: Final = 1_000_000
MOMENT_US_END: Final = 253_402_214_400 * _MICROSECONDS
"""The last day of the year 9999, which is still in that year in every time zone. Spark shows no
later time in Python, and AMQP's time has 64 bits of seconds."""

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


def decode_properties(
    header: bytes | memoryview, mended: Mended | None = None
) -> dict[str, int | str | None] | None:
    """Reads a content header payload.

    Args:
        mended: counts what can't be shown as it was sent.

    Returns:
        The properties that are set; `timestamp` in µs since the epoch, None for one that Spark
        can't hold. None for a damaged header.
    """
    mended = Counter() if mended is None else mended
    try:
        values = split_properties(header)
    except ValueError:
        mended["content header"] += 1
        return None
    return {
        name: _decode(name, value, mended) for name, value in values.items() if name != "headers"
    }


def _decode(name: str, value: bytes, mended: Mended) -> int | str | None:
    match _KINDS[name]:
        case "text":
            return shown_text(value[1:], name, mended)
        case "octet":
            return value[0]
    return shown_moment(int.from_bytes(value, "big"), name, mended)


def shown_text(value: bytes, name: str, mended: Mended) -> str:
    """Returns text; U+FFFD for what is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        mended[name] += 1
        return value.decode("utf-8", "replace")


def shown_moment(seconds: object, name: str, mended: Mended) -> int | None:
    """Returns a time in µs since the epoch; None for what is no time that Spark can hold."""
    if isinstance(seconds, int) and 0 <= seconds < MOMENT_US_END // _MICROSECONDS:
        return seconds * _MICROSECONDS
    mended[name] += 1
    return None


def mended_text(constants: Mapping[str, object], mended: Mended) -> str:
    """Returns what people are told about values that Spark can't hold."""
    source = " ".join(f"{name} {value}" for name, value in constants.items())
    counts = ", ".join(f"{name} {count}" for name, count in sorted(mended.items()))
    return f"{source}: values that Spark can't hold are NULL or mended: {counts}"
