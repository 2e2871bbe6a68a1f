# Types of the compiled build; machine.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.kernels.command_walk cimport CommandWalk
from convoymq.queues.group_machine cimport GroupMachine
from convoymq.queues.sessions cimport Session

cdef class StreamMachine(GroupMachine):
    cdef public dict stored
    cdef public bint _broken
    cdef public object chunks, segments
    cdef public int64_t next, last_chunk, bytes, open_bytes, published
    cdef public uint64_t _newest_ms, truncated
    @cython.locals(
        kind=int, flags=int, count=uint64_t, offset=Py_ssize_t, session=Session,
        walk=CommandWalk,
    )
    cpdef apply(self, uint64_t index, uint64_t time_ms, bytes data)
    @cython.locals(size=uint64_t, repeated=uint64_t)
    cdef _enqueue(
        self, Session session, uint64_t index, uint64_t count, bytes data, Py_ssize_t offset
    )
    @cython.locals(start=int64_t, closes=bint)
    cdef _append(
        self, uint64_t index, uint64_t command, uint64_t first, uint64_t count, uint64_t size
    )
