# cython: annotation_typing=False
"""A replica whose log is damaged: it is wiped, and fetched from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.storage.types import Damage

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica


class DamagedLog:
    """Recovery of one replica whose log is damaged."""

    __slots__ = ("_pristine", "core", "group", "host", "is_marking", "log", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.group = replica.group
        self._pristine = replica.machine.snapshot()
        #: The log is wiped when the mark in the vote is on disk.
        self.is_marking = False

    def on_damage(self) -> None:
        """A log of this node was found damaged: perhaps this one."""
        replica = self.replica
        if self.log.damaged is not None and not replica.faulty:
            self.resynchronise(self.log.damaged)
            replica.run_effects()

    def resynchronise(self, damage: Damage) -> None:
        """The log is damaged: nothing of it is served; it is wiped and fetched from the others."""
        replica = self.replica
        self.host.note("raft.replica_damaged", group=self.group, reason=damage.reason)
        replica.faulty = damage.reason
        self.host.active.add(self.group)
        replica.snapshots.end()
        core = self.core
        core.lost_data.quarantine(bool(damage.vote_lost))
        replica.cancel_timers()
        if (core.durable_term, core.durable_vote) == (core.term, core.voted_for):
            self.log.wipe(self.on_wiped)
        else:
            # Not before the mark is on disk: see `LostData.quarantine`.
            self.is_marking = True

    def on_wiped(self, error: BaseException | None) -> None:
        """The log is empty, or (`error`) could not be wiped."""
        replica = self.replica
        if replica.dead:
            return
        if error is not None:
            self.host.note("raft.wipe_failed", group=self.group, error=str(error))
            return
        replica.faulty = ""
        replica.machine.restore(self._pristine)
        replica.machine.effects = []
        replica.versions.changed()
        self.core.lost_data.on_log_lost()
        replica.run_effects()
