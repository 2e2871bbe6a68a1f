"""Columnar frames to record batches and back, against rows made one by one."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.spark import frames
from convoymq.spark.schema import QUEUE_COLUMNS, STREAM_COLUMNS, full_schema
from convoymq.spark.writer import _frame
from tests.spark.fakes import T0_MS, Message, frame_of, headers_of, messages_of

ALL = full_schema(STREAM_COLUMNS, include_headers=True, include_properties=True)
QUEUE_ALL = full_schema(
    QUEUE_COLUMNS, include_headers=True, include_properties=True, include_content_header=True
)
CONSTANTS = {"topic": "flights", "partition": 0}

cells = st.none() | st.binary(max_size=20)
headers = st.none() | st.lists(st.tuples(st.text(max_size=5), cells), max_size=3)
messages = st.lists(
    st.builds(
        Message,
        value=st.binary(max_size=40),
        key=cells,
        headers=headers,
        exchange=st.text(max_size=5),
        routing_key=st.text(max_size=5),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(messages=messages, base=st.integers(0, 1 << 40))
def test_a_frame_becomes_rows_of_kafkas_columns(messages: list[Message], base: int) -> None:
    maker = frames.BatchMaker(ALL, STREAM_COLUMNS)
    rows = [
        row
        for batch in maker.batches(frame_of(maker.bits, base, messages), CONSTANTS)
        for row in batch.to_pylist()
    ]
    assert len(rows) == len(messages)
    for i, (row, message) in enumerate(zip(rows, messages, strict=True)):
        assert row["key"] == message.key
        assert row["value"] == message.value
        assert (row["topic"], row["partition"], row["timestampType"]) == ("flights", 0, 1)
        assert row["offset"] == base + i
        when = datetime.datetime.fromtimestamp(T0_MS / 1000, datetime.UTC)
        assert row["timestamp"] == when
        expected = message.headers
        if expected is not None:
            expected = [{"key": name, "value": value} for name, value in expected]
        assert row["headers"] == expected
        assert row["properties"]["exchange"] == message.exchange
        assert row["properties"]["routing_key"] == message.routing_key


@pytest.mark.parametrize(("schema", "columns"), [(ALL, STREAM_COLUMNS), (QUEUE_ALL, QUEUE_COLUMNS)])
def test_batches_have_exactly_the_schema_that_spark_expects(schema, columns) -> None:
    maker = frames.BatchMaker(schema, columns)
    constants = {**CONSTANTS, "queue": "orders"}
    frame = frame_of(maker.bits, 5, [Message(b"a", acquired=2, delivered=1)])
    (batch,) = maker.batches(frame, constants)
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    batch.validate(full=True)


def test_only_the_columns_of_the_users_schema_are_fetched() -> None:
    from pyspark.sql.types import StructType

    wanted = StructType([ALL["offset"], ALL["value"]])
    maker = frames.BatchMaker(wanted, STREAM_COLUMNS)
    assert maker.bits == bits.OFFSET | bits.VALUE
    (batch,) = maker.batches(frame_of(maker.bits, 0, [Message(b"x")]), CONSTANTS)
    assert batch.to_pylist() == [{"offset": 0, "value": b"x"}]
    constant = frames.BatchMaker(StructType([ALL["topic"]]), STREAM_COLUMNS)
    (batch,) = constant.batches(frame_of(constant.bits, 0, [Message(b"x")]), CONSTANTS)
    assert batch.to_pylist() == [{"topic": "flights"}]


def test_batches_stay_within_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = frames.BatchMaker(ALL, STREAM_COLUMNS)
    many = frame_of(maker.bits, 0, [Message(b"v")] * 25_001)
    assert [b.num_rows for b in maker.batches(many, CONSTANTS)] == [10_000, 10_000, 5_001]
    monkeypatch.setattr(frames, "BATCH_BYTES_MAX", 100)
    sizes = [60, 40, 1, 99, 150, 10, 100]
    large = frame_of(maker.bits, 0, [Message(bytes(size)) for size in sizes])
    found = [b.column("value").to_pylist() for b in maker.batches(large, CONSTANTS)]
    assert [[len(v) for v in batch] for batch in found] == [[60, 40], [1, 99], [150], [10], [100]]
    keys = frame_of(maker.bits, 0, [Message(b"", key=bytes(70)) for _ in range(3)])
    assert [b.num_rows for b in maker.batches(keys, CONSTANTS)] == [1, 1, 1]


def test_no_bytes_are_copied() -> None:
    maker = frames.BatchMaker(ALL, STREAM_COLUMNS)
    frame = frame_of(maker.bits, 0, [Message(b"x" * 1000)] * 100)
    (batch,) = maker.batches(frame, CONSTANTS)
    data = frame.buffers(bits.VALUE)[2]
    assert batch.column("value").buffers()[2].address == pa.py_buffer(data).address


rows = st.lists(st.tuples(cells, st.binary(max_size=20), headers), min_size=1, max_size=30)


@settings(max_examples=60)
@given(rows=rows, lead=st.integers(0, 20), large=st.booleans())
def test_written_rows_come_out_of_their_frame(rows, lead: int, large: bool) -> None:
    """Slices of batches as well: their buffers begin anywhere."""
    binary = pa.large_binary() if large else pa.binary()
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    filler = [(b"filler", b"filler", [("f", b"f"), ("g", None)])] * lead
    columns = {
        "key": pa.array([row[0] for row in filler + rows], binary),
        "value": pa.array([row[1] for row in filler + rows], binary),
        "headers": pa.array(
            [
                None if row[2] is None else [{"key": k, "value": v} for k, v in row[2]]
                for row in filler + rows
            ],
            kind,
        ),
    }
    sliced = {name: column.slice(lead) for name, column in columns.items()}
    frame = ColumnFrame(_frame(sliced, len(rows), by_key=False))
    found = messages_of(frame, "")
    assert [m.key for m in found] == [row[0] for row in rows]
    assert [m.value for m in found] == [row[1] for row in rows]
    assert headers_of(frame) == [row[2] for row in rows]


def test_a_header_without_a_name_is_refused() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    with pytest.raises(ValueError, match="null"):
        frames.header_buffers(pa.array([[{"key": None, "value": b""}]], kind))
    with pytest.raises(ValueError, match="null"):
        frames.header_buffers(pa.array([[None]], kind))
