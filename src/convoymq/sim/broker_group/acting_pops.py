"""Consumers that pop from a group whose slaves act for its master, one that is ahead of it, and
what their referee knows.

| rule | looked at |
|---|---|
| a message does not come again once it is acknowledged | at every pop |
| every acknowledged message is popped until an acknowledgement of it is stored | at the end |
| a consumer that is ahead of an acting slave is not answered at once | at every pull of it |

Unacknowledged messages come back at the broker that has the records of the pop: the group's, or
one to which they escaped. So consumers pop from all.

The record of a failed pop may be stored: its messages are popped again, and come back besides. A
message that came back names that record (`ESCAPE_KEY`): only what no consumer was given is excused,
and what an acting slave gives out again whose log lacks the record of the first pop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from convoymq.rocketmq.acting.escape import HOME_MIN, KEY_PROPERTY, key_of
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.client.client import records
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.special.names import POP_CHECKPOINT, TAGS, is_pop_record
from convoymq.rocketmq.special.pop_records import (
    ACK_TAG,
    CHECKPOINT_TAG,
    NORMAL,
    Ack,
    CheckPoint,
    PopKey,
    Receipt,
    real_topic,
)
from convoymq.rocketmq.store.types import GetStatus, Message
from convoymq.sim.broker_group.acting_node import POP_GROUP as GROUP
from convoymq.sim.broker_group.acting_node import POP_TOPIC as TOPIC
from convoymq.sim.broker_group.acting_node import ActingNode
from convoymq.sim.delivery_model import InvariantBroken

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_clients import ClientNode

INVISIBLE_MS = 2_000
AHEAD_MS, HELD_MS = 600, 200
AT_ONCE = (Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED)


class Given(NamedTuple):
    """A message that a pop gave out, by its queue offset."""

    pop: PopKey
    offset: int

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Returns where the message is."""
        return self.pop.broker, self.pop.topic, self.pop.queue, self.offset


class PopBook:
    """See the module text."""

    def __init__(self) -> None:
        self.sent: set[int] = set()
        """Acknowledged to their producers."""
        self.done: set[int] = set()
        """Acknowledged by consumers."""
        self.popped = self.again = 0
        self._unsure: dict[int, list[Given]] = {}
        """Acknowledgements without an answer."""
        self._pops: set[PopKey] = set()
        """Pops that a consumer got messages of."""
        self._done_places: set[tuple[str, str, int, int]] = set()
        self._done: set[Given] = set()
        self._split: set[int] = set()
        """Messages that came back of a pop that no consumer got, or were given out twice."""
        self._by_place: dict[tuple[str, str, int, int], set[PopKey]] = {}
        """Pops of messages whose checkpoints are in their broker's log."""

    def on_popped(
        self, number: int, node: ActingNode, given: Given, origin: Given | None, *, is_own: bool
    ) -> None:
        """A consumer got a message.

        Args:
            origin: it came back of this earlier pop.
            is_own: the checkpoint is in the broker's log.
        """
        self.popped += 1
        self._pops.add(given.pop)
        former = self._by_place.setdefault(given.place, set())
        lacks_pop = bool(former) and not former <= set(_stored_pops(node))
        if is_own:
            former.add(given.pop)
        if lacks_pop or (origin is not None and origin.pop not in self._pops):
            self._split.add(number)
        if number not in self.done or lacks_pop:
            return
        self.again += 1
        is_excused = number in self._split
        if given.place in self._done_places or origin in self._done or not is_excused:
            raise InvariantBroken(
                f"{node.name}: {number} was popped, and acknowledged before: {given}, of {origin}"
            )

    def on_acknowledged(self, number: int, given: Given, code: int | None) -> None:
        """A consumer's acknowledgement was answered. `code`: None without an answer."""
        if code is None:
            self._unsure.setdefault(number, []).append(given)
        elif code == Answer.SUCCESS:
            self.done.add(number)
            self._done.add(given)
            self._done_places.add(given.place)

    def lacking(self, brokers: Iterable[ActingNode]) -> list[int]:
        """Returns the messages of which no acknowledgement is stored."""
        lacking = self.sent - self.done
        if not lacking or lacking - self._unsure.keys():
            return sorted(lacking - self._unsure.keys())
        stored = {given for broker in brokers for given in _stored_acks(broker)}
        return sorted(number for number in lacking if stored.isdisjoint(self._unsure[number]))


class PopClients:
    """Producers and consumers on a client node."""

    def __init__(self, node: ClientNode, book: PopBook) -> None:
        self._node = node
        self._world = node.world
        self._book = book

    async def send(self) -> None:
        """Sends messages to the master."""
        world, draw = self._world, self._world.scheduler
        while not world.quiet:
            await asyncio.sleep(draw.between(5_000, 300_000) / 1e6)
            number = world.new_number()
            fields = {
                "a": GROUP, "b": TOPIC, "c": "TBW102", "d": "2", "e": str(number % 2), "f": "0",
                "g": str(self._node.wall_ms()), "h": "0", "i": "", "j": "0", "k": "false",
                "m": "false",
            }  # fmt: skip
            answer = await self._node.ask(
                world.replicas[1], Request.SEND_MESSAGE_V2, fields, number.to_bytes(8, "big")
            )
            if answer is not None and answer.code == Answer.SUCCESS:
                self._book.sent.add(number)

    async def pop(self) -> None:
        """Pops from every broker, in turn, and acknowledges most messages."""
        world, draw = self._world, self._world.scheduler
        while True:
            await asyncio.sleep(draw.between(5_000, 200_000) / 1e6)
            node = draw.rng.choice([world.found(), *world.targets.values()])
            if node is None:
                continue
            fields = {
                "consumerGroup": GROUP, "topic": TOPIC, "queueId": "-1", "maxMsgNums": "4",
                "invisibleTime": str(INVISIBLE_MS), "pollTime": "0", "initMode": "0",
                "bornTime": str(node.wall_ms()), "order": "false",
            }  # fmt: skip
            answer = await self._node.ask(node, Request.POP_MESSAGE, fields)
            if answer is not None and answer.code == Answer.SUCCESS:
                for message in records(answer.body):
                    await self._take(node, answer, message)

    async def _take(self, node: ActingNode, answer: Command, message: Message) -> None:
        world, draw = self._world, self._world.scheduler
        number = int.from_bytes(message.body[:8], "big")
        receipt = _receipt(node, answer, message)
        world.trace.add(self._node.name, f"popped {number} at {node.name}: {receipt}")
        topic = real_topic(TOPIC, GROUP, receipt.retry)
        pop = PopKey(topic, GROUP, receipt.queue, receipt.start, receipt.pop_ms, receipt.broker)
        assert receipt.offset is not None
        given = Given(pop, receipt.offset)
        is_own = receipt.revive_queue < HOME_MIN
        self._book.on_popped(number, node, given, self._origin(message), is_own=is_own)
        if not world.quiet and draw.chance(0.3):
            return
        await asyncio.sleep(draw.skewed(1_000, 800_000) / 1e6)
        at = node if receipt.broker == node.broker_name else world.found()
        if at is None:
            return
        fields = {
            "consumerGroup": GROUP, "topic": topic, "queueId": str(receipt.queue),
            "extraInfo": str(receipt), "offset": str(receipt.offset),
        }  # fmt: skip
        done = await self._node.ask(at, Request.ACK_MESSAGE, fields)
        world.trace.add(self._node.name, f"ack of {number} at {at.name}: {done and done.code}")
        self._book.on_acknowledged(number, given, None if done is None else done.code)

    def _origin(self, message: Message) -> Given | None:
        """Returns of which pop a message came back."""
        key = key_of(message.properties.get(KEY_PROPERTY, ""))
        if key is None:
            return None
        for node in self._world.brokers:
            if node.is_ready and node.broker_name == key.broker:
                record = node.store.message_at(key.offset >> 6)
                if record is not None:
                    checkpoint = json.loads(record.body, CheckPoint)
                    offset = checkpoint.offsets[key.offset & 63]
                    return Given(checkpoint.key(key.broker), offset)
        raise InvariantBroken(f"{message.properties} came back of a record that nobody has")

    async def ahead(self) -> None:
        """Pulls behind the end of what an acting slave has."""
        world, draw = self._world, self._world.scheduler
        while not world.quiet:
            await asyncio.sleep(draw.between(50_000, 500_000) / 1e6)
            node = world.found()
            if node is None or node.state is not State.ACTING:
                continue
            process = node.process
            fields = {
                "consumerGroup": GROUP, "topic": TOPIC, "queueId": "0", "maxMsgNums": "1",
                "queueOffset": str(node.store.queue_max(TOPIC, 0) + 1000), "sysFlag": "6",
                "commitOffset": "0", "suspendTimeoutMillis": str(AHEAD_MS), "subscription": "*",
                "subVersion": "0", "expressionType": "TAG",
            }  # fmt: skip
            asked_us = draw.now_us
            answer = await self._node.ask(node, Request.PULL_MESSAGE, fields)
            took_us = draw.now_us - asked_us
            still = node.process is process and node.state is State.ACTING
            if answer and answer.code in AT_ONCE and still and took_us < 1000 * HELD_MS:
                raise InvariantBroken(
                    f"{node.name}: a consumer ahead was answered {answer.code} after {took_us} us"
                )


def _stored_acks(node: ActingNode) -> Iterator[Given]:
    """Yields the acknowledgements in a broker's log."""
    for message in _pop_records(node):
        if message.properties[TAGS] == ACK_TAG:
            ack = json.loads(message.body, Ack)
            yield Given(ack.key(node.broker_name), ack.offset)


def _stored_pops(node: ActingNode) -> Iterator[PopKey]:
    """Yields the pops in a broker's log."""
    for message in _pop_records(node):
        if message.properties[TAGS] == CHECKPOINT_TAG:
            yield json.loads(message.body, CheckPoint).key(node.broker_name)


def _pop_records(node: ActingNode) -> Iterator[Message]:
    at = node.store.queue_min(TIMER_TOPIC, 0)
    while True:
        got = node.store.get(TIMER_TOPIC, 0, at, 32)
        if got.status is not GetStatus.FOUND:
            return
        for message in map(Message, got.records):
            at = message.queue_offset + 1
            if is_pop_record(message):
                yield message


def _receipt(node: ActingNode, answer: Command, message: Message) -> Receipt:
    """Returns the receipt of a message, as clients make it."""
    text = message.properties.get(POP_CHECKPOINT)
    if text is not None:
        return Receipt.parse(text)
    starts = [info.split(" ") for info in answer.needed("startOffsetInfo").split(";")]
    start = next(
        int(at) for retry, queue, at in starts
        if retry == NORMAL and int(queue) == message.queue_id
    )  # fmt: skip
    return Receipt(
        start, answer.number("popTime"), answer.number("invisibleTime"),
        answer.number("reviveQid"), NORMAL, node.broker_name, message.queue_id,
        message.queue_offset,
    )  # fmt: skip
