"""Headers by which deliveries from an ordered topic say where their messages lie.

    x-pid, x-offset, x-lp, x-route-version    integers
    x-order-token                             as `topics.rules.order_token` writes it
    x-late                                    true, where the group had skipped the partition

`x-lp` is computed from the record: nothing in it says so, and whoever publishes cannot lie about
it. It is -1 for a message without a key. Fields of these names that a publisher has set are dropped
(`delivery_encoder`).
"""

import cython
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, store64
from cython.cimports.convoymq.kernels.ordered_runs import find_order_key, murmur3
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t, uint64_t

_PID = cython.declare(bytes, b"\x05x-pidl")
_OFFSET = cython.declare(bytes, b"\x08x-offsetl")
_LP = cython.declare(bytes, b"\x04x-lpl")
_VERSION = cython.declare(bytes, b"\x0fx-route-versionl")
_TOKEN = cython.declare(bytes, b"\x0dx-order-tokenS\x00\x00\x00\x21")
_LATE = cython.declare(bytes, b"\x06x-latet\x01")
_NO_LP = cython.declare(uint64_t, 0xFFFFFFFFFFFFFFFF)
_DIGITS = cython.declare(bytes, b"0123456789abcdef")


@cython.cclass
class Place:
    def __init__(
        self,
        pid: uint64_t,
        base: uint64_t,
        version: uint64_t,
        logical: uint32_t,
        seed: uint32_t,
    ):
        if logical == 0:
            raise ValueError("a topic has at least one logical partition")
        self.pid = pid
        self.base = base
        self.version = version
        self.logical = logical
        self.seed = seed
        self.late = False


@cython.cfunc
@cython.exceptval(check=False)
def _put_number(p: cython.p_uchar, field: bytes, value: uint64_t) -> cython.p_uchar:
    n: cython.Py_ssize_t = len(field)
    string.memcpy(p, bytes_pointer(field), n)
    store64(p + n, value)
    return p + n + 8


@cython.cfunc
@cython.exceptval(check=False)
def _put_digits(p: cython.p_uchar, value: uint64_t) -> cython.p_uchar:
    digits: cython.p_uchar = bytes_pointer(_DIGITS)
    i: cython.int = 16
    while i > 0:
        i -= 1
        p[i] = digits[value & 15]
        value >>= 4
    return p + 16


@cython.cfunc
@cython.exceptval(check=False)
def put_order_fields(
    p: cython.p_uchar,
    place: Place,
    offset: uint64_t,
    record: cython.pointer(cython.const[cython.uchar]),
    n: cython.Py_ssize_t,
) -> cython.p_uchar:
    key: cython.pointer(cython.const[cython.uchar]) = cython.NULL
    length: cython.Py_ssize_t = find_order_key(record, n, cython.address(key))
    lp: uint64_t = _NO_LP
    if length:
        lp = murmur3(key, length, place.seed) % place.logical
    p = _put_number(p, _PID, place.pid)
    p = _put_number(p, _OFFSET, offset)
    p = _put_number(p, _LP, lp)
    p = _put_number(p, _VERSION, place.version)
    size: cython.Py_ssize_t = len(_TOKEN)
    string.memcpy(p, bytes_pointer(_TOKEN), size)
    p = _put_digits(p + size, place.version)
    p[0] = 45  # a dash
    p = _put_digits(p + 1, offset)
    if place.late:
        size = len(_LATE)
        string.memcpy(p, bytes_pointer(_LATE), size)
        p += size
    return p


@cython.cfunc
@cython.exceptval(check=False)
def is_order_field(name: cython.pointer(cython.const[cython.uchar])) -> cython.bint:
    length: cython.int = name[0]
    if length == 5:
        return string.memcmp(name, bytes_pointer(_PID), 6) == 0
    if length == 6:
        return string.memcmp(name, bytes_pointer(_LATE), 7) == 0
    if length == 8:
        return string.memcmp(name, bytes_pointer(_OFFSET), 9) == 0
    if length == 4:
        return string.memcmp(name, bytes_pointer(_LP), 5) == 0
    if length == 15:
        return string.memcmp(name, bytes_pointer(_VERSION), 16) == 0
    return length == 13 and string.memcmp(name, bytes_pointer(_TOKEN), 14) == 0
