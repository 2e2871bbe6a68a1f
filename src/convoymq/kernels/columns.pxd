from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "Python.h":
    char* PyOS_double_to_string(double value, char format, int precision, int flags, int* type) except NULL
    int Py_DTSF_ADD_DOT_0
    void PyMem_Free(void* p)

# Bytes that grow.
cdef struct Area:
    unsigned char* p
    Py_ssize_t end
    Py_ssize_t capacity

# A part of a message body, where it lies in its block.
cdef struct Piece:
    unsigned char* p
    Py_ssize_t n

# What a frame is made of: buffer i of the table, NULL for the value bytes of a writer.
cdef struct Source:
    unsigned char* p
    Py_ssize_t n

# A property inside a content header payload.
cdef struct Span:
    Py_ssize_t at
    Py_ssize_t n

cdef class ColumnWriter:
    cdef readonly uint32_t columns
    cdef readonly Py_ssize_t rows
    cdef readonly Py_ssize_t bytes
    cdef readonly bint full
    cdef Py_ssize_t max_rows
    cdef Py_ssize_t max_bytes
    cdef Py_ssize_t row_cost
    cdef uint64_t base
    cdef uint64_t expected
    cdef bint dense
    cdef bint key_nulls
    cdef bint header_nulls
    cdef bint text_nulls
    cdef Py_ssize_t entries
    cdef Py_ssize_t value_bytes
    cdef Area areas[23]
    cdef Piece* pieces
    cdef Py_ssize_t piece_count
    cdef Py_ssize_t piece_capacity
    cdef list blocks
    # the x-key of the row that is read
    cdef unsigned char* key
    cdef Py_ssize_t key_length

    cdef assembled(self, uint64_t next)
    cdef int reserve_rows(self, Py_ssize_t count) except? -1
    cdef int reserve_pieces(self, Py_ssize_t count) except? -1
    cdef void finish_rows(self, Py_ssize_t taken, uint64_t base, uint64_t time_ms,
                          uint32_t acquired, uint32_t delivered) noexcept
    cdef int add_row(self, unsigned char* p, Py_ssize_t n) except? -2
    cdef int scan_headers(self, unsigned char* p, Py_ssize_t n, bint wanted) except? -2
    cdef int add_header(self, unsigned char* name, Py_ssize_t k, unsigned char* value, Py_ssize_t n) except? -1
    cdef int drop_headers(self, Py_ssize_t entries) except? -1

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
    cdef Py_ssize_t at[23]
    cdef Py_ssize_t length[23]

    cdef int hold(self, object data) except? -1
    cdef int read(self, object data, Py_ssize_t body_max, bint sealed) except? -1
    cdef int check(self) except? -1
    cdef Py_ssize_t check_ends(self, int area, Py_ssize_t n, Py_ssize_t limit) except? -1
    cdef int check_validity(self, int area, Py_ssize_t n) except? -1
    cdef Py_ssize_t ends_at(self, int area, Py_ssize_t i) noexcept
    cdef bint is_null(self, int area, Py_ssize_t i) noexcept
