"""The columnar protocol: its constants, its frames and its errors, for server and client alike.

Layout and meaning: docs/formats/columnar-protocol.md. The payload of a frame is a columnar frame,
which `convoymq.kernels.column_frame` reads. Sans IO: bytes in, frames out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
from crc32c import crc32c

from convoymq.model.errors import BrokerError, Misuse, PeerError

VERSION = 1
PREFACE = b"CNVY\x00\x00" + bytes((VERSION, 0))
#: What a connection of this protocol begins with, whatever its version.
PREFACE_MAGIC = PREFACE[:6]

HEADER_SIZE = 32
ANSWER = 128
HANDSHAKE_FRAME_MAX = 64 << 10
FRAME_MAX_LIMIT = (1 << 32) - 1
REQUEST_MAP_MAX = 1 << 20
ANSWER_MAP_MAX = 16 << 20
REQUESTS_MAX = 64
AHEAD_BYTES = 256 << 10
GROWTH = 4
"""The buffer of an unfinished frame grows by this factor, so at most a third is copied twice."""

_HEADER = struct.Struct("<IBBHQIIQ")
_CHECKED = 20


class Op(IntEnum):
    """Operations; an answer carries `op + ANSWER`."""

    AUTHENTICATE = 1
    METADATA = 2
    OFFSETS = 3
    FETCH = 4
    PRODUCE = 5
    RESERVATION = 6
    RESERVATION_FETCH = 7
    BROWSE = 8
    STORE_OFFSET = 9
    QUERY_OFFSET = 10
    CHECK_PRODUCE = 11
    TOPIC_ROUTE = 12
    TOPIC_PRODUCE = 13
    TOPIC_PRODUCER = 14
    GROUP_JOIN = 32
    GROUP_HEARTBEAT = 33
    GROUP_WAKE = 34
    GROUP_FETCH = 35
    GROUP_SETTLE = 36
    GROUP_SEEK = 37


class ErrorCode(IntEnum):
    """Reason why a request was not served; 0 in the status of a frame means that it was."""

    FRAME_ERROR = 1
    ACCESS_REFUSED = 2
    NOT_FOUND = 3
    OFFSET_OUT_OF_RANGE = 4
    REPLICA_BEHIND = 5
    UNAVAILABLE = 6
    PRECONDITION_FAILED = 7
    RESERVATION_GONE = 8
    RESOURCE_ALARM = 9
    INTERNAL_ERROR = 10
    NOT_IMPLEMENTED = 11


class ColumnarError(BrokerError):
    """A request that is answered with an error.

    `code` is an `ErrorCode`, or a plain number that this version does not know. `details` are the
    other fields of the error map.
    """

    def __init__(self, code: int, text: str, details: Mapping[str, object] | None = None) -> None:
        super().__init__(text)
        try:
            self.code: int = ErrorCode(code)
        except ValueError:
            self.code = code
        self.details: dict[str, object] = dict(details or {})

    def to_map(self) -> dict[str, object]:
        """Returns the map of the answer."""
        return {**self.details, "text": self.text}


class ProtocolError(PeerError):
    """Bytes that are no frame of this protocol: the connection cannot go on.

    `correlation` names the request as far as it is known, else 0. `frames` are the whole ones that
    came before, in the same call.
    """

    def __init__(self, text: str, correlation: int = 0) -> None:
        super().__init__(text)
        self.correlation = correlation
        self.frames: list[Frame] = []


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `payload` is read-only; its buffer belongs to this frame alone."""

    op: int
    status: int
    correlation: int
    map: dict[str, object]
    payload: memoryview

    @property
    def is_answer(self) -> bool:
        """Returns whether it answers a request."""
        return self.op >= ANSWER

    def error(self) -> ColumnarError | None:
        """Returns the error of an answer with a status other than 0."""
        if not self.status:
            return None
        details = dict(self.map)
        text = details.pop("text", "")
        return ColumnarError(self.status, str(text) or f"error {self.status}", details)


def preface_version(data: bytes) -> int:
    """Returns the version of the protocol that an 8-byte preface asks for.

    Raises:
        ProtocolError: it is no preface.
    """
    if len(data) != len(PREFACE) or data[:6] != PREFACE_MAGIC or data[7]:
        raise ProtocolError("the connection does not begin with the preface of this protocol")
    return data[6]


def encode_frame(
    op: int,
    status: int,
    correlation: int,
    map: Mapping[str, object],
    payload: bytes | memoryview = b"",
) -> list[bytes | memoryview]:
    """Returns the parts of a frame, to be sent one behind the other; the payload is not copied.

    Raises:
        Misuse: the map holds what msgpack has no form for, or the frame would reach 4 GiB.
    """
    try:
        encoded = msgspec.msgpack.encode(map)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Misuse(f"map of a frame cannot be encoded: {error}") from error
    used = HEADER_SIZE + len(encoded)
    start = (used + 7) & ~7
    payload_length = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    length = start + payload_length
    if length > FRAME_MAX_LIMIT:
        raise Misuse(f"frame of {length} bytes")
    head = _HEADER.pack(length, op, VERSION, status, correlation, len(encoded), 0, 0)
    checked = head[:_CHECKED] + encoded + bytes(start - used)
    check = crc32c(checked)
    first = checked[:_CHECKED] + check.to_bytes(4, "little") + bytes(8) + checked[_CHECKED:]
    return [first, payload] if payload_length else [first]


def encode_error(op: int, correlation: int, error: ColumnarError) -> list[bytes | memoryview]:
    """Returns the answer that tells of an error; `op` is the request's."""
    return encode_frame((op & 127) + ANSWER, error.code, correlation, error.to_map())


class FrameReader:
    """Cuts a stream of bytes into frames. Every length is compared with its bound first.

    Bytes come by `feed`, or straight into `buffer()` and then `advance` says how many: so a large
    payload is read where it stays. After a ProtocolError nothing more is taken.
    """

    def __init__(
        self,
        frame_max: int = HANDSHAKE_FRAME_MAX,
        ahead: int = AHEAD_BYTES,
        allocate: Callable[[int], bytearray] = bytearray,
    ) -> None:
        """`frame_max`: bytes of the largest frame that is taken; may be changed between frames.
        `ahead`: memory that a frame gets before its bytes have come; then it grows as they do.
        `allocate`: makes that memory; what is in it does not matter."""
        self.frame_max = frame_max
        self.ahead = ahead
        self._allocate = allocate
        self._length = 0
        self._head = bytearray(HEADER_SIZE)
        self._data = self._head
        self._at = 0
        self._broken = False

    @property
    def length(self) -> int:
        """Returns the number of bytes that the unfinished frame will have; 0 while its header is
        not here."""
        return self._length

    @property
    def waiting(self) -> int:
        """Returns the number of bytes of an unfinished frame."""
        return self._at

    @property
    def missing(self) -> int:
        """Returns the number of bytes that will still come for the unfinished frame, as far as
        known."""
        return (self._length or HEADER_SIZE) - self._at

    def buffer(self) -> memoryview:
        """Returns the room for the next bytes: at least one byte, never beyond the frame that is
        read."""
        return memoryview(self._data)[self._at :]

    def advance(self, count: int) -> list[Frame]:
        """Takes `count` bytes that were written to `buffer()`.

        Raises:
            ProtocolError: they are no frame of this protocol.
            Misuse: there was no room for so many.
        """
        if self._broken:
            raise ProtocolError("the connection broke the protocol before")
        if count < 0 or count > len(self._data) - self._at:
            raise Misuse(f"{count} bytes where {len(self._data) - self._at} fit")
        self._at += count
        if self._at < len(self._data):
            return []
        try:
            if self._data is self._head:
                return self._begin()
            if self._at < self._length:
                self._grow()
                return []
            return [self._finish()]
        except ProtocolError:
            self._broken = True
            raise

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Takes bytes from the connection and returns the frames that are whole now.

        Raises:
            ProtocolError: they are no frames of this protocol; `frames` holds those before.
        """
        view = memoryview(data)
        frames: list[Frame] = []
        at = 0
        try:
            while at < len(view):
                part = view[at : at + len(self._data) - self._at]
                self._data[self._at : self._at + len(part)] = part
                at += len(part)
                frames += self.advance(len(part))
        except ProtocolError as error:
            error.frames = frames
            raise
        return frames

    def _begin(self) -> list[Frame]:
        """The header is here: check it and make room for the rest."""
        length, op, version, status, correlation, map_length, _, spare = _HEADER.unpack(self._head)
        if version != VERSION:
            raise ProtocolError(f"frame of version {version}, this is version {VERSION}")
        if length > self.frame_max:
            text = f"frame of {length} bytes, at most {self.frame_max} are allowed"
            raise ProtocolError(text, correlation)
        answer = op >= ANSWER
        map_max = ANSWER_MAP_MAX if answer else REQUEST_MAP_MAX
        if map_length > map_max or (HEADER_SIZE + map_length + 7) & ~7 > length:
            text = f"map of {map_length} bytes in a frame of {length}"
            raise ProtocolError(text, correlation)
        if op & 127 == 0 or spare or (status and not answer):
            raise ProtocolError("frame header is broken", correlation)
        if length == HEADER_SIZE:
            raise ProtocolError("frame without a map", correlation)
        self._length = length
        self._data = self._allocate(min(length, max(self.ahead, HEADER_SIZE + 1)))
        self._data[:HEADER_SIZE] = self._head
        return []

    def _grow(self) -> None:
        """Enlarges the buffer when it is full, in proportion to what has come."""
        larger = self._allocate(min(self._length, GROWTH * len(self._data)))
        larger[: self._at] = self._data
        self._data = larger

    def _finish(self) -> Frame:
        """The frame is whole: check its map and start anew."""
        data, self._data, self._at = self._data, self._head, 0
        self._length = 0
        _, op, _, status, correlation, map_length, check, _ = _HEADER.unpack_from(data)
        used = HEADER_SIZE + map_length
        start = (used + 7) & ~7
        view = memoryview(data).toreadonly()
        if crc32c(view[HEADER_SIZE:start], crc32c(view[:_CHECKED])) != check:
            raise ProtocolError("frame checksum does not fit")
        if any(view[used:start]):
            raise ProtocolError("padding of a map is not zero", correlation)
        try:
            found = msgspec.msgpack.decode(view[HEADER_SIZE:used], type=dict[str, object])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"map of a frame is broken: {error}", correlation) from error
        return Frame(op, status, correlation, found, view[start:])


__all__ = [
    "ANSWER",
    "ANSWER_MAP_MAX",
    "FRAME_MAX_LIMIT",
    "HANDSHAKE_FRAME_MAX",
    "HEADER_SIZE",
    "PREFACE",
    "PREFACE_MAGIC",
    "REQUESTS_MAX",
    "REQUEST_MAP_MAX",
    "VERSION",
    "ColumnarError",
    "ErrorCode",
    "Frame",
    "FrameReader",
    "Op",
    "ProtocolError",
    "encode_error",
    "encode_frame",
    "preface_version",
]
