# Types of the compiled build; core.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.replication.raft.elections cimport Elections
from convoymq.replication.raft.progress cimport Progress

cdef class RaftCore:
    cdef public int node, group, role, leader, transfer_target, election_ms
    cdef public object log, connected, random, members
    cdef public int64_t replica_number, window_bytes
    cdef public list effects, peers
    # object, not list: negative indexes are used and the build turns their check off.
    cdef public object memberships
    cdef public dict progress
    cdef public Elections elections
    cdef public object changes, lost_data
    cdef public int64_t term, voted_for, durable_term, durable_vote
    cdef public int64_t commit_index, applied_index, match_index, term_start, reject_hint
    cdef public bint reply_due, members_due, pace_due, quarantined, lost_state
    cdef public bint founded
    cpdef bint log_is_up_to_date(self, int64_t last_index, int64_t last_term)
    cpdef bint _may_commit(self, int64_t index)
    cpdef int64_t _own_match(self)
    cpdef int64_t ack_index(self)
    cpdef bint may_vote(self, int candidate)
    cpdef bint may_stand(self)
    cpdef bint may_change_members(self)
    cpdef _truncate(self, int64_t index)
    @cython.locals(last=int64_t, index=int64_t)
    cpdef bint on_append(self, int node, int64_t term, int64_t previous, int64_t previous_term,
                         int64_t commit, object entries) except *
    cpdef int64_t take_reply(self)
    cpdef bint on_commit(self, int node, int64_t term, int64_t commit) except *
    cpdef on_written(self, int64_t index)
    cpdef append_own(self, object entry)
    @cython.locals(peer=Progress)
    cpdef on_append_reply(self, int node, int64_t term, int64_t index, int64_t rejected,
                          bint was_reset=*, bint voteless=*)
    @cython.locals(peer=Progress, index=int64_t, before=int64_t)
    cpdef _advance_commit(self)
    cpdef on_applied(self, int64_t index)
