"""Load of a partition, by logical partition: messages and bytes, and the largest keys of those that
are hot.

`count` is called once per command and does all the work per message: the key's hash, and an
addition. A hot logical partition has a space-saving counter: sixteen keys, each with a count that
is never too small. A key that has no place takes that of the smallest, with its count.
Python's twin: tests/unit/kernels/test_load_counter.py.
"""

import cython
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import bytes_pointer
from cython.cimports.convoymq.kernels.ordered_runs import find_order_key, murmur3
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t

KEY_SLOTS = 16
KEY_BYTES_MAX = 64
HOT_MAX = 8
WIDTH_MAX = 65536

_SLOTS = cython.declare(cython.Py_ssize_t, 16)
_KEY_BYTES = cython.declare(cython.Py_ssize_t, 64)
_HOT_MAX = cython.declare(cython.Py_ssize_t, 8)
_WIDTH_MAX = cython.declare(cython.Py_ssize_t, 65536)


@cython.cclass
class LoadCounter:
    def __cinit__(self):
        self.weights = cython.NULL
        self.slots = cython.NULL

    def __init__(
        self, lo: cython.Py_ssize_t, hi: cython.Py_ssize_t, logical: uint32_t, seed: uint32_t
    ):
        if lo < 0 or hi <= lo or hi - lo > _WIDTH_MAX or logical == 0:
            raise ValueError("no range of logical partitions")
        stdlib.free(self.weights)
        stdlib.free(self.slots)
        self.slots = cython.NULL
        self.lo = lo
        self.width = hi - lo
        self.logical = logical
        self.seed = seed
        self.messages = 0
        self.size = 0
        self.hot = []
        self.weights = cython.cast(
            cython.pointer(cython.double),
            stdlib.calloc(2 * self.width, cython.sizeof(cython.double)),
        )
        if self.weights == cython.NULL:
            raise MemoryError

    def __dealloc__(self):
        stdlib.free(self.weights)
        stdlib.free(self.slots)

    def count(
        self,
        data: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
    ):
        records: Records
        open_records(bytes_pointer(data), len(data), command, first, count, cython.address(records))
        record: cython.pointer(cython.const[cython.uchar])
        key: cython.pointer(cython.const[cython.uchar]) = cython.NULL
        size: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t
        at: cython.Py_ssize_t
        i: cython.Py_ssize_t
        hashed: uint32_t
        watches: cython.bint = self.slots != cython.NULL
        for i in range(count):
            record = record_at(cython.address(records), first + i, cython.address(size))
            key = record
            length = find_order_key(record, size, cython.address(key))
            hashed = murmur3(key, length, self.seed)
            self.messages += 1
            self.size += size
            at = cython.cast(cython.Py_ssize_t, hashed % self.logical) - self.lo
            # A sender that hashes otherwise is refused elsewhere; here it only must not harm.
            if at < 0 or at >= self.width:
                continue
            self.weights[2 * at] += 1
            self.weights[2 * at + 1] += size
            if watches:
                self._watched(at + self.lo, hashed, key, length)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _watched(
        self,
        lp: cython.Py_ssize_t,
        hashed: uint32_t,
        key: cython.pointer(cython.const[cython.uchar]),
        length: cython.Py_ssize_t,
    ) -> cython.void:
        n: cython.Py_ssize_t
        for n in range(self.watched):
            if self.lps[n] == lp:
                self._take_key(self.slots + n * _SLOTS, hashed, key, length)
                return

    @cython.cfunc
    @cython.exceptval(check=False)
    def _take_key(
        self,
        slots: cython.pointer(KeySlot),
        hashed: uint32_t,
        key: cython.pointer(cython.const[cython.uchar]),
        length: cython.Py_ssize_t,
    ) -> cython.void:
        """Counts a key. Keys that agree in hash, length and first bytes are taken for one."""
        kept: cython.Py_ssize_t = length if length < _KEY_BYTES else _KEY_BYTES
        least: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        for i in range(_SLOTS):
            if (
                slots[i].count
                and slots[i].hash == hashed
                and slots[i].length == cython.cast(uint32_t, length)
                and string.memcmp(slots[i].key, key, kept) == 0
            ):
                slots[i].count += 1
                return
            if slots[i].count < slots[least].count:
                least = i
        slots[least].count += 1
        slots[least].hash = hashed
        slots[least].length = cython.cast(uint32_t, length)
        string.memcpy(slots[least].key, key, kept)

    def fade(self, factor: cython.double):
        """Multiplies the weights of all logical partitions."""
        if not 0 <= factor <= 1:
            raise ValueError("a factor lies between 0 and 1")
        i: cython.Py_ssize_t
        for i in range(2 * self.width):
            self.weights[i] *= factor

    def loads(self):
        """Returns (messages, bytes) of the logical partitions, each packed as floats of 4 bytes."""
        messages: bytearray = bytearray(4 * self.width)
        sizes: bytearray = bytearray(4 * self.width)
        m: cython.p_char = messages
        s: cython.p_char = sizes
        value: cython.float
        i: cython.Py_ssize_t
        for i in range(self.width):
            value = cython.cast(cython.float, self.weights[2 * i])
            string.memcpy(m + 4 * i, cython.address(value), 4)
            value = cython.cast(cython.float, self.weights[2 * i + 1])
            string.memcpy(s + 4 * i, cython.address(value), 4)
        return bytes(messages), bytes(sizes)

    def watch(self, lps):
        """Keeps the largest keys of these logical partitions, and of no others."""
        wanted: list = sorted(set(lps))[:HOT_MAX]
        if wanted == self.hot:
            return
        slots: cython.pointer(KeySlot) = cython.NULL
        if wanted:
            slots = cython.cast(
                cython.pointer(KeySlot),
                stdlib.calloc(len(wanted) * _SLOTS, cython.sizeof(KeySlot)),
            )
            if slots == cython.NULL:
                raise MemoryError
        stdlib.free(self.slots)
        self.slots = slots
        self.hot = wanted
        self.watched = len(wanted)
        i: cython.Py_ssize_t
        for i in range(self.watched):
            self.lps[i] = wanted[i]

    def top_keys(self):
        """Returns by watched logical partition its keys with their counts, the largest first."""
        found: dict = {}
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t
        kept: cython.Py_ssize_t
        for n in range(self.watched):
            rows: list = []
            for i in range(n * _SLOTS, (n + 1) * _SLOTS):
                if self.slots[i].count:
                    kept = self.slots[i].length
                    if kept > _KEY_BYTES:
                        kept = _KEY_BYTES
                    key: bytes = cython.cast(cython.p_char, self.slots[i].key)[:kept]
                    rows.append((key, self.slots[i].count))
            rows.sort(key=_by_count)
            found[self.lps[n]] = rows
        return found


def _by_count(row):
    key, count = row
    return -count, key
