"""aio-pika: its own features, and a leader killed under it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.failover import (
    COUNT,
    LEADER,
    Ledger,
    declare_on_leader,
    leader_killed,
    uris_from,
)
from tests.patience import PATIENCE_S

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
WINDOW = 50
FAILURES = (aio_pika.exceptions.AMQPError, OSError, asyncio.TimeoutError, RuntimeError)


@pytest.fixture
async def aio_channel(cluster: Cluster) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect_robust(cluster.uris[0])
    async with connection:
        yield await connection.channel(on_return_raises=True)


async def test_publish_get_and_acknowledge(aio_channel: AbstractChannel, names: Names) -> None:
    queue = await aio_channel.declare_queue(names.queue(), durable=True, arguments=QUORUM)
    message = aio_pika.Message(
        b"body",
        headers={"number": 1, "text": "ü"},
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        correlation_id="c",
    )
    await aio_channel.default_exchange.publish(message, queue.name)
    received = await queue.get(timeout=PATIENCE_S)
    assert received is not None
    assert received.body == b"body"
    assert received.correlation_id == "c"
    assert {key: received.headers[key] for key in ("number", "text")} == {"number": 1, "text": "ü"}
    await received.ack()
    assert await queue.get(fail=False) is None


async def test_iterator_and_topic_exchange(aio_channel: AbstractChannel, names: Names) -> None:
    exchange = await aio_channel.declare_exchange(names.exchange(), aio_pika.ExchangeType.TOPIC)
    queue = await aio_channel.declare_queue(exclusive=True)
    await queue.bind(exchange, "a.*")
    for key in ("a.b", "b.a", "a.c"):
        await exchange.publish(aio_pika.Message(key.encode()), key, mandatory=False)
    seen = []
    async with queue.iterator(timeout=PATIENCE_S) as messages:
        async for message in messages:
            async with message.process():
                seen.append(message.body)
            if len(seen) == 2:
                break
    assert seen == [b"a.b", b"a.c"]


async def test_unroutable_message_is_an_error(aio_channel: AbstractChannel) -> None:
    with pytest.raises(aio_pika.exceptions.PublishError):
        await aio_channel.default_exchange.publish(aio_pika.Message(b"x"), "interop-absent")


async def test_transaction(aio_channel: AbstractChannel, names: Names, cluster: Cluster) -> None:
    connection = await aio_pika.connect(cluster.uris[1])
    async with connection:
        channel = await connection.channel(publisher_confirms=False)
        queue = await channel.declare_queue(names.queue(), durable=True, arguments=QUORUM)
        transaction = channel.transaction()
        await transaction.select()
        await channel.default_exchange.publish(aio_pika.Message(b"kept"), queue.name)
        await transaction.commit()
        await channel.default_exchange.publish(aio_pika.Message(b"dropped"), queue.name)
        await transaction.rollback()
    again = await aio_channel.get_queue(queue.name)
    received = await again.get(timeout=PATIENCE_S)
    assert received is not None
    assert received.body == b"kept"
    await received.ack()
    assert await again.get(fail=False) is None


async def keep_doing(
    uris: list[str], work: Callable[[AbstractChannel, asyncio.Future[None]], Awaitable[None]]
) -> None:
    """Run `work(channel, closed)` on one node after the other until it ends without a failure."""
    for uri in itertools.cycle(uris):
        try:
            connection = await aio_pika.connect(uri, timeout=5)
            try:
                closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

                def on_close(*_: object, closed: asyncio.Future[None] = closed) -> None:
                    if not closed.done():
                        closed.set_result(None)

                connection.close_callbacks.add(on_close)
                channel = await connection.channel()
                channel.close_callbacks.add(on_close)
                await work(channel, closed)
                return
            finally:
                with suppress(*FAILURES):
                    await connection.close()
        except FAILURES:
            await asyncio.sleep(0.05)


async def publish(
    uris: list[str], queue: str, ledger: Ledger, at_a_third: Callable[[], Awaitable[None]]
) -> None:
    """Publish in windows whose confirms are awaited together."""
    tried: set[int] = set()

    async def work(channel: AbstractChannel, _closed: asyncio.Future[None]) -> None:
        while len(ledger.confirmed) < COUNT:
            start = len(ledger.confirmed)
            window = range(start, min(start + WINDOW, COUNT))
            ledger.resent |= tried & set(window)
            tried.update(window)
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(str(number).encode()), queue, timeout=PATIENCE_S
                    )
                    for number in window
                )
            )
            ledger.confirmed.extend(window)
            if window[0] <= COUNT // 3 <= window[-1]:
                await at_a_third()

    await keep_doing(uris, work)


async def consume(uris: list[str], queue: str, ledger: Ledger) -> None:
    seen: set[int] = set()

    async def work(channel: AbstractChannel, closed: asyncio.Future[None]) -> None:
        everything = asyncio.get_running_loop().create_future()

        async def on_message(message: AbstractIncomingMessage) -> None:
            number = int(message.body)
            ledger.delivered.append((number, bool(message.redelivered)))
            await message.ack()
            seen.add(number)
            if len(seen) == COUNT and not everything.done():
                everything.set_result(None)

        await channel.set_qos(prefetch_count=100)
        target = await channel.get_queue(queue)
        await target.consume(on_message)
        await asyncio.wait({everything, closed}, return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            raise ConnectionError("closed while consuming")

    await keep_doing(uris, work)


@pytest.mark.parametrize("first", [0, LEADER], ids=["on a follower", "on the leader"])
async def test_leader_killed_while_publishing_and_consuming(
    cluster: Cluster, names: Names, first: int
) -> None:
    queue = names.queue()
    declare_on_leader(cluster, queue)
    ledger = Ledger()
    with leader_killed(cluster, True) as strike:

        async def at_a_third() -> None:
            await asyncio.to_thread(strike)

        uris = uris_from(cluster, first)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(
                publish(uris, queue, ledger, at_a_third), consume(uris[::-1], queue, ledger)
            )
    ledger.check()
