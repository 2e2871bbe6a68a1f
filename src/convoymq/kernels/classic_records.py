"""Records of an ENQUEUE command, as a classic queue sorts them: by priority, and by whether they
outlive a restart.

A record that cannot be read has the lowest level, and does not outlive a restart.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    BIT_DELIVERY_MODE,
    BIT_LAST,
    BIT_PRIORITY,
    HAS_PRIORITY,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    PERSISTENT,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load16,
    load64,
    put32,
    put64,
)
from cython.cimports.convoymq.kernels.content import SPANS, Span, find_header, find_properties
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_ARG,
    COMMAND_COUNT,
    COMMAND_FLAGS,
    COMMAND_TYPE,
    ENQUEUE_BYTES,
    ENQUEUE_PRIORITY,
    ENQUEUE_RECORDS,
    TYPE_ENQUEUE,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t, uint64_t

LEVELS = 256

_LEVELS = cython.declare(cython.int, 256)


@cython.cfunc
@cython.exceptval(check=False)
def _level(p: cython.p_uchar, n: cython.Py_ssize_t, body: cython.pointer(uint64_t)) -> cython.int:
    """Priority and body bytes of one record."""
    body[0] = 0
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
    if at < 0:
        return 0
    p += at
    spans: Span[SPANS]
    if find_properties(p, size, BIT_PRIORITY, cython.address(spans[0])) < 0:
        return 0
    body[0] = load64(p + HEADER_BODY_SIZE)
    if load16(p + HEADER_FLAGS) & HAS_PRIORITY:
        return p[spans[BIT_PRIORITY].at]
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _is_persistent(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """1, 0, or -1 when the record cannot be read."""
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
    if at < 0:
        return -1
    p += at
    spans: Span[SPANS]
    if find_properties(p, size, BIT_LAST, cython.address(spans[0])) < 0:
        return -1
    if not load16(p + HEADER_FLAGS) & (1 << BIT_DELIVERY_MODE):
        return 0
    return p[spans[BIT_DELIVERY_MODE].at] == PERSISTENT


def split_levels(
    data: bytes, command: cython.Py_ssize_t, count: cython.Py_ssize_t, level_max: cython.int
):
    p: cython.p_uchar = bytes_pointer(data)
    records: Records
    open_records(p, len(data), command, 0, count, cython.address(records))
    counts: uint32_t[256]
    bodies: uint64_t[256]
    sizes: cython.Py_ssize_t[256]
    string.memset(counts, 0, cython.sizeof(counts))
    string.memset(bodies, 0, cython.sizeof(bodies))
    string.memset(sizes, 0, cython.sizeof(sizes))
    # The levels of the records, to be found once.
    found: bytes = bytes(count)
    levels: cython.p_uchar = bytes_pointer(found)
    level_max = max(0, min(level_max, _LEVELS - 1))
    record: cython.p_uchar
    n: cython.Py_ssize_t = 0
    body: uint64_t = 0
    level: cython.int = 0
    i: cython.Py_ssize_t
    for i in range(count):
        record = record_at(cython.address(records), i, cython.address(n))
        level = min(_level(record, n, cython.address(body)), level_max)
        levels[i] = cython.cast(cython.uchar, level)
        counts[level] += 1
        bodies[level] += body
        sizes[level] += n
    if count and counts[levels[0]] == cython.cast(uint32_t, count):
        return [(levels[0], None, count, bodies[levels[0]])]
    made: list = []
    flags: cython.uchar = p[command + COMMAND_FLAGS]
    for level in range(level_max, -1, -1):
        if not counts[level]:
            continue
        position: cython.Py_ssize_t = (ENQUEUE_RECORDS + sizes[level] + 3) & ~3
        length: cython.Py_ssize_t = (
            position + 4 * (cython.cast(cython.Py_ssize_t, counts[level]) + 1) + 7
        ) & ~7
        copy: bytes = bytes(length)
        q: cython.p_uchar = bytes_pointer(copy)
        put32(q, cython.cast(uint32_t, length))
        q[COMMAND_TYPE] = TYPE_ENQUEUE
        q[COMMAND_FLAGS] = flags
        put32(q + COMMAND_COUNT, counts[level])
        put32(q + COMMAND_ARG, cython.cast(uint32_t, position))
        put64(q + ENQUEUE_BYTES, bodies[level])
        at: cython.Py_ssize_t = ENQUEUE_RECORDS
        table: cython.Py_ssize_t = position
        for i in range(count):
            if levels[i] != level:
                continue
            record = record_at(cython.address(records), i, cython.address(n))
            put32(q + table, cython.cast(uint32_t, at))
            table += 4
            string.memcpy(q + at, record, n)
            at += n
        put32(q + table, cython.cast(uint32_t, at))
        made.append((level, copy, counts[level], bodies[level]))
    return made


def level_of(data: bytes, command: cython.Py_ssize_t, level_max: cython.int):
    records: Records
    n: cython.Py_ssize_t = 0
    body: uint64_t = 0
    p: cython.p_uchar = bytes_pointer(data)
    open_records(p, len(data), command, 0, 1, cython.address(records))
    if not p[command + COMMAND_FLAGS] & ENQUEUE_PRIORITY:
        return 0
    record: cython.p_uchar = record_at(cython.address(records), 0, cython.address(n))
    return min(_level(record, n, cython.address(body)), level_max)


def transient_records(data: bytes, command: cython.Py_ssize_t, count: cython.Py_ssize_t):
    records: Records
    open_records(bytes_pointer(data), len(data), command, 0, count, cython.address(records))
    record: cython.p_uchar
    n: cython.Py_ssize_t = 0
    damaged: cython.Py_ssize_t = 0
    persistent: cython.int = 0
    first: cython.Py_ssize_t = -1
    i: cython.Py_ssize_t
    found: list = []
    for i in range(count):
        record = record_at(cython.address(records), i, cython.address(n))
        persistent = _is_persistent(record, n)
        damaged += persistent < 0
        if persistent > 0:
            if first >= 0:
                found += (first, i - 1)
                first = -1
        elif first < 0:
            first = i
    if first >= 0:
        found += (first, count - 1)
    return found, damaged
