"""Transfers of publishers of AMQP 1.0: the compiled form of `edges.amqp10.receiving`, for messages
that are one frame each.

    frame     u32 size, u8 data offset 2, u8 type 0, u16 channel, performative, payload
    payload   header? properties? application-properties? (data+ | amqp-value)

The content header is that of `messages.amqp10.encoding.view_of`. Annotations, footers, values that
hold others, user ids, and all that is rare or wrong are left to the modules named here, which judge
it. Every length is compared with what is there before it is used.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_PAYLOAD_MAX,
    AMQP_SIZE,
    BIT_CONTENT_ENCODING,
    BIT_CONTENT_TYPE,
    BIT_CORRELATION_ID,
    BIT_DELIVERY_MODE,
    BIT_EXPIRATION,
    BIT_HEADERS,
    BIT_MESSAGE_ID,
    BIT_PRIORITY,
    BIT_REPLY_TO,
    BIT_TIMESTAMP,
    CLASS_BASIC,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    PERSISTENT,
)
from cython.cimports.convoymq.kernels.amqp10_values import (
    FRAME_HEAD,
    PERFORMATIVE_DISPOSITION,
    PERFORMATIVE_FLOW,
    PERFORMATIVE_TRANSFER,
    enter,
    read_uint,
)
from cython.cimports.convoymq.kernels.batch import PublishTarget
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    load16,
    load32,
    load64,
    store16,
    store32,
    store64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.content import (
    RECORD_ASKS,
    RECORD_EXAMINE,
    RECORD_EXPIRATION,
    RECORD_GROUPED,
    RECORD_HEADERS,
    RECORD_PRIORITY,
    RECORD_TRACED,
    RECORD_WAITS,
    walk_properties,
)
from cython.cimports.convoymq.kernels.message_sizes import MessageSizes, count_size
from cython.cimports.convoymq.kernels.trace_contexts import context_of
from cython.cimports.convoymq.kernels.utf8 import is_utf8
from cython.cimports.cpython.bytearray import PyByteArray_AS_STRING
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

_SETTLES = cython.declare(uint64_t, 1 << 32)

# Values


@cython.cfunc
@cython.exceptval(check=False)
def _is_ascii(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    i: cython.Py_ssize_t
    for i in range(n):
        if p[i] >= 0x80:
            return False
    return True


@cython.cfunc
@cython.exceptval(check=False)
def _read_bytes(
    p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t, found: cython.pointer(Text)
) -> cython.Py_ssize_t:
    """Reads the binary, text or symbol at `at`. Returns the place behind it; -1 = there is none, or
    it is no text."""
    if end - at < 2:
        return -1
    code: cython.int = p[at]
    if code == 0xA0 or code == 0xA1 or code == 0xA3:
        found.n = p[at + 1]
        at += 2
    elif (code == 0xB0 or code == 0xB1 or code == 0xB3) and end - at >= 5:
        found.n = load32(p + at + 1)
        at += 5
    else:
        return -1
    if found.n > end - at:
        return -1
    found.p = p + at
    if code & 0xF == 1 and not is_utf8(found.p, found.n):
        return -1
    if code & 0xF == 3 and not _is_ascii(found.p, found.n):
        return -1
    return at + found.n


@cython.cfunc
@cython.exceptval(check=False)
def _write_number(out: cython.p_uchar, number: uint64_t) -> cython.Py_ssize_t:
    """Writes a number in decimal."""
    digits: cython.uchar[20]
    n: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    while True:
        digits[n] = cython.cast(cython.uchar, 48 + number % 10)
        number //= 10
        n += 1
        if number == 0:
            break
    for i in range(n):
        out[i] = digits[n - 1 - i]
    return n


@cython.cfunc
@cython.exceptval(check=False)
def _write_urn(out: cython.p_uchar, p: cython.p_uchar) -> cython.Py_ssize_t:
    """Writes a UUID as text."""
    hex: cython.pointer(cython.const[cython.char]) = b"0123456789abcdef"
    string.memcpy(out, b"urn:uuid:", 9)
    at: cython.Py_ssize_t = 9
    i: cython.Py_ssize_t
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            out[at] = b"-"
            at += 1
        out[at] = hex[p[i] >> 4]
        out[at + 1] = hex[p[i] & 0xF]
        at += 2
    return at


# Sections


@cython.cfunc
@cython.exceptval(check=False)
def _read_header(
    found: cython.pointer(Plain), p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Reads the value of the header section at `at`. Returns the place behind it; -1 = it needs a
    closer look."""
    count: uint32_t = 0
    number: uint32_t = 0
    stop: cython.Py_ssize_t = enter(p, cython.address(at), end, 0xC0, cython.address(count))
    if stop < 0 or count > HEADER_FIELDS:
        return -1
    i: uint32_t
    for i in range(count):
        if at >= stop:
            return -1
        if p[at] == 0x40:
            at += 1
        elif i == 0 or i == 3:
            if p[at] != 0x41 and p[at] != 0x42:
                return -1
            if i == 0:
                found.durable = p[at] == 0x41
            at += 1
        elif i == 1:
            if p[at] != 0x50 or stop - at < 2:
                return -1
            found.priority = p[at + 1]
            at += 2
        else:
            at = read_uint(p, at, stop, cython.address(number))
            if at < 0:
                return -1
            if i == 2:
                found.ttl_ms = number
    return stop if at == stop else -1


@cython.cfunc
@cython.exceptval(check=False)
def _read_identifier(
    p: cython.p_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    found: cython.pointer(Text),
    made: cython.p_uchar,
) -> cython.Py_ssize_t:
    """Reads a message-id as text. Returns the place behind it; -1 = it needs a closer look."""
    code: cython.int = p[at]
    if code == 0xA1:
        return _read_bytes(p, at, end, found)
    number: uint64_t = 0
    found.p = made
    if code == 0x98 and end - at >= 17:
        found.n = _write_urn(made, p + at + 1)
        return at + 17
    if code == 0x44:
        at += 1
    elif code == 0x53 and end - at >= 2:
        number = p[at + 1]
        at += 2
    elif code == 0x80 and end - at >= 9:
        number = load64(p + at + 1)
        at += 9
    else:
        return -1
    found.n = _write_number(made, number)
    return at


@cython.cfunc
@cython.exceptval(check=False)
def _read_properties(
    found: cython.pointer(Plain), p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Does the same for the properties."""
    count: uint32_t = 0
    number: uint32_t = 0
    stop: cython.Py_ssize_t = enter(p, cython.address(at), end, 0xC0, cython.address(count))
    if stop < 0 or count > TEXTS:
        return -1
    text: cython.pointer(Text)
    i: cython.int
    for i in range(cython.cast(cython.int, count)):
        if at >= stop:
            return -1
        if p[at] == 0x40:
            at += 1
            continue
        text = cython.address(found.texts[i])
        if i == AT_MESSAGE_ID:
            at = _read_identifier(p, at, stop, text, cython.address(found.message_id[0]))
        elif i == AT_CORRELATION_ID:
            at = _read_identifier(p, at, stop, text, cython.address(found.correlation_id[0]))
        elif i == AT_EXPIRY_TIME or i == AT_CREATION_TIME:
            if p[at] != 0x83 or stop - at < 9:
                return -1
            if i == AT_CREATION_TIME:
                found.created_ms = cython.cast(int64_t, load64(p + at + 1))
                if found.created_ms < 0:
                    return -1
            at += 9
        elif i == AT_GROUP_SEQUENCE:
            at = read_uint(p, at, stop, cython.address(number))
        elif i == AT_USER_ID or p[at] != (
            0xA3 if i == AT_CONTENT_TYPE or i == AT_CONTENT_ENCODING else 0xA1
        ):
            return -1
        else:
            at = _read_bytes(p, at, stop, text)
        if at < 0:
            return -1
    text = cython.address(found.texts[AT_REPLY_TO])
    if text.p != cython.NULL and text.n >= 8 and string.memcmp(text.p, b"/queues/", 8) == 0:
        if string.memchr(text.p, 37, text.n) != cython.NULL:
            return -1
        text.p += 8
        text.n -= 8
    return stop if at == stop else -1


@cython.cfunc
@cython.exceptval(check=False)
def _write_short_number(
    out: cython.p_uchar, code: cython.int, number: int64_t
) -> cython.Py_ssize_t:
    """Writes a number that has one byte, or none, as a field. Returns its size."""
    if code >= 0x54 and number >= 128:
        number -= 256
    if code == 0x43 or code == 0x52 or code == 0x54:
        out[0] = b"I" if code == 0x54 else b"i"
        store32(out + 1, cython.cast(uint32_t, number))
        return 5
    out[0] = b"l"
    store64(out + 1, cython.cast(uint64_t, number))
    return 9


@cython.cfunc
@cython.exceptval(check=False)
def _write_field(
    out: cython.p_uchar,
    room: cython.Py_ssize_t,
    p: cython.p_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    written: cython.pointer(cython.Py_ssize_t),
) -> cython.Py_ssize_t:
    """Writes the value at `at` as a field (see `messages.amqp10.fields`). Returns the place behind
    it; -1 = it needs a closer look."""
    if at >= end or room < 64:
        return -1
    code: cython.int = p[at]
    text: Text
    number: int64_t = 0
    kind: cython.int = 0
    size: cython.Py_ssize_t = 0
    at += 1
    if code >= 0xA0:
        at = _read_bytes(p, at - 1, end, cython.address(text))
        if at < 0 or text.n > room - 5:
            return -1
        out[0] = b"S"
        store32(out + 1, cython.cast(uint32_t, text.n))
        string.memcpy(out + 5, text.p, text.n)
        written[0] = 5 + text.n
        return at
    if code == 0x40 or code == 0x41 or code == 0x42:
        out[0] = b"V" if code == 0x40 else b"t"
        out[1] = code == 0x41
        written[0] = 1 if code == 0x40 else 2
        return at
    if code == 0x43 or code == 0x44 or (code >= 0x52 and code <= 0x55):
        if code >= 0x52:
            if at >= end:
                return -1
            number = p[at]
            at += 1
        written[0] = _write_short_number(out, code, number)
        return at
    if code == 0x50 or code == 0x51:
        kind, size = b"B" if code == 0x50 else b"b", 1
    elif code == 0x60 or code == 0x61:
        kind, size = b"u" if code == 0x60 else b"s", 2
    elif code == 0x70 or code == 0x71 or code == 0x72:
        kind, size = b"i" if code == 0x70 else b"I" if code == 0x71 else b"f", 4
    elif code >= 0x80 and code <= 0x83:
        kind, size = b"l" if code < 0x82 else b"d" if code == 0x82 else b"T", 8
    elif code == 0x98 and end - at >= 16:
        out[0] = b"S"
        size = _write_urn(out + 5, p + at)
        store32(out + 1, cython.cast(uint32_t, size))
        written[0] = 5 + size
        return at + 16
    if kind == 0 or end - at < size:
        return -1
    if (code == 0x80 or code == 0x83) and p[at] >= 0x80:
        return -1
    # What is no number may not stay as it is.
    if code == 0x72 and load16(p + at) & 0x7F80 == 0x7F80:
        return -1
    if code == 0x82 and load16(p + at) & 0x7FF0 == 0x7FF0:
        return -1
    out[0] = cython.cast(cython.uchar, kind)
    if code == 0x83:
        store64(out + 1, load64(p + at) // 1000)
    else:
        string.memcpy(out + 1, p + at, size)
    written[0] = 1 + size
    return at + size


@cython.cfunc
@cython.exceptval(check=False)
def _read_application_properties(
    found: cython.pointer(Plain), p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Does the same for the application properties."""
    count: uint32_t = 0
    stop: cython.Py_ssize_t = enter(p, cython.address(at), end, 0xC1, cython.address(count))
    if stop < 0 or count % 2 or count > 2 * PAIRS_MAX:
        return -1
    keys: Text[PAIRS_MAX]
    used: cython.Py_ssize_t = 0
    written: cython.Py_ssize_t = 0
    i: cython.int
    k: cython.int
    for i in range(cython.cast(cython.int, count // 2)):
        if at >= stop or p[at] != 0xA1:
            return -1
        at = _read_bytes(p, at, stop, cython.address(keys[i]))
        if at < 0 or 1 + keys[i].n > TABLE_MAX - used:
            return -1
        # They are no requests for copies.
        if keys[i].n == 2 and string.memcmp(keys[i].p, b"CC", 2) == 0:
            return -1
        if keys[i].n == 3 and string.memcmp(keys[i].p, b"BCC", 3) == 0:
            return -1
        for k in range(i):
            if keys[k].n == keys[i].n and string.memcmp(keys[k].p, keys[i].p, keys[i].n) == 0:
                return -1
        found.table[used] = cython.cast(cython.uchar, keys[i].n)
        string.memcpy(cython.address(found.table[used + 1]), keys[i].p, keys[i].n)
        used += 1 + keys[i].n
        at = _write_field(
            cython.address(found.table[0]) + used,
            TABLE_MAX - used,
            p,
            at,
            stop,
            cython.address(written),
        )
        if at < 0:
            return -1
        used += written
    found.table_size = used
    return stop if at == stop else -1


@cython.cfunc
@cython.exceptval(check=False)
def _is_body(
    found: cython.pointer(Plain), p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.bint:
    """Returns whether a plain body, and nothing behind it, is at `at`."""
    code: cython.int
    width: cython.int
    sections: cython.int = 0
    while at < end:
        if end - at < 4 or p[at] != 0 or p[at + 1] != 0x53 or sections > 1000:
            return False
        sections += 1
        found.is_value = p[at + 2] == 0x77
        code = p[at + 3]
        at += 4
        if found.is_value:
            if sections > 1:
                return False
        elif p[at - 2] != 0x75 or (code != 0xA0 and code != 0xB0):
            return False
        width = code >> 4
        if width >= 0xA:
            if width & 1 == 0:
                if at >= end:
                    return False
                at += 1 + cython.cast(cython.Py_ssize_t, p[at])
            else:
                if end - at < 4:
                    return False
                at += 4 + cython.cast(cython.Py_ssize_t, load32(p + at))
        elif width > 4:
            at += 1 << (width - 5)
        elif width < 4:
            return False
        if found.is_value:
            break
    return sections > 0 and at == end


@cython.cfunc
@cython.exceptval(check=False)
def _read(found: cython.pointer(Plain), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Reads a message of n bytes and makes its content header. Returns what `walk_properties` does
    for it; -1 = the message needs a closer look."""
    at: cython.Py_ssize_t = 0
    last: cython.int = 0x6F
    code: cython.int
    i: cython.int
    found.durable = False
    found.priority = -1
    found.ttl_ms = -1
    found.created_ms = -1
    found.table_size = 0
    found.bare_at = 0
    for i in range(TEXTS):
        found.texts[i].p = cython.NULL
    while True:
        if n - at < 4 or p[at] != 0 or p[at + 1] != 0x53:
            return -1
        code = p[at + 2]
        if code <= last:
            return -1
        last = code
        if code == 0x70:
            at = _read_header(found, p, at + 3, n)
            found.bare_at = at
        elif code == 0x73:
            at = _read_properties(found, p, at + 3, n)
        elif code == 0x74:
            at = _read_application_properties(found, p, at + 3, n)
        elif code == 0x75 or code == 0x77:
            break
        else:
            return -1
        if at < 0:
            return -1
    return _make_head(found, n - found.bare_at) if _is_body(found, p, at, n) else -1


# Content


@cython.cfunc
@cython.exceptval(check=False)
def _put_text(
    found: cython.pointer(Plain),
    at: cython.Py_ssize_t,
    text: cython.pointer(Text),
    bit: cython.int,
    flags: cython.pointer(uint32_t),
) -> cython.Py_ssize_t:
    """Writes a property at `at` of the content header, if there is one."""
    if text.p == cython.NULL:
        return at
    flags[0] |= cython.cast(uint32_t, 1) << bit
    found.head[at] = cython.cast(cython.uchar, text.n)
    string.memcpy(cython.address(found.head[at + 1]), text.p, text.n)
    return at + 1 + text.n


@cython.cfunc
@cython.exceptval(check=False)
def _make_head(found: cython.pointer(Plain), body_size: cython.Py_ssize_t) -> cython.int:
    """Makes the frame of the content header. Returns what `walk_properties` does for it."""
    out: cython.p_uchar = cython.address(found.head[0])
    flags: uint32_t = 1 << BIT_DELIVERY_MODE
    texts: cython.pointer(Text) = cython.address(found.texts[0])
    start: cython.Py_ssize_t = AMQP_FRAME_HEAD
    at: cython.Py_ssize_t = start + HEADER_PROPERTIES
    size: cython.Py_ssize_t
    at = _put_text(found, at, texts + AT_CONTENT_TYPE, BIT_CONTENT_TYPE, cython.address(flags))
    at = _put_text(
        found, at, texts + AT_CONTENT_ENCODING, BIT_CONTENT_ENCODING, cython.address(flags)
    )
    if found.table_size:
        flags |= 1 << BIT_HEADERS
        store32(out + at, cython.cast(uint32_t, found.table_size))
        string.memcpy(out + at + 4, cython.address(found.table[0]), found.table_size)
        at += 4 + found.table_size
    out[at] = PERSISTENT if found.durable else 1
    at += 1
    if found.priority >= 0:
        flags |= 1 << BIT_PRIORITY
        out[at] = cython.cast(cython.uchar, found.priority)
        at += 1
    at = _put_text(found, at, texts + AT_CORRELATION_ID, BIT_CORRELATION_ID, cython.address(flags))
    at = _put_text(found, at, texts + AT_REPLY_TO, BIT_REPLY_TO, cython.address(flags))
    if found.ttl_ms >= 0:
        flags |= 1 << BIT_EXPIRATION
        size = _write_number(out + at + 1, cython.cast(uint64_t, found.ttl_ms))
        out[at] = cython.cast(cython.uchar, size)
        at += 1 + size
    at = _put_text(found, at, texts + AT_MESSAGE_ID, BIT_MESSAGE_ID, cython.address(flags))
    if found.created_ms >= 0:
        flags |= 1 << BIT_TIMESTAMP
        store64(out + at, cython.cast(uint64_t, found.created_ms // 1000))
        at += 8
    if found.is_value:
        flags |= cython.cast(uint32_t, 1) << BIT_TYPE
        string.memcpy(out + at, b"\x08amqp-1.0", 9)
        at += 9
    at = _put_text(found, at, texts + AT_GROUP_ID, BIT_APP_ID, cython.address(flags))
    out[0] = cython.cast(cython.uchar, ENCODING_10)
    store16(out + 1, 0)
    store32(out + AMQP_SIZE, cython.cast(uint32_t, at - start))
    store16(out + start, CLASS_BASIC)
    store16(out + start + 2, 0)
    store64(out + start + HEADER_BODY_SIZE, cython.cast(uint64_t, body_size))
    store16(out + start + HEADER_FLAGS, flags)
    out[at] = AMQP_END
    found.head_size = at + 1
    return walk_properties(out + start, at - start)


@cython.cfunc
@cython.exceptval(check=False)
def _content_size(found: cython.pointer(Plain), n: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Returns the bytes of the content of a message of n bytes."""
    size: cython.Py_ssize_t = n - found.bare_at
    frames: cython.Py_ssize_t = (size + AMQP_PAYLOAD_MAX - 1) // AMQP_PAYLOAD_MAX
    return found.head_size + size + frames * AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(check=False)
def _write_content(
    out: cython.p_uchar, found: cython.pointer(Plain), p: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.void:
    string.memcpy(out, cython.address(found.head[0]), found.head_size)
    out += found.head_size
    at: cython.Py_ssize_t = found.bare_at
    size: cython.Py_ssize_t
    while at < n:
        size = n - at if n - at < AMQP_PAYLOAD_MAX else AMQP_PAYLOAD_MAX
        out[0] = AMQP_BODY
        store16(out + 1, 0)
        store32(out + AMQP_SIZE, cython.cast(uint32_t, size))
        string.memcpy(out + AMQP_FRAME_HEAD, p + at, size)
        out[AMQP_FRAME_HEAD + size] = AMQP_END
        out += size + AMQP_FRAME_OVERHEAD
        at += size


def plain_content(payload: bytes):
    found: Plain
    p: cython.p_uchar = bytes_pointer(payload)
    n: cython.Py_ssize_t = len(payload)
    if _read(cython.address(found), p, n) < 0:
        return None
    content: bytes = uninitialized(_content_size(cython.address(found), n))
    _write_content(bytes_pointer(content), cython.address(found), p, n)
    return content


# Transfers


@cython.cfunc
@cython.exceptval(check=False)
def _read_transfer(
    found: cython.pointer(PlainTransfer), p: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.bint:
    """Reads a transfer that is a whole message; False = it needs a closer look."""
    if n < 4 or p[0] != 0 or p[1] != 0x53 or p[2] != PERFORMATIVE_TRANSFER:
        return False
    at: cython.Py_ssize_t = 3
    count: uint32_t = 0
    number: uint32_t = 0
    tag: Text
    stop: cython.Py_ssize_t = enter(p, cython.address(at), n, 0xC0, cython.address(count))
    if stop < 0 or count < 2 or count > TRANSFER_FIELDS:
        return False
    at = read_uint(p, at, stop, cython.address(found.handle))
    if at < 0:
        return False
    at = read_uint(p, at, stop, cython.address(found.delivery_id))
    if at < 0:
        return False
    found.settled = False
    i: uint32_t
    for i in range(2, count):
        if at >= stop:
            return False
        if p[at] == 0x40:
            at += 1
        elif i == 2:
            # A long form, or more bytes than a tag may have.
            if p[at] & 0xF or (stop - at > 1 and p[at + 1] > TAG_BYTES_MAX):
                return False
            at = _read_bytes(p, at, stop, cython.address(tag))
        elif i == 3:
            at = read_uint(p, at, stop, cython.address(number))
        elif i == 6:
            if p[at] != 0x50 or stop - at < 2:
                return False
            at += 2
        elif p[at] == 0x42 or (p[at] == 0x41 and (i == 4 or i == 10)):
            if i == 7:
                return False
            if i == 4:
                found.settled = p[at] == 0x41
            at += 1
        else:
            # More to come, a state, a delivery that goes on, one that is given up.
            return False
        if at < 0:
            return False
    found.payload = stop
    return at == stop


def next_plain(data: bytearray, at: cython.Py_ssize_t):
    n: cython.Py_ssize_t = len(data) - at
    if at < 0 or n < FRAME_HEAD + 4:
        return -1
    p: cython.p_uchar = cython.cast(cython.p_uchar, PyByteArray_AS_STRING(data)) + at
    if p[4] != 2 or p[5] != 0 or p[8] != 0 or p[9] != 0x53:
        return -1
    channel: uint64_t = cython.cast(uint64_t, load16(p + 6)) << 33
    number: uint32_t = 0
    if p[10] == PERFORMATIVE_FLOW or p[10] == PERFORMATIVE_DISPOSITION:
        return channel | _SETTLES
    if p[10] != PERFORMATIVE_TRANSFER:
        return -1
    place: cython.Py_ssize_t = FRAME_HEAD + 3
    if p[place] == 0xC0 and n > place + 3:
        place += 3
    elif p[place] == 0xD0 and n > place + 9:
        place += 9
    else:
        return -1
    if read_uint(p, place, n, cython.address(number)) < 0:
        return -1
    return channel | number


@cython.cfunc
def _is_sampled(message: Plain, below: bytes) -> cython.bint:
    """Returns whether a message belongs to a trace with spans."""
    size: cython.Py_ssize_t = load32(cython.address(message.head[AMQP_SIZE]))
    return context_of(cython.address(message.head[AMQP_FRAME_HEAD]), size, below) is not None


def publish_plain(
    data: bytearray,
    at: cython.Py_ssize_t,
    frame_max: cython.Py_ssize_t,
    channel: uint32_t,
    handle: uint32_t,
    mode: cython.int,
    most: cython.Py_ssize_t,
    most_settled: cython.Py_ssize_t,
    message_size_max: cython.Py_ssize_t,
    names: bytes,
    target: PublishTarget,
    tag: uint64_t,
    sizes: MessageSizes,
    below: bytes | None,
):
    # What is called to make room can no more move what is read here.
    guard = memoryview(data)
    p: cython.p_uchar = cython.cast(cython.p_uchar, PyByteArray_AS_STRING(data))
    end: cython.Py_ssize_t = len(data)
    first: PlainTransfer
    found: PlainTransfer
    message: Plain
    size: cython.Py_ssize_t
    n: cython.Py_ssize_t
    out: cython.p_uchar
    content: cython.p_uchar
    notes: cython.int
    count: cython.Py_ssize_t = 0
    first.delivery_id = 0
    first.settled = False
    while at >= 0 and count < most and end - at >= FRAME_HEAD:
        size = load32(p + at)
        if size > end - at or size > frame_max or size < FRAME_HEAD or p[at + 4] != 2 or p[at + 5]:
            break
        if load16(p + at + 6) != channel:
            break
        if not _read_transfer(cython.address(found), p + at + FRAME_HEAD, size - FRAME_HEAD):
            break
        if found.handle != handle or (mode < 2 and found.settled != (mode == 1)):
            break
        if count == 0:
            first = found
            if found.settled:
                most = min(most, most_settled)
                tag = 0
                if count >= most:
                    break
        elif found.settled != first.settled or found.delivery_id != cython.cast(
            uint32_t, first.delivery_id + count
        ):
            break
        n = size - FRAME_HEAD - found.payload
        if n > message_size_max:
            break
        content = p + at + FRAME_HEAD + found.payload
        notes = _read(cython.address(message), content, n)
        if notes < 0 or notes & RECORD_EXAMINE:
            break
        if notes & RECORD_TRACED and below is not None and _is_sampled(message, below):
            break
        if notes & ~target.serves & (RECORD_ASKS | RECORD_WAITS | RECORD_GROUPED):
            break
        out = target.builder.reserve(
            target,
            tag + cython.cast(uint64_t, count) if tag else 0,
            cython.cast(uint64_t, n - message.bare_at),
            notes & (RECORD_PRIORITY | RECORD_EXPIRATION | RECORD_HEADERS),
            len(names) + _content_size(cython.address(message), n),
        )
        string.memcpy(out, bytes_pointer(names), len(names))
        _write_content(out + len(names), cython.address(message), content, n)
        count_size(sizes, cython.cast(uint64_t, n - message.bare_at))
        count += 1
        at += size
    guard.release()
    return at, count, first.delivery_id, bool(first.settled)
