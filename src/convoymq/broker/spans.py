"""Spans of the broker for OpenTelemetry: what became of sampled messages, sent by OTLP.

A span is a row of a bounded list until a thread of its own sends it: nothing waits for a collector.
What does not fit is dropped and counted. The thread makes bytes of rows by templates, because all
spans of a queue have the same name and attributes: see docs/adr/0228-spans-by-otlp.md.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from convoymq.model.config import ConfigError, OtlpConfig
from convoymq.model.late_imports import import_late

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

log = structlog.get_logger()

BATCH_SPANS = 512
"""Spans of one request."""
TRIES = 3
"""Number of times that one request is sent before its spans are dropped."""
TEMPLATES_MAX = 1024
TIMEOUT_S = 10.0
STOP_S = 2.0
_HALF = 16
_CONTENT = "application/x-protobuf"


class SpanKind(NamedTuple):
    """All that the spans of one queue or exchange have in common."""

    operation: str
    """`publish`, `deliver` or `settle`."""
    destination: str
    vhost: str
    protocol: str
    """Name and version, such as `amqp 1.0`."""
    outcome: str = ""


class SpanRow(NamedTuple):
    """One span."""

    kind: SpanKind
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    state: bytes
    began_ns: int
    ended_ns: int
    routing_key: bytes = b""
    failed: bool = False


_TYPES = {"publish": "send", "deliver": "receive", "settle": "settle"}
"""`messaging.operation.type` of OpenTelemetry's conventions."""


def bound_of(ratio: float) -> bytes:
    """Returns the characters below which the lower half of the id of a sampled trace lies."""
    if ratio >= 1:
        return b"g" * _HALF
    return f"{int(ratio * (1 << 64)):016x}".encode()


class Spans:
    """Spans of one node, and the thread that sends them.

    Args:
        node: names this node in spans.

    Raises:
        ConfigError: a package is missing.
    """

    def __init__(self, config: OtlpConfig, node: str, version: str) -> None:
        try:
            import_late("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        except ImportError as error:
            text = f"otlp.endpoint needs {error.name}: pip install 'convoymq[otlp]'"
            raise ConfigError(text) from None
        self.below = bound_of(config.sampling)
        self.sent = 0
        self.dropped = 0
        self._config = config
        self._resource = {
            "service.name": "convoymq",
            "service.version": version,
            "service.instance.id": node,
        }
        self._rows: deque[SpanRow] = deque()
        self._templates: dict[SpanKind, Span] = {}
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, row: SpanRow) -> None:
        """Sends a span, later."""
        if len(self._rows) >= self._config.queue_max:
            self.dropped += 1
        else:
            self._rows.append(row)

    def close(self) -> None:
        """Sends what is there, for a while."""
        self._stopping.set()
        self._thread.join(STOP_S)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(self._config.interval_ms / 1000):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        rows = self._rows
        while rows:
            batch = [rows.popleft() for _ in range(min(len(rows), BATCH_SPANS))]
            if self._send(self.encoded(batch)):
                self.sent += len(batch)
            else:
                self.dropped += len(batch)
                return

    def _send(self, body: bytes) -> bool:
        # Only here: most nodes send no spans.
        import gzip
        import urllib.request

        config, error = self._config, OSError("")
        headers = {"Content-Type": _CONTENT, "Content-Encoding": "gzip", **_headers_of(config)}
        request = urllib.request.Request(config.endpoint, gzip.compress(body, 1), headers)
        for tried in range(TRIES):
            if tried and self._stopping.wait(config.interval_ms / 1000):
                break
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    self._failing = False
                    return True
            except (OSError, ValueError) as found:
                error = OSError(str(found))
        if not self._failing:
            log.warning("spans.not_sent", endpoint=config.endpoint, reason=str(error))
        self._failing = True
        return False

    def encoded(self, rows: Sequence[SpanRow]) -> bytes:
        """Returns a request of OTLP with the spans."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        request = ExportTraceServiceRequest()
        group = request.resource_spans.add()
        for key, text in self._resource.items():
            group.resource.attributes.add(key=key).value.string_value = text
        scope = group.scope_spans.add()
        scope.scope.name = "convoymq"
        for row in rows:
            span = scope.spans.add()
            span.CopyFrom(self._template(row.kind))
            span.trace_id, span.span_id = row.trace_id, row.span_id
            span.parent_span_id = row.parent_id
            span.start_time_unix_nano, span.end_time_unix_nano = row.began_ns, row.ended_ns
            if row.state:
                span.trace_state = row.state.decode("latin-1")
            if row.routing_key:
                name = "messaging.rabbitmq.destination.routing_key"
                key = row.routing_key.decode("utf-8", "replace")
                span.attributes.add(key=name).value.string_value = key
            if row.failed:
                span.status.code = span.status.STATUS_CODE_ERROR
        made: bytes = request.SerializeToString()
        return made

    def _template(self, kind: SpanKind) -> Span:
        found = self._templates.get(kind)
        if found is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            found = self._templates[kind] = _template_of(kind)
        return found


def _headers_of(config: OtlpConfig) -> Mapping[str, str]:
    return dict(each.split("=", 1) for each in config.headers)


def _template_of(kind: SpanKind) -> Span:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    made = Span(name=f"{kind.operation} {kind.destination or 'amq.default'}")
    made.kind = Span.SPAN_KIND_PRODUCER if kind.operation == "deliver" else Span.SPAN_KIND_SERVER
    protocol, _, version = kind.protocol.partition(" ")
    attributes = {
        "messaging.system": "convoymq",
        "messaging.operation.name": kind.operation,
        "messaging.operation.type": _TYPES[kind.operation],
        "messaging.destination.name": kind.destination or "amq.default",
        "convoymq.vhost": kind.vhost,
        "convoymq.outcome": kind.outcome,
        "network.protocol.name": protocol,
        "network.protocol.version": version,
    }
    for key, text in attributes.items():
        if text:
            made.attributes.add(key=key).value.string_value = text
    return made


def new_span_id() -> bytes:
    """Returns the id of a span."""
    return os.urandom(8)
