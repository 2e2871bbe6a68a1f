"""A channel into a mirrored queue."""

from __future__ import annotations

from convoymq.queues.interface import Delivery, QueueClient
from convoymq.sim.classic.channel import ClassicChannel
from convoymq.sim.mirrored.referee import MirroredReferee


class MirroredChannel(ClassicChannel):
    """See the module text. Another master gives out again what the last one may have given, so the
    order of what is given out is the referee's to judge, master by master."""

    def _note_sent(
        self, identity: bytes, *, persistent: bool, expiration: int | None, priority: int | None
    ) -> None:
        assert isinstance(self._referee, MirroredReferee)
        self._referee.on_sent(identity, persistent=persistent)

    def _receive(
        self, consumer: int, message_id: int, identity: bytes, acquired: int, delivered: int
    ) -> None:
        pass

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Messages arrive."""
        self._last_fresh.clear()
        super().on_deliver(client, delivery)
