"""Sweeps that give findings and rows for the next sweep: one table, with columns for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from convoymq.spark.audit.findings import SCHEMA, Array, Findings

ROW = "row"
"""`what` of a row for the next sweep."""


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Returns the table's schema: findings, then the columns of rows."""
    return pa.schema([*SCHEMA, *((f"x_{name}", pa.int64()) for name in columns)])


def spark_schema_of(columns: Sequence[str]) -> str:
    """Returns the same for Spark."""
    names = schema_of(columns).names
    return ", ".join(
        f"`{name}` {'string' if name in ('what', 'text') else 'bigint'}" for name in names
    )


def batches_of(
    findings: Findings, columns: Sequence[str], blocks: Iterable[dict[str, Array]]
) -> Iterator[pa.RecordBatch]:
    """Yields findings and rows."""
    schema = schema_of(columns)
    for batch in findings.take():
        more = [pa.nulls(batch.num_rows, pa.int64())] * len(columns)
        yield pa.RecordBatch.from_arrays([*batch.columns, *more], schema=schema)
    for block in blocks:
        n = len(block[columns[0]])
        if n:
            narrow = [pa.repeat(ROW, n)]
            narrow += [pa.nulls(n, field.type) for field in list(SCHEMA)[1:]]
            rows = [pa.array(block[name], pa.int64()) for name in columns]
            yield pa.RecordBatch.from_arrays([*narrow, *rows], schema=schema)
