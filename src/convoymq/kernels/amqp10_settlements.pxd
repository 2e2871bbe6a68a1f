from libc.stdint cimport uint32_t

# A disposition: a range of delivery ids, and where the outcome lies in the performative.
cdef struct Settled:
    uint32_t first
    uint32_t last
    Py_ssize_t state
    Py_ssize_t state_end

# A link's flow, up to its credit.
cdef struct Flow:
    uint32_t fields[7]
