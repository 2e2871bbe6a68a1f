"""The way of a replica to get online with its group: five steps, without I/O.

`pre_online` is a generator: it yields a step, is sent the step's result, and returns the view with
which the replica goes online. Results are None for what failed.

1. Ask name servers for the members of the group. Nobody answers, or another replica has the own
   id: again, a second later.
2. Nobody else is there: online at once. A lone slave acts; a lone master serves.
3. A master, for each other member, smallest id first:
   a. tell it where the master's log is (906), so that it connects;
   b. compare the ends of both logs, and fetch what the master lacks;
   c. wait until its replication link transfers;
   d. take special services over, and what the member knows: offsets, topics, groups, what has
      escaped (`merging.py`).
   After a member that fails all begins again: what was taken over would be stale.
4. A slave whose master is listed: ask it for its HA address (906), follow it, wait for the link.
5. A slave without a master: take over what the other slaves know, as far as they answer; then
   online, and the smallest id acts.

The shell answers a waiting step at the moment when its condition holds, so that a replica is
online well within a second of its link. RocketMQ looks once a second, and its slave waits five.
A special service that was taken over is given back after `HAND_OVER_MS`; a master that took longer
takes it over again (`is_fresh`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from convoymq.rocketmq.acting.roles import HAND_OVER_MS
from convoymq.rocketmq.remoting.values import MASTER_ID

RETRY_MS = 1000
LINK_TIMEOUT_MS = 10_000
FRESH_MS = HAND_OVER_MS // 2


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits."""

    ms: int


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Asks for the members of the group. Result: id -> address."""


@dataclass(frozen=True, slots=True)
class IdTaken:
    """Reports another replica that has the own id."""

    address: str


@dataclass(frozen=True, slots=True)
class TellHaAddress:
    """Tells a member where this master's log is (906). Result: True."""

    address: str


@dataclass(frozen=True, slots=True)
class CompareTails:
    """Compares the ends of both logs, and fetches missing messages. Result: True; also for a
    member that has no such request."""

    address: str


@dataclass(frozen=True, slots=True)
class AwaitLink:
    """Waits until the replication link with a member transfers. Result: True, or False after
    `timeout_ms`."""

    address: str
    timeout_ms: int = LINK_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Ends a member's special services and takes its metadata over. Result: when that was, ms."""

    address: str


@dataclass(frozen=True, slots=True)
class Join:
    """Takes over what another slave knows. Result: None."""

    address: str


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Asks the master for the address of its log. Result: the address; "" if it has none."""

    address: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Replicates from a master. Result: True."""

    address: str
    ha_address: str


Step: TypeAlias = (
    Wait
    | AskMembers
    | IdTaken
    | TellHaAddress
    | CompareTails
    | AwaitLink
    | TakeOver
    | Join
    | AskMaster
    | Follow
)


@dataclass(frozen=True, slots=True)
class Online:
    """The view with which a replica goes online."""

    members: Mapping[int, str]
    ha_address: str | None = None
    taken_ms: int | None = None
    """Time at which the first special service was taken over; None: none was."""

    def is_fresh(self, now_ms: int) -> bool:
        """Returns whether the result still holds."""
        return self.taken_ms is None or now_ms - self.taken_ms < FRESH_MS


Result: TypeAlias = "Mapping[int, str] | str | int | None"
Steps: TypeAlias = Generator[Step, Result, Online]
_Part: TypeAlias = "Generator[Step, Result, Online | None]"


def pre_online(own_id: int, own: str, *, skips: bool = False) -> Steps:
    """See the module text.

    Args:
        own: the address of this replica.
        skips: `skipPreOnline`, only members are looked at.
    """
    while True:
        listed = yield AskMembers()
        if not isinstance(listed, Mapping):
            yield Wait(RETRY_MS)
            continue
        if listed.get(own_id, own) != own:
            yield IdTaken(listed[own_id])
            yield Wait(RETRY_MS)
            continue
        members = {number: address for number, address in listed.items() if number != own_id}
        if skips or not members:
            return Online(members)
        if own_id != MASTER_ID and MASTER_ID not in members:
            for address in members.values():
                yield Join(address)
            return Online(members)
        steps = _master(members) if own_id == MASTER_ID else _slave(members)
        online = yield from steps
        if online is not None:
            return online
        yield Wait(RETRY_MS)


def _master(members: Mapping[int, str]) -> _Part:
    taken: int | None = None
    for _, address in sorted(members.items()):
        is_told = yield TellHaAddress(address)
        if not is_told or not (yield CompareTails(address)):
            return None
        if not (yield AwaitLink(address)):
            return None
        taken_ms = yield TakeOver(address)
        if not isinstance(taken_ms, int):
            return None
        taken = taken_ms if taken is None else min(taken, taken_ms)
    return Online(members, None, taken)


def _slave(members: Mapping[int, str]) -> _Part:
    master = members[MASTER_ID]
    ha_address = yield AskMaster(master)
    if not isinstance(ha_address, str):
        return None
    if not ha_address:
        return Online(members)
    if not (yield Follow(master, ha_address)) or not (yield AwaitLink(master)):
        return None
    return Online(members, ha_address)
