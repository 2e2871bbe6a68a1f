# Types of the compiled build; connections.py is complete without them.
from convoymq.kernels.sockets cimport LinkReader, LinkWriter

cdef class PlainConnection:
    cdef public object _loop, _run_input, _sock, totals, on_frames, on_lost
    cdef public int _fd
    cdef public bint _writing, _reading, closed
    cdef public LinkReader reader
    cdef public LinkWriter writer
    cpdef flush(self)
