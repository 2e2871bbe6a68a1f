"""Values of the log, without a server: bytes as MariaDB writes them, and their JSON."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.capture.binlog import Cursor, MapColumn
from convoymq.capture.columns import (
    TYPES,
    Column,
    address,
    decoded,
    of_catalogue,
    of_log,
    quoted,
    shortest,
)
from convoymq.capture.errors import CaptureError

CHARSETS = {8: "latin1", 45: "utf8mb4", 35: "ucs2", 1: "big5", 69: "dec8"}
STRING = 254 << 8


def column(type: str, **more: Any) -> Column:
    return Column(name="c", type=type, **more)


LONG = "12345678901234567890.0123456789"
# (column, metadata of the map, bytes of the log, what a query gives, JSON)
VECTORS: list[tuple[Column, int, str, Any, Any]] = [
    (column("tinyint"), 0, "ff", "-1", -1),
    (column("tinyint", unsigned=True), 0, "ff", "255", 255),
    (column("mediumint"), 0, "ffff7f", "8388607", 8388607),
    (column("int", unsigned=True), 0, "2a000000", "0000000042", 42),
    (column("bigint", unsigned=True), 0, "ff" * 8, str((1 << 64) - 1), (1 << 64) - 1),
    (column("bit", length=9), 0x0101, "0105", "261", 261),
    (column("year"), 0, "78", "2020", 2020),
    (column("year"), 0, "00", "0000", 0),
    (column("float"), 4, "c3f54840", "3.140000104904175", 3.14),
    (column("double"), 8, "9a9999999999b93f", "0.1", 0.1),
    (column("decimal", length=30, scale=10), 30 << 8 | 10, "8c149aa4350dfb38d200bc614e09", LONG,
     LONG),
    (column("decimal", length=5, scale=2), 5 << 8 | 2, "7ffecd", "-1.50", "-1.50"),
    (column("decimal", length=5, scale=2), 5 << 8 | 2, "800000", "000.00", "0.00"),
    (column("date"), 0, "5dc80f", "2020-02-29", "2020-02-29"),
    (column("date"), 0, "000000", "0000-00-00", "0000-00-00"),
    (column("time"), 0, "801083", "01:02:03", "01:02:03"),
    (column("time"), 0, "7fef7d", "-01:02:03", "-01:02:03"),
    (column("time", scale=2), 2, "7fffffe7", "-00:00:00.25", "-00:00:00.25"),
    (column("time", scale=6), 6, "b46efb000000", "838:59:59.000000", "838:59:59.000000"),
    (column("datetime"), 0, "99a5bac8b8", "2020-02-29 12:34:56", "2020-02-29T12:34:56"),
    (column("datetime", scale=3), 3, "80000000000000",
     "0000-00-00 00:00:00.000", "0000-00-00T00:00:00.000"),
    (column("timestamp"), 0, "5ed4eec0", "2020-06-01 12:04:16", "2020-06-01T12:04:16Z"),
    (column("timestamp", scale=1), 1, "0000000000", "0000-00-00 00:00:00.0",
     "0000-00-00T00:00:00.0Z"),
    (column("char", length=5, charset="utf8mb4"), STRING | 5, "026162", b"ab   ", "ab"),
    (column("char", length=10, charset="ucs2"), STRING | 10, "0400610020", b"\0a\0 ", "a"),
    (column("varchar", length=20, charset="latin1"), 20, "04636166e9", b"caf\xe9", "café"),
    (column("varchar", length=300, charset="utf8mb4"), 300, "0200c3a9", "é".encode(), "é"),
    (column("varchar", length=9, charset="utf8mb4"), 9, "0161", b"a", "a"),
    (column("text", charset="utf8mb4"), 2, "020061ff", b"a\xff", "a\ufffd"),
    (column("binary", length=4), STRING | 4, "0101", b"\1\0\0\0", "AQAAAA=="),
    (column("varbinary", length=4), 4, "0300ff00", b"\0\xff\0", "AP8A"),
    (column("blob"), 2, "0000", b"", ""),
    (column("enum", members=("a", "b")), 1, "02", "2", "b"),
    (column("enum", members=("a", "b")), 1, "00", "0", ""),
    (column("set", members=("z", "y", "x")), 1, "05", "5", "z,x"),
    (column("set", members=("z", "y", "x")), 1, "00", "0", ""),
    (column("uuid"), STRING | 16, "10" + "123e4567e89b12d3a456426614174000",
     bytes.fromhex("123e4567e89b12d3a456426614174000"), "123e4567-e89b-12d3-a456-426614174000"),
    (column("uuid"), STRING | 16, "0101", b"\1" + bytes(15),
     "01000000-0000-0000-0000-000000000000"),
    (column("inet6"), STRING | 16, "00", bytes(16), "::"),
    (column("inet4"), STRING | 4, "04c0000201", b"\xc0\0\2\1", "192.0.2.1"),
    (column("point"), 4, "05000000" + "e6100000" + "01", b"\xe6\x10\0\0\1",
     {"srid": 4326, "wkb": "AQ=="}),
]  # fmt: skip


@pytest.mark.parametrize(("of", "meta", "logged", "selected", "json"), VECTORS)
def test_a_value_is_one_json(of: Column, meta: int, logged: str, selected: Any, json: Any) -> None:
    row = Cursor(bytes.fromhex(logged))
    found = of.json(of.logged(row, meta))
    assert not row.has_more
    assert found == of.json(of.selected(selected)) == json
    assert type(found) is type(json)
    assert of.json(of.selected(None)) is None


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_has_the_fewest_digits_that_name_it(value: float) -> None:
    found = shortest(value)
    assert struct.pack("<f", found) == struct.pack("<f", value)
    assert len(Decimal(repr(found)).as_tuple().digits) <= 17
    assert float(f"{found:.9g}") == found


@given(st.binary(max_size=40))
def test_any_bytes_are_text_in_any_charset(data: bytes) -> None:
    for charset in ("latin1", "utf8mb4", "utf16", "big5", "koi8r"):
        decoded(data, charset)
    assert decoded(data, "latin1").encode("latin-1", "ignore") is not None


def test_latin1_has_a_character_for_every_byte() -> None:
    text = decoded(bytes(range(256)), "latin1")
    assert len(set(text)) == 256
    assert (text[0x80], text[0x81], text[0xE9]) == ("€", "\x81", "é")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("00010000000000020000000000000003", "1:0:0:2::3"),
        ("00010000000200030004000500060007", "1::2:3:4:5:6:7"),
        ("00000000000000000000ffff01020304", "::ffff:1.2.3.4"),
        ("00000000000000000000000001020304", "::1.2.3.4"),
        ("00000000000000000000000000000304", "::304"),
        ("00000000000000000000ffff00000000", "::ffff:0.0.0.0"),
    ],
)
def test_an_address_is_printed_as_the_server_does(raw: str, text: str) -> None:
    assert address(bytes.fromhex(raw)) == text


def test_every_type_of_the_catalogue_fits_its_own_map() -> None:
    for name, kind in TYPES.items():
        made = Column(name="c", type=name, length=20, scale=3, charset="utf8mb4")
        meta = {
            "decimal": 20 << 8 | 3, "time": 3, "datetime": 3, "timestamp": 3, "varchar": 20,
            "varbinary": 20, "char": STRING | 20, "binary": STRING | 20, "uuid": STRING | 16,
            "inet6": STRING | 16, "inet4": STRING | 4,
        }.get(name, kind.size)  # fmt: skip
        assert made.fits(MapColumn(code=kind.code, meta=meta)), name
        assert not made.fits(MapColumn(code=7, meta=meta)), name


def test_the_log_defines_columns_by_its_metadata() -> None:
    def logged(code: int, meta: int, hint: Column | None = None, **more: Any) -> Column:
        return of_log(MapColumn(code=code, meta=meta, name="c", **more), hint, CHARSETS)

    assert logged(8, 0, unsigned=True) == column("bigint", unsigned=True)
    assert logged(15, 20, collation=8) == column("varchar", length=20, charset="latin1")
    assert logged(15, 20, collation=63) == column("varbinary", length=20)
    assert logged(252, 3, collation=45) == column("mediumtext", charset="utf8mb4")
    assert logged(252, 4, collation=63) == column("longblob")
    members = ("ä".encode("latin-1"), b"b")
    assert logged(247, 1, collation=8, members=members).members == ("ä", "b")
    # UUID and INET6 are BINARY there.
    assert logged(254, STRING | 16, collation=63) == column("binary", length=16)
    assert logged(254, STRING | 16, column("uuid"), collation=63).type == "uuid"
    assert logged(254, STRING | 8, column("uuid"), collation=63).type == "binary"
    assert logged(3, 0, column("int", is_virtual=True)).is_virtual
    for wrong in (lambda: logged(140, 2), lambda: logged(15, 20, collation=69)):
        with pytest.raises(CaptureError, match="column c"):
            wrong()


def test_the_catalogue_defines_columns() -> None:
    made = of_catalogue("c", "enum", "enum('a','it''s',',')", charset="utf8mb4")
    assert made.members == ("a", "it's", ",")
    assert of_catalogue("c", "bigint", "bigint(20) unsigned", digits=20).unsigned
    assert of_catalogue("c", "int", "int(11)", extra="VIRTUAL GENERATED").is_virtual
    for type, whole, charset in (
        ("vector", "vector(3)", ""),
        ("text", "text /*M!100301 COMPRESSED*/", "utf8mb4"),
        ("datetime", "datetime /* mariadb-5.3 */", ""),
        ("varchar", "varchar(5)", "swe7"),
    ):
        with pytest.raises(CaptureError, match="column c: "):
            of_catalogue("c", type, whole, charset=charset)
    assert quoted("a`b") == "`a``b`"
