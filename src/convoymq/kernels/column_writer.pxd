from libc.stdint cimport uint32_t, uint64_t

from convoymq.kernels.area cimport Area
from convoymq.kernels.columns cimport AREAS, Piece

# A record that becomes a row: where its parts lie.
cdef struct Row:
    unsigned char* exchange
    Py_ssize_t exchange_length
    unsigned char* routing
    Py_ssize_t routing_length
    unsigned char* header
    Py_ssize_t header_length
    uint64_t body_length
    unsigned char* key
    Py_ssize_t key_length
    bint has_table
    # it has no body, and the marker for none
    bint is_null

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
    cdef bint value_nulls
    cdef bint header_nulls
    cdef bint text_nulls
    cdef Py_ssize_t entries
    cdef Py_ssize_t value_bytes
    cdef Area areas[AREAS]
    cdef Piece* pieces
    cdef Py_ssize_t piece_count
    cdef Py_ssize_t piece_capacity
    cdef list blocks
    # the x-key of the row that is read
    cdef unsigned char* key
    cdef Py_ssize_t key_length
    # whether that row has no body, and then the marker
    cdef bint is_empty
    cdef bint is_marked

    cdef assembled(self, uint64_t next)
    cdef int reserve_rows(self, Py_ssize_t count) except? -1
    cdef int reserve_pieces(self, Py_ssize_t count) except? -1
    cdef void finish_rows(self, Py_ssize_t taken, uint64_t base, uint64_t time_ms,
                          uint32_t acquired_count, uint32_t failed_delivery_count) noexcept
    cdef int add_row(self, unsigned char* p, Py_ssize_t n) except? -2
    cdef int scan_headers(self, unsigned char* p, Py_ssize_t n, bint wanted) except? -2
    cdef int add_header(self, unsigned char* name, Py_ssize_t k, unsigned char* value, Py_ssize_t n) except? -1
    cdef int drop_headers(self, Py_ssize_t entries) except? -1
