# cython: annotation_typing=False
"""Frames between neighbours of a ring (docs/formats/entries-and-frames.md).

A CONTROL frame of kind `ring`: group in `a`, (sender << 32 | receiver) in `c`, version of the
sender's view in `d`. Its body, little-endian:

    u8 format · u8 kind · u16 senders
    for each sender: u32 number · u32 payloads · u64 complete · u64 last
    u32 length of each payload
    the payloads
"""

from __future__ import annotations

from struct import Struct

from convoymq.kernels.link_frames import HEADER_SIZE
from convoymq.model.errors import PeerError
from convoymq.replication.ring.types import Frame, Progress

FORMAT = 1
ACTIVITY = 0
CATCH_UP = 1
QUESTION = 2
"""The right neighbour needs the state. Has no senders."""
KINDS = (ACTIVITY, CATCH_UP, QUESTION)
_HEAD = Struct("<BBH")
_SENDER = Struct("<IIQQ")
_LENGTH_BYTES = 4

QUESTION_BODY = _HEAD.pack(FORMAT, QUESTION, 0)


def encode(frame: Frame) -> list[bytes]:
    """Returns the body in parts: payloads are not copied."""
    kind = CATCH_UP if frame.catch_up else ACTIVITY
    head = bytearray(_HEAD.pack(FORMAT, kind, len(frame.progress)))
    payloads: list[bytes] = []
    for each in frame.progress:
        head += _SENDER.pack(each.sender, len(each.payloads), each.complete, each.last)
        payloads += each.payloads
    for payload in payloads:
        head += len(payload).to_bytes(_LENGTH_BYTES, "little")
    return [bytes(head), *payloads]


def decode(data: bytes, version: int) -> Frame | None:
    """Reads the body of a whole link frame.

    Args:
        version: the view's, from the header.

    Returns:
        None for a question.

    Raises:
        PeerError: no member sends this.
    """
    if len(data) < HEADER_SIZE + _HEAD.size:
        raise PeerError("a frame of a ring is cut short")
    written, kind, count = _HEAD.unpack_from(data, HEADER_SIZE)
    if written != FORMAT or kind not in KINDS or (kind == QUESTION and count):
        raise PeerError(f"a frame of a ring has format {written} and kind {kind}")
    at = HEADER_SIZE + _HEAD.size
    lengths_at = at + count * _SENDER.size
    if lengths_at > len(data):
        raise PeerError("a frame of a ring is cut short")
    senders = [_SENDER.unpack_from(data, at + i * _SENDER.size) for i in range(count)]
    payloads = _payloads(data, lengths_at, sum(sender[1] for sender in senders))
    if kind == QUESTION:
        return None
    progress = []
    taken = 0
    for sender, number, complete, last in senders:
        if not sender or complete > last or number > last:
            raise PeerError(f"a frame of a ring has {number} broadcasts up to {last} of {sender}")
        if kind == CATCH_UP and number and complete + number != last:
            raise PeerError(f"a catch-up frame of a ring lacks broadcasts of {sender}")
        progress.append(
            Progress(
                sender=sender,
                complete=complete,
                last=last,
                payloads=payloads[taken : taken + number],
            )
        )
        taken += number
    return Frame(version=version, catch_up=kind == CATCH_UP, progress=tuple(progress))


def _payloads(data: bytes, lengths_at: int, count: int) -> tuple[bytes, ...]:
    at = lengths_at + count * _LENGTH_BYTES
    if at > len(data):
        raise PeerError("a frame of a ring is cut short")
    found: list[bytes] = []
    for place in range(lengths_at, at, _LENGTH_BYTES):
        end = at + int.from_bytes(data[place : place + _LENGTH_BYTES], "little")
        if end > len(data):
            raise PeerError("a frame of a ring is cut short")
        found.append(data[at:end])
        at = end
    if at != len(data):
        raise PeerError("a frame of a ring is too long")
    return tuple(found)
