"""Records of RocketMQ's commit log: written from drafts, and read back (docs/formats/rocketmq.md).

    record  size 4 · magic 4 · CRC-32 of the body & 0x7FFFFFFF 4 · queue 4 · flag 4 ·
            queue offset 8 · physical offset 8 · system flag 4 · born at 8 · born host 4|16 + 4 ·
            stored at 8 · store host 4|16 + 4 · times consumed again 4 · prepared offset 8 ·
            length 4 + body · length 1|2 + topic · length 2 + properties
    blank   size 4 · magic 4 · whatever fills the rest of a file
    batch   { size 4 · magic 4 · CRC 4 · flag 4 · length 4 + body · length 2 + properties }
    CRC     the last property, __CRC32#, where a record has it: CRC-32 & 0x7FFFFFFF of the record
            before it, in ten digits, the last first
    entry   physical offset 8 · size 4 · tags code 8

All integers are big-endian. The magic says how long the length of a topic is, the system flag how
long the two hosts are.
"""

from zlib import crc32 as _crc32

import cython
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    load16,
    load32,
    load64,
    memory_view,
    store16,
    store32,
    store64,
    uninitialized,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int32_t, int64_t, uint32_t, uint64_t

ILLEGAL = -1
PROPERTIES_TOO_LONG = -2

ENDED = 0
BLANK = 1
ZEROS = 2
CUT = 3
DAMAGED = 4

UNCHECKED = 0
BODY = 1
RECORD = 2
RECORD_ALWAYS = 3

_V1 = cython.declare(uint32_t, 0xDAA320A7)
_V2 = cython.declare(uint32_t, 0xDAA320AB)
_BLANK = cython.declare(uint32_t, 0xCBD43194)
_CRC_BITS = cython.declare(uint32_t, 0x7FFFFFFF)
_PROPERTIES_MAX = cython.declare(cython.Py_ssize_t, 0x7FFF)
_FIXED = cython.declare(cython.Py_ssize_t, 72)
"""Bytes of a record without hosts, body, topic and its length, properties and theirs."""
_BATCH_HEAD = cython.declare(cython.Py_ssize_t, 20)
_SECTOR = cython.declare(cython.Py_ssize_t, 512)

_crc_name = cython.declare(bytes, b"__CRC32#\x01")
_CRC_BYTES = cython.declare(cython.Py_ssize_t, 20)
_CRC_DIGITS = cython.declare(cython.Py_ssize_t, 10)
_schedule_topic = cython.declare(bytes, b"SCHEDULE_TOPIC_XXXX")


@cython.cfunc
@cython.exceptval(check=False)
def _batch_size(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    fixed: cython.Py_ssize_t,
    added: cython.Py_ssize_t,
    count: cython.pointer(cython.Py_ssize_t),
) -> cython.Py_ssize_t:
    """Bytes of the records that a batch becomes, -1 when it cannot be read, -2 when properties are
    too long. `fixed`: of a record without body and properties; `added`: properties of all."""
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = 0
    count[0] = 0
    while at < n:
        if n - at < _BATCH_HEAD + 2:
            return -1
        total: cython.Py_ssize_t = load32(p + at)
        body: cython.Py_ssize_t = load32(p + at + 16)
        if total > n - at or body > total - _BATCH_HEAD - 2 or total < _BATCH_HEAD + 2:
            return -1
        properties: cython.Py_ssize_t = load16(p + at + _BATCH_HEAD + body)
        if _BATCH_HEAD + body + 2 + properties != total:
            return -1
        if added and properties and p[at + total - 1] != 2:
            properties += 1
        if properties + added > _PROPERTIES_MAX:
            return -2
        size += fixed + body + properties + added
        count[0] += 1
        at += total
    return size if count[0] else -1


@cython.cfunc
@cython.exceptval(check=False)
def _write(
    q: cython.p_uchar,
    topic: bytes,
    queue: int32_t,
    offset: int64_t,
    physical: int64_t,
    draft_flags: int32_t,
    born: bytes,
    host: bytes,
) -> cython.p_uchar:
    """Writes what all records of a draft have alike; returns where the length of the body goes."""
    store32(q + 4, _V2 if len(topic) > 127 else _V1)
    store32(q + 12, cython.cast(uint32_t, queue))
    store64(q + 20, cython.cast(uint64_t, offset))
    store64(q + 28, cython.cast(uint64_t, physical))
    store32(q + 36, cython.cast(uint32_t, draft_flags))
    string.memcpy(q + 48, bytes_pointer(born), len(born))
    q += 56 + len(born)
    string.memcpy(q, bytes_pointer(host), len(host))
    return q + len(host) + 12


@cython.cfunc
@cython.exceptval(check=False)
def _write_topic(q: cython.p_uchar, topic: bytes) -> cython.p_uchar:
    n: cython.Py_ssize_t = len(topic)
    if n > 127:
        store16(q, cython.cast(uint32_t, n))
        q += 2
    else:
        q[0] = cython.cast(cython.uchar, n)
        q += 1
    string.memcpy(q, bytes_pointer(topic), n)
    return q + n


@cython.cfunc
def _is_int32(number) -> cython.bint:
    return -0x80000000 <= number <= 0x7FFFFFFF


@cython.cfunc
def _measure(draft, host: bytes, count: cython.pointer(cython.Py_ssize_t)) -> cython.Py_ssize_t:
    """Bytes of a draft's records, ILLEGAL or PROPERTIES_TOO_LONG."""
    topic: bytes = draft.topic.encode()
    body: bytes = draft.body
    properties: bytes = draft.properties
    born: bytes = draft.born_host
    count[0] = 1
    if not 0 < len(topic) <= 0xFFFF or len(born) not in (8, 20) or len(body) > 0x7FFFFFFF:
        return -1
    if len(properties) > _PROPERTIES_MAX:
        return -2
    if not (_is_int32(draft.flag) and _is_int32(draft.sys_flag)
            and _is_int32(draft.reconsume_times)):  # fmt: skip
        return -1
    fixed: cython.Py_ssize_t = (
        _FIXED + len(born) + len(host) + (2 if len(topic) > 127 else 1) + len(topic) + 2
    )
    if draft.is_batch:
        return _batch_size(bytes_pointer(body), len(body), fixed, len(properties), count)
    return fixed + len(body) + len(properties)


@cython.cfunc
@cython.exceptval(check=False)
def _write_crc(p: cython.p_uchar, n: cython.Py_ssize_t, out: cython.p_uchar) -> cython.void:
    """Writes the digits of the checksum of a record of `n` bytes."""
    value: uint32_t = cython.cast(uint32_t, _crc32(memory_view(p, n - _CRC_BYTES))) & _CRC_BITS
    i: cython.Py_ssize_t
    for i in range(_CRC_DIGITS):
        out[i] = cython.cast(cython.uchar, 48 + value % 10)
        value //= 10


@cython.cfunc
def _encode(
    q: cython.p_uchar,
    draft,
    physical: int64_t,
    offset: int64_t,
    now: int64_t,
    host: bytes,
    with_crc: cython.bint,
) -> list:
    """Writes a draft's records, whose bytes were measured. Returns their physical offsets."""
    topic: bytes = draft.topic.encode()
    body: bytes = draft.body
    properties: bytes = draft.properties
    born: bytes = draft.born_host
    flags: int32_t = draft.sys_flag & ~0x30
    flags |= (0x10 if len(born) == 20 else 0) | (0x20 if len(host) == 20 else 0)
    queue: int32_t = draft.queue_id
    born_ms: int64_t = draft.born_ms
    again: int32_t = draft.reconsume_times
    prepared: int64_t = draft.prepared_offset
    user: int32_t = draft.flag
    is_batch: cython.bint = draft.is_batch
    in_queue: cython.bint = (flags & 0xC) in (0, 8)
    p: cython.p_uchar = bytes_pointer(body)
    rest: cython.Py_ssize_t = len(body)
    found: list = []
    more: cython.Py_ssize_t = len(properties)
    while True:
        start: cython.p_uchar = q
        content: cython.p_uchar = p
        n: cython.Py_ssize_t = rest
        own: cython.p_uchar = p
        own_n: cython.Py_ssize_t = 0
        if is_batch:
            user = cython.cast(int32_t, load32(p + 12))
            n = load32(p + 16)
            content = p + _BATCH_HEAD
            own = content + n + 2
            own_n = load16(content + n)
            p = own + own_n
            rest -= _BATCH_HEAD + n + 2 + own_n
        found.append(physical)
        q = _write(start, topic, queue, offset if in_queue else 0, physical, flags, born, host)
        store32(start + 8, cython.cast(uint32_t, _crc32(memory_view(content, n))) & _CRC_BITS)
        store32(start + 16, cython.cast(uint32_t, user))
        store64(start + 40, cython.cast(uint64_t, born_ms))
        store64(start + 48 + len(born), cython.cast(uint64_t, now))
        store32(q - 12, cython.cast(uint32_t, again))
        store64(q - 8, cython.cast(uint64_t, prepared))
        store32(q, cython.cast(uint32_t, n))
        string.memcpy(q + 4, content, n)
        q = _write_topic(q + 4 + n, topic)
        separator: cython.Py_ssize_t = 1 if own_n and more and own[own_n - 1] != 2 else 0
        store16(q, cython.cast(uint32_t, own_n + separator + more))
        q += 2
        string.memcpy(q, own, own_n)
        q += own_n
        if separator:
            q[0] = 2
            q += 1
        string.memcpy(q, bytes_pointer(properties), more)
        q += more
        store32(start, cython.cast(uint32_t, q - start))
        if with_crc:
            _write_crc(start, q - start, q - _CRC_DIGITS - 1)
        physical += q - start
        offset += 1
        if not is_batch or rest <= 0:
            return found


def encode(
    drafts: list,
    first: cython.Py_ssize_t,
    room: cython.Py_ssize_t,
    size_max: cython.Py_ssize_t,
    physical: int64_t,
    next_offsets: dict,
    now_ms: int64_t,
    host: bytes,
    with_crc: cython.bint,
) -> tuple:
    if len(host) not in (8, 20):
        raise ValueError("a host has 8 or 20 bytes")
    sizes: list = []
    counts: list = []
    total: cython.Py_ssize_t = 0
    count: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t
    i: cython.Py_ssize_t
    for i in range(first, len(drafts)):
        size = _measure(drafts[i], host, cython.address(count))
        if size > size_max:
            size = -1
        if size > 0:
            if total + size + 8 > room:
                break
            total += size
        sizes.append(size)
        counts.append(count)
    block: bytes = uninitialized(total)
    q: cython.p_uchar = bytes_pointer(block)
    rows: list = []
    for i in range(len(sizes)):
        size = sizes[i]
        draft = drafts[first + i]
        if size < 0:
            rows.append((size, 0, 0, None))
            continue
        place = (draft.topic, draft.queue_id)
        offset = next_offsets[place]
        made = _encode(q, draft, physical, offset, now_ms, host, with_crc)
        rows.append((size, counts[i], offset, made))
        if (draft.sys_flag & 0xC) in (0, 8):
            next_offsets[place] = offset + counts[i]
        q += size
        physical += size
    return block, rows


@cython.cfunc
@cython.exceptval(check=False)
def _property(
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    name: cython.p_char,
    size: cython.Py_ssize_t,
    length: cython.pointer(cython.Py_ssize_t),
) -> cython.p_uchar:
    """Finds the value of a property; NULL without one. Of several it is the last, as in a map."""
    end: cython.p_uchar = p + n
    found: cython.p_uchar = cython.NULL
    length[0] = 0
    while p < end:
        stop: cython.p_uchar = cython.cast(cython.p_uchar, string.memchr(p, 2, end - p))
        if stop == cython.NULL:
            stop = end
        if stop - p > size + 1 and p[size] == 1 and string.memcmp(p, name, size) == 0:
            found = p + size + 1
            length[0] = stop - found
        p = stop + 1
    return found


@cython.cfunc
def _java_hash(p: cython.p_uchar, n: cython.Py_ssize_t, value: uint32_t) -> uint32_t:
    """Goes on with Java's hash of a text, which counts UTF-16 units."""
    i: cython.Py_ssize_t
    for i in range(n):
        if p[i] >= 0x80:
            units: bytes = p[i:n].decode("utf-8", "replace").encode("utf-16-be")
            u: cython.p_uchar = bytes_pointer(units)
            at: cython.Py_ssize_t
            for at in range(0, len(units), 2):
                value = 31 * value + load16(u + at)
            return value
        value = 31 * value + p[i]
    return value


@cython.cclass
class Fields:
    """Places of the parts of one record."""

    size: cython.Py_ssize_t
    stored: cython.Py_ssize_t
    body: cython.Py_ssize_t
    body_size: cython.Py_ssize_t
    topic: cython.Py_ssize_t
    topic_size: cython.Py_ssize_t
    properties: cython.Py_ssize_t
    properties_size: cython.Py_ssize_t


@cython.cfunc
@cython.exceptval(check=False)
def _parse(p: cython.p_uchar, n: cython.Py_ssize_t, found: Fields) -> cython.int:
    """Finds the parts of a record of `n` bytes. Returns 0 when it is none."""
    if n < 91:
        return 0
    magic: uint32_t = load32(p + 4)
    if magic != _V1 and magic != _V2:
        return 0
    flags: uint32_t = load32(p + 36)
    at: cython.Py_ssize_t = 48 + (20 if flags & 0x10 else 8)
    found.size = n
    found.stored = at
    at += 8 + (20 if flags & 0x20 else 8) + 12
    if at + 4 > n:
        return 0
    found.body_size = load32(p + at)
    at += 4
    found.body = at
    if found.body_size > n - at - 3:
        return 0
    at += found.body_size
    if magic == _V2:
        found.topic_size = load16(p + at)
        at += 2
    else:
        found.topic_size = p[at]
        at += 1
    found.topic = at
    if found.topic_size > n - at - 2 or found.topic_size == 0:
        return 0
    at += found.topic_size
    found.properties_size = load16(p + at)
    found.properties = at + 2
    return at + 2 + found.properties_size == n


@cython.cfunc
def _tags_code(p: cython.p_uchar, f: Fields, delays: list) -> int64_t:
    """Returns the tags code of a record: the hash of its tag, or when it is due."""
    n: cython.Py_ssize_t = 0
    properties: cython.p_uchar = p + f.properties
    value: cython.p_uchar
    if f.topic_size == 19 and string.memcmp(p + f.topic, bytes_pointer(_schedule_topic), 19) == 0:
        value = _property(properties, f.properties_size, "DELAY", 5, cython.address(n))
        level: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        for i in range(n if value else 0):
            if not 48 <= value[i] <= 57 or level > 1000:
                level = 0
                break
            level = level * 10 + value[i] - 48
        if level > 0 and delays:
            level = min(level, len(delays))
            return cython.cast(int64_t, load64(p + f.stored)) + delays[level - 1]
    value = _property(properties, f.properties_size, "TAGS", 4, cython.address(n))
    if value == cython.NULL:
        return 0
    return cython.cast(int32_t, _java_hash(value, n, 0))


@cython.cfunc
@cython.exceptval(check=False)
def _kind(
    p: cython.p_uchar, n: cython.Py_ssize_t, size: cython.pointer(cython.Py_ssize_t)
) -> cython.int:
    """Returns what begins at `p`: a record of `size` bytes (ENDED), or why there is none."""
    size[0] = 0
    if n < 8:
        return 3 if n else 0
    size[0] = load32(p)
    magic: uint32_t = load32(p + 4)
    if size[0] == 0 and magic == 0:
        return 2
    if magic == _BLANK:
        return 1 if 8 <= size[0] <= 0x7FFFFFFF else 4
    if (magic != _V1 and magic != _V2) or not 91 <= size[0] <= 0x7FFFFFFF:
        return 4
    return 3 if size[0] > n else 0


@cython.cclass
class _Runs:
    """Runs of neighbours in a queue, as they are found."""

    made: list
    entries: bytearray
    topic: bytes
    queue: int32_t
    offset: int64_t
    next: int64_t
    stored: int64_t

    def __cinit__(self):
        self.made = []
        self.entries = bytearray()
        self.topic = b""

    @cython.cfunc
    def add(self, p: cython.p_uchar, f: Fields, delays: list):
        offset: int64_t = cython.cast(int64_t, load64(p + 20))
        queue: int32_t = cython.cast(int32_t, load32(p + 12))
        if (
            not self.entries
            or offset != self.next
            or queue != self.queue
            or f.topic_size != len(self.topic)
            or string.memcmp(p + f.topic, bytes_pointer(self.topic), f.topic_size)
        ):
            self.close()
            self.topic = copy_bytes(p + f.topic, f.topic_size)
            self.queue = queue
            self.offset = offset
        entry: cython.uchar[20]
        string.memcpy(entry, p + 28, 8)
        string.memcpy(cython.address(entry[8]), p, 4)
        store64(cython.address(entry[12]), cython.cast(uint64_t, _tags_code(p, f, delays)))
        self.entries += copy_bytes(cython.cast(cython.p_uchar, entry), 20)
        self.next = offset + 1
        self.stored = cython.cast(int64_t, load64(p + f.stored))

    @cython.cfunc
    def close(self):
        if self.entries:
            self.made.append((
                self.topic.decode("utf-8", "replace"), self.queue, self.offset,
                len(self.entries) // 20, bytes(self.entries), self.stored,
            ))  # fmt: skip
            self.entries = bytearray()


@cython.cfunc
def _index_keys(p: cython.p_uchar, f: Fields, out: bytearray):
    """Adds a row for each key of a record: hash 4 · physical offset 8 · stored at 8."""
    properties: cython.p_uchar = p + f.properties
    seed: uint32_t = 31 * _java_hash(p + f.topic, f.topic_size, 0) + 35
    row: cython.uchar[20]
    string.memcpy(cython.address(row[4]), p + 28, 8)
    string.memcpy(cython.address(row[12]), p + f.stored, 8)
    n: cython.Py_ssize_t = 0
    value: cython.p_uchar = _property(
        properties, f.properties_size, "UNIQ_KEY", 8, cython.address(n)
    )
    if value:
        store32(cython.cast(cython.p_uchar, row), _absolute(_java_hash(value, n, seed)))
        out += copy_bytes(cython.cast(cython.p_uchar, row), 20)
    value = _property(properties, f.properties_size, "KEYS", 4, cython.address(n))
    if not value:
        return
    at: cython.Py_ssize_t = 0
    start: cython.Py_ssize_t = 0
    for at in range(n + 1):
        if at < n and value[at] != 32:
            continue
        if at > start:
            store32(
                cython.cast(cython.p_uchar, row),
                _absolute(_java_hash(value + start, at - start, seed)),
            )
            out += copy_bytes(cython.cast(cython.p_uchar, row), 20)
        start = at + 1


@cython.cfunc
@cython.exceptval(check=False)
def _absolute(value: uint32_t) -> uint32_t:
    if value == 0x80000000:
        return 0
    return 0 - value if value >> 31 else value


def scan(
    block,
    start: cython.Py_ssize_t,
    physical: int64_t,
    check: cython.int,
    delays: list,
) -> tuple:
    view: cython.const[cython.uchar][::1] = block
    n: cython.Py_ssize_t = view.shape[0]
    if not 0 <= start <= n:
        raise ValueError("a scan begins inside its block")
    runs: _Runs = _Runs()
    keys: bytearray = bytearray()
    f: Fields = Fields()
    at: cython.Py_ssize_t = start
    count: cython.Py_ssize_t = 0
    stored: int64_t = 0
    size: cython.Py_ssize_t = 0
    kind: cython.int = 0
    while at < n:
        p: cython.p_uchar = cython.cast(cython.p_uchar, cython.address(view[at]))
        kind = _kind(p, n - at, cython.address(size))
        if kind:
            break
        if (
            not _parse(p, size, f)
            or cython.cast(int64_t, load64(p + 28)) != physical + at
            or (check and not _is_whole(p, f, check))
        ):
            kind = 4
            break
        flags: uint32_t = load32(p + 36) & 0xC
        if flags == 0 or flags == 8:
            runs.add(p, f, delays)
        if flags != 0xC:
            _index_keys(p, f, keys)
        stored = cython.cast(int64_t, load64(p + f.stored))
        count += 1
        at += size
        size = 0
    runs.close()
    return kind, at, size, count, stored, runs.made, bytes(keys)


@cython.cfunc
@cython.exceptval(check=False)
def _has_right_crc(p: cython.p_uchar, f: Fields, check: cython.int) -> cython.bint:
    """Compares the checksum of the record; one without it passes unless `check` asks for it."""
    at: cython.Py_ssize_t = f.size - _CRC_BYTES
    if (
        f.properties_size < _CRC_BYTES
        or string.memcmp(p + at, bytes_pointer(_crc_name), len(_crc_name))
        or p[f.size - 1] != 2
    ):
        return check < 3
    digits: cython.uchar[10]
    _write_crc(p, f.size, cython.cast(cython.p_uchar, digits))
    return string.memcmp(p + f.size - 1 - _CRC_DIGITS, digits, _CRC_DIGITS) == 0


@cython.cfunc
def _is_whole(p: cython.p_uchar, f: Fields, check: cython.int) -> cython.bint:
    """Compares the checksums of the body and of the record. Nothing else covers topic and
    properties: but where a write was cut short, sectors of zeros lie."""
    if check > 1 and not _has_right_crc(p, f, check):
        return False
    if f.body_size:
        crc: uint32_t = _crc32(memory_view(p + f.body, f.body_size))
        if crc & _CRC_BITS != load32(p + 8):
            return False
    at: cython.Py_ssize_t = f.topic
    # The length of no properties is zeros as well.
    end: cython.Py_ssize_t = f.size if f.properties_size else f.topic + f.topic_size
    stop: cython.Py_ssize_t
    physical: cython.Py_ssize_t = load64(p + 28)
    while at < end:
        stop = min(end, at + _SECTOR - (physical + at) % _SECTOR)
        while at < stop and p[at] == 0:
            at += 1
        if at == stop:
            return False
        at = stop
    return True


def is_record(record, physical: int64_t, check: cython.int) -> bool:
    view: cython.const[cython.uchar][::1] = record
    n: cython.Py_ssize_t = view.shape[0]
    if n < 91:
        return False
    p: cython.p_uchar = cython.cast(cython.p_uchar, cython.address(view[0]))
    f: Fields = Fields()
    return (
        load32(p) == n
        and _parse(p, n, f) != 0
        and cython.cast(int64_t, load64(p + 28)) == physical
        and _is_whole(p, f, check)
    )


def key_hash(topic: str, key: str) -> int:
    text: bytes = f"{topic}#{key}".encode()
    return _absolute(_java_hash(bytes_pointer(text), len(text), 0))
