"""Events of the binary log, built as a server sends them."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.capture.binlog import (
    Begin,
    Commit,
    Heartbeat,
    LogReader,
    RowKind,
    Rows,
    Statement,
)
from convoymq.capture.columns import of_log
from convoymq.capture.errors import CaptureError, DatabaseLost
from convoymq.capture.messages import RowChange, changes_of


def event(code: int, body: bytes, flags: int = 0, time_s: int = 5) -> bytes:
    return struct.pack("<IBIIIH", time_s, code, 1, 19 + len(body), 0, flags) + body


def form(checksum: int) -> bytes:
    """The event that a log begins with."""
    return event(15, bytes(60) + bytes([checksum]) + bytes(4))


TABLE = (
    struct.pack("<IHH", 7, 0, 1) + b"\4shop\0\1t\0" + b"\2" + b"\3\xfe" + b"\2\xfe\x04" + b"\2"
    # Signs, a default collation, names.
    + b"\1\1\x80" + b"\2\1\x3f" + b"\4\5\2id\1b"
)  # fmt: skip
ROW_1 = b"\0" + struct.pack("<I", 1) + b"\1\x09"
ROW_2 = b"\2" + struct.pack("<I", (1 << 32) - 1)


def rows(code: int, *images: bytes, body: bytes | None = None) -> bytes:
    head = struct.pack("<IHH", 7, 0, 1)
    if code in (30, 31, 32, 169, 170, 171):
        head += struct.pack("<H", 2)
    bitmaps = b"\3" * (2 if code in (24, 31, 167, 170) else 1)
    return event(code, head + b"\2" + bitmaps + (b"".join(images) if body is None else body))


def compressed(data: bytes) -> bytes:
    return bytes([0x82]) + struct.pack(">H", len(data)) + zlib.compress(data)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (23, RowKind.INSERT), (25, RowKind.DELETE), (30, RowKind.INSERT), (32, RowKind.DELETE),
        (166, RowKind.INSERT), (168, RowKind.DELETE), (169, RowKind.INSERT), (171, RowKind.DELETE),
    ],
)  # fmt: skip
def test_rows_are_read(code: int, kind: RowKind) -> None:
    reader = LogReader()
    assert reader.read(form(0)) is None
    assert reader.read(event(19, TABLE)) is None
    body = ROW_1 + ROW_2
    found = reader.read(rows(code, body=compressed(body) if code >= 166 else body))
    assert isinstance(found, Rows)
    assert found.kind is kind
    assert found.map.is_named
    assert (found.map.database, found.map.table) == ("shop", "t")
    columns = [of_log(each, None, {}) for each in found.map.columns]
    whole = [{"id": 1, "b": "CQAAAA=="}, {"id": (1 << 32) - 1, "b": None}]
    assert list(changes_of(found, columns)) == [
        RowChange(None, row) if kind is RowKind.INSERT else RowChange(row, None) for row in whole
    ]


@pytest.mark.parametrize("code", [24, 31, 167, 170])
def test_updates_have_both_rows(code: int) -> None:
    reader = LogReader()
    reader.read(event(19, TABLE))
    body = ROW_1 + ROW_2
    found = reader.read(rows(code, body=compressed(body) if code >= 166 else body))
    assert isinstance(found, Rows)
    columns = [of_log(each, None, {}) for each in found.map.columns]
    before, after = {"id": 1, "b": "CQAAAA=="}, {"id": (1 << 32) - 1, "b": None}
    assert list(changes_of(found, columns)) == [RowChange(before, after)]


def test_transactions_and_statements_are_read() -> None:
    reader = LogReader()
    begin = reader.read(event(162, struct.pack("<QIB", 138, 2, 1 | 64), time_s=9))
    assert begin == Begin(
        domain=2, server=1, sequence=138, time_s=9, is_standalone=True, is_prepared=True
    )
    assert isinstance(begin, Begin)
    assert begin.gtid == "2-1-138"
    assert reader.read(event(16, bytes(8))) == reader.read(event(38, b"")) == Commit()
    head = struct.pack("<IIBHH", 1, 0, 4, 0, 3) + b"abc" + b"shop\0"
    said = Statement(database="shop", text="TRUNCATE é")
    assert reader.read(event(2, head + "TRUNCATE é".encode())) == said
    assert reader.read(event(2, head + "TRUNCATE é".encode("latin-1"))) == said
    assert reader.read(event(165, head + compressed("TRUNCATE é".encode()))) == said
    assert reader.read(event(2, head + b"COMMIT")) == Commit()
    assert reader.read(event(2, head + b"BEGIN")) is None
    assert reader.read(event(27, b"")) == Heartbeat()


def test_a_checksum_is_looked_at() -> None:
    reader = LogReader()
    reader.read(form(1))
    data = event(16, bytes(8))
    assert reader.read(data + struct.pack("<I", zlib.crc32(data))) == Commit()
    with pytest.raises(DatabaseLost, match="checksum"):
        reader.read(data + struct.pack("<I", zlib.crc32(data) ^ 1))


def test_nothing_is_passed_over_that_may_change_rows() -> None:
    reader = LogReader()
    for code in (3, 4, 5, 13, 14, 160, 161, 163, 164):
        assert reader.read(event(code, b"")) is None
    assert reader.read(event(120, b"", flags=0x80)) is None
    with pytest.raises(CaptureError, match="type 120"):
        reader.read(event(120, b""))
    with pytest.raises(CaptureError, match="lost"):
        reader.read(event(26, b"\1\0"))
    with pytest.raises(CaptureError, match="without its map"):
        reader.read(rows(23, ROW_1))
    reader.read(event(19, TABLE))
    found = reader.read(rows(23, ROW_1[:-1]))
    assert isinstance(found, Rows)
    with pytest.raises(CaptureError, match="too early"):
        list(changes_of(found, [of_log(each, None, {}) for each in found.map.columns]))


@settings(max_examples=500)
@given(st.sampled_from((2, 16, 19, 23, 24, 25, 162, 165, 166)), st.binary(max_size=60))
def test_any_bytes_have_an_answer(code: int, body: bytes) -> None:
    reader = LogReader()
    reader.read(event(19, TABLE))
    with suppress(CaptureError):
        reader.read(event(code, body))
