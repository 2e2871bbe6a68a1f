"""Priorities and expirations of the records of an ENQUEUE command, as runs of equal ones.

A record that cannot be read has neither: what it is was decided when it was published, and every
replica must come to the same.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_FRAME_HEAD,
    AMQP_SIZE,
    BIT_CONTENT_TYPE,
    BIT_DELIVERY_MODE,
    BIT_EXPIRATION,
    BIT_HEADERS,
    BIT_PRIORITY,
    BIT_TIMESTAMP,
    HAS_CONTENT_TYPE,
    HAS_MASK,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    MORE_FLAGS,
    PRIORITY_DEFAULT,
)
from cython.cimports.convoymq.kernels.batch import record_table
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, get32, load16, load32, load64
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

LEVEL_MAX = 31
LEVEL_DEFAULT = 4
EXPIRATION_MS_MAX = 315_360_000_000

_LEVEL_MAX = cython.declare(cython.int, 31)
_EXPIRATION_MS_MAX = cython.declare(int64_t, 315360000000)
_SIZE_MAX = cython.declare(uint64_t, 0xFFFFFFFF)


@cython.cfunc
@cython.exceptval(check=False)
def _number(p: cython.p_uchar, n: cython.Py_ssize_t) -> int64_t:
    """Milliseconds of an expiration, at most ten years; -1 when it is no such number."""
    value: int64_t = 0
    i: cython.Py_ssize_t = 0
    if n and p[0] == 43:
        i = 1
    if i == n:
        return -1
    while i < n:
        if p[i] < 48 or p[i] > 57:
            return -1
        value = value * 10 + (p[i] - 48)
        if value > _EXPIRATION_MS_MAX:
            value = _EXPIRATION_MS_MAX
        i += 1
    return value


@cython.cfunc
@cython.exceptval(check=False)
def _properties(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    priority: cython.pointer(cython.int),
    expiration: cython.pointer(int64_t),
) -> cython.int:
    """Reads the properties of a content header payload; 0 = it is broken."""
    if n < HEADER_PROPERTIES:
        return 0
    flags: uint32_t = load16(p + HEADER_FLAGS)
    if flags & MORE_FLAGS:
        return 0
    at: cython.Py_ssize_t = HEADER_PROPERTIES
    bit: cython.int = BIT_CONTENT_TYPE + 1
    size: cython.Py_ssize_t
    flags &= HAS_MASK
    while flags & HAS_MASK:
        bit -= 1
        if not flags & HAS_CONTENT_TYPE:
            flags <<= 1
            continue
        flags <<= 1
        if bit == BIT_HEADERS:
            if n - at < 4:
                return 0
            size = load32(p + at)
            if size > n - at - 4:
                return 0
            at += 4 + size
        elif bit == BIT_DELIVERY_MODE or bit == BIT_PRIORITY:
            if at >= n:
                return 0
            if bit == BIT_PRIORITY:
                priority[0] = p[at]
            at += 1
        elif bit == BIT_TIMESTAMP:
            if n - at < 8:
                return 0
            at += 8
        else:
            if at >= n:
                return 0
            size = p[at]
            if size > n - at - 1:
                return 0
            if bit == BIT_EXPIRATION:
                expiration[0] = _number(p + at + 1, size)
                return 1
            at += 1 + size
    return 1


@cython.cfunc
@cython.exceptval(check=False)
def _read(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    level: cython.pointer(cython.int),
    expiration: cython.pointer(int64_t),
    body: cython.pointer(uint64_t),
) -> cython.void:
    """Level, expiration (-1 = none) and body bytes of one record."""
    level[0] = PRIORITY_DEFAULT
    expiration[0] = -1
    body[0] = 0
    at: cython.Py_ssize_t = 0
    i: cython.int
    for i in range(2):
        if at >= n:
            return
        at += 1 + p[at]
    if n - at < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        return
    size: cython.Py_ssize_t = load32(p + at + AMQP_SIZE)
    at += AMQP_FRAME_HEAD
    if size > n - at:
        return
    priority: cython.int = PRIORITY_DEFAULT
    own: int64_t = -1
    if not _properties(p + at, size, cython.address(priority), cython.address(own)):
        return
    level[0] = priority if priority < _LEVEL_MAX else _LEVEL_MAX
    expiration[0] = own
    body[0] = load64(p + at + HEADER_BODY_SIZE)


def attribute_runs(
    data: bytes, command: cython.Py_ssize_t, first: cython.Py_ssize_t, count: cython.Py_ssize_t
):
    p: cython.p_uchar = bytes_pointer(data)
    known: uint32_t = 0
    table: cython.Py_ssize_t = record_table(p, len(data), command, cython.address(known))
    if table < 0 or first < 0 or count < 0 or first + count > known:
        raise ValueError("records lie outside their command")
    length: cython.Py_ssize_t = get32(p + command)
    level: cython.int = 0
    last_level: cython.int = -1
    expiration: int64_t = 0
    last_expiration: int64_t = -1
    body: uint64_t = 0
    size: uint64_t = 0
    began: cython.Py_ssize_t = first
    low: cython.Py_ssize_t
    high: cython.Py_ssize_t
    i: cython.Py_ssize_t
    made: list = []
    for i in range(first, first + count):
        low = get32(p + table + 4 * i)
        high = get32(p + table + 4 * i + 4)
        if low > high or high > length:
            # As a record that is empty.
            low = high = 0
        _read(
            p + command + low,
            high - low,
            cython.address(level),
            cython.address(expiration),
            cython.address(body),
        )
        if body > _SIZE_MAX:
            body = 0
        if level != last_level or expiration != last_expiration or size + body > _SIZE_MAX:
            if i > began:
                made += (began, i - began, size, last_level, last_expiration)
            began = i
            size = 0
            last_level = level
            last_expiration = expiration
        size += body
    if count:
        made += (began, first + count - began, size, last_level, last_expiration)
    return made
