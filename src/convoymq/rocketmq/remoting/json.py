"""JSON as RocketMQ's own servers write it, which is not always JSON.

Their library leaves the names of members that are numbers without quotes, and writes maps whose
keys are objects with the object in the place of the name (`{{"topic":"t"}:1}`). `loads` reads both:
such a name becomes the text of the number, or the object as JSON text without blanks, its members
in their order. `dumps` writes JSON that all clients read, without blanks, since some of them split
texts by hand.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from convoymq.model.errors import SyntaxFault
from convoymq.model.json import Json

DEPTH_MAX = 32

_BLANK = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORD = re.compile(rb"[^\s,:{}\[\]\"]+")

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


def dumps(value: object) -> bytes:
    """Returns a value as JSON text."""
    return _encoder.encode(value)


def loads(text: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Returns JSON text as a value of a type. Raises SyntaxFault."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise SyntaxFault(f"the body of a command is not as expected: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    except RecursionError:
        raise SyntaxFault(f"more than {DEPTH_MAX} values inside each other") from None
    try:
        return msgspec.convert(_Reader(bytes(text)).value(), type=kind, strict=False)
    except (ValueError, msgspec.MsgspecError) as error:
        raise SyntaxFault(f"the body of a command cannot be read: {error}") from error


class _Reader:
    """Reads text from its begin to its end."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0

    def value(self) -> Json:
        """Returns the only value of the text. Raises ValueError."""
        found = self._value(0)
        if self._next() != b"":
            raise ValueError(f"something follows at byte {self._at}")
        return found

    def _next(self) -> bytes:
        """Passes blanks; returns the byte that follows."""
        match = _BLANK.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[bytes]) -> bytes:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"nothing that can be read at byte {self._at}")
        self._at = match.end()
        return match.group()

    def _expect(self, mark: bytes) -> None:
        if self._next() != mark:
            raise ValueError(f"{mark.decode()} is missing at byte {self._at}")
        self._at += 1

    def _value(self, depth: int) -> Json:
        if depth > DEPTH_MAX:
            raise ValueError(f"more than {DEPTH_MAX} values inside each other")
        mark = self._next()
        if mark == b"{":
            return self._object(depth + 1)
        if mark == b"[":
            return self._array(depth + 1)
        found: Json = msgspec.json.decode(self._take(_STRING if mark == b'"' else _WORD))
        return found

    def _object(self, depth: int) -> dict[str, Json]:
        self._at += 1
        members: dict[str, Json] = {}
        if self._next() == b"}":
            self._at += 1
            return members
        while True:
            name = self._name(depth)
            self._expect(b":")
            members[name] = self._value(depth)
            if self._next() != b",":
                break
            self._at += 1
        self._expect(b"}")
        return members

    def _name(self, depth: int) -> str:
        mark = self._next()
        if mark == b"{":
            return dumps(self._value(depth)).decode()
        if mark == b'"':
            return msgspec.json.decode(self._take(_STRING), type=str)
        return self._take(_WORD).decode()

    def _array(self, depth: int) -> list[Json]:
        self._at += 1
        values: list[Json] = []
        if self._next() == b"]":
            self._at += 1
            return values
        while True:
            values.append(self._value(depth))
            if self._next() != b",":
                break
            self._at += 1
        self._expect(b"]")
        return values
