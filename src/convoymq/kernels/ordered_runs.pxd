from libc.stdint cimport int64_t, uint32_t, uint64_t

from convoymq.kernels.batch cimport PublishTarget

cpdef enum:
    # States of a slot: nothing was sent to its partition yet, it takes nothing for now, or it takes
    # records.
    SLOT_NEW = 0
    SLOT_WAIT = 1
    SLOT_SEND = 2

cdef class Slot:
    cdef public int state
    # The client's target, and what waits.
    cdef public PublishTarget sender
    cdef public PublishTarget waiter
    # Records that `sender` was given so far.
    cdef public uint64_t sent
    cdef public Py_ssize_t waiting_bytes
    # What the owner knows of it.
    cdef public object owner
    cdef uint64_t untagged

cdef class OrderedTarget(PublishTarget):
    cdef public bint over
    # Where messages without a key go: -1 as the empty key, or the range of this logical partition,
    # or, with spreads_keyless, one range after the other.
    cdef public int64_t keyless_lp
    cdef public bint spreads_keyless
    cdef uint32_t logical
    cdef uint32_t seed
    # Range i begins at starts[i] and belongs to slots[i].
    cdef uint32_t* starts
    cdef Py_ssize_t count
    cdef list slots

    cpdef int hold(self, Py_ssize_t size) except? -1
    cdef Slot _slot_of(self, unsigned char* key, Py_ssize_t n)
    cdef Slot _slot_at(self, uint32_t partition)
    cdef int _append_record(self, unsigned char* p, Py_ssize_t n, uint64_t tag,
                            int flags) except? -1

# MurmurHash3 x86 32 of n bytes.
cdef uint32_t murmur3(const unsigned char* p, Py_ssize_t n, uint32_t seed) noexcept nogil

# Length of the order key of a record of n bytes, and where it lies: header x-order-key, a string or
# bytes, or else the routing key. 0: there is none.
cdef Py_ssize_t find_order_key(const unsigned char* record, Py_ssize_t n,
                               const unsigned char** key) noexcept

cdef inline uint32_t rotated(uint32_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (32 - bits))
