"""Locks of ordered queues: which client of a group may consume a queue, without I/O.

A lock belongs to one client for `LOCK_LIFE_MS` after it was renewed. It has an *epoch*, which
grows with every holder; the table remembers the last one of every queue. A broker refuses pulls
and commits of a client while another one has the lock: the client's own idea of its lock may be
half a minute old.

`lockInStrictMode` asks a majority of the *configured* replicas: two replicas of which one is away
lock nothing. The replica that a client asks (`Ballot`) proposes an epoch above all that it knows;
a replica that knows a higher one refuses, and says so; then it is proposed again, once. As two
majorities share a replica, epochs of one queue grow over all holders. Locks that were won without
a majority are given back, so that nobody waits a minute for them; RocketMQ leaves them. What
frees a lock has an epoch too: it neither ends a lease that began later, nor does a request for an
earlier one get the lock again.

Tables are lost with the process. Before a replica votes for an epoch, a file says up to which one
it may (`LockRequests`): after a restart it votes for later ones only (docs/adr/0213).

RocketMQ's brokers have no epochs: they take part in majorities, and are believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LOCK_LIFE_MS = 60_000
QUEUES_MAX = 1 << 20
"""Of the table. More are refused."""


class Queue(NamedTuple):
    """A queue of an ordered topic."""

    topic: str
    broker: str
    id: int


@dataclass(slots=True)
class _Lock:
    client: str | None
    epoch: int
    renewed_ms: int


class LockTable:
    """The locks of one broker. `now_ms`: monotonic; epochs begin at the wall clock's time, or
    above `floor`: a former life of this replica voted for no later one."""

    def __init__(self) -> None:
        self.floor = 0
        self._locks: dict[str, dict[Queue, _Lock]] = {}
        self._size = 0
        self._proposed = 0

    def propose(self, group: str, wall_ms: int, above: int = 0) -> int:
        """Returns an epoch above all of a group, above all that were proposed here, and above one
        that another replica knows."""
        known = max((lock.epoch for lock in self._locks.get(group, {}).values()), default=0)
        self._proposed = max(wall_ms, 1 + max(known, self._proposed, above, self.floor))
        return self._proposed

    def lock(self, group: str, client: str, queue: Queue, epoch: int, now_ms: int) -> bool:
        """Locks a queue, or renews the lock; returns whether the client has it. No epoch is won
        after a later one, by the holder neither: others may know of nothing but this one."""
        locks = self._locks.setdefault(group, {})
        lock = locks.get(queue)
        if lock is None:
            if self._size >= QUEUES_MAX or epoch <= self.floor:
                return False
            self._size += 1
            locks[queue] = _Lock(client, epoch, now_ms)
            return True
        if self._is_held(lock, now_ms):
            if lock.client != client or epoch < lock.epoch:
                return False
        elif epoch <= lock.epoch:
            return False
        lock.client, lock.epoch, lock.renewed_ms = client, epoch, now_ms
        return True

    def unlock(self, group: str, client: str, queue: Queue, epoch: int = 0) -> None:
        """Gives a lock back, if the client has it, and not by a lease that began after `epoch`; 0:
        whichever lease. The epoch is remembered."""
        lock = self._locks.get(group, {}).get(queue)
        if lock is not None and lock.client == client and (not epoch or epoch >= lock.epoch):
            lock.client, lock.epoch = None, max(lock.epoch, epoch)

    def holder(self, group: str, queue: Queue, now_ms: int) -> str | None:
        """Returns the client that has a queue's lock."""
        lock = self._locks.get(group, {}).get(queue)
        return lock.client if lock is not None and self._is_held(lock, now_ms) else None

    def epoch(self, group: str, queue: Queue) -> int:
        """Returns the last epoch of a queue, `floor` if it was never locked."""
        lock = self._locks.get(group, {}).get(queue)
        return self.floor if lock is None else lock.epoch

    def may_consume(
        self, group: str, client: str, queue: Queue, now_ms: int, epoch: int | None = None
    ) -> bool:
        """Returns whether a pull or commit of a client is served: nobody else has the lock, and
        the epoch that it names, if it names one, is not older than the lock's."""
        lock = self._locks.get(group, {}).get(queue)
        if lock is None:
            return True
        if epoch is not None and epoch < lock.epoch:
            return False
        return not self._is_held(lock, now_ms) or lock.client == client

    def is_ordered(self, group: str, now_ms: int) -> bool:
        """Returns whether a group has any lock: what its clients give up goes to its dead letters
        at once."""
        return any(self._is_held(lock, now_ms) for lock in self._locks.get(group, {}).values())

    def held(self, now_ms: int) -> int:
        """Returns the number of queues that clients have locked."""
        locks = (lock for found in self._locks.values() for lock in found.values())
        return sum(self._is_held(lock, now_ms) for lock in locks)

    @staticmethod
    def _is_held(lock: _Lock, now_ms: int) -> bool:
        return lock.client is not None and now_ms - lock.renewed_ms < LOCK_LIFE_MS


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer of one replica to `Ballot`: queues that it locked, and epochs that it knows of
    those that it did not for their epoch."""

    granted: frozenset[Queue]
    epochs: Mapping[Queue, int]


class Ballot:
    """A client's request for locks, asked of a majority.

    Args:
        replicas: configured number of them; 1 or less: this broker's table decides.
        won: the queues that this broker's own table gave.
        epoch: what is proposed.
    """

    def __init__(self, replicas: int, won: Iterable[Queue], epoch: int = 0) -> None:
        self.epoch = epoch
        self.asked = frozenset(won)
        self._needed = replicas // 2 + 1
        self._counts = Counter(self.asked)
        self._above = 0

    @property
    def needs_votes(self) -> bool:
        """Returns whether other replicas have to be asked."""
        return self._needed > 1 and bool(self.asked)

    def on_vote(self, vote: Vote) -> None:
        """Another replica answered."""
        self._counts.update(vote.granted & self.asked)
        self._above = max(self._above, *vote.epochs.values(), 0)

    def granted(self) -> frozenset[Queue]:
        """Returns the queues that a majority gave."""
        return frozenset(q for q in self.asked if self._counts[q] >= self._needed)

    def lost(self) -> frozenset[Queue]:
        """Returns the queues to give back."""
        return self.asked - self.granted()

    @property
    def above(self) -> int:
        """Returns the highest epoch that a replica refused for, 0 if none did: another ballot
        above it may win."""
        return self._above if self.lost() else 0
