# Types of the compiled build; snapshots.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.replication.raft.core cimport RaftCore
from convoymq.storage.log cimport GroupLog

cdef class SnapshotTransfers:
    cdef public object replica, host, receiving
    cdef public RaftCore core
    cdef public GroupLog log
    cdef public int64_t group
    cdef public dict sending
