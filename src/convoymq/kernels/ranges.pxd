# Ranges of numbers, gathered in the order in which they end; inlined into the kernels that gather.
from libc.stdint cimport uint64_t
from libc.stdlib cimport realloc

cdef struct Ranges:
    uint64_t* pairs
    Py_ssize_t count
    Py_ssize_t capacity
    bint unsorted

cdef inline int grow_ranges(Ranges* r) except -1:
    cdef Py_ssize_t capacity = max(4, r.capacity * 2)
    cdef void* grown = realloc(r.pairs, capacity * 16)
    if grown == NULL:
        raise MemoryError
    r.pairs = <uint64_t*>grown
    r.capacity = capacity
    return 0

# Adds [first, last]; it joins the range that was added last when it follows it.
cdef inline int add_range(Ranges* r, uint64_t first, uint64_t last) except -1:
    if r.count:
        if first == r.pairs[2 * r.count - 1] + 1:
            r.pairs[2 * r.count - 1] = last
            return 0
        if first <= r.pairs[2 * r.count - 1]:
            r.unsorted = True
    if r.count == r.capacity:
        grow_ranges(r)
    r.pairs[2 * r.count] = first
    r.pairs[2 * r.count + 1] = last
    r.count += 1
    return 0
