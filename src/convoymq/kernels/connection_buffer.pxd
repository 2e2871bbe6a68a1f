from libc.stdint cimport uint32_t, uint64_t

from convoymq.kernels.byte_buffer cimport Buffer
from convoymq.kernels.message_sizes cimport MessageSizes

cpdef enum:
    # States of a connection. HEADER: the protocol header is due. CLOSING: connection.close was
    # sent, only channel 0 is heard.
    CONNECTION_HEADER = 0
    CONNECTION_OPEN = 1
    CONNECTION_CLOSING = 2
    CONNECTION_CLOSED = 3

cdef enum:
    # What one read of a socket takes at most.
    RECEIVE_BYTES = 128 << 10

cdef class Outbox:
    cdef public list buffers
    cdef public object on_first
    cdef public uint64_t bytes_sent
    cdef public uint64_t bytes_received
    cdef public MessageSizes sizes

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

# Has the output sent at the end of the round.
cdef inline int mark_dirty(ConnectionBuffer buffer) except -1:
    cdef Outbox outbox
    if not buffer.dirty:
        buffer.dirty = True
        outbox = buffer.outbox
        outbox.buffers.append(buffer)
        if len(outbox.buffers) == 1 and outbox.on_first is not None:
            outbox.on_first()
    return 0

# Appends a frame to the output.
cdef int put_frame(ConnectionBuffer buffer, int type, int channel, unsigned char* p,
                   Py_ssize_t n) except? -1
