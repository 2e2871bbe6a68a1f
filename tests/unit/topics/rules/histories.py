"""Random histories of a topic, made by the code under test and by a naive model beside it.

The model knows nothing of ranges: per version and per logical partition it keeps who owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from convoymq.topics.rules import changes, lineage
from convoymq.topics.rules.changes import Change, Kind, Phase, Seal
from convoymq.topics.rules.lineage import Lineage
from convoymq.topics.rules.routes import Route, first_route

LOGICAL_MAX = 12


@dataclass
class Naive:
    """Who owned which logical partition when, and what each partition holds."""

    owners: list[list[int]]
    """By version, by logical partition."""
    messages: dict[int, int] = field(default_factory=dict)
    """By sealed partition, how many messages it got."""

    def chain(self, lp: int) -> list[int]:
        """The owners of a logical partition, the oldest first."""
        return list(dict.fromkeys(owner[lp] for owner in self.owners))

    def lps(self, pid: int) -> set[int]:
        return {lp for owner in self.owners for lp, each in enumerate(owner) if each == pid}

    def before(self, pid: int) -> set[int]:
        """All partitions whose messages come before those of `pid`, over any logical partition of
        any of them."""
        found: set[int] = set()
        waiting = [pid]
        while waiting:
            current = waiting.pop()
            for lp in self.lps(current):
                chain = self.chain(lp)
                new = set(chain[: chain.index(current)]) - found
                found |= new
                waiting += new
        return found

    def pids(self) -> set[int]:
        return {pid for owner in self.owners for pid in owner}

    def versions_of(self, pid: int) -> list[int]:
        return [version for version, owner in enumerate(self.owners) if pid in owner]


@dataclass
class History:
    """A lineage and its model. `routes` and `changes` are what was published."""

    lineage: Lineage
    naive: Naive
    routes: list[Route]
    changes: list[Change] = field(default_factory=list)
    next_pid: int = 0

    @classmethod
    def begin(cls, logical: int, partitions: int) -> History:
        route = first_route(logical, partitions)
        owner = [route.pid_of(lp) for lp in range(logical)]
        return cls(Lineage.first(route), Naive([owner]), [route], next_pid=partitions)

    @property
    def route(self) -> Route:
        return self.routes[-1]

    @property
    def open_pids(self) -> list[int]:
        return list(self.route.pids)

    def plan(self, kind: Kind, pids: Sequence[int], cuts: Sequence[int] = ()) -> Change:
        name = f"c{len(self.changes)}"
        if kind is Kind.SPLIT:
            return changes.plan_split(self.route, pids[0], cuts, self.next_pid, name)
        if kind is Kind.MERGE:
            return changes.plan_merge(self.route, pids, self.next_pid, name)
        return changes.plan_move(self.route, pids[0], self.next_pid, name, kind)

    def split(self, pid: int, *cuts: int, messages: int = 1) -> tuple[int, ...]:
        return self.run(self.plan(Kind.SPLIT, [pid], cuts), [messages])

    def merge(self, *pids: int, messages: int = 1) -> tuple[int, ...]:
        return self.run(self.plan(Kind.MERGE, pids), [messages] * len(pids))

    def move(self, pid: int, messages: int = 1) -> tuple[int, ...]:
        return self.run(self.plan(Kind.MOVE, [pid]), [messages])

    def run(self, change: Change, messages: Iterable[int]) -> tuple[int, ...]:
        """Take a change through all phases; return its targets."""
        change = changes.start(None, self.route, change)
        change = self.up_to_sealing(change)
        for pid, count in zip(change.sources, messages, strict=True):
            if pid not in change.seals:
                change = changes.record_seal(change, pid, Seal(count + 1))
        return self.publish(change)

    def up_to_sealing(self, change: Change) -> Change:
        self.next_pid = max(self.next_pid, 1 + max(span.pid for span in change.targets))
        for span in change.targets:
            change = changes.target_ready(change, span.pid)
        return changes.advance(changes.advance(change, Phase.TARGETS_READY), Phase.SEALING)

    def publish(self, change: Change) -> tuple[int, ...]:
        change = changes.advance(change, Phase.SEALED)
        expected = changes.next_route(self.route, change)
        change = changes.advance(change, Phase.PUBLISHED)
        route = self.lineage.apply(change, published_at=100 * expected.version)
        assert route == expected
        owner = list(self.naive.owners[-1])
        for pid in change.sources:
            close_offset = change.seals[pid].close_offset
            assert close_offset is not None
            self.naive.messages[pid] = close_offset - 1
        for span in change.targets:
            for lp in range(span.lo, span.hi):
                assert owner[lp] in change.sources
                owner[lp] = span.pid
            self.lineage.opened(span.pid)
        self.naive.owners.append(owner)
        self.routes.append(route)
        self.changes.append(changes.advance(change, Phase.DONE))
        return tuple(span.pid for span in change.targets)

    def merge_with_deadline(self, pids: Sequence[int], sealed: Iterable[int], count: int) -> None:
        """Merge, amend when only some sources are sealed, then move those sealed in vain."""
        change = self.up_to_sealing(changes.start(None, self.route, self.plan(Kind.MERGE, pids)))
        for pid in sealed:
            change = changes.record_seal(change, pid, Seal(count + 1))
        change = changes.amend(change, self.route, self.next_pid)
        self.next_pid += 1
        for span in change.targets:
            change = changes.target_ready(change, span.pid)
        self.publish(change)
        for pid, seal in change.left_out.items():
            if seal is not None:
                name = f"c{len(self.changes)}"
                moved = changes.plan_reconcile(self.route, pid, seal, self.next_pid, name)
                self.run(moved, [count])


@st.composite
def histories(draw: st.DrawFn, steps_max: int = 10) -> History:
    """Random splits, merges, moves, rebuckets and amended merges, many of empty partitions."""
    logical = draw(st.integers(1, LOGICAL_MAX))
    history = History.begin(logical, draw(st.integers(1, min(logical, 4))))
    for _ in range(draw(st.integers(0, steps_max))):
        _step(draw, history)
    lineage.check_invariants(history.lineage)
    return history


def _step(draw: st.DrawFn, history: History) -> None:
    count = draw(st.sampled_from((0, 0, 1, 3)))
    spans = history.route.spans
    at = draw(st.integers(0, len(spans) - 1))
    span = spans[at]
    kind = draw(st.sampled_from(("split", "split", "merge", "amended", "move", "rebucket")))
    if kind == "split" and span.width > 1:
        cuts = draw(st.sets(st.integers(span.lo + 1, span.hi - 1), min_size=1, max_size=3))
        history.split(span.pid, *sorted(cuts), messages=count)
    elif kind in ("merge", "amended") and len(spans) > 1:
        at = min(at, len(spans) - 2)
        width = draw(st.integers(2, min(4, len(spans) - at)))
        pids = [each.pid for each in spans[at : at + width]]
        if kind == "merge":
            history.merge(*draw(st.permutations(pids)), messages=count)
        else:
            sealed = draw(st.sets(st.sampled_from(pids), min_size=1, max_size=width - 1))
            history.merge_with_deadline(pids, sorted(sealed), count)
    elif kind == "rebucket":
        history.run(history.plan(Kind.REBUCKET, [span.pid]), [count])
    else:
        history.move(span.pid, messages=count)
