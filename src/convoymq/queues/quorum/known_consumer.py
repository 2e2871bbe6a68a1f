"""A consumer of a quorum queue, as the client of its session knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.queues.quorum.picking import Picker


class KnownConsumer:
    """See the module text."""

    __slots__ = (
        "active", "asked", "asked_at", "asked_ms", "cancelled", "cancelling", "grants",
        "hears_cancel", "link", "missed", "next_id", "paused", "picker", "subscribed",
    )  # fmt: skip

    def __init__(self, *, hears_cancel: bool = False, link: bytes = b"") -> None:
        self.link = link
        self.picker: Picker | None = None
        self.next_id = 0
        self.hears_cancel = hears_cancel
        self.subscribed = False
        self.cancelling = False
        self.cancelled = False
        self.asked = False
        self.paused = False
        #: `next_id` when this client last asked for what is missing; -1: nothing is on its way.
        self.asked_at = -1
        self.asked_ms = 0
        #: Something was dropped since then: the answer may not have it.
        self.missed = False
        #: Calls of `grant` without an answer, in their order: [seq, granted, ready]; granted -1:
        #: the queue has not answered.
        self.grants: list[list[int]] = []
        #: Whether it is the single active consumer, as its owner was told; None: it was not.
        self.active: bool | None = None

    def stop_picking(self) -> None:
        """No more messages are picked."""
        if self.picker is not None:
            self.picker.stop()
