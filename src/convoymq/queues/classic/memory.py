# cython: annotation_typing=False
"""The memory of a node's classic queues: one target for all, shared by what they give out.

While all together stay below the target nothing is paged out. Above it, a queue keeps as much as it
gives out in `AHEAD_S` seconds, in proportion to the others (ADR 0126).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

AHEAD_S = 10
SHARE_MIN_BYTES = 4 << 10
"""A queue keeps at least so much, whatever the others want."""
KEPT = 0.75
"""A queue that has too much goes down to this part of its share, so that it need not at once
again."""
SMOOTHING = 0.3
"""Weight of the last second in a rate."""


@dataclass(slots=True)
class Rates:
    """Messages per second of a queue."""

    ingress: float = 0.0
    egress: float = 0.0
    ack_ingress: float = 0.0
    ack_egress: float = 0.0
    _counts: tuple[int, int, int] = (0, 0, 0)
    _last_ms: int = 0

    def note(self, published: int, delivered: int, acknowledged: int, now_ms: int) -> None:
        """Takes the counts of a queue, about once a second."""
        seconds = (now_ms - self._last_ms) / 1000
        if seconds <= 0:
            return
        before, self._counts = self._counts, (published, delivered, acknowledged)
        self._last_ms = now_ms
        into, out, acks = (
            (now - then) / seconds for now, then in zip(self._counts, before, strict=True)
        )
        self.ingress += SMOOTHING * (into - self.ingress)
        self.egress += SMOOTHING * (out - self.egress)
        # What is handed out waits for its acknowledgement.
        self.ack_ingress = self.egress
        self.ack_egress += SMOOTHING * (acks - self.ack_egress)

    def after(self, now_ms: int) -> Rates:
        """Returns the rates at a time until when nothing came or left."""
        seconds = (now_ms - self._last_ms) / 1000
        if seconds <= 0:
            return self
        left = (1 - SMOOTHING) ** seconds
        return replace(
            self,
            ingress=self.ingress * left,
            egress=self.egress * left,
            ack_ingress=self.ack_ingress * left,
            ack_egress=self.ack_egress * left,
            _last_ms=now_ms,
        )


class Memory:
    """See the module text."""

    def __init__(self, target_bytes: int) -> None:
        self.target_bytes = target_bytes
        self.used_bytes = 0
        self._footprints: dict[int, int] = {}
        """Group -> bytes of a queue that has some."""
        self._shares: dict[int, int] = {}

    def weigh(self, group: int, footprint: int) -> None:
        """A queue takes so much memory now."""
        self.used_bytes += footprint - self._footprints.get(group, 0)
        if footprint:
            self._footprints[group] = footprint
        else:
            self._footprints.pop(group, None)

    def forget(self, group: int) -> None:
        """A queue is closed."""
        self.used_bytes -= self._footprints.pop(group, 0)
        self._shares.pop(group, None)

    def keep(self, group: int, footprint: int) -> int | None:
        """Returns to how many bytes a queue is to go down; None: it may keep what it has."""
        self.weigh(group, footprint)
        if not self.is_short:
            return None
        share = self.share(group)
        return int(share * KEPT) if footprint > share else None

    @property
    def is_short(self) -> bool:
        """Returns whether queues are to page out."""
        return self.used_bytes > self.target_bytes

    def share(self, group: int) -> int:
        """Returns how many bytes a queue may take while memory is short."""
        share = self._shares.get(group)
        if share is None:
            share = self.target_bytes // (len(self._footprints) + 1)
        return max(share, SHARE_MIN_BYTES)

    def large(self) -> Iterable[int]:
        """Returns the groups of the queues that may have to page out."""
        return [g for g, footprint in self._footprints.items() if footprint > SHARE_MIN_BYTES]

    def divide(self, egress_bytes: dict[int, float]) -> None:
        """Divides the target among queues by the bytes that they give out in a second."""
        if self.used_bytes <= self.target_bytes // 2:
            # Memory will not be short before the next time.
            self._shares = {}
            return
        wants = {
            group: AHEAD_S * egress_bytes.get(group, 0.0) + min(footprint, SHARE_MIN_BYTES)
            for group, footprint in self._footprints.items()
        }
        total = sum(wants.values())
        self._shares = {g: int(self.target_bytes * want / total) for g, want in wants.items()}
