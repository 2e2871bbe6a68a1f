"""Payloads of a master's broadcasts."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.model.errors import PeerError
from convoymq.queues.classic.log import HANDED_OUT, MESSAGES
from convoymq.queues.mirrored.instructions import (
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

EVERY = [
    Messages(5, 1_000, b"12345678"),
    Settled(bytes(16)),
    HandedOut(9, 2),
    Applied(1 << 60, 7),
    Applied(1 << 60, 9, 8),
    Cut(2, 100),
    Depth(0),
    SyncBegin([2, 3]),
    Synced(MESSAGES, 5, 1_000, b"12345678"),
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
