# Types of the compiled build; deliveries.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.group_machine cimport GroupMachine
from convoymq.queues.quorum.backlog cimport Backlog
from convoymq.queues.quorum.consumers cimport Consumer, Consumers

cdef class Deliveries:
    cdef public GroupMachine machine
    cdef public Backlog backlog
    cdef public Consumers consumers
    cdef public object dead_letters
    @cython.locals(
        ready=int64_t, others=int64_t, turn=int64_t, fair=int64_t, busy=int64_t, missing=int64_t,
        completes=bint, taken=int64_t,
        consumer=Consumer, backlog=Backlog, consumers=Consumers,
    )
    cpdef assign(self)
    @cython.locals(backlog=Backlog, run=tuple, count=uint64_t)
    cpdef uint64_t hand_out(self, Consumer consumer, uint64_t limit, bint hold) except? 0
    @cython.locals(
        backlog=Backlog, index=uint64_t, offset=uint64_t, first=uint64_t, count=uint64_t,
        size=uint64_t, acquired_count=uint64_t, failed_delivery_count=uint64_t, mark=uint64_t,
        message_id=uint64_t,
    )
    cpdef _give(self, Consumer consumer, tuple run, bint hold)
    @cython.locals(run=tuple)
    cpdef release(self, Consumer consumer, int kind, int flags, uint64_t first, uint64_t last)
