"""By this module's name Spark finds the source `convoymq_queue`; the rest is in `convoymq.spark`.

Spark imports this in every session that uses any Python data source, so nothing else is imported
before it is needed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from convoymq.spark.sources import QueueSource


class DefaultSource(DataSource):
    """Format `convoymq_queue`: see docs/spark.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from convoymq.spark.sources import QueueSource

        super().__init__(options)
        self._source: QueueSource = QueueSource(dict(options))

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return "convoymq_queue"

    def schema(self) -> StructType:
        """Columns by name and type; asks nobody."""
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a batch read."""
        return self._source.reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Returns a streaming read."""
        return self._source.stream_reader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Returns a batch write."""
        return self._source.writer(schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Returns a streaming write."""
        return self._source.stream_writer(schema, overwrite)
