"""RocketMQ's end of a bridge: a topic, by any name server and broker of its protocol.

Queues are pulled in order, and the group's offset moves when what lies before it is safe. A
message that is sent has the key of the record that it comes from, as messages that escape from a
group without a master have: a broker of ours looks into its log and stores it once. RocketMQ's
brokers do not look.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Sequence

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.acting.escape import GENERATION_FIELD, KEY_FIELD, KEY_PROPERTY, Key
from convoymq.rocketmq.acting.name_servers import Identity, NameServers
from convoymq.rocketmq.bridge.mapping import (
    AmqpMessage,
    RocketMessage,
    to_amqp,
    to_rocketmq,
)
from convoymq.rocketmq.bridge.pump import BridgeStopped, Item
from convoymq.rocketmq.bridge.settings import BridgeSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.server import RemotingClient
from convoymq.rocketmq.remoting.values import MASTER_ID, PERM_READ, PERM_WRITE, RouteData
from convoymq.rocketmq.store.types import Message, SysFlag, encode_properties, java_hash

ASK_S = 10.0
HOLD_MS = 10_000
PROPERTIES_BYTES_MAX = 32_000
"""A broker takes 32,767, and adds some of its own."""
UNCOMPRESSED_BYTES_MAX = 64 << 20
STORED = frozenset((
    *(Answer.SUCCESS, Answer.FLUSH_DISK_TIMEOUT),
    *(Answer.SLAVE_NOT_AVAILABLE, Answer.FLUSH_SLAVE_TIMEOUT),
))  # fmt: skip
"""The message is in the log; how safe that is, is the group's configuration."""
PULL_SUSPEND, PULL_SUBSCRIPTION = 2, 4
_LZ4, _ZSTD = 1, 2


class Rocket:
    """Requests to the brokers of a topic."""

    def __init__(self, settings: BridgeSettings) -> None:
        self.remoting = RemotingClient()
        own = Identity(cluster="", name="", id=0, address="", ha_address="")
        self._names = NameServers(settings.name_servers, own, self.remoting)
        self.group = f"CID_{settings.name}"

    async def route(self, topic: str) -> RouteData:
        """Returns where a topic is. Raises Unavailable."""
        found = await self._names.route(topic)
        if found is None:
            raise Unavailable(f"no name server knows topic {topic}")
        return found

    async def ask(
        self, topic: str, broker: str, code: int, fields: dict[str, str], body: bytes = b"",
        *, wait_s: float = 0.0, writes: bool = False,
    ) -> Command:  # fmt: skip
        """Asks a broker of a topic: its master, or who acts for it. Raises Unavailable."""
        route = await self.route(topic)
        replicas = next(
            (data.broker_addrs for data in route.broker_datas if data.broker_name == broker), {}
        )
        if not replicas or (writes and MASTER_ID not in replicas):
            raise Unavailable(f"broker {broker} of topic {topic} has no master now")
        connection = await self.remoting.connected(replicas[min(replicas)], ASK_S)
        return await connection.request(request(code, fields, body), ASK_S + wait_s)

    async def send(
        self, topic: str, broker: str, queue: int, message: RocketMessage, key: Key, *, once: bool
    ) -> str | None:
        """Sends a message; returns why it is refused, if it is. Raises Unavailable."""
        properties = encode_properties({**message.properties, KEY_PROPERTY: str(key)})
        if len(properties) > PROPERTIES_BYTES_MAX:
            return f"{len(properties)} bytes of properties, {PROPERTIES_BYTES_MAX} may be"
        fields = {
            "a": self.group, "b": topic, "c": "TBW102", "d": "8", "e": str(queue), "f": "0",
            "g": str(message.born_ms), "h": "0", "i": properties.decode(), "j": "0", "k": "false",
            "m": "false", "n": broker,
        }  # fmt: skip
        if once:
            fields |= {KEY_FIELD: str(key), GENERATION_FIELD: "0"}
        answer = await self.ask(
            topic, broker, Request.SEND_MESSAGE_V2, fields, message.body, writes=True
        )
        if answer.code in STORED:
            return None
        reason = answer.remark or f"code {answer.code}"
        if answer.code == Answer.MESSAGE_ILLEGAL:
            return reason
        raise Unavailable(f"broker {broker}: {reason}")

    async def knows_keys(self, topic: str, broker: str) -> bool:
        """Returns whether a broker stores a message of a key once. Raises Unavailable."""
        fields = {"brokerName": f"bridge.{self.group}", "generation": "0"}
        answer = await self.ask(topic, broker, Request.GET_ESCAPE_KEYS, fields)
        if answer.code not in (Answer.SUCCESS, Answer.REQUEST_CODE_NOT_SUPPORTED):
            raise Unavailable(f"broker {broker}: {answer.remark or f'code {answer.code}'}")
        return answer.code == Answer.SUCCESS


class RocketSink:
    """A topic on one broker."""

    def __init__(self, rocket: Rocket, topic: str, broker: str, queues: int, *, once: bool) -> None:
        self._rocket = rocket
        self._topic = topic
        self._broker = broker
        self._queues = queues
        self._once = once

    def lanes(self, items: Sequence[Item[AmqpMessage]]) -> Sequence[Sequence[Item[AmqpMessage]]]:
        """See `Sink`: by queue, which follows from the order key."""
        found: dict[int, list[Item[AmqpMessage]]] = {}
        for item in items:
            found.setdefault(self._queue_of(item.message), []).append(item)
        return list(found.values())

    def _queue_of(self, message: AmqpMessage) -> int:
        return java_hash((message.key or b"").decode("latin-1")) % self._queues

    async def store(self, items: Sequence[Item[AmqpMessage]]) -> tuple[int, str | None]:
        """See `Sink`."""
        item = items[0]
        reason = await self._rocket.send(
            self._topic, self._broker, self._queue_of(item.message), to_rocketmq(item.message),
            item.key, once=self._once,
        )  # fmt: skip
        return (0, reason) if reason is not None else (1, None)


class RocketSource:
    """One queue of a topic."""

    def __init__(self, rocket: Rocket, settings: BridgeSettings, broker: str, queue: int) -> None:
        self._rocket = rocket
        self._settings = settings
        self._topic = settings.from_rocketmq_topic
        self._broker = broker
        self._queue = queue
        self._offset: int | None = None

    async def _ask(self, code: int, wait_s: float = 0.0, **fields: object) -> Command:
        known = {
            "consumerGroup": self._rocket.group, "topic": self._topic, "queueId": str(self._queue),
        }  # fmt: skip
        texts = {name: str(value) for name, value in fields.items()}
        return await self._rocket.ask(self._topic, self._broker, code, known | texts, wait_s=wait_s)

    async def _begin(self) -> int:
        answer = await self._ask(Request.QUERY_CONSUMER_OFFSET, setZeroIfNotFound="false")
        if answer.code == Answer.QUERY_NOT_FOUND:
            answer = await self._ask(Request.GET_MIN_OFFSET)
        if answer.code != Answer.SUCCESS:
            raise Unavailable(f"broker {self._broker}: {answer.remark or f'code {answer.code}'}")
        return max(0, answer.number("offset"))

    async def next(self) -> Sequence[Item[AmqpMessage]]:
        """See `Source`."""
        if self._offset is None:
            self._offset = await self._begin()
        answer = await self._ask(
            Request.PULL_MESSAGE, HOLD_MS / 1000, queueOffset=self._offset,
            maxMsgNums=self._settings.window, maxMsgBytes=self._settings.window_bytes,
            sysFlag=PULL_SUSPEND | PULL_SUBSCRIPTION, commitOffset=0, suspendTimeoutMillis=HOLD_MS,
            subscription="*", subVersion=0, expressionType="TAG",
        )  # fmt: skip
        if answer.code == Answer.SUCCESS:
            return [self._item(message) for message in _records(answer.body)]
        following = answer.number("nextBeginOffset", self._offset)
        if answer.code == Answer.PULL_OFFSET_MOVED and following != self._offset:
            raise BridgeStopped(
                f"{self._broker}:{self._topic}:{self._queue}: offset {self._offset} is not there, "
                f"messages begin at {following}; set the offset of group {self._rocket.group} to "
                "go on without what is missing"
            )
        if answer.code not in (Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY):
            raise Unavailable(f"broker {self._broker}: {answer.remark or f'code {answer.code}'}")
        if answer.code == Answer.PULL_RETRY_IMMEDIATELY:
            await asyncio.sleep(self._settings.poll_ms / 1000)
        return ()

    def _item(self, message: Message) -> Item[AmqpMessage]:
        key = Key(self._broker, self._topic, self._queue, message.queue_offset)
        body = bytes(message.body)
        if message.sys_flag & SysFlag.COMPRESSED:
            if message.sys_flag >> 8 & 7 in (_LZ4, _ZSTD):
                raise BridgeStopped(f"message {key} is compressed with LZ4 or Zstandard")
            body = _uncompressed(body, key)
        found = RocketMessage(body, message.properties, message.born_ms, str(key))
        return Item(key, to_amqp(found))

    async def done(self, items: Sequence[Item[AmqpMessage]]) -> None:
        """See `Source`."""
        offset = items[-1].key.offset + 1
        answer = await self._ask(Request.UPDATE_CONSUMER_OFFSET, commitOffset=offset)
        if answer.code != Answer.SUCCESS:
            raise Unavailable(f"broker {self._broker}: {answer.remark or f'code {answer.code}'}")
        self._offset = offset

    async def dead_letter(self, item: Item[AmqpMessage], reason: str) -> None:
        """See `Source`."""
        topic = self._settings.dead_letter_rocketmq_topic
        broker, queues = await place_of(self._rocket, topic, self._broker)
        once = await self._rocket.knows_keys(topic, broker)
        headers = {**item.message.headers, "refused": reason.encode()}
        message = AmqpMessage(
            item.message.body, item.message.key, headers, item.message.properties,
            item.message.time_ms,
        )  # fmt: skip
        # A broker knows its own records by other means: the bridge's name tells them apart.
        key = Key(f"bridge.{self._rocket.group}.{self._broker}", *item.key[1:])
        refusal = await self._rocket.send(
            topic, broker, self._queue % queues, to_rocketmq(message), key, once=once
        )
        if refusal is not None:
            raise BridgeStopped(f"topic {topic} takes no dead letters: {refusal}")


async def place_of(rocket: Rocket, topic: str, broker: str) -> tuple[str, int]:
    """Returns the broker that a topic is written to, and its queues there. Raises Unavailable,
    BridgeStopped."""
    route = await rocket.route(topic)
    found = {
        q.broker_name: q.write_queue_nums
        for q in route.queue_datas
        if q.perm & PERM_WRITE and q.write_queue_nums > 0
    }
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


async def queues_of(rocket: Rocket, topic: str) -> list[tuple[str, int]]:
    """Returns the queues of a topic: broker and number. Raises Unavailable."""
    route = await rocket.route(topic)
    return [
        (q.broker_name, queue)
        for q in route.queue_datas
        if q.perm & PERM_READ
        for queue in range(q.read_queue_nums)
    ]


def _records(body: bytes | bytearray | memoryview) -> list[Message]:
    view, found, at = memoryview(bytes(body)), [], 0
    while at + 4 <= len(view):
        (size,) = struct.unpack_from(">i", view, at)
        if not 0 < size <= len(view) - at:
            raise Unavailable("a broker's answer holds no whole records")
        found.append(Message(view[at : at + size]))
        at += size
    return found


def _uncompressed(body: bytes, key: Key) -> bytes:
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body, UNCOMPRESSED_BYTES_MAX)
    except zlib.error as error:
        raise BridgeStopped(f"message {key} is compressed, and damaged: {error}") from error
    if not stream.eof:
        raise BridgeStopped(f"message {key} is larger than {UNCOMPRESSED_BYTES_MAX} bytes")
    return content
