"""Merges batches into a Delta table: each batch once, each row only where it is younger.

`TableMerger` has the rules: which rows a row replaces (`YOUNGER`), and which batches a table has
already. Two classes carry a MERGE out:

- `DriverMerger`, with the package deltalake: rows pass through the driver, `MERGE_ROWS_MAX` at a
  time over all tables.
- `ExecutorMerger`, with Delta Lake's extension of the Spark session: rows stay on the executors.

A commit has a Delta transaction (application, version) and the batch's name as `userMetadata`, by
whichever of them it was made, so a table may pass from one to the other at any batch. Both read
these from the table's log by deltalake.
"""

from __future__ import annotations

import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from convoymq.spark.errors import OptionError, SourceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Result = TypeVar("Result")

MERGE_ROWS_MAX = 1_000_000
"""Rows that pass through the driver at a time. More are merged in slices by key."""
POSITION = "_position"
OFFSET = "_offset"
DELETED = "_deleted"
CHANGED_AT = "_changed_at"
FIRST_OFFSET = -1
"""Below every offset: of rows of release 0.2, which have none."""
YOUNGER = (
    f"s.{POSITION} > t.{POSITION} OR "
    f"(s.{POSITION} = t.{POSITION} AND s.{OFFSET} > coalesce(t.{OFFSET}, {FIRST_OFFSET}))"
)
"""Condition under which an event replaces a row. Inside a batch the order is the same."""
BATCH_KEY = "convoymq.batch"
"""In a commit of the table: pipeline and slice, batch, and which offsets the batch has."""
USER_METADATA = "userMetadata"
"""Field of a commit that Delta's writers leave to their callers: here JSON with `BATCH_KEY`."""

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
EXTENSIONS_SETTING = "spark.sql.extensions"
CATALOG_SETTING = "spark.sql.catalog.spark_catalog"
TRANSACTION_SETTINGS = (
    "spark.databricks.delta.write.txnAppId",
    "spark.databricks.delta.write.txnVersion",
)
METADATA_SETTING = "spark.databricks.delta.commitInfo.userMetadata"
MISFITS = (
    *("NoSuchMethodError", "NoSuchFieldError", "NoClassDefFoundError", "ClassNotFoundException"),
    *("AbstractMethodError", "IncompatibleClassChangeError"),
)
"""Errors of Java when jars are of another version of Spark."""


class MergePath(StrEnum):
    """Path of the rows of a MERGE."""

    AUTO = "auto"
    """On the executors where the session has Delta Lake's extension, else through the driver."""
    DRIVER = "driver"
    EXECUTORS = "executors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of a pipeline."""

    number: int
    plan: str = ""
    """Names the offsets at its end; "" = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptied:
    """The last event that emptied a table: rows of events before it are gone."""

    position: int | str
    offset: int
    at_us: int
    """Time of the event, µs since the epoch."""

    @classmethod
    def parse(cls, text: str) -> Emptied:
        """Reads what `str` has written. Raises ValueError, KeyError, TypeError."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps({"position": self.position, "offset": self.offset, "at_us": self.at_us})

    def is_after(self, other: Emptied | None) -> bool:
        """Returns whether it is later."""
        if other is None:
            return True
        mine, others = (self.position, self.offset), (other.position, other.offset)
        return mine > others

    def later(self, side: str) -> str:
        """Returns the condition that a row is of an event after it."""
        place = self._place
        return (
            f"({side}.{POSITION} > {place} OR ({side}.{POSITION} = {place} AND "
            f"coalesce({side}.{OFFSET}, {FIRST_OFFSET}) > {self.offset}))"
        )

    def tombstone(self, time: str) -> dict[str, str]:
        """Returns the columns of a row that it has removed. `time` is its time, as SQL."""
        return {
            POSITION: self._place,
            OFFSET: str(self.offset),
            DELETED: "true",
            CHANGED_AT: time,
        }

    @property
    def _place(self) -> str:
        if isinstance(self.position, int):
            return str(self.position)
        return "'" + self.position.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class MergeCommit:
    """Identity of a commit: Delta's transaction, and the batch's name."""

    app: str
    version: int
    name: str

    @property
    def metadata(self) -> str:
        """Content of the commit's `userMetadata`."""
        return json.dumps({BATCH_KEY: self.name})


def batch_name(commit: Mapping[str, object]) -> str | None:
    """Returns the batch that a commit of a table's history is of; None: of none."""
    # Release 0.3.0 wrote a key of its own.
    if (name := commit.get(BATCH_KEY)) is not None:
        return str(name)
    try:
        kept = json.loads(str(commit[USER_METADATA]))
    except (KeyError, ValueError):
        return None
    found = kept.get(BATCH_KEY) if isinstance(kept, dict) else None
    return None if found is None else str(found)


def has_delta(spark: SparkSession) -> bool:
    """Returns whether a session is set up with Delta Lake's extension and its catalog."""
    extensions = spark.conf.get(EXTENSIONS_SETTING, "") or ""
    named = [each.strip() for each in extensions.split(",")]
    return EXTENSION in named and spark.conf.get(CATALOG_SETTING, "") == CATALOG


def chosen_path(spark: SparkSession, wanted: str) -> MergePath:
    """Returns where rows go in a session: never AUTO. Raises OptionError."""
    if wanted not in list(MergePath):
        raise OptionError(f"merge {wanted!r}: there are {', '.join(MergePath)}")
    if wanted == MergePath.DRIVER:
        return MergePath.DRIVER
    if has_delta(spark):
        return MergePath.EXECUTORS
    if wanted == MergePath.AUTO:
        return MergePath.DRIVER
    raise OptionError(
        "merge executors: the session has no Delta Lake; it needs its jars, "
        f"{EXTENSIONS_SETTING}={EXTENSION} and {CATALOG_SETTING}={CATALOG}"
    )


def location(path: str) -> str:
    """Returns a table's place as Spark and deltalake both take it. A plain path is of this machine,
    also where Spark has another default file system."""
    return path if "://" in path else f"file://{os.path.abspath(path)}"


class TableMerger(ABC):
    """Merges batches into one table."""

    rows_max: int | None
    """Rows of one MERGE; None: no bound."""

    def __init__(self, app: str, path: str, keys: Sequence[str]) -> None:
        self._app = app
        self._path = path
        self._keys = tuple(keys)
        self._matched = " AND ".join(f"t.`{key}` = s.`{key}`" for key in keys)

    def collected(self, rows: DataFrame) -> pa.Table | None:
        """Returns rows that pass through the driver at once; None when they do not."""
        if self.rows_max is None:
            return None
        found = rows.limit(self.rows_max + 1).toArrow()
        return None if found.num_rows > self.rows_max else found

    def merge(
        self,
        rows: DataFrame | pa.Table,
        count: int,
        batch: Batch,
        probe: Callable[[str], None],
        emptied: Emptied | None = None,
    ) -> bool:
        """Merges a batch, unless the table has it.

        Args:
            rows: the latest row of each key, `collected` or persisted; the same ones when the batch
                is repeated.
            count: how many.
            probe: called with `merging` and `merged` at every MERGE.
            emptied: rows of events before it are gone.

        Returns:
            Whether there was something to do.
        """
        from pyspark.sql import functions as f

        whole = self._next(self._app, batch)
        if whole is None:
            return False
        slices = 1 if self.rows_max is None else max(1, -(-count // self.rows_max))
        merged = False
        for number in range(slices):
            # The same rows give the same slices, so a repeat finds its own transactions.
            commit = whole if slices == 1 else self._next(f"{self._app}/{number}/{slices}", batch)
            if commit is None:
                continue
            part = rows
            if slices > 1:
                keyed = f.pmod(f.xxhash64(*self._keys), f.lit(slices))
                part = rows.where(keyed == number)
            probe("merging")
            self._execute(part, commit, emptied)
            probe("merged")
            merged = True
        return merged

    def _next(self, app: str, batch: Batch) -> MergeCommit | None:
        """Returns how the batch is committed; None: the table has it."""
        from deltalake import DeltaTable

        table = DeltaTable(self._path)
        name = f"{app}/{batch.number}/{batch.plan}"
        last = table.transaction_version(app)
        if last is None or last < batch.number:
            return MergeCommit(app, batch.number, name)
        if any(batch_name(each) == name for each in table.history()):
            return None
        # An older checkpoint was put back: the number stands for other events. What is merged
        # again changes nothing, so the batch is merged, under an identity that Delta does not
        # pass over.
        app = f"{app}/{batch.plan}"
        last = table.transaction_version(app)
        return (
            None
            if last is not None and last >= batch.number
            else MergeCommit(app, batch.number, name)
        )

    @abstractmethod
    def _execute(
        self, rows: DataFrame | pa.Table, commit: MergeCommit, emptied: Emptied | None = None
    ) -> None:
        """Merges rows in one commit."""


class DriverMerger(TableMerger):
    """By the package deltalake: rows are collected in the driver."""

    def __init__(self, app: str, path: str, keys: Sequence[str], *, rows_max: int) -> None:
        super().__init__(app, path, keys)
        self.rows_max = rows_max

    def _execute(
        self, rows: DataFrame | pa.Table, commit: MergeCommit, emptied: Emptied | None = None
    ) -> None:
        from deltalake import CommitProperties, DeltaTable, Transaction

        properties = CommitProperties(
            app_transactions=[Transaction(commit.app, commit.version)],
            custom_metadata={USER_METADATA: commit.metadata},
        )
        merging = DeltaTable(self._path).merge(
            rows if isinstance(rows, pa.Table) else rows.toArrow(),
            self._matched,
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
        )
        if emptied is None:
            merging.when_matched_update_all(YOUNGER).when_not_matched_insert_all().execute()
            return
        late, gone = emptied.later("s"), f"NOT {emptied.later('t')}"
        time = f"arrow_cast({emptied.at_us}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
        tombstone = emptied.tombstone(time)
        (
            merging.when_matched_update_all(f"({YOUNGER}) AND {late}")
            .when_matched_update(tombstone, gone)
            .when_not_matched_insert_all(late)
            .when_not_matched_by_source_update(tombstone, gone)
            .execute()
        )


class ExecutorMerger(TableMerger):
    """By Delta Lake's extension: the executors join rows and table, and write the files.

    Delta takes the transaction from settings of the session, so each table has a session of its
    own, which shares all else with the others."""

    rows_max = None

    def __init__(self, spark: SparkSession, app: str, path: str, keys: Sequence[str]) -> None:
        super().__init__(app, path, keys)
        self._session = spark.newSession()
        for name, value in spark.conf.getAll.items():
            if spark.conf.isModifiable(name):
                self._session.conf.set(name, value)
        self._view = f"convoymq_{uuid.uuid4().hex}"
        target = location(path).replace("`", "``")
        self._statement = (
            f"MERGE INTO delta.`{target}` AS t USING global_temp.{self._view} AS s "
            f"ON {self._matched} "
        )

    def _clauses(self, emptied: Emptied | None) -> str:
        if emptied is None:
            return f"WHEN MATCHED AND ({YOUNGER}) THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        late, gone = emptied.later("s"), f"NOT {emptied.later('t')}"
        tombstone = emptied.tombstone(f"timestamp_micros({emptied.at_us})")
        columns = ", ".join(f"t.{name} = {value}" for name, value in tombstone.items())
        return (
            f"WHEN MATCHED AND ({YOUNGER}) AND {late} THEN UPDATE SET * "
            f"WHEN MATCHED AND {gone} THEN UPDATE SET {columns} "
            f"WHEN NOT MATCHED AND {late} THEN INSERT * "
            f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN UPDATE SET {columns}"
        )

    def _execute(
        self, rows: DataFrame | pa.Table, commit: MergeCommit, emptied: Emptied | None = None
    ) -> None:
        from py4j.protocol import Py4JError

        assert not isinstance(rows, pa.Table)
        settings = dict(zip(TRANSACTION_SETTINGS, (commit.app, str(commit.version)), strict=True))
        settings[METADATA_SETTING] = commit.metadata
        for name, value in settings.items():
            self._session.conf.set(name, value)
        rows.createOrReplaceGlobalTempView(self._view)
        try:
            self._session.sql(self._statement + self._clauses(emptied)).collect()
        except Py4JError as error:
            text = str(error)
            if any(each in text for each in MISFITS):
                raise SourceError(
                    f"Delta Lake's jars do not fit Spark {self._session.version}: take those that "
                    "are made for it, or merge by the driver"
                ) from error
            raise
        finally:
            self._session.catalog.dropGlobalTempView(self._view)


def run_together(
    spark: SparkSession, works: Sequence[Callable[[], Result]], threads_max: int
) -> list[Result]:
    """Runs works on a session in threads, and returns their results when all have ended.

    When one fails, those that have not begun are left out, and those that run go to their ends.

    Raises:
        The error of the first of them that failed, the others as its notes.
    """
    if threads_max == 1 or len(works) == 1:
        return [work() for work in works]
    from pyspark import inheritable_thread_target

    # Jobs belong to the query in whose thread this is: stopping it ends them.
    own = [inheritable_thread_target(spark)(work) for work in works]
    with ThreadPoolExecutor(min(threads_max, len(works)), "convoymq-tables") as pool:
        futures = [pool.submit(work) for work in own]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    errors = [found for each in futures if not each.cancelled() and (found := each.exception())]
    for other in errors[1:]:
        errors[0].add_note(f"another table failed as well: {other}")
    if errors:
        raise errors[0]
    return [each.result() for each in futures]
