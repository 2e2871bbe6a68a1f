# cython: annotation_typing=False
"""Instructions of a master to its mirrors: what one broadcast on the ring says.

A payload is a msgpack list of lists, each of which begins with its kind. A payload without
instructions asks mirrors to say how far they are. Positions are those of
`queues/classic/machine.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from convoymq.kernels.classic_records import level_of
from convoymq.model.errors import PeerError
from convoymq.queues.classic.log import HANDED_OUT, MESSAGES, SETTLED
from convoymq.queues.classic.notes import NOTES_MAX, unpack_note

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number or a time: mirrors write them to their logs."""
POSITION_MAX = 1 << 62
"""No queue comes so far. A mirror that believed a higher one could take no message as a master."""
Position: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]


class Messages(msgspec.Struct, array_like=True, tag=MESSAGES):
    """A record of the master's log."""

    position: Position
    time_ms: Number
    command: bytes


class Settled(msgspec.Struct, array_like=True, tag=SETTLED):
    """A record of the master's log."""

    pairs: bytes
    """Packed u64 positions (first, last, …)."""


class HandedOut(msgspec.Struct, array_like=True, tag=HANDED_OUT):
    """A record of the master's log."""

    position: Position
    level: Number


class Applied(msgspec.Struct, array_like=True, tag=4):
    """The master has done a session's commands up to `seq`."""

    session: Number
    seq: Number
    refused: Number = 0
    """The last of them whose messages the queue refused; 0: none."""


class Cut(msgspec.Struct, array_like=True, tag=5):
    """A mirror takes part from here on."""

    member: Number
    depth: Number


class Depth(msgspec.Struct, array_like=True, tag=6):
    """The master has so many messages at this place."""

    depth: Number


class SyncBegin(msgspec.Struct, array_like=True, tag=7):
    """Some mirrors get the records of the master's log as well."""

    members: list[int]


class Synced(msgspec.Struct, array_like=True, tag=8):
    """A record of the master's log, in its order."""

    kind: Annotated[int, msgspec.Meta(ge=MESSAGES, le=HANDED_OUT)]
    position: Position
    time_ms: Number
    body: bytes


class SyncEnd(msgspec.Struct, array_like=True, tag=9):
    """The log has ended, or the synchronisation was cancelled."""

    depth: Number


class Stopping(msgspec.Struct, array_like=True, tag=10):
    """The master's node is being stopped."""


class Serves(msgspec.Struct, array_like=True, tag=11):
    """The queue has had consumers."""

    session: Number
    """Of the single active consumer; 0: there is none."""
    number: Number


class TimeToLive(msgspec.Struct, array_like=True, tag=12):
    """Messages from a position on have the queue's time of so many ms; None: no limit."""

    position: Position
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None


class Noted(msgspec.Struct, array_like=True, tag=13):
    """A record of the master's log: what consumers have said of messages."""

    first: Position
    last: Position
    note: bytes


Instruction: TypeAlias = (
    Messages
    | Settled
    | HandedOut
    | Applied
    | Cut
    | Depth
    | SyncBegin
    | Synced
    | SyncEnd
    | Stopping
    | Serves
    | TimeToLive
    | Noted
)
_DECODER = msgspec.msgpack.Decoder(list[Instruction])
_ENCODER = msgspec.msgpack.Encoder()


def encode(instructions: Sequence[Instruction]) -> bytes:
    """Returns the payload of a broadcast."""
    return _ENCODER.encode(instructions)


def decode(payload: bytes) -> list[Instruction]:
    """Returns the instructions of a broadcast, whose records are whole. Raises PeerError."""
    try:
        found = _DECODER.decode(payload)
        for each in found:
            match each:
                case Messages(position, _, body) | Synced(1, position, _, body):
                    _check_messages(position, body)
                case Settled(body) | Synced(2, _, _, body):
                    _check_pairs(body)
                case Noted(first, last, note):
                    if len(note) % 8 or last - first >= NOTES_MAX:
                        raise ValueError("a note is cut off, or of too many messages")
                    unpack_note(note)
    except (msgspec.DecodeError, ValueError) as error:
        raise PeerError(f"malformed instructions of a master: {error}") from error
    return found


def _check_messages(position: int, command: bytes) -> None:
    """Raises ValueError when the records of an ENQUEUE command are not all in it, or there are
    none."""
    if int.from_bytes(command[:4], "little") != len(command) or len(command) % 8:
        raise ValueError("messages are cut off")
    level_of(command, 0, 0)
    if position + int.from_bytes(command[24:28], "little") > POSITION_MAX:
        raise ValueError("messages have no position")


def _check_pairs(pairs: bytes) -> None:
    if len(pairs) % 16:
        raise ValueError("settled positions are cut off")
    for first, last in struct.iter_unpack("<QQ", pairs):
        if not first <= last <= POSITION_MAX:
            raise ValueError("settled positions are upside down")
