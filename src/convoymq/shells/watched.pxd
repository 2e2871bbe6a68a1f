# Types of the compiled build; watched.py is complete without them.
from libc.stdint cimport int64_t

from convoymq.kernels.batch cimport CommandBuilder

cdef class Watched:
    cdef public object group, host, late, sink
    cdef public tuple members
    cdef public CommandBuilder builder
    cdef public int64_t leader, term, asked_at, turn
    cdef public bint wanted
