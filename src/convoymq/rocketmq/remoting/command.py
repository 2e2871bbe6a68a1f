"""One request or answer of the remoting protocol, and its two encodings.

A header is JSON (0) or binary (1). An answer has the encoding and the number (*opaque*) of its
request. Values of fields are text in both.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from convoymq.kernels.remoting import FrameScanner, decode_binary, encode_binary, frame
from convoymq.model.errors import FrameFault, Refused, SyntaxFault
from convoymq.rocketmq.remoting.codes import LANGUAGES, PYTHON, VERSION, Answer

JSON = 0
BINARY = 1

FLAG_ANSWER = 1
FLAG_ONE_WAY = 2

FRAME_BYTES_MAX = 16 << 20
CODE_BINARY_MAX = 0x7FFF
"""Codes above it, those of pop among them, do not fit into a binary header."""

Body: TypeAlias = "bytes | bytearray | memoryview"

_opaques = itertools.count(1)
_HEAD = struct.Struct(">II")


class Refusal(Refused):
    """A request is answered with a code, a remark and fields."""

    def __init__(self, code: int, remark: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.fields = fields


@dataclass(slots=True)
class Command:
    """A request, or an answer to one. `opaque` joins the two on their connection.

    Args:
        slices: what follows the body, in parts that are sent without a copy.
    """

    code: int
    fields: dict[str, str] = field(default_factory=dict)
    body: Body = b""
    opaque: int = 0
    flag: int = 0
    language: int = PYTHON
    version: int = VERSION
    remark: str | None = None
    encoding: int = JSON
    slices: Sequence[memoryview] = ()

    @property
    def is_answer(self) -> bool:
        """Returns whether this answers a request."""
        return bool(self.flag & FLAG_ANSWER)

    @property
    def is_one_way(self) -> bool:
        """Returns whether nobody waits for an answer."""
        return bool(self.flag & FLAG_ONE_WAY)

    def needed(self, name: str) -> str:
        """Returns a field that has to be there. Raises SyntaxFault."""
        found = self.fields.get(name)
        if found is None:
            raise SyntaxFault(f"the custom field <{name}> is null")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a field that is a number; None: it has to be there. Raises SyntaxFault."""
        text = self.fields.get(name) if default is not None else self.needed(name)
        if text is None:
            assert default is not None
            return default
        try:
            found = int(text)
        except ValueError:
            raise SyntaxFault(f"the custom field <{name}> is no number: {text:.64}") from None
        if not -(1 << 63) <= found < 1 << 63:
            raise SyntaxFault(f"the custom field <{name}> has more than 64 bits")
        return found

    def answer(
        self,
        code: int = Answer.SUCCESS,
        fields: dict[str, str] | None = None,
        body: Body = b"",
        remark: str | None = None,
    ) -> Command:
        """Returns the answer to this request."""
        return Command(
            code=code,
            fields=fields or {},
            body=body,
            opaque=self.opaque,
            flag=FLAG_ANSWER,
            remark=remark,
            encoding=self.encoding if code <= CODE_BINARY_MAX else JSON,
        )


def request(
    code: int, fields: dict[str, str] | None = None, body: Body = b"", *, one_way: bool = False
) -> Command:
    """Returns a request with a number of its own."""
    return Command(
        code=code,
        fields=fields or {},
        body=body,
        opaque=next(_opaques) & 0x7FFFFFFF,
        flag=FLAG_ONE_WAY if one_way else 0,
    )


class _Head(msgspec.Struct, rename="camel"):
    code: int
    opaque: int
    language: str | int = "JAVA"
    version: int = 0
    flag: int = 0
    remark: str | None = None


class _Header(_Head, rename="camel"):
    ext_fields: dict[str, str] | None = None


class _LooseHeader(_Head, rename="camel"):
    ext_fields: dict[str, msgspec.Raw] | None = None


_header = msgspec.json.Decoder(_Header)
_loose_header = msgspec.json.Decoder(_LooseHeader, strict=False)
_encoder = msgspec.json.Encoder()


def _text(raw: msgspec.Raw) -> str | None:
    """Returns a field as text."""
    content = bytes(raw)
    if content[:1] == b'"':
        return msgspec.json.decode(content, type=str)
    return None if content == b"null" else content.decode()


def _language(value: str | int) -> int:
    if isinstance(value, int):
        return value & 0xFF
    return LANGUAGES.index(value) if value in LANGUAGES else LANGUAGES.index("OTHER")


def _decode_json(header: bytes, body: Body) -> Command:
    found: _Head
    try:
        found = _header.decode(header)
        fields = found.ext_fields or {}
    except msgspec.ValidationError:
        # Some clients send numbers and booleans.
        found = _loose_header.decode(header)
        texts = ((name, _text(raw)) for name, raw in (found.ext_fields or {}).items())
        fields = {name: text for name, text in texts if text is not None}
    return Command(
        code=found.code,
        fields=fields,
        body=body,
        opaque=found.opaque,
        flag=found.flag,
        language=_language(found.language),
        version=found.version,
        remark=found.remark,
        encoding=JSON,
    )


def decode(encoding: int, header: bytes, body: Body) -> Command:
    """Decodes a frame's header. Raises SyntaxFault."""
    try:
        if encoding == JSON:
            return _decode_json(header, body)
        code, language, version, opaque, flag, remark, fields = decode_binary(header)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SyntaxFault(f"the header of a command cannot be read: {error}") from error
    return Command(code, fields, body, opaque, flag, language, version, remark, BINARY)


def encode(command: Command) -> bytes:
    """Encodes a command as one frame, which lacks its slices. Raises ValueError for what its
    encoding has no place for."""
    header = _encode_header(command)
    if not command.slices:
        return frame(command.encoding, header, command.body)
    size = len(header) + len(command.body) + sum(map(len, command.slices))
    return b"".join((
        _HEAD.pack(4 + size, command.encoding << 24 | len(header)), header, command.body
    ))  # fmt: skip


def _encode_header(command: Command) -> bytes:
    if command.encoding == BINARY:
        return encode_binary(
            command.code,
            command.language,
            command.version,
            command.opaque,
            command.flag,
            command.remark,
            command.fields,
        )
    # Without blanks: some clients split the text of addresses by hand.
    members: dict[str, object] = {
        "code": command.code,
        "flag": command.flag,
        "language": LANGUAGES[command.language % len(LANGUAGES)],
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
        "extFields": command.fields,
    }
    if command.remark is not None:
        members["remark"] = command.remark
    return _encoder.encode(members)


class CommandReader:
    """Reads the commands of one connection.

    Args:
        frame_bytes_max: of a frame; a longer one is refused when its length is known.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._scanner = FrameScanner(frame_bytes_max)

    def feed(self, data: bytes) -> list[Command]:
        """Returns the commands that are whole now. Raises FrameFault, SyntaxFault."""
        try:
            frames = self._scanner.feed(data)
        except ValueError as error:
            raise FrameFault(str(error)) from error
        return [decode(*found) for found in frames]
