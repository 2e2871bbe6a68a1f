"""Assignment: which member of a group owns which partition (section 6.2).

Each partition has one owner. Whoever has a partition keeps it; a child goes to an owner of one of
its parents, so that no lease changes hands; the rest goes to whoever has least to do. After that,
partitions move only for balance: the numbers of partitions of two members differ by one at most.

The result depends on the arguments alone, and given as `previous` it comes out again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from convoymq.topics.rules.routes import Span


def assign(
    spans: Iterable[Span],
    members: Collection[str],
    previous: Mapping[int, str] | None = None,
    parents_owner: Mapping[int, Sequence[str]] | None = None,
) -> dict[int, str]:
    """Return the owner of each partition, in the order of their ranges; none without members.

    Args:
        spans: the partitions of the group's version.
        members: of the group.
        previous: the owners until now. Members that left, and partitions that are gone, may be in
            it.
        parents_owner: of new partitions, who owned their parents.

    Cost: O(n + n m + k), with n partitions, m members, and k partitions that move for balance.
    """
    if not members:
        return {}
    work = _Work(sorted(set(members)))
    pids = [span.pid for span in sorted(spans, key=lambda span: span.lo)]
    kept = {pid: (previous or {}).get(pid, "") for pid in pids}
    for pid in pids:
        if kept[pid] in work.owned:
            work.give(pid, kept[pid])
    rest = [pid for pid in pids if kept[pid] not in work.owned]
    for pid in rest:
        work.give_child(pid, (parents_owner or {}).get(pid, ()))
    for pid in rest:
        if pid not in work.owner:
            work.give(pid, work.least())
    work.balance()
    return {pid: work.owner[pid] for pid in pids}


class _Work:
    """An assignment in the making."""

    __slots__ = ("owned", "owner")

    def __init__(self, members: Iterable[str]) -> None:
        self.owner: dict[int, str] = {}
        self.owned: dict[str, list[int]] = {member: [] for member in members}

    def give(self, pid: int, member: str) -> None:
        assert pid not in self.owner
        self.owner[pid] = member
        self.owned[member].append(pid)

    def give_child(self, pid: int, owners: Iterable[str]) -> None:
        """Give a child to the owner of a parent who has least to do, unless that breaks the
        balance."""
        known = [member for member in owners if member in self.owned]
        if not known:
            return
        member = min(known, key=self._rank)
        if len(self.owned[member]) <= min(map(len, self.owned.values())):
            self.give(pid, member)

    def least(self) -> str:
        return min(self.owned, key=self._rank)

    def _rank(self, member: str) -> tuple[int, str]:
        return len(self.owned[member]), member

    def balance(self) -> None:
        """Move partitions until the bound of this module holds."""
        while True:
            least, most = self.least(), max(self.owned, key=self._rank)
            if len(self.owned[most]) - len(self.owned[least]) <= 1:
                return
            pid = min(self.owned[most])
            self.owned[most].remove(pid)
            del self.owner[pid]
            self.give(pid, least)
