from libc.stdint cimport uint32_t, uint64_t

# The commands of an entry, one after the other. All were looked at before the first one is here.
cdef class CommandWalk:
    cdef bytes data
    cdef readonly int type
    cdef readonly int flags
    cdef readonly uint64_t session
    cdef readonly uint64_t seq
    cdef readonly uint32_t count
    cdef readonly uint32_t arg
    # Of the command in the entry.
    cdef readonly Py_ssize_t offset
    cdef readonly Py_ssize_t length

    # Goes to the next command; False behind the last one.
    cpdef bint next(self) noexcept
