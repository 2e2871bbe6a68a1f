from libc.stdint cimport uint32_t, uint64_t

from convoymq.kernels.channel_codec cimport ChannelCodec, ConsumerDeliveries

cdef extern from "string.h" nogil:
    void* memmem(const void* hay, size_t n, const void* needle, size_t k)

cdef enum:
    # basic.deliver besides consumer tag, exchange and routing key: method, delivery tag,
    # redelivered; and with its framing.
    DELIVER_FIXED = 13
    DELIVER_ROOM = 21
    # The field x-stream-offset: name with its length, and where the value begins. What it adds to
    # a content header: a table's length, and the field.
    OFFSET_NAME = 16
    OFFSET_VALUE = 17
    OFFSET_ROOM = 29

cdef bytes record_of(bytes block, Py_ssize_t command, Py_ssize_t record)
# basic.deliver of one record that no queue holds.
cdef int encode_delivery(ChannelCodec codec, ConsumerDeliveries consumer, bytes record,
                         bint redelivered) except? -1
cdef int send_content(ChannelCodec codec, bytes method, bytes content, uint32_t acquired_count,
                      uint32_t failed_delivery_count) except? -1
# basic.deliver of `count` records of the command from `first` on.
cdef int encode_deliveries(ChannelCodec codec, ConsumerDeliveries consumer, uint64_t first_id,
                           bytes block, Py_ssize_t command, Py_ssize_t first, Py_ssize_t count,
                           uint32_t acquired_count, uint32_t failed_delivery_count) except? -1
