"""State of a capture, in a file: how far the topic has the database."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from convoymq.capture.columns import Column
from convoymq.capture.database import Table
from convoymq.capture.errors import CaptureError
from convoymq.model.replaced_files import replace_file

FILE = "state.json"
LOCK = "lock"


class Progress(msgspec.Struct, kw_only=True):
    """Content of the file."""

    format: int = 1
    database: str
    topic: str
    topic_created_ms: int
    """Of another topic of that name the places mean nothing."""
    generation: int = 1
    """Counted up by a new snapshot: its places are behind all older ones."""
    attempt: int = 0
    """Of the snapshot."""
    begin: str = ""
    """The transaction before the first attempt: rows since may be in the topic."""
    has_snapshot: bool = False
    """The snapshot is stored."""
    gtid: str = ""
    """All up to this transaction is stored. It never falls."""
    tables: dict[str, tuple[list[Column], list[str]]] = msgspec.field(default_factory=dict)
    """Columns and key of each table behind `gtid`."""
    altered: set[str] = msgspec.field(default_factory=set)
    """Tables whose columns the log has not named since a statement altered them."""

    def table(self, name: str) -> Table:
        """Returns a table as it was."""
        columns, key = self.tables[name]
        return Table(name=name, columns=tuple(columns), key=tuple(key))

    def keep(self, table: Table) -> None:
        """Notes a table as it is."""
        self.tables[table.name] = (list(table.columns), list(table.key))


class StateFile:
    """The directory of a state, which one process has at a time.

    Raises:
        CaptureError: another process has it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / FILE
        self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CaptureError(f"another capture has the state {directory}") from None

    def close(self) -> None:
        """Releases the directory."""
        os.close(self._lock)

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> Progress | None:
        """Returns the state; None: there is none yet. Raises CaptureError: damaged."""
        if not self._path.exists():
            return None
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Progress)
        except msgspec.DecodeError as error:
            raise CaptureError(f"{self._path} is damaged: {error}") from None
        if found.format != 1:
            raise CaptureError(f"{self._path} has format {found.format}, of a newer version")
        return found

    def store(self, progress: Progress) -> None:
        """Replaces the file: after a crash it is the old or the new one."""
        text = msgspec.json.format(msgspec.json.encode(progress), indent=1)
        replace_file(self._path, text)
