from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "Python.h":
    char* PyOS_double_to_string(double value, char format, int precision, int flags, int* type) except NULL
    int Py_DTSF_ADD_DOT_0
    void PyMem_Free(void* p)

cpdef enum:
    # Columns, as bits.
    OFFSET = 1
    TIMESTAMP = 2
    KEY = 4
    VALUE = 8
    HEADERS = 16
    EXCHANGE = 32
    ROUTING_KEY = 64
    PROPERTIES = 128
    DELIVERY_COUNT = 256
    REDELIVERED = 512

cdef enum:
    # Buffers, as places in the table of a frame with all columns. NULLS are validity bitmaps, ENDS
    # offsets into the bytes that follow; LIST_ENDS are offsets of rows into the headers.
    OFFSETS = 0
    TIMES = 1
    KEY_NULLS = 2
    KEY_ENDS = 3
    KEYS = 4
    VALUE_NULLS = 5
    VALUE_ENDS = 6
    VALUES = 7
    HEADER_NULLS = 8
    LIST_ENDS = 9
    NAME_ENDS = 10
    NAMES = 11
    TEXT_NULLS = 12
    TEXT_ENDS = 13
    TEXTS = 14
    EXCHANGE_ENDS = 15
    EXCHANGES = 16
    ROUTING_ENDS = 17
    ROUTING_KEYS = 18
    PROPERTY_ENDS = 19
    PROPERTY_BYTES = 20
    DELIVERY_COUNTS = 21
    REDELIVERIES = 22
    AREAS = 23

cdef enum:
    # Header of a frame, and a row of the table behind it: where a buffer begins, and its length.
    HEAD_SIZE = 64
    HEAD_VERSION = 4
    HEAD_COMPRESSION = 6
    HEAD_COLUMNS = 8
    HEAD_ROWS = 12
    HEAD_BASE = 16
    HEAD_NEXT = 24
    HEAD_BUFFERS = 32
    HEAD_CRC = 36
    HEAD_STORED = 40
    HEAD_LENGTH = 48
    HEAD_SPARE = 56
    TABLE_ROW = 16
    VERSION = 1
    UNCOMPRESSED = 0
    ZSTD = 1
    LZ4 = 2

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

cdef enum:
    # One for each bit of the property flags.
    SPANS = 16

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
    cdef Area areas[AREAS]
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
    cdef Py_ssize_t at[AREAS]
    cdef Py_ssize_t length[AREAS]

    cdef int hold(self, object data) except? -1
    cdef int read(self, object data, Py_ssize_t body_max, bint sealed) except? -1
    cdef int check(self) except? -1
    cdef Py_ssize_t check_ends(self, int area, Py_ssize_t n, Py_ssize_t limit) except? -1
    cdef int check_validity(self, int area, Py_ssize_t n) except? -1
    cdef Py_ssize_t ends_at(self, int area, Py_ssize_t i) noexcept
    cdef bint is_null(self, int area, Py_ssize_t i) noexcept
