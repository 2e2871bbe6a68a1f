"""Ordered pops: the messages that a group has of a queue, and until when nobody else gets any.

A queue gives out nothing while a message of its last pop is neither acknowledged nor visible again.
What was not acknowledged then comes first again: the group's offset moves with acknowledgements
only. A pop with the same attempt id is a repeat of the last one, whose answer was lost.

The file `consumerOrderInfo.json` has RocketMQ's form. A crash forgets acknowledgements of the last
seconds, as it does offsets of consumers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CLEAN_MS = 24 * 3600 * 1000


class OrderInfo(msgspec.Struct, rename={
    "pop_ms": "popTime", "invisible_ms": "i", "differences": "o", "next_visible_ms": "ot",
    "counts": "oc", "consumed_ms": "l", "done": "cm", "attempt": "a",
}):  # fmt: skip
    """The last pop of a group from a queue."""

    pop_ms: int = 0
    invisible_ms: int | None = None
    differences: list[int] | None = None
    """The first offset, then distances to it."""
    next_visible_ms: dict[int, int] | None = None
    counts: dict[int, int] | None = None
    """Offset -> how often it was given out before."""
    consumed_ms: int = 0
    done: int = 0
    """A bit for each message that was acknowledged."""
    attempt: str | None = None

    @property
    def offsets(self) -> list[int]:
        """Returns the offsets of its messages."""
        found = self.differences or []
        return [*found[:1], *(found[0] + difference for difference in found[1:])]


class OrderTable(msgspec.Struct):
    """All of them: `topic@group` -> queue -> the last pop."""

    table: dict[str, dict[int, OrderInfo]] = msgspec.field(default_factory=dict)


class PopOrder:
    """See the module text."""

    def __init__(self, table: OrderTable | None = None) -> None:
        self.table = table or OrderTable()

    def _find(self, topic: str, group: str, queue: int) -> OrderInfo | None:
        return self.table.table.get(f"{topic}@{group}", {}).get(queue)

    def free_ms(
        self, topic: str, group: str, queue: int, *, attempt: str | None, invisible_ms: int
    ) -> int:
        """Returns when the queue gives out messages again; 0: now."""
        info = self._find(topic, group, queue)
        if info is None or (info.attempt is not None and info.attempt == attempt):
            return 0
        if not info.invisible_ms or info.invisible_ms <= 0:
            info.invisible_ms = invisible_ms
        visible = info.next_visible_ms or {}
        end_ms = info.pop_ms + info.invisible_ms
        return max(
            (visible.get(o, end_ms) for n, o in enumerate(info.offsets) if not info.done >> n & 1),
            default=0,
        )

    def popped(
        self,
        topic: str,
        group: str,
        queue: int,
        offsets: Sequence[int],
        *,
        pop_ms: int,
        invisible_ms: int,
        attempt: str | None,
    ) -> list[tuple[int, int]]:
        """Enters a pop; returns each offset with how often it was given out before."""
        before = self._find(topic, group, queue)
        counts: dict[int, int] = {}
        if before is not None:
            known = before.counts or {}
            is_repeat = before.attempt is not None and before.attempt == attempt
            for offset in set(before.offsets).intersection(offsets):
                counts[offset] = known.get(offset, 0) + (0 if is_repeat else 1)
        first = offsets[0]
        info = OrderInfo(
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            differences=[first, *(offset - first for offset in offsets[1:])],
            counts={offset: count for offset, count in counts.items() if count} or None,
            consumed_ms=pop_ms,
            attempt=attempt,
        )
        self.table.table.setdefault(f"{topic}@{group}", {})[queue] = info
        return [(offset, counts.get(offset, 0)) for offset in offsets]

    def ack(self, topic: str, group: str, queue: int, offset: int, pop_ms: int) -> int | None:
        """Enters an acknowledgement; returns the group's new offset, None where it is of an older
        pop.

        Raises:
            ValueError: the last pop did not give out this message.
        """
        info = self._find(topic, group, queue)
        if info is None:
            return offset + 1
        if pop_ms != info.pop_ms:
            return None
        offsets = info.offsets
        info.done |= 1 << offsets.index(offset)
        for n, waiting in enumerate(offsets):
            if not info.done >> n & 1:
                return waiting
        return offsets[-1] + 1

    def show_at(
        self, topic: str, group: str, queue: int, offset: int, pop_ms: int, visible_ms: int
    ) -> None:
        """Changes when a message is visible again."""
        info = self._find(topic, group, queue)
        if info is not None and info.pop_ms == pop_ms:
            info.next_visible_ms = {**(info.next_visible_ms or {}), offset: visible_ms}

    def forget(self, topic: str, group: str, queue: int) -> None:
        """Forgets the last pop: the group's offset was set."""
        self.table.table.get(f"{topic}@{group}", {}).pop(queue, None)

    def clean(self, now_ms: int) -> None:
        """Forgets pops of queues that nobody consumes any more."""
        for name, queues in list(self.table.table.items()):
            for queue, info in list(queues.items()):
                if now_ms - info.consumed_ms > CLEAN_MS:
                    del queues[queue]
            if not queues:
                del self.table.table[name]
