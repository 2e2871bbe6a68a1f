"""Partitions of a topic and their clients, as publishers see them. Tests say what happens when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand, PublishTarget
from convoymq.kernels.ordered_runs import order_key
from convoymq.queues.interface import PublishOutcome
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span


@dataclass(slots=True)
class FakeTimer:
    """A call that is due at a time."""

    due_ms: int
    call: Callable[[], object] | None

    def cancel(self) -> None:
        """See `Timer`."""
        self.call = None


class FakeClock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.time_ms = 0
        self.timers: list[FakeTimer] = []

    def now_ms(self) -> int:
        """See `Clock`."""
        return self.time_ms

    def monotonic_ms(self) -> int:
        """See `Clock`."""
        return self.time_ms

    def call_later(
        self, delay_ms: int, callback: Callable[..., object], *arguments: Any
    ) -> FakeTimer:
        """See `Clock`."""
        timer = FakeTimer(self.time_ms + delay_ms, lambda: callback(*arguments))
        self.timers.append(timer)
        return timer

    def random(self) -> float:
        """See `Clock`."""
        return 0.5

    def advance(self, ms: int) -> None:
        """Lets time pass."""
        self.time_ms += ms
        due = [timer for timer in self.timers if timer.due_ms <= self.time_ms]
        self.timers = [timer for timer in self.timers if timer.due_ms > self.time_ms]
        for timer in sorted(due, key=lambda each: each.due_ms):
            if timer.call is not None:
                timer.call()


@dataclass(slots=True)
class FakePartition:
    """A partition's log, and its state."""

    span: Span
    version: int
    """Route version that it came with."""
    state: str = "creating"
    log: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Order key and record of each message."""


class FakeClient:
    """A client of a partition. What it was given is applied when a test says so; a client that was
    refused once is refused for ever, with the same code."""

    def __init__(self, partition: FakePartition, events: Any) -> None:
        self.partition = partition
        self.events = events
        self.target = PublishTarget(batch.CommandBuilder(), 1 << 56, self)
        self.refusal: Code | None = None
        self.closed = False

    def check_flow(self) -> None:
        """See `FlowOwner`."""

    def close(self) -> None:
        """See `QueueClient`."""
        assert not self.target.pending
        assert not self.target.builder.used
        self.closed = True

    @property
    def has_commands(self) -> bool:
        """Returns whether anything is under way."""
        return bool(self.target.pending or self.target.builder.used)

    def apply_next(self) -> None:
        """The partition applies the next command, and its answer arrives."""
        if not self.target.pending:
            self.target.builder.discard_unsent()
        command: PendingCommand = self.target.pending[0]
        self.target.applied(command.seq)
        span = self.partition.span
        if self.refusal is None and self.partition.state != "open":
            creating = self.partition.state == "creating"
            self.refusal = Code.NOT_OPEN if creating else Code.CLOSED
        if self.refusal is not None:
            self.events.on_closed(self, command, self.refusal, self.partition.version + 1)
            return
        data = command.chunk.data
        assert data is not None, span
        for i in range(command.messages):
            record = batch.record(data, command.offset, i)
            self.partition.log.append((order_key(record), record))
        self.events.on_published(self, list(command.tags or ()), PublishOutcome.ACCEPTED)

    def fail_all(self) -> None:
        """Nobody knows the outcome of what is under way: it is refused."""
        self.target.builder.discard_unsent()
        for command in self.target.applied(self.target.seq):
            if command.tags:
                self.events.on_published(self, command.tags, PublishOutcome.REFUSED_UNAVAILABLE)
