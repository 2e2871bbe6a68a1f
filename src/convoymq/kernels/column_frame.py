"""A columnar frame: checked as a whole, so that all that follows may trust its buffers."""

import cython
from cython.cimports.convoymq.kernels.amqp import AMQP_PAYLOAD_MAX
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    get32,
    get64,
    put32,
    put64,
    uninitialized,
)
from cython.cimports.convoymq.kernels.columns import (
    AREAS,
    DELIVERY_COUNTS,
    EXCHANGE,
    EXCHANGE_ENDS,
    FRAME_BODY_MAX,
    FRAME_MAGIC,
    FRAME_ROWS_MAX,
    HEAD_BASE,
    HEAD_BUFFERS,
    HEAD_COLUMNS,
    HEAD_COMPRESSION,
    HEAD_CRC,
    HEAD_LENGTH,
    HEAD_NEXT,
    HEAD_ROWS,
    HEAD_SIZE,
    HEAD_SPARE,
    HEAD_STORED,
    HEAD_VERSION,
    HEADER_NULLS,
    HEADERS,
    KEY,
    KEY_ENDS,
    KEY_NULLS,
    KEYS,
    LIST_ENDS,
    LZ4,
    NAME_ENDS,
    NAMES,
    OFFSET,
    OFFSETS,
    PROPERTY_ENDS,
    REDELIVERIES,
    ROUTING_ENDS,
    ROUTING_KEY,
    TABLE_ROW,
    TEXT_ENDS,
    TEXT_NULLS,
    TEXTS,
    TIMES,
    TIMESTAMP,
    UNCOMPRESSED,
    VALUE,
    VALUE_ENDS,
    VALUE_NULLS,
    VALUES,
    VERSION,
    Source,
    area_count,
    assemble,
    check_columns,
    checksum,
    column_of,
    decompressed,
    first_area,
    sealed,
)
from cython.cimports.cpython import buffer as cbuffer
from cython.cimports.libc import string
from cython.cimports.libc.stdint import INT64_MAX, uint32_t, uint64_t


@cython.cfunc
@cython.exceptval(-1)
def _read_table(frame: ColumnFrame, entry: cython.p_uchar, length: uint64_t) -> cython.int:
    """Finds the buffers of the frame's columns in its body, which has `length` bytes."""
    at: cython.Py_ssize_t = 0
    i: cython.int
    for i in range(AREAS):
        frame.at[i] = 0
        frame.length[i] = 0
        if not frame.columns & column_of(i):
            continue
        size: uint64_t = get64(entry + 8)
        if get64(entry) != cython.cast(uint64_t, at) or size > length - at:
            raise ValueError("buffer table of a columnar frame is broken")
        frame.at[i] = at
        frame.length[i] = cython.cast(cython.Py_ssize_t, size)
        at += (frame.length[i] + 7) & ~7
        if cython.cast(uint64_t, at) > length:
            raise ValueError("buffer table of a columnar frame is broken")
        entry += TABLE_ROW
    if cython.cast(uint64_t, at) != length:
        raise ValueError("buffer table of a columnar frame is broken")
    return 0


# The collector must clear neither this nor `view` while the buffer taken from it is held. No cycle
# goes through a view of bytes, so it need not look here at all.
@cython.no_gc
@cython.cclass
class ColumnFrame:
    def __cinit__(self):
        self.holding = False

    def __init__(self, data, body_max: cython.Py_ssize_t = 1 << 30):
        self.read(data, body_max, True)

    @cython.cfunc
    @cython.exceptval(-1)
    def read(self, data, body_max: cython.Py_ssize_t, sealed: cython.bint) -> cython.int:
        """Checks and keeps a frame. `sealed`: it came from elsewhere, with a checksum."""
        self.hold(data)
        p: cython.p_uchar = cython.cast(cython.p_uchar, self.held.buf)
        n: cython.Py_ssize_t = self.held.len
        if n < HEAD_SIZE:
            raise ValueError("columnar frame is shorter than its header")
        if get32(p) != FRAME_MAGIC:
            raise ValueError("not a columnar frame")
        if p[HEAD_VERSION] != VERSION or p[HEAD_VERSION + 1]:
            raise ValueError(
                f"columnar frame of version {p[HEAD_VERSION] | (p[HEAD_VERSION + 1] << 8)}"
            )
        kind: cython.int = p[HEAD_COMPRESSION] | (p[HEAD_COMPRESSION + 1] << 8)
        if kind > LZ4:
            raise ValueError(f"compression {kind} is not known")
        columns: uint32_t = get32(p + HEAD_COLUMNS)
        check_columns(columns)
        rows: cython.Py_ssize_t = get32(p + HEAD_ROWS)
        if rows > FRAME_ROWS_MAX:
            raise ValueError(f"columnar frame of {rows} rows, at most {FRAME_ROWS_MAX} are allowed")
        self.base = get64(p + HEAD_BASE)
        self.next = get64(p + HEAD_NEXT)
        if self.base > INT64_MAX - cython.cast(uint64_t, rows) or self.next > INT64_MAX:
            raise ValueError("offset of a columnar frame does not fit 63 bits")
        count: cython.Py_ssize_t = get32(p + HEAD_BUFFERS)
        if count != area_count(columns):
            raise ValueError(f"{count} buffers do not fit columns {columns}")
        start: cython.Py_ssize_t = HEAD_SIZE + TABLE_ROW * count
        if n < start or get64(p + HEAD_STORED) != cython.cast(uint64_t, n - start):
            raise ValueError("columnar frame is cut off or too long")
        length: uint64_t = get64(p + HEAD_LENGTH)
        if body_max > FRAME_BODY_MAX:
            body_max = FRAME_BODY_MAX
        if body_max < 0 or length > cython.cast(uint64_t, body_max) or get64(p + HEAD_SPARE):
            raise ValueError("header of a columnar frame is broken, or its body too large")
        if sealed and get32(p + HEAD_CRC) != checksum(p, n):
            raise ValueError("columnar frame checksum does not fit")
        self.columns = columns
        self.rows = rows
        if kind == UNCOMPRESSED:
            if length != cython.cast(uint64_t, n - start):
                raise ValueError("header of a columnar frame is broken")
            self.view = self.view[start:]
            self.body = p + start
        else:
            made: bytes = decompressed(kind, self.view[start:], length)
            self.view = memoryview(made)
            self.body = bytes_pointer(made)
        _read_table(self, p + HEAD_SIZE, length)
        self.check()
        if kind:
            # All that is needed from now on is the body.
            self.holding = False
            cbuffer.PyBuffer_Release(cython.address(self.held))
        return 0

    def __dealloc__(self):
        if self.holding:
            cbuffer.PyBuffer_Release(cython.address(self.held))

    @cython.cfunc
    @cython.exceptval(-1)
    def hold(self, data) -> cython.int:
        """Keeps the bytes in place. What others could still change is copied first."""
        view = memoryview(data)
        if not view.readonly or not view.contiguous:
            view = memoryview(bytes(view))
        elif view.ndim != 1 or view.itemsize != 1:
            view = view.cast("B")
        if self.holding:
            raise ValueError("a columnar frame is read once")
        cbuffer.PyObject_GetBuffer(view, cython.address(self.held), cbuffer.PyBUF_SIMPLE)
        self.holding = True
        self.view = view
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def check(self) -> cython.int:
        """Every buffer is as long as its column needs, and offsets stay inside their bytes."""
        n: cython.Py_ssize_t = self.rows
        columns: uint32_t = self.columns
        if columns & OFFSET and self.length[OFFSETS] and self.length[OFFSETS] != 8 * n:
            raise ValueError("offset column is damaged")
        if columns & TIMESTAMP and self.length[TIMES] != 8 * n:
            raise ValueError("timestamp column is damaged")
        if columns & KEY:
            self.check_validity(KEY_NULLS, n)
            self.check_ends(KEY_ENDS, n, self.length[KEYS])
        self.value_max = 0
        if columns & VALUE:
            self.check_validity(VALUE_NULLS, n)
            self.value_max = self.check_ends(VALUE_ENDS, n, self.length[VALUES])
        if columns & HEADERS:
            self.check_validity(HEADER_NULLS, n)
            self.check_ends(LIST_ENDS, n, -1)
            m: cython.Py_ssize_t = ends_at(self, LIST_ENDS, n)
            self.check_ends(NAME_ENDS, m, self.length[NAMES])
            self.check_validity(TEXT_NULLS, m)
            self.check_ends(TEXT_ENDS, m, self.length[TEXTS])
        i: cython.int
        for i in (EXCHANGE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
            if columns & column_of(i):
                self.check_ends(i, n, self.length[i + 1])
        for i in (DELIVERY_COUNTS, REDELIVERIES):
            if columns & column_of(i) and self.length[i] != 4 * n:
                raise ValueError("count column is damaged")
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def check_ends(
        self, area: cython.int, n: cython.Py_ssize_t, limit: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Returns the longest of n pieces; `limit` = length of their bytes, -1 = any."""
        if self.length[area] != 4 * (n + 1):
            raise ValueError("offsets of a column are damaged")
        p: cython.p_uchar = self.body + self.at[area]
        low: uint32_t = get32(p)
        longest: uint32_t = 0
        fallen: uint32_t = low
        i: cython.Py_ssize_t
        for i in range(n):
            high: uint32_t = get32(p + 4 * i + 4)
            fallen |= high < low
            longest = max(longest, high - low)
            low = high
        if fallen or low > 0x7FFFFFFF or (limit >= 0 and low != cython.cast(uint32_t, limit)):
            raise ValueError("offsets of a column are damaged")
        return longest

    @cython.cfunc
    @cython.exceptval(-1)
    def check_validity(self, area: cython.int, n: cython.Py_ssize_t) -> cython.int:
        if self.length[area] and self.length[area] != (n + 7) >> 3:
            raise ValueError("validity of a column is damaged")
        return 0

    def buffers(self, column: uint32_t):
        area: cython.int = first_area(column)
        if area < 0 or not self.columns & column:
            raise ValueError(f"the frame has no column {column}")
        view = self.view
        found: list = []
        while area < AREAS and column_of(area) == column:
            found.append(view[self.at[area] : self.at[area] + self.length[area]])
            area += 1
        return found

    def offsets(self):
        if not self.columns & OFFSET:
            raise ValueError("the frame has no offset column")
        if self.length[OFFSETS] or self.rows == 0:
            return self.view[self.at[OFFSETS] : self.at[OFFSETS] + self.length[OFFSETS]].cast("q")
        made: bytes = uninitialized(8 * self.rows)
        p: cython.p_uchar = bytes_pointer(made)
        i: cython.Py_ssize_t
        for i in range(self.rows):
            put64(p + 8 * i, self.base + cython.cast(uint64_t, i))
        return memoryview(made).cast("q")

    def runs(self, column: uint32_t):
        if column != EXCHANGE and column != ROUTING_KEY or not self.columns & column:
            raise ValueError(f"the frame has no text column {column}")
        area: cython.int = first_area(column)
        p: cython.p_uchar = self.body + self.at[area + 1]
        found: list = []
        first: cython.Py_ssize_t = 0
        start: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t = 0
        low: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        for i in range(self.rows):
            high: cython.Py_ssize_t = ends_at(self, area, i + 1)
            if i == 0 or high - low != length or string.memcmp(p + start, p + low, length) != 0:
                if i:
                    found.append((first, i - first, copy_bytes(p + start, length)))
                first = i
                start = low
                length = high - low
            low = high
        if self.rows:
            found.append((first, self.rows - first, copy_bytes(p + start, length)))
        return found

    def rows_within(
        self, first: cython.Py_ssize_t, bytes_max: cython.Py_ssize_t, fixed: cython.Py_ssize_t = 128
    ):
        if first < 0 or first > self.rows:
            raise ValueError("rows lie outside the frame")
        low: cython.Py_ssize_t = first
        high: cython.Py_ssize_t = self.rows
        # The bound rises with the number of rows.
        while low < high:
            middle: cython.Py_ssize_t = (low + high + 1) >> 1
            if command_bound(self, first, middle - first, fixed) <= bytes_max:
                low = middle
            else:
                high = middle - 1
        return max(low - first, min(1, self.rows - first))


@cython.cfunc
@cython.exceptval(check=False)
def command_bound(
    frame: ColumnFrame, first: cython.Py_ssize_t, count: cython.Py_ssize_t, fixed: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    last: cython.Py_ssize_t = first + count
    bound: cython.Py_ssize_t = 8 + count * fixed + 4 * (count + 2) + 8
    area: cython.int
    for area in (KEY_ENDS, VALUE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
        if frame.columns & column_of(area):
            bound += ends_at(frame, area, last) - ends_at(frame, area, first)
    if frame.columns & VALUE:
        n: cython.Py_ssize_t = ends_at(frame, VALUE_ENDS, last) - ends_at(frame, VALUE_ENDS, first)
        bound += 8 * (n // AMQP_PAYLOAD_MAX + count)
    if frame.columns & HEADERS:
        low: cython.Py_ssize_t = ends_at(frame, LIST_ENDS, first)
        high: cython.Py_ssize_t = ends_at(frame, LIST_ENDS, last)
        bound += 6 * (high - low)
        for area in (NAME_ENDS, TEXT_ENDS):
            bound += ends_at(frame, area, high) - ends_at(frame, area, low)
    return bound


# --- columns to a frame ------------------------------------------------------------------------


def build_frame(columns, rows, base, next, buffers, compression=""):
    check_columns(columns)
    if rows < 0 or rows > FRAME_ROWS_MAX:
        raise ValueError(f"columnar frame of {rows} rows, at most {FRAME_ROWS_MAX} are allowed")
    views = [_flat(item) for item in buffers]
    if len(views) != area_count(columns):
        raise ValueError(f"{len(views)} buffers do not fit columns {columns}")
    wanted: uint32_t = columns
    area: cython.int
    parts: dict = {}
    for area in range(AREAS):
        if wanted & column_of(area):
            parts[area] = views[len(parts)]
    _trim(parts, wanted, rows)
    sources: Source[AREAS]
    string.memset(cython.address(sources[0]), 0, AREAS * cython.sizeof(Source))
    held: cbuffer.Py_buffer[AREAS]
    holding: cython.int = 0
    try:
        for area, part in parts.items():
            cbuffer.PyObject_GetBuffer(part, cython.address(held[holding]), cbuffer.PyBUF_SIMPLE)
            sources[area].p = cython.cast(cython.p_uchar, held[holding].buf)
            sources[area].n = held[holding].len
            holding += 1
        made: bytes = assemble(wanted, rows, base, next, cython.address(sources[0]), cython.NULL, 0)
    finally:
        for area in range(holding):
            cbuffer.PyBuffer_Release(cython.address(held[area]))
    made = sealed(made, "")
    # Arrays of others are not trusted: what is built is what can be read.
    ColumnFrame(made)
    return sealed(made, compression) if compression else made


def _flat(item):
    view = memoryview(b"" if item is None else item)
    return view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")


@cython.cfunc
@cython.exceptval(-1)
def _trim(parts: dict, columns: uint32_t, rows: cython.Py_ssize_t) -> cython.int:
    """Cuts Arrow's buffers, which may be longer, to what the frame has."""
    area: cython.int
    for area in (OFFSETS, TIMES):
        if columns & column_of(area):
            parts[area] = parts[area][: 8 * rows]
    for area in (DELIVERY_COUNTS, REDELIVERIES):
        if columns & column_of(area):
            parts[area] = parts[area][: 4 * rows]
    if columns & KEY:
        parts[KEY_NULLS] = parts[KEY_NULLS][: (rows + 7) >> 3]
        _trim_pieces(parts, KEY_ENDS, rows)
    if columns & VALUE:
        parts[VALUE_NULLS] = parts[VALUE_NULLS][: (rows + 7) >> 3]
        _trim_pieces(parts, VALUE_ENDS, rows)
    for area in (EXCHANGE_ENDS, ROUTING_ENDS, PROPERTY_ENDS):
        if columns & column_of(area):
            _trim_pieces(parts, area, rows)
    if columns & HEADERS:
        parts[HEADER_NULLS] = parts[HEADER_NULLS][: (rows + 7) >> 3]
        parts[LIST_ENDS] = _trimmed_ends(parts[LIST_ENDS], rows)
        entries: cython.Py_ssize_t = _int32_at(parts[LIST_ENDS], rows)
        if _int32_at(parts[LIST_ENDS], 0) != 0:
            raise ValueError("headers of a slice: copy the array first")
        parts[TEXT_NULLS] = parts[TEXT_NULLS][: (entries + 7) >> 3]
        _trim_pieces(parts, NAME_ENDS, entries)
        _trim_pieces(parts, TEXT_ENDS, entries)
    return 0


@cython.cfunc
def _trimmed_ends(view, n: cython.Py_ssize_t):
    if n == 0 and len(view) < 4:
        return memoryview(bytes(4))
    if len(view) < 4 * (n + 1):
        raise ValueError("offsets of a column are too short")
    return view[: 4 * (n + 1)]


@cython.cfunc
@cython.exceptval(-1, check=True)
def _int32_at(view, i: cython.Py_ssize_t) -> cython.Py_ssize_t:
    value: cython.Py_ssize_t = int.from_bytes(view[4 * i : 4 * i + 4], "little", signed=True)
    if value < 0:
        raise ValueError("offsets of a column are damaged")
    return value


@cython.cfunc
@cython.exceptval(-1)
def _trim_pieces(parts: dict, area: cython.int, n: cython.Py_ssize_t) -> cython.int:
    """Offsets that begin at 0, and just the bytes that they speak of."""
    view = _trimmed_ends(parts[area], n)
    low: cython.Py_ssize_t = _int32_at(view, 0)
    high: cython.Py_ssize_t = _int32_at(view, n)
    data = parts[area + 1]
    if high < low or high > len(data):
        raise ValueError("offsets of a column are damaged")
    if low:
        moved: bytes = uninitialized(4 * (n + 1))
        source: bytes = bytes(view)
        p: cython.p_uchar = bytes_pointer(moved)
        q: cython.p_uchar = bytes_pointer(source)
        i: cython.Py_ssize_t
        for i in range(n + 1):
            put32(p + 4 * i, get32(q + 4 * i) - cython.cast(uint32_t, low))
        view = memoryview(moved)
        data = data[low:high]
    else:
        data = data[:high]
    parts[area] = view
    parts[area + 1] = data
    return 0
