"""The leases of a member of a group: what it holds, what it gives back, and its heartbeats.

A heartbeat renews all leases of the member; its answer lists them. A lease counts from when the
heartbeat was sent, and `margin` before its end nothing is started any more. A lease that the answer
does not list has ended; one that was given back is told as released until the coordinator has heard
of it.

Source: ordered topics, section 6.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from convoymq.topics.rules.heartbeats import Heartbeat, Leases
from convoymq.topics.rules.refusals import Code

RENEW_MS = 3_000
LOST = frozenset((Code.LEASE_FENCED, Code.NOT_VISIBLE))
"""Answers of a partition to who does not own it any more."""


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send to the coordinator."""

    heartbeat: Heartbeat


@dataclass(slots=True)
class HeldLease:
    """A lease that a member holds."""

    pid: int
    epoch: int
    group_epoch: int
    until_ms: int
    revoked: bool = field(default=False, kw_only=True)


H = TypeVar("H", bound=HeldLease)


class Leaseholder(ABC, Generic[H]):
    """The leases of one member."""

    def __init__(self, member: str, *, ttl_ms: int, margin_ms: int, renew_ms: int) -> None:
        self.member = member
        self.ttl_ms = ttl_ms
        self.margin_ms = margin_ms
        self.renew_ms = renew_ms
        self.held: dict[int, H] = {}
        self.leaves = False
        self.heartbeat_due_ms = 0
        self._over: dict[int, int] = {}
        """The latest epoch of each partition that this member held and holds no more."""
        self._releasing: dict[int, int] = {}
        """Ended leases that the coordinator may not know to be over."""
        self._told_ms: dict[int, int] = {}
        """First times at which a heartbeat told of those."""
        self._running: dict[int, int] = {}
        """Leases that ended, and count as held: handlers run for them."""
        self._answered_ms = -1
        self._group_epoch = 0

    @abstractmethod
    def _new_held(self, pid: int, epoch: int, group_epoch: int) -> H:
        """Returns a lease that begins."""

    def take_leases(self, answer: Leases) -> bool:
        """Takes the answer to a heartbeat; False for one that an earlier answer has overtaken."""
        if answer.sent_ms <= self._answered_ms:
            return False
        self._answered_ms = answer.sent_ms
        self._group_epoch = answer.group_epoch
        until_ms = answer.sent_ms + self.ttl_ms - self.margin_ms
        for pid, told_ms in list(self._told_ms.items()):
            # What the coordinator has heard of, and lists no more, is over on both sides.
            if told_ms <= answer.sent_ms and answer.leases.get(pid) != self._releasing[pid]:
                del self._releasing[pid], self._told_ms[pid]
        for pid in list(self.held):
            if answer.leases.get(pid) != self.held[pid].epoch:
                self.end(self.held[pid])
        for pid, epoch in answer.leases.items():
            held = self.held.get(pid)
            if held is None:
                if epoch <= self._over.get(pid, 0):
                    self._releasing[pid] = epoch
                    continue
                if pid in self._running:
                    continue
                held = self.held[pid] = self._new_held(pid, epoch, answer.group_epoch)
            held.until_ms = until_ms
            # Once revoked it is given back: what waited is gone.
            held.revoked = held.revoked or pid in answer.revoked
        return True

    def may_start(self, held: H, now_ms: int) -> bool:
        """True while the lease holds for certain."""
        return now_ms < held.until_ms

    def revoke_all(self, now_ms: int) -> None:
        """Gives everything back, as soon as it may be, and leaves the group."""
        self.leaves = True
        for held in self.held.values():
            held.revoked = True
        self.heartbeat_due_ms = now_ms

    def end(self, held: H) -> None:
        """A lease has ended."""
        self._over[held.pid] = self._releasing[held.pid] = held.epoch
        self._told_ms.pop(held.pid, None)
        del self.held[held.pid]

    @property
    def is_gone(self) -> bool:
        """True when the member leaves, and has nothing left that its coordinator may not know."""
        return self.leaves and not self.held and not self._releasing and self._answered_ms >= 0

    def take_heartbeat(self, now_ms: int) -> SendHeartbeat | None:
        """Returns the heartbeat that is due."""
        if now_ms < self.heartbeat_due_ms:
            return None
        self.heartbeat_due_ms = now_ms + self.renew_ms
        epochs = {pid: held.epoch for pid, held in self.held.items()}
        epochs.update(self._running)
        released = {p: e for p, e in self._releasing.items() if self._running.get(p) != e}
        for pid in released:
            self._told_ms.setdefault(pid, now_ms)
        return SendHeartbeat(
            Heartbeat(self.member, now_ms, self._group_epoch, epochs, released, self.leaves)
        )
