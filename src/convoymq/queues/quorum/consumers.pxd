# Types of the compiled build; consumers.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.group_machine cimport GroupMachine
from convoymq.queues.quorum.runs cimport CheckedOut
from convoymq.queues.sessions cimport Session

cdef class QueueSession(Session):
    cdef public dict consumers

cdef class Consumer:
    cdef public QueueSession session
    cdef public object number
    cdef public int state
    cdef public str tag
    cdef public int64_t window
    cdef public bint no_ack, exclusive, filtered, queued
    cdef public object priority
    cdef public dict arguments
    cdef public uint64_t next_id
    cdef public int64_t limit
    cdef public bytes link
    cdef public CheckedOut checked_out
    cdef public int64_t settled_at_once
    cdef public int64_t turn_limit
    cdef public int64_t turn_ms
    @cython.locals(packed=list)
    cpdef list pack(self, int version)
    @cython.locals(room=int64_t, credit=int64_t)
    cpdef int64_t room(self) except? -1
    cpdef settled(self, int64_t messages, int64_t time_ms, int version)
    cpdef int64_t turn_of(self, int64_t time_ms) except? -1
    cpdef int64_t missing_in_batch(self) except? -1

cdef class Consumers:
    cdef public GroupMachine machine
    cdef public bint single_active, strict, is_reserved
    cdef public dict levels
    cdef public list priorities, waiting
    cdef public Consumer active
    cdef public int64_t count, changes
    cdef public uint64_t last_active_ms
    cpdef serve_last(self, Consumer consumer)
    cpdef serve_no_more(self, Consumer consumer)
    cpdef refresh(self, Consumer consumer)
    @cython.locals(
        oldest=uint64_t, session=QueueSession, consumer=Consumer, held=CheckedOut,
    )
    cpdef uint64_t oldest_live(self) except? 0
