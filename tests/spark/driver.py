"""A Spark program of its own, for tests that kill it: `python driver.py '{"format": …}'`.

Reads a stream or a queue into Parquet, or with `sink` into a stream of that name. The fields of the
argument: format, options, out, sink, shuffle (rows go to this many tasks by chance), checkpoint,
master, trigger, conf.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql.functions import rand

from convoymq.spark import session
from convoymq.spark.query_runs import run_queries


def main() -> None:
    """Runs one query to its end."""
    job = json.loads(sys.argv[1])
    spark = session("driver", master=job.get("master"), conf=job.get("conf"))
    rows = spark.readStream.format(job["format"]).options(**job["options"]).load()
    if job.get("shuffle"):
        rows = rows.withColumn("chance", rand()).repartition(job["shuffle"], "chance")
    if job.get("sink"):
        writer = rows.select("value").writeStream.format("convoymq").option("topic", job["sink"])
        writer = writer.option("servers", job["options"]["servers"])
        writer = writer.option("convoymq.produce.maxRows", "100")
    else:
        writer = rows.writeStream.format("parquet").option("path", job["out"])
    writer = writer.option("checkpointLocation", job["checkpoint"])
    run_queries([writer.trigger(**job["trigger"])])
    spark.stop()


if __name__ == "__main__":
    main()
