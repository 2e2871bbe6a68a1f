# cython: annotation_typing=False
"""Work that the groups of a node defer by some milliseconds, to do it together.

Entries for followers that nobody waits for, batches that wait to be coalesced, the first entries of
new groups, and elections of groups that nobody uses.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from convoymq.model.clock import Timer
from convoymq.model.rounds import run_each

if TYPE_CHECKING:
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.shells.groups.replica import Replica

IDLE_ELECTIONS_MS = 10
IDLE_ELECTIONS = 10
"""Groups that nobody uses elect a new leader so many at a time, at least so far apart: thousands at
once would keep those waiting that are in use. A node that is late begins fewer."""
OPENING_MS = 10
"""New groups that nobody has used yet open their terms together, so much later."""


class Deferred:
    """See the module text."""

    def __init__(self, host: ReplicaHost) -> None:
        self.host = host
        self.clock = host.clock
        self.config = host.config
        #: The node is to call `release` after it has told its clients what is committed.
        self.release_due = False
        #: Replicas that hold back entries for deferred followers, since when.
        self._holding: list[Replica] = []
        self._holding_since = 0
        self._holding_timer: Timer | None = None
        #: Replicas of groups that nobody uses whose election waits for its turn.
        self._elections: deque[Replica] = deque()
        #: Founders whose term is not opened yet.
        self._openings: list[Replica] = []
        #: Replicas whose open batch waits to be coalesced.
        self._batches_due: list[Replica] = []

    def hold(self, replica: Replica) -> None:
        """The replica holds entries back; all that do are released together."""
        host = self.host
        replica.sender.holding = True
        if not self._holding:
            self._holding_since = host.now
            self._holding_timer = self.clock.call_later(
                2 * self.config.deferral_ms, self._held_long
            )
        self._holding.append(replica)

    def coalesce(self, replica: Replica) -> None:
        """The replica's open batch waits for commands to be coalesced with, but not for long."""
        if not replica.batch_due:
            replica.batch_due = True
            if not self._batches_due:
                self.clock.call_later(self.config.deferral_ms, self._on_batches_due)
            self._batches_due.append(replica)

    def _on_batches_due(self) -> None:
        host = self.host
        due = self._batches_due
        self._batches_due = []
        for replica in due:
            replica.batch_due = False
            if replica.builder.held and not replica.dead:
                host.mark_dirty(replica)

    def release_between(self) -> None:
        """All that a replica appended is committed: a good time for what was held back, its flush
        disturbs nobody who waits. The timer is for when there is none."""
        host = self.host
        if host.now - self._holding_since >= self.config.deferral_ms:
            self.release_due = True

    def hold_opening(self, replica: Replica) -> None:
        """The founder of a new group opens its term when it is used, or soon."""
        if not self._openings:
            self.clock.call_later(OPENING_MS, self._open_terms)
        self._openings.append(replica)

    def _open_terms(self) -> None:
        host = self.host
        host.now = self.clock.monotonic_ms()
        due = self._openings
        self._openings = []
        run_each(due, _open_term, host.stop_failed)

    def defer_election(self, replica: Replica) -> None:
        """Puts the election of a group that nobody uses at the end of the line."""
        if not self._elections:
            self.clock.call_later(IDLE_ELECTIONS_MS, self._begin_elections)
        self._elections.append(replica)

    def _begin_elections(self) -> None:
        begun = 0

        def begin(replica: Replica) -> None:
            nonlocal begun
            begun += replica.election_timer.begin()

        while self._elections and begun < IDLE_ELECTIONS:
            run_each((self._elections.popleft(),), begin, self.host.stop_failed)
        if self._elections:
            self.clock.call_later(IDLE_ELECTIONS_MS, self._begin_elections)

    def _held_long(self) -> None:
        host = self.host
        host.now = self.clock.monotonic_ms()
        self.release()
        host.wake()

    def release(self) -> None:
        """Sends what was held back. When `release_due`, the node calls this after it has told its
        clients what is committed: who gets it may take the processor at once."""
        self.release_due = False
        assert self._holding_timer is not None
        self._holding_timer.cancel()
        holding = self._holding
        self._holding = []
        run_each(holding, _release, self.host.stop_failed)


def _open_term(replica: Replica) -> None:
    if not replica.dead:
        replica.open_term()


def _release(replica: Replica) -> None:
    if not replica.dead:
        replica.sender.release()
