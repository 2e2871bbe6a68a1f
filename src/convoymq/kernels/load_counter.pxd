from libc.stdint cimport uint32_t, uint64_t

cdef struct KeySlot:
    uint64_t count
    uint32_t hash
    # Of the whole key, of which the first bytes are kept.
    uint32_t length
    unsigned char key[64]

cdef class LoadCounter:
    cdef Py_ssize_t lo
    cdef Py_ssize_t width
    cdef uint32_t logical
    cdef uint32_t seed
    cdef readonly uint64_t messages
    cdef readonly uint64_t size
    cdef readonly list hot
    # Messages and bytes of each logical partition, in turn.
    cdef double* weights
    # KEY_SLOTS for each of `lps`.
    cdef KeySlot* slots
    cdef Py_ssize_t lps[8]
    cdef Py_ssize_t watched

    cdef void _watched(self, Py_ssize_t lp, uint32_t hashed, const unsigned char* key,
                       Py_ssize_t length) noexcept
    cdef void _take_key(self, KeySlot* slots, uint32_t hashed, const unsigned char* key,
                        Py_ssize_t length) noexcept
