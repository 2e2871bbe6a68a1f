"""Publishes the dead letters of a quorum queue, on the node that leads it (ADR 0044).

    effect DEAD_LETTERS, at most once ─▶ line ─▶ route ─▶ clients of the targets
    machine's FIFO, at least once ─▶ DeadLetterWorker ─▶ route ─▶ clients ─▶ confirms ─▶ SETTLE

How they are published: `dead_letter_publisher`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.messages.deaths import DeadLetter, DeadLetterRun, is_cycle
from convoymq.model.errors import BrokerError, NotFound
from convoymq.queues.dead_letter_publisher import (
    AT_LEAST_ONCE_NAME,
    AT_MOST_ONCE_NAME,
    DISABLED_NAME,
    ONCE,
    REFUSED,
    Cause,
    DeadLetterOptions,
    DeadLetterPublisher,
    is_gone,
)
from convoymq.queues.dead_letter_worker import DeadLetterWorker
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.quorum.dead_letters import AT_LEAST_ONCE, AT_MOST_ONCE, OFF, DeadLetters
from convoymq.queues.quorum.settings import dead_letter_strategy
from convoymq.replication.machine import Effect

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue
    from convoymq.shells.groups.replica import Replica

LINE_RUNS_MAX = 10_000
"""At most once: more runs that wait for their targets are lost."""
SLICE_MESSAGES = 256
"""At most once: so many are published before others have their turn."""
SLICE_WORK = 1_024
"""At least once: so many messages are moved, or as many KiB, before others have their turn."""
RUN_WORK = 16
"""Work besides for every run of messages that is moved as one, be it a single message."""
SETTLE_AGAIN_MS = 1_000
"""Time after which what is done and still kept is proposed again: a leader that was about to hand
over, and stayed, may have dropped the command."""
NAMES = {
    OFF: DISABLED_NAME,
    AT_MOST_ONCE: AT_MOST_ONCE_NAME,
    AT_LEAST_ONCE: AT_LEAST_ONCE_NAME,
}
"""Names of the strategies in metrics."""


class DeadLetterMover(DeadLetterPublisher):
    """Part of a `QuorumQueue`; see the module text."""

    def __init__(self, queue: QuorumQueue, options: DeadLetterOptions | None) -> None:
        super().__init__(queue, options)
        self._queue = queue
        self.warning = ""
        """Reason why the strategy is another one than was asked for; empty: it is not."""
        self._line: deque[Effect] = deque()
        self._worker: DeadLetterWorker | None = None
        self._proposed_ms = 0

    # --- what the queue says -------------------------------------------------------------

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `DeadLetterPublisher`; and whether the strategy is the one that was asked for."""
        super().configure(settings)
        warning = dead_letter_strategy(settings)[1]
        if warning and warning != self.warning:
            self._queue.note("queue.dead_letter_fallback", {"reason": warning})
        self.warning = warning

    def info(self, letters: DeadLetters) -> dict[str, object]:
        """Returns the fields of the management API about the strategy."""
        warning = {"dead_letter_warning": self.warning} if self.warning else {}
        return {"dead_letter_strategy": NAMES[letters.strategy], **warning}

    def on_left(self, effect: Effect) -> None:
        """The effect DEAD_LETTERS, on the node that leads."""
        _, strategy, reason, _index, _command, _first, count, _ = effect
        self._queue.left[NAMES[strategy], reason] += count
        if strategy == AT_MOST_ONCE:
            if self._options is None:
                self._lose(count, "no route")
            elif self._queue.leader != self._queue.node:
                # An entry that a leader applies before it knows its own term is committed may
                # have been carried out by the one before it.
                self._queue.note("queue.dead_letters_unknown", {"count": count})
            elif len(self._line) >= LINE_RUNS_MAX:
                self._lose(count, "targets are too slow")
            else:
                self._line.append(effect)
                self._timer.soon(0)
        elif strategy == AT_LEAST_ONCE:
            self._timer.soon(0)

    def on_leader(self, replica: Replica | None) -> None:
        """Another term; `replica`: this node leads, from now on."""
        self._stop()
        if replica is not None and replica.machine.dead_letters.held.messages:
            self._timer.soon(0)

    def on_deleted(self) -> None:
        """The queue is gone."""
        self._stop()

    def _stop(self) -> None:
        lost = sum(effect[6] for effect in self._line)
        if lost:
            self._lose(lost, "no leader")
        self._line.clear()
        self._worker = None
        self._close()

    # --- time ----------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._line)

    def _work(self) -> None:
        queue = self._queue
        replica = queue.replica()
        if queue.deleted or self._options is None or queue.leader != queue.node:
            return
        if replica is None or not replica.is_leader:
            return
        if self._line:
            self._publish_line()
        letters = replica.machine.dead_letters
        if letters.strategy == AT_LEAST_ONCE or self._worker is not None:
            self._move(replica)

    # --- at most once --------------------------------------------------------------------

    def _publish_line(self) -> None:
        left = SLICE_MESSAGES
        while self._line and left > 0:
            if self._is_blocked:
                # `on_flow` goes on.
                return
            effect = self._line.popleft()
            _, _, reason, index, command, first, count, said = effect
            taken = min(count, left)
            left -= taken
            if taken < count:
                rest = (first + taken, count - taken, said)
                self._line.appendleft((*effect[:5], *rest))
            block = self._queue.entry_bytes(index)
            self._publish_once(block, command, first, taken, Cause(reason, said))
        if self._line:
            self._timer.soon(0)

    # --- at least once -------------------------------------------------------------------

    def _move(self, replica: Replica) -> None:
        assert self._options is not None
        letters = replica.machine.dead_letters
        held = letters.held
        worker = self._worker
        if worker is None:
            worker = DeadLetterWorker(self._options.prefetch, self._options.confirm_timeout_ms)
            self._worker = worker
        now = self._queue.clock.monotonic_ms()
        oldest = held.first_id() if held.messages else letters.next_number
        worker.forget_below(oldest)
        if worker.room:
            for first, _, _, _, count, *_ in letters.letters(worker.next_number, worker.room):
                worker.take(first, count, now)
            if worker.room:
                # Whatever has a number above these is settled: by a leader before this one.
                worker.skip_to(letters.next_number)
        self._move_due(worker, letters, now)
        self._propose_settled(replica, worker)
        self._propose_again(replica, worker, now)
        due = worker.next_due_ms()
        if due is not None:
            self._timer.soon(max(0, due - now) + 1)

    def _move_due(self, worker: DeadLetterWorker, letters: DeadLetters, now: int) -> None:
        left = SLICE_WORK
        for first, count in worker.due(now):
            number, end = first, first + count
            for at, entry, command, record, held, reason, said in letters.letters(first, count):
                if at >= end:
                    break
                if at > number:
                    worker.gone(number, at - number)
                number, stop = at, min(at + held, end)
                block = self._queue.entry_bytes(entry)
                while number < stop:
                    if left <= 0:
                        return
                    before = worker.bytes
                    start = record + number - at
                    moved = self._move_run(
                        worker,
                        number,
                        block,
                        (command, start, min(stop - number, left), Cause(reason, said)),
                    )
                    number += moved
                    left -= moved + RUN_WORK + (max(0, worker.bytes - before) >> 10)
            if number < end:
                worker.gone(number, end - number)

    def _move_run(
        self,
        worker: DeadLetterWorker,
        number: int,
        block: bytes | None,
        records: tuple[int, int, int, Cause],
    ) -> int:
        """Publishes a message, and those that follow it and go the same way; returns how many.

        Args:
            block: their entry; None: it cannot be read.
            records: command, first record, how many at most, and the cause of their death.
        """
        now = self._queue.clock.monotonic_ms()
        letters: DeadLetter | DeadLetterRun | None = None
        route: tuple[Queue, ...] = ()
        reason = "not readable"
        count = records[2] if block is None else 1
        if block is not None:
            letters = self._letters(block, *records)
        if letters is not None:
            count = letters.count
            try:
                route = self._route(letters)
                reason = "no route"
            except NotFound:
                reason = f"no exchange '{self._exchange}'"
            except BrokerError as error:
                reason = error.text
                letters = None
        if letters is None:
            self._wait(count, reason)
            worker.failed(number, count, now)
            return count
        deaths = letters.deaths
        queues = {queue.group: queue for queue in route if not is_cycle(deaths, queue.name)}
        if route and not queues:
            self._queue.note("queue.dead_letter_cycle", {"count": count})
            worker.dropped(number, count)
            return count
        if not queues:
            self._wait(count, reason)
        published = []
        for group in worker.routed(number, count, queues, letters.size, now):
            if queues[group].refuses_publishes:
                self._refused(worker, number, number + count - 1, group, now)
                continue
            published.append(queues[group])
            target = self._target(queues[group])
            target.open += count
            letters.publish(target.client.target, number + 1)
        self._count(published, count)
        return count

    def _refused(
        self, worker: DeadLetterWorker, first: int, last: int, group: int, now: int
    ) -> None:
        count = worker.answered(first, last, group, False, now)
        if count:
            self._wait(count, REFUSED)

    def _wait(self, count: int, reason: str) -> None:
        self._queue.note("queue.dead_letters_waiting", {"count": count, "reason": reason})

    def _propose_settled(self, replica: Replica, worker: DeadLetterWorker) -> None:
        settled = worker.take_settled()
        if not settled:
            return
        for first, last in zip(settled[::2], settled[1::2], strict=True):
            self._queue.moved += last - first + 1
        self._proposed_ms = self._queue.clock.monotonic_ms()
        self._propose(replica, settled)

    def _propose_again(self, replica: Replica, worker: DeadLetterWorker, now: int) -> None:
        """Proposes what is done and has not gone for a while."""
        letters = replica.machine.dead_letters
        untaken = letters.next_number - worker.next_number
        if letters.held.messages - untaken <= len(worker):
            return
        self._timer.soon(SETTLE_AGAIN_MS)
        if now - self._proposed_ms < SETTLE_AGAIN_MS:
            return
        self._proposed_ms = now
        taken = letters.letters(0, letters.held.messages - untaken)
        done = [n for each in taken for n in worker.missing(each[0], each[4])]
        self._propose(replica, done)

    def _propose(self, replica: Replica, settled: Sequence[int]) -> None:
        body = batch.pack_ranges(settled)
        replica.propose(batch.CMD_SETTLE, 0, len(settled) // 2, 0, body)

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`: what is published until it is confirmed finds its way anew."""
        return super().on_replaced(client, successor) if self._worker is None else None

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`: confirms and refusals of targets. A tag is a number plus one: a
        target is asked once at a time to take a message."""
        worker = self._worker
        # Publishes to a queue that is deleted are confirmed: nobody has the message.
        took = outcome and not is_gone(client)
        now = self._queue.clock.monotonic_ms()
        group = client.queue.group
        target = self._targets.get(group)
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            if first >= ONCE:
                super().on_published(client, (first, last), outcome)
            elif worker is None:
                continue
            elif took:
                worker.answered(first - 1, last - 1, group, True, now)
            else:
                self._refused(worker, first - 1, last - 1, group, now)
            if target is not None and target.client is client:
                target.open -= last - first + 1
        self._timer.soon(0)
