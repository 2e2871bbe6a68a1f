"""Spans of the sampled messages that pass one channel, session or request (ADR 0228, ADR 0229).

`publish` and `deliver` are children of the context that a message carries. `settle` is a child of
its delivery: from there to the consumer's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from convoymq.broker.spans import SpanKind, SpanRow, Spans, new_span_id
from convoymq.kernels.channel_codec import DISCARD, RETURN, RETURN_FAILED, SETTLE
from convoymq.kernels.trace_contexts import find_context, find_contexts, find_produced
from convoymq.queues.interface import Delivery, QueueClient

COLUMNAR = "columnar"
"""Name of the columnar protocol in spans."""
OPEN_MAX = 1024
"""Spans of a channel that wait for an outcome, of publishes and of deliveries; later ones end at
once, or are not begun."""
OUTCOMES = {SETTLE: "accepted", RETURN: "returned", RETURN_FAILED: "failed", DISCARD: "rejected"}

Context = tuple[bytes, bytes]
"""traceparent and tracestate."""
Records = tuple[bytes, int, int, int]
"""Records of an ENQUEUE command: (data, offset of the command, first, count)."""
Source = tuple[object, ...]
"""Numbers deliveries: a client and a consumer, or a partition of a consumer group."""


class _Open(NamedTuple):
    """A span that has begun."""

    kind: SpanKind
    context: Context
    parent_id: bytes
    began_ns: int
    routing_key: bytes = b""


class StreamSpans:
    """See the module text.

    Args:
        protocol: name and version.
    """

    def __init__(self, spans: Spans, vhost: str, protocol: str) -> None:
        self.below = spans.below
        self._spans = spans
        self._vhost = vhost
        self._protocol = protocol
        self._publishes: dict[int, _Open] = {}
        self._deliveries: dict[Source, dict[int, _Open]] = {}
        """Source -> message id -> span of the settlement."""
        self._count = 0

    @classmethod
    def of(cls, spans: Spans | None, vhost: str, protocol: str) -> StreamSpans | None:
        """Returns the spans of a channel, session or request; None: there are none here."""
        return None if spans is None else cls(spans, vhost, protocol)

    def published(self, names: bytes, context: Context, tag: int) -> None:
        """A message has come. `tag`: its outcome is told by it; 0 = nobody waits."""
        exchange = names[1 : 1 + names[0]]
        kind = SpanKind("publish", exchange.decode("utf-8", "replace"), self._vhost, self._protocol)
        key = names[2 + len(exchange) :]
        opened = _Open(kind, context, bytes.fromhex(context[0][36:52].decode()), _now_ns(), key)
        if tag and len(self._publishes) < OPEN_MAX:
            self._publishes[tag] = opened
        else:
            self._end(opened)

    def take(self, names: bytes, content: bytes, tag: int) -> None:
        """A message has come that may be sampled."""
        context = find_context(content, self.below)
        if context is not None:
            self.published(names, context, tag)

    def produced(self, body: bytes, count: int, position: int) -> None:
        """Rows of a request have come, as `find_produced` reads them: `confirmed` ends them."""
        for names, context in find_produced(body, count, position, self.below):
            self.published(names, context, 1 + len(self._publishes))

    def confirmed(self, awaits: Callable[[int], bool], *, accepted: bool) -> None:
        """Ends spans of publishes that no queue has to tell an outcome of any more."""
        if not self._publishes:
            return
        for tag in [tag for tag in self._publishes if not awaits(tag)]:
            self._end(self._publishes.pop(tag), failed=not accepted)

    def delivered(self, client: QueueClient, delivery: Delivery, *, settles: bool) -> None:
        """Messages are in the output of the connection. `settles`: the client will."""
        _, first_id, block, command, first, count, *_ = delivery
        source = (id(client), delivery.consumer) if settles else None
        self.sent(client.queue.name, source, first_id, (block, command, first, count))

    def sent(self, queue: str, source: Source | None, first_id: int, records: Records) -> None:
        """Messages of a queue are on their way. `source`: numbers those that will be settled."""
        for place, context in find_contexts(*records, self.below):
            kind = SpanKind("deliver", queue, self._vhost, self._protocol)
            parent = bytes.fromhex(context[0][36:52].decode())
            span_id = self._end(_Open(kind, context, parent, _now_ns()))
            if source is not None and self._count < OPEN_MAX:
                waiting = self._deliveries.setdefault(source, {})
                kind = kind._replace(operation="settle")
                self._count += first_id + place not in waiting
                waiting[first_id + place] = _Open(kind, context, span_id, _now_ns())

    def settled(self, client: object, consumer: int, ranges: Sequence[int], outcome: int) -> None:
        """A consumer has settled message ids, by ranges."""
        self.settled_of((id(client), consumer), ranges, outcome)

    def settled_of(self, source: Source, ranges: Sequence[int], outcome: int) -> None:
        """Message ids of a source are settled, by ranges."""
        waiting = self._deliveries.get(source) if self._count else None
        if not waiting:
            return
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            if first == last:
                found = [first] if first in waiting else []
            else:
                found = [each for each in waiting if first <= each <= last]
            for each in found:
                opened = waiting.pop(each)
                kind = opened.kind._replace(outcome=OUTCOMES[outcome])
                self._end(opened._replace(kind=kind), failed=outcome in (RETURN_FAILED, DISCARD))
                self._count -= 1

    def close(self) -> None:
        """The channel is gone: what it held returns, and publishes have no outcome."""
        for opened in self._publishes.values():
            self._end(opened, failed=True)
        for waiting in self._deliveries.values():
            for opened in waiting.values():
                self._end(opened._replace(kind=opened.kind._replace(outcome=OUTCOMES[RETURN])))
        self._publishes.clear()
        self._deliveries.clear()
        self._count = 0

    def _end(self, opened: _Open, *, failed: bool = False) -> bytes:
        parent, state = opened.context
        span_id = new_span_id()
        self._spans.add(
            SpanRow(
                opened.kind,
                bytes.fromhex(parent[3:35].decode()),
                span_id,
                opened.parent_id,
                state,
                opened.began_ns,
                _now_ns(),
                opened.routing_key,
                failed,
            )
        )
        return span_id


def _now_ns() -> int:
    return time.time_ns()
