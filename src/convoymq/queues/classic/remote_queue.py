# cython: annotation_typing=False
"""A node's handle of a classic queue whose home is another node: sends the sealed batch there and
gets the effects back."""

from __future__ import annotations

import asyncio

from convoymq.kernels.batch import CMD_SESSION_CLOSE, CommandBuilder
from convoymq.model.errors import NotFound, Refused, Unavailable
from convoymq.model.refusals import missing
from convoymq.queues.classic.client import ClassicClient
from convoymq.queues.classic.queue import ClassicQueue
from convoymq.queues.classic.reservation_clients import AwayReservations
from convoymq.queues.interface import ClientEvents, Row

HOME_POLL_S = 0.02


class RemoteQueue(AwayReservations, ClassicQueue):
    """The queue as seen from another node."""

    _held = False
    """The batch waits for room on the link."""

    def _session_for(self, session: int) -> int:
        # A fresh one: the home node may not have noticed yet that a former stream broke.
        return self.host.new_session()

    def client(self, session: int, events: ClientEvents) -> ClassicClient:
        """See `ClassicQueue`; one that comes while the link is full is told so."""
        made = super().client(session, events)
        if self._held:
            self.host.soon(lambda: self._tell_held(self._held))
        return made

    def end_of_round(self, now_ms: int) -> None:
        """Sends the open batch home; it waits, and so do publishers, while the link is full."""
        if self.ended is not None:
            self._seal_ended()
        elif self.known_seqs[0]:
            return
        elif self.builder.used and self.host.has_room(self):
            self.host.send_commands(self, self.builder.take_forward(self.group, 0))
        elif self.builder.used:
            self._tell_held(True)

    def on_room(self, node: int) -> None:
        """The link to the home node takes bulk again."""
        if self.builder.used:
            self.host.mark_dirty(self)
        self._tell_held(False)

    def on_lost(self, node: int) -> None:
        """The home node is suspected: the batch waits on. Or it is gone: `home_lost` follows."""
        self.on_room(node)

    def _tell_held(self, held: bool) -> None:
        if held or self._held:
            self._held = held
            self.tell_all(lambda client: client.on_flow(held))

    def home_lost(self) -> None:
        """The home node is gone: pending publishes are refused, consumers cancelled."""
        self._cancel_all("home node is down")
        self.end(self.host.home_down(self.record), published_ok=False)

    def crash(self, error: Refused) -> None:
        """See `ClassicQueue`; also when the home node has given up sessions of this handle. Those
        that it still has end."""
        closing = CommandBuilder()
        for session, client in self.clients.items():
            closing.add(CMD_SESSION_CLOSE, 0, session, client.target.seq + 1, 0, 0, b"")
        super().crash(error)
        if closing.used:
            self.host.send_commands(self, closing.take_forward(self.group, 0))

    def delete(self) -> None:
        """The queue is gone from the tree."""
        self._cancel_all("deleted")
        self.end(missing(self.subject), published_ok=True)

    async def ready(self, timeout: float) -> None:
        """Raises NotFound when the home node is away."""
        self.host.check_home(self)

    async def wait_until_open(self, timeout: float) -> None:
        """See `Queue`. The home node may be a few milliseconds behind; commands must not reach it
        before."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        await self.counts()
                        return
                    except NotFound:
                        if not self.host.is_up(self.record.home):
                            raise
                        await asyncio.sleep(HOME_POLL_S)
        except TimeoutError:
            raise Unavailable(f"{self.subject} was not opened in time") from None

    async def counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers), asked from the home node."""
        self.host.check_home(self)
        try:
            messages, consumers = await self.host.remote_counts(self)
        except Unavailable:
            raise self.host.home_down(self.record) from None
        return messages, consumers

    def info(self) -> Row:
        """Local knowledge only: where it lives and whether that node is up."""
        up = self.host.is_up(self.record.home)
        return {
            "state": "running" if up else "down",
            "node": self.host.node_name(self.record.home),
        }
