"""End of a queue's ring at the host of mirrored queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.replication.ring.views import RingView

if TYPE_CHECKING:
    from convoymq.queues.mirrored.host import MirroredHost


class RingEnd:
    """One queue's end of the ring on this node. Implements `RingSink`."""

    def __init__(self, host: MirroredHost, group: int) -> None:
        self._host = host
        self._group = group

    def on_broadcast(self, sender: int, number: int, payload: bytes) -> None:
        """See `RingSink`."""
        self._host.on_broadcast(self._group, sender, number, payload)

    def on_complete(self, _number: int) -> None:
        """See `RingSink`."""
        master = self._host.master_of(self._group)
        if master is not None:
            self._host.contain(master, master.on_room)

    def on_view(self, _view: RingView) -> None:
        """See `RingSink`. The host follows the record, which is the same."""

    def on_expelled(self) -> None:
        """See `RingSink`. The host follows the record."""
