# Values of AMQP 1.0, inlined into the kernels that read performatives and sections; and the heads of
# frames.
from libc.stdint cimport uint32_t

from convoymq.kernels.bytes cimport load32

cdef enum:
    FRAME_HEAD = 8
    PERFORMATIVE_FLOW = 0x13
    PERFORMATIVE_TRANSFER = 0x14
    PERFORMATIVE_DISPOSITION = 0x15

# Enters the list (`short` 0xC0) or map (0xC1) at `at`: fills in where its items begin, and how many
# it says to have, and returns its end; -1 = there is none, or it is cut off.
cdef inline Py_ssize_t enter(
    unsigned char* p, Py_ssize_t* at, Py_ssize_t end, int short, uint32_t* count
) noexcept:
    cdef Py_ssize_t i = at[0]
    cdef Py_ssize_t stop
    if i < end and p[i] == 0x45 and short == 0xC0:
        at[0] = i + 1
        count[0] = 0
        return i + 1
    if end - i >= 3 and p[i] == short:
        stop = i + 2 + <Py_ssize_t>p[i + 1]
        count[0] = p[i + 2]
        at[0] = i + 3
    elif end - i >= 9 and p[i] == short + 0x10:
        stop = i + 5 + <Py_ssize_t>load32(p + i + 1)
        count[0] = load32(p + i + 5)
        at[0] = i + 9
    else:
        return -1
    return stop if at[0] <= stop and stop <= end else -1

# Reads the uint at `at`. Returns the place behind it; -1 = there is none.
cdef inline Py_ssize_t read_uint(
    unsigned char* p, Py_ssize_t at, Py_ssize_t end, uint32_t* number
) noexcept:
    if at >= end:
        return -1
    if p[at] == 0x43:
        number[0] = 0
        return at + 1
    if p[at] == 0x52 and end - at >= 2:
        number[0] = p[at + 1]
        return at + 2
    if p[at] == 0x70 and end - at >= 5:
        number[0] = load32(p + at + 1)
        return at + 5
    return -1
