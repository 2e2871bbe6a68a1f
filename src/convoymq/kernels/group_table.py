"""The message groups of a queue: which message of each may go, and which are blocked behind it.

Groups and blocked runs lie in arrays of structs, without a Python object for any of them. Two hash
tables find a group: by its key, and by the place of its head.
"""

from hashlib import blake2b

import cython
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, copy_bytes
from cython.cimports.convoymq.kernels.message_attributes import (
    Asked,
    find_headers,
    read_attributes,
)
from cython.cimports.convoymq.kernels.message_ids import keyed_hash
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint32_t, uint64_t

KEY_BYTES_MAX = 64

_KEY_MAX = cython.declare(cython.Py_ssize_t, 64)
_INLINE_MAX = cython.declare(cython.Py_ssize_t, 15)
_NONE = cython.declare(uint32_t, 0xFFFFFFFF)
_LOW = cython.declare(uint64_t, 0xFFFFFFFF)
_CAPACITY_MIN = cython.declare(uint32_t, 16)
_LEVEL_BITS = cython.declare(cython.int, 5)
_LEVEL_DEFAULT = cython.declare(cython.int, 4)
_DELAY_MS_MAX = cython.declare(int64_t, 315360000000)
_TIME_MS_MAX = cython.declare(int64_t, (1 << 48) - 1)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _bucket(index: uint64_t, place: uint64_t) -> uint32_t:
    h: uint64_t = index * cython.cast(uint64_t, 0x9E3779B97F4A7C15)
    h ^= place * cython.cast(uint64_t, 0xC2B2AE3D27D4EB4F)
    h ^= h >> 29
    h *= cython.cast(uint64_t, 0x9FB21C651E98DF25)
    return cython.cast(uint32_t, h >> 32)


@cython.cfunc
def _run(blocked: cython.pointer(Blocked), mark: uint64_t) -> tuple:
    index: uint64_t = cython.cast(uint64_t, blocked.index_high) << 32 | blocked.index_low
    return index, blocked.offset, blocked.first, blocked.count, blocked.size, 0, 0, mark


@cython.cclass
class GroupTable:
    def __cinit__(self):
        self.groups = cython.NULL
        self.blocked = cython.NULL
        self.marks = cython.NULL
        self.by_key = cython.NULL
        self.by_head = cython.NULL
        self.heads = 0
        self._release()

    def __dealloc__(self):
        self._release()

    @cython.cfunc
    @cython.exceptval(check=False)
    def _release(self) -> cython.void:
        """An empty table has no memory. Its groups must have been dropped."""
        number: uint32_t
        if self.heads:
            for number in range(self.group_end):
                if self.groups[number].hash and self.groups[number].key[0] > _INLINE_MAX:
                    stdlib.free(self._key(self.groups + number))
        stdlib.free(self.groups)
        stdlib.free(self.blocked)
        stdlib.free(self.marks)
        stdlib.free(self.by_key)
        stdlib.free(self.by_head)
        self.groups = cython.NULL
        self.blocked = cython.NULL
        self.marks = cython.NULL
        self.by_key = cython.NULL
        self.by_head = cython.NULL
        self.group_capacity = self.group_end = self.mask = 0
        self.blocked_capacity = self.blocked_end = self.blocked_used = 0
        self.group_free = self.blocked_free = self.oldest = self.youngest = _NONE
        self.heads = self.messages = self.size = 0

    # The hash tables.

    @cython.cfunc
    @cython.exceptval(check=False)
    def _key(self, group: cython.pointer(Group)) -> cython.p_uchar:
        p: cython.p_uchar
        if group.key[0] <= _INLINE_MAX:
            return cython.address(group.key[1])
        string.memcpy(cython.address(p), cython.address(group.key[8]), cython.sizeof(p))
        return p

    @cython.cfunc
    @cython.exceptval(check=False)
    def _by_name(self, hash: uint32_t, p: cython.p_uchar, n: cython.Py_ssize_t) -> uint32_t:
        if self.by_key == cython.NULL:
            return _NONE
        number: uint32_t = self.by_key[hash & self.mask]
        while number != _NONE:
            group: cython.pointer(Group) = self.groups + number
            if group.hash == hash and group.key[0] == n:
                if string.memcmp(self._key(group), p, n) == 0:
                    return number
            number = group.next_key
        return _NONE

    @cython.cfunc
    @cython.exceptval(check=False)
    def _at(self, index: uint64_t, place: uint64_t) -> uint32_t:
        if self.by_head == cython.NULL:
            return _NONE
        number: uint32_t = self.by_head[_bucket(index, place) & self.mask]
        while number != _NONE:
            if self.groups[number].place == place and self.groups[number].index == index:
                return number
            number = self.groups[number].next_head
        return _NONE

    @cython.cfunc
    @cython.exceptval(check=False)
    def _link_key(self, number: uint32_t) -> cython.void:
        bucket: uint32_t = self.groups[number].hash & self.mask
        self.groups[number].next_key = self.by_key[bucket]
        self.by_key[bucket] = number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _link_head(self, number: uint32_t) -> cython.void:
        group: cython.pointer(Group) = self.groups + number
        bucket: uint32_t = _bucket(group.index, group.place) & self.mask
        group.next_head = self.by_head[bucket]
        self.by_head[bucket] = number

    @cython.cfunc
    @cython.exceptval(check=False)
    def _unlink_head(self, number: uint32_t) -> cython.void:
        group: cython.pointer(Group) = self.groups + number
        link: cython.pointer(uint32_t) = self.by_head + (
            _bucket(group.index, group.place) & self.mask
        )
        while link[0] != number:
            link = cython.address(self.groups[link[0]].next_head)
        link[0] = group.next_head

    # Memory.

    @cython.cfunc
    @cython.exceptval(-1)
    def _grow_groups(self) -> cython.int:
        """Makes room for a group more."""
        if self.group_free != _NONE or self.group_end < self.group_capacity:
            return 0
        wanted: uint32_t = max(self.group_capacity + (self.group_capacity >> 2), _CAPACITY_MIN)
        grown: cython.p_void = stdlib.realloc(self.groups, wanted * cython.sizeof(Group))
        if grown == cython.NULL:
            raise MemoryError
        self.groups = cython.cast(cython.pointer(Group), grown)
        if self.by_key == cython.NULL or wanted > self.mask + 1:
            buckets: uint32_t = _CAPACITY_MIN
            while buckets < wanted:
                buckets <<= 1
            size: cython.size_t = buckets * cython.sizeof(uint32_t)
            keys: cython.p_void = stdlib.malloc(size)
            heads: cython.p_void = stdlib.malloc(size)
            if keys == cython.NULL or heads == cython.NULL:
                stdlib.free(keys)
                stdlib.free(heads)
                raise MemoryError
            stdlib.free(self.by_key)
            stdlib.free(self.by_head)
            self.by_key = cython.cast(cython.pointer(uint32_t), keys)
            self.by_head = cython.cast(cython.pointer(uint32_t), heads)
            self.mask = buckets - 1
            string.memset(keys, 255, size)
            string.memset(heads, 255, size)
            # No place is free: all of them are groups.
            number: uint32_t
            for number in range(self.group_end):
                self._link_key(number)
                self._link_head(number)
        self.group_capacity = wanted
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _grow_blocked(self) -> cython.int:
        """Makes room for a blocked run more."""
        if self.blocked_free != _NONE or self.blocked_end < self.blocked_capacity:
            return 0
        wanted: uint32_t = max(self.blocked_capacity + (self.blocked_capacity >> 2), _CAPACITY_MIN)
        grown: cython.p_void
        if self.marks != cython.NULL:
            grown = stdlib.realloc(self.marks, wanted * cython.sizeof(uint64_t))
            if grown == cython.NULL:
                raise MemoryError
            self.marks = cython.cast(cython.pointer(uint64_t), grown)
        grown = stdlib.realloc(self.blocked, wanted * cython.sizeof(Blocked))
        if grown == cython.NULL:
            raise MemoryError
        self.blocked = cython.cast(cython.pointer(Blocked), grown)
        self.blocked_capacity = wanted
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _need_marks(self) -> cython.int:
        if self.marks == cython.NULL:
            made: cython.p_void = stdlib.calloc(self.blocked_capacity, cython.sizeof(uint64_t))
            if made == cython.NULL:
                raise MemoryError
            self.marks = cython.cast(cython.pointer(uint64_t), made)
        return 0

    # Groups.

    @cython.cfunc
    @cython.exceptval(-1)
    def _add(
        self,
        hash: uint32_t,
        p: cython.p_uchar,
        n: cython.Py_ssize_t,
        index: uint64_t,
        place: uint64_t,
    ) -> cython.int:
        """A group that was not known, with its head."""
        self._grow_groups()
        name: cython.p_uchar = cython.NULL
        if n > _INLINE_MAX:
            name = cython.cast(cython.p_uchar, stdlib.malloc(n))
            if name == cython.NULL:
                raise MemoryError
            string.memcpy(name, p, n)
        number: uint32_t = self.group_free
        if number != _NONE:
            self.group_free = self.groups[number].next_key
        else:
            number = self.group_end
            self.group_end += 1
        group: cython.pointer(Group) = self.groups + number
        group.index = index
        group.place = place
        group.key[0] = n
        if name != cython.NULL:
            string.memcpy(cython.address(group.key[8]), cython.address(name), cython.sizeof(name))
        else:
            string.memcpy(cython.address(group.key[1]), p, n)
        group.first = group.last = group.before = group.after = _NONE
        group.hash = hash
        self._link_key(number)
        self._link_head(number)
        self.heads += 1
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _drop(self, number: uint32_t) -> cython.void:
        """Forgets a group that has no message; its head is not linked any more."""
        group: cython.pointer(Group) = self.groups + number
        link: cython.pointer(uint32_t) = self.by_key + (group.hash & self.mask)
        while link[0] != number:
            link = cython.address(self.groups[link[0]].next_key)
        link[0] = group.next_key
        if group.key[0] > _INLINE_MAX:
            stdlib.free(self._key(group))
        group.hash = 0
        group.next_key = self.group_free
        self.group_free = number
        self.heads -= 1
        if not self.heads:
            if self.group_capacity > _CAPACITY_MIN or self.blocked_capacity > _CAPACITY_MIN:
                self._release()
            else:
                self.group_free = _NONE
                self.group_end = 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _block(
        self,
        number: uint32_t,
        index: uint64_t,
        place: uint64_t,
        count: uint32_t,
        size: uint32_t,
        mark: uint64_t,
    ) -> cython.int:
        """A run goes behind all others of its group."""
        self._grow_blocked()
        if mark:
            self._need_marks()
        group: cython.pointer(Group) = self.groups + number
        last: cython.pointer(Blocked)
        self.messages += count
        self.size += size
        if group.last != _NONE:
            last = self.blocked + group.last
            if (
                last.first + last.count == cython.cast(uint32_t, place)
                and last.offset == cython.cast(uint32_t, place >> 32)
                and last.index_low == cython.cast(uint32_t, index)
                and last.index_high == cython.cast(uint32_t, index >> 32)
                and cython.cast(uint64_t, last.size) + size <= _LOW
                and (self.marks == cython.NULL or self.marks[group.last] == mark)
            ):
                last.count += count
                last.size += size
                return 0
        at: uint32_t = self.blocked_free
        if at != _NONE:
            self.blocked_free = self.blocked[at].next
        else:
            at = self.blocked_end
            self.blocked_end += 1
        self.blocked_used += 1
        made: cython.pointer(Blocked) = self.blocked + at
        made.index_low = cython.cast(uint32_t, index)
        made.index_high = cython.cast(uint32_t, index >> 32)
        made.offset = cython.cast(uint32_t, place >> 32)
        made.first = cython.cast(uint32_t, place)
        made.count = count
        made.size = size
        made.next = _NONE
        if self.marks != cython.NULL:
            self.marks[at] = mark
        if group.last != _NONE:
            self.blocked[group.last].next = at
            group.last = at
            return 0
        group.first = group.last = at
        group.before = self.youngest
        group.after = _NONE
        if self.youngest != _NONE:
            self.groups[self.youngest].after = number
        else:
            self.oldest = number
        self.youngest = number
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _take(
        self,
        number: uint32_t,
        limit: uint32_t,
        taken: cython.pointer(Blocked),
        mark: cython.pointer(uint64_t),
    ) -> cython.void:
        """Takes at most `limit` messages of the oldest blocked run of a group that has one."""
        group: cython.pointer(Group) = self.groups + number
        at: uint32_t = group.first
        run: cython.pointer(Blocked) = self.blocked + at
        taken[0] = run[0]
        mark[0] = self.marks[at] if self.marks != cython.NULL else 0
        if run.count > limit:
            taken.count = limit
            taken.size = cython.cast(uint32_t, cython.cast(uint64_t, run.size) * limit // run.count)
            run.first += limit
            run.count -= limit
            run.size -= taken.size
        else:
            group.first = run.next
            run.next = self.blocked_free
            self.blocked_free = at
            self.blocked_used -= 1
            if group.first == _NONE:
                group.last = _NONE
                self._unblock(number)
        self.messages -= taken.count
        self.size -= taken.size

    @cython.cfunc
    @cython.exceptval(check=False)
    def _unblock(self, number: uint32_t) -> cython.void:
        """A group has no blocked messages any more."""
        group: cython.pointer(Group) = self.groups + number
        if group.before != _NONE:
            self.groups[group.before].after = group.after
        else:
            self.oldest = group.after
        if group.after != _NONE:
            self.groups[group.after].before = group.before
        else:
            self.youngest = group.before

    # Messages come.

    @cython.cfunc
    @cython.exceptval(-1)
    def _enter(
        self,
        asked: cython.pointer(Asked),
        index: uint64_t,
        place: uint64_t,
        size: uint32_t,
        mark: uint64_t,
    ) -> cython.int:
        """Takes a message of a group; whether it is blocked."""
        name: cython.p_uchar = asked.group
        length: cython.Py_ssize_t = asked.group_length
        digest: bytes = b""
        if length > _KEY_MAX:
            digest = blake2b(copy_bytes(name, length)).digest()
            name = bytes_pointer(digest)
            length = len(digest)
        hash: uint32_t = keyed_hash(name, length)
        number: uint32_t = self._by_name(hash, name, length)
        if number == _NONE:
            return self._add(hash, name, length, index, place)
        self._block(number, index, place, 1, size, mark)
        return 1

    @cython.cfunc
    @cython.exceptval(check=False)
    def _read(
        self,
        p: cython.p_uchar,
        n: cython.Py_ssize_t,
        time_ms: int64_t,
        ttl_ms: int64_t,
        asked: cython.pointer(Asked),
        found: cython.pointer(Piece),
    ) -> cython.void:
        """Reads one record: what it asks for by headers, and a piece of its own."""
        level: cython.int = 0
        expiration: int64_t = 0
        find_headers(p, n, asked)
        read_attributes(
            p,
            n,
            cython.address(level),
            cython.address(expiration),
            cython.address(found.size),
        )
        if found.size > _LOW:
            found.size = 0
        if expiration < 0 or 0 <= ttl_ms < expiration:
            expiration = ttl_ms
        found.mark = level ^ _LEVEL_DEFAULT
        if expiration >= 0:
            found.mark |= cython.cast(uint64_t, time_ms + max(expiration, 1)) << _LEVEL_BITS
        found.due_ms = 0
        if asked.kind == 1:
            found.due_ms = time_ms + min(asked.number, _DELAY_MS_MAX)
        elif asked.kind == 2:
            found.due_ms = min(asked.number, _TIME_MS_MAX)
        if found.due_ms <= time_ms:
            found.due_ms = 0

    @cython.ccall
    def enqueue(
        self,
        data: bytes,
        index: uint64_t,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        time_ms: int64_t,
        ttl_ms: int64_t,
    ) -> list:
        records: Records
        open_records(bytes_pointer(data), len(data), command, first, count, cython.address(records))
        record: cython.p_uchar
        length: cython.Py_ssize_t = 0
        asked: Asked
        found: Piece
        # Records from `began` on that are not blocked, and ask the same.
        run: Piece
        run.due_ms = run.mark = run.size = 0
        began: cython.Py_ssize_t = first
        blocked: cython.bint
        i: cython.Py_ssize_t
        made: list = []
        for i in range(first, first + count):
            record = record_at(cython.address(records), i, cython.address(length))
            self._read(
                record, length, time_ms, ttl_ms, cython.address(asked), cython.address(found)
            )
            blocked = (
                not found.due_ms
                and asked.group_length >= 0
                and self._enter(
                    cython.address(asked),
                    index,
                    cython.cast(uint64_t, command) << 32 | cython.cast(uint64_t, i),
                    cython.cast(uint32_t, found.size),
                    found.mark,
                )
            )
            if i > began and (
                blocked
                or found.mark != run.mark
                or found.due_ms != run.due_ms
                or run.size + found.size > _LOW
            ):
                made += (run.due_ms, began, i - began, run.size, run.mark)
                began = i
                run.size = 0
            if blocked:
                began = i + 1
                continue
            found.size += run.size
            run = found
        if first + count > began:
            made += (run.due_ms, began, first + count - began, run.size, run.mark)
        return made

    # They come back, and go.

    def parts(self, run: tuple):
        index: uint64_t = run[0]
        place: uint64_t = run[1] << 32 | run[2]
        count: uint64_t = run[3]
        size: uint64_t = run[4]
        i: uint64_t
        began: uint64_t = 0
        low: uint64_t
        high: uint64_t
        grouped: cython.bint = self._at(index, place) != _NONE
        made: list = []
        for i in range(1, count + 1):
            if i < count and (self._at(index, place + i) != _NONE) == grouped:
                continue
            low = size * began // count
            high = size * i // count
            part = (*run[:2], run[2] + began, i - began, high - low, *run[5:])
            made.append((part, bool(grouped)))
            began = i
            grouped = not grouped
        return made

    @cython.ccall
    def leave(self, run: tuple) -> list:
        index: uint64_t = run[0]
        offset: uint64_t = run[1]
        place: uint64_t = run[2]
        count: uint64_t = run[3]
        place |= offset << 32
        i: uint64_t
        number: uint32_t
        group: cython.pointer(Group)
        made: list = []
        next: Blocked
        mark: uint64_t = 0
        # What was freed last, and may go on.
        freed: Blocked
        freed.count = 0
        freed_mark: uint64_t = 0
        for i in range(count):
            if not self.heads:
                break
            number = self._at(index, place + i)
            if number == _NONE:
                continue
            self._unlink_head(number)
            group = self.groups + number
            if group.first == _NONE:
                self._drop(number)
                continue
            self._take(number, 1, cython.address(next), cython.address(mark))
            group.index = cython.cast(uint64_t, next.index_high) << 32 | next.index_low
            group.place = cython.cast(uint64_t, next.offset) << 32 | next.first
            self._link_head(number)
            if (
                freed.count
                and next.first == freed.first + freed.count
                and next.offset == freed.offset
                and next.index_low == freed.index_low
                and next.index_high == freed.index_high
                and mark == freed_mark
                and cython.cast(uint64_t, next.size) + freed.size <= _LOW
            ):
                freed.count += 1
                freed.size += next.size
                continue
            if freed.count:
                made.append(_run(cython.address(freed), freed_mark))
            freed = next
            freed_mark = mark
        if freed.count:
            made.append(_run(cython.address(freed), freed_mark))
        return made

    def take_blocked(self, limit: uint32_t):
        if self.oldest == _NONE or not limit:
            raise ValueError("nothing is blocked")
        taken: Blocked
        mark: uint64_t = 0
        self._take(self.oldest, limit, cython.address(taken), cython.address(mark))
        return _run(cython.address(taken), mark)

    def blocked_amount(self):
        if self.oldest == _NONE:
            raise ValueError("nothing is blocked")
        run: cython.pointer(Blocked) = self.blocked + self.groups[self.oldest].first
        return run.count, run.size

    def purge(self, held: list):
        dropped = self.messages
        kept: list = []
        number: uint32_t
        index: uint64_t
        place: uint64_t
        i: uint64_t
        count: uint64_t
        for run in held:
            index = run[0]
            place = run[1] << 32 | run[2]
            count = run[3]
            for i in range(count):
                number = self._at(index, place + i)
                if number != _NONE:
                    kept.append((index, place + i, self._name(number)))
        self._release()
        self.restore(kept, [])
        return dropped

    # Looking at it.

    def _name(self, number: uint32_t):
        group: cython.pointer(Group) = self.groups + number
        return copy_bytes(self._key(group), group.key[0])

    def _blocked_of(self, number: uint32_t):
        at: uint32_t = self.groups[number].first
        made: list = []
        while at != _NONE:
            mark: uint64_t = self.marks[at] if self.marks != cython.NULL else 0
            made.append(_run(self.blocked + at, mark))
            at = self.blocked[at].next
        return made

    def blocked_runs(self):
        return [run for runs in self.blocked_by_key().values() for run in runs]

    def blocked_by_key(self):
        number: uint32_t = self.oldest
        made: dict = {}
        while number != _NONE:
            made[self._name(number)] = self._blocked_of(number)
            number = self.groups[number].after
        return made

    def indexes(self):
        number: uint32_t = self.oldest
        at: uint32_t
        made: set = set()
        while number != _NONE:
            at = self.groups[number].first
            while at != _NONE:
                made.add(
                    cython.cast(uint64_t, self.blocked[at].index_high) << 32
                    | self.blocked[at].index_low
                )
                at = self.blocked[at].next
            number = self.groups[number].after
        return made

    def oldest_index(self):
        if self.oldest == _NONE:
            return None
        run: cython.pointer(Blocked) = self.blocked + self.groups[self.oldest].first
        return cython.cast(uint64_t, run.index_high) << 32 | run.index_low

    def keys(self):
        number: uint32_t
        made: dict = {}
        for number in range(self.group_end):
            if self.groups[number].hash:
                place = self.groups[number].index, self.groups[number].place
                made[place] = self._name(number)
        return made

    def run_count(self):
        return self.heads + self.blocked_used

    def memory_bytes(self):
        words: cython.size_t = 0
        if self.by_key != cython.NULL:
            words += 2 * (cython.cast(cython.size_t, self.mask) + 1) * cython.sizeof(uint32_t)
        if self.marks != cython.NULL:
            words += self.blocked_capacity * cython.sizeof(uint64_t)
        words += self.group_capacity * cython.sizeof(Group)
        return words + self.blocked_capacity * cython.sizeof(Blocked)

    def restore(self, heads: list, blocked: list):
        if self.heads:
            raise ValueError("groups are restored over others")
        key: bytes
        number: uint32_t
        hash: uint32_t
        for index, place, key in heads:
            hash = keyed_hash(bytes_pointer(key), len(key))
            if len(key) > _KEY_MAX or self._by_name(hash, bytes_pointer(key), len(key)) != _NONE:
                raise ValueError("a group has two heads, or too long a name")
            self._add(hash, bytes_pointer(key), len(key), index, place)
        for key, runs in blocked:
            hash = keyed_hash(bytes_pointer(key), len(key))
            number = self._by_name(hash, bytes_pointer(key), len(key))
            if number == _NONE:
                raise ValueError("messages are blocked in a group without a head")
            for index, offset, first, count, size, _, _, mark in runs:
                self._block(number, index, offset << 32 | first, count, size, mark)
