# cython: annotation_typing=False
"""Runs: ranges of consecutive messages of one ENQUEUE command that share a fate.

A run is a tuple (index, offset, first, count, size, acquired_count, failed_delivery_count, mark):
records [first, first + count) of the ENQUEUE command at byte `offset` of entry `index`, their body
bytes in sum, how often they were handed out before, how many of those times count as failed, and
when they are due and at which level (`marks`; 0 = never, and the default). Containers keep runs
packed in 64-bit words: a run costs 24 bytes while it is ready, 32 when it came back and 40 while it
is checked out; there is no Python object per run, and none per message. A container that gets a run
with a mark has one more word for every run, the last, until it is empty.

When a run is cut, its bytes are divided in proportion to the messages, so parts always add up to
the whole; with equal body sizes the division is exact.

Invariants: count > 0 everywhere; ids of a `CheckedOut` ascend and do not overlap.
"""

from __future__ import annotations

from array import array
from collections import deque

from convoymq.model.words import words_from_bytes, words_to_bytes

#: (index, offset, first, count, size, acquired_count, failed_delivery_count, mark)
Run = tuple[int, int, int, int, int, int, int, int]

LOW = 0xFFFFFFFF
#: Free words in front from which on the words move down; spare words that an empty container keeps.
COMPACT_WORDS = 1024
SPARE_WORDS_MAX = 1024
#: Least growth of a container; a multiple of every run size.
GROW_WORDS_MIN = 60
#: Stands in front of packed runs that have marks; no entry index and no message id.
MARKED = b"\xff" * 8


def room_for(words: array[int], end: int, needed: int) -> None:
    """Makes words[end : end + needed] exist. Cost: amortised O(needed), at most 1/8 of it spare."""
    missing = end + needed - len(words)
    if missing > 0:
        words.frombytes(bytes(8 * max(missing, GROW_WORDS_MIN, end >> 3)))


def widened(words: array[int], head: int, end: int, stride: int) -> array[int]:
    """Words [head, end) of runs of `stride` words, with one more word for each run: 0. Cost:
    O(runs), without an object per run."""
    wide: array[int] = array("Q", bytes(8 * ((end - head) // stride * (stride + 1))))
    for column in range(stride):
        wide[column :: stride + 1] = words[head + column : end : stride]
    return wide


class PackedRuns:
    """Runs packed in words: what the containers share. A run has `stride` words, and one more for
    its mark once any has one."""

    __slots__ = ("_end", "_head", "_marked", "_stride", "_words", "messages", "size")

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._marked = False
        self._words: array[int] = array("Q")
        self._head = 0
        self._end = 0
        self.messages = 0
        self.size = 0

    def _widen(self) -> None:
        """From now on every run has a mark."""
        self._words = widened(self._words, self._head, self._end, self._stride)
        self._head = 0
        self._end = len(self._words)
        self._stride += 1
        self._marked = True

    def _narrow(self) -> None:
        """An empty container has no marks."""
        if self._marked:
            self._marked = False
            self._stride -= 1

    def _tidy(self) -> None:
        """Gives back words in front, once they are the larger part."""
        head = self._head
        if head == self._end:
            self._head = 0
            self._end = 0
            self._narrow()
            if len(self._words) > SPARE_WORDS_MAX:
                self._words = array("Q")
        elif head >= COMPACT_WORDS and head * 2 >= self._end:
            del self._words[:head]
            self._end -= head
            self._head = 0

    def clear(self) -> None:
        """Drops everything."""
        self._words = array("Q")
        self._head = 0
        self._end = 0
        self._narrow()
        self.messages = 0
        self.size = 0

    def run_count(self) -> int:
        """Returns the number of runs."""
        return (self._end - self._head) // self._stride

    def memory_bytes(self) -> int:
        """Returns the number of bytes that the packed words take."""
        return len(self._words) * 8

    def pack(self) -> bytes:
        """Returns the packed words, little-endian: equal for equal content. Runs with marks stand
        behind MARKED."""
        packed = words_to_bytes(self._words[self._head : self._end])
        return MARKED + packed if self._marked else packed

    def _unpack(self, data: bytes, amount: int) -> None:
        """Replaces the content by that of `pack`; the word `amount` of a run has its messages and
        body bytes. Raises ValueError."""
        self._narrow()
        if data[:8] == MARKED:
            data = data[8:]
            self._marked = True
            self._stride += 1
        self._words = words_from_bytes(data, self._stride)
        self._head = 0
        self._end = len(self._words)
        self.messages = 0
        self.size = 0
        for word in self._words[amount :: self._stride]:
            if word >> 32 == 0:
                raise ValueError("packed runs: an empty run")
            self.messages += word >> 32
            self.size += word & LOW


class Fifo(PackedRuns):
    """A first-in first-out queue of runs.

    With `counted` the runs keep their counts (32 bytes a run); without, every run is fresh, that is
    both counts are 0 (24 bytes a run). Words: index · offset, first · count, size [·
    acquired_count, failed_delivery_count] [· mark].
    """

    __slots__ = ("counted",)

    def __init__(self, counted: bool) -> None:
        PackedRuns.__init__(self, 4 if counted else 3)
        self.counted = counted

    def push(
        self,
        index: int,
        offset: int,
        first: int,
        count: int,
        size: int,
        acquired_count: int,
        failed_delivery_count: int,
        mark: int = 0,
    ) -> None:
        """Appends a run; joins it to the last one when it continues it with the same counts."""
        assert count > 0
        if mark and not self._marked:
            self._widen()
        words = self._words
        end = self._end
        stride = self._stride
        self.messages += count
        self.size += size
        if self.counted:
            counts = acquired_count << 32 | failed_delivery_count
            if end > self._head:
                at = end - stride
                place = words[at + 1]
                amount = words[at + 2]
                if (
                    words[at] == index
                    and place >> 32 == offset
                    and (place & LOW) + (amount >> 32) == first
                    and words[at + 3] == counts
                    and (not self._marked or words[at + 4] == mark)
                ):
                    words[at + 2] = ((amount >> 32) + count) << 32 | ((amount & LOW) + size)
                    return
            room_for(words, end, stride)
            words[end + 3] = counts
        else:
            assert acquired_count == 0
            assert failed_delivery_count == 0
            room_for(words, end, stride)
        words[end] = index
        words[end + 1] = offset << 32 | first
        words[end + 2] = count << 32 | size
        if self._marked:
            words[end + stride - 1] = mark
        self._end = end + stride

    def push_front(self, run: Run) -> None:
        """Puts a run in front of all others. Of a queue whose runs keep their counts. Cost:
        amortised O(1)."""
        assert self.counted
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        if mark and not self._marked:
            self._widen()
        if self._head < self._stride:
            spare = self._stride * (GROW_WORDS_MIN + (self._end - self._head) // 8)
            self._words = array("Q", bytes(8 * spare)) + self._words[self._head : self._end]
            self._end += spare - self._head
            self._head = spare
        at = self._head = self._head - self._stride
        words = self._words
        words[at] = index
        words[at + 1] = offset << 32 | first
        words[at + 2] = count << 32 | size
        words[at + 3] = acquired_count << 32 | failed_delivery_count
        if self._marked:
            words[at + 4] = mark
        self.messages += count
        self.size += size

    def head_place(self) -> tuple[int, int]:
        """Returns (entry index, offset above record) of the oldest message. The queue must not be
        empty."""
        assert self._head < self._end
        return self._words[self._head], self._words[self._head + 1]

    @property
    def has_marks(self) -> bool:
        """Returns whether some run may have a mark."""
        return self._marked

    def head_mark(self) -> int:
        """Returns the mark of the oldest run; 0 as well when there is none."""
        if not self._marked or self._head == self._end:
            return 0
        return self._words[self._head + self._stride - 1]

    def head_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the oldest run. The queue must not be empty."""
        assert self._head < self._end
        amount = self._words[self._head + 2]
        return amount >> 32, amount & LOW

    def take(self, limit: int) -> Run:
        """Removes at most `limit` messages from the head run. The queue must not be empty."""
        words = self._words
        at = self._head
        assert limit > 0
        assert at < self._end
        place = words[at + 1]
        amount = words[at + 2]
        count = amount >> 32
        size = amount & LOW
        acquired_count = 0
        failed_delivery_count = 0
        if self.counted:
            counts = words[at + 3]
            acquired_count = counts >> 32
            failed_delivery_count = counts & LOW
        index = words[at]
        mark = words[at + self._stride - 1] if self._marked else 0
        if count <= limit:
            self._head = at + self._stride
            self._tidy()
        else:
            part = size * limit // count
            words[at + 1] = place + limit
            words[at + 2] = (count - limit) << 32 | (size - part)
            count = limit
            size = part
        self.messages -= count
        self.size -= size
        return (
            index,
            place >> 32,
            place & LOW,
            count,
            size,
            acquired_count,
            failed_delivery_count,
            mark,
        )

    def words(self) -> tuple[array[int], int]:
        """Returns a copy of the packed words, and how many of them a run has."""
        return self._words[self._head : self._end], self._stride

    def replace(self, words: array[int], messages: int, size: int) -> None:
        """Takes other words of the same form; `messages` and `size` are what they add up to."""
        self._words = words
        self._head = 0
        self._end = len(words)
        self.messages = messages
        self.size = size
        self._tidy()

    def runs(self) -> list[Run]:
        """Returns all runs, oldest first. Cost: O(runs); for tests, tools and invariants."""
        return [self._run(at) for at in range(self._head, self._end, self._stride)]

    def indexes(self) -> list[int]:
        """Returns the entry index of every run, oldest first."""
        return list(self._words[self._head : self._end : self._stride])

    def runs_from(
        self, index: int, offset: int, record: int, limit: int, runs_max: int
    ) -> list[Run]:
        """Whole runs, in the order of the log, that hold messages at or behind a place: at least
        `limit` of these, or all, or `runs_max` runs. Only for queues whose runs lie in that order.
        Cost: O(log runs) + O(runs listed)."""
        words = self._words
        stride = self._stride
        low = 0
        high = (self._end - self._head) // stride
        while low < high:
            middle = (low + high) // 2
            at = self._head + middle * stride
            place = words[at + 1]
            last = (place & LOW) + (words[at + 2] >> 32) - 1
            if (words[at], place >> 32, last) < (index, offset, record):
                low = middle + 1
            else:
                high = middle
        made: list[Run] = []
        listed = 0
        at = self._head + low * stride
        while at < self._end and listed < limit and len(made) < runs_max:
            place = words[at + 1]
            if words[at] == index and place >> 32 == offset and record > place & LOW:
                listed -= record - (place & LOW)
            made.append(self._run(at))
            listed += words[at + 2] >> 32
            at += stride
        return made

    def runs_after(self, index: int, offset: int, record: int, runs_max: int) -> list[Run]:
        """As `runs_from`, for queues whose runs lie in any order: the first `runs_max` of them in
        the order of the log. Cost: O(runs log runs), of packed words."""
        words = self._words
        found = []
        for at in range(self._head, self._end, self._stride):
            entry = words[at]
            place = words[at + 1]
            last = (place & LOW) + (words[at + 2] >> 32) - 1
            if entry > index or (
                entry == index
                and (place >> 32 > offset or (place >> 32 == offset and last >= record))
            ):
                found.append((entry, place, at))
        found.sort()
        return [self._run(at) for _, _, at in found[:runs_max]]

    def _run(self, at: int) -> Run:
        words = self._words
        place = words[at + 1]
        amount = words[at + 2]
        counts = words[at + 3] if self.counted else 0
        return (
            words[at],
            place >> 32,
            place & LOW,
            amount >> 32,
            amount & LOW,
            counts >> 32,
            counts & LOW,
            words[at + self._stride - 1] if self._marked else 0,
        )

    def first_index(self) -> int:
        """Returns the entry index of the oldest run. The queue must not be empty."""
        assert self._head < self._end
        return self._words[self._head]

    def last_index(self) -> int:
        """Returns the entry index of the youngest run. The queue must not be empty."""
        assert self._head < self._end
        return self._words[self._end - self._stride]

    def unpack(self, data: bytes) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self._unpack(data, 2)


class Tail(Fifo):
    """Runs that came back to the tail of a queue.

    A group of them knows how many fresh messages had ever entered the queue when it came back: its
    turn comes when so many have left their FIFO.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        Fifo.__init__(self, True)
        #: [fresh messages before it, messages], in the order of their turns.
        self._groups: deque[list[int]] = deque()

    def requeue(
        self,
        entered: int,
        index: int,
        offset: int,
        first: int,
        count: int,
        size: int,
        acquired_count: int,
        failed_delivery_count: int,
        mark: int = 0,
    ) -> None:
        """Appends a run, when `entered` fresh messages have entered the queue so far."""
        groups = self._groups
        if groups and groups[-1][0] == entered:
            groups[-1][1] += count
        else:
            assert not groups or groups[-1][0] < entered
            groups.append([entered, count])
        self.push(index, offset, first, count, size, acquired_count, failed_delivery_count, mark)

    def ahead(self, left: int) -> int:
        """Returns how many fresh messages come before the head run, when `left` have left their
        FIFO."""
        before: int = self._groups[0][0]
        return before - left if before > left else 0

    def together(self) -> int:
        """Returns how many messages have their turn with the head run."""
        return self._groups[0][1]

    def groups(self) -> list[tuple[int, int]]:
        """Returns (fresh messages that ever entered before it, messages) of each group, in turn."""
        return [(entered, count) for entered, count in self._groups]

    def regroup(self, groups: list[tuple[int, int]]) -> None:
        """Takes other groups, when the runs were replaced."""
        self._groups = deque([entered, count] for entered, count in groups)

    def take(self, limit: int) -> Run:
        """As of `Fifo`, within the head group."""
        group = self._groups[0]
        run = Fifo.take(self, min(limit, group[1]))
        group[1] -= run[3]
        if not group[1]:
            self._groups.popleft()
        return run

    def clear(self) -> None:
        """Drops everything."""
        Fifo.clear(self)
        self._groups.clear()

    def pack_tail(self) -> tuple[bytes, list[list[int]]]:
        """Plain values: the packed runs, and the groups."""
        return self.pack(), [list(group) for group in self._groups]

    def unpack_tail(self, packed: tuple[bytes, list[list[int]]]) -> None:
        """Replaces the content by that of `pack_tail`. Raises ValueError."""
        self.unpack(packed[0])
        self._groups = deque([entered, count] for entered, count in packed[1])
        if sum(group[1] for group in self._groups) != self.messages:
            raise ValueError("packed runs: groups of the tail do not add up")


class CheckedOut(PackedRuns):
    """Messages that one consumer holds, by message id.

    Words: first message id · index · offset, first · count, size · acquired_count,
    failed_delivery_count [· mark].
    """

    __slots__ = ()

    def __init__(self) -> None:
        PackedRuns.__init__(self, 5)

    def add(
        self,
        message_id: int,
        index: int,
        offset: int,
        first: int,
        count: int,
        size: int,
        acquired_count: int,
        failed_delivery_count: int,
        mark: int = 0,
    ) -> None:
        """Appends a run under ids that follow all that are held."""
        assert count > 0
        if mark and not self._marked:
            self._widen()
        words = self._words
        end = self._end
        counts = acquired_count << 32 | failed_delivery_count
        self.messages += count
        self.size += size
        if end > self._head:
            at = end - self._stride
            place = words[at + 2]
            amount = words[at + 3]
            held = amount >> 32
            assert words[at] + held <= message_id
            if (
                words[at] + held == message_id
                and words[at + 1] == index
                and place >> 32 == offset
                and (place & LOW) + held == first
                and words[at + 4] == counts
                and (not self._marked or words[at + 5] == mark)
            ):
                words[at + 3] = (held + count) << 32 | ((amount & LOW) + size)
                return
        room_for(words, end, self._stride)
        words[end] = message_id
        words[end + 1] = index
        words[end + 2] = offset << 32 | first
        words[end + 3] = count << 32 | size
        words[end + 4] = counts
        if self._marked:
            words[end + 5] = mark
        self._end = end + self._stride

    def take_from(
        self, source: Fifo, message_id: int, limit: int, runs_max: int
    ) -> tuple[int, int, int]:
        """Moves at most `limit` messages in `runs_max` runs from the front of a queue, under ids
        from `message_id` on. Returns (messages, runs, messages that were handed out before)."""
        taken = 0
        moved = 0
        again = 0
        while taken < limit and moved < runs_max and source.messages:
            run = source.take(limit - taken)
            self.add(message_id + taken, *run)
            taken += run[3]
            if run[5]:
                again += run[3]
            moved += 1
        return taken, moved, again

    def _find(self, message_id: int) -> int:
        """Returns the position of the first run whose last id is not below `message_id`."""
        words = self._words
        head = self._head
        if head >= self._end or words[head] + (words[head + 3] >> 32) > message_id:
            return head
        low = 0
        stride = self._stride
        high = (self._end - head) // stride
        while low < high:
            middle = (low + high) // 2
            at = head + middle * stride
            if words[at] + (words[at + 3] >> 32) > message_id:
                high = middle
            else:
                low = middle + 1
        return head + low * stride

    def remove(self, first_id: int, last_id: int) -> list[Run]:
        """Removes the messages with ids first_id … last_id (inclusive) that are held; ascending.

        Cost: O(runs removed), plus a move of the words behind them unless they are the oldest.
        """
        assert first_id <= last_id
        words = self._words
        start = self._find(first_id)
        at = start
        end = self._end
        removed: list[Run] = []
        kept: list[int] = []
        marked = self._marked
        mark = 0
        while at < end and words[at] <= last_id:
            run_id = words[at]
            index = words[at + 1]
            place = words[at + 2]
            amount = words[at + 3]
            counts = words[at + 4]
            count = amount >> 32
            size = amount & LOW
            if marked:
                mark = words[at + 5]
            if run_id < first_id:
                part = first_id - run_id
                part_size = size * part // count
                kept += [run_id, index, place, part << 32 | part_size, counts]
                if marked:
                    kept.append(mark)
                run_id = first_id
                place += part
                count -= part
                size -= part_size
            if run_id + count - 1 > last_id:
                taken = last_id - run_id + 1
                part_size = size * taken // count
                right = (count - taken) << 32 | (size - part_size)
                kept += [run_id + taken, index, place + taken, right, counts]
                count = taken
                size = part_size
                if marked:
                    kept.append(mark)
            removed.append(
                (index, place >> 32, place & LOW, count, size, counts >> 32, counts & LOW, mark)
            )
            self.messages -= count
            self.size -= size
            at += self._stride
        if at == start:
            return removed
        spare = at - start - len(kept)
        if start == self._head and spare >= 0:
            # The oldest go first nearly always: move the head instead of the words.
            start += spare
            for i in range(len(kept)):
                words[start + i] = kept[i]
            self._head = start
            self._tidy()
        else:
            words[start:at] = array("Q", kept)
            self._end -= spare
        return removed

    def between(self, first_id: int, end_id: int, runs_max: int) -> list[tuple[int, Run]]:
        """Returns (first id, run) of the messages with ids first_id … end_id - 1, cut to them; at
        most `runs_max` runs. Cost: O(log runs) + O(runs listed)."""
        made: list[tuple[int, Run]] = []
        if first_id >= end_id:
            return made
        words = self._words
        at = self._find(first_id)
        while at < self._end and words[at] < end_id and len(made) < runs_max:
            run_id = words[at]
            place = words[at + 2]
            amount = words[at + 3]
            counts = words[at + 4]
            count = amount >> 32
            size = amount & LOW
            skip = first_id - run_id if first_id > run_id else 0
            kept = min(count, end_id - run_id) - skip
            part = size * (skip + kept) // count - size * skip // count
            made.append(
                (
                    run_id + skip,
                    (
                        words[at + 1],
                        place >> 32,
                        (place & LOW) + skip,
                        kept,
                        part,
                        counts >> 32,
                        counts & LOW,
                        self._mark(at),
                    ),
                )
            )
            at += self._stride
        return made

    def drop_oldest(self, last_id: int) -> tuple[int, int]:
        """Removes the messages with ids up to `last_id`; returns (messages, body bytes). Cost:
        O(runs removed), without an object per run."""
        words = self._words
        at = self._head
        end = self._end
        messages = 0
        dropped = 0
        while at < end and words[at] <= last_id:
            run_id = words[at]
            amount = words[at + 3]
            count = amount >> 32
            size = amount & LOW
            if run_id + count - 1 > last_id:
                part = last_id - run_id + 1
                part_size = size * part // count
                words[at] = last_id + 1
                words[at + 2] = words[at + 2] + part
                words[at + 3] = (count - part) << 32 | (size - part_size)
                messages += part
                dropped += part_size
                break
            messages += count
            dropped += size
            at += self._stride
        self._head = at
        self._tidy()
        self.messages -= messages
        self.size -= dropped
        return messages, dropped

    def remove_all(self) -> list[Run]:
        """Removes everything, ascending."""
        removed = [run for _, run in self.held()]
        self.clear()
        return removed

    def held(self) -> list[tuple[int, Run]]:
        """Returns (first id, run) of all that is held, ascending."""
        return self.held_from(0)

    def _mark(self, at: int) -> int:
        """Returns the mark of the run at a position."""
        return self._words[at + 5] if self._marked else 0

    def held_from(self, message_id: int) -> list[tuple[int, Run]]:
        """As `held`, from a message id on; a run that begins before it is cut."""
        words = self._words
        made: list[tuple[int, Run]] = []
        for at in range(self._find(message_id), self._end, self._stride):
            skip = max(0, message_id - words[at])
            place = words[at + 2] + skip
            count = (words[at + 3] >> 32) - skip
            size = (words[at + 3] & LOW) * count // (count + skip)
            counts = words[at + 4]
            run = (
                words[at + 1],
                place >> 32,
                place & LOW,
                count,
                size,
                counts >> 32,
                counts & LOW,
                self._mark(at),
            )
            made.append((words[at] + skip, run))
        return made

    def first_id(self) -> int:
        """Returns the lowest message id that is held. Something must be held."""
        assert self._head < self._end
        return self._words[self._head]

    def first_index(self) -> int:
        """Returns the entry index of the run that was held first. Something must be held."""
        assert self._head < self._end
        return self._words[self._head + 1]

    def indexes(self) -> list[int]:
        """Returns the entry index of every run held."""
        return list(self._words[self._head + 1 : self._end : self._stride])

    def unpack(self, data: bytes) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self._unpack(data, 3)
