"""A channel into a mirrored queue."""

from __future__ import annotations

from convoymq.sim.classic.channel import ClassicChannel
from convoymq.sim.mirrored.referee import MirroredReferee


class MirroredChannel(ClassicChannel):
    """See the module text."""

    def _note_sent(
        self, identity: bytes, *, persistent: bool, expiration: int | None, priority: int | None
    ) -> None:
        assert isinstance(self._referee, MirroredReferee)
        self._referee.on_sent(identity, persistent=persistent)

    def _receive(
        self, consumer: int, message_id: int, identity: bytes, acquired: int, delivered: int
    ) -> None:
        assert isinstance(self._referee, MirroredReferee)
        self._referee.on_received(identity, acquired)
