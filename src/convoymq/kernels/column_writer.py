"""Records to a columnar frame.

`ColumnWriter` reads records where they lie in their blocks and remembers where each value is; only
`finish` copies values, once, into the frame.
"""

import cython
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_BODY,
    AMQP_ENCODED,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_HEADER,
    AMQP_SIZE,
    HAS_HEADERS,
    HEADER_BODY_SIZE,
    HEADER_FLAGS,
    HEADER_PROPERTIES,
)
from cython.cimports.convoymq.kernels.area import Area, add, put_bit, put_end, reserve
from cython.cimports.convoymq.kernels.batch import Records, open_records
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    load16,
    load32,
    load64,
    put32,
    put64,
)
from cython.cimports.convoymq.kernels.column_frame import ColumnFrame
from cython.cimports.convoymq.kernels.column_text import add_json, add_text
from cython.cimports.convoymq.kernels.columns import (
    AREAS,
    DELIVERY_COUNT,
    DELIVERY_COUNTS,
    EXCHANGE,
    EXCHANGE_ENDS,
    EXCHANGES,
    FRAME_BODY_MAX,
    FRAME_ROWS_MAX,
    HEAD_SIZE,
    HEADER_NULLS,
    HEADERS,
    KEY,
    KEY_ENDS,
    KEY_NULLS,
    KEYS,
    LIST_ENDS,
    NAME_ENDS,
    NAMES,
    OFFSET,
    OFFSETS,
    PROPERTIES,
    PROPERTY_BYTES,
    PROPERTY_ENDS,
    REDELIVERED,
    REDELIVERIES,
    ROUTING_ENDS,
    ROUTING_KEY,
    ROUTING_KEYS,
    TEXT_ENDS,
    TEXT_NULLS,
    TEXTS,
    TIMES,
    TIMESTAMP,
    VALUE,
    VALUE_ENDS,
    VALUE_NULLS,
    VALUES,
    Piece,
    Source,
    area_count,
    assemble,
    check_columns,
    column_of,
    sealed,
)
from cython.cimports.convoymq.kernels.content import (
    Field,
    find_fields,
    find_header,
    is_named,
    names_length,
    next_field,
    plain_content,
)
from cython.cimports.convoymq.kernels.layout import ENQUEUE_RECORDS
from cython.cimports.convoymq.kernels.tombstone import is_tombstone_field
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import INT64_MAX, uint32_t, uint64_t


@cython.cfunc
@cython.exceptval(-1)
def _read_head(
    p: cython.p_uchar, n: cython.Py_ssize_t, row: cython.pointer(Row)
) -> cython.Py_ssize_t:
    """Finds names and content header of a record; returns where its body frames begin."""
    string.memset(row, 0, cython.sizeof(Row))
    length: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = find_header(p, n, cython.address(length))
    if at < 0 or p[at - AMQP_FRAME_HEAD] != AMQP_HEADER:
        raise ValueError("record is damaged")
    if length < HEADER_PROPERTIES or length > n - at - 1:
        raise ValueError("content header of a record is damaged")
    exchange: cython.Py_ssize_t = p[0]
    routing: cython.Py_ssize_t = p[exchange + 1]
    row.exchange = p + 1
    row.exchange_length = exchange
    row.routing = p + exchange + 2
    row.routing_length = routing
    row.header = p + at
    row.header_length = length
    row.body_length = load64(row.header + HEADER_BODY_SIZE)
    return at + length + 1


@cython.cfunc
@cython.exceptval(-1)
def _read_body(
    writer: ColumnWriter,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
    at: cython.Py_ssize_t,
    length: uint64_t,
) -> cython.Py_ssize_t:
    """Checks the body frames of a record and, when values are wanted, notes where they lie; returns
    how many pieces there are with it."""
    pieces: cython.Py_ssize_t = writer.piece_count
    wanted: cython.bint = writer.columns & VALUE != 0
    seen: uint64_t = 0
    size: cython.Py_ssize_t
    while at < n:
        if n - at < AMQP_FRAME_OVERHEAD or p[at] != AMQP_BODY:
            raise ValueError("body of a record is damaged")
        size = load32(p + at + AMQP_SIZE)
        if size > n - at - AMQP_FRAME_OVERHEAD:
            raise ValueError("body of a record is damaged")
        if wanted:
            if pieces == writer.piece_capacity:
                writer.reserve_pieces(pieces - writer.piece_count + 1)
            writer.pieces[pieces].p = p + at + AMQP_FRAME_HEAD
            writer.pieces[pieces].n = size
            pieces += 1
        seen += size
        at += size + AMQP_FRAME_OVERHEAD
    if seen != length:
        raise ValueError("body of a record is damaged")
    return pieces


@cython.cfunc
@cython.exceptval(-1)
def _read_headers(writer: ColumnWriter, row: cython.pointer(Row)) -> cython.Py_ssize_t:
    """Finds the key in the header table of a record and, when headers are wanted, appends them;
    returns what these cost."""
    if not load16(row.header + HEADER_FLAGS) & HAS_HEADERS:
        return 0
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = find_fields(row.header, row.header_length, cython.address(at))
    if size < 0:
        raise ValueError("content header of a record is damaged")
    row.has_table = True
    wanted: cython.bint = writer.columns & HEADERS != 0
    entries: cython.Py_ssize_t = writer.entries
    writer.is_empty = row.body_length == 0
    try:
        if writer.scan_headers(row.header + at, size, wanted) < 0:
            raise ValueError("header table of a record is damaged")
    except BaseException:
        writer.drop_headers(entries)
        raise
    row.key = writer.key
    row.key_length = writer.key_length
    row.is_null = writer.is_marked
    if not wanted:
        return 0
    return (
        9 * (writer.entries - entries)
        + writer.areas[NAMES].end
        + writer.areas[TEXTS].end
        - get32(writer.areas[NAME_ENDS].p + 4 * entries)
        - get32(writer.areas[TEXT_ENDS].p + 4 * entries)
    )


@cython.cfunc
@cython.exceptval(-1)
def _append_row(
    writer: ColumnWriter, row: cython.pointer(Row), pieces: cython.Py_ssize_t
) -> cython.int:
    """Appends a row for which there is room. `pieces`: of `_read_body`."""
    columns: uint32_t = writer.columns
    areas: cython.pointer(Area) = writer.areas
    if columns & KEY:
        if row.key != cython.NULL:
            add(areas + KEYS, row.key, row.key_length)
        else:
            writer.key_nulls = True
        put_bit(areas + KEY_NULLS, writer.rows, row.key != cython.NULL)
        put_end(areas + KEY_ENDS, areas[KEYS].end)
    if columns & VALUE:
        if row.is_null:
            writer.value_nulls = True
        put_bit(areas + VALUE_NULLS, writer.rows, not row.is_null)
        writer.piece_count = pieces
        writer.value_bytes += cython.cast(cython.Py_ssize_t, row.body_length)
        put_end(areas + VALUE_ENDS, writer.value_bytes)
    if columns & HEADERS:
        if not row.has_table:
            writer.header_nulls = True
        put_bit(areas + HEADER_NULLS, writer.rows, row.has_table)
        put_end(areas + LIST_ENDS, writer.entries)
    if columns & EXCHANGE:
        add(areas + EXCHANGES, row.exchange, row.exchange_length)
        put_end(areas + EXCHANGE_ENDS, areas[EXCHANGES].end)
    if columns & ROUTING_KEY:
        add(areas + ROUTING_KEYS, row.routing, row.routing_length)
        put_end(areas + ROUTING_ENDS, areas[ROUTING_KEYS].end)
    if columns & PROPERTIES:
        add(areas + PROPERTY_BYTES, row.header, row.header_length)
        put_end(areas + PROPERTY_ENDS, areas[PROPERTY_BYTES].end)
    writer.rows += 1
    return 0


@cython.cclass
class ColumnWriter:
    def __cinit__(self):
        string.memset(cython.address(self.areas[0]), 0, AREAS * cython.sizeof(Area))
        self.pieces = cython.NULL

    def __init__(self, columns, max_rows, max_bytes):
        check_columns(columns)
        self.columns = columns
        self.max_rows = max(1, min(max_rows, FRAME_ROWS_MAX))
        self.max_bytes = min(max_bytes, FRAME_BODY_MAX)
        self.rows = 0
        self.full = False
        self.dense = True
        self.key_nulls = False
        self.value_nulls = False
        self.header_nulls = False
        self.text_nulls = False
        self.entries = 0
        self.value_bytes = 0
        self.piece_count = 0
        self.blocks = []
        i: cython.int
        ends: cython.int = 0
        for i in range(AREAS):
            self.areas[i].end = 0
        for i in (
            KEY_ENDS,
            VALUE_ENDS,
            LIST_ENDS,
            NAME_ENDS,
            TEXT_ENDS,
            EXCHANGE_ENDS,
            ROUTING_ENDS,
            PROPERTY_ENDS,
        ):
            if columns & column_of(i):
                reserve(cython.address(self.areas[i]), 4)
                put_end(cython.address(self.areas[i]), 0)
                ends += 1
        # What a row costs besides its bytes: 8 for int64, 4 for int32, a byte for validity.
        self.row_cost = 4 * (ends + 2) + 3
        for i in range(2):
            if columns & column_of(i):
                self.row_cost += 8
        # Header, table, paddings: `bytes` is never below the length of the frame.
        self.bytes = HEAD_SIZE + 24 * cython.cast(cython.Py_ssize_t, area_count(columns)) + 4 * ends

    def __dealloc__(self):
        i: cython.int
        for i in range(AREAS):
            stdlib.free(self.areas[i].p)
        stdlib.free(self.pieces)

    def append(
        self,
        block: bytes,
        command: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        base: uint64_t,
        time_ms: uint64_t,
        acquired_count: uint32_t = 0,
        failed_delivery_count: uint32_t = 0,
    ):
        if block is None:
            raise ValueError("no block")
        records: Records
        open_records(
            bytes_pointer(block), len(block), command, first, count, cython.address(records)
        )
        if base > INT64_MAX - FRAME_ROWS_MAX or time_ms > INT64_MAX // 1000:
            raise ValueError("offset or time does not fit 63 bits")
        if count > self.max_rows - self.rows:
            count = self.max_rows - self.rows
            self.full = True
        if count == 0:
            return 0
        low: cython.Py_ssize_t = get32(records.table + 4 * first)
        end: cython.Py_ssize_t = get32(records.table + 4 * (first + count))
        if low < ENQUEUE_RECORDS or end < low or end > records.table - records.command:
            raise ValueError("record table is damaged")
        self.reserve_rows(count)
        if not self.blocks or self.blocks[len(self.blocks) - 1] is not block:
            self.blocks.append(block)
        taken: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        try:
            for i in range(count):
                high: cython.Py_ssize_t = get32(records.table + 4 * (first + i + 1))
                if high < low or high > end:
                    raise ValueError("record table is damaged")
                if self.add_row(records.command + low, high - low) == 0:
                    self.full = True
                    break
                taken += 1
                low = high
        finally:
            # Also when a record is damaged: the rows before it stand.
            self.finish_rows(taken, base, time_ms, acquired_count, failed_delivery_count)
        if self.rows == self.max_rows or self.bytes >= self.max_bytes:
            self.full = True
        return taken

    @cython.cfunc
    @cython.exceptval(-1)
    def reserve_rows(self, count: cython.Py_ssize_t) -> cython.int:
        """Makes room in all that grows by a fixed number of bytes a row."""
        columns: uint32_t = self.columns
        areas: cython.pointer(Area) = self.areas
        if columns & OFFSET:
            reserve(areas + OFFSETS, 8 * count)
        if columns & TIMESTAMP:
            reserve(areas + TIMES, 8 * count)
        if columns & KEY:
            reserve(areas + KEY_ENDS, 4 * count)
        if columns & VALUE:
            reserve(areas + VALUE_ENDS, 4 * count)
            self.reserve_pieces(count)
        if columns & HEADERS:
            reserve(areas + LIST_ENDS, 4 * count)
        if columns & EXCHANGE:
            reserve(areas + EXCHANGE_ENDS, 4 * count)
        if columns & ROUTING_KEY:
            reserve(areas + ROUTING_ENDS, 4 * count)
        if columns & PROPERTIES:
            reserve(areas + PROPERTY_ENDS, 4 * count)
        if columns & DELIVERY_COUNT:
            reserve(areas + DELIVERY_COUNTS, 4 * count)
        if columns & REDELIVERED:
            reserve(areas + REDELIVERIES, 4 * count)
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def reserve_pieces(self, count: cython.Py_ssize_t) -> cython.int:
        if self.piece_count + count <= self.piece_capacity:
            return 0
        capacity: cython.Py_ssize_t = max(self.piece_count + count, self.piece_capacity * 2, 16)
        grown: cython.p_void = stdlib.realloc(self.pieces, capacity * cython.sizeof(Piece))
        if grown == cython.NULL:
            raise MemoryError
        self.pieces = cython.cast(cython.pointer(Piece), grown)
        self.piece_capacity = capacity
        return 0

    @cython.cfunc
    @cython.exceptval(-2)
    def add_row(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        """Adds one record. 1 = taken, 0 = it does not fit any more and nothing has changed."""
        columns: uint32_t = self.columns
        row: Row
        names: cython.Py_ssize_t = names_length(p, n)
        if 0 <= names < n and p[names] >= AMQP_ENCODED:
            made: bytes = copy_bytes(p, names) + plain_content(copy_bytes(p + names, n - names))
            # Its values are copied when the frame is finished.
            self.blocks.append(made)
            p = bytes_pointer(made)
            n = len(made)
        at: cython.Py_ssize_t = _read_head(p, n, cython.address(row))
        pieces: cython.Py_ssize_t = _read_body(self, p, n, at, row.body_length)
        entries: cython.Py_ssize_t = self.entries
        cost: cython.Py_ssize_t = self.row_cost
        if columns & VALUE:
            cost += cython.cast(cython.Py_ssize_t, row.body_length)
        # Only an empty body can be null.
        if columns & (KEY | HEADERS) or (columns & VALUE and row.body_length == 0):
            cost += _read_headers(self, cython.address(row))
            if row.key == cython.NULL and row.exchange_length:
                row.key = row.routing
                row.key_length = row.routing_length
            if columns & KEY:
                cost += row.key_length
        if columns & EXCHANGE:
            cost += row.exchange_length
        if columns & ROUTING_KEY:
            cost += row.routing_length
        if columns & PROPERTIES:
            cost += row.header_length
        if self.bytes + cost > self.max_bytes and self.rows:
            self.drop_headers(entries)
            return 0
        if self.bytes + cost > FRAME_BODY_MAX:
            self.drop_headers(entries)
            raise ValueError("a record is too large for a columnar frame")
        self.bytes += cost
        _append_row(self, cython.address(row), pieces)
        return 1

    @cython.cfunc
    @cython.exceptval(-2)
    def scan_headers(
        self, p: cython.p_uchar, n: cython.Py_ssize_t, wanted: cython.bint
    ) -> cython.int:
        """Finds key and marker among the fields and, when wanted, appends the others; -1 =
        broken."""
        self.key = cython.NULL
        self.is_marked = False
        self.key_length = 0
        at: cython.Py_ssize_t = 0
        field: Field
        while at < n:
            step: cython.Py_ssize_t = next_field(p + at, n - at, 1, cython.address(field))
            if step < 0:
                return -1
            if (
                self.key == cython.NULL
                and is_named(cython.address(field), b"x-key", 5)
                and (field.value[0] == b"S" or field.value[0] == b"x")
            ):
                self.key = field.value + 5
                self.key_length = field.value_length - 5
            elif self.is_empty and is_tombstone_field(p + at):
                self.is_marked = True
            elif wanted:
                self.add_header(field.name, field.name_length, field.value, field.value_length)
            at += step
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def add_header(
        self,
        name: cython.p_uchar,
        k: cython.Py_ssize_t,
        value: cython.p_uchar,
        n: cython.Py_ssize_t,
    ) -> cython.int:
        names: cython.pointer(Area) = cython.address(self.areas[NAMES])
        texts: cython.pointer(Area) = cython.address(self.areas[TEXTS])
        void: cython.bint = value[0] == b"V"
        reserve(cython.address(self.areas[NAME_ENDS]), 4)
        reserve(cython.address(self.areas[TEXT_ENDS]), 4)
        put_bit(cython.address(self.areas[TEXT_NULLS]), self.entries, not void)
        add_text(names, name, k)
        if void:
            self.text_nulls = True
        else:
            add_json(texts, value, n, False)
        if names.end > FRAME_BODY_MAX or texts.end > FRAME_BODY_MAX:
            raise ValueError("a record is too large for a columnar frame")
        put_end(cython.address(self.areas[NAME_ENDS]), names.end)
        put_end(cython.address(self.areas[TEXT_ENDS]), texts.end)
        self.entries += 1
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def drop_headers(self, entries: cython.Py_ssize_t) -> cython.int:
        """Takes back the headers behind the first `entries`."""
        if not self.columns & HEADERS:
            return 0
        self.entries = entries
        self.areas[NAME_ENDS].end = 4 * (entries + 1)
        self.areas[TEXT_ENDS].end = 4 * (entries + 1)
        self.areas[NAMES].end = get32(self.areas[NAME_ENDS].p + 4 * entries)
        self.areas[TEXTS].end = get32(self.areas[TEXT_ENDS].p + 4 * entries)
        self.areas[TEXT_NULLS].end = (entries + 7) >> 3
        if entries & 7:
            self.areas[TEXT_NULLS].p[entries >> 3] &= (1 << (entries & 7)) - 1
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def finish_rows(
        self,
        taken: cython.Py_ssize_t,
        base: uint64_t,
        time_ms: uint64_t,
        acquired_count: uint32_t,
        failed_delivery_count: uint32_t,
    ) -> cython.void:
        """The columns that all rows of a run share."""
        if taken == 0:
            return
        i: cython.Py_ssize_t
        p: cython.p_uchar
        if self.rows == taken:
            self.base = base
            self.dense = True
        elif base != self.expected:
            self.dense = False
        self.expected = base + cython.cast(uint64_t, taken)
        if self.columns & OFFSET:
            p = self.areas[OFFSETS].p + self.areas[OFFSETS].end
            for i in range(taken):
                put64(p + 8 * i, base + cython.cast(uint64_t, i))
            self.areas[OFFSETS].end += 8 * taken
        if self.columns & TIMESTAMP:
            p = self.areas[TIMES].p + self.areas[TIMES].end
            for i in range(taken):
                put64(p + 8 * i, time_ms * 1000)
            self.areas[TIMES].end += 8 * taken
        if self.columns & DELIVERY_COUNT:
            p = self.areas[DELIVERY_COUNTS].p + self.areas[DELIVERY_COUNTS].end
            for i in range(taken):
                put32(p + 4 * i, min(failed_delivery_count, 0x7FFFFFFF))
            self.areas[DELIVERY_COUNTS].end += 4 * taken
        if self.columns & REDELIVERED:
            p = self.areas[REDELIVERIES].p + self.areas[REDELIVERIES].end
            for i in range(taken):
                put32(p + 4 * i, min(acquired_count, 0x7FFFFFFF))
            self.areas[REDELIVERIES].end += 4 * taken

    def finish(self, next: uint64_t, compression: str = ""):
        return sealed(self.assembled(next), compression)

    def frame(self, next: uint64_t):
        made: ColumnFrame = ColumnFrame.__new__(ColumnFrame)
        made.read(self.assembled(next), FRAME_BODY_MAX, False)
        return made

    @cython.cfunc
    def assembled(self, next: uint64_t):
        sources: Source[AREAS]
        i: cython.int
        for i in range(AREAS):
            sources[i].p = self.areas[i].p
            sources[i].n = self.areas[i].end
        if self.dense:
            sources[OFFSETS].n = 0
        if not self.key_nulls:
            sources[KEY_NULLS].n = 0
        if not self.value_nulls:
            sources[VALUE_NULLS].n = 0
        if not self.header_nulls:
            sources[HEADER_NULLS].n = 0
        if not self.text_nulls:
            sources[TEXT_NULLS].n = 0
        sources[VALUES].p = cython.NULL
        sources[VALUES].n = self.value_bytes
        return assemble(
            self.columns,
            self.rows,
            self.base if self.rows else next,
            next,
            cython.address(sources[0]),
            self.pieces,
            self.piece_count,
        )
