"""A client of Spark Connect that reads and writes streams: a program of its own, because a process
has one kind of Spark session. Arguments: servers, source, target, directory for a checkpoint."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession


def main(servers: str, source: str, target: str, checkpoint: str) -> None:
    """Copies the source by a batch and by a streaming query; prints what it saw."""
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    given = {"servers": servers, "subscribe": source}
    rows = spark.read.format("convoymq").options(**given).load()
    seen = [bytes(row.value).decode() for row in rows.select("value").collect()]
    writing = rows.select("value").write.format("convoymq").mode("append")
    writing.options(servers=servers, topic=target).save()
    live = spark.readStream.format("convoymq").options(startingOffsets="earliest", **given).load()
    query = (
        live.select("value")
        .writeStream.format("convoymq")
        .options(servers=servers, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = query.lastProgress
    refused = ""
    try:
        spark.read.format("convoymq").options(servers=servers, subscribe="none").load().collect()
    except Exception as error:
        refused = str(error)
    kind = type(spark).__module__
    metrics = dict(progress.sources[0].metrics) if progress is not None else {}
    told = {"kind": kind, "seen": seen, "metrics": metrics, "refused": refused}
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
