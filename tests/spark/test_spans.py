"""One trace crosses Spark: a message that a query reads from a stream and writes to a queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest
from pyspark.sql import SparkSession

from tests.collector import CONTEXT, PARENT, TRACE, Collector
from tests.forked_nodes import ForkedCluster
from tests.interop.helpers import eventually
from tests.ports import cluster_ports
from tests.spark.cluster import Broker


@pytest.fixture
def collector() -> Iterator[Collector]:
    with closing(Collector()) as made:
        yield made


@pytest.fixture
def traced(collector: Collector, tmp_path: Path) -> Iterator[Broker]:
    """A cluster whose nodes send spans."""
    with ForkedCluster(tmp_path, 3, cluster_ports(__name__), collector.settings) as cluster:
        cluster.wait_ready()
        made = Broker(cluster)
        yield made
        made.client.close()


@pytest.mark.cluster
def test_one_trace_crosses_spark(
    spark: SparkSession, traced: Broker, collector: Collector, tmp_path: Path
) -> None:
    source, target = traced.declare("stream"), traced.declare("quorum")
    with traced.channel() as channel:
        channel.confirm_delivery()
        properties = pika.BasicProperties(headers={"traceparent": CONTEXT, "tracestate": "a=1"})
        channel.basic_publish("", source, b"x", properties)
    rows = spark.readStream.format("convoymq").options(
        servers=traced.servers, subscribe=source, includeHeaders="true", startingOffsets="earliest"
    )
    query = (
        rows.load()
        .select("value", "headers")
        .writeStream.format("convoymq_queue")
        .options(servers=traced.servers, queue=target, checkpointLocation=str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with traced.channel() as channel:
        method, properties, body = channel.basic_get(target)
        channel.basic_ack(method.delivery_tag)
        assert (body, properties.headers["traceparent"]) == (b"x", CONTEXT)
        eventually(lambda: bool(collector.named(f"settle {target}")))
    names = {span.name for _, span in collector.spans}
    publish = "publish amq.default"
    assert names == {publish, f"deliver {source}", f"deliver {target}", f"settle {target}"}
    assert len(collector.named(publish)) == 2, "that of the publisher, and that of Spark"
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    children = [span for _, span in collector.spans if not span.name.startswith("settle")]
    assert {span.parent_span_id.hex() for span in children} == {PARENT}
    assert {span.trace_state for span in children} == {"a=1"}
