"""Fences of leaders that append what clients send under a lease of their node alone.

Commands wait in the open batch while the fence is closed. Beyond a bound they are dropped: sessions
send theirs again, and the leader says its own again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from convoymq.kernels.batch import CommandBuilder
from convoymq.replication.raft.types import LEADER

if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica

WAITING_BYTES_MAX: Final = 1 << 20
ANY_TERM: Final = -1
NO_TERM: Final = 0


class AppendFence:
    """Fence of one replica; made by whoever has the lease of the node
    (`ReplicaHost.lease_until_ms`)."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.term = NO_TERM
        """The term in which its leader may append commands; ANY_TERM, NO_TERM."""
        self._dropped = False

    @property
    def is_open(self) -> bool:
        """Returns whether a leader may append commands now."""
        replica = self.replica
        if self.term not in (ANY_TERM, replica.term):
            return False
        return replica.host.now < replica.host.lease_until_ms

    def holds_back(self) -> bool:
        """Returns whether the open batch has to wait; once a round."""
        if self.is_open:
            return False
        builder = self.replica.builder
        if builder.used > WAITING_BYTES_MAX:
            builder.discard_unsent()
            self._dropped = True
        return True

    def append_first(self, type: int, body: bytes) -> None:
        """Leader: appends a command of its own before all that waits in the open batch."""
        replica = self.replica
        assert replica.core.role == LEADER, "only a leader appends entries of its own"
        replica.open_term()
        builder = CommandBuilder()
        builder.add(type, 0, 0, 0, 0, len(body), body)
        index = replica.log.last_index + 1
        time_ms = replica.time.now_ms()
        replica.sender.append(builder.take_entry(replica.group, index, replica.term, time_ms))

    def reconsider(self) -> None:
        """Called when the fence may be open by now: what waits goes on."""
        replica = self.replica
        if replica.dead or replica.core.role != LEADER:
            return
        if self._dropped:
            self._dropped = False
            replica.serving.greet()
        if replica.builder.used:
            replica.host.mark_dirty(replica)
