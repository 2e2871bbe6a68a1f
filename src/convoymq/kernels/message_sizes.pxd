from libc.stdint cimport uint64_t

cdef class MessageSizes:
    cdef uint64_t counts[9]
    cdef readonly uint64_t total

# Inlined: it runs for every message.
cdef inline void count_size(MessageSizes sizes, uint64_t n) noexcept:
    sizes.total += n
    sizes.counts[
        (n > 100) + (n > 1000) + (n > 10000) + (n > 100000)
        + (n > 1000000) + (n > 10000000) + (n > 50000000) + (n > 100000000)
    ] += 1
