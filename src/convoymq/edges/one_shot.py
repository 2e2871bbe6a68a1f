"""Queue clients for a single question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq.model.errors import Unavailable
from convoymq.queues.interface import (
    ClientEvents,
    Delivery,
    GetResult,
    PublishOutcome,
    Queue,
    QueueClient,
)

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker

ANSWER_TIMEOUT_S = 30.0


class OneShot(ClientEvents):
    """A queue client for a single question; hears the answer as a future."""

    def __init__(self, broker: Broker, queue: Queue) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[object] = self._loop.create_future()
        self.client = queue.client(broker.new_session(), self)

    async def wait(self) -> object:
        """Returns the next answer. Raises the queue's refusal, or Unavailable."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._answer
        except TimeoutError:
            raise Unavailable("the queue did not answer in time") from None
        finally:
            self._answer = self._loop.create_future()

    async def settled(self) -> None:
        """Waits until what was settled or returned is applied. Raises Unavailable."""
        self.client.when_settled(self._tell)
        if not await self.wait():
            raise Unavailable("the queue was lost")

    def _tell(self, result: object, error: Exception | None = None) -> None:
        if self._answer.done():
            return
        if error is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(result)

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `ClientEvents`."""
        self._tell(bool(outcome))

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Nothing was subscribed to."""

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """Nothing was subscribed to."""

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """Nothing was subscribed to."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """Nothing was subscribed to."""

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """See `ClientEvents`."""
        self._tell(result, result.error)

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self._tell(count, error)

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """A single message is let through."""

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`: whoever asks may ask again."""
        return None


async def purge(broker: Broker, vhost: str, name: str, owner: int | None = None) -> int:
    """Drops the ready messages of a queue that the connection may use, and returns how many. Raises
    BrokerError."""
    shot = OneShot(broker, broker.queue_admin.find_queue(vhost, name, owner))
    try:
        shot.client.purge()
        count = await shot.wait()
        assert isinstance(count, int)
        return count
    finally:
        shot.client.close()
