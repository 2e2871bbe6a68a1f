# Columns and buffers of a columnar frame, and its header (docs/formats/columnar-protocol.md).
from libc.stdint cimport uint32_t, uint64_t

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
    FRAME_MAGIC = 0x46435643
    UNCOMPRESSED = 0
    ZSTD = 1
    LZ4 = 2

cdef enum:
    # Bounds of a frame: its rows, and the bytes of its body without compression.
    FRAME_ROWS_MAX = 1 << 22
    FRAME_BODY_MAX = 1 << 30

# A part of a message body, where it lies in its block.
cdef struct Piece:
    unsigned char* p
    Py_ssize_t n

# What a frame is made of: buffer i of the table, NULL for the value bytes of a writer.
cdef struct Source:
    unsigned char* p
    Py_ssize_t n

cdef int first_area(uint32_t column) noexcept
cdef uint32_t column_of(int area) noexcept
cdef int area_count(uint32_t columns) noexcept
cdef int check_columns(uint32_t columns) except? -1
# The frame without its checksum, then with it.
cdef bytes assemble(uint32_t columns, Py_ssize_t rows, uint64_t base, uint64_t next,
                    Source* sources, Piece* pieces, Py_ssize_t piece_count)
cdef bytes sealed(bytes data, str compression)
cdef uint32_t checksum(unsigned char* p, Py_ssize_t n) except? 0
cdef bytes decompressed(int kind, object stored, Py_ssize_t length)
