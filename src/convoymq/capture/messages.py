"""Messages of a capture: places in the source, keys, Debezium's envelope, rows of the log."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from convoymq.capture.binlog import Cursor, RowKind, Rows
from convoymq.capture.columns import Column
from convoymq.capture.errors import CaptureError
from convoymq.model.json import Json

Row = dict[str, Json]

SNAPSHOT, LOG = 0, 1
_PLACE = struct.Struct(">IBQQ")
KEY_BYTES_MAX = 255
"""Of a routing key. A longer one is shown by its hash."""


def snapshot_place(generation: int, attempt: int, number: int) -> bytes:
    """Returns the place of a row of a snapshot."""
    return _PLACE.pack(generation, SNAPSHOT, attempt, number)


def log_place(generation: int, sequence: int, ordinal: int) -> bytes:
    """Returns the place of a change: behind those of the generation's snapshot."""
    return _PLACE.pack(generation, LOG, sequence, ordinal)


def tombstone_place(place: bytes) -> bytes:
    """Returns the place of the tombstone behind a delete: before that of the next change."""
    return place + b"\0"


def sequence_of(gtid: str) -> int:
    """Returns the number of a transaction: the last part of domain-server-sequence."""
    return int(gtid.rsplit("-", 1)[1]) if gtid else 0


def domain_of(gtid: str) -> int:
    """Returns the replication domain of a transaction."""
    return int(gtid.partition("-")[0])


def key_of(table: str, columns: Sequence[str], row: Mapping[str, Json]) -> bytes:
    """Returns the order key of a row: `table:value:value`, the same on every way to the row."""
    values = [row[column] for column in columns]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
    key = ":".join(each.replace("%", "%25").replace(":", "%3A") for each in (table, *texts))
    data = key.encode()
    if len(data) <= KEY_BYTES_MAX:
        return data
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    return b"%s:%%23%s" % (table.encode()[:128], digest.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Origin of a change."""

    database: str
    table: str
    gtid: str
    place: bytes
    is_snapshot: bool
    time_ms: int


def body_of(op: str, before: Row | None, after: Row | None, source: Source) -> bytes:
    """Returns an event in Debezium's envelope. Equal changes give equal bytes."""
    event = {
        "op": op,
        "before": before,
        "after": after,
        "source": {
            "db": source.database,
            "table": source.table,
            "gtid": source.gtid,
            "place": source.place.hex(),
            "snapshot": source.is_snapshot,
        },
        "ts_ms": source.time_ms,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row before and after a change; None: it was not there, or is gone."""

    before: Row | None
    after: Row | None


def changes_of(rows: Rows, columns: Sequence[Column]) -> Iterator[RowChange]:
    """Yields the changes of an event.

    Raises:
        CaptureError: the log does not have whole rows.
    """
    for present in rows.present:
        missing = [
            column.name
            for place, column in enumerate(columns)
            if not column.is_virtual and not _bit(present, place)
        ]
        if missing:
            raise CaptureError(
                f"the binary log has rows of {rows.map.table} without {', '.join(missing)}: a"
                " session has set binlog_row_image to something else than FULL"
            )
    held = [
        [
            (column, logged.meta)
            for place, (column, logged) in enumerate(zip(columns, rows.map.columns, strict=True))
            if _bit(present, place)
        ]
        for present in rows.present
    ]
    cursor = Cursor(rows.body)
    while cursor.has_more:
        images = [_image(cursor, each) for each in held]
        if rows.kind is RowKind.INSERT:
            yield RowChange(None, images[0])
        elif rows.kind is RowKind.DELETE:
            yield RowChange(images[0], None)
        else:
            yield RowChange(images[0], images[1])


def _image(cursor: Cursor, held: Sequence[tuple[Column, int]]) -> Row:
    """Returns the next row. `held`: its columns, with the metadata of their types."""
    nulls = cursor.take((len(held) + 7) // 8)
    row: Row = {}
    for number, (column, meta) in enumerate(held):
        raw = None if _bit(nulls, number) else column.logged(cursor, meta)
        if not column.is_virtual:
            row[column.name] = column.json(raw)
    return row


def _bit(bits: bytes, place: int) -> int:
    return bits[place >> 3] >> (place & 7) & 1
