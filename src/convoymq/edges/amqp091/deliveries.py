"""Deliveries that a client cannot take yet: it reads too slowly, or has too much unacknowledged."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import structlog

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.consumers import Consumer
from convoymq.kernels import channel_codec
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import Delivery

if TYPE_CHECKING:
    from convoymq.edges.amqp091.channel import Channel

log = structlog.get_logger()

Held: TypeAlias = tuple[Consumer, Delivery]


class Deliveries:
    """The deliveries of one channel on their way to the client."""

    def __init__(self, channel: Channel) -> None:
        self.held: deque[Held] = deque()
        self.held_bytes = 0
        """Of the blocks that they are in."""
        self._channel = channel
        self._codec = channel.codec
        self._connection = channel.connection

    def room(self, consumer: Consumer) -> int:
        """Returns how many deliveries may be encoded for the consumer now."""
        if self._connection.output_full():
            self._codec.buffer.holding = True
            return 0
        prefetch = self._channel.global_prefetch
        if prefetch and not consumer.deliveries.no_ack:
            return max(0, prefetch - self._codec.unacked)
        return 1 << 30

    def deliver(self, consumer: Consumer, delivery: Delivery) -> None:
        """Encodes a delivery."""
        _, first_id, block, command, first, count, acquired_count, failed, _ = delivery
        try:
            self._codec.deliver(
                consumer.deliveries, first_id, block, command, first, count, acquired_count, failed
            )
        except ValueError as error:
            log.error("amqp.batch_damaged", queue=consumer.queue.name, reason=str(error))
            self._channel.refuse(BrokerError("stored message is damaged"), spec.BASIC, 60)
            return
        trace = consumer.queue.trace
        if trace is not None:
            trace.sent(consumer.client.session, *delivery[:8])
        if self._channel.spans is not None:
            settles = not consumer.deliveries.no_ack
            self._channel.spans.delivered(consumer.client, delivery, settles=settles)
        if self._channel.is_traced:
            self._channel.trace_deliveries(
                consumer.queue.name, block, command, first, count, acquired_count
            )

    def release(self) -> None:
        """Encodes held deliveries as far as there is room, each consumer's in their order."""
        waiting, self.held = self.held, deque()
        blocked: set[Consumer] = set()
        while waiting and not self._channel.closed:
            consumer, delivery = waiting.popleft()
            count = delivery.messages
            room = 0 if consumer in blocked else min(count, self.room(consumer))
            if room < count:
                blocked.add(consumer)
                self.held.append((consumer, delivery.without(room)))
            if room:
                self.deliver(consumer, delivery.upto(room))
        blocks = [delivery.block for _, delivery in self.held]
        self.held_bytes = sum(
            len(block) for k, block in enumerate(blocks) if not k or blocks[k - 1] is not block
        )
        if self.held_bytes * 2 <= self._connection.settings.held_bytes_max:
            self._resume_consumers()

    def _resume_consumers(self) -> None:
        for consumer in list(self._channel.consumers.values()):
            if consumer.paused:
                consumer.paused = False
                consumer.client.resume(consumer.number)

    def take_back(self, consumer: Consumer) -> None:
        """Returns what is held for a consumer that goes."""
        kept: deque[Held] = deque()
        for held in self.held:
            if held[0] is consumer:
                self._return(held)
            else:
                kept.append(held)
        self.held = kept
        if self.held_bytes:
            self.release()

    def _return(self, held: Held) -> None:
        """The client never saw these: they go back, without acknowledgements too, where only what
        was sent counts as consumed."""
        consumer, delivery = held
        first_id = delivery.first_id
        self._codec.note(
            consumer.deliveries, channel_codec.RETURN, first_id, first_id + delivery.messages - 1
        )
