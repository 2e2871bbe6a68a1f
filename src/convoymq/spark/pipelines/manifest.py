"""The manifest of an archive: which files count, said atomically.

Spark's own file sink leaves the files of a batch that was cut short beside those of its repeat;
only Spark, which reads `_spark_metadata`, knows which to skip. An archive has a manifest that every
reader can use instead:

    <target>/data/<column>=<value>/…/<app>-<batch>-<number>.parquet
    <target>/_manifest/<version>.json       the highest version is the archive
    <target>/_staging/                      what a batch under way has written so far

A version is written to a temporary file, flushed, and linked to its name: two writers can't both
have made version n. A batch is archived when the version that names it exists, not before.

Manifest (JSON): `format` = "convoymq-archive/1", `version`, `applied` {app: last batch id},
`ranges` {app: {topic/partition: [first offset, next offset]}}, `files` [{path, rows, bytes, app,
first batch, last batch}], `removed` [{path, at}]: files that a compaction has replaced, kept for
readers of older versions until `at` (seconds since the epoch) plus the retention has passed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from convoymq.spark.errors import SourceError

FORMAT = "convoymq-archive/1"
VERSIONS_KEPT = 20
ATTEMPTS_MAX = 100


class ManifestError(SourceError):
    """The manifest of an archive is missing, damaged, or does not fit its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """One Parquet file that counts."""

    path: str
    """Relative to the archive's directory."""
    rows: int
    bytes: int
    app: str
    """Who wrote it: the pipeline's id, from its checkpoint."""
    first_batch: int
    last_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFile:
    """A file that a compaction has replaced; no version from this one on names it."""

    path: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of what the archive holds."""

    version: int = 0
    applied: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    files: tuple[ArchivedFile, ...] = ()
    removed: tuple[RemovedFile, ...] = ()

    @property
    def rows(self) -> int:
        """Messages in the archive."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Size of the files that count."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, name: str) -> Manifest:
        """Reads a version.

        Raises:
            ManifestError: it is not one.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop("format") != FORMAT:
                raise ManifestError(f"{name}: another format than {FORMAT}")
            files = tuple(ArchivedFile(**each) for each in values.pop("files"))
            removed = tuple(RemovedFile(**each) for each in values.pop("removed"))
            return cls(files=files, removed=removed, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{name}: damaged: {error}") from error


class Archive:
    """The directory of an archive.

    Args:
        target: a directory of a file system with atomic links (any POSIX one).
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.root = Path(target)
        self.data = self.root / "data"
        self.staging = self.root / "_staging"
        self._versions = self.root / "_manifest"

    def current(self) -> Manifest:
        """The highest version; an empty manifest where there is none.

        Raises:
            ManifestError: it is damaged.
        """
        # A version that is read may be pruned meanwhile: then there are newer ones.
        for _ in range(ATTEMPTS_MAX):
            names = self._names()
            if not names:
                return Manifest()
            try:
                text = (self._versions / names[-1]).read_text()
            except FileNotFoundError:
                continue
            return Manifest.from_json(text, names[-1])
        raise ManifestError(f"{self._versions} changes faster than it can be read")

    def commit(self, change: Callable[[Manifest], Manifest | None]) -> Manifest:
        """Makes the next version. `change` gets the current one and may be called again when
        another writer was quicker; None = leave it as it is. Returns the version that holds.

        Raises:
            ManifestError: the current version is damaged.
        """
        self._versions.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS_MAX):
            now = self.current()
            wanted = change(now)
            if wanted is None:
                return now
            wanted = replace(wanted, version=now.version + 1)
            if self._link(wanted):
                self._prune()
                return wanted
        raise ManifestError(f"{self._versions}: too many writers")

    def paths(self, manifest: Manifest | None = None) -> list[str]:
        """Absolute paths of the files that count."""
        found = manifest if manifest is not None else self.current()
        return [str(self.root / file.path) for file in found.files]

    def orphans(self) -> Iterator[Path]:
        """Parquet files below `data` that neither count nor wait for their removal."""
        manifest = self.current()
        known = {file.path for file in manifest.files} | {file.path for file in manifest.removed}
        for path in sorted(self.data.rglob("*.parquet")):
            if path.relative_to(self.root).as_posix() not in known:
                yield path

    def check(self) -> list[str]:
        """What is wrong with the files that count: missing, or of another size or row count."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        wrong: list[str] = []
        for file in self.current().files:
            path = self.root / file.path
            try:
                size = path.stat().st_size
                rows = pq.read_metadata(path).num_rows
            except FileNotFoundError:
                wrong.append(f"{file.path}: missing")
                continue
            except pa.ArrowException as error:
                wrong.append(f"{file.path}: {error}")
                continue
            if (rows, size) != (file.rows, file.bytes):
                wrong.append(
                    f"{file.path}: {rows} rows in {size} bytes, "
                    f"not {file.rows} rows in {file.bytes} bytes"
                )
        return wrong

    def remove_replaced(self, older_than_s: float) -> int:
        """Deletes files that compactions have replaced, when that is long enough ago. Returns how
        many."""
        limit = time.time() - older_than_s
        gone: list[str] = []

        def change(now: Manifest) -> Manifest | None:
            gone[:] = [file.path for file in now.removed if file.at <= limit]
            if not gone:
                return None
            return replace(now, removed=tuple(f for f in now.removed if f.at > limit))

        for path in gone if self.commit(change) and gone else ():
            (self.root / path).unlink(missing_ok=True)
        return len(gone)

    def _names(self) -> list[str]:
        if not self._versions.is_dir():
            return []
        return sorted(
            name
            for name in os.listdir(self._versions)
            if name.endswith(".json") and name[:-5].isdigit()
        )

    def _link(self, manifest: Manifest) -> bool:
        name = self._versions / f"{manifest.version:020d}.json"
        draft = self._versions / f".{manifest.version}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            with open(draft, "w") as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, name)
            except FileExistsError:
                return False
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(self._versions)
        return True

    def _prune(self) -> None:
        for name in self._names()[:-VERSIONS_KEPT]:
            (self._versions / name).unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names of a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Makes the contents of files, and then their names, survive a power cut."""
    directories = set()
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        directories.add(path.parent)
    for directory in directories:
        sync_directory(directory)
