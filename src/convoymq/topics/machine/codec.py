"""Commands of a physical partition and their outcomes, as bytes of its log and of links.

Both are msgpack arrays of a number and the fields in order (docs/formats/entries-and-frames.md).
Numbers and fields of a released version stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import GenericAlias
from typing import Generic, TypeVar, get_type_hints

import msgspec

from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules import commands as of_partitions
from convoymq.topics.rules.answers import (
    AckAnswer,
    Answer,
    CursorAnswer,
    HandOverAnswer,
    LossAnswer,
    ParkAnswer,
    ProduceAnswer,
    ProducerAnswer,
    RunsAnswer,
    SealAnswer,
)
from convoymq.topics.rules.commands import Command, ProducedRun

Value = TypeVar("Value")

CMD_PARTITION = 22
"""Type of the command in a batch; its `arg` has the number of bytes in the body."""

CMD_PRODUCE = 23
"""Type of the command that says whose messages the session's next ENQUEUE brings, in which runs;
its `arg` has the number of bytes in the body."""

COMMANDS: dict[int, type[Command]] = {
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
OUTCOMES: dict[int, type[Outcome]] = {
    1: Answer,
    2: ProduceAnswer,
    3: ProducerAnswer,
    4: SealAnswer,
    5: HandOverAnswer,
    6: AckAnswer,
    7: ParkAnswer,
    8: LossAnswer,
    9: RunsAnswer,
    10: CursorAnswer,
}

PackedRuns = tuple[int, int, list[ProducedRun]]
"""Producer, epoch, runs."""

_RUNS = msgspec.msgpack.Decoder(PackedRuns)
_HEAD = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


class _Codec(Generic[Value]):
    """Values of numbered classes as bytes."""

    def __init__(self, kinds: Mapping[int, type[Value]]) -> None:
        self._kinds = kinds
        self._numbers = {kind.__name__: number for number, kind in kinds.items()}
        self._fields: dict[int, tuple[str, ...]] = {}
        self._decoders: dict[int, msgspec.msgpack.Decoder[tuple[object, ...]]] = {}
        for number, kind in kinds.items():
            types = get_type_hints(kind)
            self._fields[number] = tuple(types)
            packed = GenericAlias(tuple, tuple(types.values()))
            self._decoders[number] = msgspec.msgpack.Decoder(packed)

    def encode(self, value: Value) -> bytes:
        """Returns the bytes of a value."""
        number = self._numbers[type(value).__name__]
        fields = [getattr(value, name) for name in self._fields[number]]
        return msgspec.msgpack.encode((number, fields))

    def decode(self, data: bytes) -> Value:
        """Returns the value of bytes. Raises ValueError."""
        try:
            number, packed = _HEAD.decode(data)
            return self._kinds[number](*self._decoders[number].decode(packed))
        except (KeyError, msgspec.MsgspecError) as error:
            raise ValueError(f"malformed command or outcome of a partition: {error!r}") from error


_OF_COMMANDS: _Codec[Command] = _Codec(COMMANDS)
_OF_OUTCOMES: _Codec[Outcome] = _Codec(OUTCOMES)


def encode_command(command: Command) -> bytes:
    """Returns the body of a command in the log."""
    return _OF_COMMANDS.encode(command)


def decode_command(data: bytes) -> Command:
    """Returns the command of a body. Raises ValueError."""
    return _OF_COMMANDS.decode(data)


def encode_outcome(outcome: Outcome) -> bytes:
    """Returns the answer to a command as its session gets it."""
    return _OF_OUTCOMES.encode(outcome)


def decode_outcome(data: bytes) -> Outcome:
    """Returns the outcome that was encoded. Raises ValueError."""
    return _OF_OUTCOMES.decode(data)


def encode_runs(producer: int, epoch: int, runs: Sequence[ProducedRun]) -> bytes:
    """Returns the body of a PRODUCE command."""
    return msgspec.msgpack.encode((producer, epoch, runs))


def decode_runs(data: bytes) -> PackedRuns:
    """Returns producer, epoch and runs of a PRODUCE command. Raises ValueError."""
    try:
        producer, epoch, runs = _RUNS.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"malformed runs of a producer: {error}") from error
    if any(run.seq < 1 or run.messages < 1 for run in runs):
        raise ValueError("malformed runs of a producer: sequences count from 1")
    return producer, epoch, runs
