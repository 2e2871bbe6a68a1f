"""Effects of a classic queue as a frame from its home to the node of a session.

The frame's `c` is the session, its `d` the length of the head: a msgpack list, the effect without
session and block. Behind it DELIVER and GOT have an ENQUEUE command with just their records.
"""

from __future__ import annotations

import msgspec

from convoymq.kernels.batch import slice_records
from convoymq.kernels.link_frames import HEADER_SIZE
from convoymq.model.errors import PeerError
from convoymq.queues.classic.machine import DELIVER, GOT, Effect


def encode_effect(effect: Effect) -> tuple[bytes, bytes]:
    """Returns (head, block) of an effect; its messages are copied."""
    kind = effect[0]
    block = b""
    head: list[object]
    if kind == DELIVER:
        _, _, consumer, first_id, (data, command), first, count, *said = effect
        block = slice_records(data, command, first, count)
        head = [kind, consumer, first_id, count, *said]
    elif kind == GOT:
        _, _, place, index, number, acquired_count, ready = effect
        if place is not None:
            block = slice_records(place[0], place[1], index, 1)
        head = [kind, number, acquired_count, ready]
    else:
        head = [kind, *effect[2:]]
    return msgspec.msgpack.encode(head), block


def decode_effect(data: bytes, session: int, head_length: int) -> Effect:
    """Returns the effect of a frame. Raises PeerError."""
    middle = HEADER_SIZE + head_length
    block = data[middle:]
    try:
        kind, *rest = msgspec.msgpack.decode(memoryview(data)[HEADER_SIZE:middle])
        if kind == DELIVER:
            consumer, first_id, count, *said = rest
            return (kind, session, consumer, first_id, (block, 0), 0, count, *said)
        if kind == GOT:
            number, acquired_count, ready = rest
            place = (block, 0) if block else None
            return (kind, session, place, 0, number, acquired_count, ready)
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise PeerError(f"malformed effect of a classic queue: {error}") from error
    return (kind, session, *rest)
