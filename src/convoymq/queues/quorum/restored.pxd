# Types of the compiled build; restored.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.kernels.place_heap cimport PlaceHeap

cdef class Restored:
    cdef dict _heaps
    cdef public int64_t messages, size, again
    @cython.locals(heap=PlaceHeap)
    cpdef add(self, int level, tuple run)
    @cython.locals(heap=PlaceHeap)
    cpdef int64_t count(self, int level) except? -1
    @cython.locals(heap=PlaceHeap)
    cpdef tuple head(self, int level)
    @cython.locals(heap=PlaceHeap)
    cpdef tuple head_place(self, int level)
    @cython.locals(heap=PlaceHeap, run=tuple, count=int64_t)
    cpdef tuple take(self, int level, uint64_t limit)
