"""Carries escape out: puts messages of special services into the own store, that of another master
of this process, or another broker; and takes those of others in, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import PeerError, StorageFault, Unavailable
from convoymq.rocketmq.acting.escape import (
    GENERATION_FIELD,
    KEY_FIELD,
    KEY_PROPERTY,
    Key,
    Outcome,
    Target,
    Targets,
    home_number,
    key_of,
)
from convoymq.rocketmq.acting.key_log import KeyLog
from convoymq.rocketmq.acting.name_servers import NameServers
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.broker.send import Header, refusal_of
from convoymq.rocketmq.broker.types import STORED
from convoymq.rocketmq.client.client import pull_fields, send_fields
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import MASTER_ID, PERM_WRITE, RouteData
from convoymq.rocketmq.special.names import PRODUCER_GROUP
from convoymq.rocketmq.store.types import (
    Draft,
    Message,
    Placed,
    PutStatus,
    decode_properties,
)

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker
    from convoymq.rocketmq.remoting.connection import Answered, Handler

log = structlog.get_logger()

SEND_TIMEOUT_S = 3.0
PULL_TIMEOUT_S = 10.0
ROUTES_MAX = 10_000
_REFUSED = frozenset((
    *(Answer.SYSTEM_BUSY, Answer.MESSAGE_ILLEGAL, Answer.SERVICE_NOT_AVAILABLE),
    *(Answer.NO_PERMISSION, Answer.TOPIC_NOT_EXIST, Answer.INVALID_PARAMETER),
))  # fmt: skip
"""Nothing was stored. Of any other code nobody can tell."""
FAILED = Placed(PutStatus.PUT_TO_REMOTE_BROKER_FAIL)


class Intake:
    """Takes in what escapes from others: the target's side.

    A send without a key goes to the handler that was there before.
    """

    def __init__(self, parts: Broker, keys: KeyLog) -> None:
        self._parts = parts
        self._keys = keys
        self._under_way: dict[Key, asyncio.Future[Placed]] = {}
        self._others: dict[int, Handler | None] = {
            code: parts.register(code, self._send)
            for code in (Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2)
        }

    def _send(self, connection: Connection, command: Command) -> Answered:
        text = command.fields.get(KEY_FIELD)
        key = None if text is None else key_of(text)
        other = self._others[command.code]
        if key is None and other is not None:
            return other(connection, command)
        return self._send_once(command, key)

    async def _send_once(self, command: Command, key: Key | None) -> Command:
        if key is None:
            raise Refusal(Answer.INVALID_PARAMETER, "no key of an escaped message")
        if key.broker == self.name:
            raise Refusal(Answer.INVALID_PARAMETER, f"{self.name} takes no message of its own")
        header = Header(command)
        topic = self._parts.topics.get(header.needed("b"))
        if topic is None or not topic.perm & PERM_WRITE:
            raise Refusal(Answer.TOPIC_NOT_EXIST, f"topic[{header.needed('b')}] takes nothing here")
        queue = header.number("e")
        if not 0 <= queue < topic.write_queue_nums:
            raise Refusal(Answer.INVALID_PARAMETER, f"request queueId[{queue}] is illegal")
        generation = command.number(GENERATION_FIELD, 0)
        if not self.takes(key, generation):
            raise Refusal(
                Answer.SERVICE_NOT_AVAILABLE, f"{key.broker} sends by another replica now",
                {GENERATION_FIELD: str(generation)},
            )  # fmt: skip
        draft = Draft(
            topic.topic_name, queue, bytes(command.body), (header.fields.get("i") or "").encode(),
            header.number("h"), header.number("f"), header.number("g"),
            reconsume_times=header.number("j", 0),
        )  # fmt: skip
        placed = await self.take(draft, key)
        code = STORED.get(placed.status)
        if code is None:
            raise refusal_of(placed.status, self._parts.message_bytes_max)
        fields = {
            "msgId": placed.message_id,
            "queueId": str(queue),
            "queueOffset": str(placed.queue_offset),
        }
        return command.answer(code, fields)

    @property
    def name(self) -> str:
        """Returns this broker's name."""
        return self._parts.role.name

    def takes(self, key: Key | None, generation: int) -> bool:
        """Returns whether a key's broker sends by a replica of this generation."""
        return key is None or self._keys.generations.takes(key.broker, generation)

    def serves(self, topic: str) -> bool:
        """Returns whether this broker takes messages of a topic."""
        found = self._parts.topics.get(topic)
        is_writable = found is not None and found.perm & PERM_WRITE and found.write_queue_nums > 0
        return self._parts.role.is_master and bool(is_writable)

    async def take_any(self, draft: Draft, key: Key | None) -> Placed:
        """Stores a message of a neighbour in a queue of its topic, which `serves` knows."""
        topic = self._parts.topics.get(draft.topic)
        assert topic is not None
        draft = replace(draft, queue_id=draft.queue_id % topic.write_queue_nums)
        if key is not None:
            return await self.take(draft, key)
        (placed,) = await self._parts.put([draft])
        return placed

    async def take(self, draft: Draft, key: Key) -> Placed:
        """Stores a message, unless it is stored already. A repeat has no place."""
        if key.is_position:
            return (await self._parts.put([draft]))[0]
        known = self._under_way.get(key)
        if known is not None:
            return await asyncio.shield(known)
        if not self._parts.role.is_master:
            return Placed(PutStatus.SERVICE_NOT_AVAILABLE)
        if self._keys.has(key):
            log.info("rocketmq.escape_repeated", key=str(key))
            self._trace_taken(draft, None, key)
            return Placed(PutStatus.PUT_OK)
        ended = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            (placed,) = await self._parts.put([draft])
        except BaseException:
            ended.set_result(FAILED)
            raise
        finally:
            del self._under_way[key]
        if not ended.done():
            ended.set_result(placed)
        if placed.status in STORED:
            self._trace_taken(draft, placed, key)
        return placed

    def _trace_taken(self, draft: Draft, placed: Placed | None, key: Key) -> None:
        if self._parts.trace is not None:
            self._parts.trace.taken(draft, placed, key)


class Bridge:
    """See the module text: `broker.types.Escape`.

    Args:
        neighbours: other brokers of this process.
    """

    def __init__(
        self,
        parts: Broker,
        settings: ActingSettings,
        name_servers: NameServers,
        keys: KeyLog,
        neighbours: Callable[[], Sequence[Intake]],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._name_servers = name_servers
        self._keys = keys
        self._neighbours = neighbours
        self.generation = 0
        """Of this replica, see `escape.py`."""
        self.on_superseded: Callable[[], None] = lambda: None
        """Called when a target takes a later generation only."""
        self._targets = Targets(parts.role.name)
        self._routes: dict[str, tuple[int, RouteData]] = {}
        self.stored = self.failures = 0
        """Messages that another broker stored, and attempts that failed."""

    # --- putting ------------------------------------------------------------------------------

    async def put(self, draft: Draft) -> Placed:
        """Stores a message in any queue of its topic, wherever it may be written to."""
        if self._parts.role.id == MASTER_ID:
            return (await self._parts.put([draft]))[0]
        return await self._counted(draft, None)

    async def home(self, topic: str) -> int | None:
        """Returns the number of a broker that a topic's messages can escape to."""
        for neighbour in self._neighbours():
            if neighbour.serves(topic):
                return home_number(neighbour.name)
        _, writable = await self._writable(topic)
        target = self._targets.choose(None, writable)
        return None if target is None else home_number(target.broker)

    async def put_at(self, draft: Draft, home: int) -> Placed:
        """Stores a message at the broker of a number (`home`). A master does that too: the broker
        got the message's checkpoint while this one was away."""
        return await self._counted(draft, home)

    async def _counted(self, draft: Draft, home: int | None) -> Placed:
        if not self._parts.role.runs_special_services:
            return Placed(PutStatus.SERVICE_NOT_AVAILABLE)
        placed = await self._leave(draft, home)
        if placed.status in STORED:
            self.stored += 1
        else:
            self.failures += 1
        return placed

    async def _leave(self, draft: Draft, home: int | None) -> Placed:
        key = key_of(decode_properties(draft.properties).get(KEY_PROPERTY, ""))
        for neighbour in () if self._targets.is_bound(key) else self._neighbours():
            if neighbour.serves(draft.topic) and home in (None, home_number(neighbour.name)):
                if key is not None and not self._begin(neighbour.name):
                    return FAILED
                if not neighbour.takes(key, self.generation):
                    self.on_superseded()
                    return FAILED
                placed = await neighbour.take_any(draft, key)
                self._trace_escaped(draft, key, neighbour.name, placed.status)
                return placed
        if not self._settings.remote_escape:
            return Placed(PutStatus.SERVICE_NOT_AVAILABLE)
        return await self._send(draft, key, home)

    async def _send(self, draft: Draft, key: Key | None, home: int | None) -> Placed:
        masters, writable = await self._writable(draft.topic)
        if home is None:
            target = self._targets.choose(key, writable)
        else:
            names = (name for name in writable if home_number(name) == home)
            target = next((Target(name, draft.queue_id) for name in names), None)
        if target is None:
            self._routes.pop(draft.topic, None)
            return FAILED
        status, outcome = await self._attempt(draft, key, target, masters[target.broker])
        self._targets.ended(key, outcome)
        self._trace_escaped(draft, key, target.broker, status)
        if outcome is not Outcome.STORED:
            self._routes.pop(draft.topic, None)
        return Placed(status)

    async def _writable(self, topic: str) -> tuple[dict[str, str], dict[str, int]]:
        """Returns the addresses of masters, and the brokers whose queues of a topic can be written
        to: name -> count."""
        route = await self._route(topic)
        if route is None:
            return {}, {}
        masters = {d.broker_name: d.broker_addrs[MASTER_ID] for d in route.broker_datas
                   if MASTER_ID in d.broker_addrs}  # fmt: skip
        return masters, {
            q.broker_name: q.write_queue_nums
            for q in route.queue_datas
            if q.perm & PERM_WRITE and q.broker_name in masters
            and q.broker_name != self._parts.role.name and q.write_queue_nums > 0
        }  # fmt: skip

    def _trace_escaped(self, draft: Draft, key: Key | None, to: str, status: PutStatus) -> None:
        trace = self._parts.trace
        if trace is not None and key is not None and not key.is_position and status in STORED:
            trace.escaped(draft.topic, key, to)

    async def _attempt(
        self, draft: Draft, key: Key | None, target: Target, address: str
    ) -> tuple[PutStatus, Outcome]:
        failed = PutStatus.PUT_TO_REMOTE_BROKER_FAIL
        try:
            connection = await self._parts.remoting.connected(address, SEND_TIMEOUT_S)
        except Unavailable as error:
            self._log_failure(draft, target, error.text)
            return failed, Outcome.REFUSED
        if key is not None and not self._begin(target.broker):
            return failed, Outcome.REFUSED
        self._targets.attempt(key, target)
        try:
            answer = await connection.request(self._request(draft, key, target), SEND_TIMEOUT_S)
        except (Unavailable, PeerError) as error:
            self._log_failure(draft, target, error.text)
            return failed, Outcome.UNKNOWN
        status = next((s for s, code in STORED.items() if code == answer.code), None)
        if status is not None:
            return status, Outcome.STORED
        if GENERATION_FIELD in answer.fields:
            self.on_superseded()
        self._log_failure(draft, target, answer.remark or f"code {answer.code}")
        return failed, Outcome.REFUSED if answer.code in _REFUSED else Outcome.UNKNOWN

    def _begin(self, target: str) -> bool:
        """Returns whether a message may be sent to a broker."""
        try:
            may_send = self._keys.begin(target, self.generation)
        except StorageFault as error:
            log.error("rocketmq.not_persisted", reason=error.text)
            return False
        if not may_send:
            self.on_superseded()
        return may_send

    def _log_failure(self, draft: Draft, target: Target, reason: str) -> None:
        log.warning("rocketmq.escape_failed", topic=draft.topic, target=target.broker,
                    reason=reason)  # fmt: skip

    def _request(self, draft: Draft, key: Key | None, target: Target) -> Command:
        role = self._parts.role
        found = decode_properties(draft.properties)
        fields = send_fields(
            group=found.get(PRODUCER_GROUP) or f"InnerProducerGroup_{role.name}_{role.id}",
            topic=draft.topic, broker=target.broker, queue=target.queue,
            properties=draft.properties.decode("utf-8", "surrogateescape"), born_ms=draft.born_ms,
            flag=draft.flag, sys_flag=draft.sys_flag, reconsumed=draft.reconsume_times, key=key,
            generation=self.generation,
        )  # fmt: skip
        return request(Request.SEND_MESSAGE_V2, fields, draft.body)

    async def _route(self, topic: str) -> RouteData | None:
        now_ms = self._parts.now_ms()
        made_ms, route = self._routes.get(topic, (0, None))
        if route is None or not 0 <= now_ms - made_ms < self._settings.route_ms:
            route = await self._name_servers.route(topic)
            if route is not None:
                if len(self._routes) >= ROUTES_MAX:
                    self._routes.clear()
                self._routes[topic] = now_ms, route
        return route

    # --- getting ------------------------------------------------------------------------------

    async def get(self, topic: str, queue_id: int, offset: int, broker: str) -> Message | None:
        """Returns one message of a broker; None if it is not there, or nobody answers."""
        if broker in ("", self._parts.role.name):
            got = self._parts.store.get(topic, queue_id, offset, 1, 1 << 30, None)
            return Message(got.records[0]) if got.records else None
        brokers = await self._name_servers.brokers() or {}
        addresses = brokers.get(broker, {})
        if not addresses:
            return None
        role = self._parts.role
        group = f"InnerConsumerGroup_{role.name}_{role.id}"
        fields = pull_fields(group, topic, queue_id, offset)
        try:
            connection = await self._parts.remoting.connected(
                addresses[min(addresses)], SEND_TIMEOUT_S
            )
            answer = await connection.request(request(Request.PULL_MESSAGE, fields), PULL_TIMEOUT_S)
        except Unavailable as error:
            log.info("rocketmq.member_silent", address=addresses[min(addresses)], reason=error.text)
            return None
        if answer.code != Answer.SUCCESS or len(answer.body) < 4:
            return None
        return Message(memoryview(bytes(answer.body)))
