"""Assignment: which member of a group owns which partition (section 6.2).

Each partition has one owner. Whoever has a partition keeps it; a child goes to an owner of one of
its parents, so that no lease changes hands; the rest goes to whoever has least to do. After that,
partitions move only for balance:

- the load of no two members differs by more than the heaviest partition, and
- no member is idle while another has two partitions.

Without rates every partition weighs the same, and the numbers of partitions differ by one at most.
The result depends on the arguments alone, and given as `previous` it comes out again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from convoymq.topics.rules.routes import Span

BASE_SHARE = 0.1
"""Weight of a partition at rest, in shares of the mean rate: it costs its owner something."""


def assign(
    spans: Iterable[Span],
    members: Collection[str],
    previous: Mapping[int, str] | None = None,
    parents_owner: Mapping[int, Sequence[str]] | None = None,
    rates: Mapping[int, float] | None = None,
) -> dict[int, str]:
    """Return the owner of each partition, in the order of their ranges; none without members.

    Args:
        spans: the partitions of the group's version.
        members: of the group.
        previous: the owners until now. Members that left, and partitions that are gone, may be in
            it.
        parents_owner: of new partitions, who owned their parents.
        rates: of partitions, in any unit, as far as they are known.

    Cost: O(n m + n k), with n partitions, m members, and k partitions that move for balance.
    """
    ordered = sorted(spans, key=lambda span: span.lo)
    if not members:
        return {}
    work = _Work(_weights(ordered, rates or {}), sorted(set(members)))
    pids = [span.pid for span in ordered]
    kept = {pid: (previous or {}).get(pid, "") for pid in pids}
    for pid in pids:
        if kept[pid] in work.owned:
            work.give(pid, kept[pid])
    rest = [pid for pid in pids if kept[pid] not in work.owned]
    children = [pid for pid in rest if (parents_owner or {}).get(pid)]
    for pid in children:
        work.give_child(pid, (parents_owner or {})[pid])
    for pid in sorted(rest, key=lambda pid: -work.weights[pid]):
        if pid not in work.owner:
            work.give(pid, work.least())
    work.balance()
    return {pid: work.owner[pid] for pid in pids}


def _weights(spans: Sequence[Span], rates: Mapping[int, float]) -> dict[int, float]:
    """Return what partitions weigh. One without a rate weighs as the mean."""
    known = [rates[span.pid] for span in spans if span.pid in rates]
    mean = sum(known) / len(known) if known else 0.0
    if mean <= 0.0:
        return {span.pid: 1.0 for span in spans}
    return {span.pid: rates.get(span.pid, mean) + BASE_SHARE * mean for span in spans}


class _Work:
    """An assignment in the making."""

    __slots__ = ("heaviest", "load", "owned", "owner", "slack", "weights")

    def __init__(self, weights: Mapping[int, float], members: Iterable[str]) -> None:
        self.weights = weights
        self.owner: dict[int, str] = {}
        self.owned: dict[str, list[int]] = {member: [] for member in members}
        self.load = dict.fromkeys(self.owned, 0.0)
        self.heaviest = max(weights.values(), default=0.0)
        self.slack = self.heaviest * 1e-6  # sums of floats are not exact

    def give(self, pid: int, member: str) -> None:
        assert pid not in self.owner
        self.owner[pid] = member
        self.owned[member].append(pid)
        self.load[member] += self.weights[pid]

    def give_child(self, pid: int, owners: Iterable[str]) -> None:
        """Give a child to the owner of a parent who has least to do, unless that breaks the
        balance."""
        known = [member for member in owners if member in self.owned]
        if not known:
            return
        member = min(known, key=self._rank)
        others = [load for each, load in self.load.items() if each != member]
        load = self.load[member] + self.weights[pid]
        if load - min(others, default=load) <= self.heaviest + self.slack:
            self.give(pid, member)

    def least(self) -> str:
        return min(self.owned, key=self._rank)

    def _rank(self, member: str) -> tuple[float, int, str]:
        return self.load[member], len(self.owned[member]), member

    def balance(self) -> None:
        """Move partitions until the bounds of this module hold. Every move makes the sum of the
        squares of the loads smaller, so it ends."""
        while True:
            least, most = self.least(), max(self.owned, key=self._rank)
            gap = self.load[most] - self.load[least]
            if gap <= self.heaviest + self.slack:
                break
            self._move(min(self.owned[most], key=lambda pid: self._misfit(pid, gap / 2)), least)
        while (idle := self._idle()) and (rich := [m for m in self.owned if self._has_two(m)]):
            donor = max(rich, key=self._rank)
            half = self.load[donor] / 2
            self._move(min(self.owned[donor], key=lambda pid: self._misfit(pid, half)), idle)

    def _misfit(self, pid: int, wanted: float) -> tuple[float, int]:
        return abs(self.weights[pid] - wanted), pid

    def _idle(self) -> str:
        return next((member for member, pids in self.owned.items() if not pids), "")

    def _has_two(self, member: str) -> bool:
        return len(self.owned[member]) > 1

    def _move(self, pid: int, member: str) -> None:
        before = self.owner.pop(pid)
        self.owned[before].remove(pid)
        self.load[before] -= self.weights[pid]
        self.give(pid, member)
