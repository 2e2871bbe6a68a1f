# The header field by which a message without a body says that its value is null: x-tombstone, of
# the type boolean, true (docs/formats/columnar-protocol.md).
from libc.string cimport memcmp, memcpy

cdef enum:
    TOMBSTONE_NAME_SIZE = 11
    # Length of the name, name, type, value.
    TOMBSTONE_FIELD_SIZE = 14

cdef inline bint is_tombstone_name(const unsigned char* name, Py_ssize_t n) noexcept:
    return n == TOMBSTONE_NAME_SIZE and memcmp(name, b"x-tombstone", TOMBSTONE_NAME_SIZE) == 0

# Whether a field is the marker. It is whole: its value was walked before.
cdef inline bint is_tombstone_field(const unsigned char* field) noexcept:
    if not is_tombstone_name(field + 1, field[0]):
        return False
    return field[1 + TOMBSTONE_NAME_SIZE] == b"t" and field[2 + TOMBSTONE_NAME_SIZE] != 0

# Writes the field; returns the pointer behind it.
cdef inline unsigned char* put_tombstone_field(unsigned char* p) noexcept:
    memcpy(p, b"\x0bx-tombstonet\x01", TOMBSTONE_FIELD_SIZE)
    return p + TOMBSTONE_FIELD_SIZE
