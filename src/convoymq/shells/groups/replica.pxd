# Types of the compiled build; replica.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.shells.groups.applying cimport Applying
from convoymq.shells.groups.sender cimport EntrySender
from convoymq.shells.groups.serving cimport Serving
from convoymq.shells.groups.snapshots cimport SnapshotTransfers
from convoymq.kernels.batch cimport CommandBuilder
from convoymq.kernels.entries cimport Entry
from convoymq.replication.raft.core cimport RaftCore
from convoymq.replication.raft.progress cimport Progress
from convoymq.storage.log cimport GroupLog

cdef class Replica:
    cdef public object host, machine, sink
    cdef public int64_t group
    cdef public GroupLog log
    cdef public CommandBuilder builder
    cdef public bint batch_due, dead, has_forwarded, opening
    cdef public str faulty, stopped
    cdef public int64_t _transfer_began, _waits_since, _sealed_ms
    cdef public object time, late, fence
    cdef public RaftCore core
    cdef public Applying applying
    cdef public EntrySender sender
    cdef public Serving serving
    cdef public SnapshotTransfers snapshots
    cdef public object lagging, election_timer, versions, changes, damage
    @cython.locals(core=RaftCore, entry=Entry, held=bint)
    cpdef seal(self)
    @cython.locals(core=RaftCore, deferral_ms=int64_t)
    cpdef bint _may_wait(self)
    @cython.locals(core=RaftCore)
    cpdef bint _may_gather(self)
    @cython.locals(core=RaftCore, entries=object, was=int64_t)
    cpdef on_append(self, int sender, bytes data, int64_t term, int64_t previous,
                    int64_t previous_term, int64_t commit)
    @cython.locals(index=int64_t)
    cpdef acknowledge(self)
    cpdef reply(self, int to, int flags, int64_t index, int64_t rejected)
    @cython.locals(core=RaftCore, was=int64_t)
    cpdef on_written(self, int64_t group, int64_t index, int64_t term)
    @cython.locals(core=RaftCore, peer=Progress, was=int64_t)
    cpdef on_append_reply(self, int sender, int flags, int64_t term, int64_t index,
                          int64_t rejected)
    @cython.locals(core=RaftCore)
    cpdef _after(self, int64_t was)
