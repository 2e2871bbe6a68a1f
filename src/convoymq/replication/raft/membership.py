"""Membership of a group: voters, and non-voters on their way to become voters.

Encoded form (body of a membership entry): u32 length, then msgpack [voters, [[node, promote at,
replica number], …]], and a voter that leaves, if there is one; the length is there because entry
bodies are padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from convoymq.model.errors import SyntaxFault

NEVER = 1 << 62
"""Index that a member would have to reach to get a vote, when it shall get none."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A non-voter. It becomes a voter when its log reaches `promote_at`.

    One above `NEVER` names, by the difference, the member whose place it is to take (ADR 0227).

    `replica_number` is that of the start that asked to be taken in; 0 when none did.
    """

    node: int
    promote_at: int
    replica_number: int = 0


@dataclass(frozen=True, slots=True)
class Membership:
    """One configuration of a group. Changes differ from it by one node at most."""

    voters: frozenset[int]
    learners: tuple[Learner, ...] = ()
    leaving: int = 0
    """The only voter of a group that moves, until the other node leads it (ADR 0227); 0: none."""

    @property
    def nodes(self) -> frozenset[int]:
        """Returns all nodes that have a replica."""
        return self.voters | {learner.node for learner in self.learners}

    def learner(self, node: int) -> Learner | None:
        """Returns the non-voter of that number."""
        return next((found for found in self.learners if found.node == node), None)

    @property
    def stand_in(self) -> tuple[int, int] | None:
        """Returns a member that is to take another member's place, and that member."""
        if self.leaving in self.voters and len(self.nodes) > 1:
            return min(self.nodes - {self.leaving}), self.leaving
        for learner in self.learners:
            if learner.promote_at > NEVER and learner.promote_at - NEVER in self.nodes:
                return learner.node, learner.promote_at - NEVER
        return None

    def with_learner(self, learner: Learner) -> Membership:
        """Returns this membership and one non-voter more."""
        others = tuple(other for other in self.learners if other.node != learner.node)
        return replace(self, voters=self.voters - {learner.node}, learners=(*others, learner))

    def promoted(self, node: int) -> Membership:
        """Returns this membership with that non-voter as a voter."""
        assert self.learner(node) is not None, "only a member is promoted"
        others = tuple(other for other in self.learners if other.node != node)
        return replace(self, voters=self.voters | {node}, learners=others)

    def without(self, node: int) -> Membership:
        """Returns this membership without that node."""
        others = tuple(other for other in self.learners if other.node != node)
        left = Membership(self.voters - {node}, others)
        # Without another node nothing moves any more.
        moves = self.leaving in left.voters and len(left.nodes) > 1
        return replace(left, leaving=self.leaving) if moves else left

    def is_single_step_from(self, other: Membership) -> bool:
        """Returns whether the voters differ by at most one: then any two majorities intersect."""
        return len(self.voters ^ other.voters) <= 1

    def encode(self) -> bytes:
        """Returns the body of a membership entry."""
        learners = [[each.node, each.promote_at, each.replica_number] for each in self.learners]
        more = [self.leaving] if self.leaving else []
        body = msgspec.msgpack.encode([sorted(self.voters), learners, *more])
        return len(body).to_bytes(4, "little") + body


class _Encoded(msgspec.Struct, array_like=True):
    voters: list[int]
    learners: list[tuple[int, int, int]]
    leaving: int = 0


@lru_cache(maxsize=1024)
def decode_membership(body: bytes) -> Membership:
    """Reads what `Membership.encode` wrote, padding allowed. Raises SyntaxFault.

    Thousands of groups have the same few configurations: they share them.
    """
    size = int.from_bytes(body[:4], "little")
    if len(body) < 4 or size > len(body) - 4:
        raise SyntaxFault("a membership is cut off")
    try:
        found = msgspec.msgpack.decode(body[4 : 4 + size], type=_Encoded)
    except msgspec.DecodeError as error:
        raise SyntaxFault(f"not a membership: {error}") from None
    learners = tuple(Learner(*each) for each in found.learners)
    return Membership(frozenset(found.voters), learners, found.leaving)
