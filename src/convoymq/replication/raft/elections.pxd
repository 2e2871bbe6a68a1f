# Types of the compiled build; elections.py is complete without them.
from libc.stdint cimport int64_t

cdef class Elections:
    # object: the types of the core name this one.
    cdef public object core
    cdef public set votes
    cdef public int64_t vote_waiting
    cdef public int attempts
    cdef public bint in_contact, armed
    cpdef bint is_elected(self)
    cpdef disarm(self)
