# Types of the compiled build; machine.py is complete without them.
import cython
from libc.stdint cimport int64_t, uint64_t

from convoymq.queues.quorum.runs cimport CheckedOut, Fifo, Tail
from convoymq.queues.sessions cimport Session, SessionTable

cdef class QueueSession(Session):
    cdef public dict consumers

cdef class Consumer:
    cdef public QueueSession session
    cdef public object number
    cdef public int state
    cdef public str tag
    cdef public int64_t window
    cdef public bint no_ack, exclusive, queued
    cdef public object priority
    cdef public dict arguments
    cdef public uint64_t next_id
    cdef public CheckedOut checked_out
    cpdef list pack(self)

cdef class QuorumMachine(SessionTable):
    cdef public object trace
    cdef public int version
    cdef public dict settings
    cdef public int64_t delivery_limit
    cdef public bint single_active, strict
    cdef public uint64_t index, last_active_ms
    cdef public Fifo fresh, returned
    cdef public Tail requeued
    cdef public dict down_nodes, dropped
    cdef public dict _levels
    cdef public list _priorities, waiting
    cdef public Consumer active
    cdef public object reservations
    cdef public int64_t unacked, unacked_bytes, consumer_count
    cdef public uint64_t published, delivered, acked, returns, redelivered, purged
    @cython.locals(
        kind=int, flags=int, seq=uint64_t, count=uint64_t, offset=Py_ssize_t, session=QueueSession,
        size=uint64_t, repeated=uint64_t,
    )
    cpdef apply(self, uint64_t index, uint64_t time_ms, bytes data)
    @cython.locals(consumer=Consumer, ranges=list, i=Py_ssize_t)
    cdef _session_command(
        self, QueueSession session, int kind, int flags, Py_ssize_t count, object arg, bytes data,
        Py_ssize_t offset
    )
    cdef _serve_last(self, Consumer consumer)
    cdef _serve_no_more(self, Consumer consumer)
    @cython.locals(
        ready=int64_t, others=int64_t, turn=int64_t, fair=int64_t, taken=int64_t, consumer=Consumer,
    )
    cdef _assign(self)
    @cython.locals(
        source=Fifo, index=uint64_t, offset=uint64_t, first=uint64_t, count=uint64_t, size=uint64_t,
        acquired=uint64_t, delivered=uint64_t, message_id=uint64_t, ahead=uint64_t,
    )
    cdef uint64_t _hand_out(self, Consumer consumer, uint64_t limit, bint hold) except? 0
    @cython.locals(run=tuple)
    cdef _release(self, Consumer consumer, int kind, int failed, uint64_t first, uint64_t last)
    cdef _refresh(self, Consumer consumer)
