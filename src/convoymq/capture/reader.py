"""Capture of a database: a consistent snapshot, then its binary log, each change once.

    snapshot (no locks) ──▶ binary log from where the snapshot was begun

The order key is table and primary key, so the changes of a row stay in order. Every message has its
place in the source (`source_pos`), which grows. What happens when something is lost:

    lost                      goes on
    connection to database    behind the last transaction that was sent whole; of one that was sent
                              in part, behind the last place that was sent
    the capture itself        behind the last transaction that is stored (`state.Progress.gtid`);
                              what the topic has of later ones is left out
    a snapshot in part        a new snapshot; before its rows, deletes since the first one was begun
                              are sent: the topic may have such rows

Statements that change rows without row events end the capture (`statements.effects`), as does
everything in the log that is not understood.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from convoymq.capture import messages
from convoymq.capture.binlog import Begin, Commit, Event, Rows, Statement, TableMap
from convoymq.capture.columns import Column, of_log
from convoymq.capture.database import Address, Database, Snapshot, Table
from convoymq.capture.errors import CaptureError, DatabaseLost
from convoymq.capture.messages import Row, Source
from convoymq.capture.state import Progress, StateFile
from convoymq.capture.statements import Effect, effects
from convoymq.client import errors
from convoymq.client.producer_thread import TopicReceipt
from convoymq.model.json import Json

STORE_EVERY_S = 0.5
WAIT_S = 0.5
"""For the broker, until a stop is looked for."""
RETRY_FIRST_S = 0.2
RETRY_MOST_S = 10.0


class Producer(Protocol):
    """Part of `TopicProducer` that a capture needs."""

    def is_stored(self, key: bytes | str, source_pos: bytes) -> bool: ...

    def send(
        self,
        key: bytes | str | None,
        body: bytes | None,
        headers: Mapping[str, str | bytes] | None = None,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[TopicReceipt]: ...

    def flush(self, timeout: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Rules of a capture."""

    server_id: int
    """Of the capture among the replicas of the database."""
    keys: Mapping[str, Sequence[str]]
    """Columns that name a row, of tables where these are not the primary key's."""
    passed: frozenset[str] = frozenset()
    """Transactions whose statement an operator knows: the capture goes on behind them."""
    truncate_events: bool = False
    """TRUNCATE becomes an event with op `t`."""
    tombstones: bool = False
    """A deleted row's key gets a message without a value behind the delete."""
    allow_cascades: bool = False
    resnapshot: bool = False
    """Begins with a new snapshot. Its places are behind all that were given."""
    until_end: bool = False
    """Ends when all that was in the log at the beginning is stored."""


class Stopped(Exception):
    """The capture has been told to stop."""


@dataclass(slots=True)
class _Transaction:
    """The transaction that is being read."""

    begin: Begin
    ordinal: int = 0
    """Places given so far."""


@dataclass(slots=True)
class _Attempt:
    """The snapshot that is being taken."""

    moment: Snapshot
    number: int = 0
    """Places given so far."""


Report = Callable[[str, Mapping[str, Json]], None]
"""Called with an event's name and values: `snapshot`, `table`, `follow`, `stored`, `lost`,
`altered`, `passed`."""


class Capture:
    """See the module text.

    Args:
        topic_created_ms: tells the topic from another one of its name.
        stop: set by a signal: what was read is stored, and `run` returns.

    Raises:
        CaptureError: an operator has to act.
        ClientError: the producer has ended.
    """

    def __init__(
        self,
        address: Address,
        tables: Sequence[str],
        producer: Producer,
        file: StateFile,
        *,
        topic: str,
        topic_created_ms: int,
        options: Options,
        report: Report,
        stop: threading.Event,
    ) -> None:
        self._address = address
        self._names = tables
        self._producer = producer
        self._file = file
        self._options = options
        self._report = report
        self._stop = stop
        self._progress = file.load() or Progress(
            database=address.database, topic=topic, topic_created_ms=topic_created_ms
        )
        self._check_state(topic, topic_created_ms)
        self._tables: dict[str, Table] = {}
        self._charsets: dict[int, str] = {}
        self._columns: dict[TableMap, tuple[Column, ...]] = {}
        self._attempt: _Attempt | None = None
        self._whole = self._progress.gtid
        """The last transaction that was sent whole."""
        self._place = b""
        """The last place that was sent or left out."""
        self._sent = 0
        self._reported = 0
        self._failed: Exception | None = None

    @property
    def sent(self) -> int:
        """Returns the number of messages that were sent."""
        return self._sent

    @property
    def progress(self) -> Progress:
        """Returns the state."""
        return self._progress

    def _check_state(self, topic: str, created_ms: int) -> None:
        had = self._progress
        if had.database != self._address.database or had.topic != topic:
            raise CaptureError(
                f"the state is of database {had.database} and topic {had.topic}: give this capture"
                " a directory of its own"
            )
        if had.topic_created_ms != created_ms:
            raise CaptureError(
                f"topic {topic} was deleted and created again, and has nothing of what the state"
                " says is stored: remove the state to begin with a snapshot"
            )
        if self._options.resnapshot:
            self._progress = Progress(
                database=had.database, topic=topic, topic_created_ms=created_ms,
                generation=had.generation + 1,
            )  # fmt: skip
            self._file.store(self._progress)
        elif had.tables and (new := [name for name in self._names if name not in had.tables]):
            raise CaptureError(
                f"table {', '.join(new)} is not in the state: take a new snapshot of all tables"
                " (--resnapshot), or capture it with a state of its own"
            )

    # --- connections -------------------------------------------------------------------------

    def run(self) -> None:
        """Goes on until it is told to stop, or until the end that it is to reach."""
        wait_s = 0.0
        was_connected = False
        while True:
            try:
                with Database(self._address) as database:
                    database.check()
                    self._define(database)
                    wait_s, was_connected = 0.0, True
                    if not self._progress.has_snapshot:
                        self._take_snapshot(database)
                    self._follow(database)
                return
            except Stopped:
                self._store()
                return
            except DatabaseLost as error:
                if not was_connected:
                    raise CaptureError(f"no connection to the database: {error}") from None
                wait_s = min(RETRY_MOST_S, 2 * wait_s or RETRY_FIRST_S)
                self._report("lost", {"reason": str(error), "retry_s": wait_s})
                if self._stop.wait(wait_s):
                    self._store()
                    return
            except CaptureError:
                # What was read before it is stored, unless the broker has a fault of its own.
                with suppress(errors.ClientError):
                    self._store()
                raise

    def _define(self, database: Database) -> None:
        """Learns what the tables are: from the state, or from the catalogue before a snapshot."""
        self._charsets = database.charsets()
        self._columns.clear()
        had = self._progress
        self._attempt = None
        if had.has_snapshot:
            self._tables = {name: had.table(name) for name in self._names}
            last = database.last_gtid()
            if messages.sequence_of(last) < messages.sequence_of(self._whole):
                raise CaptureError(
                    f"the binary log ends with {last or 'nothing'}, before {self._whole} which was"
                    " captured: another server, or its log was reset. Take a new snapshot:"
                    " --resnapshot"
                )
            return
        found = {name: self._catalogued(database, name) for name in self._names}
        if had.attempt and any(had.table(name) != table for name, table in found.items()):
            raise CaptureError("tables were altered since the snapshot was begun: --resnapshot")
        self._tables = found

    def _catalogued(self, database: Database, name: str) -> Table:
        key = self._options.keys.get(name, ())
        return database.table(name, key, cascades=self._options.allow_cascades)

    # --- messages ----------------------------------------------------------------------------

    def _send(self, key: bytes, op: str, before: Row | None, after: Row | None, to: Source) -> None:
        """Sends a message, unless this session or one before it has done so."""
        if self._is_due(key, to.place):
            self._put(key, messages.body_of(op, before, after, to), to.place)
        if op == "d" and self._options.tombstones:
            place = messages.tombstone_place(to.place)
            if self._is_due(key, place):
                self._put(key, None, place)

    def _is_due(self, key: bytes, place: bytes) -> bool:
        if place <= self._place:
            return False
        self._place = place
        return not self._producer.is_stored(key, place)

    def _put(self, key: bytes, body: bytes | None, place: bytes) -> None:
        while True:
            self._check_stop()
            try:
                sending = self._producer.send(key, body, source_pos=place, timeout=WAIT_S)
                break
            except errors.Unavailable:
                continue
        sending.add_done_callback(self._done)
        self._sent += 1

    def _send_truncate(self, table: str, source: Source) -> None:
        self._send(messages.key_of(table, (), {}), "t", None, None, source)

    def _done(self, sending: Future[TopicReceipt]) -> None:
        error = sending.exception()
        if error is not None and self._failed is None and isinstance(error, Exception):
            self._failed = error

    def _check_stop(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._stop.is_set():
            raise Stopped

    def _flush(self, *, is_stopping: bool = False) -> None:
        """Waits until all that was sent is stored."""
        while True:
            try:
                self._producer.flush(WAIT_S)
                break
            except errors.Unavailable:
                if not is_stopping:
                    self._check_stop()
                elif self._failed is None:
                    # The next session finds out what is stored.
                    raise
        if self._failed is not None:
            raise self._failed

    def _store(self) -> None:
        """Notes the last whole transaction as stored, once it is."""
        if not self._progress.has_snapshot or self._whole == self._progress.gtid:
            return
        whole, begin = self._whole, time.monotonic()
        self._flush(is_stopping=self._stop.is_set())
        assert messages.sequence_of(whole) > messages.sequence_of(self._progress.gtid)
        self._progress.gtid = whole
        self._file.store(self._progress)
        if self._sent != self._reported:
            self._reported = self._sent
            self._report(
                "stored",
                {
                    "gtid": whole,
                    "messages": self._sent,
                    "wait_s": round(time.monotonic() - begin, 6),
                },
            )

    # --- snapshot ----------------------------------------------------------------------------

    def _take_snapshot(self, database: Database) -> None:
        progress = self._progress
        attempt = self._attempt = _Attempt(database.begin_snapshot())
        had_begun = progress.attempt > 0
        progress.begin = progress.begin if had_begun else attempt.moment.gtid
        progress.attempt += 1
        for table in self._tables.values():
            progress.keep(table)
        self._file.store(progress)
        self._report("snapshot", {"gtid": attempt.moment.gtid, "attempt": progress.attempt})
        if progress.generation > 1 and self._options.truncate_events:
            for name in self._tables:
                self._send_truncate(name, self._source(name, None))
        if had_begun:
            self._whole = progress.begin
            self._read_log(attempt.moment.gtid)
        for table in self._tables.values():
            first = attempt.number
            columns = [column for column in table.columns if not column.is_virtual]
            for values in database.read_table(table):
                row: Row = {
                    column.name: column.json(column.selected(value))
                    for column, value in zip(columns, values, strict=True)
                }
                source = self._source(table.name, None)
                self._send(messages.key_of(table.name, table.key, row), "r", None, row, source)
            self._report("table", {"table": table.name, "rows": attempt.number - first})
        self._attempt = None
        self._flush()
        self._whole = progress.gtid = attempt.moment.gtid
        progress.has_snapshot = True
        self._file.store(progress)

    # --- log ---------------------------------------------------------------------------------

    def _follow(self, database: Database) -> None:
        """Reads the log from the last transaction that was sent whole, never from an earlier."""
        self._report("follow", {"after": self._whole})
        self._read_log(database.last_gtid() if self._options.until_end else None)
        self._store()

    def _read_log(self, end: str | None) -> None:
        """Reads the log behind `_whole`, up to a transaction or for ever."""
        last = None if end is None else messages.sequence_of(end)
        stored_s = time.monotonic()
        current: _Transaction | None = None
        with Database(self._address) as log:
            events = log.follow(self._whole, self._options.server_id)
            while last is None or messages.sequence_of(self._whole) < last:
                current = self._read(next(events), current)
                self._check_stop()
                if time.monotonic() >= stored_s + STORE_EVERY_S:
                    self._store()
                    stored_s = time.monotonic()

    def _read(self, event: Event, current: _Transaction | None) -> _Transaction | None:
        """Carries an event out. Returns the transaction that goes on."""
        match event:
            case Begin():
                self._check_order(event)
                return _Transaction(event)
            case Rows() if current is not None:
                self._send_rows(event, current)
                return current
            case Statement() if current is not None:
                self._meet(event, current)
                if not current.begin.is_standalone:
                    return current
                self._whole = current.begin.gtid
            case Commit() if current is not None:
                self._whole = current.begin.gtid
            case _:
                return current
        return None

    def _check_order(self, begin: Begin) -> None:
        if not self._whole:
            return
        if begin.domain != messages.domain_of(self._whole):
            raise CaptureError(
                f"transaction {begin.gtid} is of another replication domain than {self._whole}:"
                " one is served"
            )
        if begin.sequence <= messages.sequence_of(self._whole):
            raise CaptureError(
                f"transaction {begin.gtid} comes behind {self._whole}: the server needs"
                " gtid_strict_mode = ON"
            )

    def _source(self, table: str, current: _Transaction | None) -> Source:
        """Returns the next place: of the snapshot that is being taken, or of a transaction."""
        generation, database = self._progress.generation, self._address.database
        if self._attempt is not None:
            self._attempt.number += 1
            moment, number = self._attempt.moment, self._attempt.number
            return Source(
                database=database, table=table, gtid=moment.gtid,
                place=messages.snapshot_place(generation, self._progress.attempt, number),
                is_snapshot=True, time_ms=moment.time_ms,
            )  # fmt: skip
        assert current is not None
        current.ordinal += 1
        begin = current.begin
        return Source(
            database=database, table=table, gtid=begin.gtid,
            place=messages.log_place(generation, begin.sequence, current.ordinal),
            is_snapshot=False, time_ms=begin.time_s * 1000,
        )  # fmt: skip

    def _send_rows(self, rows: Rows, current: _Transaction) -> None:
        table = self._tables.get(rows.map.table)
        if table is None or rows.map.database != self._address.database:
            return
        if current.begin.is_prepared:
            raise CaptureError(
                f"transaction {current.begin.gtid} changes {table.name} and is only prepared (XA):"
                " it may be rolled back. A capture can't follow XA transactions"
            )
        columns = self._columns_of(rows.map, table)
        table = self._tables[table.name]
        for change in messages.changes_of(rows, columns):
            # Two places a row: a change of its key deletes one row and inserts another.
            gone, made = self._source(table.name, current), self._source(table.name, current)
            before, after = change.before, change.after
            old = None if before is None else messages.key_of(table.name, table.key, before)
            new = None if after is None else messages.key_of(table.name, table.key, after)
            if old is not None and old != new:
                self._send(old, "d", before, None, gone)
            if new is not None and self._attempt is None:
                op = "u" if old == new else "c"
                self._send(new, op, before if op == "u" else None, after, made)

    def _columns_of(self, map: TableMap, table: Table) -> tuple[Column, ...]:
        """Returns what the columns of a map are, and notes it when the table has changed."""
        known = self._columns.get(map)
        if known is not None:
            return known
        is_altered = table.name in self._progress.altered
        if map.is_named:
            hints = {column.name: column for column in table.columns}
            known = tuple(
                of_log(each, hints.get(each.name), self._charsets) for each in map.columns
            )
            if missing := set(table.key) - {column.name for column in known}:
                raise CaptureError(
                    f"table {table.name} has lost {', '.join(sorted(missing))} of its key:"
                    " --resnapshot"
                )
        else:
            known = table.columns
            fits = len(known) == len(map.columns) and all(
                column.fits(logged) for column, logged in zip(known, map.columns, strict=True)
            )
            if is_altered or not fits:
                raise CaptureError(
                    f"table {table.name} was altered, and the binary log does not name columns:"
                    " SET GLOBAL binlog_row_metadata = FULL, then --resnapshot"
                )
        if is_altered:
            self._progress.altered.remove(table.name)
            self._tables[table.name] = Table(name=table.name, columns=known, key=table.key)
            self._progress.keep(self._tables[table.name])
        self._columns[map] = known
        return known

    # --- statements --------------------------------------------------------------------------

    def _meet(self, statement: Statement, current: _Transaction) -> None:
        """Carries out what a statement does to captured tables, or refuses to go on."""
        captured = [(self._address.database, name) for name in self._names]
        gtid = current.begin.gtid
        for name, effect in effects(statement.text, statement.database, captured).items():
            values: dict[str, Json] = {"table": name, "gtid": gtid, "statement": statement.text}
            if gtid in self._options.passed:
                self._report("passed", values)
                self._alter(name)
            elif effect is Effect.FOLLOWED:
                self._report("altered", values)
                self._alter(name)
            elif effect is Effect.TRUNCATED and self._options.truncate_events:
                self._send_truncate(name, self._source(name, current))
            else:
                more = " (--truncate event makes it an event)"
                raise CaptureError(
                    f"transaction {gtid} changes rows of {name} without row events:"
                    f" {' '.join(statement.text.split())[:200]!r}."
                    f"{more if effect is Effect.TRUNCATED else ''} Take a new snapshot into tables"
                    f" that are empty (--resnapshot), or, when no row that the topic has is another"
                    f" one now, go on behind it: --pass {gtid}"
                )

    def _alter(self, name: str) -> None:
        """Has the next map of a table define its columns. Types that the log does not tell come
        from the catalogue."""
        table = self._tables[name]
        known = {column.name: column for column in table.columns}
        try:
            with Database(self._address) as database:
                found = self._catalogued(database, name)
            known.update({each.name: each for each in found.columns})
        except CaptureError:
            # Gone, or altered once more: its rows will show it.
            pass
        self._tables[name] = Table(name=name, columns=tuple(known.values()), key=table.key)
        self._progress.altered.add(name)
        self._progress.keep(self._tables[name])
        self._columns.clear()
