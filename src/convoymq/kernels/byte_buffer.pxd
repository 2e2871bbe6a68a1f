# Bytes that are appended at one end and taken at the other, inlined into the kernels that use them.
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove

cdef struct Buffer:
    unsigned char* p
    Py_ssize_t start
    Py_ssize_t end
    Py_ssize_t capacity

cdef enum:
    # What a buffer keeps of its memory while it is empty.
    IDLE_CAPACITY = 16 << 10

# Makes the buffer larger, or moves what it holds to its beginning.
cdef inline int grow(Buffer* b, Py_ssize_t n) except -1:
    cdef Py_ssize_t used
    if b.start > 0:
        used = b.end - b.start
        if used:
            memmove(b.p, b.p + b.start, used)
        b.start = 0
        b.end = used
        if b.end + n <= b.capacity:
            return 0
    cdef Py_ssize_t capacity = max(b.end + n, b.capacity * 2, 512)
    cdef void* grown = realloc(b.p, capacity)
    if grown == NULL:
        raise MemoryError
    b.p = <unsigned char*>grown
    b.capacity = capacity
    return 0

# Makes room for n bytes at the end.
cdef inline int reserve(Buffer* b, Py_ssize_t n) except -1:
    if b.end + n <= b.capacity:
        return 0
    return grow(b, n)

cdef inline int append(Buffer* b, const unsigned char* p, Py_ssize_t n) except -1:
    reserve(b, n)
    memcpy(b.p + b.end, p, n)
    b.end += n
    return 0

cdef inline void free_buffer(Buffer* b) noexcept:
    free(b.p)
    b.p = NULL
    b.start = 0
    b.end = 0
    b.capacity = 0
