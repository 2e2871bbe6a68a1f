"""Records of messages that die for the first time: the headers of the death are appended to the
ones that they have, the expiration goes, the rest is copied.

    before   exchange, key │ header frame: class … flags, properties │ body frames
    after    dead-letter exchange, key │ channel 65535, flags, headers, death, properties │ the same

The body stays as it is, in its encoding. `messages.deaths.dead_letter` does the same, and serves
every other message. Every length is compared with what is there before it is used.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_CHANNEL,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_PAYLOAD_MAX,
    AMQP_SIZE,
    BIT_EXPIRATION,
    CLASS_BASIC,
    HAS_EXPIRATION,
    HAS_HEADERS,
    HAS_PRIORITY,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    load16,
    load32,
    load64,
    put32,
    put64,
    store16,
    store32,
    uninitialized,
)
from cython.cimports.convoymq.kernels.content import (
    RECORD_HEADERS,
    RECORD_PRIORITY,
    SPANS,
    Field,
    Span,
    check_content,
    find_fields,
    find_properties,
    is_named,
    names_length,
    next_field,
)
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_ARG,
    COMMAND_COUNT,
    COMMAND_FLAGS,
    COMMAND_TYPE,
    ENQUEUE_BYTES,
    ENQUEUE_RECORDS,
    TYPE_ENQUEUE,
)
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t

_BYTES_SOFT = cython.declare(cython.Py_ssize_t, 1 << 20)
_CHANNEL = cython.declare(cython.int, 0xFFFF)
# Bits 1 and 0 of the property flags: no property, and more flags.
_ODD_FLAGS = cython.declare(cython.int, 3)


@cython.cfunc
@cython.exceptval(check=False)
def _walk_fields(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Returns flags of ENQUEUE for the fields of a table of headers; -1: they need a closer
    look."""
    asks: cython.int = 0
    at: cython.Py_ssize_t = 0
    field: Field
    while at < n:
        step: cython.Py_ssize_t = next_field(p + at, n - at, 1, cython.address(field))
        if step < 0:
            return -1
        at += step
        key: cython.Py_ssize_t = field.name_length
        q: cython.p_uchar = field.name
        if key == 2:
            if q[0] == b"C" and q[1] == b"C":
                return -1
        elif key >= 7 and q[0] == b"x" and q[1] == b"-":
            if is_named(cython.address(field), b"x-group-id", 10):
                asks = RECORD_HEADERS
            elif (
                is_named(cython.address(field), b"x-death", 7)
                or is_named(cython.address(field), b"x-delay", 7)
                or is_named(cython.address(field), b"x-deliver-at", 12)
                or (key > 14 and string.memcmp(q, b"x-first-death-", 14) == 0)
                or (key > 13 and string.memcmp(q, b"x-last-death-", 13) == 0)
            ):
                return -1
    return asks


@cython.cfunc
@cython.exceptval(check=False)
def _split(p: cython.p_uchar, n: cython.Py_ssize_t, parts: cython.pointer(Parts)) -> cython.bint:
    """Finds the parts of the record at p; False: its message needs a closer look."""
    content: cython.Py_ssize_t = names_length(p, n)
    if content < 0 or check_content(p + content, n - content, n) < 0:
        return False
    if load16(p + content + AMQP_CHANNEL) == cython.cast(uint32_t, _CHANNEL):
        return False
    length: cython.Py_ssize_t = load32(p + content + AMQP_SIZE)
    if length < HEADER_PROPERTIES:
        return False
    parts.exchange_length = p[0]
    parts.key = 1 + parts.exchange_length
    parts.key_length = p[parts.key]
    parts.encoding = p[content]
    parts.header = content + AMQP_FRAME_HEAD
    parts.header_end = parts.header + length
    parts.body = parts.header_end + 1
    return _split_properties(p, parts)


@cython.cfunc
@cython.exceptval(check=False)
def _split_properties(p: cython.p_uchar, parts: cython.pointer(Parts)) -> cython.bint:
    """Finds the properties in the header of a record; False: they need a closer look."""
    p += parts.header
    flags: uint32_t = load16(p + HEADER_FLAGS)
    if flags & cython.cast(uint32_t, _ODD_FLAGS):
        return False
    spans: Span[SPANS]
    spans[BIT_EXPIRATION].n = 0
    length: cython.Py_ssize_t = parts.header_end - parts.header
    end: cython.Py_ssize_t = find_properties(p, length, BIT_EXPIRATION, cython.address(spans[0]))
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = find_fields(p, length, cython.address(at))
    if end < 0 or size < 0:
        return False
    asks: cython.int = _walk_fields(p + at, size)
    if asks < 0 or spans[BIT_EXPIRATION].n == 1:
        return False
    parts.flags = flags
    parts.asks = asks | (RECORD_PRIORITY if flags & HAS_PRIORITY else 0)
    parts.fields = parts.header + at
    parts.fields_end = parts.fields + size
    parts.expiration_length = spans[BIT_EXPIRATION].n
    parts.expiration = parts.header + end - parts.expiration_length
    return True


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put(q: cython.p_uchar, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.p_uchar:
    string.memcpy(q, p, n)
    return q + n


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_text(
    q: cython.p_uchar,
    head: cython.p_char,
    head_length: cython.Py_ssize_t,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
) -> cython.p_uchar:
    """Writes a field whose key and type code are `head`, with n bytes of text."""
    string.memcpy(q, head, head_length)
    store32(q + head_length, cython.cast(uint32_t, n))
    string.memcpy(q + head_length + 4, p, n)
    return q + head_length + 4 + n


@cython.cclass
class FirstDeath:
    def __init__(self, exchange: bytes, routing_key, entry: bytes, first: bytes, last: bytes):
        if len(exchange) > 255 or (routing_key is not None and len(routing_key) > 255):
            raise ValueError("a short string is too long")
        self.exchange = exchange
        self.routing_key = routing_key
        self.entry = entry
        self.first = first
        self.last = last

    @cython.cfunc
    @cython.exceptval(check=False)
    def fields_length(self, parts: cython.pointer(Parts)) -> cython.Py_ssize_t:
        """Returns the bytes of the fields of the death."""
        length: cython.Py_ssize_t = (
            # x-death: array, table
            (9 + 4 + 1 + 4)
            + cython.cast(cython.Py_ssize_t, len(self.entry))
            # exchange, routing-keys with one key
            + (10 + 4 + parts.exchange_length)
            + (14 + 4 + 1 + 4 + parts.key_length)
            # exchange of the first and of the newest death
            + cython.cast(cython.Py_ssize_t, len(self.first))
            + (24 + 4 + parts.exchange_length)
            + cython.cast(cython.Py_ssize_t, len(self.last))
            + (23 + 4 + parts.exchange_length)
        )
        if parts.expiration_length:
            length += 21 + 4 + parts.expiration_length - 1
        return length

    @cython.cfunc
    @cython.exceptval(check=False)
    def record_length(
        self, parts: cython.pointer(Parts), n: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Returns the bytes of a record of n bytes after its death; -1: its header would be too
        large."""
        header: cython.Py_ssize_t = (
            parts.header_end - parts.header - parts.expiration_length + self.fields_length(parts)
        )
        if not parts.flags & HAS_HEADERS:
            header += 4
        if header > AMQP_PAYLOAD_MAX:
            return -1
        key: cython.Py_ssize_t = parts.key_length
        if self.routing_key is not None:
            key = len(self.routing_key)
        return 2 + len(self.exchange) + key + AMQP_FRAME_OVERHEAD + header + n - parts.body

    @cython.cfunc
    @cython.exceptval(check=False)
    def put_fields(
        self, q: cython.p_uchar, p: cython.p_uchar, parts: cython.pointer(Parts)
    ) -> cython.p_uchar:
        """Writes the fields of the death; returns where they end."""
        exchange: cython.p_uchar = p + 1
        n: cython.Py_ssize_t = parts.exchange_length
        string.memcpy(q, b"\x07x-deathA", 9)
        array: cython.p_uchar = q + 9
        array[4] = b"F"
        q = _put(array + 9, bytes_pointer(self.entry), len(self.entry))
        q = _put_text(q, b"\x08exchangeS", 10, exchange, n)
        string.memcpy(q, b"\x0crouting-keysA", 14)
        store32(q + 14, cython.cast(uint32_t, 5 + parts.key_length))
        q = _put_text(q + 18, b"S", 1, p + parts.key + 1, parts.key_length)
        if parts.expiration_length:
            q = _put_text(
                q,
                b"\x13original-expirationS",
                21,
                p + parts.expiration + 1,
                parts.expiration_length - 1,
            )
        store32(array, cython.cast(uint32_t, q - array - 4))
        store32(array + 5, cython.cast(uint32_t, q - array - 9))
        q = _put(q, bytes_pointer(self.first), len(self.first))
        q = _put_text(q, b"\x16x-first-death-exchangeS", 24, exchange, n)
        q = _put(q, bytes_pointer(self.last), len(self.last))
        return _put_text(q, b"\x15x-last-death-exchangeS", 23, exchange, n)

    @cython.cfunc
    @cython.exceptval(check=False)
    def put_record(
        self,
        q: cython.p_uchar,
        p: cython.p_uchar,
        parts: cython.pointer(Parts),
        n: cython.Py_ssize_t,
    ) -> cython.p_uchar:
        """Writes what becomes of the record of n bytes at p; returns where it ends."""
        q[0] = cython.cast(cython.uchar, len(self.exchange))
        q = _put(q + 1, bytes_pointer(self.exchange), len(self.exchange))
        if self.routing_key is not None:
            q[0] = cython.cast(cython.uchar, len(self.routing_key))
            q = _put(q + 1, bytes_pointer(self.routing_key), len(self.routing_key))
        else:
            q = _put(q, p + parts.key, 1 + parts.key_length)
        frame: cython.p_uchar = q
        q[0] = parts.encoding
        store16(q + AMQP_CHANNEL, cython.cast(uint32_t, _CHANNEL))
        q += AMQP_FRAME_HEAD
        store32(q, CLASS_BASIC << 16)
        string.memcpy(q + HEADER_BODY_SIZE, p + parts.header + HEADER_BODY_SIZE, 8)
        store16(q + HEADER_FLAGS, (parts.flags | HAS_HEADERS) & ~HAS_EXPIRATION)
        before: cython.Py_ssize_t = parts.header + HEADER_PROPERTIES
        after: cython.Py_ssize_t = parts.fields
        if parts.flags & HAS_HEADERS:
            after -= 4
        table: cython.p_uchar = _put(q + HEADER_PROPERTIES, p + before, after - before)
        q = _put(table + 4, p + parts.fields, parts.fields_end - parts.fields)
        q = self.put_fields(q, p, parts)
        store32(table, cython.cast(uint32_t, q - table - 4))
        q = _put(q, p + parts.fields_end, parts.expiration - parts.fields_end)
        rest: cython.Py_ssize_t = parts.expiration + parts.expiration_length
        q = _put(q, p + rest, parts.header_end - rest)
        store32(frame + AMQP_SIZE, cython.cast(uint32_t, q - frame - AMQP_FRAME_HEAD))
        q[0] = AMQP_END
        return _put(q + 1, p + parts.body, n - parts.body)

    def records(
        self,
        data: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        limit: cython.Py_ssize_t,
    ):
        records: Records
        p: cython.p_uchar = bytes_pointer(data)
        open_records(p, len(data), command, first, 1, cython.address(records))
        if limit < 1:
            raise ValueError("no record is asked for")
        limit = min(
            limit, cython.cast(cython.Py_ssize_t, get32(records.command + COMMAND_COUNT)) - first
        )
        offsets: cython.pointer(uint32_t) = cython.cast(
            cython.pointer(uint32_t), stdlib.malloc(4 * (limit + 1))
        )
        if offsets == cython.NULL:
            raise MemoryError
        try:
            return self._records(cython.address(records), first, limit, offsets)
        finally:
            stdlib.free(offsets)

    @cython.cfunc
    def _records(
        self,
        records: cython.pointer(Records),
        first: cython.Py_ssize_t,
        limit: cython.Py_ssize_t,
        offsets: cython.pointer(uint32_t),
    ) -> tuple:
        """Returns as `records` does; `offsets` has room for one more than `limit`."""
        parts: Parts
        count: cython.Py_ssize_t = 0
        end: cython.Py_ssize_t = ENQUEUE_RECORDS
        body_bytes: uint64_t = 0
        asks: cython.int = 0
        key: cython.p_uchar = cython.NULL
        size: cython.Py_ssize_t = 0
        n: cython.Py_ssize_t
        # First how long all is, then what it is: nothing is copied twice.
        while count < limit and end < _BYTES_SOFT:
            p: cython.p_uchar = record_at(records, first + count, cython.address(size))
            if not _split(p, size, cython.address(parts)):
                break
            if self.routing_key is None:
                if key == cython.NULL:
                    key = p + parts.key
                elif string.memcmp(key, p + parts.key, 1 + parts.key_length) != 0:
                    break
            n = self.record_length(cython.address(parts), size)
            if n < 0:
                break
            offsets[count] = cython.cast(uint32_t, end)
            count += 1
            end += n
            asks |= parts.asks
            body_bytes += load64(p + parts.header + HEADER_BODY_SIZE)
        if count == 0:
            return 0, b"", b""
        offsets[count] = cython.cast(uint32_t, end)
        position: cython.Py_ssize_t = (end + 3) & ~3
        length: cython.Py_ssize_t = (position + 4 * (count + 1) + 7) & ~7
        made: bytes = uninitialized(length)
        q: cython.p_uchar = bytes_pointer(made)
        string.memset(q, 0, ENQUEUE_RECORDS)
        put32(q, cython.cast(uint32_t, length))
        q[COMMAND_TYPE] = TYPE_ENQUEUE
        q[COMMAND_FLAGS] = cython.cast(cython.uchar, asks)
        put32(q + COMMAND_COUNT, cython.cast(uint32_t, count))
        put32(q + COMMAND_ARG, cython.cast(uint32_t, position))
        put64(q + ENQUEUE_BYTES, body_bytes)
        put64(q + length - 8, 0)
        string.memset(q + end, 0, position - end)
        string.memcpy(q + position, offsets, 4 * (count + 1))
        i: cython.Py_ssize_t
        for i in range(count):
            p = record_at(records, first + i, cython.address(size))
            _split(p, size, cython.address(parts))
            p = self.put_record(q + offsets[i], p, cython.address(parts), size)
            assert p == q + offsets[i + 1], "a record has another length than was said"
        if self.routing_key is not None:
            return count, made, self.routing_key
        return count, made, copy_bytes(key + 1, key[0])
