"""The replicated state of a consumer group, and the commands that change it.

Every command names what it expects: a coordinator that was replaced, or repeats itself, changes
nothing.

| command | applied when                                      | effect                           |
|---------|---------------------------------------------------|----------------------------------|
| Join    | the member is new                                 | it is offered partitions         |
| Leave   | it owns nothing                                   | it is forgotten                  |
| Grant   | nobody owns the partition, its epoch is expected  | lease epoch + 1, owner           |
| Release | the owner's lease has this epoch                  | nobody owns it                   |
| Advance | the version is the expected one and is published, | the version + 1                  |
|         | and the group has not expired                     |                                  |
| Seek    | the group epoch is the expected one, and nothing  | version, starts, group epoch + 1 |
|         | that it begins in is deleted                      |                                  |
| Expire  | nobody was a member since the expected time       | it holds nothing back any more   |
| Lose    | the group epoch is the expected one               | a loss, by name                  |
| Skip    | the group epoch is the expected one, nothing else | the group goes on without the    |
|         | was said of the partition                         | partition, and says so           |
| Recover | the partition was skipped                         | it was read after all            |

The last three are of weak topics. What was skipped is read late, when it can be: `skipped` has the
partitions that are still to come, and they are kept for the group.

After a seek the owners of the former group epoch keep the partitions until they release them or
expire; only then is anything granted again.

A group that has expired comes back with its next member as long as nothing was deleted that it has
not read; otherwise its members are refused (DATA_EXPIRED) until an operator seeks or deletes it.

Source: ordered topics, sections 1.5, 6, 7 and 12; invariants I8 and I11.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Lineage, Mode


class Owner(NamedTuple):
    """Owner of a partition, and the lease."""

    member: str
    epoch: int
    group_epoch: int


@dataclass(frozen=True, slots=True)
class Join:
    """A member is there. `loses`: an expired group goes on without what was deleted meanwhile, and
    says so; else it is refused then."""

    member: str
    loses: bool = False


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
class Expire:
    """Nobody was a member for too long; `idle_since_ms` is what the proposer saw."""

    idle_since_ms: int


@dataclass(frozen=True, slots=True)
class Lose:
    """The group goes on behind messages of a partition that retention cut before it had read
    them: from `first` to below `end`."""

    pid: int
    group_epoch: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Skip:
    """Nobody answers for a closed partition: the group goes on without it. `end`: where it ends,
    None: nobody knows."""

    pid: int
    group_epoch: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Recover:
    """A partition that was skipped has been read to its end."""

    pid: int
    group_epoch: int


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
GroupCommand = Join | Leave | Grant | Release | Advance | Seek | Expire | Lose | Skip | Recover
DATA_EXPIRED, SKIPPED, READ_LATE = "data_expired", "skipped", "read_late"
"""Reasons of losses."""


class Kept(NamedTuple):
    """Versions and partitions of a topic that are still there."""

    oldest: int = 0
    """The first version that a group may begin at."""
    whole: int = 0
    """The first version from which on nothing is deleted."""
    deleted: Mapping[int, int] = MappingProxyType({})
    """Partitions, and the versions that took them away."""


EVERYTHING = Kept()


def is_kept(kept: Kept, version: int, starts: Collection[int]) -> bool:
    """True when a group may begin at a version, with these partitions of it."""
    return version >= kept.oldest and not any(pid in kept.deleted for pid in starts)


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
    idle_since_ms: int = 0
    """Time when the last member left, or the group was created; by the clock of the log."""
    expired: bool = False
    """Nothing is held back for it."""
    losses: list[Loss] = field(default_factory=list)
    """The latest of them, in the order in which they became known."""
    skipped: set[int] = field(default_factory=set)
    """Partitions that the group has gone on without, and reads when somebody answers for them."""

    @classmethod
    def first(
        cls,
        name: str,
        version: int,
        starts: Mapping[int, int],
        mode: Mode = Mode.LINEAR,
        time_ms: int = 0,
    ) -> GroupState:
        """The state of a new group that begins at a position."""
        return cls(name, version, dict(starts), mode, version, idle_since_ms=time_ms)

    def apply(
        self, command: GroupCommand, latest: int, kept: Kept = EVERYTHING, time_ms: int = 0
    ) -> bool:
        """Applies a committed command; False when it came too late and changed nothing.

        Args:
            latest: the newest published version.
            time_ms: of the command's entry in the log.
        """
        match command:
            case Join():
                return self._join(command, kept, time_ms)
            case Leave(member):
                return self._leave(member, time_ms)
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
                return self._seek(command, latest, kept, time_ms)
            case Expire(idle_since_ms):
                return self._expire(idle_since_ms)
            case Lose():
                return self._lose_expired(command, time_ms)
            case Skip():
                return self._skip(command, kept, time_ms)
            case Recover():
                return self._recover(command, time_ms)

    def held_version(self, lineage: Lineage) -> int:
        """Returns the oldest version of which a partition is kept for the group. What was skipped
        begins with what its parents hand over, when it answers for the first time."""
        created = [lineage.partition(pid).created_version for pid in self.skipped]
        return min([self.cv, *(max(0, version - 1) for version in created)])

    def has_lost_data(self, kept: Kept) -> bool:
        """True when something was deleted that the group has not read: it had expired."""
        return self.expired and self.cv < kept.whole

    def _join(self, command: Join, kept: Kept, time_ms: int) -> bool:
        if command.member in self.members:
            return False
        if self.has_lost_data(kept):
            if not command.loses:
                return False
            self._lose_deleted(kept, time_ms)
        self.skipped -= kept.deleted.keys()
        self.expired = False
        self.members.add(command.member)
        return True

    def _lose_deleted(self, kept: Kept, time_ms: int) -> None:
        """Partitions that the group may not have read, and that are gone."""
        for pid, version in sorted(kept.deleted.items()):
            if version > self.cv:
                first = max(self.starts.get(pid, FIRST_USER_OFFSET), FIRST_USER_OFFSET)
                # One record says that all of it is gone, whatever was known of it before.
                kept_losses = [
                    each
                    for each in self.losses
                    if (each.pid, each.group_epoch, each.reason)
                    != (pid, self.group_epoch, DATA_EXPIRED)
                ]
                loss = Loss(pid, self.group_epoch, first, None, None, DATA_EXPIRED, time_ms)
                self.losses = [*kept_losses, loss][-LOSSES_KEPT_MAX:]

    def _leave(self, member: str, time_ms: int) -> bool:
        owns = any(owner.member == member for owner in self.owners.values())
        if member not in self.members or owns:
            return False
        self.members.remove(member)
        if not self.members:
            self.idle_since_ms = time_ms
        return True

    def _expire(self, idle_since_ms: int) -> bool:
        if self.members or self.expired or idle_since_ms != self.idle_since_ms:
            return False
        self.expired = True
        return True

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
        # Of an expired group, sources may be drained because they are deleted.
        late = group_epoch != self.group_epoch or self.cv != expect or self.expired
        if late or to != expect + 1 or to > latest:
            return False
        self.cv = to
        return True

    def _seek(self, command: Seek, latest: int, kept: Kept, time_ms: int) -> bool:
        known = is_kept(kept, command.version, command.starts) and command.version <= latest
        if command.expect_group_epoch != self.group_epoch or not known:
            return False
        self.expired = False
        self.idle_since_ms = time_ms
        self.group_epoch += 1
        self.cv = self.start_version = command.version
        self.starts = dict(command.starts)
        self.skipped.clear()
        return True

    def _lose_expired(self, command: Lose, time_ms: int) -> bool:
        pid, group_epoch, first, end = command.pid, command.group_epoch, command.first, command.end
        if group_epoch != self.group_epoch or self.has_lost(pid, first, end):
            return False
        losses = list(self.losses)
        for each in losses:
            same = (each.pid, each.group_epoch, each.reason) == (pid, group_epoch, DATA_EXPIRED)
            if same and each.end is not None and each.first <= first <= each.end:
                # More of the same: it has expired before the group could go on.
                first = each.first
                losses.remove(each)
                break
        loss = Loss(pid, group_epoch, first, end, 0, DATA_EXPIRED, time_ms)
        self.losses = [*losses, loss][-LOSSES_KEPT_MAX:]
        return True

    def has_lost(self, pid: int, first: int, end: int) -> bool:
        """True when a record says that the group goes on without these messages."""
        return any(
            each.pid == pid
            and each.group_epoch == self.group_epoch
            and each.reason == DATA_EXPIRED
            and each.first <= first
            and each.end is not None
            and end <= each.end
            for each in self.losses
        )

    def _skip(self, command: Skip, kept: Kept, time_ms: int) -> bool:
        pid = command.pid
        if command.group_epoch != self.group_epoch or pid in self.skipped or self.expired:
            return False
        if pid in kept.deleted:
            # It is gone since the coordinator looked: it will never be read late.
            return False
        self.skipped.add(pid)
        first = max(self.starts.get(pid, FIRST_USER_OFFSET), FIRST_USER_OFFSET)
        loss = Loss(pid, self.group_epoch, first, command.end, None, SKIPPED, time_ms)
        self.losses = [*self.losses, loss][-LOSSES_KEPT_MAX:]
        return True

    def _recover(self, command: Recover, time_ms: int) -> bool:
        if command.group_epoch != self.group_epoch or command.pid not in self.skipped:
            return False
        self.skipped.discard(command.pid)
        self.losses = [
            replace(each, reason=READ_LATE, time_ms=time_ms)
            if (each.pid, each.group_epoch, each.reason) == (command.pid, self.group_epoch, SKIPPED)
            else each
            for each in self.losses
        ]
        return True

    def forget_skipped(self, pid: int) -> None:
        """A partition that was skipped is lost for good: another record says so."""
        self.skipped.discard(pid)
        self.losses = [
            each
            for each in self.losses
            if (each.pid, each.group_epoch, each.reason) != (pid, self.group_epoch, SKIPPED)
        ]

    def lose(self, loss: Loss) -> None:
        """Records a loss; one for each partition, group epoch and reason."""
        known = {(each.pid, each.group_epoch, each.reason) for each in self.losses}
        if (loss.pid, loss.group_epoch, loss.reason) not in known:
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
                self.idle_since_ms,
                self.expired,
                [astuple(loss) for loss in self.losses],
                sorted(self.skipped),
            ]
        ).encode()

    @classmethod
    def restore(cls, snapshot: bytes) -> GroupState:
        """The state of a snapshot."""
        name, cv, mode, start, epoch, starts, members, *rest = json.loads(snapshot)
        owners, leases, idle_since_ms, expired, losses, skipped = rest
        state = cls(name, cv, dict(starts), Mode[mode], start, epoch, set(members))
        state.owners = {pid: Owner(*owner) for pid, *owner in owners}
        state.lease_epochs = dict(leases)
        state.idle_since_ms, state.expired = idle_since_ms, expired
        state.losses = [Loss(*loss) for loss in losses]
        state.skipped = set(skipped)
        return state

    def state_hash(self) -> int:
        """Equal for equal states."""
        return zlib.crc32(self.snapshot())

    def check_invariants(self) -> None:
        """Raises AssertionError when an owner is no member, a lease is not the latest one, or a
        group with members has expired."""
        assert not (self.expired and self.members)
        for pid, owner in self.owners.items():
            assert owner.member in self.members
            assert owner.epoch == self.lease_epochs[pid]
            assert owner.group_epoch <= self.group_epoch
