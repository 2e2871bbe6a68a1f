"""Publisher confirms of a channel: how many targets each publish waits for, and what is due.

A ring has a place for every publish tag from the oldest one that is not answered.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_CHANNEL,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_METHOD,
    AMQP_SIZE,
    BASIC_ACK,
    BASIC_NACK,
    METHOD_ID_SIZE,
)
from cython.cimports.convoymq.kernels.byte_buffer import Buffer, reserve
from cython.cimports.convoymq.kernels.bytes import store16, store32, store64
from cython.cimports.convoymq.kernels.channel_codec import CHANNEL_CLOSING, ChannelCodec
from cython.cimports.convoymq.kernels.connection_buffer import mark_dirty
from cython.cimports.convoymq.kernels.ranges import add_range
from cython.cimports.libc import stdlib
from cython.cimports.libc.stdint import uint16_t, uint64_t


@cython.cfunc
@cython.exceptval(-1)
def grow_ring(codec: ChannelCodec) -> cython.int:
    size: uint64_t = 256 if codec.ring == cython.NULL else (codec.ring_mask + 1) * 2
    made: cython.p_void = stdlib.malloc(size * 2)
    if made == cython.NULL:
        raise MemoryError
    ring: cython.pointer(uint16_t) = cython.cast(cython.pointer(uint16_t), made)
    tag: uint64_t = codec.confirm_low
    while tag < codec.confirm_next:
        ring[tag & (size - 1)] = codec.ring[tag & codec.ring_mask]
        tag += 1
    stdlib.free(codec.ring)
    codec.ring = ring
    codec.ring_mask = size - 1
    return 0


@cython.cfunc
@cython.exceptval(-1)
def expect_confirms(codec: ChannelCodec, tag: uint64_t, count: cython.int) -> cython.int:
    if tag < codec.confirm_low or tag >= codec.confirm_next:
        raise ValueError("publish tag was never given out, or is answered")
    if count < 0 or count >= CONFIRM_COUNT:
        raise ValueError("too many targets for one message")
    if count == 0:
        return resolve_confirms(codec, tag, tag, True)
    codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, count)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def resolve_confirms(
    codec: ChannelCodec, first: uint64_t, last: uint64_t, ok: cython.bint
) -> cython.int:
    if first < codec.confirm_low:
        first = codec.confirm_low
    if last >= codec.confirm_next:
        last = codec.confirm_next - 1
    tag: uint64_t = first
    while tag <= last:
        v: cython.int = codec.ring[tag & codec.ring_mask]
        if v & CONFIRM_COUNT:
            v -= 1
            if not ok:
                v |= CONFIRM_NACK
            codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, v)
            if v & CONFIRM_COUNT == 0:
                add_range(cython.address(codec.done), tag, tag)
        tag += 1
    if codec.done.count and not codec.confirm_dirty:
        codec.confirm_dirty = True
        codec.buffer.confirm_codecs.append(codec)
        mark_dirty(codec.buffer)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _emit_confirm(
    codec: ChannelCodec, nack: cython.bint, tag: uint64_t, multiple: cython.bint
) -> cython.int:
    out: cython.pointer(Buffer) = cython.address(codec.buffer.out)
    reserve(out, CONFIRM_FRAME)
    p: cython.p_uchar = out.p + out.end
    p[0] = AMQP_METHOD
    store16(p + AMQP_CHANNEL, codec.number)
    store32(p + AMQP_SIZE, CONFIRM_FRAME - AMQP_FRAME_OVERHEAD)
    store32(p + AMQP_FRAME_HEAD, BASIC_NACK if nack else BASIC_ACK)
    store64(p + AMQP_FRAME_HEAD + METHOD_ID_SIZE, tag)
    p[CONFIRM_FRAME - 2] = 1 if multiple else 0
    p[CONFIRM_FRAME - 1] = AMQP_END
    out.end += CONFIRM_FRAME
    return 0


@cython.cfunc
@cython.exceptval(-1)
def encode_confirms(codec: ChannelCodec) -> cython.int:
    codec.confirm_dirty = False
    if codec.state == CHANNEL_CLOSING:
        codec.done.count = 0
        return 0
    last: uint64_t = 0
    count: uint64_t = 0
    low: uint64_t = codec.confirm_low
    v: cython.int
    while low < codec.confirm_next:
        v = codec.ring[low & codec.ring_mask]
        if v & CONFIRM_COUNT:
            break
        if v & CONFIRM_ANSWERED == 0:
            if v & CONFIRM_NACK:
                if count:
                    _emit_confirm(codec, False, last, count > 1)
                    count = 0
                _emit_confirm(codec, True, low, False)
            else:
                last = low
                count += 1
        low += 1
    if count:
        _emit_confirm(codec, False, last, count > 1)
    codec.confirm_low = low
    i: cython.Py_ssize_t
    tag: uint64_t
    for i in range(codec.done.count):
        tag = max(codec.done.pairs[2 * i], low)
        while tag <= codec.done.pairs[2 * i + 1]:
            v = codec.ring[tag & codec.ring_mask]
            if v & CONFIRM_COUNT == 0 and v & CONFIRM_ANSWERED == 0:
                _emit_confirm(codec, v & CONFIRM_NACK != 0, tag, False)
                codec.ring[tag & codec.ring_mask] = cython.cast(uint16_t, v | CONFIRM_ANSWERED)
            tag += 1
    codec.done.count = 0
    codec.done.unsorted = False
    return 0
