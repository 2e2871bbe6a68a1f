# Types of the compiled build; machine.py is complete without them.
from libc.stdint cimport uint64_t

from convoymq.queues.sessions cimport Session
from convoymq.queues.stream.machine cimport StreamMachine

cdef class PartitionGroupMachine(StreamMachine):
    cdef public object state
    cdef public dict refused, announced
    cdef public object load
    cdef public long long fenced
    cdef bint _is_behind
    cdef _enqueue(
        self, Session session, uint64_t index, uint64_t count, bytes data, Py_ssize_t offset
    )
    cdef _answer(self, Session session)
    cdef _end_entry(self)
