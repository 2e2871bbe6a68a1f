"""RocketMQ's end of a bridge: a topic, by any name server and broker of its protocol.

Queues are pulled in order, and the group's offset moves when what lies before it is safe. A
message that is sent has the key of the record that it comes from, as messages that escape from a
group without a master have: a broker of ours looks into its log and stores it once. RocketMQ's
brokers do not look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from convoymq.model.errors import Refused, Unavailable
from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.bridge.mapping import (
    AmqpMessage,
    RocketMessage,
    to_amqp,
    to_rocketmq,
)
from convoymq.rocketmq.bridge.pump import BridgeStopped, Item
from convoymq.rocketmq.bridge.settings import BridgeSettings
from convoymq.rocketmq.client.client import Queue, RocketClient, content_of
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.store.types import Message, java_hash


class RocketSink:
    """A topic on one broker."""

    def __init__(
        self, rocket: RocketClient, topic: str, broker: str, queues: int, *, once: bool
    ) -> None:
        self._rocket = rocket
        self._topic = topic
        self._broker = broker
        self._queues = queues
        self._once = once

    def lanes(self, items: Sequence[Item[AmqpMessage]]) -> Sequence[Sequence[Item[AmqpMessage]]]:
        """See `Sink`: by queue, which follows from the order key."""
        found: dict[int, list[Item[AmqpMessage]]] = {}
        for item in items:
            found.setdefault(queue_of(item.message.key, self._queues), []).append(item)
        return list(found.values())

    async def store(self, items: Sequence[Item[AmqpMessage]]) -> tuple[int, str | None]:
        """See `Sink`."""
        item = items[0]
        queue = Queue(self._broker, queue_of(item.message.key, self._queues))
        try:
            await send(self._rocket, self._topic, queue, item, item.key, once=self._once)
        except Refused as refusal:
            return 0, refusal.text
        return 1, None


class RocketSource:
    """One queue of a topic."""

    def __init__(self, rocket: RocketClient, settings: BridgeSettings, queue: Queue) -> None:
        self._rocket = rocket
        self._settings = settings
        self._topic = settings.from_rocketmq_topic
        self._queue = queue
        self._offset: int | None = None

    async def _begin(self) -> int:
        found = await self._rocket.committed(self._topic, self._queue)
        return (await self._rocket.ends(self._topic, self._queue))[0] if found is None else found

    async def next(self) -> Sequence[Item[AmqpMessage]]:
        """See `Source`."""
        if self._offset is None:
            self._offset = await self._begin()
        settings = self._settings
        found = await self._rocket.pull(
            self._topic, self._queue, self._offset, count=settings.window,
            bytes_max=settings.window_bytes,
        )  # fmt: skip
        if found.code == Answer.PULL_OFFSET_MOVED and found.next != self._offset:
            raise BridgeStopped(
                f"{self._queue.broker}:{self._topic}:{self._queue.number}: offset {self._offset} "
                f"is not there, messages begin at {found.next}; set the offset of group "
                f"{self._rocket.group} to go on without what is missing"
            )
        if found.code in (Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED):
            await asyncio.sleep(settings.poll_ms / 1000)
        return [self._item(message) for message in found.messages]

    def _item(self, message: Message) -> Item[AmqpMessage]:
        key = Key(self._queue.broker, self._topic, self._queue.number, message.queue_offset)
        try:
            body = content_of(message)
        except ValueError as error:
            raise BridgeStopped(f"the body of message {key} cannot be read: {error}") from error
        found = RocketMessage(body, message.properties, message.born_ms, str(key))
        return Item(key, to_amqp(found))

    async def done(self, items: Sequence[Item[AmqpMessage]]) -> None:
        """See `Source`."""
        offset = items[-1].key.offset + 1
        await self._rocket.commit(self._topic, self._queue, offset)
        self._offset = offset

    async def dead_letter(self, item: Item[AmqpMessage], reason: str) -> None:
        """See `Source`."""
        rocket, topic = self._rocket, self._settings.dead_letter_rocketmq_topic
        broker, queues = await place_of(rocket, topic, self._queue.broker)
        once = await knows_keys(rocket, topic, broker)
        headers = {**item.message.headers, "refused": reason.encode()}
        message = AmqpMessage(
            item.message.body, item.message.key, headers, item.message.properties,
            item.message.time_ms,
        )  # fmt: skip
        # A broker knows its own records by other means: the bridge's name tells them apart.
        key = Key(f"bridge.{rocket.group}.{self._queue.broker}", *item.key[1:])
        try:
            target = Queue(broker, self._queue.number % queues)
            await send(rocket, topic, target, Item(item.key, message), key, once=once)
        except Refused as refusal:
            raise BridgeStopped(f"topic {topic} takes no dead letters: {refusal.text}") from refusal


async def send(
    rocket: RocketClient, topic: str, queue: Queue, item: Item[AmqpMessage], key: Key, *, once: bool
) -> None:
    """Sends a message. Raises Refused, Unavailable."""
    message = to_rocketmq(item.message)
    await rocket.send(
        topic, queue, message.body, message.properties, born_ms=message.born_ms, key=key, once=once
    )


def queue_of(key: bytes | None, queues: int) -> int:
    """Returns the queue for messages of an order key."""
    return java_hash((key or b"").decode("latin-1")) % queues


async def knows_keys(rocket: RocketClient, topic: str, broker: str) -> bool:
    """Returns whether a broker stores a message of a key once. Raises Unavailable."""
    return await rocket.keys(topic, broker, f"bridge.{rocket.group}") is not None


async def place_of(rocket: RocketClient, topic: str, broker: str) -> tuple[str, int]:
    """Returns the broker that a topic is written to, and its queues there. Raises Unavailable,
    BridgeStopped."""
    found = await rocket.writable(topic)
    if broker in found:
        return broker, found[broker]
    if broker:
        raise Unavailable(f"topic {topic} cannot be written to on broker {broker}")
    if len(found) > 1:
        raise BridgeStopped(
            f"topic {topic} is on {', '.join(sorted(found))}: toRocketmqBroker has to name one"
        )
    if not found:
        raise Unavailable(f"topic {topic} cannot be written to")
    return next(iter(found.items()))
