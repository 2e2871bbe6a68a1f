# Types of the compiled build; order.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.quorum.backlog cimport Backlog
from convoymq.queues.quorum.levels cimport Levels
from convoymq.queues.quorum.restored cimport Restored
from convoymq.queues.quorum.runs cimport Fifo

cdef class Order:
    cdef Backlog _backlog
    cdef public int turn
    @cython.locals(backlog=Backlog, highest=int)
    cdef tuple _next_level(self)
    cdef bint _has_plain(self) except? True
    @cython.locals(backlog=Backlog, ahead=uint64_t)
    cdef tuple _own(self, int level)
    @cython.locals(backlog=Backlog)
    cdef bint _is_restored(self, int level, Fifo own) except? True
    @cython.locals(level=int, room=uint64_t, run=tuple)
    cpdef tuple take(self, uint64_t limit)
    @cython.locals(own=Fifo, room=uint64_t)
    cdef tuple _take_at(self, int level, uint64_t limit)
