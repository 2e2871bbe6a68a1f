# cython: annotation_typing=False
"""A node's handle of a classic queue whose master is elsewhere, or became one later.

When the master goes, clients stay: what they send waits until another master is known, which gets
what has no answer and the consumers (`client.MirroredClient`). Where none can take over, the queue
is lost as a plain one is. A master that was promoted on this node stands behind the handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from convoymq.kernels.link_frames import HEADER_SIZE
from convoymq.metadata.machine import QueueRecord
from convoymq.model.clock import Timer
from convoymq.model.refusals import timed_out
from convoymq.model.tables import Table
from convoymq.queues.classic.host import SEQ_MAX
from convoymq.queues.classic.remote_queue import HOME_POLL_S, RemoteQueue
from convoymq.queues.interface import Row
from convoymq.queues.mirrored.client import MirroredClient
from convoymq.queues.mirrored.features import FEATURES
from convoymq.queues.reservation_reads import Fields, Room, no_wait

if TYPE_CHECKING:
    from convoymq.queues.mirrored.host import MirroredHost
    from convoymq.queues.mirrored.master import MasterQueue

SEEK_AGAIN_MS = 100
WAIT_MS_MAX = 60_000
"""Clients wait for another master for so long."""
Seq = Annotated[int, msgspec.Meta(ge=0, le=SEQ_MAX)]
Place = tuple[int, Seq, Seq, Seq]
"""`MirroredClient.place`."""


class MirroredHandle(RemoteQueue):
    """See the module text."""

    features = FEATURES
    host: MirroredHost
    master: MasterQueue | None = None
    """The queue itself, if it is on this node."""
    waits_since_ms: int | None = None
    """Time since when there is no master, by the monotonic clock."""

    def __init__(
        self,
        host: MirroredHost,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
    ) -> None:
        super().__init__(host, record, arguments, settings)
        self._served_by = record.view.master if record.view is not None else 0
        self._seeking: Timer | None = None

    # --- masters -------------------------------------------------------------------------

    def follow(self, record: QueueRecord) -> None:
        """The tree has a newer record."""
        before, self.record = self.record, record
        view = record.view
        if view is None or self._served_by == view.master:
            return
        began = not self._served_by and before.home == record.home
        self._served_by = view.master
        if not began:
            self.master = None
            self.lose_master()
            self.seek_master()

    def take_clients(self, master: MasterQueue) -> None:
        """Takes over the clients of a master of this node that leads no more."""
        if master.builder.used:
            master.builder.discard_unsent()
        self.clients, master.clients = {**self.clients, **master.clients}, {}
        self.master = None
        for client in self._clients():
            client.move_to(self)
        self.lose_master()

    def lose_master(self) -> None:
        """Holds commands back until there is a master again."""
        if self.waits_since_ms is None and self.ended is None:
            self.waits_since_ms = self.host.clock.monotonic_ms()
            self.host.without_master[self] = None
            for client in self._clients():
                client.lose_master()
            self._tell_held(True)

    def seek_master(self) -> None:
        """Asks the recorded master to take the clients over, if it can be reached."""
        view = self.record.view
        if self.waits_since_ms is None or view is None or not view.is_live(view.master):
            return
        if self.builder.used:
            self.builder.discard_unsent()
        self.host.ask_master(self, view.master, [each.place() for each in self._clients()])

    def seek_later(self) -> None:
        """The master is not open yet: it is asked again in a while."""
        if self._seeking is None:
            self._seeking = self.host.clock.call_later(SEEK_AGAIN_MS, self._seek_again)

    def _seek_again(self) -> None:
        self._seeking = None
        self.seek_master()

    def on_master(self, number: int) -> None:
        """A master has taken the clients over."""
        if self.waits_since_ms is None or number != self._served_by or self.ended is not None:
            return
        self.waits_since_ms = None
        if self.builder.used:
            self.builder.discard_unsent()
        for client in self._clients():
            self.tell(client, lambda told: cast(MirroredClient, told).go_on())
        self._tell_held(False)

    def _clients(self) -> list[MirroredClient]:
        return [cast(MirroredClient, client) for client in self.clients.values()]

    # --- rounds --------------------------------------------------------------------------

    def end_of_round(self, now_ms: int) -> None:
        """See `RemoteQueue`."""
        if self.ended is None and self.waits_since_ms is not None:
            if self.builder.used:
                self._tell_held(True)
        elif self.ended is None and self.master is not None:
            if self.builder.used:
                data = self.builder.take_forward(self.group, 0)
                self.master.builder.adopt(data, HEADER_SIZE, len(data))
        else:
            super().end_of_round(now_ms)

    # --- Queue ---------------------------------------------------------------------------

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `Queue`."""
        super().configure(settings)
        # One that was opened while the node is paused does not have the clients yet.
        master = self.host.master_of(self.group)
        if master is not None:
            master.configure(settings)

    @property
    def known_leader(self) -> int | None:
        """See `Queue`."""
        waits = self.waits_since_ms is not None or self.ended is not None
        home = self.record.home
        return home if not waits and self.host.is_up(home) else None

    async def ready(self, timeout: float) -> None:
        """Waits for a master, as another one may be about to take over. Raises NotFound when none
        does."""
        try:
            async with asyncio.timeout(timeout):
                while self.waits_since_ms is not None and self.ended is None:
                    await asyncio.sleep(HOME_POLL_S)
        except TimeoutError:
            raise timed_out(self.subject) from None
        if self.ended is not None:
            raise self.ended
        if self.master is None:
            await super().ready(timeout)

    async def counts(self) -> tuple[int, int]:
        """See `Queue`."""
        if self.record.view is not None:
            await self.ready(self.host.counts_timeout_s)
        return await super().counts() if self.master is None else await self.master.counts()

    def synchronise(self, *, cancels: bool = False) -> None:
        """See `Queue`."""
        if self.record.view is None:
            super().synchronise(cancels=cancels)
        elif self.master is not None:
            self.master.synchronise(cancels=cancels)
        else:
            self.host.check_home(self)
            self.host.ask_sync(self, cancels=cancels)

    async def serve_reservation(self, request: Fields, room: Room = no_wait) -> list[object]:
        """See `Queue`."""
        if self.master is None:
            return await super().serve_reservation(request, room)
        return await self.master.serve_reservation(request, room)

    def reservations(self) -> list[Row]:
        """See `Queue`."""
        return [] if self.master is None else self.master.reservations()

    def activity(self) -> list[tuple[int, int, str]]:
        """See `Queue`."""
        return [] if self.master is None else self.master.activity()

    def info(self) -> Row:
        """See `RemoteQueue`."""
        if self.master is not None:
            return self.master.info()
        row = super().info()
        return {**row, "state": "down"} if self.waits_since_ms is not None else row
