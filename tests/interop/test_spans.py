"""Spans of messages that cross nodes, at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika  # type: ignore[import-untyped]
import pytest
from benchmarks.systems import connect
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from convoymq.cli.cluster import offsets
from convoymq.edges.amqp10.performatives import Transfer
from convoymq.messages.amqp10.values import Described, ULong, encode
from tests.clusters import RunningCluster, serving_cluster
from tests.interop.amqp10.frame_client import OUT, FrameClient, message
from tests.interop.helpers import Inbox, eventually
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

HTTP, METRICS = 0, 1
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{PARENT}-01"
LATER = "00-4bf92f3577b34da6f3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collector:
    """Takes spans by OTLP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Node and span."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Encoding"] == "gzip"
                collector.take(self.path, self.headers.get("x-token"), gzip.decompress(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, token: str | None, body: bytes) -> None:
        """Keeps the spans of a request."""
        assert (path, token) == ("/v1/traces", "secret")
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {each.key: each.value.string_value for each in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [(about["service.instance.id"], span) for span in scope.spans]

    def named(self, name: str) -> list[tuple[str, Any]]:
        """Returns the spans of a name."""
        return [each for each in self.spans if each[1].name == name]

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with closing(Collector()) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    settings = {
        "otlp.endpoint": f"http://127.0.0.1:{collector.port}/v1/traces",
        "otlp.headers": "x-token=secret",
        "otlp.interval": "50",
        "otlp.sampling": "0.9",
    }
    directory: Path = tmp_path_factory.mktemp("spans")
    port = cluster_ports(__name__)
    with serving_cluster(directory, port, settings):
        uris = [f"amqp://guest:guest@127.0.0.1:{port + each}" for each in range(3)]
        yield RunningCluster("convoy", uris)


def ask(cluster: RunningCluster, place: int, path: str, body: object = None) -> str:
    """Asks the first node: a port by its place in `offsets`."""
    base = urlsplit(cluster.uris[0]).port or 0
    request = urllib.request.Request(
        f"http://127.0.0.1:{base + offsets(base)[place]}/{path}",
        data=None if body is None else json.dumps(body).encode(),
        method="GET" if body is None else "POST",
        headers={"authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def declare(cluster: RunningCluster, name: str) -> None:
    with closing(connect(cluster.uris[0])) as connection:
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})


def carrying(context: str) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"traceparent": context, "tracestate": "rojo=1"})


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
