"""A bridge that runs: one pump for each queue of RocketMQ that is read, one for the way back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from convoymq.client import Client
from convoymq.rocketmq.bridge.amqp import (
    QueueSink,
    QueueSource,
    TopicSink,
    TopicSource,
    type_of,
)
from convoymq.rocketmq.bridge.mapping import AmqpMessage
from convoymq.rocketmq.bridge.pump import BridgeStopped, Pump, Sink, Source, again
from convoymq.rocketmq.bridge.rocket import (
    RocketSink,
    RocketSource,
    knows_keys,
    place_of,
)
from convoymq.rocketmq.bridge.settings import BridgeSettings
from convoymq.rocketmq.client.client import Queue, RocketClient

log = structlog.get_logger()

R = TypeVar("R")

ROUTE_S = 10.0
"""Between two looks for queues that are new."""


class Bridge:
    """See the module text.

    Args:
        ended: called when the bridge cannot go on.
    """

    def __init__(self, settings: BridgeSettings, ended: Callable[[], None]) -> None:
        self._settings = settings
        self._ended = ended
        self._rocket: RocketClient | None = None
        self._clients: list[Client] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumped: set[Queue] = set()
        self._topic_source: TopicSource | None = None
        self.failed = False

    async def start(self) -> int:
        """Begins; a bridge listens on no port."""
        settings = self._settings
        self._rocket = RocketClient(
            settings.name_servers, f"CID_{settings.name}", settings.account, settings.client_tls()
        )
        if self._settings.to_convoymq:
            self._spawn(self._to_convoymq(self._rocket))
        if self._settings.to_rocketmq:
            self._spawn(self._to_rocketmq(self._rocket))
        return 0

    async def stop(self) -> None:
        """Ends. What is under way comes again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._topic_source is not None:
            await asyncio.to_thread(self._topic_source.close)
        if self._rocket is not None:
            await self._rocket.stop()
        for client in self._clients:
            await asyncio.to_thread(client.close)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except BridgeStopped as error:
            log.error("rocketmq.bridge_failed", bridge=self._settings.name, reason=error.text)
            self.failed = True
            self._ended()
        except Exception as error:
            log.error("rocketmq.bridge_failed", bridge=self._settings.name, reason=repr(error),
                      exc_info=error)  # fmt: skip
            self.failed = True
            self._ended()

    def _client(self) -> Client:
        self._clients.append(Client(self._settings.client_config()))
        return self._clients[-1]

    async def _pump(self, source: Source[AmqpMessage], sink: Sink[AmqpMessage]) -> None:
        settings = self._settings
        await Pump(
            settings.name, source, sink, dead_letters=settings.refused == "deadLetter",
            retry_ms=settings.retry_ms,
        ).run()  # fmt: skip

    async def _again(self, call: Callable[[], Awaitable[R]]) -> R:
        return await again(self._settings.name, call, self._settings.retry_ms / 1000)

    # --- to ConvoyMQ ------------------------------------------------------------------------

    async def _to_convoymq(self, rocket: RocketClient) -> None:
        settings = self._settings
        client = self._client()
        kind = "topic"
        if settings.to_queue:
            kind = await self._again(lambda: asyncio.to_thread(type_of, client, settings.to_queue))
        self._began(settings.from_rocketmq_topic, settings.to_queue or settings.to_topic,
                    once=kind != "classic")  # fmt: skip
        while True:
            queues = await self._again(lambda: rocket.queues(settings.from_rocketmq_topic))
            for queue in queues:
                if queue not in self._pumped:
                    self._pumped.add(queue)
                    source = RocketSource(rocket, settings, queue)
                    self._spawn(self._pump(source, self._amqp_sink(kind)))
            await asyncio.sleep(ROUTE_S)

    def _amqp_sink(self, kind: str) -> Sink[AmqpMessage]:
        settings = self._settings
        if kind == "topic":
            return TopicSink(self._client(), settings.name, settings.to_topic)
        return QueueSink(self._client(), settings.name, settings.to_queue, kind)

    # --- to RocketMQ ------------------------------------------------------------------------

    async def _to_rocketmq(self, rocket: RocketClient) -> None:
        settings = self._settings
        topic = settings.to_rocketmq_topic
        client = self._client()
        source: Source[AmqpMessage]
        is_classic = False
        if settings.from_queue:
            kind = await self._again(
                lambda: asyncio.to_thread(type_of, client, settings.from_queue)
            )
            if kind == "stream":
                raise BridgeStopped(
                    f"'{settings.from_queue}' is a stream: nothing can be taken out"
                )
            is_classic = kind == "classic"
            source = QueueSource(client, settings, os.urandom(8).hex())
        else:
            source = self._topic_source = TopicSource(client, settings)
        broker, queues = await self._again(
            lambda: place_of(rocket, topic, settings.to_rocketmq_broker)
        )
        once = await self._again(lambda: knows_keys(rocket, topic, broker))
        self._began(settings.from_queue or settings.from_topic, topic, once=once and not is_classic)
        await self._pump(source, RocketSink(rocket, topic, broker, queues, once=once))

    def _began(self, source: str, target: str, *, once: bool) -> None:
        log.info("rocketmq.bridge_began", bridge=self._settings.name, source=source, target=target,
                 promise="exactly once" if once else "at least once")  # fmt: skip
