# Bytes that grow, inlined into the kernels that fill them: the buffers of a columnar frame.
from libc.stdint cimport uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memset

from convoymq.kernels.bytes cimport put32

cdef struct Area:
    unsigned char* p
    Py_ssize_t end
    Py_ssize_t capacity

cdef inline int grow(Area* area, Py_ssize_t n) except -1:
    cdef Py_ssize_t capacity = max(area.end + n, area.capacity * 2, 256)
    cdef void* grown = realloc(area.p, capacity)
    if grown == NULL:
        raise MemoryError
    area.p = <unsigned char*>grown
    memset(area.p + area.capacity, 0, capacity - area.capacity)
    area.capacity = capacity
    return 0

# Makes room for n bytes at the end; fresh bytes are zeros.
cdef inline int reserve(Area* area, Py_ssize_t n) except -1:
    if area.end + n <= area.capacity:
        return 0
    return grow(area, n)

cdef inline int add(Area* area, const unsigned char* p, Py_ssize_t n) except -1:
    reserve(area, n)
    if n:
        memcpy(area.p + area.end, p, n)
    area.end += n
    return 0

# Appends an int32; the room was made before.
cdef inline void put_end(Area* area, Py_ssize_t end) noexcept:
    put32(area.p + area.end, <uint32_t>end)
    area.end += 4

# Sets bit i of a bitmap that has i bits so far.
cdef inline int put_bit(Area* area, Py_ssize_t i, bint bit) except -1:
    cdef int mask = 1 << (i & 7)
    cdef Py_ssize_t at = i >> 3
    if i & 7 == 0:
        reserve(area, 1)
        area.p[area.end] = 0
        area.end += 1
    if bit:
        area.p[at] |= mask
    else:
        area.p[at] &= 255 ^ mask
    return 0
