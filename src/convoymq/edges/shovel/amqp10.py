"""Ends of a shovel that speak AMQP 1.0: one connection, session and link each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple, TypeVar

from convoymq.broker.shovel_uris import ShovelUri
from convoymq.broker.shovels import ON_CONFIRM, Shovel
from convoymq.edges.amqp10.frames import AMQP, HEADER_BYTES, SASL, FrameReader, frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER
from convoymq.edges.amqp10.outcomes import ranges_of
from convoymq.edges.amqp10.performatives import (
    OUTCOMES,
    Accepted,
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Modified,
    Open,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    Transfer,
    read,
)
from convoymq.edges.amqp10.serial import ahead, following
from convoymq.edges.sasl import EXTERNAL
from convoymq.edges.shovel.ends import CLOSE_S, Confirm, EndFailed, Inside, Message, Wire
from convoymq.messages.amqp10.encoding import ENCODING
from convoymq.messages.amqp10.message import EXCHANGE, ROUTING_KEY, stored_of
from convoymq.model.errors import BrokerError

FRAME_BYTES_MAX = 131_072
MESSAGE_BYTES_MAX = 1 << 30
WINDOW = (1 << 31) - 1
IDLE_MS = 60_000
TRANSFER_BYTES = 64
"""At most: of a transfer without its message."""
ANONYMOUS = "ANONYMOUS"

P = TypeVar("P", bound=Composite)
T = TypeVar("T")


class Received(NamedTuple):
    """A performative and what is behind it."""

    performative: Composite
    payload: bytes


class Peer:
    """A connection with session 0."""

    def __init__(self, wire: Wire, uri: ShovelUri) -> None:
        self.blocked = False
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.transfers_in = 0
        """Transfer frames that came in the session."""
        self.transfers_out = 0
        self._wire = wire
        self._uri = uri
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._window = 0
        """Transfer frames that may be sent."""
        self._incoming_base = 0

    @classmethod
    async def connect(cls, uri: ShovelUri, inside: Inside, name: str) -> Peer:
        """Logs in, and begins the session. Raises EndFailed."""
        peer = cls(await Wire.open(uri, SASL_HEADER, inside), uri)
        try:
            await peer._log_in()
            await peer._open(name)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def _log_in(self) -> None:
        uri = self._uri
        if await self._wire.read(len(SASL_HEADER)) != SASL_HEADER:
            raise EndFailed("the broker does not speak AMQP 1.0")
        offered = (await self.expect(SaslMechanisms)).mechanisms
        mechanism, response = "PLAIN", f"\0{uri.user}\0{uri.password}".encode()
        if uri.is_local:
            mechanism, response = EXTERNAL, b""
        elif uri.user is None or uri.options.get("sasl") in ("anon", "none"):
            mechanism, response = ANONYMOUS, b""
        if mechanism not in offered:
            raise EndFailed(f"the broker offers {' '.join(offered)}, not {mechanism}")
        self.send(SaslInit(mechanism=mechanism, initial_response=response), SASL)
        if (await self.expect(SaslOutcome)).code:
            raise EndFailed("the broker refuses the log-in")
        self._wire.write(PLAIN_HEADER)
        await self._wire.read(len(PLAIN_HEADER))

    async def _open(self, name: str) -> None:
        uri = self._uri
        hostname = uri.options.get("hostname")
        if hostname is None:
            hostname = f"vhost:{uri.vhost}"
        self.send(
            Open(
                container_id=name,
                hostname=hostname,
                max_frame_size=FRAME_BYTES_MAX,
                idle_time_out=IDLE_MS,
            )
        )
        opened = await self.expect(Open)
        self.frame_bytes_max = min(opened.max_frame_size, FRAME_BYTES_MAX)
        beat_s = (opened.idle_time_out or 0) / 1000
        self._wire.watch(frame(0, b""), beat_s / 2, 2 * IDLE_MS / 1000)
        self.send(Begin(next_outgoing_id=0, incoming_window=WINDOW, outgoing_window=WINDOW))
        begun = await self.expect(Begin)
        self._window = begun.incoming_window
        self._incoming_base = begun.next_outgoing_id

    def send(self, performative: Composite, kind: int = AMQP, payload: bytes = b"") -> None:
        """Sends a performative. Raises EndFailed."""
        try:
            self._wire.write(frame(0, performative.encoded() + payload, kind))
        except BrokerError as error:
            raise EndFailed(error.text) from error

    def grant(self, delivery_count: int, credit: int) -> None:
        """Gives a link credit."""
        self.send(
            Flow(
                next_incoming_id=following(self._incoming_base, self.transfers_in),
                incoming_window=WINDOW,
                next_outgoing_id=self.transfers_out,
                outgoing_window=WINDOW,
                handle=0,
                delivery_count=delivery_count,
                link_credit=credit,
            )
        )

    def flowed(self, flow: Flow) -> None:
        """Takes the window that the broker has."""
        sent = flow.next_incoming_id or 0
        self._window = flow.incoming_window - (self.transfers_out - sent) % (1 << 32)

    @property
    def has_window(self) -> bool:
        """Returns whether a transfer frame may be sent."""
        return self._window > 0

    async def transfer(self, transfer: Transfer, part: bytes) -> None:
        """Sends one transfer frame. Raises EndFailed."""
        self._window -= 1
        self.transfers_out = following(self.transfers_out, 1)
        self.send(transfer, payload=part)
        await self._wire.drain()

    async def next(self) -> Received:
        """Returns the next performative. Raises EndFailed."""
        while True:
            found = _read(self._reader.frame)
            if found is None:
                self._reader.feed(await self._wire.read_some())
                continue
            if not found.body:
                continue
            performative, payload = _read(partial(read, found.body))
            if isinstance(performative, Detach | End | Close):
                raise EndFailed(reason_of(performative))
            return Received(performative, payload)

    async def expect(self, wanted: type[P]) -> P:
        """Returns the next performative of a type. Raises EndFailed."""
        while True:
            found = (await self.next()).performative
            if isinstance(found, wanted):
                return found

    async def attach(self, attach: Attach) -> None:
        """Attaches the link. Raises EndFailed: the broker refuses it."""
        self.send(attach)
        answer = await self.expect(Attach)
        if (answer.source if attach.role else answer.target) is None:
            await self.expect(Detach)

    async def close(self) -> None:
        """Ends the connection: what was sent before is read by the broker."""
        try:
            async with asyncio.timeout(CLOSE_S):
                self.send(Close())
                while True:
                    await self.next()
        except (EndFailed, TimeoutError):
            pass
        await self._wire.close()


def reason_of(performative: Detach | End | Close) -> str:
    """Returns why a broker ended something."""
    error = performative.error
    if isinstance(error, Error):
        return str(error.description or error.condition)
    return f"the broker sent {performative.NAME.partition(':')[0]}"


def _read(decode: Callable[[], T]) -> T:
    """Returns what bytes stand for. Raises EndFailed."""
    try:
        return decode()
    except BrokerError as error:
        raise EndFailed(error.text) from error


class Source10:
    """See `Source`."""

    def __init__(self, peer: Peer, shovel: Shovel) -> None:
        self.peer = peer
        self._shovel = shovel
        self._received = 0
        """Deliveries of the link."""
        self._credit = 0
        self._open = 0
        """Deliveries that are not settled."""

    async def open(self) -> int | None:
        """See `Source`."""
        return None

    async def consume(self) -> None:
        """See `Source`."""
        settled = self._shovel.takes_settled
        await self.peer.attach(
            Attach(
                name=f"shovel {self._shovel.name}",
                handle=0,
                role=True,
                source=Source(address=self._shovel.source.address, outcomes=OUTCOMES),
                target=Target(),
                snd_settle_mode=int(settled),
            )
        )
        self._refill()

    def _refill(self) -> None:
        most = self._shovel.prefetch or 1
        wanted = most - self._open
        if wanted - self._credit > most // 2 or (wanted and not self._credit):
            self._credit = wanted
            self.peer.grant(self._received, wanted)

    async def next(self) -> Message:
        """See `Source`."""
        parts: list[bytes] = []
        tag = 0
        while True:
            performative, payload = await self.peer.next()
            if not isinstance(performative, Transfer):
                continue
            self.peer.transfers_in += 1
            if performative.delivery_id is not None:
                tag = performative.delivery_id
            if performative.aborted:
                parts.clear()
                self._taken()
                continue
            parts.append(payload)
            if sum(map(len, parts)) > MESSAGE_BYTES_MAX:
                raise EndFailed(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
            if not performative.more:
                break
        self._taken()
        if not self._shovel.takes_settled:
            self._open += 1
        self._refill()
        return _message(tag, b"".join(parts))

    def _taken(self) -> None:
        self._received = following(self._received, 1)
        self._credit -= 1

    def settle(self, tags: Collection[int], *, accepted: bool) -> None:
        """See `Source`."""
        if self._shovel.takes_settled:
            return
        outcome = Accepted() if accepted else Modified(delivery_failed=True)
        bounds = ranges_of((tag, tag) for tag in tags)
        for first, last in zip(bounds[::2], bounds[1::2], strict=True):
            self.peer.send(
                Disposition(role=True, first=first, last=last, settled=True, state=outcome)
            )
        self._open -= len(tags)
        self._refill()


def _message(tag: int, payload: bytes) -> Message:
    """Returns a message as AMQP 0-9-1 has it, and its sections. Raises EndFailed."""
    stored = _read(lambda: stored_of(payload))
    properties, body = _read(lambda: ENCODING.to_amqp091(stored.properties, stored.body))
    notes = stored.sections.annotations
    exchange, key = notes.get(EXCHANGE), notes.get(ROUTING_KEY)
    subject = stored.sections.properties.get("subject")
    return Message(
        tag,
        exchange if isinstance(exchange, str) else "",
        str(key if isinstance(key, str) else subject if isinstance(subject, str) else ""),
        properties,
        body,
        payload,
    )


class Destination10:
    """See `Destination`."""

    def __init__(self, peer: Peer, shovel: Shovel) -> None:
        self.peer = peer
        self._shovel = shovel
        self.sequence = 0
        self._limit = 0
        """Delivery count up to which there is credit."""
        self._outcomes: deque[Confirm] = deque()
        self._room = asyncio.Event()

    async def open(self) -> None:
        """See `Destination`."""
        await self.peer.attach(
            Attach(
                name=f"shovel {self._shovel.name}",
                handle=0,
                role=False,
                source=Source(),
                target=Target(address=self._shovel.destination.address),
                snd_settle_mode=int(self._shovel.ack_mode != ON_CONFIRM),
                initial_delivery_count=0,
            )
        )

    async def publish(self, message: Message) -> None:
        """See `Destination`. `outcome`, which runs beside it, takes the credit."""
        data = message.sections
        step = self.peer.frame_bytes_max - HEADER_BYTES - TRANSFER_BYTES
        sequence = self.sequence
        while ahead(self._limit, sequence) <= 0:
            await self._wait()
        self.sequence = following(sequence, 1)
        for at in range(0, len(data), step):
            while not self.peer.has_window:
                await self._wait()
            first = at == 0
            transfer = Transfer(
                handle=0,
                delivery_id=sequence if first else None,
                delivery_tag=sequence.to_bytes(8, "big") if first else None,
                message_format=0 if first else None,
                settled=self._shovel.ack_mode != ON_CONFIRM,
                more=at + step < len(data),
            )
            await self.peer.transfer(transfer, data[at : at + step])

    async def _wait(self) -> None:
        self.peer.blocked = True
        self._room.clear()
        await self._room.wait()
        self.peer.blocked = False

    async def outcome(self) -> Confirm:
        """See `Destination`."""
        while not self._outcomes:
            performative = (await self.peer.next()).performative
            match performative:
                case Flow():
                    self.peer.flowed(performative)
                    if performative.handle is not None:
                        count = performative.delivery_count or 0
                        self._limit = following(count, performative.link_credit or 0)
                    self._room.set()
                    if performative.echo:
                        self.peer.grant(self.sequence, 0)
                case Disposition():
                    last = performative.first if performative.last is None else performative.last
                    accepted = isinstance(performative.state, Accepted)
                    self._outcomes += [
                        Confirm(each, False, accepted)
                        for each in range(performative.first, last + 1)
                    ]
        return self._outcomes.popleft()
