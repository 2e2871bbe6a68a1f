"""Spans of messages that cross nodes, at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import json
import struct
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika  # type: ignore[import-untyped]
import pytest
from benchmarks.systems import connect

from convoymq.cli.cluster import offsets
from convoymq.client import Client, ClientConfig
from convoymq.client.rows import texts_of
from convoymq.client.topic_consumer import TopicConsumer, TopicDelivery
from convoymq.edges.amqp10.performatives import Transfer
from convoymq.kernels.column_frame import build_frame
from convoymq.kernels.columns import HEADERS, VALUE
from convoymq.messages.amqp10.values import Described, ULong, encode
from tests.clusters import RunningCluster, serving_cluster
from tests.collector import CONTEXT, PARENT, TRACE, Collector
from tests.interop.amqp10.frame_client import OUT, FrameClient, message
from tests.interop.helpers import Inbox, eventually
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

HTTP, METRICS = 0, 1
LATER = "00-4bf92f3577b34da6f3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with closing(Collector()) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    settings = collector.settings | {"otlp.sampling": "0.9"}
    directory: Path = tmp_path_factory.mktemp("spans")
    port = cluster_ports(__name__)
    with serving_cluster(directory, port, settings):
        uris = [f"amqp://guest:guest@127.0.0.1:{port + each}" for each in range(3)]
        yield RunningCluster("convoy", uris)


def ask(
    cluster: RunningCluster, place: int, path: str, body: object = None, method: str = "POST"
) -> str:
    """Asks the first node: a port by its place in `offsets`."""
    base = urlsplit(cluster.uris[0]).port or 0
    request = urllib.request.Request(
        f"http://127.0.0.1:{base + offsets(base)[place]}/{path}",
        data=None if body is None else json.dumps(body).encode(),
        method="GET" if body is None else method,
        headers={"authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def declare(cluster: RunningCluster, name: str) -> None:
    with closing(connect(cluster.uris[0])) as connection:
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})


def carrying(context: str) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"traceparent": context, "tracestate": "rojo=1"})


def rows(values: list[bytes]) -> bytes:
    """Rows that have the context as a header."""
    count = len(values)
    counts = struct.pack(f"<{count + 1}i", *range(count + 1))
    names, contexts = texts_of([b"traceparent"] * count), texts_of([CONTEXT.encode()] * count)
    buffers = [*texts_of(values), b"", counts, *names[1:], *contexts]
    return build_frame(VALUE | HEADERS, count, 0, count, buffers)


def client_of(cluster: RunningCluster, node: int = 0) -> Client:
    """A client of the columnar protocol."""
    address = f"127.0.0.1:{urlsplit(cluster.uris[node]).port}"
    return Client(ClientConfig((address,), spread=False, timeout=PATIENCE_S))


def protocols(collector: Collector) -> set[str]:
    return {attributes_of(span)["network.protocol.name"] for _, span in collector.spans}


def attributes_of(span: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


@pytest.mark.moves("convoy_spans_sent_total")
def test_a_message_that_crosses_nodes_is_one_trace(
    cluster: RunningCluster, collector: Collector, observed: Observed
) -> None:
    observed.exposition(ask(cluster, METRICS, "metrics"))
    with connect(cluster.uris[0]) as first, connect(cluster.uris[2]) as third:
        channel, other = first.channel(), third.channel()
        channel.confirm_delivery()
        channel.queue_declare("spans", durable=True, arguments={"x-queue-type": "quorum"})
        inbox = Inbox(other, "spans")
        channel.basic_publish("", "spans", b"a", carrying(CONTEXT))
        # Not sampled by the client, out of the part of traces that is chosen, no context at all.
        channel.basic_publish("", "spans", b"b", carrying(CONTEXT[:-1] + "0"))
        channel.basic_publish("", "spans", b"c", carrying(LATER))
        channel.basic_publish("", "spans", b"d", carrying("00-zz"))
        channel.basic_publish("", "spans", b"e")
        inbox.wait(5)
        other.basic_ack(0, multiple=True)
        # Each node sends its own.
        eventually(lambda: len(collector.spans) >= 3, connection=third)
    (publisher, publish), *_ = collector.named("publish amq.default")
    (consumer, deliver), *_ = collector.named("deliver spans")
    (_, settle), *_ = collector.named("settle spans")
    assert len(collector.spans) == 3
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    assert publish.parent_span_id.hex() == deliver.parent_span_id.hex() == PARENT
    assert settle.parent_span_id == deliver.span_id
    assert publisher != consumer
    assert publish.trace_state == "rojo=1"
    assert publish.start_time_unix_nano <= publish.end_time_unix_nano
    assert attributes_of(publish)["messaging.rabbitmq.destination.routing_key"] == "spans"
    assert attributes_of(settle)["convoymq.outcome"] == "accepted"
    observed.exposition(ask(cluster, METRICS, "metrics"))


def test_http_and_rejections_have_spans(cluster: RunningCluster, collector: Collector) -> None:
    collector.spans.clear()
    declare(cluster, "spans.http")
    body = {
        "routing_key": "spans.http",
        "payload": "a",
        "payload_encoding": "string",
        "properties": {"headers": {"traceparent": CONTEXT}},
    }
    ask(cluster, HTTP, "api/exchanges/%2F/amq.default/publish", body)
    taken = {"count": 1, "ackmode": "reject_requeue_true", "encoding": "auto"}
    ask(cluster, HTTP, "api/queues/%2F/spans.http/get", taken)
    with connect(cluster.uris[1]) as connection:
        channel = connection.channel()
        method, _, _ = channel.basic_get("spans.http")
        channel.basic_nack(method.delivery_tag, requeue=False)
        eventually(lambda: len(collector.spans) >= 5, connection=connection)
    assert len(collector.named("publish amq.default")) == 1
    assert len(collector.named("deliver spans.http")) == 2
    settled = [attributes_of(span) for _, span in collector.named("settle spans.http")]
    assert {each["convoymq.outcome"] for each in settled} == {"failed", "rejected"}


def test_messages_of_amqp_10_have_spans(cluster: RunningCluster, collector: Collector) -> None:
    collector.spans.clear()
    queue = "spans.10"
    declare(cluster, queue)
    context = encode(Described(ULong(0x74), {"traceparent": CONTEXT}))
    with closing(FrameClient(cluster, 0, "out")) as publisher:
        publisher.publish_to(queue)
        publisher.send(
            Transfer(handle=OUT, delivery_id=0, delivery_tag=b"a", settled=False),
            context + message(b"a"),
        )
        assert publisher.settled(1) == 1
        with closing(FrameClient(cluster, 2, "in")) as consumer:
            consumer.receive(queue, 10)
            (transfer, _), *_ = consumer.deliveries(1)
            assert transfer.delivery_id is not None
            consumer.accept(transfer.delivery_id, transfer.delivery_id)
            eventually(lambda: len(collector.spans) == 3)
    names = {"publish amq.default", f"deliver {queue}", f"settle {queue}"}
    assert {span.name for _, span in collector.spans} == names
    versions = {attributes_of(span)["network.protocol.version"] for _, span in collector.spans}
    assert versions == {"1.0"}


@pytest.mark.parametrize("local", [False, True])
def test_rows_have_spans(cluster: RunningCluster, collector: Collector, local: bool) -> None:
    collector.spans.clear()
    stream = f"spans.rows.{local}"
    with closing(connect(cluster.uris[0])) as connection:
        arguments = {"x-queue-type": "stream"}
        connection.channel().queue_declare(stream, durable=True, arguments=arguments)
    with client_of(cluster) as client, client_of(cluster, 2) as reader:
        client.produce(rows([b"a", b"b"]), stream=stream)
        eventually(lambda: len(collector.named("publish amq.default")) == 2)
        assert reader.fetch(stream, 0, end=2, wait_ms=5000, local=local).frame.rows == 2
        eventually(lambda: len(collector.named(f"deliver {stream}")) == 2)
    assert protocols(collector) == {"columnar"}
    assert {span.parent_span_id.hex() for _, span in collector.spans} == {PARENT}
    (publisher, publish), *_ = collector.named("publish amq.default")
    assert publisher != collector.named(f"deliver {stream}")[0][0]
    assert attributes_of(publish)["messaging.rabbitmq.destination.routing_key"] == stream
    assert not publish.status.code


def test_messages_of_a_group_are_settled(cluster: RunningCluster, collector: Collector) -> None:
    topic, group = "spans.topic", "spans.topic/g"
    ask(cluster, HTTP, f"api/topics/%2F/{topic}", {"partitions": 1}, method="PUT")
    collector.spans.clear()
    with closing(connect(cluster.uris[0])) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for body in (b"good", b"bad"):
            channel.basic_publish(topic, body.decode(), body, carrying(CONTEXT))

    def handle(ctx: TopicDelivery) -> None:
        if ctx.body == b"bad":
            raise ValueError("bad")

    with client_of(cluster, 1) as client:
        consumer = TopicConsumer(client, topic, "g", retries=0)
        thread = threading.Thread(target=consumer.run, args=(handle,), daemon=True)
        thread.start()
        eventually(lambda: len(collector.named(f"settle {group}")) >= 2)
        consumer.close()
        thread.join(PATIENCE_S)
    outcomes = {
        attributes_of(span)["convoymq.outcome"] for _, span in collector.named(f"settle {group}")
    }
    assert outcomes == {"accepted", "failed"}
    delivered = {span.span_id for _, span in collector.named(f"deliver {group}")}
    assert {span.parent_span_id for _, span in collector.named(f"settle {group}")} <= delivered
