# cython: annotation_typing=False
"""Chunks of a stream: their places in the log, found by offset and by time.

A chunk is an ENQUEUE command; its records have consecutive stream offsets. An *index range* is a
row of chunks in consecutive entries of commands, with nothing between them that looks like a chunk
and is none (a repeat that was dropped): who reads it takes every ENQUEUE from the index range's
first one on, until its offsets are used up. So the index needs one line per index range, not per
chunk, and a stream of single published messages costs no more memory than one of large batches.

Five words an index range: entry index; command offset · first record; first stream offset; body
bytes; time of the first entry in ms. Offsets and times ascend (times may be equal), so both are
found by bisection; a time is exact after a look into the index range's entries (`reader`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from convoymq.model.words import words_from_bytes, words_to_bytes

LOW = 0xFFFFFFFF

#: An index range ends behind the chunk that fills one of these.
INDEX_RANGE_BYTES = 64 << 10
INDEX_RANGE_MESSAGES = 8192
INDEX_RANGE_ENTRIES = 256

FIELDS = 5


class ChunkIndex:
    """The index ranges of one stream, oldest first."""

    __slots__ = ("indexes", "offsets", "places", "sizes", "times")

    def __init__(self) -> None:
        self.indexes: array[int] = array("Q")
        self.places: array[int] = array("Q")
        self.offsets: array[int] = array("Q")
        self.sizes: array[int] = array("Q")
        self.times: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self.offsets)

    def continues(self, index: int, offset: int) -> bool:
        """Returns whether a chunk of entry `index` with first stream offset `offset`, which stands
        right behind the last index range, belongs to it."""
        return (
            len(self.offsets) > 0
            and self.sizes[-1] < INDEX_RANGE_BYTES
            and offset - self.offsets[-1] < INDEX_RANGE_MESSAGES
            and index - self.indexes[-1] < INDEX_RANGE_ENTRIES
        )

    def grow(self, size: int) -> None:
        """The last index range gets another chunk of `size` body bytes."""
        self.sizes[-1] += size

    def begin(
        self, index: int, command: int, first: int, offset: int, size: int, time_ms: int
    ) -> None:
        """A chunk opens an index range: records from `first` on of the ENQUEUE at `command`."""
        self.indexes.append(index)
        self.places.append(command << 32 | first)
        self.offsets.append(offset)
        self.sizes.append(size)
        self.times.append(time_ms)

    def find(self, offset: int) -> int:
        """Returns the position of the index range that holds an offset, which must be kept."""
        return bisect_right(self.offsets, offset) - 1

    def before(self, time_ms: int) -> int:
        """Returns the position of the last index range that began before a time; -1 when none
        did."""
        return bisect_left(self.times, time_ms) - 1

    def row(self, position: int) -> tuple[int, int, int, int]:
        """Returns (entry index, command offset, first record, first stream offset) of an index
        range."""
        place = self.places[position]
        return (self.indexes[position], place >> 32, place & LOW, self.offsets[position])

    def part(self, first: int, end: int) -> ChunkIndex:
        """Returns a copy of the index ranges at positions [first, end)."""
        made = ChunkIndex()
        parts = [words[first:end] for words in self._columns()]
        made.indexes, made.places, made.offsets, made.sizes, made.times = parts
        return made

    def drop_before(self, offset: int) -> None:
        """Forgets the index ranges below an offset at which one begins, or which ends the last."""
        count = bisect_left(self.offsets, offset)
        for words in (self.indexes, self.places, self.offsets, self.sizes, self.times):
            del words[:count]

    def memory_bytes(self) -> int:
        """Returns the number of bytes that the words take."""
        return 8 * FIELDS * len(self.offsets)

    def pack(self) -> list[bytes]:
        """Returns the words, little-endian: equal for equal content."""
        return [words_to_bytes(words) for words in self._columns()]

    def unpack(self, columns: list[bytes]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        if len(columns) != FIELDS or len({len(column) for column in columns}) != 1:
            raise ValueError("packed chunks: columns of different lengths")
        made = [words_from_bytes(column, 1) for column in columns]
        self.indexes, self.places, self.offsets, self.sizes, self.times = made

    def _columns(self) -> tuple[array[int], ...]:
        return (self.indexes, self.places, self.offsets, self.sizes, self.times)
