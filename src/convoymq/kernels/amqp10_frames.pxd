from libc.stdint cimport int64_t, uint32_t

cdef enum:
    # Of the properties of AMQP 1.0; those of identifiers are made as text.
    TEXTS = 13
    IDENTIFIER_MAX = 48
    # More pairs, or more bytes of headers, need a closer look.
    PAIRS_MAX = 32
    TABLE_MAX = 2048
    # Of a content header with all properties.
    HEAD_MAX = 4096

cdef enum:
    # Type octet of the header frame.
    ENCODING_10 = 0x82
    HEADER_FIELDS = 5
    TRANSFER_FIELDS = 11
    TAG_BYTES_MAX = 32
    BIT_TYPE = 5
    BIT_APP_ID = 3

cdef enum:
    # Places of properties.
    AT_MESSAGE_ID = 0
    AT_USER_ID = 1
    AT_REPLY_TO = 4
    AT_CORRELATION_ID = 5
    AT_CONTENT_TYPE = 6
    AT_CONTENT_ENCODING = 7
    AT_EXPIRY_TIME = 8
    AT_CREATION_TIME = 9
    AT_GROUP_ID = 10
    AT_GROUP_SEQUENCE = 11

cdef struct Text:
    # NULL = there is none.
    unsigned char* p
    Py_ssize_t n

# What the sections in front of a message's body say; numbers that are missing are -1.
cdef struct Plain:
    bint durable
    int priority
    int64_t ttl_ms
    int64_t created_ms
    Text texts[TEXTS]
    unsigned char message_id[IDENTIFIER_MAX]
    unsigned char correlation_id[IDENTIFIER_MAX]
    unsigned char table[TABLE_MAX]
    Py_ssize_t table_size
    Py_ssize_t bare_at
    bint is_value
    unsigned char head[HEAD_MAX]
    Py_ssize_t head_size

# What is used of the performative of a transfer.
cdef struct PlainTransfer:
    uint32_t handle
    uint32_t delivery_id
    bint settled
    # Behind the performative.
    Py_ssize_t payload
