"""Spans: sampling by trace id, OTLP requests, a collector that is away, bounds."""

from __future__ import annotations

import struct
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from structlog.testing import capture_logs

from convoymq.broker.spans import TEMPLATES_MAX, SpanKind, SpanRow, Spans, bound_of
from convoymq.client.rows import texts_of
from convoymq.edges.http.exposition import Text
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.column_records import encode_enqueue
from convoymq.kernels.columns import HEADERS
from convoymq.kernels.trace_contexts import find_context, find_produced
from convoymq.messages.amqp091 import ContentHeader, Properties
from convoymq.messages.record import with_properties
from convoymq.model.config import ConfigError, OtlpConfig
from convoymq.model.tables import Field, Table
from tests.patience import PATIENCE_S, pause_s
from tests.provocation import Observed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = f"00-{TRACE}-00f067aa0ba902b7-01"
KIND = SpanKind("publish", "x", "/", "amqp 0.9.1")


def content_with(headers: dict[str, Any] | None) -> bytes:
    table = None if headers is None else Table.of(headers)
    empty = bytes.fromhex("0200000000000e003c00000000000000000000 0000ce".replace(" ", ""))
    return with_properties(empty, ContentHeader(body_size=0, properties=Properties(headers=table)))


def found(context: object, ratio: float = 1.0) -> bool:
    return find_context(content_with({"a": 1, "traceparent": context}), bound_of(ratio)) is not None


@pytest.mark.parametrize(
    "context",
    [
        CONTEXT[:-1] + "0",
        CONTEXT[:-1] + "g",
        CONTEXT[:-1],
        CONTEXT + "0",
        CONTEXT.upper(),
        CONTEXT.replace("-", "_"),
        "ff" + CONTEXT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        "",
        7,
        None,
        Field("F", Table.of({"traceparent": CONTEXT})),
    ],
)
def test_what_is_no_sampled_context_is_none(context: object) -> None:
    assert not found(context)


def test_a_name_within_a_value_is_no_context() -> None:
    """What looks like the field stands in a value before it, or alone."""
    field = b"\x0btraceparentS" + (55).to_bytes(4, "big")
    text = (field + CONTEXT.encode()).decode()
    assert find_context(content_with({"a": text}), bound_of(1)) is None
    other = (field + CONTEXT[:-1].encode() + b"0").decode()
    assert find_context(content_with({"a": other, "traceparent": CONTEXT}), bound_of(1))
    assert find_context(content_with({"a": text, "traceparent": other}), bound_of(1)) is None


def test_a_context_comes_with_its_state() -> None:
    below = bound_of(1)
    both = content_with({"tracestate": "a=1", "traceparent": CONTEXT})
    assert find_context(both, below) == (CONTEXT.encode(), b"a=1")
    long = content_with({"tracestate": "a" * 513, "traceparent": CONTEXT[:-1] + "3"})
    assert find_context(long, below) == (CONTEXT[:-1].encode() + b"3", b"")
    assert find_context(content_with(None), below) is None
    assert find_context(b"", below) is None


@pytest.mark.parametrize("name", [b"", b"x" * 255])
def test_contexts_of_rows_come_with_the_names_of_their_messages(name: bytes) -> None:
    counts, below = [0, 0, 1, 3], bound_of(1)
    headers = [(b"traceparent", CONTEXT.encode()), (b"a", b"b"), (b"traceparent", CONTEXT.encode())]
    names, values = zip(*headers, strict=True)
    buffers = [b"", struct.pack("<4i", *counts), *texts_of(names)[1:], *texts_of(values)]
    columns = ColumnFrame(build_frame(HEADERS, 3, 0, 3, buffers), 1 << 20)
    body, rows, position = encode_enqueue(columns, 0, 3, name, b"key")
    expected = bytes((len(name),)) + name + b"\x03key"
    context = CONTEXT.encode(), b""
    assert find_produced(body, rows, position, below) == [(expected, context)] * 2
    assert find_produced(body, rows, position, bound_of(0)) == []
    for wrong in (position + 4, 0, len(body) + 64):
        with pytest.raises(ValueError, match="outside their command"):
            find_produced(body, len(body), wrong, below)


@given(low=st.integers(1, (1 << 64) - 1), ratio=st.floats(0, 1))
def test_sampling_is_a_comparison_of_the_lower_half(low: int, ratio: float) -> None:
    expected = ratio >= 1 or low < int(ratio * (1 << 64))
    assert found(f"00-{'a' * 16}{low:016x}-00f067aa0ba902b7-01", ratio) is expected


def row(**more: Any) -> SpanRow:
    return SpanRow(KIND, b"t" * 16, b"s" * 8, b"p" * 8, b"", 1, 2, **more)


def test_a_request_has_resource_and_spans() -> None:
    spans = Spans(OtlpConfig(endpoint="http://127.0.0.1:9/"), "one", "0.4")
    kinds = [KIND._replace(destination=f"q{k}") for k in range(TEMPLATES_MAX + 1)]
    rows = [row(failed=True, routing_key=b"k")] + [row()._replace(kind=kind) for kind in kinds]
    request = ExportTraceServiceRequest.FromString(spans.encoded(rows))
    (group,) = request.resource_spans
    about = {each.key: each.value.string_value for each in group.resource.attributes}
    assert about["service.instance.id"] == "one"
    made = group.scope_spans[0].spans
    assert [span.name for span in made[1:]] == [f"publish {kind.destination}" for kind in kinds]
    assert made[0].status.code == made[0].status.STATUS_CODE_ERROR
    assert not made[1].status.code
    spans.close()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"otlp\.endpoint needs opentelemetry.*convoymq\[otlp\]"):
        Spans(OtlpConfig(endpoint="http://127.0.0.1:9/"), "one", "0.4")


@pytest.mark.provokes("spans.not_sent")
@pytest.mark.moves("convoy_spans_dropped_total")
def test_what_no_collector_takes_is_dropped_and_said_once(observed: Observed) -> None:
    config = OtlpConfig(endpoint="http://127.0.0.1:9/", queue_max=16, interval_ms=10)
    with capture_logs() as logged:
        spans = Spans(config, "one", "0.4")
        began = time.monotonic()
        for _ in range(3):
            render(spans)
            for _ in range(20):
                spans.add(row())
            while spans._rows:
                time.sleep(pause_s(began))
                assert time.monotonic() < began + PATIENCE_S
        while spans.dropped < 60:
            time.sleep(pause_s(began))
            assert time.monotonic() < began + PATIENCE_S
        render(spans)
        spans.close()
    assert [line["event"] for line in logged] == ["spans.not_sent"]
    assert (spans.sent, spans.dropped) == (0, 60)


def render(spans: Spans) -> None:
    text = Text({"convoy_spans_dropped_total": "Dropped"}, open_metrics=False)
    text.counter("convoy_spans_dropped_total", spans.dropped)
    text.render()
