from libc.stdint cimport uint16_t, uint32_t, uint64_t

cdef uint64_t now_us() noexcept nogil

cdef class Histogram:
    cdef uint64_t* counts
    cdef public uint64_t total
    cdef public uint64_t largest
    cdef void record(self, uint64_t value) noexcept

cdef class Ledger:
    cdef unsigned char* confirmed_bits
    cdef unsigned char* seen_bits
    cdef Py_ssize_t size
    cdef public uint64_t confirmed
    cdef public uint64_t unique
    cdef public uint64_t duplicates
    cdef int need(self, uint32_t seq) except *
    cdef int confirm(self, uint32_t seq) except *
    cdef int see(self, uint32_t seq) except *

cdef class _Socket:
    cdef public int fd
    cdef unsigned char* input
    cdef unsigned char* output
    cdef Py_ssize_t filled
    cdef Py_ssize_t out_size
    cdef Py_ssize_t out_from
    cdef Py_ssize_t out_to
    cdef public bint closed
    # Whoever watches the socket was told that it waits to write.
    cdef public bint awaits_write
    cdef public uint64_t bad
    cdef public list others
    cdef public bint measuring
    cdef void flush(self) noexcept
    cdef bint room(self, Py_ssize_t n) noexcept
    cdef bint receive(self) except *
    cdef int scan(self, unsigned char* p, Py_ssize_t n) except *
    cdef int handle(self, int type, unsigned char* p, Py_ssize_t n, int channel) except *
    cdef int other(self, int type, unsigned char* p, Py_ssize_t n, int channel) except *

cdef class Publisher(_Socket):
    cdef unsigned char* template
    cdef Py_ssize_t template_size
    cdef Py_ssize_t stamp_at
    cdef Py_ssize_t number_at
    cdef uint32_t distinct
    cdef uint64_t* times
    cdef uint32_t* seqs
    cdef uint64_t ring
    cdef public Ledger ledger
    cdef uint16_t publisher
    cdef uint16_t run
    cdef public uint64_t window
    cdef Histogram latency
    cdef public uint32_t next_seq
    cdef uint64_t next_tag
    cdef uint64_t low_tag
    cdef uint64_t tag_limit
    cdef public uint64_t outstanding
    cdef list again
    cdef public long long published
    cdef public uint64_t resent
    cdef public uint64_t nacked
    cdef public uint64_t returned
    cdef public uint64_t last_confirm_us
    cdef public uint64_t longest_gap_us
    cdef public uint64_t longest_gap_end_us
    cdef void mark(self, unsigned char* p) noexcept
    cdef int resolve(self, uint64_t tag, bint multiple, bint ok) except *
    cdef int resolve_range(self, uint64_t first, uint64_t tag, bint ok, bint every) except *

cdef class Consumer(_Socket):
    cdef list ledgers
    cdef uint16_t run
    cdef uint64_t ack_every
    cdef bint no_ack
    cdef Histogram latency
    cdef bint verify
    cdef dict last_seq
    cdef uint64_t unacked
    cdef uint64_t last_tag
    cdef uint64_t body_left
    cdef Py_ssize_t stamped
    cdef unsigned char stamp[16]
    cdef bint redelivered_now
    cdef public uint64_t consumed
    cdef public uint64_t redelivered
    cdef public uint64_t foreign
    cdef public uint64_t out_of_order
    cdef public uint64_t gaps
    cdef public uint64_t last_deliver_us
    cdef public uint64_t longest_gap_us
    cdef public uint64_t longest_gap_end_us
    cdef int ack(self) except *
    cdef int delivered(self) except *
