"""The sink of a Parquet archive: the next version of the manifest makes files count."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from convoymq.spark.errors import SourceError
from convoymq.spark.pipelines.archive_sink import (
    COMPACT_BYTES,
    Ranges,
    Sink,
    StagedFile,
    check_overlap,
    merge_ranges,
)
from convoymq.spark.pipelines.manifest import (
    Archive,
    ArchivedFile,
    Manifest,
    RemovedFile,
    sync_files,
)


class ParquetSink(Sink):
    """A directory of Parquet files with a manifest."""

    def __init__(self, root: Path, app: str) -> None:
        self.archive = Archive(root)
        super().__init__(root, app, self.archive.data)

    def take_over(self) -> None:
        self.archive.commit(lambda now: replace(now, runs={**now.runs, self.app: self.run}))

    def counted(self) -> set[str]:
        now = self.archive.current()
        if self._begun and now.runs.get(self.app) != self.run:
            raise self._superseded()
        return self._names(now)

    def names(self) -> set[str]:
        return self._names(self.archive.current())

    def _names(self, now: Manifest) -> set[str]:
        return {file.path for file in now.files} | {file.path for file in now.removed}

    def check(self, ranges: Ranges) -> None:
        check_overlap(self.archive.current().ranges, ranges)

    def applied(self) -> int:
        return self.archive.current().applied.get(self.app, -1)

    def last_plan(self) -> str:
        return self.archive.current().plans.get(self.app, "")

    def held(self) -> Ranges:
        return self.archive.current().ranges.get(self.app, {})

    def commit(
        self,
        batch_id: int,
        staged: Sequence[StagedFile],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        def change(now: Manifest) -> Manifest:
            if now.runs.get(self.app) != self.run or now.applied.get(self.app, -1) >= batch_id:
                raise self._superseded()
            check_overlap(now.ranges, ranges)
            held = {key: list(value) for key, value in now.ranges.get(self.app, {}).items()}
            merge_ranges(held, ranges)
            return replace(
                now,
                applied={**now.applied, self.app: batch_id},
                ranges={**now.ranges, self.app: held},
                plans={**now.plans, self.app: plan},
                files=(*now.files, *files),
            )

        self.archive.commit(change)

    def compact(self, files_min: int, keep_s: float) -> int:
        replaced = 0
        now = self.archive.current()
        small = [file for file in now.files if file.bytes < COMPACT_BYTES]
        folders = Counter(os.path.dirname(file.path) for file in small)
        for folder, count in sorted(folders.items()):
            if count >= files_min:
                mine = [file for file in small if os.path.dirname(file.path) == folder]
                for group in _groups(mine):
                    replaced += self._join(folder, group)
        self.archive.remove_replaced(keep_s)
        return replaced

    def _join(self, folder: str, group: Sequence[ArchivedFile]) -> int:
        import pyarrow.parquet as pq

        number = uuid.uuid4().hex
        place = self.root / folder / f"joined-{number}.parquet"
        draft = self.staging / f"{self.app}-joined-{number}.parquet"
        plan = draft.with_suffix(".plan")
        self.write_plan(plan, [place.relative_to(self.root).as_posix()])
        gone = {file.path for file in group}
        rows = 0
        try:
            schema = pq.read_schema(self.root / group[0].path)
            with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
                for file in group:
                    parquet = pq.ParquetFile(self.root / file.path)
                    for part in parquet.iter_batches():
                        writer.write_batch(part)
                        rows += part.num_rows
        except FileNotFoundError:
            draft.unlink(missing_ok=True)
            plan.unlink(missing_ok=True)
            if gone <= {file.path for file in self.archive.current().files}:
                raise
            # Another pipeline has joined them meanwhile, and removed them.
            return 0
        if rows != sum(file.rows for file in group):
            draft.unlink()
            plan.unlink()
            raise SourceError(f"{folder}: files hold {rows} rows, the manifest says otherwise")
        try:
            os.replace(draft, place)
        except FileNotFoundError:
            # A later run of the pipeline has removed what this one left.
            return 0
        sync_files([place])
        joined = ArchivedFile(
            path=place.relative_to(self.root).as_posix(),
            rows=rows,
            bytes=place.stat().st_size,
            app=group[0].app,
            first_batch=min(file.first_batch for file in group),
            last_batch=max(file.last_batch for file in group),
            schema=group[0].schema,
        )
        at = time.time()

        def change(now: Manifest) -> Manifest | None:
            if not gone <= {file.path for file in now.files}:
                return None
            kept = tuple(file for file in now.files if file.path not in gone)
            removed = tuple(RemovedFile(path=path, at=at) for path in sorted(gone))
            return replace(now, files=(*kept, joined), removed=(*now.removed, *removed))

        done = self.archive.commit(change)
        counts = joined in done.files
        if not counts:
            place.unlink(missing_ok=True)
        plan.unlink(missing_ok=True)
        return len(gone) if counts else 0

    def totals(self) -> tuple[int, int]:
        now = self.archive.current()
        return now.rows, len(now.files)


def _groups(files: Sequence[ArchivedFile]) -> list[list[ArchivedFile]]:
    """Files of one directory in groups of at least two that make about one large file: of one
    pipeline, and with the same columns, which options may change from run to run."""
    groups: list[list[ArchivedFile]] = []
    group: list[ArchivedFile] = []
    size = 0
    for file in sorted(files, key=lambda each: (each.app, each.schema, each.first_batch)):
        alike = group and (file.app, file.schema) == (group[0].app, group[0].schema)
        if group and (size + file.bytes > COMPACT_BYTES or not alike):
            groups.append(group)
            group, size = [], 0
        group.append(file)
        size += file.bytes
    groups.append(group)
    return [group for group in groups if len(group) > 1]
