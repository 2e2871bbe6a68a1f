"""Hash slots and units of RocketMQ's index files (docs/formats/rocketmq.md).

    row   hash of the key 4 · physical offset 8 · stored at, in ms 8: what `rocketmq_records` finds
    slot  number of the newest unit whose hash leads here 4, 0 without one
    unit  hash of the key 4 · physical offset 8 · seconds since the file's begin 4 ·
          number of the next older unit of the slot 4
    page  1024 neighbouring slots

All integers are big-endian. Units are numbered from 1.
"""

import cython
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load32,
    load64,
    store32,
    uninitialized,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t

ROW_BYTES = 20
UNIT_BYTES = 20
PAGE_SLOTS = 1024
PAGE_BYTES = 4096

_ROW = cython.declare(cython.Py_ssize_t, 20)
_SECONDS_MAX = cython.declare(int64_t, 0x7FFFFFFF)


def pages_of(rows: bytes, slot_count: uint32_t) -> list:
    p: cython.p_uchar = bytes_pointer(rows)
    found: set = set()
    i: cython.Py_ssize_t
    for i in range(len(rows) // _ROW):
        found.add((load32(p + i * _ROW) % slot_count) >> 10)
    return sorted(found)


def enter(
    rows: bytes, slot_count: uint32_t, first: uint32_t, begin_ms: int64_t, pages: dict
) -> tuple:
    count: cython.Py_ssize_t = len(rows) // _ROW
    p: cython.p_uchar = bytes_pointer(rows)
    units: bytes = uninitialized(count * _ROW)
    q: cython.p_uchar = bytes_pointer(units)
    used: cython.Py_ssize_t = 0
    number: uint32_t = first
    i: cython.Py_ssize_t
    for i in range(count):
        hash_: uint32_t = load32(p)
        slot: uint32_t = hash_ % slot_count
        page: bytearray = pages[slot >> 10]
        at: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, slot & 1023) * 4
        if at + 4 > len(page):
            raise ValueError("a page is too short")
        place: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, page)) + at
        older: uint32_t = load32(place)
        if older >= number:
            older = 0
        used += older == 0
        seconds: int64_t = (cython.cast(int64_t, load64(p + 12)) - begin_ms) // 1000
        seconds = max(0, min(seconds, _SECONDS_MAX))
        string.memcpy(q, p, 12)
        store32(q + 12, cython.cast(uint32_t, seconds))
        store32(q + 16, older)
        store32(place, number)
        number += 1
        p += _ROW
        q += _ROW
    return units, used


def find(rows: bytes, hash_: uint32_t) -> list:
    p: cython.p_uchar = bytes_pointer(rows)
    found: list = []
    i: cython.Py_ssize_t
    for i in range(len(rows) // _ROW - 1, -1, -1):
        if load32(p + i * _ROW) == hash_:
            found.append((
                cython.cast(int64_t, load64(p + i * _ROW + 4)),
                cython.cast(int64_t, load64(p + i * _ROW + 12)),
            ))  # fmt: skip
    return found


def rebuild(units: bytes, first: uint32_t, slot_count: uint32_t, slots: bytearray) -> int:
    if len(slots) < 4 * cython.cast(cython.Py_ssize_t, slot_count):
        raise ValueError("there are fewer slots")
    p: cython.p_uchar = bytes_pointer(units)
    table: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, slots))
    used: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    for i in range(len(units) // _ROW):
        place: cython.p_uchar = table + 4 * cython.cast(
            cython.Py_ssize_t, load32(p + i * _ROW) % slot_count
        )
        used += load32(place) == 0
        store32(place, first + cython.cast(uint32_t, i))
    return used
