"""Frame around the records of a WAL batch. Layout: docs/formats/storage.md."""

import cython
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, get32, put32, put64
from cython.cimports.convoymq.kernels.entries import checksum
from cython.cimports.convoymq.kernels.layout import (
    ENTRY_CRC,
    ENTRY_HEADER_SIZE,
    WAL_BATCH_COVERED_FROM,
    WAL_BATCH_CRC,
    WAL_BATCH_DIRECTORY_CRC,
    WAL_BATCH_GENERATION,
    WAL_BATCH_HEADER_SIZE,
    WAL_BATCH_LENGTH,
    WAL_BATCH_MAP,
    WAL_BATCH_POSITION,
    WAL_BATCH_RECORDS,
    WAL_BATCH_SEQUENCE,
    WAL_DIRECTORY_ROW,
    WAL_MAP_BYTES,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t

_NO_GROUP = cython.declare(uint32_t, 0xFFFFFFFF)


def wal_batch_frame(
    magic: bytes,
    generation,
    sequence,
    position,
    length,
    sizes: list,
    records: list,
    recent: bytearray,
    covered_from,
):
    if len(magic) != 8 or len(recent) != 2 * WAL_MAP_BYTES:
        raise ValueError("a magic has 8 bytes, two maps have 128")
    count: cython.Py_ssize_t = len(records)
    if len(sizes) != 2 * count:
        raise ValueError("every record has a group and a size")
    size: cython.Py_ssize_t = (WAL_DIRECTORY_ROW * count + 7) & ~7
    directory: bytes = bytes(size)
    p: cython.p_uchar = bytes_pointer(directory)
    row: cython.p_uchar = p
    record: bytes
    i: cython.Py_ssize_t
    for i in range(count):
        record = records[i]
        if len(record) < ENTRY_HEADER_SIZE:
            raise ValueError("a record has a header")
        put32(row, sizes[2 * i])
        put32(row + 4, sizes[2 * i + 1])
        put32(row + 8, get32(bytes_pointer(record) + ENTRY_CRC))
        row += WAL_DIRECTORY_ROW
    head: bytes = bytes(WAL_BATCH_HEADER_SIZE)
    q: cython.p_uchar = bytes_pointer(head)
    string.memcpy(q, bytes_pointer(magic), 8)
    put64(q + WAL_BATCH_GENERATION, generation)
    put64(q + WAL_BATCH_SEQUENCE, sequence)
    put64(q + WAL_BATCH_LENGTH, length)
    put64(q + WAL_BATCH_COVERED_FROM, covered_from)
    put32(q + WAL_BATCH_RECORDS, cython.cast(uint32_t, count))
    put32(q + WAL_BATCH_POSITION, position)
    put32(q + WAL_BATCH_DIRECTORY_CRC, checksum(p, size))
    maps: cython.p_uchar = recent
    for i in range(WAL_MAP_BYTES):
        q[WAL_BATCH_MAP + i] = maps[i] | maps[WAL_MAP_BYTES + i]
    group: uint32_t
    for i in range(count):
        group = get32(p + WAL_DIRECTORY_ROW * i)
        if group != _NO_GROUP:
            group %= 8 * WAL_MAP_BYTES
            maps[WAL_MAP_BYTES + (group >> 3)] |= 1 << (group & 7)
    put32(q + WAL_BATCH_CRC, checksum(q, WAL_BATCH_CRC))
    return head, directory
