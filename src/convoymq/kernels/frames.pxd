from convoymq.kernels.channel_codec cimport ChannelCodec
from convoymq.kernels.connection_buffer cimport ConnectionBuffer

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
    # basic.ack, basic.nack and basic.reject: method, delivery tag, bits.
    ACK_SIZE = 13
    ACK_BITS = 12
    ACK_MULTIPLE = 1
    NACK_REQUEUE = 2
    REJECT_REQUEUE = 1

cdef enum:
    # An incomplete message stays in the connection's input up to this size.
    WAIT_MAX = 32 << 10

# Works through the frames in n bytes. Returns how many bytes are done with.
cdef Py_ssize_t scan(ConnectionBuffer buffer, unsigned char* p, Py_ssize_t n) except? -1
# Works through the frames that were kept while the channel codec was busy; those of a channel
# codec that closes meanwhile are looked through for a close.
cdef int pump_backlog(ChannelCodec codec) except? -1
