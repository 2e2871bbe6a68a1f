"""Sends: 10, 310, 320, 36 and replies to requests (324, 325).

All sends that arrive in one turn of the event loop are one append of the store, one wait for the
disk and the slaves, and one answer each. A draft has the properties as the client sent them, with
what the broker adds behind them.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.acting.escape import KEY_PROPERTY
from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.topics import check_is_writable
from convoymq.rocketmq.broker.types import STORED
from convoymq.rocketmq.remoting.codes import VERSION_MAX_RECONSUME_TIMES, Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import PERM_WRITE, TopicConfig
from convoymq.rocketmq.special.names import DELAY
from convoymq.rocketmq.special.recall import handle_of
from convoymq.rocketmq.store.types import (
    Draft,
    Placed,
    PutStatus,
    SysFlag,
    decode_properties,
    encode_properties,
)

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

TOPIC_LENGTH_MAX = 127
REPLY_TIMEOUT_S = 10.0
DEAD_LETTER_QUEUES = 1
UNIT = 1
UNIT_SUBSCRIPTION = 2

_V2 = {
    "a": "producerGroup", "b": "topic", "c": "defaultTopic", "d": "defaultTopicQueueNums",
    "e": "queueId", "f": "sysFlag", "g": "bornTimestamp", "h": "flag", "i": "properties",
    "j": "reconsumeTimes", "k": "unitMode", "l": "maxReconsumeTimes", "m": "batch",
}  # fmt: skip
_PORT = struct.Struct(">i")


_NOT_OF_CLIENTS = ("MSG_REGION", "CLUSTER", "POP_CK", "TRACE_ON", KEY_PROPERTY)
"""Properties that brokers set. A copied `ESCAPE_KEY` would say that another message has left."""
_MARKS = tuple(f"{name}\x01".encode() for name in _NOT_OF_CLIENTS)
_BATCH_HEAD = 20
"""Bytes before the body of a message of a batch."""


def refusal_of(status: PutStatus, message_bytes_max: int) -> Refusal:
    """Returns what a message that was not stored is answered with."""
    illegal = (
        "the message is illegal, maybe msg body or properties length not matched. msg body length "
        f"limit {message_bytes_max}B, msg properties length limit 32KB."
    )
    code, text = {
        PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH: (
            Answer.SYSTEM_ERROR, "in-sync replicas not enough"),
        PutStatus.CREATE_MAPPED_FILE_FAILED: (
            Answer.SYSTEM_ERROR, "create mapped file failed, server is busy or broken."),
        PutStatus.MESSAGE_ILLEGAL: (Answer.MESSAGE_ILLEGAL, illegal),
        PutStatus.PROPERTIES_SIZE_EXCEEDED: (Answer.MESSAGE_ILLEGAL, illegal),
        PutStatus.SERVICE_NOT_AVAILABLE: (
            Answer.SERVICE_NOT_AVAILABLE,
            "service not available now. It may be caused by one of the following reasons: the "
            "broker's disk is full, messages are put to the slave, message store has been shut "
            "down, etc."),
        PutStatus.OS_PAGE_CACHE_BUSY: (
            Answer.SYSTEM_BUSY,
            "[PC_SYNCHRONIZED]broker busy, start flow control for a while"),
    }.get(status, (Answer.SYSTEM_ERROR, "UNKNOWN_ERROR"))  # fmt: skip
    return Refusal(code, text)


def host_bytes(remote: tuple[str, int]) -> bytes:
    """Returns an address as records have it."""
    try:
        return ip_address(remote[0]).packed + _PORT.pack(remote[1])
    except ValueError:
        return bytes(8)


class Header:
    """Fields of a send, by their letters."""

    __slots__ = ("command", "fields")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.fields = command.fields
        if command.code not in _HAS_LETTERS:
            self.fields = {
                letter: self.fields[name] for letter, name in _V2.items() if name in self.fields
            }

    def needed(self, letter: str) -> str:
        """Returns a field that has to be there. Raises SyntaxFault."""
        found = self.fields.get(letter)
        return self.command.needed(self._name(letter)) if found is None else found

    def number(self, letter: str, default: int | None = None) -> int:
        """Returns a field that is a number. Raises SyntaxFault."""
        try:
            found = int(self.fields[letter])
            if -(1 << 63) <= found < 1 << 63:
                return found
        except (KeyError, ValueError):
            pass
        # Says what is wrong.
        return self.command.number(self._name(letter), default)

    def _name(self, letter: str) -> str:
        return letter if self.command.code in _HAS_LETTERS else _V2[letter]

    def is_set(self, letter: str) -> bool:
        """Returns whether a flag is set."""
        return self.fields.get(letter) == "true"


_HAS_LETTERS = (
    Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE, Request.SEND_REPLY_MESSAGE_V2,
)  # fmt: skip


def unique_key() -> str:
    """Returns a key for a message whose client gave it none."""
    return os.urandom(16).hex().upper()


@dataclass(slots=True)
class _Sent:
    """A send that waits for the end of the turn."""

    connection: Connection
    command: Command
    draft: Draft
    key: str


class Sender:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts
        self._turn: list[_Sent] = []
        self._loop = asyncio.get_running_loop()
        self._born_hosts: dict[Connection, bytes] = {}
        settings = parts.settings
        self._added = encode_properties({
            "MSG_REGION": settings.region,
            "TRACE_ON": str(settings.trace_on).lower(),
            "CLUSTER": settings.cluster,
        })  # fmt: skip
        self._told = {"MSG_REGION": settings.region, "TRACE_ON": str(settings.trace_on).lower()}
        for code in (Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE):
            parts.register(code, self._send)
        parts.register(Request.CONSUMER_SEND_MSG_BACK, self._send_back)
        for code in (Request.SEND_REPLY_MESSAGE, Request.SEND_REPLY_MESSAGE_V2):
            parts.register(code, self._reply)

    @property
    def _settings(self) -> BrokerSettings:
        return self._parts.settings

    def closed(self, connection: Connection) -> None:
        """A connection ended."""
        self._born_hosts.pop(connection, None)

    # --- one send ------------------------------------------------------------------------

    def _send(
        self, connection: Connection, command: Command
    ) -> Command | Awaitable[Command | None] | None:
        try:
            self._check_role()
            header = Header(command)
            name = header.needed("b")
            topic = self._parts.topics.get(name)
            if topic is None:
                return self._send_to_new(connection, header, name)
            self._enqueue(connection, header, topic)
        except Refusal as refusal:
            refusal.fields = self._told
            raise
        return None

    async def _send_to_new(self, connection: Connection, header: Header, name: str) -> None:
        """The first message of a topic: it is sent when name servers know of the topic."""
        try:
            self._check_name(name)
            topic = self._create(header, name)
            await self._parts.registrar.announced()
            self._enqueue(connection, header, topic)
        except Refusal as refusal:
            refusal.fields = self._told
            raise

    def _check_role(self) -> None:
        if self._parts.role.is_master:
            return
        if self._parts.role.id and not self._settings.acting_master:
            raise Refusal(
                Answer.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"
            )
        raise refusal_of(PutStatus.SERVICE_NOT_AVAILABLE, 0)

    def _check_name(self, topic: str) -> None:
        names.check_topic(topic)
        if topic in names.NOT_SENDABLE:
            raise Refusal(Answer.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")

    def _check_topic(self, connection: Connection, header: Header, topic: TopicConfig) -> None:
        """Raises Refusal for a send that the topic does not take."""
        if topic.topic_name in names.NOT_SENDABLE:
            self._check_name(topic.topic_name)
        if not self._settings.permission & PERM_WRITE and topic.order:
            raise Refusal(
                Answer.NO_PERMISSION,
                f"the broker[{self._parts.role.address}] sending message is forbidden",
            )
        queue = header.number("e")
        if queue >= max(topic.write_queue_nums, topic.read_queue_nums):
            raise Refusal(
                Answer.INVALID_PARAMETER,
                f"request queueId[{queue}] is illegal, {topic.topic_name} Producer: "
                f"{connection.name}",
            )

    def _create(self, header: Header, name: str) -> TopicConfig:
        """Makes the topic of a send. Raises Refusal where the settings forbid it."""
        is_retry = name.startswith(RETRY_PREFIX)
        flag = 0
        if header.is_set("k"):
            flag = UNIT_SUBSCRIPTION if is_retry else UNIT
        topics = self._parts.topics
        found = topics.get(name) or topics.create_for_send(
            name, header.fields.get("c") or "", header.number("d", 0), flag
        )
        if found is None and is_retry:
            found = topics.create_for_retry(name, 1, flag)
        if found is None:
            raise Refusal(
                Answer.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!{names.MORE}"
            )
        return found

    def _enqueue(self, connection: Connection, header: Header, topic: TopicConfig) -> None:
        self._check_topic(connection, header, topic)
        draft, key = self._draft(connection, header, topic)
        draft = self._parts.prepared(draft)
        if not self._turn:
            self._loop.call_soon(self._store_turn)
        self._turn.append(_Sent(connection, header.command, draft, key))

    def _draft(
        self, connection: Connection, header: Header, topic: TopicConfig
    ) -> tuple[Draft, str]:
        name = topic.topic_name
        command = header.command
        is_batch = command.code == Request.SEND_BATCH_MESSAGE or header.is_set("m")
        reconsumed = header.number("j", 0)
        properties = (header.fields.get("i") or "").encode("utf-8", "surrogatepass")
        if name.startswith(RETRY_PREFIX):
            if is_batch:
                raise Refusal(
                    Answer.MESSAGE_ILLEGAL, f"batch request does not support retry group {name}"
                )
            if self._is_dead(header, name, reconsumed):
                name = DEAD_LETTER_PREFIX + names.group_of_retry(name)
                topic = self._parts.topics.create_for_retry(name, DEAD_LETTER_QUEUES)
                properties = without(properties, DELAY)
        if is_batch and len(name) > TOPIC_LENGTH_MAX:
            raise Refusal(Answer.MESSAGE_ILLEGAL, f"message topic length too long {len(name)}")
        queue = header.number("e") if name == header.needed("b") else -1
        if queue < 0:
            queue = random.randrange(topic.write_queue_nums) if topic.write_queue_nums else 0
        flag = header.number("f")
        if topic.topic_filter_type == "MULTI_TAG":
            flag |= SysFlag.MULTI_TAGS
        properties, key = self._complete(properties, is_batch=is_batch)
        body = bytes(command.body)
        if is_batch and KEY_PROPERTY.encode() in body:
            body = _without_keys(body)
        return Draft(
            name, queue, body, properties, header.number("h"), flag,
            header.number("g"), self._born_host(connection), reconsumed, is_batch=is_batch,
        ), key  # fmt: skip

    def _is_dead(self, header: Header, topic: str, reconsumed: int) -> bool:
        """Returns whether a message that comes back is not consumed again."""
        group = names.group_of_retry(topic)
        config = self._parts.groups.find(group)
        if config is None:
            raise no_group(group)
        limit = config.retry_max_times
        if header.command.version >= VERSION_MAX_RECONSUME_TIMES:
            limit = header.number("l", limit)
        return reconsumed > limit or self._parts.locks.is_ordered(group, self._parts.steady_ms())

    def _complete(self, properties: bytes, *, is_batch: bool = False) -> tuple[bytes, str]:
        """Returns properties with the broker's own, and the message's unique key."""
        for mark in _MARKS:
            if mark in properties:
                properties = without(properties, *_NOT_OF_CLIENTS)
                break
        if properties and properties[-1:] != b"\x02":
            properties += b"\x02"
        key = ""
        at = properties.find(b"UNIQ_KEY\x01")
        if at >= 0:
            key = properties[at + 9 : properties.index(b"\x02", at)].decode("utf-8", "replace")
        elif not is_batch:
            key = unique_key()
            properties += f"UNIQ_KEY\x01{key}\x02".encode()
        return properties + self._added, key

    def _born_host(self, connection: Connection) -> bytes:
        found = self._born_hosts.get(connection)
        if found is None:
            found = self._born_hosts[connection] = host_bytes(connection.remote)
        return found

    # --- all sends of a turn -------------------------------------------------------------

    def _store_turn(self) -> None:
        turn, self._turn = self._turn, []
        placed = self._parts.put_now([sent.draft for sent in turn])
        waiting: list[tuple[_Sent, Placed]] = []
        others: list[tuple[_Sent, Placed]] = []
        for sent, found in zip(turn, placed, strict=True):
            is_asked = b"WAIT\x01false" not in sent.draft.properties
            is_put = found.status is PutStatus.PUT_OK
            (waiting if is_put and is_asked else others).append((sent, found))
        if waiting:
            end = max(found.physical + found.size for _, found in waiting)
            self._parts.when_confirmed(end, partial(self._answer_turn, waiting))
        self._answer_all(others)

    def _answer_turn(self, waiting: list[tuple[_Sent, Placed]], status: PutStatus) -> None:
        for _, found in waiting:
            found.status = status
        if self._parts.trace is not None:
            self._parts.trace.confirmed((sent.draft, found) for sent, found in waiting)
        self._answer_all(waiting)

    def _answer_all(self, done: list[tuple[_Sent, Placed]]) -> None:
        answers: dict[Connection, list[Command]] = {}
        for sent, found in done:
            if not sent.command.is_one_way:
                answers.setdefault(sent.connection, []).append(self._answer(sent, found))
            if found.status in STORED:
                self._parts.stats.stored(sent.draft.topic, found.count, found.size)
        for connection, commands in answers.items():
            connection.answer_all(commands)

    def _answer(self, sent: _Sent, placed: Placed) -> Command:
        command, draft = sent.command, sent.draft
        code = STORED.get(placed.status)
        if code is None:
            refusal = refusal_of(placed.status, self._parts.message_bytes_max)
            return command.answer(refusal.code, self._told, remark=refusal.text)
        fields = {
            **self._told,
            "msgId": placed.message_id,
            "queueId": str(draft.queue_id),
            "queueOffset": str(placed.queue_offset),
        }
        if sent.key:
            fields["transactionId"] = sent.key
        if draft.topic == names.TIMER_TOPIC:
            handle = handle_of(draft, self._parts.role.name)
            fields |= {} if handle is None else {"recallHandle": handle}
        return command.answer(code, fields)

    # --- messages that come back ---------------------------------------------------------

    async def _send_back(self, connection: Connection, command: Command) -> Command:
        parts = self._parts
        group = command.needed("group")
        offset, level = command.number("offset"), command.number("delayLevel")
        if not parts.role.is_master:
            raise Refusal(
                Answer.SYSTEM_ERROR, f"no master available along with {parts.role.address}"
            )
        config = parts.groups.find(group)
        if config is None:
            raise no_group(group)
        if not self._settings.permission & PERM_WRITE:
            raise Refusal(
                Answer.NO_PERMISSION,
                f"the broker[{parts.role.address}] sending message is forbidden",
            )
        if config.retry_queue_nums <= 0:
            return command.answer()
        unit = UNIT_SUBSCRIPTION if command.fields.get("unitMode") == "true" else 0
        topic = parts.topics.create_for_retry(RETRY_PREFIX + group, config.retry_queue_nums, unit)
        check_is_writable(topic)
        message = parts.store.message_at(offset)
        if message is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"look message by offset failed, {offset}")
        properties = dict(message.properties)
        properties.setdefault("RETRY_TOPIC", message.topic)
        properties.setdefault("ORIGIN_MESSAGE_ID", message.message_id)
        properties["WAIT"] = "false"
        limit = config.retry_max_times
        if command.version >= VERSION_MAX_RECONSUME_TIMES:
            limit = command.number("maxReconsumeTimes", limit)
        draft = message.draft()
        if message.reconsume_times >= limit or level < 0:
            topic = parts.topics.create_for_retry(DEAD_LETTER_PREFIX + group, DEAD_LETTER_QUEUES)
            properties.pop(DELAY, None)
        else:
            properties[DELAY] = str(level or 3 + message.reconsume_times)
        draft.topic = topic.topic_name
        draft.queue_id = random.randrange(topic.write_queue_nums)
        draft.properties = encode_properties(properties)
        draft.count_again()
        (placed,) = await parts.put([draft])
        if placed.status not in STORED:
            raise Refusal(Answer.SYSTEM_ERROR, placed.status.name)
        return command.answer()

    # --- replies to requests -------------------------------------------------------------

    async def _reply(self, connection: Connection, command: Command) -> Command:
        """Pushes a reply to the client that asked, and stores it."""
        self._check_role()
        header = Header(command)
        name = header.needed("b")
        topic = self._parts.topics.get(name)
        if topic is None:
            self._check_name(name)
            topic = self._create(header, name)
        self._check_topic(connection, header, topic)
        properties = decode_properties((header.fields.get("i") or "").encode())
        problem = await self._push_reply(connection, header, properties)
        if self._settings.store_replies:
            draft, _ = self._draft(connection, header, topic)
            await self._parts.put([self._parts.prepared(draft)])
        if problem:
            raise Refusal(Answer.SYSTEM_ERROR, problem, self._told)
        queue = str(max(0, header.number("e")))
        return command.answer(
            fields={**self._told, "msgId": "0", "queueId": queue, "queueOffset": "0"}
        )

    async def _push_reply(
        self, connection: Connection, header: Header, properties: dict[str, str]
    ) -> str:
        """Returns why the client that asked does not have the reply."""
        to = properties.get("REPLY_TO_CLIENT")
        if to is None:
            return "reply message properties[REPLY_TO_CLIENT] is null"
        client = self._parts.clients.producer(to)
        if client is None or not isinstance(client.channel, Connection):
            return f"push reply message fail, channel of <{to}> not found."
        now = str(self._parts.now_ms())
        properties["PUSH_REPLY_TIME"] = now
        fields = {
            name: v for letter, name in _V2.items() if (v := header.fields.get(letter)) is not None
        }
        fields |= {
            "bornHost": connection.name,
            "storeHost": self._parts.role.address,
            "storeTimestamp": now,
            "properties": encode_properties(properties).decode(),
        }
        push = request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, fields, header.command.body)
        try:
            answer = await client.channel.request(push, REPLY_TIMEOUT_S)
        except Unavailable:
            return f"push reply message to {to}fail."
        return "" if answer.code == Answer.SUCCESS else f"push reply message to {to}fail."


def without(properties: bytes, *gone: str) -> bytes:
    """Returns encoded properties without some."""
    prefixes = tuple(f"{name}\x01".encode() for name in gone)
    return b"".join(
        pair + b"\x02"
        for pair in properties.split(b"\x02") if pair and not pair.startswith(prefixes)
    )  # fmt: skip


def _without_keys(batch: bytes) -> bytes:
    """Returns the body of a batch without keys of escaped messages. What cannot be read stays."""
    parts, at = [], 0
    while at + _BATCH_HEAD <= len(batch):
        end = at + _BATCH_HEAD + int.from_bytes(batch[at + 16 : at + 20], "big")
        following = end + 2 + int.from_bytes(batch[end : end + 2], "big")
        if following > len(batch):
            break
        properties = without(batch[end + 2 : following], KEY_PROPERTY)
        size = end + 2 - at + len(properties)
        head = size.to_bytes(4, "big") + batch[at + 4 : end]
        parts += [head, len(properties).to_bytes(2, "big"), properties]
        at = following
    return b"".join(parts) + batch[at:]


def no_group(group: str) -> Refusal:
    """Returns the refusal of a request about a group that does not exist."""
    return Refusal(
        Answer.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group} {names.MORE}"
    )
