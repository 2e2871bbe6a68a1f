from libc.stdint cimport uint16_t, uint32_t, uint64_t

from convoymq.kernels.byte_buffer cimport Buffer
from convoymq.kernels.connection_buffer cimport ConnectionBuffer
from convoymq.kernels.ranges cimport Ranges
from convoymq.kernels.route_cache cimport RouteCache, RouteCacheVersion, RouteCount

cpdef enum:
    # States of a channel. BUSY: an answer is being worked on, frames are kept. CLOSING:
    # channel.close was sent, all but close, close-ok and a second open is dropped.
    CHANNEL_OPEN = 0
    CHANNEL_BUSY = 1
    CHANNEL_CLOSING = 2

cpdef enum:
    MODE_PLAIN = 0
    MODE_CONFIRM = 1
    MODE_TX = 2

cpdef enum:
    # How deliveries end.
    SETTLE = 0
    RETURN = 1
    RETURN_FAILED = 2
    DISCARD = 3

cdef enum:
    KINDS = 4

cdef enum:
    # What a channel expects next.
    EXPECT_METHOD = 0
    EXPECT_HEADER = 1
    EXPECT_BODY = 2

# Consecutive delivery tags of one consumer with consecutive message ids.
cdef struct Run:
    uint64_t tag
    uint64_t count
    uint64_t first_id
    uint32_t consumer

cdef class ConsumerDeliveries:
    cdef public ChannelCodec codec
    cdef public object client
    cdef public uint32_t number
    cdef public bint no_ack
    cdef public bint counted
    cdef public bint offsets
    # Number of a place -> Place, for messages of ordered topics; otherwise None.
    cdef public dict places
    cdef public bytes head
    cdef public uint64_t unacked
    cdef public uint32_t index
    cdef bint dirty
    cdef Ranges kinds[KINDS]

cdef class ChannelCodec:
    cdef public ConnectionBuffer buffer
    cdef public int number
    cdef public object owner
    cdef public int state
    cdef public int mode
    cdef public RouteCacheVersion route_cache_version
    # Set by `resolve_route`: its answer holds for every routing key, but the empty one.
    cdef public bint every_key
    # Set by `resolve_route`: counts what goes where it says; None: nothing does.
    cdef public RouteCount route_count
    # For `resolve_route`: the headers of its message have an order key.
    cdef public bint has_order_key
    # Makes spans (`ChannelSpans`); None: nothing does.
    cdef public object spans
    cdef public uint64_t published
    cdef public uint64_t delivered
    cdef public uint64_t acknowledged
    # content being assembled
    cdef int expect
    cdef int publish_bits
    cdef Py_ssize_t key_length
    cdef Py_ssize_t header_length
    cdef Py_ssize_t body_frame
    cdef uint64_t body_size
    cdef uint64_t body_seen
    cdef Buffer content
    # frames that arrived while the channel was busy
    cdef Buffer backlog
    cdef bint pumping
    cdef RouteCache routes
    # unacknowledged deliveries
    cdef Run* runs
    cdef Py_ssize_t runs_head
    cdef Py_ssize_t runs_end
    cdef Py_ssize_t runs_capacity
    cdef public uint64_t next_tag
    cdef public uint64_t unacked
    cdef public list consumers
    cdef list free_indexes
    cdef list dirty_consumers
    # confirms
    cdef uint16_t* ring
    cdef uint64_t ring_mask
    cdef public uint64_t confirm_low
    cdef public uint64_t confirm_next
    cdef Ranges done
    cdef bint confirm_dirty
