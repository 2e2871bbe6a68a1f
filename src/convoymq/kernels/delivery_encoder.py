"""Encodes basic.deliver, basic.get-ok and basic.return: records become frames of the output."""

import cython
from cython.cimports.convoymq.kernels.acknowledgements import add_deliveries, note_outcome
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_CHANNEL,
    AMQP_ENCODED,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_MAX,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_METHOD,
    AMQP_SIZE,
    BASIC_DELIVER,
    HAS_HEADERS,
    HEADER_FLAGS,
    METHOD_ID_SIZE,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_table
from cython.cimports.convoymq.kernels.byte_buffer import Buffer, reserve
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    load16,
    load32,
    store16,
    store32,
    store64,
)
from cython.cimports.convoymq.kernels.channel_codec import SETTLE, ChannelCodec, ConsumerDeliveries
from cython.cimports.convoymq.kernels.connection_buffer import (
    ConnectionBuffer,
    mark_dirty,
    put_frame,
)
from cython.cimports.convoymq.kernels.content import (
    Field,
    check_content,
    find_fields,
    names_length,
    next_field,
    plain_content,
)
from cython.cimports.convoymq.kernels.delivery_encoder import memmem
from cython.cimports.convoymq.kernels.layout import ENQUEUE_RECORDS
from cython.cimports.convoymq.kernels.order_headers import (
    PLACE_BITS,
    PLACE_ROOM,
    Place,
    is_order_field,
    put_order_fields,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

from convoymq.kernels.content import with_counts

_OFFSET_FIELD = cython.declare(bytes, b"\x0fx-stream-offsetl")


@cython.cfunc
def record_of(block: bytes, command: cython.Py_ssize_t, record: cython.Py_ssize_t) -> bytes:
    count: uint32_t = 0
    p: cython.p_uchar = bytes_pointer(block)
    table: cython.Py_ssize_t = record_table(p, len(block), command, cython.address(count))
    if table < 0 or record < 0 or record >= cython.cast(cython.Py_ssize_t, count):
        raise ValueError("record lies outside its command")
    low: cython.Py_ssize_t = get32(p + table + 4 * record)
    high: cython.Py_ssize_t = get32(p + table + 4 * record + 4)
    if low < ENQUEUE_RECORDS or high < low or command + high > table:
        raise ValueError("record table is damaged")
    return block[command + low : command + high]


@cython.cfunc
@cython.exceptval(-1)
def _write_content(
    codec: ChannelCodec,
    content: cython.p_uchar,
    length: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
    offset: int64_t,
) -> cython.int:
    """Appends the content frames for this channel; the room was made for the plain case.
    `offset` of the message in its stream, or -1."""
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    kind: cython.int = check_content(content, length, codec.buffer.frame_max)
    if kind != 0 or acquired_count != 0 or failed_delivery_count != 0:
        if kind < 0:
            raise ValueError("content of a record is damaged")
        return _write_changed(codec, content, length, acquired_count, failed_delivery_count, offset)
    n: cython.Py_ssize_t
    if offset >= 0:
        n = load32(content + AMQP_SIZE)
        n = _write_header(codec, content + AMQP_FRAME_HEAD, n, offset, None, cython.NULL, 0)
        content += n
        length -= n
    p: cython.p_uchar = out.p + out.end
    at: cython.Py_ssize_t = 0
    string.memcpy(p, content, length)
    while at < length:
        store16(p + at + AMQP_CHANNEL, codec.number)
        at += load32(p + at + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    out.end += length
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _write_changed(
    codec: ChannelCodec,
    content: cython.p_uchar,
    length: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
    offset: int64_t,
) -> cython.int:
    """The same with counts in the header, or for a client of small frames."""
    n: cython.Py_ssize_t = load32(content + AMQP_SIZE)
    if offset >= 0:
        used: cython.Py_ssize_t = _write_header(
            codec, content + AMQP_FRAME_HEAD, n, offset, None, cython.NULL, 0
        )
        if used:
            return _write_bodies(codec, content + used, length - used)
    header: bytes = copy_bytes(content + AMQP_FRAME_HEAD, n)
    if acquired_count or failed_delivery_count:
        header = with_counts(header, acquired_count, failed_delivery_count)
    put_frame(codec.buffer, AMQP_HEADER, codec.number, bytes_pointer(header), len(header))
    return _write_bodies(codec, content + n + AMQP_FRAME_OVERHEAD, length - n - AMQP_FRAME_OVERHEAD)


@cython.cfunc
@cython.exceptval(-1)
def _write_placed(
    codec: ChannelCodec,
    content: cython.p_uchar,
    rest: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
    place: Place,
    offset: int64_t,
    record: cython.p_uchar,
    length: cython.Py_ssize_t,
) -> cython.int:
    """Appends the content frames of a message of an ordered topic, whose record says its key."""
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    kind: cython.int = check_content(content, rest, codec.buffer.frame_max)
    if kind < 0:
        raise ValueError("content of a record is damaged")
    n: cython.Py_ssize_t = load32(content + AMQP_SIZE)
    header: bytes = b""
    p: cython.p_uchar = content + AMQP_FRAME_HEAD
    size: cython.Py_ssize_t = n
    if acquired_count or failed_delivery_count:
        header = with_counts(copy_bytes(p, n), acquired_count, failed_delivery_count)
        p = bytes_pointer(header)
        size = len(header)
    if not _write_header(codec, p, size, offset, place, record, length):
        put_frame(codec.buffer, AMQP_HEADER, codec.number, p, size)
    n += AMQP_FRAME_OVERHEAD
    if kind:
        return _write_bodies(codec, content + n, rest - n)
    reserve(out, rest)
    p = out.p + out.end
    string.memcpy(p, content + n, rest - n)
    at: cython.Py_ssize_t = 0
    while at < rest - n:
        store16(p + at + AMQP_CHANNEL, codec.number)
        at += load32(p + at + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
    out.end += rest - n
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _write_bodies(
    codec: ChannelCodec, content: cython.p_uchar, length: cython.Py_ssize_t
) -> cython.int:
    """Appends body frames, cut as the client wants them."""
    buffer: ConnectionBuffer = codec.buffer
    at: cython.Py_ssize_t = 0
    n: cython.Py_ssize_t
    room: cython.Py_ssize_t = buffer.frame_max - AMQP_FRAME_OVERHEAD
    while at < length:
        n = load32(content + at + AMQP_SIZE)
        done: cython.Py_ssize_t = 0
        while done < n:
            part: cython.Py_ssize_t = min(room, n - done)
            put_frame(buffer, AMQP_BODY, codec.number, content + at + AMQP_FRAME_HEAD + done, part)
            done += part
        at += n + AMQP_FRAME_OVERHEAD
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _copy_fields(
    q: cython.p_uchar, source: cython.p_uchar, fields: cython.Py_ssize_t, placed: cython.bint
) -> cython.Py_ssize_t:
    """Copies `fields` bytes of header fields to q, but for those that `_write_header` writes;
    returns how many bytes it wrote. Raises ValueError."""
    name: cython.p_uchar = bytes_pointer(_OFFSET_FIELD)
    if fields == 0 or (not placed and memmem(source, fields, name, OFFSET_NAME) == cython.NULL):
        if fields:
            string.memcpy(q, source, fields)
        return fields
    begin: cython.p_uchar = q
    field: Field
    dropped: cython.bint
    done: cython.Py_ssize_t = 0
    while done < fields:
        step: cython.Py_ssize_t = next_field(source + done, fields - done, 1, cython.address(field))
        if step < 0:
            raise ValueError("header table of a record is damaged")
        if placed:
            dropped = is_order_field(source + done)
        else:
            dropped = string.memcmp(source + done, name, OFFSET_NAME) == 0
        if not dropped:
            string.memcpy(q, source + done, step)
            q += step
        done += step
    return q - begin


@cython.cfunc
@cython.exceptval(-1)
def _write_header(
    codec: ChannelCodec,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    offset: int64_t,
    place: Place | None,
    record: cython.p_uchar,
    length: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Appends the content header frame with the header x-stream-offset, or with those of the place
    of a record, instead of any other of their names. `p`: the n bytes of the payload. Returns what
    the frame has in the record; 0 = nothing was done, because it would not fit a frame any more."""
    buffer: ConnectionBuffer = codec.buffer
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    room: cython.Py_ssize_t = OFFSET_ROOM if place is None else PLACE_ROOM
    if n + room + AMQP_FRAME_OVERHEAD > cython.cast(cython.Py_ssize_t, buffer.frame_max):
        return 0
    flags: uint32_t = load16(p + HEADER_FLAGS)
    at: cython.Py_ssize_t = 0
    fields: cython.Py_ssize_t = find_fields(p, n, cython.address(at))
    if fields < 0:
        raise ValueError("content header of a record is damaged")
    rest: cython.Py_ssize_t = at + fields
    if flags & HAS_HEADERS:
        at -= 4
    reserve(out, n + room + AMQP_FRAME_OVERHEAD)
    start: cython.p_uchar = out.p + out.end
    q: cython.p_uchar = start + AMQP_FRAME_HEAD
    string.memcpy(q, p, at)
    q[HEADER_FLAGS] = ((flags | HAS_HEADERS) >> 8) & 0xFF
    q += at + 4
    table: cython.p_uchar = q
    field: cython.p_uchar = bytes_pointer(_OFFSET_FIELD)
    q += _copy_fields(q, p + rest - fields, fields, place is not None)
    if place is not None:
        q = put_order_fields(q, place, cython.cast(uint64_t, offset), record, length)
    else:
        string.memcpy(q, field, OFFSET_VALUE)
        store64(q + OFFSET_VALUE, cython.cast(uint64_t, offset))
        q += OFFSET_VALUE + 8
    store32(table - 4, cython.cast(uint32_t, q - table))
    string.memcpy(q, p + rest, n - rest)
    q += n - rest
    start[0] = AMQP_HEADER
    store16(start + AMQP_CHANNEL, codec.number)
    store32(start + AMQP_SIZE, cython.cast(uint32_t, q - start - AMQP_FRAME_HEAD))
    q[0] = AMQP_END
    out.end += q - start + 1
    return n + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(-1)
def send_content(
    codec: ChannelCodec,
    method: bytes,
    content: bytes,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
) -> cython.int:
    if content and bytes_pointer(content)[0] >= AMQP_ENCODED:
        content = plain_content(content)
    put_frame(codec.buffer, AMQP_METHOD, codec.number, bytes_pointer(method), len(method))
    reserve(cython.address(codec.buffer.out), len(content))
    _write_content(
        codec, bytes_pointer(content), len(content), acquired_count, failed_delivery_count, -1
    )
    mark_dirty(codec.buffer)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _encode_record(
    codec: ChannelCodec,
    head: bytes,
    tag: uint64_t,
    redelivered: cython.bint,
    record: cython.p_uchar,
    length: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
    head_length: cython.Py_ssize_t,
    offset: int64_t,
    place: Place | None,
) -> cython.int:
    """basic.deliver of one record. The caller has made room for the plain case; 1 = it was another,
    and there may be less room left than was made."""
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    key: cython.Py_ssize_t = names_length(record, length)
    if key < 0:
        raise ValueError("record is damaged")
    p: cython.p_uchar = out.p + out.end
    size: cython.Py_ssize_t = DELIVER_FIXED + head_length + key
    p[0] = AMQP_METHOD
    store16(p + AMQP_CHANNEL, codec.number)
    store32(p + AMQP_SIZE, cython.cast(uint32_t, size))
    store32(p + AMQP_FRAME_HEAD, BASIC_DELIVER)
    q: cython.p_uchar = p + AMQP_FRAME_HEAD + METHOD_ID_SIZE
    string.memcpy(q, bytes_pointer(head), head_length)
    q += head_length
    store64(q, tag)
    q[8] = 1 if redelivered else 0
    string.memcpy(q + 9, record, key)
    p[AMQP_FRAME_HEAD + size] = AMQP_END
    out.end += size + AMQP_FRAME_OVERHEAD
    content: cython.p_uchar = record + key
    rest: cython.Py_ssize_t = length - key
    if rest > 0 and content[0] >= AMQP_ENCODED:
        _write_converted(
            codec,
            content,
            rest,
            acquired_count,
            failed_delivery_count,
            place,
            offset,
            record,
            length,
        )
        return 1
    if place is None:
        return _write_content(codec, content, rest, acquired_count, failed_delivery_count, offset)
    return _write_placed(
        codec, content, rest, acquired_count, failed_delivery_count, place, offset, record, length
    )


@cython.cfunc
@cython.exceptval(-1)
def _write_converted(
    codec: ChannelCodec,
    content: cython.p_uchar,
    rest: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
    place: Place | None,
    offset: int64_t,
    record: cython.p_uchar,
    length: cython.Py_ssize_t,
) -> cython.int:
    """Appends the content frames of a record in another encoding."""
    plain: bytes = plain_content(copy_bytes(content, rest))
    content = bytes_pointer(plain)
    rest = len(plain)
    reserve(cython.address(codec.buffer.out), rest + OFFSET_ROOM)
    if place is None:
        return _write_content(codec, content, rest, acquired_count, failed_delivery_count, offset)
    return _write_placed(
        codec, content, rest, acquired_count, failed_delivery_count, place, offset, record, length
    )


@cython.cfunc
@cython.exceptval(-1)
def encode_delivery(
    codec: ChannelCodec, consumer: ConsumerDeliveries, record: bytes, redelivered: cython.bint
) -> cython.int:
    head: bytes = consumer.head
    length: cython.Py_ssize_t = len(record)
    reserve(cython.address(codec.buffer.out), 64 + len(head) + 2 * length)
    p: cython.p_uchar = bytes_pointer(record)
    _encode_record(codec, head, codec.next_tag, redelivered, p, length, 0, 0, len(head), -1, None)
    codec.next_tag += 1
    codec.delivered += 1
    mark_dirty(codec.buffer)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def encode_deliveries(
    codec: ChannelCodec,
    consumer: ConsumerDeliveries,
    first_id: uint64_t,
    block: bytes,
    command: cython.Py_ssize_t,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    acquired_count: uint32_t,
    failed_delivery_count: uint32_t,
) -> cython.int:
    if count == 0:
        return 0
    records: Records
    open_records(bytes_pointer(block), len(block), command, first, count, cython.address(records))
    low: cython.Py_ssize_t = get32(records.table + 4 * first)
    end: cython.Py_ssize_t = get32(records.table + 4 * (first + count))
    if low < ENQUEUE_RECORDS or end < low or end > records.table - records.command:
        raise ValueError("record table is damaged")
    head: bytes = consumer.head
    head_length: cython.Py_ssize_t = len(head)
    room: cython.Py_ssize_t = end - low + count * (DELIVER_ROOM + head_length)
    place: Place | None = None
    offset: int64_t = -1
    if consumer.offsets:
        room += count * OFFSET_ROOM
        offset = cython.cast(int64_t, first_id)
    elif consumer.places is not None:
        room += count * PLACE_ROOM
        place = consumer.places[first_id >> PLACE_BITS]
        offset = place.base + (first_id & ((cython.cast(uint64_t, 1) << PLACE_BITS) - 1))
    buffer: ConnectionBuffer = codec.buffer
    reserve(cython.address(buffer.out), room)
    shown: cython.bint = consumer.counted
    # Frames may become more or longer than they are in the record.
    tight: cython.bint = shown or buffer.frame_max < AMQP_FRAME_MAX
    tag: uint64_t = codec.next_tag
    before: cython.Py_ssize_t = buffer.out.end - buffer.out.start
    i: cython.Py_ssize_t
    high: cython.Py_ssize_t
    try:
        for i in range(count):
            high = get32(records.table + 4 * (first + i + 1))
            if high < low or high > end:
                raise ValueError("record table is damaged")
            if tight:
                reserve(
                    cython.address(buffer.out),
                    high - low + DELIVER_ROOM + head_length + OFFSET_ROOM + PLACE_ROOM,
                )
            if _encode_record(
                codec,
                head,
                tag,
                acquired_count > 0,
                records.command + low,
                high - low,
                acquired_count if shown else 0,
                failed_delivery_count if shown else 0,
                head_length,
                offset,
                place,
            ):
                tight = True
            if offset >= 0:
                offset += 1
            tag += 1
            low = high
    except BaseException:
        # Half a message would spoil all that comes after it.
        buffer.out.end = buffer.out.start + before
        raise
    if consumer.no_ack:
        note_outcome(consumer, SETTLE, first_id, first_id + count - 1)
    else:
        add_deliveries(codec, codec.next_tag, count, first_id, consumer)
    codec.next_tag = tag
    codec.delivered += count
    mark_dirty(buffer)
    return 0
