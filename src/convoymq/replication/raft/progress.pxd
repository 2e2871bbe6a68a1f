# Types of the compiled build; progress.py is complete without them.
from libc.stdint cimport int64_t

cdef class Progress:
    cdef public int node, state
    cdef public bint voter, voteless, waiting, connected, is_deferred, silent
    cdef public int64_t match, next_index, commit_sent, in_flight_bytes, window_bytes, stalled_ms, stalled_match, owes_ms
    cdef public int64_t held_bytes, goal, goal_ms, lag_told_ms
    cdef int64_t _probed
    cdef object _sent
    cpdef bint may_send(self)
    cpdef sent(self, int64_t last, int64_t size)
    cpdef bint acknowledged(self, int64_t index)
