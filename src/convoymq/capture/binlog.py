"""Reader of MariaDB's binary log: bytes of events in, events out.

    Begin ─▶ TableMap ─▶ Rows … ─▶ Commit        a transaction of row events
    Begin ─▶ Statement (─▶ Commit)               a statement: DDL, or changes logged as text

The reader has no socket. `LogReader.read` takes one event as the server sends it and returns None
for events that change no row. An event that may change rows and is not understood raises
`CaptureError`: nothing is passed over in silence.

Source: MariaDB's documentation of the replication protocol (replication events).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from convoymq.capture.errors import CaptureError, DatabaseLost

HEADER = struct.Struct("<IBIIIH")
CHECKSUM_BYTES = 4
CHECKSUM_CRC32 = 1

QUERY, FORMAT, XID, TABLE_MAP, INCIDENT, HEARTBEAT, XA_PREPARE = 2, 15, 16, 19, 26, 27, 38
GTID = 162
QUERY_COMPRESSED = 165
IGNORED = frozenset((3, 4, 5, 13, 14, 160, 161, 163, 164))
"""Stop, rotate, variables of statements, annotations, checkpoints, GTID lists, encryption."""
IGNORABLE_FLAG = 0x80
STANDALONE, PREPARED_XA = 1, 64
"""Flags of a GTID: no commit follows; a transaction that is only prepared."""


class RowKind(Enum):
    """Change of a row."""

    INSERT = "c"
    UPDATE = "u"
    DELETE = "d"


ROWS = {
    23: RowKind.INSERT, 24: RowKind.UPDATE, 25: RowKind.DELETE,
    30: RowKind.INSERT, 31: RowKind.UPDATE, 32: RowKind.DELETE,
    166: RowKind.INSERT, 167: RowKind.UPDATE, 168: RowKind.DELETE,
    169: RowKind.INSERT, 170: RowKind.UPDATE, 171: RowKind.DELETE,
}  # fmt: skip
ROWS_SECOND_VERSION = frozenset((30, 31, 32, 169, 170, 171))
ROWS_COMPRESSED = frozenset(range(166, 172))
META_BYTES = {
    4: 1, 5: 1, 15: 2, 16: 2, 17: 1, 18: 1, 19: 1, 140: 1, 141: 2, 245: 1, 246: 2, 247: 2,
    248: 2, 249: 1, 250: 1, 251: 1, 252: 1, 253: 2, 254: 2, 255: 1,
}  # fmt: skip
"""Bytes of metadata in a table map, by the code of a column's type; others have none."""
BIG_ENDIAN_META = frozenset((246, 247, 248, 253, 254))
NUMERIC = frozenset((1, 2, 3, 4, 5, 8, 9, 13, 246))
"""Codes of types that have a sign in the metadata of names."""
CHARACTER = frozenset((15, 252, 253, 254, 255))
"""Codes of types that have a collation there; a geometry has that of bytes."""
BINARY_COLLATION = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class MapColumn:
    """A column as the log has it."""

    code: int
    """Type; of an ENUM or SET its own code, not that of the string it is stored as."""
    meta: int
    name: str = ""
    """Empty: the server does not log names (`binlog_row_metadata`)."""
    unsigned: bool = False
    collation: int = 0
    """0 = not logged, or no text."""
    members: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMap:
    """Columns of a table, as of the row events that follow."""

    database: str
    table: str
    columns: tuple[MapColumn, ...]

    @property
    def is_named(self) -> bool:
        """Returns whether names of columns are logged."""
        return all(column.name for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A transaction begins."""

    domain: int
    server: int
    sequence: int
    time_s: int
    is_standalone: bool
    is_prepared: bool

    @property
    def gtid(self) -> str:
        """Returns domain-server-sequence."""
        return f"{self.domain}-{self.server}-{self.sequence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The transaction is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement, in the server's or a client's words."""

    database: str
    """Default of names without one."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Changed rows of one table, undecoded."""

    kind: RowKind
    map: TableMap
    present: tuple[bytes, ...]
    """Bitmaps of the columns that a row has: before, and after an update."""
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The log has nothing more for now."""


Event = Begin | Commit | Statement | Rows | Heartbeat


class Cursor:
    """Place in the bytes of an event. Raises CaptureError past the end."""

    __slots__ = ("data", "place")

    def __init__(self, data: bytes, place: int = 0) -> None:
        self.data = data
        self.place = place

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        end = self.place + size
        if end > len(self.data):
            raise CaptureError("an event of the binary log ends too early")
        taken = self.data[self.place : end]
        self.place = end
        return taken

    def uint(self, size: int) -> int:
        """Returns the next unsigned number, little-endian."""
        return int.from_bytes(self.take(size), "little")

    def packed(self) -> int:
        """Returns the next length-coded number."""
        first = self.uint(1)
        return first if first < 251 else self.uint({252: 2, 253: 3, 254: 8}[first])

    def text(self) -> bytes:
        """Returns the next length-coded string."""
        return self.take(self.packed())

    @property
    def has_more(self) -> bool:
        """Returns whether bytes are left."""
        return self.place < len(self.data)


class LogReader:
    """State of one connection: the form of events and the maps of tables."""

    def __init__(self) -> None:
        self._has_checksum = False
        self._maps: dict[int, TableMap] = {}

    def read(self, data: bytes) -> Event | None:
        """Returns the event in `data`; None: it changes no row.

        Raises:
            CaptureError: an event that may change rows and is not understood.
            DatabaseLost: damaged on its way.
        """
        try:
            return self._event(data)
        except (ValueError, LookupError, struct.error, zlib.error) as error:
            raise CaptureError(f"an event of the binary log is not understood: {error}") from error

    def _event(self, data: bytes) -> Event | None:
        time_s, code, server, _, _, flags = HEADER.unpack_from(data)
        if code == FORMAT:
            # The algorithm stands before the event's own checksum, which is always there.
            self._has_checksum = data[-CHECKSUM_BYTES - 1] == CHECKSUM_CRC32
            self._maps.clear()
            return None
        if self._has_checksum:
            found = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
            data = data[:-CHECKSUM_BYTES]
            if zlib.crc32(data) != found:
                raise DatabaseLost("an event of the binary log has a wrong checksum")
        body = Cursor(data, HEADER.size)
        if code in ROWS:
            return self._rows(code, body)
        if code == TABLE_MAP:
            number = body.uint(6)
            self._maps[number] = _table_map(body)
            return None
        if code == GTID:
            sequence, domain, kind = body.uint(8), body.uint(4), body.uint(1)
            return Begin(
                domain=domain, server=server, sequence=sequence, time_s=time_s,
                is_standalone=bool(kind & STANDALONE), is_prepared=bool(kind & PREPARED_XA),
            )  # fmt: skip
        if code in (XID, XA_PREPARE):
            return Commit()
        if code in (QUERY, QUERY_COMPRESSED):
            return _statement(body, is_compressed=code == QUERY_COMPRESSED)
        if code == HEARTBEAT:
            return Heartbeat()
        if code == INCIDENT:
            raise CaptureError("the server has noted in its binary log that changes were lost")
        if code not in IGNORED and not flags & IGNORABLE_FLAG:
            raise CaptureError(f"events of type {code} of the binary log are not served")
        return None

    def _rows(self, code: int, body: Cursor) -> Rows:
        number = body.uint(6)
        body.take(2)
        if code in ROWS_SECOND_VERSION:
            body.take(body.uint(2) - 2)
        table = self._maps.get(number)
        if table is None:
            raise CaptureError("the binary log has rows of a table without its map")
        count = body.packed()
        if count != len(table.columns):
            raise CaptureError(f"rows of {table.table} have other columns than its map")
        kind = ROWS[code]
        images = 2 if kind is RowKind.UPDATE else 1
        present = tuple(body.take((count + 7) // 8) for _ in range(images))
        rest = body.take(len(body.data) - body.place)
        if code in ROWS_COMPRESSED:
            rest = _inflated(rest)
        return Rows(kind=kind, map=table, present=present, body=rest)


def _inflated(data: bytes) -> bytes:
    """Returns what a compressed event stands for: a byte has the length of the length behind it."""
    return zlib.decompress(data[1 + (data[0] & 7) :])


def _statement(body: Cursor, *, is_compressed: bool) -> Statement | Commit | None:
    body.take(8)
    database_bytes = body.uint(1)
    body.take(2)
    body.take(body.uint(2))
    database = body.take(database_bytes)
    body.take(1)
    text = body.take(len(body.data) - body.place)
    if is_compressed:
        text = _inflated(text)
    if text in (b"COMMIT", b"ROLLBACK"):
        return Commit()
    if text == b"BEGIN" or text.startswith(b"SAVEPOINT "):
        return None
    return Statement(database=_name(database), text=_name(text))


def _name(data: bytes) -> str:
    """Returns text of a client, who may have spoken another charset than UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _table_map(body: Cursor) -> TableMap:
    body.take(2)
    database = body.take(body.uint(1)).decode()
    body.take(1)
    table = body.take(body.uint(1)).decode()
    body.take(1)
    codes = list(body.take(body.packed()))
    meta = Cursor(body.text())
    metas = []
    for place, code in enumerate(codes):
        size = META_BYTES.get(code, 0)
        value = int.from_bytes(meta.take(size), "big" if code in BIG_ENDIAN_META else "little")
        if code == 254 and value >> 8 in (247, 248):
            codes[place], value = value >> 8, value & 0xFF
        metas.append(value)
    body.take((len(codes) + 7) // 8)
    more: dict[int, Cursor] = {}
    while body.has_more:
        kind = body.uint(1)
        more[kind] = Cursor(body.text())
    return TableMap(database=database, table=table, columns=_columns(codes, metas, more))


def _columns(codes: list[int], metas: list[int], more: dict[int, Cursor]) -> tuple[MapColumn, ...]:
    """Returns the columns with their optional metadata."""
    signs = iter(_signs(more.get(1)))
    texts = iter(_collations(more.get(2), more.get(3), sum(code in CHARACTER for code in codes)))
    choices = iter(_collations(more.get(10), more.get(11), sum(c in (247, 248) for c in codes)))
    members = {247: more.get(6), 248: more.get(5)}
    names = more.get(4)
    columns = []
    for code, meta in zip(codes, metas, strict=True):
        of_choice = members.get(code)
        known: tuple[bytes, ...] = ()
        if of_choice is not None:
            known = tuple(of_choice.text() for _ in range(of_choice.packed()))
        collations = texts if code in CHARACTER else choices if code in members else iter(())
        columns.append(
            MapColumn(
                code=code,
                meta=meta,
                name="" if names is None else names.text().decode(),
                unsigned=code in NUMERIC and next(signs, False),
                collation=next(collations, 0),
                members=known,
            )
        )
    return tuple(columns)


def _signs(bits: Cursor | None) -> Iterator[bool]:
    """Yields for each number whether it has no sign."""
    for byte in b"" if bits is None else bits.data:
        for shift in range(7, -1, -1):
            yield bool(byte >> shift & 1)


def _collations(usual: Cursor | None, each: Cursor | None, count: int) -> list[int]:
    """Returns the collation of each text: one by one, or the usual one and what differs."""
    if each is not None:
        return [each.packed() for _ in range(count)]
    if usual is None:
        return [0] * count
    found = [usual.packed()] * count
    while usual.has_more:
        place = usual.packed()
        found[place] = usual.packed()
    return found
