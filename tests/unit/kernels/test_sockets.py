"""Link sockets: frames come out as they went in, however they are cut; bad lengths are refused."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels.sockets import (
    LARGE_FRAME_SIZE,
    READ_BUFFER_SIZE,
    LinkReader,
    LinkWriter,
    free_heap_bytes,
    trim_malloc,
)
from tests.patience import PATIENCE_S

FRAME_MAX = 4 << 20


def make(size: int, fill: int = 0) -> bytes:
    return struct.pack("<I", size) + bytes([fill & 255]) * (size - 4)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.integers(48, 400),
            st.integers(LARGE_FRAME_SIZE - 2, LARGE_FRAME_SIZE + 2),
            st.integers(READ_BUFFER_SIZE - 2, 3 * READ_BUFFER_SIZE),
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=6),
)
def test_frames_come_out_as_they_went_in(sizes: list[int], cuts: list[int]) -> None:
    sent = [make(size, i) for i, size in enumerate(sizes)]
    stream = b"".join(sent)
    reader = LinkReader(-1, FRAME_MAX)
    frames: list[bytes] = []
    position = turn = 0
    while position < len(stream):
        cut = cuts[turn % len(cuts)]
        reader.feed(stream[position : position + cut], frames)
        position += cut
        turn += 1
    assert frames == sent
    assert (reader.frames_in, reader.bytes_in) == (len(sent), len(stream))


@pytest.mark.parametrize("length", [0, 47, FRAME_MAX + 1, 2**32 - 1])
def test_a_length_outside_the_bounds_is_refused(length: int) -> None:
    reader = LinkReader(-1, FRAME_MAX)
    with pytest.raises(ValueError, match="link frame"):
        reader.feed(struct.pack("<I", length), [])


def test_lengths_at_the_bounds_are_taken() -> None:
    reader = LinkReader(-1, FRAME_MAX)
    frames: list[bytes] = []
    reader.feed(make(48) + make(FRAME_MAX), frames)
    assert [len(frame) for frame in frames] == [48, FRAME_MAX]


def drain(right: socket.socket, reader: LinkReader, frames: list[bytes]) -> None:
    while select.select([right], [], [], 0)[0]:
        assert reader.read(frames)


def test_a_full_socket_keeps_the_rest_and_its_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    writer = LinkWriter(left.fileno())
    reader = LinkReader(right.fileno(), FRAME_MAX)
    bodies = [make(1_000_000, i) for i in range(5)]
    for body in bodies:
        writer.send(body[:48], (body[48:100], b"", body[100:]))
    assert writer.queued_bytes == 5_000_000
    frames: list[bytes] = []
    assert not writer.flush()
    while not writer.flush():
        drain(right, reader, frames)
    drain(right, reader, frames)
    assert frames == bodies
    assert (writer.queued_bytes, writer.bytes_out, writer.frames_out) == (0, 5_000_000, 5)


def test_urgent_frames_go_ahead_at_a_frame_boundary(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    writer = LinkWriter(left.fileno())
    reader = LinkReader(right.fileno(), FRAME_MAX)
    for i in range(50):
        writer.send(make(100_000, i))
    assert not writer.flush()
    writer.send(make(48, 201), urgent=True)
    writer.send(make(48, 202), urgent=True)
    frames: list[bytes] = []
    while not writer.flush():
        drain(right, reader, frames)
    drain(right, reader, frames)
    order = [frame[10] for frame in frames]
    assert [o for o in order if o < 200] == list(range(50))
    assert order.index(202) == order.index(201) + 1
    assert order.index(201) < 20


def test_many_small_frames_use_more_than_one_call(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    writer = LinkWriter(left.fileno())
    reader = LinkReader(right.fileno(), FRAME_MAX)
    sent = [make(48 + i % 9, i) for i in range(1000)]
    for frame in sent:
        writer.send(frame)
    frames: list[bytes] = []
    while not writer.flush():
        drain(right, reader, frames)
    drain(right, reader, frames)
    assert frames == sent


def test_end_of_stream_and_errors_are_told(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    reader = LinkReader(right.fileno(), FRAME_MAX)
    frames: list[bytes] = []
    assert reader.read(frames)
    left.send(make(60)[:50])
    assert reader.read(frames)
    left.close()
    assert not reader.read(frames)
    assert frames == []
    writer = LinkWriter(right.fileno())
    writer.send(make(48))
    with pytest.raises(OSError, match="sendmsg"):
        writer.flush()
    null = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError, match="recv"):
        LinkReader(null, FRAME_MAX).read(frames)
    os.close(null)


def test_take_hands_out_the_same_bytes() -> None:
    writer = LinkWriter(-1)
    sent = [make(50_000, i) for i in range(20)]
    for frame in sent:
        writer.send(frame[:48], [frame[48:]])
    got = []
    while parts := writer.take(65536):
        got += parts
    assert b"".join(got) == b"".join(sent)
    assert writer.queued_bytes == 0


def test_the_heap_can_be_asked_and_trimmed() -> None:
    trim_malloc()
    assert free_heap_bytes() >= 0


def test_released_code_is_not_resident_and_runs_again() -> None:
    # In a process of its own: others may have released theirs already.
    script = """if True:
        import asyncio, gc, json, re, ssl
        from pathlib import Path

        from convoymq.kernels.sockets import release_code

        def clean_bytes():
            fields = dict(
                line.split()[:2] for line in Path("/proc/self/smaps_rollup").open() if "_C" in line
            )
            return 1024 * (int(fields["Shared_Clean:"]) + int(fields["Private_Clean:"]))

        before = clean_bytes()
        release_code()
        after = clean_bytes()
        gc.collect()
        print(before, after, json.dumps(re.findall("a+", "aab")), ssl.OPENSSL_VERSION[:7])
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    before, after, *rest = done.stdout.split()
    assert int(after) < int(before) / 2
    assert rest == ['["aa"]', "OpenSSL"]
