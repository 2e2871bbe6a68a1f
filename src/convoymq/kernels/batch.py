"""Commands, and the open batch that collects them: built once, never re-encoded.

Layout: docs/formats/entries-and-frames.md. A `CommandBuilder` writes commands behind 48 free bytes,
so that sealing it as an entry or as a FORWARD frame only fills the header in. Every length that
comes from outside is checked before it is used.
"""

from collections import deque

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.convoymq.kernels.amqp import HEADER_BODY_SIZE
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    get32,
    get64,
    load64,
    put32,
    put64,
)
from cython.cimports.convoymq.kernels.command_walk import CommandWalk
from cython.cimports.convoymq.kernels.content import find_header
from cython.cimports.convoymq.kernels.entries import ENTRY_COMMANDS, seal_entry
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_ARG,
    COMMAND_COUNT,
    COMMAND_FLAGS,
    COMMAND_HEADER_SIZE,
    COMMAND_SEQ,
    COMMAND_SESSION,
    COMMAND_SPARE,
    COMMAND_TYPE,
    ENQUEUE_BYTES,
    ENQUEUE_RECORDS,
    ENQUEUE_SAME_SIZE,
    ENQUEUE_SIZE_MIN,
    ENTRY_HEADER_SIZE,
    RANGE_SIZE,
    TYPE_DISCARD,
    TYPE_ENQUEUE,
    TYPE_RETURN,
    TYPE_SETTLE,
)
from cython.cimports.convoymq.kernels.link_frames import FRAME_FORWARD, put_header
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t, uint64_t

COMMAND_SIZE = COMMAND_HEADER_SIZE

CMD_ENQUEUE = 1
CMD_SETTLE = 2
CMD_RETURN = 3
CMD_DISCARD = 4
CMD_CHECKOUT = 5
CMD_CANCEL = 6
CMD_CREDIT = 7
CMD_GET = 8
CMD_PURGE = 9
CMD_SESSION_CLOSE = 10
CMD_SESSION_DOWN = 11
CMD_NODE_DOWN = 12
CMD_NODE_UP = 13
CMD_TICK = 14
CMD_PRODUCER = 17
CMD_RESERVATION = 18
CMD_STORE_OFFSET = 19
CMD_SESSION_OPEN = 20
CMD_CONFIG = 21
CMD_METADATA = 64

_SOFT = cython.declare(cython.Py_ssize_t, 4 << 20)
_CAPACITY_MIN = cython.declare(cython.Py_ssize_t, 512)
_UNBOUNDED = cython.declare(cython.Py_ssize_t, 1 << 62)


@cython.cclass
class Chunk:
    def __init__(self):
        self.data = None


@cython.cclass
class PendingCommand:
    def bytes(self):
        if self.chunk.data is None:
            raise ValueError("the command's batch is not sealed yet")
        return memoryview(self.chunk.data)[self.offset : self.offset + self.length]


@cython.cclass
class PendingBudget:
    def __init__(self, bytes_max=_UNBOUNDED):
        self.bytes = 0
        self.bytes_max = bytes_max
        self.waiting = set()


@cython.cclass
class PublishTarget:
    def __init__(self, builder: CommandBuilder, session, owner):
        self.builder = builder
        self.session = session
        self.seq = 0
        self.pending = deque()
        self.pending_bytes = 0
        self.pending_messages = 0
        self.pending_bytes_max = _UNBOUNDED
        self.pending_messages_max = _UNBOUNDED
        self.pending_commands_max = _UNBOUNDED
        self.budget = PendingBudget()
        self.owner = owner
        self.serves = 0
        self.spreads = False
        self.named = False
        self.producer = b""
        self.sequence = 0

    def __del__(self):
        self.budget.bytes -= self.pending_bytes

    def name_next(self, producer: bytes, sequence: uint64_t):
        builder: CommandBuilder = self.builder
        if builder.end > _SOFT and builder.on_full is not None:
            builder.close_command()
            builder.on_full()
        if (
            builder.open_target is not self
            or not builder.open_named
            or sequence != self.sequence + builder.open_count
            or producer != self.producer
        ):
            body = int(sequence).to_bytes(8, "little") + producer
            self.command(CMD_PRODUCER, 0, len(producer), 0, body)
            self.producer = producer
            self.sequence = sequence
        self.named = True

    def publish(self, record, body_size, tag, flags=0):
        joined: bytes = b"".join(record)
        n: cython.Py_ssize_t = len(joined)
        p: cython.p_uchar = bytes_pointer(joined)
        string.memcpy(self.reserve_record(p, n, tag, body_size, flags), p, n)

    def publish_records(self, command: bytes, count: cython.Py_ssize_t, tag: uint64_t):
        records: Records
        p: cython.p_uchar = bytes_pointer(command)
        open_records(p, len(command), 0, 0, count, cython.address(records))
        flags: cython.int = p[COMMAND_FLAGS] & ~ENQUEUE_SAME_SIZE
        n: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        for i in range(count):
            p = record_at(cython.address(records), i, cython.address(n))
            body_size: cython.Py_ssize_t = record_body_size(p, n)
            if body_size < 0:
                raise ValueError("record is damaged")
            string.memcpy(self.reserve_record(p, n, tag, body_size, flags), p, n)
            if tag:
                tag += 1

    @cython.cfunc
    def place(
        self,
        names: cython.p_uchar,
        names_length: cython.Py_ssize_t,
        content: cython.p_uchar,
        content_length: cython.Py_ssize_t,
        tag: cython.pointer(uint64_t),
    ) -> PublishTarget:
        return self

    @cython.cfunc
    def reserve_record(
        self,
        record: cython.p_uchar,
        n: cython.Py_ssize_t,
        tag: uint64_t,
        body_size: uint64_t,
        flags: cython.int,
    ) -> cython.p_uchar:
        target: PublishTarget = self
        if self.spreads:
            names: cython.Py_ssize_t = 1 + record[0] if n > 1 else n
            if names < n:
                names += 1 + cython.cast(cython.Py_ssize_t, record[names])
            if names > n:
                raise ValueError("record is damaged")
            target = self.place(record, names, record + names, n - names, cython.address(tag))
        return target.builder.reserve(target, tag, body_size, flags, n)

    def command(self, type, flags, count, arg, body=b"", note=None):
        builder: CommandBuilder = self.builder
        data: bytes = body
        n: cython.Py_ssize_t = len(data)
        was_empty: cython.bint = builder.end == ENTRY_HEADER_SIZE
        builder.close_command()
        self.seq += 1
        start: cython.Py_ssize_t = builder.end
        builder.start_command(type, flags, self.session, self.seq, count, arg, n)
        if n:
            string.memcpy(builder.p + start + COMMAND_HEADER_SIZE, bytes_pointer(data), n)
        _remember(self, builder, type, start, builder.end - start, 0, None, note)
        builder.announce(was_empty)
        return self.seq

    def applied(self, seq):
        done = []
        pending = self.pending
        while pending:
            first: PendingCommand = pending[0]
            if first.seq > seq:
                break
            pending.popleft()
            self.pending_bytes -= first.length
            self.pending_messages -= first.messages
            self.budget.bytes -= first.length
            done.append(first)
        return done

    def resend(self, after):
        for item in list(self.pending):
            command: PendingCommand = item
            if command.seq <= after or command.chunk.data is None:
                continue
            data: bytes = command.chunk.data
            self.builder.adopt(data, command.offset, command.offset + command.length)


@cython.cfunc
@cython.exceptval(check=False)
def record_body_size(p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.Py_ssize_t:
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(p, n, cython.address(size))
    if at < 0:
        return -1
    return cython.cast(cython.Py_ssize_t, load64(p + at + HEADER_BODY_SIZE))


@cython.cfunc
def _remember(
    target: PublishTarget,
    builder: CommandBuilder,
    type: cython.int,
    start: cython.Py_ssize_t,
    length: cython.Py_ssize_t,
    messages: uint32_t,
    tags: object,
    note: object,
) -> cython.int:
    command: PendingCommand = PendingCommand.__new__(PendingCommand)
    command.seq = target.seq
    command.type = type
    command.chunk = builder.chunk
    command.offset = start
    command.length = length
    command.messages = messages
    command.tags = tags
    command.note = note
    target.pending.append(command)
    target.pending_bytes += length
    target.pending_messages += messages
    target.budget.bytes += length
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _add_tags(tags: list, first: uint64_t, last: uint64_t) -> cython.int:
    """Appends a range. Of one tag, which is what publishes to a topic have, it is one object."""
    begin: object = first
    tags.append(begin)
    if last == first:
        tags.append(begin)
    else:
        tags.append(last)
    return 0


@cython.cclass
class CommandBuilder:
    def __cinit__(self):
        self.store = cython.NULL
        self.p = cython.NULL
        self.offsets = cython.NULL
        self.offsets_capacity = 0
        self.end = ENTRY_HEADER_SIZE
        self.capacity = 0
        self.hint = 4096
        self.last_end = 0
        self.command_count = 0
        self.deferrable_count = 0
        self.held = False
        self.open_start = -1

    def __init__(self, on_first=None, on_full=None):
        self.on_first = on_first
        self.on_full = on_full
        self.chunk = Chunk()
        self.open_target = None
        self.open_tags = None

    def __dealloc__(self):
        if self.store != cython.NULL:
            cext.Py_DECREF_raw(self.store)
        stdlib.free(self.offsets)

    @property
    def used(self):
        return self.end - ENTRY_HEADER_SIZE

    @property
    def full(self):
        return self.end > _SOFT

    @property
    def deferrable(self):
        return self.deferrable_count == self.command_count and self.end <= _SOFT

    @cython.cfunc
    @cython.exceptval(-1)
    def announce(self, was_empty: cython.bint) -> cython.int:
        if (was_empty or self.held) and self.on_first is not None:
            self.held = False
            self.on_first()
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def need(self, n: cython.Py_ssize_t) -> cython.int:
        wanted: cython.Py_ssize_t = self.end + n
        if wanted <= self.capacity:
            return 0
        if self.store == cython.NULL:
            capacity: cython.Py_ssize_t = max(self.hint, wanted)
            self.store = cext.PyBytes_FromStringAndSize(cython.NULL, capacity)
        else:
            capacity = max(wanted, self.capacity * 2)
            # On failure the store is gone and set to NULL by the call.
            try:
                cext._PyBytes_Resize(cython.address(self.store), capacity)
            except MemoryError:
                self.p = cython.NULL
                self.capacity = 0
                raise
        self.capacity = capacity
        self.p = cython.cast(cython.p_uchar, cext.PyBytes_AS_STRING(self.store))
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def start_command(
        self,
        type: cython.int,
        flags: cython.int,
        session: uint64_t,
        seq: uint64_t,
        count: uint32_t,
        arg: uint32_t,
        body_length: cython.Py_ssize_t,
    ) -> cython.int:
        length: cython.Py_ssize_t = (COMMAND_HEADER_SIZE + body_length + 7) & ~7
        self.need(length)
        p: cython.p_uchar = self.p + self.end
        # The last eight bytes hold the padding, if any.
        put64(p + length - 8, 0)
        put32(p, cython.cast(uint32_t, length))
        p[COMMAND_TYPE] = cython.cast(cython.uchar, type)
        p[COMMAND_FLAGS] = cython.cast(cython.uchar, flags)
        p[COMMAND_SPARE] = 0
        p[COMMAND_SPARE + 1] = 0
        put64(p + COMMAND_SESSION, session)
        put64(p + COMMAND_SEQ, seq)
        put32(p + COMMAND_COUNT, count)
        put32(p + COMMAND_ARG, arg)
        self.end += length
        self.command_count += 1
        self.deferrable_count += _is_deferrable(type, count)
        return 0

    @cython.cfunc
    def reserve(
        self,
        target: PublishTarget,
        tag: uint64_t,
        body_size: uint64_t,
        flags: cython.int,
        n: cython.Py_ssize_t,
    ) -> cython.p_uchar:
        first: cython.bint = False
        if self.open_target is not target or self.open_named != target.named:
            self.close_command()
            if self.end > _SOFT and self.on_full is not None:
                self.on_full()
            first = self.end == ENTRY_HEADER_SIZE or self.held
            target.seq += 1
            start: cython.Py_ssize_t = self.end
            self.start_command(TYPE_ENQUEUE, 0, target.session, target.seq, 0, 0, 8)
            self.open_target = target
            self.open_named = target.named
            self.open_start = start
            self.open_count = 0
            self.open_bytes = 0
            self.open_size = body_size
            self.open_flags = ENQUEUE_SAME_SIZE
            self.tag_first = 0
            self.open_tags = None
        elif self.end > _SOFT and self.on_full is not None:
            self.close_command()
            self.on_full()
            return self.reserve(target, tag, body_size, flags, n)
        if self.end + n > self.capacity:
            # With room for the table of offsets, or closing the command would double it all.
            self.need(n + 4 * (cython.cast(cython.Py_ssize_t, self.open_count) + 2) + 64)
        if self.open_count + 2 > self.offsets_capacity:
            capacity: cython.Py_ssize_t = max(64, self.offsets_capacity * 2)
            grown: cython.p_void = stdlib.realloc(self.offsets, capacity * 4)
            if grown == cython.NULL:
                raise MemoryError
            self.offsets = cython.cast(cython.pointer(uint32_t), grown)
            self.offsets_capacity = capacity
        self.offsets[self.open_count] = cython.cast(uint32_t, self.end - self.open_start)
        self.open_count += 1
        target.named = False
        self.open_bytes += body_size
        if body_size != self.open_size:
            self.open_flags &= ~ENQUEUE_SAME_SIZE
        self.open_flags |= flags
        if tag:
            if self.tag_first == 0:
                self.tag_first = tag
            elif tag != self.tag_last + 1:
                if self.open_tags is None:
                    self.open_tags = []
                _add_tags(self.open_tags, self.tag_first, self.tag_last)
                self.tag_first = tag
            self.tag_last = tag
        at: cython.Py_ssize_t = self.end
        self.end += n
        if first:
            self.announce(True)
        return self.p + at

    @cython.cfunc
    @cython.exceptval(-1)
    def close_command(self) -> cython.int:
        if self.open_target is None:
            return 0
        target: PublishTarget = self.open_target
        start: cython.Py_ssize_t = self.open_start
        count: uint32_t = self.open_count
        self.offsets[count] = cython.cast(uint32_t, self.end - start)
        position: cython.Py_ssize_t = (self.end - start + 3) & ~3
        length: cython.Py_ssize_t = (
            position + 4 * (cython.cast(cython.Py_ssize_t, count) + 1) + 7
        ) & ~7
        self.need(start + length - self.end)
        p: cython.p_uchar = self.p + start
        string.memset(p + (self.end - start), 0, position - (self.end - start))
        put64(p + length - 8, 0)
        string.memcpy(p + position, self.offsets, 4 * (cython.cast(cython.Py_ssize_t, count) + 1))
        put32(p, cython.cast(uint32_t, length))
        p[COMMAND_FLAGS] = cython.cast(cython.uchar, self.open_flags)
        put32(p + COMMAND_COUNT, count)
        put32(p + COMMAND_ARG, cython.cast(uint32_t, position))
        put64(p + ENQUEUE_BYTES, self.open_bytes)
        self.end = start + length
        tags: list = self.open_tags
        if self.tag_first:
            if tags is None:
                tags = []
            _add_tags(tags, self.tag_first, self.tag_last)
        # Any session that appends is the last one in `target`: its seq is this command's.
        _remember(target, self, TYPE_ENQUEUE, start, length, count, tags, None)
        self.open_target = None
        self.open_tags = None
        self.open_start = -1
        if (
            target.pending_messages > target.pending_messages_max
            or target.pending_bytes > target.pending_bytes_max
            or len(target.pending) > target.pending_commands_max
            or target.budget.bytes > target.budget.bytes_max
        ):
            target.owner.check_flow()
        return 0

    @cython.cfunc
    def seal(self) -> bytes:
        self.close_command()
        if self.store == cython.NULL:
            self.need(0)
        end: cython.Py_ssize_t = self.end
        if end != self.capacity:
            cext._PyBytes_Resize(cython.address(self.store), end)
        data: bytes = cython.cast(bytes, self.store)
        # The cast took its own reference; the builder's goes.
        cext.Py_DECREF_raw(self.store)
        self.store = cython.NULL
        self.p = cython.NULL
        self.capacity = 0
        # One large batch does not make the next one large.
        hint: cython.Py_ssize_t = min(end, self.last_end)
        self.hint = min(max(_CAPACITY_MIN, hint + (hint >> 2)), _SOFT)
        self.last_end = end
        self.end = ENTRY_HEADER_SIZE
        self.command_count = 0
        self.deferrable_count = 0
        self.held = False
        self.chunk.data = data
        self.chunk = Chunk.__new__(Chunk)
        return data

    def add(self, type, flags, session, seq, count, arg, body=b""):
        data: bytes = body
        n: cython.Py_ssize_t = len(data)
        was_empty: cython.bint = self.end == ENTRY_HEADER_SIZE
        self.close_command()
        start: cython.Py_ssize_t = self.end
        self.start_command(type, flags, session, seq, count, arg, n)
        if n:
            string.memcpy(self.p + start + COMMAND_HEADER_SIZE, bytes_pointer(data), n)
        self.announce(was_empty)

    def adopt(
        self, data: bytes, start: cython.Py_ssize_t, end: cython.Py_ssize_t, allowed: bytes = None
    ):
        if start < 0 or end > len(data) or start >= end:
            raise ValueError("command range lies outside its buffer")
        p: cython.p_uchar = bytes_pointer(data)
        table: cython.p_uchar = cython.NULL
        if allowed is not None:
            if len(allowed) != 32:
                raise ValueError("a table of command types has 256 bits")
            table = bytes_pointer(allowed)
        at: cython.Py_ssize_t = start
        count: cython.int = 0
        deferrable: cython.int = 0
        while at < end:
            length: cython.Py_ssize_t = _check_command(p, end, at)
            if length < 0:
                raise ValueError(f"malformed command at {at}")
            type: cython.int = p[at + COMMAND_TYPE]
            if table != cython.NULL and not (table[type >> 3] >> (type & 7)) & 1:
                raise ValueError(f"command type {type} is not in the version in force")
            deferrable += _is_deferrable(type, get32(p + at + COMMAND_COUNT))
            at += length
            count += 1
        if self.open_target is not None:
            self.close_command()
        if self.end > _SOFT and self.on_full is not None:
            self.on_full()
        was_empty: cython.bint = self.end == ENTRY_HEADER_SIZE
        self.need(end - start)
        string.memcpy(self.p + self.end, p + start, end - start)
        self.end += end - start
        self.command_count += count
        self.deferrable_count += deferrable
        self.announce(was_empty)

    def take_entry(self, group, index, term, time_ms):
        count: cython.int = self.command_count
        data: bytes = self.seal()
        return seal_entry(data, group, index, term, time_ms, ENTRY_COMMANDS, count)

    def take_forward(self, group, term):
        data: bytes = self.seal()
        p: cython.p_uchar = bytes_pointer(data)
        put_header(p, cython.cast(uint32_t, len(data)), FRAME_FORWARD, 0, group, term, 0, 0, 0)
        return data

    def discard_unsent(self):
        self.seal()


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_deferrable(type: cython.int, count: uint32_t) -> cython.bint:
    """Returns whether the sender of the command waits for no answer. A SETTLE of nothing asks for
    one."""
    return type == TYPE_SETTLE and count != 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _check_command(
    p: cython.p_uchar, size: cython.Py_ssize_t, at: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Returns the length of the command at `at`, or -1 when it does not lie wholly inside
    `size`."""
    if size - at < COMMAND_HEADER_SIZE:
        return -1
    length: cython.Py_ssize_t = get32(p + at)
    if length < COMMAND_HEADER_SIZE or length & 7 or length > size - at:
        return -1
    type: cython.int = p[at + COMMAND_TYPE]
    if type == TYPE_ENQUEUE:
        count: uint32_t = 0
        table: cython.Py_ssize_t = record_table(p, at + length, at, cython.address(count))
        if table < 0:
            return -1
        i: uint32_t
        low: uint32_t = ENQUEUE_RECORDS
        for i in range(count + 1):
            offset: uint32_t = get32(p + table + 4 * cython.cast(cython.Py_ssize_t, i))
            if offset < low:
                return -1
            low = offset
        if low > table - at:
            return -1
    elif type == TYPE_SETTLE or type == TYPE_RETURN or type == TYPE_DISCARD:
        if cython.cast(uint64_t, get32(p + at + COMMAND_COUNT)) * RANGE_SIZE > cython.cast(
            uint64_t, length - COMMAND_HEADER_SIZE
        ):
            return -1
    return length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def record_table(
    p: cython.pointer(cython.const[cython.uchar]),
    size: cython.Py_ssize_t,
    command: cython.Py_ssize_t,
    count: cython.pointer(uint32_t),
) -> cython.Py_ssize_t:
    if command < 0 or size - command < ENQUEUE_SIZE_MIN:
        return -1
    length: cython.Py_ssize_t = get32(p + command)
    if length < ENQUEUE_SIZE_MIN or length > size - command:
        return -1
    if p[command + COMMAND_TYPE] != TYPE_ENQUEUE:
        return -1
    n: uint32_t = get32(p + command + COMMAND_COUNT)
    position: cython.Py_ssize_t = get32(p + command + COMMAND_ARG)
    if position < ENQUEUE_RECORDS or position & 3 or position > length:
        return -1
    if (cython.cast(uint64_t, n) + 1) * 4 > cython.cast(uint64_t, length - position):
        return -1
    count[0] = n
    return command + position


@cython.cfunc
@cython.exceptval(-1)
def open_records(
    p: cython.p_uchar,
    size: cython.Py_ssize_t,
    command: cython.Py_ssize_t,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    records: cython.pointer(Records),
) -> cython.int:
    known: uint32_t = 0
    table: cython.Py_ssize_t = record_table(p, size, command, cython.address(known))
    total: cython.Py_ssize_t = known
    if table < 0 or first < 0 or count < 0 or first > total or count > total - first:
        raise ValueError("records lie outside their command")
    records.command = p + command
    records.table = p + table
    records.length = get32(p + command)
    return 0


def commands(data: bytes):
    found: list = []
    walk: CommandWalk = CommandWalk(data)
    while walk.next():
        found.append(
            (
                walk.type,
                walk.flags,
                walk.session,
                walk.seq,
                walk.count,
                walk.arg,
                walk.offset,
                walk.length,
            )
        )
    return found


@cython.cfunc
def _command_length(data: bytes, offset: cython.Py_ssize_t) -> cython.Py_ssize_t:
    size: cython.Py_ssize_t = len(data)
    if offset < 0 or offset > size - COMMAND_HEADER_SIZE:
        raise ValueError("command lies outside its entry")
    length: cython.Py_ssize_t = get32(bytes_pointer(data) + offset)
    if length < COMMAND_HEADER_SIZE or length > size - offset:
        raise ValueError("command lies outside its entry")
    return length


def command_body(data: bytes, offset: cython.Py_ssize_t):
    length: cython.Py_ssize_t = _command_length(data, offset)
    return data[offset + COMMAND_HEADER_SIZE : offset + length]


def enqueue_bytes(data: bytes, offset: cython.Py_ssize_t):
    if _command_length(data, offset) < ENQUEUE_RECORDS:
        raise ValueError("ENQUEUE command is too short")
    return get64(bytes_pointer(data) + offset + ENQUEUE_BYTES)


def ranges(data: bytes, offset: cython.Py_ssize_t, count: cython.Py_ssize_t):
    length: cython.Py_ssize_t = _command_length(data, offset)
    if count < 0 or count > (length - COMMAND_HEADER_SIZE) // RANGE_SIZE:
        raise ValueError("range table lies outside its command")
    p: cython.p_uchar = bytes_pointer(data) + offset + COMMAND_HEADER_SIZE
    i: cython.Py_ssize_t
    return [get64(p + 8 * i) for i in range(2 * count)]


def pack_ranges(values):
    n: cython.Py_ssize_t = len(values)
    data: bytes = bytes(n * 8) if n else b""
    p: cython.p_uchar = bytes_pointer(data)
    i: cython.Py_ssize_t
    for i in range(n):
        put64(p + 8 * i, values[i])
    return data


@cython.cfunc
@cython.exceptval(-1)
def _record_bounds(
    data: bytes,
    command: cython.Py_ssize_t,
    first: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    begin: cython.pointer(cython.Py_ssize_t),
    table: cython.pointer(cython.Py_ssize_t),
) -> cython.Py_ssize_t:
    """End of the records [first, first + count), absolute; `begin` and `table` are filled in."""
    size: cython.Py_ssize_t = len(data)
    p: cython.p_uchar = bytes_pointer(data)
    n: uint32_t = 0
    at: cython.Py_ssize_t = record_table(p, size, command, cython.address(n))
    if at < 0 or first < 0 or count < 1 or first + count > n:
        raise ValueError("record lies outside its command")
    low: cython.Py_ssize_t = get32(p + at + 4 * first)
    high: cython.Py_ssize_t = get32(p + at + 4 * (first + count))
    if low < ENQUEUE_RECORDS or high < low or command + high > at:
        raise ValueError("record table is damaged")
    begin[0] = command + low
    table[0] = at
    return command + high


def record(data: bytes, command: cython.Py_ssize_t, i: cython.Py_ssize_t):
    begin: cython.Py_ssize_t = 0
    table: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t = _record_bounds(
        data, command, i, 1, cython.address(begin), cython.address(table)
    )
    return data[begin:end]


def slice_records(
    data: bytes, command: cython.Py_ssize_t, first: cython.Py_ssize_t, count: cython.Py_ssize_t
):
    begin: cython.Py_ssize_t = 0
    table: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t = _record_bounds(
        data, command, first, count, cython.address(begin), cython.address(table)
    )
    size: cython.Py_ssize_t = end - begin
    position: cython.Py_ssize_t = (ENQUEUE_RECORDS + size + 3) & ~3
    length: cython.Py_ssize_t = (position + 4 * (count + 1) + 7) & ~7
    made: bytes = bytes(length)
    source: cython.p_uchar = bytes_pointer(data)
    p: cython.p_uchar = bytes_pointer(made)
    put32(p, cython.cast(uint32_t, length))
    p[COMMAND_TYPE] = TYPE_ENQUEUE
    p[COMMAND_FLAGS] = source[command + COMMAND_FLAGS]
    put32(p + COMMAND_COUNT, cython.cast(uint32_t, count))
    put32(p + COMMAND_ARG, cython.cast(uint32_t, position))
    string.memcpy(p + ENQUEUE_RECORDS, source + begin, size)
    shift: cython.Py_ssize_t = begin - command - ENQUEUE_RECORDS
    low: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    for i in range(count + 1):
        offset: cython.Py_ssize_t = get32(source + table + 4 * (first + i))
        if offset < low or command + offset > end:
            raise ValueError("record table is damaged")
        low = offset
        put32(p + position + 4 * i, cython.cast(uint32_t, offset - shift))
    return made
