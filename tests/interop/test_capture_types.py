"""One value, one JSON: rows of every type by the snapshot and by the binary log of a real MariaDB.

Rows are captured by the snapshot. Then a column beside them is changed, and the log's rows before
and after, and their keys, are those of the snapshot.
"""

from __future__ import annotations

import datetime
import decimal
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.mariadb import MariaDb, Topic, capture, execute, needs_mariadb
from tests.ports import single_port

pytestmark = [pytest.mark.optional, needs_mariadb]

BYTES = st.binary(max_size=20)
TEXT = st.text(st.characters(exclude_categories=("Cs",), max_codepoint=0x10FFFF), max_size=12)
LATIN = st.text(st.characters(max_codepoint=0xFF, exclude_categories=("Cc",)), max_size=12)
CYRILLIC = st.text("абвгдеёжзАБВ xyz", max_size=12)
MICROS = st.integers(0, 999_999)


def whole(bits: int, *, unsigned: bool = False) -> st.SearchStrategy[int]:
    least = 0 if unsigned else -(1 << bits - 1)
    return st.integers(least, least + (1 << bits) - 1)


def decimals(digits: int, places: int) -> st.SearchStrategy[str]:
    most = decimal.Decimal(10 ** (digits - places) - 1)
    return st.decimals(-most, most, places=places).map(str)


def times(places: int) -> st.SearchStrategy[str]:
    def text(sign: str, h: int, m: int, s: int, us: int) -> str:
        return f"{sign}{h:02d}:{m:02d}:{s:02d}.{us:06d}"[: 9 + places + len(sign) + (h > 99)]

    return st.builds(
        text, st.sampled_from(("", "-")), st.integers(0, 837), st.integers(0, 59),
        st.integers(0, 59), MICROS,
    )  # fmt: skip


MOMENT = st.datetimes(datetime.datetime(1000, 1, 1), datetime.datetime(9999, 12, 31)).map(str)
STAMP = st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2038, 1, 1)).map(str)
DAY = st.dates(datetime.date(1, 1, 1)).map(str) | st.sampled_from(
    ("0000-00-00", "2020-00-00", "2020-11-00", "0000-12-31", "9999-12-31")
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLES = st.floats(allow_nan=False, allow_infinity=False)

# name → (definition, values): how each is written, and read by the server itself.
COLUMNS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "tiny": ("TINYINT", whole(8)),
    "tiny_u": ("TINYINT UNSIGNED", whole(8, unsigned=True)),
    "bool": ("TINYINT(1)", st.integers(0, 1)),
    "small": ("SMALLINT", whole(16)),
    "small_u": ("SMALLINT UNSIGNED", whole(16, unsigned=True)),
    "medium": ("MEDIUMINT", whole(24)),
    "medium_u": ("MEDIUMINT UNSIGNED", whole(24, unsigned=True)),
    "int_": ("INT", whole(32)),
    "int_u": ("INT(10) UNSIGNED ZEROFILL", whole(32, unsigned=True)),
    "big": ("BIGINT", whole(64)),
    "big_u": ("BIGINT UNSIGNED", whole(64, unsigned=True)),
    "bit1": ("BIT(1)", whole(1, unsigned=True)),
    "bit9": ("BIT(9)", whole(9, unsigned=True)),
    "bit64": ("BIT(64)", whole(64, unsigned=True)),
    "year_": ("YEAR", st.integers(1901, 2155) | st.just(0)),
    "f": ("FLOAT", FLOATS),
    "f_fixed": ("FLOAT(9,3)", st.floats(-99999, 99999, width=32)),
    "d": ("DOUBLE", DOUBLES),
    "d_fixed": ("DOUBLE(20,2)", st.floats(-1e15, 1e15)),
    "n": ("DECIMAL(10,2)", decimals(10, 2)),
    "n_wide": ("DECIMAL(65,30)", decimals(65, 30)),
    "n_whole": ("DECIMAL(9,0)", decimals(9, 0)),
    "n_fraction": ("DECIMAL(5,5)", st.integers(-99999, 99999).map(lambda n: str(n / 100000))),
    "n_zero": ("DECIMAL(12,3) ZEROFILL", st.integers(0, 10**9).map(lambda n: f"{n / 1000:.3f}")),
    "day": ("DATE", DAY),
    **{f"t{n}": (f"TIME({n})", times(n)) for n in range(7)},
    **{f"dt{n}": (f"DATETIME({n})", MOMENT) for n in (0, 1, 2, 3, 4, 5, 6)},
    "dt_zero": ("DATETIME", st.sampled_from(("0000-00-00 00:00:00", "2020-00-00 01:02:03"))),
    **{f"ts{n}": (f"TIMESTAMP({n}) NULL", STAMP) for n in (0, 1, 3, 6)},
    "ts_zero": ("TIMESTAMP(3) NULL", st.just("0000-00-00 00:00:00")),
    "c": ("CHAR(12)", TEXT),
    "c_long": ("CHAR(200)", TEXT),
    "c_ucs2": ("CHAR(12) CHARACTER SET ucs2", CYRILLIC),
    "v": ("VARCHAR(12)", TEXT),
    "v_long": ("VARCHAR(2000)", TEXT),
    "v_latin": ("VARCHAR(12) CHARACTER SET latin1", LATIN),
    "v_koi": ("VARCHAR(12) CHARACTER SET koi8r", CYRILLIC),
    "v_utf16": ("VARCHAR(12) CHARACTER SET utf16", TEXT),
    "x_tiny": ("TINYTEXT", TEXT),
    "x": ("TEXT", TEXT),
    "x_medium": ("MEDIUMTEXT", TEXT),
    "x_long": ("LONGTEXT CHARACTER SET latin1", LATIN),
    "b": ("BINARY(20)", BYTES),
    "b_long": ("BINARY(255)", BYTES),
    "vb": ("VARBINARY(20)", BYTES),
    "vb_long": ("VARBINARY(3000)", BYTES),
    "bb_tiny": ("TINYBLOB", BYTES),
    "bb": ("BLOB", BYTES),
    "bb_medium": ("MEDIUMBLOB", BYTES),
    "bb_long": ("LONGBLOB", BYTES),
    "e": ("ENUM('a','it''s','комма,','')", st.sampled_from(("a", "it's", "комма,", "", "none"))),
    "e_latin": ("ENUM('ä','ö') CHARACTER SET latin1", st.sampled_from(("ä", "ö"))),
    "e_many": (f"ENUM({','.join(repr(str(n)) for n in range(300))})", st.integers(1, 300)),
    "s": ("SET('z','y','x')", st.sets(st.sampled_from("xyz")).map(",".join)),
    "s_many": (
        f"SET({','.join(repr(f'm{n}') for n in range(64))})",
        st.sets(st.integers(0, 63)).map(lambda bits: ",".join(f"m{n}" for n in bits)),
    ),
    "j": ("JSON", st.sampled_from(('{"a": 1, "b": [1.50, null]}', "[]", '"é"'))),
    "u": ("UUID", st.uuids(allow_nil=True).map(str)),
    "i6": (
        "INET6",
        (
            st.ip_addresses(v=6)
            | st.sampled_from(
                [
                    ipaddress.ip_address(each)
                    for each in (
                        "::",
                        "::1",
                        "::ffff:1.2.3.4",
                        "::1.2.3.4",
                        "1:0:0:2:0:0:0:3",
                        "1:0:2:3:4:5:6:7",
                        "::2:0:0",
                        "0:0:0:0:0:ffff::",
                        "::ffff:0:0",
                    )
                ]
            )
        ).map(str),
    ),
    "i4": ("INET4", st.ip_addresses(v=4).map(str)),
    "g": ("POINT", st.tuples(st.integers(-9, 9), st.integers(-9, 9))),
    "own": ("INT AS (tiny + 1) STORED", st.nothing()),
    "virtual": ("INT AS (tiny + 2) VIRTUAL", st.nothing()),
    "op": ("VARCHAR(10)", st.sampled_from(("d", "buy"))),
    "table": ("VARCHAR(10)", st.sampled_from(("t", "dinner"))),
    "place": ("VARCHAR(10)", st.just("here")),
    "a`b%s": ("INT", st.integers(0, 9)),
}
WRITTEN = [name for name in COLUMNS if name not in ("own", "virtual")]


AS_PRINTED = ("u", "i6", "i4", "e", "e_latin", "e_many", "s", "s_many", "v", "v_latin", "v_koi",
              "v_utf16", "x_long", "c", "c_ucs2", "big_u")  # fmt: skip
"""Columns whose JSON is what the server prints."""


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDb]:
    with MariaDb(tmp_path_factory.mktemp("mariadb") / "data", single_port()) as made:
        with made.connect() as connection:
            execute(connection, "SET GLOBAL sql_mode = ''")
            execute(connection, "SET GLOBAL time_zone = '+05:30'")
        with made.connect() as connection:
            columns = ", ".join(f"{quoted(name)} {kind}" for name, (kind, _) in COLUMNS.items())
            execute(
                connection,
                f"CREATE TABLE t (id INT PRIMARY KEY, {columns}, touched INT DEFAULT 0)"
                " DEFAULT CHARSET utf8mb4 ROW_FORMAT=DYNAMIC",
            )
        yield made


def insert(connection: Any, number: int, row: dict[str, Any]) -> None:
    names = ", ".join(map(quoted, row))
    marks = ", ".join("ST_GeomFromText(%s)" if name == "g" else "%s" for name in row)
    values = [
        f"POINT({value[0]} {value[1]})" if name == "g" and value is not None else value
        for name, value in row.items()
    ]
    statement = f"INSERT INTO t (id, {names.replace('%', '%%')}) VALUES ({number}, {marks})"
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def both_ways(database: MariaDb, state: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows, which both ways show alike."""
    topic = Topic()
    with database.connect() as connection:
        execute(connection, "DELETE FROM t")
        for number, row in enumerate(rows):
            insert(connection, number, row)
        capture(database, ["t"], topic, state)
        snapshot = topic.rows("t")
        texts = execute(connection, f"SELECT id, {', '.join(map(quoted, AS_PRINTED))} FROM t")
        for number, *values in texts:
            row = snapshot[f"t:{number}"]
            assert [row[name] for name in AS_PRINTED] == values
        execute(connection, "UPDATE t SET touched = 1")
    capture(database, ["t"], topic, state)
    logged = [(key, event) for key, event in topic.messages if event["op"] == "u"]
    assert len(snapshot) == len(logged) == len(rows)
    for key, event in logged:
        assert event["before"] == snapshot[key]
        assert event["after"] == {**snapshot[key], "touched": 1}
    return [snapshot[f"t:{number}"] for number in range(len(rows))]


ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | COLUMNS[name][1] for name in WRITTEN}),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # A row of all types takes minutes to shrink; the difference names the column.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(rows=ROWS)
def test_any_value_is_one_json_both_ways(
    database: MariaDb, tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    both_ways(database, tmp_path_factory.mktemp("state"), rows)


def test_the_table_of_types_in_the_docs(database: MariaDb, tmp_path: Path) -> None:
    """Values and their JSON, one by one."""
    shown: dict[str, tuple[Any, Any]] = {
        "bit9": (5, 5),
        "bit64": ((1 << 64) - 1, (1 << 64) - 1),
        "big_u": ((1 << 64) - 1, (1 << 64) - 1),
        "int_u": (42, 42),
        "year_": (2020, 2020),
        "f": (3.14, 3.14),
        "d": (0.1, 0.1),
        "n": ("1.5", "1.50"),
        "n_wide": ("-0.5", "-0.500000000000000000000000000000"),
        "n_zero": ("7.25", "7.250"),
        "n_fraction": ("-0.00001", "-0.00001"),
        "day": ("0000-00-00", "0000-00-00"),
        "t0": ("-01:02:03", "-01:02:03"),
        "t3": ("838:59:59", "838:59:59.000"),
        "t2": ("-00:00:00.25", "-00:00:00.25"),
        "dt6": ("2020-02-29 12:34:56.789012", "2020-02-29T12:34:56.789012"),
        "dt_zero": ("0000-00-00 00:00:00", "0000-00-00T00:00:00"),
        "ts_zero": ("0000-00-00 00:00:00", "0000-00-00T00:00:00.000Z"),
        # The server's time zone is half past five.
        "ts3": ("2020-06-01 12:00:00.123", "2020-06-01T06:30:00.123Z"),
        "c": ("ab  ", "ab"),
        "v": ("ab \0", "ab \0"),
        "v_latin": ("café", "café"),
        "b": (b"\x01\0\x02\0", "AQACAAAAAAAAAAAAAAAAAAAAAAA="),
        "vb": (b"\0\xff\0", "AP8A"),
        "bb": (b"", ""),
        "e": ("none", ""),
        "e_latin": ("ö", "ö"),
        "s": ("x,z", "z,x"),
        "j": ('{"a": 1}', '{"a": 1}'),
        "u": ("123E4567-E89B-12D3-A456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
        "i6": ("2001:DB8:0::1", "2001:db8::1"),
        "i4": ("192.0.2.1", "192.0.2.1"),
        "g": ((1, 2), {"srid": 0, "wkb": "AQEAAAAAAAAAAADwPwAAAAAAAABA"}),
        "x": (None, None),
        "tiny": (7, 7),
        "a`b%s": (1, 1),
    }
    (row,) = both_ways(database, tmp_path, [{name: given for name, (given, _) in shown.items()}])
    assert {name: row[name] for name in shown} == {name: json for name, (_, json) in shown.items()}
    # A stored column is part of the row, a virtual one is not.
    assert row["own"] == 8
    assert "virtual" not in row
