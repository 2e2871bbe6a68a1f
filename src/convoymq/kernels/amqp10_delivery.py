"""Transfers of stored messages: the compiled form of `messages.amqp10.message.transfer_of`.

`plain_transfer` makes those of messages of AMQP 1.0 that have nothing but their bare message, no
annotations of a publisher and no deaths, and of AMQP 0-9-1 without headers and what becomes an
annotation or an address. That is nearly all of them. `plain_transfers` makes the frames of a run of
them, straight from the records of an entry.
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
from cython.cimports.convoymq.kernels.amqp10_delivery import Names, Run
from cython.cimports.convoymq.kernels.batch import record_table
from cython.cimports.convoymq.kernels.byte_buffer import Buffer, free_buffer, reserve
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    load16,
    load32,
    load64,
    store32,
    store64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.content import (
    SPANS,
    Span,
    check_content,
    find_properties,
    names_length,
)
from cython.cimports.convoymq.kernels.layout import ENQUEUE_RECORDS
from cython.cimports.convoymq.kernels.utf8 import is_utf8
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

_ENCODING = cython.declare(cython.int, 0x82)
_SHORT_TAG_MAX = cython.declare(uint64_t, 0xFFFFFFFF)
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
    names: cython.pointer(Names),
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
    at += _write_text(out + at, 0xA1, names.exchange, names.exchange_size)
    at += _write_key(out + at, b"x-routing-key", 13)
    at += _write_text(out + at, 0xA1, names.key, names.key_size)
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


@cython.cfunc
@cython.exceptval(check=False)
def _write_head(
    q: cython.p_uchar,
    names: cython.pointer(Names),
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    acquired: uint32_t,
    failed: uint32_t,
    offset: int64_t,
    total: cython.pointer(cython.Py_ssize_t),
) -> cython.Py_ssize_t:
    """Writes what is in front of the body of a message, whose content has n bytes at p, and fills
    in the size of all of it. Returns the bytes written; -1 = that needs a closer look."""
    if n < 3 or (p[0] != _ENCODING and p[0] != AMQP_HEADER) or (p[1] == 0xFF and p[2] == 0xFF):
        return -1
    if check_content(p, n, n) < 0:
        return -1
    header: cython.Py_ssize_t = load32(p + AMQP_SIZE)
    body: cython.Py_ssize_t = header + AMQP_FRAME_OVERHEAD
    if p[0] == _ENCODING:
        if n - body < AMQP_FRAME_OVERHEAD + 3 or load32(p + body + AMQP_SIZE) < 3:
            return -1
        first: cython.p_uchar = p + body + AMQP_FRAME_HEAD
        if first[0] != 0 or first[1] != 0x53 or first[2] < _PROPERTIES or first[2] > _VALUE:
            return -1
    used: cython.Py_ssize_t = _write_header(q, p + AMQP_FRAME_HEAD, header, acquired, failed)
    if used < 0:
        return -1
    used += _write_annotations(q + used, names, acquired, failed, offset)
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = body
    while at < n:
        size += load32(p + at + AMQP_SIZE)
        at += load32(p + at + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    if p[0] == AMQP_HEADER:
        at = _write_properties(q + used, p + AMQP_FRAME_HEAD, header)
        if at < 0:
            return -1
        used += at
        used += _write_data_head(q + used, size)
    total[0] = used + size
    return used


@cython.cfunc
@cython.exceptval(check=False)
def _write_bodies(out: cython.p_uchar, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.void:
    """Writes the payloads of the body frames of the content of n bytes at p."""
    at: cython.Py_ssize_t = load32(p + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    size: cython.Py_ssize_t
    while at < n:
        size = load32(p + at + AMQP_SIZE)
        string.memcpy(out, p + at + AMQP_FRAME_HEAD, size)
        out += size
        at += size + AMQP_FRAME_OVERHEAD


def plain_transfer(
    exchange: bytes,
    routing_key: bytes,
    content: bytes,
    acquired: uint32_t,
    failed: uint32_t,
    offset: int64_t = -1,
):
    if len(exchange) > _TEXT_MAX or len(routing_key) > _TEXT_MAX:
        return None
    names: Names
    names.exchange = bytes_pointer(exchange)
    names.exchange_size = len(exchange)
    names.key = bytes_pointer(routing_key)
    names.key_size = len(routing_key)
    head: cython.uchar[2200]
    q: cython.p_uchar = cython.address(head[0])
    p: cython.p_uchar = bytes_pointer(content)
    n: cython.Py_ssize_t = len(content)
    total: cython.Py_ssize_t = 0
    used: cython.Py_ssize_t = _write_head(
        q, cython.address(names), p, n, acquired, failed, offset, cython.address(total)
    )
    if used < 0:
        return None
    assert used <= _HEAD_MAX
    made: bytes = uninitialized(total)
    out: cython.p_uchar = bytes_pointer(made)
    string.memcpy(out, q, used)
    _write_bodies(out + used, p, n)
    return made


@cython.cfunc
@cython.exceptval(check=False)
def _begin_frame(
    p: cython.p_uchar,
    channel: uint32_t,
    handle: uint32_t,
    delivery_id: uint32_t,
    tag: cython.p_uchar,
    tag_size: cython.Py_ssize_t,
    settled: cython.bint,
    begins: cython.bint,
    more: cython.bint,
) -> cython.Py_ssize_t:
    """Writes a frame up to its part of a message, but for its size."""
    store32(p + 4, cython.cast(uint32_t, 0x02000000 | (channel & 0xFFFF)))
    p[8] = 0
    p[9] = 0x53
    p[10] = 0x14
    p[11] = 0xC0
    used: cython.Py_ssize_t = 14 + _write_uint(p + 14, handle)
    count: cython.int = 1
    if begins:
        used += _write_uint(p + used, delivery_id)
        used += _write_text(p + used, 0xA0, tag, tag_size)
        p[used] = 0x43
        p[used + 1] = 0x41 if settled else 0x42
        used += 2
        count = 5
    if more:
        while count < 5:
            p[used] = 0x40
            used += 1
            count += 1
        p[used] = 0x41
        used += 1
        count = 6
    p[12] = cython.cast(cython.uchar, used - 13)
    p[13] = cython.cast(cython.uchar, count)
    return used


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
    used: cython.Py_ssize_t = _begin_frame(
        p,
        channel,
        handle,
        delivery_id,
        bytes_pointer(tag),
        tag_size,
        settled,
        at == 0,
        size < rest,
    )
    store32(p, cython.cast(uint32_t, used + size))
    made: bytes = uninitialized(used + size)
    out: cython.p_uchar = bytes_pointer(made)
    string.memcpy(out, p, used)
    string.memcpy(out + used, bytes_pointer(message) + at, size)
    return made


@cython.cfunc
@cython.exceptval(check=False)
def _read_names(
    names: cython.pointer(Names), p: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Reads the names of the record of n bytes at p. Returns where its content begins; -1 = they
    need a closer look."""
    at: cython.Py_ssize_t = names_length(p, n)
    if at < 0:
        return -1
    names.exchange = p + 1
    names.exchange_size = p[0]
    names.key = p + 2 + names.exchange_size
    names.key_size = at - 2 - names.exchange_size
    if not is_utf8(names.exchange, names.exchange_size) or not is_utf8(names.key, names.key_size):
        return -1
    return at


@cython.cfunc
@cython.exceptval(-1)
def _append_transfer(
    out: cython.pointer(Buffer),
    run: cython.pointer(Run),
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    i: cython.Py_ssize_t,
) -> cython.int:
    """Appends the frame of message i of a run, whose record has n bytes at p. Returns whether that
    is done: else it needs a closer look."""
    names: Names
    tag: cython.uchar[8]
    tag_size: cython.Py_ssize_t = 0
    head: cython.uchar[2280]
    q: cython.p_uchar = cython.address(head[0])
    total: cython.Py_ssize_t = 0
    begin: cython.Py_ssize_t = _read_names(cython.address(names), p, n)
    if begin < 0:
        return 0
    id: uint64_t = run.first_id + cython.cast(uint64_t, i)
    if not run.settled:
        store64(cython.address(tag[0]), id)
        tag_size = 4 if id <= _SHORT_TAG_MAX else 8
    frame: cython.Py_ssize_t = _begin_frame(
        q,
        run.channel,
        run.handle,
        cython.cast(uint32_t, run.delivery_id + cython.cast(uint64_t, i)),
        cython.address(tag[0]) + 8 - tag_size,
        tag_size,
        run.settled,
        True,
        False,
    )
    used: cython.Py_ssize_t = _write_head(
        q + frame,
        cython.address(names),
        p + begin,
        n - begin,
        run.acquired,
        run.failed,
        run.offset + i if run.offset >= 0 else -1,
        cython.address(total),
    )
    if used < 0 or total > run.room or cython.cast(uint64_t, total) > run.size_max:
        return 0
    assert used <= _HEAD_MAX
    store32(q, cython.cast(uint32_t, frame + total))
    reserve(out, frame + total)
    string.memcpy(out.p + out.end, q, frame + used)
    _write_bodies(out.p + out.end + frame + used, p + begin, n - begin)
    out.end += frame + total
    return 1


def plain_transfers(
    place: tuple,
    delivery: tuple,
    offset: int64_t,
    most: cython.Py_ssize_t,
    bytes_most: cython.Py_ssize_t,
):
    run: Run
    run.channel, run.handle, run.delivery_id, run.settled, run.room, run.size_max = place
    run.offset = offset
    block: bytes
    command: cython.Py_ssize_t
    first: cython.Py_ssize_t
    count: cython.Py_ssize_t
    run.first_id, block, command, first, count, run.acquired, run.failed = delivery
    known: uint32_t = 0
    p: cython.p_uchar = bytes_pointer(block)
    table: cython.Py_ssize_t = record_table(p, len(block), command, cython.address(known))
    if table < 0 or first < 0 or first > known or run.room > _ROOM_MAX:
        return b"", 0
    most = min(most, count, cython.cast(cython.Py_ssize_t, known) - first)
    out: Buffer
    out.p = cython.NULL
    out.start = out.end = out.capacity = 0
    low: cython.Py_ssize_t
    high: cython.Py_ssize_t
    i: cython.Py_ssize_t = 0
    try:
        while i < most and out.end <= bytes_most:
            low = get32(p + table + 4 * (first + i))
            high = get32(p + table + 4 * (first + i) + 4)
            if low < ENQUEUE_RECORDS or high < low or command + high > table:
                break
            if not _append_transfer(
                cython.address(out), cython.address(run), p + command + low, high - low, i
            ):
                break
            i += 1
        return copy_bytes(out.p, out.end), i
    finally:
        free_buffer(cython.address(out))
