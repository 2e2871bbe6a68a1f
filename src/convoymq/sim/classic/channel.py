"""A channel into a classic queue, at its home or elsewhere."""

from __future__ import annotations

from convoymq.kernels import batch
from convoymq.queues.classic.machine import FLAG_PRIORITY
from convoymq.queues.classic.runs import FLAG_EXPIRATION
from convoymq.queues.interface import GetResult, QueueClient
from convoymq.sim.classic.referee import ClassicReferee
from convoymq.sim.clients import Channel, record_of
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.records import identity_of

PERSISTENT_SHARE = 0.7
PRIORITY_SHARE = 0.6
PRIORITY_MAX = 12
EXPIRATIONS_MS = (0, 5, 100, 2_000)


class ClassicChannel(Channel):
    """See the module text."""

    @property
    def _book(self) -> ClassicReferee:
        assert isinstance(self._referee, ClassicReferee)
        return self._referee

    def _publish(self) -> None:
        config, scheduler = self.config, self._scheduler
        for _ in range(scheduler.between(1, config.burst_max)):
            if len(self.unconfirmed) >= config.unconfirmed_max:
                return
            self._count += 1
            self._tag += 1
            identity = self.publisher.to_bytes(4, "big") + self._count.to_bytes(8, "big")
            large = scheduler.chance(config.body_large_chance)
            size = scheduler.skewed(0, config.body_large_max if large else config.body_max)
            persistent = scheduler.chance(PERSISTENT_SHARE)
            expiration = None
            if scheduler.chance(config.attribute_chance):
                expiration = scheduler.rng.choice(EXPIRATIONS_MS)
            priority = None
            if scheduler.chance(PRIORITY_SHARE):
                priority = scheduler.between(0, PRIORITY_MAX)
            self.unconfirmed[self._tag] = identity
            self._workload.published += 1
            self._note_sent(
                identity, persistent=persistent, expiration=expiration, priority=priority
            )
            body = identity + bytes(size)
            made = record_of(body, priority=priority, expiration=expiration, persistent=persistent)
            flags = FLAG_EXPIRATION if expiration is not None else 0
            flags |= FLAG_PRIORITY if priority is not None else 0
            self.client.target.publish(made, len(body), self._tag, flags)

    def _note_sent(
        self, identity: bytes, *, persistent: bool, expiration: int | None, priority: int | None
    ) -> None:
        self._book.on_sent(
            identity, persistent=persistent, expiration_ms=expiration, priority=priority
        )

    def _receive(
        self, consumer: int, message_id: int, identity: bytes, acquired: int, delivered: int
    ) -> None:
        self._book.on_received(self.client.session, consumer, message_id, identity)

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """An answer to get."""
        self._gets -= 1
        if self._gets < 0:
            raise InvariantBroken(f"{self.name}: more answers to get than calls")
        block, command, record, get_id, acquired, failed, _, _ = result
        if block is None:
            return
        identity = identity_of(batch.record(block, command, record))
        self._receive(0, get_id, identity, acquired, failed)
        self._workload.delivered += 1
        self.held.setdefault(0, []).append(get_id)
        self.held[0].sort()
