# cython: annotation_typing=False
"""Machine versions of one group: which is in force, and when the leader raises it (ADR 0016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.entries import ENTRY_VERSION, encode_version, make_entry
from convoymq.replication import versions as supported
from convoymq.replication.raft.types import LEADER

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica


class VersionRaising:
    """The version of one replica's machine."""

    __slots__ = ("allowed", "core", "due", "group", "host", "log", "proposed_index", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.host = replica.host
        self.core = replica.core
        self.log = replica.log
        self.group = replica.group
        #: Command types that other nodes may forward.
        self.allowed: bytes | None = None
        #: Leader: index of the last version that it proposed.
        self.proposed_index = 0
        #: Who supports which version is to be looked at anew.
        self.due = False

    def changed(self) -> None:
        """A version is in force: other command types may come."""
        replica = self.replica
        machine = replica.machine
        self.allowed = machine.command_types(machine.version)
        self.host.on_version_in_force(machine.KIND, machine.version)

    def propose_if_due(self) -> None:
        """Looks anew, if something has changed since or it could not be proposed then."""
        if self.due:
            self.due = False
            self.propose()

    def propose(self) -> None:
        """Leader: proposes the newest version that all members support. One that is not connected
        may come back with an older release, but for what every node supports."""
        replica = self.replica
        core = self.core
        machine = replica.machine
        if machine.version >= machine.VERSION or core.role != LEADER:
            return
        if self.host.config.hold_versions:
            return
        if core.transfer_target or not replica.takes_entries:
            # Both may pass without an entry that is applied: `Replica.tick` asks again.
            self.due = True
            self.host.active.add(self.group)
            return
        established = replica.serving.established == (core.leader, core.term)
        if not established or self.proposed_index > core.applied_index:
            return
        newest = machine.VERSION
        floor = supported.floor_of(self.host.versions, replica.kind)
        for node in core.members.nodes:
            if node == self.host.node:
                continue
            if node not in core.connected:
                if floor <= machine.version:
                    return
                newest = min(newest, floor)
                continue
            newest = min(
                newest, supported.newest_of(self.host.supports.get(node, {}), replica.kind)
            )
        if newest <= machine.version:
            return
        replica.open_term()
        if replica.builder.used:
            replica.seal()
        index = self.proposed_index = self.log.last_index + 1
        replica.sender.append(
            make_entry(
                self.group, index, core.term, replica.time.now_ms(), ENTRY_VERSION,
                encode_version(newest),
            )
        )  # fmt: skip
