"""Types of a broker group's replication: its log, settings, verdicts, and what members exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes
from convoymq.replication.group.stream import BLOCK_BYTES_MAX

MASTER_ID = 0


class Log(Protocol):
    """A commit log: bytes at physical offsets, equal on all members."""

    @property
    def min_offset(self) -> int:
        """Returns where it begins."""

    @property
    def max_offset(self) -> int:
        """Returns where it ends; equal to `min_offset` when it is empty."""

    @property
    def flushed(self) -> int:
        """Returns up to where it is durable."""

    @property
    def stored(self) -> int:
        """Returns up to where its own readers may see it: `flushed` with SYNC_FLUSH."""

    @property
    def file_bytes(self) -> int:
        """Returns the size of one of its files."""

    def read_raw(self, offset: int, limit: int) -> memoryview:
        """Returns up to `limit` bytes from an offset on, fewer as suits; empty only at the end."""

    def append_raw(self, offset: int, block: bytes | memoryview) -> None:
        """Appends bytes at its end. An empty log begins at any offset."""

    def truncate(self, offset: int) -> None:
        """Ends the log at an offset, durably."""

    def record_before(self, offset: int) -> tuple[int, int] | None:
        """Returns start and end of the last message that ends at an offset or before it."""

    def crc32c(self, start: int, end: int) -> int:
        """Returns the checksum of a range that it has whole."""


class Verdict(Enum):
    """Outcome of a send, as far as other replicas count."""

    OK = "ok"
    SLAVE_TIMEOUT = "not confirmed in time"
    NOT_ENOUGH = "not enough replicas are in sync"
    NOT_ONLINE = "this master has not compared its log with enough slaves"


class SlaveState(Enum):
    """State of a slave's link, as RocketMQ names it."""

    READY = "READY"
    """Connecting, or waiting until it may."""
    TRANSFER = "TRANSFER"
    SUSPEND = "SUSPEND"
    """Stopped: an operator has to say which of two logs counts."""
    SHUTDOWN = "SHUTDOWN"
    """Following nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings(Section):
    """Copies of messages, and the links between a master and its slaves."""

    in_sync: int = key(
        "inSyncReplicas", 1, "Copies of an acknowledged message, the master's among them. With "
        "SYNC_MASTER and 2 or more none is lost with the master.", low=1, high=16,
    )  # fmt: skip
    in_sync_min: int = key(
        "minInSyncReplicas", 1, "As few copies are enough while slaves are away, with "
        "`enableAutoInSyncReplicas`. Fewer than 2: acknowledged messages may be lost then.",
        low=1, high=16,
    )  # fmt: skip
    auto: bool = key(
        "enableAutoInSyncReplicas", False, "Messages need as many copies as there are replicas in "
        "sync, between the two numbers above.",
    )  # fmt: skip
    gap_bytes_max: int = key(
        "haMaxGapNotInSync", 256 << 20, "A slave that is further behind is not in sync.",
        parse=parse_bytes, low=1, high=1 << 40,
    )  # fmt: skip
    block_bytes_max: int = key(
        "haTransferBatchSize", 32 << 10, "Size of a block for RocketMQ's slaves.",
        parse=parse_bytes, low=1024, high=BLOCK_BYTES_MAX,
    )  # fmt: skip
    heartbeat_ms: int = key(
        "haSendHeartbeatInterval", 5000, "Time between two signs of life on a link on which "
        "nothing else is sent.", unit="ms", low=10,
    )  # fmt: skip
    silence_ms: int = key(
        "haHousekeepingInterval", 20_000, "A link on which nothing arrives for so long is closed.",
        unit="ms", low=50,
    )  # fmt: skip
    # The rest is said by other parts of a broker's configuration.
    replicas: int = 1
    """`totalReplicas`."""
    is_synchronous: bool = True
    """`brokerRole` is SYNC_MASTER: sends wait for slaves."""
    refuses: bool = True
    """`enableSlaveActingMaster`: sends are refused while too few replicas are in sync."""
    flushes: bool = False
    """`flushDiskType` is SYNC_FLUSH: a slave reports what its disk has."""
    timeout_ms: int = 3_000
    """`slaveTimeout`."""
    retry_ms: int = 5_000
    """A slave waits so long after an error, as RocketMQ's do."""
    wait_ms: int = 500
    """A slave waits so long for a master that may yet fetch what it lacks."""

    def check(self) -> None:
        """See `Section`."""
        if self.auto and self.in_sync_min > self.in_sync:
            raise ValueError("minInSyncReplicas must not be larger than inSyncReplicas")

    @property
    def copies_min(self) -> int:
        """Returns how many copies every acknowledged message has, the master's among them."""
        if not self.is_synchronous:
            return 1
        return min(self.in_sync, self.in_sync_min) if self.auto else self.in_sync

    @property
    def slaves_to_compare(self) -> int:
        """Returns how many slaves together have every acknowledged message, whichever they are."""
        others = max(self.replicas, self.in_sync) - 1
        return min(others, others + 2 - self.copies_min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One run of a master that takes writes: a message of a later one lies behind what every
    earlier one had acknowledged, if the run is *proven*."""

    number: int
    begin: int
    """Offset of its first message."""
    is_proven: bool
    """All that was acknowledged before is in the log that it began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Question to another member: what has it, and the checksum of a range of its log."""

    start: int
    end: int
    """Equal to `start`: no checksum is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Question for a part of another member's log, answered by its bytes."""

    offset: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Answer to an `Ask`."""

    min_offset: int
    max_offset: int
    """End of its last whole message."""
    member: int
    """Broker id of who answers."""
    session: int
    """Number of the run of its process; it changes when its log is cut, too."""
    takes_writes: bool
    """A master whose life has begun."""
    lives: tuple[Life, ...]
    checksum: int | None
    """None: its log does not have the range."""
