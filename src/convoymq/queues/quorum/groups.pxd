# Types of the compiled build; groups.py is complete without them.
import cython

from convoymq.kernels.group_table cimport GroupTable
from convoymq.queues.quorum.levels cimport Levels

cdef class Groups(GroupTable):
    cdef Levels _levels
    @cython.locals(expires=bint, follower=tuple)
    cpdef bint gone(self, tuple run) except? False
