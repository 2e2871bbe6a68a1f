"""The columns of both formats, and which of the broker's columns each of them needs.

For streams they are those of Spark's Kafka source, name by name and type by type. `timestampType`
is always 1, log append time: the broker stamps messages, not their senders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from convoymq.kernels import columns as bits
from convoymq.model.near_names import did_you_mean
from convoymq.spark.errors import SchemaError
from convoymq.spark.properties import PROPERTY_KINDS

LOG_APPEND_TIME: Final = 1

HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)


_PROPERTY_TYPES = {"text": StringType(), "octet": IntegerType(), "time": TimestampType()}

PROPERTIES = StructType(
    [StructField("exchange", StringType()), StructField("routing_key", StringType())]
    + [StructField(name, _PROPERTY_TYPES[kind]) for name, kind in PROPERTY_KINDS.items()]
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a format."""

    type: DataType
    bits: int
    """Columns that must be fetched for it."""
    nullable: bool = False
    """True if it can be null; every column is declared so, as Kafka's are."""
    option: str = ""
    """The option that adds it; empty = it is always there."""


STREAM_COLUMNS: Mapping[str, Column] = {
    "key": Column(BinaryType(), bits.KEY, nullable=True),
    # Null of a tombstone.
    "value": Column(BinaryType(), bits.VALUE, nullable=True),
    "topic": Column(StringType(), 0),
    "partition": Column(IntegerType(), 0),
    "offset": Column(LongType(), bits.OFFSET),
    "timestamp": Column(TimestampType(), bits.TIMESTAMP),
    "timestampType": Column(IntegerType(), 0),
    "headers": Column(HEADERS, bits.HEADERS, nullable=True, option="includeHeaders"),
    "properties": Column(
        PROPERTIES,
        bits.EXCHANGE | bits.ROUTING_KEY | bits.PROPERTIES,
        nullable=True,
        option="includeProperties",
    ),
}

_ORDER_KEY = bits.ROUTING_KEY | bits.HEADERS
"""Columns in which the order key of a message stands."""

TOPIC_COLUMNS: Mapping[str, Column] = {
    **STREAM_COLUMNS,
    # A topic may take messages without a key, which then have no logical partition either.
    "key": Column(BinaryType(), _ORDER_KEY, nullable=True),
    "lp": Column(IntegerType(), _ORDER_KEY, nullable=True),
    "pid": Column(IntegerType(), 0),
    "route_version": Column(LongType(), 0),
    "order_token": Column(StringType(), 0),
}
"""Columns of streams, and a message's place in its topic."""

ROCKETMQ_COLUMNS: Mapping[str, Column] = {
    "key": Column(BinaryType(), 0, nullable=True),
    "value": Column(BinaryType(), 0, nullable=True),
    "topic": Column(StringType(), 0),
    "broker": Column(StringType(), 0),
    "partition": Column(IntegerType(), 0),
    "offset": Column(LongType(), 0),
    "timestamp": Column(TimestampType(), 0),
    "timestampType": Column(IntegerType(), 0),
    "born_timestamp": Column(TimestampType(), 0, nullable=True),
    "tags": Column(StringType(), 0, nullable=True),
    "keys": Column(ArrayType(StringType()), 0),
    "message_id": Column(StringType(), 0),
    "reconsume_times": Column(IntegerType(), 0),
    "properties": Column(MapType(StringType(), StringType()), 0),
}
"""Columns of topics of RocketMQ; `partition` is the number of the queue, on its broker."""

QUEUE_COLUMNS: Mapping[str, Column] = {
    "key": STREAM_COLUMNS["key"],
    "value": STREAM_COLUMNS["value"],
    "queue": Column(StringType(), 0),
    "offset": STREAM_COLUMNS["offset"],
    "timestamp": STREAM_COLUMNS["timestamp"],
    "exchange": Column(StringType(), bits.EXCHANGE),
    "routing_key": Column(StringType(), bits.ROUTING_KEY),
    "delivery_count": Column(IntegerType(), bits.DELIVERY_COUNT),
    "redelivered": Column(IntegerType(), bits.REDELIVERED),
    "headers": STREAM_COLUMNS["headers"],
    "properties": STREAM_COLUMNS["properties"],
    "content_header": Column(BinaryType(), bits.PROPERTIES, option="includeContentHeader"),
}


def full_schema(
    columns: Mapping[str, Column],
    *,
    include_headers: bool,
    include_properties: bool,
    include_content_header: bool = False,
) -> StructType:
    """Returns the schema of a read without a schema of the user's."""
    added = {
        "includeHeaders": include_headers,
        "includeProperties": include_properties,
        "includeContentHeader": include_content_header,
    }
    return StructType(
        [
            StructField(name, column.type)
            for name, column in columns.items()
            if not column.option or added[column.option]
        ]
    )


def check_schema(columns: Mapping[str, Column], schema: StructType) -> None:
    """Checks what the user wants to read: any of the columns, each once, with its type.

    Raises:
        SchemaError: an unknown column, another type, or NOT NULL where nulls can be.
    """
    for field in schema.fields:
        column = columns.get(field.name)
        if column is None:
            near = did_you_mean(field.name, columns, 0.5) or f"there are {', '.join(columns)}"
            raise SchemaError(f"there is no column {field.name}; {near}")
        if field.dataType.simpleString() != column.type.simpleString():
            raise SchemaError(
                f"column {field.name} has the type {column.type.simpleString()}, "
                f"not {field.dataType.simpleString()}"
            )
        if column.nullable and not field.nullable:
            raise SchemaError(f"column {field.name} can be null: it can't be declared NOT NULL")
    names = [field.name for field in schema.fields]
    if not names:
        raise SchemaError("a schema without columns")
    if len(set(names)) != len(names):
        raise SchemaError("a column stands twice in the schema")
