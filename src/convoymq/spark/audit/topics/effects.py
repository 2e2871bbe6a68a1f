"""Lines that sinks and sources wrote beside the trace (`trace.effects`), as rows by key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from convoymq.kernels.trace import name_hash
from convoymq.model.errors import Misuse
from convoymq.spark.audit.topics.keys import APPLIED
from convoymq.spark.audit.topics.partitions import (
    EFFECT,
    KEY_COLUMNS,
    KEYLESS,
    SOURCE,
    keyless_key,
)
from convoymq.topics.rules.order_token import OrderToken
from convoymq.trace.effects import EFFECTS_PATTERN, SOURCE_PATTERN

SPARK_SCHEMA = ", ".join(f"`{name}` bigint" for name in KEY_COLUMNS)
_SCHEMA = pa.schema([(name, pa.int64()) for name in KEY_COLUMNS])


def files_of(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[Path]:
    """Returns the files of sinks and sources below the paths."""
    roots = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [
        file
        for root in map(Path, roots)
        if root.is_dir()
        for pattern in (EFFECTS_PATTERN, SOURCE_PATTERN)
        for file in sorted(root.rglob(pattern))
    ]
    return list(dict.fromkeys(file.resolve() for file in found))


def sinks_of(files: Iterable[Path], topics: Mapping[str, int]) -> frozenset[tuple[int, int]]:
    """Returns (topic, consumer group) of the sinks, by the first line of each file. Raises
    Misuse."""
    found = set()
    for file in files:
        if not file.name.startswith("effects-"):
            continue
        with file.open(encoding="utf-8") as lines:
            first = lines.readline()
        if first.strip():
            line = _parsed(first)
            topic = topics.get(str(line.get("topic")))
            if topic is not None:
                found.add((topic, name_hash(str(line.get("group")).encode())))
    return frozenset(found)


class EffectSweep:
    """For `mapInArrow`: lines of text to rows by key."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self.topics = dict(topics)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields rows; lines of topics that are not in the trace are left out."""
        for batch in batches:
            rows = [
                row
                for text in batch.column(0).to_pylist()
                if text.strip()
                for row in [row_of(_parsed(text), self.topics)]
                if row is not None
            ]
            arrays = [
                pa.array(np.array([row[name] for row in rows], np.int64)) for name in KEY_COLUMNS
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _parsed(text: str) -> dict[str, object]:
    try:
        line = json.loads(text)
    except ValueError:
        # The last line of a process that was killed.
        return {}
    if not isinstance(line, dict):
        raise Misuse(f"not a line of effects or of a source: {text[:80]!r}")
    return line


def row_of(line: Mapping[str, object], topics: Mapping[str, int]) -> dict[str, int] | None:
    """Returns a line as a row by key; None when it is of no topic of the trace."""
    topic = topics.get(str(line.get("topic")))
    if topic is None:
        return None
    row = dict.fromkeys(KEY_COLUMNS, 0)
    row["topic"] = topic
    row["key"] = name_hash(str(line.get("key")).encode())
    row["time_us"] = int(str(line.get("time_us", 0)))
    row["settled_lease"] = name_hash(str(line.get("value")).encode())
    if "token" not in line:
        row["row"] = SOURCE
        return row
    token = OrderToken.parse(str(line["token"]))
    row["row"] = EFFECT
    row["reader"] = name_hash(str(line.get("group")).encode())
    row["version"], row["offset"] = token.created_version, token.offset
    if row["key"] == KEYLESS:
        row["key"] = keyless_key(row["version"], row["offset"])
    row["how"] = APPLIED if line.get("applied") else 0
    return row
