from libc.stdint cimport uint32_t

from convoymq.kernels.batch cimport Records

# Where the parts of a record stand that change when its message dies.
ctypedef struct Parts:
    unsigned char encoding
    Py_ssize_t exchange_length
    # With its length byte.
    Py_ssize_t key
    Py_ssize_t key_length
    # The header frame's payload and what follows the frame.
    Py_ssize_t header
    Py_ssize_t body
    uint32_t flags
    # Fields of the table of headers; empty without one, where it would stand.
    Py_ssize_t fields
    Py_ssize_t fields_end
    # With its length byte; length 0 = none.
    Py_ssize_t expiration
    Py_ssize_t expiration_length
    Py_ssize_t header_end
    # Flags of ENQUEUE.
    int asks

cdef class FirstDeath:
    cdef bytes exchange
    cdef bytes routing_key
    cdef bytes entry
    cdef bytes first
    cdef bytes last

    cdef Py_ssize_t fields_length(self, Parts* parts) noexcept
    cdef Py_ssize_t record_length(self, Parts* parts, Py_ssize_t n) noexcept
    cdef unsigned char* put_fields(self, unsigned char* q, unsigned char* p, Parts* parts) noexcept
    cdef unsigned char* put_record(
        self, unsigned char* q, unsigned char* p, Parts* parts, Py_ssize_t n
    ) noexcept
    cdef tuple _records(
        self, Records* records, Py_ssize_t first, Py_ssize_t limit, uint32_t* offsets
    )
