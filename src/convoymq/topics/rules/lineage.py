"""The lineage of a topic: all of its partitions, and which came from which.

One line per partition is kept for ever, also of deleted ones: it answers old clients and audits,
and every route version can be told from these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from convoymq.model.errors import check
from convoymq.topics.rules.changes import Change, Kind, Phase, next_route
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import SealConflict, StaleRoute, UnknownPartition
from convoymq.topics.rules.routes import Route, Span

FIRST_USER_OFFSET = 1
"""Offset 0 is the OPEN entry."""


class PartitionState(Enum):
    """The life of a partition; there is no way back."""

    CREATING = "creating"
    OPEN = "open"
    SEALED = "sealed"
    RETIRED = "retired"
    DELETED = "deleted"


CLOSED_STATES = frozenset((PartitionState.SEALED, PartitionState.RETIRED, PartitionState.DELETED))


class Mode(Enum):
    """Rules for how far ahead a group may look (section 6.4)."""

    LINEAR = "linear"
    DAG = "dag"


@dataclass(slots=True)
class Partition:
    """One line of the lineage."""

    pid: int
    lo: int
    hi: int
    created_version: int
    sealed_version: int | None = None
    """The first version without it."""
    open_offset: int = 0
    close_offset: int | None = None
    """Of its CLOSE, the end of its messages; None while open, and while the end is not known."""
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    state: PartitionState = PartitionState.OPEN

    @property
    def is_closed(self) -> bool:
        """Return whether it takes no messages any more."""
        return self.state in CLOSED_STATES

    @property
    def is_deleted(self) -> bool:
        """Return whether its messages are gone."""
        return self.state is PartitionState.DELETED

    def is_behind(self, version: int) -> bool:
        """Return whether a group at a route version has left it behind."""
        return self.sealed_version is not None and self.sealed_version <= version

    def is_in(self, version: int) -> bool:
        """Return whether a route version names it."""
        sealed = self.sealed_version
        return self.created_version <= version and (sealed is None or version < sealed)

    def overlaps(self, lo: int, hi: int) -> bool:
        """Return whether it owns a logical partition from `lo` to `hi` (exclusive)."""
        return self.lo < hi and lo < self.hi

    def token(self, offset: int) -> OrderToken:
        """Return the order token of a message (I13)."""
        return OrderToken(self.created_version, offset)


@dataclass(frozen=True, slots=True)
class Published:
    """One version in the history of routes, beside its ranges."""

    version: int
    change_id: str
    kind: Kind | None
    """None for version 0, the creation."""
    published_at: int
    """ms; decides time-based starts, nothing else."""


@dataclass(slots=True)
class Lineage:
    """All partitions of a topic, by pid, and its newest route."""

    latest: Route
    partitions: dict[int, Partition]
    published: dict[int, Published]
    """By version, from `min_version` on."""
    min_version: int = 0
    """The oldest version that is still described."""
    _created: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By version, the partitions that it brought."""
    _sealed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By version, the partitions that it took away."""

    @classmethod
    def first(cls, route: Route, *, published_at: int = 0) -> Lineage:
        """Return the lineage of a new topic."""
        assert route.version == 0
        partitions = {
            span.pid: Partition(span.pid, span.lo, span.hi, created_version=0)
            for span in route.spans
        }
        published = {0: Published(0, "", None, published_at)}
        return cls(route, partitions, published, _created={0: route.pids})

    # --- growing ---------------------------------------------------------------------------

    def apply(self, change: Change, *, published_at: int = 0) -> Route:
        """Take in a change that is published, and return the new route. Its targets are CREATING
        until `opened`.

        Raises:
            VersionConflict: the change belongs to another version than the newest.
        """
        check(change.phase in (Phase.PUBLISHED, Phase.DONE), f"{change} is not published")
        check(change.is_sealed, f"{change} is published before its sources are sealed")
        route = next_route(self.latest, change)
        for span in change.targets:
            check(span.pid not in self.partitions, f"partition {span.pid} would return")
            self.partitions[span.pid] = Partition(
                span.pid,
                span.lo,
                span.hi,
                created_version=route.version,
                parents=change.sources,
                state=PartitionState.CREATING,
            )
        for pid in change.sources:
            self._seal(self.partitions[pid], change, route.version)
        self._created[route.version] = tuple(span.pid for span in change.targets)
        self._sealed[route.version] = change.sources
        self.published[route.version] = Published(
            route.version, change.change_id, change.kind, published_at
        )
        self.latest = route
        return route

    @staticmethod
    def _seal(source: Partition, change: Change, version: int) -> None:
        assert not source.is_closed, source
        source.state = PartitionState.SEALED
        source.sealed_version = version
        source.close_offset = change.seals[source.pid].close_offset
        source.children = tuple(span.pid for span in change.targets)

    def opened(self, pid: int) -> None:
        """Record that a target has its OPEN entry. Raises UnknownPartition."""
        partition = self.partition(pid)
        if partition.state is PartitionState.CREATING:
            partition.state = PartitionState.OPEN

    def learn_close(self, pid: int, close_offset: int) -> None:
        """Record the end of a partition that was sealed without being asked, when it is known.

        Raises:
            UnknownPartition: there is none.
            SealConflict: another end is recorded.
        """
        partition = self.partition(pid)
        check(partition.is_closed, f"partition {pid} is not sealed")
        if partition.close_offset not in (None, close_offset):
            raise SealConflict(pid, partition.close_offset, close_offset)
        partition.close_offset = close_offset

    # --- looking up ------------------------------------------------------------------------

    def partition(self, pid: int) -> Partition:
        """Return the line of a partition. Raises UnknownPartition."""
        if (found := self.partitions.get(pid)) is None:
            raise UnknownPartition(pid)
        return found

    def route(self, version: int) -> Route:
        """Return a route version that is still described. Raises StaleRoute."""
        if not self.min_version <= version <= self.latest.version:
            raise StaleRoute(version, self.min_version, self.latest.version)
        if version == self.latest.version:
            return self.latest
        spans = (
            Span(each.lo, each.hi, each.pid)
            for each in self.partitions.values()
            if each.is_in(version)
        )
        return Route(version, self.latest.logical, tuple(sorted(spans, key=lambda s: s.lo)))

    def sources(self, version: int) -> tuple[int, ...]:
        """Return the sources of the change from `version` to the next one; none for the newest."""
        return self._sealed.get(version + 1, ())

    def targets(self, version: int) -> tuple[int, ...]:
        """Return the targets of the change from `version` to the next one; none for the newest."""
        return self._created.get(version + 1, ())

    def ancestors(self, pid: int) -> tuple[int, ...]:
        """Return what a group consumes before the partition: parents, their parents and so on, the
        nearest first. Each overlaps the range of a partition that it is a parent of."""
        return tuple(self._reached(self.partition(pid).parents, lambda each: each.parents))

    def descendants(self, pid: int) -> tuple[int, ...]:
        """Return children, their children and so on, the nearest first."""
        return tuple(self._reached(self.partition(pid).children, lambda each: each.children))

    def _reached(
        self, pids: Iterable[int], following: Callable[[Partition], Iterable[int]]
    ) -> Iterator[int]:
        found = dict.fromkeys(pids)
        waiting = list(found)
        for pid in waiting:
            yield pid
            new = [each for each in following(self.partitions[pid]) if each not in found]
            found.update(dict.fromkeys(new))
            waiting += new

    def oldest_first(self) -> list[Partition]:
        """Return all partitions, by version and range."""
        return sorted(self.partitions.values(), key=_age_order)

    # --- retention (section 12) ------------------------------------------------------------

    def first_version(self) -> int:
        """Return where a group begins that wants all that is kept.

        The smallest version with a partition that is not deleted would do as well: the steps from
        there to here wait for deleted partitions only.
        """
        kept = (each for each in self.partitions.values() if not each.is_deleted)
        return min(
            self.latest.version if each.sealed_version is None else each.sealed_version - 1
            for each in kept
        )

    def retirable(
        self, group_versions: Collection[int], lost: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return the sealed partitions that are behind every group, the oldest first. One whose end
        is not known yet is still asked for it, unless it is lost.

        Args:
            group_versions: of all groups that are registered and not expired.
        """
        reached = min(group_versions, default=self.latest.version)
        found = (
            each
            for each in self.partitions.values()
            if each.state is PartitionState.SEALED
            and (each.sealed_version or 0) <= reached
            and (each.close_offset is not None or each.pid in lost)
        )
        return tuple(each.pid for each in sorted(found, key=_age_order))

    def retire(
        self, group_versions: Collection[int], lost: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Record that what is `retirable` is retired, and return it."""
        found = self.retirable(group_versions, lost)
        for pid in found:
            self.partitions[pid].state = PartitionState.RETIRED
        return found

    def deletable(
        self, has_expired: Callable[[int], bool], group_versions: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return the retired partitions that may be deleted, the oldest first.

        A child stays until its parents are gone, otherwise a start from the earliest message would
        begin inside a hole. Of partitions that were merged, the younger ones wait for the older. A
        group that began anew in a retired partition, or before it, holds it.

        Args:
            has_expired: whether the last message of a retired partition is older than is kept.
            group_versions: of all groups that are registered and not expired.
        """
        reached = min(group_versions, default=self.latest.version)
        found: dict[int, None] = {}
        for each in self.oldest_first():
            held = (each.sealed_version or 0) > reached
            if each.state is not PartitionState.RETIRED or held or not has_expired(each.pid):
                continue
            merged_with = {pid for child in each.children for pid in self.partitions[child].parents}
            first = [self.partitions[pid] for pid in (*each.parents, *merged_with)]
            older = [p for p in first if _age_order(p) < _age_order(each)]
            if all(p.is_deleted or p.pid in found for p in older):
                found[each.pid] = None
        return tuple(found)

    def delete(
        self, has_expired: Callable[[int], bool], group_versions: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Record that what is `deletable` is deleted, and return it."""
        found = self.deletable(has_expired, group_versions)
        for pid in found:
            self.partitions[pid].state = PartitionState.DELETED
        return found

    def trim(self, needed: Collection[int]) -> int:
        """Forget versions that nobody needs, and return the oldest one that is still described.
        The lines of partitions stay.

        Args:
            needed: versions of groups, and of the running change.
        """
        version = max(self.min_version, min((self.first_version(), *needed)))
        for old in range(self.min_version, version):
            del self.published[old]
        for index in (self._created, self._sealed):
            for old in [each for each in index if each <= version]:
                del index[old]
        self.min_version = version
        return version

    def merges_before(self, pid: int) -> int:
        """Return how many merges a partition comes from, itself included, as far as they are not
        deleted."""
        lines = (self.partitions[each] for each in (pid, *self.ancestors(pid)))
        return sum(len(each.parents) > 1 and not each.is_deleted for each in lines)


def _age_order(partition: Partition) -> tuple[int, int]:
    return partition.created_version, partition.lo


def check_invariants(lineage: Lineage) -> None:
    """Raises InvariantViolated unless the lines make a history (I1, I2, I5)."""
    partitions: Mapping[int, Partition] = lineage.partitions
    versions = range(lineage.min_version, lineage.latest.version + 1)
    check(sorted(lineage.published) == list(versions), "versions are not consecutive")
    for partition in partitions.values():
        sealed = partition.sealed_version
        check((sealed is not None) == partition.is_closed, f"state and versions of {partition}")
        check(sealed is None or sealed > partition.created_version, f"order of {partition}")
        check(bool(partition.children) == partition.is_closed, f"children of {partition}")
        check(bool(partition.parents) == (partition.created_version > 0), f"parents {partition}")
        for child in map(partitions.__getitem__, partition.children):
            check(partition.pid in child.parents, f"{child} does not know its parent")
            check(child.created_version == sealed, f"{child} begins when {partition} ends")
            check(child.overlaps(partition.lo, partition.hi), f"{child} is no child")
