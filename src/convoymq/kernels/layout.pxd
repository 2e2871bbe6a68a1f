# Layout of entries, commands and link frames (docs/formats/entries-and-frames.md). Readers in
# Python have the entry's header in logformat/entry.py.

cdef enum:
    ENTRY_HEADER_SIZE = 48
    ENTRY_CRC = 4
    ENTRY_CHECKED_FROM = 8
    ENTRY_INDEX = 8
    ENTRY_TERM = 16
    ENTRY_TIME = 24
    ENTRY_GROUP = 32
    ENTRY_KIND = 36
    ENTRY_FORMAT = 37
    ENTRY_COUNT = 38
    ENTRY_SPARE = 40
    ENTRY_FORMAT_KNOWN = 1

cdef enum:
    COMMAND_HEADER_SIZE = 32
    COMMAND_TYPE = 4
    COMMAND_FLAGS = 5
    COMMAND_SPARE = 6
    COMMAND_SESSION = 8
    COMMAND_SEQ = 16
    COMMAND_COUNT = 24
    COMMAND_ARG = 28

cdef enum:
    # Types that kernels look into; batch.py has them all.
    TYPE_ENQUEUE = 1
    TYPE_SETTLE = 2
    TYPE_RETURN = 3
    TYPE_DISCARD = 4
    # A range of message ids: first and last, u64 each.
    RANGE_SIZE = 16

cdef enum:
    # ENQUEUE: total body bytes, then records, then the table of their offsets at `arg`
    ENQUEUE_BYTES = 32
    ENQUEUE_RECORDS = 40
    ENQUEUE_SIZE_MIN = 48
    ENQUEUE_SAME_SIZE = 1
    ENQUEUE_PRIORITY = 2
    ENQUEUE_EXPIRATION = 4
    ENQUEUE_HEADERS = 8

cdef enum:
    LINK_HEADER_SIZE = 48
    LINK_TYPE = 4
    LINK_FLAGS = 5
    LINK_SPARE = 6
    LINK_GROUP = 8
    LINK_SPARE_WORD = 12
    LINK_A = 16
    LINK_B = 24
    LINK_C = 32
    LINK_D = 40

cdef enum:
    WAL_BATCH_HEADER_SIZE = 120
    WAL_BATCH_GENERATION = 8
    WAL_BATCH_SEQUENCE = 16
    WAL_BATCH_LENGTH = 24
    WAL_BATCH_COVERED_FROM = 32
    WAL_BATCH_MAP = 40
    WAL_BATCH_RECORDS = 104
    WAL_BATCH_POSITION = 108
    WAL_BATCH_DIRECTORY_CRC = 112
    WAL_BATCH_CRC = 116
    WAL_MAP_BYTES = 64
    WAL_DIRECTORY_ROW = 12
