"""Request bodies: bounded, read within a time, and parsed where they do not hold the loop up.

A small body is parsed at once. A large one is parsed in a thread, in steps of `STEP_CHARS`: the C
scanner keeps the interpreter's lock for as long as it runs, so it is given no more than a step;
what is longer is taken apart here, level by level. No library parses in such steps (ADR 0194).
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject

BODY_BYTES_MAX = 1 << 20
"""Of a request that describes one thing."""
AT_ONCE_BYTES_MAX = 16 << 10
LARGE_AT_ONCE = 2
"""Large bodies that are read and parsed at a time; others wait."""
CONTAINERS_MAX = 1_000_000
DEPTH_MAX = 64
STEP_CHARS = 32 << 10
ESCAPE_CHARS_MAX = 12
"""The longest escape: a pair of surrogates."""
NUMBER_CHARS_MAX = 5000
IDLE_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0

FORM_TYPE = "multipart/form-data"
FIELDS_TYPE = "application/x-www-form-urlencoded"
FIELDS_MAX = 16

_WHITE = " \t\n\r"
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FILE_PART = re.compile(
    r'content-disposition:[^\r\n]*[ ;]name="?file"?(?:[;\r\n]|$)', re.IGNORECASE
)


class ApiError(BrokerError):
    """An answer other than success: HTTP status, short name, reason, and more for programs."""

    def __init__(
        self, status: int, error: str, reason: str, more: JsonObject | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.error = error
        self.more = more or {}


def bad_request(reason: str) -> ApiError:
    """The request is not acceptable."""
    return ApiError(400, "bad_request", reason)


class Bodies:
    """Reads bodies; the parts of all requests that share bounds."""

    def __init__(
        self, *, idle_timeout_s: float = IDLE_TIMEOUT_S, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._timeout_s = timeout_s
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def read(self, request: Request, most: int, *, form: bool = False) -> object:
        """Returns the body's JSON value; None when it is empty. `form`: it may be a form with the
        JSON as its file.

        Raises:
            ApiError: it is too large, comes too slowly, or is not JSON that can be used.
        """
        reader = _Reader(request, most, self._idle_timeout_s)
        kind = request.headers.get("content-type", "") if form else ""
        try:
            async with asyncio.timeout(self._timeout_s):
                if await reader.take(AT_ONCE_BYTES_MAX):
                    return None if reader.empty else parse(file_in(kind, reader.text()))
                async with self._large:
                    await reader.take(most)
                    # The time is for the client to send; parsing is bounded by the size.
                    return await asyncio.shield(
                        asyncio.get_running_loop().run_in_executor(
                            None, lambda: parse(file_in(kind, reader.text()))
                        )
                    )
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the body did not come in time") from None

    async def read_bytes(self, request: Request, most: int) -> bytes:
        """Returns the body as it is. Raises ApiError."""
        reader = _Reader(request, most, self._idle_timeout_s, is_text=False)
        try:
            async with asyncio.timeout(self._timeout_s), self._large:
                await reader.take(most)
            return bytes(reader.data)
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the body did not come in time") from None

    async def read_fields(self, request: Request) -> JsonObject:
        """Returns the fields of a small form, or of a JSON object. Raises ApiError."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != FIELDS_TYPE:
            body = await self.read(request, AT_ONCE_BYTES_MAX)
            if not isinstance(body, dict):
                raise bad_request("the body must be a JSON object or a form")
            return body
        reader = _Reader(request, AT_ONCE_BYTES_MAX, self._idle_timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await reader.take(AT_ONCE_BYTES_MAX)
            return dict(parse_qsl(reader.text(), max_num_fields=FIELDS_MAX))
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the body did not come in time") from None
        except ValueError as error:
            raise bad_request(str(error)) from None


class _Reader:
    def __init__(
        self, request: Request, most: int, idle_timeout_s: float, *, is_text: bool = True
    ) -> None:
        self.data = bytearray()
        """The body, unless it is text."""
        self._is_text = is_text
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdecimal() and len(declared) > len(str(most)):
            raise self._too_large(most)
        self._parts: list[str] = []
        self._stream = request.stream()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._idle_timeout_s = idle_timeout_s
        self._most = most
        self._size = 0
        self._containers = 0

    @property
    def empty(self) -> bool:
        return self._size == 0

    def text(self) -> str:
        return "".join(self._parts)

    async def take(self, most: int) -> bool:
        """Reads until more than `most` bytes are there, or all: then True."""
        while self._size <= most:
            async with asyncio.timeout(self._idle_timeout_s):
                try:
                    part = await anext(self._stream, None)
                except ClientDisconnect:
                    raise bad_request("the body is not whole") from None
            if part is None:
                self._add(b"", final=True)
                return True
            self._add(part)
        return False

    def _add(self, part: bytes, *, final: bool = False) -> None:
        self._size += len(part)
        if not self._is_text:
            if self._size > self._most:
                raise self._too_large(self._most)
            self.data += part
            return
        self._containers += part.count(b"[") + part.count(b"{")
        if self._size > self._most:
            raise self._too_large(self._most)
        if self._containers > CONTAINERS_MAX:
            raise bad_request(f"the body has more than {CONTAINERS_MAX} objects and arrays")
        try:
            self._parts.append(self._decoder.decode(part, final))
        except UnicodeDecodeError:
            raise bad_request("the body is not UTF-8") from None

    @staticmethod
    def _too_large(most: int) -> ApiError:
        return bad_request(f"a body of this request has at most {most} bytes")


def file_in(content_type: str, text: str) -> str:
    """Returns the part `file` of a form (multipart/form-data, RFC 7578), or the text itself when it
    is no form. Raises ApiError when the form has no such part."""
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != FORM_TYPE:
        return text
    found = _BOUNDARY.search(parameters)
    if found is None:
        raise bad_request("the form names no boundary")
    for part in text.split("--" + (found[1] or found[2]))[1:]:
        head, empty_line, content = part.partition("\r\n\r\n")
        if empty_line and _FILE_PART.search(head):
            return content.removesuffix("\r\n")
    raise bad_request("the form has no part 'file'")


def parse(text: str) -> object:
    """Returns the JSON value in `text`.

    Raises:
        ApiError: it is not JSON, nested too deeply, or has text or numbers that are none.
    """
    try:
        if len(text) <= STEP_CHARS:
            value = json.loads(text)
        else:
            value, at = _value(text, _skip(text, 0), 0)
            if _skip(text, at) != len(text):
                raise ValueError("more than one value")
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None
    _check(value)
    return value


def _check(value: object) -> None:
    """Raises ApiError for what Python's parser takes and nobody can use."""
    level = [value]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str):
                if not each.isascii():
                    _check_text(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise bad_request("the body has a number that is none or too large")
        if not below:
            return
        level = below
    raise bad_request(f"the body is nested deeper than {DEPTH_MAX}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request("the body has half of a surrogate pair") from None


# --- parsing in steps -------------------------------------------------------------------------

_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _WHITE:
        at += 1
    return at


def _value(text: str, at: int, depth: int) -> tuple[object, int]:
    """Returns the value at `at`, and where it ends. Raises ValueError."""
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    first = text[at : at + 1]
    if first == '"':
        return _string(text, at + 1)
    if first and first in "[{":
        try:
            # What closes within the step is complete, whatever follows.
            value, used = _scan(text[at : at + STEP_CHARS], 0)
            return value, at + used
        except (ValueError, StopIteration):
            pass
        return _array(text, at + 1, depth) if first == "[" else _object(text, at + 1, depth)
    try:
        value, used = _scan(text[at : at + NUMBER_CHARS_MAX], 0)
    except StopIteration:
        raise ValueError("no value") from None
    return value, at + used


def _array(text: str, at: int, depth: int) -> tuple[list[object], int]:
    made: list[object] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        return made, at + 1
    while True:
        value, at = _value(text, _skip(text, at), depth + 1)
        made.append(value)
        at, closed = _next(text, at, "]")
        if closed:
            return made, at


def _object(text: str, at: int, depth: int) -> tuple[JsonObject, int]:
    made: JsonObject = {}
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        return made, at + 1
    while True:
        at = _skip(text, at)
        if text[at : at + 1] != '"':
            raise ValueError("no name")
        name, at = _string(text, at + 1)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no colon")
        made[name], at = _value(text, _skip(text, at + 1), depth + 1)
        at, closed = _next(text, at, "}")
        if closed:
            return made, at


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """Returns the place behind an element, and whether that was the last. Raises ValueError."""
    at = _skip(text, at)
    mark = text[at : at + 1]
    if mark not in (end, ","):
        raise ValueError("no comma")
    return at + 1, mark == end


def _string(text: str, at: int) -> tuple[str, int]:
    """Returns the string whose first character is at `at`."""
    parts: list[str] = []
    while True:
        piece = text[at : at + STEP_CHARS]
        try:
            value, used = scanstring(piece, 0, True)
        except json.JSONDecodeError:
            if len(piece) < STEP_CHARS:
                raise
        else:
            parts.append(value)
            joined = "".join(parts)
            return (joined if len(parts) == 1 else _paired(joined)), at + used
        # It goes on behind this step, which must not end inside an escape.
        end = _cut(piece)
        value, used = scanstring(piece[:end] + '"', 0, True)
        if used != end + 1:
            raise ValueError("not a string")
        parts.append(value)
        at += end


def _cut(piece: str) -> int:
    """Returns how much of a string's inside can be read without what follows."""
    end = len(piece)
    tail = piece.rfind("\\", end - ESCAPE_CHARS_MAX // 2)
    if tail == -1:
        return end
    # A backslash that is itself escaped begins nothing: count the run that ends with it.
    run = tail
    while run > 0 and piece[run - 1] == "\\":
        run -= 1
    return tail if (tail - run) % 2 == 0 else tail + 1


def _paired(text: str) -> str:
    """Joins pairs of surrogates that a cut parted."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
