"""Deliveries of one session that wait for their outcome.

They lie in blocks by their ids, so that a range which names few of them costs little, however many
there are and however wide it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead, following

if TYPE_CHECKING:
    from convoymq.edges.amqp10.sending import Sender

_BITS = 8
_BLOCKS_MASK = WINDOW_MAX >> _BITS

Held = tuple["Sender", int]
"""Link and message id of a delivery."""


class Unsettled:
    """See the module text."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, Held]] = {}
        """By all bits of delivery ids but the last ones."""
        self._of: dict[Sender, int] = {}
        """Deliveries by link."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, delivery_id: int, link: Sender, message_id: int) -> None:
        """Keeps a delivery."""
        number = delivery_id >> _BITS
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = {}
        block[delivery_id] = link, message_id
        self._of[link] = self._of.get(link, 0) + 1
        self._count += 1

    def take(self, first: int, last: int) -> list[Held]:
        """Forgets the deliveries of a range of ids, and returns them."""
        return [held for _, held in self.taken(first, last)]

    def taken(self, first: int, last: int) -> list[tuple[int, Held]]:
        """As `take`: with their ids."""
        count = ahead(last, first) + 1
        begin = first >> _BITS
        blocks = ((last >> _BITS) - begin & _BLOCKS_MASK) + 1
        if blocks <= len(self._blocks):
            numbers = [begin + each & _BLOCKS_MASK for each in range(blocks)]
        else:
            numbers = [each for each in self._blocks if each - begin & _BLOCKS_MASK < blocks]
        found: list[tuple[int, Held]] = []
        for number in numbers:
            block = self._blocks.get(number)
            if block is None:
                continue
            if count <= len(block):
                ids = [following(first, each) for each in range(count)]
            else:
                ids = [each for each in block if 0 <= ahead(each, first) < count]
            found += [(each, self._forget(number, block, each)) for each in ids if each in block]
        return found

    def take_of(self, link: Sender) -> list[int]:
        """Forgets the deliveries of a link, and returns the ids of their messages."""
        found: list[int] = []
        for number in reversed(list(self._blocks)):
            if link not in self._of:
                break
            block = self._blocks[number]
            ids = [delivery_id for delivery_id, (of, _) in block.items() if of is link]
            found += [self._forget(number, block, each)[1] for each in ids]
        return found

    def clear(self) -> None:
        """Forgets all."""
        self._blocks.clear()
        self._of.clear()
        self._count = 0

    def _forget(self, number: int, block: dict[int, Held], delivery_id: int) -> Held:
        held = block.pop(delivery_id)
        if not block:
            del self._blocks[number]
        self._count -= 1
        left = self._of[held[0]] - 1
        if left:
            self._of[held[0]] = left
        else:
            del self._of[held[0]]
        return held
