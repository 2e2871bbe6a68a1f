"""Channels of a simulated cluster: their queues may be deleted."""

from __future__ import annotations

from collections.abc import Sequence

from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.interface import QueueClient
from convoymq.sim.clients import Channel
from convoymq.sim.streams import StreamChannel


class EndedChannel(Channel):
    """Of a channel: what it hears when its queue is deleted is no promise."""

    @property
    def is_over(self) -> bool:
        """Returns whether its queue is deleted."""
        queue = self.client.queue
        assert isinstance(queue, GroupQueue)
        return queue.deleted

    def _turn(self) -> None:
        """Does nothing more once the queue is gone: no route leads there."""
        if not self.is_over:
            super()._turn()

    def drain(self) -> None:
        """The quiet phase: only where there is a queue."""
        if not self.is_over:
            super().drain()

    def on_published(self, client: QueueClient, tags: Sequence[int], ok: bool) -> None:
        """Confirms; those of a deleted queue say that nobody has to wait."""
        if self.is_over:
            for i in range(0, len(tags), 2):
                for tag in range(tags[i], tags[i + 1] + 1):
                    self.unconfirmed.pop(tag)
            return
        super().on_published(client, tags, ok)


class QueueChannel(EndedChannel):
    """A channel into a quorum queue that may be deleted."""


class StreamQueueChannel(EndedChannel, StreamChannel):
    """A channel into a stream that may be deleted."""
