"""Applies changes to a Delta table by both ways of a MERGE, and prints the rates as JSON.

    python benchmarks/spark_apply.py --servers HOST:PORT --stream NAME --rows N

`benchmarks/spark.py` starts it for its case `apply`, with the Spark that `make spark-jars` has put
beside the environment's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

SCHEMA = "id bigint, name string, city string, amount bigint"
BATCHES = 4
SESSION = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "2g",
    "spark.databricks.delta.snapshotPartitions": "1",
}


def main() -> int:
    """Measures; the order of the two ways is given."""
    from convoymq.spark import session
    from convoymq.spark.pipelines.apply import Events, TableSpec, apply
    from convoymq.spark.pipelines.merging import (
        CATALOG,
        CATALOG_SETTING,
        EXTENSION,
        EXTENSIONS_SETTING,
    )

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--order", nargs=2, default=["driver", "executors"])
    options = parser.parse_args()
    conf = {**SESSION, EXTENSIONS_SETTING: EXTENSION, CATALOG_SETTING: CATALOG}
    spark = session("bench apply", master="local[2]", conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="convoy-bench-apply-") as place:
        # The first pass is what the first jobs of a session cost.
        for number, merge in enumerate([*options.order, *options.order]):
            home = Path(place, str(number))
            begun = time.perf_counter()
            report = apply(
                spark,
                servers=options.servers,
                stream=options.stream,
                tables=[TableSpec(path=str(home / "table"), schema=SCHEMA, keys=("id",))],
                checkpoint=home / "state",
                events=Events(envelope="flat"),
                options={"maxOffsetsPerTrigger": str(options.rows // BATCHES)},
                merge=merge,
            )
            assert report.events == options.rows
            rates[merge] = options.rows / (time.perf_counter() - begun)
    print(json.dumps(rates))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
