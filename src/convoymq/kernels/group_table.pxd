from libc.stdint cimport int64_t, uint32_t, uint64_t

from convoymq.kernels.message_attributes cimport Asked

# A group, in 64 bytes. Numbers of other groups and of blocked runs are places in their arrays.
cdef struct Group:
    # Where its head was published: entry index; offset, first record.
    uint64_t index, place
    # u8 length, bytes; from INLINE_MAX bytes on a pointer to them at byte 8.
    unsigned char key[16]
    # Its blocked runs, the oldest and the youngest one.
    uint32_t first, last
    # The next one in the same bucket of each table.
    uint32_t next_key, next_head
    # Neighbours among those that have blocked messages.
    uint32_t before, after
    uint32_t hash

# A run of blocked messages of one group, in 28 bytes; its mark lies in an array beside.
cdef struct Blocked:
    uint32_t index_low, index_high, offset, first, count, size, next

# Records that are not blocked, and ask the same: when they are ready (0 = now), body bytes, mark.
cdef struct Piece:
    int64_t due_ms
    uint64_t size, mark

cdef class GroupTable:
    cdef Group* groups
    cdef uint32_t group_capacity, group_end, group_free
    cdef Blocked* blocked
    # NULL = no mark was ever seen.
    cdef uint64_t* marks
    cdef uint32_t blocked_capacity, blocked_end, blocked_free, blocked_used
    # Chained hash tables of mask + 1 buckets.
    cdef uint32_t* by_key
    cdef uint32_t* by_head
    cdef uint32_t mask
    # Groups that have blocked messages, in the order in which they began to.
    cdef uint32_t oldest, youngest
    cdef readonly int64_t heads, messages, size

    cdef unsigned char* _key(self, Group* group) noexcept
    cdef uint32_t _by_name(self, uint32_t hash, unsigned char* p, Py_ssize_t n) noexcept
    cdef uint32_t _at(self, uint64_t index, uint64_t place) noexcept
    cdef void _link_key(self, uint32_t number) noexcept
    cdef void _link_head(self, uint32_t number) noexcept
    cdef void _unlink_head(self, uint32_t number) noexcept
    cdef int _grow_groups(self) except? -1
    cdef int _grow_blocked(self) except? -1
    cdef int _need_marks(self) except? -1
    cdef int _add(self, uint32_t hash, unsigned char* p, Py_ssize_t n, uint64_t index,
                  uint64_t place) except? -1
    cdef void _drop(self, uint32_t number) noexcept
    cdef int _block(self, uint32_t number, uint64_t index, uint64_t place, uint32_t count,
                    uint32_t size, uint64_t mark) except? -1
    cdef void _take(self, uint32_t number, uint32_t limit, Blocked* taken,
                    uint64_t* mark) noexcept
    cdef void _unblock(self, uint32_t number) noexcept
    cdef void _release(self) noexcept
    cdef int _enter(self, Asked* asked, uint64_t index, uint64_t place, uint32_t size,
                    uint64_t mark) except? -1
    cdef void _read(self, unsigned char* p, Py_ssize_t n, int64_t time_ms, int64_t ttl_ms,
                    Asked* asked, Piece* found) noexcept
    cpdef list enqueue(self, bytes data, uint64_t index, Py_ssize_t command, Py_ssize_t first,
                       Py_ssize_t count, int64_t time_ms, int64_t ttl_ms)
    cpdef list leave(self, tuple run)
