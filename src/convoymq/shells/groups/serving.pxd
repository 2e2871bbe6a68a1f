# Types of the compiled build; serving.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.replication.raft.core cimport RaftCore

cdef class Serving:
    cdef public object replica, host
    cdef public RaftCore core
    cdef public int64_t group, follows_since, lags_until, _asked
    cdef public tuple established, serving
    cdef public bint wanted
    @cython.locals(core=RaftCore)
    cpdef leader_of_clients(self)
    @cython.locals(core=RaftCore)
    cpdef establish(self)
