from libc.stdint cimport uint64_t

from convoymq.kernels cimport cdisk

cdef class Flusher:
    cdef int wake_fd
    cdef int done_fd
    cdef int method
    cdef bint busy  # submitted and not yet taken
    cdef bint pending  # submitted and not yet written
    cdef bint stopping
    # What the thread reads while `busy`; nobody else touches it then.
    cdef int fd
    cdef long offset
    cdef cdisk.iovec* iov
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity
    cdef int result
    cdef list kept
    cdef object file
    cdef object token
    cdef object thread
    cdef public object on_completed

    cdef bint inline
    cdef bint inlining
    cdef double average_us
    cdef uint64_t ended_us
    cdef uint64_t inline_after_us

    cdef void loop(self) noexcept nogil
    cdef int timed_flush(self) noexcept nogil
    cdef bint _is_idle(self)
    cdef int _flush_inline(self) except *
    cdef int flush(self) noexcept nogil
