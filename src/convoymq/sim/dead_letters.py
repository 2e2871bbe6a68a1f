"""Target of dead letters in a simulated cluster: one that every node can publish to.

It answers late, refuses, has no route now and then, and is reached by processes that die before
they hear it. It remembers what it has taken: the model of a queue asks for that when the leader
says that a dead letter is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from convoymq.kernels import batch
from convoymq.model.errors import NotFound
from convoymq.queues.interface import PublisherEvents, QueueFeatures, outcome_of
from convoymq.sim.clock import Process, Scheduler
from convoymq.sim.records import identity_of

TARGET_GROUP = 1 << 30
"""No group of a world has this number."""
NO_ROUTE_CHANCE = 0.1
REFUSAL_CHANCE = 0.1
FULL_CHANCE = 0.05
DELAY_MAX_US = 50_000
POLICIES: tuple[dict[str, object], ...] = (
    {},
    {"dead-letter-exchange": "dlx"},
    {
        "dead-letter-exchange": "dlx",
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
    },
)
"""Policies for dead letters that queues may have."""


if TYPE_CHECKING:
    from convoymq.sim.quorum import QuorumLoad


class DeadLetterTarget:
    """The target as one process of a node sees it: the queue, its client and the route to it."""

    vhost = "/"
    name = "dead"
    group = TARGET_GROUP
    ended = None
    deleted = False
    features = QueueFeatures()

    def __init__(self, load: QuorumLoad, process: Process) -> None:
        self._load = load
        self._world = load.world
        self._process = process
        self._scheduler: Scheduler = load.world.scheduler
        self._rng: Random = load.dead_letter_rng

    def route_dead_letter(self, *_message: object) -> tuple[Any, ...]:
        """See `DeadLetterRoutes`."""
        draw = 1.0 if self._world.quiet else self._rng.random()
        if draw < NO_ROUTE_CHANCE / 2:
            raise NotFound("there is no such exchange")
        return () if draw < NO_ROUTE_CHANCE else (self,)

    def count(self, *_counted: object) -> None:
        """See `DeadLetterRoutes`."""

    @property
    def refuses_publishes(self) -> bool:
        """Full now and then, and known to be."""
        return not self._world.quiet and self._rng.random() < FULL_CHANCE

    def varies_by_message(self, _vhost: str, _exchange: str) -> bool:
        """See `DeadLetterRoutes`: draws for whole runs."""
        return False

    def client(self, _session: int, events: PublisherEvents) -> _Client:
        """Opens a stream of publishes."""
        return _Client(self, events)

    def publish(self, client: _Client, record: bytes, tag: int) -> None:
        """Takes a message or refuses it; the answer comes later, if its process still runs."""
        refused = not self._world.quiet and self._rng.random() < REFUSAL_CHANCE
        if not refused:
            self._load.moved.add(identity_of(record))
        if tag:
            delay_us = self._rng.randrange(1, DELAY_MAX_US)
            self._scheduler.after(delay_us, self._process, client.answer, tag, not refused)


class _Client:
    """One stream of publishes; see `QueueClient`."""

    has_pending = False

    def __init__(self, queue: DeadLetterTarget, events: PublisherEvents) -> None:
        self.queue = queue
        self.target = self
        self._events = events
        self._closed = False

    def publish(self, parts: Sequence[bytes], _body_size: int, tag: int, _flags: int) -> None:
        """See `PublishTarget`."""
        self.queue.publish(self, b"".join(parts), tag)

    def publish_records(self, command: bytes, count: int, tag: int) -> None:
        """See `PublishTarget`."""
        for i in range(count):
            self.queue.publish(self, batch.record(command, 0, i), tag + i if tag else 0)

    def answer(self, tag: int, ok: bool) -> None:
        """Tells who published."""
        if not self._closed:
            self._events.on_published(self, [tag, tag], outcome_of(ok))  # type: ignore[arg-type]

    def close(self) -> None:
        """No answers follow."""
        self._closed = True
