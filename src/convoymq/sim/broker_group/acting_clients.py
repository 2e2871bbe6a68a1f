"""Clients of a group whose slaves act for its master: real requests from a node of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.broker.values import (
    GroupConfig,
    HeartbeatData,
    LockBody,
    LockedBody,
    MessageQueue,
    ProducerData,
)
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Body, Command, request
from convoymq.rocketmq.remoting.connection import Connection, dispatch
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.special.names import (
    DELAY,
    IS_PREPARED,
    PRODUCER_GROUP,
    TIMER_DELAY_MS,
    UNIQUE_KEY,
)
from convoymq.rocketmq.special.transactions import End
from convoymq.rocketmq.store.settings import parse_delays
from convoymq.rocketmq.store.types import SysFlag, encode_properties
from convoymq.sim.broker_group.acting_node import DELAYS, GROUP, ActingNode, ProductionNode
from convoymq.sim.broker_group.acting_pops import PopClients
from convoymq.sim.broker_group.acting_referee import Fate, Sent
from convoymq.sim.network import Receiver

TIMEOUT_S = 1.0
PRODUCERS = "producers"
QUEUE = MessageQueue("orders", "a", 0)
DELAYS_MS = parse_delays(DELAYS)


class ClientNode(ProductionNode):
    """Producers of delayed, timed and transactional messages, consumers, and operators."""

    def _open(self) -> Receiver:
        self._open_loop()
        self.loop.enter(self._make)
        return self

    def _make(self) -> None:
        self.remoting = RemotingClient(dispatch({Request.CHECK_TRANSACTION_STATE: self._checked}))
        works = (self._send(), self._commit(), self._register(), *map(self._lock, ("one", "two")))
        for work in (*works, *self._pops()):
            self._start_process(work)

    def _pops(self) -> list[Coroutine[object, object, object]]:
        """Returns what the kinds `pops` and `ahead` add."""
        book, kinds = self.world.pops, self.world.plan.faults
        clients = PopClients(self, book)
        works: list[Coroutine[object, object, object]] = []
        if "pops" in kinds:
            works += [clients.send(), clients.pop(), clients.pop()]
        if "ahead" in kinds:
            works.append(clients.ahead())
        return works

    async def _pause(self, low_ms: int, high_ms: int) -> None:
        await asyncio.sleep(self.world.scheduler.between(low_ms, high_ms) / 1000)

    async def ask(
        self, node: ActingNode, code: int, fields: dict[str, str] | None = None, body: Body = b""
    ) -> Command | None:
        """Returns the answer of a broker, None without one."""
        try:
            connection = await self.remoting.connected(node.address, TIMEOUT_S)
            return await connection.request(request(code, fields, body), TIMEOUT_S)
        except Unavailable:
            return None

    async def _register(self) -> None:
        """Producers say that they are there, so that they are asked for half messages."""
        heartbeat = HeartbeatData("producer", [ProducerData(PRODUCERS)])
        while True:
            for node in (self.world.serving(), *self.world.targets.values()):
                if node is not None:
                    await self.ask(node, Request.HEART_BEAT, body=json.dumps(heartbeat))
            await self._pause(300, 600)

    # --- producers ----------------------------------------------------------------------------

    async def _send(self) -> None:
        world = self.world
        while not world.quiet:
            await self._pause(1, world.pause_ms)
            # One does not wait for the other.
            self._start_process(self._send_one(world.scheduler.between(0, 3)))

    async def _send_one(self, kind: int) -> None:
        world, draw = self.world, self.world.scheduler
        number = world.new_number()
        properties = {UNIQUE_KEY: f"{number:032X}"}
        fate, delay_ms, sys_flag = Fate.DELIVERED, 0, 0
        if kind < 2:
            delay_ms = DELAYS_MS[kind]
            properties[DELAY] = str(kind + 1)
        elif kind == 2:
            delay_ms = draw.between(500, world.timed_ms_max)
            properties[TIMER_DELAY_MS] = str(delay_ms)
        else:
            properties |= {IS_PREPARED: "true", PRODUCER_GROUP: PRODUCERS}
            sys_flag = SysFlag.PREPARED
            if draw.chance(0.3):
                fate = Fate.NEVER
        sent = world.acting.sent[number] = Sent(fate, kind < 3, draw.now_us + delay_ms * 1000)
        fields = {
            "a": PRODUCERS, "b": "deals" if kind == 3 else "later", "c": "TBW102", "d": "2",
            "e": str(number % 2), "f": str(sys_flag), "g": str(self.wall_ms()), "h": "0",
            "i": encode_properties(properties).decode(), "j": "0", "k": "false", "m": "false",
        }  # fmt: skip
        body = number.to_bytes(8, "big") + bytes(kind * 40)
        answer = await self.ask(world.replicas[1], Request.SEND_MESSAGE_V2, fields, body)
        world.trace.add(self.name, f"special {number} kind {kind}: {answer and answer.code}")
        if answer is None or answer.code != Answer.SUCCESS:
            return
        sent.is_acknowledged = True
        sent.physical = int(answer.fields["msgId"][-16:], 16)
        # A timed message's delay counts from when the broker has it.
        sent.due_us = draw.now_us + delay_ms * 1000
        if kind == 3 and draw.chance(0.7):
            await asyncio.sleep(draw.skewed(1_000, 4_000_000) / 1e6)
            node = world.found()
            if node is not None:
                offset = int(answer.fields["queueOffset"])
                await self._end(node, number, sent.physical, offset, is_checked=False)

    async def _end(
        self, node: ActingNode, number: int, physical: int, offset: int, *, is_checked: bool
    ) -> None:
        """A producer ends its transaction."""
        is_committed = self.world.acting.sent[number].fate is Fate.DELIVERED
        was_serving = node.serves
        fields = {
            "producerGroup": PRODUCERS, "tranStateTableOffset": str(offset),
            "commitLogOffset": str(physical), "fromTransactionCheck": str(is_checked).lower(),
            "commitOrRollback": str(End.COMMIT if is_committed else End.ROLLBACK),
        }  # fmt: skip
        answer = await self.ask(node, Request.END_TRANSACTION, fields)
        self.world.trace.add(self.name, f"end of {number} at {node.name}: {answer and answer.code}")
        sent = self.world.acting.sent[number]
        # A rollback without an answer may have been carried out, and leaves no trace elsewhere.
        sent.is_ended |= (
            sent.fate is Fate.NEVER if answer is None else answer.code == Answer.SUCCESS
        )
        if answer is not None and was_serving and node.serves:
            self.world.acting.on_end(node.name, answer.code, answer.remark or "")

    def _checked(self, connection: Connection, command: Command) -> None:
        """A broker asks for a half message. Producers do not always answer."""
        node = next((n for n in self.world.brokers if n.address == connection.name), None)
        if node is None or self.world.scheduler.chance(0.3):
            return
        number = int(command.fields["msgId"], 16)
        physical, offset = (
            command.number(name) for name in ("commitLogOffset", "tranStateTableOffset")
        )
        self._start_process(self._end(node, number, physical, offset, is_checked=True))

    # --- consumers, operators -----------------------------------------------------------------

    async def _commit(self) -> None:
        """Consumers commit, operators create topics and groups: where the group serves."""
        while not self.world.quiet:
            await self._pause(20, 300)
            node = self.world.found()
            if node is None:
                continue
            draw, topic = self.world.scheduler, QUEUE.topic
            queue = draw.between(0, 1)
            known = max(0, node.broker.offsets.get(GROUP, topic, queue))
            end = min(
                node.store.queue_max(topic, queue), self.world.referee.acknowledged_end(queue)
            )
            fields = {
                "consumerGroup": GROUP, "topic": topic, "queueId": str(queue),
                "commitOffset": str(max(known, min(end, known + draw.between(1, 5)))),
            }  # fmt: skip
            await self.ask(node, Request.UPDATE_CONSUMER_OFFSET, fields)
            if self.world.scheduler.chance(0.05) and node.serves:
                name = f"t{self.world.scheduler.now_us}"
                node.loop.enter(node.broker.topics.create, TopicConfig(name, 1, 1))
                node.loop.enter(node.broker.groups.update, [GroupConfig(name)])

    async def _lock(self, client: str) -> None:
        """A consumer of an ordered topic locks its queue, and gives it back."""
        world, draw = self.world, self.world.scheduler
        body = json.dumps(LockBody(GROUP, client, [QUEUE]))
        while not world.quiet:
            await self._pause(50, 600)
            node = world.found()
            if node is None:
                continue
            known = world.acting.known_epoch(QUEUE)
            answer = await self.ask(node, Request.LOCK_BATCH_MQ, body=body)
            is_locked = answer is not None and answer.code == Answer.SUCCESS and bool(
                json.loads(answer.body, LockedBody).locked
            )  # fmt: skip
            if is_locked and node.serves:
                world.on_locked(node, client, known)
                await asyncio.sleep(draw.between(1_000, 400_000) / 1e6)
            world.acting.on_unlocked(QUEUE, client)
            await self.ask(node, Request.UNLOCK_BATCH_MQ, body=body)
