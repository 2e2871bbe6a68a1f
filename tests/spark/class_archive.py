"""A run of Spark whose loaded classes Java archives, so that the Sparks of tests start sooner.

`python class_archive.py DIRECTORY` does a little of all that these tests let Spark do: a source in
Python, as a batch and as a stream, and Parquet. Which rows come out does not matter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.datasource import InputPartition as Partition

from convoymq.spark import session


class Reader(DataSourceReader, DataSourceStreamReader):
    """Ten rows, once."""

    def partitions(self, *_offsets: Any) -> list[Partition]:  # type: ignore[override]
        """One."""
        return [Partition(0)]

    def read(self, _partition: Partition) -> Iterator[tuple[int, bytes]]:  # type: ignore[override]
        """The rows."""
        return ((number, b"%d" % number) for number in range(10))

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """The start."""
        return {"at": 0}

    def latestOffset(self, *_start: Any) -> dict[str, int]:  # noqa: N802
        """The end."""
        return {"at": 10}


class Source(DataSource):
    """The source of these rows."""

    @classmethod
    def name(cls) -> str:
        """Its format."""
        return "ten_rows"

    def schema(self) -> str:
        """A number and bytes."""
        return "number bigint, value binary"

    def reader(self, schema: Any) -> Reader:
        """For a batch."""
        return Reader()

    def streamReader(self, schema: Any) -> Reader:  # noqa: N802
        """For a stream."""
        return Reader()


def main() -> None:
    """Reads, groups, writes, and waits for Java, which writes the archive when it ends."""
    directory = Path(sys.argv[1])
    spark = session("classes", master="local[2]")
    spark.dataSource.register(Source)
    rows = spark.readStream.format("ten_rows").load().selectExpr("number % 3 k", "value")
    writer = rows.repartition(2, "k").writeStream.format("parquet").trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    writer.start(str(directory / "out")).awaitTermination()
    found = spark.read.parquet(str(directory / "out")).groupBy("k").count()
    numbers = spark.read.format("ten_rows").load()
    found.join(numbers, found.k == numbers.number).orderBy("number").collect()
    java: subprocess.Popen[bytes] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    assert java.stdin is not None
    java.stdin.close()
    sys.exit(java.wait())


if __name__ == "__main__":
    main()
