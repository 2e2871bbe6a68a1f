"""The message-ids that a queue remembers: which records of an ENQUEUE command it has had before.

Ids are kept in full and compared byte by byte: two that differ are never taken for one. They lie
packed in the order in which they came, and a hash table finds them. Its hash (SipHash-1-3) has a
key of the process, so nobody can choose ids that collide; what is a repeat does not depend on it.
"""

import os

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_CHANNEL,
    AMQP_FRAME_HEAD,
    BIT_MESSAGE_ID,
    HEADER_BODY_SIZE,
)
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get64,
    load16,
    load64,
    put64,
)
from cython.cimports.convoymq.kernels.content import SPANS, Span, find_header, find_properties
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t

ID_HEAD_BYTES = 9

_HEAD = cython.declare(cython.Py_ssize_t, 9)
_ID_MAX = cython.declare(cython.Py_ssize_t, 255)
_SLOTS_MIN = cython.declare(cython.Py_ssize_t, 16)
_CAPACITY_MIN = cython.declare(cython.Py_ssize_t, 512)
_SIZE_MAX = cython.declare(uint64_t, 0xFFFFFFFF)
_DEAD_LETTER = cython.declare(uint32_t, 0xFFFF)

_KEY = os.urandom(16)
_key_0 = cython.declare(uint64_t, get64(bytes_pointer(_KEY)))
_key_1 = cython.declare(uint64_t, get64(bytes_pointer(_KEY) + 8))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _rotated(v: uint64_t, bits: cython.int) -> uint64_t:
    return (v << bits) | (v >> (64 - bits))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _round(v: cython.pointer(uint64_t)) -> cython.void:
    v[0] += v[1]
    v[2] += v[3]
    v[1] = _rotated(v[1], 13) ^ v[0]
    v[3] = _rotated(v[3], 16) ^ v[2]
    v[0] = _rotated(v[0], 32)
    v[2] += v[1]
    v[0] += v[3]
    v[1] = _rotated(v[1], 17) ^ v[2]
    v[3] = _rotated(v[3], 21) ^ v[0]
    v[2] = _rotated(v[2], 32)


@cython.cfunc
@cython.exceptval(check=False)
def keyed_hash(p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
    """32 bits of SipHash-1-3 of n bytes; never 0."""
    v: uint64_t[4]
    v[0] = _key_0 ^ cython.cast(uint64_t, 0x736F6D6570736575)
    v[1] = _key_1 ^ cython.cast(uint64_t, 0x646F72616E646F6D)
    v[2] = _key_0 ^ cython.cast(uint64_t, 0x6C7967656E657261)
    v[3] = _key_1 ^ cython.cast(uint64_t, 0x7465646279746573)
    word: uint64_t
    tail: uint64_t = cython.cast(uint64_t, n) << 56
    at: cython.Py_ssize_t = 0
    while n - at >= 8:
        word = get64(p + at)
        v[3] ^= word
        _round(v)
        v[0] ^= word
        at += 8
    bits: cython.int = 0
    while at < n:
        tail |= cython.cast(uint64_t, p[at]) << bits
        bits += 8
        at += 1
    v[3] ^= tail
    _round(v)
    v[0] ^= tail
    v[2] ^= 0xFF
    _round(v)
    _round(v)
    _round(v)
    made: uint32_t = cython.cast(uint32_t, v[0] ^ v[1] ^ v[2] ^ v[3])
    return made if made else 1


@cython.cclass
class MessageIdWindow:
    def __cinit__(self):
        self.ids = cython.NULL
        self.slots = cython.NULL
        self.start = self.end = self.capacity = self.mask = self.known = 0
        # Places begin again at 0 after 2^32 bytes of ids: soon, so that tests see it.
        self.head = 0xFFFFFF00

    def __init__(self, known_max, bytes_max):
        if known_max < 1 or not _HEAD + _ID_MAX <= bytes_max < 1 << 31:
            raise ValueError("a window has room for one id at least, and for less than 2 GiB")
        self.known_max = known_max
        self.bytes_max = bytes_max

    def __dealloc__(self):
        stdlib.free(self.ids)
        stdlib.free(self.slots)

    def __len__(self):
        return self.known

    def size_bytes(self):
        return self.end - self.start

    def memory_bytes(self):
        slots: cython.Py_ssize_t = self.mask + 1 if self.slots != cython.NULL else 0
        return self.capacity + slots * cython.sizeof(Slot)

    def oldest_ms(self):
        return get64(self.ids + self.start) if self.known else None

    # The hash table.

    @cython.cfunc
    @cython.exceptval(check=False)
    def _equals(
        self,
        slot: cython.pointer(Slot),
        hash: uint32_t,
        p: cython.p_uchar,
        n: cython.Py_ssize_t,
    ) -> cython.bint:
        if slot.hash != hash:
            return False
        at: cython.p_uchar = self.ids + self.start + cython.cast(uint32_t, slot.place - self.head)
        return at[_HEAD - 1] == n and string.memcmp(at + _HEAD, p, n) == 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _has(self, hash: uint32_t, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.bint:
        if not self.known:
            return False
        i: cython.Py_ssize_t = hash & self.mask
        while self.slots[i].hash:
            if self._equals(self.slots + i, hash, p, n):
                return True
            i = (i + 1) & self.mask
        return False

    @cython.cfunc
    @cython.exceptval(check=False)
    def _insert(self, hash: uint32_t, place: uint32_t) -> cython.void:
        i: cython.Py_ssize_t = hash & self.mask
        while self.slots[i].hash:
            i = (i + 1) & self.mask
        self.slots[i].hash = hash
        self.slots[i].place = place

    @cython.cfunc
    @cython.exceptval(-1)
    def _grow_slots(self) -> cython.int:
        """Makes room for one id more."""
        size: cython.Py_ssize_t = self.mask + 1 if self.slots != cython.NULL else 0
        if (self.known + 1) * 2 <= size:
            return 0
        wanted: cython.Py_ssize_t = size * 2 if size else _SLOTS_MIN
        before: cython.pointer(Slot) = self.slots
        made: cython.pointer(Slot) = cython.cast(
            cython.pointer(Slot), stdlib.calloc(wanted, cython.sizeof(Slot))
        )
        if made == cython.NULL:
            raise MemoryError
        self.slots = made
        self.mask = wanted - 1
        i: cython.Py_ssize_t
        for i in range(size):
            if before[i].hash:
                self._insert(before[i].hash, before[i].place)
        stdlib.free(before)
        return 0

    # The ids.

    @cython.cfunc
    @cython.exceptval(-1)
    def _make_room(self, n: cython.Py_ssize_t) -> cython.int:
        """Makes room for n bytes behind the ids."""
        if self.end + n <= self.capacity:
            return 0
        used: cython.Py_ssize_t = self.end - self.start
        if self.start * 4 < self.capacity or used + n > self.capacity:
            wanted: cython.Py_ssize_t = max(
                self.capacity + (self.capacity >> 1), self.end + n, _CAPACITY_MIN
            )
            grown: cython.p_void = stdlib.realloc(self.ids, wanted)
            if grown == cython.NULL:
                raise MemoryError
            self.ids = cython.cast(cython.p_uchar, grown)
            self.capacity = wanted
        # Rare: a quarter of the memory was forgotten since the last time, or it has grown by half.
        string.memmove(self.ids, self.ids + self.start, used)
        self.start = 0
        self.end = used
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _append(
        self, hash: uint32_t, p: cython.p_uchar, n: cython.Py_ssize_t, time_ms: uint64_t
    ) -> cython.int:
        """Remembers an id that is not known; the oldest ones go where there is no room."""
        while self.known and (
            self.known >= self.known_max or self.end - self.start + _HEAD + n > self.bytes_max
        ):
            self._forget_oldest()
        self._make_room(_HEAD + n)
        self._grow_slots()
        at: cython.p_uchar = self.ids + self.end
        put64(at, time_ms)
        at[_HEAD - 1] = n
        string.memcpy(at + _HEAD, p, n)
        self._insert(hash, self.head + cython.cast(uint32_t, self.end - self.start))
        self.end += _HEAD + n
        self.known += 1
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _forget_oldest(self) -> cython.void:
        at: cython.p_uchar = self.ids + self.start
        n: cython.Py_ssize_t = at[_HEAD - 1]
        hash: uint32_t = keyed_hash(at + _HEAD, n)
        mask: cython.Py_ssize_t = self.mask
        hole: cython.Py_ssize_t = hash & mask
        while self.slots[hole].place != self.head or not self.slots[hole].hash:
            hole = (hole + 1) & mask
        # What stands behind moves up where it may, so that no search ends at the hole.
        i: cython.Py_ssize_t = hole
        while True:
            i = (i + 1) & mask
            if not self.slots[i].hash:
                break
            if ((i - (self.slots[i].hash & mask)) & mask) >= ((i - hole) & mask):
                self.slots[hole] = self.slots[i]
                hole = i
        self.slots[hole].hash = 0
        self.start += _HEAD + n
        self.head += cython.cast(uint32_t, _HEAD + n)
        self.known -= 1
        if not self.known:
            self._release()

    @cython.cfunc
    @cython.exceptval(check=False)
    def _release(self) -> cython.void:
        """An empty window has no memory beyond a small one's."""
        if self.capacity > 64 * _CAPACITY_MIN:
            stdlib.free(self.ids)
            stdlib.free(self.slots)
            self.ids = cython.NULL
            self.slots = cython.NULL
            self.capacity = self.mask = 0
        self.start = self.end = 0

    def forget_until(self, time_ms):
        last: uint64_t = time_ms
        while self.known and get64(self.ids + self.start) <= last:
            self._forget_oldest()

    # Records.

    @cython.cfunc
    @cython.exceptval(-1)
    def _repeats(
        self,
        p: cython.p_uchar,
        n: cython.Py_ssize_t,
        time_ms: uint64_t,
        body: cython.pointer(uint64_t),
    ) -> cython.int:
        """Returns whether a record has an id that is known; otherwise remembers its id, if it has
        one. Fills in its body bytes."""
        body[0] = 0
        size: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
        if at < 0:
            return 0
        spans: Span[SPANS]
        spans[BIT_MESSAGE_ID].n = 0
        if find_properties(p + at, size, BIT_MESSAGE_ID, cython.address(spans[0])) < 0:
            return 0
        body[0] = load64(p + at + HEADER_BODY_SIZE)
        if body[0] > _SIZE_MAX:
            body[0] = 0
        size = spans[BIT_MESSAGE_ID].n - 1
        if size <= 0 or load16(p + at - AMQP_FRAME_HEAD + AMQP_CHANNEL) == _DEAD_LETTER:
            return 0
        message_id: cython.p_uchar = p + at + spans[BIT_MESSAGE_ID].at + 1
        hash: uint32_t = keyed_hash(message_id, size)
        if self._has(hash, message_id, size):
            return 1
        self._append(hash, message_id, size, time_ms)
        return 0

    def new_runs(
        self,
        data: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        time_ms: uint64_t,
    ):
        p: cython.p_uchar = bytes_pointer(data)
        records: Records
        open_records(p, len(data), command, first, count, cython.address(records))
        record: cython.p_uchar
        length: cython.Py_ssize_t = 0
        body: uint64_t = 0
        size: uint64_t = 0
        began: cython.Py_ssize_t = first
        repeated: cython.bint = False
        i: cython.Py_ssize_t
        made: list = []
        for i in range(first, first + count):
            record = record_at(cython.address(records), i, cython.address(length))
            if self._repeats(record, length, time_ms, cython.address(body)):
                repeated = True
                if i > began:
                    made += (began, i - began, size)
                began = i + 1
                size = 0
                continue
            if size + body > _SIZE_MAX:
                made += (began, i - began, size)
                began = i
                size = 0
            size += body
        if not repeated:
            return None
        if first + count > began:
            made += (began, first + count - began, size)
        return made

    # Snapshots.

    def pack(self):
        return copy_bytes(self.ids + self.start, self.end - self.start) if self.known else b""

    def unpack(self, packed: bytes):
        p: cython.p_uchar = bytes_pointer(packed)
        size: cython.Py_ssize_t = len(packed)
        at: cython.Py_ssize_t = 0
        n: cython.Py_ssize_t
        hash: uint32_t
        last_ms: uint64_t = 0
        while self.known:
            self._forget_oldest()
        while at < size:
            n = p[at + _HEAD - 1] if size - at > _HEAD else 0
            if not n or n > size - at - _HEAD or get64(p + at) < last_ms:
                raise ValueError("packed message-ids are damaged")
            last_ms = get64(p + at)
            hash = keyed_hash(p + at + _HEAD, n)
            if self._has(hash, p + at + _HEAD, n):
                raise ValueError("a message-id is remembered twice")
            self._append(hash, p + at + _HEAD, n, last_ms)
            at += _HEAD + n
