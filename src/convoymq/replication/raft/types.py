"""Words of the Raft core: roles, message kinds, effects, and what it needs of a log.

The shell carries effects out in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

FOLLOWER = 0
PRE_CANDIDATE = 1
CANDIDATE = 2
LEADER = 3
ROLE_NAMES = ("follower", "pre_candidate", "candidate", "leader")

#: Kinds of general messages: (kind, term, …), sent as msgpack in a RAFT frame.
PRE_VOTE = 1
"""(kind, term it would stand in, last index, last term)"""
PRE_VOTE_REPLY = 2
"""(kind, term of the answerer, granted, term asked for, leader known or 0)"""
VOTE = 3
"""(kind, term, last index, last term)"""
VOTE_REPLY = 4
"""(kind, term, granted)"""
TIMEOUT_NOW = 5
"""(kind, term): stand for election at once"""
LOG_END_REQUEST = 6
"""(kind, term): a replica that lost its log asks how far it has to catch up"""
LOG_END = 7
"""(kind, term, last index)"""
REJOIN = 8
"""(kind, term, replica number): a replica without a past asks to be taken in under that number"""
REJOIN_ACCEPTED = 9
"""(kind, term, replica number): it has been, as a non-voter: committed"""
STEPPED_DOWN = 10
"""(kind, term): the sender does not lead this term any more, although it is there"""

#: Values of the saved vote that are no nodes. Within a term only a greater one may follow.
QUARANTINED = 0xFFFE
"""The log was lost, the vote was not: no vote until caught up."""
LOST_STATE = 0xFFFF
"""Log and vote were lost: no vote and no acknowledgement until taken in anew."""
WITHHELD = 0x10000
"""Caught up after QUARANTINED: votes again from the next term on."""

Message = tuple[int | bool, ...]
"""(kind, term, …)"""
Received: TypeAlias = Sequence[Any]
"""A general message of another node, decoded: what its kind has in it is not checked yet."""


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a general message."""

    node: int
    message: Message


@dataclass(frozen=True, slots=True)
class Arm:
    """Starts the group's one election timer anew."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Disarm:
    """Stops it."""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Role, term or leader changed."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Became leader: appends the entry that opens the term."""


Effect: TypeAlias = Send | Arm | Disarm | RoleChanged | Lead

PROBE = 0
"""State in which the agreement of the follower's log is being found out: one append at a time."""
REPLICATE = 1
"""Appends are sent without waiting for replies."""
SNAPSHOT = 2
"""The follower receives a snapshot: no appends."""


class LogEntry(Protocol):
    """Fields of an entry that the core looks at."""

    index: int
    term: int
    kind: int
    size: int
    data: bytes


class Log(Protocol):
    """The group's log: changes show at once in memory, durability is reported later."""

    first_index: int
    last_index: int
    last_term: int
    written_index: int
    term: int
    voted_for: int
    snapshot_index: int

    def term_at(self, index: int) -> int:
        """Returns the term of an entry; 0 for index 0. Raises LookupError when it is not known any
        more."""

    def append(self, entry: Any) -> None:
        """Adds the next entry."""

    def truncate_from(self, index: int) -> None:
        """Removes the entries >= index."""

    def assume_vote(self, term: int, voted_for: int) -> None:
        """Takes a term and vote that follow from what is durable elsewhere."""

    def save_vote(self, term: int, voted_for: int) -> None:
        """Records term and vote; durable when the shell calls `RaftCore.on_vote_written`."""
