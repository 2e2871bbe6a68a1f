"""Frames and binary headers of the remoting protocol, against a naive reading of their layout."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.remoting import FrameScanner, decode_binary, encode_binary, frame

FIELDS = st.dictionaries(st.text(max_size=12), st.text(max_size=40), max_size=6)
INTEGERS = st.integers(-(1 << 31), (1 << 31) - 1)


def twin(
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str,
    fields: dict[str, str],
) -> bytes:
    """A binary header by its layout."""
    text = remark.encode()
    packed = b"".join(
        struct.pack(">h", len(name.encode()))
        + name.encode()
        + struct.pack(">i", len(value.encode()))
        + value.encode()
        for name, value in fields.items()
    )
    head = struct.pack(">hBhii", code, language, version, opaque, flag)
    return head + struct.pack(">i", len(text)) + text + struct.pack(">i", len(packed)) + packed


@given(
    code=st.integers(-0x8000, 0x7FFF),
    opaque=INTEGERS,
    flag=INTEGERS,
    remark=st.none() | st.text(min_size=1, max_size=30),
    fields=FIELDS,
)
def test_a_binary_header_has_its_layout_and_comes_back(
    code: int, opaque: int, flag: int, remark: str | None, fields: dict[str, str]
) -> None:
    header = encode_binary(code, 9, 413, opaque, flag, remark, fields)
    assert header == twin(code, 9, 413, opaque, flag, remark or "", fields)
    assert decode_binary(header) == (code, 9, 413, opaque, flag, remark, fields)


@given(data=st.binary(max_size=80), cut=st.integers(0, 120), fields=FIELDS)
def test_nonsense_is_refused_or_read(data: bytes, cut: int, fields: dict[str, str]) -> None:
    good = encode_binary(10, 0, 413, 1, 0, "remark", fields)
    for header in (data, good[:cut], good[:cut] + data):
        try:
            found = decode_binary(header)
        except ValueError:
            continue
        assert len(found) == 7


@pytest.mark.parametrize(
    ("at", "word"), [(13, 0x7FFFFFFF), (13, -1), (17, 0x7FFFFFFF), (17, -1), (17, 1)]
)
def test_lengths_that_lie_are_refused(at: int, word: int) -> None:
    header = bytearray(encode_binary(10, 0, 413, 1, 0, None, {"a": "b"}))
    struct.pack_into(">i", header, at, word)
    with pytest.raises(ValueError, match="cut"):
        decode_binary(bytes(header))


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="200050"):
        encode_binary(200050, 0, 413, 1, 0, None, {})
    with pytest.raises(ValueError, match="too many bytes"):
        encode_binary(10, 0, 413, 1, 0, None, {"n" * 0x8000: ""})
    with pytest.raises(ValueError, match="16 MiB"):
        frame(2, b"", b"")


FRAMES = st.lists(
    st.tuples(st.integers(0, 1), st.binary(max_size=40), st.binary(max_size=300)), max_size=8
)


@given(frames=FRAMES, data=st.data())
def test_frames_come_whole_however_they_are_cut(
    frames: list[tuple[int, bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(frame(*each) for each in frames)
    scanner = FrameScanner(1 << 20)
    found = []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 200))
        found += scanner.feed(stream[at : at + size])
        at += size
    assert found == frames


def test_a_large_frame_comes_in_small_parts() -> None:
    stream = frame(0, b"{}", bytes(1 << 20)) + frame(0, b"[]", b"x")
    scanner = FrameScanner(1 << 24)
    found = [
        one for at in range(0, len(stream), 1000) for one in scanner.feed(stream[at : at + 1000])
    ]
    assert [(e, h, len(b)) for e, h, b in found] == [(0, b"{}", 1 << 20), (0, b"[]", 1)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack(">i", 3), "a frame of 3 bytes"),
        (struct.pack(">I", 0xFFFFFFFF), "a frame of 4294967295 bytes"),
        (struct.pack(">I", 1025), "a frame of 1025 bytes"),
        (struct.pack(">II", 8, 5), "a header of 5 bytes in a frame of 8"),
        (struct.pack(">II", 8, 2 << 24), "a header in encoding 2"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a frame of"),
    ],
)
def test_what_cannot_be_a_frame_is_refused_at_once(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FrameScanner(1024).feed(data)
