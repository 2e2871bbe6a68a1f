"""Compressed contents: whatever a sender says, nothing larger than the limit is made."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq import compression
from convoymq.rocketmq.compression import LZ4, ZLIB, ZSTANDARD, uncompressed


def zstandard_stream(content: bytes) -> bytes:
    """As RocketMQ's clients write it: without its size."""
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return bytes(stream.compress(content) + stream.flush())


COMPRESS: dict[int, Callable[[bytes], bytes]] = {
    0: zlib.compress, LZ4: lz4.frame.compress, ZSTANDARD: zstandard_stream, ZLIB: zlib.compress,
}  # fmt: skip


@given(st.binary(max_size=5000), st.sampled_from(list(COMPRESS)))
def test_what_was_compressed_is_returned(content: bytes, kind: int) -> None:
    assert uncompressed(COMPRESS[kind](content), kind) == content
    assert uncompressed(memoryview(COMPRESS[kind](content)), kind) == content


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_is_too_large_is_refused_at_the_limit(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "UNCOMPRESSED_BYTES_MAX", 1 << 20)
    assert len(uncompressed(COMPRESS[kind](bytes(1 << 20)), kind)) == 1 << 20
    for size in ((1 << 20) + 1, 64 << 20):
        with pytest.raises(ValueError, match="more than 1048576 bytes"):
            uncompressed(COMPRESS[kind](bytes(size)), kind)


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_is_cut_or_damaged_is_refused(kind: int) -> None:
    whole = COMPRESS[kind](b"0123456789" * 500)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="it is"):
            uncompressed(whole[:end], kind)
    with pytest.raises(ValueError, match="it is damaged"):
        uncompressed(b"\x00" * 40, kind)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="compression 5 is unknown"):
        uncompressed(b"", 5)
