"""Columnar frames: records become Arrow's columns, columns become records. No object per row.

Layout: docs/formats/columnar-protocol.md. `ColumnWriter` reads records where they lie in their
blocks and remembers where each value is; only `finish` copies values, once, into the frame.
`ColumnFrame` checks a frame as a whole, so that all that follows may trust its buffers.

Buffers have one number everywhere, their place in the table of a frame with all columns: the
constants in columns.pxd.

Every length is compared with what is there before it is used. The naive twin of this module is
tests/unit/kernels/columns_reference.py.
"""

import cython
from crc32c import crc32c as _crc32c
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
    BIT_PRIORITY,
    BIT_REPLY_TO,
    BIT_TIMESTAMP,
    CLASS_BASIC,
    HAS_CONTENT_ENCODING,
    HAS_CONTENT_TYPE,
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
    MORE_FLAGS,
    PERSISTENT,
)
from cython.cimports.convoymq.kernels.batch import record_table
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    get64,
    load16,
    load32,
    load64,
    memory_view,
    put32,
    put64,
    store32,
    store64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.columns import (
    Py_DTSF_ADD_DOT_0,
    PyMem_Free,
    PyOS_double_to_string,
)
from cython.cimports.convoymq.kernels.content import walk_table, walk_value
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_HEADER_SIZE,
    ENQUEUE_EXPIRATION,
    ENQUEUE_PRIORITY,
    ENQUEUE_RECORDS,
    ENQUEUE_SAME_SIZE,
)
from cython.cimports.cpython import buffer as cbuffer
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

FRAME_HEADER_SIZE = 64
ROWS_MAX = 1 << 22
BODY_MAX = 1 << 30
COMPRESSIONS = ("", "zstd", "lz4")

_ALL = cython.declare(uint32_t, 1023)
_MAGIC = cython.declare(uint32_t, 0x46435643)
_ROWS_MAX = cython.declare(cython.Py_ssize_t, 1 << 22)
_BODY_MAX = cython.declare(cython.Py_ssize_t, 1 << 30)
_INT32_MAX = cython.declare(cython.Py_ssize_t, 0x7FFFFFFF)
_INT64_MAX = cython.declare(uint64_t, 0x7FFFFFFFFFFFFFFF)
_COMMAND_MAX = cython.declare(cython.Py_ssize_t, 512 << 20)
_EXPIRATION_MS_MAX = cython.declare(uint64_t, 315360000000)


# As C variables: literals above 63 bits would be Python numbers.
_HIGH_BITS = cython.declare(uint64_t, 0x8080808080808080)

_X_KEY = cython.declare(bytes, b"x-key")


# --- bytes -----------------------------------------------------------------------------------


def raw_bytearray(size: cython.Py_ssize_t) -> bytearray:
    if size < 0:
        raise ValueError(f"a buffer of {size} bytes")
    return cext.PyByteArray_FromStringAndSize(cython.NULL, size)


@cython.cfunc
@cython.inline
@cython.exceptval(-1)
def _room(area: cython.pointer(Area), n: cython.Py_ssize_t) -> cython.int:
    """Makes room for n bytes at the end; fresh bytes are zeros."""
    if area.end + n <= area.capacity:
        return 0
    return _grow(area, n)


@cython.cfunc
@cython.exceptval(-1)
def _grow(area: cython.pointer(Area), n: cython.Py_ssize_t) -> cython.int:
    capacity: cython.Py_ssize_t = max(area.end + n, area.capacity * 2, 256)
    grown: cython.p_void = stdlib.realloc(area.p, capacity)
    if grown == cython.NULL:
        raise MemoryError
    area.p = cython.cast(cython.p_uchar, grown)
    string.memset(area.p + area.capacity, 0, capacity - area.capacity)
    area.capacity = capacity
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(-1)
def _add(area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    _room(area, n)
    if n:
        string.memcpy(area.p + area.end, p, n)
    area.end += n
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_end(area: cython.pointer(Area), end: cython.Py_ssize_t) -> cython.void:
    """Appends an int32; the room was made before."""
    put32(area.p + area.end, cython.cast(uint32_t, end))
    area.end += 4


@cython.cfunc
@cython.exceptval(-1)
def _put_bit(area: cython.pointer(Area), i: cython.Py_ssize_t, bit: cython.bint) -> cython.int:
    """Sets bit i of a bitmap that has i bits so far."""
    if i & 7 == 0:
        _room(area, 1)
        area.p[area.end] = 0
        area.end += 1
    mask: cython.int = 1 << (i & 7)
    at: cython.Py_ssize_t = i >> 3
    if bit:
        area.p[at] |= mask
    else:
        area.p[at] &= 255 ^ mask
    return 0


# --- text ------------------------------------------------------------------------------------


@cython.cfunc
@cython.exceptval(check=False)
def _is_utf8(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    """Whether the bytes are UTF-8 as Python's strict decoder takes it."""
    at: cython.Py_ssize_t = 0
    c: cython.int
    d: cython.int
    while at < n:
        if n - at >= 8 and get64(p + at) & _HIGH_BITS == 0:
            at += 8
            continue
        c = p[at]
        if c < 0x80:
            at += 1
        elif c < 0xC2:
            return False
        elif c < 0xE0:
            if n - at < 2 or p[at + 1] & 0xC0 != 0x80:
                return False
            at += 2
        elif c < 0xF0:
            if n - at < 3 or p[at + 1] & 0xC0 != 0x80 or p[at + 2] & 0xC0 != 0x80:
                return False
            d = p[at + 1]
            # Too long a form, or a surrogate.
            if (c == 0xE0 and d < 0xA0) or (c == 0xED and d >= 0xA0):
                return False
            at += 3
        elif c < 0xF5:
            if (
                n - at < 4
                or p[at + 1] & 0xC0 != 0x80
                or p[at + 2] & 0xC0 != 0x80
                or p[at + 3] & 0xC0 != 0x80
            ):
                return False
            d = p[at + 1]
            if (c == 0xF0 and d < 0x90) or (c == 0xF4 and d >= 0x90):
                return False
            at += 4
        else:
            return False
    return True


@cython.cfunc
@cython.exceptval(-1)
def _add_text(area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Appends text; what is not UTF-8 is replaced."""
    if _is_utf8(p, n):
        return _add(area, p, n)
    mended: bytes = copy_bytes(p, n).decode("utf-8", "replace").encode()
    return _add(area, bytes_pointer(mended), len(mended))


@cython.cfunc
@cython.exceptval(-1)
def _add_number(area: cython.pointer(Area), v: uint64_t, negative: cython.bint) -> cython.int:
    digits: cython.uchar[24]
    at: cython.int = 24
    while True:
        at -= 1
        digits[at] = cython.cast(cython.uchar, 48 + v % 10)
        v //= 10
        if v == 0:
            break
    if negative:
        at -= 1
        digits[at] = 45
    return _add(area, cython.address(digits[at]), 24 - at)


@cython.cfunc
@cython.exceptval(-1)
def _add_signed(area: cython.pointer(Area), v: int64_t) -> cython.int:
    u: uint64_t = cython.cast(uint64_t, v)
    if v < 0:
        return _add_number(area, ~u + 1, True)
    return _add_number(area, u, False)


@cython.cfunc
@cython.exceptval(-1)
def _add_decimal(area: cython.pointer(Area), scale: cython.int, v: uint64_t) -> cython.int:
    """`v` divided by ten to the power of `scale`, with all its digits."""
    start: cython.Py_ssize_t = area.end
    _add_number(area, v, False)
    if scale == 0:
        return 0
    digits: cython.Py_ssize_t = area.end - start
    missing: cython.Py_ssize_t = scale + 1 - digits
    p: cython.p_uchar
    if missing > 0:
        _room(area, missing)
        p = area.p + start
        string.memmove(p + missing, p, digits)
        string.memset(p, 48, missing)
        area.end += missing
        digits += missing
    _room(area, 1)
    p = area.p + start + digits - scale
    string.memmove(p + 1, p, scale)
    p[0] = 46
    area.end += 1
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _add_double(area: cython.pointer(Area), v: cython.double) -> cython.int:
    if v != v:
        return _add(area, b"NaN", 3)
    if v - v != 0:
        if v > 0:
            return _add(area, b"Infinity", 8)
        return _add(area, b"-Infinity", 9)
    text: cython.p_char = PyOS_double_to_string(v, 114, 0, Py_DTSF_ADD_DOT_0, cython.NULL)
    try:
        _add(area, cython.cast(cython.p_uchar, text), string.strlen(text))
    finally:
        PyMem_Free(text)
    return 0


_HEX = cython.declare(bytes, b"0123456789abcdef")


@cython.cfunc
@cython.exceptval(-1)
def _add_quoted(area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Appends a JSON string."""
    mended: bytes = None
    if not _is_utf8(p, n):
        mended = copy_bytes(p, n).decode("utf-8", "replace").encode()
        p = bytes_pointer(mended)
        n = len(mended)
    _room(area, 6 * n + 2)
    q: cython.p_uchar = area.p + area.end
    hex: cython.p_uchar = bytes_pointer(_HEX)
    q[0] = 34
    at: cython.Py_ssize_t = 1
    i: cython.Py_ssize_t
    for i in range(n):
        c: cython.uchar = p[i]
        if c >= 32 and c != 34 and c != 92:
            q[at] = c
            at += 1
            continue
        q[at] = 92
        at += 2
        if c == 34 or c == 92:
            q[at - 1] = c
        elif c == 8:
            q[at - 1] = 98
        elif c == 9:
            q[at - 1] = 116
        elif c == 10:
            q[at - 1] = 110
        elif c == 12:
            q[at - 1] = 102
        elif c == 13:
            q[at - 1] = 114
        else:
            q[at - 1] = 117
            q[at] = 48
            q[at + 1] = 48
            q[at + 2] = hex[c >> 4]
            q[at + 3] = hex[c & 15]
            at += 4
    q[at] = 34
    area.end += at + 1
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _add_json(
    area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t, nested: cython.bint
) -> cython.int:
    """Appends the n bytes of a field value, type code first, that `walk_value` has found whole."""
    code: cython.int = p[0]
    q: cython.p_uchar = p + 1
    v: uint64_t
    f: cython.float
    d: cython.double
    if code == b"S" or code == b"x":
        if nested:
            return _add_quoted(area, p + 5, n - 5)
        return _add(area, p + 5, n - 5)
    if code == b"t":
        if q[0]:
            return _add(area, b"true", 4)
        return _add(area, b"false", 5)
    if code == b"V":
        return _add(area, b"null", 4)
    if code == b"b":
        return _add_signed(area, cython.cast(cython.schar, q[0]))
    if code == b"B":
        return _add_number(area, q[0], False)
    if code == b"s":
        return _add_signed(area, cython.cast(cython.short, load16(q)))
    if code == b"u":
        return _add_number(area, load16(q), False)
    if code == b"I":
        return _add_signed(area, cython.cast(cython.int, load32(q)))
    if code == b"i":
        return _add_number(area, load32(q), False)
    if code == b"l" or code == b"L":
        return _add_signed(area, cython.cast(int64_t, load64(q)))
    if code == b"T":
        return _add_number(area, load64(q), False)
    if code == b"D":
        return _add_decimal(area, q[0], load32(q + 1))
    if code == b"f":
        v32: uint32_t = load32(q)
        string.memcpy(cython.address(f), cython.address(v32), 4)
        return _add_double(area, f)
    if code == b"d":
        v = load64(q)
        string.memcpy(cython.address(d), cython.address(v), 8)
        return _add_double(area, d)
    table: cython.bint = code == b"F"
    if table:
        _add(area, b"{", 1)
    else:
        _add(area, b"[", 1)
    at: cython.Py_ssize_t = 5
    while at < n:
        if at > 5:
            _add(area, b",", 1)
        if table:
            _add_quoted(area, p + at + 1, p[at])
            _add(area, b":", 1)
            at += 1 + p[at]
        step: cython.Py_ssize_t = walk_value(p + at, n - at, 1)
        if step < 0:
            raise ValueError("header of a record is damaged")
        _add_json(area, p + at, step, True)
        at += step
    if table:
        return _add(area, b"}", 1)
    return _add(area, b"]", 1)


# --- the layout of a frame ---------------------------------------------------------------------


@cython.cfunc
@cython.exceptval(check=False)
def _first_area(column: uint32_t) -> cython.int:
    """The first buffer of a column; -1 when there is no such column."""
    if column == OFFSET:
        return OFFSETS
    if column == TIMESTAMP:
        return TIMES
    if column == KEY:
        return KEY_NULLS
    if column == VALUE:
        return VALUE_NULLS
    if column == HEADERS:
        return HEADER_NULLS
    if column == EXCHANGE:
        return EXCHANGE_ENDS
    if column == ROUTING_KEY:
        return ROUTING_ENDS
    if column == PROPERTIES:
        return PROPERTY_ENDS
    if column == DELIVERY_COUNT:
        return DELIVERY_COUNTS
    if column == REDELIVERED:
        return REDELIVERIES
    return -1


@cython.cfunc
@cython.exceptval(check=False)
def _column_of(area: cython.int) -> uint32_t:
    """The column that a buffer belongs to."""
    if area == OFFSETS:
        return OFFSET
    if area == TIMES:
        return TIMESTAMP
    if area < VALUE_NULLS:
        return KEY
    if area < HEADER_NULLS:
        return VALUE
    if area < EXCHANGE_ENDS:
        return HEADERS
    if area < ROUTING_ENDS:
        return EXCHANGE
    if area < PROPERTY_ENDS:
        return ROUTING_KEY
    if area < DELIVERY_COUNTS:
        return PROPERTIES
    return DELIVERY_COUNT if area == DELIVERY_COUNTS else REDELIVERED


@cython.cfunc
@cython.exceptval(check=False)
def _area_count(columns: uint32_t) -> cython.int:
    n: cython.int = 0
    i: cython.int
    for i in range(AREAS):
        if columns & _column_of(i):
            n += 1
    return n


@cython.cfunc
@cython.exceptval(-1)
def _check_columns(columns: uint32_t) -> cython.int:
    if columns == 0 or columns & ~_ALL:
        raise ValueError(f"columns {columns} are not known")
    return 0


@cython.cfunc
def _compressed(compression: str, body) -> bytes:
    if compression == "zstd":
        import zstandard

        return zstandard.ZstdCompressor(level=1).compress(body)
    if compression == "lz4":
        import lz4.frame

        return lz4.frame.compress(body)
    raise ValueError(f"compression {compression!r} is not known")


@cython.cfunc
def _decompressed(kind: cython.int, stored, length: cython.Py_ssize_t) -> bytes:
    """The body; never more than `length` bytes are made, whatever the stored ones say."""
    if kind == ZSTD:
        import zstandard

        try:
            said = zstandard.get_frame_parameters(stored).content_size
            if said != length:
                raise ValueError(f"compressed body says it has {said} bytes, not {length}")
            body = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(f"compressed body is broken: {error}") from None
    else:
        import lz4.frame

        try:
            decompressor = lz4.frame.LZ4FrameDecompressor()
            body = decompressor.decompress(stored, max_length=length + 1)
            if not decompressor.eof or decompressor.unused_data:
                raise ValueError("compressed body is cut off or too long")
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"compressed body is broken: {error}") from None
    if len(body) != length:
        raise ValueError(f"body has {len(body)} bytes instead of {length}")
    return body


@cython.cfunc
def _assemble(
    columns: uint32_t,
    rows: cython.Py_ssize_t,
    base: uint64_t,
    next: uint64_t,
    sources: cython.pointer(Source),
    pieces: cython.pointer(Piece),
    piece_count: cython.Py_ssize_t,
) -> bytes:
    """The frame without its checksum. The pieces stand where a source has no pointer."""
    count: cython.Py_ssize_t = _area_count(columns)
    body_length: cython.Py_ssize_t = 0
    i: cython.int
    for i in range(AREAS):
        if columns & _column_of(i):
            body_length += (sources[i].n + 7) & ~7
    if body_length > _BODY_MAX:
        raise ValueError(f"columns of {body_length} bytes do not fit a frame")
    start: cython.Py_ssize_t = HEAD_SIZE + TABLE_ROW * count
    data: bytes = uninitialized(start + body_length)
    p: cython.p_uchar = bytes_pointer(data)
    string.memset(p, 0, HEAD_SIZE)
    entry: cython.p_uchar = p + HEAD_SIZE
    at: cython.Py_ssize_t = 0
    k: cython.Py_ssize_t
    n: cython.Py_ssize_t
    for i in range(AREAS):
        if not columns & _column_of(i):
            continue
        n = sources[i].n
        put64(entry, at)
        put64(entry + 8, n)
        entry += TABLE_ROW
        q: cython.p_uchar = p + start + at
        if n & 7:
            put64(q + (n & ~7), 0)
        if sources[i].p == cython.NULL:
            if n:
                for k in range(piece_count):
                    string.memcpy(q, pieces[k].p, pieces[k].n)
                    q += pieces[k].n
        elif n:
            string.memcpy(q, sources[i].p, n)
        at += (n + 7) & ~7
    put32(p, _MAGIC)
    p[HEAD_VERSION] = VERSION
    put32(p + HEAD_COLUMNS, columns)
    put32(p + HEAD_ROWS, cython.cast(uint32_t, rows))
    put64(p + HEAD_BASE, base)
    put64(p + HEAD_NEXT, next)
    put32(p + HEAD_BUFFERS, cython.cast(uint32_t, count))
    put64(p + HEAD_STORED, body_length)
    put64(p + HEAD_LENGTH, body_length)
    return data


@cython.cfunc
def _sealed(data: bytes, compression: str) -> bytes:
    """The frame with its checksum, and compressed if that makes it smaller.

    `data` is fresh from `_assemble`: nobody else has seen it, so its header may be written."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r} is not known")
    p: cython.p_uchar = bytes_pointer(data)
    length: cython.Py_ssize_t = get64(p + HEAD_LENGTH)
    if compression and length:
        start: cython.Py_ssize_t = len(data) - length
        packed: bytes = _compressed(compression, memory_view(p + start, length))
        if len(packed) < length:
            data = data[:start] + packed
            p = bytes_pointer(data)
            p[HEAD_COMPRESSION] = ZSTD if compression == "zstd" else LZ4
            put64(p + HEAD_STORED, len(packed))
    put32(p + HEAD_CRC, _checksum(p, len(data)))
    return data


@cython.cfunc
def _checksum(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
    return _crc32c(memory_view(p + HEAD_STORED, n - HEAD_STORED), _crc32c(memory_view(p, HEAD_CRC)))


# --- records to columns ------------------------------------------------------------------------


@cython.cclass
class ColumnWriter:
    def __cinit__(self):
        string.memset(cython.address(self.areas[0]), 0, AREAS * cython.sizeof(Area))
        self.pieces = cython.NULL

    def __init__(self, columns, max_rows, max_bytes):
        _check_columns(columns)
        self.columns = columns
        self.max_rows = max(1, min(max_rows, _ROWS_MAX))
        self.max_bytes = min(max_bytes, _BODY_MAX)
        self.rows = 0
        self.full = False
        self.dense = True
        self.key_nulls = False
        self.header_nulls = False
        self.text_nulls = False
        self.entries = 0
        self.value_bytes = 0
        self.piece_count = 0
        self.blocks = []
        i: cython.int
        ends: cython.int = 0
        for i in range(AREAS):
            self.areas[i].end = 0
        for i in (
            KEY_ENDS,
            VALUE_ENDS,
            LIST_ENDS,
            NAME_ENDS,
            TEXT_ENDS,
            EXCHANGE_ENDS,
            ROUTING_ENDS,
            PROPERTY_ENDS,
        ):
            if columns & _column_of(i):
                _room(cython.address(self.areas[i]), 4)
                _put_end(cython.address(self.areas[i]), 0)
                ends += 1
        # What a row costs besides its bytes: 8 for int64, 4 for int32, a byte for validity.
        self.row_cost = 4 * (ends + 2) + 2
        for i in range(2):
            if columns & _column_of(i):
                self.row_cost += 8
        # Header, table, paddings: `bytes` is never below the length of the frame.
        self.bytes = (
            HEAD_SIZE + 24 * cython.cast(cython.Py_ssize_t, _area_count(columns)) + 4 * ends
        )

    def __dealloc__(self):
        i: cython.int
        for i in range(AREAS):
            stdlib.free(self.areas[i].p)
        stdlib.free(self.pieces)

    def append(
        self,
        block: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        base: uint64_t,
        time_ms: uint64_t,
        acquired: uint32_t = 0,
        delivered: uint32_t = 0,
    ):
        if block is None:
            raise ValueError("no block")
        source: cython.p_uchar = bytes_pointer(block)
        total: uint32_t = 0
        table: cython.Py_ssize_t = record_table(source, len(block), command, cython.address(total))
        if (
            table < 0
            or first < 0
            or count < 0
            or first > cython.cast(cython.Py_ssize_t, total)
            or count > cython.cast(cython.Py_ssize_t, total) - first
        ):
            raise ValueError("records lie outside their command")
        if base > _INT64_MAX - _ROWS_MAX or time_ms > _INT64_MAX // 1000:
            raise ValueError("offset or time does not fit 63 bits")
        if count > self.max_rows - self.rows:
            count = self.max_rows - self.rows
            self.full = True
        if count == 0:
            return 0
        low: cython.Py_ssize_t = get32(source + table + 4 * first)
        end: cython.Py_ssize_t = get32(source + table + 4 * (first + count))
        if low < ENQUEUE_RECORDS or end < low or command + end > table:
            raise ValueError("record table is damaged")
        self.reserve_rows(count)
        if not self.blocks or self.blocks[len(self.blocks) - 1] is not block:
            self.blocks.append(block)
        taken: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        try:
            for i in range(count):
                high: cython.Py_ssize_t = get32(source + table + 4 * (first + i + 1))
                if high < low or high > end:
                    raise ValueError("record table is damaged")
                if self.add_row(source + command + low, high - low) == 0:
                    self.full = True
                    break
                taken += 1
                low = high
        finally:
            # Also when a record is damaged: the rows before it stand.
            self.finish_rows(taken, base, time_ms, acquired, delivered)
        if self.rows == self.max_rows or self.bytes >= self.max_bytes:
            self.full = True
        return taken

    @cython.cfunc
    @cython.exceptval(-1)
    def reserve_rows(self, count: cython.Py_ssize_t) -> cython.int:
        """Makes room in all that grows by a fixed number of bytes a row."""
        columns: uint32_t = self.columns
        areas: cython.pointer(Area) = self.areas
        if columns & OFFSET:
            _room(areas + OFFSETS, 8 * count)
        if columns & TIMESTAMP:
            _room(areas + TIMES, 8 * count)
        if columns & KEY:
            _room(areas + KEY_ENDS, 4 * count)
        if columns & VALUE:
            _room(areas + VALUE_ENDS, 4 * count)
            self.reserve_pieces(count)
        if columns & HEADERS:
            _room(areas + LIST_ENDS, 4 * count)
        if columns & EXCHANGE:
            _room(areas + EXCHANGE_ENDS, 4 * count)
        if columns & ROUTING_KEY:
            _room(areas + ROUTING_ENDS, 4 * count)
        if columns & PROPERTIES:
            _room(areas + PROPERTY_ENDS, 4 * count)
        if columns & DELIVERY_COUNT:
            _room(areas + DELIVERY_COUNTS, 4 * count)
        if columns & REDELIVERED:
            _room(areas + REDELIVERIES, 4 * count)
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def reserve_pieces(self, count: cython.Py_ssize_t) -> cython.int:
        if self.piece_count + count <= self.piece_capacity:
            return 0
        capacity: cython.Py_ssize_t = max(self.piece_count + count, self.piece_capacity * 2, 16)
        grown: cython.p_void = stdlib.realloc(self.pieces, capacity * cython.sizeof(Piece))
        if grown == cython.NULL:
            raise MemoryError
        self.pieces = cython.cast(cython.pointer(Piece), grown)
        self.piece_capacity = capacity
        return 0

    @cython.cfunc
    @cython.exceptval(-2)
    def add_row(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        """One record. 1 = taken, 0 = it does not fit any more and nothing has changed."""
        columns: uint32_t = self.columns
        if n < 2:
            raise ValueError("record is damaged")
        exchange: cython.Py_ssize_t = p[0]
        if exchange + 2 > n:
            raise ValueError("record is damaged")
        routing: cython.Py_ssize_t = p[exchange + 1]
        at: cython.Py_ssize_t = exchange + routing + 2
        if n - at < AMQP_FRAME_OVERHEAD + HEADER_PROPERTIES or p[at] != AMQP_HEADER:
            raise ValueError("record is damaged")
        header: cython.p_uchar = p + at + AMQP_FRAME_HEAD
        header_length: cython.Py_ssize_t = load32(p + at + AMQP_SIZE)
        if header_length < HEADER_PROPERTIES or header_length > n - at - AMQP_FRAME_OVERHEAD:
            raise ValueError("content header of a record is damaged")
        body: uint64_t = load64(header + HEADER_BODY_SIZE)
        at += header_length + AMQP_FRAME_OVERHEAD
        cost: cython.Py_ssize_t = self.row_cost
        area: cython.pointer(Area)
        entries: cython.Py_ssize_t = self.entries
        pieces: cython.Py_ssize_t = self.piece_count
        key: cython.p_uchar = cython.NULL
        key_length: cython.Py_ssize_t = 0

        # The body frames: where the value lies.
        seen: uint64_t = 0
        size: cython.Py_ssize_t
        while at < n:
            if n - at < AMQP_FRAME_OVERHEAD or p[at] != AMQP_BODY:
                raise ValueError("body of a record is damaged")
            size = load32(p + at + AMQP_SIZE)
            if size > n - at - AMQP_FRAME_OVERHEAD:
                raise ValueError("body of a record is damaged")
            if columns & VALUE:
                if pieces == self.piece_capacity:
                    self.reserve_pieces(pieces - self.piece_count + 1)
                self.pieces[pieces].p = p + at + AMQP_FRAME_HEAD
                self.pieces[pieces].n = size
                pieces += 1
            seen += size
            at += size + AMQP_FRAME_OVERHEAD
        if seen != body:
            raise ValueError("body of a record is damaged")
        if columns & VALUE:
            cost += cython.cast(cython.Py_ssize_t, body)

        # The header table: key and headers.
        has_table: cython.bint = False
        if columns & (KEY | HEADERS):
            flags: uint32_t = load16(header + HEADER_FLAGS)
            if flags & HAS_HEADERS:
                at = HEADER_PROPERTIES
                if flags & HAS_CONTENT_TYPE:
                    at += 1 + (header[at] if at < header_length else 0)
                if flags & HAS_CONTENT_ENCODING:
                    at += 1 + (header[at] if at < header_length else 0)
                if header_length - at < 4:
                    raise ValueError("content header of a record is damaged")
                size = load32(header + at)
                if size > header_length - at - 4:
                    raise ValueError("content header of a record is damaged")
                has_table = True
                try:
                    if self.scan_headers(header + at + 4, size, columns & HEADERS != 0) < 0:
                        raise ValueError("header table of a record is damaged")
                except BaseException:
                    self.drop_headers(entries)
                    raise
                key = self.key
                key_length = self.key_length
                if columns & HEADERS:
                    cost += (
                        9 * (self.entries - entries)
                        + self.areas[NAMES].end
                        + self.areas[TEXTS].end
                        - get32(self.areas[NAME_ENDS].p + 4 * entries)
                        - get32(self.areas[TEXT_ENDS].p + 4 * entries)
                    )
            if key == cython.NULL and exchange:
                key = p + exchange + 2
                key_length = routing
            if columns & KEY:
                cost += key_length
        if columns & EXCHANGE:
            cost += exchange
        if columns & ROUTING_KEY:
            cost += routing
        if columns & PROPERTIES:
            cost += header_length
        if self.bytes + cost > self.max_bytes and self.rows:
            self.drop_headers(entries)
            return 0
        if self.bytes + cost > _BODY_MAX:
            self.drop_headers(entries)
            raise ValueError("a record is too large for a columnar frame")

        # It is taken.
        self.bytes += cost
        if columns & KEY:
            area = cython.address(self.areas[KEYS])
            if key != cython.NULL:
                _add(area, key, key_length)
            else:
                self.key_nulls = True
            _put_bit(cython.address(self.areas[KEY_NULLS]), self.rows, key != cython.NULL)
            _put_end(cython.address(self.areas[KEY_ENDS]), area.end)
        if columns & VALUE:
            self.piece_count = pieces
            self.value_bytes += cython.cast(cython.Py_ssize_t, body)
            _put_end(cython.address(self.areas[VALUE_ENDS]), self.value_bytes)
        if columns & HEADERS:
            if not has_table:
                self.header_nulls = True
            _put_bit(cython.address(self.areas[HEADER_NULLS]), self.rows, has_table)
            _put_end(cython.address(self.areas[LIST_ENDS]), self.entries)
        if columns & (EXCHANGE | ROUTING_KEY | PROPERTIES):
            if columns & EXCHANGE:
                area = cython.address(self.areas[EXCHANGES])
                _add(area, p + 1, exchange)
                _put_end(cython.address(self.areas[EXCHANGE_ENDS]), area.end)
            if columns & ROUTING_KEY:
                area = cython.address(self.areas[ROUTING_KEYS])
                _add(area, p + exchange + 2, routing)
                _put_end(cython.address(self.areas[ROUTING_ENDS]), area.end)
            if columns & PROPERTIES:
                area = cython.address(self.areas[PROPERTY_BYTES])
                _add(area, header, header_length)
                _put_end(cython.address(self.areas[PROPERTY_ENDS]), area.end)
        self.rows += 1
        return 1

    @cython.cfunc
    @cython.exceptval(-2)
    def scan_headers(
        self, p: cython.p_uchar, n: cython.Py_ssize_t, wanted: cython.bint
    ) -> cython.int:
        """Finds the key among the fields and, when wanted, appends the others; -1 = broken."""
        self.key = cython.NULL
        self.key_length = 0
        x_key: cython.p_uchar = bytes_pointer(_X_KEY)
        at: cython.Py_ssize_t = 0
        while at < n:
            k: cython.Py_ssize_t = p[at]
            if k >= n - at - 1:
                return -1
            name: cython.p_uchar = p + at + 1
            value: cython.p_uchar = name + k
            step: cython.Py_ssize_t = walk_value(value, n - at - 1 - k, 1)
            if step < 0:
                return -1
            if (
                k == 5
                and self.key == cython.NULL
                and (value[0] == b"S" or value[0] == b"x")
                and string.memcmp(name, x_key, 5) == 0
            ):
                self.key = value + 5
                self.key_length = step - 5
            elif wanted:
                self.add_header(name, k, value, step)
            at += 1 + k + step
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def add_header(
        self,
        name: cython.p_uchar,
        k: cython.Py_ssize_t,
        value: cython.p_uchar,
        n: cython.Py_ssize_t,
    ) -> cython.int:
        names: cython.pointer(Area) = cython.address(self.areas[NAMES])
        texts: cython.pointer(Area) = cython.address(self.areas[TEXTS])
        void: cython.bint = value[0] == b"V"
        _room(cython.address(self.areas[NAME_ENDS]), 4)
        _room(cython.address(self.areas[TEXT_ENDS]), 4)
        _put_bit(cython.address(self.areas[TEXT_NULLS]), self.entries, not void)
        _add_text(names, name, k)
        if void:
            self.text_nulls = True
        else:
            _add_json(texts, value, n, False)
        if names.end > _BODY_MAX or texts.end > _BODY_MAX:
            raise ValueError("a record is too large for a columnar frame")
        _put_end(cython.address(self.areas[NAME_ENDS]), names.end)
        _put_end(cython.address(self.areas[TEXT_ENDS]), texts.end)
        self.entries += 1
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def drop_headers(self, entries: cython.Py_ssize_t) -> cython.int:
        """Takes back the headers behind the first `entries`."""
        if not self.columns & HEADERS:
            return 0
        self.entries = entries
        self.areas[NAME_ENDS].end = 4 * (entries + 1)
        self.areas[TEXT_ENDS].end = 4 * (entries + 1)
        self.areas[NAMES].end = get32(self.areas[NAME_ENDS].p + 4 * entries)
        self.areas[TEXTS].end = get32(self.areas[TEXT_ENDS].p + 4 * entries)
        self.areas[TEXT_NULLS].end = (entries + 7) >> 3
        if entries & 7:
            self.areas[TEXT_NULLS].p[entries >> 3] &= (1 << (entries & 7)) - 1
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def finish_rows(
        self,
        taken: cython.Py_ssize_t,
        base: uint64_t,
        time_ms: uint64_t,
        acquired: uint32_t,
        delivered: uint32_t,
    ) -> cython.void:
        """The columns that all rows of a run share."""
        if taken == 0:
            return
        i: cython.Py_ssize_t
        p: cython.p_uchar
        if self.rows == taken:
            self.base = base
            self.dense = True
        elif base != self.expected:
            self.dense = False
        self.expected = base + cython.cast(uint64_t, taken)
        if self.columns & OFFSET:
            p = self.areas[OFFSETS].p + self.areas[OFFSETS].end
            for i in range(taken):
                put64(p + 8 * i, base + cython.cast(uint64_t, i))
            self.areas[OFFSETS].end += 8 * taken
        if self.columns & TIMESTAMP:
            p = self.areas[TIMES].p + self.areas[TIMES].end
            for i in range(taken):
                put64(p + 8 * i, time_ms * 1000)
            self.areas[TIMES].end += 8 * taken
        if self.columns & DELIVERY_COUNT:
            p = self.areas[DELIVERY_COUNTS].p + self.areas[DELIVERY_COUNTS].end
            for i in range(taken):
                put32(p + 4 * i, min(delivered, 0x7FFFFFFF))
            self.areas[DELIVERY_COUNTS].end += 4 * taken
        if self.columns & REDELIVERED:
            p = self.areas[REDELIVERIES].p + self.areas[REDELIVERIES].end
            for i in range(taken):
                put32(p + 4 * i, min(acquired, 0x7FFFFFFF))
            self.areas[REDELIVERIES].end += 4 * taken

    def finish(self, next: uint64_t, compression: str = ""):
        return _sealed(self.assembled(next), compression)

    def frame(self, next: uint64_t):
        made: ColumnFrame = ColumnFrame.__new__(ColumnFrame)
        made.read(self.assembled(next), _BODY_MAX, False)
        return made

    @cython.cfunc
    def assembled(self, next: uint64_t):
        sources: Source[AREAS]
        i: cython.int
        for i in range(AREAS):
            sources[i].p = self.areas[i].p
            sources[i].n = self.areas[i].end
        if self.dense:
            sources[OFFSETS].n = 0
        if not self.key_nulls:
            sources[KEY_NULLS].n = 0
        if not self.header_nulls:
            sources[HEADER_NULLS].n = 0
        if not self.text_nulls:
            sources[TEXT_NULLS].n = 0
        sources[VALUES].p = cython.NULL
        sources[VALUES].n = self.value_bytes
        return _assemble(
            self.columns,
            self.rows,
            self.base if self.rows else next,
            next,
            cython.address(sources[0]),
            self.pieces,
            self.piece_count,
        )


# --- reading a frame ---------------------------------------------------------------------------


# The collector must clear neither this nor `view` while the buffer taken from it is held. No cycle
# goes through a view of bytes, so it need not look here at all.
@cython.no_gc
@cython.cclass
class ColumnFrame:
    def __cinit__(self):
        self.holding = False

    def __init__(self, data, body_max: cython.Py_ssize_t = 1 << 30):
        self.read(data, body_max, True)

    @cython.cfunc
    @cython.exceptval(-1)
    def read(self, data, body_max: cython.Py_ssize_t, sealed: cython.bint) -> cython.int:
        """Checks and keeps a frame. `sealed`: it came from elsewhere, with a checksum."""
        self.hold(data)
        p: cython.p_uchar = cython.cast(cython.p_uchar, self.held.buf)
        n: cython.Py_ssize_t = self.held.len
        if n < HEAD_SIZE:
            raise ValueError("columnar frame is shorter than its header")
        if get32(p) != _MAGIC:
            raise ValueError("not a columnar frame")
        if p[HEAD_VERSION] != VERSION or p[HEAD_VERSION + 1]:
            raise ValueError(
                f"columnar frame of version {p[HEAD_VERSION] | (p[HEAD_VERSION + 1] << 8)}"
            )
        kind: cython.int = p[HEAD_COMPRESSION] | (p[HEAD_COMPRESSION + 1] << 8)
        if kind > LZ4:
            raise ValueError(f"compression {kind} is not known")
        columns: uint32_t = get32(p + HEAD_COLUMNS)
        _check_columns(columns)
        rows: cython.Py_ssize_t = get32(p + HEAD_ROWS)
        if rows > _ROWS_MAX:
            raise ValueError(f"columnar frame of {rows} rows, at most {_ROWS_MAX} are allowed")
        self.base = get64(p + HEAD_BASE)
        self.next = get64(p + HEAD_NEXT)
        if self.base > _INT64_MAX - cython.cast(uint64_t, rows) or self.next > _INT64_MAX:
            raise ValueError("offset of a columnar frame does not fit 63 bits")
        count: cython.Py_ssize_t = get32(p + HEAD_BUFFERS)
        if count != _area_count(columns):
            raise ValueError(f"{count} buffers do not fit columns {columns}")
        start: cython.Py_ssize_t = HEAD_SIZE + TABLE_ROW * count
        if n < start or get64(p + HEAD_STORED) != cython.cast(uint64_t, n - start):
            raise ValueError("columnar frame is cut off or too long")
        length: uint64_t = get64(p + HEAD_LENGTH)
        if body_max > _BODY_MAX:
            body_max = _BODY_MAX
        if body_max < 0 or length > cython.cast(uint64_t, body_max) or get64(p + HEAD_SPARE):
            raise ValueError("header of a columnar frame is broken, or its body too large")
        if sealed and get32(p + HEAD_CRC) != _checksum(p, n):
            raise ValueError("columnar frame checksum does not fit")
        self.columns = columns
        self.rows = rows
        if kind == UNCOMPRESSED:
            if length != cython.cast(uint64_t, n - start):
                raise ValueError("header of a columnar frame is broken")
            self.view = self.view[start:]
            self.body = p + start
        else:
            made: bytes = _decompressed(kind, self.view[start:], length)
            self.view = memoryview(made)
            self.body = bytes_pointer(made)
        at: cython.Py_ssize_t = 0
        entry: cython.p_uchar = p + HEAD_SIZE
        i: cython.int
        for i in range(AREAS):
            self.at[i] = 0
            self.length[i] = 0
            if not columns & _column_of(i):
                continue
            size: uint64_t = get64(entry + 8)
            if get64(entry) != cython.cast(uint64_t, at) or size > length - at:
                raise ValueError("buffer table of a columnar frame is broken")
            self.at[i] = at
            self.length[i] = cython.cast(cython.Py_ssize_t, size)
            at += (self.length[i] + 7) & ~7
            if cython.cast(uint64_t, at) > length:
                raise ValueError("buffer table of a columnar frame is broken")
            entry += TABLE_ROW
        if cython.cast(uint64_t, at) != length:
            raise ValueError("buffer table of a columnar frame is broken")
        self.check()
        if kind:
            # All that is needed from now on is the body.
            self.holding = False
            cbuffer.PyBuffer_Release(cython.address(self.held))
        return 0

    def __dealloc__(self):
        if self.holding:
            cbuffer.PyBuffer_Release(cython.address(self.held))

    @cython.cfunc
    @cython.exceptval(-1)
    def hold(self, data) -> cython.int:
        """Keeps the bytes in place. What others could still change is copied first."""
        view = memoryview(data)
        if not view.readonly or not view.contiguous:
            view = memoryview(bytes(view))
        elif view.ndim != 1 or view.itemsize != 1:
            view = view.cast("B")
        if self.holding:
            raise ValueError("a columnar frame is read once")
        cbuffer.PyObject_GetBuffer(view, cython.address(self.held), cbuffer.PyBUF_SIMPLE)
        self.holding = True
        self.view = view
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def check(self) -> cython.int:
        """Every buffer is as long as its column needs, and offsets stay inside their bytes."""
        n: cython.Py_ssize_t = self.rows
        columns: uint32_t = self.columns
        if columns & OFFSET and self.length[OFFSETS] and self.length[OFFSETS] != 8 * n:
            raise ValueError("offset column is damaged")
        if columns & TIMESTAMP and self.length[TIMES] != 8 * n:
            raise ValueError("timestamp column is damaged")
        if columns & KEY:
            self.check_validity(KEY_NULLS, n)
            self.check_ends(KEY_ENDS, n, self.length[KEYS])
        self.value_max = 0
        if columns & VALUE:
            self.check_validity(VALUE_NULLS, n)
            self.value_max = self.check_ends(VALUE_ENDS, n, self.length[VALUES])
        if columns & HEADERS:
            self.check_validity(HEADER_NULLS, n)
            self.check_ends(LIST_ENDS, n, -1)
            m: cython.Py_ssize_t = self.ends_at(LIST_ENDS, n)
            self.check_ends(NAME_ENDS, m, self.length[NAMES])
            self.check_validity(TEXT_NULLS, m)
            self.check_ends(TEXT_ENDS, m, self.length[TEXTS])
        i: cython.int
        for i in (EXCHANGE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
            if columns & _column_of(i):
                self.check_ends(i, n, self.length[i + 1])
        for i in (DELIVERY_COUNTS, REDELIVERIES):
            if columns & _column_of(i) and self.length[i] != 4 * n:
                raise ValueError("count column is damaged")
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def check_ends(
        self, area: cython.int, n: cython.Py_ssize_t, limit: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """The longest of n pieces; `limit` = length of their bytes, -1 = any."""
        if self.length[area] != 4 * (n + 1):
            raise ValueError("offsets of a column are damaged")
        p: cython.p_uchar = self.body + self.at[area]
        low: uint32_t = get32(p)
        longest: uint32_t = 0
        fallen: uint32_t = low
        i: cython.Py_ssize_t
        for i in range(n):
            high: uint32_t = get32(p + 4 * i + 4)
            fallen |= high < low
            longest = max(longest, high - low)
            low = high
        if fallen or low > 0x7FFFFFFF or (limit >= 0 and low != cython.cast(uint32_t, limit)):
            raise ValueError("offsets of a column are damaged")
        return longest

    @cython.cfunc
    @cython.exceptval(-1)
    def check_validity(self, area: cython.int, n: cython.Py_ssize_t) -> cython.int:
        if self.length[area] and self.length[area] != (n + 7) >> 3:
            raise ValueError("validity of a column is damaged")
        return 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def ends_at(self, area: cython.int, i: cython.Py_ssize_t) -> cython.Py_ssize_t:
        return get32(self.body + self.at[area] + 4 * i)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def is_null(self, area: cython.int, i: cython.Py_ssize_t) -> cython.bint:
        if self.length[area] == 0:
            return False
        return (self.body + self.at[area])[i >> 3] >> (i & 7) & 1 == 0

    def buffers(self, column: uint32_t):
        area: cython.int = _first_area(column)
        if area < 0 or not self.columns & column:
            raise ValueError(f"the frame has no column {column}")
        view = self.view
        found: list = []
        while area < AREAS and _column_of(area) == column:
            found.append(view[self.at[area] : self.at[area] + self.length[area]])
            area += 1
        return found

    def offsets(self):
        if not self.columns & OFFSET:
            raise ValueError("the frame has no offset column")
        if self.length[OFFSETS] or self.rows == 0:
            return self.view[self.at[OFFSETS] : self.at[OFFSETS] + self.length[OFFSETS]].cast("q")
        made: bytes = uninitialized(8 * self.rows)
        p: cython.p_uchar = bytes_pointer(made)
        i: cython.Py_ssize_t
        for i in range(self.rows):
            put64(p + 8 * i, self.base + cython.cast(uint64_t, i))
        return memoryview(made).cast("q")

    def runs(self, column: uint32_t):
        if column != EXCHANGE and column != ROUTING_KEY or not self.columns & column:
            raise ValueError(f"the frame has no text column {column}")
        area: cython.int = _first_area(column)
        p: cython.p_uchar = self.body + self.at[area + 1]
        found: list = []
        first: cython.Py_ssize_t = 0
        start: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t = 0
        low: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        for i in range(self.rows):
            high: cython.Py_ssize_t = self.ends_at(area, i + 1)
            if i == 0 or high - low != length or string.memcmp(p + start, p + low, length) != 0:
                if i:
                    found.append((first, i - first, copy_bytes(p + start, length)))
                first = i
                start = low
                length = high - low
            low = high
        if self.rows:
            found.append((first, self.rows - first, copy_bytes(p + start, length)))
        return found

    def rows_within(
        self, first: cython.Py_ssize_t, bytes_max: cython.Py_ssize_t, fixed: cython.Py_ssize_t = 128
    ):
        if first < 0 or first > self.rows:
            raise ValueError("rows lie outside the frame")
        low: cython.Py_ssize_t = first
        high: cython.Py_ssize_t = self.rows
        # The bound rises with the number of rows.
        while low < high:
            middle: cython.Py_ssize_t = (low + high + 1) >> 1
            if _command_bound(self, first, middle - first, fixed) <= bytes_max:
                low = middle
            else:
                high = middle - 1
        return max(low - first, min(1, self.rows - first))


# --- columns to a frame ------------------------------------------------------------------------


def build_frame(columns, rows, base, next, buffers, compression=""):
    _check_columns(columns)
    if rows < 0 or rows > ROWS_MAX:
        raise ValueError(f"columnar frame of {rows} rows, at most {ROWS_MAX} are allowed")
    views = [_flat(item) for item in buffers]
    if len(views) != _area_count(columns):
        raise ValueError(f"{len(views)} buffers do not fit columns {columns}")
    wanted: uint32_t = columns
    area: cython.int
    parts: dict = {}
    for area in range(AREAS):
        if wanted & _column_of(area):
            parts[area] = views[len(parts)]
    _trim(parts, wanted, rows)
    sources: Source[AREAS]
    string.memset(cython.address(sources[0]), 0, AREAS * cython.sizeof(Source))
    held: cbuffer.Py_buffer[AREAS]
    holding: cython.int = 0
    try:
        for area, part in parts.items():
            cbuffer.PyObject_GetBuffer(part, cython.address(held[holding]), cbuffer.PyBUF_SIMPLE)
            sources[area].p = cython.cast(cython.p_uchar, held[holding].buf)
            sources[area].n = held[holding].len
            holding += 1
        made: bytes = _assemble(
            wanted, rows, base, next, cython.address(sources[0]), cython.NULL, 0
        )
    finally:
        for area in range(holding):
            cbuffer.PyBuffer_Release(cython.address(held[area]))
    made = _sealed(made, "")
    # Arrays of others are not trusted: what is built is what can be read.
    ColumnFrame(made)
    return _sealed(made, compression) if compression else made


def _flat(item):
    view = memoryview(b"" if item is None else item)
    return view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")


@cython.cfunc
@cython.exceptval(-1)
def _trim(parts: dict, columns: uint32_t, rows: cython.Py_ssize_t) -> cython.int:
    """Cuts Arrow's buffers, which may be longer, to what the frame has."""
    area: cython.int
    for area in (OFFSETS, TIMES):
        if columns & _column_of(area):
            parts[area] = parts[area][: 8 * rows]
    for area in (DELIVERY_COUNTS, REDELIVERIES):
        if columns & _column_of(area):
            parts[area] = parts[area][: 4 * rows]
    if columns & KEY:
        parts[KEY_NULLS] = parts[KEY_NULLS][: (rows + 7) >> 3]
        _trim_pieces(parts, KEY_ENDS, rows)
    if columns & VALUE:
        parts[VALUE_NULLS] = parts[VALUE_NULLS][: (rows + 7) >> 3]
        _trim_pieces(parts, VALUE_ENDS, rows)
    for area in (EXCHANGE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
        if columns & _column_of(area):
            _trim_pieces(parts, area, rows)
    if columns & HEADERS:
        parts[HEADER_NULLS] = parts[HEADER_NULLS][: (rows + 7) >> 3]
        parts[LIST_ENDS] = _trimmed_ends(parts[LIST_ENDS], rows)
        entries: cython.Py_ssize_t = _int32_at(parts[LIST_ENDS], rows)
        if _int32_at(parts[LIST_ENDS], 0) != 0:
            raise ValueError("headers of a slice: copy the array first")
        parts[TEXT_NULLS] = parts[TEXT_NULLS][: (entries + 7) >> 3]
        _trim_pieces(parts, NAME_ENDS, entries)
        _trim_pieces(parts, TEXT_ENDS, entries)
    return 0


@cython.cfunc
def _trimmed_ends(view, n: cython.Py_ssize_t):
    if n == 0 and len(view) < 4:
        return memoryview(bytes(4))
    if len(view) < 4 * (n + 1):
        raise ValueError("offsets of a column are too short")
    return view[: 4 * (n + 1)]


@cython.cfunc
@cython.exceptval(-1, check=True)
def _int32_at(view, i: cython.Py_ssize_t) -> cython.Py_ssize_t:
    value: cython.Py_ssize_t = int.from_bytes(view[4 * i : 4 * i + 4], "little", signed=True)
    if value < 0:
        raise ValueError("offsets of a column are damaged")
    return value


@cython.cfunc
@cython.exceptval(-1)
def _trim_pieces(parts: dict, area: cython.int, n: cython.Py_ssize_t) -> cython.int:
    """Offsets that begin at 0, and just the bytes that they speak of."""
    view = _trimmed_ends(parts[area], n)
    low: cython.Py_ssize_t = _int32_at(view, 0)
    high: cython.Py_ssize_t = _int32_at(view, n)
    data = parts[area + 1]
    if high < low or high > len(data):
        raise ValueError("offsets of a column are damaged")
    if low:
        moved: bytes = uninitialized(4 * (n + 1))
        source: bytes = bytes(view)
        p: cython.p_uchar = bytes_pointer(moved)
        q: cython.p_uchar = bytes_pointer(source)
        i: cython.Py_ssize_t
        for i in range(n + 1):
            put32(p + 4 * i, get32(q + 4 * i) - cython.cast(uint32_t, low))
        view = memoryview(moved)
        data = data[low:high]
    else:
        data = data[:high]
    parts[area] = view
    parts[area + 1] = data
    return 0


# --- columns to records ------------------------------------------------------------------------


@cython.cfunc
@cython.exceptval(-1)
def _refuse_row(row: cython.Py_ssize_t, text: str) -> cython.int:
    raise ValueError(f"row {row}: {text}")


@cython.cfunc
@cython.exceptval(-2)
def _spans(p: cython.p_uchar, n: cython.Py_ssize_t, spans: cython.pointer(Span)) -> cython.int:
    """Where each property of the payload lies, by its flag bit; its flags, -1 = broken."""
    if n < HEADER_PROPERTIES:
        return -1
    flags: cython.int = load16(p + HEADER_FLAGS)
    if flags & MORE_FLAGS:
        return -1
    # Bit 1 has no property.
    flags &= HAS_MASK
    at: cython.Py_ssize_t = HEADER_PROPERTIES
    bit: cython.int
    size: cython.Py_ssize_t
    for bit in range(BIT_CONTENT_TYPE, BIT_LAST - 1, -1):
        spans[bit].at = at
        spans[bit].n = 0
        if not flags >> bit & 1:
            continue
        if bit == BIT_HEADERS:
            if n - at < 4:
                return -1
            size = load32(p + at)
            if size > n - at - 4 or walk_table(p + at + 4, size, 1) < 0:
                return -1
            size += 4
        elif bit == BIT_DELIVERY_MODE or bit == BIT_PRIORITY:
            size = 1
        elif bit == BIT_TIMESTAMP:
            size = 8
        else:
            if at >= n:
                return -1
            size = 1 + cython.cast(cython.Py_ssize_t, p[at])
        if size > n - at:
            return -1
        spans[bit].n = size
        at += size
    return flags if at == n else -1


@cython.cfunc
@cython.exceptval(check=False)
def _is_expiration(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    """Whether a short string is a number of milliseconds that the broker accepts."""
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
    q[0] = 83 if _is_utf8(p, n) else 120
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
    has_key: cython.bint = columns & KEY != 0 and not frame.is_null(KEY_NULLS, row)
    i: cython.Py_ssize_t
    low: cython.Py_ssize_t
    k: cython.Py_ssize_t
    name: cython.p_uchar
    q += 4
    if columns & HEADERS and not frame.is_null(HEADER_NULLS, row):
        names: cython.p_uchar = frame.body + frame.at[NAMES]
        texts: cython.p_uchar = frame.body + frame.at[TEXTS]
        for i in range(frame.ends_at(LIST_ENDS, row), frame.ends_at(LIST_ENDS, row + 1)):
            low = frame.ends_at(NAME_ENDS, i)
            k = frame.ends_at(NAME_ENDS, i + 1) - low
            name = names + low
            if k > 255 or not _is_utf8(name, k):
                _refuse_row(row, "name of a header is longer than 255 bytes, or not UTF-8")
            if has_key and _is_key_name(name, k):
                continue
            low = frame.ends_at(TEXT_ENDS, i)
            q = _put_field(
                q,
                name,
                k,
                texts + low,
                frame.ends_at(TEXT_ENDS, i + 1) - low,
                frame.is_null(TEXT_NULLS, i),
            )
    elif old != cython.NULL:
        if not has_key:
            string.memcpy(q, old, old_length)
            q += old_length
        else:
            at: cython.Py_ssize_t = 0
            while at < old_length:
                k = old[at]
                size: cython.Py_ssize_t = walk_value(old + at + 1 + k, old_length - at - 1 - k, 1)
                if size < 0:
                    _refuse_row(row, "properties are broken")
                size += 1 + k
                if not _is_key_name(old + at + 1, k):
                    string.memcpy(q, old + at, size)
                    q += size
                at += size
    elif not has_key:
        return 0
    if has_key:
        low = frame.ends_at(KEY_ENDS, row)
        q = _put_field(
            q,
            bytes_pointer(_X_KEY),
            5,
            frame.body + frame.at[KEYS] + low,
            frame.ends_at(KEY_ENDS, row + 1) - low,
            False,
        )
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
        n = frame.ends_at(PROPERTY_ENDS, row)
        old = frame.body + frame.at[PROPERTY_BYTES] + n
        n = frame.ends_at(PROPERTY_ENDS, row + 1) - n
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


@cython.cfunc
def _command_bound(
    frame: ColumnFrame, first: cython.Py_ssize_t, count: cython.Py_ssize_t, fixed: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Bytes that the body of the command cannot exceed. `fixed`: of every row."""
    last: cython.Py_ssize_t = first + count
    bound: cython.Py_ssize_t = 8 + count * fixed + 4 * (count + 2) + 8
    area: cython.int
    for area in (KEY_ENDS, VALUE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
        if frame.columns & _column_of(area):
            bound += frame.ends_at(area, last) - frame.ends_at(area, first)
    if frame.columns & VALUE:
        n: cython.Py_ssize_t = frame.ends_at(VALUE_ENDS, last) - frame.ends_at(VALUE_ENDS, first)
        bound += 8 * (n // AMQP_PAYLOAD_MAX + count)
    if frame.columns & HEADERS:
        low: cython.Py_ssize_t = frame.ends_at(LIST_ENDS, first)
        high: cython.Py_ssize_t = frame.ends_at(LIST_ENDS, last)
        bound += 6 * (high - low)
        for area in (NAME_ENDS, TEXT_ENDS):
            bound += frame.ends_at(area, high) - frame.ends_at(area, low)
    return bound


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
    # Routing key's length, header frame, table with key, delivery mode, timestamp, message id.
    bound: cython.Py_ssize_t = _command_bound(
        frame, first, count, head_length + 1 + 22 + 15 + 1 + 8 + 21 + len(prefix)
    )
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
                low = frame.ends_at(ROUTING_ENDS, row)
                n = frame.ends_at(ROUTING_ENDS, row + 1) - low
                p: cython.p_uchar = frame.body + frame.at[ROUTING_KEYS] + low
                if n > 255 or not _is_utf8(p, n):
                    _refuse_row(row, "routing key is longer than 255 bytes, or not UTF-8")
                q[0] = cython.cast(cython.uchar, n)
                string.memcpy(q + 1, p, n)
                q += 1 + n
            low = 0
            n = 0
            if columns & VALUE and not frame.is_null(VALUE_NULLS, row):
                low = frame.ends_at(VALUE_ENDS, row)
                n = frame.ends_at(VALUE_ENDS, row + 1) - low
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


def enqueue_flags(frame: ColumnFrame, first: cython.Py_ssize_t, count: cython.Py_ssize_t):
    if frame is None or first < 0 or count < 1 or first > frame.rows - count:
        raise ValueError("rows lie outside the frame")
    flags: cython.int = ENQUEUE_SAME_SIZE
    size: cython.Py_ssize_t = -1
    i: cython.Py_ssize_t
    for i in range(first, first + count):
        n: cython.Py_ssize_t = 0
        if frame.columns & VALUE and not frame.is_null(VALUE_NULLS, i):
            n = frame.ends_at(VALUE_ENDS, i + 1) - frame.ends_at(VALUE_ENDS, i)
        if size >= 0 and n != size:
            flags &= ~ENQUEUE_SAME_SIZE
        size = n
        if frame.columns & PROPERTIES:
            low: cython.Py_ssize_t = frame.ends_at(PROPERTY_ENDS, i)
            if frame.ends_at(PROPERTY_ENDS, i + 1) - low >= HEADER_PROPERTIES:
                bits: uint32_t = load16(frame.body + frame.at[PROPERTY_BYTES] + low + HEADER_FLAGS)
                if bits & HAS_PRIORITY:
                    flags |= ENQUEUE_PRIORITY
                if bits & HAS_EXPIRATION:
                    flags |= ENQUEUE_EXPIRATION
    return flags
