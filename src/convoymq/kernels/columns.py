"""Columnar frames: records become Arrow's columns, columns become records. No object per row.

Layout: docs/formats/columnar-protocol.md. `ColumnWriter` reads records where they lie in their
blocks and remembers where each value is; only `finish` copies values, once, into the frame.
`ColumnFrame` checks a frame as a whole, so that all that follows may trust its buffers.

Buffers have one number everywhere, their place in the table of a frame with all columns:

    0 offset    1 timestamp    2 3 4 key    5 6 7 value    8 headers' validity    9 list
    10 11 names    12 13 14 texts    15 16 exchange    17 18 routing key    19 20 properties
    21 delivery count    22 redelivered

Every length is compared with what is there before it is used. The naive twin of this module is
tests/unit/kernels/columns_reference.py.
"""

import cython
from crc32c import crc32c as _crc32c
from cython.cimports.convoymq.kernels import cext
from cython.cimports.convoymq.kernels.batch import get32, get64, put32, put64, record_table
from cython.cimports.convoymq.kernels.columns import (
    Py_DTSF_ADD_DOT_0,
    PyMem_Free,
    PyOS_double_to_string,
)
from cython.cimports.convoymq.kernels.frames import walk_table, walk_value
from cython.cimports.cpython import buffer as cbuffer
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

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

FRAME_HEADER_SIZE = 64
ROWS_MAX = 1 << 22
BODY_MAX = 1 << 30
COMPRESSIONS = ("", "zstd", "lz4")

_ALL = cython.declare(uint32_t, 1023)
_MAGIC = cython.declare(uint32_t, 0x46435643)
_HEAD = cython.declare(cython.Py_ssize_t, 64)
_ROWS_MAX = cython.declare(cython.Py_ssize_t, 1 << 22)
_BODY_MAX = cython.declare(cython.Py_ssize_t, 1 << 30)
_INT32_MAX = cython.declare(cython.Py_ssize_t, 0x7FFFFFFF)
_INT64_MAX = cython.declare(uint64_t, 0x7FFFFFFFFFFFFFFF)
_PAYLOAD_MAX = cython.declare(cython.Py_ssize_t, 131064)
_COMMAND_MAX = cython.declare(cython.Py_ssize_t, 512 << 20)
_EXPIRATION_MS_MAX = cython.declare(uint64_t, 315360000000)
_AREAS = cython.declare(cython.int, 23)

_KEY_NULLS = cython.declare(cython.int, 2)
_KEY_ENDS = cython.declare(cython.int, 3)
_KEYS = cython.declare(cython.int, 4)
_VALUE_NULLS = cython.declare(cython.int, 5)
_VALUE_ENDS = cython.declare(cython.int, 6)
_VALUES = cython.declare(cython.int, 7)
_HEADER_NULLS = cython.declare(cython.int, 8)
_LIST_ENDS = cython.declare(cython.int, 9)
_NAME_ENDS = cython.declare(cython.int, 10)
_NAMES = cython.declare(cython.int, 11)
_TEXT_NULLS = cython.declare(cython.int, 12)
_TEXT_ENDS = cython.declare(cython.int, 13)
_TEXTS = cython.declare(cython.int, 14)
_EXCHANGE_ENDS = cython.declare(cython.int, 15)
_ROUTING_ENDS = cython.declare(cython.int, 17)
_PROPERTY_ENDS = cython.declare(cython.int, 19)

# As C variables: literals above 63 bits would be Python numbers.
_HIGH_BITS = cython.declare(uint64_t, 0x8080808080808080)

_X_KEY = cython.declare(bytes, b"x-key")
_PSEUDO_QUEUE = cython.declare(bytes, b"amq.rabbitmq.reply-to")


# --- bytes -----------------------------------------------------------------------------------


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _load16(p: cython.p_uchar) -> uint32_t:
    return (cython.cast(uint32_t, p[0]) << 8) | p[1]


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _load32(p: cython.p_uchar) -> uint32_t:
    v: uint32_t
    string.memcpy(cython.address(v), p, 4)
    return cext.be32toh(v)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _load64(p: cython.p_uchar) -> uint64_t:
    v: uint64_t
    string.memcpy(cython.address(v), p, 8)
    return cext.be64toh(v)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _store32(p: cython.p_uchar, v: uint32_t) -> cython.void:
    v = cext.htobe32(v)
    string.memcpy(p, cython.address(v), 4)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _store64(p: cython.p_uchar, v: uint64_t) -> cython.void:
    v = cext.htobe64(v)
    string.memcpy(p, cython.address(v), 8)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _pointer(data: bytes) -> cython.p_uchar:
    return cython.cast(
        cython.p_uchar, cext.PyBytes_AS_STRING(cython.cast(cython.pointer(cext.PyObject), data))
    )


@cython.cfunc
def _copy(p: cython.p_uchar, n: cython.Py_ssize_t) -> bytes:
    return cython.cast(bytes, cython.cast(cython.p_char, p)[:n])


@cython.cfunc
def _view(p: cython.p_uchar, n: cython.Py_ssize_t):
    return cext.PyMemoryView_FromMemory(cython.cast(cython.p_char, p), n, cext.PyBUF_READ)


@cython.cfunc
def _uninitialized(n: cython.Py_ssize_t) -> bytes:
    """A bytes object that is filled before anybody sees it."""
    raw: cython.pointer(cext.PyObject) = cext.PyBytes_FromStringAndSize(cython.NULL, n)
    data: bytes = cython.cast(bytes, raw)
    cext.Py_DECREF_raw(raw)
    return data


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
    mended: bytes = _copy(p, n).decode("utf-8", "replace").encode()
    return _add(area, _pointer(mended), len(mended))


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
        mended = _copy(p, n).decode("utf-8", "replace").encode()
        p = _pointer(mended)
        n = len(mended)
    _room(area, 6 * n + 2)
    q: cython.p_uchar = area.p + area.end
    hex: cython.p_uchar = _pointer(_HEX)
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
        return _add_signed(area, cython.cast(cython.short, _load16(q)))
    if code == b"u":
        return _add_number(area, _load16(q), False)
    if code == b"I":
        return _add_signed(area, cython.cast(cython.int, _load32(q)))
    if code == b"i":
        return _add_number(area, _load32(q), False)
    if code == b"l" or code == b"L":
        return _add_signed(area, cython.cast(int64_t, _load64(q)))
    if code == b"T":
        return _add_number(area, _load64(q), False)
    if code == b"D":
        return _add_decimal(area, q[0], _load32(q + 1))
    if code == b"f":
        v32: uint32_t = _load32(q)
        string.memcpy(cython.address(f), cython.address(v32), 4)
        return _add_double(area, f)
    if code == b"d":
        v = _load64(q)
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
    if column == 1:
        return 0
    if column == 2:
        return 1
    if column == 4:
        return 2
    if column == 8:
        return 5
    if column == 16:
        return 8
    if column == 32:
        return 15
    if column == 64:
        return 17
    if column == 128:
        return 19
    if column == 256:
        return 21
    if column == 512:
        return 22
    return -1


@cython.cfunc
@cython.exceptval(check=False)
def _column_of(area: cython.int) -> uint32_t:
    """The column that a buffer belongs to."""
    if area == 0:
        return 1
    if area == 1:
        return 2
    if area < 5:
        return 4
    if area < 8:
        return 8
    if area < 15:
        return 16
    if area < 17:
        return 32
    if area < 19:
        return 64
    if area < 21:
        return 128
    return 256 if area == 21 else 512


@cython.cfunc
@cython.exceptval(check=False)
def _area_count(columns: uint32_t) -> cython.int:
    n: cython.int = 0
    i: cython.int
    for i in range(_AREAS):
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
    if kind == 1:
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
    for i in range(_AREAS):
        if columns & _column_of(i):
            body_length += (sources[i].n + 7) & ~7
    if body_length > _BODY_MAX:
        raise ValueError(f"columns of {body_length} bytes do not fit a frame")
    start: cython.Py_ssize_t = _HEAD + 16 * count
    data: bytes = _uninitialized(start + body_length)
    p: cython.p_uchar = _pointer(data)
    string.memset(p, 0, _HEAD)
    entry: cython.p_uchar = p + _HEAD
    at: cython.Py_ssize_t = 0
    k: cython.Py_ssize_t
    n: cython.Py_ssize_t
    for i in range(_AREAS):
        if not columns & _column_of(i):
            continue
        n = sources[i].n
        put64(entry, at)
        put64(entry + 8, n)
        entry += 16
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
    p[4] = 1
    put32(p + 8, columns)
    put32(p + 12, cython.cast(uint32_t, rows))
    put64(p + 16, base)
    put64(p + 24, next)
    put32(p + 32, cython.cast(uint32_t, count))
    put64(p + 40, body_length)
    put64(p + 48, body_length)
    return data


@cython.cfunc
def _sealed(data: bytes, compression: str) -> bytes:
    """The frame with its checksum, and compressed if that makes it smaller.

    `data` is fresh from `_assemble`: nobody else has seen it, so its header may be written."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r} is not known")
    p: cython.p_uchar = _pointer(data)
    length: cython.Py_ssize_t = get64(p + 48)
    if compression and length:
        start: cython.Py_ssize_t = len(data) - length
        packed: bytes = _compressed(compression, _view(p + start, length))
        if len(packed) < length:
            data = data[:start] + packed
            p = _pointer(data)
            p[6] = 1 if compression == "zstd" else 2
            put64(p + 40, len(packed))
    put32(p + 36, _checksum(p, len(data)))
    return data


@cython.cfunc
def _checksum(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
    return _crc32c(_view(p + 40, n - 40), _crc32c(_view(p, 36)))


# --- records to columns ------------------------------------------------------------------------


@cython.cclass
class ColumnWriter:
    def __cinit__(self):
        string.memset(cython.address(self.areas[0]), 0, 23 * cython.sizeof(Area))
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
        for i in range(_AREAS):
            self.areas[i].end = 0
        for i in (3, 6, 9, 10, 13, 15, 17, 19):
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
        self.bytes = _HEAD + 24 * cython.cast(cython.Py_ssize_t, _area_count(columns)) + 4 * ends

    def __dealloc__(self):
        i: cython.int
        for i in range(23):
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
        source: cython.p_uchar = _pointer(block)
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
        if low < 40 or end < low or command + end > table:
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
        if columns & 1:
            _room(areas, 8 * count)
        if columns & 2:
            _room(areas + 1, 8 * count)
        if columns & 4:
            _room(areas + _KEY_ENDS, 4 * count)
        if columns & 8:
            _room(areas + _VALUE_ENDS, 4 * count)
            self.reserve_pieces(count)
        if columns & 16:
            _room(areas + _LIST_ENDS, 4 * count)
        if columns & 32:
            _room(areas + _EXCHANGE_ENDS, 4 * count)
        if columns & 64:
            _room(areas + _ROUTING_ENDS, 4 * count)
        if columns & 128:
            _room(areas + _PROPERTY_ENDS, 4 * count)
        if columns & 256:
            _room(areas + 21, 4 * count)
        if columns & 512:
            _room(areas + 22, 4 * count)
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
        if n - at < 22 or p[at] != 2:
            raise ValueError("record is damaged")
        header: cython.p_uchar = p + at + 7
        header_length: cython.Py_ssize_t = _load32(p + at + 3)
        if header_length < 14 or header_length > n - at - 8:
            raise ValueError("content header of a record is damaged")
        body: uint64_t = _load64(header + 4)
        at += header_length + 8
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
            if n - at < 8 or p[at] != 3:
                raise ValueError("body of a record is damaged")
            size = _load32(p + at + 3)
            if size > n - at - 8:
                raise ValueError("body of a record is damaged")
            if columns & 8:
                if pieces == self.piece_capacity:
                    self.reserve_pieces(pieces - self.piece_count + 1)
                self.pieces[pieces].p = p + at + 7
                self.pieces[pieces].n = size
                pieces += 1
            seen += size
            at += size + 8
        if seen != body:
            raise ValueError("body of a record is damaged")
        if columns & 8:
            cost += cython.cast(cython.Py_ssize_t, body)

        # The header table: key and headers.
        has_table: cython.bint = False
        if columns & 20:
            flags: uint32_t = _load16(header + 12)
            if flags & 0x2000:
                at = 14
                if flags & 0x8000:
                    at += 1 + (header[at] if at < header_length else 0)
                if flags & 0x4000:
                    at += 1 + (header[at] if at < header_length else 0)
                if header_length - at < 4:
                    raise ValueError("content header of a record is damaged")
                size = _load32(header + at)
                if size > header_length - at - 4:
                    raise ValueError("content header of a record is damaged")
                has_table = True
                try:
                    if self.scan_headers(header + at + 4, size, columns & 16 != 0) < 0:
                        raise ValueError("header table of a record is damaged")
                except BaseException:
                    self.drop_headers(entries)
                    raise
                key = self.key
                key_length = self.key_length
                if columns & 16:
                    cost += (
                        9 * (self.entries - entries)
                        + self.areas[_NAMES].end
                        + self.areas[_TEXTS].end
                        - get32(self.areas[_NAME_ENDS].p + 4 * entries)
                        - get32(self.areas[_TEXT_ENDS].p + 4 * entries)
                    )
            if key == cython.NULL and exchange:
                key = p + exchange + 2
                key_length = routing
            if columns & 4:
                cost += key_length
        if columns & 32:
            cost += exchange
        if columns & 64:
            cost += routing
        if columns & 128:
            cost += header_length
        if self.bytes + cost > self.max_bytes and self.rows:
            self.drop_headers(entries)
            return 0
        if self.bytes + cost > _BODY_MAX:
            self.drop_headers(entries)
            raise ValueError("a record is too large for a columnar frame")

        # It is taken.
        self.bytes += cost
        if columns & 4:
            area = cython.address(self.areas[_KEYS])
            if key != cython.NULL:
                _add(area, key, key_length)
            else:
                self.key_nulls = True
            _put_bit(cython.address(self.areas[_KEY_NULLS]), self.rows, key != cython.NULL)
            _put_end(cython.address(self.areas[_KEY_ENDS]), area.end)
        if columns & 8:
            self.piece_count = pieces
            self.value_bytes += cython.cast(cython.Py_ssize_t, body)
            _put_end(cython.address(self.areas[_VALUE_ENDS]), self.value_bytes)
        if columns & 16:
            if not has_table:
                self.header_nulls = True
            _put_bit(cython.address(self.areas[_HEADER_NULLS]), self.rows, has_table)
            _put_end(cython.address(self.areas[_LIST_ENDS]), self.entries)
        if columns & 224:
            if columns & 32:
                area = cython.address(self.areas[_EXCHANGE_ENDS + 1])
                _add(area, p + 1, exchange)
                _put_end(cython.address(self.areas[_EXCHANGE_ENDS]), area.end)
            if columns & 64:
                area = cython.address(self.areas[_ROUTING_ENDS + 1])
                _add(area, p + exchange + 2, routing)
                _put_end(cython.address(self.areas[_ROUTING_ENDS]), area.end)
            if columns & 128:
                area = cython.address(self.areas[_PROPERTY_ENDS + 1])
                _add(area, header, header_length)
                _put_end(cython.address(self.areas[_PROPERTY_ENDS]), area.end)
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
        x_key: cython.p_uchar = _pointer(_X_KEY)
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
        names: cython.pointer(Area) = cython.address(self.areas[_NAMES])
        texts: cython.pointer(Area) = cython.address(self.areas[_TEXTS])
        void: cython.bint = value[0] == b"V"
        _room(cython.address(self.areas[_NAME_ENDS]), 4)
        _room(cython.address(self.areas[_TEXT_ENDS]), 4)
        _put_bit(cython.address(self.areas[_TEXT_NULLS]), self.entries, not void)
        _add_text(names, name, k)
        if void:
            self.text_nulls = True
        else:
            _add_json(texts, value, n, False)
        if names.end > _BODY_MAX or texts.end > _BODY_MAX:
            raise ValueError("a record is too large for a columnar frame")
        _put_end(cython.address(self.areas[_NAME_ENDS]), names.end)
        _put_end(cython.address(self.areas[_TEXT_ENDS]), texts.end)
        self.entries += 1
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def drop_headers(self, entries: cython.Py_ssize_t) -> cython.int:
        """Takes back the headers behind the first `entries`."""
        if not self.columns & 16:
            return 0
        self.entries = entries
        self.areas[_NAME_ENDS].end = 4 * (entries + 1)
        self.areas[_TEXT_ENDS].end = 4 * (entries + 1)
        self.areas[_NAMES].end = get32(self.areas[_NAME_ENDS].p + 4 * entries)
        self.areas[_TEXTS].end = get32(self.areas[_TEXT_ENDS].p + 4 * entries)
        self.areas[_TEXT_NULLS].end = (entries + 7) >> 3
        if entries & 7:
            self.areas[_TEXT_NULLS].p[entries >> 3] &= (1 << (entries & 7)) - 1
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
        if self.columns & 1:
            p = self.areas[0].p + self.areas[0].end
            for i in range(taken):
                put64(p + 8 * i, base + cython.cast(uint64_t, i))
            self.areas[0].end += 8 * taken
        if self.columns & 2:
            p = self.areas[1].p + self.areas[1].end
            for i in range(taken):
                put64(p + 8 * i, time_ms * 1000)
            self.areas[1].end += 8 * taken
        if self.columns & 256:
            p = self.areas[21].p + self.areas[21].end
            for i in range(taken):
                put32(p + 4 * i, min(delivered, 0x7FFFFFFF))
            self.areas[21].end += 4 * taken
        if self.columns & 512:
            p = self.areas[22].p + self.areas[22].end
            for i in range(taken):
                put32(p + 4 * i, min(acquired, 0x7FFFFFFF))
            self.areas[22].end += 4 * taken

    def finish(self, next: uint64_t, compression: str = ""):
        return _sealed(self.assembled(next), compression)

    def frame(self, next: uint64_t):
        made: ColumnFrame = ColumnFrame.__new__(ColumnFrame)
        made.read(self.assembled(next), _BODY_MAX, False)
        return made

    @cython.cfunc
    def assembled(self, next: uint64_t):
        sources: Source[23]
        i: cython.int
        for i in range(_AREAS):
            sources[i].p = self.areas[i].p
            sources[i].n = self.areas[i].end
        if self.dense:
            sources[0].n = 0
        if not self.key_nulls:
            sources[_KEY_NULLS].n = 0
        if not self.header_nulls:
            sources[_HEADER_NULLS].n = 0
        if not self.text_nulls:
            sources[_TEXT_NULLS].n = 0
        sources[_VALUES].p = cython.NULL
        sources[_VALUES].n = self.value_bytes
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
        if n < _HEAD:
            raise ValueError("columnar frame is shorter than its header")
        if get32(p) != _MAGIC:
            raise ValueError("not a columnar frame")
        if p[4] != 1 or p[5]:
            raise ValueError(f"columnar frame of version {p[4] | (p[5] << 8)}")
        kind: cython.int = p[6] | (p[7] << 8)
        if kind > 2:
            raise ValueError(f"compression {kind} is not known")
        columns: uint32_t = get32(p + 8)
        _check_columns(columns)
        rows: cython.Py_ssize_t = get32(p + 12)
        if rows > _ROWS_MAX:
            raise ValueError(f"columnar frame of {rows} rows, at most {_ROWS_MAX} are allowed")
        self.base = get64(p + 16)
        self.next = get64(p + 24)
        if self.base > _INT64_MAX - cython.cast(uint64_t, rows) or self.next > _INT64_MAX:
            raise ValueError("offset of a columnar frame does not fit 63 bits")
        count: cython.Py_ssize_t = get32(p + 32)
        if count != _area_count(columns):
            raise ValueError(f"{count} buffers do not fit columns {columns}")
        start: cython.Py_ssize_t = _HEAD + 16 * count
        if n < start or get64(p + 40) != cython.cast(uint64_t, n - start):
            raise ValueError("columnar frame is cut off or too long")
        length: uint64_t = get64(p + 48)
        if body_max > _BODY_MAX:
            body_max = _BODY_MAX
        if body_max < 0 or length > cython.cast(uint64_t, body_max) or get64(p + 56):
            raise ValueError("header of a columnar frame is broken, or its body too large")
        if sealed and get32(p + 36) != _checksum(p, n):
            raise ValueError("columnar frame checksum does not fit")
        self.columns = columns
        self.rows = rows
        if kind == 0:
            if length != cython.cast(uint64_t, n - start):
                raise ValueError("header of a columnar frame is broken")
            self.view = self.view[start:]
            self.body = p + start
        else:
            made: bytes = _decompressed(kind, self.view[start:], length)
            self.view = memoryview(made)
            self.body = _pointer(made)
        at: cython.Py_ssize_t = 0
        entry: cython.p_uchar = p + _HEAD
        i: cython.int
        for i in range(_AREAS):
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
            entry += 16
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
        if columns & 1 and self.length[0] and self.length[0] != 8 * n:
            raise ValueError("offset column is damaged")
        if columns & 2 and self.length[1] != 8 * n:
            raise ValueError("timestamp column is damaged")
        if columns & 4:
            self.check_validity(_KEY_NULLS, n)
            self.check_ends(_KEY_ENDS, n, self.length[_KEYS])
        self.value_max = 0
        if columns & 8:
            self.check_validity(_VALUE_NULLS, n)
            self.value_max = self.check_ends(_VALUE_ENDS, n, self.length[_VALUES])
        if columns & 16:
            self.check_validity(_HEADER_NULLS, n)
            self.check_ends(_LIST_ENDS, n, -1)
            m: cython.Py_ssize_t = self.ends_at(_LIST_ENDS, n)
            self.check_ends(_NAME_ENDS, m, self.length[_NAMES])
            self.check_validity(_TEXT_NULLS, m)
            self.check_ends(_TEXT_ENDS, m, self.length[_TEXTS])
        i: cython.int
        for i in (15, 17, 19):
            if columns & _column_of(i):
                self.check_ends(i, n, self.length[i + 1])
        for i in (21, 22):
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
        while area < _AREAS and _column_of(area) == column:
            found.append(view[self.at[area] : self.at[area] + self.length[area]])
            area += 1
        return found

    def offsets(self):
        if not self.columns & 1:
            raise ValueError("the frame has no offset column")
        if self.length[0] or self.rows == 0:
            return self.view[self.at[0] : self.at[0] + self.length[0]].cast("q")
        made: bytes = _uninitialized(8 * self.rows)
        p: cython.p_uchar = _pointer(made)
        i: cython.Py_ssize_t
        for i in range(self.rows):
            put64(p + 8 * i, self.base + cython.cast(uint64_t, i))
        return memoryview(made).cast("q")

    def runs(self, column: uint32_t):
        if column != 32 and column != 64 or not self.columns & column:
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
                    found.append((first, i - first, _copy(p + start, length)))
                first = i
                start = low
                length = high - low
            low = high
        if self.rows:
            found.append((first, self.rows - first, _copy(p + start, length)))
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
    for area in range(_AREAS):
        if wanted & _column_of(area):
            parts[area] = views[len(parts)]
    _trim(parts, wanted, rows)
    sources: Source[23]
    string.memset(cython.address(sources[0]), 0, 23 * cython.sizeof(Source))
    held: cbuffer.Py_buffer[23]
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
    for area in (0, 1):
        if columns & _column_of(area):
            parts[area] = parts[area][: 8 * rows]
    for area in (21, 22):
        if columns & _column_of(area):
            parts[area] = parts[area][: 4 * rows]
    if columns & 4:
        parts[2] = parts[2][: (rows + 7) >> 3]
        _trim_pieces(parts, 3, rows)
    if columns & 8:
        parts[5] = parts[5][: (rows + 7) >> 3]
        _trim_pieces(parts, 6, rows)
    for area in (15, 17, 19):
        if columns & _column_of(area):
            _trim_pieces(parts, area, rows)
    if columns & 16:
        parts[8] = parts[8][: (rows + 7) >> 3]
        parts[9] = _trimmed_ends(parts[9], rows)
        entries: cython.Py_ssize_t = _int32_at(parts[9], rows)
        if _int32_at(parts[9], 0) != 0:
            raise ValueError("headers of a slice: copy the array first")
        parts[12] = parts[12][: (entries + 7) >> 3]
        _trim_pieces(parts, 10, entries)
        _trim_pieces(parts, 13, entries)
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
        moved: bytes = _uninitialized(4 * (n + 1))
        source: bytes = bytes(view)
        p: cython.p_uchar = _pointer(moved)
        q: cython.p_uchar = _pointer(source)
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
    if n < 14:
        return -1
    flags: cython.int = _load16(p + 12)
    if flags & 1:
        return -1
    # Bit 1 has no property.
    flags &= 0xFFFC
    at: cython.Py_ssize_t = 14
    bit: cython.int
    size: cython.Py_ssize_t
    for bit in range(15, 1, -1):
        spans[bit].at = at
        spans[bit].n = 0
        if not flags >> bit & 1:
            continue
        if bit == 13:
            if n - at < 4:
                return -1
            size = _load32(p + at)
            if size > n - at - 4 or walk_table(p + at + 4, size, 1) < 0:
                return -1
            size += 4
        elif bit == 12 or bit == 11:
            size = 1
        elif bit == 6:
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
    _store32(q + 1, cython.cast(uint32_t, n))
    if n:
        string.memcpy(q + 5, p, n)
    return q + 5 + n


@cython.cfunc
@cython.exceptval(check=False)
def _is_key_name(p: cython.p_uchar, k: cython.Py_ssize_t) -> cython.bint:
    return k == 5 and string.memcmp(p, _pointer(_X_KEY), 5) == 0


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
    has_key: cython.bint = columns & 4 != 0 and not frame.is_null(_KEY_NULLS, row)
    i: cython.Py_ssize_t
    low: cython.Py_ssize_t
    k: cython.Py_ssize_t
    name: cython.p_uchar
    q += 4
    if columns & 16 and not frame.is_null(_HEADER_NULLS, row):
        names: cython.p_uchar = frame.body + frame.at[_NAMES]
        texts: cython.p_uchar = frame.body + frame.at[_TEXTS]
        for i in range(frame.ends_at(_LIST_ENDS, row), frame.ends_at(_LIST_ENDS, row + 1)):
            low = frame.ends_at(_NAME_ENDS, i)
            k = frame.ends_at(_NAME_ENDS, i + 1) - low
            name = names + low
            if k > 255 or not _is_utf8(name, k):
                _refuse_row(row, "name of a header is longer than 255 bytes, or not UTF-8")
            if has_key and _is_key_name(name, k):
                continue
            low = frame.ends_at(_TEXT_ENDS, i)
            q = _put_field(
                q,
                name,
                k,
                texts + low,
                frame.ends_at(_TEXT_ENDS, i + 1) - low,
                frame.is_null(_TEXT_NULLS, i),
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
        low = frame.ends_at(_KEY_ENDS, row)
        q = _put_field(
            q,
            _pointer(_X_KEY),
            5,
            frame.body + frame.at[_KEYS] + low,
            frame.ends_at(_KEY_ENDS, row + 1) - low,
            False,
        )
    _store32(start, cython.cast(uint32_t, q - start - 4))
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
    spans: Span[16]
    flags: cython.int = 0
    given: cython.int = 0
    old: cython.p_uchar = cython.NULL
    bit: cython.int
    n: cython.Py_ssize_t
    if columns & 128:
        n = frame.ends_at(_PROPERTY_ENDS, row)
        old = frame.body + frame.at[_PROPERTY_ENDS + 1] + n
        n = frame.ends_at(_PROPERTY_ENDS, row + 1) - n
        if n:
            given = _spans(old, n, cython.address(spans[0]))
            if given < 0:
                _refuse_row(row, "properties are broken")
            if given & 16:
                _refuse_row(row, "user-id cannot be produced")
            if given & 256 and not _is_expiration(old + spans[8].at, spans[8].n):
                _refuse_row(row, "expiration is no number of milliseconds")
            if (
                given & 512
                and spans[9].n == 22
                and string.memcmp(old + spans[9].at + 1, _pointer(_PSEUDO_QUEUE), 21) == 0
            ):
                _refuse_row(row, "replies to the direct reply queue cannot be produced")
    p: cython.p_uchar = q + 7
    at: cython.Py_ssize_t = 14
    table: cython.p_uchar = cython.NULL
    for bit in range(15, 1, -1):
        n = 0
        if bit == 13:
            table = old + spans[13].at + 4 if given & 0x2000 else cython.NULL
            n = _put_table(frame, row, table, spans[13].n - 4 if given & 0x2000 else 0, p + at)
        elif bit == 12:
            p[at] = 2
            n = 1
        elif bit == 6 and columns & 2:
            micros: int64_t = cython.cast(int64_t, get64(frame.body + frame.at[1] + 8 * row))
            if micros < 0:
                _refuse_row(row, "timestamp lies before 1970")
            _store64(p + at, cython.cast(uint64_t, micros) // 1000000)
            n = 8
        elif bit == 7 and not given & 128 and prefix:
            n = len(prefix)
            string.memcpy(p + at + 1, _pointer(prefix), n)
            n += _put_digits(p + at + 1 + n, frame.base + cython.cast(uint64_t, row))
            p[at] = cython.cast(cython.uchar, n)
            n += 1
        elif given >> bit & 1:
            n = spans[bit].n
            string.memcpy(p + at, old + spans[bit].at, n)
        if n:
            flags |= 1 << bit
            at += n
    if at > _PAYLOAD_MAX:
        _refuse_row(row, f"content header of {at} bytes does not fit a frame")
    q[0] = 2
    q[1] = 0
    q[2] = 0
    _store32(q + 3, cython.cast(uint32_t, at))
    _store32(p, 60 << 16)
    _store64(p + 4, body)
    p[12] = cython.cast(cython.uchar, flags >> 8)
    p[13] = cython.cast(cython.uchar, flags & 255)
    p[at] = 206
    return at + 8


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
        part: cython.Py_ssize_t = min(n, _PAYLOAD_MAX)
        q[0] = 3
        q[1] = 0
        q[2] = 0
        _store32(q + 3, cython.cast(uint32_t, part))
        string.memcpy(q + 7, p, part)
        q[7 + part] = 206
        q += part + 8
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
    for area in (3, 6, 17, 19):
        if frame.columns & _column_of(area):
            bound += frame.ends_at(area, last) - frame.ends_at(area, first)
    if frame.columns & 8:
        n: cython.Py_ssize_t = frame.ends_at(_VALUE_ENDS, last) - frame.ends_at(_VALUE_ENDS, first)
        bound += 8 * (n // _PAYLOAD_MAX + count)
    if frame.columns & 16:
        low: cython.Py_ssize_t = frame.ends_at(_LIST_ENDS, first)
        high: cython.Py_ssize_t = frame.ends_at(_LIST_ENDS, last)
        bound += 6 * (high - low)
        for area in (10, 13):
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
    if routing_key is None and not columns & 64:
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
        q: cython.p_uchar = start + 8
        total: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(count):
            row: cython.Py_ssize_t = first + i
            put32(ends + 4 * i, cython.cast(uint32_t, q - start + 32))
            string.memcpy(q, _pointer(head), head_length)
            q += head_length
            low: cython.Py_ssize_t
            n: cython.Py_ssize_t
            if routing_key is None:
                low = frame.ends_at(_ROUTING_ENDS, row)
                n = frame.ends_at(_ROUTING_ENDS, row + 1) - low
                p: cython.p_uchar = frame.body + frame.at[_ROUTING_ENDS + 1] + low
                if n > 255 or not _is_utf8(p, n):
                    _refuse_row(row, "routing key is longer than 255 bytes, or not UTF-8")
                q[0] = cython.cast(cython.uchar, n)
                string.memcpy(q + 1, p, n)
                q += 1 + n
            low = 0
            n = 0
            if columns & 8 and not frame.is_null(_VALUE_NULLS, row):
                low = frame.ends_at(_VALUE_ENDS, row)
                n = frame.ends_at(_VALUE_ENDS, row + 1) - low
            q += _put_header(frame, row, n, prefix, q)
            q = _put_body(q, frame.body + frame.at[_VALUES] + low, n)
            total += n
        put32(ends + 4 * count, cython.cast(uint32_t, q - start + 32))
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
    return data, count, at + 32


def enqueue_flags(frame: ColumnFrame, first: cython.Py_ssize_t, count: cython.Py_ssize_t):
    if frame is None or first < 0 or count < 1 or first > frame.rows - count:
        raise ValueError("rows lie outside the frame")
    flags: cython.int = 1
    size: cython.Py_ssize_t = -1
    i: cython.Py_ssize_t
    for i in range(first, first + count):
        n: cython.Py_ssize_t = 0
        if frame.columns & 8 and not frame.is_null(_VALUE_NULLS, i):
            n = frame.ends_at(_VALUE_ENDS, i + 1) - frame.ends_at(_VALUE_ENDS, i)
        if size >= 0 and n != size:
            flags &= ~1
        size = n
        if frame.columns & 128:
            low: cython.Py_ssize_t = frame.ends_at(_PROPERTY_ENDS, i)
            if frame.ends_at(_PROPERTY_ENDS, i + 1) - low >= 14:
                bits: uint32_t = _load16(frame.body + frame.at[_PROPERTY_ENDS + 1] + low + 12)
                if bits & 0x800:
                    flags |= 2
                if bits & 0x100:
                    flags |= 4
    return flags
