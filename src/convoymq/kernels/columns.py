"""Columns and buffers of a columnar frame, its header, checksum and compression.

Layout: docs/formats/columnar-protocol.md. Buffers have one number everywhere, their place in the
table of a frame with all columns: the constants in columns.pxd.

`column_writer` turns records into columns, `column_frame` checks and reads a frame and makes one of
Arrow's buffers, `column_records` turns rows into records. No object is made per row, and every
length is compared with what is there before it is used. The naive twin of these modules is
tests/unit/kernels/columns_reference.py.
"""

import cython
from crc32c import crc32c as _crc32c
from cython.cimports.convoymq.kernels import cext
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    get64,
    memory_view,
    put32,
    put64,
    uninitialized,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t, uint64_t

FRAME_HEADER_SIZE = HEAD_SIZE
ROWS_MAX = FRAME_ROWS_MAX
BODY_MAX = FRAME_BODY_MAX
COMPRESSIONS = ("", "zstd", "lz4")

_ALL = cython.declare(uint32_t, 1023)


def raw_bytearray(size: cython.Py_ssize_t) -> bytearray:
    if size < 0:
        raise ValueError(f"a buffer of {size} bytes")
    return cext.PyByteArray_FromStringAndSize(cython.NULL, size)


@cython.cfunc
@cython.exceptval(check=False)
def first_area(column: uint32_t) -> cython.int:
    """Returns the first buffer of a column; -1 when there is no such column."""
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
def column_of(area: cython.int) -> uint32_t:
    """Returns the column that a buffer belongs to."""
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
def area_count(columns: uint32_t) -> cython.int:
    n: cython.int = 0
    i: cython.int
    for i in range(AREAS):
        if columns & column_of(i):
            n += 1
    return n


@cython.cfunc
@cython.exceptval(-1)
def check_columns(columns: uint32_t) -> cython.int:
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
def decompressed(kind: cython.int, stored, length: cython.Py_ssize_t) -> bytes:
    """Returns the body; never more than `length` bytes are made, whatever the stored ones say."""
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
def assemble(
    columns: uint32_t,
    rows: cython.Py_ssize_t,
    base: uint64_t,
    next: uint64_t,
    sources: cython.pointer(Source),
    pieces: cython.pointer(Piece),
    piece_count: cython.Py_ssize_t,
) -> bytes:
    """Returns the frame without its checksum. The pieces stand where a source has no pointer."""
    count: cython.Py_ssize_t = area_count(columns)
    body_length: cython.Py_ssize_t = 0
    i: cython.int
    for i in range(AREAS):
        if columns & column_of(i):
            body_length += (sources[i].n + 7) & ~7
    if body_length > FRAME_BODY_MAX:
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
        if not columns & column_of(i):
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
    put32(p, FRAME_MAGIC)
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
def sealed(data: bytes, compression: str) -> bytes:
    """Returns the frame with its checksum, and compressed if that makes it smaller.

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
    put32(p + HEAD_CRC, checksum(p, len(data)))
    return data


@cython.cfunc
@cython.exceptval(0, check=True)
def checksum(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
    return _crc32c(memory_view(p + HEAD_STORED, n - HEAD_STORED), _crc32c(memory_view(p, HEAD_CRC)))
