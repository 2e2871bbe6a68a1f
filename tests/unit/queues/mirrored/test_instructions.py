"""Payloads of a master's broadcasts."""

from __future__ import annotations

import struct

import msgspec
import pytest

from convoymq.model.errors import PeerError
from convoymq.queues.classic.log import HANDED_OUT, MESSAGES, SETTLED, TIME_TO_LIVE
from convoymq.queues.mirrored.instructions import (
    POSITION_MAX,
    Applied,
    Cut,
    Depth,
    HandedOut,
    Messages,
    Settled,
    Stopping,
    SyncBegin,
    Synced,
    SyncEnd,
    TimeToLive,
    decode,
    encode,
)
from tests.unit.queues.classic.test_log import command

ENQUEUE = command(1)
EVERY = [
    Messages(5, 1_000, ENQUEUE),
    Settled(bytes(16)),
    HandedOut(9, 2),
    Applied(1 << 60, 7),
    Applied(1 << 60, 9, 8),
    Cut(2, 100),
    Depth(0),
    SyncBegin([2, 3]),
    Synced(MESSAGES, 5, 1_000, ENQUEUE),
    SyncEnd(4),
    Stopping(),
    TimeToLive(7, 1_000),
    TimeToLive(9, None),
]


def test_every_instruction_comes_back() -> None:
    assert decode(encode(EVERY)) == EVERY
    assert decode(encode([])) == []


@pytest.mark.parametrize(
    "content",
    [
        None, [[99]], [[]], [[5, 1]], [[MESSAGES, 1, 2, "text"]], [[6, True]], [[6, "5"]],
        [[MESSAGES, -1, 2, b""]], [[HANDED_OUT, -1, 0]], [[8, HANDED_OUT, 5, -1, b""]], [[6, -1]],
        [[12, 5, -1]],
    ],
)  # fmt: skip
def test_nonsense_is_refused(content: object) -> None:
    with pytest.raises(PeerError):
        decode(msgspec.msgpack.encode(content))


def test_a_payload_that_is_cut_off_is_refused() -> None:
    payload = encode(EVERY)
    for length in range(len(payload)):
        with pytest.raises(PeerError):
            decode(payload[:length])


def counted(count: int) -> bytes:
    return ENQUEUE[:24] + struct.pack("<I", count) + ENQUEUE[28:]


def pairs(*positions: int) -> bytes:
    return struct.pack(f"<{len(positions)}Q", *positions)


@pytest.mark.parametrize(
    ("kind", "position", "body"),
    [
        (MESSAGES, 1, b""),
        (MESSAGES, 1, ENQUEUE[:-8]),
        (MESSAGES, 1, ENQUEUE + bytes(8)),
        (MESSAGES, 1, ENQUEUE[:4] + b"\x02" + ENQUEUE[5:]),
        (MESSAGES, 1, counted(0)),
        (MESSAGES, 1, counted(2)),
        (MESSAGES, 1, counted((1 << 32) - 1)),
        (MESSAGES, POSITION_MAX, ENQUEUE),
        (MESSAGES, POSITION_MAX + 1, ENQUEUE),
        (SETTLED, 0, pairs(1)),
        (SETTLED, 0, pairs(1, 2, 4, 3)),
        (SETTLED, 0, pairs(1, POSITION_MAX + 1)),
        (SETTLED, 0, b"12345678" * 2 + b"1"),
        (HANDED_OUT, POSITION_MAX + 1, b""),
        (TIME_TO_LIVE, 1, b""),
        (0, 1, b""),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(kind: int, position: int, body: bytes) -> None:
    """Whether it is new, or of a synchronisation."""
    alone = {
        MESSAGES: [MESSAGES, position, 2, body],
        SETTLED: [SETTLED, body],
        HANDED_OUT: [HANDED_OUT, position, 0],
    }
    for content in filter(None, (alone.get(kind), [8, kind, position, 2, body])):
        with pytest.raises(PeerError):
            decode(msgspec.msgpack.encode([content]))
