"""A Spark program of its own, for tests that kill it: `python driver.py '{"format": …}'`.

Reads a stream or a queue into Parquet, or with `sink` into a stream of that name. The fields of the
argument: format, options, out, sink, shuffle (rows go to this many tasks by chance), checkpoint,
master, trigger, conf.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import rand
from pyspark.sql.streaming.readwriter import DataStreamWriter

from convoymq.spark import session
from convoymq.spark.query_runs import run_queries


def writer_of(spark: SparkSession, job: dict[str, Any]) -> DataStreamWriter:
    """Returns the query of a job, for a session of any process."""
    rows = spark.readStream.format(job["format"]).options(**job["options"]).load()
    if job.get("shuffle"):
        rows = rows.withColumn("chance", rand()).repartition(job["shuffle"], "chance")
    if job.get("sink"):
        writer = rows.select("value").writeStream.format("convoymq").option("topic", job["sink"])
        writer = writer.option("servers", job["options"]["servers"])
        writer = writer.option("convoymq.produce.maxRows", "100")
    else:
        writer = rows.writeStream.format("parquet").option("path", job["out"])
    return writer.option("checkpointLocation", job["checkpoint"]).trigger(**job["trigger"])


def main() -> None:
    """Runs one query to its end."""
    job = json.loads(sys.argv[1])
    spark = session("driver", master=job.get("master"), conf=job.get("conf"))
    run_queries([writer_of(spark, job)])
    spark.stop()


if __name__ == "__main__":
    main()
