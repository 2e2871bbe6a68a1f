"""The sink of a Delta table: a commit with an app transaction makes files count."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from convoymq.spark.errors import SourceError
from convoymq.spark.pipelines.archive_sink import (
    COMPACT_BYTES,
    Ranges,
    Sink,
    StagedFile,
    check_overlap,
    merge_ranges,
)
from convoymq.spark.pipelines.manifest import ATTEMPTS_MAX, ArchivedFile

if TYPE_CHECKING:
    from deltalake import DeltaTable, Field
    from deltalake.transaction import AddAction

RANGES_ID = "convoymq/ranges"
RANGES_KEY = "convoymq.ranges"
PLANS_KEY = "convoymq.plans"
"""In a Delta table: the transaction that each commit of ours makes, and what it says of ranges and
of the offsets of last batches."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class Commit:
    """Content that a version adds to a Delta table."""

    actions: Sequence[AddAction]
    versions: Mapping[str, int]
    ranges: Ranges
    plan: str = ""
    """Of the batch; "" = this is none."""


class DeltaSink(Sink):
    """A Delta table: files are moved below it, and one commit with an app transaction adds them.

    The files lie in one directory: the table's log knows their partitions, and the names of streams
    need no encoding."""

    def __init__(self, root: Path, app: str) -> None:
        super().__init__(root, app, root / "data")
        self._run_id = f"{app}/run"
        self._epoch = 0

    def place(self, file: StagedFile) -> Path:
        return self.data

    def _table(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        return DeltaTable(str(self.root)) if DeltaTable.is_deltatable(str(self.root)) else None

    def _existing(self) -> DeltaTable:
        table = self._table()
        assert table is not None
        return table

    def applied(self) -> int:
        table = self._table()
        version = None if table is None else table.transaction_version(self.app)
        return -1 if version is None else int(version)

    def last_plan(self) -> str:
        table = self._table()
        return "" if table is None else self._noted(table)[1].get(self.app, "")

    def held(self) -> Ranges:
        table = self._table()
        return {} if table is None else self._noted(table)[0].get(self.app, {})

    def take_over(self) -> None:
        # Where there is no table there is nothing to take over yet, and nothing to fence with.
        if self._table() is not None:
            self._transact(self._take)

    def _take(self, table: DeltaTable) -> Commit:
        last = table.transaction_version(self._run_id) or 0
        if self._begun and last:
            # Another run made the table.
            raise self._superseded()
        self._epoch = last + 1
        return Commit((), {}, {})

    def is_fenced(self) -> bool:
        if not self._epoch and self._table() is not None:
            self._transact(self._take)
        return self._epoch > 0

    def names(self) -> set[str]:
        table = self._table()
        return set() if table is None else self._names(table)

    def _names(self, table: DeltaTable) -> set[str]:
        import pyarrow as pa

        return set(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())

    def counted(self) -> set[str]:
        table = self._table()
        if table is None:
            return set()
        self._check_run(table)
        return self._names(table)

    def _check_run(self, table: DeltaTable) -> None:
        if self._begun and (table.transaction_version(self._run_id) or 0) != self._epoch:
            raise self._superseded()

    def check(self, ranges: Ranges) -> None:
        table = self._table()
        if table is not None:
            check_overlap(self._noted(table)[0], ranges)

    def commit(
        self,
        batch_id: int,
        staged: Sequence[StagedFile],
        files: Sequence[ArchivedFile],
        ranges: Ranges,
        plan: str = "",
    ) -> None:
        from deltalake.transaction import AddAction

        if self._table() is None:
            if not files:
                return
            self._create(staged[0].folder, files[0].path)
        self.is_fenced()
        self._check_run(self._existing())
        self._widen(files)
        actions = [
            AddAction(
                path=file.path,
                size=file.bytes,
                partition_values=_partition_values(source.folder),
                modification_time=int(time.time() * 1000),
                data_change=True,
                stats=json.dumps({"numRecords": file.rows}),
            )
            for source, file in zip(staged, files, strict=True)
        ]

        def change(table: DeltaTable) -> Commit:
            self._check_run(table)
            last = table.transaction_version(self.app)
            if last is not None and last >= batch_id:
                raise self._superseded()
            return Commit(actions, {self.app: batch_id}, ranges, plan)

        self._transact(change)

    def _transact(self, change: Callable[[DeltaTable], Commit]) -> None:
        """Makes the next version. Each names the run and the ranges as transactions, so that Delta
        refuses a version that was made meanwhile by another run, or by another pipeline that could
        overlap; then `change` looks at the table again."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        for _ in range(ATTEMPTS_MAX):
            table = self._existing()
            wanted = change(table)
            known, plans = self._noted(table)
            check_overlap(known, wanted.ranges)
            merge_ranges(known.setdefault(self.app, {}), wanted.ranges)
            number = (table.transaction_version(RANGES_ID) or 0) + 1
            versions = {self._run_id: self._epoch, RANGES_ID: number, **wanted.versions}
            if self.app in wanted.versions:
                plans[self.app] = wanted.plan
            try:
                table.create_write_transaction(
                    list(wanted.actions),
                    "append",
                    table.schema(),
                    table.metadata().partition_columns,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(*each) for each in versions.items()],
                        custom_metadata={
                            RANGES_KEY: json.dumps(known),
                            PLANS_KEY: json.dumps(plans),
                        },
                    ),
                )
            except CommitFailedError:
                continue
            return
        raise SourceError(f"{self.root}: too many writers")

    def _create(self, folder: str, path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from deltalake import DeltaTable, Schema

        names = list(_partition_values(folder))
        schema = pq.read_schema(self.root / path).remove_metadata()
        kinds = {"date": pa.date32(), "hour": pa.int32()}
        for name in names:
            schema = schema.append(pa.field(name, kinds.get(name, pa.string())))
        # A later batch may come without a column that this one has.
        schema = pa.schema([field.with_nullable(True) for field in schema])
        DeltaTable.create(
            str(self.root), Schema.from_arrow(schema), mode="ignore", partition_by=names
        )

    def _widen(self, files: Sequence[ArchivedFile]) -> None:
        """Adds columns that the table lacks: options may ask for more than they did before."""
        import pyarrow.parquet as pq
        from deltalake import Field, Schema

        table = self._existing()
        known = {field.name for field in table.schema().fields}
        fresh: dict[str, Field] = {}
        for path in {file.schema: file.path for file in files}.values():
            schema = pq.read_schema(self.root / path).remove_metadata()
            fields = Schema.from_arrow(schema).fields
            # What is archived already does not have them.
            fresh |= {
                field.name: Field(field.name, field.type, nullable=True)
                for field in fields
                if field.name not in known
            }
        if fresh:
            table.alter.add_columns(list(fresh.values()))

    def _noted(self, table: DeltaTable) -> tuple[dict[str, Ranges], dict[str, str]]:
        """Returns what each pipeline has archived, and how its last batch is named: every commit of
        any of them says it of all."""
        for limit in (4, 64, None):
            for commit in table.history(limit):
                if RANGES_KEY in commit:
                    plans = commit.get(PLANS_KEY, "{}")
                    return json.loads(commit[RANGES_KEY]), json.loads(plans)
        return {}, {}

    def compact(self, files_min: int, keep_s: float) -> int:
        from deltalake.exceptions import CommitFailedError

        table = self._table()
        if table is None:
            return 0
        replaced = 0
        if len(table.file_uris()) >= files_min:
            # Another pipeline may be at it.
            with contextlib.suppress(CommitFailedError):
                done = table.optimize.compact(target_size=COMPACT_BYTES)
                replaced = int(done["numFilesRemoved"])
        # Only what the table's log calls removed: not what batches under way have moved.
        hours = math.ceil(keep_s / 3600)
        for path in table.vacuum(hours, dry_run=True, enforce_retention_duration=False):
            (self.root / unquote(path)).unlink(missing_ok=True)
        return replaced

    def totals(self) -> tuple[int, int]:
        table = self._table()
        if table is None:
            return 0, 0
        import pyarrow as pa

        actions = pa.table(table.get_add_actions(flatten=True))
        return sum(actions["num_records"].to_pylist()), actions.num_rows


def _partition_values(folder: str) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for part in folder.split("/"):
        name, _, value = part.partition("=")
        values[name] = None if value == HIVE_NULL else unquote(value)
    return values
