# Types of the compiled build; sender.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.kernels.entries cimport Entry
from convoymq.replication.raft.core cimport RaftCore
from convoymq.replication.raft.progress cimport Progress
from convoymq.storage.log cimport GroupLog

cdef class EntrySender:
    cdef public object replica, host, machine, _awaited
    cdef public RaftCore core
    cdef public GroupLog log
    cdef public int64_t group, opening, sample, _sample_ms
    cdef public bint holding, notice_due
    @cython.locals(core=RaftCore, peer=Progress, slow=bint)
    cpdef append(self, Entry entry)
    @cython.locals(core=RaftCore, previous=int64_t, commit=int64_t)
    cpdef _send_append(self, Progress peer, list bodies, int64_t last, int64_t size)
    @cython.locals(core=RaftCore, held=bint)
    cpdef on_answer(self, Progress peer, bint rejected)
    @cython.locals(core=RaftCore, peer=Progress, commit=int64_t)
    cpdef send_notices(self)
