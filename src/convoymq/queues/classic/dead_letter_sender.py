"""Publishes the dead letters of a classic queue, at its home (ADR 0055).

    machine.leaving ─▶ record from memory or the queue's log ─▶ route ─▶ clients of the targets

Messages wait in the machine until they are published, on disk if there are many. They are settled
in the queue's log then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.errors import StorageFault
from convoymq.queues.classic.runs import Run
from convoymq.queues.dead_letter_publisher import Cause, DeadLetterOptions, DeadLetterPublisher

if TYPE_CHECKING:
    from convoymq.queues.classic.queue import LocalQueue

SLICE_MESSAGES = 256
"""So many are published before others have their turn."""


BLOCKED_WAIT_MS = 1_000
"""Pause of a blocked sender before it looks again; `on_flow` comes earlier, unless its target is
gone."""


class DeadLetterSender(DeadLetterPublisher):
    """Part of a `LocalQueue`; see the module text."""

    def __init__(self, queue: LocalQueue, options: DeadLetterOptions | None) -> None:
        super().__init__(queue, options)
        self._queue = queue

    def on_left(self) -> None:
        """Something is leaving, or was lost."""
        leaving = self._queue.machine.leaving
        if leaving.lost:
            self._lose(leaving.lost, "targets are too slow")
            leaving.lost = 0
        if leaving.runs:
            self._timer.soon(BLOCKED_WAIT_MS if self._is_blocked else 0)

    def on_deleted(self) -> None:
        """The queue is gone."""
        if self._queue.machine.leaving.count:
            self._lose(self._queue.machine.leaving.count, "the queue was deleted")
        self._close()

    def on_crashed(self) -> None:
        """The queue is stopped: what was not published stays in its log, if it is durable."""
        if self._queue.machine.leaving.count and not self._queue.durable:
            self._lose(self._queue.machine.leaving.count, "the queue has crashed")
        self._close()

    def stop(self) -> None:
        """The node stops: what was not published stays in the queue's log."""
        self._timer.cancel()

    @property
    def waits(self) -> bool:
        return bool(self._queue.machine.leaving.runs)

    def _work(self) -> None:
        queue = self._queue
        if queue.ended is None and queue.machine.leaving.runs and not queue.host.is_paused:
            queue.host.contain(queue, self._send_some)

    def _send_some(self) -> None:
        queue = self._queue
        leaving = queue.machine.leaving
        left = SLICE_MESSAGES
        while leaving.runs and left > 0:
            if self._is_blocked:
                break
            run, reason = leaving.take(left)
            left -= run.count
            if self._options is None:
                self._lose(run.count, "no route")
            else:
                self._publish(run, reason)
            queue.machine.forget(run)
        queue.settle_leaving()

    def _publish(self, run: Run, reason: str) -> None:
        try:
            data, command = self._queue.machine.body_of(run.block)
        except (StorageFault, OSError):
            self._lose(run.count, "not readable")
            return
        self._publish_once(data, command, run.first, run.count, Cause(reason, run.note.annotations))
