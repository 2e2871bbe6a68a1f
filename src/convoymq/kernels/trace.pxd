from libc.stdint cimport int64_t, uint32_t

cdef class TraceRows:
    cdef int64_t* store
    cdef Py_ssize_t capacity
    cdef Py_ssize_t used
    cdef Py_ssize_t rows_max
    cdef bint muted
    cdef int64_t ordinal
    cdef int64_t now_index
    cdef int64_t now_term
    cdef int64_t now_us
    cdef public int64_t skip_through
    cdef public uint32_t logical
    cdef public uint32_t seed
    cdef public int64_t lost
    cdef public int64_t index
    cdef public object on_full
    cdef public object on_restored

    cdef Py_ssize_t row(self) except -1
    cdef void grow(self) noexcept
