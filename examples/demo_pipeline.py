"""What Spark does in the demo: archive the flights exactly once, compute delays, prove the run.

Each step is a command of its own process, because the demo kills one of them:

    python examples/demo_pipeline.py archive --servers … --stream … --target DIR
    python examples/demo_pipeline.py finish  --servers … --stream … --target DIR --traces DIR …
        --out DIR

`archive` goes on until it is killed. `finish` archives what is missing, writes `delays.png` and
`delays.html`, audits the traces into `audit.html`, and leaves its numbers in `result.json`. Both
start Spark first and then wait for a line on their standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from convoymq.spark import session
from convoymq.spark.pipelines.archive import archive, archived
from convoymq.spark.pipelines.manifest import Archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = (
    "year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, "
    "arr_time int, sched_arr_time int, arr_delay double, carrier string, flight int, "
    "tailnum string, origin string, dest string, air_time double, distance double, hour int, "
    "minute int, time_hour string"
)
BATCH_ROWS = 40_000
SOURCE_OPTIONS = {"maxOffsetsPerTrigger": str(BATCH_ROWS), "includeHeaders": "true"}
SPARK_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def start() -> SparkSession:
    """A session for two cores."""
    spark = session("convoymq demo", master="local[2]", conf=SPARK_CONF)
    spark.sparkContext.setLogLevel("FATAL")
    return spark


def delays(spark: SparkSession, target: Path) -> DataFrame:
    """Mean departure delay in minutes and flights, per carrier and scheduled hour."""
    from pyspark.sql import functions as f

    row = f.from_csv(f.col("value").cast("string"), COLUMNS)
    flights = archived(spark, target).select(row.alias("flight")).select("flight.*")
    return (
        flights.where("dep_delay IS NOT NULL")
        .groupBy("carrier", "hour")
        .agg(f.avg("dep_delay").alias("delay"), f.count("*").alias("flights"))
        .orderBy("carrier", "hour")
    )


def import_pyplot() -> ModuleType:
    """Imports what draws, which takes a second or two, for pictures without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(rows: list[Any], out: Path) -> None:
    """A picture of the delays (PNG), and a page that shows it with its numbers (HTML)."""
    import numpy as np

    plt = import_pyplot()

    carriers = sorted({row.carrier for row in rows})
    hours = sorted({row.hour for row in rows})
    grid = np.full((len(carriers), len(hours)), np.nan)
    for row in rows:
        grid[carriers.index(row.carrier), hours.index(row.hour)] = row.delay
    figure, axes = plt.subplots(figsize=(10, 5.5))
    picture = axes.imshow(grid, aspect="auto", cmap="RdYlGn_r", vmin=-10, vmax=50)
    axes.set_xticks(range(len(hours)), [str(hour) for hour in hours])
    axes.set_yticks(range(len(carriers)), carriers)
    axes.set_xlabel("scheduled hour of departure")
    axes.set_ylabel("carrier")
    axes.set_title("Mean departure delay, New York 2013 (minutes)")
    figure.colorbar(picture, label="minutes")
    figure.tight_layout()
    figure.savefig(out / "delays.png", dpi=110)
    plt.close(figure)
    lines = "".join(
        f"<tr><td>{row.carrier}<td>{row.hour}<td>{row.delay:.1f}<td>{row.flights:,}" for row in rows
    )
    (out / "delays.html").write_text(
        "<!doctype html><meta charset=utf-8><title>Delays</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.1em .8em;text-align:right}"
        "</style><h1>Mean departure delay per carrier and hour</h1><img src=delays.png>"
        f"<table><tr><th>carrier<th>hour<th>minutes<th>flights{lines}</table>"
    )


def finish(options: argparse.Namespace) -> dict[str, Any]:
    """Archives the rest, computes, audits; the numbers for the demo's report."""
    from pyspark.sql import functions as f

    spark = start()
    # All that does not need the flights, while they are still being published.
    import_pyplot()
    sys.stdin.readline()
    report = archive(
        spark,
        servers=options.servers,
        target=options.target,
        streams=[options.stream],
        options=SOURCE_OPTIONS,
    )
    rows = archived(spark, options.target)
    # Every flight carries its number in a header: equal lines would be two flights all the same.
    number = f.filter("headers", lambda header: header["key"] == "number")[0]["value"]
    counted = rows.select(
        f.count("*").alias("rows"), f.countDistinct(number).alias("messages")
    ).first()
    assert counted is not None
    table = delays(spark, options.target).collect()
    options.out.mkdir(parents=True, exist_ok=True)
    plot(table, options.out)
    result: dict[str, Any] = {
        "archived": counted["rows"],
        "distinct": counted["messages"],
        "damaged_files": Archive(options.target).check(),
        "orphans": [str(path) for path in Archive(options.target).orphans()],
        "finished_rows": report.rows,
        "skipped_batches": report.skipped,
        "files": report.files_total,
        "carriers": len({row.carrier for row in table}),
        "cells": len(table),
    }
    if options.traces:
        from convoymq.spark.audit import audit
        from convoymq.spark.audit.report import html_page

        # A node completes its trace when it stops; whoever started this process stops them now.
        print("archived", flush=True)
        sys.stdin.readline()
        found = audit(options.traces, spark=spark)
        (options.out / "audit.html").write_text(html_page(found), "utf-8")
        result["audit"] = found.to_dict()
    spark.stop()
    return result


def main() -> int:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["archive", "finish"])
    parser.add_argument("--servers", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--traces", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step == "finish":
        result = finish(options)
        (options.out / "result.json").write_text(json.dumps(result, indent=1, default=str))
        return 0
    spark = start()
    sys.stdin.readline()
    archive(
        spark,
        servers=options.servers,
        target=options.target,
        streams=[options.stream],
        options=SOURCE_OPTIONS,
        every="100 milliseconds",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
