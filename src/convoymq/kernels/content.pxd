from libc.stdint cimport uint32_t
from libc.string cimport memcmp

from convoymq.kernels.amqp cimport (
    AMQP_BODY,
    AMQP_ENCODED,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_SIZE,
    BIT_CONTENT_TYPE,
    BIT_DELIVERY_MODE,
    BIT_EXPIRATION,
    BIT_HEADERS,
    BIT_PRIORITY,
    BIT_REPLY_TO,
    BIT_TIMESTAMP,
    BIT_USER_ID,
    HAS_CONTENT_TYPE,
    HAS_MASK,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    MORE_FLAGS,
    PRIORITY_DEFAULT,
)
from convoymq.kernels.bytes cimport load16, load32

cdef enum:
    # Below the ten years that an expiration may last.
    EXPIRATION_DIGITS_MAX = 11

cpdef enum:
    # What `walk_properties` notes of a message. The first three are flags of ENQUEUE, too.
    RECORD_PRIORITY = 2
    RECORD_EXPIRATION = 4
    # A header that queues act on: x-delay, x-deliver-at, x-group-id.
    RECORD_HEADERS = 8
    RECORD_EXAMINE = 256
    # An expiration that can be read, or a priority above the default: not every queue serves it.
    RECORD_ASKS = 512
    # A time to wait for that can be read: only some queues serve it.
    RECORD_WAITS = 1024
    # A message group; together with a time it needs a closer look.
    RECORD_GROUPED = 2048
    # An order key that topics take; any other value of its header needs a closer look.
    RECORD_ORDERED = 4096
    # A trace context (`trace_contexts`).
    RECORD_TRACED = 8192

# Bytes of the field value at p (type code included) or, for a table without its length, notes on
# what its keys say; -1 when it is broken, nested too deeply or cut off within n bytes.
cdef Py_ssize_t walk_value(unsigned char* p, Py_ssize_t n, int depth) noexcept
cdef int walk_table(unsigned char* p, Py_ssize_t n, int depth) noexcept

# A field of a table: its name without the length byte, its value with the type code.
cdef struct Field:
    unsigned char* name
    Py_ssize_t name_length
    unsigned char* value
    Py_ssize_t value_length

# Bytes of the field at p; -1 when it is broken or cut off within n bytes.
cdef inline Py_ssize_t next_field(unsigned char* p, Py_ssize_t n, int depth, Field* field) noexcept:
    cdef Py_ssize_t at = 1 + p[0]
    if at >= n:
        return -1
    cdef Py_ssize_t size = walk_value(p + at, n - at, depth)
    if size < 0:
        return -1
    field.name = p + 1
    field.name_length = at - 1
    field.value = p + at
    field.value_length = size
    return at + size

# Whether a field has a name of n bytes.
cdef inline bint is_named(Field* field, const char* name, Py_ssize_t n) noexcept:
    return field.name_length == n and memcmp(field.name, name, n) == 0

# A property inside a content header payload.
cdef struct Span:
    Py_ssize_t at
    Py_ssize_t n

cdef enum:
    # One for each bit of the property flags.
    SPANS = 16

# Finds the properties of the content header payload at p, up to the one with bit `last`: fills in
# the spans of those that are set, by bit, and returns where the next one begins; -1 = broken.
cdef Py_ssize_t find_properties(unsigned char* p, Py_ssize_t n, int last, Span* spans) noexcept

# Bytes of the fields of the headers in such a payload, and where they begin; without headers 0, and
# where their table would stand; -1 = broken.
cdef Py_ssize_t find_fields(unsigned char* p, Py_ssize_t n, Py_ssize_t* at) noexcept

# Bytes of exchange and routing key at the begin of a record; -1 = it is damaged.
cdef inline Py_ssize_t names_length(const unsigned char* p, Py_ssize_t n) noexcept:
    if n < 2:
        return -1
    cdef Py_ssize_t at = 1 + <Py_ssize_t>p[0]
    if at >= n:
        return -1
    at += 1 + <Py_ssize_t>p[at]
    return at if at <= n else -1

# Where the content header payload of a record of n bytes lies, in every encoding, and how many bytes
# it has; -1 = the record is damaged.
cdef inline Py_ssize_t find_header(unsigned char* p, Py_ssize_t n, Py_ssize_t* size) noexcept:
    cdef Py_ssize_t at = names_length(p, n)
    if at < 0 or n - at < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        return -1
    size[0] = load32(p + at + AMQP_SIZE)
    at += AMQP_FRAME_HEAD
    return -1 if size[0] > n - at else at

# A content in encoding 1 (`messages.record.as_amqp091`). Raises ValueError.
cdef bytes plain_content(bytes content)

# Whether an expiration is a number of milliseconds that needs no closer look.
cdef inline bint is_short_number(unsigned char* p, Py_ssize_t n) noexcept:
    cdef Py_ssize_t i
    if n == 0 or n > EXPIRATION_DIGITS_MAX:
        return False
    for i in range(n):
        if p[i] < 48 or p[i] > 57:
            return False
    return True

# What the content header payload at p says: RECORD_* flags, with RECORD_EXAMINE when the message
# needs a closer look (copies, a named producer, an odd delay or expiration, user-id, reply-to pseudo
# queue); -1 when it is broken. Inlined: it runs for every message.
cdef inline int walk_properties(unsigned char* p, Py_ssize_t n) noexcept:
    if n < HEADER_PROPERTIES:
        return -1
    cdef uint32_t flags = load16(p + HEADER_FLAGS)
    cdef int notes = 0
    cdef int found
    cdef Py_ssize_t length
    cdef Py_ssize_t size
    if flags & MORE_FLAGS:
        return -1
    cdef Py_ssize_t at = HEADER_PROPERTIES
    cdef int bit = BIT_CONTENT_TYPE + 1
    # From the first property's bit to the last one's: each moves to the place of the first.
    flags &= HAS_MASK
    while flags & HAS_MASK:
        bit -= 1
        if not flags & HAS_CONTENT_TYPE:
            flags <<= 1
            continue
        flags <<= 1
        if bit == BIT_HEADERS:
            if n - at < 4:
                return -1
            length = load32(p + at)
            if length > n - at - 4:
                return -1
            found = walk_table(p + at + 4, length, 1)
            if found < 0:
                return -1
            notes |= found
            at += 4 + length
            continue
        if bit == BIT_DELIVERY_MODE or bit == BIT_PRIORITY:
            if at >= n:
                return -1
            if bit == BIT_PRIORITY:
                notes |= RECORD_PRIORITY
                if p[at] > PRIORITY_DEFAULT:
                    notes |= RECORD_ASKS
            at += 1
            continue
        if bit == BIT_TIMESTAMP:
            if n - at < 8:
                return -1
            at += 8
            continue
        if at >= n:
            return -1
        size = p[at]
        if size > n - at - 1:
            return -1
        if bit == BIT_EXPIRATION:
            notes |= RECORD_EXPIRATION
            notes |= RECORD_ASKS if is_short_number(p + at + 1, size) else RECORD_EXAMINE
        elif bit == BIT_USER_ID:
            notes |= RECORD_EXAMINE
        elif bit == BIT_REPLY_TO and size == 21:
            if memcmp(p + at + 1, b"amq.rabbitmq.reply-to", 21) == 0:
                notes |= RECORD_EXAMINE
        at += 1 + size
    return notes if at == n else -1

# 0 = whole frames of at most frame_max bytes each, in any encoding, 1 = some frame is larger, -1 =
# broken. Inlined: it runs for every delivery.
cdef inline int check_content(unsigned char* p, Py_ssize_t n, Py_ssize_t frame_max) noexcept:
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t size
    cdef int large = 0
    cdef int first = AMQP_HEADER
    while at < n:
        if n - at < AMQP_FRAME_OVERHEAD:
            return -1
        if p[at] != first and (at or p[at] < AMQP_ENCODED):
            return -1
        first = AMQP_BODY
        size = load32(p + at + AMQP_SIZE)
        if size + AMQP_FRAME_OVERHEAD > n - at:
            return -1
        if size + AMQP_FRAME_OVERHEAD > frame_max:
            large = 1
        at += size + AMQP_FRAME_OVERHEAD
    return large if n >= AMQP_FRAME_OVERHEAD + HEADER_PROPERTIES else -1
