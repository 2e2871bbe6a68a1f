from libc.stdint cimport int64_t

cdef struct Asked:
    # What the headers of a record ask for: when (0 = at once, 1 = after `number` ms, 2 = at `number`
    # ms since the epoch), and the group's bytes inside the record (group_length -1 = none).
    int kind
    int64_t number
    unsigned char* group
    Py_ssize_t group_length
