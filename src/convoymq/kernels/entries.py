"""Log entries: header, then commands, a membership, or a machine version.

Layout: docs/formats/entries-and-frames.md.
"""

import cython
from crc32c import crc32c as _crc32c
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    get32,
    get64,
    memory_view,
    put32,
    put64,
)
from cython.cimports.convoymq.kernels.layout import (
    ENTRY_CHECKED_FROM,
    ENTRY_COUNT,
    ENTRY_CRC,
    ENTRY_FORMAT,
    ENTRY_FORMAT_KNOWN,
    ENTRY_GROUP,
    ENTRY_HEADER_SIZE,
    ENTRY_INDEX,
    ENTRY_KIND,
    ENTRY_SPARE,
    ENTRY_TERM,
    ENTRY_TIME,
)
from cython.cimports.libc.stdint import uint32_t, uint64_t

from convoymq.model.errors import UnsupportedVersion

HEADER_SIZE = ENTRY_HEADER_SIZE


@cython.cfunc
@cython.exceptval(0, check=True)
def checksum(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
    return _crc32c(memory_view(p, n))


@cython.cclass
class Entry:
    def __init__(self, data: bytes):
        size: cython.Py_ssize_t = len(data)
        p: cython.p_uchar = bytes_pointer(data)
        if size < ENTRY_HEADER_SIZE or get32(p) != size:
            raise ValueError(f"entry of {size} bytes has a wrong length field")
        if get32(p + ENTRY_CRC) != checksum(p + ENTRY_CHECKED_FROM, size - ENTRY_CHECKED_FROM):
            raise ValueError("entry checksum does not fit")
        # Not before the checksum: damage may look like any format.
        if p[ENTRY_FORMAT] != ENTRY_FORMAT_KNOWN:
            raise UnsupportedVersion(
                f"entry format {p[ENTRY_FORMAT]} is not known;"
                f" this release knows {ENTRY_FORMAT_KNOWN}"
            )
        _unpack(self, data, p, size)

    def __repr__(self):
        return f"Entry(group={self.group}, index={self.index}, term={self.term}, size={self.size})"


@cython.cfunc
@cython.exceptval(check=False)
def _unpack(entry: Entry, data: bytes, p: cython.p_uchar, size: cython.Py_ssize_t) -> cython.void:
    entry.data = data
    entry.index = get64(p + ENTRY_INDEX)
    entry.term = get64(p + ENTRY_TERM)
    entry.time_ms = get64(p + ENTRY_TIME)
    entry.group = get32(p + ENTRY_GROUP)
    entry.kind = p[ENTRY_KIND]
    entry.size = size


@cython.cfunc
def seal_entry(
    data: bytes,
    group: uint32_t,
    index: uint64_t,
    term: uint64_t,
    time_ms: uint64_t,
    kind: cython.int,
    count: cython.int,
) -> Entry:
    size: cython.Py_ssize_t = len(data)
    p: cython.p_uchar = bytes_pointer(data)
    put32(p, cython.cast(uint32_t, size))
    put64(p + ENTRY_INDEX, index)
    put64(p + ENTRY_TERM, term)
    put64(p + ENTRY_TIME, time_ms)
    put32(p + ENTRY_GROUP, group)
    p[ENTRY_KIND] = cython.cast(cython.uchar, kind)
    p[ENTRY_FORMAT] = ENTRY_FORMAT_KNOWN
    p[ENTRY_COUNT] = count & 0xFF
    p[ENTRY_COUNT + 1] = (count >> 8) & 0xFF
    put64(p + ENTRY_SPARE, 0)
    put32(p + ENTRY_CRC, checksum(p + ENTRY_CHECKED_FROM, size - ENTRY_CHECKED_FROM))
    entry: Entry = Entry.__new__(Entry)
    _unpack(entry, data, p, size)
    return entry


def make_entry(group, index, term, time_ms, kind, body):
    # C division: the remainder of a negative number would be negative.
    padding = (8 - len(body) % 8) % 8
    data = bytes(ENTRY_HEADER_SIZE) + body + bytes(padding)
    # A fresh object that nobody else has seen: its header may still be written.
    return seal_entry(data, group, index, term, time_ms, kind, 0)


def encode_version(version: uint32_t):
    body: bytes = bytes(8)
    put32(bytes_pointer(body), version)
    return body


def decode_version(data: bytes):
    if len(data) != ENTRY_HEADER_SIZE + 8:
        raise ValueError(f"a machine version entry has 56 bytes, not {len(data)}")
    return get32(bytes_pointer(data) + ENTRY_HEADER_SIZE)


def split_entries(data: bytes, offset: cython.Py_ssize_t):
    size: cython.Py_ssize_t = len(data)
    if offset < 0 or offset > size:
        raise ValueError("entries lie outside their frame")
    p: cython.p_uchar = bytes_pointer(data)
    found: list = []
    at: cython.Py_ssize_t = offset
    while at < size:
        if size - at < ENTRY_HEADER_SIZE:
            raise ValueError("entry is cut off")
        length: cython.Py_ssize_t = get32(p + at)
        if length < ENTRY_HEADER_SIZE or length > size - at:
            raise ValueError("entry is cut off")
        found.append(Entry(data[at : at + length]))
        at += length
    return found
