"""A client: where a topic is, messages of its queues, and sends.

Queues belong to a broker, which is a group of replicas. Each request goes to its master, or to the
slave that acts for it: offsets of a queue are the same on all replicas. Nothing is tried again
here; the caller does it, for as long as it likes.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convoymq.model.errors import Refused, Unavailable
from convoymq.rocketmq.acting.escape import GENERATION_FIELD, KEY_FIELD, KEY_PROPERTY, Key
from convoymq.rocketmq.client.routes import Routes, merged_route
from convoymq.rocketmq.compression import uncompressed
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.signing import Signer
from convoymq.rocketmq.remoting.values import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    EscapeKeys,
    RouteData,
)
from convoymq.rocketmq.store.types import Message, SysFlag, encode_properties

ASK_S = 10.0
HOLD_MS = 10_000
ROUTE_S = 1.0
"""Age of a route that requests use."""
PROPERTIES_BYTES_MAX = 32_000
"""A broker takes 32,767, and adds some of its own."""
STORED = frozenset((
    *(Answer.SUCCESS, Answer.FLUSH_DISK_TIMEOUT),
    *(Answer.SLAVE_NOT_AVAILABLE, Answer.FLUSH_SLAVE_TIMEOUT),
))  # fmt: skip
"""The message is in the log; how safe that is, is the group's configuration."""
_PULLED = frozenset((
    *(Answer.SUCCESS, Answer.PULL_NOT_FOUND),
    *(Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED),
))  # fmt: skip
_SUSPEND, _SUBSCRIPTION = 2, 4
_KIND_SHIFT, _KIND_MASK = 8, 7
_FOREVER_MS = 0x7FFF_FFFF_FFFF_FFFF


class NoTopic(Unavailable):
    """No name server knows the topic."""


class Queue(NamedTuple):
    """A queue of a topic."""

    broker: str
    number: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """An answer to a pull."""

    code: int
    messages: Sequence[Message]
    next: int
    """Offset to go on with, as the broker says."""
    min: int
    """Of the messages that are kept."""
    max: int
    """Behind the last one."""


def content_of(message: Message) -> bytes:
    """Returns the body, no longer compressed. Raises ValueError."""
    if message.sys_flag & SysFlag.COMPRESSED:
        return uncompressed(message.body, message.sys_flag >> _KIND_SHIFT & _KIND_MASK)
    return bytes(message.body)


def send_fields(
    *, group: str, topic: str, broker: str, queue: int, properties: str, born_ms: int,
    flag: int = 0, sys_flag: int = 0, reconsumed: int = 0, key: Key | None = None,
    generation: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Returns the fields of SEND_MESSAGE_V2. `key`: a broker of ours stores its message once."""
    fields = {
        "a": group, "b": topic, "c": "TBW102", "d": "8", "e": str(queue), "f": str(sys_flag),
        "g": str(born_ms), "h": str(flag), "i": properties, "j": str(reconsumed), "k": "false",
        "m": "false", "n": broker,
    }  # fmt: skip
    if key is not None:
        fields |= {KEY_FIELD: str(key), GENERATION_FIELD: str(generation)}
    return fields


def pull_fields(
    group: str, topic: str, queue: int, offset: int, *, count: int = 1, hold_ms: int = 0,
    bytes_max: int | None = None,
) -> dict[str, str]:  # fmt: skip
    """Returns the fields of PULL_MESSAGE, for all messages whatever their tags."""
    fields = {
        "consumerGroup": group, "topic": topic, "queueId": str(queue), "queueOffset": str(offset),
        "maxMsgNums": str(count), "sysFlag": str(_SUBSCRIPTION | (_SUSPEND if hold_ms else 0)),
        "commitOffset": "0", "suspendTimeoutMillis": str(hold_ms), "subscription": "*",
        "subVersion": "0", "expressionType": "TAG",
    }  # fmt: skip
    return fields if bytes_max is None else fields | {"maxMsgBytes": str(bytes_max)}


class RocketClient:
    """See the module text. All methods raise Unavailable: trying again may help.

    Args:
        name_servers: `host:port`, with `;` between.
        group: name of the consumer or producer.
        account: access key and secret key, where brokers want signatures.
        tls: of all connections; None: none.
    """

    def __init__(
        self,
        name_servers: str,
        group: str,
        account: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.remoting = RemotingClient(sign=None if account is None else Signer(*account), tls=tls)
        self.group = group
        self._names = Routes(name_servers, self.remoting)
        self._known: dict[str, tuple[float, RouteData]] = {}

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Returns the addresses of the name servers."""
        return self._names.addresses

    async def stop(self) -> None:
        """Ends all connections."""
        await self.remoting.stop()

    # --- where a topic is -------------------------------------------------------------------

    async def route(self, topic: str) -> RouteData:
        """Returns where a topic is now. Raises NoTopic."""
        routes = await self._names.routes(topic)
        if routes is None:
            raise Unavailable(f"no name server answers of {', '.join(self.name_servers)}")
        found = merged_route(routes)
        if not routes:
            raise NoTopic(f"no name server knows topic {topic}")
        self._known[topic] = time.monotonic(), found
        return found

    async def queues(self, topic: str) -> list[Queue]:
        """Returns the queues of a topic that may be read."""
        route = await self.route(topic)
        return [
            Queue(data.broker_name, number)
            for data in route.queue_datas
            if data.perm & PERM_READ
            for number in range(data.read_queue_nums)
        ]

    async def writable(self, topic: str) -> dict[str, int]:
        """Returns the brokers that a topic may be written to, with their number of queues."""
        route = await self.route(topic)
        return {
            data.broker_name: data.write_queue_nums
            for data in route.queue_datas
            if data.perm & PERM_WRITE and data.write_queue_nums > 0
        }

    # --- requests to a broker -----------------------------------------------------------------

    async def ask(
        self, topic: str, broker: str, code: int, fields: Mapping[str, str], body: bytes = b"",
        *, wait_s: float = 0.0, writes: bool = False,
    ) -> Command:  # fmt: skip
        """Asks a broker of a topic: its master, or the slave that acts for it."""
        known_s, route = self._known.get(topic, (0.0, None))
        if route is None or time.monotonic() - known_s >= ROUTE_S:
            route = await self.route(topic)
        replicas: Mapping[int, str] = next(
            (data.broker_addrs for data in route.broker_datas if data.broker_name == broker), {}
        )
        try:
            if not replicas or (writes and MASTER_ID not in replicas):
                raise Unavailable(f"broker {broker} of topic {topic} has no master now")
            asked = request(code, dict(fields), body)
            return await self.remoting.ask(replicas[min(replicas)], asked, ASK_S + wait_s)
        except Unavailable:
            self._known.pop(topic, None)
            raise

    def failed(self, topic: str, broker: str, answer: Command) -> Unavailable:
        """Returns the error for an answer that is none: the route may be an old one."""
        self._known.pop(topic, None)
        return Unavailable(f"broker {broker}: {answer.remark or f'code {answer.code}'}")

    async def _number(self, code: int, topic: str, queue: Queue, **fields: object) -> int:
        """Returns the field `offset` of an answer."""
        known = {"consumerGroup": self.group, "topic": topic, "queueId": str(queue.number)}
        texts = {name: str(value) for name, value in fields.items()}
        answer = await self.ask(topic, queue.broker, code, known | texts)
        if answer.code != Answer.SUCCESS:
            raise self.failed(topic, queue.broker, answer)
        return max(0, answer.number("offset"))

    # --- reading --------------------------------------------------------------------------

    async def pull(
        self, topic: str, queue: Queue, offset: int, *, count: int, bytes_max: int,
        hold_ms: int = HOLD_MS,
    ) -> Pulled:  # fmt: skip
        """Returns messages of a queue from an offset on.

        Args:
            hold_ms: the broker waits so long for a message.
        """
        answer = await self.ask(
            topic, queue.broker, Request.PULL_MESSAGE,
            pull_fields(self.group, topic, queue.number, offset, count=count, hold_ms=hold_ms,
                        bytes_max=bytes_max),
            wait_s=hold_ms / 1000,
        )  # fmt: skip
        if answer.code not in _PULLED:
            raise self.failed(topic, queue.broker, answer)
        return Pulled(
            answer.code,
            records(answer.body) if answer.code == Answer.SUCCESS else (),
            answer.number("nextBeginOffset", offset),
            answer.number("minOffset", 0),
            answer.number("maxOffset", 0),
        )

    async def ends(self, topic: str, queue: Queue) -> tuple[int, int]:
        """Returns the offset of the first message that is kept, and that behind the last one."""
        first, end = await asyncio.gather(
            self._number(Request.GET_MIN_OFFSET, topic, queue),
            self._number(Request.GET_MAX_OFFSET, topic, queue),
        )
        return first, max(first, end)

    async def offset_at(self, topic: str, queue: Queue, ms: int) -> int:
        """Returns the offset of the first message that was stored at a time or later."""
        fields = {"timestamp": ms, "boundaryType": "LOWER"}
        return await self._number(Request.SEARCH_OFFSET_BY_TIMESTAMP, topic, queue, **fields)

    async def committed(self, topic: str, queue: Queue) -> int | None:
        """Returns where the group goes on; None: it has never read the queue."""
        fields = {
            "consumerGroup": self.group, "topic": topic, "queueId": str(queue.number),
            "setZeroIfNotFound": "false",
        }  # fmt: skip
        answer = await self.ask(topic, queue.broker, Request.QUERY_CONSUMER_OFFSET, fields)
        if answer.code == Answer.QUERY_NOT_FOUND:
            return None
        if answer.code != Answer.SUCCESS:
            raise self.failed(topic, queue.broker, answer)
        return max(0, answer.number("offset"))

    async def commit(self, topic: str, queue: Queue, offset: int) -> None:
        """Says that the group goes on at an offset."""
        fields = {
            "consumerGroup": self.group, "topic": topic, "queueId": str(queue.number),
            "commitOffset": str(offset),
        }  # fmt: skip
        answer = await self.ask(topic, queue.broker, Request.UPDATE_CONSUMER_OFFSET, fields)
        if answer.code != Answer.SUCCESS:
            raise self.failed(topic, queue.broker, answer)

    async def with_key(self, topic: str, broker: str, key: str) -> list[Message]:
        """Returns messages of a broker that have a key (KEYS, UNIQ_KEY), by its index."""
        fields = {
            "topic": topic, "key": key, "maxNum": "32", "beginTimestamp": "0",
            "endTimestamp": str(_FOREVER_MS), "_UNIQUE_KEY_QUERY": "true",
        }  # fmt: skip
        answer = await self.ask(topic, broker, Request.QUERY_MESSAGE, fields)
        if answer.code not in (Answer.SUCCESS, Answer.QUERY_NOT_FOUND):
            raise self.failed(topic, broker, answer)
        return records(answer.body) if answer.code == Answer.SUCCESS else []

    # --- sending --------------------------------------------------------------------------

    async def send(
        self, topic: str, queue: Queue, body: bytes, properties: Mapping[str, str], *,
        born_ms: int = 0, key: Key | None = None, once: bool = False, generation: int = 0,
    ) -> None:  # fmt: skip
        """Sends a message.

        Args:
            key: the record that it comes from, kept as a property.
            once: the broker is one of ours, and looks whether it has the key.

        Raises:
            Refused: the broker takes no such message.
        """
        if key is not None:
            properties = {**properties, KEY_PROPERTY: str(key)}
        encoded = encode_properties(dict(properties))
        if len(encoded) > PROPERTIES_BYTES_MAX:
            raise Refused(f"{len(encoded)} bytes of properties, {PROPERTIES_BYTES_MAX} may be")
        fields = send_fields(
            group=self.group, topic=topic, broker=queue.broker, queue=queue.number,
            properties=encoded.decode(), born_ms=born_ms or int(time.time() * 1000),
            key=key if once else None, generation=generation,
        )  # fmt: skip
        answer = await self.ask(
            topic, queue.broker, Request.SEND_MESSAGE_V2, fields, body, writes=True
        )
        if answer.code == Answer.MESSAGE_ILLEGAL:
            raise Refused(answer.remark or f"code {answer.code}")
        if answer.code not in STORED:
            raise self.failed(topic, queue.broker, answer)

    async def keys(
        self, topic: str, broker: str, source: str, generation: int = 0
    ) -> EscapeKeys | None:
        """Returns the keys of a source that a broker has stored, and its generation: from now on
        the broker refuses sends of earlier ones. None: it is one of RocketMQ's, which look at no
        keys."""
        fields = {"brokerName": source, "generation": str(generation)}
        answer = await self.ask(topic, broker, Request.GET_ESCAPE_KEYS, fields, writes=True)
        if answer.code == Answer.REQUEST_CODE_NOT_SUPPORTED:
            return None
        if answer.code != Answer.SUCCESS:
            raise self.failed(topic, broker, answer)
        return json.loads(answer.body, EscapeKeys)


def records(body: bytes | bytearray | memoryview) -> list[Message]:
    """Returns the messages of an answer. Raises Unavailable."""
    view, found, at = memoryview(body), [], 0
    while at + 4 <= len(view):
        (size,) = struct.unpack_from(">i", view, at)
        if not 0 < size <= len(view) - at:
            raise Unavailable("a broker's answer holds no whole records")
        found.append(Message(view[at : at + size]))
        at += size
    return found
