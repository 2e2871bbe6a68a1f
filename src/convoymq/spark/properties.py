"""AMQP's message properties as a Spark struct. Opt-in: it is decoded message by message.

Senders choose these values, and a broker carries them as they are, so no value may stop a read. One
rule for each type: a time that Spark can't hold is NULL, bytes that are not UTF-8 are U+FFFD in a
text, and of a damaged header nothing is known. Each of them is counted in a `Mended`.

Source: AMQP 0-9-1, 2.3.5.2 and class basic (60). The header table is skipped: the column `headers`
has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from convoymq.messages.amqp091 import Properties, PropertyType, split_header
from convoymq.model.errors import PeerError

_WORDS = {
    PropertyType.SHORTSTR: "text",
    PropertyType.OCTET: "octet",
    PropertyType.TIMESTAMP: "time",
}

Mended = Counter[str]
"""Values that are not shown as their senders sent them, by name."""
_MICROSECONDS: Final = 1_000_000
MOMENT_US_END: Final = 253_402_214_400 * _MICROSECONDS
"""The last day of the year 9999, which is still in that year in every time zone. Spark shows no
later time in Python, and AMQP's time has 64 bits of seconds."""

_KINDS = {name: _WORDS[kind] for name, kind in Properties.FIELDS if kind in _WORDS}
PROPERTY_KINDS = {name: kind for name, kind in _KINDS.items() if name != "cluster_id"}
"""Kind (`text`, `octet`, `time`) of each property that people set, in the specification's order."""


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
        values = split_header(bytes(header))[1]
    except PeerError:
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
