"""AMQP 0-9-1 frames between a socket and the batches: scans, acknowledges, delivers, confirms.

`ConnectionBuffer` is a connection, `ChannelCodec` one of its channels, `ConsumerDeliveries` one of
the channel's consumers. Complete publishes go from the receive buffer straight into the builders of
their targets; acknowledgements become ranges of message ids; records become basic.deliver frames in
the output buffer. Everything else is handed to the owner as bytes. No Python object is made per
message.

    frame     u8 type (1 method, 2 header, 3 body, 8 heartbeat), u16 channel, u32 size, payload, 206
    header    u16 class 60, u16 weight, u64 body size, u16 property flags, properties
    record    docs/formats/entries-and-frames.md

Every length is compared with what is there before it is used; nothing outside a buffer is read.
The naive twin of the scanner is tests/unit/kernels/test_frames.py.
"""

import cython
from cython.cimports.convoymq.kernels import cext, cnet
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_CHANNEL,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_MAX,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_HEARTBEAT,
    AMQP_METHOD,
    AMQP_PAYLOAD_MAX,
    AMQP_SIZE,
    BASIC_ACK,
    BASIC_DELIVER,
    BASIC_NACK,
    BASIC_PUBLISH,
    BASIC_REJECT,
    CHANNEL_CLOSE_METHOD,
    CHANNEL_CLOSE_OK_METHOD,
    CHANNEL_OPEN_METHOD,
    CLASS_BASIC,
    HAS_CONTENT_ENCODING,
    HAS_CONTENT_TYPE,
    HAS_HEADERS,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
    METHOD_ID_SIZE,
    METHOD_PUBLISH,
    PUBLISH_IMMEDIATE,
    PUBLISH_MANDATORY,
    REPLY_FRAME_ERROR,
    REPLY_SYNTAX_ERROR,
    REPLY_UNEXPECTED_FRAME,
)
from cython.cimports.convoymq.kernels.batch import PublishTarget, record_table
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    load16,
    load32,
    load64,
    store16,
    store32,
    store64,
)
from cython.cimports.convoymq.kernels.content import (
    RECORD_EXAMINE,
    RECORD_EXPIRATION,
    RECORD_PRIORITY,
    check_content,
    walk_properties,
    walk_value,
)
from cython.cimports.convoymq.kernels.frames import memmem
from cython.cimports.convoymq.kernels.layout import ENQUEUE_RECORDS
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint16_t, uint32_t, uint64_t

from convoymq.kernels.content import split_record, with_counts

ROUTES_MAX = 4096
RECEIVE_BYTES = 128 << 10
FRAME_PAYLOAD_MAX = 131064

_RECEIVE = cython.declare(cython.Py_ssize_t, 128 << 10)
_KEEP = cython.declare(cython.Py_ssize_t, 32 << 10)
_ROUTES_MAX = cython.declare(cython.Py_ssize_t, 4096)
_COUNT = cython.declare(cython.int, 0x3FFF)
_ANSWERED = cython.declare(cython.int, 0x4000)
_NACK = cython.declare(cython.int, 0x8000)
_IDLE_CAPACITY = cython.declare(cython.Py_ssize_t, 16 << 10)

# As C variables: literals above 63 bits would be Python numbers.
_HASH_SEED = cython.declare(uint64_t, 0x9E3779B97F4A7C15)
_HASH_FACTOR = cython.declare(uint64_t, 0xFF51AFD7ED558CCD)


# What x-stream-offset adds to a content header: a table's length, and the field.
_OFFSET_ROOM = cython.declare(cython.Py_ssize_t, 29)
_OFFSET_FIELD = cython.declare(bytes, b"\x0fx-stream-offsetl")

# One receive buffer serves all connections: what is left over moves to its connection.
_scratch = cython.declare(cython.p_uchar, cython.NULL)
_scratch_capacity = cython.declare(cython.Py_ssize_t, 0)
_scratch_busy = cython.declare(cython.bint, False)


# Stands where a list is due that nothing is put into.
_NOTHING = cython.declare(list, [])


@cython.cfunc
@cython.exceptval(-1)
def _need(b: cython.pointer(Buffer), n: cython.Py_ssize_t) -> cython.int:
    """Makes room for n bytes at the end of the buffer."""
    used: cython.Py_ssize_t
    if b.end + n <= b.capacity:
        return 0
    if b.start > 0:
        used = b.end - b.start
        if used:
            string.memmove(b.p, b.p + b.start, used)
        b.start = 0
        b.end = used
        if b.end + n <= b.capacity:
            return 0
    capacity: cython.Py_ssize_t = max(b.end + n, b.capacity * 2, 512)
    grown: cython.p_void = stdlib.realloc(b.p, capacity)
    if grown == cython.NULL:
        raise MemoryError
    b.p = cython.cast(cython.p_uchar, grown)
    b.capacity = capacity
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _append(b: cython.pointer(Buffer), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    _need(b, n)
    string.memcpy(b.p + b.end, p, n)
    b.end += n
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _free(b: cython.pointer(Buffer)) -> cython.void:
    stdlib.free(b.p)
    b.p = cython.NULL
    b.start = 0
    b.end = 0
    b.capacity = 0


@cython.cfunc
@cython.exceptval(-1)
def _add_pair(r: cython.pointer(Ranges), first: uint64_t, last: uint64_t) -> cython.int:
    if r.count:
        if first == r.pairs[2 * r.count - 1] + 1:
            r.pairs[2 * r.count - 1] = last
            return 0
        if first <= r.pairs[2 * r.count - 1]:
            r.unsorted = True
    if r.count == r.capacity:
        capacity: cython.Py_ssize_t = max(4, r.capacity * 2)
        grown: cython.p_void = stdlib.realloc(r.pairs, capacity * 16)
        if grown == cython.NULL:
            raise MemoryError
        r.pairs = cython.cast(cython.pointer(uint64_t), grown)
        r.capacity = capacity
    r.pairs[2 * r.count] = first
    r.pairs[2 * r.count + 1] = last
    r.count += 1
    return 0


@cython.cfunc
def _take_pairs(r: cython.pointer(Ranges)) -> list:
    """The ranges as (first, last, first, last, …), ascending and merged; empties `r`."""
    flat: list = [r.pairs[i] for i in range(2 * r.count)]
    if r.unsorted:
        pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
        flat = []
        n: cython.Py_ssize_t = 0
        for first, last in pairs:
            if n and first == flat[n - 1] + 1:
                flat[n - 1] = last
            else:
                flat += (first, last)
                n += 2
    r.count = 0
    r.unsorted = False
    if r.capacity > 1024:
        stdlib.free(r.pairs)
        r.pairs = cython.NULL
        r.capacity = 0
    return flat


# --- small classes -----------------------------------------------------------------------------


@cython.cclass
class Epoch:
    def __init__(self):
        self.value = 1

    def bump(self):
        self.value += 1


@cython.cclass
class Outbox:
    def __init__(self, on_first=None):
        self.buffers = []
        self.on_first = on_first
        self.bytes_sent = 0
        self.bytes_received = 0

    def flush(self):
        buffers: list = self.buffers
        while buffers:
            self.buffers = []
            for item in buffers:
                buffer: ConnectionBuffer = item
                buffer.dirty = False
                buffer.flush()
            buffers = self.buffers


@cython.cclass
class ConsumerDeliveries:
    def __cinit__(self):
        kind: cython.int
        for kind in range(KINDS):
            self.kinds[kind].pairs = cython.NULL
            self.kinds[kind].count = 0
            self.kinds[kind].capacity = 0
            self.kinds[kind].unsorted = False

    def __init__(self, codec: ChannelCodec, client, number, tag: bytes, no_ack, counted, offsets):
        if len(tag) > 255:
            raise ValueError("consumer tag is longer than 255 bytes")
        self.codec = codec
        self.client = client
        self.number = number
        self.head = bytes((len(tag),)) + tag
        self.no_ack = no_ack
        self.counted = counted
        self.offsets = offsets
        self.unacked = 0
        self.dirty = False

    def __dealloc__(self):
        kind: cython.int
        for kind in range(KINDS):
            stdlib.free(self.kinds[kind].pairs)


@cython.cfunc
@cython.exceptval(-1)
def _note(
    slot: ConsumerDeliveries, kind: cython.int, first: uint64_t, last: uint64_t
) -> cython.int:
    """Remembers that message ids [first, last] of the slot are settled in this way."""
    ranges: cython.pointer(Ranges) = cython.address(slot.kinds[kind])
    if (
        (kind == RETURN or kind == RETURN_FAILED)
        and ranges.count
        and first <= ranges.pairs[2 * ranges.count - 1]
    ):
        # The order of returns is the order of redelivery: it must not be sorted away.
        _flush_kind(slot, kind)
    _add_pair(ranges, first, last)
    if not slot.dirty:
        slot.dirty = True
        slot.codec.dirty_slots.append(slot)
        if len(slot.codec.dirty_slots) == 1:
            slot.codec.buffer.dirty_codecs.append(slot.codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _flush_kind(slot: ConsumerDeliveries, kind: cython.int) -> cython.int:
    if slot.kinds[kind].count == 0:
        return 0
    pairs: list = _take_pairs(cython.address(slot.kinds[kind]))
    client = slot.client
    if kind == SETTLE:
        client.settle(slot.number, pairs)
    elif kind == DISCARD:
        client.discard(slot.number, pairs)
    else:
        client.return_(slot.number, pairs, failed=kind == RETURN_FAILED)
    return 0


# --- channel -------------------------------------------------------------------------------------


@cython.cclass
class ChannelCodec:
    def __cinit__(self):
        self.stage.p = cython.NULL
        self.backlog.p = cython.NULL
        self.routes = cython.NULL
        self.runs = cython.NULL
        self.ring = cython.NULL
        self.done.pairs = cython.NULL

    def __init__(self, buffer: ConnectionBuffer, number, owner, epoch: Epoch):
        self.buffer = buffer
        self.number = number
        self.owner = owner
        self.epoch = epoch
        self.state = CHANNEL_OPEN
        self.mode = MODE_PLAIN
        self.next_tag = 1
        self.confirm_low = 1
        self.confirm_next = 1
        self.slots = []
        self.free_slots = []
        self.dirty_slots = []

    def __dealloc__(self):
        stdlib.free(self.stage.p)
        stdlib.free(self.backlog.p)
        _drop_routes(self)
        stdlib.free(self.runs)
        stdlib.free(self.ring)
        stdlib.free(self.done.pairs)

    @property
    def backlog_bytes(self):
        return self.backlog.end - self.backlog.start

    @property
    def oldest_unacked(self):
        return self.runs[self.runs_head].tag if self.runs_head < self.runs_end else 0

    # consumers

    def add_slot(self, client, number, tag: bytes, no_ack=False, counted=False, offsets=False):
        slot: ConsumerDeliveries = ConsumerDeliveries(
            self, client, number, tag, no_ack, counted, offsets
        )
        if self.free_slots:
            index = self.free_slots.pop()
            self.slots[index] = slot
        else:
            index = len(self.slots)
            self.slots.append(slot)
        slot.index = index
        return slot

    def remove_slot(self, slot: ConsumerDeliveries):
        if slot.unacked:
            raise ValueError("deliveries of this consumer are still unacknowledged")
        _flush_slot(slot)
        if self.slots[slot.index] is slot:
            self.slots[slot.index] = None
            self.free_slots.append(slot.index)

    # state

    def close(self):
        self.state = CHANNEL_CLOSING
        self.expect = EXPECT_METHOD
        _free(cython.address(self.stage))
        _drop_routes(self)

    def drain(self):
        """Once channel.close was sent: hears a close among the frames that were kept."""
        if self.state == CHANNEL_CLOSING and not self.pumping:
            _pump_backlog(self)

    def detach(self):
        self.close()
        _free(cython.address(self.backlog))
        codecs: list = self.buffer.codecs
        if self.number < len(codecs) and codecs[self.number] is self:
            codecs[self.number] = None

    def resume(self):
        if self.state != CHANNEL_BUSY:
            return
        self.state = CHANNEL_OPEN
        if not self.pumping and self.backlog.end > self.backlog.start:
            _pump_backlog(self)
            self.buffer.flush_settles()

    def forget_routes(self):
        _drop_routes(self)

    # publishing

    def append(self, target: PublishTarget, key: bytes, content: bytes, body_size, flags, tag):
        n: cython.Py_ssize_t = len(key)
        m: cython.Py_ssize_t = len(content)
        p: cython.p_uchar = target.builder.reserve(target, tag, body_size, flags, n + m)
        string.memcpy(p, bytes_pointer(key), n)
        string.memcpy(p + n, bytes_pointer(content), m)

    def select_confirms(self):
        self.mode = MODE_CONFIRM

    def next_confirm(self):
        return _allocate_confirm(self)

    def expect_confirms(self, tag: uint64_t, count: cython.int):
        _expect_confirms(self, tag, count)

    def resolve(self, tags, ok: cython.bint):
        i: cython.Py_ssize_t
        for i in range(0, len(tags) - 1, 2):
            _resolve(self, tags[i], tags[i + 1], ok)

    # acknowledging

    def acknowledge(self, kind: cython.int, tag: uint64_t, multiple: cython.bint):
        return _acknowledge(self, kind, tag, multiple) == 0

    def take(self, tag: uint64_t, multiple: cython.bint):
        """Removes the tags from the unacknowledged; None when the tag is unknown."""
        taken: list = []
        if _collect(self, tag, multiple, taken) < 0:
            return None
        return taken

    def put_back(self, taken):
        for tag, count, slot, first_id in sorted(taken, key=lambda item: item[0]):
            _insert_run(self, tag, count, first_id, slot)

    def settle_taken(self, kind: cython.int, taken):
        for _, count, item, first_id in taken:
            slot: ConsumerDeliveries = item
            _note(slot, kind, first_id, first_id + count - 1)
            self.acknowledged += count

    def note(self, slot: ConsumerDeliveries, kind: cython.int, first: uint64_t, last: uint64_t):
        _note(slot, kind, first, last)

    def flush_settles(self):
        _flush_codec(self)

    # delivering

    def deliver(
        self,
        slot: ConsumerDeliveries,
        first_id: uint64_t,
        block: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        acquired: uint32_t,
        delivery_count: uint32_t,
    ):
        _deliver(self, slot, first_id, block, command, first, count, acquired, delivery_count)

    def deliver_record(self, slot: ConsumerDeliveries, record: bytes, redelivered: cython.bint):
        """basic.deliver of one record that no queue holds (direct reply-to)."""
        _need(cython.address(self.buffer.out), 64 + len(slot.head) + 2 * len(record))
        _encode_record(
            self,
            slot.head,
            self.next_tag,
            redelivered,
            bytes_pointer(record),
            len(record),
            0,
            0,
            0,
            -1,
        )
        self.next_tag += 1
        self.delivered += 1
        _touch(self.buffer)

    def send_get(
        self,
        slot: ConsumerDeliveries,
        block: bytes,
        command: cython.Py_ssize_t,
        record: cython.Py_ssize_t,
        get_id: uint64_t,
        acquired: uint32_t,
        delivery_count: uint32_t,
        ready: uint32_t,
        no_ack: cython.bint,
    ):
        data: bytes = _record_of(block, command, record)
        key, content = split_record(data)
        method = b"".join(
            (
                b"\x00\x3c\x00\x47",
                int(self.next_tag).to_bytes(8, "big"),
                b"\x01" if acquired else b"\x00",
                key,
                int(ready).to_bytes(4, "big"),
            )
        )
        if slot.counted:
            _send_content(self, method, content, acquired, delivery_count)
        else:
            _send_content(self, method, content, 0, 0)
        if not no_ack:
            _insert_run(self, self.next_tag, 1, get_id, slot)
        self.next_tag += 1
        self.delivered += 1

    def send_return(self, code: int, text: bytes, key: bytes, content: bytes):
        method = b"".join(
            (b"\x00\x3c\x00\x32", int(code).to_bytes(2, "big"), bytes((len(text),)), text, key)
        )
        _send_content(self, method, content, 0, 0)


# routes


@cython.cfunc
@cython.exceptval(check=False)
def _drop_routes(codec: ChannelCodec) -> cython.void:
    i: cython.Py_ssize_t
    if codec.routes == cython.NULL:
        return
    routes: cython.pointer(Route) = codec.routes
    mask: cython.Py_ssize_t = codec.routes_mask
    codec.routes = cython.NULL
    codec.routes_mask = 0
    codec.routes_used = 0
    for i in range(mask + 1):
        if routes[i].key != cython.NULL:
            stdlib.free(routes[i].key)
            cext.Py_DECREF_raw(routes[i].targets)
    stdlib.free(routes)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _hash(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint64_t:
    h: uint64_t = _HASH_SEED ^ cython.cast(uint64_t, n)
    v: uint64_t
    while n >= 8:
        string.memcpy(cython.address(v), p, 8)
        h = (h ^ v) * _HASH_FACTOR
        h ^= h >> 32
        p += 8
        n -= 8
    if n:
        v = 0
        string.memcpy(cython.address(v), p, n)
        h = (h ^ v) * _HASH_FACTOR
    return h ^ (h >> 29)


@cython.cfunc
@cython.exceptval(check=False)
def _find_route(
    codec: ChannelCodec, hash: uint64_t, key: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.pointer(Route):
    """The slot of the key, or the free one where it belongs; NULL without a table."""
    if codec.routes == cython.NULL:
        return cython.NULL
    at: cython.Py_ssize_t = hash & cython.cast(uint64_t, codec.routes_mask)
    while True:
        route: cython.pointer(Route) = codec.routes + at
        if route.key == cython.NULL:
            return route
        if route.hash == hash and route.key_length == n and string.memcmp(route.key, key, n) == 0:
            return route
        at = (at + 1) & codec.routes_mask


@cython.cfunc
@cython.exceptval(-1)
def _add_route(
    codec: ChannelCodec, hash: uint64_t, key: cython.p_uchar, n: cython.Py_ssize_t, targets: tuple
) -> cython.int:
    route: cython.pointer(Route)
    if codec.routes_used >= _ROUTES_MAX:
        _drop_routes(codec)
    if codec.routes == cython.NULL or codec.routes_used * 2 >= codec.routes_mask + 1:
        old: cython.pointer(Route) = codec.routes
        old_size: cython.Py_ssize_t = codec.routes_mask + 1 if old != cython.NULL else 0
        size: cython.Py_ssize_t = max(16, old_size * 2)
        made: cython.p_void = stdlib.calloc(size, cython.sizeof(Route))
        if made == cython.NULL:
            raise MemoryError
        codec.routes = cython.cast(cython.pointer(Route), made)
        codec.routes_mask = size - 1
        i: cython.Py_ssize_t
        for i in range(old_size):
            if old[i].key != cython.NULL:
                route = _find_route(codec, old[i].hash, old[i].key, old[i].key_length)
                route[0] = old[i]
        stdlib.free(old)
    route = _find_route(codec, hash, key, n)
    if route.key != cython.NULL:
        return 0
    copy: cython.p_void = stdlib.malloc(n)
    if copy == cython.NULL:
        raise MemoryError
    string.memcpy(copy, key, n)
    route.hash = hash
    route.key = cython.cast(cython.p_uchar, copy)
    route.key_length = n
    route.targets = cython.cast(cython.pointer(cext.PyObject), targets)
    cext.Py_INCREF_raw(route.targets)
    codec.routes_used += 1
    return 0


# publishing


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
        return _fault(
            buffer,
            REPLY_SYNTAX_ERROR,
            "content header is broken",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
    codec.published += 1
    flags: cython.int = notes & (RECORD_PRIORITY | RECORD_EXPIRATION)
    tag: uint64_t = 0
    targets: tuple = None
    if notes & RECORD_EXAMINE == 0 and bits & PUBLISH_IMMEDIATE == 0 and codec.mode != MODE_TX:
        hash: uint64_t = _hash(key, key_length)
        if codec.epoch.value != codec.routes_epoch:
            _drop_routes(codec)
            codec.routes_epoch = codec.epoch.value
        route: cython.pointer(Route) = _find_route(codec, hash, key, key_length)
        if route != cython.NULL and route.key != cython.NULL:
            targets = cython.cast(tuple, route.targets)
        else:
            found = codec.owner.resolve_route(copy_bytes(key, key_length))
            if codec.state != CHANNEL_OPEN or buffer.state != WIRE_OPEN:
                return 0
            if found is not None:
                targets = found
                _add_route(codec, hash, key, key_length, targets)
    if codec.mode == MODE_CONFIRM:
        tag = _allocate_confirm(codec)
    if targets is None or (bits & PUBLISH_MANDATORY and len(targets) == 0):
        codec.owner.on_publish(
            copy_bytes(key, key_length),
            bits,
            copy_bytes(content, content_length),
            body_size,
            flags,
            tag,
        )
        return 0
    count: cython.Py_ssize_t = len(targets)
    if count == 0:
        codec.owner.on_dropped()
    if tag and count != 1:
        _expect_confirms(codec, tag, cython.cast(cython.int, count))
    i: cython.Py_ssize_t
    for i in range(count):
        target: PublishTarget = cython.cast(PublishTarget, targets[i])
        p: cython.p_uchar = target.builder.reserve(
            target, tag, body_size, flags, key_length + content_length
        )
        string.memcpy(p, key, key_length)
        string.memcpy(p + key_length, content, content_length)
    return 0


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
        _fault(
            buffer,
            REPLY_FRAME_ERROR,
            "basic.publish is cut off",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
        return size + AMQP_FRAME_OVERHEAD
    exchange: cython.Py_ssize_t = m[PUBLISH_EXCHANGE]
    if PUBLISH_EXCHANGE + 1 + exchange >= size:
        _fault(
            buffer,
            REPLY_FRAME_ERROR,
            "basic.publish is cut off",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
        return size + AMQP_FRAME_OVERHEAD
    key_length: cython.Py_ssize_t = 2 + exchange + m[PUBLISH_EXCHANGE + 1 + exchange]
    if PUBLISH_EXCHANGE + key_length + 1 != size:
        _fault(
            buffer,
            REPLY_FRAME_ERROR,
            "basic.publish has a wrong length",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
        return size + AMQP_FRAME_OVERHEAD
    bits: cython.int = m[PUBLISH_EXCHANGE + key_length]
    if buffer.alarmed:
        buffer.paused = True
        buffer.owner.on_publish_blocked()
        return 0

    # All of it in the buffer: no copy but the one into the batch.
    r: cython.p_uchar = q + size + AMQP_FRAME_OVERHEAD
    rest: cython.Py_ssize_t = left - size - AMQP_FRAME_OVERHEAD
    channel: uint32_t = load16(q + AMQP_CHANNEL)
    found: cython.int = CONTENT_ASSEMBLE
    at: cython.Py_ssize_t = 0
    body_size: uint64_t = 0
    seen: uint64_t = 0
    n: cython.Py_ssize_t
    if rest < AMQP_FRAME_HEAD + HEADER_PROPERTIES:
        found = CONTENT_WAIT
        if rest >= AMQP_SIZE and (r[0] != AMQP_HEADER or load16(r + AMQP_CHANNEL) != channel):
            found = CONTENT_ASSEMBLE
        elif rest >= AMQP_FRAME_HEAD and load32(r + AMQP_SIZE) > buffer.frame_max:
            found = CONTENT_ASSEMBLE
    elif r[0] == AMQP_HEADER and load16(r + AMQP_CHANNEL) == channel:
        n = load32(r + AMQP_SIZE)
        if n >= HEADER_PROPERTIES and n <= buffer.frame_max:
            body_size = load64(r + AMQP_FRAME_HEAD + HEADER_BODY_SIZE)
            if load16(r + AMQP_FRAME_HEAD) == CLASS_BASIC and body_size <= buffer.message_size_max:
                found = CONTENT_WAIT
                if n + AMQP_FRAME_OVERHEAD <= rest and r[AMQP_FRAME_HEAD + n] == AMQP_END:
                    at = n + AMQP_FRAME_OVERHEAD
                    while True:
                        if seen == body_size:
                            found = CONTENT_WHOLE
                            break
                        if rest - at < AMQP_FRAME_HEAD:
                            break
                        n = load32(r + at + AMQP_SIZE)
                        if (
                            r[at] != AMQP_BODY
                            or load16(r + at + AMQP_CHANNEL) != channel
                            or n == 0
                            or n > AMQP_PAYLOAD_MAX
                            or n > buffer.frame_max
                            or cython.cast(uint64_t, n) > body_size - seen
                        ):
                            found = CONTENT_ASSEMBLE
                            break
                        if rest - at < n + AMQP_FRAME_OVERHEAD:
                            break
                        if r[at + AMQP_FRAME_HEAD + n] != AMQP_END:
                            found = CONTENT_ASSEMBLE
                            break
                        seen += n
                        at += n + AMQP_FRAME_OVERHEAD
                elif n + AMQP_FRAME_OVERHEAD <= rest:
                    found = CONTENT_ASSEMBLE
    if found == CONTENT_WHOLE:
        _publish_complete(buffer, codec, m + PUBLISH_EXCHANGE, key_length, bits, r, at, body_size)
        return size + AMQP_FRAME_OVERHEAD + at
    if found == CONTENT_WAIT and left < _KEEP and not codec.pumping:
        return 0

    # Parts are missing: gather them at the channel.
    codec.stage.start = 0
    codec.stage.end = 0
    _append(cython.address(codec.stage), m + PUBLISH_EXCHANGE, key_length)
    codec.key_length = key_length
    codec.publish_bits = bits
    codec.expect = EXPECT_HEADER
    return size + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(-1)
def _stage_header(
    buffer: ConnectionBuffer, codec: ChannelCodec, q: cython.p_uchar, size: cython.Py_ssize_t
) -> cython.int:
    if codec.expect != EXPECT_HEADER:
        return _fault(
            buffer,
            REPLY_UNEXPECTED_FRAME,
            "content header frame where none is due",
            codec.number,
            0,
            0,
        )
    if size < HEADER_PROPERTIES:
        return _fault(
            buffer,
            REPLY_FRAME_ERROR,
            "content header is cut off",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
    if load16(q + AMQP_FRAME_HEAD) != CLASS_BASIC:
        return _fault(
            buffer,
            REPLY_UNEXPECTED_FRAME,
            "content header of another class than its method",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
    codec.body_size = load64(q + AMQP_FRAME_HEAD + HEADER_BODY_SIZE)
    codec.body_seen = 0
    codec.body_frame = -1
    if codec.body_size > buffer.message_size_max:
        codec.expect = EXPECT_METHOD
        codec.owner.on_too_big(codec.body_size)
        return 0
    _append(cython.address(codec.stage), q, size + AMQP_FRAME_OVERHEAD)
    codec.header_length = size
    codec.expect = EXPECT_BODY
    if codec.body_size == 0:
        _stage_done(buffer, codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _stage_body(
    buffer: ConnectionBuffer, codec: ChannelCodec, q: cython.p_uchar, size: cython.Py_ssize_t
) -> cython.int:
    if codec.expect != EXPECT_BODY:
        return _fault(
            buffer,
            REPLY_UNEXPECTED_FRAME,
            "content body frame where none is due",
            codec.number,
            0,
            0,
        )
    if cython.cast(uint64_t, size) > codec.body_size - codec.body_seen:
        return _fault(
            buffer,
            REPLY_FRAME_ERROR,
            "more body bytes than announced",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
    codec.body_seen += size
    stage: cython.pointer(Buffer) = cython.address(codec.stage)
    p: cython.p_uchar = q + AMQP_FRAME_HEAD
    n: cython.Py_ssize_t
    used: cython.Py_ssize_t
    # Fragments are joined into frames of the size that records have.
    while size:
        if codec.body_frame >= 0:
            used = stage.end - codec.body_frame - AMQP_FRAME_OVERHEAD
            n = min(size, AMQP_PAYLOAD_MAX - used)
            if n:
                _need(stage, n)
                string.memcpy(stage.p + stage.end - 1, p, n)
                stage.end += n
                stage.p[stage.end - 1] = AMQP_END
                store32(stage.p + codec.body_frame + AMQP_SIZE, cython.cast(uint32_t, used + n))
                p += n
                size -= n
                continue
        n = min(size, AMQP_PAYLOAD_MAX)
        codec.body_frame = stage.end
        _need(stage, n + AMQP_FRAME_OVERHEAD)
        stage.p[stage.end] = AMQP_BODY
        store16(stage.p + stage.end + AMQP_CHANNEL, codec.number)
        store32(stage.p + stage.end + AMQP_SIZE, cython.cast(uint32_t, n))
        string.memcpy(stage.p + stage.end + AMQP_FRAME_HEAD, p, n)
        stage.end += n + AMQP_FRAME_OVERHEAD
        stage.p[stage.end - 1] = AMQP_END
        p += n
        size -= n
    if codec.body_seen == codec.body_size:
        _stage_done(buffer, codec)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _stage_done(buffer: ConnectionBuffer, codec: ChannelCodec) -> cython.int:
    """Publishes what was gathered. The buffer is taken away first: the owner may close the channel
    codec."""
    taken: Buffer = codec.stage
    codec.stage.p = cython.NULL
    codec.stage.start = 0
    codec.stage.end = 0
    codec.stage.capacity = 0
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
            codec.stage.p == cython.NULL
            and codec.state == CHANNEL_OPEN
            and taken.capacity <= _IDLE_CAPACITY
        ):
            codec.stage.p = taken.p
            codec.stage.capacity = taken.capacity
        else:
            stdlib.free(taken.p)
    return 0


# confirms


@cython.cfunc
@cython.exceptval(0)
def _allocate_confirm(codec: ChannelCodec) -> uint64_t:
    tag: uint64_t = codec.confirm_next
    i: uint64_t
    if codec.ring == cython.NULL or tag - codec.confirm_low > codec.ring_mask:
        size: uint64_t = 256 if codec.ring == cython.NULL else (codec.ring_mask + 1) * 2
        made: cython.p_void = stdlib.malloc(size * 2)
        if made == cython.NULL:
            raise MemoryError
        ring: cython.pointer(uint16_t) = cython.cast(cython.pointer(uint16_t), made)
        i = codec.confirm_low
        while i < tag:
            ring[i & (size - 1)] = codec.ring[i & codec.ring_mask]
            i += 1
        stdlib.free(codec.ring)
        codec.ring = ring
        codec.ring_mask = size - 1
    codec.ring[tag & codec.ring_mask] = 1
    codec.confirm_next = tag + 1
    return tag


@cython.cfunc
@cython.exceptval(-1)
def _expect_confirms(codec: ChannelCodec, tag: uint64_t, count: cython.int) -> cython.int:
    if tag < codec.confirm_low or tag >= codec.confirm_next:
        raise ValueError("publish tag was never given out, or is answered")
    if count < 0 or count >= _COUNT:
        raise ValueError("too many targets for one message")
    if count == 0:
        return _resolve(codec, tag, tag, True)
    codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, count)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _resolve(codec: ChannelCodec, first: uint64_t, last: uint64_t, ok: cython.bint) -> cython.int:
    """One target has answered for these tags. Tags that are not waiting are skipped."""
    if first < codec.confirm_low:
        first = codec.confirm_low
    if last >= codec.confirm_next:
        last = codec.confirm_next - 1
    tag: uint64_t = first
    while tag <= last:
        v: cython.int = codec.ring[tag & codec.ring_mask]
        if v & _COUNT:
            v -= 1
            if not ok:
                v |= _NACK
            codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, v)
            if v & _COUNT == 0:
                _add_pair(cython.address(codec.done), tag, tag)
        tag += 1
    if codec.done.count and not codec.confirm_dirty:
        codec.confirm_dirty = True
        codec.buffer.confirm_codecs.append(codec)
        _touch(codec.buffer)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _emit_confirm(
    codec: ChannelCodec, nack: cython.bint, tag: uint64_t, multiple: cython.bint
) -> cython.int:
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    _need(out, CONFIRM_FRAME)
    p: cython.p_uchar = out.p + out.end
    p[0] = AMQP_METHOD
    store16(p + AMQP_CHANNEL, codec.number)
    store32(p + AMQP_SIZE, CONFIRM_FRAME - AMQP_FRAME_OVERHEAD)
    store32(p + AMQP_FRAME_HEAD, BASIC_NACK if nack else BASIC_ACK)
    store64(p + AMQP_FRAME_HEAD + METHOD_ID_SIZE, tag)
    p[CONFIRM_FRAME - 2] = 1 if multiple else 0
    p[CONFIRM_FRAME - 1] = AMQP_END
    out.end += CONFIRM_FRAME
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _flush_confirms(codec: ChannelCodec) -> cython.int:
    codec.confirm_dirty = False
    if codec.state == CHANNEL_CLOSING:
        codec.done.count = 0
        return 0
    last: uint64_t = 0
    count: uint64_t = 0
    low: uint64_t = codec.confirm_low
    v: cython.int
    while low < codec.confirm_next:
        v = codec.ring[low & codec.ring_mask]
        if v & _COUNT:
            break
        if v & _ANSWERED == 0:
            if v & _NACK:
                if count:
                    _emit_confirm(codec, False, last, count > 1)
                    count = 0
                _emit_confirm(codec, True, low, False)
            else:
                last = low
                count += 1
        low += 1
    if count:
        _emit_confirm(codec, False, last, count > 1)
    codec.confirm_low = low
    i: cython.Py_ssize_t
    tag: uint64_t
    for i in range(codec.done.count):
        tag = max(codec.done.pairs[2 * i], low)
        while tag <= codec.done.pairs[2 * i + 1]:
            v = codec.ring[tag & codec.ring_mask]
            if v & _COUNT == 0 and v & _ANSWERED == 0:
                _emit_confirm(codec, v & _NACK != 0, tag, False)
                codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, v | _ANSWERED)
            tag += 1
    codec.done.count = 0
    codec.done.unsorted = False
    return 0


# unacknowledged deliveries


@cython.cfunc
@cython.exceptval(-1)
def _insert_run(
    codec: ChannelCodec,
    tag: uint64_t,
    count: uint64_t,
    first_id: uint64_t,
    slot: ConsumerDeliveries,
) -> cython.int:
    """Adds a run; nearly always behind all others."""
    runs: cython.pointer(Run) = codec.runs
    at: cython.Py_ssize_t = codec.runs_end
    codec.unacked += count
    slot.unacked += count
    if at > codec.runs_head:
        last: cython.pointer(Run) = runs + at - 1
        if (
            last.slot == slot.index
            and last.tag + last.count == tag
            and last.first_id + last.count == first_id
        ):
            last.count += count
            return 0
    if at == codec.runs_capacity:
        used: cython.Py_ssize_t = at - codec.runs_head
        if codec.runs_head > 0 and used <= codec.runs_capacity // 2:
            string.memmove(runs, runs + codec.runs_head, used * cython.sizeof(Run))
        else:
            capacity: cython.Py_ssize_t = max(16, codec.runs_capacity * 2)
            grown: cython.p_void = stdlib.malloc(capacity * cython.sizeof(Run))
            if grown == cython.NULL:
                raise MemoryError
            if used:
                string.memcpy(grown, runs + codec.runs_head, used * cython.sizeof(Run))
            stdlib.free(runs)
            runs = cython.cast(cython.pointer(Run), grown)
            codec.runs = runs
            codec.runs_capacity = capacity
        codec.runs_head = 0
        codec.runs_end = used
        at = used
    while at > codec.runs_head and runs[at - 1].tag > tag:
        runs[at] = runs[at - 1]
        at -= 1
    runs[at].tag = tag
    runs[at].count = count
    runs[at].first_id = first_id
    runs[at].slot = slot.index
    codec.runs_end += 1
    return 0


@cython.cfunc
@cython.exceptval(check=False)
def _find_run(codec: ChannelCodec, tag: uint64_t) -> cython.Py_ssize_t:
    low: cython.Py_ssize_t = codec.runs_head
    high: cython.Py_ssize_t = codec.runs_end
    if low < high and tag < codec.runs[low].tag + codec.runs[low].count:
        return low if tag >= codec.runs[low].tag else -1
    while low < high:
        middle: cython.Py_ssize_t = (low + high) >> 1
        if codec.runs[middle].tag + codec.runs[middle].count <= tag:
            low = middle + 1
        else:
            high = middle
    if low == codec.runs_end or codec.runs[low].tag > tag:
        return -1
    return low


@cython.cfunc
@cython.exceptval(-2)
def _collect(
    codec: ChannelCodec, tag: uint64_t, multiple: cython.bint, taken: list, kind: cython.int = -1
) -> cython.int:
    """Takes the tag, or all up to it, out of the runs: into `taken`, or into the slots' ranges of
    `kind`. -1 = unknown tag."""
    if multiple and tag == 0:
        if codec.runs_head == codec.runs_end:
            return 0
        tag = codec.runs[codec.runs_end - 1].tag + codec.runs[codec.runs_end - 1].count - 1
    at: cython.Py_ssize_t = _find_run(codec, tag)
    if at < 0:
        return -1
    run: cython.pointer(Run)
    count: uint64_t
    if multiple:
        while codec.runs_head <= at:
            run = codec.runs + codec.runs_head
            count = min(run.count, tag - run.tag + 1)
            _take_run(codec, run, run.tag, count, taken, kind)
            if count == run.count:
                codec.runs_head += 1
            else:
                run.tag += count
                run.first_id += count
                run.count -= count
                break
    else:
        run = codec.runs + at
        _take_run(codec, run, tag, 1, taken, kind)
        before: uint64_t = tag - run.tag
        after: uint64_t = run.count - before - 1
        if before == 0 and after == 0:
            if at == codec.runs_head:
                codec.runs_head += 1
            else:
                string.memmove(run, run + 1, (codec.runs_end - at - 1) * cython.sizeof(Run))
                codec.runs_end -= 1
        elif before == 0:
            run.tag += 1
            run.first_id += 1
            run.count = after
        else:
            first_id: uint64_t = run.first_id + before + 1
            slot: ConsumerDeliveries = codec.slots[run.slot]
            run.count = before
            if after:
                # The counters already say so: the rest of the run only moves into one of its own.
                codec.unacked -= after
                slot.unacked -= after
                _split_run(codec, at + 1, tag + 1, after, first_id, slot)
    if codec.runs_head == codec.runs_end:
        codec.runs_head = 0
        codec.runs_end = 0
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _split_run(
    codec: ChannelCodec,
    at: cython.Py_ssize_t,
    tag: uint64_t,
    count: uint64_t,
    first_id: uint64_t,
    slot: ConsumerDeliveries,
) -> cython.int:
    if at == codec.runs_end or codec.runs_end == codec.runs_capacity:
        return _insert_run(codec, tag, count, first_id, slot)
    run: cython.pointer(Run) = codec.runs + at
    string.memmove(run + 1, run, (codec.runs_end - at) * cython.sizeof(Run))
    run.tag = tag
    run.count = count
    run.first_id = first_id
    run.slot = slot.index
    codec.runs_end += 1
    codec.unacked += count
    slot.unacked += count
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _take_run(
    codec: ChannelCodec,
    run: cython.pointer(Run),
    tag: uint64_t,
    count: uint64_t,
    taken: list,
    kind: cython.int,
) -> cython.int:
    slot: ConsumerDeliveries = codec.slots[run.slot]
    first_id: uint64_t = run.first_id + (tag - run.tag)
    codec.unacked -= count
    slot.unacked -= count
    if kind < 0:
        taken.append((tag, count, slot, first_id))
        return 0
    codec.acknowledged += count
    return _note(slot, kind, first_id, first_id + count - 1)


@cython.cfunc
@cython.exceptval(-2)
def _acknowledge(
    codec: ChannelCodec, kind: cython.int, tag: uint64_t, multiple: cython.bint
) -> cython.int:
    return _collect(codec, tag, multiple, _NOTHING, kind)


@cython.cfunc
@cython.exceptval(-1)
def _flush_slot(slot: ConsumerDeliveries) -> cython.int:
    kind: cython.int
    if not slot.dirty:
        return 0
    slot.dirty = False
    for kind in range(KINDS):
        _flush_kind(slot, kind)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _flush_codec(codec: ChannelCodec) -> cython.int:
    kept: list = []
    dirty: list = codec.dirty_slots
    if not dirty:
        return 0
    codec.dirty_slots = []
    for item in dirty:
        slot: ConsumerDeliveries = item
        if slot.no_ack and codec.buffer.corked:
            # The client does not read: without settling the queue hands out no more.
            kept.append(slot)
        else:
            _flush_slot(slot)
    if kept:
        codec.dirty_slots += kept
        if codec not in codec.buffer.dirty_codecs:
            codec.buffer.dirty_codecs.append(codec)
    codec.owner.on_settled()
    return 0


# delivering


@cython.cfunc
def _record_of(block: bytes, command: cython.Py_ssize_t, record: cython.Py_ssize_t) -> bytes:
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
    acquired: uint32_t,
    delivery_count: uint32_t,
    offset: int64_t,
) -> cython.int:
    """Appends the content frames for this channel; the room was made for the plain case.
    `offset` of the message in its stream, or -1."""
    buffer: ConnectionBuffer = codec.buffer
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    kind: cython.int = check_content(content, length, buffer.frame_max)
    if kind < 0:
        raise ValueError("content of a record is damaged")
    p: cython.p_uchar
    at: cython.Py_ssize_t = 0
    n: cython.Py_ssize_t
    if kind == 0 and acquired == 0 and delivery_count == 0:
        if offset >= 0:
            n = _write_offset_header(
                codec, content + AMQP_FRAME_HEAD, load32(content + AMQP_SIZE), offset
            )
            content += n
            length -= n
        p = out.p + out.end
        string.memcpy(p, content, length)
        while at < length:
            store16(p + at + AMQP_CHANNEL, codec.number)
            at += load32(p + at + AMQP_SIZE) + AMQP_FRAME_OVERHEAD
        out.end += length
        return 0
    n = load32(content + AMQP_SIZE)
    if offset >= 0:
        at = _write_offset_header(codec, content + AMQP_FRAME_HEAD, n, offset)
        if at:
            return _write_bodies(codec, content + at, length - at)
    header: bytes = copy_bytes(content + AMQP_FRAME_HEAD, n)
    if acquired or delivery_count:
        header = with_counts(header, acquired, delivery_count)
    _put_frame(buffer, AMQP_HEADER, codec.number, bytes_pointer(header), len(header))
    return _write_bodies(codec, content + n + AMQP_FRAME_OVERHEAD, length - n - AMQP_FRAME_OVERHEAD)


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
            _put_frame(buffer, AMQP_BODY, codec.number, content + at + AMQP_FRAME_HEAD + done, part)
            done += part
        at += n + AMQP_FRAME_OVERHEAD
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _write_offset_header(
    codec: ChannelCodec, p: cython.p_uchar, n: cython.Py_ssize_t, offset: int64_t
) -> cython.Py_ssize_t:
    """Appends the content header frame with the header x-stream-offset in place of any other of
    that name. `p`: the n bytes of the payload. Returns what the frame has in the record; 0 =
    nothing was done, because it would not fit a frame any more."""
    buffer: ConnectionBuffer = codec.buffer
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    if n + _OFFSET_ROOM + AMQP_FRAME_OVERHEAD > cython.cast(cython.Py_ssize_t, buffer.frame_max):
        return 0
    flags: uint32_t = load16(p + HEADER_FLAGS)
    at: cython.Py_ssize_t = HEADER_PROPERTIES
    if flags & HAS_CONTENT_TYPE:
        at += 1 + (p[at] if at < n else 0)
    if flags & HAS_CONTENT_ENCODING:
        at += 1 + (p[at] if at < n else 0)
    fields: cython.Py_ssize_t = 0
    rest: cython.Py_ssize_t = at
    if flags & HAS_HEADERS:
        if n - at < 4:
            raise ValueError("content header of a record is damaged")
        fields = load32(p + at)
        if fields > n - at - 4:
            raise ValueError("content header of a record is damaged")
        rest = at + 4 + fields
    if rest > n:
        raise ValueError("content header of a record is damaged")
    _need(out, n + _OFFSET_ROOM + AMQP_FRAME_OVERHEAD)
    start: cython.p_uchar = out.p + out.end
    q: cython.p_uchar = start + AMQP_FRAME_HEAD
    string.memcpy(q, p, at)
    q[HEADER_FLAGS] = ((flags | HAS_HEADERS) >> 8) & 0xFF
    q += at + 4
    table: cython.p_uchar = q
    field: cython.p_uchar = bytes_pointer(_OFFSET_FIELD)
    source: cython.p_uchar = p + at + 4
    if fields == 0 or memmem(source, fields, field, OFFSET_NAME) == cython.NULL:
        if fields:
            string.memcpy(q, source, fields)
        q += fields
    else:
        done: cython.Py_ssize_t = 0
        while done < fields:
            key: cython.Py_ssize_t = 1 + cython.cast(cython.Py_ssize_t, source[done])
            step: cython.Py_ssize_t = -1
            if key < fields - done:
                step = walk_value(source + done + key, fields - done - key, 1)
            if step < 0:
                raise ValueError("header table of a record is damaged")
            step += key
            if key != OFFSET_NAME or string.memcmp(source + done, field, OFFSET_NAME) != 0:
                string.memcpy(q, source + done, step)
                q += step
            done += step
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
def _put_frame(
    buffer: ConnectionBuffer,
    type: cython.int,
    channel: cython.int,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
) -> cython.int:
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    _need(out, n + AMQP_FRAME_OVERHEAD)
    q: cython.p_uchar = out.p + out.end
    q[0] = cython.cast(cython.uchar, type)
    store16(q + AMQP_CHANNEL, channel)
    store32(q + AMQP_SIZE, cython.cast(uint32_t, n))
    if n:
        string.memcpy(q + AMQP_FRAME_HEAD, p, n)
    q[AMQP_FRAME_HEAD + n] = AMQP_END
    out.end += n + AMQP_FRAME_OVERHEAD
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _send_content(
    codec: ChannelCodec, method: bytes, content: bytes, acquired: uint32_t, delivery_count: uint32_t
) -> cython.int:
    _put_frame(codec.buffer, AMQP_METHOD, codec.number, bytes_pointer(method), len(method))
    _need(cython.address(codec.buffer.out), len(content))
    _write_content(codec, bytes_pointer(content), len(content), acquired, delivery_count, -1)
    _touch(codec.buffer)
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
    acquired: uint32_t,
    delivery_count: uint32_t,
    head_length: cython.Py_ssize_t,
    offset: int64_t,
) -> cython.int:
    """basic.deliver of one record. The caller has made room for the plain case."""
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    if head_length == 0:
        head_length = len(head)
    key: cython.Py_ssize_t
    if length < 2:
        raise ValueError("record is damaged")
    key = 1 + cython.cast(cython.Py_ssize_t, record[0])
    if key >= length:
        raise ValueError("record is damaged")
    key += 1 + cython.cast(cython.Py_ssize_t, record[key])
    if key > length:
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
    return _write_content(codec, record + key, length - key, acquired, delivery_count, offset)


@cython.cfunc
@cython.exceptval(-1)
def _deliver(
    codec: ChannelCodec,
    slot: ConsumerDeliveries,
    first_id: uint64_t,
    block: bytes,
    command: cython.Py_ssize_t,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    acquired: uint32_t,
    delivery_count: uint32_t,
) -> cython.int:
    if count == 0:
        return 0
    total: uint32_t = 0
    source: cython.p_uchar = bytes_pointer(block)
    table: cython.Py_ssize_t = record_table(source, len(block), command, cython.address(total))
    if table < 0 or first < 0 or count < 0 or first + count > total:
        raise ValueError("records lie outside their command")
    low: cython.Py_ssize_t = get32(source + table + 4 * first)
    end: cython.Py_ssize_t = get32(source + table + 4 * (first + count))
    if low < ENQUEUE_RECORDS or end < low or command + end > table:
        raise ValueError("record table is damaged")
    head: bytes = slot.head
    head_length: cython.Py_ssize_t = len(head)
    room: cython.Py_ssize_t = end - low + count * (DELIVER_ROOM + head_length)
    if slot.offsets:
        room += count * _OFFSET_ROOM
    buffer: ConnectionBuffer = codec.buffer
    _need(cython.address(buffer.out), room)
    shown: cython.bint = slot.counted
    tag: uint64_t = codec.next_tag
    before: cython.Py_ssize_t = buffer.out.end - buffer.out.start
    i: cython.Py_ssize_t
    high: cython.Py_ssize_t
    try:
        for i in range(count):
            high = get32(source + table + 4 * (first + i + 1))
            if high < low or high > end:
                raise ValueError("record table is damaged")
            if shown or buffer.frame_max < AMQP_FRAME_MAX:
                # Frames may become more or longer than they are in the record.
                _need(
                    cython.address(buffer.out),
                    high - low + DELIVER_ROOM + head_length + _OFFSET_ROOM,
                )
            _encode_record(
                codec,
                head,
                tag,
                acquired > 0,
                source + command + low,
                high - low,
                acquired if shown else 0,
                delivery_count if shown else 0,
                head_length,
                cython.cast(int64_t, first_id) + i if slot.offsets else -1,
            )
            tag += 1
            low = high
    except BaseException:
        # Half a message would spoil all that comes after it.
        buffer.out.end = buffer.out.start + before
        raise
    if slot.no_ack:
        _note(slot, SETTLE, first_id, first_id + count - 1)
    else:
        _insert_run(codec, codec.next_tag, count, first_id, slot)
    codec.next_tag = tag
    codec.delivered += count
    _touch(buffer)
    return 0


# --- connection ----------------------------------------------------------------------------------


@cython.cfunc
@cython.exceptval(-1)
def _fault(
    buffer: ConnectionBuffer,
    code: cython.int,
    text: str,
    channel: cython.int,
    class_id: cython.int,
    method_id: cython.int,
) -> cython.int:
    """The peer broke the protocol: the owner closes the connection."""
    buffer.owner.on_fault(code, text, channel, class_id, method_id)
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(-1)
def _touch(buffer: ConnectionBuffer) -> cython.int:
    if not buffer.dirty:
        buffer.dirty = True
        outbox: Outbox = buffer.outbox
        outbox.buffers.append(buffer)
        if len(outbox.buffers) == 1 and outbox.on_first is not None:
            outbox.on_first()
    return 0


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
        _append(cython.address(codec.backlog), q, size + AMQP_FRAME_OVERHEAD)
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_HEADER:
        _stage_header(buffer, codec, q, size)
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_BODY:
        _stage_body(buffer, codec, q, size)
        return size + AMQP_FRAME_OVERHEAD
    if codec.expect:
        _fault(
            buffer,
            REPLY_UNEXPECTED_FRAME,
            "method frame where content is due",
            codec.number,
            CLASS_BASIC,
            METHOD_PUBLISH,
        )
        return size + AMQP_FRAME_OVERHEAD
    if size < METHOD_ID_SIZE:
        _fault(buffer, REPLY_FRAME_ERROR, "method frame is cut off", codec.number, 0, 0)
        return size + AMQP_FRAME_OVERHEAD
    method = load32(q + AMQP_FRAME_HEAD)
    if method == BASIC_PUBLISH:
        return _publish(buffer, codec, q, size, left)
    kind: cython.int = -1
    multiple: cython.bint = False
    bits: cython.int
    if codec.mode != MODE_TX and size == ACK_SIZE:
        bits = q[AMQP_FRAME_HEAD + ACK_BITS]
        if method == BASIC_ACK:
            kind = SETTLE
            multiple = bits & ACK_MULTIPLE
        elif method == BASIC_NACK:
            kind = RETURN if bits & NACK_REQUEUE else DISCARD
            multiple = bits & ACK_MULTIPLE
        elif method == BASIC_REJECT:
            kind = RETURN_FAILED if bits & REJECT_REQUEUE else DISCARD
        if kind >= 0:
            tag: uint64_t = load64(q + AMQP_FRAME_HEAD + METHOD_ID_SIZE)
            if _acknowledge(codec, kind, tag, multiple) < 0:
                codec.owner.on_unknown_tag(tag, method & 0xFFFF)
            return size + AMQP_FRAME_OVERHEAD
    _flush_codec(codec)
    buffer.owner.on_method(codec.number, copy_bytes(q + AMQP_FRAME_HEAD, size))
    return size + AMQP_FRAME_OVERHEAD


@cython.cfunc
@cython.exceptval(-1)
def _pump_backlog(codec: ChannelCodec) -> cython.int:
    """Works through the frames that were kept while the channel codec was busy; those of a channel
    codec that closes meanwhile are looked through for a close."""
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
            and buffer.state == WIRE_OPEN
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
        if at < taken.end and codec.state != CHANNEL_CLOSING and buffer.state == WIRE_OPEN:
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
                _fault(buffer, REPLY_FRAME_ERROR, "heartbeat frame with a payload", 0, 0, 0)
        elif type == AMQP_METHOD:
            buffer.owner.on_method(0, copy_bytes(q + AMQP_FRAME_HEAD, size))
        elif buffer.state == WIRE_OPEN:
            _fault(buffer, REPLY_UNEXPECTED_FRAME, "content frame on channel 0", 0, 0, 0)
        return size + AMQP_FRAME_OVERHEAD
    if buffer.state != WIRE_OPEN:
        return size + AMQP_FRAME_OVERHEAD
    if type == AMQP_HEARTBEAT:
        _fault(buffer, REPLY_UNEXPECTED_FRAME, f"heartbeat frame on channel {channel}", 0, 0, 0)
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
                0,
                0,
            )
        return size + AMQP_FRAME_OVERHEAD
    return _codec_frame(buffer, found, q, type, size, left, False)


@cython.cfunc
@cython.exceptval(-1)
def _scan(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Works through the frames in n bytes. Returns how many bytes are done with."""
    at: cython.Py_ssize_t = 0
    while not buffer.paused and buffer.state != WIRE_CLOSED:
        left: cython.Py_ssize_t = n - at
        q: cython.p_uchar = p + at
        if buffer.state == WIRE_HEADER:
            if left < PROTOCOL_HEADER_SIZE:
                # A stranger's greeting may be shorter: the first byte that differs decides.
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
            _fault(buffer, REPLY_FRAME_ERROR, f"unknown frame type {type}", 0, 0, 0)
            return n
        if size > buffer.frame_max:
            _fault(
                buffer,
                REPLY_FRAME_ERROR,
                f"frame of {size} bytes is larger than the negotiated {buffer.frame_max}",
                0,
                0,
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
                0,
                0,
            )
            return n
        used: cython.Py_ssize_t = _frame(
            buffer, q, type, cython.cast(cython.int, load16(q + AMQP_CHANNEL)), size, left
        )
        if used == 0:
            break
        at += used
    return n if buffer.state == WIRE_CLOSED else at


@cython.cfunc
@cython.exceptval(-1)
def _keep(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Makes the n bytes at p all that waits in the connection's buffer (p may lie inside it)."""
    b: cython.pointer(Buffer) = cython.address(buffer.inp)
    if n == 0:
        b.start = 0
        b.end = 0
        if b.capacity > _IDLE_CAPACITY:
            _free(b)
        return 0
    if b.p != cython.NULL and p >= b.p and p < b.p + b.capacity:
        b.start = p - b.p
        b.end = b.start + n
        return 0
    b.start = 0
    b.end = 0
    _append(b, p, n)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _work(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    buffer.scanning = True
    done: cython.Py_ssize_t = n
    try:
        done = _scan(buffer, p, n)
    finally:
        buffer.scanning = False
        _keep(buffer, p + done, n - done)
    buffer.flush_settles()
    return 0


@cython.cclass
class ConnectionBuffer:
    def __cinit__(self):
        self.inp.p = cython.NULL
        self.out.p = cython.NULL

    def __init__(self, owner, outbox: Outbox, fd=-1, frame_max=8192, message_size_max=16 << 20):
        self.owner = owner
        self.outbox = outbox
        self.fd = fd
        self.state = WIRE_HEADER
        self.frame_max = frame_max
        self.message_size_max = message_size_max
        self.backlog_max = 1 << 20
        self.codecs = []
        self.dirty_codecs = []
        self.confirm_codecs = []

    def __dealloc__(self):
        stdlib.free(self.inp.p)
        stdlib.free(self.out.p)

    @property
    def output_bytes(self):
        return self.out.end - self.out.start

    @property
    def input_bytes(self):
        return self.inp.end - self.inp.start

    def open_codec(self, number: cython.int, owner, epoch: Epoch):
        codecs: list = self.codecs
        while len(codecs) <= number:
            codecs.append(None)
        if codecs[number] is not None:
            raise ValueError(f"channel {number} is open")
        codec = ChannelCodec(self, number, owner, epoch)
        codecs[number] = codec
        return codec

    def codec(self, number: cython.int):
        return self.codecs[number] if 0 <= number < len(self.codecs) else None

    def receive(self):
        """Reads the socket once and works through what came.

        Returns the bytes read: 0 = the peer has closed, -errno = failed, EAGAIN included."""
        global _scratch, _scratch_capacity, _scratch_busy
        if self.scanning or _scratch_busy:
            raise RuntimeError("receive() was called from within itself")
        kept: cython.Py_ssize_t = self.inp.end - self.inp.start
        if kept + _RECEIVE > _scratch_capacity:
            capacity: cython.Py_ssize_t = max(kept + _RECEIVE, 3 * _RECEIVE)
            grown: cython.p_void = stdlib.realloc(_scratch, capacity)
            if grown == cython.NULL:
                raise MemoryError
            _scratch = cython.cast(cython.p_uchar, grown)
            _scratch_capacity = capacity
        n: cython.Py_ssize_t = cnet.recv(self.fd, _scratch + kept, _RECEIVE, cnet.MSG_DONTWAIT)
        if n <= 0:
            return n if n == 0 else -cnet.errno
        if kept:
            string.memcpy(_scratch, self.inp.p + self.inp.start, kept)
        self.received += n
        self.outbox.bytes_received += n
        _scratch_busy = True
        try:
            _work(self, _scratch, kept + n)
        finally:
            _scratch_busy = False
        return n

    def feed(self, data: bytes):
        """Works through bytes that somebody else has read (TLS)."""
        if self.scanning:
            raise RuntimeError("feed() was called from within itself")
        n: cython.Py_ssize_t = len(data)
        self.received += n
        self.outbox.bytes_received += n
        if self.inp.end > self.inp.start:
            _append(cython.address(self.inp), bytes_pointer(data), n)
            self.pump()
        else:
            _work(self, bytes_pointer(data), n)

    def pump(self):
        """Works through what waits in the connection's own buffer, after a pause."""
        if self.scanning or self.inp.end == self.inp.start:
            return
        _work(self, self.inp.p + self.inp.start, self.inp.end - self.inp.start)

    def flush_settles(self):
        codecs: list = self.dirty_codecs
        if not codecs:
            return
        self.dirty_codecs = []
        for item in codecs:
            codec: ChannelCodec = item
            _flush_codec(codec)

    def send_frame(self, type: cython.int, channel: cython.int, payload: bytes):
        _put_frame(self, type, channel, bytes_pointer(payload), len(payload))
        _touch(self)

    def send_bytes(self, data: bytes):
        _append(cython.address(self.out), bytes_pointer(data), len(data))
        _touch(self)

    def flush_confirms(self):
        codecs: list = self.confirm_codecs
        if codecs:
            self.confirm_codecs = []
            for item in codecs:
                codec: ChannelCodec = item
                _flush_confirms(codec)

    def flush(self):
        """End of a round: encodes what is due and hands the output on."""
        # Deliveries without acknowledgement of this round.
        self.flush_settles()
        self.flush_confirms()
        if self.fd < 0:
            self.owner.on_output()
            return
        error: cython.int = self.write()
        if error or self.out.end > self.out.start:
            self.owner.on_write_blocked(error)
        elif self.holding:
            self.owner.on_drained()

    def write(self):
        """Sends what the socket takes. Returns 0, or the errno that ended the connection."""
        out: cython.pointer(Buffer) = cython.address(self.out)
        while out.end > out.start:
            n: cython.Py_ssize_t = cnet.send(
                self.fd,
                out.p + out.start,
                out.end - out.start,
                cnet.MSG_DONTWAIT | cnet.MSG_NOSIGNAL,
            )
            if n < 0:
                if cnet.errno == cnet.EINTR:
                    continue
                if cnet.errno == cnet.EAGAIN or cnet.errno == cnet.EWOULDBLOCK:
                    return 0
                return cnet.errno
            out.start += n
            self.sent += n
            self.outbox.bytes_sent += n
        _release_output(self)
        return 0

    def take_output(self):
        """All output as bytes (TLS, tests)."""
        out: cython.pointer(Buffer) = cython.address(self.out)
        data: bytes = (
            copy_bytes(out.p + out.start, out.end - out.start) if out.end > out.start else b""
        )
        out.start = out.end
        self.sent += len(data)
        self.outbox.bytes_sent += len(data)
        _release_output(self)
        return data

    def close(self):
        """Nothing is scanned or kept any more; output stays until it is taken."""
        self.state = WIRE_CLOSED
        if not self.scanning:
            _free(cython.address(self.inp))
        self.dirty_codecs = []
        self.confirm_codecs = []
        for item in self.codecs:
            if item is not None:
                codec: ChannelCodec = item
                codec.close()
        self.codecs = []


@cython.cfunc
@cython.exceptval(check=False)
def _release_output(buffer: ConnectionBuffer) -> cython.void:
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    out.start = 0
    out.end = 0
    if out.capacity > _IDLE_CAPACITY:
        _free(out)
