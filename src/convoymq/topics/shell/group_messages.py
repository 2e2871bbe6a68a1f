"""Messages between members of topics' groups and their coordinators: CONTROL frames of kind
KIND_TOPIC_GROUP, each a list.

| message                                                          | to, answer                   |
|------------------------------------------------------------------|------------------------------|
| heartbeat · vhost, topic, group, member, sent ms, group epoch,   | metadata leader; leases ·    |
|   held, released, leaves                                         | sent ms, group epoch,        |
|                                                                  | leases, revoked, is member   |
| drained · vhost, topic, group, partition, group epoch            | metadata leader; none        |
| wake · member                                                    | node of its heartbeats; none |

Leases and what is held are [partition, epoch, partition, epoch, …]. `wake`: the next heartbeat
would be answered otherwise than the last one, so it is to be sent now. A node that does not lead
the metadata group answers a heartbeat with a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from convoymq.model.errors import PeerError
from convoymq.topics.rules.heartbeats import FILTER_MARK, Heartbeat, Leases

HEARTBEAT = "heartbeat"
DRAINED = "drained"
EXPIRED = "expired"
WAKE = "wake"
MEMBER_PARTS = 4
"""Of the name of a member that its node runs."""


class GroupName(NamedTuple):
    """A group of a topic."""

    vhost: str
    topic: str
    group: str

    @property
    def queue(self) -> str:
        """Returns the name under which clients consume."""
        return f"{self.topic}/{self.group}"


def member_name(
    node: int, incarnation: int, session: int, consumer: int, filter_name: str = ""
) -> str:
    """Returns the name of a member: that of its node comes first, that of its filter last."""
    name = f"{node}-{incarnation}-{session}-{consumer}"
    return f"{name}{FILTER_MARK}{filter_name}" if filter_name else name


def process_of(member: str) -> tuple[int, int] | None:
    """Returns (node, its incarnation) of the process that a member lives in; None: it is no
    consumer of AMQP, and outlives the node that it speaks through."""
    parts = member.partition(FILTER_MARK)[0].split("-")
    if len(parts) != MEMBER_PARTS or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def pack_heartbeat(name: GroupName, beat: Heartbeat) -> list[object]:
    """Returns the message of a heartbeat."""
    return [
        HEARTBEAT,
        *name,
        beat.member,
        beat.sent_ms,
        beat.group_epoch,
        _flat(beat.held),
        _flat(beat.released),
        beat.leaves,
    ]


def unpack_heartbeat(message: Sequence[object]) -> tuple[GroupName, Heartbeat]:
    """Returns what `pack_heartbeat` packed. Raises PeerError."""
    match message:
        case [
            _,
            str(vhost),
            str(topic),
            str(group),
            str(member),
            int(sent_ms),
            int(group_epoch),
            list(held),
            list(released),
            bool(leaves),
        ]:
            beat = Heartbeat(member, sent_ms, group_epoch, _map(held), _map(released), leaves)
            return GroupName(vhost, topic, group), beat
        case _:
            raise PeerError("malformed heartbeat of a group's member")


def pack_leases(leases: Leases, *, is_member: bool) -> list[object]:
    """Returns the answer to a heartbeat."""
    return [
        leases.sent_ms,
        leases.group_epoch,
        _flat(leases.leases),
        sorted(leases.revoked),
        is_member,
    ]


def unpack_leases(member: str, answer: object) -> tuple[Leases, bool]:
    """Returns the answer, and whether the group has the member. Raises PeerError."""
    match answer:
        case [int(sent_ms), int(group_epoch), list(leases), list(revoked), bool(is_member)]:
            held = _map(leases)
            found = Leases(member, sent_ms, group_epoch, held, frozenset(map(int, revoked)))
            return found, is_member
        case _:
            raise PeerError("malformed answer to a heartbeat of a group's member")


def _flat(leases: Mapping[int, int]) -> list[int]:
    return [number for lease in sorted(leases.items()) for number in lease]


def _map(flat: list[object]) -> dict[int, int]:
    numbers = [number for number in flat if isinstance(number, int)]
    if len(numbers) != len(flat) or len(flat) % 2:
        raise PeerError("malformed leases of a group's member")
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
