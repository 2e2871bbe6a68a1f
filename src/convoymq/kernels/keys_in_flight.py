"""The messages of a partition that a member of a group has begun with, one of each key at a time.

    admit ─▶ no other message of its key ─▶ in flight ──release──▶ gone
         └─▶ waits behind those of its key ──release of the one before──▶ ready ──take──▶ in flight

A key is known by a hash of 64 bits: two keys with one hash wait for each other, and nothing else
happens. A message without a key has the hash 0, waits for none, and is not kept here. Messages lie
in an array of structs, without a Python object for any of them.
"""

import cython
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, get64
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

_NONE = cython.declare(uint32_t, 0xFFFFFFFF)
_CAPACITY_MIN = cython.declare(cython.Py_ssize_t, 64)
_CAPACITY_MAX = cython.declare(cython.Py_ssize_t, 1 << 24)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _mixed(offset: int64_t) -> uint32_t:
    h: uint64_t = cython.cast(uint64_t, offset) * cython.cast(uint64_t, 0x9E3779B97F4A7C15)
    return cython.cast(uint32_t, h >> 32)


@cython.cclass
class KeysInFlight:
    def __cinit__(self):
        self.messages = cython.NULL
        self.by_key = cython.NULL
        self.heap = cython.NULL
        self._clear()

    def __dealloc__(self):
        self._clear()

    # Memory and hash tables.

    @cython.cfunc
    @cython.exceptval(check=False)
    def _clear(self) -> cython.void:
        """Without messages there is no memory."""
        stdlib.free(self.messages)
        stdlib.free(self.by_key)
        stdlib.free(self.heap)
        self.messages = cython.NULL
        self.by_key = self.by_offset = self.heap = cython.NULL
        self.capacity = self.end = 0
        self.mask = 0
        self.free = _NONE
        self.heads = self.waiting = self.ready = 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _grow(self) -> cython.int:
        """Makes room for a message more."""
        if self.free != _NONE or self.end < self.capacity:
            return 0
        wanted: cython.Py_ssize_t = max(self.capacity * 2, _CAPACITY_MIN)
        if wanted > _CAPACITY_MAX:
            raise MemoryError
        word: cython.size_t = cython.sizeof(uint32_t)
        grown: cython.p_void = stdlib.realloc(self.messages, wanted * cython.sizeof(Message))
        if grown == cython.NULL:
            raise MemoryError
        self.messages = cython.cast(cython.pointer(Message), grown)
        grown = stdlib.realloc(self.heap, wanted * word)
        if grown == cython.NULL:
            raise MemoryError
        self.heap = cython.cast(cython.pointer(uint32_t), grown)
        grown = stdlib.malloc(2 * wanted * word)
        if grown == cython.NULL:
            raise MemoryError
        string.memset(grown, 255, 2 * wanted * word)
        stdlib.free(self.by_key)
        self.by_key = cython.cast(cython.pointer(uint32_t), grown)
        self.by_offset = self.by_key + wanted
        self.capacity = wanted
        self.mask = cython.cast(uint32_t, wanted - 1)
        # No place is free: what has a last message is a head.
        number: uint32_t
        for number in range(cython.cast(uint32_t, self.end)):
            if self.messages[number].last != _NONE:
                self._link_key(number)
                if not self.messages[number].ready:
                    self._link_offset(number)
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _link_key(self, number: uint32_t) -> cython.void:
        head: cython.pointer(Message) = self.messages + number
        bucket: uint32_t = cython.cast(uint32_t, head.hash) & self.mask
        head.next_key = self.by_key[bucket]
        self.by_key[bucket] = number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _link_offset(self, number: uint32_t) -> cython.void:
        """The head is in flight."""
        head: cython.pointer(Message) = self.messages + number
        bucket: uint32_t = _mixed(head.offset) & self.mask
        head.next_offset = self.by_offset[bucket]
        self.by_offset[bucket] = number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _unlink_offset(self, number: uint32_t) -> cython.void:
        head: cython.pointer(Message) = self.messages + number
        link: cython.pointer(uint32_t) = self.by_offset + (_mixed(head.offset) & self.mask)
        while link[0] != number:
            link = cython.address(self.messages[link[0]].next_offset)
        link[0] = head.next_offset

    @cython.cfunc
    @cython.exceptval(check=False)
    def _find_key(self, hash: uint64_t) -> uint32_t:
        number: uint32_t = self.by_key[cython.cast(uint32_t, hash) & self.mask]
        while number != _NONE and self.messages[number].hash != hash:
            number = self.messages[number].next_key
        return number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _find_offset(self, offset: int64_t) -> uint32_t:
        if not self.heads:
            return _NONE
        number: uint32_t = self.by_offset[_mixed(offset) & self.mask]
        while number != _NONE and self.messages[number].offset != offset:
            number = self.messages[number].next_offset
        return number

    # Ready messages.

    @cython.cfunc
    @cython.exceptval(check=False)
    def _make_ready(self, number: uint32_t) -> cython.void:
        at: cython.Py_ssize_t = self.ready
        offset: int64_t = self.messages[number].offset
        above: cython.Py_ssize_t
        self.ready += 1
        while at:
            above = (at - 1) >> 1
            if self.messages[self.heap[above]].offset < offset:
                break
            self.heap[at] = self.heap[above]
            at = above
        self.heap[at] = number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _pop_ready(self) -> uint32_t:
        """Returns the ready message with the lowest offset; there is one."""
        found: uint32_t = self.heap[0]
        self.ready -= 1
        number: uint32_t = self.heap[self.ready]
        offset: int64_t = self.messages[number].offset
        at: cython.Py_ssize_t = 0
        below: cython.Py_ssize_t = 1
        while below < self.ready:
            if below + 1 < self.ready and (
                self.messages[self.heap[below + 1]].offset < self.messages[self.heap[below]].offset
            ):
                below += 1
            if offset < self.messages[self.heap[below]].offset:
                break
            self.heap[at] = self.heap[below]
            at = below
            below = 2 * at + 1
        self.heap[at] = number
        return found

    # Messages come and go.

    @cython.ccall
    def admit(
        self,
        batch: int64_t,
        hashes: bytes,
        at: cython.Py_ssize_t,
        first: int64_t,
        end: int64_t,
        room: cython.Py_ssize_t,
        waiting_max: cython.Py_ssize_t,
    ) -> list:
        if at < 0 or end < first or (end - first) > len(hashes) // 8 - at:
            raise ValueError("messages without a hash")
        p: cython.pointer(cython.const[cython.uchar]) = bytes_pointer(hashes) + 8 * at
        offset: int64_t = first
        run: int64_t = -1
        number: uint32_t
        key: uint32_t
        hash: uint64_t
        made: cython.pointer(Message)
        found: list = [first]
        while offset < end and room > 0:
            hash = get64(p)
            if hash == 0:
                # Nothing is behind a message without a key.
                room -= 1
                if run < 0:
                    run = offset
                offset += 1
                p += 8
                continue
            self._grow()
            key = self._find_key(hash)
            if key != _NONE and self.waiting >= waiting_max:
                break
            number = self.free
            if number != _NONE:
                self.free = self.messages[number].next
            else:
                number = cython.cast(uint32_t, self.end)
                self.end += 1
            made = self.messages + number
            made.hash = hash
            made.offset = offset
            made.batch = batch
            made.next = made.last = _NONE
            made.ready = 0
            if key != _NONE:
                self.messages[self.messages[key].last].next = number
                self.messages[key].last = number
                self.waiting += 1
                if run >= 0:
                    found.append(run)
                    found.append(offset)
                    run = -1
            else:
                made.last = number
                self._link_key(number)
                self._link_offset(number)
                self.heads += 1
                room -= 1
                if run < 0:
                    run = offset
            offset += 1
            p += 8
        if run >= 0:
            found.append(run)
            found.append(offset)
        found[0] = offset
        return found

    @cython.ccall
    def take(self, room: cython.Py_ssize_t) -> list:
        found: list = []
        batch: int64_t = 0
        first: int64_t = 0
        end: int64_t = -1
        number: uint32_t
        message: cython.pointer(Message)
        while self.ready and room > 0:
            number = self._pop_ready()
            message = self.messages + number
            message.ready = 0
            self._link_offset(number)
            if message.offset != end or message.batch != batch:
                if end >= 0:
                    found += (batch, first, end)
                batch = message.batch
                first = message.offset
            end = message.offset + 1
            room -= 1
        if end >= 0:
            found += (batch, first, end)
        return found

    @cython.ccall
    @cython.exceptval(-1)
    def release(self, first: int64_t, last: int64_t) -> cython.int:
        offset: int64_t
        number: uint32_t
        for offset in range(first, last + 1):
            number = self._find_offset(offset)
            if number != _NONE:
                self._release(number)
        if not self.heads and self.capacity > _CAPACITY_MIN:
            self._clear()
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _release(self, number: uint32_t) -> cython.void:
        head: cython.pointer(Message) = self.messages + number
        link: cython.pointer(uint32_t) = self.by_key + (
            cython.cast(uint32_t, head.hash) & self.mask
        )
        while link[0] != number:
            link = cython.address(self.messages[link[0]].next_key)
        link[0] = head.next_key
        self._unlink_offset(number)
        following: uint32_t = head.next
        if following != _NONE:
            self.messages[following].last = head.last
            self.messages[following].ready = 1
            self._link_key(following)
            self.waiting -= 1
            self._make_ready(following)
        else:
            self.heads -= 1
        head.last = _NONE
        head.next = self.free
        self.free = number
