"""Parsers of options' values: every one takes text and says what it wanted instead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from convoymq.model.json import Json
from convoymq.spark.errors import OptionError

LATEST = -1
EARLIEST = -2
"""Kafka's numbers for the ends of a partition, in the JSON of offsets."""

SECRET_BYTES_MAX = 64 * 1024
NAME_BYTES_MAX = 200

_UNITS_MS = {
    "us": 0.001,
    "ms": 1,
    "": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_UNITS_BYTES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

Offsets = dict[tuple[str, int], int]
"""Offset, or time in ms, by stream or topic, and partition. A stream has one partition, 0."""


def text(value: str) -> str:
    """As it is, but not empty."""
    if not value.strip():
        raise ValueError("is empty")
    return value


def short_name(value: str) -> str:
    """Returns a name of at most 200 bytes: the broker keeps it, with the task's number."""
    if len(text(value).encode()) > NAME_BYTES_MAX:
        raise ValueError(f"has more than {NAME_BYTES_MAX} bytes")
    return value


def boolean(value: str) -> bool:
    """`true` or `false`."""
    match value.strip().lower():
        case "true":
            return True
        case "false":
            return False
        case _:
            raise ValueError("must be true or false")


def count(value: str) -> int:
    """Returns an integer above zero."""
    if not re.fullmatch(r"\d{1,18}", value.strip()) or int(value) < 1:
        raise ValueError("must be a whole number above zero")
    return int(value)


def whole(value: str) -> int:
    """Returns an integer from zero on."""
    if not re.fullmatch(r"\d{1,18}", value.strip()):
        raise ValueError("must be a whole number")
    return int(value)


def milliseconds(value: str) -> int:
    """Returns a time as Spark writes it: `500ms`, `30s`, `15m`, `1h`; a number alone is
    milliseconds."""
    match = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _UNITS_MS:
        raise ValueError("must be a time such as 500ms, 30s, 15m or 1h")
    return int(int(match[1]) * _UNITS_MS[match[2]])


def size_bytes(value: str) -> int:
    """Returns a size: `16m`, `1g`, or a number of bytes; above zero."""
    match = re.fullmatch(r"(\d{1,15})\s*([a-z]?)b?", value.strip().lower())
    if match is None or match[2] not in _UNITS_BYTES or int(match[1]) < 1:
        raise ValueError("must be a size such as 500000, 16m or 1g")
    return int(match[1]) * _UNITS_BYTES[match[2]]


def one_of(*allowed: str) -> Callable[[str], str]:
    """Returns a parser that takes these words, in any case."""

    def parse(value: str) -> str:
        if value.strip().lower() not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}")
        return value.strip().lower()

    return parse


def names(value: str) -> tuple[str, ...]:
    """Names with commas between them, each once, in their order."""
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise ValueError("must name at least one")
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"names {name} twice")
    return found


def servers(value: str) -> tuple[str, ...]:
    """`host:port` of nodes, with commas between them."""
    found = names(value)
    for server in found:
        if not re.search(r":\d+$", server):
            raise ValueError(f"must be host:port, {server} has no port")
    return found


def pattern(value: str) -> str:
    """Returns a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text(value)


def assignment(value: str) -> tuple[str, ...]:
    """`{"stream":[0]}`: Kafka's form. Returns the streams."""
    decoded = _object(value)
    for stream, partitions in decoded.items():
        if partitions != [0]:
            raise ValueError(f"a stream has one partition, 0: write {{{json.dumps(stream)}:[0]}}")
    if not decoded:
        raise ValueError("must name at least one stream")
    return tuple(decoded)


def offsets(value: str) -> Offsets:
    """`{"stream":{"0":23}}`, Kafka's form; −2 = earliest, −1 = latest."""
    return _by_partition(value, EARLIEST)


def timestamps(value: str) -> Offsets:
    """`{"stream":{"0":1700000000000}}`: milliseconds since the epoch."""
    return _by_partition(value, 0)


def place(value: str) -> str | Offsets:
    """`earliest`, `latest`, or the JSON of `offsets`."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    if not word.startswith("{"):
        raise ValueError('must be earliest, latest or JSON like {"stream":{"0":23}}')
    return offsets(value)


def secret(reference: str) -> str:
    """Returns the secret that a reference stands for: `env:NAME`, `file:PATH` (a trailing line
    break goes), or itself.

    Resolved where a connection is made, so that a secret behind a reference is never part of what
    Spark sends around.

    Raises:
        OptionError: the variable or the file does not exist there.
    """
    kind, _, rest = reference.partition(":")
    if kind == "env" and rest:
        found = os.environ.get(rest)
        if found is None:
            raise OptionError(f"the environment has no {rest}, named by {reference!r}")
        return found
    if kind == "file" and rest:
        try:
            with Path(rest).open(encoding="utf-8") as file:
                return file.read(SECRET_BYTES_MAX).rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"can't read {reference!r}: {error}") from None
    return reference


def _object(value: str) -> Mapping[str, Json]:
    try:
        decoded = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError("must be a JSON object")
    return decoded


def _is_partition(name: str) -> bool:
    return re.fullmatch(r"0|[1-9]\d{0,9}", name) is not None


def _by_partition(value: str, least: int) -> Offsets:
    found: Offsets = {}
    for stream, partitions in _object(value).items():
        named = isinstance(partitions, dict) and all(map(_is_partition, partitions))
        if not isinstance(partitions, dict) or not partitions or not named:
            raise ValueError(f'must name partitions: {{{json.dumps(stream)}:{{"0":23}}}}')
        for partition, number in partitions.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{stream}: {number!r} is not a whole number from {least} on")
            found[(stream, int(partition))] = number
    return found
