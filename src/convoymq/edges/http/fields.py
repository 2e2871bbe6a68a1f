"""Reads fields of request bodies and parts of paths. What cannot be used is refused by name."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.messages import table_from_json
from convoymq.model.errors import PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.model.tables import Table
from convoymq.settings.definitions import term

NUMBER_DIGITS_MAX = 18
DEFAULT_EXCHANGE = "amq.default"
"""Name of the default exchange in paths."""


def number(text: str) -> int | None:
    """Returns the number that `text` is in decimal digits, or None."""
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX):
        return None
    return int(text)


def number_in(body: JsonObject, key: str, default: int | None) -> int | None:
    """Returns a number, or text that is one; not negative. Raises ApiError."""
    value = body.get(key, default)
    found = number(value) if isinstance(value, str) else value
    if value is None:
        return None
    if type(found) is int and found >= 0:
        return found
    raise bad_request(f"key {key} is not a number")


def text_in(body: JsonObject, key: str, default: str | None = None) -> str:
    """Returns text. Raises ApiError."""
    value = body.get(key, default)
    if not isinstance(value, str):
        raise bad_request(f"key {key} is missing or not a string")
    return value


def only_keys(body: JsonObject, keys: Collection[str]) -> None:
    """Refuses keys that a request does not know: they would do nothing. Raises ApiError."""
    for key in body:
        if key not in keys:
            known = f"there are: {', '.join(keys)}" if keys else "there are none"
            raise bad_request(f"key {term(key)} is unknown here; {known}")


def object_in(body: JsonObject, key: str) -> JsonObject:
    """Returns an object, empty without one. Raises ApiError."""
    value = body.get(key)
    if value is None or value == []:
        # An empty list is what clients in PHP and Lua make of an empty object.
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"key {key} is not an object")
    return value


def table_in(body: JsonObject, key: str = "arguments") -> Table:
    """Returns arguments. Raises BrokerError."""
    return table_from_json(object_in(body, key))


def text_of_header(request: Request, name: str) -> str:
    """Returns the text of a header, which clients write in UTF-8 or in Latin-1; empty without
    it."""
    given = request.headers.get(name, "")
    try:
        return given.encode("latin-1").decode()
    except UnicodeDecodeError:
        return given


def exchange_name(name: str) -> str:
    """Returns the name of the exchange that a path means."""
    return "" if name == DEFAULT_EXCHANGE else name


def truth(value: object) -> bool:
    """Returns a boolean that may have been written as text."""
    return value is True or value == "true"


def truth_in(body: JsonObject, key: str) -> bool:
    """Returns a boolean, which may have been written as text; false without it. Raises ApiError:
    another value would be taken for false, and a dry run for the work itself."""
    value = body.get(key)
    if value not in (None, True, False, "true", "false") or type(value) in (int, float):
        raise bad_request(f"key {key} is not a boolean")
    return truth(value)


def tags_of(value: object) -> tuple[str, ...]:
    """Returns tags given as a list or as words between commas. Raises PreconditionFailed."""
    if not isinstance(value, str | list | tuple):
        raise PreconditionFailed("tags are neither a list nor words between commas")
    words = value.split(",") if isinstance(value, str) else value
    return tuple(str(word).strip() for word in words if str(word).strip())
