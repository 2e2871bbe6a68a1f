# Types of the compiled build; wal.py is complete without them.
import cython
from libc.stdint cimport int64_t

cdef class WalFile:
    cdef public object file
    cdef public str name
    cdef public int64_t generation, size, tail, first_sequence
    cdef public bint recovered, started
    cdef public dict groups

cdef class Batch:
    cdef public WalFile file
    cdef public int64_t sequence, start, end, place
    cdef public bytes opening
    cdef public list buffers, directory, dirty, votes, notes

cdef class RecentGroups:
    cdef public bytearray maps
    cdef public int64_t generation, began, turned
    cpdef reach(self, int64_t generation, int64_t place)

cdef class Wal:
    cdef public object _directory, _flusher, _worker, _config, _table, _manifest, _clusters
    cdef public list _leftovers
    cdef public RecentGroups _recent
    cdef public int64_t _named
    cdef public dict files
    cdef public WalFile current, next_file
    cdef public bint _preparing, _allocating, _failed, closing
    cdef public list _pool, _flight, _completing, _flight_buffers, _idle
    cdef public int64_t _pool_counter, _recycling, generation, sequence, written_sequence, barrier
    cdef public int64_t backlog_bytes, _marked_sequence, _seen_sequence, flush_count, bytes_written
    cdef public int64_t _size_max, _allocation_began, _allocate_bytes
    cdef public bint _preallocate, _turn
    cdef public object blocked, on_blocked, on_written, on_queued, on_full, on_client_failed
    cdef public tuple _previous, _piece
    cdef public Batch _open
    cdef public object _sealed
    @cython.locals(batch=Batch, size=int64_t, end=int64_t)
    cpdef int64_t add(self, bytes data, int64_t group) except -1
    @cython.locals(place=int64_t)
    cpdef int64_t add_entry(self, object log, bytes data) except -1
    @cython.locals(current=WalFile, batch=Batch, need=int64_t)
    cpdef Batch _open_batch(self, int64_t size)
    @cython.locals(batch=Batch, file=WalFile)
    cpdef seal(self)
    cpdef kick(self)
    @cython.locals(first=Batch, batch=Batch, buffers=list, batches=list, start=int64_t,
                   head=bytes, directory=bytes, recent=RecentGroups)
    cpdef _submit(self)
    @cython.locals(first=Batch, last=Batch, batch=Batch, batches=list, size=int64_t, note=object)
    cpdef _completed(self, object token, int code)
    cpdef bint _has_better_next(self)
    cpdef bint _is_outgrown(self, WalFile current, int64_t need)
    @cython.locals(current=WalFile, piece=tuple)
    cpdef _consider_allocating(self)
