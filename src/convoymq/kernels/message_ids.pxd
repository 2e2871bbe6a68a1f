from libc.stdint cimport int64_t, uint32_t, uint64_t

# Place of an id in the hash table: part of its hash, never 0, and where the id lies, modulo 2^32.
# A hash of 0 = the slot is free.
cdef struct Slot:
    uint32_t hash
    uint32_t place

cdef class MessageIdWindow:
    # Ids [start, end) of `ids`, in the order in which they came: u64 time ms, u8 length, bytes.
    cdef unsigned char* ids
    cdef Py_ssize_t start, end, capacity
    # The place of what lies at `start`.
    cdef uint32_t head
    # Open addressing; at least half of the slots are free.
    cdef Slot* slots
    cdef Py_ssize_t mask
    cdef Py_ssize_t known, known_max, bytes_max

    cdef bint _equals(self, Slot* slot, uint32_t hash, unsigned char* p, Py_ssize_t n) noexcept
    cdef bint _has(self, uint32_t hash, unsigned char* p, Py_ssize_t n) noexcept
    cdef void _insert(self, uint32_t hash, uint32_t place) noexcept
    cdef int _grow_slots(self) except? -1
    cdef int _make_room(self, Py_ssize_t n) except? -1
    cdef int _append(self, uint32_t hash, unsigned char* p, Py_ssize_t n, uint64_t time_ms) except? -1
    cdef void _forget_oldest(self) noexcept
    cdef void _release(self) noexcept
    cdef int _repeats(self, unsigned char* p, Py_ssize_t n, uint64_t time_ms,
                      uint64_t* body) except? -1

# 32 bits of SipHash-1-3 of n bytes, with the process's key; never 0.
cdef uint32_t keyed_hash(unsigned char* p, Py_ssize_t n) noexcept
