"""Statements that change rows without row events, and what a capture refuses at its beginning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.capture.errors import CaptureError
from tests.mariadb import MariaDb, Topic, capture, execute, needs_mariadb
from tests.ports import single_port

pytestmark = [pytest.mark.optional, needs_mariadb]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDb]:
    with MariaDb(tmp_path_factory.mktemp("mariadb") / "data", single_port()) as made:
        yield made


@pytest.fixture
def database(server: MariaDb) -> Iterator[MariaDb]:
    """Has a table `t` with two rows, and nothing else."""
    run(server, "DROP DATABASE IF EXISTS shop", "CREATE DATABASE shop", database=None)
    run(server, "CREATE TABLE t (id INT PRIMARY KEY, v INT)", "INSERT INTO t VALUES (1,1),(2,2)")
    yield server
    for setting, value in (
        ("binlog_format", "ROW"),
        ("binlog_row_image", "FULL"),
        ("binlog_row_metadata", "FULL"),
        ("log_bin_compress", "OFF"),
        ("binlog_checksum", "CRC32"),
    ):
        run(server, f"SET GLOBAL {setting} = {value}")


def run(server: MariaDb, *statements: str, database: str | None = "shop") -> None:
    with server.connect(database=database) as connection:
        for statement in statements:
            execute(connection, statement)


def gtid_of(error: pytest.ExceptionInfo[CaptureError]) -> str:
    """Returns the transaction that a text says can be passed."""
    found = re.search(r"--pass (\d+-\d+-\d+)", str(error.value))
    assert found is not None
    return found[1]


def test_columns_that_are_added_and_dropped_are_followed(database: MariaDb, tmp_path: Path) -> None:
    """All of it lies behind when the capture comes: the log says which columns there were."""
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(
        database,
        "INSERT INTO t VALUES (3, 3)",
        "ALTER TABLE t ADD COLUMN name VARCHAR(20) CHARACTER SET latin1 AFTER id",
        "INSERT INTO t VALUES (4, 'é', 4)",
        "ALTER TABLE t ADD uid UUID NULL, ADD INDEX i (v), ADD kind ENUM('a','b') DEFAULT NULL",
        "INSERT INTO t VALUES (5, 'e', 5, '123e4567-e89b-12d3-a456-426614174000', 'b')",
        "ALTER TABLE t DROP COLUMN v, ADD big BIGINT UNSIGNED NULL",
        "INSERT INTO t VALUES (6, 'f', NULL, NULL, 18446744073709551615)",
        "UPDATE t SET name = 'x' WHERE id = 1",
    )
    said = capture(database, ["t"], topic, tmp_path)
    assert [event["after"] for _, event in topic.messages[2:]] == [
        {"id": 3, "v": 3},
        {"id": 4, "name": "é", "v": 4},
        {"id": 5, "name": "e", "v": 5, "uid": "123e4567-e89b-12d3-a456-426614174000", "kind": "b"},
        {"id": 6, "name": "f", "uid": None, "kind": None, "big": 18446744073709551615},
        {"id": 1, "name": "x", "uid": None, "kind": None, "big": None},
    ]
    assert len(said.reported("altered")) == 3
    run(database, "UPDATE t SET big = 5 WHERE id = 5")
    capture(database, ["t"], topic, tmp_path)
    assert topic.messages[-1][1]["after"]["uid"] == "123e4567-e89b-12d3-a456-426614174000"


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ADD w INT DEFAULT 7",
        "ALTER TABLE t MODIFY v BIGINT UNSIGNED",
        "ALTER TABLE t CHANGE v w INT",
    ],
)
def test_an_alter_that_changes_rows_ends_a_capture_until_it_is_passed(
    database: MariaDb, tmp_path: Path, statement: str
) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "UPDATE t SET v = 10 WHERE id = 1", statement, "DELETE FROM t WHERE id = 2")
    for _ in range(2):
        with pytest.raises(CaptureError, match="without row events") as error:
            capture(database, ["t"], topic, tmp_path)
        assert statement in str(error.value)
        assert topic.messages[-1][1]["after"] == {"id": 1, "v": 10}, "what is before is there"
    said = capture(database, ["t"], topic, tmp_path, passed=frozenset([gtid_of(error)]))
    assert said.reported("passed")[0]["statement"] == statement
    key, event = topic.messages[-1]
    assert (key, event["op"]) == ("t:2", "d")
    assert set(event["before"].values()) in ({2}, {2, 7})


def test_a_truncate_ends_a_capture_or_is_an_event(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path / "a")
    run(database, "TRUNCATE TABLE t", "INSERT INTO t VALUES (3, 3)")
    with pytest.raises(CaptureError, match=r"'TRUNCATE TABLE t'.*--truncate event"):
        capture(database, ["t"], topic, tmp_path / "a")
    capture(database, ["t"], topic, tmp_path / "a", truncate_events=True)
    assert [(event["op"], key) for key, event in topic.messages] == [
        ("r", "t:1"), ("r", "t:2"), ("t", "t"), ("c", "t:3"),
    ]  # fmt: skip
    assert topic.rows("t") == {"t:3": {"id": 3, "v": 3}}
    run(database, "DELETE FROM t", "INSERT INTO t VALUES (4, 4)")
    capture(database, ["t"], topic, tmp_path / "a", truncate_events=True, resnapshot=True)
    assert [(event["op"], key) for key, event in topic.messages[4:]] == [("t", "t"), ("r", "t:4")]


@pytest.mark.parametrize(
    "statement",
    [
        "RENAME TABLE t TO t2",
        "DROP TABLE t",
        "CREATE OR REPLACE TABLE t (id INT PRIMARY KEY)",
        "ALTER TABLE t RENAME TO t2",
        "DROP DATABASE shop",
    ],
)
def test_a_table_that_goes_ends_a_capture(
    database: MariaDb, tmp_path: Path, statement: str
) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(
        database,
        "CREATE TABLE other (a INT)",
        "TRUNCATE other",
        "RENAME TABLE other TO o",
        statement,
    )
    run(database, "CREATE DATABASE IF NOT EXISTS shop", database=None)
    with pytest.raises(CaptureError, match="changes rows of t without row events") as error:
        capture(database, ["t"], topic, tmp_path)
    said = capture(database, ["t"], topic, tmp_path, passed=frozenset([gtid_of(error)]))
    assert said.reported("passed")


def test_changes_that_a_session_logs_as_statements_end_a_capture(
    database: MariaDb, tmp_path: Path
) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "CREATE TABLE other (a INT)", "SET binlog_format = STATEMENT",
        "INSERT INTO other VALUES (1)", "UPDATE t SET v = 9 WHERE id = 1")  # fmt: skip
    with pytest.raises(CaptureError, match="UPDATE t SET v = 9"):
        capture(database, ["t"], topic, tmp_path)


def test_rows_in_part_and_prepared_transactions_end_a_capture(
    database: MariaDb, tmp_path: Path
) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "SET binlog_row_image = MINIMAL", "UPDATE t SET v = 9 WHERE id = 1")
    with pytest.raises(CaptureError, match="binlog_row_image"):
        capture(database, ["t"], topic, tmp_path)
    capture(database, ["t"], topic, tmp_path, resnapshot=True)
    run(database, "XA START 'x'", "UPDATE t SET v = 10 WHERE id = 1", "XA END 'x'",
        "XA PREPARE 'x'", "XA ROLLBACK 'x'")  # fmt: skip
    with pytest.raises(CaptureError, match="only prepared"):
        capture(database, ["t"], topic, tmp_path)


def test_a_prepared_transaction_of_other_tables_is_passed(
    database: MariaDb, tmp_path: Path
) -> None:
    """None of its parts ends with a commit, and the last one is all that there is."""
    topic = Topic()
    run(database, "CREATE TABLE other (a INT)")
    capture(database, ["t"], topic, tmp_path)
    run(database, "INSERT INTO t VALUES (3, 3)", "XA START 'x'", "INSERT INTO other VALUES (1)",
        "XA END 'x'", "XA PREPARE 'x'", "XA COMMIT 'x'")  # fmt: skip
    for _ in range(2):
        capture(database, ["t"], topic, tmp_path)
        assert topic.of("t")[2:] == [("c", "t:3")]


def test_without_names_of_columns_an_altered_table_ends_a_capture(
    database: MariaDb, tmp_path: Path
) -> None:
    run(database, "SET GLOBAL binlog_row_metadata = NO_LOG")
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "INSERT INTO t VALUES (3, -3)", "UPDATE t SET v = -1 WHERE id = 1",
        "ALTER TABLE t ADD w INT", "INSERT INTO t VALUES (4, 4, 4)")  # fmt: skip
    with pytest.raises(CaptureError, match="binlog_row_metadata"):
        capture(database, ["t"], topic, tmp_path)
    assert topic.rows("t")["t:1"] == {"id": 1, "v": -1}
    capture(database, ["t"], topic, tmp_path, resnapshot=True)
    run(database, "INSERT INTO t VALUES (5, 5, 5)")
    capture(database, ["t"], topic, tmp_path)
    assert topic.rows("t")["t:5"] == {"id": 5, "v": 5, "w": 5}


def test_compressed_and_unchecked_events_are_read(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "SET GLOBAL log_bin_compress = ON")
    run(database, "ALTER TABLE t ADD COLUMN x VARCHAR(5000)" + " COMMENT '" + "c" * 500 + "'",
        "INSERT INTO t VALUES (3, 3, REPEAT('x', 5000))", "UPDATE t SET x = REPEAT('y', 4000)",
        "DELETE FROM t WHERE id = 1", "SET GLOBAL binlog_checksum = NONE",
        "INSERT INTO t VALUES (7, 7, 'z')")  # fmt: skip
    capture(database, ["t"], topic, tmp_path)
    assert {key: row["x"] for key, row in topic.rows("t").items()} == {
        "t:2": "y" * 4000, "t:3": "y" * 4000, "t:7": "z",
    }  # fmt: skip


def test_a_change_of_the_key_is_a_delete_and_an_insert(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "UPDATE t SET id = id + 1, v = 0 ORDER BY id DESC")
    capture(database, ["t"], topic, tmp_path)
    assert [(event["op"], key) for key, event in topic.messages[2:]] == [
        ("d", "t:2"), ("c", "t:3"), ("d", "t:1"), ("c", "t:2"),
    ]  # fmt: skip
    assert topic.messages[2][1]["before"] == {"id": 2, "v": 2}
    assert topic.rows("t") == {"t:2": {"id": 2, "v": 0}, "t:3": {"id": 3, "v": 0}}


def test_a_unique_key_names_rows_where_it_is_told(database: MariaDb, tmp_path: Path) -> None:
    run(database, "CREATE TABLE nopk (a INT NOT NULL, b INT, c VARCHAR(5) NOT NULL, UNIQUE (a, c),"
        " UNIQUE (b))", "INSERT INTO nopk VALUES (1, 1, 'x:y'), (1, 2, 'z')")  # fmt: skip
    topic = Topic()
    with pytest.raises(CaptureError, match="--key nopk=COLUMN"):
        capture(database, ["nopk"], topic, tmp_path)
    for wrong in (["b"], ["a"]):
        with pytest.raises(CaptureError, match="no unique key without NULL"):
            capture(database, ["nopk"], topic, tmp_path, keys={"nopk": wrong})
    with pytest.raises(CaptureError, match="no column d"):
        capture(database, ["nopk"], topic, tmp_path, keys={"nopk": ["d"]})
    capture(database, ["nopk"], topic, tmp_path, keys={"nopk": ["c", "a"]})
    assert topic.of("nopk") == [("r", "nopk:x%3Ay:1"), ("r", "nopk:z:1")]


@pytest.mark.parametrize(
    ("statement", "table", "text"),
    [
        ("SET GLOBAL binlog_format = MIXED", "t", "binlog_format is MIXED: SET GLOBAL"),
        ("SET GLOBAL binlog_row_image = NOBLOB", "t", "binlog_row_image is NOBLOB"),
        ("CREATE VIEW v AS SELECT * FROM t", "v", "v is a view"),
        ("CREATE SEQUENCE s", "s", "s is a sequence"),
        ("CREATE TABLE m (id INT PRIMARY KEY) ENGINE = MyISAM", "m", "ENGINE = InnoDB"),
        (
            "CREATE TABLE h (id INT PRIMARY KEY) WITH SYSTEM VERSIONING",
            "h",
            "h is a system versioned",
        ),
        ("CREATE TABLE c (id INT PRIMARY KEY, x TEXT COMPRESSED)", "c", "table c: column x: type"),
        (
            "CREATE TABLE d (id INT PRIMARY KEY, x TEXT CHARACTER SET dec8)",
            "d",
            "column x: charset dec8",
        ),
        (
            "CREATE TABLE f (id INT PRIMARY KEY, o INT, FOREIGN KEY (o) REFERENCES t (id)"
            " ON DELETE SET NULL)",
            "f",
            "ON DELETE SET NULL.*--allow-cascades",
        ),
        ("SELECT 1", "none", "there is no table none"),
        ("SELECT 1", "T", "is called shop.t|there is no table T"),
    ],
)
def test_what_would_hide_changes_is_refused(
    database: MariaDb, tmp_path: Path, statement: str, table: str, text: str
) -> None:
    run(database, statement)
    with pytest.raises(CaptureError, match=text):
        capture(database, [table], Topic(), tmp_path)


def test_a_cascade_is_taken_where_it_is_told(database: MariaDb, tmp_path: Path) -> None:
    run(database, "CREATE TABLE f (id INT PRIMARY KEY, o INT, FOREIGN KEY (o) REFERENCES t (id)"
        " ON DELETE CASCADE)")  # fmt: skip
    capture(database, ["f"], Topic(), tmp_path, allow_cascades=True)


def test_a_user_needs_three_rights(database: MariaDb, tmp_path: Path) -> None:
    run(database, "CREATE OR REPLACE USER reader@'%' IDENTIFIED BY 'secret'")
    topic = Topic()
    url = f"mariadb://reader:secret@127.0.0.1:{database.port}/shop"
    for right in (
        "SELECT ON shop.*", "REPLICATION SLAVE ON *.*", "BINLOG MONITOR ON *.*", ""
    ):  # fmt: skip
        if right:
            with pytest.raises(CaptureError, match=r"denied|no table t"):
                capture(database, ["t"], topic, tmp_path, url=url)
            run(database, f"GRANT {right} TO reader@'%'")
    capture(database, ["t"], topic, tmp_path, url=url)
    run(database, "INSERT INTO t VALUES (3, 3)")
    capture(database, ["t"], topic, tmp_path, url=url)
    assert topic.of("t")[-1] == ("c", "t:3")
    with pytest.raises(CaptureError, match="Access denied"):
        capture(database, ["t"], topic, tmp_path, url=url.replace("secret", "wrong"))


def test_a_state_is_of_one_topic_and_its_tables(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path)
    run(database, "CREATE TABLE t2 (id INT PRIMARY KEY)")
    with pytest.raises(CaptureError, match="t2 is not in the state"):
        capture(database, ["t", "t2"], topic, tmp_path)
    with pytest.raises(CaptureError, match="deleted and created again"):
        capture(database, ["t"], topic, tmp_path, topic_created_ms=2)
    capture(database, ["t", "t2"], topic, tmp_path, resnapshot=True)
