"""Compressed contents: bodies of messages, and registrations. One limit for both, since the sender
chooses how much comes out."""

from __future__ import annotations

import zlib

import lz4.frame
import zstandard

UNCOMPRESSED_BYTES_MAX = 64 << 20
LZ4, ZSTANDARD, ZLIB = 1, 2, 3
"""Bits 8 to 10 of a message's system flag; 0 is zlib, too."""
_ZSTANDARD_STEP_BYTES = 1024
"""Of input: a block of four bytes may become 128 KiB."""


def uncompressed(content: bytes | memoryview, kind: int = ZLIB) -> bytes:
    """Returns what was compressed.

    Raises:
        ValueError: it is damaged, cut, of an unknown kind, or larger than
            `UNCOMPRESSED_BYTES_MAX`.
    """
    limit = UNCOMPRESSED_BYTES_MAX + 1
    try:
        if kind in (0, ZLIB):
            inflating = zlib.decompressobj()
            found, is_whole = inflating.decompress(content, limit), inflating.eof
        elif kind == LZ4:
            frame = lz4.frame.LZ4FrameDecompressor()
            found, is_whole = frame.decompress(content, limit), frame.eof
        elif kind == ZSTANDARD:
            found, is_whole = _zstandard(content)
        else:
            raise ValueError(f"compression {kind} is unknown")
    except (zlib.error, RuntimeError, EOFError, zstandard.ZstdError) as error:
        raise ValueError(f"it is damaged: {error}") from None
    if len(found) > UNCOMPRESSED_BYTES_MAX:
        raise ValueError(f"it has more than {UNCOMPRESSED_BYTES_MAX} bytes")
    if not is_whole:
        raise ValueError("it is cut")
    return found


def _zstandard(content: bytes | memoryview) -> tuple[bytes, bool]:
    """Returns the content of a frame up to the limit, and whether it ended. Its size need not be
    in its header, and the library has no limit of its own."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    parts, size = [], 0
    for at in range(0, len(content), _ZSTANDARD_STEP_BYTES):
        parts.append(frame.decompress(content[at : at + _ZSTANDARD_STEP_BYTES]))
        size += len(parts[-1])
        if frame.eof or size > UNCOMPRESSED_BYTES_MAX:
            break
    return b"".join(parts), frame.eof
