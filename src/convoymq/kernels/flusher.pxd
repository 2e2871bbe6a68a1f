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
    cdef Py_ssize_t total
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

    # The direct path of inline flushes: whole blocks from a buffer of our own.
    cdef bint direct  # tried at all
    cdef readonly uint64_t inline_count, direct_count, flush_count, flushed_bytes, flush_us
    cdef int direct_fd  # of `direct_file`, O_DIRECT; -1 = none
    cdef object direct_file
    cdef long direct_size  # only inside of this much of it: a direct write must not make it grow
    cdef uint64_t direct_after_us
    cdef unsigned char* stage
    cdef Py_ssize_t staged  # bytes in `stage` that are to be written instead of `iov`; 0 = none
    cdef long stage_base  # file offset of stage[0]
    cdef long stage_end  # file offset up to which `stage` holds what the file does; -1 = nothing

    cdef bint _stage(self) except? -1
    cdef int _open_direct(self) except? -1
    cdef bint flush_staged(self) noexcept nogil
    cdef void loop(self) noexcept nogil
    cdef int timed_flush(self) noexcept nogil
    cdef bint _is_idle(self, uint64_t now)
    cdef int _flush_inline(self) except *
    cdef int flush(self) noexcept nogil
