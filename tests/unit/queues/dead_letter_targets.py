"""Fake targets of dead letters, and the way to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from convoymq.kernels import batch
from convoymq.kernels.content import content_parts, split_record
from convoymq.model.errors import NotFound, Unavailable
from convoymq.queues.interface import outcome_of


class FakeClient:
    """What is published to a fake queue."""

    def __init__(self, queue: FakeQueue, events: Any) -> None:
        self.queue = queue
        self.target = self
        self.pending: list[int] = []
        self.events = events
        self.closed = False

    def publish(self, parts: Sequence[bytes], body_size: int, tag: int, flags: int) -> None:
        body = b"".join(parts)[-1 - body_size : -1]
        self.queue.got.append((tag, body))
        if tag:
            self.pending.append(tag)

    def publish_records(self, command: bytes, count: int, tag: int) -> None:
        for i in range(count):
            record = batch.record(command, 0, i)
            names, content = split_record(record)
            size = len(content_parts(content)[1])
            self.publish([names, content], size, tag + i if tag else 0, 0)

    @property
    def has_pending(self) -> bool:
        return bool(self.pending)

    def answer(self, ok: bool = True) -> None:
        """Confirms or refuses all that waits."""
        tags, self.pending = self.pending, []
        for tag in tags:
            self.events.on_published(self, [tag, tag], outcome_of(ok))

    def close(self) -> None:
        self.closed = True


class FakeQueue:
    """A target."""

    def __init__(self, group: int, name: str) -> None:
        self.group = group
        self.name = name
        self.ended = None
        self.deleted = False
        self.refuses_publishes = False
        self.features = SimpleNamespace(answers_by_tags=False)
        self.got: list[tuple[int, bytes]] = []
        self.clients: list[FakeClient] = []

    def client(self, _session: int, events: Any) -> FakeClient:
        self.clients.append(FakeClient(self, events))
        return self.clients[-1]

    def bodies(self) -> list[bytes]:
        return [body for _, body in self.got]


class Routes:
    """Where the exchange `dlx` leads."""

    def __init__(self) -> None:
        self.queues: list[Any] = []
        self.exists = True
        self.usable = True
        self.varies = False
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.counted: Counter[tuple[str, ...]] = Counter()
        """(exchange, queues) -> messages."""

    def count(self, _vhost: str, exchange: str, queues: Sequence[Any], messages: int) -> None:
        self.counted[exchange, *(queue.name for queue in queues)] += messages

    def varies_by_message(self, _vhost: str, _exchange: str) -> bool:
        return self.varies

    def route_dead_letter(
        self, vhost: str, exchange: str, keys: Sequence[str], _headers: Any, _properties: Any
    ) -> tuple[Any, ...]:
        self.asked.append((vhost, exchange, tuple(keys)))
        if not self.exists:
            raise NotFound("no exchange")
        if not self.usable:
            raise Unavailable("not open yet")
        return tuple(self.queues)
