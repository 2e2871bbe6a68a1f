from libc.stdint cimport int64_t, uint32_t, uint64_t

# Exchange and routing key of a message.
cdef struct Names:
    unsigned char* exchange
    Py_ssize_t exchange_size
    unsigned char* key
    Py_ssize_t key_size

# A run of deliveries of one link.
cdef struct Run:
    uint32_t channel
    uint32_t handle
    # Of the first one.
    uint32_t delivery_id
    uint64_t first_id
    # In its stream, or -1.
    int64_t offset
    bint settled
    uint32_t acquired
    uint32_t failed
    # Bytes of a message in one frame, and of one that the client takes.
    Py_ssize_t room
    uint64_t size_max
