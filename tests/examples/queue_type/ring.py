"""A ring: a queue of bounded length in memory, which drops the oldest messages for new ones.

Publishes come as ENQUEUE commands in the open batch, as for every type, and are taken out of it at
the end of a round. What consumers do needs no log here: it is carried out when it is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from convoymq.kernels.batch import CMD_ENQUEUE, CommandBuilder, PublishTarget, commands
from convoymq.metadata.machine import QueueRecord
from convoymq.model.refusals import missing, queue_subject
from convoymq.queues.interface import (
    GET_EMPTY,
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    PublishOutcome,
    Queue,
    QueueClient,
    QueueFeatures,
    Row,
)

WINDOW_DEFAULT = 1000


class Message(NamedTuple):
    """One record of an ENQUEUE command, and how often it was handed out before."""

    block: bytes
    command: int
    record: int
    acquired_count: int
    place: tuple[int, int, int] = (0, 0, 0)
    """Of types whose messages have one that does not change."""


@dataclass(slots=True)
class Consumer:
    """Who is served, and what it holds."""

    client: RingClient
    spec: ConsumerSpec
    window: int
    next_id: int = 0
    held: dict[int, Message] = field(default_factory=dict)


class Ring(Queue):
    """See the module text."""

    type = "ring"
    features = QueueFeatures()

    def __init__(self, record: QueueRecord, size: int, on_first: Callable[[Ring], None]) -> None:
        self.vhost = record.vhost
        self.name = record.name
        self.group = record.group
        self.builder = CommandBuilder(lambda: on_first(self))
        self.clients: list[RingClient] = []
        self.consumers: deque[Consumer] = deque()
        self.ready_messages: deque[Message] = deque()
        self.size = size
        self.dropped = 0

    def end_of_round(self) -> None:
        """Takes what was published, drops what has no room, confirms and delivers."""
        if not self.builder.used:
            return
        data = self.builder.take_forward(self.group, 0)
        for kind, _flags, _session, _seq, count, _arg, offset, _length in commands(data):
            assert kind == CMD_ENQUEUE
            for record in range(count):
                self.ready_messages.append(Message(data, offset, record, 0))
        while len(self.ready_messages) > self.size:
            self.ready_messages.popleft()
            self.dropped += 1
        for client in list(self.clients):
            client.confirm()
        self.serve()

    def serve(self) -> None:
        """Hands messages to consumers with room, in turn."""
        for _ in range(len(self.consumers)):
            consumer = self.consumers[0]
            self.consumers.rotate(-1)
            while self.ready_messages and len(consumer.held) < consumer.window:
                consumer.client.deliver(consumer, self.ready_messages.popleft())

    def give_back(self, messages: Sequence[Message]) -> None:
        """Messages return to the front, oldest first."""
        for message in reversed(messages):
            again = message._replace(acquired_count=message.acquired_count + 1)
            self.ready_messages.appendleft(again)

    def delete(self) -> None:
        """The queue is gone: consumers hear it, publishes are answered."""
        self.ended = missing(queue_subject(self.vhost, self.name))
        self.end_of_round()
        for consumer in self.consumers:
            consumer.client.events.on_cancelled(consumer.client, consumer.spec.number, "deleted")

    # --- Queue ---------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> RingClient:
        """See `Queue`."""
        made = RingClient(self, session, events)
        self.clients.append(made)
        return made

    async def ready(self, timeout: float) -> None:
        """A ring can serve at once."""

    async def counts(self) -> tuple[int, int]:
        """See `Queue`."""
        return len(self.ready_messages), len(self.consumers)

    def info(self) -> Row:
        """See `Queue`."""
        held = sum(len(consumer.held) for consumer in self.consumers)
        ready = len(self.ready_messages)
        return {
            "messages": ready + held,
            "messages_ready": ready,
            "messages_unacknowledged": held,
            "consumers": len(self.consumers),
            "state": "running",
        }


class RingClient(QueueClient):
    """One channel's stream into a ring."""

    queue: Ring

    def __init__(self, queue: Ring, session: int, events: ClientEvents) -> None:
        self.queue = queue
        self.session = session
        self.events = events
        self._target = PublishTarget(queue.builder, session, self)
        self._got: dict[int, Message] = {}
        self._next_get = 0
        #: Consumers of this client, cancelled ones included: what they hold is settled later.
        self._consumers: dict[int, Consumer] = {}

    @property
    def target(self) -> PublishTarget:
        """See `QueueClient`."""
        return self._target

    def confirm(self) -> None:
        """Everything that was published is in the queue."""
        for command in self._target.applied(self._target.seq):
            if command.tags:
                self.events.on_published(self, command.tags, PublishOutcome.ACCEPTED)
            elif command.note is not None:
                command.note(0, None)

    def check_flow(self) -> None:
        """Nothing is ever behind."""

    def deliver(self, consumer: Consumer, message: Message) -> None:
        """Hands one message to a consumer."""
        block, command, record, acquired, _ = message
        message_id = consumer.next_id
        consumer.next_id += 1
        if not consumer.spec.no_ack:
            consumer.held[message_id] = message
        delivery = Delivery(
            consumer.spec.number, message_id, block, command, record, 1, acquired, 0
        )
        self.events.on_deliver(self, delivery)

    # --- QueueClient ---------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> None:
        """See `QueueClient`."""
        consumer = Consumer(self, spec, spec.prefetch or WINDOW_DEFAULT)
        self._consumers[spec.number] = consumer
        self.queue.consumers.append(consumer)
        self.events.on_subscribed(self, spec.number, None)
        self.queue.serve()

    def cancel(self, consumer: int) -> None:
        """See `QueueClient`."""
        self.queue.consumers.remove(self._consumers[consumer])
        self.events.on_cancel_ok(self, consumer)

    def set_credit(self, consumer: int, credit: int) -> None:
        """See `QueueClient`."""
        self._consumers[consumer].window = credit or WINDOW_DEFAULT
        self.queue.serve()

    def take(self, consumer: int, ranges: Sequence[int]) -> list[Message]:
        """Takes what a consumer holds, or basic.get handed out (0), out of its hands."""
        held = self._consumers[consumer].held if consumer else self._got
        return [
            held.pop(number)
            for first, last in zip(ranges[::2], ranges[1::2], strict=True)
            for number in range(first, last + 1)
        ]

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """See `QueueClient`."""
        self.take(consumer, ranges)
        self.queue.serve()

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """See `QueueClient`."""
        self.queue.give_back(self.take(consumer, ranges))
        self.queue.serve()

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """See `QueueClient`."""
        self.settle(consumer, ranges)

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """Everything is settled when it is called."""
        call(True)

    def get(self, *, no_ack: bool) -> None:
        """See `QueueClient`."""
        if not self.queue.ready_messages:
            self.events.on_get(self, GET_EMPTY)
            return
        block, command, record, acquired, _ = message = self.queue.ready_messages.popleft()
        number = self._next_get
        self._next_get += 1
        if not no_ack:
            self._got[number] = message
        left = len(self.queue.ready_messages)
        self.events.on_get(self, GetResult(block, command, record, number, acquired, 0, left))

    def purge(self) -> None:
        """See `QueueClient`."""
        count = len(self.queue.ready_messages)
        self.queue.ready_messages.clear()
        self.events.on_purged(self, count, None)

    def close(self) -> None:
        """See `QueueClient`."""
        self.queue.clients.remove(self)
        for consumer in self._consumers.values():
            if consumer in self.queue.consumers:
                self.queue.consumers.remove(consumer)
            self.queue.give_back(list(consumer.held.values()))
        self.queue.give_back(list(self._got.values()))
        self.queue.serve()
