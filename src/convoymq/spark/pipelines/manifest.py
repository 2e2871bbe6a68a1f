"""The manifest of an archive: which files count, said atomically.

Spark's own file sink leaves the files of a batch that was cut short beside those of its repeat;
only Spark, which reads `_spark_metadata`, knows which to skip. An archive has a manifest that every
reader can use instead:

    <target>/data/<column>=<value>/…/<app>-<batch>-<attempt>-<number>.parquet
    <target>/_manifest/<version>.json               the highest version is the archive
    <target>/_manifest/files-<version>-<id>.json    a list of files that versions refer to
    <target>/_staging/                              what batches under way have written so far

A version is written to a temporary file, flushed, and linked to its name: two writers can't both
have made version n. A batch is archived when the version that names it exists, not before.

Old versions are removed, so a name that is free is no proof that its number is: a writer that was
stopped for long would link a number that was given before. Each version therefore has an id and
the ids of those before it, and a writer that has linked version n believes it only when the highest
version descends from it. Otherwise the writer is refused and makes its change again (ADR 0030).

Version (JSON): `format` = "convoymq-archive/2", `version`, `id`, `ancestors` [id of version - 1,
version - 2, …], `applied` {app: last batch id}, `plans` {app: a digest of the offsets that the
checkpoint had for that batch; it may be missing}, `runs` {app: the run that may commit}, `ranges`
{app: {topic/partition, with @ and the stream's group where that is known: [first offset, next
offset]}}, `base` (the name of a list, or ""), `added` [file, …] and `gone` [path, …]: the files are
those of the base without `gone` and with `added`. A file is {path, rows, bytes, app, first batch,
last batch, schema}. `removed` [{path, at}]: files that a compaction has replaced, kept for readers
of older versions until `at` (seconds since the epoch) plus the retention has passed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from convoymq.spark.errors import SourceError

FORMAT = "convoymq-archive/2"
VERSIONS_KEPT = 20
ANCESTORS_KEPT = 256
CHANGES_MIN = 64
"""Files that versions name themselves before they get a list of their own, at least; where an
archive is large, as many as the square root of its files: a commit writes few of them."""
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
    """Writer of it: the pipeline's id, from its checkpoint."""
    first_batch: int
    last_batch: int
    schema: str = ""
    """Names its columns and types: equal in files that can be joined as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFile:
    """A file that a compaction has replaced; no version from this one on names it."""

    path: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of what the archive holds."""

    version: int = 0
    id: str = ""
    ancestors: tuple[str, ...] = ()
    """Ids of the versions before this one, the youngest first; at most ANCESTORS_KEPT."""
    applied: dict[str, int] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    """By app: names the offsets of its last batch."""
    runs: dict[str, str] = field(default_factory=dict)
    """By app: the run of the pipeline that may commit. Who begins takes over."""
    ranges: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    files: tuple[ArchivedFile, ...] = ()
    removed: tuple[RemovedFile, ...] = ()

    @property
    def rows(self) -> int:
        """Returns the number of messages in the archive."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Size of the files that count."""
        return sum(file.bytes for file in self.files)

    def is_or_follows(self, other: Manifest) -> bool | None:
        """Returns whether `other` is this version or one before it; None: it is too old to tell."""
        if self.version < other.version:
            return False
        if self.version == other.version:
            return self.id == other.id
        back = self.version - other.version - 1
        return self.ancestors[back] == other.id if back < len(self.ancestors) else None


@dataclass(frozen=True, slots=True)
class _Base:
    """A list of files that versions refer to."""

    name: str = ""
    files: tuple[ArchivedFile, ...] = ()


def _read(path: Path) -> dict[str, Any]:
    """Returns the values of a file of the manifest. Raises FileNotFoundError and ManifestError."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict) or values.pop("format") != FORMAT:
            raise ManifestError(f"{path.name}: another format than {FORMAT}")
    except (ValueError, KeyError) as error:
        raise ManifestError(f"{path.name}: damaged: {error!r}") from error
    return values


def _files(rows: Iterable[Mapping[str, Any]]) -> tuple[ArchivedFile, ...]:
    return tuple(ArchivedFile(**each) for each in rows)


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
        self._base = _Base()

    def current(self) -> Manifest:
        """Returns the highest version; an empty manifest where there is none.

        Raises:
            ManifestError: it is damaged.
        """
        # A version that is read may be pruned meanwhile: then there are newer ones.
        for _ in range(ATTEMPTS_MAX):
            names = self._names()
            if not names:
                return Manifest()
            with contextlib.suppress(FileNotFoundError):
                return self._load(names[-1])
        raise ManifestError(
            f"{self._versions}: {names[-1]} names a list of files that is missing, or versions "
            "change faster than they can be read"
        )

    def _load(self, name: str) -> Manifest:
        values = _read(self._versions / name)
        try:
            base = str(values.pop("base"))
            if base != self._base.name:
                listed = _read(self._versions / base)["files"] if base else ()
                self._base = _Base(base, _files(listed))
            gone = set(values.pop("gone"))
            files = tuple(file for file in self._base.files if file.path not in gone)
            added = _files(values.pop("added"))
            removed = tuple(RemovedFile(**each) for each in values.pop("removed"))
            ancestors = tuple(values.pop("ancestors"))
            return Manifest(files=files + added, removed=removed, ancestors=ancestors, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{name}: damaged: {error!r}") from error

    def commit(self, change: Callable[[Manifest], Manifest | None]) -> Manifest:
        """Makes the next version. `change` gets the current one and may be called again when
        another writer was quicker; None = leave it as it is. Returns the version that holds.

        Raises:
            ManifestError: the current version is damaged, or this writer was stopped for so long
                after it had made a version that nobody can tell any more whether that counted.
        """
        self._versions.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS_MAX):
            now = self.current()
            wanted = change(now)
            if wanted is None:
                return now
            ancestors = (now.id, *now.ancestors)[:ANCESTORS_KEPT] if now.version else ()
            wanted = replace(
                wanted, version=now.version + 1, id=uuid.uuid4().hex[:16], ancestors=ancestors
            )
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
        """Returns what is wrong with the files that count: missing, or of another size or row
        count."""
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
        gone = {file.path for file in self.current().removed if file.at <= limit}
        # First the files: who dies in between leaves a name too many, and no file that no
        # version knows. No path is used again.
        for path in gone:
            (self.root / path).unlink(missing_ok=True)

        def change(now: Manifest) -> Manifest:
            return replace(now, removed=tuple(f for f in now.removed if f.path not in gone))

        if gone:
            self.commit(change)
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
        """Makes the version; False: another writer has made it, now or long ago."""
        base = self._base_for(manifest)
        name = self._versions / f"{manifest.version:020d}.json"
        paths = {file.path for file in manifest.files}
        known = {file.path for file in base.files}
        values = {
            "format": FORMAT,
            "version": manifest.version,
            "id": manifest.id,
            "ancestors": manifest.ancestors,
            "applied": manifest.applied,
            "plans": manifest.plans,
            "runs": manifest.runs,
            "ranges": manifest.ranges,
            "base": base.name,
            "added": [asdict(file) for file in manifest.files if file.path not in known],
            "gone": sorted(known - paths),
            "removed": [asdict(file) for file in manifest.removed],
        }
        with self._draft(values) as draft:
            try:
                os.link(draft, name)
            except FileExistsError:
                return False
        sync_directory(self._versions)
        held = self.current()
        follows = held.is_or_follows(manifest)
        if follows is None:
            raise ManifestError(
                f"{self._versions}: made version {manifest.version}, and when that was done there "
                f"was version {held.version}: start again, the archive knows what counts"
            )
        if not follows:
            # The number was free because the version that had it was pruned.
            name.unlink(missing_ok=True)
        return follows

    def _base_for(self, manifest: Manifest) -> _Base:
        """Returns the list of files that the version refers to: the last one, or one of its own
        where it differs from that in too many files."""
        base = self._base
        shared = {file.path for file in base.files} & {file.path for file in manifest.files}
        changes = len(base.files) + len(manifest.files) - 2 * len(shared)
        if changes <= max(CHANGES_MIN, math.isqrt(len(manifest.files))):
            return base
        name = f"files-{manifest.version:020d}-{manifest.id}.json"
        files = [asdict(file) for file in manifest.files]
        with self._draft({"format": FORMAT, "files": files}) as draft:
            os.replace(draft, self._versions / name)
        self._base = _Base(name, manifest.files)
        return self._base

    @contextlib.contextmanager
    def _draft(self, values: Mapping[str, object]) -> Iterator[Path]:
        """A temporary file with these values, on disk; removed at the end where it is left."""
        draft = self._versions / f".draft-{uuid.uuid4().hex}"
        try:
            with open(draft, "w") as file:
                json.dump(values, file, separators=(",", ":"), sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _prune(self) -> None:
        names = self._names()
        for name in names[:-VERSIONS_KEPT]:
            (self._versions / name).unlink(missing_ok=True)
        # Lists that no kept version refers to: older than that of the oldest one.
        with contextlib.suppress(FileNotFoundError):
            oldest = str(_read(self._versions / names[-VERSIONS_KEPT:][0])["base"])
            for path in self._versions.glob("files-*.json"):
                if path.name < oldest:
                    path.unlink(missing_ok=True)


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
