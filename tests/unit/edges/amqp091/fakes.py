"""An in-memory broker, queues on real batches, and a client that speaks in methods."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from convoymq.broker.declarations import LINKS
from convoymq.broker.registry import Counters
from convoymq.broker.route_counts import RouteCounts
from convoymq.broker.route_versions import RouteVersions
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.connection import Connection
from convoymq.edges.amqp091.handshake import amqplain
from convoymq.edges.amqp091.states import State
from convoymq.edges.sasl import Login, LoginConfig
from convoymq.kernels import batch
from convoymq.kernels.connection_buffer import ConnectionBuffer, Outbox
from convoymq.kernels.route_cache import RouteCacheVersion
from convoymq.metadata.machine import MetadataMachine
from convoymq.model import refusals
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import AccessRefused
from convoymq.model.refusals import exchange_subject, queue_subject
from convoymq.model.tables import Table
from convoymq.model.tasks import Tasks
from convoymq.queues.classic.queue import ClassicQueue
from convoymq.queues.interface import (
    GET_EMPTY,
    NO_MODIFICATION,
    Delivery,
    GetResult,
    Modification,
    outcome_of,
)
from convoymq.queues.message_properties import check_served
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.queues.stream.queue import StreamQueue
from convoymq.routing.types import Destination, DestinationKind

WINDOW_UNLIMITED = 2000
FEATURES = {kind.type: kind.features for kind in (ClassicQueue, QuorumQueue, StreamQueue)}


class Route(NamedTuple):
    """As the broker's."""

    queues: tuple[Any, ...]
    cacheable: bool
    every_key: bool = False


@dataclass
class FakeConsumer:
    """What a queue knows of a consumer."""

    client: FakeClient
    spec: Any
    credit: int
    next_id: int = 0
    out: dict[int, tuple[bytes, int, int, int]] = field(default_factory=dict)


def window_of(limit: int) -> int:
    """A queue's own limit stands where nobody asks for one, as in the real ones."""
    return limit if limit > 0 else WINDOW_UNLIMITED


class FakeQueue:
    """A FIFO on sealed batches, in one process."""

    def __init__(
        self, vhost: str, name: str, type: str = "classic", owner: int | None = None
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.type = type
        self.features = FEATURES[type]
        self.owner = owner
        self.builder = batch.CommandBuilder()
        self.ready: deque[tuple[bytes, int, int, int]] = deque()
        self.consumers: list[FakeConsumer] = []
        self.clients: list[FakeClient] = []
        self.calls: list[tuple[Any, ...]] = []
        self.confirm = True
        self.settled: list[Callable[[bool], None]] = []
        self.accept = True
        self.deleted = False
        self.flags: list[int] = []
        self.producers: list[tuple[bytes, int]] = []
        self.trace: Any = None
        self.link_resume_ms = 0
        self.refuses_publishes = False
        self.serves_attributes = type != "stream"
        self.serves_delays = type == "quorum"
        self.serves_groups = True
        self.is_early = False
        self.consumer_timeout_ms: int | None = None
        self.refuses_global_qos = False

    def client(self, session: int, events: Any) -> FakeClient:
        made = FakeClient(self, session, events)
        self.clients.append(made)
        return made

    def round(self) -> bool:
        """Seal, apply, serve. True when something happened."""
        worked = False
        if self.builder.used:
            worked = True
            entry = self.builder.take_entry(1, 1, 1, 0)
            for kind, flags, _session, _seq, count, _arg, offset, _length in batch.commands(
                entry.data
            ):
                if kind == batch.CMD_PRODUCER:
                    body = batch.command_body(entry.data, offset)
                    self.producers.append((body[8 : 8 + count], int.from_bytes(body[:8], "little")))
                    continue
                assert kind == batch.CMD_ENQUEUE
                self.flags.append(flags)
                self.ready.extend((entry.data, offset, i, 0) for i in range(count))
        if self.confirm:
            for client in self.clients:
                target = client.target
                for command in target.applied(target.seq):
                    if command.tags:
                        worked = True
                        client.events.on_published(client, command.tags, outcome_of(self.accept))
            settled, self.settled = self.settled, []
            for call in settled:
                worked = True
                call(self.accept)
        return self.serve() or worked

    def serve(self) -> bool:
        worked = False
        while self.ready:
            free = [c for c in self.consumers if len(c.out) < c.credit]
            if not free:
                break
            consumer = free[0]
            self.consumers.remove(consumer)
            self.consumers.append(consumer)
            message = self.ready.popleft()
            block, command, record, acquired = message
            message_id = consumer.next_id
            consumer.next_id += 1
            consumer.out[message_id] = message
            number = consumer.spec.number
            delivery = Delivery(number, message_id, block, command, record, 1, acquired, acquired)
            consumer.client.events.on_deliver(consumer.client, delivery)
            worked = True
        return worked


class FakeClient:
    """A channel's stream into a `FakeQueue`; answers at once."""

    def __init__(self, queue: FakeQueue, session: int, events: Any) -> None:
        self.queue = queue
        self.events = events
        self.session = session
        self.target = batch.PublishTarget(queue.builder, session, self)
        self.gets: dict[int, tuple[bytes, int, int, int]] = {}
        self.get_id = 0
        self.delayed: list[Callable[[], None]] | None = None

    @property
    def has_pending(self) -> bool:
        return bool(self.target.pending)

    def _answer(self, call: Callable[[], None]) -> None:
        if self.delayed is None:
            call()
        else:
            self.delayed.append(call)

    def places_of(self, consumer: int) -> None:
        return None

    def subscribe(self, consumer: Any) -> None:
        queue = self.queue
        queue.calls.append(("subscribe", consumer))
        if consumer.exclusive and queue.consumers:
            error = refusals.exclusive_consumer(queue_subject(queue.vhost, queue.name))
            self._answer(lambda: self.events.on_subscribed(self, consumer.number, error))
            return
        queue.consumers.append(FakeConsumer(self, consumer, window_of(consumer.prefetch)))
        self._answer(lambda: self.events.on_subscribed(self, consumer.number, None))

    def _consumer(self, number: int) -> FakeConsumer:
        return next(c for c in self.queue.consumers if c.client is self and c.spec.number == number)

    def cancel(self, number: int) -> None:
        self.queue.calls.append(("cancel", number))
        consumer = self._consumer(number)
        self.queue.consumers.remove(consumer)
        self.gone = consumer
        self._answer(lambda: self.events.on_cancel_ok(self, number))

    def end_consumer(self, number: int) -> None:
        self.queue.calls.append(("end", number))
        consumer = self._consumer(number)
        self.queue.consumers.remove(consumer)
        self.gone = consumer

    def set_credit(self, number: int, credit: int) -> None:
        self.queue.calls.append(("credit", number, credit))
        self._consumer(number).credit = window_of(credit)

    def _taken(self, number: int, ranges: Sequence[int]) -> list[tuple[bytes, int, int, int]]:
        held = self.gets
        if number:
            found = [
                c for c in self.queue.consumers if c.client is self and c.spec.number == number
            ]
            held = found[0].out if found else self.gone.out
        ids = [
            each
            for first, last in zip(ranges[::2], ranges[1::2], strict=True)
            for each in range(first, last + 1)
        ]
        assert ids == sorted(ids)
        if self.queue.features.times_consumers:
            # What is late may have been returned before.
            ids = [each for each in ids if each in held]
        return [held.pop(each) for each in ids]

    def settle(self, number: int, ranges: Sequence[int]) -> None:
        self.queue.calls.append(("settle", number, list(ranges)))
        self._taken(number, ranges)

    def return_(
        self,
        number: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        self.queue.calls.append(("return", number, list(ranges), failed))
        for block, command, record, acquired in self._taken(number, ranges):
            self.queue.ready.append((block, command, record, acquired + 1))

    def discard(
        self, number: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        self.queue.calls.append(("discard", number, list(ranges)))
        self._taken(number, ranges)

    def when_settled(self, call: Callable[[bool], None]) -> None:
        self.queue.settled.append(call)

    def get(self, *, no_ack: bool) -> None:
        queue = self.queue
        queue.calls.append(("get", no_ack))
        if not queue.ready:
            self._answer(lambda: self.events.on_get(self, GET_EMPTY))
            return
        message = queue.ready.popleft()
        get_id = self.get_id
        self.get_id += 1
        if not no_ack:
            self.gets[get_id] = message
        block, command, record, acquired = message
        ready = len(queue.ready)
        result = GetResult(block, command, record, get_id, acquired, acquired, ready)
        self._answer(lambda: self.events.on_get(self, result))

    def pause(self, number: int) -> None:
        self.queue.calls.append(("pause", number))

    def resume(self, number: int) -> None:
        self.queue.calls.append(("resume", number))

    def purge(self) -> None:
        count = len(self.queue.ready)
        self.queue.ready.clear()
        self._answer(lambda: self.events.on_purged(self, count, None))

    def close(self) -> None:
        queue = self.queue
        queue.calls.append(("close",))
        for consumer in [c for c in queue.consumers if c.client is self]:
            queue.consumers.remove(consumer)
            for block, command, record, acquired in consumer.out.values():
                queue.ready.append((block, command, record, acquired + 1))
        for block, command, record, acquired in self.gets.values():
            queue.ready.append((block, command, record, acquired + 1))
        self.gets = {}


class FakeReplies:
    """Direct reply-to consumers of one node."""

    def __init__(self) -> None:
        self.routes: dict[str, Callable[[bytes], None]] = {}

    def register(self, deliver: Callable[[bytes], None]) -> str:
        token = f"token{len(self.routes)}"
        self.routes[token] = deliver
        return token

    def unregister(self, token: str) -> None:
        self.routes.pop(token, None)

    def publish(self, token: str, record: bytes) -> bool:
        if token not in self.routes:
            return False
        self.routes[token](record)
        return True

    async def exists(self, token: str) -> bool:
        return token in self.routes


class FakeBroker:
    """The broker's interface over dictionaries: all its parts in one."""

    def __init__(self) -> None:
        self.node_name = "convoy@test"
        self.cluster_name = "test"
        self.settings = DefaultsConfig()
        self.access = self.declarations = self.queue_admin = self.publishing = self
        self.route_versions = RouteVersions(RouteCacheVersion, list)
        self.route_counts = RouteCounts(MetadataMachine())
        listeners: list[Callable[[frozenset[str]], None]] = []
        self.alarms = SimpleNamespace(effective=frozenset(), listeners=listeners)
        self.replies = FakeReplies()
        self.firehose = SimpleNamespace(vhosts=frozenset())
        self.spans = None
        self.ignored_arguments = SimpleNamespace(warn=lambda *_: None)
        self.limits = SimpleNamespace(
            bound_connections=lambda user, vhost: False, bound_channels=lambda user: False
        )
        self.queues: dict[str, FakeQueue] = {}
        self.exchanges: dict[str, str] = {"amq.direct": "direct", "amq.fanout": "fanout"}
        self.bindings: list[tuple[str, str, str]] = []
        self.counters = Counters()
        self.connections = SimpleNamespace(add=self._add, remove=self._remove)
        self.open: list[Any] = []
        self.vhosts = {"/"}
        self.refuse: set[tuple[str, str, str]] = set()
        self.routed: list[tuple[Any, ...]] = []
        self.closed: list[int] = []
        self.gate: asyncio.Event | None = None
        self._sessions = itertools.count(1)

    def _add(self, connection: Any) -> None:
        self.open.append(connection)

    def _remove(self, connection: Any) -> None:
        self.open.remove(connection)

    def new_session(self) -> int:
        return (1 << 56) | next(self._sessions)

    async def authenticate(self, user: str, password: bytes, host: str, *, protocol: str) -> Any:
        await asyncio.sleep(0)
        if (user, password) != ("guest", b"guest"):
            raise AccessRefused("no")
        return SimpleNamespace(name=user, tags=("administrator",))

    async def renew(self, user: Any, secret: bytes) -> Any:
        return user

    def open_vhost(self, user: Any, vhost: str) -> None:
        if vhost not in self.vhosts:
            raise refusals.vhost_missing(vhost)

    def check_permission(
        self, user: Any, vhost: str, permission: str, kind: str, name: str
    ) -> None:
        if (permission, kind, name) in self.refuse:
            subject = (queue_subject if kind == "queue" else exchange_subject)(vhost, name)
            raise refusals.permission_missing(permission, subject, user.name)

    def has_topic_permissions(self, user: Any, vhost: str) -> bool:
        return False

    def find_queue(self, vhost: str, name: str, owner: int | None) -> FakeQueue:
        queue = self.queues.get(name)
        if queue is None:
            raise refusals.missing(queue_subject(vhost, name))
        if queue.owner not in (None, owner):
            raise refusals.exclusive_queue(queue_subject(vhost, name))
        return queue

    def route(
        self,
        vhost: str,
        exchange: str,
        keys: Sequence[str],
        headers: Table | None,
        asked: str | None = None,
        properties: object = None,
        *,
        keyed: bool = False,
    ) -> Route:
        self.routed.append((exchange, tuple(keys), headers))
        if exchange and exchange not in self.exchanges:
            raise refusals.missing(exchange_subject(vhost, exchange))
        if not exchange:
            found = [self.queues[key] for key in keys if key in self.queues]
        else:
            fanout = self.exchanges[exchange] == "fanout"
            found = [
                self.queues[queue]
                for source, queue, key in self.bindings
                if source == exchange and (fanout or key in keys)
            ]
        check_served(asked, found)  # type: ignore[arg-type]
        return Route(tuple(dict.fromkeys(found)), self.exchanges.get(exchange) != "headers")

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()

    async def declare_queue(
        self,
        vhost: str,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Table,
        owner: int,
        user: str,
        generated: str = "",
    ) -> tuple[str, int, int]:
        await self._wait()
        name = name or generated
        if name not in self.queues:
            kind = arguments.get("x-queue-type")
            self.queues[name] = FakeQueue(
                vhost,
                name,
                "classic" if kind is None else bytes(kind.value).decode(),  # type: ignore[arg-type]
                owner if exclusive else None,
            )
            self.route_versions.bump()
        queue = self.find_queue(vhost, name, owner)
        return name, len(queue.ready), len(queue.consumers)

    async def passive_declare(self, vhost: str, name: str, owner: int) -> tuple[str, int, int]:
        queue = self.find_queue(vhost, name, owner)
        return name, len(queue.ready), len(queue.consumers)

    async def delete_queue(
        self, vhost: str, name: str, *, if_unused: bool, if_empty: bool, owner: int
    ) -> int:
        await self._wait()
        queue = self.queues.pop(name, None)
        self.route_versions.bump()
        if queue is None:
            return 0
        for consumer in list(queue.consumers):
            consumer.client.events.on_cancelled(consumer.client, consumer.spec.number, "deleted")
        return len(queue.ready)

    async def bind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        key: str,
        arguments: Table,
        owner: int | None = None,
    ) -> None:
        if destination.kind is DestinationKind.EXCHANGE:
            self.routed.append(("bind", source, destination.name, key))
            return
        self.find_queue(vhost, destination.name, owner)
        if source not in self.exchanges:
            raise refusals.missing(exchange_subject(vhost, source))
        self.bindings.append((source, destination.name, key))
        self.route_versions.bump()

    async def unbind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        key: str,
        arguments: Table,
        owner: int | None = None,
    ) -> None:
        if destination.kind is DestinationKind.EXCHANGE:
            self.routed.append(("unbind", source, destination.name, key))
            return
        self.bindings = [b for b in self.bindings if b != (source, destination.name, key)]
        self.route_versions.bump()

    async def declare_exchange(
        self, vhost: str, name: str, type: str, *, durable: bool, auto_delete: bool,
        internal: bool, arguments: Table, user: str,
    ) -> None:  # fmt: skip
        await self._wait()
        self.exchanges[name] = type
        self.route_versions.bump()

    def check_link(self, vhost: str, kind: str, name: str, arguments: Table, may: Any) -> None:
        known = self.queues if kind == "queue" else self.exchanges
        if LINKS[kind] in arguments and name not in known:
            may("read", kind, name)

    def passive_declare_exchange(self, vhost: str, name: str) -> None:
        if name not in self.exchanges:
            raise refusals.missing(exchange_subject(vhost, name))

    async def delete_exchange(self, vhost: str, name: str, *, if_unused: bool) -> None:
        self.exchanges.pop(name, None)
        self.route_versions.bump()

    async def connection_closed(self, owner: int) -> None:
        self.closed.append(owner)
        self.queues = {n: q for n, q in self.queues.items() if q.owner != owner}


class FakeTimer:
    """A cancellable call on the fake clock."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class FakeShell:
    """Time, tasks and output for one connection."""

    def __init__(self) -> None:
        self.reading = True
        self.closed = False
        self.full = False
        self.output = bytearray()
        self.tasks = Tasks()
        self.now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def set_reading(self, on: bool) -> None:
        self.reading = on

    def want_write(self) -> None:
        pass

    def take_output(self, buffer: ConnectionBuffer) -> None:
        if not self.full:
            self.output += buffer.take_output()

    def close(self) -> None:
        self.closed = True

    def call_later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(call)
        heapq.heappush(self._timers, (self.now + delay_s, next(self._order), timer))
        return timer

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.spawn(work)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()
        self.now = end


@dataclass
class Message:
    """A method with the content that followed it."""

    channel: int
    method: Any
    header: codec.ContentHeader | None = None
    body: bytes = b""


class Client:
    """One connection under test, seen from the client's side."""

    def __init__(
        self,
        broker: FakeBroker,
        settings: AmqpConfig | None = None,
        id: int = 1,
        message_size_max: int = 16 << 20,
    ) -> None:
        self.broker = broker
        self.shell = FakeShell()
        self.outbox = Outbox()
        self.connection = Connection(
            id=id,
            broker=broker,
            settings=settings or AmqpConfig(),
            login=Login(broker.access, LoginConfig(), "amqp091", {"AMQPLAIN": amqplain}),
            message_size_max=message_size_max,
            outbox=self.outbox,
            shell=self.shell,
            peer=("127.0.0.1", 50000),
            local=("127.0.0.1", 5672),
        )
        self.frames: list[codec.Frame] = []

    # sending

    def send_bytes(self, data: bytes) -> None:
        self.connection.buffer.feed(data)

    def send(self, channel: int, *methods: spec.Method) -> None:
        self.send_bytes(b"".join(codec.method_frame(channel, method) for method in methods))

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes = b"body",
        channel: int = 1,
        mandatory: bool = False,
        immediate: bool = False,
        frame_max: int = 131072,
        **properties: Any,
    ) -> None:
        method = spec.BasicPublish(
            exchange=exchange, routing_key=routing_key, mandatory=mandatory, immediate=immediate
        )
        self.send_bytes(
            codec.content_frames(
                channel,
                method,
                spec.Properties(**properties),
                body,
                frame_bytes_max=frame_max,
            )
        )

    # hearing

    async def settled(self) -> None:
        """Let tasks and queues work until nothing moves any more."""
        for _ in range(200):
            await asyncio.sleep(0)
            worked = False
            for queue in list(self.broker.queues.values()):
                worked = queue.round() or worked
            if self.outbox.buffers:
                worked = True
                self.outbox.flush()
            if not worked and not self.shell.tasks:
                return
            if not worked and self.broker.gate is not None and not self.broker.gate.is_set():
                return

    async def heard(self) -> list[Message]:
        """Everything that came since the last call, contents joined to their methods."""
        await self.settled()
        data = bytes(self.shell.output)
        self.shell.output.clear()
        if data[:4] == b"AMQP":
            return [Message(0, data)]
        found: list[Message] = []
        waiting: dict[int, Message] = {}
        at = 0
        while at < len(data):
            frame = codec.decode_frame(data, at, payload_bytes_max=1 << 20)
            assert frame is not None
            at += 8 + len(frame.payload)
            match frame.type:
                case spec.FRAME_METHOD:
                    message = Message(frame.channel, codec.decode_method(frame.payload))
                    found.append(message)
                    waiting[frame.channel] = message
                case spec.FRAME_HEADER:
                    waiting[frame.channel].header = codec.decode_header(frame.payload)
                case spec.FRAME_BODY:
                    waiting[frame.channel].body += frame.payload
                case spec.FRAME_HEARTBEAT:
                    found.append(Message(0, "heartbeat"))
        return found

    async def methods(self) -> list[Any]:
        return [message.method for message in await self.heard()]

    async def ask(self, channel: int, *methods: spec.Method) -> Any:
        """Send and return the single answer."""
        self.send(channel, *methods)
        (answer,) = await self.methods()
        return answer

    async def open(self, **capabilities: bool) -> None:
        """Go through the handshake."""
        self.send_bytes(spec.PROTOCOL_HEADER)
        (start,) = await self.methods()
        assert isinstance(start, spec.ConnectionStart)
        table = Table.of(
            {"capabilities": {key.replace("__", "."): on for key, on in capabilities.items()}}
        )
        tune = await self.ask(
            0,
            spec.ConnectionStartOk(
                client_properties=table, mechanism="PLAIN", response=b"\0guest\0guest"
            ),
        )
        assert isinstance(tune, spec.ConnectionTune)
        self.send(
            0,
            spec.ConnectionTuneOk(
                channel_max=tune.channel_max, frame_max=tune.frame_max, heartbeat=0
            ),
        )
        opened = await self.ask(0, spec.ConnectionOpen(virtual_host="/"))
        assert isinstance(opened, spec.ConnectionOpenOk)

    async def channel(self, number: int = 1) -> None:
        assert isinstance(await self.ask(number, spec.ChannelOpen()), spec.ChannelOpenOk)

    async def declare(self, name: str, channel: int = 1, /, **arguments: Any) -> FakeQueue:
        answer = await self.ask(
            channel, spec.QueueDeclare(queue=name, arguments=Table.of(arguments))
        )
        assert isinstance(answer, spec.QueueDeclareOk)
        return self.broker.queues[answer.queue]

    def reads(self) -> bool:
        """Whether the connection wants input."""
        return self.shell.reading

    def gone(self) -> bool:
        """Whether the connection has closed its socket."""
        return self.shell.closed

    @property
    def state(self) -> State:
        return self.connection.state
