"""The queue on a node: messages in memory, which the primary delivers as a ring does.

Clients use the node that leads; on the others the queue refuses, by name of that node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from convoymq.kernels.batch import commands
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.queues.interface import ClientEvents, outcome_of
from tests.examples.copies.core import Copies
from tests.examples.queue_type.ring import Consumer, Message, Ring, RingClient

Place = tuple[int, int, int]
"""(op, offset of the command, record)."""
UNLIMITED = 1 << 62
PUBLISH, REMOVE = b"p", b"r"


class Messages:
    """The messages of a queue that nobody has settled, by place. Implements `Store`."""

    def __init__(self) -> None:
        self.by_place: dict[Place, Message] = {}

    def apply(self, number: int, op: bytes) -> None:
        """See `Store`."""
        if op[:1] == PUBLISH:
            self._add(number, op[1:])
            return
        for place in msgspec.msgpack.decode(op[1:], type=list[Place]):
            self.by_place.pop(place, None)

    def _add(self, number: int, block: bytes) -> None:
        for _, _, _, _, count, _, offset, _ in commands(block):
            for record in range(count):
                place = (number, offset, record)
                self.by_place[place] = Message(block, offset, record, 0, place)

    def of(self, number: int) -> list[Message]:
        """Returns the messages of one op."""
        return [each for place, each in self.by_place.items() if place[0] == number]

    def snapshot(self) -> bytes:
        """See `Store`."""
        blocks = {place[0]: message.block for place, message in self.by_place.items()}
        return msgspec.msgpack.encode((blocks, list(self.by_place)))

    def restore(self, state: bytes) -> None:
        """See `Store`."""
        blocks, places = msgspec.msgpack.decode(state, type=tuple[dict[int, bytes], list[Place]])
        self.by_place = {
            place: Message(blocks[place[0]], place[1], place[2], 0, place) for place in places
        }


class Host(Protocol):
    """A node's host of such queues."""

    def mark_dirty(self, queue: Ring) -> None:
        """The queue's open batch is not empty."""

    def step(self, queue: CopiesQueue) -> None:
        """Carries out the effects of the queue's core."""

    def take_view(self, queue: CopiesQueue, view: int, members: tuple[int, ...]) -> None:
        """The tree records the members of a queue."""

    def name_of(self, node: int) -> str:
        """Returns a node's name."""


class CopiesQueue(Ring):
    """See the module text."""

    type = "copies"

    def __init__(
        self,
        host: Host,
        record: QueueRecord,
        core: Copies,
        messages: Messages,
    ) -> None:
        super().__init__(record, UNLIMITED, host.mark_dirty)
        self.record = record
        self.core = core
        self.messages = messages
        self._host = host
        self._unconfirmed: deque[tuple[int, list[tuple[CopiesClient, int]]]] = deque()
        """(op, the last command in it of each client)."""

    @property
    def known_leader(self) -> int | None:
        """See `Queue`."""
        return self.core.primary

    def end_of_round(self) -> None:
        """Sends what was published to the copies."""
        if not self.builder.used:
            return
        data = self.builder.take_forward(self.group, 0)
        if not self.core.leads:
            self._answer_all(False)
            return
        number = self.core.submit(PUBLISH + data)
        sent = [(client, client.target.seq) for client in self.clients]
        self._unconfirmed.append((number, sent))
        self._host.step(self)

    def remove(self, messages: Sequence[Message]) -> None:
        """Nobody wants some messages any more, on any node."""
        if messages and self.core.leads:
            self.core.submit(REMOVE + msgspec.msgpack.encode([each.place for each in messages]))
            self._host.step(self)

    def follow_members(self, members: tuple[int, ...], config: tuple[int, int]) -> None:
        """See `Queue`."""
        self._host.take_view(self, config[0], members)

    # --- effects of the core -----------------------------------------------------------------

    def on_confirmed(self, number: int) -> None:
        """All of the view have an op."""
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            published, sent = self._unconfirmed.popleft()
            self.ready_messages.extend(self.messages.of(published))
            for client, seq in sent:
                client.answer(seq, True)
        self.serve()

    def lead(self) -> None:
        """This node has become the primary."""
        self.ended = None
        self.ready_messages = deque(self.messages.by_place.values())

    def refuse(self) -> None:
        """Another node leads the queue."""
        leader = self.core.primary
        where = self._host.name_of(leader) if leader is not None else "a node that is away"
        self.ended = PreconditionFailed(f"queue '{self.name}' is led by {where}: connect there")

    def yield_(self) -> None:
        """This node was the primary."""
        self.refuse()
        self._unconfirmed.clear()
        self._answer_all(False)
        for consumer in list(self.consumers):
            consumer.client.events.on_cancelled(consumer.client, consumer.spec.number, "failover")
        self.consumers.clear()
        self.ready_messages.clear()

    def _answer_all(self, confirmed: bool) -> None:
        for client in list(self.clients):
            assert isinstance(client, CopiesClient)
            client.answer(client.target.seq, confirmed)

    # --- Queue -------------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> CopiesClient:
        """See `Queue`."""
        made = CopiesClient(self, session, events)
        self.clients.append(made)
        return made


class CopiesClient(RingClient):
    """One channel's stream into the queue."""

    queue: CopiesQueue

    def answer(self, seq: int, confirmed: bool) -> None:
        """What was published up to a command is in the queue, or may not be."""
        for command in self.target.applied(seq):
            if command.tags:
                self.events.on_published(self, command.tags, outcome_of(confirmed))

    def deliver(self, consumer: Consumer, message: Message) -> None:
        """See `RingClient`."""
        super().deliver(consumer, message)
        if consumer.spec.no_ack:
            self.queue.remove([message])

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """See `QueueClient`."""
        self.queue.remove(self.take(consumer, ranges))
        self.queue.serve()

    def get(self, *, no_ack: bool) -> None:
        """See `QueueClient`."""
        ready = self.queue.ready_messages
        first = ready[0] if ready else None
        super().get(no_ack=no_ack)
        if no_ack and first is not None:
            self.queue.remove([first])

    def purge(self) -> None:
        """See `QueueClient`."""
        dropped = list(self.queue.ready_messages)
        super().purge()
        self.queue.remove(dropped)
