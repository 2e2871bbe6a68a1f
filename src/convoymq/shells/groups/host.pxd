# Types of the compiled build; host.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.shells.groups.replica cimport Replica
from convoymq.shells.watched cimport Watched

cdef class ReplicaHost:
    cdef public int node
    cdef public int64_t incarnation, now, lease_until_ms
    cdef public object storage, transport, clock, config, on_dirty, core_class, _kick, counters
    cdef public dict groups, stopped, versions, watched, incarnations, supports, removed
    cdef public set reachable, gone, active, full
    cdef public object on_note, on_membership_changed, on_stopped, on_version, after_seal
    cdef public object capacity, forwarding, deferred, await_room, intake, on_frame
    cdef public list _dirty, _apply, _notices
    cdef public bint _woken, _damaged, _queued
    cdef public int64_t _numbers, removals
    cpdef wake(self)
    cpdef mark_dirty(self, object item)
    cpdef mark_apply(self, Replica replica)
    cpdef mark_notice(self, Replica replica)
    @cython.locals(replica=Replica, watched=Watched)
    cpdef _seal(self, object item)
    cpdef end_of_round(self)
    cpdef bint _has_work(self)
    @cython.locals(replica=Replica, dirty=list, due=list, notices=list, item=object)
    cpdef _work_through(self)
