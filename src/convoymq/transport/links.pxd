# Types of the compiled build; links.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.kernels.sockets cimport LinkReader, LinkWriter

cdef class _PlainWire:
    cdef public object _loop, _run_input, _sock, totals, on_frames, on_lost
    cdef public int _fd
    cdef public bint _writing, _reading, closed
    cdef public LinkReader reader
    cdef public LinkWriter writer
    cpdef flush(self)

cdef class _Peer:
    cdef public int node
    cdef public object address, hello, watch, outward, outward_life, inward
    cdef public int64_t incarnation, frames_out
    cdef public bint up, formed, leaves, gone, dirty, told_full
    cdef public double half_since, told_clock, full_since
    cdef public list totals
    cdef public object out_id, in_id, relay_out_id, relay_in_id
    cdef public int64_t largest, taken, told, relay_sent, relay_taken, relay_in, relay_told

cdef class Links:
    cdef public object config, address, events, detector, _run_input, _secret, _on_dirty, _log, _tasks
    cdef public object _accept_backlog, _listener, _server, _timer, _contexts, _loop
    cdef public object identity, clock, relay, release, instance, process, read_start, _rejected_text
    cdef public double _rejected_since, _rejected_at
    cdef public int node_id
    cdef public int64_t _backlog_max, _window, _relay_window, _credit_step
    cdef public object is_congested
    cdef public bint formed, lists_itself, _running
    cdef public dict supports, peers, _dials, _refusals
    cdef public set forgotten, full, _pending, _withheld
    cdef public list _dirty
    @cython.locals(peer=_Peer)
    cpdef send(self, int node, bytes frame, object body=*)
    @cython.locals(writer=LinkWriter, queued=int64_t)
    cpdef _queue(self, _Peer peer, bytes frame, object body, bint urgent)
    @cython.locals(peer=_Peer, dirty=list)
    cpdef flush(self)

cpdef bint is_urgent(bytes data) except -1
