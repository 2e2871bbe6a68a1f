"""Events of a queue's client that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

from convoymq.queues.interface import ClientEvents, Delivery, GetResult, PublishOutcome, QueueClient


class NullEvents(ClientEvents):
    """Does nothing; who waits for some of the events derives from it."""

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """Does nothing."""

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Does nothing."""

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """Does nothing."""

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """Does nothing."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """Does nothing."""

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """Does nothing."""

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """Does nothing."""

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """Does nothing."""
