"""A collector of OpenTelemetry that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{PARENT}-01"


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

    @property
    def settings(self) -> dict[str, str]:
        """Returns the configuration of nodes that send their spans here."""
        return {
            "otlp.endpoint": f"http://127.0.0.1:{self.port}/v1/traces",
            "otlp.headers": "x-token=secret",
            "otlp.interval": "50",
        }

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
