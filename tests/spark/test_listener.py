"""What the listener makes of Spark's events."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from convoymq.spark.listener import LagListener


def progress(run: str = "r1", name: str | None = "archive", **fields: Any) -> Any:
    source = SimpleNamespace(
        endOffset=json.dumps({"v": 1, "p": {"flights": {"0": 80}}}),
        latestOffset=json.dumps({"v": 1, "p": {"flights": {"0": 100}}}),
    )
    other = SimpleNamespace(endOffset='{"logOffset":3}', latestOffset=None)
    known = {
        "runId": run,
        "id": "q1",
        "name": name,
        "batchId": 4,
        "numInputRows": 30,
        "processedRowsPerSecond": 60.0,
        "batchDuration": 500,
        "sources": [source, other],
        **fields,
    }
    return SimpleNamespace(progress=SimpleNamespace(**known))


def ended(run: str = "r1", exception: str | None = None) -> Any:
    return SimpleNamespace(runId=run, id="q1", exception=exception)


def test_lag_is_the_streams_end_less_the_batchs() -> None:
    listener = LagListener()
    listener.onQueryStarted(SimpleNamespace(runId="r1", id="q1", name="archive"))
    listener.onQueryProgress(progress())
    listener.onQueryProgress(progress(batchId=5))
    (query,) = listener.queries()
    assert (query.state, query.batch, query.rows, query.lag) == (
        "running", 5, 60, {("flights", 0): 20},
    )  # fmt: skip
    listener.onQueryIdle(ended())
    assert query.lag == {("flights", 0): 0}
    assert query.state == "idle"


def test_offsets_of_queues_and_of_other_sources() -> None:
    listener = LagListener()
    source = SimpleNamespace(
        endOffset='{"v":1,"queue":"orders","epoch":7,"off":10}',
        latestOffset='{"v":1,"queue":"orders","epoch":7,"off":25}',
    )
    odd = [SimpleNamespace(endOffset=text, latestOffset=text) for text in ("5", "{", '{"v":1}')]
    listener.onQueryProgress(progress(sources=[source, *odd], processedRowsPerSecond=float("nan")))
    (query,) = listener.queries()
    assert query.lag == {("orders", 0): 15}
    assert query.rows_per_second == 0


def test_metrics_for_prometheus() -> None:
    listener = LagListener()
    listener.onQueryProgress(progress(name='a"b\\c'))
    text = listener.prometheus()
    labels = r'query="a\"b\\c"'
    assert f"convoymq_spark_rows_total{{{labels}}} 30" in text
    assert f"convoymq_spark_batch_duration_seconds{{{labels}}} 0.5" in text
    assert f'convoymq_spark_lag{{partition="0",{labels},topic="flights"}} 20' in text
    assert f'convoymq_spark_offset{{partition="0",{labels},topic="flights"}} 80' in text
    assert f"convoymq_spark_query_active{{{labels}}} 1" in text
    listener.onQueryTerminated(ended(exception="boom\n  at x"))
    assert f"convoymq_spark_query_failed{{{labels}}} 1" in listener.prometheus()
    assert listener.queries()[0].error == "boom"


def test_metrics_by_http_and_in_a_file(tmp_path: Path) -> None:
    listener = LagListener()
    host, port = listener.serve()
    try:
        listener.onQueryProgress(progress())
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
            assert answer.read().decode() == listener.prometheus()
    finally:
        listener.close()
    file = tmp_path / "convoymq.prom"
    listener.write_to(file)
    listener.onQueryProgress(progress())
    assert file.read_text() == listener.prometheus()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(OSError):
        listener.write_to(tmp_path / "none" / "x.prom")


def test_a_query_that_starts_again_takes_its_place() -> None:
    listener = LagListener()
    for run in ("r1", "r2", "r3"):
        listener.onQueryProgress(progress(run))
        listener.onQueryTerminated(ended(run))
    assert len(listener.queries()) == 1


def test_people_see_a_table() -> None:
    listener = LagListener()
    listener.onQueryProgress(progress())
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    with listener.live(console):
        listener.onQueryTerminated(ended(exception="boom"))
    assert "archive" in out.getvalue()
    assert "failed: boom" in out.getvalue()
