"""The replicated state of a consumer group, and the commands that change it.

Every command names what it expects: a coordinator that was replaced, or repeats itself, changes
nothing.

| command | applied when                                      | effect                           |
|---------|---------------------------------------------------|----------------------------------|
| Join    | the member is new                                 | it is offered partitions         |
| Leave   | it owns nothing                                   | it is forgotten                  |
| Grant   | nobody owns the partition, its epoch is expected  | lease epoch + 1, owner           |
| Release | the owner's lease has this epoch                  | nobody owns it                   |
| Advance | the version is the expected one, and is published | the version + 1                  |
| Seek    | the group epoch is the expected one               | version, starts, group epoch + 1 |

After a seek the owners of the former group epoch keep the partitions until they release them or
expire; only then is anything granted again.

Source: ordered topics, sections 1.5, 6 and 7; invariants I8 and I11.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from convoymq.topics.lineage import Mode


class Owner(NamedTuple):
    """Owner of a partition, and the lease."""

    member: str
    epoch: int
    group_epoch: int


@dataclass(frozen=True, slots=True)
class Join:
    """A member is there."""

    member: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A member is gone."""

    member: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease. `expect` is the lease epoch before it."""

    pid: int
    member: str
    group_epoch: int
    expect: int


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a lease. `expired`: its time ran out, the member did not say so."""

    pid: int
    epoch: int
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Advance:
    """All sources of the change from `expect` to `to` are drained."""

    group_epoch: int
    expect: int
    to: int


@dataclass(frozen=True, slots=True)
class Seek:
    """The group reads again from a position. `starts`: offsets in partitions of that version."""

    expect_group_epoch: int
    version: int
    starts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages of a partition that the group goes on without (I15): what it had not acknowledged
    there, and what it had parked there."""

    pid: int
    group_epoch: int
    first: int
    """The first offset that was not acknowledged, as far as known."""
    end: int | None
    """Offset behind the last message; None: nobody knows."""
    parked_keys: int | None
    """Keys that were parked in the partition; None: nobody knows."""
    reason: str
    time_ms: int


LOSSES_KEPT_MAX = 1_000
GroupCommand = Join | Leave | Grant | Release | Advance | Seek


@dataclass(slots=True)
class GroupState:
    """One group of one topic."""

    name: str
    cv: int
    """The route version that the group reads."""
    starts: dict[int, int]
    """Starts of cursors in the partitions of `start_version` begin; all others begin at 0."""
    mode: Mode = Mode.LINEAR
    start_version: int = 0
    group_epoch: int = 1
    members: set[str] = field(default_factory=set)
    owners: dict[int, Owner] = field(default_factory=dict)
    lease_epochs: dict[int, int] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    """The latest of them, in the order in which they became known."""

    @classmethod
    def first(
        cls, name: str, version: int, starts: Mapping[int, int], mode: Mode = Mode.LINEAR
    ) -> GroupState:
        """The state of a new group that begins at a position."""
        return cls(name, version, dict(starts), mode, version)

    def apply(self, command: GroupCommand, latest: int, oldest: int = 0) -> bool:
        """Applies a committed command; False when it came too late and changed nothing.

        Args:
            latest: the newest published version.
            oldest: the first version that can be read as a whole.
        """
        match command:
            case Join(member):
                changed = member not in self.members
                self.members.add(member)
                return changed
            case Leave(member):
                owns = any(owner.member == member for owner in self.owners.values())
                changed = member in self.members and not owns
                if changed:
                    self.members.remove(member)
                return changed
            case Grant():
                return self._grant(command)
            case Release(pid, epoch):
                owner = self.owners.get(pid)
                if owner is None or owner.epoch != epoch:
                    return False
                del self.owners[pid]
                return True
            case Advance(group_epoch, expect, to):
                return self._advance(group_epoch, expect, to, latest)
            case Seek():
                return self._seek(command, oldest, latest)

    def _grant(self, command: Grant) -> bool:
        pid = command.pid
        if (
            pid in self.owners
            or command.member not in self.members
            or command.group_epoch != self.group_epoch
            or command.expect != self.lease_epochs.get(pid, 0)
            or self.has_former_owners()
        ):
            return False
        epoch = self.lease_epochs[pid] = command.expect + 1
        self.owners[pid] = Owner(command.member, epoch, self.group_epoch)
        return True

    def has_former_owners(self) -> bool:
        """True while a lease from before the latest seek may be in use."""
        return any(owner.group_epoch != self.group_epoch for owner in self.owners.values())

    def _advance(self, group_epoch: int, expect: int, to: int, latest: int) -> bool:
        late = group_epoch != self.group_epoch or self.cv != expect
        if late or to != expect + 1 or to > latest:
            return False
        self.cv = to
        return True

    def _seek(self, command: Seek, oldest: int, latest: int) -> bool:
        known = oldest <= command.version <= latest
        if command.expect_group_epoch != self.group_epoch or not known:
            return False
        self.group_epoch += 1
        self.cv = self.start_version = command.version
        self.starts = dict(command.starts)
        return True

    def lose(self, loss: Loss) -> None:
        """Records a loss; one for each partition and group epoch."""
        known = {(each.pid, each.group_epoch) for each in self.losses}
        if (loss.pid, loss.group_epoch) not in known:
            self.losses = [*self.losses, loss][-LOSSES_KEPT_MAX:]

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        return json.dumps(
            [
                self.name,
                self.cv,
                self.mode.name,
                self.start_version,
                self.group_epoch,
                sorted(self.starts.items()),
                sorted(self.members),
                sorted((pid, *owner) for pid, owner in self.owners.items()),
                sorted(self.lease_epochs.items()),
                [astuple(loss) for loss in self.losses],
            ]
        ).encode()

    @classmethod
    def restore(cls, snapshot: bytes) -> GroupState:
        """The state of a snapshot."""
        name, cv, mode, start, epoch, starts, members, *rest = json.loads(snapshot)
        owners, leases, losses = rest
        state = cls(name, cv, dict(starts), Mode[mode], start, epoch, set(members))
        state.owners = {pid: Owner(*owner) for pid, *owner in owners}
        state.lease_epochs = dict(leases)
        state.losses = [Loss(*loss) for loss in losses]
        return state

    def state_hash(self) -> int:
        """Equal for equal states."""
        return zlib.crc32(self.snapshot())

    def check_invariants(self) -> None:
        """Raises AssertionError when an owner is no member, or a lease is not the latest one."""
        for pid, owner in self.owners.items():
            assert owner.member in self.members
            assert owner.epoch == self.lease_epochs[pid]
            assert owner.group_epoch <= self.group_epoch
