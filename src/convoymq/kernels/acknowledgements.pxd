from libc.stdint cimport uint64_t

from convoymq.kernels.channel_codec cimport ChannelCodec, ConsumerDeliveries, Run

# Adds a run of its own; nearly always behind all others.
cdef int insert_run(ChannelCodec codec, uint64_t tag, uint64_t count, uint64_t first_id,
                    ConsumerDeliveries consumer) except? -1
# Takes the tag, or all up to it, out of the runs: into `taken`, or into the consumers' ranges of
# `kind`. -1 = unknown tag.
cdef int take_tags(ChannelCodec codec, uint64_t tag, bint multiple, list taken,
                   int kind) except? -2
# Settles, returns or discards deliveries. -1 = unknown tag.
cdef int acknowledge_tag(ChannelCodec codec, int kind, uint64_t tag, bint multiple) except? -2
# Remembers that message ids [first, last] of the consumer are settled in this way.
cdef int note_outcome(ConsumerDeliveries consumer, int kind, uint64_t first,
                      uint64_t last) except? -1
cdef int flush_consumer(ConsumerDeliveries consumer) except? -1
# Hands the ranges gathered so far to the queues, one call per consumer and kind.
cdef int flush_codec(ChannelCodec codec) except? -1

# Adds deliveries, to the last run where they follow it. Inlined: it runs for every delivery.
cdef inline int add_deliveries(ChannelCodec codec, uint64_t tag, uint64_t count, uint64_t first_id,
                               ConsumerDeliveries consumer) except -1:
    cdef Run* last
    if codec.runs_end > codec.runs_head:
        last = codec.runs + codec.runs_end - 1
        if (
            last.consumer == consumer.index
            and last.tag + last.count == tag
            and last.first_id + last.count == first_id
        ):
            codec.unacked += count
            consumer.unacked += count
            last.count += count
            return 0
    return insert_run(codec, tag, count, first_id, consumer)
