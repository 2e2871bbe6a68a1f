"""Bodies of requests about ordered topics, and the status of refusals."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.fields import number, text_in
from convoymq.model.json import JsonObject
from convoymq.settings.table import AUTOSCALE_KEYS
from convoymq.topics.rules.refusals import Code
from convoymq.topics.shell.vocabulary import TOPIC_SETTINGS

if TYPE_CHECKING:
    from convoymq.topics.shell.cuts import Position
    from convoymq.topics.shell.parked import ParkedKeyRow

NUMBERS_MAX = 65_536
KEYS_MAX = 1_000
CHANGE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
"""As it can stand in a path."""
OF_NODES = ("auto-", "reconcile-")
"""Begins of the ids that nodes give to changes: the autoscaler, and the controller."""
POSITION_KEYS = ("position", "time", "vector")
TOPIC_KEYS = ("partitions", "logical", "mode", *TOPIC_SETTINGS)
SPLIT_KEYS = ("pid", "at", "change_id")
MERGE_KEYS = ("pids", "change_id")
MOVE_KEYS = ("pid", "node", "change_id")
PARTITION_KEYS = ("pid",)
NODE_KEYS = ("node",)
GROUP_KEYS = ("advance", *POSITION_KEYS)
PARK_KEYS = ("keys", "encoding")
REPLACE_KEYS = (*PARK_KEYS, "payload", "payload_encoding")
ENCODINGS = ("string", "base64")

STATUS: Mapping[Code, int] = {
    Code.BAD_TOPIC: 400,
    Code.NO_KEY: 400,
    Code.BAD_HASH: 400,
    Code.TOO_MANY_PARTITIONS: 400,
    Code.BAD_CUT: 400,
    Code.NOT_ADJACENT: 400,
    Code.BAD_POSITION: 400,
    Code.GROUP_LIVE: 400,
    Code.UNKNOWN_PARTITION: 404,
    Code.STALE_ROUTE: 404,
    Code.NOT_PARKED: 404,
    Code.DATA_EXPIRED: 410,
}
CONFLICT: Final = 409
"""Of all other refusals: it may succeed later, or when something else is done first."""
NAMES = {400: "bad_request", 404: "not_found", CONFLICT: "conflict", 410: "gone"}


def refusal_of(code: Code) -> tuple[int, str]:
    """Returns status and short name of a refusal."""
    status = STATUS.get(code, CONFLICT)
    return status, NAMES[status]


def whole_number(body: JsonObject, key: str, default: int | None = None) -> int:
    """Returns a number; not negative. Raises ApiError."""
    value = body.get(key, default)
    if value is None:
        raise bad_request(f"key {key} is missing")
    return _number(key, value)


def numbers_in(body: JsonObject, key: str) -> tuple[int, ...]:
    """Returns a list of numbers, empty without one. Raises ApiError."""
    value = body.get(key, [])
    if not isinstance(value, list) or len(value) > NUMBERS_MAX:
        raise bad_request(f"key {key} is not a list of at most {NUMBERS_MAX} numbers")
    return tuple(_number(key, each) for each in value)


def change_id_in(body: JsonObject) -> str:
    """Returns the id that a change shall have; empty: a new one. Raises ApiError."""
    if "change_id" not in body:
        return ""
    found = text_in(body, "change_id")
    if not CHANGE_ID.fullmatch(found):
        raise bad_request(
            f"key change_id: {found!r} is not 1 to 64 letters, digits and any of . _ : - with a "
            "letter or digit first"
        )
    if found.startswith(OF_NODES):
        raise bad_request(f"key change_id: ids of nodes begin with {' or '.join(OF_NODES)}")
    return found


def settings_in(body: JsonObject) -> dict[str, bool | int | str]:
    """Returns the settings of a new topic. Raises ApiError."""
    found: dict[str, bool | int | str] = {}
    for name in TOPIC_SETTINGS:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, bool | int | str):
                raise bad_request(f"key {name}: {value!r} is no setting")
            found[name] = value
    return found


def scaling_in(body: JsonObject) -> dict[str, bool | int | str | None]:
    """Returns changes of an autoscaler's settings; None takes one away. Raises ApiError."""
    found: dict[str, bool | int | str | None] = {}
    for name, value in body.items():
        if value is not None and not isinstance(value, bool | int | str):
            raise bad_request(f"key {name}: {value!r} is no setting")
        found[name] = value
    if not found:
        raise bad_request(f"give some of {', '.join(AUTOSCALE_KEYS)}")
    return found


def position_in(body: JsonObject) -> Position:
    """Returns where a group shall be. Raises ApiError."""
    named = [key for key in POSITION_KEYS if key in body]
    match named:
        case ["position"]:
            return _end(text_in(body, "position"))
        case ["time"]:
            return whole_number(body, "time")
        case ["vector"]:
            return _vector(body["vector"])
        case _:
            raise bad_request("give one of position, time and vector")


def _end(text: str) -> Position:
    match text:
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
        case _:
            raise bad_request(f"position is one of earliest, latest, not {text!r}")


def _vector(value: object) -> dict[int, int]:
    if not isinstance(value, dict) or not 1 <= len(value) <= NUMBERS_MAX:
        raise bad_request("key vector is not an object of offsets by partition")
    made = {_number("vector", pid): _number("vector", offset) for pid, offset in value.items()}
    if len(made) != len(value):
        raise bad_request("key vector names a partition twice")
    return made


def keys_in(body: JsonObject) -> list[bytes]:
    """Returns order keys. Raises ApiError."""
    encoding = text_in(body, "encoding", "string")
    if encoding not in ENCODINGS:
        raise bad_request(f"encoding is one of {', '.join(ENCODINGS)}")
    keys = body.get("keys")
    if not isinstance(keys, list) or not 1 <= len(keys) <= KEYS_MAX:
        raise bad_request(f"keys must be a list of 1 to {KEYS_MAX} order keys")
    return [_key(each, encoding) for each in keys]


def body_in(body: JsonObject) -> bytes:
    """Returns the body of a message. Raises ApiError."""
    encoding = text_in(body, "payload_encoding", "string")
    if encoding not in ENCODINGS:
        raise bad_request(f"payload_encoding is one of {', '.join(ENCODINGS)}")
    payload = body.get("payload")
    if not isinstance(payload, str):
        raise bad_request("key payload is not a string")
    return _decoded(payload, encoding, "key payload")


def _key(value: object, encoding: str) -> bytes:
    if not isinstance(value, str):
        raise bad_request(f"the order key {value!r} is not a string")
    return _decoded(value, encoding, f"the order key {value!r}")


def _decoded(text: str, encoding: str, what: str) -> bytes:
    if encoding == "string":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(f"{what} is not base64") from None


def parked_json(row: ParkedKeyRow) -> JsonObject:
    """Returns a parked key as JSON; one that is no text is base64."""
    key = row["key"]
    try:
        shown = {"key": key.decode(), "encoding": "string"}
    except UnicodeDecodeError:
        shown = {"key": base64.b64encode(key).decode("ascii"), "encoding": "base64"}
    return {**row, **shown}


def _number(key: str, value: object) -> int:
    found = number(value) if isinstance(value, str) else value
    if type(found) is int and found >= 0:
        return found
    raise bad_request(f"key {key}: {value!r} is not a number")
