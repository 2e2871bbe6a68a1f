# Types of the compiled build; levels.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.quorum.restored cimport Restored
from convoymq.queues.quorum.runs cimport Fifo

cdef class Levels:
    cdef dict _by_level
    cdef list _descending
    cdef object _make
    cdef public Restored restored
    cdef public int64_t messages, size
    cpdef push(
        self, uint64_t index, uint64_t offset, uint64_t first, uint64_t count, uint64_t size,
        uint64_t mark
    )
    cpdef restore(self, tuple run)
    cpdef int highest(self) except? -1
    @cython.locals(fifo=Fifo)
    cpdef int64_t count(self, int level) except? -1
    @cython.locals(found=Fifo)
    cpdef Fifo fifo(self, int level)
    @cython.locals(run=tuple)
    cpdef tuple take(self, int level, uint64_t limit, bint restored)
