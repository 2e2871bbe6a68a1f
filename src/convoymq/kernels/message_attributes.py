"""Attributes of the records of an ENQUEUE command, as runs of records with the same ones.

A record that cannot be read has none: what it is was decided when it was published, and every
replica must come to the same.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    BIT_EXPIRATION,
    BIT_PRIORITY,
    HAS_EXPIRATION,
    HAS_PRIORITY,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    PRIORITY_DEFAULT,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load16,
    load32,
    load64,
)
from cython.cimports.convoymq.kernels.content import (
    SPANS,
    Field,
    Span,
    find_fields,
    find_header,
    find_properties,
    is_named,
    next_field,
)
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
def find_headers(
    p: cython.p_uchar, n: cython.Py_ssize_t, found: cython.pointer(Asked)
) -> cython.void:
    """Headers of one record, up to where they are broken. The first header counts of several with
    one name, and of the two that say when."""
    found.kind = 0
    found.number = 0
    found.group = cython.NULL
    found.group_length = -1
    size: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
    if at < 0:
        return
    p += at
    n = find_fields(p, size, cython.address(place))
    p += place
    field: Field
    timed: cython.bint = False
    grouped: cython.bint = False
    at = 0
    while at < n:
        size = next_field(p + at, n - at, 1, cython.address(field))
        if size < 0:
            return
        at += size
        if not timed and is_named(cython.address(field), b"x-delay", 7):
            timed = True
            if _integer(field.value, cython.address(found.number)):
                found.kind = 1
        elif not timed and is_named(cython.address(field), b"x-deliver-at", 12):
            timed = True
            if _integer(field.value, cython.address(found.number)):
                found.kind = 2
        elif not grouped and is_named(cython.address(field), b"x-group-id", 10):
            grouped = True
            if field.value[0] == b"S" or field.value[0] == b"x":
                found.group = field.value + 5
                found.group_length = field.value_length - 5


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
    at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
    if at < 0:
        return
    p += at
    spans: Span[SPANS]
    if find_properties(p, size, BIT_EXPIRATION, cython.address(spans[0])) < 0:
        return
    flags: uint32_t = load16(p + HEADER_FLAGS)
    if flags & HAS_PRIORITY:
        level[0] = min(p[spans[BIT_PRIORITY].at], _LEVEL_MAX)
    if flags & HAS_EXPIRATION:
        at = spans[BIT_EXPIRATION].at
        expiration[0] = _number(p + at + 1, spans[BIT_EXPIRATION].n - 1)
    body[0] = load64(p + HEADER_BODY_SIZE)


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
