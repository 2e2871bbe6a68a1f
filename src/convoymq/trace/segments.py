"""Files of a trace: a journal while rows come, a Parquet segment when it is complete.

| file           | what                                                                           |
|----------------|--------------------------------------------------------------------------------|
| `NAME.journal` | Arrow IPC stream, one batch per flush; a process that is killed loses the rest |
| `NAME.part`    | a segment that is being written                                                |
| `NAME.parquet` | complete; the journal of the same name is gone or goes                         |

NAME is `group-<group>-node-<node>-<incarnation>-<number>`. Nothing here knows the event loop: a
`Segment` belongs to the writer's thread. Only this module imports pyarrow, and only when used.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import quote

from convoymq.model.trace import (
    CLOSED,
    COMPLETE,
    COVERED,
    FORMAT,
    MARK_COLUMNS,
    MEMBER,
    METADATA_KEY,
    REPLICA,
    ROW_COLUMNS,
    SUMMARY,
    SUMMARY_COLUMNS,
    Footer,
)

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_ROWS = 256 << 10
NAME_BYTES_MAX = 200
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"group-(\d+)-node-(\d+)-(\d+)-(\d+)\.(journal|parquet)")
_SMALL = {"kind": "int8", "reason": "int8", "flags": "int32", "ordinal": "int32"}
_WORDS = ("vhost", "queue", "type")


def is_available() -> bool:
    """Returns whether pyarrow is installed; does not import it."""
    return find_spec("pyarrow") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Queue and node whose rows a file holds."""

    vhost: str
    queue: str
    type: str
    group: int
    node: int
    incarnation: int

    def directory(self, root: Path) -> Path:
        """Returns the directory of the queue's files."""
        return root / _file_name(self.vhost) / _file_name(self.queue)

    def name(self, number: int) -> str:
        """Returns a file's name without its ending."""
        return f"group-{self.group}-node-{self.node}-{self.incarnation}-{number}"


def _file_name(name: str) -> str:
    # Two long names may share a directory: files also carry the group's number.
    quoted = quote(name, safe="")[:NAME_BYTES_MAX]
    # Tools take what begins with these for hidden, and so would leave it out.
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted[:1] in (".", "_") else quoted


@cache
def _arrow() -> tuple[ModuleType, ModuleType, pa.Schema, pa.Schema]:
    """pyarrow and the schemas of journal and segment."""
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet as pq

    journal = pa.schema([(name, pa.int64()) for name in ROW_COLUMNS])
    fields = [(name, getattr(pa, _SMALL.get(name, "int64"))()) for name in ROW_COLUMNS]
    fields += [(name, pa.dictionary(pa.int32(), pa.string())) for name in _WORDS]
    fields += [("group", pa.int64()), ("node", pa.int32()), ("incarnation", pa.int64())]
    return pa, pq, journal, pa.schema(fields)


def segment_schema() -> pa.Schema:
    """Arrow schema of a segment: the columns of rows, then those of their origin."""
    return _arrow()[3]


class Segment:
    """The segment that one queue's rows go to at present. Raises OSError from every method."""

    def __init__(self, directory: Path, origin: Origin) -> None:
        self.directory = directory
        self.origin = origin
        self.bytes = 0
        """Size of the journal."""
        self.rows = 0
        numbers = [
            f.number for f in files_of(directory, origin) if f.incarnation == origin.incarnation
        ]
        self._number = max(numbers, default=-1)
        self._file: io.FileIO | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._path = directory

    def write(self, rows: int, data: bytes) -> None:
        """Appends what `TraceRows.take` returned; it survives the death of the process."""
        pa, _, schema, _ = _arrow()
        if self._writer is None:
            self._open()
        assert self._writer is not None
        assert self._file is not None
        block = pa.py_buffer(data)
        size = rows * 8
        columns = [
            pa.Array.from_buffers(pa.int64(), rows, [None, block.slice(k * size, size)])
            for k in range(len(ROW_COLUMNS))
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        self.bytes = self._file.tell()
        self.rows += rows

    def _open(self) -> None:
        pa, _, schema, _ = _arrow()
        self._number += 1
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._path = self.directory / f"{self.origin.name(self._number)}.journal"
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_stream(self._file, schema, options=options)

    def finish(self) -> Path | None:
        """Makes the journal a segment and returns it; None when there were no rows."""
        if self._writer is None:
            return None
        path = self._path
        self.abandon()
        return convert(path, self.origin)

    def abandon(self) -> None:
        """Lets go of the journal as it is; `convert` takes what is readable of it later."""
        writer, file = self._writer, self._file
        self._writer = self._file = None
        self.bytes = self.rows = 0
        for each in (writer, file):
            # A full disk may refuse the end mark: readers do not need it.
            with contextlib.suppress(OSError):
                if each is not None:
                    each.close()


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A journal or segment that lies in a queue's directory."""

    path: Path
    incarnation: int
    number: int
    is_journal: bool


def files_of(directory: Path, origin: Origin) -> list[TraceFile]:
    """Files of this queue that this node wrote, in any of its incarnations, oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (int(match[1]), int(match[2])) == (origin.group, origin.node):
                found.append(TraceFile(path, int(match[3]), int(match[4]), match[5] == "journal"))
    return sorted(found, key=lambda file: (file.incarnation, file.number, not file.is_journal))


def covered_through(directory: Path, origin: Origin) -> int:
    """Returns the index up to which this node's files hold the decided rows. Raises OSError."""
    for file in reversed(files_of(directory, origin)):
        covered = _journal_covers(file.path) if file.is_journal else _segment_covers(file.path)
        if covered:
            return covered
    return 0


def read_metadata(path: Path) -> Footer:
    """Returns a segment's metadata. Raises OSError when it is none."""
    pa, pq, _, _ = _arrow()
    try:
        facts = pq.read_metadata(path)
        known: Footer = json.loads(facts.metadata[METADATA_KEY])
        known["found"] = facts.num_rows
        if known["format"] != FORMAT:
            raise OSError(f"{path}: trace format {known['format']} is not known")
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise OSError(f"{path}: no segment of a trace: {error!r}") from None
    match = _NAME.fullmatch(path.name)
    known["number"] = int(match[4]) if match else 0
    return known


def _segment_covers(path: Path) -> int:
    entries = read_metadata(path)["covered"]
    return int(entries[-1][1]) if entries else 0


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yields the readable batches of a journal; a torn end is where it ends."""
    pa, _, schema, _ = _arrow()
    with open(path, "rb") as file:
        try:
            reader = pa.ipc.open_stream(file)
            if reader.schema != schema:
                return
            yield from reader
        except (pa.ArrowInvalid, OSError, EOFError):
            return


class _Coverage:
    """Coverage by the marks and summaries among the rows: the entries and times that are
    complete."""

    def __init__(self) -> None:
        self.entries: list[list[int]] = []
        self.acts: list[list[int]] = []
        self.state_snapshots: list[dict[str, int]] = []
        self.members: list[list[int]] = []
        self.marked = dict.fromkeys((*MARK_COLUMNS, "marks"), 0)
        self.lost = 0
        self.closed = False

    @property
    def end(self) -> int:
        """Returns the last entry that is covered; 0 = none."""
        return self.entries[-1][1] if self.entries else 0

    def see(self, rows: pa.Table) -> None:
        """Takes the marks of a table up; contiguous ones are joined."""
        pa = _arrow()[0]
        kinds = rows.column(0)
        wanted = pa.compute.is_in(kinds, pa.array([COVERED, SUMMARY, MEMBER], pa.int64()))
        for row in rows.filter(wanted).to_pylist():
            if row["kind"] == MEMBER:
                member = [row["consumer"], row["seq"], int(bool(row["flags"] & REPLICA))]
                if member not in self.members:
                    self.members.append(member)
                continue
            if row["kind"] == SUMMARY:
                self.state_snapshots.append(
                    {
                        "index": row["index"],
                        "time_us": row["time_us"],
                        "complete": int(bool(row["flags"] & COMPLETE)),
                        **{name: row[column] for name, column in SUMMARY_COLUMNS.items()},
                    }
                )
                continue
            self.lost += row["count"]
            self.marked["marks"] += 1
            for name, column in MARK_COLUMNS.items():
                self.marked[name] += row[column]
            self.closed = bool(row["flags"] & CLOSED)
            _extend(self.entries, row["position_index"], row["index"])
            _extend(self.acts, row["first_id"], row["time_us"])


def _extend(ranges: list[list[int]], start: int, end: int) -> None:
    if end <= start:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1][1] = end
    else:
        ranges.append([start, end])


def _journal_covers(path: Path) -> int:
    coverage = _Coverage()
    for whole in _tables(path):
        coverage.see(whole)
    return coverage.end


def convert(journal: Path, origin: Origin) -> Path | None:
    """Writes the readable rows of a journal as a segment, syncs it, and removes the journal.

    Returns None when there was nothing to keep. Raises OSError; the journal stays then.
    """
    _, pq, _, schema = _arrow()
    done = journal.with_suffix(".parquet")
    if done.exists():
        journal.unlink()
        return done
    part = journal.with_suffix(".part")
    plain = [name for name in schema.names if name not in _WORDS]
    coverage = _Coverage()
    rows = 0
    with open(part, "wb") as file:
        writer = pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            use_dictionary=list(_WORDS),
            column_encoding=dict.fromkeys(plain, "DELTA_BINARY_PACKED"),
            write_page_index=True,
        )
        for whole in _tables(journal):
            coverage.see(whole)
            writer.write_table(_table(whole, origin))
            rows += whole.num_rows
        facts: Footer = {
            "vhost": origin.vhost,
            "queue": origin.queue,
            "type": origin.type,
            "group": origin.group,
            "node": origin.node,
            "incarnation": origin.incarnation,
            "format": FORMAT,
            "covered": coverage.entries,
            "acts": coverage.acts,
            "state_snapshots": coverage.state_snapshots,
            "members": coverage.members,
            "marked": coverage.marked,
            "previous": _previous(journal, origin),
            "lost": coverage.lost,
            "closed": coverage.closed,
            "rows": rows,
            "host": host(),
        }
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(facts).encode()})
        writer.close()
        if not file.closed:
            file.flush()
            os.fsync(file.fileno())
    if not rows:
        part.unlink()
        journal.unlink()
        return None
    os.replace(part, done)
    journal.unlink()
    return done


@cache
def host() -> str:
    """Returns what names this start of this machine; "" where nothing does."""
    try:
        return BOOT_ID.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _previous(journal: Path, origin: Origin) -> list[int] | None:
    """Returns (incarnation, number) of the file before this one; None = it is the first."""
    match = _NAME.fullmatch(journal.name)
    assert match is not None
    own = (int(match[3]), int(match[4]))
    names = [(file.incarnation, file.number) for file in files_of(journal.parent, origin)]
    before = max((name for name in names if name < own), default=None)
    return None if before is None else [*before]


def _tables(journal: Path) -> Iterator[pa.Table]:
    """Yields the readable rows of a journal, a row group at a time: a batch alone costs what
    thousands of rows cost."""
    pa = _arrow()[0]
    waiting = []
    held = 0
    for batch in _batches(journal):
        waiting.append(batch)
        held += batch.num_rows
        if held >= ROW_GROUP_ROWS:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, held = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _table(table: pa.Table, origin: Origin) -> pa.Table:
    pa, _, _, schema = _arrow()
    n = table.num_rows
    facts = asdict(origin)
    columns = [table.column(name).cast(schema.field(name).type, safe=True) for name in ROW_COLUMNS]
    for name in _WORDS:
        zeros = pa.array(memoryview(bytes(4 * n)).cast("i"), pa.int32())
        columns.append(pa.DictionaryArray.from_arrays(zeros, [facts[name]]))
    for name in ("group", "node", "incarnation"):
        columns.append(pa.repeat(pa.scalar(facts[name], schema.field(name).type), n))
    return pa.Table.from_arrays(columns, schema=schema)


def trim(root: Path, bytes_max: int) -> int:
    """Deletes the oldest segments under `root` until the others fit; returns how many went."""
    found = []
    for path in root.rglob("*.parquet"):
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            found.append((facts.st_mtime_ns, facts.st_size, path))
    total = sum(size for _, size, _ in found)
    gone = 0
    for _, size, path in sorted(found):
        if total <= bytes_max:
            break
        path.unlink(missing_ok=True)
        total -= size
        gone += 1
    return gone
