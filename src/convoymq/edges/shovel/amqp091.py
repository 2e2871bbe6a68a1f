"""Ends of a shovel that speak AMQP 0-9-1: one connection with one channel each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from convoymq.broker.shovel_uris import ShovelUri
from convoymq.broker.shovels import ON_CONFIRM, Shovel, ShovelEnd
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.edges.sasl import EXTERNAL
from convoymq.edges.shovel.ends import CLOSE_S, Confirm, EndFailed, Inside, Message, Wire
from convoymq.edges.shovel.ledger import Deliveries
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table

FRAME_BYTES_MAX = 131_072
HEARTBEAT_S = 60
BODY_BYTES_MAX = 1 << 30
NOT_FOUND = 404
_FRAME_HEAD_BYTES = 7
_CAPABILITIES = ("publisher_confirms", "consumer_cancel_notify", "basic.nack", "connection.blocked",
                 "authentication_failure_close")  # fmt: skip

M = TypeVar("M", bound=spec.Method)
T = TypeVar("T")


class Refused(EndFailed):
    """Tells why the broker closed the channel or the connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Peer:
    """A connection with channel 1 open."""

    def __init__(self, wire: Wire, uri: ShovelUri) -> None:
        self.blocked = False
        self.frame_bytes_max = FRAME_BYTES_MAX
        self._wire = wire
        self._uri = uri
        self._head = b""
        """Of a frame that is being read: who reads may be cancelled."""

    @classmethod
    async def connect(cls, uri: ShovelUri, inside: Inside, name: str) -> Peer:
        """Logs in, and opens the channel. Raises EndFailed."""
        peer = cls(await Wire.open(uri, spec.PROTOCOL_HEADER, inside), uri)
        try:
            await peer._log_in(name)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def _log_in(self, name: str) -> None:
        uri = self._uri
        start = await self._expect(spec.ConnectionStart)
        offered = start.mechanisms.decode("ascii", "replace").split()
        external = uri.is_local or uri.options.get("auth_mechanism") == "external"
        mechanism, response = EXTERNAL, b""
        if not external:
            mechanism = "PLAIN"
            response = f"\0{uri.user or 'guest'}\0{uri.password if uri.user else 'guest'}".encode()
        if mechanism not in offered:
            raise EndFailed(f"the broker offers {' '.join(offered)}, not {mechanism}")
        known = {"product": "ConvoyMQ shovel", "connection_name": name,
                 "capabilities": dict.fromkeys(_CAPABILITIES, True)}  # fmt: skip
        self.send(
            spec.ConnectionStartOk(
                client_properties=Table.of(known),
                mechanism=mechanism,
                response=response,
                locale="en_US",
            ),
            channel=0,
        )
        tune = await self._expect(spec.ConnectionTune)
        self.frame_bytes_max = min(tune.frame_max or FRAME_BYTES_MAX, FRAME_BYTES_MAX)
        wanted_s = uri.number("heartbeat", HEARTBEAT_S)
        beat_s = min(tune.heartbeat, wanted_s) if tune.heartbeat else wanted_s
        self.send(
            spec.ConnectionTuneOk(
                channel_max=tune.channel_max, frame_max=self.frame_bytes_max, heartbeat=beat_s
            ),
            channel=0,
        )
        if beat_s:
            self._wire.watch(codec.HEARTBEAT, beat_s / 2, beat_s * 2)
        self.send(spec.ConnectionOpen(virtual_host=uri.vhost), channel=0)
        await self._expect(spec.ConnectionOpenOk)
        await self.call(spec.ChannelOpen(), spec.ChannelOpenOk)

    def send(self, method: spec.Method, channel: int = 1) -> None:
        """Sends one method. Raises EndFailed."""
        try:
            self._wire.write(codec.method_frame(channel, method))
        except BrokerError as error:
            raise EndFailed(error.text) from error

    async def call(self, method: spec.Method, reply: type[M]) -> M:
        """Sends a method, and returns its reply. Raises EndFailed."""
        self.send(method)
        return await self._expect(reply)

    async def declare(self, end: ShovelEnd, queue: str) -> int:
        """Makes a queue that is missing, and returns how many messages are ready. Raises
        EndFailed."""
        try:
            there = spec.QueueDeclare(queue=queue, passive=True)
            found = await self.call(there, spec.QueueDeclareOk)
        except Refused as error:
            if error.code != NOT_FOUND or end.predeclared:
                raise
            await self.call(spec.ChannelOpen(), spec.ChannelOpenOk)
            made = spec.QueueDeclare(
                queue=queue, durable=True, arguments=Table.of(dict(end.queue_args))
            )
            found = await self.call(made, spec.QueueDeclareOk)
        return found.message_count

    async def publish(self, message: Message, *, mandatory: bool) -> None:
        """Sends a message. Raises EndFailed."""
        method = spec.BasicPublish(
            exchange=message.exchange, routing_key=message.routing_key, mandatory=mandatory
        )
        try:
            frames = codec.content_frames(
                1, method, message.properties, message.body, frame_bytes_max=self.frame_bytes_max
            )
        except BrokerError as error:
            raise EndFailed(error.text) from error
        self._wire.write(frames)
        await self._wire.drain()

    async def next(self) -> spec.Method:
        """Returns the next method that this object does not serve itself. Raises EndFailed."""
        while True:
            frame = await self._frame()
            if frame.type != spec.FRAME_METHOD:
                continue
            method = _read(codec.decode_method, frame.payload)
            match method:
                case spec.ConnectionClose():
                    self.send(spec.ConnectionCloseOk(), channel=0)
                    raise Refused(method.reply_code, method.reply_text)
                case spec.ChannelClose():
                    self.send(spec.ChannelCloseOk())
                    raise Refused(method.reply_code, method.reply_text)
                case spec.ConnectionBlocked() | spec.ConnectionUnblocked():
                    self.blocked = isinstance(method, spec.ConnectionBlocked)
                case _:
                    return method

    async def content(self) -> tuple[codec.Properties, bytes]:
        """Returns the content behind a method. Raises EndFailed."""
        header = _read(codec.decode_header, (await self._frame()).payload)
        if header.body_size > BODY_BYTES_MAX:
            raise EndFailed(f"a message of {header.body_size} bytes")
        parts, left = [], header.body_size
        while left > 0:
            parts.append((await self._frame()).payload)
            left -= len(parts[-1])
        return header.properties, b"".join(parts)

    async def _frame(self) -> codec.Frame:
        while True:
            if not self._head:
                self._head = await self._wire.read(_FRAME_HEAD_BYTES)
            size = int.from_bytes(self._head[3:7], "big")
            if self._head[:4] == b"AMQP" or size > self.frame_bytes_max:
                raise EndFailed("the broker does not speak AMQP 0-9-1")
            data = self._head + await self._wire.read(size + 1)
            self._head = b""
            frame = _read(partial(codec.decode_frame, payload_bytes_max=size), data)
            assert frame is not None
            if frame.type != spec.FRAME_HEARTBEAT:
                return frame

    async def _expect(self, wanted: type[M]) -> M:
        while True:
            method = await self.next()
            if isinstance(method, wanted):
                return method

    async def close(self) -> None:
        """Ends the connection: what was sent before is read by the broker."""
        try:
            async with asyncio.timeout(CLOSE_S):
                self.send(spec.ConnectionClose(reply_code=200, reply_text="Goodbye"), channel=0)
                await self._expect(spec.ConnectionCloseOk)
        except (EndFailed, TimeoutError):
            pass
        await self._wire.close()


def _read(decode: Callable[[bytes], T], data: bytes) -> T:
    """Returns what bytes stand for. Raises EndFailed."""
    try:
        return decode(data)
    except BrokerError as error:
        raise EndFailed(error.text) from error


class Source091:
    """See `Source`."""

    def __init__(self, peer: Peer, shovel: Shovel) -> None:
        self.peer = peer
        self._shovel = shovel
        self._queue = shovel.source.queue
        self._deliveries = Deliveries()

    async def open(self) -> int | None:
        """See `Source`."""
        end, peer = self._shovel.source, self.peer
        if self._queue is not None:
            return await peer.declare(end, self._queue)
        made = await peer.call(spec.QueueDeclare(exclusive=True), spec.QueueDeclareOk)
        self._queue = made.queue
        bind = spec.QueueBind(
            queue=made.queue, exchange=end.exchange or "", routing_key=end.key or ""
        )
        await peer.call(bind, spec.QueueBindOk)
        return 0

    async def consume(self) -> None:
        """See `Source`."""
        settled = self._shovel.takes_settled
        if not settled:
            await self.peer.call(
                spec.BasicQos(prefetch_count=self._shovel.prefetch), spec.BasicQosOk
            )
        consume = spec.BasicConsume(
            queue=self._queue or "",
            no_ack=settled,
            arguments=Table.of(dict(self._shovel.source.consumer_args)),
        )
        await self.peer.call(consume, spec.BasicConsumeOk)

    async def next(self) -> Message:
        """See `Source`."""
        while True:
            match await self.peer.next():
                case spec.BasicDeliver() as method:
                    tag = method.delivery_tag
                    properties, body = await self.peer.content()
                    if not self._shovel.takes_settled:
                        self._deliveries.add(tag)
                    return Message(tag, method.exchange, method.routing_key, properties, body)
                case spec.BasicCancel():
                    raise EndFailed("the source cancelled the consumer")

    def settle(self, tags: Collection[int], *, accepted: bool) -> None:
        """See `Source`."""
        if self._shovel.takes_settled:
            return
        settled = spec.BasicAck if accepted else spec.BasicNack
        for tag, multiple in self._deliveries.settle(tags):
            self.peer.send(settled(delivery_tag=tag, multiple=multiple))


class Destination091:
    """See `Destination`."""

    def __init__(self, peer: Peer, shovel: Shovel) -> None:
        self.peer = peer
        self._shovel = shovel
        self.sequence = 1

    async def open(self) -> None:
        """See `Destination`."""
        end = self._shovel.destination
        if end.queue is not None:
            await self.peer.declare(end, end.queue)
        if self._shovel.ack_mode == ON_CONFIRM:
            await self.peer.call(spec.ConfirmSelect(), spec.ConfirmSelectOk)

    async def publish(self, message: Message) -> None:
        """See `Destination`. A message for a queue that is gone ends the run, which makes it
        anew."""
        self.sequence += 1
        await self.peer.publish(message, mandatory=self._shovel.destination.queue is not None)

    async def outcome(self) -> Confirm:
        """See `Destination`."""
        while True:
            match await self.peer.next():
                case spec.BasicAck() as method:
                    return Confirm(method.delivery_tag, method.multiple, True)
                case spec.BasicNack() as method:
                    return Confirm(method.delivery_tag, method.multiple, False)
                case spec.BasicReturn() as method:
                    raise EndFailed(f"queue '{method.routing_key}' is gone: {method.reply_text}")
