# Types of the compiled build; log.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.kernels.entries cimport Entry
from convoymq.storage.wal cimport Wal

cdef class GroupLog:
    # So that an observer can put itself before a method, as the simulator does.
    cdef dict __dict__
    cdef public object store
    cdef public Wal _wal
    cdef public int64_t group, term, voted_for, first_index, last_index, last_term, written_index
    cdef public int64_t snapshot_index, snapshot_term, base, memory_first, memory_bytes, cache_bytes
    cdef public int64_t stale_index, version, _head, _snapshot_submitted
    cdef public object next_order, era, eras_used
    cdef public object snapshot_membership, damaged, logged, on_written, on_vote_written, receiver
    cdef public bint known, removed, _truncated, dirty, remembered, cache_used, compacting
    cdef public object places, sizes
    cdef public list segments, stale_segments, _run_starts, _run_terms, _memory, _snapshot_waiting
    cdef public dict _cache
    @cython.locals(index=int64_t, term=int64_t, size=int64_t, data=bytes)
    cpdef append(self, Entry entry)
    cpdef entries_written(self, int64_t index)
    @cython.locals(starts=list)
    cpdef int64_t term_at(self, int64_t index) except? -1
    cpdef Entry entry(self, int64_t index)
