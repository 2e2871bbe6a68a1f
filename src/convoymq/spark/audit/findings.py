"""Findings of sweeps, and the cut of their input into whole groups.

All sweeps return one small table (`SCHEMA`): counts, not rows, whatever the size of the trace.

| what      | k1 … k4                     | v1 … v7                              | n        |
|-----------|-----------------------------|--------------------------------------|----------|
| violation | invariant, rows             | –                                    | messages |
| unproved  | invariant, rows             | –                                    | messages |
| fate      | fate, reason, in a state snapshot? | –                                    | messages |
| entered   | in the last state snapshot's time? | –                                    | messages |
| confirmed | –                           | –                                    | messages |
| latency   | hour, metric, bucket        | –                                    | messages |
| share     | hour, session, consumer     | –                                    | messages |
| client    | kind of row, node           | –                                    | messages |
| missing   | kind of count, –            | –                                    | rows     |
| edge      | kind of edge, key (2), part | ends (4), spans of both, first order | –        |

`text` of a violation is a JSON list of a few examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Columns = dict[str, npt.NDArray[np.int64]]
Array = npt.NDArray[Any]
"""A numpy array; its element type is told by the name."""
Known = TypeVar("Known")
"""Knowledge of a sweep beside its rows."""

SCHEMA = pa.schema(
    [
        ("what", pa.string()),
        ("group", pa.int64()),
        ("k1", pa.int64()),
        ("k2", pa.int64()),
        ("k3", pa.int64()),
        ("k4", pa.int64()),
        *((f"v{k}", pa.int64()) for k in range(1, 8)),
        ("n", pa.int64()),
        ("text", pa.string()),
    ]
)


class FindingRow(TypedDict, total=False):
    """A row of `SCHEMA`, as it comes back from Spark."""

    what: str
    group: int
    k1: int
    k2: int
    k3: int
    k4: int
    v1: int
    v2: int
    n: int
    text: str | None


SPARK_SCHEMA = ", ".join(
    f"`{name}` {'string' if name in ('what', 'text') else 'bigint'}" for name in SCHEMA.names
)

EXAMPLES = 3
ORDINAL_BITS = 24
LAST_ORDINAL = (1 << ORDINAL_BITS) - 1
LOW = (1 << 32) - 1

METRICS = ("published_delivered", "delivered_settled", "published_settled", "delivered_sent")
BUCKETS_PER_OCTAVE = 24
BUCKET_ZERO_US = 50.0
HOUR_US = 3_600_000_000

FATE_SETTLED = 1
FATE_DROPPED = 2
FATE_READY = 3
FATE_HELD = 4
FATE_AGAIN = 5


def bucket_of(us: Array) -> Array:
    """Logarithmic bucket of durations in µs; 3 % wide."""
    scaled = np.log2(1.0 + np.maximum(us, 0) / BUCKET_ZERO_US) * BUCKETS_PER_OCTAVE
    buckets: Array = np.floor(scaled).astype(np.int64)
    return buckets


def bucket_us(bucket: float) -> float:
    """Returns the middle of a bucket, in µs."""
    return float((2.0 ** ((bucket + 0.5) / BUCKETS_PER_OCTAVE) - 1.0) * BUCKET_ZERO_US)


@dataclass(frozen=True)
class Scope:
    """Facts on the queues that a sweep needs: small, and sent to every worker.

    `groups` ascend. Gaps are ranges (start, end] without rows of any node; `covered` the rest.
    """

    groups: tuple[int, ...]
    state_snapshots: tuple[int, ...]
    """Entry of the last complete state snapshot; -1 = none."""
    covered: tuple[tuple[int, int, int], ...]
    """(group, start, end], ascending."""
    _cache: dict[str, tuple[Array, Array]] = field(default_factory=dict, compare=False, repr=False)

    def place(self, group: Array) -> Array:
        """Returns the position of each group in `groups`."""
        return np.searchsorted(np.asarray(self.groups, np.int64), group)

    def _keys(self) -> tuple[Array, Array]:
        if "keys" not in self._cache:
            spans = np.asarray(self.covered, np.int64).reshape(-1, 3)
            base = self.place(spans[:, 0]) << 40
            self._cache["keys"] = (base + spans[:, 1], base + spans[:, 2])
        found: tuple[Array, Array] = self._cache["keys"]
        return found

    def span(self, group: Array, index: Array) -> Array:
        """Returns the number of the covered range that an entry lies in; -1 = it is in none. Two
        entries of one number have no gap between them."""
        starts, ends = self._keys()
        key = (self.place(group) << 40) + index
        at = np.searchsorted(starts, key, side="left") - 1
        inside = (at >= 0) & (key <= ends[np.maximum(at, 0)])
        return np.where(inside, at, -1)

    def state_snapshot(self, group: Array) -> Array:
        """Returns the entry of each group's state snapshot; -1 = none."""
        return np.asarray(self.state_snapshots, np.int64)[self.place(group)]


class Findings:
    """Collects rows of `SCHEMA`."""

    def __init__(self) -> None:
        self.rows: list[tuple[object, ...]] = []
        self.blocks: list[pa.RecordBatch] = []

    def violation(
        self,
        invariant: int,
        group: Array,
        messages: Array,
        mask: Array,
        example: Callable[[int], dict[str, object]],
        *,
        what: str = "violation",
    ) -> None:
        """Notes the rows that `mask` picks, per group, with a few examples."""
        if not mask.any():
            return
        picked = np.flatnonzero(mask)
        groups = group[picked]
        for each in np.unique(groups):
            mine = picked[groups == each]
            shown = [example(int(k)) for k in mine[:EXAMPLES]] if what == "violation" else []
            self.rows.append(
                (what, int(each), invariant, len(mine), 0, 0, *[0] * 7, int(messages[mine].sum()),
                 json.dumps(shown))
            )  # fmt: skip

    def counts(self, what: str, group: Array, keys: Sequence[Array], messages: Array) -> None:
        """Sums messages by group and up to four keys."""
        if not len(group):
            return
        table = np.stack([group, *keys])
        order = np.lexsort(table[::-1])
        table = table[:, order]
        fresh = np.ones(table.shape[1], bool)
        fresh[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
        starts = np.flatnonzero(fresh)
        sums = np.add.reduceat(messages[order], starts)
        table = table[:, starts]
        self._block(what, table[0], list(table[1:]), [], sums)

    def edges(
        self, kind: int, group: Array, keys: Sequence[Array], values: Sequence[Array]
    ) -> None:
        """One row per group and key: how a part begins and ends, to be compared with the next.

        keys: what is continued (two numbers), then the number of the part.
        """
        if len(group):
            kinds = np.full(len(group), kind, np.int64)
            self._block("edge", group, [kinds, *keys], values, np.zeros(len(group), np.int64))

    def _block(
        self, what: str, group: Array, keys: Sequence[Array], values: Sequence[Array], n: Array
    ) -> None:
        rows = len(group)
        zeros = np.zeros(rows, np.int64)
        columns: list[pa.Array] = [pa.repeat(what, rows), pa.array(group, pa.int64())]
        columns += [pa.array(keys[k] if k < len(keys) else zeros, pa.int64()) for k in range(4)]
        columns += [pa.array(values[k] if k < len(values) else zeros, pa.int64()) for k in range(7)]
        columns += [pa.array(n, pa.int64()), pa.nulls(rows, pa.string())]
        self.blocks.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yields what was collected; empties it."""
        blocks, self.blocks = self.blocks, []
        rows, self.rows = self.rows, []
        yield from blocks
        if rows:
            arrays = [
                pa.array([row[k] for row in rows], SCHEMA.field(k).type)
                for k in range(len(SCHEMA.names))
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def columns_of(batch: pa.RecordBatch) -> Columns:
    """Returns a batch of int64 columns as arrays, without copies."""
    return {
        name: batch.column(k).to_numpy(zero_copy_only=False)
        for k, name in enumerate(batch.schema.names)
    }


def whole_groups(
    batches: Iterator[pa.RecordBatch], keys: Sequence[str], rows_min: int = 1 << 17
) -> Iterator[Columns]:
    """Cuts sorted input where a key changes: a group is never split. Memory: a few batches, or the
    largest group."""
    held: list[Columns] = []
    waiting = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(columns_of(batch))
        waiting += batch.num_rows
        if waiting < rows_min:
            continue
        whole = _joined(held)
        cut = _last_change(whole, keys)
        if cut:
            yield {name: values[:cut] for name, values in whole.items()}
            whole = {name: values[cut:] for name, values in whole.items()}
        held = [whole]
        waiting = len(whole[keys[0]]) if cut else 0
    if held:
        yield _joined(held)


def picked(columns: Columns, mask: Array) -> Columns:
    """Returns the rows of a mask."""
    return {name: values[mask] for name, values in columns.items()}


class Sweep(Generic[Known]):
    """For `mapInArrow`: has `follow` look at whole groups of rows; yields what it finds."""

    def __init__(
        self, keys: Sequence[str], follow: Callable[[Columns, Known, Findings], None], known: Known
    ) -> None:
        self.keys = keys
        self.follow = follow
        self.known = known

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields findings."""
        for columns in whole_groups(batches, self.keys):
            findings = Findings()
            self.follow(columns, self.known, findings)
            yield from findings.take()


def _joined(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def changes(columns: Columns, keys: Sequence[str]) -> Array:
    """Returns True at every row that begins a new key."""
    rows = len(columns[keys[0]])
    fresh = np.zeros(rows, bool)
    fresh[:1] = True
    for key in keys:
        values = columns[key]
        fresh[1:] |= values[1:] != values[:-1]
    return fresh


def _last_change(columns: Columns, keys: Sequence[str]) -> int:
    starts = np.flatnonzero(changes(columns, keys))
    return int(starts[-1]) if len(starts) else 0
