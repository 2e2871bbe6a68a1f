from libc.stdint cimport uint32_t, uint64_t

cpdef enum:
    # What an entry holds.
    ENTRY_NOOP = 0
    ENTRY_COMMANDS = 1
    ENTRY_MEMBERSHIP = 2
    ENTRY_VERSION = 3

cdef class Entry:
    cdef public bytes data
    cdef public uint64_t index
    cdef public uint64_t term
    cdef public uint64_t time_ms
    cdef public uint32_t group
    cdef public int kind
    cdef public Py_ssize_t size

cdef uint32_t checksum(unsigned char* p, Py_ssize_t n) except? 0

# Fills the header of an entry in, in its place: nobody else may have seen `data`.
cdef Entry seal_entry(bytes data, uint32_t group, uint64_t index, uint64_t term, uint64_t time_ms,
                      int kind, int count)
