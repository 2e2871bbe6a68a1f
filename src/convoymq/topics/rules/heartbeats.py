"""Heartbeats of members of groups, and what coordinators answer.

A lease lasts `TTL_MS` from when its heartbeat was sent, and a coordinator gives it to nobody else
before `TTL_MS` and `MARGIN_MS` have passed since it heard the heartbeat.

Source: ordered topics, section 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TTL_MS = 10_000
MARGIN_MS = 1_000
FILTER_MARK = "~"
"""In the name of a member, before what names its filter (ADR 0224)."""


def filter_of(member: str) -> str:
    """Returns what names the filter of a member; empty: it wants every message."""
    return member.partition(FILTER_MARK)[2]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member renews what it holds, and says what it holds no more. Times are the member's.

    What still runs under a lease that has ended counts as held. `group_epoch`: of the latest answer
    that the member has seen.
    """

    member: str
    sent_ms: int
    group_epoch: int
    held: Mapping[int, int]
    released: Mapping[int, int]
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Leases:
    """The answer to a heartbeat. Leases that are not listed have ended; revoked ones are to be
    released when what runs has finished."""

    member: str
    sent_ms: int
    group_epoch: int
    leases: Mapping[int, int]
    revoked: frozenset[int]
