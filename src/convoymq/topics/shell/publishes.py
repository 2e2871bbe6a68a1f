"""Publishes of one channel to one topic: which wait, which are sent again, which are confirmed.

Sans IO. A record is placed when it comes (`kernels.ordered_runs`): its order key says which range
of logical partitions, and the range which partition. A partition has at most one client here:

| state    | records           | leaves it by                                                     |
|----------|-------------------|------------------------------------------------------------------|
| NEW      |                   | first record: opened -> SENDING; not open on this node -> PAUSED |
| SENDING  | go to its client  | refusal, or a route without it -> DRAINING                       |
| DRAINING | wait              | every record that was sent has an outcome -> the next three      |
|          |                   | the route leads elsewhere: the range goes to those partitions    |
| SEALED   | wait              | the route leads elsewhere, as above                              |
| PAUSED   | wait              | after 1, 2, 4 ... 50 ms -> NEW, with another client              |

What was refused comes first, then what waited, each in its order, so the messages of a key keep
theirs: a client whose publish was refused gets no later one stored. Ranges of other partitions go
on meanwhile. A refused command is kept as the client's batch has it: no body is kept twice.

Routes come from the tree alone. A partition that says it is sealed before the tree does waits for
the tree.

Invariants:
    - a record has one outcome: a confirm, or a refusal after which it is placed again
    - what waits here is bounded in bytes: beyond it the channel reads no more publishes

Source: ordered topics, section 3, for producers without sequences (ADR 0064).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq.kernels.batch import PendingBudget, PendingCommand
from convoymq.kernels.ordered_runs import (
    SLOT_NEW,
    SLOT_SEND,
    SLOT_WAIT,
    OrderedTarget,
    Slot,
    count_tags,
    tagged,
)
from convoymq.model.clock import Clock, Timer
from convoymq.queues.interface import PublishOutcome, QueueClient
from convoymq.queues.null_events import NullEvents
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Route

if TYPE_CHECKING:
    from convoymq.topics.shell.publisher import TopicPublisher

BACKOFF_MS = (1, 2, 4, 8, 16, 32, 50)
"""Waits for a partition that is not open yet; as long again at most is added by chance."""


class PartitionPublishes:
    """Publishes to one partition."""

    __slots__ = (
        "answered", "attempts", "busy_ms", "client", "drained_ms", "draining", "paused_ms", "pid",
        "returned", "sealed", "slot",
    )  # fmt: skip

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.slot = Slot(self)
        self.client: QueueClient | None = None
        self.answered = 0
        """Of the records that `slot` says were sent."""
        self.draining = False
        """Nothing is sent before those have an outcome, and more happens."""
        self.sealed = False
        self.returned: list[PendingCommand] = []
        """Refused commands, in order."""
        self.attempts = 0
        self.busy_ms = -1
        """Time of the last confirm behind which more was under way; below 0: nothing was."""
        self.drained_ms = -1
        """Time at which records began to wait."""
        self.paused_ms = -1
        """Time from which on a range of keys that came from another partition has stood still,
        until the first confirm; below 0: it does not."""

    def stand_still(self, since_ms: int) -> None:
        """Notes that records which waited for another partition were placed here, if any were."""
        if self.slot.sent or self.slot.waiter is not None:
            self.paused_ms = since_ms

    @property
    def is_quiet(self) -> bool:
        """Returns whether all that was sent has an outcome."""
        return self.slot.sent == self.answered


class OrderedPublishes(NullEvents):
    """See the module text.

    Args:
        bytes_max: most bytes that may wait here; the channel goes on at half of it.
        budget: what all channels and queues may have under way together.
        publisher: session of the channel, for the trace.
    """

    def __init__(
        self,
        route: Route,
        seed: int,
        outlet: TopicPublisher,
        clock: Clock,
        *,
        bytes_max: int,
        budget: PendingBudget,
        publisher: int = 0,
    ) -> None:
        self.target = OrderedTarget(route.logical, seed, self)
        self.target.pending_bytes_max = bytes_max
        self.target.budget = self._budget = budget
        self.route = route
        self.publisher = publisher
        self.sent_again = 0
        """Records that a partition refused."""
        self.pauses = 0
        """Ranges of keys that stood still at a change."""
        self.paused_ms = 0
        """Sum of the times for which they did, from confirm to confirm."""
        self.closed = False
        self.finished = False
        self.blocked = False
        self._over = False
        self._outlet = outlet
        self._clock = clock
        self._partitions: dict[int, PartitionPublishes] = {}
        self._clients: dict[QueueClient, PartitionPublishes] = {}
        self._full: set[QueueClient] = set()
        """Clients that take no more for now."""
        self._timers: dict[PartitionPublishes, Timer] = {}
        self._ranges: list[tuple[int, PartitionPublishes]] = [
            (span.lo, self._partition(span.pid)) for span in route.spans
        ]
        self._set_ranges()

    # --- routes --------------------------------------------------------------------------

    def on_route(self, route: Route) -> None:
        """The tree has this route by now."""
        if route.version <= self.route.version:
            return
        self.route = route
        live = set(route.pids)
        for partition in list(self._partitions.values()):
            if partition.pid not in live:
                self._drain(partition)
                self._go_on(partition)
        self._end_round()

    def _partition(self, pid: int) -> PartitionPublishes:
        found = self._partitions.get(pid)
        if found is None:
            found = self._partitions[pid] = PartitionPublishes(pid)
        return found

    def _set_ranges(self) -> None:
        self.target.set_ranges(
            [lo for lo, _ in self._ranges], [partition.slot for _, partition in self._ranges]
        )

    def _replace(self, gone: PartitionPublishes) -> None:
        """Gives the ranges of a partition to those that the route has for them."""
        ranges: list[tuple[int, PartitionPublishes]] = []
        ends = [*(lo for lo, _ in self._ranges[1:]), self.route.logical]
        for (lo, partition), hi in zip(self._ranges, ends, strict=True):
            if partition is not gone:
                ranges.append((lo, partition))
                continue
            ranges += [
                (max(lo, span.lo), self._partition(span.pid))
                for span in self.route.spans
                if span.overlaps(lo, hi)
            ]
        self._ranges = [
            each for i, each in enumerate(ranges) if i == 0 or each[1] is not ranges[i - 1][1]
        ]
        del self._partitions[gone.pid]
        self._set_ranges()

    # --- placing -------------------------------------------------------------------------

    def open_slot(self, slot: Slot) -> None:
        """See `OrderedOwner`."""
        partition = slot.owner
        assert isinstance(partition, PartitionPublishes)
        client = self._outlet.open_client(partition.pid)
        if client is None:
            self._drain(partition)
            self._pause(partition)
            return
        partition.client = client
        self._clients[client] = partition
        slot.sender = client.target
        slot.state = SLOT_SEND

    def _drain(self, partition: PartitionPublishes) -> None:
        if not partition.draining:
            partition.drained_ms = self._clock.monotonic_ms()
        partition.draining = True
        partition.slot.state = SLOT_WAIT

    def _go_on(self, partition: PartitionPublishes) -> None:
        """Sends what waits for a partition, when nothing of it is under way."""
        if not partition.draining or not partition.is_quiet:
            return
        if any(span.pid == partition.pid for span in self.route.spans):
            if not partition.sealed and partition not in self._timers:
                self._pause(partition)
            return
        timer = self._timers.pop(partition, None)
        if timer is not None:
            timer.cancel()
        self._close_client(partition)
        commands = self._take(partition)
        known = set(self._partitions)
        self._replace(partition)
        self._place(commands)
        since_ms = partition.busy_ms if partition.busy_ms >= 0 else partition.drained_ms
        for pid in self._partitions.keys() - known:
            self._partitions[pid].stand_still(since_ms)

    def _pause(self, partition: PartitionPublishes) -> None:
        wait = BACKOFF_MS[min(partition.attempts, len(BACKOFF_MS) - 1)]
        partition.attempts += 1
        delay = wait + int(self._clock.random() * wait)
        self._timers[partition] = self._clock.call_later(delay, self._resume, partition)

    def _resume(self, partition: PartitionPublishes) -> None:
        del self._timers[partition]
        self._close_client(partition)
        partition.draining = False
        partition.slot.state = SLOT_NEW
        self._place(self._take(partition))
        self._end_round()

    def _take(self, partition: PartitionPublishes) -> list[PendingCommand]:
        """Returns what was refused and what waits, in order."""
        returned, partition.returned = partition.returned, []
        self.target.hold(-sum(command.length for command in returned))
        return returned + self.target.take_waiting(partition.slot)

    def _place(self, commands: list[PendingCommand]) -> None:
        for command in commands:
            self.target.append(command)

    def _close_client(self, partition: PartitionPublishes) -> None:
        client, partition.client = partition.client, None
        partition.slot.sender = None
        if client is not None:
            del self._clients[client]
            self._full.discard(client)
            client.close()

    # --- what the partitions say ---------------------------------------------------------

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        partition = self._clients.get(client)
        if partition is None:
            return
        partition.answered += count_tags(tags)
        if outcome:
            partition.attempts = 0
            now_ms = self._clock.monotonic_ms()
            partition.busy_ms = -1 if partition.is_quiet else now_ms
            if partition.paused_ms >= 0:
                self.pauses += 1
                self.paused_ms += now_ms - partition.paused_ms
                partition.paused_ms = -1
        self._confirm(tags, PublishOutcome.DELETED if self._outlet.is_deleted() else outcome)
        if partition.draining or self.closed:
            self._go_on(partition)
            self._end_round()

    def on_closed(
        self, client: QueueClient, command: PendingCommand, code: Code, to_version: int
    ) -> None:
        """See `PartitionPublisherEvents`."""
        partition = self._clients.get(client)
        if partition is None or not command.tags:
            # Without tags: it was given up, and its failure told, before.
            return
        partition.answered += command.messages
        self.sent_again += command.messages
        partition.returned.append(command)
        partition.sealed |= code is Code.CLOSED
        self._drain(partition)
        self.target.hold(command.length)
        self._go_on(partition)
        self._end_round()

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        if blocked:
            self._full.add(client)
        else:
            self._full.discard(client)
        self.check_flow()

    def _confirm(self, tags: Sequence[int], outcome: PublishOutcome) -> None:
        if self.closed:
            return
        tags = tagged(tags)
        if tags:
            self._outlet.confirm(tags, outcome)

    # --- flow and end --------------------------------------------------------------------

    def check_flow(self) -> None:
        """Stops the channel while a client takes no more, or too much waits here."""
        target, budget = self.target, self._budget
        factor = 2 if self._over else 1
        waiting = target.pending_bytes
        self._over = not self.closed and (
            waiting * factor > target.pending_bytes_max
            or (waiting > 0 and budget.bytes * factor > budget.bytes_max)
        )
        target.over = self._over
        if self._over:
            budget.waiting.add(self)
        else:
            budget.waiting.discard(self)
        blocked = self._over or bool(self._full)
        if blocked != self.blocked:
            self.blocked = blocked
            if not self.closed:
                self._outlet.flow(blocked)

    @property
    def has_pending(self) -> bool:
        """Returns whether a record has no outcome yet."""
        return self.target.pending_bytes > 0 or not all(
            partition.is_quiet for partition in self._partitions.values()
        )

    def close(self) -> None:
        """The channel is gone. What it has published is still stored, if nobody hears of it."""
        self.closed = True
        self.check_flow()
        self._end_round()

    def end(self) -> None:
        """The topic is deleted: what waits is answered as what was sent is, as safe."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for partition in self._partitions.values():
            self._drain(partition)
            partition.sealed = True
            for command in self._take(partition):
                if command.tags:
                    self._confirm(command.tags, PublishOutcome.DELETED)
        self._end_round()

    def _end_round(self) -> None:
        self.check_flow()
        if self.closed and not self.finished and not self.has_pending:
            self.finished = True
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
            for partition in self._partitions.values():
                self._close_client(partition)
            self._outlet.finished()
