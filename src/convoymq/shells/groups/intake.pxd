# Types of the compiled build; intake.py is complete without them.
import cython
from convoymq.shells.groups.replica cimport Replica

cdef class FrameIntake:
    cdef public object _host
    cdef public dict _groups, _watched, _early
    @cython.locals(replica=Replica)
    cpdef _take(self, int node, bytes data)
