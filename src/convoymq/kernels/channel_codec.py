"""The compiled part of one AMQP channel, and of its consumers."""

import cython
from cython.cimports.convoymq.kernels.acknowledgements import (
    acknowledge_tag,
    add_deliveries,
    flush_codec,
    flush_consumer,
    note_outcome,
    take_tags,
)
from cython.cimports.convoymq.kernels.batch import PublishTarget
from cython.cimports.convoymq.kernels.byte_buffer import free_buffer
from cython.cimports.convoymq.kernels.bytes import bytes_pointer
from cython.cimports.convoymq.kernels.confirms import (
    CONFIRM_COUNT,
    allocate_confirm,
    expect_confirms,
    resolve_confirms,
)
from cython.cimports.convoymq.kernels.connection_buffer import ConnectionBuffer
from cython.cimports.convoymq.kernels.delivery_encoder import (
    encode_deliveries,
    encode_delivery,
    record_of,
    send_content,
)
from cython.cimports.convoymq.kernels.frames import pump_backlog
from cython.cimports.convoymq.kernels.route_cache import RouteCacheVersion, drop_routes
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t

from convoymq.kernels.content import split_record


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
        self.places = None
        self.unacked = 0
        self.dirty = False

    def __dealloc__(self):
        kind: cython.int
        for kind in range(KINDS):
            stdlib.free(self.kinds[kind].pairs)


@cython.cclass
class ChannelCodec:
    def __cinit__(self):
        self.content.p = cython.NULL
        self.backlog.p = cython.NULL
        self.routes.routes = cython.NULL
        self.runs = cython.NULL
        self.ring = cython.NULL
        self.done.pairs = cython.NULL

    def __init__(self, buffer: ConnectionBuffer, number, owner, version: RouteCacheVersion):
        self.buffer = buffer
        self.number = number
        self.owner = owner
        self.route_cache_version = version
        self.state = CHANNEL_OPEN
        self.mode = MODE_PLAIN
        self.next_tag = 1
        self.confirm_low = 1
        self.confirm_next = 1
        self.consumers = []
        self.free_indexes = []
        self.dirty_consumers = []

    def __dealloc__(self):
        stdlib.free(self.content.p)
        stdlib.free(self.backlog.p)
        drop_routes(cython.address(self.routes))
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

    def add_consumer(self, client, number, tag: bytes, no_ack=False, counted=False, offsets=False):
        consumer: ConsumerDeliveries = ConsumerDeliveries(
            self, client, number, tag, no_ack, counted, offsets
        )
        if self.free_indexes:
            index = self.free_indexes.pop()
            self.consumers[index] = consumer
        else:
            index = len(self.consumers)
            self.consumers.append(consumer)
        consumer.index = index
        return consumer

    def remove_consumer(self, consumer: ConsumerDeliveries):
        if consumer.unacked:
            raise ValueError("deliveries of this consumer are still unacknowledged")
        flush_consumer(consumer)
        if self.consumers[consumer.index] is consumer:
            self.consumers[consumer.index] = None
            self.free_indexes.append(consumer.index)

    # state

    def close(self):
        self.state = CHANNEL_CLOSING
        self.expect = EXPECT_METHOD
        free_buffer(cython.address(self.content))
        drop_routes(cython.address(self.routes))

    def drain(self):
        """Once channel.close was sent: hears a close among the frames that were kept."""
        if self.state == CHANNEL_CLOSING and not self.pumping:
            pump_backlog(self)

    def detach(self):
        self.close()
        free_buffer(cython.address(self.backlog))
        codecs: list = self.buffer.codecs
        if self.number < len(codecs) and codecs[self.number] is self:
            codecs[self.number] = None

    def resume(self):
        if self.state != CHANNEL_BUSY:
            return
        self.state = CHANNEL_OPEN
        if not self.pumping and self.backlog.end > self.backlog.start:
            pump_backlog(self)
            self.buffer.flush_settles()

    def forget_routes(self):
        drop_routes(cython.address(self.routes))

    # publishing

    def append(self, target: PublishTarget, key: bytes, content: bytes, body_size, flags, tag):
        n: cython.Py_ssize_t = len(key)
        m: cython.Py_ssize_t = len(content)
        placed: uint64_t = tag
        into: PublishTarget = target
        if target.spreads:
            into = target.place(
                bytes_pointer(key), n, bytes_pointer(content), m, cython.address(placed)
            )
        p: cython.p_uchar = into.builder.reserve(into, placed, body_size, flags, n + m)
        string.memcpy(p, bytes_pointer(key), n)
        string.memcpy(p + n, bytes_pointer(content), m)

    def select_confirms(self):
        self.mode = MODE_CONFIRM

    def next_confirm(self):
        return allocate_confirm(self)

    def awaits(self, tag: uint64_t):
        if tag < self.confirm_low or tag >= self.confirm_next:
            return False
        return self.ring[tag & self.ring_mask] & CONFIRM_COUNT != 0

    def expect_confirms(self, tag: uint64_t, count: cython.int):
        expect_confirms(self, tag, count)

    def resolve(self, tags, ok: cython.bint):
        i: cython.Py_ssize_t
        first: uint64_t
        last: uint64_t
        count: uint64_t = 0
        for i in range(0, len(tags) - 1, 2):
            first = tags[i]
            last = tags[i + 1]
            resolve_confirms(self, first, last, ok)
            count += last - first + 1
        return count

    # acknowledging

    def acknowledge(self, kind: cython.int, tag: uint64_t, multiple: cython.bint):
        return acknowledge_tag(self, kind, tag, multiple) == 0

    def take(self, tag: uint64_t, multiple: cython.bint):
        """Removes the tags from the unacknowledged; None when the tag is unknown."""
        taken: list = []
        if take_tags(self, tag, multiple, taken, -1) < 0:
            return None
        return taken

    def put_back(self, taken):
        for tag, count, consumer, first_id in sorted(taken, key=lambda item: item[0]):
            add_deliveries(self, tag, count, first_id, consumer)

    def settle_taken(self, kind: cython.int, taken):
        for _, count, item, first_id in taken:
            consumer: ConsumerDeliveries = item
            note_outcome(consumer, kind, first_id, first_id + count - 1)
            self.acknowledged += count

    def note(self, consumer: ConsumerDeliveries, kind: cython.int, first: uint64_t, last: uint64_t):
        note_outcome(consumer, kind, first, last)

    def flush_settles(self):
        flush_codec(self)

    # delivering

    def deliver(
        self,
        consumer: ConsumerDeliveries,
        first_id: uint64_t,
        block: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        acquired: uint32_t,
        delivery_count: uint32_t,
    ):
        encode_deliveries(
            self, consumer, first_id, block, command, first, count, acquired, delivery_count
        )

    def deliver_record(self, consumer: ConsumerDeliveries, record: bytes, redelivered: cython.bint):
        """basic.deliver of one record that no queue holds (direct reply-to)."""
        encode_delivery(self, consumer, record, redelivered)

    def send_get(
        self,
        consumer: ConsumerDeliveries,
        block: bytes,
        command: cython.Py_ssize_t,
        record: cython.Py_ssize_t,
        get_id: uint64_t,
        acquired: uint32_t,
        delivery_count: uint32_t,
        ready: uint32_t,
        no_ack: cython.bint,
    ):
        data: bytes = record_of(block, command, record)
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
        if consumer.counted:
            send_content(self, method, content, acquired, delivery_count)
        else:
            send_content(self, method, content, 0, 0)
        if not no_ack:
            add_deliveries(self, self.next_tag, 1, get_id, consumer)
        self.next_tag += 1
        self.delivered += 1

    def send_return(self, code: int, text: bytes, key: bytes, content: bytes):
        method = b"".join(
            (b"\x00\x3c\x00\x32", int(code).to_bytes(2, "big"), bytes((len(text),)), text, key)
        )
        send_content(self, method, content, 0, 0)
