"""Writes to streams, queues and exchanges against a broker in memory."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from convoymq.client.errors import AccessRefused, MaybeProduced
from convoymq.client.results import ProduceResult
from convoymq.spark import writer
from convoymq.spark.errors import OptionError, SchemaError, SourceError
from convoymq.spark.properties import decode_properties
from convoymq.spark.schema import HEADERS
from tests.spark.fakes import FakeBroker, FakeClient
from tests.spark.support import batch_rows, numbered, queue_source, stream_source

VALUE = StructType([StructField("value", BinaryType())])


class Context:
    """`TaskContext` of a streaming task."""

    def __init__(self, query: str | None, batch: int, partition: int = 0) -> None:
        self._properties = {
            writer.QUERY_ID_PROPERTY: query,
            writer.BATCH_ID_PROPERTY: str(batch),
        }
        self._partition = partition

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        return self._properties.get(name)

    def partitionId(self) -> int:  # noqa: N802
        return self._partition


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    def enter(*arguments: Any) -> None:
        monkeypatch.setattr(
            writer.TaskContext, "get", classmethod(lambda _cls: Context(*arguments))
        )

    return enter


def batch_of(values: list[bytes | None], **columns: list[Any]) -> pa.RecordBatch:
    arrays = {"value": pa.array(values, pa.binary())}
    arrays |= {name: pa.array(column) for name, column in columns.items()}
    return pa.RecordBatch.from_pydict(arrays)


def write(made: Any, *batches: pa.RecordBatch) -> writer.TaskResult:
    """As a task does: from what was pickled."""
    rows: Iterator[pa.RecordBatch] = iter(batches)
    result: writer.TaskResult = pickle.loads(pickle.dumps(made)).write(rows)
    return result


def schema(**types: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def test_rows_arrive_in_order_in_requests_of_bounded_size(broker: FakeBroker) -> None:
    broker.stream("s")
    options = {"convoymq.produce.maxRows": 4}
    made = stream_source(topic="s", **options).writer(VALUE, False)
    result = write(made, batch_of(numbered(0, 10)), batch_of([]), batch_of(numbered(10, 13)))
    assert (result.rows, result.duplicates, result.unroutable) == (13, 0, 0)
    assert [row["value"] for row in batch_rows(stream_source(subscribe="s"))] == numbered(0, 13)
    assert broker.calls.count("produce") == 4


def test_requests_are_bounded_by_bytes(broker: FakeBroker) -> None:
    broker.stream("s")
    options = {"convoymq.produce.maxBytes": 1000}
    write(stream_source(topic="s", **options).writer(VALUE, False), batch_of([bytes(300)] * 7))
    assert broker.calls.count("produce") == 3


def test_what_is_a_little_too_much_goes_in_parts_alike(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.stream("s")
    counts: list[int] = []
    produce = FakeClient.produce

    def counting(self: FakeClient, *args: Any, **named: Any) -> ProduceResult:
        counts.append((result := produce(self, *args, **named)).count)
        return result

    monkeypatch.setattr(FakeClient, "produce", counting)
    for options in ({"convoymq.produce.maxRows": 9}, {"convoymq.produce.maxBytes": 1000}):
        made = stream_source(topic="s", **options).writer(VALUE, False)
        write(made, batch_of([bytes(100)] * 10))
    assert counts == [5, 5, 5, 5]


def test_all_columns_of_kafkas_sink(broker: FakeBroker) -> None:
    broker.stream("s")
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(["k", None]),
            "value": pa.array(["v", None]),
            "headers": pa.array(
                [[{"key": "h", "value": b"1"}], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
            "timestampType": pa.array([1, 1]),
        }
    )
    made = stream_source(topic="s").writer(
        schema(key=StringType(), value=StringType(), headers=HEADERS, timestampType=IntegerType()),
        False,
    )
    write(made, batch)
    rows = batch_rows(stream_source(subscribe="s", includeHeaders="true"))
    assert [(r["key"], r["value"], r["headers"]) for r in rows] == [
        (b"k", b"v", [{"key": "h", "value": b"1"}]),
        (None, None, None),
    ]


def test_the_topic_column_spreads_rows_in_their_order(broker: FakeBroker) -> None:
    broker.stream("a")
    broker.stream("b")
    made = stream_source().writer(schema(topic=StringType(), value=BinaryType()), False)
    topics = ["a", "b", "a", "a", "b"]
    write(made, batch_of(numbered(0, 5), topic=topics), batch_of(numbered(5, 6), topic=["b"]))
    assert [m.value for m in broker.streams["a"].messages] == [b"0", b"2", b"3"]
    assert [m.value for m in broker.streams["b"].messages] == [b"1", b"4", b"5"]
    with pytest.raises(SourceError, match="topic of a row is null"):
        write(made, batch_of([b"x"], topic=pa.array([None], pa.string())))


def test_a_task_that_runs_again_adds_nothing(broker: FakeBroker) -> None:
    stream = broker.stream("s")
    made = stream_source(topic="s", **{"convoymq.produce.maxRows": 3}).writer(VALUE, False)
    batches = [batch_of(numbered(i, i + 7)) for i in range(0, 21, 7)]
    write(made, *batches[:2])
    result = write(made, *batches)
    assert (result.rows, result.duplicates) == (21, 14)
    assert [m.value for m in stream.messages] == numbered(0, 21)


@pytest.mark.parametrize("given", [False, True])
def test_a_repeat_in_another_order_costs_duplicates_and_no_rows(
    broker: FakeBroker, in_task: Any, given: bool
) -> None:
    """With and without ids of the user's own: after a shuffle a repeated micro-batch comes in
    another order, its rows in other tasks; and a first part of it was written before."""
    stream = broker.stream("s")
    kind = schema(value=BinaryType(), message_id=StringType()) if given else VALUE

    def micro(batch_id: int, task: int, rows: list[int]) -> None:
        in_task("query", batch_id, task)
        ids = {"message_id": [str(row) for row in rows]} if given else {}
        made = stream_source(topic="s", **{"convoymq.produce.maxRows": 10}).stream_writer(
            kind, False
        )
        write(made, batch_of([b"%d" % row for row in rows], **ids))

    rows = list(range(200))
    micro(4, 0, rows[:100])
    random.Random(7).shuffle(rows)
    micro(4, 0, rows[:100])
    micro(4, 1, rows[100:])
    assert {m.value for m in stream.messages} == set(numbered(0, 200))
    before = len(stream.messages)
    micro(4, 0, rows[:100])
    micro(4, 1, rows[100:])
    assert len(stream.messages) == before, "the same order adds nothing"


def test_a_checkpoint_that_was_put_back_loses_nothing(broker: FakeBroker, in_task: Any) -> None:
    """Its batches have numbers that were written before, but other rows."""
    stream = broker.stream("s")
    for batch_id, first in ((0, 0), (1, 5), (2, 10), (1, 100), (1, 100), (2, 105)):
        in_task("query", batch_id)
        made = stream_source(topic="s").stream_writer(VALUE, False)
        write(made, batch_of(numbered(first, first + 5)))
    assert [m.value for m in stream.messages] == numbered(0, 15) + numbered(100, 110)


def test_two_batch_writes_are_two_unless_they_have_one_name(broker: FakeBroker) -> None:
    stream = broker.stream("s")
    for _ in range(2):
        write(stream_source(topic="s").writer(VALUE, False), batch_of([b"x"]))
    assert len(stream.messages) == 2
    for _ in range(2):
        write(stream_source(topic="s", producerName="job").writer(VALUE, False), batch_of([b"y"]))
    assert len(stream.messages) == 3


def test_a_repeated_micro_batch_adds_nothing_and_a_zombie_neither(
    broker: FakeBroker, in_task: Any
) -> None:
    stream = broker.stream("s")

    def micro(batch_id: int, values: list[bytes], task: int = 0) -> writer.TaskResult:
        in_task("query", batch_id, task)
        return write(stream_source(topic="s").stream_writer(VALUE, False), batch_of(values))

    micro(0, numbered(0, 5))
    micro(0, numbered(0, 5))
    micro(1, numbered(5, 7))
    assert micro(0, numbered(0, 5)).duplicates == 5
    assert micro(1, numbered(7, 9), task=1).duplicates == 0
    micro(2, numbered(9, 10))
    assert [m.value for m in stream.messages] == numbered(0, 10)
    assert set(stream.written) == {"query:0", "query:1"}
    assert list(stream.written["query:0"].micro_batches) == [0, 1, 2]


def test_a_task_that_does_not_know_its_query_is_refused(broker: FakeBroker, in_task: Any) -> None:
    broker.stream("s")
    in_task(None, 0)
    with pytest.raises(SourceError, match="did not tell"):
        write(stream_source(topic="s").stream_writer(VALUE, False), batch_of([b"x"]))


def test_messages_to_a_queue_have_ids(broker: FakeBroker, in_task: Any) -> None:
    queue = broker.queue("q")
    in_task("query", 7, 3)
    made = queue_source(queue="q").stream_writer(VALUE, False)
    write(made, batch_of(numbered(0, 3)), batch_of(numbered(3, 4)))
    found = [decode_properties(m.properties) for m in queue.ready]
    assert [p["message_id"] for p in found] == [f"query/7/3/{i:010d}" for i in range(4)]
    assert {p["delivery_mode"] for p in found} == {2}


def test_ids_of_the_users_own(broker: FakeBroker) -> None:
    queue = broker.queue("q")
    kind = schema(value=BinaryType(), message_id=StringType())
    made = queue_source(queue="q").writer(kind, False)
    write(made, batch_of([b"a", b"b"], message_id=["x", None]))
    found = [decode_properties(m.properties) for m in queue.ready]
    assert [p.get("message_id") for p in found] == ["x", None]
    assert all(p["delivery_mode"] == 2 for p in found)
    with pytest.raises(SourceError, match="255 are allowed"):
        write(made, batch_of([b"a"], message_id=["x" * 256]))


def test_at_least_once_where_repeats_cannot_be_told(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = broker.queue("q")
    produce = FakeClient.produce
    answers = iter([False, True])

    def losing(self: FakeClient, frame: bytes, **fields: Any) -> Any:
        assert fields["producer"] is None
        done = produce(self, frame, **fields)
        if not next(answers):
            raise MaybeProduced("the connection was lost before the answer")
        return done

    monkeypatch.setattr(FakeClient, "produce", losing)
    made = queue_source(queue="q", idempotent="false").writer(VALUE, False)
    assert write(made, batch_of([b"a"])).rows == 1
    assert [m.value for m in queue.ready] == [b"a", b"a"]


def test_exchanges_with_one_key_or_a_key_for_each_row(broker: FakeBroker) -> None:
    for name in ("a", "b"):
        broker.queue(name)
    write(queue_source(exchange="e", routingKey="a").writer(VALUE, False), batch_of([b"1"]))
    kind = schema(value=BinaryType(), routing_key=StringType())
    by_row = queue_source(exchange="e").writer(kind, False)
    write(by_row, batch_of([b"2", b"3"], routing_key=["b", "a"]))
    assert [m.value for m in broker.queues["a"].ready] == [b"1", b"3"]
    assert [m.value for m in broker.queues["b"].ready] == [b"2"]
    with pytest.raises(SourceError, match="routing_key of a row is null"):
        write(by_row, batch_of([b"2"], routing_key=pa.array([None], pa.string())))


def test_messages_without_a_queue_fail_the_task_unless_they_may_drop(broker: FakeBroker) -> None:
    options = {"exchange": "e", "routingKey": "nowhere"}
    with pytest.raises(SourceError, match=r"no queue for routing key 'nowhere'; .*onUnroutable"):
        write(queue_source(**options).writer(VALUE, False), batch_of([b"1", b"2"]))
    dropping = queue_source(onUnroutable="drop", **options).writer(VALUE, False)
    assert write(dropping, batch_of([b"1", b"2"])).unroutable == 2


def test_a_request_with_a_row_without_a_queue_is_not_published_in_part(broker: FakeBroker) -> None:
    """Else the row would be taken for a repeat when its queue is there."""
    kind = schema(value=BinaryType(), routing_key=StringType())
    rows = batch_of([b"1", b"2", b"3"], routing_key=["a", "b", "a"])
    made = queue_source(exchange="e", producerName="p").writer(kind, False)
    broker.queue("a")
    with pytest.raises(SourceError, match="nothing was published"):
        write(made, rows)
    assert not broker.queues["a"].ready
    broker.queue("b")
    assert write(made, rows).rows == 3
    assert [message.value for message in broker.queues["a"].ready] == [b"1", b"3"]
    assert [message.value for message in broker.queues["b"].ready] == [b"2"]


def test_what_can_be_known_is_refused_before_a_row_is_written(broker: FakeBroker) -> None:
    broker.stream("flights")
    broker.queue("orders")
    stream = stream_source(topic="flights")
    for kind, text in (
        (schema(valeu=BinaryType()), "no column value"),
        (schema(value=IntegerType()), "value must be string or binary, not int"),
        (schema(value=BinaryType(), key=IntegerType()), "key must be"),
        (schema(value=BinaryType(), headers=StringType()), "headers must be array"),
    ):
        with pytest.raises(SchemaError, match=text):
            stream.writer(kind, False)
    with pytest.raises(OptionError, match="append"):
        stream.writer(VALUE, True)
    with pytest.raises(SchemaError, match="option topic"):
        stream_source().writer(VALUE, False)
    with pytest.raises(SourceError, match="orders is a quorum queue"):
        stream_source(topic="orders").writer(VALUE, False)
    with pytest.raises(SchemaError, match="no column routing_key"):
        queue_source(exchange="e").writer(VALUE, False)


def test_a_refusal_reaches_the_task(broker: FakeBroker) -> None:
    broker.stream("s")
    broker.refuse_writes.add("s")
    made = stream_source(topic="s").writer(VALUE, False)
    with pytest.raises(AccessRefused, match="refused"):
        write(made, batch_of([b"x"]))
