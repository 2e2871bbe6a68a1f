# cython: annotation_typing=False
"""Messages that leave a quorum queue other than by acknowledgement or purge (ADR 0044).

    leave(run, reason) --off----------> dropped
                       --at most once-> DEAD_LETTERS effect: the leader publishes it, or it is lost
                       --at least once> kept here until the leader says that it was published

What is kept is numbered from 0 in the order in which it left, for ever. It is neither ready nor
checked out; its entries stay in the live ranges. A purge drops it, and so does CONFIG when it
switches the strategy away from at-least-once.

Every message that leaves is counted by its reason in `Backlog.dropped`, whatever becomes of it.

Invariants: numbers of what is kept ascend and lie below `next_number`; nothing is kept unless the
strategy is at-least-once; every number that is kept has a reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from convoymq.model import trace as words
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.quorum.backlog import (
    EXPIRED,
    OVER_DELIVERY_LIMIT,
    OVER_LENGTH,
    REJECTED,
    Backlog,
)
from convoymq.queues.quorum.consumers import Consumer
from convoymq.queues.quorum.notes import NOTHING
from convoymq.queues.sessions import Packed
from convoymq.replication.machine import EFFECT_DEAD_LETTERS, EFFECT_NOTE

#: Values of the setting `dead_letters`.
OFF = 0
AT_MOST_ONCE = 1
AT_LEAST_ONCE = 2
SETTING = "dead_letters"

#: In the order of their numbers in snapshots: new ones go to the end.
REASONS = (REJECTED, OVER_DELIVERY_LIMIT, EXPIRED, OVER_LENGTH)
_TRACED = {
    REJECTED: words.REJECTED,
    OVER_DELIVERY_LIMIT: words.OVER_DELIVERY_LIMIT,
    EXPIRED: words.EXPIRED,
    OVER_LENGTH: words.OVER_LENGTH,
}

Letters = tuple[int, int, int, int, int, str, bytes]
"""(number of the first, entry index, command offset, first record, count, reason, annotations):
neighbouring messages that left for one reason."""


class DeadLetters:
    """Dead letters of a machine's queue: counted, and those of them that are kept."""

    __slots__ = ("_reasons", "backlog", "held", "machine", "next_number")

    def __init__(self, machine: GroupMachine, backlog: Backlog) -> None:
        self.machine = machine
        self.backlog = backlog
        self.held = backlog.dead_letters
        self.next_number = 0
        #: [first number, index in REASONS], ascending: of the numbers from there on.
        self._reasons: deque[list[int]] = deque()

    @property
    def strategy(self) -> int:
        """OFF, AT_MOST_ONCE or AT_LEAST_ONCE. Version 1 has no such setting."""
        return int(self.machine.settings.get(SETTING, OFF))

    # ---------------------------------------------------------------- leaving

    def leave(self, run: runs.Run, reason: str, consumer: Consumer | None = None) -> None:
        """Takes a run that is in no FIFO and held by nobody any more. `consumer`: who held it until
        now; None: it was ready."""
        count = run[3]
        assert count > 0, "nothing leaves"
        machine = self.machine
        if machine.trace is not None:
            flags, session, number = 0, 0, 0
            if consumer is not None:
                flags, session, number = words.HELD, consumer.session.id, consumer.number
            tracing.left(machine.trace, words.DROPPED, flags, _TRACED[reason], session, number, run)
        self.backlog.drop(count, reason)
        strategy = self.strategy
        notes = self.backlog.notes
        for part, note in notes.parts(run) if notes.by_place else ((run, NOTHING),):
            machine.effects.append((EFFECT_DEAD_LETTERS, strategy, reason, *part[:4], note[0]))
            if note[1]:
                notes.let_in(part, ())
        if reason == OVER_DELIVERY_LIMIT:
            machine.effects.append((EFFECT_NOTE, "quorum.delivery_limit", {"count": count}))
        if strategy == AT_LEAST_ONCE:
            self._keep(run, REASONS.index(reason))
        if strategy != AT_LEAST_ONCE:
            if self.backlog.follows():
                self.backlog.gone(run)
        elif self.backlog.groups.heads:
            # Its note goes when it is published.
            self.backlog.gone_from_group(run)

    def _keep(self, run: runs.Run, reason: int) -> None:
        reasons = self._reasons
        if not self.held.messages:
            reasons.clear()
        if not reasons or reasons[-1][1] != reason:
            reasons.append([self.next_number, reason])
        self.held.add(self.next_number, *run)
        self.next_number += run[3]

    def settle(self, ranges: Sequence[int]) -> None:
        """Forgets what was published: numbers (first, last, first, last, …; inclusive)."""
        for i in range(0, len(ranges), 2):
            if ranges[i] <= ranges[i + 1]:
                for run in self.held.remove(ranges[i], ranges[i + 1]):
                    self._forget(run)
        self._trim()

    def _forget(self, run: runs.Run) -> None:
        if self.backlog.notes.by_place:
            self.backlog.notes.forget(run)

    def _trim(self) -> None:
        """Forgets reasons of numbers that are gone."""
        reasons = self._reasons
        if not self.held.messages:
            reasons.clear()
            return
        oldest = self.held.first_id()
        while len(reasons) > 1 and reasons[1][0] <= oldest:
            reasons.popleft()

    def drop_all(self) -> int:
        """Drops what is kept; returns how many messages."""
        count = self.held.messages
        for run in self.held.remove_all():
            self._forget(run)
        self._reasons.clear()
        assert not self.held.messages, "messages were left by a purge"
        return count

    def on_configured(self) -> None:
        """The settings have changed: without the strategy nothing is kept."""
        if self.strategy != AT_LEAST_ONCE:
            self.drop_all()

    # ---------------------------------------------------------------- what is kept

    def letters(self, first: int, limit: int) -> list[Letters]:
        """Returns what is kept from a number on, at most `limit` messages. Cost: O(log runs) +
        O(runs listed)."""
        made: list[Letters] = []
        for number, run, said in self._between(first, limit):
            record, left = run[2], min(run[3], limit)
            limit -= left
            while left:
                reason, end = self._reason_of(number)
                count = min(left, end - number)
                made.append((number, run[0], run[1], record, count, reason, said))
                number += count
                record += count
                left -= count
            if not limit:
                break
        return made

    def _between(self, first: int, limit: int) -> Iterator[tuple[int, runs.Run, bytes]]:
        notes = self.backlog.notes
        for number, run in self.held.between(first, self.next_number, limit):
            if not notes.by_place:
                yield number, run, b""
                continue
            for part, (said, _) in notes.parts(run):
                yield number, part, said
                number += part[3]

    def _reason_of(self, number: int) -> tuple[str, int]:
        """Returns the reason of a number, and the first number above it that may have another
        one."""
        found, end = "", self.next_number
        for first, reason in self._reasons:
            if first > number:
                end = first
                break
            found = REASONS[reason]
        assert found, "a dead letter has no reason"
        return found, end

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> dict[str, object]:
        """Plain values, equal for equal content."""
        return {
            "held": self.held.pack(),
            "next": self.next_number,
            "reasons": [list(each) for each in self._reasons],
        }

    def unpack(self, known: Packed) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        self.held.unpack(known["held"])
        self.next_number = known["next"]
        self._reasons = deque([first, reason] for first, reason in known["reasons"])
        for _, reason in self._reasons:
            if not 0 <= reason < len(REASONS):
                raise ValueError(f"dead letters: reason {reason} is not known")

    def check(self) -> list[runs.Run]:
        """Asserts what the module docstring promises; returns the runs that are kept."""
        held = self.held.held()
        assert not held or self.strategy == AT_LEAST_ONCE, "dead letters are kept for nobody"
        last = -1
        for number, run in held:
            assert number > last, "numbers of dead letters overlap"
            last = number + run[3] - 1
            self._reason_of(number)
        assert last < self.next_number, "a dead letter has a number that was not given out"
        kept = [run for _, run in held]
        assert sum(run[3] for run in kept) == self.held.messages
        assert sum(run[4] for run in kept) == self.held.size
        firsts = [first for first, _ in self._reasons]
        assert firsts == sorted(set(firsts)), "reasons of dead letters are not in order"
        return kept
