"""Attributes of the records of an ENQUEUE command, as runs of records with the same ones.

A record that cannot be read has none: what it is was decided when it was published, and every
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
    BIT_MESSAGE_ID,
    BIT_PRIORITY,
    BIT_TIMESTAMP,
    HAS_CONTENT_ENCODING,
    HAS_CONTENT_TYPE,
    HAS_HEADERS,
    HAS_MASK,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    MORE_FLAGS,
    PRIORITY_DEFAULT,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load16,
    load32,
    load64,
)
from cython.cimports.convoymq.kernels.content import walk_value
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

LEVEL_MAX = 31
LEVEL_DEFAULT = 4

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
def read_properties(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    last: cython.int,
    found: cython.pointer(Attributes),
) -> cython.int:
    """Reads the properties of a content header payload, up to the one with bit `last`; 0 = it is
    broken."""
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
                found.priority = p[at]
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
                found.expiration = _number(p + at + 1, size)
            elif bit == BIT_MESSAGE_ID:
                found.message_id = p + at + 1
                found.message_id_size = size
            if bit == last:
                return 1
            at += 1 + size
    return 1


@cython.cfunc
@cython.exceptval(check=False)
def content_header(
    p: cython.p_uchar, n: cython.Py_ssize_t, size: cython.pointer(cython.Py_ssize_t)
) -> cython.Py_ssize_t:
    """Finds the content header payload of a record: returns its place and fills in its size; -1 =
    the record is broken."""
    at: cython.Py_ssize_t = 0
    i: cython.int
    for i in range(2):
        if at >= n:
            return -1
        at += 1 + p[at]
    if n - at < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        return -1
    size[0] = load32(p + at + AMQP_SIZE)
    at += AMQP_FRAME_HEAD
    return -1 if size[0] > n - at else at


@cython.cfunc
@cython.exceptval(check=False)
def _integer(p: cython.p_uchar, number: cython.pointer(int64_t)) -> cython.bint:
    """Returns whether the whole field value at p is an integer; fills it in."""
    code: cython.int = p[0]
    if code == b"b":
        number[0] = p[1] if p[1] < 128 else cython.cast(int64_t, p[1]) - 256
    elif code == b"B":
        number[0] = p[1]
    elif code == b"s":
        number[0] = load16(p + 1)
        if number[0] >= 32768:
            number[0] -= 65536
    elif code == b"u":
        number[0] = load16(p + 1)
    elif code == b"I":
        number[0] = load32(p + 1)
        if number[0] >= 2147483648:
            number[0] -= 4294967296
    elif code == b"i":
        number[0] = load32(p + 1)
    elif code == b"l" or code == b"L":
        number[0] = cython.cast(int64_t, load64(p + 1))
    else:
        return False
    return True


@cython.cfunc
@cython.exceptval(check=False)
def _headers(p: cython.p_uchar, n: cython.Py_ssize_t, found: cython.pointer(Asked)) -> cython.void:
    """Reads the n bytes of fields of a table, up to where it is broken. The first header counts of
    several with one name, and of the two that say when."""
    at: cython.Py_ssize_t = 0
    key: cython.Py_ssize_t
    step: cython.Py_ssize_t
    q: cython.p_uchar
    value: cython.p_uchar
    timed: cython.bint = False
    grouped: cython.bint = False
    while at < n:
        q = p + at + 1
        key = p[at]
        at += 1 + key
        if at >= n:
            return
        value = p + at
        step = walk_value(value, n - at, 1)
        if step < 0:
            return
        at += step
        if not timed and key == 7 and string.memcmp(q, b"x-delay", 7) == 0:
            timed = True
            if _integer(value, cython.address(found.number)):
                found.kind = 1
        elif not timed and key == 12 and string.memcmp(q, b"x-deliver-at", 12) == 0:
            timed = True
            if _integer(value, cython.address(found.number)):
                found.kind = 2
        elif not grouped and key == 10 and string.memcmp(q, b"x-group-id", 10) == 0:
            grouped = True
            if value[0] == b"S" or value[0] == b"x":
                found.group = value + 5
                found.group_length = step - 5


@cython.cfunc
@cython.exceptval(check=False)
def find_headers(
    p: cython.p_uchar, n: cython.Py_ssize_t, found: cython.pointer(Asked)
) -> cython.void:
    """Headers of one record."""
    found.kind = 0
    found.number = 0
    found.group = cython.NULL
    found.group_length = -1
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = content_header(p, n, cython.address(size))
    if at < 0 or size < HEADER_PROPERTIES:
        return
    i: cython.int
    end: cython.Py_ssize_t = at + size
    flags: uint32_t = load16(p + at + HEADER_FLAGS)
    if flags & MORE_FLAGS or not flags & HAS_HEADERS:
        return
    at += HEADER_PROPERTIES
    for i in range(2):
        if flags & (HAS_CONTENT_TYPE if i == 0 else HAS_CONTENT_ENCODING):
            if at >= end:
                return
            at += 1 + p[at]
    if end - at < 4:
        return
    size = load32(p + at)
    if size <= end - at - 4:
        _headers(p + at + 4, size, found)


@cython.cfunc
@cython.exceptval(check=False)
def read_attributes(
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
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = content_header(p, n, cython.address(size))
    if at < 0:
        return
    found: Attributes
    found.priority = PRIORITY_DEFAULT
    found.expiration = -1
    if not read_properties(p + at, size, BIT_EXPIRATION, cython.address(found)):
        return
    level[0] = found.priority if found.priority < _LEVEL_MAX else _LEVEL_MAX
    expiration[0] = found.expiration
    body[0] = load64(p + at + HEADER_BODY_SIZE)


def attribute_runs(
    data: bytes, command: cython.Py_ssize_t, first: cython.Py_ssize_t, count: cython.Py_ssize_t
):
    p: cython.p_uchar = bytes_pointer(data)
    records: Records
    open_records(p, len(data), command, first, count, cython.address(records))
    record: cython.p_uchar
    length: cython.Py_ssize_t = 0
    level: cython.int = 0
    last_level: cython.int = -1
    expiration: int64_t = 0
    last_expiration: int64_t = -1
    body: uint64_t = 0
    size: uint64_t = 0
    began: cython.Py_ssize_t = first
    i: cython.Py_ssize_t
    made: list = []
    for i in range(first, first + count):
        record = record_at(cython.address(records), i, cython.address(length))
        read_attributes(
            record,
            length,
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
