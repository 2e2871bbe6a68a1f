# Types of the compiled build; machine.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.kernels.command_walk cimport CommandWalk
from convoymq.queues.group_machine cimport GroupMachine
from convoymq.queues.quorum.backlog cimport Backlog
from convoymq.queues.quorum.consumers cimport Consumer, Consumers, QueueSession
from convoymq.queues.quorum.deliveries cimport Deliveries

cdef class QuorumMachine(GroupMachine):
    cdef public Backlog backlog
    cdef public Consumers consumers
    cdef public Deliveries deliveries
    cdef public object reservations, dead_letters, deduplication, delayed, waiting, operations
    cdef public object transactions, links
    cdef public int _attributes
    cdef public bint _deduplicates, is_frozen
    cdef public int64_t announced_due_ms, _expires_ms
    cdef public uint64_t stirred_at
    @cython.locals(
        kind=int, flags=int, count=uint64_t, offset=Py_ssize_t, session=QueueSession,
        walk=CommandWalk, staged=dict,
        backlog=Backlog, consumers=Consumers, deliveries=Deliveries,
    )
    cpdef apply(self, uint64_t index, uint64_t time_ms, bytes data)
    @cython.locals(size=uint64_t, repeated=uint64_t, backlog=Backlog)
    cdef _enqueue(
        self, QueueSession session, uint64_t index, int flags, uint64_t count, bytes data,
        Py_ssize_t offset
    )
    @cython.locals(backlog=Backlog)
    cpdef enqueue_run(
        self, uint64_t index, int flags, uint64_t first, uint64_t count, uint64_t size, bytes data,
        Py_ssize_t offset
    )
    @cython.locals(i=Py_ssize_t, settled=int64_t, deliveries=Deliveries)
    cpdef settle_ranges(self, Consumer consumer, int kind, int flags, list ranges)
    @cython.locals(consumer=Consumer)
    cdef _session_command(
        self, QueueSession session, int kind, int flags, Py_ssize_t count, object arg, bytes data,
        Py_ssize_t offset
    )
