"""Views of a ring: who is in it, in which order, and who completes whose broadcasts. Pure.

A view is a value of the replicated tree; each change makes one of the next version. A member that
failed keeps its place until its broadcasts are complete: the place says which member does that.

| change       | proposed by                               | effect on the ring                   |
| joined       | a node that is to have a copy             | a newcomer, right of a full member   |
| caught up    | the newcomer                              | it is a full member                  |
| failed       | a node that knows that the member is gone | its place is marked                  |
| handed over  | the master                                | it has failed; another one follows   |
| erased       | the member that completed its broadcasts  | its place is gone                    |
| synchronised | the member                                | its copy has all that the master has |
| promoted     | the next master, or the oldest that is    | it is the master                     |
|              | synchronised                              |                                      |
| refounded    | a node with a copy, or its operator       | a new ring of that node alone        |

Newcomers broadcast nothing, and go with the full member to their left when that fails: they may
lack what only that one had. Without a full member a ring is over, and its owner founds another.

Members are numbered, in the order in which they came, and no number is used twice. A member is one
run of a node: a node that comes back is a new member.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
from msgspec.structs import replace

NODES_MAX = 255
NUMBER_MAX = 0xFFFFFFFF
"""Of members, incarnations and versions: four bytes in frames."""


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of a node that is, or was, part of a ring."""

    number: int
    node: int
    incarnation: int


class RingView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One version of a ring.

    Attributes:
        version: rises by one with each change.
        members: in the direction in which messages travel.
        next_member: number of the next member.
        master: number of the member that serves; it may have failed, or be erased, until another
            one is promoted.
        failed: those that failed and whose broadcasts are not known to be complete.
        newcomers: those that do not have their neighbour's state yet.
        synchronised: live members with all that the master has.
        next_master: the synchronised member that follows a master that has failed; 0 = the oldest.
    """

    version: int
    members: tuple[Member, ...]
    next_member: int
    master: int
    failed: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    synchronised: tuple[int, ...] = ()
    next_master: int = 0

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """Returns the numbers of the members, in their order."""
        return tuple(member.number for member in self.members)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Returns the members that have not failed, in the order of the ring."""
        return tuple(number for number in self.ring if number not in self.failed)

    def is_live(self, member: int) -> bool:
        """Returns whether the member is in the ring and has not failed."""
        return member in self.live

    def node_of(self, member: int) -> int:
        """Returns the node of a member. Raises ValueError for a number that is not in the ring."""
        return self.members[self.ring.index(member)].node

    def nodes(self) -> tuple[int, ...]:
        """Returns the nodes with a live member: the master's first, then in order of age."""
        live = sorted(self.live, key=lambda number: (number != self.master, number))
        return tuple(dict.fromkeys(self.node_of(number) for number in live))

    def live_at(self, node: int) -> Member | None:
        """Returns the live member on a node, if there is one."""
        return next(
            (each for each in self.members if each.node == node and self.is_live(each.number)), None
        )

    def right_of(self, member: int) -> int:
        """Returns the nearest live member that gets what `member` sends; itself when it is alone.
        Raises ValueError for a number that is not in the ring."""
        return next((other for other in self._behind(member) if self.is_live(other)), member)

    def left_of(self, member: int) -> int:
        """Returns the nearest live member whose messages `member` gets; itself when it is alone.
        Raises ValueError for a number that is not in the ring."""
        before = reversed(self._behind(member))
        return next((other for other in before if self.is_live(other)), member)

    def _behind(self, member: int) -> tuple[int, ...]:
        """Returns the others from a member on, to the right."""
        ring = self.ring
        place = ring.index(member)
        return ring[place + 1 :] + ring[:place]

    def home_of(self, sender: int) -> int:
        """Returns the member that completes the rounds of `sender`: itself while it is live, then
        the nearest live member to its right. Everything that any live member has of the sender came
        through that one. Raises ValueError for a number that is not in the ring."""
        return self.right_of(sender) if sender in self.failed else sender

    def is_full(self, member: int) -> bool:
        """Returns whether the member is live and no newcomer."""
        return self.is_live(member) and member not in self.newcomers

    def full(self) -> list[int]:
        """Returns the full members, oldest first."""
        return sorted(number for number in self.ring if self.is_full(number))

    def joined(self, node: int, incarnation: int, left: int = 0) -> RingView:
        """Returns the view with a newcomer, numbered `next_member`, right of the full member
        `left`; 0 = the youngest. Next to a live member it inherits nobody's broadcasts. Raises
        ValueError when `left` is no full member, or the node has a live member already."""
        left = left or max(self.full(), default=0)
        if self.live_at(node) is not None or not self.is_full(left):
            raise ValueError(f"node {node} cannot join right of {left}")
        place = self.ring.index(left) + 1
        newcomer = Member(self.next_member, node, incarnation)
        return self._next(
            members=(*self.members[:place], newcomer, *self.members[place:]),
            next_member=self.next_member + 1,
            newcomers=(*self.newcomers, newcomer.number),
        )

    def caught_up(self, member: int) -> RingView:
        """Returns the view in which the newcomer is a full member; the same for any other one."""
        if member not in self.newcomers:
            return self
        return self._next(newcomers=_without(self.newcomers, {member}))

    def with_failed(self, member: int) -> RingView:
        """Returns the view in which the member has failed; the same when it had, or is unknown."""
        if not self.is_live(member):
            return self
        gone = {member} & set(self.newcomers)
        for other in self._behind(member):
            if member in self.newcomers or self.is_full(other):
                break
            gone |= {other} & set(self.newcomers)
        return self._next(
            members=tuple(each for each in self.members if each.number not in gone),
            failed=self.failed if member in gone else (*self.failed, member),
            newcomers=_without(self.newcomers, gone),
            synchronised=_without(self.synchronised, gone | {member}),
            next_master=0 if member == self.next_master else self.next_master,
        )

    def handed_over(self, member: int) -> RingView:
        """Returns the view in which the master has failed, and is followed by a synchronised
        member. Raises ValueError for another one."""
        if member == self.master or member not in self.synchronised:
            raise ValueError(f"member {member} cannot follow {self.master}")
        return replace(self.with_failed(self.master), next_master=member)

    def erased(self, member: int) -> RingView:
        """Returns the view without a failed member whose broadcasts are complete; the same for any
        other one."""
        if member not in self.failed:
            return self
        members = tuple(each for each in self.members if each.number != member)
        return self._next(members=members, failed=_without(self.failed, {member}))

    def with_synchronised(self, member: int) -> RingView:
        """Returns the view in which the member has all that the master has; the same when it had,
        or is no full member."""
        if member in self.synchronised or not self.is_full(member):
            return self
        return self._next(synchronised=(*self.synchronised, member))

    def promoted(self, member: int) -> RingView:
        """Returns the view in which the member is the master. An unsynchronised one makes those
        unsynchronised that had what it lacks. Raises ValueError when it is no full member, or the
        broadcasts of the failed master may be incomplete: it could get more of them."""
        if not self.is_full(member) or self.master in self.failed:
            raise ValueError(f"member {member} cannot be promoted after {self.master}")
        kept = self.synchronised if member in self.synchronised else (member,)
        return self._next(master=member, synchronised=kept, next_master=0)

    def refounded(self, node: int, incarnation: int) -> RingView:
        """Returns the view of a new ring with one member, whatever became of the others."""
        return founded(node, incarnation, version=self.version + 1, number=self.next_member)

    def _next(self, **changes: object) -> RingView:
        return replace(self, version=self.version + 1, **changes)


def founded(node: int, incarnation: int, *, version: int = 1, number: int = 1) -> RingView:
    """Returns the view of a new ring with one member."""
    return RingView(
        version=version,
        members=(Member(number, node, incarnation),),
        next_member=number + 1,
        master=number,
        synchronised=(number,),
    )


def check_view(view: RingView) -> None:
    """Raises ValueError for a view that no changes lead to."""
    ring = set(view.ring)
    live = [each for each in view.members if view.is_live(each.number)]
    if len(ring) != len(view.members) or len({each.node for each in live}) != len(live):
        raise ValueError("a member is twice in a view")
    if not all(
        0 < each.number < view.next_member
        and 0 < each.node <= NODES_MAX
        and 0 < each.incarnation <= NUMBER_MAX
        for each in view.members
    ):
        raise ValueError("a member of a view has a number that none can have")
    if not 0 < view.version <= NUMBER_MAX or not 0 < view.next_member <= NUMBER_MAX:
        raise ValueError("a view has a number that none can have")
    failed, newcomers = set(view.failed), set(view.newcomers)
    if not failed | newcomers | set(view.synchronised) <= ring or failed & newcomers:
        raise ValueError("a view says something of members that it does not have")
    if any(not view.is_full(number) for number in view.synchronised) or not view.full():
        raise ValueError("a view has no full member, or a synchronised one that is none")
    if view.next_master not in (0, *view.synchronised):
        raise ValueError("the next master of a view is not synchronised")


def _without(numbers: tuple[int, ...], gone: set[int]) -> tuple[int, ...]:
    return tuple(number for number in numbers if number not in gone)
