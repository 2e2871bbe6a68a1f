"""Content of messages: the compiled reader of content headers, and of records' content frames.

    frame     u8 type, u16 channel, u32 size, payload, end octet
    header    u16 class, u16 weight, u64 body size, u16 property flags, properties
    record    docs/formats/entries-and-frames.md

Every length is compared with what is there before it is used.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_ENCODED,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_SIZE,
    BIT_CONTENT_TYPE,
    BIT_DELIVERY_MODE,
    BIT_HEADERS,
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
)
from cython.cimports.convoymq.kernels.amqp10_values import enter
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
    check_content,
    is_named,
    names_length,
    next_field,
    walk_properties,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t

_DEPTH_MAX = cython.declare(cython.int, 32)
_TABLE_MAX = cython.declare(cython.Py_ssize_t, 1 << 20)
_DELAY_MS_MAX = cython.declare(int64_t, 315360000000)
_DELIVER_AT_MS_MAX = cython.declare(int64_t, 253402300799999)
_converter = cython.declare(object, None)
# Type octet of header frames of messages of AMQP 1.0, and codes of their sections.
_AMQP_10 = cython.declare(cython.int, 0x82)
_ANNOTATIONS = cython.declare(cython.int, 0x72)
_PROPERTIES = cython.declare(cython.int, 0x73)
_DATA = cython.declare(cython.int, 0x75)


@cython.cfunc
@cython.exceptval(check=False)
def walk_value(p: cython.p_uchar, n: cython.Py_ssize_t, depth: cython.int) -> cython.Py_ssize_t:
    """Returns the bytes of the field value at p, type code included; -1 when it is broken or cut
    off."""
    if n < 1:
        return -1
    code: cython.int = p[0]
    size: cython.Py_ssize_t
    if code == b"t" or code == b"b" or code == b"B":
        size = 1
    elif code == b"s" or code == b"u":
        size = 2
    elif code == b"I" or code == b"i" or code == b"f":
        size = 4
    elif code == b"l" or code == b"L" or code == b"d" or code == b"T":
        size = 8
    elif code == b"V":
        size = 0
    elif code == b"D":
        size = 5
    elif code == b"S" or code == b"x" or code == b"F" or code == b"A":
        if n < 5:
            return -1
        inner: cython.Py_ssize_t = load32(p + 1)
        if inner > n - 5:
            return -1
        if code == b"F" or code == b"A":
            if depth >= _DEPTH_MAX:
                return -1
            if code == b"F":
                if walk_table(p + 5, inner, depth + 1) < 0:
                    return -1
            else:
                at: cython.Py_ssize_t = 0
                while at < inner:
                    step: cython.Py_ssize_t = walk_value(p + 5 + at, inner - at, depth + 1)
                    if step < 0:
                        return -1
                    at += step
        size = 4 + inner
    else:
        return -1
    return 1 + size if size < n else -1


@cython.cfunc
@cython.exceptval(check=False)
def _note_of_time(
    p: cython.p_uchar, n: cython.Py_ssize_t, most: int64_t, notes: cython.int
) -> cython.int:
    """Notes about the value of a header that says when, within n bytes: one such header with an
    integer up to `most`, and no group, needs no closer look."""
    if notes & (RECORD_WAITS | RECORD_GROUPED) == 0 and n > 0:
        code: cython.int = p[0]
        if code == b"b" or code == b"B" or code == b"s" or code == b"u":
            return RECORD_HEADERS | RECORD_WAITS
        if code == b"I" or code == b"i":
            return RECORD_HEADERS | RECORD_WAITS
        if (code == b"l" or code == b"L") and n >= 9:
            if cython.cast(int64_t, load64(p + 1)) <= most:
                return RECORD_HEADERS | RECORD_WAITS
    return RECORD_HEADERS | RECORD_EXAMINE


@cython.cfunc
@cython.exceptval(check=False)
def _note_of_order_key(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Notes about the value of the header x-order-key, within n bytes."""
    if n > 5 and (p[0] == b"S" or p[0] == b"x") and load32(p + 1) != 0:
        return RECORD_ORDERED
    return RECORD_EXAMINE


@cython.cfunc
@cython.exceptval(check=False)
def walk_table(p: cython.p_uchar, n: cython.Py_ssize_t, depth: cython.int) -> cython.int:
    """Notes about the n bytes of fields: whether keys matter to the broker; -1 when broken."""
    if n > _TABLE_MAX:
        return -1
    field: Field
    notes: cython.int = 0
    at: cython.Py_ssize_t = 0
    while at < n:
        step: cython.Py_ssize_t = next_field(p + at, n - at, depth, cython.address(field))
        if step < 0:
            return -1
        at += step
        key: cython.Py_ssize_t = field.name_length
        q: cython.p_uchar = field.name
        if key == 2 and string.memcmp(q, b"CC", 2) == 0:
            notes |= RECORD_EXAMINE
        elif key == 3 and string.memcmp(q, b"BCC", 3) == 0:
            notes |= RECORD_EXAMINE
        elif key == 17 and string.memcmp(q, b"x-stream-producer", 17) == 0:
            notes |= RECORD_EXAMINE
        elif key == 7 and string.memcmp(q, b"x-delay", 7) == 0:
            notes |= _note_of_time(field.value, field.value_length, _DELAY_MS_MAX, notes)
        elif key == 12 and string.memcmp(q, b"x-deliver-at", 12) == 0:
            notes |= _note_of_time(field.value, field.value_length, _DELIVER_AT_MS_MAX, notes)
        elif key == 10 and string.memcmp(q, b"x-group-id", 10) == 0:
            notes |= RECORD_HEADERS | RECORD_GROUPED
            if notes & RECORD_WAITS:
                notes |= RECORD_EXAMINE
        elif key == 11 and string.memcmp(q, b"x-order-key", 11) == 0:
            notes |= _note_of_order_key(field.value, field.value_length)
        elif key == 11 and string.memcmp(q, b"traceparent", 11) == 0:
            notes |= RECORD_TRACED
    return notes


@cython.cfunc
@cython.exceptval(check=False)
def find_properties(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    last: cython.int,
    spans: cython.pointer(Span),
) -> cython.Py_ssize_t:
    if n < HEADER_PROPERTIES:
        return -1
    flags: uint32_t = load16(p + HEADER_FLAGS)
    if flags & MORE_FLAGS:
        return -1
    flags &= HAS_MASK
    at: cython.Py_ssize_t = HEADER_PROPERTIES
    bit: cython.int = BIT_CONTENT_TYPE
    size: cython.Py_ssize_t
    while flags and bit >= last:
        if flags & HAS_CONTENT_TYPE:
            if bit == BIT_HEADERS:
                if n - at < 4:
                    return -1
                size = 4 + cython.cast(cython.Py_ssize_t, load32(p + at))
            elif bit == BIT_DELIVERY_MODE or bit == BIT_PRIORITY:
                size = 1
            elif bit == BIT_TIMESTAMP:
                size = 8
            else:
                if at >= n:
                    return -1
                size = 1 + cython.cast(cython.Py_ssize_t, p[at])
            if size > n - at:
                return -1
            spans[bit].at = at
            spans[bit].n = size
            at += size
        flags = (flags << 1) & HAS_MASK
        bit -= 1
    return at


@cython.cfunc
@cython.exceptval(check=False)
def find_fields(
    p: cython.p_uchar, n: cython.Py_ssize_t, at: cython.pointer(cython.Py_ssize_t)
) -> cython.Py_ssize_t:
    if n < HEADER_PROPERTIES:
        return -1
    flags: uint32_t = load16(p + HEADER_FLAGS)
    place: cython.Py_ssize_t = HEADER_PROPERTIES
    if flags & MORE_FLAGS:
        return -1
    if flags & HAS_CONTENT_TYPE:
        if place >= n:
            return -1
        place += 1 + cython.cast(cython.Py_ssize_t, p[place])
    if flags & HAS_CONTENT_ENCODING:
        if place >= n:
            return -1
        place += 1 + cython.cast(cython.Py_ssize_t, p[place])
    if place > n:
        return -1
    at[0] = place
    if not flags & HAS_HEADERS:
        return 0
    if n - place < 4:
        return -1
    size: cython.Py_ssize_t = load32(p + place)
    at[0] = place + 4
    return size if size <= n - place - 4 else -1


def set_converter(converter):
    """Sets what `plain_content` asks."""
    global _converter
    _converter = converter


def data_content(content: bytes):
    p: cython.p_uchar = bytes_pointer(content)
    n: cython.Py_ssize_t = len(content)
    if n < 3 or p[0] != _AMQP_10 or check_content(p, n, n) < 0:
        return None
    header: cython.Py_ssize_t = load32(p + AMQP_SIZE)
    body: cython.Py_ssize_t = header + AMQP_FRAME_OVERHEAD
    if n - body < AMQP_FRAME_OVERHEAD or walk_properties(p + AMQP_FRAME_HEAD, header) < 0:
        return None
    at: cython.Py_ssize_t = body + AMQP_FRAME_HEAD
    end: cython.Py_ssize_t = n - 1
    size: cython.Py_ssize_t
    code: cython.int
    count: uint32_t = 0
    # Of several frames.
    if end - at != load32(p + body + AMQP_SIZE):
        return None
    while True:
        if end - at < 5 or p[at] != 0 or p[at + 1] != 0x53:
            return None
        code = p[at + 2]
        at += 3
        if code == _DATA:
            break
        if code < _ANNOTATIONS or code > _DATA:
            return None
        code = 0xC0 if code == _PROPERTIES else 0xC1
        at = enter(p, cython.address(at), end, code, cython.address(count))
        if at < 0:
            return None
    if p[at] == 0xA0:
        size = p[at + 1]
        at += 2
    elif p[at] == 0xB0 and end - at >= 5:
        size = load32(p + at + 1)
        at += 5
    else:
        return None
    if end - at != size:
        return None
    made: bytes = uninitialized(body + size + AMQP_FRAME_OVERHEAD if size else body)
    q: cython.p_uchar = bytes_pointer(made)
    string.memcpy(q, p, body)
    q[0] = AMQP_HEADER
    store64(q + AMQP_FRAME_HEAD + HEADER_BODY_SIZE, size)
    if size:
        q += body
        q[0] = AMQP_BODY
        store16(q + 1, 0)
        store32(q + AMQP_SIZE, cython.cast(uint32_t, size))
        string.memcpy(q + AMQP_FRAME_HEAD, p + at, size)
        q[AMQP_FRAME_HEAD + size] = AMQP_END
    return made


@cython.cfunc
def plain_content(content: bytes) -> bytes:
    if not content or bytes_pointer(content)[0] < AMQP_ENCODED:
        raise ValueError("content is damaged")
    made: object = data_content(content)
    if made is not None:
        return made
    if _converter is None:
        raise ValueError("content is in an encoding that is not known here")
    return _converter(content)


def with_counts(header: bytes, acquired_count: int, failed_delivery_count: int) -> bytes:
    data: bytes = header
    p: cython.p_uchar = bytes_pointer(data)
    n: cython.Py_ssize_t = len(data)
    if walk_properties(p, n) < 0:
        raise ValueError("content header is broken")
    flags: uint32_t = load16(p + HEADER_FLAGS)
    at: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t = find_fields(p, n, cython.address(at))
    field: Field
    kept = []
    pos: cython.Py_ssize_t = at
    end += at
    while pos < end:
        step: cython.Py_ssize_t = next_field(p + pos, end - pos, 1, cython.address(field))
        if step <= 0:
            raise ValueError("content header is broken")
        if not is_named(cython.address(field), b"x-delivery-count", 16) and not is_named(
            cython.address(field), b"x-acquired-count", 16
        ):
            kept.append(data[pos : pos + step])
        pos += step
    fields: bytes = b"".join(kept)
    if flags & HAS_HEADERS:
        at -= 4
    if acquired_count:
        fields += b"\x10x-acquired-countl" + int(acquired_count).to_bytes(8, "big")
    if failed_delivery_count:
        fields += b"\x10x-delivery-countl" + int(failed_delivery_count).to_bytes(8, "big")
    return b"".join(
        (
            data[:HEADER_FLAGS],
            int(flags | HAS_HEADERS).to_bytes(2, "big"),
            data[HEADER_PROPERTIES:at],
            len(fields).to_bytes(4, "big"),
            fields,
            data[end:],
        )
    )


def split_record(record: bytes):
    at: cython.Py_ssize_t = names_length(bytes_pointer(record), len(record))
    if at < 0:
        raise ValueError("record is damaged")
    return record[:at], record[at:]


def content_parts(content: bytes):
    """(content header payload, body) of whole content frames."""
    n: cython.Py_ssize_t = len(content)
    p: cython.p_uchar = bytes_pointer(content)
    if check_content(p, n, n) < 0:
        raise ValueError("content is damaged")
    at: cython.Py_ssize_t = load32(p + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    header = content[AMQP_FRAME_HEAD : at - 1]
    parts = []
    while at < n:
        size: cython.Py_ssize_t = load32(p + at + AMQP_SIZE)
        parts.append(content[at + AMQP_FRAME_HEAD : at + AMQP_FRAME_HEAD + size])
        at += size + AMQP_FRAME_OVERHEAD
    return header, b"".join(parts)


def replace_header(content: bytes, header: bytes):
    """The content frames with another content header payload."""
    n: cython.Py_ssize_t = len(content)
    p: cython.p_uchar = bytes_pointer(content)
    if check_content(p, n, n) < 0:
        raise ValueError("content is damaged")
    at: cython.Py_ssize_t = load32(p + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    return b"".join(
        (content[:AMQP_SIZE], len(header).to_bytes(4, "big"), header, b"\xce", content[at:])
    )
