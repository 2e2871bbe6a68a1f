"""Ordered topics as JSON: rows, what requests ask for, and the status of refusals."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from convoymq.management.bodies import bad_request
from convoymq.management.fields import number, text_in
from convoymq.model.json import JsonObject
from convoymq.topics.order_token import OrderToken
from convoymq.topics.refusals import Code

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PIDS_MAX = 65_536
KEYS_MAX = 1_000
ENCODINGS = ("string", "base64")

STATUS: Mapping[Code, int] = {
    Code.BAD_TOPIC: 400,
    Code.BAD_CUT: 400,
    Code.NOT_ADJACENT: 400,
    Code.BAD_POSITION: 400,
    Code.BAD_HASH: 400,
    Code.NO_KEY: 400,
    Code.UNKNOWN_PARTITION: 404,
    Code.STALE_ROUTE: 404,
    Code.NOT_PARKED: 404,
    Code.DATA_EXPIRED: 410,
}
NAMES = {400: "bad_request", 404: "not_found", 409: "conflict", 410: "gone"}


def status_of(code: Code) -> int:
    """Returns the HTTP status of a refusal; what may succeed later is a conflict."""
    return STATUS.get(code, 409)


def row_of(found: DataclassInstance) -> JsonObject:
    """Returns the fields of a value as JSON."""
    made: JsonObject = {}
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, bytes):
            made |= {field.name: _text(value), f"{field.name}_encoding": _encoding(value)}
        else:
            made[field.name] = _plain(value)
    return made


def _plain(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case OrderToken():
            return str(value)
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return row_of(value)
        case _:
            return value


def _encoding(value: bytes) -> str:
    try:
        value.decode()
    except UnicodeDecodeError:
        return "base64"
    return "string"


def _text(value: bytes) -> str:
    return (
        value.decode() if _encoding(value) == "string" else base64.b64encode(value).decode("ascii")
    )


# --- bodies of requests ------------------------------------------------------------------------


def whole_number(body: JsonObject, key: str, default: int | None = None) -> int:
    """Returns a number; not negative. Raises ApiError."""
    value = body.get(key, default)
    if value is None:
        raise bad_request(f"key {key} is missing")
    return _number(key, value)


def _number(key: str, value: object) -> int:
    found = number(value) if isinstance(value, str) else value
    if type(found) is int and found >= 0:
        return found
    raise bad_request(f"key {key}: {value!r} is not a number")


def numbers_in(body: JsonObject, key: str) -> tuple[int, ...]:
    """Returns a list of numbers, empty without one. Raises ApiError."""
    value = body.get(key, [])
    if not isinstance(value, list) or len(value) > PIDS_MAX:
        raise bad_request(f"key {key} is not a list of at most {PIDS_MAX} numbers")
    return tuple(_number(key, each) for each in value)


def position_in(body: JsonObject) -> str | int | dict[int, int]:
    """Returns where a group shall be: `earliest`, `latest`, a time (ms), or offsets by partition.
    Raises ApiError."""
    named = [key for key in ("position", "time", "vector") if key in body]
    if len(named) != 1:
        raise bad_request("give one of position, time and vector")
    match named[0]:
        case "position":
            place = text_in(body, "position")
            if place not in ("earliest", "latest"):
                raise bad_request("position is one of earliest, latest")
            return place
        case "time":
            return whole_number(body, "time")
        case _:
            vector = body["vector"]
            if not isinstance(vector, dict) or not vector:
                raise bad_request("key vector is not an object of offsets by partition")
            made = {_number("vector", pid): _number("vector", at) for pid, at in vector.items()}
            if len(made) != len(vector):
                raise bad_request("key vector names a partition twice")
            return made


def bytes_in(body: JsonObject, value: object) -> bytes:
    """Returns text of a body as bytes, by its key `encoding`. Raises ApiError."""
    encoding = text_in(body, "encoding", "string")
    if encoding not in ENCODINGS:
        raise bad_request(f"encoding is one of {', '.join(ENCODINGS)}")
    if not isinstance(value, str):
        raise bad_request("keys and payloads are strings")
    if encoding == "string":
        return value.encode()
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise bad_request(f"{value!r} is not base64") from None


def keys_in(body: JsonObject) -> list[bytes]:
    """Returns the order keys of a request. Raises ApiError."""
    keys = body.get("keys")
    if not isinstance(keys, list) or not 1 <= len(keys) <= KEYS_MAX:
        raise bad_request(f"keys must be a list of 1 to {KEYS_MAX} order keys")
    return [bytes_in(body, each) for each in keys]
