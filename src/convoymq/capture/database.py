"""A MariaDB server as a capture sees it: its settings, its tables, their rows, its binary log."""

from __future__ import annotations

import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import pymysql
import pymysql.cursors
from pymysql.constants import COMMAND, ER

from convoymq.capture.binlog import Event, LogReader
from convoymq.capture.columns import Column, of_catalogue, quoted
from convoymq.capture.errors import CaptureError, DatabaseLost

VERSION_MIN = (10, 11)
CONNECT_TIMEOUT_S = 10
HEARTBEAT_S = 0.5
READ_TIMEOUT_S = 60
"""Without a row, an event or a heartbeat for so long the connection counts as lost."""
PATIENCE_S = 3_600
"""Of the server, while a capture waits for the broker and reads nothing."""
FETCH_ROWS = 1_000
DUMP_START = 4
LOG_LOST = 1236
"""Error of a server that can't send its log from where it is asked to."""
PERMANENT = frozenset((
    ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.BAD_DB_ERROR,
    ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR,
))  # fmt: skip
SILENT_RULES = ("CASCADE", "SET NULL", "SET DEFAULT")
"""Of foreign keys: rows of the table change without events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a database, and the user that reads it."""

    host: str
    port: int
    user: str
    password: str = field(default="", repr=False)
    database: str
    ca_file: str = ""
    """Authority of the server's certificate; empty: the connection is not encrypted."""

    @classmethod
    def of(cls, url: str, password: str = "", ca_file: str = "") -> Address:
        """Returns the address `mariadb://user@host:3306/database`. Raises CaptureError."""
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError:
            parts, port = urlsplit(""), 0
        database = unquote(parts.path.removeprefix("/"))
        if parts.scheme not in ("mariadb", "mysql") or not parts.hostname or not database:
            raise CaptureError("the database is given as mariadb://USER@HOST:PORT/DATABASE")
        return cls(
            host=parts.hostname, port=port, user=unquote(parts.username or "root"),
            password=password or unquote(parts.password or ""), database=database,
            ca_file=ca_file,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: its columns, and those of them that name a row."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A moment of the database: the transaction before it, and its time."""

    gtid: str
    time_ms: int


class Database:
    """One connection. Not thread-safe.

    Raises:
        DatabaseLost: no connection, or it is gone.
        CaptureError: refused by the server for a reason that stays.
    """

    def __init__(self, address: Address) -> None:
        self.name = address.database
        self._address = address
        context = ssl.create_default_context(cafile=address.ca_file) if address.ca_file else None
        with _failures(address):
            # Without converters values stay as the server sends them: `Column.selected` reads them.
            self._connection = pymysql.connect(
                host=address.host, port=address.port, user=address.user,
                password=address.password, database=address.database, charset="utf8mb4",
                autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S,
                conv={}, ssl=context, cursorclass=pymysql.cursors.SSCursor,
                init_command=f"SET SESSION net_write_timeout = {PATIENCE_S}",
            )  # fmt: skip

    def close(self) -> None:
        """Ends the connection."""
        if self._connection.open:
            # No farewell: a log is sent for as long as the socket is there.
            self._connection._force_close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, statement: str, *values: object) -> Iterator[tuple[bytes | str | None, ...]]:
        """Yields the rows of a query as they come."""
        with _failures(self._address), self._connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            while found := cursor.fetchmany(FETCH_ROWS):
                yield from found

    def execute(self, statement: str) -> None:
        """Executes a statement without rows."""
        for _ in self.rows(statement):
            pass

    def value(self, statement: str) -> str:
        """Returns the only value of a query, as text; empty: NULL."""
        ((value,),) = self.rows(statement)
        return value.decode() if isinstance(value, bytes) else value or ""

    # --- what must be so ---------------------------------------------------------------------

    def check(self) -> None:
        """Raises CaptureError: a setting that would hide changes."""
        version = self.value("SELECT VERSION()")
        if "MariaDB" not in version:
            raise CaptureError(f"the server is {version}; a capture reads MariaDB")
        if tuple(map(int, version.split(".")[:2])) < VERSION_MIN:
            raise CaptureError(f"the server is MariaDB {version}; 10.11 or newer is needed")
        if self.value("SELECT @@log_bin") != "1":
            raise CaptureError("the server writes no binary log: start it with log_bin")
        for setting, wanted in (("binlog_format", "ROW"), ("binlog_row_image", "FULL")):
            found = self.value(f"SELECT @@GLOBAL.{setting}")
            if found != wanted:
                raise CaptureError(
                    f"{setting} is {found}: SET GLOBAL {setting} = {wanted}, also in the server's"
                    " configuration; sessions that are open keep the old value"
                )
        if "," in self.value("SELECT @@gtid_binlog_pos"):
            raise CaptureError("the binary log has several replication domains; one is served")
        is_replica = self.value("SELECT @@gtid_slave_pos") != ""
        if is_replica and self.value("SELECT @@log_slave_updates") != "1":
            raise CaptureError("the server is a replica: it needs log_slave_updates = ON")
        for _, _, only, ignored in self.rows("SHOW MASTER STATUS"):
            if only and self.name not in _text(only).split(","):
                raise CaptureError(f"binlog_do_db leaves {self.name} out of the binary log")
            if self.name in _text(ignored).split(","):
                raise CaptureError(f"binlog_ignore_db leaves {self.name} out of the binary log")

    def last_gtid(self) -> str:
        """Returns the last transaction in the binary log."""
        return self.value("SELECT @@gtid_binlog_pos")

    def charsets(self) -> dict[int, str]:
        """Returns the charset of each collation."""
        found = {}
        for number, charset in self.rows(
            "SELECT ID, CHARACTER_SET_NAME FROM"
            " information_schema.COLLATION_CHARACTER_SET_APPLICABILITY"
            if self._knows_numbers()
            else "SELECT ID, CHARACTER_SET_NAME FROM information_schema.COLLATIONS"
        ):
            if number is not None and charset is not None:
                found[int(_text(number))] = _text(charset)
        return found

    def _knows_numbers(self) -> bool:
        columns = self.rows(
            "SELECT 1 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'information_schema'"
            " AND TABLE_NAME = 'COLLATION_CHARACTER_SET_APPLICABILITY' AND COLUMN_NAME = 'ID'"
        )
        return bool(list(columns))

    def table(self, name: str, key: Sequence[str] = (), *, cascades: bool = False) -> Table:
        """Returns a table.

        Args:
            key: columns that name a row; none: those of the primary key.
            cascades: takes tables that foreign keys change.

        Raises:
            CaptureError: no such table, no key, or one that can't be captured.
        """
        kinds = list(
            self.rows(
                "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE FROM information_schema.TABLES"
                " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
                self.name,
                name,
            )
        )
        if not kinds:
            raise CaptureError(
                f"there is no table {name} in {self.name} (or no right to SELECT from it)"
            )
        ((base, found, kind, engine),) = kinds
        # Compared by the catalogue without regard to case; the log has the name as it is.
        if (_text(base), _text(found)) != (self.name, name):
            raise CaptureError(
                f"table {name} of {self.name} is called {_text(base)}.{_text(found)}"
            )
        if _text(kind) != "BASE TABLE":
            raise CaptureError(f"{name} is a {_text(kind).lower()}: a plain table can be captured")
        if _text(engine) not in ("InnoDB", "ROCKSDB"):
            raise CaptureError(
                f"table {name} has engine {_text(engine)}, which has no consistent snapshot:"
                f" ALTER TABLE {name} ENGINE = InnoDB"
            )
        if not cascades:
            self._check_cascades(name)
        columns = self._columns(name)
        return Table(name=name, columns=columns, key=self._key(name, columns, key))

    def _columns(self, name: str) -> tuple[Column, ...]:
        made = []
        for row in self.rows(
            "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, CHARACTER_OCTET_LENGTH,"
            " NUMERIC_PRECISION, COALESCE(NUMERIC_SCALE, DATETIME_PRECISION), CHARACTER_SET_NAME,"
            " EXTRA FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
            " ORDER BY ORDINAL_POSITION", self.name, name,
        ):  # fmt: skip
            column, kind, whole, octets, digits, scale, charset, extra = map(_text, row)
            try:
                made.append(
                    of_catalogue(
                        column,
                        kind,
                        whole,
                        octets=int(octets or 0),
                        digits=int(digits or 0),
                        scale=int(scale or 0),
                        charset=charset,
                        extra=extra,
                    )
                )
            except CaptureError as error:
                raise CaptureError(f"table {name}: {error}") from None
        return tuple(made)

    def _key(self, name: str, columns: Sequence[Column], wanted: Sequence[str]) -> tuple[str, ...]:
        unique: dict[str, list[tuple[str, bool]]] = {}
        for index, column, nullable in self.rows(
            "SELECT INDEX_NAME, COLUMN_NAME, NULLABLE FROM information_schema.STATISTICS"
            " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND NON_UNIQUE = 0"
            " ORDER BY INDEX_NAME, SEQ_IN_INDEX", self.name, name,
        ):  # fmt: skip
            unique.setdefault(_text(index), []).append((_text(column), _text(nullable) == "YES"))
        primary = tuple(column for column, _ in unique.get("PRIMARY", ()))
        if not wanted:
            if not primary:
                raise CaptureError(
                    f"table {name} has no primary key: name the columns of a unique key with"
                    f" --key {name}=COLUMN,COLUMN"
                )
            return primary
        known = {column.name for column in columns if not column.is_virtual}
        if missing := [each for each in wanted if each not in known]:
            raise CaptureError(f"table {name} has no column {', '.join(missing)}")
        if not any(
            {column for column, _ in each} <= set(wanted) and not any(null for _, null in each)
            for each in unique.values()
        ):
            raise CaptureError(
                f"table {name}: no unique key without NULL lies within {', '.join(wanted)}, so two"
                " rows may have one key"
            )
        return tuple(wanted)

    def _check_cascades(self, name: str) -> None:
        for key, deleted, updated in self.rows(
            "SELECT CONSTRAINT_NAME, DELETE_RULE, UPDATE_RULE FROM"
            " information_schema.REFERENTIAL_CONSTRAINTS WHERE CONSTRAINT_SCHEMA = %s AND"
            " TABLE_NAME = %s", self.name, name,
        ):  # fmt: skip
            for rule, verb in ((_text(deleted), "DELETE"), (_text(updated), "UPDATE")):
                if rule in SILENT_RULES:
                    raise CaptureError(
                        f"table {name}: foreign key {_text(key)} has ON {verb} {rule}: MariaDB"
                        " changes its rows without an event in the binary log. Change the key, or"
                        " pass --allow-cascades and know that such changes are missing"
                    )

    # --- snapshot ----------------------------------------------------------------------------

    def begin_snapshot(self) -> Snapshot:
        """Begins a transaction whose queries all see this moment."""
        self.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self.execute("SET SESSION time_zone = '+00:00', sql_mode = ''")
        self.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        status = {_text(a): _text(b) for a, b in self.rows("SHOW STATUS LIKE 'binlog_snapshot_%'")}
        file, place = status["Binlog_snapshot_file"], int(status["Binlog_snapshot_position"])
        gtid = self.value(f"SELECT BINLOG_GTID_POS('{file}', {place})")
        now = self.value("SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)")
        return Snapshot(gtid=gtid, time_ms=int(now))

    def read_table(self, table: Table) -> Iterator[tuple[bytes | str | None, ...]]:
        """Yields the rows of a table: what each column's `expression` gives."""
        columns = ", ".join(each.expression for each in table.columns if not each.is_virtual)
        return self.rows(f"SELECT {columns} FROM {quoted(table.name)}")

    # --- binary log --------------------------------------------------------------------------

    def follow(self, after: str, server_id: int) -> Iterator[Event]:
        """Yields what the log has behind a transaction, for ever; heartbeats while it has none."""
        self.execute("SET @mariadb_slave_capability = 4")
        self.execute(f"SET @slave_connect_state = '{after}'")
        self.execute("SET @slave_gtid_strict_mode = 1")
        self.execute(f"SET @master_heartbeat_period = {int(HEARTBEAT_S * 1e9)}")
        self.execute("SET @master_binlog_checksum = @@GLOBAL.binlog_checksum")
        reader = LogReader()
        connection = self._connection
        with _failures(self._address):
            connection._execute_command(
                COMMAND.COM_BINLOG_DUMP, struct.pack("<IHI", DUMP_START, 0, server_id)
            )
            while True:
                packet = connection._read_packet()
                if packet.is_eof_packet():
                    raise DatabaseLost("the server has ended the binary log")
                event = reader.read(packet.get_all_data()[1:])
                if event is not None:
                    yield event


@contextmanager
def _failures(address: Address) -> Iterator[None]:
    """Turns errors of the driver into those of a capture."""
    try:
        yield
    except pymysql.err.MySQLError as error:
        code = error.args[0] if error.args else 0
        text = str(error.args[1] if len(error.args) > 1 else error)
        if code == LOG_LOST:
            raise CaptureError(
                f"the server can't send its binary log from where the capture is: {text}."
                " If the transactions behind it are gone, take a new snapshot: --resnapshot"
            ) from None
        if code in PERMANENT:
            raise CaptureError(f"{address.host}:{address.port}: {text}") from None
        if isinstance(error, pymysql.err.OperationalError | pymysql.err.InterfaceError):
            raise DatabaseLost(f"{address.host}:{address.port}: {text}") from None
        if isinstance(error, pymysql.err.InternalError):
            raise DatabaseLost(f"{address.host}:{address.port}: {text}") from None
        raise CaptureError(f"{address.host}:{address.port}: {text}") from None
    except OSError as error:
        raise DatabaseLost(f"{address.host}:{address.port}: {error}") from None


def _text(value: bytes | str | None) -> str:
    """Returns a catalogue's value; empty: NULL."""
    return value.decode() if isinstance(value, bytes) else value or ""
