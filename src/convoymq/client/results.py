"""Results of a client's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.kernels.column_frame import ColumnFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """One queue, as the server that was asked knows it."""

    name: str
    type: str
    group: int
    leader: str | None
    """Name of the leading node; None = nobody leads now."""
    members: tuple[str, ...]
    first: int | None
    """Streams: the first offset that is kept; None where the server does not know."""
    next: int | None
    """Streams: the offset behind the last message, as far as the server knows."""
    bytes: int | None
    """Bodies, in bytes."""
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """Rows, and what there is besides them."""

    frame: ColumnFrame
    first: int
    """Streams: the first offset that is kept; reservations: the oldest unsettled one."""
    high: int
    """Streams: the committed end as the server knows it; reservations: the end of what was asked
    for."""

    @property
    def next(self) -> int:
        """Returns the offset to go on from."""
        return int(self.frame.next)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceResult:
    """Outcome for the rows of one frame; all of them are safe."""

    count: int
    """Rows that were sent."""
    duplicates: int
    """Of these, dropped because their target had them already, summed over targets."""
    unroutable: int
    """Of these, without a queue to go to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembership:
    """Name of a new member of a group, and what it has to know of its topic."""

    member: str
    created: bool
    """The group is new."""
    logical: int
    """Logical partitions of the topic."""
    hash_seed: int
    ttl_ms: int
    """A lease lasts so long from when its heartbeat was sent."""
    margin_ms: int
    """Nothing is begun so long before its end."""
    holds_keys: bool
    """A message waits for the outcome of those of its key before it. Not in weak topics with a
    retry exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSession:
    """State of an ordered topic's producer."""

    epoch: int
    """Number of its newest session; 0: there was none."""
    stored: Mapping[int, tuple[int, bytes]]
    """Logical partition -> last sequence and last source position that are stored."""
