"""Watches queries: lag by stream, rows per second, batch duration, for Prometheus and for people.

Spark's own progress has no lag for a Python source. It does hold the end of each batch and what
`reportLatestOffset` said: their difference is the lag.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Metric,
    generate_latest,
    start_http_server,
    write_to_textfile,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pyspark.sql.streaming.listener import StreamingQueryListener

from convoymq.spark import offsets
from convoymq.spark.errors import SourceError

if TYPE_CHECKING:
    from http.server import HTTPServer

    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from rich.console import Console
    from rich.table import Table

QUERIES_MAX = 1000
"""Queries that are remembered; the oldest that have ended go first."""


@dataclass(slots=True)
class QueryState:
    """State of one query."""

    name: str
    state: str = "starting"
    """`starting`, `running`, `idle`, `ended` or `failed`."""
    error: str = ""
    batch: int = -1
    batches: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    duration_s: float = 0.0
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    """End of the last batch, by stream (or queue) and partition."""
    lag: dict[tuple[str, int], int] = field(default_factory=dict)
    """Messages behind that, by the same."""


_Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]
_METRICS: tuple[tuple[_Family, str, str, Callable[[QueryState], float]], ...] = (
    (
        GaugeMetricFamily,
        "query_active",
        "1 while the query runs",
        lambda query: int(query.state in ("starting", "running", "idle")),
    ),
    (
        GaugeMetricFamily,
        "query_failed",
        "1 when the query has ended with an error",
        lambda query: int(query.state == "failed"),
    ),
    (CounterMetricFamily, "rows", "Rows read since the listener began", lambda query: query.rows),
    (
        CounterMetricFamily,
        "batches",
        "Batches since the listener began",
        lambda query: query.batches,
    ),
    (
        GaugeMetricFamily,
        "rows_per_second",
        "Rows of the last batch by its duration",
        lambda query: round(query.rows_per_second, 3),
    ),
    (
        GaugeMetricFamily,
        "batch_duration_seconds",
        "Duration of the last batch",
        lambda query: query.duration_s,
    ),
)


class LagListener(StreamingQueryListener, Collector):
    """Add it with `spark.streams.addListener(listener)`; then `serve`, `write_to` or `live`.

    Called by Spark's listener thread, read by others: nothing here blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, QueryState] = {}
        self._file: Path | None = None
        self._server: HTTPServer | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # --- events ------------------------------------------------------------------------------

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """A query begins."""
        with self._lock:
            self._query(event.runId, event.name, event.id)
        self._write()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """A batch is done."""
        progress = event.progress
        with self._lock:
            query = self._query(progress.runId, progress.name, progress.id)
            query.state = "running"
            query.batch = progress.batchId
            query.batches += 1
            query.rows += progress.numInputRows
            query.rows_per_second = _number(progress.processedRowsPerSecond)
            query.duration_s = progress.batchDuration / 1000
            for source in progress.sources:
                ends = _positions(source.endOffset)
                latest = _positions(source.latestOffset)
                for known in (query.positions, query.lag):
                    _forget_finished(known, ends)
                query.positions.update(ends)
                for key, end in ends.items():
                    query.lag[key] = max(0, latest.get(key, end) - end)
        self._write()

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing to do: all that was there is read."""
        with self._lock:
            query = self._query(event.runId, None, event.id)
            query.state = "idle"
            query.rows_per_second = 0.0
            query.lag = dict.fromkeys(query.lag, 0)
        self._write()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """The query has ended."""
        with self._lock:
            query = self._query(event.runId, None, event.id)
            query.state = "failed" if event.exception else "ended"
            query.error = (event.exception or "").strip().splitlines()[0] if event.exception else ""
            query.rows_per_second = 0.0
        self._write()

    # --- for machines ------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics (a collector of `prometheus_client`)."""
        queries = self.queries()
        for make, name, text, value in _METRICS:
            family = make(f"convoymq_spark_{name}", text, labels=("query",))
            for query in queries:
                family.add_metric((query.name,), value(query))
            yield family
        for name, text in (("offset", "End of the last batch"), ("lag", "Messages behind it")):
            labels = ("query", "topic", "partition")
            positions = GaugeMetricFamily(f"convoymq_spark_{name}", text, labels=labels)
            for query in queries:
                known = query.positions if name == "offset" else query.lag
                for (topic, partition), number in sorted(known.items()):
                    positions.add_metric((query.name, topic, str(partition)), number)
            yield positions

    def prometheus(self) -> str:
        """Returns all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry).decode()

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> tuple[str, int]:
        """Answers `GET /metrics` in a thread; returns host and port. OSError: port in use."""
        self.close()
        self._server, _ = start_http_server(port, host, self._registry)
        address = self._server.server_address
        return str(address[0]), int(address[1])

    def write_to(self, path: str | Path) -> None:
        """Writes the metrics to a file after every event, for the node exporter's text collector.
        The file is replaced as a whole. Raises OSError when it can't be written now."""
        self._file = Path(path)
        self._write(must=True)

    def close(self) -> None:
        """Ends `serve`."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    # --- for people --------------------------------------------------------------------------

    def queries(self) -> list[QueryState]:
        """Returns all queries that are remembered, in the order of their start."""
        with self._lock:
            return list(self._queries.values())

    def table(self) -> Table:
        """Returns one line a query."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title, justify in (
            ("query", "left"),
            ("state", "left"),
            ("batch", "right"),
            ("rows", "right"),
            ("rows/s", "right"),
            ("batch s", "right"),
            ("lag", "right"),
        ):
            table.add_column(title, justify=justify)  # type: ignore[arg-type]
        for query in self.queries():
            table.add_row(
                query.name,
                f"{query.state}: {query.error}" if query.error else query.state,
                str(query.batch) if query.batch >= 0 else "",
                f"{query.rows:,}",
                f"{query.rows_per_second:,.0f}",
                f"{query.duration_s:.2f}",
                f"{sum(query.lag.values()):,}",
            )
        return table

    @contextmanager
    def live(self, console: Console | None = None) -> Iterator[None]:
        """Shows the table, renewed four times a second, while the context lasts."""
        from rich.live import Live

        with Live(get_renderable=self.table, console=console, refresh_per_second=4):
            yield

    # --- parts -------------------------------------------------------------------------------

    def _query(self, run_id: object, name: str | None, query_id: object) -> QueryState:
        key = str(run_id)
        query = self._queries.get(key)
        if query is None:
            ended = [k for k, q in self._queries.items() if q.state in ("ended", "failed")]
            if len(self._queries) >= QUERIES_MAX and ended:
                del self._queries[ended[0]]
            # A query that begins again takes its place.
            label = name or str(query_id)
            for other in [k for k in ended if self._queries[k].name == label]:
                del self._queries[other]
            query = self._queries[key] = QueryState(name=label)
        return query

    def _write(self, *, must: bool = False) -> None:
        if self._file is None:
            return
        try:
            write_to_textfile(str(self._file), self._registry)
        except OSError:
            # Spark's listener thread must go on; the file's age tells that it is not written.
            if must:
                raise


def _forget_finished(
    known: dict[tuple[str, int], int], ends: Mapping[tuple[str, int], int]
) -> None:
    """Forgets partitions of a topic that are read to their ends."""
    names = {name for name, _ in ends}
    for key in [key for key in known if key[0] in names and key not in ends]:
        del known[key]


def _positions(text: str | None) -> dict[tuple[str, int], int]:
    """Positions of one of our sources; nothing for those of others."""
    try:
        decoded = json.loads(text or "null")
        if not isinstance(decoded, dict) or offsets.is_symbol(decoded):
            return {}
        if "queue" in decoded:
            return {(str(decoded["queue"]), 0): int(decoded["off"])} if "off" in decoded else {}
        if "topic" in decoded:
            topic = str(decoded["topic"])
            cut = offsets.parse_topic(decoded, topic).cut
            return {(topic, pid): offset for pid, offset in cut.items()}
        return dict(offsets.parse(decoded).ends)
    except (ValueError, TypeError, SourceError):
        return {}


def _number(value: float | None) -> float:
    """Spark says NaN, or nothing, of a batch that took no time."""
    number = float(value or 0.0)
    return number if number == number and number not in (float("inf"), float("-inf")) else 0.0
