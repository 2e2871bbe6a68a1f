"""Scans AMQP 0-9-1 frames: publishes, acknowledgements, and what is handed to the owner as bytes.

Complete publishes go from the receive buffer straight into the builders of their targets.
Acknowledgements become ranges of message ids. No Python object is made per message.

    frame     u8 type (1 method, 2 header, 3 body, 8 heartbeat), u16 channel, u32 size, payload, 206
    header    u16 class 60, u16 weight, u64 body size, u16 property flags, properties
    record    docs/formats/entries-and-frames.md

Every length is compared with what is there before it is used; nothing outside a buffer is read.
The naive twin of the scanner is tests/unit/kernels/test_frames.py.
"""

import cython
from cython.cimports.convoymq.kernels.acknowledgements import acknowledge_tag, flush_codec
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_CHANNEL,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_HEARTBEAT,
    AMQP_METHOD,
    AMQP_PAYLOAD_MAX,
    AMQP_SIZE,
    BASIC_ACK,
    BASIC_NACK,
    BASIC_PUBLISH,
    BASIC_REJECT,
    CHANNEL_CLOSE_METHOD,
    CHANNEL_CLOSE_OK_METHOD,
    CHANNEL_OPEN_METHOD,
    CLASS_BASIC,
    HEADER_BODY_SIZE,
    HEADER_PROPERTIES,
    METHOD_ID_SIZE,
    METHOD_PUBLISH,
    PUBLISH_IMMEDIATE,
    PUBLISH_MANDATORY,
    REPLY_FRAME_ERROR,
    REPLY_SYNTAX_ERROR,
    REPLY_UNEXPECTED_FRAME,
)
from cython.cimports.convoymq.kernels.batch import PublishTarget
from cython.cimports.convoymq.kernels.byte_buffer import IDLE_CAPACITY, Buffer, append, reserve
from cython.cimports.convoymq.kernels.bytes import (
    copy_bytes,
    load16,
    load32,
    load64,
    store16,
    store32,
)
from cython.cimports.convoymq.kernels.channel_codec import (
    CHANNEL_BUSY,
    CHANNEL_CLOSING,
    CHANNEL_OPEN,
    DISCARD,
    EXPECT_BODY,
    EXPECT_HEADER,
    EXPECT_METHOD,
    MODE_CONFIRM,
    MODE_TX,
    RETURN,
    RETURN_FAILED,
    SETTLE,
    ChannelCodec,
)
from cython.cimports.convoymq.kernels.confirms import allocate_confirm, expect_confirms
from cython.cimports.convoymq.kernels.connection_buffer import (
    CONNECTION_CLOSED,
    CONNECTION_HEADER,
    CONNECTION_OPEN,
    ConnectionBuffer,
)
from cython.cimports.convoymq.kernels.content import (
    RECORD_ASKS,
    RECORD_EXAMINE,
    RECORD_EXPIRATION,
    RECORD_GROUPED,
    RECORD_HEADERS,
    RECORD_ORDERED,
    RECORD_PRIORITY,
    RECORD_TRACED,
    RECORD_WAITS,
    walk_properties,
)
from cython.cimports.convoymq.kernels.message_sizes import count_size
from cython.cimports.convoymq.kernels.route_cache import (
    Route,
    RouteCache,
    add_route,
    drop_routes,
    find_route,
    hash_key,
)
from cython.cimports.convoymq.kernels.trace_contexts import context_of
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t


@cython.cfunc
@cython.exceptval(-1)
def _fault(
    buffer: ConnectionBuffer, code: cython.int, text: str, channel: cython.int
) -> cython.int:
    """The peer broke the protocol: the owner closes the connection."""
    buffer.owner.on_fault(code, text, channel, 0, 0)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _publish_fault(codec: ChannelCodec, code: cython.int, text: str) -> cython.int:
    """The same, in a publish."""
    codec.buffer.owner.on_fault(code, text, codec.number, CLASS_BASIC, METHOD_PUBLISH)
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _all_serve(targets: tuple, asked: cython.int) -> cython.bint:
    """Returns whether every queue serves what a message asks for."""
    i: cython.Py_ssize_t
    for i in range(len(targets)):
        if cython.cast(PublishTarget, targets[i]).serves & asked != asked:
            return False
    return True


@cython.cfunc
def _resolve(
    buffer: ConnectionBuffer,
    codec: ChannelCodec,
    hash: uint64_t,
    key: cython.p_uchar,
    key_length: cython.Py_ssize_t,
    names: cython.Py_ssize_t,
) -> tuple:
    """Asks the owner where messages with this key go, and remembers it; None: each is to be looked
    at, or the channel has closed. The first `names` bytes of the key name the exchange."""
    codec.every_key = False
    codec.route_count = None
    targets: tuple = codec.owner.resolve_route(copy_bytes(key, key_length))
    if targets is None or codec.state != CHANNEL_OPEN or buffer.state != CONNECTION_OPEN:
        return None
    if codec.every_key:
        hash, key_length = hash_key(key, names), names
    add_route(cython.address(codec.routes), hash, key, key_length, targets, codec.route_count)
    return targets


@cython.cfunc
@cython.exceptval(-1)
def _begin_span(
    codec: ChannelCodec,
    key: cython.p_uchar,
    key_length: cython.Py_ssize_t,
    content: cython.p_uchar,
    tag: uint64_t,
) -> cython.int:
    """Tells the channel's spans of a message with a trace context, when it is sampled."""
    header: cython.p_uchar = content + AMQP_FRAME_HEAD
    context = context_of(header, load32(content + AMQP_SIZE), codec.spans.below)
    if context is not None:
        codec.spans.published(copy_bytes(key, key_length), context, tag)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _publish_complete(
    buffer: ConnectionBuffer,
    codec: ChannelCodec,
    key: cython.p_uchar,
    key_length: cython.Py_ssize_t,
    bits: cython.int,
    content: cython.p_uchar,
    content_length: cython.Py_ssize_t,
    body_size: uint64_t,
) -> cython.int:
    """A whole message lies at `key` and `content` (header frame, body frames): send it on."""
    notes: cython.int = walk_properties(content + AMQP_FRAME_HEAD, load32(content + AMQP_SIZE))
    if notes < 0:
        return _publish_fault(codec, REPLY_SYNTAX_ERROR, "content header is broken")
    codec.published += 1
    count_size(buffer.outbox.sizes, body_size)
    flags: cython.int = notes & (RECORD_PRIORITY | RECORD_EXPIRATION | RECORD_HEADERS)
    tag: uint64_t = 0
    targets: tuple = None
    counted: cython.pointer(uint64_t) = cython.NULL
    if notes & RECORD_EXAMINE == 0 and bits & PUBLISH_IMMEDIATE == 0 and codec.mode != MODE_TX:
        hash: uint64_t = hash_key(key, key_length)
        names: cython.Py_ssize_t = 0
        cache: cython.pointer(RouteCache) = cython.address(codec.routes)
        if codec.route_cache_version.value != cache.version:
            drop_routes(cache)
            cache.version = codec.route_cache_version.value
        route: cython.pointer(Route) = find_route(cache, hash, key, key_length)
        if route != cython.NULL and route.key != cython.NULL:
            targets = cython.cast(tuple, route.targets)
            counted = route.messages
        else:
            # Of a topic the exchange alone is remembered: it has a key for almost every message.
            names = 1 + cython.cast(cython.Py_ssize_t, key[0])
            if key_length > names + 1 or notes & RECORD_ORDERED:
                route = find_route(cache, hash_key(key, names), key, names)
                if route != cython.NULL and route.key != cython.NULL:
                    targets = cython.cast(tuple, route.targets)
                    counted = route.messages
        if targets is None:
            codec.has_order_key = notes & RECORD_ORDERED != 0
            targets = _resolve(buffer, codec, hash, key, key_length, names)
            if codec.state != CHANNEL_OPEN or buffer.state != CONNECTION_OPEN:
                return 0
            if codec.route_count is not None:
                counted = cython.address(codec.route_count.messages)
        asked: cython.int = notes & (RECORD_ASKS | RECORD_WAITS | RECORD_GROUPED)
        if asked and targets is not None and not _all_serve(targets, asked):
            targets = None
    if codec.mode == MODE_CONFIRM:
        tag = allocate_confirm(codec)
    if notes & RECORD_TRACED and codec.spans is not None:
        _begin_span(codec, key, key_length, content, tag)
    if targets is None or (bits & PUBLISH_MANDATORY and len(targets) == 0):
        whole: bytes = copy_bytes(content, content_length)
        codec.owner.on_publish(copy_bytes(key, key_length), bits, whole, body_size, flags, tag)
        return 0
    if counted != cython.NULL:
        counted[0] += 1
    count: cython.Py_ssize_t = len(targets)
    if count == 0:
        codec.owner.on_dropped()
    if tag and count != 1:
        expect_confirms(codec, tag, cython.cast(cython.int, count))
    i: cython.Py_ssize_t
    for i in range(count):
        target: PublishTarget = cython.cast(PublishTarget, targets[i])
        placed: uint64_t = tag
        if target.spreads:
            target = target.place(key, key_length, content, content_length, cython.address(placed))
        p: cython.p_uchar = target.builder.reserve(
            target, placed, body_size, flags, key_length + content_length
        )
        string.memcpy(p, key, key_length)
        string.memcpy(p + key_length, content, content_length)
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _find_content(
    buffer: ConnectionBuffer,
    channel: uint32_t,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    used: cython.pointer(cython.Py_ssize_t),
    body_size: cython.pointer(uint64_t),
) -> cython.int:
    """Finds what of a message's content lies in the n bytes at p. For all of it (CONTENT_WHOLE) the
    bytes used and the size of the body are filled in."""
    if n < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        if n >= AMQP_SIZE and (p[0] != AMQP_HEADER or load16(p + AMQP_CHANNEL) != channel):
            return CONTENT_ASSEMBLE
        if n >= AMQP_FRAME_HEAD and load32(p + AMQP_SIZE) > buffer.frame_max:
            return CONTENT_ASSEMBLE
        return CONTENT_WAIT
    if p[0] != AMQP_HEADER or load16(p + AMQP_CHANNEL) != channel:
        return CONTENT_ASSEMBLE
    size: cython.Py_ssize_t = load32(p + AMQP_SIZE)
    if size < HEADER_PROPERTIES or size > buffer.frame_max:
        return CONTENT_ASSEMBLE
    body: uint64_t = load64(p + AMQP_FRAME_HEAD + HEADER_BODY_SIZE)
    if load16(p + AMQP_FRAME_HEAD) != CLASS_BASIC or body > buffer.message_size_max:
        return CONTENT_ASSEMBLE
    at: cython.Py_ssize_t = size + AMQP_FRAME_OVERHEAD
    if at > n:
        return CONTENT_WAIT
    if p[AMQP_FRAME_HEAD + size] != AMQP_END:
        return CONTENT_ASSEMBLE
    seen: uint64_t = 0
    while seen != body:
        if n - at < AMQP_FRAME_HEAD:
            return CONTENT_WAIT
        size = load32(p + at + AMQP_SIZE)
        if (
            p[at] != AMQP_BODY
            or load16(p + at + AMQP_CHANNEL) != channel
            or size == 0
            or size > AMQP_PAYLOAD_MAX
            or size > buffer.frame_max
            or cython.cast(uint64_t, size) > body - seen
        ):
            return CONTENT_ASSEMBLE
        if n - at < size + AMQP_FRAME_OVERHEAD:
            return CONTENT_WAIT
        if p[at + AMQP_FRAME_HEAD + size] != AMQP_END:
            return CONTENT_ASSEMBLE
        seen += size
        at += size + AMQP_FRAME_OVERHEAD
    used[0] = at
    body_size[0] = body
    return CONTENT_WHOLE


@cython.cfunc
@cython.exceptval(-1)
def _publish(
    buffer: ConnectionBuffer,
    codec: ChannelCodec,
    q: cython.p_uchar,
    size: cython.Py_ssize_t,
    left: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """basic.publish at q. Returns the bytes used; 0 = more is needed first."""
    m: cython.p_uchar = q + AMQP_FRAME_HEAD
    if size < PUBLISH_SIZE_MIN:
        _publish_fault(codec, REPLY_FRAME_ERROR, "basic.publish is cut off")
        return size + AMQP_FRAME_OVERHEAD
    exchange: cython.Py_ssize_t = m[PUBLISH_EXCHANGE]
    if PUBLISH_EXCHANGE + 1 + exchange >= size:
        _publish_fault(codec, REPLY_FRAME_ERROR, "basic.publish is cut off")
        return size + AMQP_FRAME_OVERHEAD
    key_length: cython.Py_ssize_t = 2 + exchange + m[PUBLISH_EXCHANGE + 1 + exchange]
    if PUBLISH_EXCHANGE + key_length + 1 != size:
        _publish_fault(codec, REPLY_FRAME_ERROR, "basic.publish has a wrong length")
        return size + AMQP_FRAME_OVERHEAD
    bits: cython.int = m[PUBLISH_EXCHANGE + key_length]
    if buffer.alarmed:
        buffer.paused = True
        buffer.owner.on_publish_blocked()
        return 0

    # All of it in the buffer: no copy but the one into the batch.
    r: cython.p_uchar = q + size + AMQP_FRAME_OVERHEAD
    at: cython.Py_ssize_t = 0
    body_size: uint64_t = 0
    found: cython.int = _find_content(
        buffer,
        load16(q + AMQP_CHANNEL),
        r,
        left - size - AMQP_FRAME_OVERHEAD,
        cython.address(at),
        cython.address(body_size),
    )
    if found == CONTENT_WHOLE:
        _publish_complete(buffer, codec, m + PUBLISH_EXCHANGE, key_length, bits, r, at, body_size)
        return size + AMQP_FRAME_OVERHEAD + at
    if found == CONTENT_WAIT and left < WAIT_MAX and not codec.pumping:
        return 0

    # Parts are missing: gather them at the channel.
    codec.content.start = 0
    codec.content.end = 0
    append(cython.address(codec.content), m + PUBLISH_EXCHANGE, key_length)
    codec.key_length = key_length
    codec.publish_bits = bits
    codec.expect = EXPECT_HEADER
    return size + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(-1)
def _assemble_header(
    buffer: ConnectionBuffer, codec: ChannelCodec, q: cython.p_uchar, size: cython.Py_ssize_t
) -> cython.int:
    if codec.expect != EXPECT_HEADER:
        return _fault(
            buffer, REPLY_UNEXPECTED_FRAME, "content header frame where none is due", codec.number
        )
    if size < HEADER_PROPERTIES:
        return _publish_fault(codec, REPLY_FRAME_ERROR, "content header is cut off")
    if load16(q + AMQP_FRAME_HEAD) != CLASS_BASIC:
        return _publish_fault(
            codec, REPLY_UNEXPECTED_FRAME, "content header of another class than its method"
        )
    codec.body_size = load64(q + AMQP_FRAME_HEAD + HEADER_BODY_SIZE)
    codec.body_seen = 0
    codec.body_frame = -1
    if codec.body_size > buffer.message_size_max:
        codec.expect = EXPECT_METHOD
        codec.owner.on_too_big(codec.body_size)
        return 0
    append(cython.address(codec.content), q, size + AMQP_FRAME_OVERHEAD)
    codec.header_length = size
    codec.expect = EXPECT_BODY
    if codec.body_size == 0:
        _publish_assembled(buffer, codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _assemble_body(
    buffer: ConnectionBuffer, codec: ChannelCodec, q: cython.p_uchar, size: cython.Py_ssize_t
) -> cython.int:
    if codec.expect != EXPECT_BODY:
        return _fault(
            buffer, REPLY_UNEXPECTED_FRAME, "content body frame where none is due", codec.number
        )
    if cython.cast(uint64_t, size) > codec.body_size - codec.body_seen:
        return _publish_fault(codec, REPLY_FRAME_ERROR, "more body bytes than announced")
    codec.body_seen += size
    stage: cython.pointer(Buffer) = cython.address(codec.content)
    p: cython.p_uchar = q + AMQP_FRAME_HEAD
    n: cython.Py_ssize_t
    used: cython.Py_ssize_t
    # Fragments are joined into frames of the size that records have.
    while size:
        if codec.body_frame >= 0:
            used = stage.end - codec.body_frame - AMQP_FRAME_OVERHEAD
            n = min(size, AMQP_PAYLOAD_MAX - used)
            if n:
                reserve(stage, n)
                string.memcpy(stage.p + stage.end - 1, p, n)
                stage.end += n
                stage.p[stage.end - 1] = AMQP_END
                store32(stage.p + codec.body_frame + AMQP_SIZE, cython.cast(uint32_t, used + n))
                p += n
                size -= n
                continue
        n = min(size, AMQP_PAYLOAD_MAX)
        codec.body_frame = stage.end
        reserve(stage, n + AMQP_FRAME_OVERHEAD)
        stage.p[stage.end] = AMQP_BODY
        store16(stage.p + stage.end + AMQP_CHANNEL, codec.number)
        store32(stage.p + stage.end + AMQP_SIZE, cython.cast(uint32_t, n))
        string.memcpy(stage.p + stage.end + AMQP_FRAME_HEAD, p, n)
        stage.end += n + AMQP_FRAME_OVERHEAD
        stage.p[stage.end - 1] = AMQP_END
        p += n
        size -= n
    if codec.body_seen == codec.body_size:
        _publish_assembled(buffer, codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _publish_assembled(buffer: ConnectionBuffer, codec: ChannelCodec) -> cython.int:
    """Publishes what was gathered. The buffer is taken away first: the owner may close the channel
    codec."""
    taken: Buffer = codec.content
    codec.content.p = cython.NULL
    codec.content.start = 0
    codec.content.end = 0
    codec.content.capacity = 0
    codec.expect = EXPECT_METHOD
    try:
        _publish_complete(
            buffer,
            codec,
            taken.p,
            codec.key_length,
            codec.publish_bits,
            taken.p + codec.key_length,
            taken.end - codec.key_length,
            codec.body_size,
        )
    finally:
        if (
            codec.content.p == cython.NULL
            and codec.state == CHANNEL_OPEN
            and taken.capacity <= IDLE_CAPACITY
        ):
            codec.content.p = taken.p
            codec.content.capacity = taken.capacity
        else:
            stdlib.free(taken.p)
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _outcome(method: uint32_t, bits: cython.int) -> cython.int:
    """Returns how basic.ack, basic.nack or basic.reject ends deliveries; -1 for any other
    method."""
    if method == BASIC_ACK:
        return SETTLE
    if method == BASIC_NACK:
        return RETURN if bits & NACK_REQUEUE else DISCARD
    if method == BASIC_REJECT:
        return RETURN_FAILED if bits & REJECT_REQUEUE else DISCARD
    return -1


@cython.cfunc
@cython.exceptval(-1)
def _codec_frame(
    buffer: ConnectionBuffer,
    codec: ChannelCodec,
    q: cython.p_uchar,
    type: cython.int,
    size: cython.Py_ssize_t,
    left: cython.Py_ssize_t,
    kept: cython.bint,
) -> cython.Py_ssize_t:
    """One whole frame of an open channel at q. Returns the bytes used; 0 = more is needed first."""
    method: uint32_t
    if codec.state == CHANNEL_CLOSING:
        if type == AMQP_METHOD and size >= METHOD_ID_SIZE:
            method = load32(q + AMQP_FRAME_HEAD)
            if (
                method == CHANNEL_CLOSE_METHOD
                or method == CHANNEL_CLOSE_OK_METHOD
                or method == CHANNEL_OPEN_METHOD
            ):
                buffer.owner.on_method(codec.number, copy_bytes(q + AMQP_FRAME_HEAD, size))
        return size + AMQP_FRAME_OVERHEAD
    if not kept and (codec.state == CHANNEL_BUSY or codec.backlog.end > codec.backlog.start):
        if (
            codec.backlog.end - codec.backlog.start + size + AMQP_FRAME_OVERHEAD
            > buffer.backlog_max
        ):
            buffer.paused = True
            buffer.owner.on_backlog_full(codec.number)
            return 0
        append(cython.address(codec.backlog), q, size + AMQP_FRAME_OVERHEAD)
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_HEADER:
        _assemble_header(buffer, codec, q, size)
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_BODY:
        _assemble_body(buffer, codec, q, size)
        return size + AMQP_FRAME_OVERHEAD
    if codec.expect:
        _publish_fault(codec, REPLY_UNEXPECTED_FRAME, "method frame where content is due")
        return size + AMQP_FRAME_OVERHEAD
    if size < METHOD_ID_SIZE:
        _fault(buffer, REPLY_FRAME_ERROR, "method frame is cut off", codec.number)
        return size + AMQP_FRAME_OVERHEAD
    method = load32(q + AMQP_FRAME_HEAD)
    if method == BASIC_PUBLISH:
        return _publish(buffer, codec, q, size, left)
    if codec.mode != MODE_TX and size == ACK_SIZE:
        bits: cython.int = q[AMQP_FRAME_HEAD + ACK_BITS]
        kind: cython.int = _outcome(method, bits)
        if kind >= 0:
            multiple: cython.bint = method != BASIC_REJECT and bits & ACK_MULTIPLE
            tag: uint64_t = load64(q + AMQP_FRAME_HEAD + METHOD_ID_SIZE)
            if acknowledge_tag(codec, kind, tag, multiple) < 0:
                codec.owner.on_unknown_tag(tag, method & 0xFFFF)
            return size + AMQP_FRAME_OVERHEAD
    flush_codec(codec)
    buffer.owner.on_method(codec.number, copy_bytes(q + AMQP_FRAME_HEAD, size))
    return size + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(-1)
def pump_backlog(codec: ChannelCodec) -> cython.int:
    buffer: ConnectionBuffer = codec.buffer
    taken: Buffer = codec.backlog
    codec.backlog.p = cython.NULL
    codec.backlog.start = 0
    codec.backlog.end = 0
    codec.backlog.capacity = 0
    codec.pumping = True
    at: cython.Py_ssize_t = taken.start
    try:
        while (
            at < taken.end
            and codec.state != CHANNEL_BUSY
            and buffer.state == CONNECTION_OPEN
            and (codec.state == CHANNEL_CLOSING or not buffer.alarmed)
        ):
            q: cython.p_uchar = taken.p + at
            used: cython.Py_ssize_t = _codec_frame(
                buffer, codec, q, q[0], load32(q + AMQP_SIZE), taken.end - at, True
            )
            if used == 0:
                break
            at += used
    finally:
        codec.pumping = False
        if at < taken.end and codec.state != CHANNEL_CLOSING and buffer.state == CONNECTION_OPEN:
            taken.start = at
            codec.backlog = taken
        else:
            stdlib.free(taken.p)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _frame(
    buffer: ConnectionBuffer,
    q: cython.p_uchar,
    type: cython.int,
    channel: cython.int,
    size: cython.Py_ssize_t,
    left: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    if channel == 0:
        if type == AMQP_HEARTBEAT:
            if size:
                _fault(buffer, REPLY_FRAME_ERROR, "heartbeat frame with a payload", 0)
        elif type == AMQP_METHOD:
            buffer.owner.on_method(0, copy_bytes(q + AMQP_FRAME_HEAD, size))
        elif buffer.state == CONNECTION_OPEN:
            _fault(buffer, REPLY_UNEXPECTED_FRAME, "content frame on channel 0", 0)
        return size + AMQP_FRAME_OVERHEAD
    if buffer.state != CONNECTION_OPEN:
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_HEARTBEAT:
        _fault(buffer, REPLY_UNEXPECTED_FRAME, f"heartbeat frame on channel {channel}", 0)
        return size + AMQP_FRAME_OVERHEAD
    found = buffer.codecs[channel] if channel < len(buffer.codecs) else None
    if found is None:
        if type == AMQP_METHOD:
            buffer.owner.on_method(channel, copy_bytes(q + AMQP_FRAME_HEAD, size))
        else:
            _fault(
                buffer,
                REPLY_UNEXPECTED_FRAME,
                f"content frame on channel {channel} that is not open",
                0,
            )
        return size + AMQP_FRAME_OVERHEAD
    return _codec_frame(buffer, found, q, type, size, left, False)


@cython.cfunc
@cython.exceptval(-1)
def scan(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.Py_ssize_t:
    at: cython.Py_ssize_t = 0
    while not buffer.paused and buffer.state != CONNECTION_CLOSED:
        left: cython.Py_ssize_t = n - at
        q: cython.p_uchar = p + at
        if buffer.state == CONNECTION_HEADER:
            if left < PROTOCOL_HEADER_SIZE:
                # Another protocol may begin with less: the first byte that differs decides.
                if left and string.memcmp(q, b"AMQP\x00\x00\x09\x01", min(left, 4)) != 0:
                    buffer.owner.on_protocol_header(copy_bytes(q, left))
                    return n
                break
            buffer.owner.on_protocol_header(copy_bytes(q, PROTOCOL_HEADER_SIZE))
            at += PROTOCOL_HEADER_SIZE
            continue
        if left < AMQP_FRAME_HEAD:
            break
        type: cython.int = q[0]
        size: cython.Py_ssize_t = load32(q + AMQP_SIZE)
        if (
            type != AMQP_METHOD
            and type != AMQP_HEADER
            and type != AMQP_BODY
            and type != AMQP_HEARTBEAT
        ):
            _fault(buffer, REPLY_FRAME_ERROR, f"unknown frame type {type}", 0)
            return n
        if size > buffer.frame_max:
            _fault(
                buffer,
                REPLY_FRAME_ERROR,
                f"frame of {size} bytes is larger than the negotiated {buffer.frame_max}",
                0,
            )
            return n
        if left < size + AMQP_FRAME_OVERHEAD:
            break
        if q[AMQP_FRAME_HEAD + size] != AMQP_END:
            _fault(
                buffer,
                REPLY_FRAME_ERROR,
                f"frame ends with octet {q[AMQP_FRAME_HEAD + size]} instead of {AMQP_END}",
                0,
            )
            return n
        used: cython.Py_ssize_t = _frame(
            buffer, q, type, cython.cast(cython.int, load16(q + AMQP_CHANNEL)), size, left
        )
        if used == 0:
            break
        at += used
    return n if buffer.state == CONNECTION_CLOSED else at
