from libc.stdint cimport uint64_t

# A run: u32 pairs are packed, the first one in the upper half. place: offset, first; amount: count,
# size; counts: acquired, failed.
cdef struct Item:
    uint64_t index, place, amount, counts, mark

cdef class PlaceHeap:
    cdef Item* items
    cdef Py_ssize_t used, capacity
    cdef readonly Py_ssize_t messages

    cdef void _rise(self, Py_ssize_t at) noexcept
    cdef void _sink(self) noexcept
    cdef void _pop(self) noexcept
    cdef tuple _run(self, Item* item)
    cpdef add(self, tuple run)
    cpdef tuple head(self)
    cpdef tuple head_place(self)
    cpdef tuple take(self, uint64_t limit)
