"""A channel into a queue that is migrated, and what is known of the queue's messages.

A channel goes on in the successor as one of AMQP does: consumers keep their numbers, what they hold
comes again.
"""

from __future__ import annotations

from convoymq.kernels import batch
from convoymq.model.tables import Field
from convoymq.queues.interface import ConsumerSpec, GetResult, Queue, QueueClient
from convoymq.sim.clients import Channel, Traits, ranges_of, record_of
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.records import identity_of

FIRST = Field("S", b"first")
"""Offset at which consumers begin whose queue is a stream, or becomes one."""


class Book:
    """Answers that publishers and consumers of one queue got, whatever type it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: set[bytes] = set()
        self.confirmed: set[bytes] = set()
        self.settled: set[bytes] = set()
        """Messages that some consumer has acknowledged or rejected; the queue may not know it."""
        self.fresh: dict[bytes, int] = {}
        """Message -> how many disturbances there were when it came for the first time."""

    def on_confirmed(self, identity: bytes) -> None:
        """See `ChannelReferee`."""
        if identity not in self.sent:
            raise InvariantBroken(f"{self.name}: {identity.hex()} is confirmed and was never sent")
        self.confirmed.add(identity)

    def on_received(self, identity: bytes, *, fresh: bool, disturbances: int) -> None:
        """A client got a message."""
        if identity not in self.sent:
            raise InvariantBroken(f"{self.name}: {identity.hex()} came and was never sent")
        if fresh and self.fresh.get(identity) == disturbances:
            raise InvariantBroken(f"{self.name}: {identity.hex()} came twice, not as redelivered")
        self.fresh[identity] = disturbances

    def waits_for(self) -> str:
        """Returns what was confirmed and never came to its end; empty when nothing is left."""
        left = self.confirmed - self.settled
        some = ", ".join(sorted(identity.hex() for identity in left)[:5])
        return f"{self.name}: {len(left)} confirmed messages: {some}" if left else ""


class MigratedChannel(Channel):
    """See the module text."""

    _referee: Book

    def _prepare(self) -> None:
        self._specs: dict[int, ConsumerSpec] = {}
        self._names: dict[tuple[int, int], bytes] = {}
        """(consumer, message id) -> message, of what is held."""
        self._first_session = 0

    # Publishing.

    def _publish(self) -> None:
        config, scheduler = self.config, self._scheduler
        for _ in range(scheduler.between(1, config.burst_max)):
            if len(self.unconfirmed) >= config.unconfirmed_max:
                return
            self._count += 1
            self._tag += 1
            identity = self.publisher.to_bytes(4, "big") + self._count.to_bytes(8, "big")
            size = scheduler.skewed(0, config.body_max)
            self.unconfirmed[self._tag] = identity
            self._workload.published += 1
            self._referee.sent.add(identity)
            body = identity + bytes(size)
            self.client.target.publish(
                record_of(body, Traits(persistent=True)), len(body), self._tag
            )

    # Consuming.

    def _subscribe(self) -> None:
        self._numbers += 1
        spec = self._specs[self._numbers] = ConsumerSpec(
            number=self._numbers,
            tag=f"{self.name}-{self._numbers}",
            prefetch=self._scheduler.between(1, self.config.prefetch_max),
            no_ack=False,
            stream_offset=FIRST,
        )
        self._asked.add(spec.number)
        self._consumers[spec.number] = False
        self.client.subscribe(spec)

    @property
    def _deliveries(self) -> MigratedChannel:  # type: ignore[override]
        return self

    def on_skipped(self, session: int, consumer: int, first: int, last: int) -> None:
        """Message ids are left out of what the consumer does not hold any more."""

    def _receive(
        self,
        consumer: int,
        message_id: int,
        identity: bytes,
        acquired: int,
        delivered: int,
        said: bytes | None = None,
    ) -> None:
        self._names[consumer, message_id] = identity
        disturbances = self._workload.channels_disturbed
        # Every consumer gets all that a stream has.
        fresh = not acquired and not self._reads_stream
        self._referee.on_received(identity, fresh=fresh, disturbances=disturbances)

    @property
    def _reads_stream(self) -> bool:
        return self.client.queue.features.reads_by_offset

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """An answer to get."""
        self._gets -= 1
        if self._gets < 0:
            raise InvariantBroken(f"{self.name}: more answers to get than calls")
        block, command, record, get_id, acquired, failed, _, _ = result
        if block is None:
            return
        self._renewed()
        self._receive(
            0, get_id, identity_of(batch.record(block, command, record)), acquired, failed
        )
        self.held.setdefault(0, []).append(get_id)
        self.held[0].sort()

    def _settle(self, consumer: int, ids: list[int]) -> None:
        self._renewed()
        # Nothing comes back to a stream.
        is_kept = self.draining or self._reads_stream
        draw = 1.0 if is_kept else self._scheduler.rng.random()
        ranges = ranges_of(ids)
        if draw < self.config.requeue_chance:
            self.client.return_(consumer, ranges, failed=False, untried=True)
            return
        for number in ids:
            self._referee.settled.add(self._names[consumer, number])
        if draw < self.config.requeue_chance + self.config.reject_chance:
            self.client.discard(consumer, ranges)
        else:
            self.client.settle(consumer, ranges)
        self._workload.settled += len(ids)

    # Migration.

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`."""
        if self.closed:
            return None
        self._trace.add(self.name, f"goes on in {successor.type} {successor.group}")
        self.blocked = False
        self.client = successor.client(self._first_session or client.session, self)
        self._first_session = self._first_session or client.session
        self._session = self.client.session
        self.held.clear()
        self._last_id.clear()
        self._paused.clear()
        if self._reads_stream:
            self._last_fresh.clear()
        # A channel of AMQP waits for one answer before it asks for more: no other is cancelled.
        self._asked = set(self._consumers)
        for number in sorted(self._consumers):
            self.client.subscribe(self._specs[number])
        return self.client
