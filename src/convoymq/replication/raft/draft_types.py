"""Messages, configuration and the view of the log that the Raft core needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

FOLLOWER = 0
CANDIDATE = 1
PRE_CANDIDATE = 2
LEADER = 3

ROLE_NAMES = ("follower", "candidate", "pre_vote", "leader")

#: `voted_for` of a replica that lost data: it grants no vote until it has caught up.
VOTE_WITHHELD = 0xFFFF


class LogView(Protocol):
    """What the core reads from the log. `term_at` knows first_index - 1 … last_index."""

    first_index: int
    last_index: int
    last_term: int
    written_index: int

    def term_at(self, index: int) -> int:
        """Term of the entry; raises LookupError when it is not known any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """Timing and bounds of one node's Raft groups. Times in ms, sizes in bytes."""

    election_min_ms: int = 150
    """Shortest wait before an election when nobody is known to lead. Too short: split votes."""
    election_spread_ms: int = 250
    """Random part of that wait."""
    suspect_spread_ms: int = 40
    """Random wait before a pre-vote once the leader's node is known to be away."""
    retransmit_ms: int = 1000
    """An append that is unanswered for so long is sent again from the last known match."""
    quorum_grace_ms: int = 1500
    """A leader that reaches no majority for so long steps down."""
    in_flight_bytes_max: int = 8 << 20
    """Unanswered append bytes for one follower. Bounds memory of the link."""
    append_bytes_max: int = 2 << 20
    """Bytes of old entries read for a lagging follower at a time."""
    snapshot_chunk_bytes: int = 1_000_000
    """`snapshot_chunk_size`."""
    snapshot_chunks_in_flight: int = 4
    """Unacknowledged snapshot chunks."""
    lag_entries_max: int = 10_000
    """A follower this far behind counts as not live: the leader sends its deliveries."""


class Membership(msgspec.Struct, frozen=True, array_like=True):
    """Who belongs to a group. Voters decide; learners only receive."""

    voters: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()

    def has(self, node: int) -> bool:
        """True for voters and learners."""
        return node in self.voters or node in self.learners


class PreVote(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Would you vote for me in `term`? Changes nothing at the receiver (thesis, 9.6)."""

    term: int
    last_index: int
    last_term: int


class PreVoteReply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`term` is the asked one when granted, else the receiver's."""

    term: int
    granted: bool


class Vote(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """RequestVote. `transfer`: the old leader asked for this election (thesis, 3.10)."""

    term: int
    last_index: int
    last_term: int
    transfer: bool = False


class VoteReply(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answer to Vote."""

    term: int
    granted: bool


class TimeoutNow(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The leader hands its leadership to the receiver."""

    term: int


class SnapshotBegin(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The leader's state up to `index` follows in chunks, then the live entries below it."""

    term: int
    transfer: int
    index: int
    snapshot_term: int
    membership: Membership
    size: int


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Part `number` of the state (live=False) or whole live entries back to back (live=True)."""

    term: int
    transfer: int
    number: int
    live: bool
    last: bool
    data: bytes


class SnapshotAck(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Chunk `number` arrived; `done`: the snapshot is durable; `failed`: begin again."""

    term: int
    transfer: int
    number: int
    done: bool
    failed: bool
    index: int


class LeaderIs(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Announcement, and the answer to a FORWARD that reached somebody else. leader 0 = unknown."""

    term: int
    leader: int


Message = (
    PreVote
    | PreVoteReply
    | Vote
    | VoteReply
    | TimeoutNow
    | SnapshotBegin
    | SnapshotChunk
    | SnapshotAck
    | LeaderIs
)

_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The body of a RAFT frame."""
    return _ENCODER.encode(message)


def decode(body: bytes) -> Message:
    """Raises ValueError (msgspec's errors are ValueErrors) when the body is no message."""
    message: Message = _DECODER.decode(body)
    return message
