# Types of the compiled build; credit.py is complete without them.
from libc.stdint cimport int64_t, uint64_t

cdef class Credit:
    # object: the types of the links name this one.
    cdef public object links
    cdef public uint64_t window
    cdef public int64_t relay_window, step
    cdef public set withheld
