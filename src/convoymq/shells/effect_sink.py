"""Effect sink: carries out the effects of a machine's replica on a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from convoymq.replication.machine import Effect

Replica = TypeVar("Replica", contravariant=True)
"""Replica of the shell that runs the machine."""


class EffectSink(Protocol[Replica]):
    """Executes a machine's effects on this node. Implemented by the handles of queues."""

    def on_effects(self, effects: Sequence[Effect], replica: Replica) -> None:
        """All effects of one apply, in order; the sink picks those for this node's sessions, and
        forwards those for nodes without a replica when this node leads."""

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """Takes note of the leader (None: nobody known). For a leader: after the no-op of its term
        was applied here, and again when the link to it came back: whatever is pending is resent
        then."""

    def on_link_frame(
        self, node: int, kind: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """An APPLIED or DELIVER frame: an effect that another node's replica carries out for
        this one."""

    def on_version_raised(self, replica: Replica) -> None:
        """Another version of the machine is in force (ADR 0016)."""

    def on_restored(self) -> None:
        """The machine's state was replaced by a snapshot."""

    def on_replica_gone(self) -> None:
        """Takes note that this node's replica left the group or stopped, possibly before it applied
        what the leader counted on it for: whatever clients here miss is to be asked for."""
