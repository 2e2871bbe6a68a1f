"""Text forms of header values: numbers, quoted strings and nested tables, as JSON."""

import cython
from cython.cimports.convoymq.kernels.area import Area, add, reserve
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    load16,
    load32,
    load64,
)
from cython.cimports.convoymq.kernels.content import walk_value
from cython.cimports.convoymq.kernels.utf8 import is_utf8
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t


@cython.cfunc
@cython.exceptval(-1)
def add_text(area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    if is_utf8(p, n):
        return add(area, p, n)
    mended: bytes = copy_bytes(p, n).decode("utf-8", "replace").encode()
    return add(area, bytes_pointer(mended), len(mended))


@cython.cfunc
@cython.exceptval(-1)
def _add_number(area: cython.pointer(Area), v: uint64_t, negative: cython.bint) -> cython.int:
    digits: cython.uchar[24]
    at: cython.int = 24
    while True:
        at -= 1
        digits[at] = cython.cast(cython.uchar, 48 + v % 10)
        v //= 10
        if v == 0:
            break
    if negative:
        at -= 1
        digits[at] = 45
    return add(area, cython.address(digits[at]), 24 - at)


@cython.cfunc
@cython.exceptval(-1)
def _add_signed(area: cython.pointer(Area), v: int64_t) -> cython.int:
    u: uint64_t = cython.cast(uint64_t, v)
    if v < 0:
        return _add_number(area, ~u + 1, True)
    return _add_number(area, u, False)


@cython.cfunc
@cython.exceptval(-1)
def _add_decimal(area: cython.pointer(Area), scale: cython.int, v: uint64_t) -> cython.int:
    """`v` divided by ten to the power of `scale`, with all its digits."""
    start: cython.Py_ssize_t = area.end
    _add_number(area, v, False)
    if scale == 0:
        return 0
    digits: cython.Py_ssize_t = area.end - start
    missing: cython.Py_ssize_t = scale + 1 - digits
    p: cython.p_uchar
    if missing > 0:
        reserve(area, missing)
        p = area.p + start
        string.memmove(p + missing, p, digits)
        string.memset(p, 48, missing)
        area.end += missing
        digits += missing
    reserve(area, 1)
    p = area.p + start + digits - scale
    string.memmove(p + 1, p, scale)
    p[0] = 46
    area.end += 1
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _add_double(area: cython.pointer(Area), v: cython.double) -> cython.int:
    if v != v:
        return add(area, b"NaN", 3)
    if v - v != 0:
        if v > 0:
            return add(area, b"Infinity", 8)
        return add(area, b"-Infinity", 9)
    text: cython.p_char = PyOS_double_to_string(v, 114, 0, Py_DTSF_ADD_DOT_0, cython.NULL)
    try:
        add(area, cython.cast(cython.p_uchar, text), string.strlen(text))
    finally:
        PyMem_Free(text)
    return 0


_HEX = cython.declare(bytes, b"0123456789abcdef")


@cython.cfunc
@cython.exceptval(-1)
def _add_quoted(area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Appends a JSON string."""
    mended: bytes = None
    if not is_utf8(p, n):
        mended = copy_bytes(p, n).decode("utf-8", "replace").encode()
        p = bytes_pointer(mended)
        n = len(mended)
    reserve(area, 6 * n + 2)
    q: cython.p_uchar = area.p + area.end
    hex: cython.p_uchar = bytes_pointer(_HEX)
    q[0] = 34
    at: cython.Py_ssize_t = 1
    i: cython.Py_ssize_t
    for i in range(n):
        c: cython.uchar = p[i]
        if c >= 32 and c != 34 and c != 92:
            q[at] = c
            at += 1
            continue
        q[at] = 92
        at += 2
        if c == 34 or c == 92:
            q[at - 1] = c
        elif c == 8:
            q[at - 1] = 98
        elif c == 9:
            q[at - 1] = 116
        elif c == 10:
            q[at - 1] = 110
        elif c == 12:
            q[at - 1] = 102
        elif c == 13:
            q[at - 1] = 114
        else:
            q[at - 1] = 117
            q[at] = 48
            q[at + 1] = 48
            q[at + 2] = hex[c >> 4]
            q[at + 3] = hex[c & 15]
            at += 4
    q[at] = 34
    area.end += at + 1
    return 0


@cython.cfunc
@cython.exceptval(-1)
def add_json(
    area: cython.pointer(Area), p: cython.p_uchar, n: cython.Py_ssize_t, nested: cython.bint
) -> cython.int:
    code: cython.int = p[0]
    q: cython.p_uchar = p + 1
    v: uint64_t
    f: cython.float
    d: cython.double
    if code == b"S" or code == b"x":
        if nested:
            return _add_quoted(area, p + 5, n - 5)
        return add(area, p + 5, n - 5)
    if code == b"t":
        if q[0]:
            return add(area, b"true", 4)
        return add(area, b"false", 5)
    if code == b"V":
        return add(area, b"null", 4)
    if code == b"b":
        return _add_signed(area, cython.cast(cython.schar, q[0]))
    if code == b"B":
        return _add_number(area, q[0], False)
    if code == b"s":
        return _add_signed(area, cython.cast(cython.short, load16(q)))
    if code == b"u":
        return _add_number(area, load16(q), False)
    if code == b"I":
        return _add_signed(area, cython.cast(cython.int, load32(q)))
    if code == b"i":
        return _add_number(area, load32(q), False)
    if code == b"l" or code == b"L":
        return _add_signed(area, cython.cast(int64_t, load64(q)))
    if code == b"T":
        return _add_number(area, load64(q), False)
    if code == b"D":
        return _add_decimal(area, q[0], load32(q + 1))
    if code == b"f":
        v32: uint32_t = load32(q)
        string.memcpy(cython.address(f), cython.address(v32), 4)
        return _add_double(area, f)
    if code == b"d":
        v = load64(q)
        string.memcpy(cython.address(d), cython.address(v), 8)
        return _add_double(area, d)
    table: cython.bint = code == b"F"
    if table:
        add(area, b"{", 1)
    else:
        add(area, b"[", 1)
    at: cython.Py_ssize_t = 5
    while at < n:
        if at > 5:
            add(area, b",", 1)
        if table:
            _add_quoted(area, p + at + 1, p[at])
            add(area, b":", 1)
            at += 1 + p[at]
        step: cython.Py_ssize_t = walk_value(p + at, n - at, 1)
        if step < 0:
            raise ValueError("header of a record is damaged")
        add_json(area, p + at, step, True)
        at += step
    if table:
        return add(area, b"}", 1)
    return add(area, b"]", 1)
