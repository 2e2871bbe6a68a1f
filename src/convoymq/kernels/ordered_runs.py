"""Records of an ordered topic: their order keys, the hash of these, and the partitions they go to.

    record ─▶ order key ─▶ MurmurHash3 mod logical partitions ─▶ range ─▶ slot ─▶ target of a client
                                                                            └──▶ what waits

An `OrderedTarget` takes a channel's publishes as any other target does, and places each into the
target of its partition at once: a record is copied once. A partition that takes nothing for now has
its records written to a builder of its own, from where `append` places them again.

The order key is the header `x-order-key` (a string or bytes, not empty), or else the routing key.
Python's twins: `topics.rules.hashing`, tests/unit/kernels/test_ordered_runs.py.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_FRAME_HEAD,
    AMQP_SIZE,
)
from cython.cimports.convoymq.kernels.batch import (
    CommandBuilder,
    PendingCommand,
    PublishTarget,
    Records,
    open_records,
    record_at,
    record_body_size,
)
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    get32,
    load32,
    put32,
    put64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.content import (
    Field,
    find_fields,
    is_named,
    names_length,
    next_field,
)
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_FLAGS,
    COMMAND_HEADER_SIZE,
    ENQUEUE_SAME_SIZE,
)
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t

UNTAGGED = 1 << 62

_UNTAGGED = cython.declare(uint64_t, 1 << 62)
_C1 = cython.declare(uint32_t, 0xCC9E2D51)
_WITH_KEY = cython.declare(uint32_t, 0x80000000)
_C2 = cython.declare(uint32_t, 0x1B873593)


# --- order keys ------------------------------------------------------------------------------


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def murmur3(
    p: cython.pointer(cython.const[cython.uchar]), n: cython.Py_ssize_t, seed: uint32_t
) -> uint32_t:
    value: uint32_t = seed
    block: uint32_t
    at: cython.Py_ssize_t = 0
    while n - at >= 4:
        block = rotated(get32(p + at) * _C1, 15) * _C2
        value = rotated(value ^ block, 13) * 5 + cython.cast(uint32_t, 0xE6546B64)
        at += 4
    if at < n:
        block = 0
        end: cython.Py_ssize_t = n
        while end > at:
            end -= 1
            block = (block << 8) | p[end]
        value ^= rotated(block * _C1, 15) * _C2
    value ^= cython.cast(uint32_t, n)
    value = (value ^ (value >> 16)) * cython.cast(uint32_t, 0x85EBCA6B)
    value = (value ^ (value >> 13)) * cython.cast(uint32_t, 0xC2B2AE35)
    return value ^ (value >> 16)


@cython.cfunc
@cython.exceptval(check=False)
def _find_header_key(
    p: cython.p_uchar, n: cython.Py_ssize_t, key: cython.pointer(cython.pointer(cython.uchar))
) -> cython.Py_ssize_t:
    """Returns the length of the header x-order-key in the content header payload at p; 0: there is
    none that is a string or bytes and not empty."""
    at: cython.Py_ssize_t = 0
    n = find_fields(p, n, cython.address(at))
    p += at
    field: Field
    at = 0
    while at < n:
        step: cython.Py_ssize_t = next_field(p + at, n - at, 1, cython.address(field))
        if step < 0:
            return 0
        if is_named(cython.address(field), b"x-order-key", 11):
            if field.value[0] != b"S" and field.value[0] != b"x":
                return 0
            key[0] = field.value + 5
            return field.value_length - 5
        at += step
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _find_key(
    names: cython.p_uchar,
    names_length: cython.Py_ssize_t,
    content: cython.p_uchar,
    n: cython.Py_ssize_t,
    key: cython.pointer(cython.pointer(cython.uchar)),
) -> cython.Py_ssize_t:
    """As `find_order_key`, of a record in two parts: exchange and routing key, and content."""
    size: cython.Py_ssize_t
    if n > AMQP_FRAME_HEAD:
        size = load32(content + AMQP_SIZE)
        if size <= n - AMQP_FRAME_HEAD:
            size = _find_header_key(content + AMQP_FRAME_HEAD, size, key)
            if size:
                return size
    at: cython.Py_ssize_t = 1 + cython.cast(cython.Py_ssize_t, names[0])
    if at >= names_length:
        return 0
    size = names[at]
    if at + 1 + size > names_length:
        return 0
    key[0] = names + at + 1
    return size


@cython.cfunc
@cython.exceptval(check=False)
def find_order_key(
    record: cython.pointer(cython.const[cython.uchar]),
    n: cython.Py_ssize_t,
    key: cython.pointer(cython.pointer(cython.const[cython.uchar])),
) -> cython.Py_ssize_t:
    p: cython.p_uchar = cython.cast(cython.p_uchar, record)
    names: cython.Py_ssize_t = names_length(p, n)
    if names < 0:
        return 0
    return _find_key(
        p,
        names,
        p + names,
        n - names,
        cython.cast(cython.pointer(cython.pointer(cython.uchar)), key),
    )


def order_hash(key: bytes, seed: uint32_t = 0):
    return murmur3(bytes_pointer(key), len(key), seed)


def order_key(record: bytes):
    p: cython.pointer(cython.const[cython.uchar]) = cython.NULL
    n: cython.Py_ssize_t = find_order_key(bytes_pointer(record), len(record), cython.address(p))
    return cython.cast(cython.p_char, p)[:n] if n else b""


def key_hashes(
    block: bytes, command: cython.Py_ssize_t, first: cython.Py_ssize_t, count: cython.Py_ssize_t
):
    """Returns 64 bits of hash, little-endian, of the order key of each record; 0 without one."""
    records: Records
    open_records(bytes_pointer(block), len(block), command, first, count, cython.address(records))
    made: bytes = uninitialized(8 * count)
    out: cython.p_uchar = bytes_pointer(made)
    key: cython.pointer(cython.const[cython.uchar]) = cython.NULL
    n: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    p: cython.p_uchar
    for i in range(count):
        p = record_at(cython.address(records), first + i, cython.address(n))
        n = find_order_key(p, n, cython.address(key))
        if n:
            put32(out, murmur3(key, n, 0))
            put32(out + 4, murmur3(key, n, _C1) | _WITH_KEY)
        else:
            put64(out, 0)
        out += 8
    return made


def find_misplaced(
    body: bytes,
    table: cython.Py_ssize_t,
    lps,
    counts,
    logical: uint32_t,
    seed: uint32_t = 0,
    keyless: cython.bint = False,
):
    """Looks for the first record of an ENQUEUE whose order key does not belong to the logical
    partition of its run: run i has counts[i] records of lps[i].

    Args:
        body: the command without its head.
        table: where its offsets lie, in the command.
        keyless: records without a key are right in any run.

    Returns:
        (record, logical partition that its key belongs to; -1: it has no key), or None.
    Raises:
        ValueError: records and runs do not fit.
    """
    start: cython.p_uchar = bytes_pointer(body)
    length: cython.Py_ssize_t = len(body) + COMMAND_HEADER_SIZE
    if table < COMMAND_HEADER_SIZE or table > length - 4 or logical == 0:
        raise ValueError("no records")
    ends: cython.p_uchar = start + table - COMMAND_HEADER_SIZE
    total: cython.Py_ssize_t = (length - table) // 4 - 1
    at: cython.Py_ssize_t = get32(ends)
    row: cython.Py_ssize_t = 0
    key: cython.pointer(cython.const[cython.uchar]) = cython.NULL
    end: cython.Py_ssize_t
    n: cython.Py_ssize_t
    left: cython.Py_ssize_t
    lp: uint32_t
    found: uint32_t
    for wanted, count in zip(lps, counts, strict=True):
        lp = wanted
        left = count
        if left < 0 or left > total - row:
            raise ValueError("runs of more records than there are")
        while left > 0:
            end = get32(ends + 4 * (row + 1))
            if at < COMMAND_HEADER_SIZE or end < at or end > table:
                raise ValueError("record is damaged")
            n = find_order_key(start + at - COMMAND_HEADER_SIZE, end - at, cython.address(key))
            if n:
                found = murmur3(key, n, seed) % logical
                if found != lp:
                    return row, found
            elif not keyless:
                return row, -1
            at = end
            row += 1
            left -= 1
    if row != total:
        raise ValueError("runs of fewer records than there are")
    return None


# --- placing ---------------------------------------------------------------------------------


@cython.cclass
class Slot:
    def __init__(self, owner=None):
        self.state = SLOT_NEW
        self.sender = None
        self.waiter = None
        self.sent = 0
        self.waiting_bytes = 0
        self.owner = owner
        self.untagged = 0


@cython.cclass
class OrderedTarget(PublishTarget):
    def __cinit__(self):
        self.starts = cython.NULL
        self.count = 0

    def __init__(self, logical: uint32_t, seed: uint32_t, owner):
        if logical == 0:
            raise ValueError("a topic has at least one logical partition")
        PublishTarget.__init__(self, CommandBuilder(), 0, owner)
        self.spreads = True
        self.over = False
        self.keyless_lp = -1
        self.spreads_keyless = False
        self.logical = logical
        self.seed = seed
        self.slots = []

    def __dealloc__(self):
        stdlib.free(self.starts)

    def set_ranges(self, starts, slots):
        """Range i begins at logical partition starts[i] and belongs to slots[i]."""
        n: cython.Py_ssize_t = len(starts)
        if n == 0 or n != len(slots) or starts[0] != 0:
            raise ValueError("ranges cover every logical partition from 0 on")
        kept: list = []
        for slot in slots:
            if not isinstance(slot, Slot):
                raise ValueError("a range belongs to a slot")
            kept.append(slot)
        made: cython.p_void = stdlib.malloc(n * 4)
        if made == cython.NULL:
            raise MemoryError
        stdlib.free(self.starts)
        self.starts = cython.cast(cython.pointer(uint32_t), made)
        self.count = n
        i: cython.Py_ssize_t
        for i in range(n):
            self.starts[i] = starts[i]
        self.slots = kept

    def slot_of(self, key: bytes):
        """Returns the slot of the range that the key belongs to."""
        return self._slot_of(bytes_pointer(key), len(key))

    @cython.cfunc
    def _slot_of(self, key: cython.p_uchar, n: cython.Py_ssize_t) -> Slot:
        if n == 0 and self.keyless_lp >= 0:
            if self.spreads_keyless and self.count:
                self.keyless_lp += 1
                return cython.cast(Slot, self.slots[self.keyless_lp % self.count])
            return self._slot_at(cython.cast(uint32_t, self.keyless_lp))
        return self._slot_at(murmur3(key, n, self.seed) % self.logical)

    @cython.cfunc
    def _slot_at(self, partition: uint32_t) -> Slot:
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = self.count
        middle: cython.Py_ssize_t
        if high == 0:
            raise ValueError("no ranges were set")
        while high - low > 1:
            middle = (low + high) >> 1
            if self.starts[middle] <= partition:
                low = middle
            else:
                high = middle
        return cython.cast(Slot, self.slots[low])

    @cython.cfunc
    def place(
        self,
        names: cython.p_uchar,
        names_length: cython.Py_ssize_t,
        content: cython.p_uchar,
        content_length: cython.Py_ssize_t,
        tag: cython.pointer(uint64_t),
    ) -> PublishTarget:
        key: cython.p_uchar = names
        n: cython.Py_ssize_t = _find_key(
            names, names_length, content, content_length, cython.address(key)
        )
        slot: Slot = self._slot_of(key, n)
        self.seq += 1
        if tag[0] == 0 or tag[0] >= _UNTAGGED:
            slot.untagged += 1
            tag[0] = _UNTAGGED + slot.untagged
        if slot.state == SLOT_SEND:
            slot.sent += 1
            return slot.sender
        if slot.state == SLOT_NEW:
            self.owner.open_slot(slot)
            if slot.state == SLOT_SEND:
                slot.sent += 1
                return slot.sender
        if slot.waiter is None:
            builder: CommandBuilder = CommandBuilder()
            builder.on_full = builder.discard_unsent
            slot.waiter = PublishTarget(builder, 0, None)
        size: cython.Py_ssize_t = names_length + content_length
        slot.waiting_bytes += size
        self.hold(size)
        return slot.waiter

    @cython.ccall
    @cython.exceptval(-1)
    def hold(self, size: cython.Py_ssize_t) -> cython.int:
        """So many bytes wait here, too; below 0: so many less."""
        self.pending_bytes += size
        self.budget.bytes += size
        if not self.over and (
            self.pending_bytes > self.pending_bytes_max or self.budget.bytes > self.budget.bytes_max
        ):
            self.over = True
            self.owner.check_flow()
        return 0

    def take_waiting(self, slot: Slot):
        """Returns the sealed commands of what waits for the slot's partition, in order, and waits
        for them no more."""
        if slot.waiter is None:
            return []
        slot.waiter.builder.discard_unsent()
        taken = slot.waiter.applied(slot.waiter.seq)
        slot.waiter = None
        size: cython.Py_ssize_t = slot.waiting_bytes
        slot.waiting_bytes = 0
        self.hold(-size)
        return taken

    def append(self, command: PendingCommand):
        """Places the records of a sealed ENQUEUE command, in order, with the tags that they
        have. Raises ValueError: it is damaged, or not every record has a tag."""
        data: bytes = command.chunk.data
        if data is None:
            raise ValueError("the command's batch is not sealed yet")
        tags: list = command.tags
        count: cython.Py_ssize_t = command.messages
        records: Records
        p: cython.p_uchar = bytes_pointer(data)
        open_records(p, len(data), command.offset, 0, count, cython.address(records))
        flags: cython.int = p[command.offset + COMMAND_FLAGS] & ~ENQUEUE_SAME_SIZE
        n: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t = 0
        tag: uint64_t = 0
        last: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(count):
            if i and tag < last:
                tag += 1
            else:
                if tags is None or at + 2 > len(tags):
                    raise ValueError("not every record has a tag")
                tag = tags[at]
                last = tags[at + 1]
                at += 2
            p = record_at(cython.address(records), i, cython.address(n))
            self._append_record(p, n, tag, flags)

    @cython.cfunc
    @cython.exceptval(-1)
    def _append_record(
        self, p: cython.p_uchar, n: cython.Py_ssize_t, tag: uint64_t, flags: cython.int
    ) -> cython.int:
        body_size: cython.Py_ssize_t = record_body_size(p, n)
        if body_size < 0:
            raise ValueError("record is damaged")
        names: cython.Py_ssize_t = names_length(p, n)
        target: PublishTarget = self.place(p, names, p + names, n - names, cython.address(tag))
        string.memcpy(target.builder.reserve(target, tag, body_size, flags, n), p, n)
        return 0


def count_tags(tags):
    """Returns how many tags the ranges (first, last, …) have."""
    count: uint64_t = 0
    i: cython.Py_ssize_t
    for i in range(0, len(tags) - 1, 2):
        count += cython.cast(uint64_t, tags[i + 1]) - cython.cast(uint64_t, tags[i]) + 1
    return count


def tagged(tags):
    """Returns the ranges (first, last, …) whose tags are those of a channel: all, nearly always."""
    i: cython.Py_ssize_t
    for i in range(0, len(tags) - 1, 2):
        if cython.cast(uint64_t, tags[i]) >= _UNTAGGED:
            pairs = zip(tags[::2], tags[1::2], strict=True)
            return [tag for pair in pairs if pair[0] < UNTAGGED for tag in pair]
    return tags
