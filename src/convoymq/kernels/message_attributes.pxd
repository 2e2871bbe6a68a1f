from libc.stdint cimport int64_t, uint64_t

cdef struct Asked:
    # What the headers of a record ask for: when (0 = at once, 1 = after `number` ms, 2 = at `number`
    # ms since the epoch), and the group's bytes inside the record (group_length -1 = none).
    int kind
    int64_t number
    unsigned char* group
    Py_ssize_t group_length

# Properties of one message, as far as a queue looks at them.
cdef struct Attributes:
    int priority
    int64_t expiration
    unsigned char* message_id
    Py_ssize_t message_id_size

# Where the content header payload of a record of n bytes lies, and how many bytes it has; -1 = the
# record is broken.
cdef Py_ssize_t content_header(unsigned char* p, Py_ssize_t n, Py_ssize_t* size) noexcept
# Reads the properties of such a payload up to the one with bit `last`; 0 = it is broken.
cdef int read_properties(unsigned char* p, Py_ssize_t n, int last, Attributes* found) noexcept
# Headers of one record.
cdef void find_headers(unsigned char* p, Py_ssize_t n, Asked* found) noexcept
# Level, expiration (-1 = none) and body bytes of one record.
cdef void read_attributes(unsigned char* p, Py_ssize_t n, int* level, int64_t* expiration,
                          uint64_t* body) noexcept
