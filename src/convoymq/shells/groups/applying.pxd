# Types of the compiled build; applying.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.shells.groups.sender cimport EntrySender
from convoymq.shells.groups.serving cimport Serving
from convoymq.shells.groups.snapshots cimport SnapshotTransfers
from convoymq.kernels.entries cimport Entry
from convoymq.replication.raft.core cimport RaftCore
from convoymq.storage.log cimport GroupLog

cdef class Applying:
    cdef public object replica, host, machine, versions
    cdef public RaftCore core
    cdef public GroupLog log
    cdef public EntrySender sender
    cdef public Serving serving
    cdef public SnapshotTransfers snapshots
    cdef public int64_t group, commit_latency_ms
    cdef public bint due
    @cython.locals(core=RaftCore, log=GroupLog, machine=object, commit=int64_t, index=int64_t,
                   room=int64_t, term=int64_t, entry=Entry)
    cpdef apply(self)
    @cython.locals(effects=list)
    cpdef carry_out(self)
