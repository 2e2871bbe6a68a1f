"""Goal: whatever happens and whenever, each message reaches the sink once. Method: random histories
of publishing, batches, crashes and restarts, in the engine's order of calls; then a count."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StructField, StructType

from convoymq.spark import clients, writer
from tests.spark.fakes import FakeBroker, FakeClient
from tests.spark.support import Query, numbered, queue_source, stream_source

VALUE = StructType([StructField("value", BinaryType())])

publishing = st.tuples(st.just("publish"), st.integers(1, 9))
batch = st.tuples(st.just("batch"), st.sampled_from(["", "planned", "sunk"]))
restart = st.tuples(st.just("restart"), st.booleans())
histories = st.lists(st.one_of(publishing, batch, batch, restart), max_size=25)
options = st.fixed_dictionaries(
    {
        "maxOffsetsPerTrigger": st.integers(1, 8),
        "minPartitions": st.integers(1, 3),
        "convoymq.fetch.maxRows": st.integers(1, 5),
    }
)


def run(history: list[tuple[str, Any]], query: Query, publish: Any) -> int:
    """Carries out a history and brings it to its end. Returns how many messages there were."""
    count = 3
    publish(numbered(0, count))
    query.start()
    for what, how in history:
        if what == "publish":
            publish(numbered(count, count + how))
            count += how
        elif what == "batch":
            if query.step(crash=how) and how:
                query.start()
        else:
            query.start(available_now=how)
    query.start()
    query.run()
    query.start(available_now=True)
    query.run()
    query.die()
    return count


@settings(max_examples=150)
@given(history=histories, chosen=options)
def test_streams(history: list[tuple[str, Any]], chosen: dict[str, Any]) -> None:
    broker = FakeBroker()
    stream = broker.stream("s")
    data_source = stream_source(
        subscribe="s", startingOffsets="earliest", **{"convoymq.pollInterval": "0ms"}, **chosen
    )
    with mock.patch.object(clients, "connect", return_value=FakeClient(broker)):
        query = Query(lambda: data_source.stream_reader(data_source.schema()))
        count = run(history, query, lambda values: stream.add(*values))
    assert query.values == numbered(0, count)


@settings(max_examples=150)
@given(history=histories, chosen=options)
def test_queues_in_reservations(history: list[tuple[str, Any]], chosen: dict[str, Any]) -> None:
    broker = FakeBroker()
    queue = broker.queue("q")
    data_source = queue_source(queue="q", **{"convoymq.pollInterval": "0ms"}, **chosen)
    with mock.patch.object(clients, "connect", return_value=FakeClient(broker)):
        query = Query(lambda: data_source.stream_reader(data_source.schema()))
        count = run(history, query, lambda values: queue.add(*values))
    assert query.values == numbered(0, count)
    assert not queue.ready
    assert all(
        reservation.first == reservation.next for reservation in queue.reservations.by_name.values()
    )


@settings(max_examples=80)
@given(history=histories, chosen=options)
def test_copies_into_a_stream(history: list[tuple[str, Any]], chosen: dict[str, Any]) -> None:
    """The sink is written in every attempt: what is repeated must not be added again."""
    broker = FakeBroker()
    source, target = broker.stream("s"), broker.stream("t")
    data_source = stream_source(
        subscribe="s", startingOffsets="earliest", **{"convoymq.pollInterval": "0ms"}, **chosen
    )
    sink = stream_source(topic="t", **{"convoymq.produce.maxRows": 3})

    class Copy(Query):
        def _run_batch(self, *, commit: bool = True) -> None:
            number = self.commits
            super()._run_batch(commit=commit)
            context = mock.Mock()
            context.partitionId.return_value = 0
            context.getLocalProperty.side_effect = {
                writer.QUERY_ID_PROPERTY: "query",
                writer.BATCH_ID_PROPERTY: str(number),
            }.get
            values = pa.array([row["value"] for row in self.sink[number]], pa.binary())
            rows = pa.RecordBatch.from_pydict({"value": values})
            with mock.patch.object(writer.TaskContext, "get", return_value=context):
                sink.stream_writer(VALUE, False).write(iter([rows]))

    with mock.patch.object(clients, "connect", return_value=FakeClient(broker)):
        query = Copy(lambda: data_source.stream_reader(data_source.schema()))
        count = run(history, query, lambda values: source.add(*values))
    assert [message.value for message in target.messages] == numbered(0, count)
