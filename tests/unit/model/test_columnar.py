"""The frames of the columnar protocol: out and in again, in pieces, broken, too long."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.model import columnar
from convoymq.model.columnar import ColumnarError, ErrorCode, FrameReader, Op, ProtocolError
from convoymq.model.errors import Misuse

FRAME_MAX = 1 << 20

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
maps = st.dictionaries(st.text(max_size=12), values, max_size=6)
frames = st.tuples(
    st.sampled_from(list(Op)),
    st.booleans(),
    st.integers(0, 0xFFFF),
    st.integers(0, (1 << 64) - 1),
    maps,
    st.binary(max_size=200),
)


def joined(op: int, status: int, correlation: int, map: dict[str, Any], payload: bytes) -> bytes:
    return b"".join(columnar.encode_frame(op, status, correlation, map, payload))


def naive(op: int, status: int, correlation: int, map: bytes, payload: bytes = b"") -> bytes:
    """A frame with any bytes as its map and a checksum that fits."""
    padded = map + bytes(-len(map) % 8)
    length = 32 + len(padded) + len(payload)
    head = struct.pack("<IBBHQ", length, op, 1, status, correlation)
    head += struct.pack("<I", len(map))
    return head + struct.pack("<IQ", crc32c(head + padded), 0) + padded + payload


@given(st.lists(frames, max_size=5), st.integers(1, 60))
def test_frames_come_back_whole_however_they_are_cut(items: list[Any], step: int) -> None:
    data, expected = b"", []
    for op, answer, status, correlation, map, payload in items:
        number, code = (op + columnar.ANSWER, status) if answer else (op, 0)
        data += joined(number, code, correlation, map, payload)
        expected.append((number, code, correlation, map, payload))
    reader = FrameReader(FRAME_MAX)
    found = []
    for at in range(0, len(data), step):
        found += reader.feed(data[at : at + step])
    assert [(f.op, f.status, f.correlation, f.map, bytes(f.payload)) for f in found] == expected
    assert reader.waiting == 0

    direct = FrameReader(FRAME_MAX)
    again, at = [], 0
    while at < len(data):
        room = direct.buffer()
        count = min(len(room), step, len(data) - at)
        room[:count] = data[at : at + count]
        at += count
        again += direct.advance(count)
    assert again == found


@given(frames)
def test_the_layout_is_the_one_of_the_document(item: Any) -> None:
    op, _, _, correlation, map, payload = item
    made = joined(op, 0, correlation, map, payload)
    assert made == naive(op, 0, correlation, msgspec.msgpack.encode(map), payload)
    assert len(made) % 8 == len(payload) % 8


@settings(max_examples=150)
@given(frames, st.data())
def test_a_changed_byte_in_front_of_the_payload_is_seen(item: Any, data: st.DataObject) -> None:
    op, _, _, correlation, map, payload = item
    made = bytearray(joined(op, 0, correlation, map, payload))
    at = data.draw(st.integers(0, len(made) - len(payload) - 1))
    made[at] ^= data.draw(st.integers(1, 255))
    reader = FrameReader(FRAME_MAX)
    try:
        found = reader.feed(bytes(made))
    except ProtocolError:
        with pytest.raises(ProtocolError):
            reader.advance(0)
        return
    # A length that has grown is only noticed when more bytes come.
    assert found == []
    assert at < 4
    assert reader.waiting


@given(st.binary(max_size=200))
def test_garbage_never_does_more_than_raise(data: bytes) -> None:
    reader = FrameReader(4096)
    try:
        found = reader.feed(data)
    except ProtocolError as error:
        found = error.frames
    assert found == []


@given(st.binary(max_size=60))
def test_any_bytes_as_a_map_are_decoded_or_refused(encoded: bytes) -> None:
    data = naive(Op.METADATA, 0, 7, encoded)
    if not encoded:
        with pytest.raises(ProtocolError):
            FrameReader().feed(data)
        return
    try:
        found = FrameReader().feed(data)[0].map
        correlation = 7
    except ProtocolError as error:
        found, correlation = {}, error.correlation
    assert isinstance(found, dict)
    assert correlation == 7


HEAD = {"length": 40, "op": 2, "version": 1, "status": 0, "correlation": 9, "map": 1, "spare": 0}


@pytest.mark.parametrize(
    ("change", "correlation"),
    [
        ({"length": FRAME_MAX + 1}, 9),
        ({"length": 39}, 9),
        ({"length": 32, "map": 0}, 9),
        ({"length": 31}, 9),
        ({"length": 0}, 9),
        ({"map": 9}, 9),
        ({"map": 0xFFFFFFFF}, 9),
        ({"length": FRAME_MAX, "map": columnar.REQUEST_MAP_MAX + 1}, 9),
        ({"version": 2}, 0),
        ({"op": 0}, 9),
        ({"op": 128}, 9),
        ({"status": 1}, 9),
        ({"spare": 1}, 9),
    ],
)
def test_a_broken_header_is_refused_before_anything_is_kept(
    change: dict[str, int], correlation: int
) -> None:
    f = HEAD | change
    head = struct.pack(
        "<IBBHQIIQ",
        *(f["length"], f["op"], f["version"], f["status"], f["correlation"], f["map"]),
        *(0, f["spare"]),
    )
    reader = FrameReader(FRAME_MAX)
    with pytest.raises(ProtocolError) as caught:
        reader.feed(head)
    assert caught.value.correlation == correlation
    with pytest.raises(ProtocolError):
        reader.feed(b"x")


def test_a_frame_at_the_bound_is_taken_and_one_byte_more_is_not() -> None:
    payload = bytes(4096)
    made = joined(Op.PRODUCE, 0, 1, {}, payload)
    (frame,) = FrameReader(len(made)).feed(made)
    assert frame.payload == payload
    with pytest.raises(ProtocolError):
        FrameReader(len(made) - 1).feed(made)


def test_a_map_at_its_bound_is_taken_and_one_byte_more_is_not() -> None:
    for length, fits in ((columnar.REQUEST_MAP_MAX, True), (columnar.REQUEST_MAP_MAX + 1, False)):
        encoded = b"\x81\xa1k\xc6" + (length - 8).to_bytes(4, "big") + bytes(length - 8)
        data = naive(Op.METADATA, 0, 1, encoded)
        if fits:
            assert FrameReader(4 << 20).feed(data)[0].map["k"] == bytes(length - 8)
        else:
            with pytest.raises(ProtocolError):
                FrameReader(4 << 20).feed(data)
            answer = naive(Op.METADATA + columnar.ANSWER, 0, 1, encoded)
            assert len(FrameReader(4 << 20).feed(answer)[0].map["k"]) == length - 8


def test_memory_may_hold_anything_before_a_frame_is_read_into_it() -> None:
    made: list[int] = []

    def dirty(size: int) -> bytearray:
        made.append(size)
        return bytearray(b"\xaa" * size)

    payload = bytes(range(256)) * 4096
    data = joined(Op.PRODUCE, 0, 1, {"a": 1}, payload)
    reader = FrameReader(4 << 20, ahead=1000, allocate=dirty)
    assert reader.missing == 32
    assert reader.feed(data[:40]) == []
    assert reader.missing == len(data) - 40
    (frame,) = reader.feed(data[40:])
    assert frame.payload == payload
    assert made[0] == 1000
    assert made[-1] == len(data)


def test_whole_frames_before_a_broken_one_are_not_lost() -> None:
    good = joined(Op.OFFSETS, 0, 5, {"queries": []}, b"")
    with pytest.raises(ProtocolError) as caught:
        FrameReader().feed(good + good + bytes(32))
    assert [frame.correlation for frame in caught.value.frames] == [5, 5]


def test_a_deeply_nested_map_is_refused() -> None:
    encoded = b"\x81\xa1k" + b"\x91" * 5000 + b"\xc0"
    with pytest.raises(ProtocolError):
        FrameReader().feed(naive(Op.METADATA, 0, 1, encoded))


def test_padding_must_be_zero() -> None:
    encoded = b"\x80"
    padded = encoded + b"\x00\x00\x00\x00\x00\x00\x01"
    head = struct.pack("<IBBHQI", 40, Op.METADATA, 1, 0, 3, 1)
    data = head + struct.pack("<IQ", crc32c(head + padded), 0) + padded
    with pytest.raises(ProtocolError, match="padding"):
        FrameReader().feed(data)


def test_payloads_are_read_only() -> None:
    (frame,) = FrameReader().feed(joined(Op.PRODUCE, 0, 1, {}, b"12345678"))
    assert frame.payload.readonly


def test_errors_cross_the_wire() -> None:
    error = ColumnarError(ErrorCode.OFFSET_OUT_OF_RANGE, "too old", {"first": 7, "high": 9})
    data = b"".join(columnar.encode_error(Op.FETCH, 3, error))
    (frame,) = FrameReader().feed(data)
    assert frame.is_answer
    assert frame.op == Op.FETCH + columnar.ANSWER
    found = frame.error()
    assert found is not None
    assert found.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert (found.text, found.details) == ("too old", {"first": 7, "high": 9})


def test_an_answer_without_error_has_none_and_an_unknown_code_stays() -> None:
    (fine,) = FrameReader().feed(joined(Op.FETCH + columnar.ANSWER, 0, 1, {}, b""))
    assert fine.error() is None
    (odd,) = FrameReader().feed(joined(Op.FETCH + columnar.ANSWER, 999, 1, {}, b""))
    found = odd.error()
    assert found is not None
    assert (found.code, found.text) == (999, "error 999")


def test_a_map_that_has_no_form_is_misuse() -> None:
    with pytest.raises(Misuse):
        columnar.encode_frame(Op.FETCH, 0, 1, {"x": object()})
    with pytest.raises(Misuse):
        columnar.encode_frame(Op.FETCH, 0, 1, {"x": 1 << 70})


def test_more_than_the_buffer_holds_is_misuse() -> None:
    reader = FrameReader()
    with pytest.raises(Misuse):
        reader.advance(len(reader.buffer()) + 1)


@pytest.mark.parametrize("data", [b"", b"CNVY", b"AMQP\x00\x00\x09\x01", b"CNVY\x00\x00\x01\x01"])
def test_what_is_no_preface_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        columnar.preface_version(data)


def test_a_preface_tells_its_version() -> None:
    assert columnar.preface_version(columnar.PREFACE) == columnar.VERSION
    assert columnar.preface_version(b"CNVY\x00\x00\x07\x00") == 7


@pytest.mark.parametrize("step", [1, 999, 100_000])
@pytest.mark.parametrize("ahead", [0, 33, 5000, 1 << 30])
def test_memory_is_set_aside_as_bytes_come(ahead: int, step: int) -> None:
    payload = bytes(range(256)) * (40 if step == 1 else 4000)
    data = joined(Op.PRODUCE, 0, 3, {"queue": "q"}, payload)
    reader = FrameReader(1 << 30, ahead)
    frames: list[columnar.Frame] = []
    for at in range(0, len(data), step):
        part = data[at : at + step]
        frames += reader.feed(part)
        arrived = min(at + step, len(data))
        assert len(reader._data) <= max(ahead, columnar.GROWTH * max(arrived, 33))
        expected = len(data) if 32 <= arrived < len(data) else 0
        assert reader.length == expected
    (frame,) = frames
    assert bytes(frame.payload) == payload
    assert frame.payload.readonly
