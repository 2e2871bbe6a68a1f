"""How fast the audit is: writes a clean synthetic trace of three nodes, audits it, tells rows/s.

    python benchmarks/audit.py --rows 50000000 --master 'local[2]'

Every entry publishes a run, delivers it in the same entry and settles the one before last; three
replicas record that, one node the confirm and one the sending: 11 rows an entry. The trace is on
disk before the clock starts. Memory: peak of Java and of Python's workers, from /proc. Fails when
the audit does not prove the trace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from convoymq.compiled_modules import build_text
from convoymq.model import trace as words
from convoymq.trace.segments import Origin, segment_schema

NODES = (1, 2, 3)
CHANNELS = 4
CONSUMERS = 4
RUN = 32
LAG = 8
ROWS_PER_ENTRY = 11
CHUNK = 250_000
START_US = 1_700_000_000_000_000


def columns(n: int, **given: Any) -> dict[str, Any]:
    """All columns of n rows; what is not given is 0."""
    made = {name: np.zeros(n, np.int64) for name in words.ROW_COLUMNS}
    for name, value in given.items():
        made[name] = np.broadcast_to(np.asarray(value, np.int64), n)
    return made


def session(node: int, number: Any) -> Any:
    """Session ids of channels."""
    return (node << 56) + (1 << 24) + number


def decided(index: Any, entries: int) -> dict[str, Any]:
    """Rows of entries `index`, in log order; the last LAG runs stay checked out."""
    n = len(index)
    number = index - 1
    time_us = START_US + number * 1000
    place = {"position_command": 48, "count": RUN, "term": 1}
    consumer = number % CONSUMERS
    who = {"session": session(2, 100), "consumer": consumer + 1}
    published = columns(
        n, kind=words.PUBLISHED, index=index, ordinal=0, time_us=time_us,
        session=session(1, number % CHANNELS), seq=number // CHANNELS + 1, first_id=number * RUN,
        position_index=index, **place,
    )  # fmt: skip
    delivered = columns(
        n, kind=words.DELIVERED, index=index, ordinal=1, time_us=time_us,
        first_id=number // CONSUMERS * RUN, position_index=index, **who, **place,
    )  # fmt: skip
    late = index > LAG
    old = (number - LAG)[late]
    acked = columns(
        int(late.sum()), kind=words.ACKED, index=index[late], ordinal=2, time_us=time_us[late],
        session=session(2, 100), consumer=old % CONSUMERS + 1, position_index=old + 1, **place,
    )  # fmt: skip
    parts = [published, delivered, acked]
    if index[0] == 1:
        parts.append(
            columns(
                CONSUMERS, kind=words.OWNER, flags=words.CAME, index=1, ordinal=0, term=1,
                time_us=START_US, session=session(2, 100), consumer=np.arange(CONSUMERS) + 1,
            )
        )  # fmt: skip
        published["ordinal"] = published["ordinal"] + np.where(index == 1, CONSUMERS, 0)
        delivered["ordinal"] = delivered["ordinal"] + np.where(index == 1, CONSUMERS, 0)
        parts[-1]["ordinal"] = np.arange(CONSUMERS)
    return joined(parts)


def acts(index: Any, node: int) -> dict[str, Any] | None:
    """What node 1 confirmed and node 2 sent."""
    n = len(index)
    number = index - 1
    time_us = START_US + number * 1000 + 400
    if node == 1:
        seq = number // CHANNELS + 1
        return columns(
            n, kind=words.CONFIRMED, time_us=time_us, session=session(1, number % CHANNELS),
            seq=seq, first_id=seq, count=RUN,
        )  # fmt: skip
    if node == 2:
        return columns(
            n, kind=words.SENT, time_us=time_us, session=session(2, 100),
            consumer=number % CONSUMERS + 1, first_id=number // CONSUMERS * RUN, count=RUN,
            position_index=index, position_command=48,
        )  # fmt: skip
    return None


def state_snapshot(entries: int) -> dict[str, Any]:
    """What is checked out at the end."""
    index = np.arange(entries - LAG + 1, entries + 1)
    number = index - 1
    return columns(
        LAG, kind=words.STATE, flags=words.HELD, index=entries, session=session(2, 100),
        consumer=number % CONSUMERS + 1, first_id=number // CONSUMERS * RUN, count=RUN,
        position_index=index, position_command=48, time_us=START_US + entries * 1000,
    )  # fmt: skip


def members() -> dict[str, Any]:
    """Who records: every node has a replica, and lived once."""
    return columns(
        len(NODES), kind=words.MEMBER, flags=words.REPLICA, time_us=START_US, consumer=NODES, seq=1
    )


def mark(start: int, end: int, flags: int, marked: dict[str, int]) -> dict[str, Any]:
    """Says that entries (start, end] are complete, and counts the rows before."""
    first_us, last_us = span_us(start, end)
    counts = {column: marked[name] for name, column in words.MARK_COLUMNS.items()}
    return columns(
        1, kind=words.COVERED, flags=flags, time_us=last_us, index=end, first_id=first_us,
        position_index=start, **counts,
    )  # fmt: skip


def span_us(start: int, end: int) -> tuple[int, int]:
    """When entries (start, end] were recorded; begins where the span before ended."""
    return START_US + start * 1000 + (500 if start else 0), START_US + end * 1000 + 500


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of all parts, by entry and ordinal."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort([whole["ordinal"], whole["index"], whole["time_us"] // 1000])
    return {name: values[order] for name, values in whole.items()}


def table(rows: dict[str, Any], origin: Origin) -> pa.Table:
    """Rows as a segment's table."""
    schema = segment_schema()
    n = len(rows["kind"])
    facts = {
        "vhost": origin.vhost, "queue": origin.queue, "type": origin.type, "group": origin.group,
        "node": origin.node, "incarnation": origin.incarnation,
    }  # fmt: skip
    made = []
    for field in schema:
        if field.name in rows:
            made.append(pa.array(rows[field.name], pa.int64()).cast(field.type))
        elif pa.types.is_dictionary(field.type):
            zeros = pa.array(np.zeros(n, np.int32))
            made.append(pa.DictionaryArray.from_arrays(zeros, [facts[field.name]]))
        else:
            made.append(pa.repeat(pa.scalar(facts[field.name], field.type), n))
    return pa.Table.from_arrays(made, schema=schema)


def write(root: Path, rows: int) -> int:
    """Writes the trace; returns its rows."""
    entries = max(rows // ROWS_PER_ENTRY, LAG + 1)
    total = 0
    for node in NODES:
        origin = Origin(vhost="/", queue="bench", type="quorum", group=1, node=node, incarnation=1)
        directory = origin.directory(root / f"node-{node}")
        directory.mkdir(parents=True)
        for number, start in enumerate(range(0, entries, CHUNK)):
            end = min(start + CHUNK, entries)
            index = np.arange(start + 1, end + 1)
            parts = [members(), decided(index, entries)]
            own = acts(index, node)
            parts += [own] if own is not None else []
            state_snapshots = []
            if end == entries:
                parts.append(state_snapshot(entries))
                state_snapshots = [
                    {
                        "index": entries, "time_us": START_US, "complete": 1,
                        "published": entries * RUN, "acked": (entries - LAG) * RUN, "ready": 0,
                        "unacked": LAG * RUN, "dropped": 0, "purged": 0,
                        "delivered": entries * RUN, "returned": 0,
                    }
                ]  # fmt: skip
            kinds = np.concatenate([part["kind"] for part in parts])
            marked = {
                "confirmed": int((kinds == words.CONFIRMED).sum()),
                "sent": int((kinds == words.SENT).sum()),
                "rows": len(kinds),
            }
            closed = end == entries
            parts.append(mark(start, end, words.CLOSED if closed else 0, marked))
            made = table(joined(parts), origin)
            total += made.num_rows
            facts = {
                "vhost": "/", "queue": "bench", "type": "quorum", "group": 1, "node": node,
                "incarnation": 1, "format": words.FORMAT, "covered": [[start, end]],
                "acts": [span_us(start, end)], "state_snapshots": state_snapshots,
                "members": [[each, 1, 1] for each in NODES], "marked": {**marked, "marks": 1},
                "previous": [1, number - 1] if number else None,
                "lost": 0, "closed": closed, "rows": made.num_rows,
            }  # fmt: skip
            path = directory / f"{origin.name(number)}.parquet"
            with pq.ParquetWriter(path, made.schema, compression="zstd") as writer:
                writer.write_table(made)
                writer.add_key_value_metadata({words.METADATA_KEY: json.dumps(facts).encode()})
    return total


class PeakMemory:
    """Resident bytes of this process and all below it, looked at twice a second."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil  # type: ignore[import-untyped]

        own = psutil.Process()
        while not self._stop.wait(0.5):
            used = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    used += process.memory_info().rss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, used)


def main() -> int:
    """Writes, audits, prints one line of JSON; returns 0 when the trace is proved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="2g")
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    root = options.directory or Path(tempfile.mkdtemp(prefix="trace-"))
    try:
        rows = write(root, options.rows)
        size = sum(path.stat().st_size for path in root.rglob("*.parquet"))
        from convoymq.spark import session as spark_session
        from convoymq.spark.audit import audit

        conf = {"spark.driver.memory": options.driver_memory, "spark.ui.enabled": "false"}
        spark = spark_session("audit benchmark", master=options.master, conf=conf)
        spark.sparkContext.setLogLevel("ERROR")
        began = time.monotonic()
        times: list[tuple[str, float]] = []
        with PeakMemory() as memory:
            report = audit(
                root,
                spark=spark,
                progress=lambda step: times.append((step, time.monotonic() - began)),
            )
        spark.stop()
        ends = [at for _, at in times[1:]] + [time.monotonic() - began]
        print(
            json.dumps(
                {
                    "build": build_text(),
                    "rows": rows,
                    "messages": report.queues[0].published,
                    "bytes": size,
                    "seconds": round(report.duration_s, 1),
                    "rows_per_s": round(rows / report.duration_s),
                    "peak_memory_bytes": memory.bytes,
                    "violations": report.violations,
                    "proved": report.proved,
                    "steps": {
                        step: round(end - at, 1)
                        for (step, at), end in zip(times, ends, strict=True)
                    },
                    "load": os.getloadavg()[0],
                }
            )
        )
        return report.exit_code if report.proved else 1
    finally:
        if options.directory is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
