"""Framing of RocketMQ's remoting protocol, and its binary header: layout in the module."""

from typing_extensions import Buffer

HEADER_BYTES_MAX: int
KEY_BYTES_MAX: int

class FrameScanner:
    """Cuts what a connection sends into frames."""

    def __init__(self, frame_bytes_max: int) -> None:
        """`frame_bytes_max`: of a frame without its length. Raises ValueError."""

    def feed(self, data: bytes) -> list[tuple[int, bytes, bytes]]:
        """Returns the frames that are whole now: encoding of the header, header, body. Raises
        ValueError for what cannot be a frame; nothing more can be read then."""

def frame(encoding: int, header: bytes, body: Buffer) -> bytes:
    """Encodes a frame. Raises ValueError."""

def decode_binary(header: bytes) -> tuple[int, int, int, int, int, str | None, dict[str, str]]:
    """Decodes a binary header: code, language, version, opaque, flag, remark, fields. Raises
    ValueError."""

def encode_binary(
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    fields: dict[str, str],
) -> bytes:
    """Encodes a binary header. Raises ValueError for what it has no place for."""
