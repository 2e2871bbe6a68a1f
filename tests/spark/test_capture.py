"""`convoy pipeline capture` and `apply` together: Delta tables equal a database's tables, whatever
is lost between."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from convoymq.capture.messages import sequence_of
from convoymq.client.topic_reader import TopicReader
from convoymq.spark.pipelines import apply as pipeline
from tests.faults.topic_traffic import create
from tests.faults.traffic import until
from tests.mariadb import MariaDb, execute, needs_mariadb
from tests.ports import single_port
from tests.spark.cluster import Broker

pytestmark = [pytest.mark.optional, needs_mariadb]

PATIENCE_S = 120.0
SCHEMA = (
    "id int, big decimal(20,0), bits bigint, f float, d double, n decimal(10,2), day date,"
    " at timestamp_ntz, stamp timestamp, clock string, text string, data binary, fixed binary,"
    " kind string, tags string, uid string, ip string, place struct<srid: int, wkb: binary>"
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDb]:
    with MariaDb(tmp_path_factory.mktemp("mariadb") / "data", single_port()) as made:
        yield made


class Captured:
    """The command in a process of its own."""

    def __init__(self, database: MariaDb, nodes: Broker, topic: str, table: str, state: Path):
        self.state = state
        self.output = state.with_suffix(".log")
        self._command = [
            sys.executable, "-m", "convoymq.cli", "pipeline", "capture", "--format", "json",
            "--database", database.url, "--servers", nodes.servers, "--topic", topic,
            "--state", str(state), "--table", table,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with open(self.output, "ab") as output:
            command = [*self._command, *more]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(PATIENCE_S)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def run(self, *more: str) -> int:
        self.start("--until-end", *more)
        return self.wait()

    def gtid(self) -> str:
        """Returns the last transaction that is stored; empty: none."""
        try:
            return str(json.loads((self.state / "state.json").read_text())["gtid"])
        except FileNotFoundError:
            return ""


def kill_dump(database: MariaDb) -> bool:
    """Kills the connection that reads the log, if there is one."""
    with database.connect() as connection:
        found = [
            row[0] for row in execute(connection, "SHOW PROCESSLIST") if row[4] == "Binlog Dump"
        ]
        for number in found:
            execute(connection, f"KILL {number}")
    return bool(found)


@pytest.mark.long
def test_delta_tables_equal_the_database(
    spark: SparkSession, nodes: Broker, database: MariaDb, tmp_path: Path
) -> None:
    create(nodes.cluster, "captured", 2)
    captured = Captured(database, nodes, "captured", "types", tmp_path / "state")
    with database.connect() as connection:
        execute(connection, "SET time_zone = '+00:00'")
        execute(
            connection,
            "CREATE TABLE types (id INT PRIMARY KEY, big BIGINT UNSIGNED, bits BIT(9), f FLOAT,"
            " d DOUBLE, n DECIMAL(10,2), day DATE, at DATETIME(6), stamp TIMESTAMP(3) NULL,"
            " clock TIME(1), text VARCHAR(20) CHARACTER SET latin1, data BLOB, fixed BINARY(4),"
            " kind ENUM('a','b'), tags SET('z','y','x'), uid UUID, ip INET6, place POINT)",
        )

        def insert(first: int, last: int) -> None:
            for number in range(first, last):
                execute(
                    connection,
                    f"INSERT INTO types VALUES ({number}, 18446744073709551615 - {number},"
                    f" {number}, {number} + 0.14, 0.1, {number} / 4, '2020-02-29',"
                    f" '2020-02-29 12:34:56.{number:06d}', '2020-06-01 06:30:00.123',"
                    f" '-101:02:03.4', 'café {number}', x'00ff{number:02x}', x'0100',"
                    " 'b', 'x,z', '123e4567-e89b-12d3-a456-426614174000', '2001:db8::1',"
                    " POINT(1, 2))",
                )
            execute(connection, f"INSERT INTO types (id) VALUES ({1000 + first})")

        insert(0, 40)
        captured.start()
        until(captured.gtid, "the snapshot is not stored", PATIENCE_S)
        for begin in (40, 80, 120):
            insert(begin, begin + 40)
            changed = f"id BETWEEN {begin} AND 999"
            execute(connection, f"UPDATE types SET n = n + 1, fixed = x'02' WHERE {changed}")
            until(lambda: kill_dump(database), "no connection", PATIENCE_S)
            execute(connection, f"DELETE FROM types WHERE id = {begin}")
            assert captured.end(signal.SIGKILL) == -signal.SIGKILL
            execute(connection, f"UPDATE types SET id = id + 5000 WHERE id = {begin} + 1")
            captured.start()
        ((last,),) = execute(connection, "SELECT @@gtid_binlog_pos")
        until(lambda: sequence_of(captured.gtid()) >= sequence_of(last), "not stored", PATIENCE_S)
        assert captured.end(signal.SIGTERM) == 0, captured.output.read_text()
        spec = pipeline.TableSpec(
            name="types", path=str(tmp_path / "delta"), schema=SCHEMA, keys=("id",)
        )
        pipeline.apply(
            spark, servers=nodes.servers, topic="captured", tables=[spec],
            checkpoint=tmp_path / "checkpoint",
        )  # fmt: skip
        ids = [row[0] for row in execute(connection, "SELECT id FROM types ORDER BY id")]
        sums = execute(connection, "SELECT id, n, fixed FROM types WHERE n IS NOT NULL")
    found = {row.id: row.asDict() for row in pipeline.rows(spark, spec.path).collect()}
    assert sorted(found) == ids
    for number, n, fixed in sums:
        assert found[number]["n"] == n
        assert bytes(found[number]["fixed"]) == fixed
    assert found[7] == row_of(7)
    assert set(found[1000].values()) == {1000, None}


def row_of(number: int) -> dict[str, Any]:
    """Returns the row as Spark has it."""
    return {
        "id": number,
        "big": decimal.Decimal((1 << 64) - 1 - number),
        "bits": number,
        "f": pytest.approx(number + 0.14),
        "d": 0.1,
        "n": decimal.Decimal(number) / 4,
        "day": dt.date(2020, 2, 29),
        "at": dt.datetime(2020, 2, 29, 12, 34, 56, number),
        "stamp": dt.datetime(2020, 6, 1, 6, 30, 0, 123_000),
        "clock": "-101:02:03.4",
        "text": f"café {number}",
        "data": bytearray((0, 255, number)),
        "fixed": bytearray((1, 0, 0, 0)),
        "kind": "b",
        "tags": "z,x",
        "uid": "123e4567-e89b-12d3-a456-426614174000",
        "ip": "2001:db8::1",
        "place": (0, bytearray.fromhex("0101000000000000000000f03f0000000000000040")),
    }


def test_a_truncate_and_a_new_snapshot_empty_the_table(
    spark: SparkSession, nodes: Broker, database: MariaDb, tmp_path: Path
) -> None:
    create(nodes.cluster, "emptied", 2)
    captured = Captured(database, nodes, "emptied", "short", tmp_path / "state")
    spec = pipeline.TableSpec(
        name="short", path=str(tmp_path / "delta"), schema="id int, v int", keys=("id",)
    )

    def applied() -> list[tuple[int, int]]:
        pipeline.apply(
            spark, servers=nodes.servers, topic="emptied", tables=[spec],
            checkpoint=tmp_path / "checkpoint",
            events=pipeline.Events(position_field="source.place"),
        )  # fmt: skip
        found = pipeline.rows(spark, spec.path).collect()
        return sorted((row.id, row.v) for row in found)

    with database.connect() as connection:
        execute(connection, "CREATE TABLE short (id INT PRIMARY KEY, v INT)")
        execute(connection, "INSERT INTO short VALUES (1, 1), (2, 2), (3, 3)")
        assert captured.run() == 0
        assert applied() == [(1, 1), (2, 2), (3, 3)]
        execute(connection, "TRUNCATE short")
        execute(connection, "INSERT INTO short VALUES (2, 20), (4, 4)")
        assert captured.run() == 1
        assert "--truncate event" in captured.output.read_text()
        assert captured.run("--truncate", "event") == 0
        assert applied() == [(2, 20), (4, 4)]
        execute(connection, "DELETE FROM short WHERE id = 4")
        execute(connection, "RESET MASTER")
        assert captured.run("--truncate", "event") == 1
        assert captured.run("--truncate", "event", "--resnapshot") == 0
        assert applied() == [(2, 20)]


def test_a_tombstone_follows_a_delete(
    spark: SparkSession, nodes: Broker, database: MariaDb, tmp_path: Path
) -> None:
    """By the client, by Spark, and where `apply` makes tables of them. A change of a key deletes
    the old one. A TRUNCATE is one message about the table, so it has none."""
    create(nodes.cluster, "graves", 2)
    captured = Captured(database, nodes, "graves", "dying", tmp_path / "state")
    with database.connect() as connection:
        execute(connection, "CREATE TABLE dying (id INT PRIMARY KEY, v INT)")
        execute(connection, "INSERT INTO dying VALUES (1, 1), (2, 2), (3, 3)")
        assert captured.run("--tombstones") == 0
        execute(connection, "DELETE FROM dying WHERE id = 1")
        execute(connection, "UPDATE dying SET id = 20 WHERE id = 2")
        assert captured.run("--tombstones") == 0
        execute(connection, "TRUNCATE dying")
        execute(connection, "INSERT INTO dying VALUES (1, 10)")
        assert captured.run("--tombstones", "--truncate", "event") == 0

    def told(messages: Iterable[tuple[bytes, bytes | None]]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key, body in messages:
            word = "tombstone" if body is None else json.loads(body)["op"]
            found.setdefault(key.decode(), []).append(word)
        return found

    expected = {
        "dying": ["t"],
        "dying:1": ["r", "d", "tombstone", "c"],
        "dying:2": ["r", "d", "tombstone"],
        "dying:20": ["c"],
        "dying:3": ["r"],
    }
    read = [m for rows in TopicReader(nodes.client, "graves") for m in rows.messages()]
    assert told((m.key, m.body) for m in read) == expected
    options = {"servers": nodes.servers, "topic": "graves"}
    rows = spark.read.format("convoymq").options(**options).load().collect()
    assert told((bytes(r.key), r.value) for r in sorted(rows, key=order_of)) == expected
    spec = pipeline.TableSpec(
        name="dying", path=str(tmp_path / "delta"), schema="id int, v int", keys=("id",)
    )
    report = pipeline.apply(
        spark, servers=nodes.servers, topic="graves", tables=[spec],
        checkpoint=tmp_path / "checkpoint",
        events=pipeline.Events(position_field="source.place"),
    )  # fmt: skip
    assert report is not None
    assert [tuple(row) for row in pipeline.rows(spark, spec.path).select("id", "v").collect()] == [
        (1, 10)
    ]


def order_of(row: Any) -> Any:
    return row.order_token


def test_a_newer_capture_of_a_name_ends_the_one_before(
    nodes: Broker, database: MariaDb, tmp_path: Path
) -> None:
    create(nodes.cluster, "fenced", 1)
    create(nodes.cluster, "weak", 1, mode="weak")
    with database.connect() as connection:
        execute(connection, "CREATE TABLE fenced (id INT PRIMARY KEY)")
        execute(connection, "INSERT INTO fenced VALUES (1)")
        for topic, text in (("weak", "topic weak is weak"), ("none", "none")):
            refused = Captured(database, nodes, topic, "fenced", tmp_path / topic)
            assert refused.run() == 1
            assert text in refused.output.read_text()
        first = Captured(database, nodes, "fenced", "fenced", tmp_path / "first")
        first.start("--server-id", "4000000001")
        until(first.gtid, "the snapshot is not stored", PATIENCE_S)
        same = Captured(database, nodes, "fenced", "fenced", tmp_path / "first")
        assert same.run() == 1
        assert "another capture has the state" in same.output.read_text()
        second = Captured(database, nodes, "fenced", "fenced", tmp_path / "second")
        second.start()
        until(second.gtid, "the snapshot is not stored", PATIENCE_S)
        execute(connection, "INSERT INTO fenced VALUES (2)")
        assert first.wait() == 1
        assert "newer session" in first.output.read_text()
        assert second.end(signal.SIGTERM) == 0
