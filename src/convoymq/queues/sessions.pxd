# Types of the compiled build; sessions.py is complete without them.
import cython
from libc.stdint cimport uint64_t

cdef class Session:
    cdef public object id
    cdef public int node
    cdef public uint64_t seq
    cdef public list replies
    cdef public Py_ssize_t applied_at
    cdef public tuple producer

cdef class SessionTable:
    cdef public list effects
    cdef public uint64_t time_ms, duplicates
    cdef public dict sessions, openings, producers, written
    cdef public Py_ssize_t _requests_known
    cdef public list _touched
    cdef public set _gaps
    cdef public object _nodes
    @cython.locals(session=Session)
    cdef Session _accept(
        self, object session_id, uint64_t seq, int kind, uint64_t count, uint64_t arg
    )
    cdef _answer(self, Session session)
    cpdef _applied(self, Session session)
    @cython.locals(session=Session)
    cdef _end_entry(self)
