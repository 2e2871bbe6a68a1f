"""JSON objects, and the bytes of answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices


def count_in(row: JsonObject, key: str, default: int = 0) -> int:
    """Returns the count that a row has under `key`, or `default`."""
    value = row.get(key, default)
    assert isinstance(value, int)
    return value


def part(row: JsonObject, key: str) -> JsonObject:
    """Returns the object that a row has under `key`; empty without one."""
    value = row.get(key, {})
    assert isinstance(value, dict)
    return value


async def listed(rows: Sequence[object]) -> bytes:
    """Returns the bytes of a long answer, made while the event loop goes on."""
    return b"[" + b",".join([as_json(row) async for row in in_slices(rows)]) + b"]"


def as_json(value: object) -> bytes:
    """Returns the bytes of an answer. What JSON has no form for (a number that is none, half a
    surrogate pair: tables of AMQP clients have such) becomes null or `?`."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _finite(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value
