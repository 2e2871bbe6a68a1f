"""Reads a database's tables and then its binary log into an ordered topic, each change once.

    snapshot (consistent, no locks) ──▶ binary log from where the snapshot was begun

The order key is table and primary key, so the changes of a row stay in order. Every message has its
place in the source (`source_pos`): a reader that was killed begins a new session, reads again from
the last transaction that it knows to be stored, and leaves out what the topic has already.

A snapshot that was cut off is taken anew, and the log is read from where the first one was begun:
what happened meanwhile is applied once more and in order, so rows that have gone since go again.

State file: {"begin": GTID, "attempt": number, "whole": the snapshot is stored, "gtid": all up to it
is stored}.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import HeartbeatLogEvent, MariadbGtidEvent
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

from convoymq.client import Client, ClientConfig
from convoymq.client.topic_producer import TopicProducer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cdc.database import DATABASE, connect, execute

PRODUCER = "change-data-reader"
SERVER_ID = 77
HEARTBEAT_S = 0.2
STORE_EVERY_S = 0.5
STATE_FILE = "state.json"
STOP_FILE = "stop"
"""Has the GTID after which the reader ends."""
PAUSES_FILE = "pauses.csv"
"""A line (time, seconds) for each wait until all that was sent was stored."""
_PLACE = struct.Struct(">BQII")
_SNAPSHOT = 0
_LOG = 1

Row = Mapping[str, object]


def sequence_of(gtid: str) -> int:
    """Returns the number of a transaction: the last part of domain-server-number."""
    return int(gtid.rsplit("-", 1)[1]) if gtid else 0


class Reader:
    """See the module text."""

    def __init__(
        self, port: int, tables: Sequence[str], producer: TopicProducer, directory: Path
    ) -> None:
        self._port = port
        self._tables = tables
        self._producer = producer
        self._directory = directory
        self._keys: dict[str, list[str]] = {}
        self._state: dict[str, Any] = {"begin": "", "attempt": 0, "whole": False, "gtid": ""}
        if (directory / STATE_FILE).exists():
            self._state = json.loads((directory / STATE_FILE).read_text())

    def _store(self, **changes: object) -> None:
        self._state.update(changes)
        new = self._directory / f"{STATE_FILE}.new"
        new.write_text(json.dumps(self._state))
        new.replace(self._directory / STATE_FILE)

    # --- events ------------------------------------------------------------------------------

    def _send(self, table: str, op: str, row: Row, place: bytes) -> None:
        key = ":".join([table, *(str(row[column]) for column in self._keys[table])]).encode()
        if self._producer.is_stored(key, place):
            return
        event = {"op": op, "table": table, "place": place.hex(), **row}
        self._producer.send(key, json.dumps(event, default=str).encode(), source_pos=place)

    # --- snapshot ----------------------------------------------------------------------------

    def run(self) -> None:
        """Goes on until it is told to stop."""
        with connect(self._port) as connection:
            for table in self._tables:
                rows = execute(connection, f"SHOW KEYS FROM {table} WHERE Key_name = 'PRIMARY'")
                self._keys[table] = [row[4] for row in sorted(rows, key=lambda row: row[3])]
        if not self._state["whole"]:
            self._take_snapshot()
        self._follow(self._state["gtid"])

    def _take_snapshot(self) -> None:
        with connect(self._port) as connection:
            execute(connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            execute(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
            status = dict(execute(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'"))
            file, place = status["Binlog_snapshot_file"], status["Binlog_snapshot_position"]
            ((gtid,),) = execute(connection, f"SELECT BINLOG_GTID_POS('{file}', {place})")
            begin = self._state["begin"] or gtid
            self._store(begin=begin, attempt=self._state["attempt"] + 1)
            number = 0
            for table in self._tables:
                columns = [row[0] for row in execute(connection, f"SHOW COLUMNS FROM {table}")]
                for values in self._rows(connection, table):
                    number += 1
                    place = _PLACE.pack(_SNAPSHOT, self._state["attempt"], 0, number)
                    self._send(table, "r", dict(zip(columns, values, strict=True)), place)
        self._producer.flush()
        self._store(whole=True, gtid=begin)

    def _rows(self, connection: Any, table: str) -> Iterator[tuple[object, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table}")
            yield from cursor

    # --- log ---------------------------------------------------------------------------------

    def _follow(self, after: str) -> None:
        stream = BinLogStreamReader(
            connection_settings={
                "host": "127.0.0.1", "port": self._port, "user": "root", "password": ""
            },
            server_id=SERVER_ID,
            is_mariadb=True,
            auto_position=after,
            blocking=True,
            slave_heartbeat=HEARTBEAT_S,
            only_schemas=[DATABASE],
            only_tables=list(self._tables),
            only_events=[
                MariadbGtidEvent, HeartbeatLogEvent, WriteRowsEvent, UpdateRowsEvent,
                DeleteRowsEvent,
            ],
        )  # fmt: skip
        try:
            self._follow_stream(stream, after)
        finally:
            stream.close()

    def _follow_stream(self, stream: BinLogStreamReader, after: str) -> None:
        whole = current = after
        ordinal = 0
        stored_s = time.monotonic()
        for event in stream:
            if isinstance(event, MariadbGtidEvent):
                # The transaction before is sent as a whole.
                whole, current, ordinal = current, event.gtid, 0
            elif isinstance(event, HeartbeatLogEvent):
                # The log has nothing more for now.
                whole = current
            else:
                ordinal += 1
                self._send_rows(event, sequence_of(current), ordinal)
            if time.monotonic() >= stored_s + STORE_EVERY_S:
                self._flush()
                self._store(gtid=whole)
                stored_s = time.monotonic()
                if self._is_told_to_stop(whole):
                    return

    def _flush(self) -> None:
        begin = time.monotonic()
        self._producer.flush()
        with open(self._directory / PAUSES_FILE, "a") as file:
            file.write(f"{time.time():.3f},{time.monotonic() - begin:.6f}\n")

    def _send_rows(self, event: Any, transaction: int, ordinal: int) -> None:
        table = event.table
        keys = self._keys[table]
        for number, row in enumerate(event.rows):
            # Two places a row: a change of its key deletes one row and inserts another.
            first = _PLACE.pack(_LOG, transaction, ordinal, 2 * number)
            second = _PLACE.pack(_LOG, transaction, ordinal, 2 * number + 1)
            if isinstance(event, DeleteRowsEvent):
                self._send(table, "d", row["values"], first)
            elif isinstance(event, WriteRowsEvent):
                self._send(table, "c", row["values"], first)
            else:
                before, now = row["before_values"], row["after_values"]
                if any(before[key] != now[key] for key in keys):
                    self._send(table, "d", before, first)
                self._send(table, "u", now, second)

    def _is_told_to_stop(self, gtid: str) -> bool:
        stop = self._directory / STOP_FILE
        return stop.exists() and sequence_of(gtid) >= sequence_of(stop.read_text().strip())


def main() -> int:
    """Exit code: 0 told to stop, and everything before is stored."""
    parser = argparse.ArgumentParser(description="A database's changes into an ordered topic")
    parser.add_argument("--port", type=int, required=True, help="of MariaDB, on loopback")
    parser.add_argument("--servers", required=True, help="host:port of nodes, comma between")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--table", action="append", required=True)
    parser.add_argument("--directory", type=Path, required=True, help="for the reader's state")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with (
        Client(ClientConfig(tuple(options.servers.split(",")))) as client,
        TopicProducer(client, options.topic, producer_id=PRODUCER) as producer,
    ):
        Reader(options.port, options.table, producer, options.directory).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
