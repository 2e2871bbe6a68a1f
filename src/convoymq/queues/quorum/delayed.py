# cython: annotation_typing=False
"""Messages of a quorum queue that wait for a time (ADR 0049).

    published with x-delay or x-deliver-at ---> waits --its time has come--> ready, at the tail
    came back, by the setting delayed_retry --> waits --its time has come--> ready, returned
    waits --cancelled by CANCEL_SCHEDULED, purged, or the queue is too long--> gone

Times are those of the log: a message is ready with the first entry whose time is not below its own.
What is due goes in the order of the times, then of the log. Of an entry at most FIRE_RUNS_MAX runs
become ready; the rest follow with the next ones.

What waits is neither ready nor checked out. It counts toward `max_length`, not toward bytes. It
expires no earlier than it is due.

A message in a group does not wait for a time by its headers; while one waits for its retry, those
behind it in its group are blocked.

A message that has waited since it was published enters behind all that is in the queue, at the
default level; one with a priority above that enters with what came back, in front. A retry goes
where the queue puts what comes back.

Invariants: nothing waits whose time has come, unless more did than one entry may carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.model import trace as words
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.quorum.waiting import Waiting
from convoymq.queues.sessions import Packed

if TYPE_CHECKING:
    from convoymq.queues.quorum.backlog import Backlog
    from convoymq.queues.quorum.machine import QuorumMachine

FIRE_RUNS_MAX = 4096
CANCEL_SCHEDULED = "cancel_scheduled"
CANCEL_MAX = 10_000
"""So many messages may one command name."""
DUE_MS_MAX = (1 << 48) - 1
"""No message waits longer."""
BAD_CANCEL = "malformed list of messages"

#: Values of the setting `delayed_retry`: which of the messages that come back wait.
RETRY_OFF = 0
RETRY_ALL = 1
RETRY_FAILED = 2
RETRY_RETURNED = 3


class Delayed:
    """Delayed messages of a machine's queue."""

    __slots__ = ("backlog", "machine", "retry", "retry_max_ms", "retry_min_ms", "waiting")

    def __init__(self, machine: QuorumMachine, backlog: Backlog) -> None:
        self.machine = machine
        self.backlog = backlog
        self.waiting: Waiting = backlog.waiting
        self.retry = RETRY_OFF
        self.retry_min_ms = 0
        self.retry_max_ms = 0

    def follow(self, settings: Mapping[str, int]) -> None:
        """Has what comes back from now on wait by the settings."""
        self.retry = settings.get("delayed_retry", RETRY_OFF)
        self.retry_min_ms = settings.get("delayed_retry_min_ms", 0)
        self.retry_max_ms = settings.get("delayed_retry_max_ms", 0)

    # ---------------------------------------------------------------- begins to wait

    def enqueue(self, index: int, first: int, count: int, data: bytes, offset: int) -> None:
        """Takes records of an ENQUEUE of which some have headers for queues. Cost: O(records), and
        a run for those that follow each other, are asked the same and are not blocked."""
        backlog, now_ms = self.backlog, self.machine.time_ms
        found = backlog.groups.enqueue(
            data, index, offset, first, count, now_ms, backlog.message_ttl_ms
        )
        beside = count
        for at in range(0, len(found), 5):
            due_ms, record, messages = found[at], found[at + 1], found[at + 2]
            size, mark = found[at + 3], found[at + 4]
            if due_ms:
                self.waiting.add(due_ms, (index, offset, record, messages, size, 0, 0, mark))
            else:
                backlog.enqueue(index, offset, record, messages, size, mark)
                beside -= messages
        # What is blocked, and what waits.
        backlog.beside += beside

    def retries(self, run: runs.Run, failed: int, due_ms: int = 0) -> bool:
        """Makes a run that has come back wait, if its client or its counts say so; returns whether
        it waits. `due_ms`: see `Backlog.give_back`."""
        if due_ms:
            if due_ms <= self.machine.time_ms:
                return False
            self.waiting.add(min(due_ms, DUE_MS_MAX), run)
            return True
        if self.retry == RETRY_OFF or self.retry == (RETRY_RETURNED if failed else RETRY_FAILED):
            return False
        delay_ms = min(self.retry_min_ms * max(1, run[6]), self.retry_max_ms)
        if delay_ms <= 0:
            return False
        self.waiting.add(self.machine.time_ms + delay_ms, run)
        return True

    # ---------------------------------------------------------------- waits no more

    def fire(self) -> bool:
        """Makes ready what is due; returns whether there was something."""
        due = self.waiting.take_due(self.machine.time_ms, FIRE_RUNS_MAX)
        for run in due:
            self.backlog.arrive(run)
        if self.backlog.fronted:
            self.backlog.put_front()
        return bool(due)

    def cancel(self, op: Packed) -> dict[str, object] | None:
        """CANCEL_SCHEDULED: drops messages that wait, by [due ms, entry, offset, record] of each.
        Returns the answer; None = the command is malformed."""
        named = op.get("messages")
        if not isinstance(named, list) or len(named) > CANCEL_MAX:
            return None
        for each in named:
            if not isinstance(each, list) or len(each) != 4:
                return None
            if not all(isinstance(part, int) and 0 <= part < 1 << 64 for part in each):
                return None
        cancelled = 0
        for due_ms, index, offset, record in named:
            run = self.waiting.remove(due_ms, index, offset, record)
            if run is not None:
                cancelled += 1
                self._trace_purged(run)
                if self.backlog.follows():
                    self.backlog.gone(run)
        self.backlog.purged += cancelled
        return {"cancelled": cancelled}

    def purge(self) -> int:
        """Drops all that waits; returns how many messages."""
        count: int = self.waiting.messages
        if self.machine.trace is not None:
            for run in self.waiting.runs():
                self._trace_purged(run)
        for run in self.waiting.runs() if self.backlog.notes.by_place else ():
            self.backlog.notes.forget(run)
        self.backlog.purged += count
        self.waiting.clear()
        return count

    def _trace_purged(self, run: runs.Run) -> None:
        rows = self.machine.trace
        if rows is not None:
            tracing.left(rows, words.DROPPED, 0, words.PURGED, 0, 0, run)
