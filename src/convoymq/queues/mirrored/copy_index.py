"""Index of a mirror's copy: which blocks of the queue it has, and how much of each is alive. Pure.

A mirror follows the log of its master without carrying the queue's rules out. It has to know which
files of its own log nobody needs any more, and how many messages it has: a mirror that has as many
as its master has the same ones, because it never has one that the master lacks.

Invariants: blocks do not overlap; the dead ranges of a block are disjoint, ascend, and do not
touch; a block without a living message is not in the index.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from convoymq.model.errors import PeerError
from convoymq.queues.classic.runs import Place


class Kept:
    """A block of the copy."""

    __slots__ = ("count", "dead", "live", "place", "position", "time_ms", "written")

    def __init__(
        self, position: int, count: int, place: Place, time_ms: int, written: list[bool]
    ) -> None:
        self.position = position
        self.count = count
        self.live = count
        self.place = place
        self.time_ms = time_ms
        self.written = written
        """True once the flush is done that it went with: before that it cannot be read."""
        self.dead: list[tuple[int, int]] = []
        """Positions (first, last) that are settled."""

    def settle(self, first: int, last: int) -> int:
        """Notes that positions of the block are settled; returns how many were alive."""
        dead = self.dead
        low = bisect_left(dead, first, key=lambda each: each[1] + 1)
        high = bisect_right(dead, last, key=lambda each: each[0] - 1)
        for known_first, known_last in dead[low:high]:
            first, last = min(first, known_first), max(last, known_last)
        covered = sum(end - begin + 1 for begin, end in dead[low:high])
        dead[low:high] = [(first, last)]
        gone = last - first + 1 - covered
        self.live -= gone
        return gone

    def settled_within(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns the settled parts of a range."""
        low = bisect_left(self.dead, first, key=lambda each: each[1])
        found = []
        for begin, end in self.dead[low:]:
            if begin > last:
                break
            found.append((max(begin, first), min(end, last)))
        return found


class CopyIndex:
    """See the module text."""

    def __init__(self) -> None:
        self.messages = 0
        """Living messages."""
        self._blocks: dict[int, Kept] = {}
        #: Positions of the blocks, ascending; some are of blocks that are gone.
        self._order: list[int] = []
        #: No block that was ever added ends behind this position.
        self._end = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def has(self, position: int, count: int) -> bool:
        """Returns whether a block is here. Raises PeerError when it overlaps another one: a master
        never divides or joins what it has sent."""
        known = self._blocks.get(position)
        if known is not None and known.count == count:
            return True
        if position < self._end:
            for i in range(bisect_left(self._order, position + count) - 1, -1, -1):
                before = self._blocks.get(self._order[i])
                if before is None:
                    continue
                if before.position + before.count > position:
                    raise PeerError(
                        f"messages {position} to {position + count - 1} overlap "
                        f"{before.position} to {before.position + before.count - 1}"
                    )
                break
        return False

    def add(
        self, position: int, count: int, place: Place, time_ms: int, written: list[bool]
    ) -> None:
        """Adds a block that `has` did not find."""
        assert position not in self._blocks
        self._blocks[position] = Kept(position, count, place, time_ms, written)
        self.messages += count
        self._end = max(self._end, position + count)
        if not self._order or self._order[-1] < position:
            self._order.append(position)
        else:
            insort(self._order, position)

    def settle(self, first: int, last: int) -> tuple[int, list[tuple[int, int]]]:
        """Notes that positions are settled, whether they are here or not.

        Returns:
            How many were here, and (file of the log, how many of them) block by block.
        """
        gone = 0
        free: list[tuple[int, int]] = []
        order = self._order
        for i in range(max(bisect_right(order, first) - 1, 0), len(order)):
            if order[i] > last:
                break
            block = self._blocks.get(order[i])
            if block is None or block.position + block.count <= first:
                continue
            end = block.position + block.count - 1
            settled = block.settle(max(first, block.position), min(last, end))
            if settled:
                gone += settled
                free.append((block.place.file, settled))
            if not block.live:
                del self._blocks[block.position]
        self.messages -= gone
        if free and len(order) > 2 * len(self._blocks) + 1024:
            self._order = sorted(self._blocks)
        return gone, free

    def living(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns the parts of a range that are here and alive."""
        found: list[tuple[int, int]] = []
        for i in range(max(bisect_right(self._order, first) - 1, 0), len(self._order)):
            if self._order[i] > last:
                break
            block = self._blocks.get(self._order[i])
            if block is None:
                continue
            at, end = max(first, block.position), min(last, block.position + block.count - 1)
            for begin, over in block.settled_within(at, end):
                if at < begin:
                    found.append((at, begin - 1))
                at = over + 1
            if at <= end:
                found.append((at, end))
        return found

    def blocks_in(self, file: int) -> list[Kept]:
        """Returns the blocks that lie in a file of the log, oldest first. Cost: O(blocks)."""
        return [
            self._blocks[position]
            for position in self._order
            if position in self._blocks and self._blocks[position].place.file == file
        ]

    def check_invariants(self) -> None:
        """Asserts what the module text promises. Cost: O(blocks)."""
        end = 0
        messages = 0
        for position in sorted(self._blocks):
            block = self._blocks[position]
            assert position >= end, "blocks overlap"
            end = position + block.count
            dead = 0
            at = position - 1
            for first, last in block.dead:
                assert at < first <= last < end, "dead ranges overlap or touch"
                at = last + 1
                dead += last - first + 1
            assert block.live == block.count - dead > 0
            messages += block.live
        assert messages == self.messages
        assert set(self._blocks) <= set(self._order)
