from libc.stdint cimport int64_t, uint64_t

cdef struct Asked:
    # What the headers of a record ask for: when (0 = at once, 1 = after `number` ms, 2 = at `number`
    # ms since the epoch), and the group's bytes inside the record (group_length -1 = none).
    int kind
    int64_t number
    unsigned char* group
    Py_ssize_t group_length

# Headers of one record.
cdef void find_headers(unsigned char* p, Py_ssize_t n, Asked* found) noexcept
# Level, expiration (-1 = none) and body bytes of one record.
cdef void read_attributes(unsigned char* p, Py_ssize_t n, int* level, int64_t* expiration,
                          uint64_t* body) noexcept
