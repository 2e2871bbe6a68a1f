"""Commands of a physical partition's state machine, as they are logged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.routes import Span

EARLIEST = -1
"""As the start of a cursor: what the log begins with."""
LATEST = -2
"""As the start of a cursor: the end of the log when the cursor is opened."""


@dataclass(frozen=True, slots=True)
class Produce:
    """One message. `seq` 0: its producer has no sequences. `base`: the producer's first
    unacknowledged sequence of the logical partition."""

    producer: int
    epoch: int
    lp: int
    seq: int
    key: bytes
    base: int = 0
    time_ms: int = 0
    source_pos: bytes = b""


class ProducedRun(NamedTuple):
    """Messages of one logical partition with sequences in succession. `base`: as in `Produce`;
    `source_pos`: of the last one."""

    lp: int
    seq: int
    messages: int
    base: int = 0
    source_pos: bytes = b""


@dataclass(frozen=True, slots=True)
class ProduceRuns:
    """Messages of a producer with sequences, in the order of their runs."""

    producer: int
    epoch: int
    runs: tuple[ProducedRun, ...]
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class OpenProducer:
    """Begins a session of a producer and fences its older ones. `epoch` 0: only asks."""

    producer: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ExpireProducers:
    """Forgets what was last used before a time. `before_ms` 0: changes nothing, and only asks."""

    before_ms: int
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """The first entry: the partition takes messages from now on."""

    change_id: str
    version: int
    term: int
    dedup_seed: bytes = b""
    time_floor_ms: int = 0


@dataclass(frozen=True, slots=True)
class Seal:
    """The last entry. `external`: the targets were opened before it, without a seed."""

    change_id: str
    attempt: int
    to_version: int
    targets: tuple[Span, ...]
    term: int
    external: bool = False


@dataclass(frozen=True, slots=True)
class OpenCursor:
    """A group may read from here.

    Args:
        states: what the parents of this partition handed over.
        without: parents that the group skipped, of which there is no state.
        taken: of a partition that the group skipped, ranges (lo, hi) of targets that begin with
            what it handed over. The rest of that is read here after all, and what is parked here is
            handed over no more. None: it was not skipped, or nobody knows yet.
    """

    group: str
    group_epoch: int
    start: int = 0
    states: tuple[bytes, ...] = ()
    without: tuple[int, ...] = ()
    taken: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The owner of the partition within a group; lower epochs are fenced."""

    group: str
    group_epoch: int
    epoch: int
    member: str


@dataclass(frozen=True, slots=True)
class Ack:
    """Offsets that the owner has processed."""

    group: str
    group_epoch: int
    epoch: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AckRanges:
    """Offsets that the owner has processed: first and last of each range, one after the other."""

    group: str
    group_epoch: int
    epoch: int
    ranges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """A failed message, or one behind a parked key (`follow`): copied and acknowledged in one."""

    group: str
    group_epoch: int
    epoch: int
    offset: int
    key: bytes
    lp: int
    message: bytes
    follow: bool


@dataclass(frozen=True, slots=True)
class DoneParked:
    """The owner has processed the head of a parked key, or failed again (`failed`)."""

    group: str
    group_epoch: int
    epoch: int
    key: bytes
    token: OrderToken
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ResumeParked:
    """An operator has a parked key delivered again. `once`: its first message only."""

    group: str
    key: bytes
    once: bool = False


@dataclass(frozen=True, slots=True)
class SkipParked:
    """An operator gives the head of a parked key up."""

    group: str
    key: bytes
    token: OrderToken


@dataclass(frozen=True, slots=True)
class ReplaceParked:
    """An operator gives the head of a parked key another content."""

    group: str
    key: bytes
    token: OrderToken
    message: bytes


@dataclass(frozen=True, slots=True)
class HandOver:
    """A group has drained the partition; its state here moves to the targets."""

    group: str
    group_epoch: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Retention: the log begins at an offset. Groups below it stop."""

    log_start: int


@dataclass(frozen=True, slots=True)
class AcceptLoss:
    """An operator lets a group go on behind data that expired before it was read, or a weak topic
    does. `end`: up to there only, as far as a record says so; -1 = all that has expired.
    `group_epoch` 0: whatever it is."""

    group: str
    end: int = -1
    group_epoch: int = 0


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A group was deleted or has expired."""

    group: str


Command = (
    Produce
    | ProduceRuns
    | OpenProducer
    | ExpireProducers
    | Open
    | Seal
    | OpenCursor
    | Lease
    | Ack
    | AckRanges
    | Park
    | DoneParked
    | ResumeParked
    | SkipParked
    | ReplaceParked
    | HandOver
    | Trim
    | AcceptLoss
    | DropGroup
)
