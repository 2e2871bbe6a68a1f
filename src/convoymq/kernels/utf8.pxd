# UTF-8, inlined into the kernels that check text for every row.
from libc.stdint cimport uint64_t

from convoymq.kernels.bytes cimport get64

# Whether the bytes are UTF-8 as Python's strict decoder takes it.
cdef inline bint is_utf8(unsigned char* p, Py_ssize_t n) noexcept:
    cdef Py_ssize_t at = 0
    cdef int c
    cdef int d
    while at < n:
        if n - at >= 8 and get64(p + at) & <uint64_t>0x8080808080808080ULL == 0:
            at += 8
            continue
        c = p[at]
        if c < 0x80:
            at += 1
        elif c < 0xC2:
            return False
        elif c < 0xE0:
            if n - at < 2 or p[at + 1] & 0xC0 != 0x80:
                return False
            at += 2
        elif c < 0xF0:
            if n - at < 3 or p[at + 1] & 0xC0 != 0x80 or p[at + 2] & 0xC0 != 0x80:
                return False
            d = p[at + 1]
            # Too long a form, or a surrogate.
            if (c == 0xE0 and d < 0xA0) or (c == 0xED and d >= 0xA0):
                return False
            at += 3
        elif c < 0xF5:
            if (
                n - at < 4
                or p[at + 1] & 0xC0 != 0x80
                or p[at + 2] & 0xC0 != 0x80
                or p[at + 3] & 0xC0 != 0x80
            ):
                return False
            d = p[at + 1]
            if (c == 0xF0 and d < 0x90) or (c == 0xF4 and d >= 0x90):
                return False
            at += 4
        else:
            return False
    return True
