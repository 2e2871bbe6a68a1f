"""Counters of the columnar protocol's server."""

from __future__ import annotations

from collections.abc import Iterator

from convoymq.model.columnar import ErrorCode, Op


class FetchCounters:
    """Totals since the node started."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(Op, 0)
        self.errors = dict.fromkeys(ErrorCode, 0)
        self.malformed = 0
        """Connections that broke the protocol."""
        self.refused = 0
        """Connections beyond the limit."""
        self.slow = 0
        """Connections that were dropped because they did not read."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.rows_in = 0
        self.rows_out = 0
        self.read_descriptors = 0
        """Fetches that were answered with a place in a file."""

    def metrics(self) -> Iterator[tuple[str, dict[str, str], int]]:
        """Yields (name without prefix, labels, value) of every counter."""
        for op, count in self.requests.items():
            yield "requests", {"op": op.name.lower()}, count
        for code, count in self.errors.items():
            yield "errors", {"code": code.name.lower()}, count
        yield "malformed", {}, self.malformed
        yield "connections_refused", {}, self.refused
        yield "slow_readers_dropped", {}, self.slow
        yield "received_bytes", {}, self.bytes_in
        yield "sent_bytes", {}, self.bytes_out
        yield "rows_received", {}, self.rows_in
        yield "rows_sent", {}, self.rows_out
        yield "read_descriptors", {}, self.read_descriptors
