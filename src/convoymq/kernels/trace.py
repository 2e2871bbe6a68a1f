"""Rows of the trace in preallocated memory: one call per run, no object per row (ADR 0009).

Row by row: a row touches three cache lines where columns would touch seventeen. They become columns
when they are taken.
"""

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.convoymq.kernels.batch import Records, open_records, record_at
from cython.cimports.convoymq.kernels.bytes import bytes_pointer
from cython.cimports.convoymq.kernels.ordered_runs import find_order_key, murmur3
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import int64_t, uint64_t

COLUMNS = 17

_COLUMNS = cython.declare(cython.Py_ssize_t, 17)
_WORD = cython.declare(cython.Py_ssize_t, 8)
_HEADER = cython.declare(cython.Py_ssize_t, 48)
_FNV_BASIS = cython.declare(uint64_t, 0xCBF29CE484222325)
_FNV_PRIME = cython.declare(uint64_t, 0x100000001B3)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _hashed(p: cython.pointer(cython.const[cython.uchar]), n: cython.Py_ssize_t) -> uint64_t:
    """FNV-1a, then a mixing step, so that short names differ in all bits."""
    value: uint64_t = _FNV_BASIS
    i: cython.Py_ssize_t
    for i in range(n):
        value = (value ^ p[i]) * _FNV_PRIME
    value ^= value >> 32
    value *= _FNV_PRIME
    return value ^ (value >> 29)


def name_hash(name: bytes):
    return cython.cast(int64_t, _hashed(bytes_pointer(name), len(name)))


@cython.cclass
class TraceRows:
    def __cinit__(self):
        self.store = cython.NULL

    def __init__(self, capacity: cython.Py_ssize_t = 1024, rows_max: cython.Py_ssize_t = 65536):
        if capacity < 1 or rows_max < capacity or rows_max > 1 << 24:
            raise ValueError("capacity must lie between 1 and rows_max")
        stdlib.free(self.store)
        self.store = cython.cast(
            cython.pointer(int64_t), stdlib.malloc(capacity * _COLUMNS * _WORD)
        )
        if self.store == cython.NULL:
            raise MemoryError
        self.capacity = capacity
        self.rows_max = rows_max
        self.used = 0
        self.muted = False
        self.ordinal = 0
        self.now_index = 0
        self.now_term = 0
        self.now_us = 0
        self.skip_through = 0
        self.logical = 0
        self.seed = 0
        self.lost = 0
        self.index = 0
        self.on_full = None
        self.on_restored = None

    def __dealloc__(self):
        stdlib.free(self.store)

    @property
    def rows(self):
        return self.used

    def begin(self, index: int64_t, term: int64_t, time_ms: int64_t):
        self.index = index
        self.now_index = index
        self.now_term = term
        self.now_us = time_ms * 1000
        self.ordinal = 0
        self.muted = index <= self.skip_through

    def begin_entry(self, data: bytes):
        if len(data) < _HEADER:
            raise ValueError("shorter than an entry's header")
        p: cython.p_char = data
        words: uint64_t[3]
        string.memcpy(words, p + 8, 24)
        self.begin(
            cython.cast(int64_t, cext.htole64(words[0])),
            cython.cast(int64_t, cext.htole64(words[1])),
            cython.cast(int64_t, cext.htole64(words[2])),
        )

    def restored(self, index: int64_t):
        if self.on_restored is not None:
            self.on_restored(index)
        self.index = index

    @cython.cfunc
    @cython.exceptval(check=False)
    def grow(self) -> cython.void:
        wider: cython.Py_ssize_t = self.capacity * 2
        if wider > self.rows_max:
            wider = self.rows_max
        fresh: cython.pointer(int64_t) = cython.cast(
            cython.pointer(int64_t), stdlib.malloc(wider * _COLUMNS * _WORD)
        )
        if fresh == cython.NULL:
            return
        string.memcpy(fresh, self.store, self.used * _COLUMNS * _WORD)
        stdlib.free(self.store)
        self.store = fresh
        self.capacity = wider

    @cython.cfunc
    @cython.exceptval(-1, check=False)
    def row(self) -> cython.Py_ssize_t:
        """Returns the number of a new row plus one; 0 when there is no room for it."""
        if self.used == self.capacity and self.capacity < self.rows_max:
            self.grow()
        if self.used == self.capacity and self.on_full is not None:
            self.on_full()
        if self.used == self.capacity:
            self.lost += 1
            return 0
        self.used += 1
        return self.used

    def add(
        self,
        kind: int64_t,
        flags: int64_t,
        reason: int64_t,
        session: uint64_t,
        consumer: int64_t,
        seq: int64_t,
        first_id: int64_t,
        count: int64_t,
        position_index: int64_t,
        position_command: int64_t,
        position_first: int64_t,
        acquired: int64_t,
        delivered: int64_t,
        /,
    ):
        ordinal: int64_t = self.ordinal
        self.ordinal = ordinal + 1
        if self.muted:
            return
        number: cython.Py_ssize_t = self.row()
        if number == 0:
            return
        at: cython.pointer(int64_t) = self.store + (number - 1) * _COLUMNS
        at[0] = kind
        at[1] = flags
        at[2] = reason
        at[3] = ordinal
        at[4] = self.now_index
        at[5] = self.now_term
        at[6] = self.now_us
        at[7] = cython.cast(int64_t, session)
        at[8] = consumer
        at[9] = seq
        at[10] = first_id
        at[11] = count
        at[12] = position_index
        at[13] = position_command
        at[14] = position_first
        at[15] = acquired
        at[16] = delivered

    def keys(
        self,
        kind: int64_t,
        data: bytes,
        index: int64_t,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        offset: int64_t,
        /,
    ):
        records: Records
        open_records(bytes_pointer(data), len(data), command, first, count, cython.address(records))
        p: cython.pointer(cython.const[cython.uchar]) = cython.NULL
        record: cython.pointer(cython.const[cython.uchar])
        size: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t
        number: cython.Py_ssize_t
        partition: int64_t
        key: int64_t
        run_key: int64_t = 0
        i: cython.Py_ssize_t
        at: cython.pointer(int64_t) = cython.NULL
        for i in range(count):
            record = record_at(cython.address(records), first + i, cython.address(size))
            p = record
            length = find_order_key(record, size, cython.address(p))
            key = cython.cast(int64_t, _hashed(p, length))
            if i and key == run_key:
                if at != cython.NULL:
                    at[11] += 1
                continue
            run_key = key
            at = cython.NULL
            self.ordinal += 1
            if self.muted:
                continue
            number = self.row()
            if number == 0:
                continue
            partition = -1
            if self.logical and length:
                partition = murmur3(p, length, self.seed) % self.logical
            at = self.store + (number - 1) * _COLUMNS
            string.memset(at, 0, _COLUMNS * _WORD)
            at[0] = kind
            at[3] = self.ordinal - 1
            at[4] = self.now_index
            at[5] = self.now_term
            at[6] = self.now_us
            at[7] = key
            at[8] = partition
            at[10] = offset + i
            at[11] = 1
            at[12] = index
            at[13] = command
            at[14] = first + i

    def act(
        self,
        kind: int64_t,
        flags: int64_t,
        time_us: int64_t,
        index: int64_t,
        session: uint64_t,
        consumer: int64_t,
        seq: int64_t,
        first_id: int64_t,
        count: int64_t,
        position_index: int64_t,
        position_command: int64_t,
        position_first: int64_t,
        acquired: int64_t,
        delivered: int64_t,
        /,
    ):
        number: cython.Py_ssize_t = self.row()
        if number == 0:
            return
        at: cython.pointer(int64_t) = self.store + (number - 1) * _COLUMNS
        at[0] = kind
        at[1] = flags
        at[2] = 0
        at[3] = 0
        at[4] = index
        at[5] = 0
        at[6] = time_us
        at[7] = cython.cast(int64_t, session)
        at[8] = consumer
        at[9] = seq
        at[10] = first_id
        at[11] = count
        at[12] = position_index
        at[13] = position_command
        at[14] = position_first
        at[15] = acquired
        at[16] = delivered

    def take(self):
        rows: cython.Py_ssize_t = self.used
        raw: cython.pointer(cext.PyObject) = cext.PyBytes_FromStringAndSize(
            cython.NULL, rows * _COLUMNS * _WORD
        )
        to: cython.pointer(int64_t) = cython.cast(
            cython.pointer(int64_t), cext.PyBytes_AS_STRING(raw)
        )
        at: cython.pointer(int64_t) = self.store
        i: cython.Py_ssize_t
        k: cython.Py_ssize_t
        for i in range(rows):
            for k in range(_COLUMNS):
                to[k * rows + i] = at[k]
            at += _COLUMNS
        self.used = 0
        made: object = cython.cast(object, raw)
        cext.Py_DECREF_raw(raw)
        return rows, made
