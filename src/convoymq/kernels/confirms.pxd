from libc.stdint cimport uint64_t

from convoymq.kernels.channel_codec cimport ChannelCodec

cdef enum:
    # A place of the ring: how many targets have not answered, whether the publisher was answered
    # out of turn, and whether a target refused.
    CONFIRM_COUNT = 0x3FFF
    CONFIRM_ANSWERED = 0x4000
    CONFIRM_NACK = 0x8000
    # A frame with basic.ack or basic.nack.
    CONFIRM_FRAME = 21

cdef int grow_ring(ChannelCodec codec) except? -1
# The publish waits for that many targets.
cdef int expect_confirms(ChannelCodec codec, uint64_t tag, int count) except? -1
# One target has answered for these tags. Tags that are not waiting are skipped.
cdef int resolve_confirms(ChannelCodec codec, uint64_t first, uint64_t last, bint ok) except? -1
# Encodes the confirms that are due.
cdef int encode_confirms(ChannelCodec codec) except? -1

# Gives a publish tag out; it waits for one target. Inlined: it runs for every message.
cdef inline uint64_t allocate_confirm(ChannelCodec codec) except 0:
    cdef uint64_t tag = codec.confirm_next
    if codec.ring == NULL or tag - codec.confirm_low > codec.ring_mask:
        grow_ring(codec)
    codec.ring[tag & codec.ring_mask] = 1
    codec.confirm_next = tag + 1
    return tag
