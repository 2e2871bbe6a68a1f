"""A broker in this process, and a client of it that asks as RocketMQ's clients do."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

from convoymq.rocketmq.broker.configuration import Configuration
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.store.types import Message
from tests.patience import PATIENCE_S

SUSPEND, SUBSCRIPTION = 2, 4


def configuration(directory: Path, **settings: object) -> Configuration:
    """Settings of a small broker on loopback; names are RocketMQ's."""
    chosen = {
        "listenPort": 0, "haListenPort": 0, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1",
        "storePathRootDir": directory, "mappedFileSizeCommitLog": 4 << 20,
        "mappedFileSizeConsumeQueue": 20_000, "brokerName": "b", "brokerClusterName": "c",
    } | settings  # fmt: skip
    return Configuration([(name, str(value).lower() if isinstance(value, bool) else str(value),
                           "test") for name, value in chosen.items()])  # fmt: skip


class Client:
    """A client on a connection of its own. Commands that the broker pushes are in `pushed`."""

    timeout_s = PATIENCE_S

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.pushed: list[Command] = []
        self.replies: dict[int, bytes] = {}
        self.remoting = RemotingClient(self._on_push)

    def _on_push(self, _connection: Connection, command: Command) -> Command:
        self.pushed.append(command)
        return command.answer(body=self.replies.get(command.code, b""))

    async def ask(self, code: int, body: bytes | object = b"", **fields: object) -> Command:
        """Sends a request; a body that is no bytes is sent as JSON."""
        texts = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in fields.items()
        }
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection = await self.remoting.connected(self.address, self.timeout_s)
        return await connection.request(request(code, texts, content), self.timeout_s)

    async def send(self, topic: str, body: bytes = b"x", /, **fields: object) -> Command:
        """Sends a message as Java's clients do."""
        known = {
            "a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0,
            "g": 1_700_000_000_000, "h": 0, "i": "", "j": 0, "k": False, "m": False,
        } | fields  # fmt: skip
        return await self.ask(Request.SEND_MESSAGE_V2, body, **known)

    async def pull(
        self, topic: str, offset: int = 0, queue: int = 0, /, *, wait_ms: int = 0, **fields: object
    ) -> Command:
        """Pulls with a subscription of its own."""
        known = {
            "consumerGroup": "g", "topic": topic, "queueId": queue, "queueOffset": offset,
            "maxMsgNums": 32, "sysFlag": SUBSCRIPTION | (SUSPEND if wait_ms else 0),
            "commitOffset": 0, "suspendTimeoutMillis": wait_ms, "subscription": "*",
            "subVersion": 0, "expressionType": "TAG",
        } | fields  # fmt: skip
        return await self.ask(Request.PULL_MESSAGE, **known)

    async def all(self, topic: str, offset: int = 0, /, **fields: object) -> list[Message]:
        """Pulls until there is no more: one answer may have a part only."""
        found: list[Message] = []
        while True:
            answer = await self.pull(topic, offset, **fields)
            if answer.code not in (Answer.SUCCESS, Answer.PULL_RETRY_IMMEDIATELY):
                return found
            found += records(answer)
            if offset == int(answer.fields["nextBeginOffset"]):
                # A slave sends readers at its end to its master.
                return found
            offset = int(answer.fields["nextBeginOffset"])

    async def heartbeat(
        self, client: str, group: str = "g", producer: str = "", **subscriptions: str
    ) -> Command:
        """Sends a heartbeat of a consumer, and maybe of a producer."""
        topics = [
            {"topic": topic, "subString": text, "subVersion": 7, "tagsSet": [], "codeSet": [],
             "expressionType": "TAG", "classFilterMode": False}
            for topic, text in subscriptions.items()
        ]  # fmt: skip
        consumer = {
            "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": topics,
            "unitMode": False,
        }  # fmt: skip
        body = {
            "clientID": client, "consumerDataSet": [consumer] if group else [],
            "producerDataSet": [{"groupName": producer}] if producer else [],
        }  # fmt: skip
        return await self.ask(Request.HEART_BEAT, body)

    async def stop(self) -> None:
        await self.remoting.stop()


class Running:
    """A broker that runs, its first client, and its name server if there is one."""

    names: NameServer
    names_port: int

    def __init__(self, broker: Broker, port: int) -> None:
        self.broker = broker
        self.port = port
        self.clients: list[Client] = []
        self.client = self.another()

    @classmethod
    async def begin(cls, directory: Path, **settings: object) -> Running:
        broker = Broker(configuration(directory, **settings))
        return cls(broker, await broker.start())

    def another(self) -> Client:
        self.clients.append(Client(self.port))
        return self.clients[-1]

    async def stop(self) -> None:
        for client in self.clients:
            await client.stop()
        await self.broker.stop()


def records(answer: Command) -> list[Message]:
    """The messages of an answer."""
    body = memoryview(answer.body)
    found = []
    at = 0
    while at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        found.append(Message(body[at : at + size]))
        at += size
    return found


def batch(*messages: tuple[bytes, str]) -> bytes:
    """The body of a batch."""
    parts = []
    for body, properties in messages:
        content = properties.encode()
        size = 22 + len(body) + len(content)
        parts.append(struct.pack(">iiiii", size, 0, 0, 0, len(body)) + body)
        parts.append(struct.pack(">h", len(content)) + content)
    return b"".join(parts)


async def settle() -> None:
    """Lets the loop run what is due."""
    for _ in range(3):
        await asyncio.sleep(0)
