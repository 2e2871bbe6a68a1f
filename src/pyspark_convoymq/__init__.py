"""By this module's name Spark finds the data source `convoymq`; the rest is in `convoymq.spark`.

Spark imports this in every session that uses any Python data source, so nothing else is imported
before it is needed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from convoymq.spark.sources import QueueSource, StreamSource


class DefaultSource(DataSource):
    """Format `convoymq`: see docs/spark.md."""

    FORMAT: ClassVar[str] = "convoymq"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._source = self._source_class()(dict(options))

    @staticmethod
    def _source_class() -> type[StreamSource | QueueSource]:
        from convoymq.spark.sources import StreamSource

        return StreamSource

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return cls.FORMAT

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
