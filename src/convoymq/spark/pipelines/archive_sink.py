"""Sinks of an archive: the part that the formats share.

A batch's files are moved to their places, then made to count in one atomic step, which each format
has of its own (`parquet_sink`, `delta_sink`). A plan on disk names the files before they are moved,
so that a later attempt can remove those that never counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoymq.spark.errors import SourceError
from convoymq.spark.pipelines.manifest import ArchivedFile, sync_directory, sync_files

COMPACT_BYTES = 128 << 20
"""A compaction joins files to about this size."""

Ranges = dict[str, list[int]]
"""topic/partition → [first offset, next offset]"""


class OverlapError(SourceError):
    """A batch holds offsets that the archive already has."""


class SupersededError(SourceError):
    """Another run of this pipeline has begun since: this one may not commit any more."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that Spark has written for a batch."""

    path: Path
    folder: str
    """`column=value/…` below the data directory."""
    rows: int
    bytes: int
    schema: str
    """A name of its columns and types."""


def staged_files(staging: Path) -> list[StagedFile]:
    """Returns the files of a staging directory that tasks have committed and that hold rows."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted(staging.rglob("*.parquet")):
        place = path.parent.relative_to(staging)
        # `_temporary` holds what tasks have begun and not committed.
        if any(part.startswith(("_", ".")) for part in place.parts):
            continue
        facts = pq.read_metadata(path)
        if facts.num_rows:
            schema = facts.schema.to_arrow_schema().remove_metadata()
            name = hashlib.sha256(schema.serialize()).hexdigest()[:16]
            size = path.stat().st_size
            found.append(StagedFile(path, place.as_posix(), facts.num_rows, size, name))
    return found


def merge_ranges(into: Ranges, other: Mapping[str, Sequence[int]]) -> None:
    """Widens the ranges of `into` by those of `other`."""
    for key, (first, next_offset) in other.items():
        known = into.get(key)
        into[key] = (
            [first, next_offset]
            if known is None
            else [min(known[0], first), max(known[1], next_offset)]
        )


def check_overlap(known: Mapping[str, Mapping[str, Sequence[int]]], ranges: Ranges) -> None:
    """Raises OverlapError when a range begins before the end of what `known` (by app) holds."""
    for app, held in known.items():
        for key, (first, next_offset) in ranges.items():
            if key in held and first < held[key][1] and next_offset > held[key][0]:
                raise OverlapError(
                    f"{key}: offsets {first} to {next_offset} begin before {held[key][1]}, the end "
                    f"of what pipeline {app} has archived here. Was its checkpoint deleted? "
                    "Bring it back, or archive to another target"
                )


class Sink:
    """Sink of a query's batches: the part that both formats share."""

    def __init__(self, root: Path, app: str, data: Path) -> None:
        self.root = root
        self.app = app
        self.data = data
        self.staging = root / "_staging"
        self.run = uuid.uuid4().hex
        """Id of this run of the pipeline: the last one that began may commit."""
        self._begun = False

    def begin(self) -> None:
        """Takes the pipeline over from earlier runs, and removes what they left. Once."""
        if not self._begun:
            self.take_over()
            self._begun = True
            self.clean()

    def take_over(self) -> None:
        """Notes this run as the one that may commit."""
        raise NotImplementedError

    def is_fenced(self) -> bool:
        """Returns whether earlier runs are kept from committing. Raises SupersededError."""
        return True

    def counted(self) -> set[str]:
        """Paths of the files that count or did. Raises SupersededError when this run may not
        commit any more, as of the same version."""
        raise NotImplementedError

    def _superseded(self) -> SupersededError:
        return SupersededError(
            f"{self.root}: another run of pipeline {self.app} has begun: this one is out of date"
        )

    def applied(self) -> int:
        """Returns the last batch that counts; -1 = none."""
        raise NotImplementedError

    def last_plan(self) -> str:
        """Names the offsets of the last batch that counts; "" = not known."""
        raise NotImplementedError

    def held(self) -> Ranges:
        """Returns what this pipeline has archived."""
        raise NotImplementedError

    def commit(
        self,
        batch_id: int,
        staged: Sequence[StagedFile],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        """Makes the files count, in one step. `plan` names the offsets of the batch."""
        raise NotImplementedError

    def compact(self, files_min: int, keep_s: float) -> int:
        """Joins small files. Returns how many were replaced."""
        raise NotImplementedError

    def totals(self) -> tuple[int, int]:
        """Returns (messages, files) that count."""
        raise NotImplementedError

    def check(self, ranges: Ranges) -> None:
        """Raises OverlapError when the archive has some of these offsets."""
        raise NotImplementedError

    def place(self, file: StagedFile) -> Path:
        """Returns the directory where a file belongs."""
        return self.data / file.folder

    def plan(self, batch_id: int, attempt: str) -> Path:
        """Returns the file that names what an attempt moves: on disk before it moves anything."""
        return self.staging / f"{self.app}-{batch_id:010d}-{attempt}.plan"

    def clean(self, keep: Path | None = None) -> None:
        """Removes what other attempts of this pipeline left. None of them can commit any more:
        they belong to runs that were taken over from, or this run has given them up.

        Raises:
            SupersededError: this run has been taken over from.
        """
        if not self.is_fenced():
            return
        self.counted()
        # First what is staged: an older run that still works can't move anything afterwards.
        for place in self.staging.glob(f"{self.app}-*"):
            if place.is_dir() and place != keep:
                shutil.rmtree(place, ignore_errors=True)
            elif place.suffix in (".parquet", ".draft"):
                place.unlink(missing_ok=True)
        for plan in self.staging.glob(f"{self.app}-*.plan"):
            self.undo(plan, self.counted())

    def undo(self, plan: Path, counted: set[str] | None = None) -> None:
        """Removes the files that a plan names and that do not count; then the plan."""
        known = self.names() if counted is None else counted
        # Another run may have done it already.
        with contextlib.suppress(FileNotFoundError):
            for name in json.loads(plan.read_text()):
                if name not in known:
                    (self.root / name).unlink(missing_ok=True)
            plan.unlink()

    def names(self) -> set[str]:
        """Paths of the files that count or did, whichever run may commit."""
        raise NotImplementedError

    def write_plan(self, plan: Path, names: Sequence[str]) -> None:
        """Puts a plan on disk."""
        self.staging.mkdir(parents=True, exist_ok=True)
        draft = plan.with_suffix(".draft")
        draft.write_text(json.dumps(names))
        sync_files([draft])
        os.replace(draft, plan)
        sync_directory(self.staging)

    def move(self, staged: Sequence[StagedFile], batch_id: int, attempt: str) -> list[ArchivedFile]:
        """Moves a batch's files to their places; a plan that is on disk first tells which."""
        files = []
        moves = []
        for number, file in enumerate(staged):
            name = f"{self.app[:12]}-{batch_id:010d}-{attempt}-{number:05d}.parquet"
            place = self.place(file) / name
            moves.append((file.path, place))
            files.append(
                ArchivedFile(
                    path=place.relative_to(self.root).as_posix(),
                    rows=file.rows,
                    bytes=file.bytes,
                    app=self.app,
                    first_batch=batch_id,
                    last_batch=batch_id,
                    schema=file.schema,
                )
            )
        self.write_plan(self.plan(batch_id, attempt), [file.path for file in files])
        for source, place in moves:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, place)
        sync_files([place for _, place in moves])
        for folder in {place.parent for _, place in moves}:
            while folder not in (self.root, folder.parent):
                folder = folder.parent
                sync_directory(folder)
        return files
