# Types of the compiled build; backlog.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.quorum.groups cimport Groups
from convoymq.queues.quorum.levels cimport Levels
from convoymq.queues.quorum.runs cimport CheckedOut, Fifo, Tail

cdef class Backlog:
    cdef public int64_t delivery_limit
    cdef public Fifo fresh, returned
    cdef public Tail requeued
    cdef public CheckedOut dead_letters
    cdef public Levels levels
    cdef public Groups groups
    cdef public object order, notes, waiting, delayed, expiry
    cdef public list fronted
    cdef public int requeue_position
    cdef public bint two_classes, counts_returns, timed, keeps_all, bounded, refuses, refusing, stirred
    cdef public int64_t message_ttl_ms, max_length, max_bytes
    cdef public uint64_t beside
    cdef public dict dropped
    cdef public int64_t unacked, unacked_bytes
    cdef public uint64_t published, delivered, acked, returns, redelivered, purged
    cpdef int64_t ready(self)
    @cython.locals(run=tuple, count=uint64_t)
    cpdef tuple take(self, uint64_t limit)
    @cython.locals(source=Fifo, ahead=uint64_t, level=int)
    cdef tuple _remove(self, uint64_t limit)
    cpdef hold(self, int64_t messages, int64_t size)
    cpdef settle(self, int64_t messages, int64_t size)
    @cython.locals(levels=Levels)
    cpdef enqueue(
        self, uint64_t index, uint64_t offset, uint64_t first, uint64_t count, uint64_t size,
        uint64_t mark
    )
    cpdef bint follows(self) except? -1
    cpdef gone(self, tuple run)
