"""Frames between neighbours of a ring: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.link_frames import HEADER_SIZE
from convoymq.model.errors import PeerError
from convoymq.replication.ring.types import Frame, Progress
from convoymq.shells.ring.frames import QUESTION_BODY, decode, encode

HEADER = bytes(HEADER_SIZE)


@st.composite
def progress(draw: st.DrawFn, *, whole: bool) -> Progress:
    payloads = tuple(draw(st.lists(st.binary(max_size=20), max_size=4)))
    complete = draw(st.integers(0, 1 << 40))
    more = 0 if whole and payloads else draw(st.integers(0, 5))
    return Progress(
        sender=draw(st.integers(1, (1 << 32) - 1)),
        complete=complete,
        last=complete + more + len(payloads),
        payloads=payloads,
    )


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    catch_up = draw(st.booleans())
    parts = draw(st.lists(progress(whole=catch_up), max_size=4))
    return Frame(version=7, catch_up=catch_up, progress=tuple(parts))


@given(frames())
def test_what_is_written_is_read(frame: Frame) -> None:
    body = encode(frame)
    assert all(part is payload for part, payload in zip(body[1:], payloads(frame), strict=True))
    assert decode(HEADER + b"".join(body), 7) == frame


def payloads(frame: Frame) -> list[bytes]:
    return [payload for each in frame.progress for payload in each.payloads]


def test_a_question_has_no_senders() -> None:
    assert decode(HEADER + QUESTION_BODY, 7) is None


@given(frames(), st.data())
def test_a_frame_that_is_cut_or_longer_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = HEADER + b"".join(encode(frame))
    size = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:size], whole + b"x"):
        with pytest.raises(PeerError):
            decode(wrong, 7)


@given(frames(), st.data())
def test_a_frame_with_any_byte_changed_is_read_or_refused(
    frame: Frame, data: st.DataObject
) -> None:
    whole = bytearray(HEADER + b"".join(encode(frame)))
    place = data.draw(st.integers(HEADER_SIZE, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(whole), 7)
    except PeerError:
        return
    for each in found.progress if found is not None else ():
        assert each.sender > 0
        assert max(each.complete, len(each.payloads)) <= each.last


@pytest.mark.parametrize(
    ("sender", "complete", "last", "count"), [(0, 0, 0, 0), (1, 5, 4, 0), (1, 0, 1, 2)]
)
def test_numbers_that_no_member_sends_are_refused(
    sender: int, complete: int, last: int, count: int
) -> None:
    wrong = Progress(sender=sender, complete=complete, last=last, payloads=(b"",) * count)
    body = encode(Frame(version=1, catch_up=False, progress=(wrong,)))
    with pytest.raises(PeerError, match="broadcasts up to"):
        decode(HEADER + b"".join(body), 1)


def test_a_catch_up_that_lacks_broadcasts_is_refused() -> None:
    wrong = Progress(sender=1, complete=1, last=3, payloads=(b"3",))
    body = encode(Frame(version=1, catch_up=True, progress=(wrong,)))
    with pytest.raises(PeerError, match="lacks broadcasts"):
        decode(HEADER + b"".join(body), 1)


@pytest.mark.parametrize("head", [b"\2\0\0\0", b"\1\3\0\0", b"\1\2\1\0"])
def test_a_frame_of_another_format_is_refused(head: bytes) -> None:
    with pytest.raises(PeerError, match="format"):
        decode(HEADER + head, 1)
