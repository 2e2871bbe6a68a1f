# Types of the compiled build; links.py is complete without them.
import cython
from libc.stdint cimport int64_t

from convoymq.kernels.sockets cimport LinkWriter
from convoymq.transport.credit cimport Credit
from convoymq.transport.peer cimport Peer

cdef class Links:
    cdef public object config, address, events, detector, run_input, _on_dirty, log, tasks, admission, dialler
    cdef public object _accept_backlog, _listener, _server, _timer, contexts, loop
    cdef public object identity, clock, relay, release, instance, process, read_start
    cdef public int node_id
    cdef public int64_t _backlog_max
    cdef public Credit credit
    cdef public object is_congested
    cdef public bint formed, lists_itself, running
    cdef public dict supports, peers
    cdef public set forgotten, full, pending
    cdef public list _dirty
    @cython.locals(peer=Peer)
    cpdef send(self, int node, bytes frame, object body=*)
    @cython.locals(writer=LinkWriter, queued=int64_t)
    cpdef _queue(self, Peer peer, bytes frame, object body, bint urgent)
    @cython.locals(peer=Peer, dirty=list)
    cpdef flush(self)
