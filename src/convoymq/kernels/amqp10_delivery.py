"""Transfers of stored messages: the compiled form of `messages.amqp10.message.transfer_of`.

`plain_transfer` makes those of messages of AMQP 1.0 that have nothing but their bare message, no
annotations of a publisher and no deaths, and of AMQP 0-9-1 without headers and what becomes an
annotation or an address. That is nearly all of them.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_SIZE,
    BIT_CONTENT_ENCODING,
    BIT_CORRELATION_ID,
    BIT_DELIVERY_MODE,
    BIT_EXPIRATION,
    BIT_LAST,
    BIT_MESSAGE_ID,
    BIT_PRIORITY,
    BIT_TIMESTAMP,
    HAS_EXPIRATION,
    HAS_PRIORITY,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    PERSISTENT,
)
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load16,
    load32,
    load64,
    store32,
    store64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.content import SPANS, Span, check_content, find_properties
from cython.cimports.convoymq.kernels.utf8 import is_utf8
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

_ENCODING = cython.declare(cython.int, 0x82)
_TEXT_MAX = cython.declare(cython.Py_ssize_t, 255)
_DIGITS_MAX = cython.declare(cython.Py_ssize_t, 10)
_TTL_MAX = cython.declare(uint64_t, 0xFFFFFFFF)
_HEAD_MAX = cython.declare(cython.Py_ssize_t, 2200)
"""Of all that is in front of the body: two texts in the annotations, five in the properties."""
_PLAIN_FLAGS = cython.declare(uint32_t, 0xDDC8)
"""All but headers, reply-to, type, user-id and cluster-id."""
_TIMESTAMP_S_MAX = cython.declare(uint64_t, 9223372036854775)
_ROOM_MAX = cython.declare(cython.Py_ssize_t, 0xFFFFFFFF)
_TAG_MAX = cython.declare(cython.Py_ssize_t, 32)
_PROPERTIES = cython.declare(cython.int, 0x73)
_VALUE = cython.declare(cython.int, 0x77)


@cython.cfunc
@cython.exceptval(check=False)
def _write_uint(p: cython.p_uchar, value: uint32_t) -> cython.Py_ssize_t:
    if value == 0:
        p[0] = 0x43
        return 1
    if value < 256:
        p[0] = 0x52
        p[1] = cython.cast(cython.uchar, value)
        return 2
    p[0] = 0x70
    store32(p + 1, value)
    return 5


@cython.cfunc
@cython.exceptval(check=False)
def _write_long(p: cython.p_uchar, value: uint64_t) -> cython.Py_ssize_t:
    if value < 128:
        p[0] = 0x55
        p[1] = cython.cast(cython.uchar, value)
        return 2
    p[0] = 0x81
    store64(p + 1, value)
    return 9


@cython.cfunc
@cython.exceptval(check=False)
def _write_text(
    p: cython.p_uchar, code: cython.int, text: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    p[0] = cython.cast(cython.uchar, code)
    p[1] = cython.cast(cython.uchar, n)
    string.memcpy(p + 2, text, n)
    return 2 + n


@cython.cfunc
@cython.exceptval(check=False)
def _write_key(
    p: cython.p_uchar, name: cython.pointer(cython.const[cython.char]), n: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    return _write_text(p, 0xA3, cython.cast(cython.p_uchar, name), n)


@cython.cfunc
@cython.exceptval(check=False)
def _write_header(
    out: cython.p_uchar,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    acquired: uint32_t,
    failed: uint32_t,
) -> cython.Py_ssize_t:
    """Writes the header section for the content header of n bytes at p; -1 = that needs a closer
    look."""
    spans: Span[SPANS]
    if find_properties(p, n, BIT_EXPIRATION, cython.address(spans[0])) < 0:
        return -1
    flags: uint32_t = load16(p + HEADER_FLAGS)
    out[0] = 0
    out[1] = 0x53
    out[2] = 0x70
    out[3] = 0xC0
    out[5] = 5
    durable: cython.bint = False
    if (flags >> BIT_DELIVERY_MODE) & 1:
        durable = p[spans[BIT_DELIVERY_MODE].at] == PERSISTENT
    out[6] = 0x41 if durable else 0x42
    at: cython.Py_ssize_t = 7
    if flags & HAS_PRIORITY:
        out[at] = 0x50
        out[at + 1] = p[spans[BIT_PRIORITY].at]
        at += 2
    else:
        out[at] = 0x40
        at += 1
    digits: cython.Py_ssize_t = 0
    if flags & HAS_EXPIRATION:
        digits = spans[BIT_EXPIRATION].n - 1
    if digits == 0:
        out[at] = 0x40
        at += 1
    else:
        if digits > _DIGITS_MAX:
            return -1
        text: cython.p_uchar = p + spans[BIT_EXPIRATION].at + 1
        value: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(digits):
            if text[i] < 48 or text[i] > 57:
                return -1
            value = 10 * value + text[i] - 48
        if value > _TTL_MAX:
            return -1
        at += _write_uint(out + at, cython.cast(uint32_t, value))
    out[at] = 0x42 if acquired or failed else 0x41
    at += 1
    at += _write_uint(out + at, failed)
    out[4] = cython.cast(cython.uchar, at - 5)
    return at


@cython.cfunc
@cython.exceptval(check=False)
def _write_annotations(
    out: cython.p_uchar,
    exchange: bytes,
    routing_key: bytes,
    acquired: uint32_t,
    failed: uint32_t,
    offset: int64_t,
) -> cython.Py_ssize_t:
    out[0] = 0
    out[1] = 0x53
    out[2] = 0x72
    # Behind the longer form, of which the shorter one may leave a gap.
    at: cython.Py_ssize_t = 12
    count: cython.int = 4
    at += _write_key(out + at, b"x-exchange", 10)
    at += _write_text(out + at, 0xA1, bytes_pointer(exchange), len(exchange))
    at += _write_key(out + at, b"x-routing-key", 13)
    at += _write_text(out + at, 0xA1, bytes_pointer(routing_key), len(routing_key))
    if acquired:
        count += 2
        at += _write_key(out + at, b"x-acquired-count", 16)
        at += _write_long(out + at, acquired)
    if failed:
        count += 2
        at += _write_key(out + at, b"x-delivery-count", 16)
        at += _write_long(out + at, failed)
    if offset >= 0:
        count += 2
        at += _write_key(out + at, b"x-stream-offset", 15)
        at += _write_long(out + at, cython.cast(uint64_t, offset))
    return _close(out, at, 0xC1, count)


@cython.cfunc
@cython.exceptval(check=False)
def _close(
    out: cython.p_uchar, at: cython.Py_ssize_t, code: cython.int, count: uint32_t
) -> cython.Py_ssize_t:
    """Ends the list or map of a section, whose items lie from 12 to `at`. Returns the size of the
    section."""
    size: cython.Py_ssize_t = at - 12
    if size + 1 > 255:
        out[3] = cython.cast(cython.uchar, code + 0x10)
        store32(out + 4, cython.cast(uint32_t, size + 4))
        store32(out + 8, count)
        return at
    out[3] = cython.cast(cython.uchar, code)
    out[4] = cython.cast(cython.uchar, size + 1)
    out[5] = cython.cast(cython.uchar, count)
    string.memmove(out + 6, out + 12, size)
    return 6 + size


@cython.cfunc
@cython.exceptval(check=False)
def _write_properties(
    out: cython.p_uchar, p: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Writes the properties section for the content header of n bytes at p, which is that of a
    message of AMQP 0-9-1; -1 = that needs a closer look."""
    # The bits of what stands at each place.
    bits: cython.pointer(cython.const[cython.char]) = b"\x07\0\0\0\0\x0a\x0f\x0e\0\x06\x03"
    spans: Span[SPANS]
    if n < HEADER_PROPERTIES or load16(p + HEADER_FLAGS) & ~_PLAIN_FLAGS:
        return -1
    if find_properties(p, n, BIT_LAST, cython.address(spans[0])) != n:
        return -1
    at: cython.Py_ssize_t = 12
    end: cython.Py_ssize_t = 12
    count: uint32_t = 0
    seconds: uint64_t
    text: cython.p_uchar
    size: cython.Py_ssize_t
    bit: cython.int
    i: cython.int
    k: cython.Py_ssize_t
    for i in range(11):
        bit = bits[i]
        if bit == 0 or (load16(p + HEADER_FLAGS) >> bit) & 1 == 0:
            out[at] = 0x40
            at += 1
            continue
        text = p + spans[bit].at + 1
        size = spans[bit].n - 1
        if bit == BIT_TIMESTAMP:
            seconds = load64(text - 1)
            if seconds > _TIMESTAMP_S_MAX:
                return -1
            out[at] = 0x83
            store64(out + at + 1, seconds * 1000)
            at += 9
        elif bit >= BIT_CONTENT_ENCODING:
            for k in range(size):
                if text[k] >= 0x80:
                    return -1
            at += _write_text(out + at, 0xA3, text, size)
        else:
            if not is_utf8(text, size):
                return -1
            if bit == BIT_MESSAGE_ID or bit == BIT_CORRELATION_ID:
                # Perhaps a UUID.
                if size >= 4 and string.memcmp(text, b"urn:", 4) == 0:
                    return -1
            at += _write_text(out + at, 0xA1, text, size)
        end = at
        count = cython.cast(uint32_t, i + 1)
    if count == 0:
        return 0
    out[0] = 0
    out[1] = 0x53
    out[2] = _PROPERTIES
    return _close(out, end, 0xC0, count)


@cython.cfunc
@cython.exceptval(check=False)
def _write_data_head(out: cython.p_uchar, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Begins a data section of so many bytes."""
    out[0] = 0
    out[1] = 0x53
    out[2] = 0x75
    if size <= 255:
        out[3] = 0xA0
        out[4] = cython.cast(cython.uchar, size)
        return 5
    out[3] = 0xB0
    store32(out + 4, cython.cast(uint32_t, size))
    return 8


def plain_transfer(
    exchange: bytes,
    routing_key: bytes,
    content: bytes,
    acquired: uint32_t,
    failed: uint32_t,
    offset: int64_t = -1,
):
    p: cython.p_uchar = bytes_pointer(content)
    n: cython.Py_ssize_t = len(content)
    if n < 3 or (p[0] != _ENCODING and p[0] != AMQP_HEADER) or (p[1] == 0xFF and p[2] == 0xFF):
        return None
    if len(exchange) > _TEXT_MAX or len(routing_key) > _TEXT_MAX or check_content(p, n, n) < 0:
        return None
    header: cython.Py_ssize_t = load32(p + AMQP_SIZE)
    body: cython.Py_ssize_t = header + AMQP_FRAME_OVERHEAD
    if p[0] == _ENCODING:
        if n - body < AMQP_FRAME_OVERHEAD + 3 or load32(p + body + AMQP_SIZE) < 3:
            return None
        first: cython.p_uchar = p + body + AMQP_FRAME_HEAD
        if first[0] != 0 or first[1] != 0x53 or first[2] < _PROPERTIES or first[2] > _VALUE:
            return None
    head: cython.uchar[2200]
    q: cython.p_uchar = cython.address(head[0])
    used: cython.Py_ssize_t = _write_header(q, p + AMQP_FRAME_HEAD, header, acquired, failed)
    if used < 0:
        return None
    used += _write_annotations(q + used, exchange, routing_key, acquired, failed, offset)
    total: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = body
    while at < n:
        total += load32(p + at + AMQP_SIZE)
        at += load32(p + at + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    if p[0] == AMQP_HEADER:
        at = _write_properties(q + used, p + AMQP_FRAME_HEAD, header)
        if at < 0:
            return None
        used += at
        used += _write_data_head(q + used, total)
    assert used <= _HEAD_MAX
    total += used
    made: bytes = uninitialized(total)
    out: cython.p_uchar = bytes_pointer(made)
    string.memcpy(out, q, used)
    size: cython.Py_ssize_t
    at = body
    while at < n:
        size = load32(p + at + AMQP_SIZE)
        string.memcpy(out + used, p + at + AMQP_FRAME_HEAD, size)
        used += size
        at += size + AMQP_FRAME_OVERHEAD
    return made


def transfer_frame(
    channel: uint32_t,
    handle: uint32_t,
    delivery_id: uint32_t,
    tag: bytes,
    settled: cython.bint,
    message: bytes,
    at: cython.Py_ssize_t,
    room: cython.Py_ssize_t,
):
    rest: cython.Py_ssize_t = len(message) - at
    tag_size: cython.Py_ssize_t = len(tag)
    if at < 0 or rest < 0 or room < 1 or room > _ROOM_MAX or tag_size > _TAG_MAX:
        raise ValueError("no such part of a message")
    size: cython.Py_ssize_t = min(rest, room)
    head: cython.uchar[80]
    p: cython.p_uchar = cython.address(head[0])
    store32(p + 4, cython.cast(uint32_t, 0x02000000 | (channel & 0xFFFF)))
    p[8] = 0
    p[9] = 0x53
    p[10] = 0x14
    p[11] = 0xC0
    used: cython.Py_ssize_t = 14 + _write_uint(p + 14, handle)
    count: cython.int = 1
    if at == 0:
        used += _write_uint(p + used, delivery_id)
        used += _write_text(p + used, 0xA0, bytes_pointer(tag), tag_size)
        p[used] = 0x43
        p[used + 1] = 0x41 if settled else 0x42
        used += 2
        count = 5
    if size < rest:
        while count < 5:
            p[used] = 0x40
            used += 1
            count += 1
        p[used] = 0x41
        used += 1
        count = 6
    p[12] = cython.cast(cython.uchar, used - 13)
    p[13] = cython.cast(cython.uchar, count)
    store32(p, cython.cast(uint32_t, used + size))
    made: bytes = uninitialized(used + size)
    out: cython.p_uchar = bytes_pointer(made)
    string.memcpy(out, p, used)
    string.memcpy(out + used, bytes_pointer(message) + at, size)
    return made
