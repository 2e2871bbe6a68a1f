"""Parts of the change-data demo: what it takes for out of order, and what the reader sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `cdc` lies beside the demo."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name == "cdc" or name.startswith("cdc.")]:
        del sys.modules[name]


class Topic:
    """A producer without a cluster: a topic of as many logical partitions as keys."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.tables: dict[str, dict[object, dict[str, object]]] = {}
        self.sent = 0
        self.fails_at = -1

    def is_stored(self, key: bytes, source_pos: bytes) -> bool:
        return self.stored.get(key, b"") >= source_pos

    def send(self, key: bytes, body: bytes, *, source_pos: bytes) -> None:
        if self.sent == self.fails_at:
            raise ConnectionError("killed")
        assert self.stored.get(key, b"") < source_pos
        self.stored[key] = source_pos
        self.sent += 1
        event = json.loads(body)
        assert event.pop("place") == source_pos.hex()
        table = self.tables.setdefault(event.pop("table"), {})
        if event.pop("op") == "d":
            table.pop(event["id"], None)
        else:
            table[event["id"]] = event

    def flush(self) -> None:
        pass


def test_changes_out_of_order_are_counted_once() -> None:
    from cdc.order import Order

    order = Order()
    for key, place in (("a", "1"), ("b", "5"), ("a", "3"), ("a", "2"), ("a", "3"), ("a", "4")):
        order.note(key, place)
    assert (order.seen, order.violations) == (5, 1)
    assert [order.busy_key(rank) for rank in (0, 1, 9)] == ["a", "b", "b"]
    assert order.changes == [("a", "1"), ("b", "5"), ("a", "3"), ("a", "2"), ("a", "4")]


@pytest.mark.parametrize(
    ("told", "fits"),
    [
        ("mariadbd  Ver 10.11.0-MariaDB-1 for debian-linux-gnu", True),
        ("mariadbd  Ver 11.8.3-MariaDB-0+deb13u1 from Debian", True),
        ("mariadbd  Ver 10.5.29-MariaDB-0+deb11u1 for debian-linux-gnu", False),
        ("mariadbd  Ver 8.0.40 for Linux on x86_64", False),
    ],
)
def test_a_database_that_is_too_old_is_refused_by_name(
    tmp_path: Path, told: str, fits: bool
) -> None:
    from cdc.database import Missing, check_version

    server = tmp_path / "mariadbd"
    server.write_text(f"#!/bin/sh\necho '{told}'\n")
    server.chmod(0o755)
    # The script that installs it says the same; with sysbench it would go on no further.
    sysbench = tmp_path / "sysbench"
    sysbench.write_text("#!/bin/sh\n")
    sysbench.chmod(0o755)
    script = subprocess.run(
        [EXAMPLES.parent / "tools" / "install_mariadb.sh"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if fits:
        check_version(str(server))
        assert (script.returncode, script.stderr) == (0, "")
    else:
        with pytest.raises(
            Missing, match=r"needs MariaDB 10\.11 or newer; .*mariadbd is: mariadbd"
        ):
            check_version(str(server))
        assert script.returncode == 1
        assert "the demo needs MariaDB 10.11 or newer" in script.stderr


def test_a_row_whose_key_changes_is_deleted_under_the_old_one(tmp_path: Path) -> None:
    from pymysqlreplication.row_event import UpdateRowsEvent

    from cdc.reader import Reader

    class Update(UpdateRowsEvent):  # type: ignore[misc]
        table = "t"
        rows = (
            {"before_values": {"id": 1, "v": "x"}, "after_values": {"id": 1, "v": "y"}},
            {"before_values": {"id": 1, "v": "y"}, "after_values": {"id": 2, "v": "z"}},
        )

        def __init__(self) -> None:
            pass

    topic: Any = Topic()
    reader = Reader(0, ["t"], topic, tmp_path)
    reader._keys = {"t": ["id"]}
    reader._send_rows(Update(), 7, 1)
    assert topic.tables == {"t": {2: {"id": 2, "v": "z"}}}
    assert list(topic.stored) == [b"t:1", b"t:2"]
    sent = topic.sent
    # What is read again is left out.
    reader._send_rows(Update(), 7, 1)
    assert topic.sent == sent == 3


def test_the_changes_of_the_autoscaler_are_read_from_the_logs_of_nodes(tmp_path: Path) -> None:
    import demo_cdc

    said = {"event": "topics.autoscaled", "decision": "split of partition 0 at 4", "rule": "load_2"}
    for node, lines in {
        1: [{**said, "change": "auto-2", "timestamp": "2026-01-01T00:00:02Z"}],
        2: [
            {**said, "change": "auto-1", "timestamp": "2026-01-01T00:00:01Z"},
            {"event": "link.up"},
        ],
    }.items():
        log = tmp_path / f"node-{node}" / "convoy.log"
        log.parent.mkdir()
        log.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "topics.autoscaled", "ch')
    found = demo_cdc.scaled_changes(tmp_path)
    assert [each.change_id for each in found] == ["auto-1", "auto-2"]
    assert found[0].rule == "load_2"


def test_the_page_shows_every_partition(tmp_path: Path) -> None:
    from cdc.report import pauses_of, write_report

    (tmp_path / "pauses.csv").write_text("100.000,0.010000\n101.000,0.020000\n")
    pauses = pauses_of(tmp_path / "pauses.csv")
    assert pauses == [(100.0, 0.01), (101.0, 0.02)]
    assert pauses_of(tmp_path / "none.csv") == []
    lineage = [
        {"pid": 0, "lo": 0, "hi": 8, "created_version": 0, "sealed_version": 1},
        {"pid": 41, "lo": 0, "hi": 4, "created_version": 1, "sealed_version": None},
        {"pid": 42, "lo": 4, "hi": 8, "created_version": 1, "sealed_version": None},
    ]
    page = write_report(
        tmp_path / "page.html",
        [(100.5, "split <0>")],
        lineage,
        pauses,
        [(100.2, 0.1)],
        [("split of partition 0 at 4", "load_2", "auto-split-1")],
    )
    text = page.read_text()
    assert "<td>split of partition 0 at 4</td><td>load_2</td><td>auto-split-1</td>" in text
    assert text.count("<svg") == 2
    assert "split &lt;0&gt;" in text
    for pid in (41, 42):
        assert f"<!-- {pid} -->" in text


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore:'db' is deprecated:DeprecationWarning")
@pytest.mark.skipif(
    not (shutil.which("sysbench") and Path("/usr/sbin/mariadbd").exists()),
    reason="MariaDB and sysbench are not installed: tools/install_mariadb.sh does it",
)
def test_a_killed_reader_goes_on_and_the_tables_are_equal(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from cdc.database import MariaDb, Sysbench, execute
    from cdc.reader import STOP_FILE, Reader
    from tests.ports import single_port

    with MariaDb(tmp_path / "database", single_port()) as database:
        load = Sysbench(database.port, 2, 200, tmp_path / "sysbench.log")
        load.prepare()
        load.start(3, 100)
        request.addfinalizer(load.stop)
        tables = ["sbtest1", "sbtest2"]
        topic: Any = Topic()
        # In the snapshot, and in the log.
        for topic.fails_at in (250, 700):
            with pytest.raises(ConnectionError):
                Reader(database.port, tables, topic, tmp_path).run()
        topic.fails_at = -1
        reader = threading.Thread(target=Reader(database.port, tables, topic, tmp_path).run)
        reader.start()
        load.wait()
        with database.connect() as connection:
            ((gtid,),) = execute(connection, "SELECT @@gtid_binlog_pos")
            (tmp_path / STOP_FILE).write_text(gtid)
            reader.join()
            for table in tables:
                rows = execute(connection, f"SELECT id, k, c, pad FROM {table}")
                assert [tuple(topic.tables[table][row[0]].values()) for row in rows] == rows
                assert len(topic.tables[table]) == len(rows)
