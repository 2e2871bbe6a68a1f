"""`convoy pipeline`, as far as it goes without Spark."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from convoymq.cli import pipeline
from convoymq.cli.pipeline import pipeline_app


def test_what_cannot_be_audited_is_said_before_spark_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert "there is no such file or directory" in result.output
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path)])
    assert result.exit_code == 2
    assert "no segment of a trace" in result.output


@contextmanager
def api(status: int) -> Iterator[tuple[int, list[tuple[str, Any]]]]:
    """An HTTP API that answers each PUT with this status: its port, and (path, body) of them."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.path, json.loads(body)))
            answer = b'{"reason": "no such luck"}'
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def test_a_result_is_reported_to_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audits = pytest.importorskip("convoymq.spark.audit")
    from convoymq.spark.audit.invariants import Invariant
    from convoymq.spark.audit.result import AuditReport, Verdict

    verdict = Verdict(invariant=next(iter(Invariant)), rows=0, unproved=3)
    found = AuditReport(queues=[], verdicts=[verdict], rows=5, files=1)
    monkeypatch.setattr(audits, "audit", lambda *_, **__: found)
    command = ["audit", str(tmp_path), "--format", "json", "--report"]
    with api(204) as (port, asked):
        result = CliRunner().invoke(pipeline_app, [*command, f"http://a:b@127.0.0.1:{port}"])
    assert result.exit_code == 0, result.output
    ((path, body),) = asked
    assert path == "/api/global-parameters/convoymq-last-audit"
    assert body["value"]["at_ms"] > 0
    assert (body["value"]["rows"], body["value"]["invariants"][0]["unproved"]) == (5, 3)
    with api(400) as (port, _):
        result = CliRunner().invoke(pipeline_app, [*command, f"127.0.0.1:{port}"])
    assert result.exit_code == 2
    assert "the result is not reported: no such luck" in result.output
    result = CliRunner().invoke(pipeline_app, [*command, "ftp://x"])
    assert result.exit_code == 2
    assert "is no address of an HTTP API" in result.output


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None if name == "numpy" else object())
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'convoymq[audit]'" in result.output
