"""Decides what of a topic is kept no longer: sealed partitions, groups, and producers.

| what             | when                                                                          |
|------------------|-------------------------------------------------------------------------------|
| sealed partition | retired when all groups have left it behind; deleted as a whole when its last |
|                  | message is older than `max_age_ms`, or when what follows it holds             |
|                  | `max_bytes` on every way to the newest partitions, or is cut there            |
| group            | expired when nobody was a member for `group_ttl_ms`                           |
| producer         | forgotten when it sent nothing for its time; not while a change runs, whose   |
|                  | targets would begin with another table than their sources had                 |

Open partitions drop segments by themselves, by the same limits. Without limits everything is kept.

Pure: times and sizes are arguments. What is decided by an old time or size is decided again when it
is applied: only retired partitions that no group holds are deleted, only idle groups expire.

Source: ordered topics, sections 1.6 and 12.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from convoymq.topics.rules.group import GroupState
from convoymq.topics.rules.lineage import Lineage, Partition, PartitionState
from convoymq.topics.rules.topic import TopicState

GROUP_TTL_MS = 7 * 24 * 3600 * 1000
PRODUCER_TTL_MS = GROUP_TTL_MS
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is kept of a topic; None: everything."""

    max_age_ms: int | None = None
    max_bytes: int | None = None
    """Of each range of keys."""

    def __bool__(self) -> bool:
        return self.max_age_ms is not None or self.max_bytes is not None


@dataclass(frozen=True, slots=True)
class Stored:
    """Contents of a partition."""

    bytes: int
    last_time_ms: int
    """Of its last message."""
    is_cut: bool = False
    """Messages of it were dropped: what comes before it need not be kept for its length."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Partitions of a topic that go now, and when to look again."""

    deleted: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    """Partitions of which it is not known what they hold."""
    due_ms: int | None = None
    """Time when the next one is too old; None: nothing waits for a time."""
    waits_for_bytes: bool = False
    """More may go when the newest partitions hold more."""


def may_retire(state: TopicState, group_versions: Collection[int]) -> bool:
    """Returns whether a partition is behind all groups, and not recorded so."""
    return bool(state.lineage.retirable(group_versions, state.lost))


def judge(
    state: TopicState,
    group_versions: Collection[int],
    limits: Limits,
    stored: Mapping[int, Stored],
    now_ms: int,
) -> Verdict:
    """Returns what of the retired partitions is deleted.

    Args:
        group_versions: of all groups that are registered and not expired.
        stored: what partitions hold, as far as known. What a sealed one holds may be old.
    """
    lineage = state.lineage
    candidates = lineage.deletable(lambda pid: True, group_versions)
    if not limits or not candidates:
        return Verdict()
    asked: set[int] = set()
    due: list[int] = []
    expired = {pid for pid in candidates if pid in state.lost}
    followed = _Followed(lineage, stored, state.lost)
    for pid in candidates:
        if pid in expired:
            continue
        own = stored.get(pid)
        if limits.max_age_ms is not None and own is None:
            asked.add(pid)
        elif limits.max_age_ms is not None and own is not None:
            # A message that is just as old is kept, as in a stream.
            if own.last_time_ms + limits.max_age_ms < now_ms:
                expired.add(pid)
                continue
            due.append(own.last_time_ms + limits.max_age_ms + 1)
        if limits.max_bytes is not None and followed.bytes_behind(pid) >= limits.max_bytes:
            expired.add(pid)
    deleted = lineage.deletable(expired.__contains__, group_versions)
    waits = limits.max_bytes is not None and len(deleted) < len(candidates)
    unknown = tuple(sorted(asked | followed.unknown))
    return Verdict(deleted, unknown, min(due, default=None), waits)


class _Followed:
    """Bytes that follow a partition, on the way that has the fewest of them."""

    def __init__(
        self, lineage: Lineage, stored: Mapping[int, Stored], lost: Collection[int]
    ) -> None:
        self._lineage = lineage
        self._stored = stored
        self._lost = lost
        self._known: dict[int, int] = {}
        self.unknown: set[int] = set()
        """Partitions that were looked for. They count as empty."""

    def bytes_behind(self, pid: int) -> int:
        """Returns the bytes in what follows a partition."""
        lines = [self._lineage.partition(each) for each in (pid, *self._lineage.descendants(pid))]
        # The newest first: what follows is known then.
        for line in sorted(lines, key=lambda line: line.created_version, reverse=True):
            each, children = line.pid, line.children
            if each not in self._known:
                ways = [self._held(child) + self._known.get(child, 0) for child in children]
                self._known[each] = min(ways, default=0)
        return self._known[pid]

    def _held(self, pid: int) -> int:
        partition = self._lineage.partition(pid)
        if pid in self._lost or partition.is_deleted:
            return 0
        found = self._stored.get(pid)
        if found is None:
            self.unknown.add(pid)
            return 0
        return ENDLESS if found.is_cut else found.bytes


def due_groups(
    groups: Mapping[str, GroupState], ttl_ms: int, now_ms: int
) -> tuple[list[GroupState], int | None]:
    """Returns the groups that expire now, and when the next one will."""
    waiting = [each for each in groups.values() if not each.members and not each.expired]
    due = [each for each in waiting if each.idle_since_ms + ttl_ms <= now_ms]
    later = [each.idle_since_ms + ttl_ms for each in waiting if each not in due]
    return due, min(later, default=None)


def forgets_producers(state: TopicState) -> list[Partition]:
    """Returns the partitions that may forget producers now: those that take messages, and none
    while the topic changes."""
    if state.running is not None or state.left_out or state.sealed_early:
        return []
    partitions = (state.lineage.partition(pid) for pid in state.route.pids)
    return [each for each in partitions if each.state is PartitionState.OPEN]
