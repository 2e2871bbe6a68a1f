"""Carries out the operations of a quorum queue that move messages, on the node that leads it.

    claimed ─▶ routed, logged ─▶ published as producer NAME, sequence = offset ─▶ confirmed ─▶ done
                                              ▲                 │
                                              └── from the first without a confirm: refused, lost,
                                                  or another node leads

Exactly once, where the target knows producers (`QueueFeatures.drops_repeats`): the route of a
message is in the log before it is published, so every leader publishes the same messages to the
same queue, each of its streams without gaps and in the order of the offsets. What a queue has of
them is therefore always all up to its highest sequence, and it drops what it gets again.

What cannot be routed, and what was routed to queues that are deleted since, comes back to the
queue. What only cannot go now, waits: for a target that is full, or has no leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.queues.dead_letter_publisher import DeadLetterRoutes
from convoymq.queues.earliest_timer import EarliestTimer
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.null_events import NullEvents
from convoymq.queues.quorum.moves import Move, MoveSpec, move_of, unpack_spec
from convoymq.queues.quorum.operations import ADVANCE, Operation, Summary, Target

if TYPE_CHECKING:
    from convoymq.queues.quorum.client import QuorumClient
    from convoymq.queues.quorum.queue import QuorumQueue
    from convoymq.shells.groups.replica import Replica

WINDOW = 512
"""Messages of one operation on their way."""
SLICE_MESSAGES = 64
"""So many are routed or published before others have their turn."""
PAUSE_MS = 500
"""Before a target that could not take a message is tried again."""
TARGETS_OPEN_MAX = 64
"""Streams to targets that an operation keeps without need."""


class _Stream:
    """A stream of publishes to one target."""

    __slots__ = ("client", "open")

    def __init__(self, client: QueueClient) -> None:
        self.client = client
        self.open = 0
        """Publishes without an answer."""


class _Job:
    """An operation that is carried out here."""

    def __init__(self, operation: Operation, spec: MoveSpec | None, producer: bytes) -> None:
        self.id = operation.id
        self.spec = spec
        self.producer = producer
        self.done = operation.first
        """All offsets below this one are confirmed, or to come back."""
        self.sent = operation.first
        self.open: dict[int, set[int]] = {}
        """Offset -> groups that have not answered."""
        self.confirmed: set[int] = set()
        """Offsets that some target has."""
        self.back: set[int] = set()
        self.streams: dict[int, _Stream] = {}
        self.attempt = 0
        self.due_ms = 0
        self.is_asking = False
        self.waits_for = ""

    def look(self) -> None:
        """Goes over what has no target that could answer any more."""
        while self.done < self.sent and self.done not in self.open:
            self.done += 1

    def restart(self) -> None:
        """From the first offset that is not done, in new streams."""
        self.look()
        self.close()
        self.attempt += 1
        self.sent = self.done
        self.open.clear()
        self.confirmed.clear()
        self.back = {offset for offset in self.back if offset < self.done}

    def close(self) -> None:
        """Ends the streams; what is under way may arrive nevertheless."""
        for stream in self.streams.values():
            stream.client.close()
        self.streams.clear()

    def take_off(self, offset: int, group: int) -> None:
        """A target answers no more about a message."""
        waiting = self.open.get(offset)
        if waiting is None:
            return
        waiting.discard(group)
        if not waiting:
            del self.open[offset]
            if offset not in self.confirmed:
                self.back.add(offset)
            self.confirmed.discard(offset)


class OperationMover(NullEvents):
    """Part of a `QuorumQueue`; see the module text. Events of its clients end here."""

    def __init__(self, queue: QuorumQueue, routes: DeadLetterRoutes | None) -> None:
        self._queue = queue
        self._routes = routes
        self._jobs: dict[str, _Job] = {}
        self._tags: dict[int, tuple[_Job, int, int, int]] = {}
        """Publish tag -> (job, its attempt, offset, group)."""
        self._tag = 0
        self._client: QuorumClient | None = None
        """Of the queue itself, for what is logged."""
        self._timer = EarliestTimer(queue.clock, self._work)

    # --- what the queue says -------------------------------------------------------------

    def on_leader(self, replica: Replica | None) -> None:
        """Another term; `replica`: this node leads, from now on."""
        self.stop()
        if replica is not None and replica.machine.operations.by_id:
            self.wake()

    def wake(self) -> None:
        """Something was claimed, or may go on."""
        self._timer.soon(0)

    def stop(self) -> None:
        """Stops all jobs: this node does not lead, or the queue is gone."""
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()
        self._tags.clear()
        self._close_client()
        self._timer.cancel()

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None and not self._queue.deleted:
            client.close()

    def waits_for(self, id: str) -> str:
        """Returns why an operation does not go on; "" = it does, or this node does not lead."""
        job = self._jobs.get(id)
        return job.waits_for if job is not None else ""

    # --- time ----------------------------------------------------------------------------

    def _work(self) -> None:
        queue = self._queue
        replica = queue.replica()
        if queue.deleted or self._routes is None or queue.leader != queue.node:
            return
        if replica is None or not replica.is_leader:
            return
        operations = replica.machine.operations.by_id
        for id in [id for id in self._jobs if id not in operations]:
            self._jobs.pop(id).close()
        now = queue.clock.monotonic_ms()
        for operation in list(operations.values()):
            if operation.spec is None or not operation.next:
                continue
            job = self._jobs.get(operation.id)
            if job is None:
                spec = unpack_spec(operation.spec)
                job = self._jobs[operation.id] = _Job(operation, spec, self._producer(operation))
            if job.due_ms > now:
                self._timer.soon(job.due_ms - now)
            else:
                self._carry_out(job, operation, self._routes)
        if not operations:
            self._close_client()

    def _producer(self, operation: Operation) -> bytes:
        """Names this operation for ever: ids may be used again."""
        return f"convoy.operation.{self._queue.group}.{operation.began}.{operation.id}".encode()

    def _pause(self, job: _Job, reason: str) -> None:
        job.waits_for = reason
        job.due_ms = self._queue.clock.monotonic_ms() + PAUSE_MS
        self._timer.soon(PAUSE_MS)

    # --- one operation -------------------------------------------------------------------

    def _carry_out(self, job: _Job, operation: Operation, routes: DeadLetterRoutes) -> None:
        if job.done < operation.first:
            # Another leader's word.
            job.done = operation.first
            job.sent = max(job.sent, job.done)
        job.waits_for = ""
        end = min(operation.routed, job.sent + SLICE_MESSAGES)
        while job.sent < end and len(job.open) < WINDOW:
            if not self._publish(job, operation, job.sent, routes):
                break
            job.sent += 1
        else:
            if job.sent < operation.routed and len(job.open) < WINDOW:
                self._timer.soon(0)
        job.look()
        if not job.is_asking:
            self._advance(job, operation, routes)

    def _advance(self, job: _Job, operation: Operation, routes: DeadLetterRoutes) -> None:
        """Logs how far the operation is, and where the next messages go."""
        found: list[tuple[int, tuple[Target, ...]]] = []
        if operation.routed < operation.next and operation.routed - job.done < WINDOW // 2:
            found = self._route_next(job, operation, routes)
        if job.done == operation.first and not found:
            return
        upto = job.done
        op = {
            "op": ADVANCE,
            "operation": job.id,
            "upto": upto,
            "back": sorted(offset for offset in job.back if offset < job.done),
            "routed": operation.routed,
            "routes": found,
        }
        if self._client is None:
            self._client = self._queue.client(self._queue.new_session(), self)
        job.is_asking = True

        def answered(_reply: Summary | None, error: BrokerError | None) -> None:
            job.is_asking = False
            if error is not None:
                self._pause(job, error.text)
            else:
                job.back = {offset for offset in job.back if offset >= upto}
                self._timer.soon(0)

        self._client.reservation(msgspec.msgpack.encode(op), answered)

    def _route_next(
        self, job: _Job, operation: Operation, routes: DeadLetterRoutes
    ) -> list[tuple[int, tuple[Target, ...]]]:
        """Returns (count, targets) of the next messages, as far as it can be said now."""
        found: list[tuple[int, tuple[Target, ...]]] = []
        end = min(operation.next, operation.routed + SLICE_MESSAGES)
        for offset in range(operation.routed, end):
            try:
                targets = self._targets(job, operation, offset, routes)
            except Unavailable as error:
                self._pause(job, error.text)
                break
            if found and found[-1][1] == targets:
                found[-1] = (found[-1][0] + 1, targets)
            else:
                found.append((1, targets))
        return found

    def _targets(
        self, job: _Job, operation: Operation, offset: int, routes: DeadLetterRoutes
    ) -> tuple[Target, ...]:
        """Returns the targets of a message; () = nowhere. Raises Unavailable."""
        move = self._move(job, operation, offset)
        if move is None:
            return ()
        try:
            queues = routes.route_dead_letter(
                self._queue.vhost, move.exchange, move.keys, move.headers, move.properties
            )
        except Unavailable:
            raise
        except BrokerError:
            return ()
        if move.asked and not all(queue.serves_attributes for queue in queues):
            return ()
        return tuple((queue.name, queue.group) for queue in queues)

    def _move(self, job: _Job, operation: Operation, offset: int) -> Move | None:
        """Returns a message on its way; None: it has none. Raises Unavailable."""
        ((_, run),) = operation.held.between(offset, offset + 1, 1)
        block = self._queue.entry_bytes(run[0])
        if block is None:
            raise Unavailable("a message cannot be read here")
        if job.spec is None:
            return None
        return move_of(batch.record(block, run[1], run[2]), job.spec)

    def _publish(
        self, job: _Job, operation: Operation, offset: int, routes: DeadLetterRoutes
    ) -> bool:
        """Sends a message to all of its targets that are there; False: not now."""
        targets = operation.route_of(offset)
        if not targets:
            return True
        try:
            move = self._move(job, operation, offset)
            found = [routes.queue_of_group(self._queue.vhost, *target) for target in targets]
        except Unavailable as error:
            self._pause(job, error.text)
            return False
        queues = [queue for queue in found if queue is not None]
        full = [queue.name for queue in queues if queue.refuses_publishes]
        if full:
            self._pause(job, f"queue '{full[0]}' is full")
            return False
        if move is None or not queues:
            job.back.add(offset)
            return True
        job.open[offset] = {queue.group for queue in queues}
        routes.count(self._queue.vhost, move.exchange, queues, 1)
        for queue in queues:
            stream = self._stream(job, queue)
            target = stream.client.target
            if queue.features.drops_repeats:
                target.name_next(job.producer, offset)
            self._tag += 1
            self._tags[self._tag] = (job, job.attempt, offset, queue.group)
            stream.open += 1
            target.publish(move.parts, move.header.body_size, self._tag, move.flags)
        return True

    def _stream(self, job: _Job, queue: Queue) -> _Stream:
        stream = job.streams.get(queue.group)
        if stream is None:
            if len(job.streams) >= TARGETS_OPEN_MAX:
                for group in [g for g, each in job.streams.items() if not each.open]:
                    job.streams.pop(group).client.close()
            client = queue.client(self._queue.new_session(), self)
            stream = job.streams[queue.group] = _Stream(client)
        return stream

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`: confirms and refusals of targets."""
        # Publishes to a queue that is deleted are confirmed: nobody has the message.
        gone = client.queue.ended is not None or bool(getattr(client.queue, "deleted", False))
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                known = self._tags.pop(tag, None)
                if known is None:
                    continue
                job, attempt, offset, group = known
                if attempt != job.attempt:
                    continue
                if not outcome and not gone:
                    # Nobody knows what became of it: what follows it must not get there first.
                    job.restart()
                    self._pause(job, f"queue '{client.queue.name}' did not take a message")
                    continue
                if group in job.streams:
                    job.streams[group].open -= 1
                if not gone:
                    job.confirmed.add(offset)
                job.take_off(offset, group)
        self._timer.soon(0)
