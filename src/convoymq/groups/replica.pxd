# Types of the compiled build; replica.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.kernels.batch cimport CommandBuilder, Entry
from convoymq.replication.raft.core cimport RaftCore
from convoymq.replication.raft.progress cimport Progress
from convoymq.storage.log cimport GroupLog

cdef class Replica:
    cdef public object host, machine, sink, receiving
    cdef public int64_t group
    cdef public GroupLog log
    cdef public CommandBuilder builder
    cdef public bint apply_due, notice_due, holding, batch_due, dead, _wiping, _version_due, _spread, _deferred, opening
    cdef public str faulty, stopped
    cdef public bytes allowed
    cdef public dict sending, _timers
    cdef public set sending_for
    cdef public object _pristine, _election
    cdef public tuple _known_leader, _stand_in
    cdef public set behind_nodes, lagging_nodes
    cdef public int64_t _follows_since, _asked, _lags_until
    cdef public bint _wanted
    cdef public int64_t _transfer_began, _waits_since, _version_index, _sample, _sample_ms
    cdef public object time, _awaited, late
    cdef public RaftCore core
    @cython.locals(core=RaftCore, entry=Entry)
    cpdef seal(self)
    @cython.locals(core=RaftCore, deferral_ms=int64_t)
    cpdef bint _may_wait(self)
    @cython.locals(core=RaftCore, peer=Progress, slow=bint)
    cpdef _append(self, Entry entry)
    @cython.locals(core=RaftCore, previous=int64_t, commit=int64_t)
    cpdef _send_append(self, Progress peer, list bodies, int64_t last, int64_t size)
    @cython.locals(core=RaftCore, peer=Progress, commit=int64_t)
    cpdef send_notices(self)
    @cython.locals(core=RaftCore, entries=object, was=int64_t)
    cpdef on_append(self, int sender, bytes data, int64_t term, int64_t previous,
                    int64_t previous_term, int64_t commit)
    @cython.locals(index=int64_t)
    cpdef _acknowledge(self)
    cpdef _reply(self, int to, int flags, int64_t index, int64_t rejected)
    @cython.locals(core=RaftCore, was=int64_t)
    cpdef on_written(self, int64_t group, int64_t index, int64_t term)
    @cython.locals(core=RaftCore, peer=Progress, was=int64_t)
    cpdef on_append_reply(self, int sender, int flags, int64_t term, int64_t index,
                          int64_t rejected)
    @cython.locals(core=RaftCore)
    cpdef _after(self, int64_t was)
    @cython.locals(core=RaftCore, log=GroupLog, machine=object, commit=int64_t, index=int64_t,
                   room=int64_t, term=int64_t, entry=Entry)
    cpdef apply(self)
    @cython.locals(effects=list, effect=tuple)
    cpdef _execute(self)
