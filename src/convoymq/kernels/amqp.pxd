# AMQP 0-9-1 as it lies in frames and content headers: constants without a cost at run time.

cdef enum:
    # frame: u8 type, u16 channel, u32 size, payload, end octet
    AMQP_METHOD = 1
    AMQP_HEADER = 2
    AMQP_BODY = 3
    AMQP_HEARTBEAT = 8
    AMQP_END = 206
    # From here on, the type of header frames of records in other encodings (messages/encodings.py).
    AMQP_ENCODED = 128
    # Where the channel and the size stand.
    AMQP_CHANNEL = 1
    AMQP_SIZE = 3
    AMQP_FRAME_HEAD = 7
    AMQP_FRAME_OVERHEAD = 8
    # Body frames of records are never larger.
    AMQP_PAYLOAD_MAX = 131064
    AMQP_FRAME_MAX = 131072

cdef enum:
    # A method begins with its class and number.
    METHOD_ID_SIZE = 4
    CLASS_BASIC = 60
    METHOD_PUBLISH = 40
    CHANNEL_OPEN_METHOD = (20 << 16) | 10
    CHANNEL_CLOSE_METHOD = (20 << 16) | 40
    CHANNEL_CLOSE_OK_METHOD = (20 << 16) | 41
    BASIC_PUBLISH = (60 << 16) | 40
    BASIC_DELIVER = (60 << 16) | 60
    BASIC_ACK = (60 << 16) | 80
    BASIC_REJECT = (60 << 16) | 90
    BASIC_NACK = (60 << 16) | 120

cdef enum:
    PUBLISH_MANDATORY = 1
    PUBLISH_IMMEDIATE = 2

cdef enum:
    REPLY_FRAME_ERROR = 501
    REPLY_SYNTAX_ERROR = 502
    REPLY_UNEXPECTED_FRAME = 505

cdef enum:
    # payload of a content header: u16 class, u16 weight, u64 body size, u16 flags, properties
    HEADER_BODY_SIZE = 4
    HEADER_FLAGS = 12
    HEADER_PROPERTIES = 14

    # Of a message without one.
    PRIORITY_DEFAULT = 4
    # The delivery mode of messages that are produced.
    PERSISTENT = 2

cdef enum:
    # Bits of the property flags, in the order of the properties.
    BIT_CONTENT_TYPE = 15
    BIT_CONTENT_ENCODING = 14
    BIT_HEADERS = 13
    BIT_DELIVERY_MODE = 12
    BIT_PRIORITY = 11
    BIT_CORRELATION_ID = 10
    BIT_REPLY_TO = 9
    BIT_EXPIRATION = 8
    BIT_MESSAGE_ID = 7
    BIT_TIMESTAMP = 6
    BIT_USER_ID = 4
    BIT_LAST = 2

cdef enum:
    HAS_CONTENT_TYPE = 1 << 15
    HAS_CONTENT_ENCODING = 1 << 14
    HAS_HEADERS = 1 << 13
    HAS_PRIORITY = 1 << 11
    HAS_REPLY_TO = 1 << 9
    HAS_EXPIRATION = 1 << 8
    HAS_MESSAGE_ID = 1 << 7
    HAS_USER_ID = 1 << 4
    # The bits that stand for a property; bit 1 does not, bit 0 would announce more flags.
    HAS_MASK = 0xFFFC
    MORE_FLAGS = 1
