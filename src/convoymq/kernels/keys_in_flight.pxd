from libc.stdint cimport int64_t, uint32_t, uint64_t

# A message of a key, in 48 bytes. `next` is the one behind it of the same key, or the next free
# place. The first one of its key is a head: then `last` is the last one of the key. A head that is
# not in flight is ready.
cdef struct Message:
    uint64_t hash
    int64_t offset, batch
    uint32_t next, last
    uint32_t next_key, next_offset
    uint32_t ready

cdef class KeysInFlight:
    cdef Message* messages
    cdef Py_ssize_t capacity, end
    cdef uint32_t free
    # Heads by the hash of their key, and those in flight by their offset: 2 ** n buckets each, in one
    # block of memory.
    cdef uint32_t* by_key
    cdef uint32_t* by_offset
    cdef uint32_t mask
    # Ready heads: a binary heap by offset, with room for all messages.
    cdef uint32_t* heap
    cdef readonly Py_ssize_t heads, waiting, ready

    cdef void _clear(self) noexcept
    cdef int _grow(self) except? -1
    cdef void _link_key(self, uint32_t number) noexcept
    cdef void _link_offset(self, uint32_t number) noexcept
    cdef void _unlink_offset(self, uint32_t number) noexcept
    cdef uint32_t _find_key(self, uint64_t hash) noexcept
    cdef uint32_t _find_offset(self, int64_t offset) noexcept
    cdef void _make_ready(self, uint32_t number) noexcept
    cdef uint32_t _pop_ready(self) noexcept
    cdef void _release(self, uint32_t number) noexcept
    cpdef list admit(self, int64_t batch, bytes hashes, Py_ssize_t at, int64_t first, int64_t end,
                     Py_ssize_t room, Py_ssize_t waiting_max)
    cpdef list take(self, Py_ssize_t room)
    cpdef int release(self, int64_t first, int64_t last) except? -1
