"""Changes of a route: planned, taken through their phases, and published as the next version.

    PREPARED -> TARGETS_READY -> SEALING -> SEALED -> PUBLISHED -> DONE
        |             |
        +-------------+-> ABORTED           from SEALING on a change only goes forward

A change replaces neighbouring source partitions by targets of the same range (I3, I4):

    kind       sources -> targets
    SPLIT      1 -> 2 or more
    MERGE      2 or more -> 1
    MOVE       1 -> 1, on another server
    REBUCKET   1 -> 1, on the same server

The functions return new values; the metadata group records each of them. All may be repeated: what
is recorded already changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from convoymq.model.errors import check
from convoymq.topics.rules.refusals import (
    BadCut,
    ChangePhase,
    ChangeRunning,
    NotAdjacent,
    SealConflict,
    UnknownPartition,
    VersionConflict,
)
from convoymq.topics.rules.routes import Route, Span, check_invariants, covers


class Kind(Enum):
    """The kinds of changes, by numbers of sources and targets."""

    SPLIT = "split"
    MERGE = "merge"
    MOVE = "move"
    REBUCKET = "rebucket"


class Phase(Enum):
    """The phases of a change."""

    PREPARED = "prepared"
    TARGETS_READY = "targets_ready"
    SEALING = "sealing"
    SEALED = "sealed"
    PUBLISHED = "published"
    DONE = "done"
    ABORTED = "aborted"


FOLLOWS: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREPARED: frozenset((Phase.TARGETS_READY, Phase.ABORTED)),
    Phase.TARGETS_READY: frozenset((Phase.SEALING, Phase.ABORTED)),
    Phase.SEALING: frozenset((Phase.SEALED,)),
    Phase.SEALED: frozenset((Phase.PUBLISHED,)),
    Phase.PUBLISHED: frozenset((Phase.DONE,)),
    Phase.DONE: frozenset(),
    Phase.ABORTED: frozenset(),
}
"""The phases that may follow a phase."""
FINISHED = frozenset((Phase.DONE, Phase.ABORTED))
ONE_TO_ONE = frozenset((Kind.MOVE, Kind.REBUCKET))
REPLACEABLE = frozenset((Phase.PREPARED, Phase.SEALING))
"""Phases in which a target may be replaced by another: it waits for targets to be ready."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The answer of a source that was sealed."""

    close_offset: int | None
    """Of its CLOSE; None when it was sealed without being asked, and its end is not known yet."""
    dedup: bytes = b""
    """State of duplicate detection at that point; the targets start with it."""


@dataclass(frozen=True, slots=True)
class Change:
    """The record of a change. `sources` and `targets` are in the order of their ranges."""

    change_id: str
    base_version: int
    kind: Kind
    sources: tuple[int, ...]
    targets: tuple[Span, ...]
    attempt: int = 1
    phase: Phase = Phase.PREPARED
    seals: Mapping[int, Seal] = field(default_factory=dict)
    ready: frozenset[int] = frozenset()
    """Targets that exist, and refuse messages."""
    left_out: Mapping[int, Seal | None] = field(default_factory=dict)
    """Sources that an amendment left out, with their seals. One that is sealed is moved next."""

    @property
    def next_version(self) -> int:
        """The version that this change publishes."""
        return self.base_version + 1

    @property
    def is_finished(self) -> bool:
        """Return whether the next change may start."""
        return self.phase in FINISHED

    @property
    def is_sealed(self) -> bool:
        """Return whether all sources are sealed."""
        return all(pid in self.seals for pid in self.sources)

    @property
    def is_ready(self) -> bool:
        """Return whether all targets exist."""
        return all(span.pid in self.ready for span in self.targets)


# --- plans ---------------------------------------------------------------------------------


def plan_split(
    route: Route, pid: int, cuts: Sequence[int], next_pid: int, change_id: str
) -> Change:
    """Return the change that splits a partition at `cuts`, which begin the further targets.

    Raises:
        UnknownPartition: `pid` is not in the route.
        BadCut: `cuts` are not rising, or not inside the range.
    """
    span = route.span_of(pid)
    edges = (span.lo, *cuts, span.hi)
    if not cuts or any(low >= high for low, high in itertools.pairwise(edges)):
        raise BadCut(pid, span.lo, span.hi, tuple(cuts))
    targets = tuple(
        Span(low, high, next_pid + number)
        for number, (low, high) in enumerate(itertools.pairwise(edges))
    )
    return _planned(route, Kind.SPLIT, (pid,), targets, change_id)


def plan_merge(route: Route, pids: Sequence[int], next_pid: int, change_id: str) -> Change:
    """Return the change that merges neighbours, given in any order.

    Raises:
        UnknownPartition: one is not in the route.
        NotAdjacent: they are not two or more different neighbours.
    """
    spans = sorted((route.span_of(pid) for pid in pids), key=lambda span: span.lo)
    if len(spans) < 2 or not covers(spans, spans[0].lo, spans[-1].hi):
        raise NotAdjacent(tuple(pids))
    target = Span(spans[0].lo, spans[-1].hi, next_pid)
    return _planned(route, Kind.MERGE, tuple(span.pid for span in spans), (target,), change_id)


def plan_move(
    route: Route, pid: int, next_pid: int, change_id: str, kind: Kind = Kind.MOVE
) -> Change:
    """Return the change that moves a partition, or rebuckets it. Raises UnknownPartition."""
    assert kind in ONE_TO_ONE, kind
    span = route.span_of(pid)
    return _planned(route, kind, (pid,), (Span(span.lo, span.hi, next_pid),), change_id)


def plan_reconcile(route: Route, pid: int, seal: Seal, next_pid: int, change_id: str) -> Change:
    """Return the MOVE of a partition of the newest version that is sealed already, by a change that
    left it out or without being asked. Its CLOSE stands. Raises UnknownPartition."""
    return replace(plan_move(route, pid, next_pid, change_id), seals={pid: seal})


def _planned(
    route: Route, kind: Kind, sources: tuple[int, ...], targets: tuple[Span, ...], change_id: str
) -> Change:
    change = Change(change_id, route.version, kind, sources, targets)
    check_change(route, change)
    return change


def check_change(route: Route, change: Change) -> None:
    """Raises InvariantViolated unless the change fits the route (I3, I4) and brings new pids."""
    spans = [route.span_of(pid) for pid in change.sources]
    counts = len(change.sources), len(change.targets)
    fits = {
        Kind.SPLIT: counts[0] == 1 and counts[1] >= 2,
        Kind.MERGE: counts[0] >= 2 and counts[1] == 1,
        Kind.MOVE: counts == (1, 1),
        Kind.REBUCKET: counts == (1, 1),
    }[change.kind]
    check(fits, f"a {change.kind.value} of {counts[0]} partitions into {counts[1]}")
    lo, hi = spans[0].lo, spans[-1].hi
    check(covers(spans, lo, hi), f"the sources of change {change} are not neighbours")
    check(covers(change.targets, lo, hi), f"the targets of change {change} are not its sources")
    pids = {span.pid for span in change.targets}
    check(len(pids) == counts[1], f"change {change} gives a partition number twice")
    check(pids.isdisjoint(route.pids), f"change {change} uses a partition number again")


# --- the record ----------------------------------------------------------------------------


def start(running: Change | None, route: Route, planned: Change) -> Change:
    """Return the change to record. The same one, when it is running already: admins repeat
    requests whose answer was lost.

    Raises:
        ChangeRunning: another one runs.
        VersionConflict: it was planned on another version than the newest.
    """
    if running is not None and running.change_id == planned.change_id:
        return running
    if running is not None and not running.is_finished:
        raise ChangeRunning(running.change_id)
    if planned.base_version != route.version:
        raise VersionConflict(planned.base_version, route.version)
    check_change(route, planned)
    return planned


def advance(change: Change, phase: Phase) -> Change:
    """Return the change in its next phase; as it is, if it is there.

    Raises:
        ChangePhase: `phase` does not follow, or something it needs is missing.
    """
    if change.phase is phase:
        return change
    if phase not in FOLLOWS[change.phase]:
        raise ChangePhase(
            change.change_id, change.phase.value, f"phase {phase.value} does not follow"
        )
    needs_targets = phase in (Phase.TARGETS_READY, Phase.SEALED)
    if needs_targets and not change.is_ready:
        raise ChangePhase(change.change_id, change.phase.value, "not all of its targets exist")
    if phase is Phase.SEALED and not change.is_sealed:
        raise ChangePhase(change.change_id, change.phase.value, "not all of its sources are sealed")
    return replace(change, phase=phase)


def abort(change: Change) -> Change:
    """Return the change aborted. Its targets are to be deleted, their numbers are used up.

    Raises:
        ChangePhase: sources may be sealed already.
    """
    if change.phase is not Phase.ABORTED and Phase.ABORTED not in FOLLOWS[change.phase]:
        raise ChangePhase(change.change_id, change.phase.value, "it can only go forward")
    return replace(change, phase=Phase.ABORTED)


def target_ready(change: Change, pid: int) -> Change:
    """Return the change with one more target that exists. Raises UnknownPartition."""
    if all(span.pid != pid for span in change.targets):
        raise UnknownPartition(pid, change.next_version)
    return replace(change, ready=change.ready | {pid})


def replace_target(change: Change, pid: int, new_pid: int) -> Change:
    """Return the change with another partition in place of a target whose server died.

    Raises:
        UnknownPartition: `pid` is not a target.
        ChangePhase: targets are settled in this phase.
    """
    if all(span.pid != pid for span in change.targets):
        raise UnknownPartition(pid, change.next_version)
    if change.phase not in REPLACEABLE:
        raise ChangePhase(change.change_id, change.phase.value, "its targets are settled")
    targets = tuple(
        replace(span, pid=new_pid) if span.pid == pid else span for span in change.targets
    )
    return replace(change, targets=targets, ready=change.ready - {pid})


def record_seal(change: Change, pid: int, seal: Seal) -> Change:
    """Return the change with the answer of a source, also of one that was left out.

    Raises:
        UnknownPartition: `pid` is not, and was not, a source.
        SealConflict: it answered otherwise before.
        ChangePhase: nobody was asked to seal yet.
    """
    if pid not in change.sources and pid not in change.left_out:
        raise UnknownPartition(pid, change.base_version)
    recorded = change.seals.get(pid) or change.left_out.get(pid)
    if recorded == seal:
        return change
    if recorded is not None:
        raise SealConflict(pid, recorded.close_offset, seal.close_offset)
    if change.phase in (Phase.PREPARED, Phase.TARGETS_READY, Phase.ABORTED):
        raise ChangePhase(change.change_id, change.phase.value, "its sources are not sealed")
    if pid in change.left_out:
        return replace(change, left_out={**change.left_out, pid: seal})
    return replace(change, seals={**change.seals, pid: seal})


def amend(change: Change, route: Route, next_pid: int) -> Change:
    """Return a merge whose deadline passed, without the sources that could not be sealed.

    What is left is the longest run of sealed neighbours: a MOVE if it is one partition, else a
    smaller MERGE. Its target has another range, and so is another partition (I5); it is to be
    created, then the change goes on. Targets given up are to be deleted.

    Raises:
        ChangePhase: the change is no merge in SEALING with sealed and unsealed sources.
    """
    sealed = [pid for pid in change.sources if pid in change.seals]
    if change.kind is not Kind.MERGE or change.phase is not Phase.SEALING:
        raise ChangePhase(change.change_id, change.phase.value, "only a merge is amended, then")
    if not sealed or len(sealed) == len(change.sources):
        raise ChangePhase(
            change.change_id, change.phase.value, "either all or none of its sources are sealed"
        )
    kept = _longest_run([route.span_of(pid) for pid in sealed])
    sources = tuple(span.pid for span in kept)
    amended = replace(
        change,
        kind=Kind.MOVE if len(kept) == 1 else Kind.MERGE,
        sources=sources,
        targets=(Span(kept[0].lo, kept[-1].hi, next_pid),),
        attempt=change.attempt + 1,
        seals={pid: change.seals[pid] for pid in sources},
        ready=frozenset(),
        left_out={
            **change.left_out,
            **{pid: change.seals.get(pid) for pid in change.sources if pid not in sources},
        },
    )
    check_change(route, amended)
    return amended


def _longest_run(spans: Sequence[Span]) -> list[Span]:
    """Return the neighbours that own the most logical partitions; the first such ones."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].hi == span.lo:
            runs[-1].append(span)
        else:
            runs.append([span])
    return max(runs, key=lambda run: (run[-1].hi - run[0].lo, -run[0].lo))


# --- publishing ----------------------------------------------------------------------------


def next_route(route: Route, change: Change) -> Route:
    """Return the version that follows. Raises VersionConflict."""
    if change.base_version != route.version:
        raise VersionConflict(change.base_version, route.version)
    check_change(route, change)
    kept = [span for span in route.spans if span.pid not in change.sources]
    spans = tuple(sorted((*kept, *change.targets), key=lambda span: span.lo))
    following = Route(route.version + 1, route.logical, spans)
    check_invariants(following)
    return following
