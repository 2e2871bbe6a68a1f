"""Dispositions and flows of consumers of AMQP 1.0: runs of them that lie in a connection's input.

    frame         u32 size, u8 data offset 2, u8 type 0, u16 channel, performative
    disposition   role true, first, last?, settled true, state, batchable?
    state         accepted, rejected without an error, released, or modified without annotations
    flow          of a link, with all windows and its credit, without drain, echo and properties

Consumers send little else. What is rare or wrong is left to `edges.amqp10.session`, which judges
it. Every length is compared with what is there before it is used.
"""

import cython
from cython.cimports.convoymq.kernels.amqp10_settlements import Flow, Settled
from cython.cimports.convoymq.kernels.amqp10_values import (
    FRAME_HEAD,
    PERFORMATIVE_DISPOSITION,
    PERFORMATIVE_FLOW,
    enter,
    read_uint,
)
from cython.cimports.convoymq.kernels.bytes import load16, load32
from cython.cimports.cpython.bytearray import PyByteArray_AS_STRING
from cython.cimports.libc import string
from cython.cimports.libc.stdint import uint32_t

_HALF = cython.declare(uint32_t, 0x7FFFFFFF)
_FLOW_FIELDS_MIN = cython.declare(uint32_t, 7)
_FLOW_FIELDS_MAX = cython.declare(uint32_t, 11)
_ACCEPTED = cython.declare(cython.int, 0x24)
_MODIFIED = cython.declare(cython.int, 0x27)


@cython.cfunc
@cython.exceptval(check=False)
def _skip_state(
    p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Returns the place behind the outcome at `at`; -1 = it needs a closer look."""
    if end - at < 4 or p[at] != 0 or p[at + 1] != 0x53:
        return -1
    code: cython.int = p[at + 2]
    if code < _ACCEPTED or code > _MODIFIED:
        return -1
    count: uint32_t = 0
    at += 3
    stop: cython.Py_ssize_t = enter(p, cython.address(at), end, 0xC0, cython.address(count))
    if stop < 0 or count > (3 if code == _MODIFIED else 0) or at + count != stop:
        return -1
    i: uint32_t
    for i in range(count):
        # Annotations are the third.
        if p[at + i] < 0x40 or p[at + i] > (0x42 if i < 2 else 0x40):
            return -1
    return stop


@cython.cfunc
@cython.exceptval(check=False)
def _read_disposition(
    found: cython.pointer(Settled), p: cython.p_uchar, n: cython.Py_ssize_t
) -> cython.bint:
    """Reads a performative of n bytes; False = it needs a closer look."""
    at: cython.Py_ssize_t = 3
    count: uint32_t = 0
    stop: cython.Py_ssize_t = enter(p, cython.address(at), n, 0xC0, cython.address(count))
    if stop != n or count < 5 or count > 6 or at >= stop or p[at] != 0x41:
        return False
    at = read_uint(p, at + 1, stop, cython.address(found.first))
    if at < 0 or at >= stop:
        return False
    found.last = found.first
    if p[at] == 0x40:
        at += 1
    else:
        at = read_uint(p, at, stop, cython.address(found.last))
    if at < 0 or at >= stop or p[at] != 0x41 or found.last - found.first > _HALF:
        return False
    found.state = at + 1
    at = found.state_end = _skip_state(p, at + 1, stop)
    if at < 0:
        return False
    if count == 6:
        if at >= stop or p[at] < 0x40 or p[at] > 0x42:
            return False
        at += 1
    return at == stop


@cython.cfunc
@cython.exceptval(check=False)
def _read_flow(found: cython.pointer(Flow), p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
    """Does the same for a flow."""
    at: cython.Py_ssize_t = 3
    count: uint32_t = 0
    number: uint32_t = 0
    stop: cython.Py_ssize_t = enter(p, cython.address(at), n, 0xC0, cython.address(count))
    if stop != n or count < _FLOW_FIELDS_MIN or count > _FLOW_FIELDS_MAX:
        return False
    i: uint32_t
    for i in range(count):
        if i < _FLOW_FIELDS_MIN:
            at = read_uint(p, at, stop, cython.address(found.fields[i]))
            if at < 0:
                return False
        elif at >= stop:
            return False
        elif i == _FLOW_FIELDS_MIN and p[at] != 0x40:
            # What is available at a consumer.
            at = read_uint(p, at, stop, cython.address(number))
            if at < 0:
                return False
        elif p[at] == 0x40 or (p[at] == 0x42 and i < _FLOW_FIELDS_MAX - 1):
            at += 1
        else:
            # Drain, echo, properties.
            return False
    return at == stop


def read_settlements(
    data: bytearray,
    at: cython.Py_ssize_t,
    frame_max: cython.Py_ssize_t,
    channel: uint32_t,
    next_outgoing_id: uint32_t,
):
    base: cython.p_uchar = cython.cast(cython.p_uchar, PyByteArray_AS_STRING(data))
    p: cython.p_uchar
    end: cython.Py_ssize_t = len(data)
    size: cython.Py_ssize_t
    one: Settled
    run: Settled
    flow: Flow
    last_flow: Flow
    state: cython.Py_ssize_t = -1
    state_size: cython.Py_ssize_t = 0
    has_flow: cython.bint = False
    ranges: list = []
    run.first = run.last = 0
    while at >= 0 and end - at > FRAME_HEAD + 3:
        p = base + at
        size = load32(p)
        if size > end - at or size > frame_max or size <= FRAME_HEAD + 3 or p[4] != 2 or p[5]:
            break
        if load16(p + 6) != channel or p[8] or p[9] != 0x53:
            break
        p += FRAME_HEAD
        if p[2] == PERFORMATIVE_DISPOSITION:
            if not _read_disposition(cython.address(one), p, size - FRAME_HEAD):
                break
            if state < 0:
                run = one
                state = at + FRAME_HEAD + one.state
                state_size = one.state_end - one.state
            elif (
                one.state_end - one.state != state_size
                or string.memcmp(base + state, p + one.state, state_size) != 0
            ):
                break
            elif (
                one.first == cython.cast(uint32_t, run.last + 1)
                and cython.cast(uint32_t, one.last - run.first) <= _HALF
            ):
                run.last = one.last
            else:
                ranges.append((run.first, run.last))
                run = one
        elif p[2] == PERFORMATIVE_FLOW:
            if not _read_flow(cython.address(flow), p, size - FRAME_HEAD):
                break
            # A client that knows of transfers to come is at fault.
            if cython.cast(uint32_t, next_outgoing_id - flow.fields[0]) > _HALF:
                break
            if has_flow and flow.fields[4] != last_flow.fields[4]:
                break
            last_flow = flow
            has_flow = True
        else:
            break
        at += size
    if state < 0 and not has_flow:
        return None
    outcome: bytes = b""
    if state >= 0:
        ranges.append((run.first, run.last))
        outcome = cython.cast(cython.p_char, base + state)[:state_size]
    return (
        at,
        ranges,
        outcome,
        tuple([last_flow.fields[i] for i in range(7)]) if has_flow else None,
    )
