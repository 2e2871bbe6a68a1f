# Types of the compiled build; group_machine.py is complete without them.
from libc.stdint cimport uint64_t

from convoymq.queues.sessions cimport SessionTable

cdef class GroupMachine(SessionTable):
    cdef public object trace
    cdef public int version
    cdef public dict settings, down_nodes
    cdef public uint64_t index
