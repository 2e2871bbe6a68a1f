"""A channel that does one thing to queues which are never deleted: base of those of links,
transactions and reservations."""

from __future__ import annotations

from convoymq.queues.null_events import NullEvents
from convoymq.sim.clients import ChannelParts


class OwnerChannel(NullEvents):
    """See the module text."""

    is_over = False
    title = "chan"
    """Beginning of its name."""

    def __init__(self, parts: ChannelParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self.node = parts.node
        self.group = parts.group
        parts.workload.channels += 1
        parts.workload.publishers += 1
        self._number = parts.workload.publishers
        self.name = f"{self.title}{self._number}"
        self._draining = False
        self._closed = False

    def _next_turn(self) -> None:
        config = self._parts.config
        delay_us = self._scheduler.between(config.turn_min_us, config.turn_max_us)
        self._scheduler.after(delay_us, self._parts.process, self._turn)

    def _turn(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        """See `OpenChannel`."""
        self._draining = True

    def end(self) -> None:
        """See `OpenChannel`."""
        raise NotImplementedError("no queue is deleted here")
