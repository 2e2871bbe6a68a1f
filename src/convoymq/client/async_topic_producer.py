"""Producers of ordered topics for asyncio; apart, as other clients need no asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from convoymq.client.producer_thread import TopicReceipt
from convoymq.client.topic_producer import PENDING_MAX, TopicProducer
from convoymq.client.topic_rows import Headers

if TYPE_CHECKING:
    from types import TracebackType

    from convoymq.client.client import Client

ROOM_WAIT_S = 1.0


class AsyncTopicProducer:
    """A `TopicProducer` for asyncio: nothing here blocks the event loop.

    async with await AsyncTopicProducer.open(client, "orders") as producer:
        await (await producer.send(b"account-7", b"..."))
    """

    def __init__(self, producer: TopicProducer) -> None:
        """Made by `open`."""
        self._producer = producer

    @classmethod
    async def open(
        cls,
        client: Client,
        topic: str,
        *,
        producer_id: str | int | None = None,
        pending_max: int = PENDING_MAX,
    ) -> AsyncTopicProducer:
        """Begins a session; see `TopicProducer`."""
        return cls(
            await asyncio.to_thread(
                TopicProducer, client, topic, producer_id=producer_id, pending_max=pending_max
            )
        )

    async def __aenter__(self) -> AsyncTopicProducer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(None if error is None else 0.0)

    @property
    def epoch(self) -> int:
        """Returns the number of this session."""
        return self._producer.epoch

    @property
    def pending(self) -> int:
        """Returns the number of messages without an outcome."""
        return self._producer.pending

    async def send(
        self,
        key: bytes | str | None,
        body: bytes | None,
        headers: Headers | None = None,
        source_pos: bytes | None = None,
    ) -> asyncio.Future[TopicReceipt]:
        """Publishes a message when there is room; returns a future that is done when it is stored.
        See `TopicProducer.send`. Messages of one key are sent by one task."""
        while not self._producer.has_room:
            await asyncio.to_thread(self._producer.wait_for_room, ROOM_WAIT_S)
        return asyncio.wrap_future(self._producer.send(key, body, headers, source_pos))

    async def flush(self, timeout: float | None = None) -> None:
        """See `TopicProducer.flush`."""
        await asyncio.to_thread(self._producer.flush, timeout)

    def last_positions(self) -> dict[int, bytes]:
        """See `TopicProducer.last_positions`."""
        return self._producer.last_positions()

    def is_stored(self, key: bytes | str, source_pos: bytes) -> bool:
        """See `TopicProducer.is_stored`."""
        return self._producer.is_stored(key, source_pos)

    async def close(self, timeout: float | None = None) -> None:
        """See `TopicProducer.close`."""
        await asyncio.to_thread(self._producer.close, timeout)
