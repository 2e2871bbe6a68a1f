"""A channel into a queue that a host keeps, on any node."""

from __future__ import annotations

from convoymq.queues.classic.queue import ClassicQueue
from convoymq.sim.clients import Channel, Traits
from convoymq.sim.hosted.book import QueueReferee

PERSISTENT_SHARE = 0.7
PRIORITY_SHARE = 0.6
PRIORITY_MAX = 12
EXPIRATIONS_MS = (0, 5, 100, 2_000)


class QueueChannel(Channel):
    """See the module text."""

    @property
    def _book(self) -> QueueReferee:
        assert isinstance(self._referee, QueueReferee)
        return self._referee

    def _draw_traits(self, identity: bytes) -> Traits:
        scheduler = self._scheduler
        traits = Traits(persistent=scheduler.chance(PERSISTENT_SHARE))
        if scheduler.chance(self.config.attribute_chance):
            traits.expiration = scheduler.rng.choice(EXPIRATIONS_MS)
        if scheduler.chance(PRIORITY_SHARE):
            traits.priority = scheduler.between(0, PRIORITY_MAX)
        self._book.on_sent(identity, traits)
        return traits

    def _now_ms(self) -> int:
        queue = self.client.queue
        assert isinstance(queue, ClassicQueue)
        return queue.host.now_ms()

    def _check_avoids(
        self, consumer: int, block: bytes, command: int, first: int, count: int
    ) -> None:
        """The book follows it: another master need not have heard what was said."""

    def _receive(
        self,
        consumer: int,
        message_id: int,
        identity: bytes,
        acquired: int,
        delivered: int,
        said: bytes | None = None,
    ) -> None:
        receiver = (self.client.session, consumer, message_id)
        self._book.on_received(receiver, identity, acquired)
