"""The refusals of ordered topics: a stable code, a text for a person, and typed fields.

A code never changes its name: clients in other languages compare it. Each protocol edge maps the
codes to its own, as it does with `convoymq.model.errors`. Texts do not name the topic: who knows it
puts it in front.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from convoymq.model.errors import Refused


class Code(Enum):
    """Every answer of a topic."""

    OK = "OK"
    CLOSED = "CLOSED"
    NOT_OPEN = "NOT_OPEN"
    STALE_ROUTE = "STALE_ROUTE"
    WRONG_RANGE = "WRONG_RANGE"
    BAD_HASH = "BAD_HASH"
    NO_KEY = "NO_KEY"
    NOT_LEADER = "NOT_LEADER"
    DUPLICATE = "DUPLICATE"
    """Success for the caller: the message is stored already."""
    OUT_OF_SEQ = "OUT_OF_SEQ"
    PRODUCER_FENCED = "PRODUCER_FENCED"
    LEASE_FENCED = "LEASE_FENCED"
    NOT_VISIBLE = "NOT_VISIBLE"
    NOT_DRAINED = "NOT_DRAINED"
    VERSION_CONFLICT = "VERSION_CONFLICT"
    CHANGE_RUNNING = "CHANGE_RUNNING"
    CHANGE_PHASE = "CHANGE_PHASE"
    SEALED_BY = "SEALED_BY"
    SEAL_CONFLICT = "SEAL_CONFLICT"
    NOT_ADJACENT = "NOT_ADJACENT"
    BAD_CUT = "BAD_CUT"
    BAD_TOPIC = "BAD_TOPIC"
    TOO_MANY_PARTITIONS = "TOO_MANY_PARTITIONS"
    BAD_POSITION = "BAD_POSITION"
    UNKNOWN_PARTITION = "UNKNOWN_PARTITION"
    DATA_EXPIRED = "DATA_EXPIRED"
    STALE_TERM = "STALE_TERM"
    """From a controller that has been replaced."""
    PARK_FULL = "PARK_FULL"
    NOT_PARKED = "NOT_PARKED"
    GROUP_LIVE = "GROUP_LIVE"


class TopicRefused(Refused):
    """An expected no of an ordered topic. Subclasses set `code`."""

    code: ClassVar[Code]


# --- producers -----------------------------------------------------------------------------


class StaleRoute(TopicRefused):
    """The route version is not known here: not yet, or no longer."""

    code = Code.STALE_ROUTE

    def __init__(self, version: int, first: int, latest: int) -> None:
        super().__init__(
            f"route version {version} is not kept: versions {first} to {latest} are known"
        )
        self.version = version
        self.first = first
        self.latest = latest


class NoKey(TopicRefused):
    """The topic takes no message without an order key."""

    code = Code.NO_KEY

    def __init__(self) -> None:
        super().__init__("the message has no order key, and the topic takes no such message")


class ProducerFenced(TopicRefused):
    """A newer session of the same producer exists."""

    code = Code.PRODUCER_FENCED

    def __init__(self, producer: str, epoch: int, current: int) -> None:
        super().__init__(
            f"producer '{producer}' has a newer session: epoch {current}, this one has {epoch}"
        )
        self.producer = producer
        self.epoch = epoch
        self.current = current


# --- groups --------------------------------------------------------------------------------


class VersionConflict(TopicRefused):
    """A step was asked for from a version that is not the current one."""

    code = Code.VERSION_CONFLICT

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(
            f"version {expected} was expected, version {current} is current: read it and try again"
        )
        self.expected = expected
        self.current = current


class GroupLive(TopicRefused):
    """The group has members."""

    code = Code.GROUP_LIVE

    def __init__(self, group: str, members: int) -> None:
        super().__init__(f"group '{group}' has {members} members: stop them first")
        self.group = group
        self.members = members


class NotParked(TopicRefused):
    """The group has no messages of the key parked."""

    code = Code.NOT_PARKED

    def __init__(self, group: str, key: bytes) -> None:
        shown = key.decode("utf-8", "backslashreplace")
        super().__init__(f"group '{group}' has no parked messages with the key '{shown}'")
        self.group = group
        self.key = key


# --- changes -------------------------------------------------------------------------------


class ChangeRunning(TopicRefused):
    """A topic has one change at a time."""

    code = Code.CHANGE_RUNNING

    def __init__(self, running: str) -> None:
        super().__init__(f"change '{running}' is still running, and a topic has one at a time")
        self.running = running


class ChangePhase(TopicRefused):
    """The change is in a phase in which this cannot be done."""

    code = Code.CHANGE_PHASE

    def __init__(self, change_id: str, phase: str, wanted: str) -> None:
        super().__init__(f"change '{change_id}' is in phase {phase}: {wanted}")
        self.change_id = change_id
        self.phase = phase


class SealConflict(TopicRefused):
    """A partition reports another end than it reported before for the same change."""

    code = Code.SEAL_CONFLICT

    def __init__(self, pid: int, recorded: int | None, reported: int | None) -> None:
        super().__init__(
            f"partition {pid} reports that it was closed at offset {reported}, and reported "
            f"{recorded} before"
        )
        self.pid = pid
        self.recorded = recorded
        self.reported = reported


class NotAdjacent(TopicRefused):
    """The sources of a merge are not two or more neighbours."""

    code = Code.NOT_ADJACENT

    def __init__(self, pids: tuple[int, ...]) -> None:
        super().__init__(
            f"partitions {', '.join(map(str, pids)) or '(none)'} cannot be merged: a merge takes "
            "two or more different partitions whose ranges follow each other without a gap"
        )
        self.pids = pids


class BadCut(TopicRefused):
    """The cut points of a split are not inside the range, or not in order."""

    code = Code.BAD_CUT

    def __init__(self, pid: int, lo: int, hi: int, cuts: tuple[int, ...]) -> None:
        given = ", ".join(map(str, cuts)) or "none"
        rule = (
            "it owns one logical partition and cannot be split"
            if hi - lo == 1
            else f"cut points are rising numbers from {lo + 1} to {hi - 1}"
        )
        super().__init__(f"partition {pid} cannot be split at {given}: {rule}")
        self.pid = pid
        self.lo = lo
        self.hi = hi
        self.cuts = cuts


class BadTopic(TopicRefused):
    """The numbers of logical and physical partitions do not make a topic."""

    code = Code.BAD_TOPIC


class TooManyPartitions(TopicRefused):
    """A route version has as many partitions as it may have."""

    code = Code.TOO_MANY_PARTITIONS

    def __init__(self, count: int, most: int) -> None:
        super().__init__(f"{count} partitions are too many: a topic has at most {most} at a time")
        self.count = count
        self.most = most


class UnknownPartition(TopicRefused):
    """No such partition, or not in the version that was asked for."""

    code = Code.UNKNOWN_PARTITION

    def __init__(self, pid: int, version: int | None = None) -> None:
        where = "" if version is None else f" in version {version}"
        super().__init__(f"there is no partition {pid}{where}")
        self.pid = pid
        self.version = version


# --- positions -----------------------------------------------------------------------------


class BadPosition(TopicRefused):
    """A position does not give every logical partition exactly one place."""

    code = Code.BAD_POSITION


class DataExpired(TopicRefused):
    """Retention has deleted what was asked for."""

    code = Code.DATA_EXPIRED

    def __init__(self, pid: int, offset: int, log_start: int | None) -> None:
        kept = "it is deleted" if log_start is None else f"it begins at offset {log_start}"
        super().__init__(f"offset {offset} of partition {pid} is not kept: {kept}")
        self.pid = pid
        self.offset = offset
        self.log_start = log_start
