from libc.stdint cimport uint32_t, uint64_t

cpdef enum:
    # A message id of a consumer with places: the number of a place, then how far behind the place's
    # base the message lies.
    PLACE_BITS = 40

cdef enum:
    # Bytes of the fields of `put_order_fields`, and what they add to a content header at most.
    ORDER_FIELDS = 133
    PLACE_ROOM = 137

cdef class Place:
    cdef public uint64_t pid
    cdef public uint64_t base
    cdef public uint64_t version
    cdef public bint late
    cdef uint32_t logical
    cdef uint32_t seed

# Writes the fields of a message at p; returns how far it came.
cdef unsigned char* put_order_fields(unsigned char* p, Place place, uint64_t offset,
                                     const unsigned char* record, Py_ssize_t n) noexcept

# True for the name, with its length in front, of a field that `put_order_fields` writes.
cdef bint is_order_field(const unsigned char* name) noexcept
