# Types of the compiled build; delayed.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.group_machine cimport GroupMachine
from convoymq.queues.quorum.backlog cimport Backlog

cdef class Delayed:
    cdef public GroupMachine machine
    cdef public Backlog backlog
    cdef public object waiting
    cdef public int retry
    cdef public int64_t retry_min_ms, retry_max_ms
    @cython.locals(
        backlog=Backlog, now_ms=uint64_t, found=list, beside=uint64_t, at=Py_ssize_t,
        messages=uint64_t,
    )
    cpdef enqueue(
        self, uint64_t index, uint64_t first, uint64_t count, bytes data, Py_ssize_t offset
    )
