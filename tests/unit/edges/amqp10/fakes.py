"""A client of AMQP 1.0 that speaks in performatives, and queues that hand out by credit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.connection import Connection
from convoymq.edges.amqp10.frames import AMQP, SASL, FrameReader, frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER
from convoymq.edges.amqp10.performatives import (
    Attach,
    Begin,
    Composite,
    Disposition,
    Flow,
    Open,
    SaslInit,
    Source,
    Target,
    Transfer,
    read,
)
from convoymq.edges.sasl import Login, LoginConfig
from convoymq.messages.amqp10.values import Described, ULong, encode
from convoymq.queues.interface import Delivery, Modification
from tests.unit.edges.amqp091.fakes import FakeBroker as BaseBroker
from tests.unit.edges.amqp091.fakes import FakeClient, FakeConsumer, FakeQueue, FakeShell

WINDOW = 1 << 20


class CreditQueue(FakeQueue):
    """A queue whose consumers get as many messages as they were granted."""

    def client(self, session: int, events: Any) -> CreditClient:
        made = CreditClient(self, session, events)
        self.clients.append(made)
        return made

    def serve(self) -> bool:
        worked = False
        for consumer in list(self.consumers):
            while self.ready and consumer.next_id < consumer.credit:
                message = block, command, record, acquired = self.ready.popleft()
                message_id, number = consumer.next_id, consumer.spec.number
                consumer.next_id += 1
                consumer.out[message_id] = message
                delivery = Delivery(number, message_id, block, command, record, 1, acquired, 0)
                consumer.client.events.on_deliver(consumer.client, delivery)
                worked = True
        for client in self.clients:
            worked |= client.answer_grants()
        return worked


class CreditClient(FakeClient):
    """A session's stream into a `CreditQueue`."""

    queue: CreditQueue

    def __init__(self, queue: CreditQueue, session: int, events: Any) -> None:
        super().__init__(queue, session, events)
        self.grants: list[tuple[int, bool]] = []

    def subscribe(self, consumer: Any) -> None:
        super().subscribe(consumer)
        for each in self.queue.consumers:
            if each.client is self and each.spec is consumer:
                each.credit = 0

    def grant(self, number: int, limit: int, *, drain: bool = False) -> None:
        self.queue.calls.append(("grant", number, limit, drain))
        self._consumer(number).credit = limit
        self.grants.append((number, drain))

    def answer_grants(self) -> bool:
        grants, self.grants = self.grants, []
        for number, drain in grants:
            consumer = self._held(number)
            if consumer is None:
                continue
            if drain:
                consumer.credit = consumer.next_id
            self.events.on_credit(self, number, consumer.next_id, len(self.queue.ready))
        return bool(grants)

    def _held(self, number: int) -> FakeConsumer | None:
        found = [c for c in self.queue.consumers if c.client is self and c.spec.number == number]
        return found[0] if found else None

    def remove(self, number: int) -> None:
        self.queue.calls.append(("remove", number))
        consumer = self._consumer(number)
        self.queue.consumers.remove(consumer)
        for block, command, record, acquired in consumer.out.values():
            self.queue.ready.append((block, command, record, acquired + 1))
        self._answer(lambda: self.events.on_cancel_ok(self, number))

    def return_(
        self,
        number: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification | None = None,
    ) -> None:
        super().return_(number, ranges, failed=failed, untried=untried)
        if modification is not None:
            self.queue.calls.append(("modify", modification))

    def discard(
        self, number: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        super().discard(number, ranges)
        self.queue.calls.append(("error", failed, error))


class FakeBroker(BaseBroker):
    """A broker with queues of that kind."""

    def __init__(self) -> None:
        super().__init__()
        self.serves_encodings = True
        self.counted: list[tuple[Any, ...]] = []

    def queue(self, name: str, type: str = "quorum", owner: int | None = None) -> CreditQueue:
        made = self.queues[name] = CreditQueue("/", name, type, owner)
        return made

    def check_exchange(self, vhost: str, exchange: str) -> None:
        self.passive_declare_exchange(vhost, exchange)

    def now_ms(self) -> int:
        return 1_000_000

    def count_published(self, *counted: Any) -> None:
        self.counted.append(counted)


class Shell(FakeShell):
    """Takes output at once."""

    connection: Connection

    def __init__(self) -> None:
        super().__init__()
        self.kept: int | None = None
        """Output that the socket does not take; None: the test says it to the connection."""

    def want_flush(self) -> None:
        pass

    def update_kept(self) -> None:
        if self.kept is not None:
            self.connection.on_kept(self.kept)

    def close(self) -> None:
        self.output += self.connection.take_output()
        super().close()


class Client:
    """One connection under test, seen from the client's side."""

    _ids = itertools.count(1)

    def __init__(
        self,
        broker: FakeBroker,
        settings: Amqp10Config | None = None,
        message_size_max: int = 16 << 20,
    ) -> None:
        self.broker = broker
        self.shell = Shell()
        self.connection = self.shell.connection = Connection(
            id=next(self._ids),
            broker=broker,  # type: ignore[arg-type]
            settings=settings or Amqp10Config(),
            login=Login(broker.access, LoginConfig(), "amqp10"),  # type: ignore[arg-type]
            shell=self.shell,
            peer=("127.0.0.1", 50000),
            local=("127.0.0.1", 5672),
            message_size_max=message_size_max,
        )
        self.headers: list[bytes] = []
        self._reader = FrameReader(1 << 30)
        self._next_delivery = 0
        self.payloads: list[bytes] = []

    # sending

    def write(self, data: bytes) -> None:
        self.connection.receive(data)

    def send(self, performative: Composite, payload: bytes = b"", channel: int = 0) -> None:
        kind = SASL if isinstance(performative, SaslInit) else AMQP
        self.write(frame(channel, performative.encoded() + payload, kind))

    # hearing

    async def heard(self) -> list[Any]:
        """Lets everything go on, and returns the performatives that came."""
        await self.rest()
        data, self.shell.output = bytes(self.shell.output), bytearray()
        while data[:4] == b"AMQP":
            self.headers.append(data[:8])
            data = data[8:]
        self._reader.feed(data)
        found: list[Any] = []
        while (each := self._reader.frame()) is not None:
            if not each.body:
                found.append(None)
                continue
            performative, payload = read(each.body)
            if payload or isinstance(performative, Transfer):
                self.payloads.append(payload)
            found.append(performative)
            # The protocol header behind the log-in stands between frames.
            rest = self._reader.take(self._reader.waiting) or b""
            while rest[:4] == b"AMQP":
                self.headers.append(rest[:8])
                rest = rest[8:]
            self._reader.feed(rest)
        return found

    async def rest(self) -> None:
        """Lets everything go on until nothing happens any more."""
        for _ in range(50):
            await asyncio.sleep(0)
            worked = any([queue.round() for queue in self.broker.queues.values()])  # noqa: C419
            self.shell.output += self.connection.take_output()
            if not worked and not len(self.shell.tasks):
                break

    # the usual

    async def log_in(self, response: bytes = b"\0guest\0guest", mechanism: str = "PLAIN") -> Any:
        self.write(SASL_HEADER)
        await self.heard()
        self.send(SaslInit(mechanism=mechanism, initial_response=response))
        return await self.heard()

    async def open(self, **fields: Any) -> Any:
        await self.log_in()
        self.write(PLAIN_HEADER)
        self.send(Open(container_id="client", **fields))
        return (await self.heard())[-1]

    async def begin(self, channel: int = 0, **fields: Any) -> Any:
        asked = {"next_outgoing_id": 0, "incoming_window": WINDOW, "outgoing_window": WINDOW}
        self.send(Begin(**(asked | fields)), channel=channel)
        return (await self.heard())[-1]

    async def attach_sender(self, address: Any, handle: int = 0, **fields: Any) -> list[Any]:
        asked: dict[str, Any] = {"initial_delivery_count": 0, "snd_settle_mode": 2}
        self.send(
            Attach(
                name=f"link {handle}",
                handle=handle,
                role=False,
                source=Source(),
                target=Target(address=address),
                **(asked | fields),
            )
        )
        return await self.heard()

    async def attach_receiver(
        self, address: Any, handle: int = 0, source: Source | None = None, **fields: Any
    ) -> list[Any]:
        self.send(
            Attach(
                name=f"link {handle}",
                handle=handle,
                role=True,
                source=source or Source(address=address),
                target=Target(),
                **fields,
            )
        )
        return await self.heard()

    def transfer(self, payload: bytes, handle: int = 0, **fields: Any) -> int:
        """Sends a message in one transfer and returns its delivery id."""
        delivery_id = self._next_delivery
        self._next_delivery += 1
        asked = {"delivery_id": delivery_id, "delivery_tag": b"%d" % delivery_id, "settled": False}
        self.send(Transfer(handle=handle, **(asked | fields)), payload)
        return delivery_id

    def credit(self, credit: int, handle: int = 0, counted: int = 0, **fields: Any) -> None:
        self.flow(handle=handle, delivery_count=counted, link_credit=credit, **fields)

    def flow(self, **fields: Any) -> None:
        asked = {"next_incoming_id": 0, "incoming_window": WINDOW, "next_outgoing_id": 0}
        self.send(Flow(**(asked | {"outgoing_window": WINDOW} | fields)))

    def settle(self, first: int, state: Any, last: int | None = None, settled: bool = True) -> None:
        self.send(Disposition(role=True, first=first, last=last, settled=settled, state=state))


def message(body: bytes = b"hello", **properties: Any) -> bytes:
    """Returns the sections of a message with these properties of the first three."""
    fields = [properties.get("message_id"), properties.get("user_id"), properties.get("to")]
    return encode(Described(ULong(0x73), fields)) + encode(Described(ULong(0x75), body))


def of_kind(found: Sequence[Any], kind: type) -> list[Any]:
    """Returns those of a kind."""
    return [each for each in found if isinstance(each, kind)]
