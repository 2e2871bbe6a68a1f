# cython: annotation_typing=False
"""Election timer of a replica, and its turn among groups that nobody uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.clock import Timer

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica


class ElectionTimer:
    """The one election timer of a replica."""

    __slots__ = ("_timer", "core", "host", "is_deferred", "replica", "spread")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self._timer: Timer | None = None
        #: The next election waits for its turn among groups that nobody uses.
        self.spread = False
        #: It does: the host has it in its line.
        self.is_deferred = False

    def arm(self, delay_ms: int) -> None:
        """Starts the timer anew, or lets the election wait for its turn."""
        replica = self.replica
        self.disarm()
        if self.spread and not replica.dead:
            self.spread = False
            self.is_deferred = True
            self.host.deferred.defer_election(replica)
        elif not replica.dead:
            self._timer = self.host.clock.call_later(delay_ms, self._on_timer)

    def campaign(self) -> None:
        """Somebody wants the group to be led: an election that waits for its turn begins soon."""
        if self.is_deferred:
            # The members that should stand first wait for their turn.
            self.arm(self.core.elections.hasty_delay_ms())

    def begin(self) -> bool:
        """Begins the group's election at its turn, if it still needs one."""
        replica = self.replica
        if replica.dead or not self.is_deferred:
            return False
        # Several members have their turn now: one of them stands first.
        wait_ms = self.core.elections.place_in_line() * self.host.config.election_timeout_ms * 4
        self.arm(wait_ms + self.core.elections.quick_delay_ms())
        return True

    def disarm(self) -> None:
        """Stops the timer."""
        self.is_deferred = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        replica = self.replica
        self._timer = None
        if not replica.dead and not replica.faulty:
            self.core.elections.on_timer()
            replica.run_effects()
