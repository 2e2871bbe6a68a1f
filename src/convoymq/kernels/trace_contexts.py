"""Finds the W3C trace contexts of messages: the headers `traceparent` and `tracestate`.

    traceparent   version(2) - trace id(32) - parent id(16) - flags(2), in lower-case hex

A context counts when its last flag says that it is sampled, and the lower half of its trace id lies
below a bound. So all nodes choose the same traces, without a word between them. Source: W3C Trace
Context, 3.2; ADR 0228.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_FRAME_HEAD,
    AMQP_SIZE,
    HAS_HEADERS,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, copy_bytes, load16, load32
from cython.cimports.convoymq.kernels.content import (
    Field,
    find_fields,
    find_header,
    is_named,
    next_field,
)
from cython.cimports.convoymq.kernels.delivery_encoder import memmem
from cython.cimports.convoymq.kernels.layout import COMMAND_HEADER_SIZE
from cython.cimports.libc import string

PARENT_BYTES = 55
BELOW_BYTES = 16

_NAME = cython.declare(bytes, b"\x0btraceparent")
_PARENT = cython.declare(cython.Py_ssize_t, 55)
_TRACE_LOW = cython.declare(cython.Py_ssize_t, 19)
_LOW = cython.declare(cython.Py_ssize_t, 16)
_STATE_MAX = cython.declare(cython.Py_ssize_t, 512)


@cython.cfunc
@cython.exceptval(check=False)
def _is_hex(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    """Returns whether n characters are lower-case hexadecimal digits."""
    i: cython.Py_ssize_t
    for i in range(n):
        if not (48 <= p[i] <= 57 or 97 <= p[i] <= 102):
            return False
    return True


@cython.cfunc
@cython.exceptval(check=False)
def _is_zero(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    i: cython.Py_ssize_t
    for i in range(n):
        if p[i] != 48:
            return False
    return True


@cython.cfunc
@cython.exceptval(check=False)
def _counts(p: cython.p_uchar, below: cython.p_uchar) -> cython.bint:
    """Returns whether the traceparent at p is sampled; `below` bounds the half of its trace id."""
    if p[2] != 45 or p[35] != 45 or p[52] != 45 or not _is_hex(p, 2) or not _is_hex(p + 53, 2):
        return False
    # Digits are ascending characters; the last bit of flags is that of their last digit.
    flag: cython.int = p[54] - 48 if p[54] < 58 else p[54] - 87
    if flag & 1 == 0 or string.memcmp(p + _TRACE_LOW, below, _LOW) >= 0:
        return False
    if not _is_hex(p + 3, 32) or not _is_hex(p + 36, 16) or (p[0] == 102 and p[1] == 102):
        return False
    return not _is_zero(p + 3, 32) and not _is_zero(p + 36, 16)


@cython.cfunc
@cython.exceptval(check=False)
def _is_text(field: cython.pointer(Field)) -> cython.bint:
    return field.value[0] == b"S" or field.value[0] == b"x"


@cython.cfunc
def context_of(p: cython.p_uchar, n: cython.Py_ssize_t, below: bytes):
    place: cython.Py_ssize_t = 0
    if n < HEADER_PROPERTIES or load16(p + HEADER_FLAGS) & HAS_HEADERS == 0 or len(below) < _LOW:
        return None
    size: cython.Py_ssize_t = find_fields(p, n, cython.address(place))
    p += place
    if size <= 0:
        return None
    field: Field
    parent: cython.p_uchar = cython.NULL
    state: cython.p_uchar = cython.NULL
    state_size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = 0
    while at < size:
        step: cython.Py_ssize_t = next_field(p + at, size - at, 1, cython.address(field))
        if step < 0:
            return None
        at += step
        if parent == cython.NULL and is_named(cython.address(field), b"traceparent", 11):
            if not _is_text(cython.address(field)) or field.value_length != 5 + _PARENT:
                return None
            parent = field.value + 5
            if not _counts(parent, bytes_pointer(below)):
                return None
        elif is_named(cython.address(field), b"tracestate", 10):
            if _is_text(cython.address(field)) and field.value_length <= 5 + _STATE_MAX:
                state = field.value + 5
                state_size = field.value_length - 5
    if parent == cython.NULL:
        return None
    return copy_bytes(parent, _PARENT), copy_bytes(state, state_size) if state_size else b""


@cython.cfunc
def _context_in(record: cython.p_uchar, length: cython.Py_ssize_t, below: bytes):
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(record, length, cython.address(size))
    if at < 0 or load16(record + at + HEADER_FLAGS) & HAS_HEADERS == 0:
        return None
    return context_of(record + at, size, below)


def find_context(content: bytes, below: bytes):
    n: cython.Py_ssize_t = len(content)
    p: cython.p_uchar = bytes_pointer(content)
    if n < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        return None
    size: cython.Py_ssize_t = load32(p + AMQP_SIZE)
    if size > n - AMQP_FRAME_HEAD:
        return None
    return context_of(p + AMQP_FRAME_HEAD, size, below)


def find_contexts(
    data: bytes,
    command: cython.Py_ssize_t,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    below: bytes,
):
    p: cython.p_uchar = bytes_pointer(data)
    records: Records
    open_records(p, len(data), command, first, count, cython.address(records))
    length: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    found: list = []
    for i in range(count):
        record: cython.p_uchar = record_at(
            cython.address(records), first + i, cython.address(length)
        )
        context = _context_in(record, length, below)
        if context is not None:
            found.append((i, context))
    return found


def find_produced(body: bytes, count: cython.Py_ssize_t, position: cython.Py_ssize_t, below: bytes):
    p: cython.p_uchar = bytes_pointer(body)
    n: cython.Py_ssize_t = len(body)
    table: cython.Py_ssize_t = position - COMMAND_HEADER_SIZE
    if count < 0 or table < 0 or table > n or count >= (n - table) // 4:
        raise ValueError("records lie outside their command")
    found: list = []
    if memmem(p, n, bytes_pointer(_NAME), 12) == cython.NULL:
        return found
    records: Records
    records.command = p - COMMAND_HEADER_SIZE
    records.table = p + table
    records.length = n + COMMAND_HEADER_SIZE
    length: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    for i in range(count):
        record: cython.p_uchar = record_at(cython.address(records), i, cython.address(length))
        if record < p:
            continue
        context = _context_in(record, length, below)
        if context is not None:
            key: cython.Py_ssize_t = 1 + record[0]
            found.append((copy_bytes(record, key + 1 + record[key]), context))
    return found
