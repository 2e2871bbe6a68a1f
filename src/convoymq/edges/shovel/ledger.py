"""Messages that a shovel has under way, and how many are to come. Pure.

taken(tag) ─▶ sent(sequence, tag) ─▶ confirmed(sequence) ─▶ settled at the source
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator


class Ledger:
    """Messages under way of one run of a shovel.

    Args:
        remaining: messages after which the shovel has done its work; None: it never has.
    """

    def __init__(self, remaining: int | None) -> None:
        self.remaining = remaining
        self.forwarded = 0
        self._to_send = remaining
        self._sent: OrderedDict[int, int] = OrderedDict()

    @property
    def pending(self) -> int:
        """Returns how many messages wait for a confirm."""
        return len(self._sent)

    @property
    def is_full(self) -> bool:
        """Returns whether no further message is wanted: those that come go back when it ends."""
        return self._to_send == 0

    @property
    def is_done(self) -> bool:
        """Returns whether all that was wanted is settled."""
        return self.remaining == 0

    def sent(self, sequence: int, tag: int) -> None:
        """Takes a message that waits for a confirm."""
        self._sent[sequence] = tag
        if self._to_send is not None:
            self._to_send -= 1

    def confirmed(self, sequence: int, *, multiple: bool, accepted: bool) -> list[int]:
        """Returns the tags of the messages that a confirm is about. One that was not accepted comes
        again, and is still wanted."""
        tags = []
        if multiple:
            while self._sent and next(iter(self._sent)) <= sequence:
                tags.append(self._sent.popitem(last=False)[1])
        elif sequence in self._sent:
            tags.append(self._sent.pop(sequence))
        if accepted:
            self.forwarded += len(tags)
            if self.remaining is not None:
                self.remaining -= len(tags)
        elif self._to_send is not None:
            self._to_send += len(tags)
        return tags


class Deliveries:
    """Deliveries of a source that are not settled, so that one frame settles many."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, tag: int) -> None:
        """Takes a delivery. Tags rise."""
        self._open[tag] = None

    def settle(self, tags: Collection[int]) -> Iterator[tuple[int, bool]]:
        """Yields (tag, whether all before it are meant too)."""
        rest = dict.fromkeys(sorted(tags))
        last = None
        while self._open and (first := next(iter(self._open))) in rest:
            del self._open[first], rest[first]
            last = first
        if last is not None:
            yield last, True
        for tag in rest:
            del self._open[tag]
            yield tag, False
