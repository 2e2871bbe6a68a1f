"""Bugs of machine versions."""

from __future__ import annotations

from typing import Any

from tests.sim.planted import parts
from tests.sim.planted.registry import planting

plant = planting("mixed")


@plant("a version is raised before all members support it", "none")
def version_raised_too_early() -> None:
    from convoymq.replication import versions as supported

    supported.newest_of = lambda known, kind: 2


@plant("a version counts from when it is proposed, not from its entry", "none")
def version_counts_from_its_proposal() -> None:
    from convoymq.shells.groups.version_raising import VersionRaising

    propose = VersionRaising.propose

    def planted(self: Any) -> None:
        before = self.proposed_index
        propose(self)
        if self.proposed_index != before:
            self.replica.machine.set_version(2)

    VersionRaising.propose = planted  # type: ignore[method-assign]


@plant("a snapshot leaves out the version in force", "crash,kill,membership")
def snapshot_without_version() -> None:
    import msgspec

    machine = parts.machine()
    snapshot = machine.snapshot

    def planted(self: Any) -> bytes:
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(snapshot(self)), "version": 1})

    machine.snapshot = planted
