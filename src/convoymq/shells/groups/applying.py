# cython: annotation_typing=False
"""Applies committed entries to the machine of one replica, and hands its effects on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.entries import (
    ENTRY_COMMANDS,
    ENTRY_MEMBERSHIP,
    ENTRY_NOOP,
    ENTRY_VERSION,
    HEADER_SIZE,
    Entry,
    decode_version,
)
from convoymq.model.errors import StorageFault, UnsupportedVersion
from convoymq.replication.raft.membership import decode_membership
from convoymq.replication.raft.types import LEADER

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica

COMMANDS = ENTRY_COMMANDS
NOOP = ENTRY_NOOP


class Applying:
    """The machine of one replica, entry by entry."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.machine = replica.machine
        self.group = replica.group
        # Used for every entry.
        self.sender = replica.sender
        self.serving = replica.serving
        self.snapshots = replica.snapshots
        self.versions = replica.versions
        #: Leader: time from making the entry that was applied last to applying it.
        self.commit_latency_ms = 0
        #: The host will call `apply`.
        self.due = False

    def apply(self) -> None:
        """Applies what is committed and hands the effects on, in one call."""
        replica = self.replica
        self.due = False
        core = self.core
        if self.snapshots.receiving is not None or replica.faulty:
            return
        log = self.log
        machine = self.machine
        commit = core.commit_index
        index = core.applied_index
        assert index <= commit <= log.last_index, "applied what is not committed"
        room = self.host.config.apply_bytes_max
        term = 0
        try:
            while index < commit and room > 0:
                entry = log.entry(index + 1)
                room -= entry.size
                term = entry.term
                if entry.kind == COMMANDS:
                    machine.apply(index + 1, entry.time_ms, entry.data)
                elif entry.kind != NOOP:
                    self._apply_other(entry)
                index += 1
        except Exception as error:
            if isinstance(error, StorageFault) and log.damaged is not None:
                replica.damage.on_damage()
                return
            # What is half applied must not be applied again, and its effects must not leave.
            core.on_applied(index)
            replica.fail(index + 1, "entry", error)
            return
        core.on_applied(index)
        if replica.builder.held:
            # What gathered behind these entries.
            replica.builder.held = False
            self.host.mark_dirty(replica)
        if index < commit:
            self.host.mark_apply(replica)
        if machine.effects:
            self.carry_out()
        if term and term == core.term:
            # The first entry of a term is the one that opened it.
            self.serving.establish()
        self.versions.propose_if_due()
        if self.sender.holding and core.commit_index == log.last_index:
            self.host.deferred.release_between()
        if core.role == LEADER:
            if term == core.term:
                self.commit_latency_ms = self.host.clock.now_ms() - entry.time_ms
            if not self.sender.notice_due:
                self.sender.notice_due = True
                self.host.mark_notice(replica)

    def _apply_other(self, entry: Entry) -> None:
        """An entry that is not the machine's. Raises UnsupportedVersion."""
        replica = self.replica
        if entry.kind == ENTRY_MEMBERSHIP:
            self.host.on_membership(replica, decode_membership(entry.data[HEADER_SIZE:]))
            self.versions.due = True
        elif entry.kind == ENTRY_VERSION:
            version = decode_version(entry.data)
            # A version never falls; two leaders may have proposed the same.
            if version > self.machine.version:
                self.machine.set_version(version)
                self.host.note(
                    "raft.version_raised", group=self.group, machine=replica.kind, version=version
                )
                self.versions.changed()
                self.versions.due = True
                replica.sink.on_version_raised(replica)
        else:
            raise UnsupportedVersion(f"entry kind {entry.kind} is not known")

    def carry_out(self) -> None:
        """Hands the machine's effects on."""
        effects = self.machine.effects
        self.machine.effects = []
        self.replica.sink.on_effects(effects, self.replica)
