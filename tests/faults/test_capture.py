"""Captures that lose their database, or their life: each change is in the topic once, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from convoymq.capture.errors import CaptureError
from convoymq.capture.messages import sequence_of
from convoymq.capture.state import StateFile
from convoymq.client.errors import PreconditionFailed
from convoymq.client.producer_thread import TopicReceipt
from tests.faults.traffic import until
from tests.mariadb import (
    MariaDb,
    Run,
    Topic,
    capture,
    capturing,
    execute,
    needs_mariadb,
    options_of,
)
from tests.ports import single_port

pytestmark = [pytest.mark.optional, needs_mariadb]

ROWS = 5


@pytest.fixture
def database(tmp_path: Path) -> Iterator[MariaDb]:
    with MariaDb(tmp_path / "mariadb", single_port()) as made:
        with made.connect() as connection:
            execute(connection, "CREATE TABLE t (id INT PRIMARY KEY, v INT)")
            for number in range(ROWS):
                execute(connection, f"INSERT INTO t VALUES ({number}, 0)")
        yield made


@contextmanager
def following(database: MariaDb, topic: Topic, state: Path) -> Iterator[Run]:
    """Captures in a thread, until the end of the block."""
    options = options_of(until_end=False)
    with capturing(database, ["t"], topic, state, options) as (made, run, stop):
        failures: list[BaseException] = []

        def work() -> None:
            try:
                made.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield run
        finally:
            stop.set()
            thread.join()
        assert not failures


def write(database: MariaDb, first: int, last: int) -> None:
    """Counts every row up, a transaction for each number."""
    with database.connect() as connection:
        for value in range(first, last):
            execute(connection, f"UPDATE t SET v = {value}")


def check(topic: Topic, last: int) -> None:
    """Every change of every row is there, once and in order."""
    for number in range(ROWS):
        values = [event["after"]["v"] for key, event in topic.messages if key == f"t:{number}"]
        assert values == list(range(last)), f"row {number}"


def kill_dump(database: MariaDb) -> int:
    """Kills the connections that read the log. Returns how many there were."""
    with database.connect() as connection:
        found = [
            row[0] for row in execute(connection, "SHOW PROCESSLIST") if row[4] == "Binlog Dump"
        ]
        for number in found:
            execute(connection, f"KILL {number}")
    return len(found)


def test_a_lost_connection_repeats_nothing(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    with following(database, topic, tmp_path / "state") as run:
        until(lambda: run.reported("follow"))
        for begin in range(1, 101, 20):
            write(database, begin, begin + 20)
            before = len(run.reported("follow"))
            until(lambda: kill_dump(database))
            until(lambda before=before: len(run.reported("follow")) > before)
        until(lambda: len(topic.messages) == ROWS * 101)
        # Nothing comes behind it: the log is read to its end.
        after = [sequence_of(said["after"]) for said in run.reported("follow")]
        assert after == sorted(after)
        assert len(run.reported("lost")) >= 5
    check(topic, 101)
    stored = [sequence_of(said["gtid"]) for said in run.reported("stored")]
    assert stored == sorted(set(stored))


def test_a_killed_connection_within_a_transaction_sends_the_rest(
    database: MariaDb, tmp_path: Path
) -> None:
    class KillingTopic(Topic):
        kills = 0

        def send(self, *given: Any, **named: Any) -> Any:
            # What is under way is read on before the loss is seen.
            if not len(self.messages) % 500 and self.kills < 3:
                self.kills += kill_dump(database)
            return super().send(*given, **named)

    topic = KillingTopic()
    with database.connect() as connection:
        execute(connection, "ALTER TABLE t ADD pad VARCHAR(2000)")
        capture(database, ["t"], topic, tmp_path / "state")
        execute(connection, "SET autocommit = 0")
        for value in range(1, 2001):
            execute(connection, f"UPDATE t SET v = {value}, pad = REPEAT('x', 2000)")
        execute(connection, "COMMIT")
        run = capture(database, ["t"], topic, tmp_path / "state")
    assert topic.kills == 3
    assert run.reported("lost")
    check(topic, 2001)


def test_a_database_that_was_killed_is_followed_again(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    with following(database, topic, tmp_path / "state") as run:
        for times, begin in enumerate(range(1, 31, 10)):
            until(lambda times=times: len(run.reported("follow")) > times)
            write(database, begin, begin + 10)
            lost = len(run.reported("lost"))
            database.kill()
            until(lambda lost=lost: len(run.reported("lost")) > lost)
            database.start()
        until(lambda: len(topic.messages) == ROWS * 31)
    check(topic, 31)


def test_a_capture_that_was_killed_goes_on(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path / "state")
    write(database, 1, 21)
    # In the middle of transactions, and between them.
    for topic.fails_at in (30, 31, 60, 85, 86, 99):
        with pytest.raises(ConnectionError):
            capture(database, ["t"], topic, tmp_path / "state")
    topic.fails_at = -1
    run = capture(database, ["t"], topic, tmp_path / "state")
    check(topic, 21)
    with database.connect() as connection:
        ((gtid,),) = execute(connection, "SELECT @@gtid_binlog_pos")
    assert run.progress.gtid == gtid


def test_a_capture_that_was_killed_before_a_tombstone_sends_it(
    database: MariaDb, tmp_path: Path
) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path / "state", tombstones=True)
    with database.connect() as connection:
        execute(connection, "DELETE FROM t WHERE id < 2")
        execute(connection, "UPDATE t SET id = 12 WHERE id = 2")
        execute(connection, "INSERT INTO t VALUES (0, 1)")
        execute(connection, "DELETE FROM t WHERE id = 0")
    for topic.fails_at in range(ROWS, ROWS + 10):
        with pytest.raises(ConnectionError):
            capture(database, ["t"], topic, tmp_path / "state", tombstones=True)
    topic.fails_at = -1
    capture(database, ["t"], topic, tmp_path / "state", tombstones=True)
    assert topic.tombstones == {"t:0": 2, "t:1": 1, "t:2": 1}
    assert topic.of("t")[ROWS:] == [
        ("d", "t:0"), ("d", "t:1"), ("d", "t:2"), ("c", "t:12"), ("c", "t:0"), ("d", "t:0"),
    ]  # fmt: skip


def test_a_snapshot_that_was_cut_off_is_taken_anew(database: MariaDb, tmp_path: Path) -> None:
    """Rows that have gone meanwhile are deleted, and no row goes back in time."""
    topic = Topic()
    for attempt, topic.fails_at in enumerate((3, 6, 9), 1):
        with pytest.raises(ConnectionError):
            capture(database, ["t"], topic, tmp_path / "state")
        with database.connect() as connection:
            execute(connection, f"DELETE FROM t WHERE id = {attempt}")
            execute(connection, "UPDATE t SET v = v + 1")
            execute(connection, f"UPDATE t SET id = id + 100 WHERE id = 0 AND {attempt} = 2")
    topic.fails_at = -1
    capture(database, ["t"], topic, tmp_path / "state")
    write(database, 5, 6)
    capture(database, ["t"], topic, tmp_path / "state")
    assert topic.rows("t") == {"t:4": {"id": 4, "v": 5}, "t:100": {"id": 100, "v": 5}}
    values = [event["after"]["v"] for key, event in topic.messages if key == "t:4"]
    assert values == sorted(values)
    assert [event["op"] for _, event in topic.messages[-2:]] == ["u", "u"]


def test_a_log_that_is_gone_ends_a_capture(database: MariaDb, tmp_path: Path) -> None:
    topic = Topic()
    capture(database, ["t"], topic, tmp_path / "state")
    with database.connect() as connection:
        write(database, 1, 3)
        for _ in range(2):
            execute(connection, "FLUSH BINARY LOGS")
        write(database, 3, 5)
        ((file, *_),) = execute(connection, "SHOW MASTER STATUS")

        def is_purged() -> bool:
            # A server keeps files that an old connection may read, or recovery may need.
            kill_dump(database)
            execute(connection, f"PURGE BINARY LOGS TO '{file}'")
            return len(execute(connection, "SHOW BINARY LOGS")) == 1

        until(is_purged)
        with pytest.raises(CaptureError, match="--resnapshot"):
            capture(database, ["t"], topic, tmp_path / "state")
        capture(database, ["t"], topic, tmp_path / "state", resnapshot=True)
        assert topic.rows("t")["t:1"] == {"id": 1, "v": 4}
        write(database, 5, 6)
        capture(database, ["t"], topic, tmp_path / "state")
        assert topic.of("t")[-1] == ("u", "t:4")
        execute(connection, "RESET MASTER")
        with pytest.raises(CaptureError, match="its log was reset"):
            capture(database, ["t"], topic, tmp_path / "state")


def test_a_message_that_is_refused_ends_a_capture(database: MariaDb, tmp_path: Path) -> None:
    """The broker may refuse one, such as one that is too large. Nothing behind it counts."""

    class RefusingTopic(Topic):
        refused = ""

        def send(self, key: Any, body: bytes, *given: Any, **named: Any) -> Any:
            if self.refused.encode() not in body or not self.refused:
                return super().send(key, body, *given, **named)
            done: Future[TopicReceipt] = Future()
            done.set_exception(PreconditionFailed("the message is too large"))
            return done

    topic = RefusingTopic()
    capture(database, ["t"], topic, tmp_path / "state")
    write(database, 1, 5)
    for _ in range(2):
        topic.refused = '"v":3'
        with pytest.raises(PreconditionFailed, match="too large"):
            capture(database, ["t"], topic, tmp_path / "state")
    topic.refused = ""
    capture(database, ["t"], topic, tmp_path / "state")
    check(topic, 5)


def test_one_process_has_a_state(tmp_path: Path) -> None:
    with StateFile(tmp_path), pytest.raises(CaptureError, match="another capture"):
        StateFile(tmp_path)
    with StateFile(tmp_path):
        pass
