"""Commands of a physical partition and their outcomes, as bytes of its log and of links.

Both are msgpack arrays of a number and the fields in order (docs/formats/entries-and-frames.md).
Numbers and fields of a released version stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import get_type_hints

import msgspec

from convoymq.topics import commands as of_partitions
from convoymq.topics.answers import (
    AckAnswer,
    Answer,
    HandOverAnswer,
    LossAnswer,
    ParkAnswer,
    ProduceAnswer,
    ProducerAnswer,
    SealAnswer,
)
from convoymq.topics.commands import Command
from convoymq.topics.partition import Outcome

CMD_PARTITION = 22
"""Type of the command in a batch; its `arg` has the number of bytes in the body."""

COMMANDS: dict[int, type] = {
    1: of_partitions.OpenProducer,
    2: of_partitions.ExpireProducers,
    3: of_partitions.Open,
    4: of_partitions.Seal,
    5: of_partitions.OpenCursor,
    6: of_partitions.Lease,
    7: of_partitions.Ack,
    8: of_partitions.Park,
    9: of_partitions.DoneParked,
    10: of_partitions.ResumeParked,
    11: of_partitions.SkipParked,
    12: of_partitions.ReplaceParked,
    13: of_partitions.HandOver,
    14: of_partitions.Trim,
    15: of_partitions.AcceptLoss,
    16: of_partitions.DropGroup,
    17: of_partitions.AckRanges,
}
"""Number -> class. Messages come as ENQUEUE and have no number here."""
OUTCOMES: dict[int, type] = {
    1: Answer,
    2: ProduceAnswer,
    3: ProducerAnswer,
    4: SealAnswer,
    5: HandOverAnswer,
    6: AckAnswer,
    7: ParkAnswer,
    8: LossAnswer,
}

_COMMAND_NUMBERS = {kind: number for number, kind in COMMANDS.items()}
_OUTCOME_NUMBERS = {kind: number for number, kind in OUTCOMES.items()}
_HEAD = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def encode_command(command: Command) -> bytes:
    """Returns the body of a command in the log."""
    return _encoded(_COMMAND_NUMBERS[type(command)], command)


def decode_command(data: bytes) -> Command:
    """Returns the command of a body. Raises ValueError."""
    command: Command = _decoded(COMMANDS, data)
    return command


def encode_outcome(outcome: Outcome) -> bytes:
    """Returns the answer to a command as its session gets it."""
    return _encoded(_OUTCOME_NUMBERS[type(outcome)], outcome)


def decode_outcome(data: bytes) -> Outcome:
    """Returns the outcome that was encoded. Raises ValueError."""
    outcome: Outcome = _decoded(OUTCOMES, data)
    return outcome


def _encoded(number: int, value: object) -> bytes:
    fields = [getattr(value, name) for name in _fields(type(value))]
    return msgspec.msgpack.encode((number, fields))


def _decoded(kinds: dict[int, type], data: bytes) -> object:
    try:
        number, packed = _HEAD.decode(data)
        kind = kinds[number]
        return kind(*_decoder(kind).decode(packed))
    except (KeyError, msgspec.MsgspecError) as error:
        raise ValueError(f"malformed command or outcome of a partition: {error!r}") from error


@cache
def _fields(kind: type) -> dict[str, object]:
    """Name -> type of each field, in order."""
    return get_type_hints(kind)


@cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder[tuple[object, ...]]:
    return msgspec.msgpack.Decoder(tuple[tuple(_fields(kind).values())])
