"""Answers of physical partitions: outcomes of commands, decided when they are applied.

Codes are those of `refusals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span


class ParkedEntry(NamedTuple):
    """A copy of a parked message and where it lay."""

    version: int
    offset: int
    pid: int
    message: bytes

    @property
    def token(self) -> OrderToken:
        """The order token of the message."""
        return OrderToken(self.version, self.offset)


@dataclass(frozen=True, slots=True)
class Answer:
    """A code alone, for most commands."""

    code: Code


@dataclass(frozen=True, slots=True)
class ProduceAnswer:
    """To a produce request. `expected` is the sequence that OUT_OF_SEQ waits for."""

    code: Code
    offset: int = -1
    expected: int = 0
    to_version: int = 0
    targets: tuple[Span, ...] = ()


class RunAnswer(NamedTuple):
    """To one run of a produce request. `stored`: so many of its last messages were stored now, the
    first of them at `offset`; `expected`: the next sequence of its logical partition."""

    code: Code
    offset: int = -1
    stored: int = 0
    expected: int = 0


@dataclass(frozen=True, slots=True)
class RunsAnswer:
    """To a produce request with runs, in their order. CLOSED: the targets are those of route
    `to_version`."""

    runs: tuple[RunAnswer, ...]
    to_version: int = 0
    targets: tuple[Span, ...] = ()

    @property
    def code(self) -> Code:
        """Returns the code of the first run that is not stored; OK when there is none."""
        stored = (Code.OK, Code.DUPLICATE)
        return next((run.code for run in self.runs if run.code not in stored), Code.OK)


@dataclass(frozen=True, slots=True)
class SealAnswer:
    """To a seal. `by` is the change that has sealed the partition; `external`: it knows that the
    route went on without it."""

    code: Code
    close_offset: int = -1
    dedup: bytes = b""
    by: str = ""
    external: bool = False


@dataclass(frozen=True, slots=True)
class CursorAnswer:
    """To the opening of a cursor. `without`: parents without whose state it was opened first."""

    code: Code
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandOverAnswer:
    """To a hand-over: what the group's cursors in the targets begin with."""

    code: Code
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class AckAnswer:
    """To an acknowledgement. `drained`: the group has nothing left here."""

    code: Code
    drained: bool = False


@dataclass(frozen=True, slots=True)
class ParkAnswer:
    """To a command on a parked key. `live`: the key is parked no more; `head`: what comes next."""

    code: Code
    live: bool = False
    head: ParkedEntry | None = None
    version: int = 0
    """Of the group's park set, after the command."""


@dataclass(frozen=True, slots=True)
class ProducerAnswer:
    """To a new producer session: (lp, last sequence, last source position) of what is stored, and
    the epoch of the newest session that is known."""

    code: Code
    stored: tuple[tuple[int, int, bytes], ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class GroupView:
    """All that an owner must know before it hands anything out: see `partition.GroupCursor`."""

    acked: tuple[int, ...]
    """A packed cursor."""
    parked: Mapping[bytes, ParkedEntry | None]
    """Parked keys; those that resume with their heads."""
    park_version: int


@dataclass(frozen=True, slots=True)
class LossAnswer:
    """To what gives data up: (group, first offset, end offset) of what was not acknowledged."""

    code: Code
    losses: tuple[tuple[str, int, int], ...] = ()
