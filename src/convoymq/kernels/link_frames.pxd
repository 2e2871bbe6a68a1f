from libc.stdint cimport uint32_t, uint64_t

cpdef enum:
    FRAME_APPEND = 1
    FRAME_APPEND_REPLY = 2
    FRAME_COMMIT = 3
    FRAME_FORWARD = 4
    FRAME_APPLIED = 5
    FRAME_DELIVER = 6
    FRAME_RAFT = 7
    FRAME_CONTROL = 8
    FRAME_HEARTBEAT = 9
    FRAME_HELLO = 10
    FRAME_RELAY = 11
    FRAME_GOODBYE = 12
    FRAME_CREDIT = 13

cdef void put_header(unsigned char* p, uint32_t length, int type, int flags, uint32_t group,
                     uint64_t a, uint64_t b, uint64_t c, uint64_t d) noexcept nogil
