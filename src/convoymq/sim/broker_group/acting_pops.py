"""Consumers that pop from a group whose slaves act for its master, one that is ahead of it, and
what their referee knows.

| rule | looked at |
|---|---|
| a message does not come again once it is acknowledged, if no pop failed | at every pop |
| every acknowledged message is popped until a consumer has acknowledged it | at the end |
| a consumer that is ahead of an acting slave is not answered at once | at every pull of it |

Unacknowledged messages come back at the broker that has the records of the pop: the group's, or
one to which they escaped. So consumers pop from all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.client.client import records
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.special.names import POP_CHECKPOINT
from convoymq.rocketmq.special.pop_records import NORMAL, Receipt, real_topic
from convoymq.rocketmq.store.types import Message
from convoymq.sim.broker_group.acting_node import POP_GROUP as GROUP
from convoymq.sim.broker_group.acting_node import POP_TOPIC as TOPIC
from convoymq.sim.broker_group.acting_node import ActingNode
from convoymq.sim.delivery_model import InvariantBroken

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_clients import ClientNode

INVISIBLE_MS = 2_000
AHEAD_MS, HELD_MS = 600, 200
AT_ONCE = (Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED)


class PopBook:
    """See the module text."""

    def __init__(self) -> None:
        self.sent: set[int] = set()
        """Acknowledged to their producers."""
        self.done: set[int] = set()
        """Acknowledged by consumers."""
        self.maybe: set[int] = set()
        """Likewise, if the acknowledgement arrived: it had no answer."""
        self.popped = self.again = 0
        self.is_uncertain = False
        """A record of a pop may be stored that its consumer was told has failed: its messages come
        back, also those that were popped again and acknowledged since."""

    def on_popped(self, number: int, name: str) -> None:
        """A consumer got a message."""
        self.popped += 1
        if number in self.done and self.is_uncertain:
            self.again += 1
        elif number in self.done:
            raise InvariantBroken(f"{name}: {number} was popped, and acknowledged before")

    def lacking(self) -> list[int]:
        """Returns the messages that no consumer has acknowledged."""
        return sorted(self.sent - self.done - self.maybe)


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
            self._book.is_uncertain |= answer is not None and answer.code == Answer.SYSTEM_ERROR
            if answer is not None and answer.code == Answer.SUCCESS:
                for message in records(answer.body):
                    await self._take(node, answer, message)

    async def _take(self, node: ActingNode, answer: Command, message: Message) -> None:
        world, draw = self._world, self._world.scheduler
        number = int.from_bytes(message.body[:8], "big")
        receipt = _receipt(node, answer, message)
        world.trace.add(self._node.name, f"popped {number} at {node.name}: {receipt}")
        self._book.on_popped(number, node.name)
        if not world.quiet and draw.chance(0.3):
            return
        await asyncio.sleep(draw.skewed(1_000, 800_000) / 1e6)
        at = node if receipt.broker == node.broker_name else world.found()
        if at is None:
            return
        fields = {
            "consumerGroup": GROUP, "topic": real_topic(TOPIC, GROUP, receipt.retry),
            "queueId": str(receipt.queue), "extraInfo": str(receipt), "offset": str(receipt.offset),
        }  # fmt: skip
        done = await self._node.ask(at, Request.ACK_MESSAGE, fields)
        world.trace.add(self._node.name, f"ack of {number} at {at.name}: {done and done.code}")
        if done is None:
            self._book.maybe.add(number)
        elif done.code == Answer.SUCCESS:
            self._book.done.add(number)

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
