"""ConvoyMQ's end of a bridge: queues, streams and ordered topics.

Queues are read by a reservation (docs/adr/0008): an offset stands for the same message until it is
settled, whoever asks. Ordered topics are read by a group, whose messages have their place. What is
published carries the offset that it comes from as a sequence of a producer: quorum queues, streams
and partitions of topics drop what is not above the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar
from urllib.parse import quote

import msgspec

from convoymq.client import Client, errors
from convoymq.client.rows import headers_of, keys_of, texts_of, times_of, values_of
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from convoymq.client.topic_producer import TopicProducer
from convoymq.client.topic_rows import ORDER_KEY
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.columns import HEADERS, KEY, PROPERTIES, TIMESTAMP, VALUE
from convoymq.messages.amqp091 import ContentHeader, Properties, decode_header, encode_header
from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.bridge import mapping
from convoymq.rocketmq.bridge.mapping import AmqpMessage
from convoymq.rocketmq.bridge.pump import BridgeStopped, Item
from convoymq.rocketmq.bridge.settings import BridgeSettings

T = TypeVar("T")
QUEUE_TYPES = ("stream", "quorum", "classic")
RESERVATION_TTL_MS = 7 * 24 * 3_600_000
POLL_S = 0.5
STORE_S = 30.0
"""A topic that stores nothing for so long is asked again, by a new session."""
_POSITION = struct.Struct(">Q")


async def _call(function: Callable[[], T]) -> T:
    """Calls the blocking client."""
    return await asyncio.to_thread(function)


def type_of(client: Client, queue: str) -> str:
    """Returns the type of a queue. Raises NotFound."""
    found = client.metadata([queue], types=QUEUE_TYPES)
    if not found:
        raise errors.NotFound(f"no queue '{queue}'")
    return found[0].type


def frame_of(messages: Sequence[AmqpMessage]) -> bytes:
    """Returns what PRODUCE takes. Raises ValueError, Misuse: no server would take it."""
    rows = [tuple(message.headers.items()) for message in messages]
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    fields = [each for row in rows for each in row]
    names = texts_of([name.encode() for name, _ in fields])[1:]
    headers = [
        b"", struct.pack(f"={len(ends)}i", *ends), *names, *texts_of([v for _, v in fields]),
    ]  # fmt: skip
    properties = [
        encode_header(ContentHeader(
            body_size=len(m.body or b""), properties=msgspec.convert(dict(m.properties), Properties)
        )) for m in messages
    ]  # fmt: skip
    times = struct.pack(f"<{len(messages)}q", *(m.time_ms * 1000 for m in messages))
    buffers = [
        times, *texts_of([m.key for m in messages]), *texts_of([m.body for m in messages]),
        *headers, *texts_of(properties)[1:],
    ]  # fmt: skip
    columns = TIMESTAMP | KEY | VALUE | HEADERS | PROPERTIES
    return build_frame(columns, len(messages), 0, len(messages), buffers)


def messages_of(frame: ColumnFrame) -> list[AmqpMessage]:
    """Returns the messages of a frame with the columns of `frame_of`."""
    ends, data = frame.buffers(PROPERTIES)
    bounds = [bound for (bound,) in struct.iter_unpack("<i", ends)]
    found = []
    for body, key, headers, time_ms, (start, end) in zip(
        values_of(frame), keys_of(frame), headers_of(frame), times_of(frame), pairwise(bounds),
        strict=True,
    ):  # fmt: skip
        known = decode_header(bytes(data[start:end])).properties if end > start else Properties()
        given = {name: getattr(known, name) for name in mapping.PROPERTIES}
        if known.timestamp is not None:
            time_ms = known.timestamp * 1000
        properties = {name: value for name, value in given.items() if value is not None}
        found.append(AmqpMessage(body, key, headers, properties, time_ms))
    return found


class QueueSink:
    """A queue or stream. Items of `store` are of one queue of RocketMQ, by offset."""

    def __init__(self, client: Client, name: str, queue: str, kind: str) -> None:
        self._client = client
        self._name = name
        self._queue = queue
        self._kind = kind

    def lanes(self, items: Sequence[Item[AmqpMessage]]) -> Sequence[Sequence[Item[AmqpMessage]]]:
        """See `Sink`."""
        return [items]

    async def store(self, items: Sequence[Item[AmqpMessage]]) -> tuple[int, str | None]:
        """See `Sink`."""
        run = 1
        while run < len(items) and items[run].key.offset == items[0].key.offset + run:
            run += 1
        try:
            await self.produce(items[:run])
        except (ValueError, errors.PreconditionFailed) as error:
            if run == 1:
                kind = await _call(lambda: type_of(self._client, self._queue))
                if kind != self._kind:
                    raise BridgeStopped(
                        f"queue '{self._queue}' was of type {self._kind}, and is of {kind}"
                    ) from error
                return 0, str(error)
        else:
            return run, None
        # A frame is refused as a whole: the first one that is refused alone is it.
        return await self.store(items[:1])

    async def produce(
        self, items: Sequence[Item[AmqpMessage]], digest: bytes | None = None
    ) -> None:
        """Publishes messages with successive offsets."""
        frame = frame_of([item.message for item in items])
        key = items[0].key
        source = hashlib.blake2b(str(key[:3]).encode(), digest_size=12).hexdigest()
        keeps, is_stream = self._kind != "classic", self._kind == "stream"
        # A dead letter may come behind later ones: its digest tells a repeat, not its number.
        await _call(lambda: self._client.produce(
            frame,
            stream=self._queue if is_stream else None,
            queue=None if is_stream else self._queue,
            producer=f"{self._name}.{source}" if keeps else None,
            sequence=1 if digest else key.offset + 1,
            digest=digest if keeps else None,
        ))  # fmt: skip


class TopicSink:
    """An ordered topic. A producer's session is one queue's of RocketMQ."""

    def __init__(self, client: Client, name: str, topic: str) -> None:
        self._client = client
        self._name = name
        self._topic = topic
        self._producer: TopicProducer | None = None

    def lanes(self, items: Sequence[Item[AmqpMessage]]) -> Sequence[Sequence[Item[AmqpMessage]]]:
        """See `Sink`."""
        return [items]

    async def store(self, items: Sequence[Item[AmqpMessage]]) -> tuple[int, str | None]:
        """See `Sink`."""
        return await _call(lambda: self._store(items))

    def _store(self, items: Sequence[Item[AmqpMessage]]) -> tuple[int, str | None]:
        if self._producer is None:
            source = ":".join(map(str, items[0].key[:3]))
            self._producer = TopicProducer(
                self._client, self._topic, producer_id=f"{self._name}:{source}"
            )
        sent = []
        refusal: str | None = None
        for item in items:
            message, position = item.message, _POSITION.pack(item.key.offset)
            key = message.key or ":".join(map(str, item.key[:3])).encode()
            headers = {name: value or b"" for name, value in message.headers.items()}
            headers |= {mapping.AMQP + n: v.encode() for n, v in message.properties.items()}
            try:
                known = self._producer.is_stored(key, position)
                sent.append(None if known else self._producer.send(
                    key, message.body, headers, position
                ))  # fmt: skip
            except ValueError as error:
                refusal = str(error)
                break
            except BaseException:
                self._end()
                raise
        for at, future in enumerate(sent):
            try:
                if future is not None:
                    future.result(STORE_S)
            except errors.ProducerFenced as error:
                raise BridgeStopped(f"another bridge has this name: {error}") from error
            except errors.PreconditionFailed as error:
                self._end()
                return at, str(error)
            except (errors.ClientError, TimeoutError):
                self._end()
                raise
        return len(sent), refusal

    def _end(self) -> None:
        """A session ends with what fails: the next one asks what is stored."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(0.0)


class _DeadLetters:
    """Keeps what RocketMQ refuses in a queue."""

    def __init__(self, client: Client, settings: BridgeSettings) -> None:
        self._client = client
        self._settings = settings
        self._sink: QueueSink | None = None

    async def keep(self, item: Item[AmqpMessage], reason: str) -> None:
        queue = self._settings.dead_letter_queue
        if self._sink is None:
            kind = await _call(lambda: type_of(self._client, queue))
            self._sink = QueueSink(self._client, f"{self._settings.name}.dead", queue, kind)
        message = item.message
        headers = {**message.headers, f"{mapping.PREFIX}refused": reason.encode()}
        kept = AmqpMessage(message.body, message.key, headers, message.properties, message.time_ms)
        digest = hashlib.blake2b(str(item.key).encode(), digest_size=16).digest()
        try:
            await self._sink.produce([Item(item.key, kept)], digest)
        except (ValueError, errors.PreconditionFailed) as error:
            raise BridgeStopped(f"queue '{queue}' takes no dead letters: {error}") from error


class QueueSource:
    """A queue, read by a reservation of the bridge's name."""

    def __init__(self, client: Client, settings: BridgeSettings, owner: str) -> None:
        self._client = client
        self._settings = settings
        self._owner = owner
        self._letters = _DeadLetters(client, settings)
        self._answer: dict[str, object] = {}
        self._at = 0

    async def next(self) -> Sequence[Item[AmqpMessage]]:
        """See `Source`."""
        try:
            return await self._next()
        except errors.ReservationGone as error:
            self._gone(error)
            return ()

    async def _next(self) -> Sequence[Item[AmqpMessage]]:
        queue, settings = self._settings.from_queue, self._settings
        if not self._answer:
            await self._op("open", owner=self._owner, ttl_ms=RESERVATION_TTL_MS)
            self._at = self._number("first")
        if self._at == self._number("next"):
            looked, cursor = await _call(
                lambda: self._client.browse(queue, max_rows=1, columns=VALUE, max_bytes=1)
            )
            if not looked.frame.rows and cursor is None:
                await asyncio.sleep(settings.poll_ms / 1000)
                return ()
            await self._op("take", max=settings.window, after=self._at)
        if self._at == self._number("next"):
            await asyncio.sleep(settings.poll_ms / 1000)
            return ()
        found = await _call(lambda: self._client.reservation_fetch(
            queue, settings.name, self._number("epoch"), self._at, end=self._number("next"),
            max_rows=settings.window, max_bytes=settings.window_bytes,
            columns=TIMESTAMP | KEY | VALUE | HEADERS | PROPERTIES,
        ))  # fmt: skip
        source = (f"bridge.{settings.name}", quote(queue, safe=""), self._number("epoch"))
        return [
            Item(Key(*source, self._at + at), message)
            for at, message in enumerate(messages_of(found.frame))
        ]

    async def done(self, items: Sequence[Item[AmqpMessage]]) -> None:
        """See `Source`."""
        upto = items[-1].key.offset + 1
        try:
            await self._op("settle", upto=upto)
        except errors.ReservationGone as error:
            self._gone(error)
            return
        self._at = upto

    async def dead_letter(self, item: Item[AmqpMessage], reason: str) -> None:
        """See `Source`."""
        await self._letters.keep(item, reason)

    def _gone(self, error: errors.ReservationGone) -> None:
        if error.reason == "reservation_fenced":
            raise BridgeStopped(f"another bridge has this name: {error}") from error
        # It expired, or its queue was deleted, or the node of a classic queue has begun anew.
        self._answer = {}

    def _number(self, name: str) -> int:
        found = self._answer.get(name)
        if not isinstance(found, int):
            raise errors.ProtocolError(f"answer without {name}")
        return found

    async def _op(self, op: str, **fields: object) -> None:
        held = {name: self._answer[name] for name in ("epoch", "fencing_token") if self._answer}
        self._answer = await _call(lambda: self._client.reservation(
            self._settings.from_queue, op, reservation=self._settings.name, **held, **fields
        ))  # fmt: skip


class TopicSource:
    """An ordered topic, read by a group of the bridge's name."""

    def __init__(self, client: Client, settings: BridgeSettings) -> None:
        self._client = client
        self._settings = settings
        self._letters = _DeadLetters(client, settings)
        self._consumer: TopicConsumer | None = None
        self._held: list[TopicDelivery] = []

    async def next(self) -> Sequence[Item[AmqpMessage]]:
        """See `Source`."""
        return await _call(self._next)

    def _next(self) -> Sequence[Item[AmqpMessage]]:
        settings = self._settings
        if self._consumer is None:
            self._consumer = TopicConsumer(
                self._client, settings.from_topic, settings.name, retries=-1,
                window=settings.window, window_bytes=settings.window_bytes,
            )  # fmt: skip
        self._held = []
        wait_s = POLL_S
        try:
            while len(self._held) < settings.window:
                found = self._consumer.poll(wait_s)
                if found is None:
                    break
                self._held.append(found)
                wait_s = 0.0
        except errors.DataExpired as error:
            raise BridgeStopped(f"topic '{settings.from_topic}': {error}") from error
        except errors.ClientError:
            self.close()
            raise
        topic = quote(settings.from_topic, safe="")
        return [
            Item(Key(f"bridge.{settings.name}", topic, each.pid, each.offset), _message(each))
            for each in self._held
        ]

    async def done(self, items: Sequence[Item[AmqpMessage]]) -> None:
        """See `Source`. Messages whose lease has ended come to another member, as repeats."""
        for each in self._held:
            with contextlib.suppress(errors.MemberFenced):
                each.ack()

    async def dead_letter(self, item: Item[AmqpMessage], reason: str) -> None:
        """See `Source`."""
        await self._letters.keep(item, reason)

    def close(self) -> None:
        """Leaves the group."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _message(delivery: TopicDelivery) -> AmqpMessage:
    headers = {n: v for n, v in delivery.headers.items() if n != ORDER_KEY}
    return AmqpMessage(delivery.body, delivery.key or None, headers, {}, delivery.time_ms)
