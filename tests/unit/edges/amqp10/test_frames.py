"""Frames: one byte at a time equals whole, and malformed ones are refused by their numbers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.frames import Frame, FrameReader, frame
from convoymq.model.errors import FrameFault

FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 1), st.integers(0, 65535), st.binary(max_size=40)), max_size=6
)


def frames_of(reader: FrameReader) -> list[Frame]:
    found = []
    while (each := reader.frame()) is not None:
        found.append(each)
    return found


@given(FRAMES, st.data())
def test_pieces_of_any_size_are_the_same_frames(frames: list[Frame], data: st.DataObject) -> None:
    whole = b"".join(frame(each.channel, each.body, each.type) for each in frames)
    reader, found, at = FrameReader(512), [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, len(whole) - at))
        reader.feed(whole[at : at + size])
        found += frames_of(reader)
        at += size
    assert found == frames
    assert reader.waiting == 0


def test_an_extended_header_is_skipped() -> None:
    reader = FrameReader(512)
    reader.feed(struct.pack(">IBBH", 14, 3, 0, 7) + b"more" + b"xy")
    assert reader.frame() == Frame(0, 7, b"xy")


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ((7, 2, 0, 0), r"7 bytes\) < minimum frame size \(8 bytes"),
        ((513, 2, 0, 0), r"513 bytes\) > maximum frame size \(512 bytes"),
        ((0xFFFFFFFF, 2, 0, 0), "4294967295 bytes"),
        ((16, 1, 0, 0), r"data offset \(1 words"),
        ((16, 5, 0, 0), r"20 bytes\) > frame size \(16 bytes"),
    ],
)
def test_a_malformed_frame_is_refused_by_its_numbers(
    head: tuple[int, int, int, int], text: str
) -> None:
    reader = FrameReader(512)
    reader.feed(struct.pack(">IBBH", *head))
    with pytest.raises(FrameFault, match=text):
        reader.frame()


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    whole, single = FrameReader(64), FrameReader(64)
    ends: list[list[Frame | str]] = [[], []]
    for reader, pieces, end in (
        (whole, [data], ends[0]),
        (single, [data[k : k + 1] for k in range(len(data))], ends[1]),
    ):
        try:
            for piece in pieces:
                reader.feed(piece)
                while (each := reader.frame()) is not None:
                    end.append(each)
        except FrameFault as error:
            end.append(error.text)
    assert ends[0] == ends[1]
