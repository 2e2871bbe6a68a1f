"""Frames between nodes: a header of the size of an entry's, then the body."""

import cython
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, get32, get64, put32, put64
from cython.cimports.convoymq.kernels.layout import (
    LINK_A,
    LINK_B,
    LINK_C,
    LINK_D,
    LINK_FLAGS,
    LINK_GROUP,
    LINK_HEADER_SIZE,
    LINK_SPARE,
    LINK_SPARE_WORD,
    LINK_TYPE,
)
from cython.cimports.libc.stdint import uint32_t, uint64_t

HEADER_SIZE = LINK_HEADER_SIZE


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def put_header(
    p: cython.p_uchar,
    length: uint32_t,
    type: cython.int,
    flags: cython.int,
    group: uint32_t,
    a: uint64_t,
    b: uint64_t,
    c: uint64_t,
    d: uint64_t,
) -> cython.void:
    put32(p, length)
    p[LINK_TYPE] = cython.cast(cython.uchar, type)
    p[LINK_FLAGS] = cython.cast(cython.uchar, flags)
    p[LINK_SPARE] = 0
    p[LINK_SPARE + 1] = 0
    put32(p + LINK_GROUP, group)
    put32(p + LINK_SPARE_WORD, 0)
    put64(p + LINK_A, a)
    put64(p + LINK_B, b)
    put64(p + LINK_C, c)
    put64(p + LINK_D, d)


def frame(type, flags, group, a, b, c, d, body=b"", body_length=-1):
    size = LINK_HEADER_SIZE + (body_length if body_length >= 0 else len(body))
    if size > 0xFFFFFFFF:
        raise ValueError("a link frame holds at most 4 GiB")
    data: bytes = bytes(LINK_HEADER_SIZE) + body
    put_header(bytes_pointer(data), size, type, flags, group, a, b, c, d)
    return data


def frame_header(data):
    view: bytes = data if type(data) is bytes else bytes(data[:LINK_HEADER_SIZE])
    if len(view) < LINK_HEADER_SIZE:
        raise ValueError("link frame is shorter than its header")
    p: cython.p_uchar = bytes_pointer(view)
    if get32(p) < LINK_HEADER_SIZE:
        raise ValueError("link frame has a wrong length field")
    return (
        get32(p),
        cython.cast(cython.int, p[LINK_TYPE]),
        cython.cast(cython.int, p[LINK_FLAGS]),
        get32(p + LINK_GROUP),
        get64(p + LINK_A),
        get64(p + LINK_B),
        get64(p + LINK_C),
        get64(p + LINK_D),
    )
