# cython: annotation_typing=False
"""Runs that wait for a time, packed, in the order of their times and then of the log.

A run is as in `runs`. It costs 48 bytes: due · index · offset, first · count, size ·
acquired_count, failed_delivery_count · mark. Rows lie in chunks of at most CHUNK_ROWS, so that one
can be put in, or taken out, anywhere without moving all that lie behind it.

Invariants: keys (due, index, offset and first record) ascend; no chunk is empty. Where chunks end
is no part of the state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from convoymq.model.words import words_from_bytes, words_to_bytes
from convoymq.queues.quorum.runs import LOW, Run

STRIDE = 6
CHUNK_ROWS = 256
CHUNK_WORDS = CHUNK_ROWS * STRIDE

Key = tuple[int, int, int]
"""(due ms, entry index, offset above first record)"""


class Waiting:
    """See the module docstring."""

    __slots__ = ("_chunks", "messages", "size")

    def __init__(self) -> None:
        self._chunks: list[array[int]] = []
        self.messages = 0
        self.size = 0

    # ---------------------------------------------------------------- in

    def add(self, due_ms: int, run: Run) -> None:
        """Takes a run in. Cost: O(log runs), and a move of at most a chunk."""
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        assert count > 0, "nothing waits"
        place = offset << 32 | first
        self.messages += count
        self.size += size
        row = array("Q", (due_ms, index, place, count << 32 | size))
        row.append(acquired_count << 32 | failed_delivery_count)
        row.append(mark)
        chunks = self._chunks
        key = (due_ms, index, place)
        at = self._chunk_of(key)
        if at == len(chunks):
            # Behind all others: most often it is so.
            if chunks and len(chunks[-1]) < CHUNK_WORDS:
                chunks[-1].extend(row)
            else:
                chunks.append(row)
            return
        chunk = chunks[at]
        place_in = self._row_of(chunk, key)
        chunk[place_in:place_in] = row
        if len(chunk) > CHUNK_WORDS:
            middle = CHUNK_ROWS // 2 * STRIDE
            chunks.insert(at + 1, chunk[middle:])
            del chunk[middle:]

    def _chunk_of(self, key: Key) -> int:
        """Returns the first chunk whose last row is not below a key; the number of chunks = there
        is none."""
        chunks = self._chunks
        low, high = 0, len(chunks)
        if high and _key_at(chunks[-1], len(chunks[-1]) - STRIDE) < key:
            return high
        while low < high:
            middle = (low + high) // 2
            chunk = chunks[middle]
            if _key_at(chunk, len(chunk) - STRIDE) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def _row_of(self, chunk: array[int], key: Key) -> int:
        """Returns the first row of a chunk that is not below a key."""
        low, high = 0, len(chunk) // STRIDE
        while low < high:
            middle = (low + high) // 2
            if _key_at(chunk, middle * STRIDE) < key:
                low = middle + 1
            else:
                high = middle
        return low * STRIDE

    # ---------------------------------------------------------------- out

    def first_due_ms(self) -> int:
        """Returns when the first run is due; 0 = nothing waits."""
        return self._chunks[0][0] if self._chunks else 0

    def take_due(self, now_ms: int, runs_max: int) -> list[Run]:
        """Takes out what is due, in order: at most `runs_max` runs."""
        taken: list[Run] = []
        chunks = self._chunks
        done = 0
        while done < len(chunks) and len(taken) < runs_max:
            chunk = chunks[done]
            at = 0
            while at < len(chunk) and chunk[at] <= now_ms and len(taken) < runs_max:
                taken.append(_run_at(chunk, at))
                at += STRIDE
            if at < len(chunk):
                del chunk[:at]
                break
            done += 1
        del chunks[:done]
        for run in taken:
            self.messages -= run[3]
            self.size -= run[4]
        return taken

    def take(self, limit: int) -> Run:
        """Takes out at most `limit` messages of the run that is due first. There must be one."""
        assert limit > 0
        chunk = self._chunks[0]
        due_ms, run = chunk[0], _run_at(chunk, 0)
        return self._cut(0, 0, due_ms, run, run[2], min(limit, run[3]))

    def remove(self, due_ms: int, index: int, offset: int, record: int) -> Run | None:
        """Takes one message out; None = it does not wait for that time."""
        chunks = self._chunks
        key = (due_ms, index, (offset << 32 | record) + 1)
        chunk_at = self._chunk_of(key)
        at = self._row_of(chunks[chunk_at], key) if chunk_at < len(chunks) else 0
        # The run that holds it begins before the key.
        if at == 0:
            chunk_at -= 1
            if chunk_at < 0:
                return None
            at = len(chunks[chunk_at])
        at -= STRIDE
        chunk = chunks[chunk_at]
        run = _run_at(chunk, at)
        if chunk[at] != due_ms or run[:2] != (index, offset) or record >= run[2] + run[3]:
            return None
        return self._cut(chunk_at, at, due_ms, run, record, 1)

    def _cut(self, chunk_at: int, at: int, due_ms: int, run: Run, record: int, count: int) -> Run:
        """Takes records [record, record + count) out of the run at a place."""
        index, offset, first, whole, size = run[:5]
        before = record - first
        behind = whole - before - count
        assert before >= 0, "a message before the run is taken out"
        assert behind >= 0, "a message behind the run is taken out"
        low = size * before // whole
        high = size * (before + count) // whole
        kept = array("Q")
        rest = ((first, before, low), (record + count, behind, size - high))
        counts = run[5] << 32 | run[6]
        for start, left, bytes_left in rest:
            if left:
                place = offset << 32 | start
                kept.extend((due_ms, index, place, left << 32 | bytes_left, counts, run[7]))
        chunk = self._chunks[chunk_at]
        chunk[at : at + STRIDE] = kept
        if not chunk:
            del self._chunks[chunk_at]
        self.messages -= count
        self.size -= high - low
        return (index, offset, record, count, high - low, run[5], run[6], run[7])

    def clear(self) -> None:
        """Drops everything."""
        self._chunks.clear()
        self.messages = 0
        self.size = 0

    # ---------------------------------------------------------------- looking at it

    def rows(self, after: Key = (0, 0, 0)) -> Iterator[tuple[int, Run]]:
        """Yields (due, run) of all that waits from a key on, in order."""
        chunks = self._chunks
        chunk_at = self._chunk_of(after)
        for i in range(chunk_at, len(chunks)):
            chunk = chunks[i]
            start = self._row_of(chunk, after) if i == chunk_at else 0
            for at in range(start, len(chunk), STRIDE):
                yield chunk[at], _run_at(chunk, at)

    def runs(self) -> list[Run]:
        """Returns all that waits, in order. Cost: O(runs)."""
        return [run for _, run in self.rows()]

    def indexes(self) -> list[int]:
        """Returns the entry index of every run."""
        return [index for chunk in self._chunks for index in chunk[1::STRIDE]]

    def first_index(self) -> int:
        """Returns the entry index of the run that is due first. Something must wait."""
        return self._chunks[0][1]

    def run_count(self) -> int:
        """Returns the number of runs."""
        return sum(len(chunk) for chunk in self._chunks) // STRIDE

    def memory_bytes(self) -> int:
        """Returns the number of bytes that the packed words take."""
        return sum(len(chunk) for chunk in self._chunks) * 8

    def pack(self) -> bytes:
        """Returns the packed rows, little-endian: equal for equal content."""
        return b"".join(words_to_bytes(chunk) for chunk in self._chunks)

    def unpack(self, data: bytes) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        words = words_from_bytes(data, STRIDE)
        self.clear()
        for start in range(0, len(words), CHUNK_WORDS):
            self._chunks.append(words[start : start + CHUNK_WORDS])
        last: Key = (0, 0, 0)
        for due_ms, run in self.rows():
            key = (due_ms, run[0], run[1] << 32 | run[2])
            if run[3] == 0 or key <= last:
                raise ValueError("packed runs that wait: empty, or out of order")
            last = key
            self.messages += run[3]
            self.size += run[4]


def _key_at(chunk: array[int], at: int) -> Key:
    return chunk[at], chunk[at + 1], chunk[at + 2]


def _run_at(chunk: array[int], at: int) -> Run:
    place = chunk[at + 2]
    amount = chunk[at + 3]
    counts = chunk[at + 4]
    return (
        chunk[at + 1],
        place >> 32,
        place & LOW,
        amount >> 32,
        amount & LOW,
        counts >> 32,
        counts & LOW,
        chunk[at + 5],
    )
