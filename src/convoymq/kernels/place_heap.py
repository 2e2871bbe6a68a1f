"""Runs of messages by their places in the log: a binary heap of packed items."""

from array import array

import cython
from cython.cimports.libc import stdlib
from cython.cimports.libc.stdint import uint64_t

_LOW = cython.declare(uint64_t, 0xFFFFFFFF)
_CAPACITY_MIN = cython.declare(cython.Py_ssize_t, 4)
_SPARE_MAX = cython.declare(cython.Py_ssize_t, 64)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _before(a: cython.pointer(Item), b: cython.pointer(Item)) -> cython.bint:
    return a.index < b.index or (a.index == b.index and a.place < b.place)


@cython.cclass
class PlaceHeap:
    def __cinit__(self):
        self.items = cython.NULL
        self.used = self.capacity = self.messages = 0

    def __dealloc__(self):
        stdlib.free(self.items)

    def __len__(self):
        return self.used

    @cython.cfunc
    @cython.exceptval(check=False)
    def _rise(self, at: cython.Py_ssize_t) -> cython.void:
        items: cython.pointer(Item) = self.items
        item: Item = items[at]
        above: cython.Py_ssize_t
        while at:
            above = (at - 1) >> 1
            if not _before(cython.address(item), items + above):
                break
            items[at] = items[above]
            at = above
        items[at] = item

    @cython.cfunc
    @cython.exceptval(check=False)
    def _sink(self) -> cython.void:
        """Moves the first item down to where it belongs."""
        items: cython.pointer(Item) = self.items
        item: Item = items[0]
        at: cython.Py_ssize_t = 0
        below: cython.Py_ssize_t = 1
        while below < self.used:
            if below + 1 < self.used and _before(items + below + 1, items + below):
                below += 1
            if not _before(items + below, cython.address(item)):
                break
            items[at] = items[below]
            at = below
            below = 2 * at + 1
        items[at] = item

    @cython.cfunc
    @cython.exceptval(check=False)
    def _pop(self) -> cython.void:
        self.used -= 1
        if self.used:
            self.items[0] = self.items[self.used]
            self._sink()
        elif self.capacity > _SPARE_MAX:
            stdlib.free(self.items)
            self.items = cython.NULL
            self.capacity = 0

    @cython.cfunc
    def _run(self, item: cython.pointer(Item)) -> tuple:
        return (
            item.index,
            item.place >> 32,
            item.place & _LOW,
            item.amount >> 32,
            item.amount & _LOW,
            item.counts >> 32,
            item.counts & _LOW,
            item.mark,
        )

    @cython.ccall
    def add(self, run: tuple):
        index: uint64_t = run[0]
        offset: uint64_t = run[1]
        first: uint64_t = run[2]
        count: uint64_t = run[3]
        size: uint64_t = run[4]
        acquired: uint64_t = run[5]
        failed: uint64_t = run[6]
        mark: uint64_t = run[7]
        if not count:
            raise ValueError("a run without messages")
        if self.used == self.capacity:
            wanted: cython.Py_ssize_t = max(self.capacity + (self.capacity >> 1), _CAPACITY_MIN)
            grown: cython.p_void = stdlib.realloc(self.items, wanted * cython.sizeof(Item))
            if grown == cython.NULL:
                raise MemoryError
            self.items = cython.cast(cython.pointer(Item), grown)
            self.capacity = wanted
        item: cython.pointer(Item) = self.items + self.used
        item.index = index
        item.place = offset << 32 | first
        item.amount = count << 32 | size
        item.counts = acquired << 32 | failed
        item.mark = mark
        self.used += 1
        self.messages += count
        self._rise(self.used - 1)

    @cython.ccall
    def head(self) -> tuple:
        return self._run(self.items) if self.used else None

    @cython.ccall
    def head_place(self) -> tuple:
        return (self.items[0].index, self.items[0].place) if self.used else None

    @cython.ccall
    def take(self, limit: uint64_t) -> tuple:
        if not self.used or not limit:
            raise ValueError("nothing is taken")
        made: Item = self.items[0]
        count: uint64_t = 0
        size: uint64_t = 0
        own: uint64_t
        part: uint64_t
        left: uint64_t
        top: cython.pointer(Item)
        while self.used and count < limit:
            top = self.items
            own = top.amount >> 32
            part = top.amount & _LOW
            if count and (
                top.index != made.index
                or top.place != made.place + count
                or top.counts != made.counts
                or top.mark != made.mark
                or size + part > _LOW
            ):
                break
            if own > limit - count:
                left = own - (limit - count)
                part = part * (limit - count) // own
                top.place += own - left
                top.amount = left << 32 | ((top.amount & _LOW) - part)
                own -= left
            else:
                self._pop()
            count += own
            size += part
        self.messages -= count
        made.amount = count << 32 | size
        return self._run(cython.address(made))

    def runs(self):
        i: cython.Py_ssize_t
        made: list = []
        for i in range(self.used):
            made.append(self._run(self.items + i))
        made.sort()
        return made

    def indexes(self):
        i: cython.Py_ssize_t
        return [self.items[i].index for i in range(self.used)]

    def memory_bytes(self):
        return self.capacity * cython.sizeof(Item)

    def words(self):
        made = array("Q")
        for index, offset, first, count, size, acquired, failed, mark in self.runs():
            place_and_amount = (offset << 32 | first, count << 32 | size)
            made.extend((index, *place_and_amount, acquired << 32 | failed, mark))
        return made
