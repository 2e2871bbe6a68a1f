from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "string.h" nogil:
    void* memmem(const void* hay, size_t n, const void* needle, size_t k)

cpdef enum:
    # States of a connection. HEADER: the protocol header is due. CLOSING: connection.close was
    # sent, only channel 0 is heard.
    WIRE_HEADER = 0
    WIRE_OPEN = 1
    WIRE_CLOSING = 2
    WIRE_CLOSED = 3

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

cdef enum:
    # What lies behind basic.publish: frames that must be assembled, an incomplete message that is
    # worth waiting for, or the whole message.
    CONTENT_ASSEMBLE = 0
    CONTENT_WHOLE = 1
    CONTENT_WAIT = 2

cdef enum:
    PROTOCOL_HEADER_SIZE = 8
    # basic.publish: class, method and ticket, then exchange and routing key, then bits.
    PUBLISH_EXCHANGE = 6
    PUBLISH_SIZE_MIN = 9
    # A frame with basic.ack or basic.nack.
    CONFIRM_FRAME = 21
    # basic.deliver besides consumer tag, exchange and routing key: method, delivery tag,
    # redelivered; and with its framing.
    DELIVER_FIXED = 13
    DELIVER_ROOM = 21
    # basic.ack, basic.nack and basic.reject: method, delivery tag, bits.
    ACK_SIZE = 13
    ACK_BITS = 12
    ACK_MULTIPLE = 1
    NACK_REQUEUE = 2
    REJECT_REQUEUE = 1
    # The field x-stream-offset: name with its length, and where the value begins.
    OFFSET_NAME = 16
    OFFSET_VALUE = 17

cdef struct Buffer:
    unsigned char* p
    Py_ssize_t start
    Py_ssize_t end
    Py_ssize_t capacity

cdef struct Route:
    uint64_t hash
    unsigned char* key
    Py_ssize_t key_length
    PyObject* targets

# Consecutive delivery tags of one consumer with consecutive message ids.
cdef struct Run:
    uint64_t tag
    uint64_t count
    uint64_t first_id
    uint32_t slot

cdef struct Ranges:
    uint64_t* pairs
    Py_ssize_t count
    Py_ssize_t capacity
    bint unsorted

cdef class Epoch:
    cdef public uint64_t value

cdef class Outbox:
    cdef public list buffers
    cdef public object on_first
    cdef public uint64_t bytes_sent
    cdef public uint64_t bytes_received

cdef class ConsumerDeliveries:
    cdef public ChannelCodec codec
    cdef public object client
    cdef public uint32_t number
    cdef public bint no_ack
    cdef public bint counted
    cdef public bint offsets
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
    cdef public Epoch epoch
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
    cdef Buffer stage
    # frames that arrived while the channel was busy
    cdef Buffer backlog
    cdef bint pumping
    # routes
    cdef Route* routes
    cdef Py_ssize_t routes_mask
    cdef Py_ssize_t routes_used
    cdef uint64_t routes_epoch
    # unacknowledged deliveries
    cdef Run* runs
    cdef Py_ssize_t runs_head
    cdef Py_ssize_t runs_end
    cdef Py_ssize_t runs_capacity
    cdef public uint64_t next_tag
    cdef public uint64_t unacked
    cdef public list slots
    cdef list free_slots
    cdef list dirty_slots
    # confirms
    cdef uint16_t* ring
    cdef uint64_t ring_mask
    cdef public uint64_t confirm_low
    cdef public uint64_t confirm_next
    cdef Ranges done
    cdef bint confirm_dirty

cdef class ConnectionBuffer:
    cdef public int fd
    cdef public object owner
    cdef public Outbox outbox
    cdef public int state
    cdef public bint paused
    cdef public bint alarmed
    cdef public bint corked
    cdef public bint holding
    cdef public uint32_t frame_max
    cdef public uint64_t message_size_max
    cdef public Py_ssize_t backlog_max
    cdef public uint64_t received
    cdef public uint64_t sent
    cdef list codecs
    cdef list dirty_codecs
    cdef list confirm_codecs
    cdef bint dirty
    cdef bint scanning
    cdef Buffer inp
    cdef Buffer out
