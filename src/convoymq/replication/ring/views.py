"""Views of a ring: who is in it, in which order, and who completes whose broadcasts. Pure.

A view is a value of the replicated tree; each change makes one of the next version. A member that
failed keeps its place until its broadcasts are complete: the place says which member does that.

| change    | proposed by                               | effect on the ring                  |
| joined    | a node that is to have a copy             | a newcomer, right of a full member  |
| caught up | the newcomer                              | it is a full member                 |
| failed    | a node that knows that the member is gone | its place is marked                 |
| erased    | the member that completed its broadcasts  | its place is gone                   |

Newcomers broadcast nothing, and go with the full member to their left when that fails: they may
lack what only that one had. Without a full member a ring is over, and its owner founds another.

Members are numbered, and no number is used twice: a node that comes back is a new member.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One version of a ring.

    Args:
        version: rises by one with each change.
        ring: members in the direction in which messages travel.
        failed: those that failed and whose broadcasts are not known to be complete.
        newcomers: those that do not have their neighbour's state yet.
    """

    version: int
    ring: tuple[int, ...]
    failed: frozenset[int] = frozenset()
    newcomers: frozenset[int] = frozenset()

    def live(self) -> tuple[int, ...]:
        """Returns the members that have not failed, in the order of the ring."""
        return tuple(member for member in self.ring if member not in self.failed)

    def is_live(self, member: int) -> bool:
        """Returns whether the member is in the ring and has not failed."""
        return member in self.ring and member not in self.failed

    def right_of(self, member: int) -> int:
        """Returns the nearest live member that gets what `member` sends; itself when it is alone.
        Raises ValueError for a number that is not in the ring."""
        place = self.ring.index(member)
        behind = self.ring[place + 1 :] + self.ring[:place]
        return next((other for other in behind if other not in self.failed), member)

    def left_of(self, member: int) -> int:
        """Returns the nearest live member whose messages `member` gets; itself when it is alone.
        Raises ValueError for a number that is not in the ring."""
        place = self.ring.index(member)
        before = self.ring[place + 1 :] + self.ring[:place]
        return next((other for other in reversed(before) if other not in self.failed), member)

    def home_of(self, sender: int) -> int:
        """Returns the member that completes the rounds of `sender`: itself while it is live, then
        the nearest live member to its right. Everything that any live member has of the sender came
        through that one. Raises ValueError for a number that is not in the ring."""
        return self.right_of(sender) if sender in self.failed else sender

    def is_full(self, member: int) -> bool:
        """Returns whether the member is live and no newcomer."""
        return self.is_live(member) and member not in self.newcomers

    def joined(self, newcomer: int, left: int) -> View:
        """Returns the view in which `newcomer` stands right of `left`. Next to a live member it
        inherits nobody's broadcasts. Raises ValueError when `left` is no full member, or the
        newcomer is in the ring already."""
        if newcomer in self.ring or not self.is_full(left):
            raise ValueError(f"member {newcomer} cannot join right of {left}")
        place = self.ring.index(left) + 1
        ring = (*self.ring[:place], newcomer, *self.ring[place:])
        return self._next(ring=ring, newcomers=self.newcomers | {newcomer})

    def caught_up(self, member: int) -> View:
        """Returns the view in which the newcomer is a full member; the same for any other one."""
        if member not in self.newcomers or member in self.failed:
            return self
        return self._next(newcomers=self.newcomers - {member})

    def with_failed(self, member: int) -> View:
        """Returns the view in which the member has failed; the same when it had, or is unknown."""
        if not self.is_live(member):
            return self
        place = self.ring.index(member)
        gone = {member} & self.newcomers
        for other in self.ring[place + 1 :] + self.ring[:place]:
            if member in self.newcomers or self.is_full(other):
                break
            gone |= {other} & self.newcomers
        return self._next(
            ring=tuple(other for other in self.ring if other not in gone),
            failed=self.failed | ({member} - gone),
            newcomers=self.newcomers - gone,
        )

    def erased(self, member: int) -> View:
        """Returns the view without a failed member whose broadcasts are complete; the same for any
        other one."""
        if member not in self.failed:
            return self
        ring = tuple(other for other in self.ring if other != member)
        return self._next(ring=ring, failed=self.failed - {member})

    def _next(self, **changes: Any) -> View:
        return replace(self, version=self.version + 1, **changes)


def founded(member: int, version: int = 1) -> View:
    """Returns the view of a new ring with one member."""
    return View(version=version, ring=(member,))
