"""The data sources: options in, readers and writers out. No connection is made here but by
the writers, which look whether their target exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.spark import options
from convoymq.spark.option_table import OptionValues, Use, parse_options
from convoymq.spark.schema import (
    QUEUE_COLUMNS,
    ROCKETMQ_COLUMNS,
    STREAM_COLUMNS,
    TOPIC_COLUMNS,
    Column,
    full_schema,
)

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class StreamSource:
    """Format convoymq. Raises OptionError for options that are unknown or wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = parse_options("convoymq", given)

    def schema(self) -> StructType:
        """Kafka's columns, and those that options add; of a topic those of places, too."""
        if self._values["namesrv"]:
            return _schema(ROCKETMQ_COLUMNS, self._values)
        of_topic = self._values["topic"] is not None
        return _schema(TOPIC_COLUMNS if of_topic else STREAM_COLUMNS, self._values)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a batch read."""
        from convoymq.spark.reader import BatchReader, FilteringBatchReader

        read = options.StreamReadOptions.of(self._values, Use.BATCH_READ)
        if read.topic is not None and not read.connection.namesrv:
            from convoymq.spark.topic_reader import TopicBatchReader

            return TopicBatchReader(read, schema)
        return FilteringBatchReader(read, schema) if read.pushdown else BatchReader(read, schema)

    def stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        """Returns a streaming read."""
        from convoymq.spark.reader import MicroBatchReader

        read = options.StreamReadOptions.of(self._values, Use.STREAM_READ)
        if read.topic is not None and not read.connection.namesrv:
            from convoymq.spark.topic_reader import TopicMicroBatchReader

            return TopicMicroBatchReader(read, schema)
        return MicroBatchReader(read, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Returns a batch write."""
        from convoymq.spark.writer import BatchWriter

        sink = options.SinkOptions.of_stream(self._values, Use.BATCH_WRITE)
        return BatchWriter(sink, schema, overwrite)

    def stream_writer(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Returns a streaming write."""
        from convoymq.spark.writer import MicroBatchWriter

        sink = options.SinkOptions.of_stream(self._values, Use.STREAM_WRITE)
        return MicroBatchWriter(sink, schema, overwrite)


class QueueSource:
    """Format convoymq_queue. Raises OptionError for options that are unknown or wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = parse_options("convoymq_queue", given)

    def schema(self) -> StructType:
        """Returns a queue's columns, and those that options add."""
        return _schema(QUEUE_COLUMNS, self._values)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a batch read: browsing."""
        from convoymq.spark.queue import BrowseReader

        return BrowseReader(options.QueueReadOptions.of(self._values, Use.BATCH_READ), schema)

    def stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        """Returns a streaming read, by reservation or by leases."""
        from convoymq.spark.queue import LeaseReader, ReservationReader

        read = options.QueueReadOptions.of(self._values, Use.STREAM_READ)
        return (
            LeaseReader(read, schema) if read.mode == "lease" else ReservationReader(read, schema)
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Returns a batch write."""
        from convoymq.spark.writer import BatchWriter

        sink = options.SinkOptions.of_queue(self._values, Use.BATCH_WRITE)
        return BatchWriter(sink, schema, overwrite)

    def stream_writer(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Returns a streaming write."""
        from convoymq.spark.writer import MicroBatchWriter

        sink = options.SinkOptions.of_queue(self._values, Use.STREAM_WRITE)
        return MicroBatchWriter(sink, schema, overwrite)


def _schema(columns: Mapping[str, Column], values: OptionValues) -> StructType:
    return full_schema(
        columns,
        include_headers=values["includeHeaders"],
        include_properties=values["includeProperties"],
        include_content_header=values.get("includeContentHeader", False),
    )
