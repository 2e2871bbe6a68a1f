from libc.stdint cimport uint32_t, uint64_t

from convoymq.kernels.bytes cimport get32
from convoymq.kernels.columns cimport AREAS

cdef class ColumnFrame:
    cdef readonly uint32_t columns
    cdef readonly Py_ssize_t rows
    cdef readonly uint64_t base
    cdef readonly uint64_t next
    cdef readonly Py_ssize_t value_max
    cdef object view
    cdef Py_buffer held
    cdef bint holding
    cdef unsigned char* body
    cdef Py_ssize_t at[AREAS]
    cdef Py_ssize_t length[AREAS]

    cdef int hold(self, object data) except? -1
    cdef int read(self, object data, Py_ssize_t body_max, bint sealed) except? -1
    cdef int check(self) except? -1
    cdef Py_ssize_t check_ends(self, int area, Py_ssize_t n, Py_ssize_t limit) except? -1
    cdef int check_validity(self, int area, Py_ssize_t n) except? -1

# Entry i of a buffer of offsets.
cdef inline Py_ssize_t ends_at(ColumnFrame frame, int area, Py_ssize_t i) noexcept:
    return get32(frame.body + frame.at[area] + 4 * i)

cdef inline bint is_null(ColumnFrame frame, int area, Py_ssize_t i) noexcept:
    if frame.length[area] == 0:
        return False
    return (frame.body + frame.at[area])[i >> 3] >> (i & 7) & 1 == 0

# Bytes that the body of a command with these rows cannot exceed. `fixed`: of every row.
cdef Py_ssize_t command_bound(ColumnFrame frame, Py_ssize_t first, Py_ssize_t count,
                              Py_ssize_t fixed) noexcept
