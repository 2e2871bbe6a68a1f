"""Rows of a columnar frame to the records of an ENQUEUE command."""

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_PAYLOAD_MAX,
    AMQP_SIZE,
    BIT_CONTENT_TYPE,
    BIT_DELIVERY_MODE,
    BIT_EXPIRATION,
    BIT_HEADERS,
    BIT_LAST,
    BIT_MESSAGE_ID,
    BIT_REPLY_TO,
    BIT_TIMESTAMP,
    CLASS_BASIC,
    HAS_EXPIRATION,
    HAS_HEADERS,
    HAS_MASK,
    HAS_MESSAGE_ID,
    HAS_PRIORITY,
    HAS_REPLY_TO,
    HAS_USER_ID,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    PERSISTENT,
)
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    get64,
    load16,
    put32,
    put64,
    store32,
    store64,
)
from cython.cimports.convoymq.kernels.column_frame import (
    ColumnFrame,
    command_bound,
    ends_at,
    is_null,
)
from cython.cimports.convoymq.kernels.columns import (
    HEADER_NULLS,
    HEADERS,
    KEY,
    KEY_ENDS,
    KEY_NULLS,
    KEYS,
    LIST_ENDS,
    NAME_ENDS,
    NAMES,
    PROPERTIES,
    PROPERTY_BYTES,
    PROPERTY_ENDS,
    ROUTING_ENDS,
    ROUTING_KEY,
    ROUTING_KEYS,
    TEXT_ENDS,
    TEXT_NULLS,
    TEXTS,
    TIMES,
    TIMESTAMP,
    VALUE,
    VALUE_ENDS,
    VALUE_NULLS,
    VALUES,
)
from cython.cimports.convoymq.kernels.content import (
    RECORD_HEADERS,
    SPANS,
    Field,
    Span,
    find_properties,
    next_field,
    walk_properties,
    walk_table,
)
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_HEADER_SIZE,
    ENQUEUE_EXPIRATION,
    ENQUEUE_HEADERS,
    ENQUEUE_PRIORITY,
    ENQUEUE_RECORDS,
    ENQUEUE_SAME_SIZE,
)
from cython.cimports.convoymq.kernels.tombstone import (
    is_tombstone_name,
    put_tombstone_field,
)
from cython.cimports.convoymq.kernels.utf8 import is_utf8
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

_COMMAND_MAX = cython.declare(cython.Py_ssize_t, 512 << 20)
# Of a record: routing key's length, header frame, table with key and marker, delivery mode,
# timestamp, message id.
_ROW_MORE_MAX = cython.declare(cython.Py_ssize_t, 1 + 22 + 15 + 14 + 1 + 8 + 21)
_EXPIRATION_MS_MAX = cython.declare(uint64_t, 315360000000)
_X_KEY = cython.declare(bytes, b"x-key")


@cython.cfunc
@cython.exceptval(-1)
def _refuse_row(row: cython.Py_ssize_t, text: str) -> cython.int:
    raise ValueError(f"row {row}: {text}")


@cython.cfunc
@cython.exceptval(-2)
def _spans(p: cython.p_uchar, n: cython.Py_ssize_t, spans: cython.pointer(Span)) -> cython.int:
    """Finds the place of each property of the payload, by its flag bit; returns its flags, -1 =
    broken."""
    if find_properties(p, n, BIT_LAST, spans) != n:
        return -1
    # Bit 1 has no property.
    flags: cython.int = load16(p + HEADER_FLAGS) & HAS_MASK
    if flags & HAS_HEADERS:
        table: Span = spans[BIT_HEADERS]
        if walk_table(p + table.at + 4, table.n - 4, 1) < 0:
            return -1
    return flags


@cython.cfunc
@cython.exceptval(check=False)
def _is_expiration(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    """Returns whether a short string is a number of milliseconds that the broker accepts."""
    v: uint64_t = 0
    i: cython.Py_ssize_t
    if n < 2 or n > 13:
        return False
    for i in range(1, n):
        if p[i] < 48 or p[i] > 57:
            return False
        v = v * 10 + (p[i] - 48)
    return v <= _EXPIRATION_MS_MAX


@cython.cfunc
@cython.exceptval(check=False)
def _put_field(
    q: cython.p_uchar,
    name: cython.p_uchar,
    k: cython.Py_ssize_t,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    null: cython.bint,
) -> cython.p_uchar:
    """Writes one field; the pointer behind it."""
    q[0] = cython.cast(cython.uchar, k)
    string.memcpy(q + 1, name, k)
    q += 1 + k
    if null:
        q[0] = 86
        return q + 1
    q[0] = 83 if is_utf8(p, n) else 120
    store32(q + 1, cython.cast(uint32_t, n))
    if n:
        string.memcpy(q + 5, p, n)
    return q + 5 + n


@cython.cfunc
@cython.exceptval(check=False)
def _is_key_name(p: cython.p_uchar, k: cython.Py_ssize_t) -> cython.bint:
    return k == 5 and string.memcmp(p, bytes_pointer(_X_KEY), 5) == 0


@cython.cfunc
def _put_table(
    frame: ColumnFrame,
    row: cython.Py_ssize_t,
    old: cython.p_uchar,
    old_length: cython.Py_ssize_t,
    q: cython.p_uchar,
) -> cython.Py_ssize_t:
    """Writes the header table of a row, its length first. 0 = it has none.

    `old`: the fields of the table inside the row's properties, NULL without one."""
    columns: uint32_t = frame.columns
    start: cython.p_uchar = q
    has_key: cython.bint = columns & KEY != 0 and not is_null(frame, KEY_NULLS, row)
    no_body: cython.bint = columns & VALUE != 0 and is_null(frame, VALUE_NULLS, row)
    i: cython.Py_ssize_t
    low: cython.Py_ssize_t
    k: cython.Py_ssize_t
    name: cython.p_uchar
    q += 4
    if columns & HEADERS and not is_null(frame, HEADER_NULLS, row):
        names: cython.p_uchar = frame.body + frame.at[NAMES]
        texts: cython.p_uchar = frame.body + frame.at[TEXTS]
        for i in range(ends_at(frame, LIST_ENDS, row), ends_at(frame, LIST_ENDS, row + 1)):
            low = ends_at(frame, NAME_ENDS, i)
            k = ends_at(frame, NAME_ENDS, i + 1) - low
            name = names + low
            if k > 255 or not is_utf8(name, k):
                _refuse_row(row, "name of a header is longer than 255 bytes, or not UTF-8")
            if (has_key and _is_key_name(name, k)) or (no_body and is_tombstone_name(name, k)):
                continue
            low = ends_at(frame, TEXT_ENDS, i)
            q = _put_field(
                q,
                name,
                k,
                texts + low,
                ends_at(frame, TEXT_ENDS, i + 1) - low,
                is_null(frame, TEXT_NULLS, i),
            )
    elif old != cython.NULL:
        if not has_key and not no_body:
            string.memcpy(q, old, old_length)
            q += old_length
        else:
            at: cython.Py_ssize_t = 0
            field: Field
            while at < old_length:
                size: cython.Py_ssize_t = next_field(
                    old + at, old_length - at, 1, cython.address(field)
                )
                if size < 0:
                    _refuse_row(row, "properties are broken")
                if not (has_key and _is_key_name(field.name, field.name_length)) and not (
                    no_body and is_tombstone_name(field.name, field.name_length)
                ):
                    string.memcpy(q, old + at, size)
                    q += size
                at += size
    elif not has_key and not no_body:
        return 0
    if has_key:
        low = ends_at(frame, KEY_ENDS, row)
        q = _put_field(
            q,
            bytes_pointer(_X_KEY),
            5,
            frame.body + frame.at[KEYS] + low,
            ends_at(frame, KEY_ENDS, row + 1) - low,
            False,
        )
    if no_body:
        q = put_tombstone_field(q)
    store32(start, cython.cast(uint32_t, q - start - 4))
    return q - start


@cython.cfunc
def _put_header(
    frame: ColumnFrame,
    row: cython.Py_ssize_t,
    body: uint64_t,
    prefix: bytes,
    q: cython.p_uchar,
) -> cython.Py_ssize_t:
    """Writes the content header frame of a row; its length."""
    columns: uint32_t = frame.columns
    spans: Span[SPANS]
    flags: cython.int = 0
    given: cython.int = 0
    old: cython.p_uchar = cython.NULL
    bit: cython.int
    n: cython.Py_ssize_t
    if columns & PROPERTIES:
        n = ends_at(frame, PROPERTY_ENDS, row)
        old = frame.body + frame.at[PROPERTY_BYTES] + n
        n = ends_at(frame, PROPERTY_ENDS, row + 1) - n
        if n:
            given = _spans(old, n, cython.address(spans[0]))
            if given < 0:
                _refuse_row(row, "properties are broken")
            if given & HAS_USER_ID:
                _refuse_row(row, "user-id cannot be produced")
            if given & HAS_EXPIRATION and not _is_expiration(
                old + spans[BIT_EXPIRATION].at, spans[BIT_EXPIRATION].n
            ):
                _refuse_row(row, "expiration is no number of milliseconds")
            if (
                given & HAS_REPLY_TO
                and spans[BIT_REPLY_TO].n == 22
                and string.memcmp(old + spans[BIT_REPLY_TO].at + 1, b"amq.rabbitmq.reply-to", 21)
                == 0
            ):
                _refuse_row(row, "replies to the direct reply queue cannot be produced")
    p: cython.p_uchar = q + AMQP_FRAME_HEAD
    at: cython.Py_ssize_t = HEADER_PROPERTIES
    table: cython.p_uchar = cython.NULL
    for bit in range(BIT_CONTENT_TYPE, BIT_LAST - 1, -1):
        n = 0
        if bit == BIT_HEADERS:
            table = old + spans[BIT_HEADERS].at + 4 if given & HAS_HEADERS else cython.NULL
            n = _put_table(
                frame, row, table, spans[BIT_HEADERS].n - 4 if given & HAS_HEADERS else 0, p + at
            )
        elif bit == BIT_DELIVERY_MODE:
            p[at] = PERSISTENT
            n = 1
        elif bit == BIT_TIMESTAMP and columns & TIMESTAMP:
            micros: int64_t = cython.cast(int64_t, get64(frame.body + frame.at[TIMES] + 8 * row))
            if micros < 0:
                _refuse_row(row, "timestamp lies before 1970")
            store64(p + at, cython.cast(uint64_t, micros) // 1000000)
            n = 8
        elif bit == BIT_MESSAGE_ID and not given & HAS_MESSAGE_ID and prefix:
            n = len(prefix)
            string.memcpy(p + at + 1, bytes_pointer(prefix), n)
            n += _put_digits(p + at + 1 + n, frame.base + cython.cast(uint64_t, row))
            p[at] = cython.cast(cython.uchar, n)
            n += 1
        elif given >> bit & 1:
            n = spans[bit].n
            string.memcpy(p + at, old + spans[bit].at, n)
        if n:
            flags |= 1 << bit
            at += n
    if at > AMQP_PAYLOAD_MAX:
        _refuse_row(row, f"content header of {at} bytes does not fit a frame")
    q[0] = AMQP_HEADER
    q[1] = 0
    q[2] = 0
    store32(q + AMQP_SIZE, cython.cast(uint32_t, at))
    store32(p, CLASS_BASIC << 16)
    store64(p + HEADER_BODY_SIZE, body)
    p[HEADER_FLAGS] = cython.cast(cython.uchar, flags >> 8)
    p[HEADER_FLAGS + 1] = cython.cast(cython.uchar, flags & 255)
    p[at] = AMQP_END
    return at + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(check=False)
def _put_digits(q: cython.p_uchar, v: uint64_t) -> cython.Py_ssize_t:
    digits: cython.uchar[20]
    at: cython.int = 20
    while True:
        at -= 1
        digits[at] = cython.cast(cython.uchar, 48 + v % 10)
        v //= 10
        if v == 0:
            break
    string.memcpy(q, cython.address(digits[at]), 20 - at)
    return 20 - at


@cython.cfunc
@cython.exceptval(check=False)
def _put_body(q: cython.p_uchar, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.p_uchar:
    """Writes body frames of the size that records have; the pointer behind them."""
    while n:
        part: cython.Py_ssize_t = min(n, AMQP_PAYLOAD_MAX)
        q[0] = AMQP_BODY
        q[1] = 0
        q[2] = 0
        store32(q + AMQP_SIZE, cython.cast(uint32_t, part))
        string.memcpy(q + AMQP_FRAME_HEAD, p, part)
        q[AMQP_FRAME_HEAD + part] = AMQP_END
        q += part + AMQP_FRAME_OVERHEAD
        p += part
        n -= part
    return q


def encode_enqueue(
    frame: ColumnFrame,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    exchange: bytes,
    routing_key: bytes | None,
    message_id_prefix: bytes = b"",
):
    if frame is None or first < 0 or count < 1 or first > frame.rows - count:
        raise ValueError("rows lie outside the frame")
    columns: uint32_t = frame.columns
    if len(exchange) > 255 or (routing_key is not None and len(routing_key) > 255):
        raise ValueError("name of exchange or routing key is longer than 255 bytes")
    if len(message_id_prefix) > 235:
        raise ValueError("prefix of message ids is longer than 235 bytes")
    if routing_key is None and not columns & ROUTING_KEY:
        raise ValueError("the frame has no routing key column")
    head: bytes = bytes((len(exchange),)) + exchange
    if routing_key is not None:
        head += bytes((len(routing_key),)) + routing_key
    head_length: cython.Py_ssize_t = len(head)
    prefix: bytes = message_id_prefix
    more: cython.Py_ssize_t = head_length + _ROW_MORE_MAX + len(prefix)
    bound: cython.Py_ssize_t = command_bound(frame, first, count, more)
    if bound > _COMMAND_MAX:
        raise ValueError(f"rows of {bound} bytes do not fit a command")
    raw: cython.pointer(cext.PyObject) = cext.PyBytes_FromStringAndSize(cython.NULL, bound)
    start: cython.p_uchar = cython.cast(cython.p_uchar, cext.PyBytes_AS_STRING(raw))
    at: cython.Py_ssize_t = 0
    ends: cython.p_uchar = cython.cast(cython.p_uchar, stdlib.malloc(4 * (count + 1)))
    try:
        if ends == cython.NULL:
            raise MemoryError
        q: cython.p_uchar = start + ENQUEUE_RECORDS - COMMAND_HEADER_SIZE
        total: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(count):
            row: cython.Py_ssize_t = first + i
            put32(ends + 4 * i, cython.cast(uint32_t, q - start + COMMAND_HEADER_SIZE))
            string.memcpy(q, bytes_pointer(head), head_length)
            q += head_length
            low: cython.Py_ssize_t
            n: cython.Py_ssize_t
            if routing_key is None:
                low = ends_at(frame, ROUTING_ENDS, row)
                n = ends_at(frame, ROUTING_ENDS, row + 1) - low
                p: cython.p_uchar = frame.body + frame.at[ROUTING_KEYS] + low
                if n > 255 or not is_utf8(p, n):
                    _refuse_row(row, "routing key is longer than 255 bytes, or not UTF-8")
                q[0] = cython.cast(cython.uchar, n)
                string.memcpy(q + 1, p, n)
                q += 1 + n
            low = 0
            n = 0
            if columns & VALUE and not is_null(frame, VALUE_NULLS, row):
                low = ends_at(frame, VALUE_ENDS, row)
                n = ends_at(frame, VALUE_ENDS, row + 1) - low
            q += _put_header(frame, row, n, prefix, q)
            q = _put_body(q, frame.body + frame.at[VALUES] + low, n)
            total += n
        put32(ends + 4 * count, cython.cast(uint32_t, q - start + COMMAND_HEADER_SIZE))
        put64(start, total)
        # The table stands at a multiple of 4.
        used: cython.Py_ssize_t = q - start
        at = (used + 3) & ~3
        string.memset(q, 0, at - used)
        string.memcpy(start + at, ends, 4 * (count + 1))
        # On failure the object is gone and `raw` NULL.
        cext._PyBytes_Resize(cython.address(raw), at + 4 * (count + 1))
        data: bytes = cython.cast(bytes, raw)
    finally:
        stdlib.free(ends)
        if raw != cython.NULL:
            cext.Py_DECREF_raw(raw)
    return data, count, at + COMMAND_HEADER_SIZE


@cython.cfunc
@cython.exceptval(check=False)
def _is_queue_header(p: cython.p_uchar, k: cython.Py_ssize_t) -> cython.bint:
    """Returns whether queues act on a header of this name: see RECORD_HEADERS."""
    if k == 7:
        return string.memcmp(p, b"x-delay", 7) == 0
    if k == 10:
        return string.memcmp(p, b"x-group-id", 10) == 0
    return k == 12 and string.memcmp(p, b"x-deliver-at", 12) == 0


@cython.cfunc
@cython.exceptval(check=False)
def _has_queue_headers(frame: ColumnFrame, row: cython.Py_ssize_t) -> cython.bint:
    """Returns whether the column of headers has one for queues in a row."""
    names: cython.p_uchar = frame.body + frame.at[NAMES]
    i: cython.Py_ssize_t
    for i in range(ends_at(frame, LIST_ENDS, row), ends_at(frame, LIST_ENDS, row + 1)):
        low: cython.Py_ssize_t = ends_at(frame, NAME_ENDS, i)
        if _is_queue_header(names + low, ends_at(frame, NAME_ENDS, i + 1) - low):
            return True
    return False


def enqueue_flags(frame: ColumnFrame, first: cython.Py_ssize_t, count: cython.Py_ssize_t):
    if frame is None or first < 0 or count < 1 or first > frame.rows - count:
        raise ValueError("rows lie outside the frame")
    flags: cython.int = ENQUEUE_SAME_SIZE
    size: cython.Py_ssize_t = -1
    i: cython.Py_ssize_t
    for i in range(first, first + count):
        n: cython.Py_ssize_t = 0
        if frame.columns & VALUE and not is_null(frame, VALUE_NULLS, i):
            n = ends_at(frame, VALUE_ENDS, i + 1) - ends_at(frame, VALUE_ENDS, i)
        if size >= 0 and n != size:
            flags &= ~ENQUEUE_SAME_SIZE
        size = n
        # These headers take the place of those in the properties.
        own: cython.bint = frame.columns & HEADERS != 0 and not is_null(frame, HEADER_NULLS, i)
        if own and not flags & ENQUEUE_HEADERS and _has_queue_headers(frame, i):
            flags |= ENQUEUE_HEADERS
        if frame.columns & PROPERTIES:
            low: cython.Py_ssize_t = ends_at(frame, PROPERTY_ENDS, i)
            length: cython.Py_ssize_t = ends_at(frame, PROPERTY_ENDS, i + 1) - low
            if length >= HEADER_PROPERTIES:
                p: cython.p_uchar = frame.body + frame.at[PROPERTY_BYTES] + low
                bits: uint32_t = load16(p + HEADER_FLAGS)
                if bits & HAS_PRIORITY:
                    flags |= ENQUEUE_PRIORITY
                if bits & HAS_EXPIRATION:
                    flags |= ENQUEUE_EXPIRATION
                if bits & HAS_HEADERS and not own and not flags & ENQUEUE_HEADERS:
                    notes: cython.int = walk_properties(p, length)
                    if notes > 0 and notes & RECORD_HEADERS:
                        flags |= ENQUEUE_HEADERS
    return flags
