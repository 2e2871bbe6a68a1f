# Types of the compiled build; host.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.groups.replica cimport Replica
from convoymq.kernels.batch cimport CommandBuilder

cdef class _Line:
    cdef public object items
    cdef public set known
    cdef public int64_t room_at

cdef class Watched:
    cdef public object group, host, late, sink
    cdef public tuple members
    cdef public CommandBuilder builder
    cdef public int64_t leader, term, asked_at, turn
    cdef public bint wanted

cdef class ReplicaHost:
    cdef public int node
    cdef public int64_t incarnation, now
    cdef public object storage, transport, clock, config, on_dirty, core_class, _kick, counters
    cdef public dict groups, stopped, versions, watched, incarnations, supports, _early, _removed
    cdef public set reachable, gone, active, full
    cdef public dict _lines
    cdef public object on_note, on_membership_changed, on_stopped, on_version, after_seal
    cdef public list _dirty, _apply, _notices, _holding, _batches_due, _openings
    cdef public bint _woken, _damaged, _queued, release_due
    cdef public int64_t _numbers, _holding_since, removals
    cdef public object _deferred
    cdef public object _holding_timer
    @cython.locals(replica=Replica)
    cpdef _take(self, int node, bytes data)
    cpdef wake(self)
    cpdef mark_dirty(self, object item)
    cpdef mark_apply(self, Replica replica)
    cpdef mark_notice(self, Replica replica)
    cpdef hold(self, Replica replica)
    cpdef release_between(self)
    @cython.locals(replica=Replica, watched=Watched)
    cpdef _seal(self, object item)
    cpdef end_of_round(self)
    cpdef bint _has_work(self)
    @cython.locals(replica=Replica, dirty=list, due=list, notices=list, item=object)
    cpdef _work_through(self)
