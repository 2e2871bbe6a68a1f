from convoymq.kernels.perfclient cimport Consumer, Publisher
from libc.stdint cimport uint32_t, uint64_t

cdef class Fields:
    cdef unsigned char* p
    cdef Py_ssize_t at
    cdef Py_ssize_t end
    cdef long long left
    cdef int begin(self, unsigned char* p, Py_ssize_t n) noexcept
    cdef Py_ssize_t size(self, Py_ssize_t at) noexcept
    cdef unsigned char* next(self) noexcept
    cdef uint32_t uint(self, uint32_t fallback) noexcept
    cdef bint flag(self, bint fallback) noexcept

cdef class Publisher10(Publisher):
    cdef Fields fields
    cdef Py_ssize_t id_at
    cdef Py_ssize_t tag_at
    cdef uint64_t transfers
    cdef uint64_t session_limit
    cdef uint64_t link_limit
    cdef int settled(self, Fields fields) except *
    cdef int flow(self, Fields fields) except *

cdef class Consumer10(Consumer):
    cdef Fields fields
    cdef uint32_t window
    cdef uint64_t count
    cdef uint64_t granted
    cdef uint64_t received
    cdef uint32_t first_id
    cdef bint whole
    cdef bint modified
    cdef int look(self, unsigned char* p, Py_ssize_t n) except *
    cdef int grant(self) except *
