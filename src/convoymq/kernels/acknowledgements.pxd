from libc.stdint cimport uint64_t

from convoymq.kernels.channel_codec cimport ChannelCodec, ConsumerDeliveries

# Adds a run of deliveries; nearly always behind all others.
cdef int insert_run(ChannelCodec codec, uint64_t tag, uint64_t count, uint64_t first_id,
                    ConsumerDeliveries slot) except? -1
# Takes the tag, or all up to it, out of the runs: into `taken`, or into the slots' ranges of
# `kind`. -1 = unknown tag.
cdef int take_tags(ChannelCodec codec, uint64_t tag, bint multiple, list taken,
                   int kind) except? -2
# Settles, returns or discards deliveries. -1 = unknown tag.
cdef int acknowledge_tag(ChannelCodec codec, int kind, uint64_t tag, bint multiple) except? -2
# Remembers that message ids [first, last] of the slot are settled in this way.
cdef int note_outcome(ConsumerDeliveries slot, int kind, uint64_t first, uint64_t last) except? -1
cdef int flush_slot(ConsumerDeliveries slot) except? -1
# Hands the ranges gathered so far to the queues, one call per consumer and kind.
cdef int flush_codec(ChannelCodec codec) except? -1
