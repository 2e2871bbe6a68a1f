"""Values that senders choose: none of them fails a batch, and what Spark can't hold is counted."""

from __future__ import annotations

import datetime
import logging
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.column_writer import ColumnWriter
from convoymq.spark import frames, reading
from convoymq.spark.frames import binary_buffers
from convoymq.spark.partition import TopicRange
from convoymq.spark.pipelines import archive as archiving
from convoymq.spark.pipelines.triage import deaths
from convoymq.spark.properties import PROPERTY_KINDS, decode_properties
from convoymq.spark.schema import QUEUE_COLUMNS, STREAM_COLUMNS, TOPIC_COLUMNS, full_schema
from convoymq.spark.topic_frames import TopicBatchMaker
from tests.spark.cluster import Broker
from tests.unit.kernels import reference

FLAGS = ("content_type", "content_encoding", "headers", "delivery_mode", "priority",
         "correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type", "user_id",
         "app_id", "cluster_id")  # fmt: skip
YEAR_9999 = 253_402_300_799
TIMES = (0, 1, 1_700_000_000, 1_700_000_000_000, 1_700_000_000_000_000, YEAR_9999, 1 << 62,
         (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip


def short(data: bytes) -> bytes:
    return bytes((len(data),)) + data


def long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def header(headers: bytes | None = None, **values: bytes) -> bytes:
    """A content header of encoded values."""
    if headers is not None:
        values["headers"] = long(headers)
    flags = sum(1 << (15 - FLAGS.index(name)) for name in values)
    parts = [values[name] for name in FLAGS if name in values]
    return struct.pack(">HHQH", 60, 0, 0, flags) + b"".join(parts)


names = st.binary(max_size=12) | st.sampled_from(
    [b"", b"x-key", b"x-order-key", b"x-death", b"\xff\xfe", "é".encode(), b"x-republish-count"]
)
anything = st.one_of(
    st.sampled_from([b"V", b"t\x00", b"t\x02", b"b\x80", b"D\xff\xff\xff\xff\xff"]),
    st.sampled_from([b"T" + struct.pack(">Q", each) for each in TIMES]),
    st.sampled_from([b"d" + struct.pack(">d", float(each)) for each in ("nan", "inf", "-inf")]),
    st.sampled_from([b"f\x7f\xc0\x00\x00", b"l" + b"\xff" * 8, b"L\x80" + bytes(7), b"i\xff\xff" * 1
                     + b"\xff\xff"]),
    st.builds(lambda data: b"S" + long(data), st.binary(max_size=20)),
    st.builds(lambda data: b"x" + long(data), st.binary(max_size=20)),
)  # fmt: skip


def table(fields: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(short(name) + value for name, value in fields)


def nested(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    tables = st.builds(table, st.lists(st.tuples(names, inner), max_size=3))
    arrays = st.builds(b"".join, st.lists(inner, max_size=3))
    return st.builds(lambda data: b"F" + long(data), tables) | st.builds(
        lambda data: b"A" + long(data), arrays
    )


tables = st.builds(table, st.lists(st.tuples(names, st.recursive(anything, nested)), max_size=4))
texts = st.builds(short, st.binary(max_size=12))
values: dict[str, st.SearchStrategy[bytes]] = {
    name: {"text": texts, "octet": st.binary(min_size=1, max_size=1),
           "time": st.sampled_from([struct.pack(">Q", each) for each in TIMES])}[kind]
    for name, kind in PROPERTY_KINDS.items()
}  # fmt: skip
headers = st.builds(
    lambda known, fields: header(fields, **known),
    st.fixed_dictionaries({}, optional=values),
    st.none() | tables,
)
messages = st.lists(
    st.tuples(names, names, headers, st.binary(max_size=10)), min_size=1, max_size=8
)


def frame_of(columns: int, items: list[tuple[bytes, bytes, bytes, bytes]]) -> ColumnFrame:
    """As a node makes it of its records."""
    records = []
    for exchange, key, content, body in items:
        sized = content[:4] + struct.pack(">Q", len(body)) + content[12:]
        parts = [short(exchange), short(key), b"\x02\x00\x01" + long(sized) + b"\xce"]
        if body:
            parts.append(b"\x03\x00\x01" + long(body) + b"\xce")
        records.append(b"".join(parts))
    writer = ColumnWriter(columns, 1000, 1 << 24)
    block = reference.enqueue(1, 1, records, [len(item[3]) for item in items], 0)
    assert writer.append(block, 0, 0, len(items), 5, 1000) == len(items)
    return writer.frame(5 + len(items))


def makers() -> list[tuple[frames.BatchMaker, dict[str, Any]]]:
    """One for each format, with all columns."""
    both: dict[str, Any] = {"include_headers": True, "include_properties": True}
    stream = full_schema(STREAM_COLUMNS, **both)
    queue = full_schema(QUEUE_COLUMNS, **both, include_content_header=True)
    topic = full_schema(TOPIC_COLUMNS, **both)
    part = TopicRange("amq.partition.t.0", 0, 0, 9, topic="t", logical=16)
    return [
        (frames.BatchMaker(stream, STREAM_COLUMNS), {"topic": "s", "partition": 0}),
        (frames.BatchMaker(queue, QUEUE_COLUMNS), {"queue": "q"}),
        (TopicBatchMaker(topic).of(part), dict(part.constants)),
    ]


@settings(max_examples=150)
@given(items=messages)
def test_no_property_header_or_name_fails_a_batch(
    items: list[tuple[bytes, bytes, bytes, bytes]],
) -> None:
    for maker, constants in makers():
        rows: list[dict[str, Any]] = []
        for batch in maker.batches(frame_of(maker.bits, items), constants):
            batch.validate(full=True)
            rows += batch.to_pylist()
        assert [row["value"] for row in rows] == [item[3] for item in items]
        for row, (_, _, content, _) in zip(rows, items, strict=True):
            assert row["properties"] is not None
            known = decode_properties(content)
            assert known is not None
            for name in ("message_id", "delivery_mode", "priority"):
                assert row["properties"][name] == known.get(name)


@settings(max_examples=150)
@given(contents=st.lists(headers | st.binary(max_size=30), max_size=6))
def test_no_dead_letter_fails_a_triage(spark: SparkSession, contents: list[bytes]) -> None:
    schema = deaths.arrow_schema(StructType.fromDDL(deaths.ddl(deaths.COLUMNS)))
    given_rows = pa.table({"content_header": pa.array(contents, pa.binary())})
    for name in deaths.MESSAGE_COLUMNS:
        if name != "content_header":
            given_rows = given_rows.append_column(
                name, pa.nulls(len(contents), schema.field(name).type)
            )
    for batch in deaths.explode(iter(given_rows.to_batches()), schema):
        batch.validate(full=True)
        assert len(batch.to_pylist()) == len(contents)
    for content in contents:
        made = deaths.outgoing(content, republish=True, deaths=1, count=1, keep_deaths=True)
        assert deaths.facts(made).keys() == deaths.FACTS.keys()


def test_what_spark_cannot_hold_is_null_or_mended_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    maker, constants = makers()[0]
    items = [
        (b"e", b"\xffk", header(timestamp=struct.pack(">Q", each), app_id=short(b"a\xff")), b"v")
        for each in TIMES
    ]
    frame = frame_of(maker.bits, items)

    caplog.set_level(logging.WARNING)
    fetching: Any = SimpleNamespace(rate_max=None, prefetch=False)
    fetched: Any = iter([SimpleNamespace(frame=frame)])
    found = reading._batches(fetched, fetching, maker, constants)
    rows = [row["properties"] for batch in found for row in batch.to_pylist()]
    assert [row["timestamp"] is None for row in rows] == [each > 17 * 10**8 for each in TIMES]
    assert {row["app_id"] for row in rows} == {"a\ufffd"}
    assert {row["routing_key"] for row in rows} == {"\ufffdk"}
    assert "topic s partition 0" in caplog.text
    assert "app_id 10, routing_key 10, timestamp 7" in caplog.text


HOSTILE = [
    header(),
    header(table([(b"\xff\xfe", b"V"), (b"", b"S" + long(b"\xff")), (b"a", b"V"), (b"a", b"V")])),
    *(header(timestamp=struct.pack(">Q", each)) for each in TIMES),
    header(message_id=short(b"\xff\xfe"), correlation_id=short(b"\xc0"), type=short(b"\xed\xa0")),
    header(table([(b"deep", b"F" + long(table([(b"\xff", b"d\x7f\xf8" + bytes(6))])))])),
    header(table([(b"x-death", b"A" + long(b"F" + long(table([(b"time", b"T" + b"\xff" * 8)]))))])),
]  # fmt: skip


def test_hostile_messages_are_rows_in_spark(
    spark: SparkSession, nodes: Broker, tmp_path: Path
) -> None:
    contents = pa.array(HOSTILE, pa.binary())
    bodies = pa.array([b"%d" % at for at in range(len(HOSTILE))], pa.binary())
    buffers = [*binary_buffers(bodies), *binary_buffers(contents)[1:]]
    frame = build_frame(bits.VALUE | bits.PROPERTIES, len(HOSTILE), 0, len(HOSTILE), buffers)
    stream, queue = nodes.declare("stream"), nodes.declare("quorum")
    nodes.client.produce(frame, stream=stream)
    nodes.client.produce(frame, queue=queue)
    all_of_it = {"includeHeaders": "true", "includeProperties": "true"}
    for format, chosen in (
        ("convoymq", {"subscribe": stream}),
        ("convoymq_queue", {"queue": queue}),
    ):
        rows = (
            spark.read.format(format).options(servers=nodes.servers, **chosen, **all_of_it).load()
        )
        assert rows.count() == len(HOSTILE)
        found = rows.orderBy("offset").collect()
        assert [int(bytes(row.value)) for row in found] == list(range(len(HOSTILE)))
        shown = [row.properties.timestamp for row in found[2 : 2 + len(TIMES)]]
        assert [each is None for each in shown] == [each > 17 * 10**8 for each in TIMES]
        assert isinstance(shown[0], datetime.datetime)
        assert rows.toArrow().num_rows == len(HOSTILE)
    report = archiving.archive(
        spark,
        servers=nodes.servers,
        target=str(tmp_path / "archive"),
        streams=(stream,),
        format="delta",
        options=all_of_it,
    )
    assert report.rows == len(HOSTILE)
