"""Credit of consumers, and what they say of messages, in the book of a queue that a host keeps.

What is asserted (ADR 0200, ADR 0206):

- A consumer with credit gets no message beyond what it was granted, and none after a drain.
- A message does not come to a consumer again that called it undeliverable, while the queue lives.
- A message that is to wait is not given before its time.
- It comes with what was said of it, and with the count of its failures. A life of the queue that
  begins may have missed the last words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from convoymq.queues.classic.machine import ClassicMachine
from convoymq.queues.classic.notes import NOTHING
from convoymq.queues.classic.runs import Consumer, Run, Session
from convoymq.queues.outcomes import (
    FLAG_DRAIN,
    FLAG_FAILED,
    FLAG_UNDELIVERABLE,
    Modified,
)

Key = tuple[int, int]
"""(session, number) of a consumer."""
Said = tuple[int, bytes]
"""(deliveries that have failed, annotations)"""
_SILENCE: Said = (0, b"")


class Outcomes:
    """See the module text.

    Args:
        told: message -> all that was ever said of it, in every life.
        fail: stops the run.
    """

    def __init__(self, told: dict[bytes, set[Said]], fail: Callable[[str], NoReturn]) -> None:
        self._told = told
        self._fail = fail
        self._said: dict[bytes, Said] = {}
        self._avoids: dict[bytes, set[Key]] = {}
        self._due: dict[bytes, int] = {}
        self._limits: dict[Key, int] = {}
        self._highest: dict[Key, int] = {}
        """Highest limit of each consumer since the last look."""
        self._given: dict[tuple[int, int, int], bytes] = {}

    def is_avoided(self, identity: bytes) -> bool:
        """Returns whether some consumer called a message undeliverable."""
        return identity in self._avoids

    def said_of(self, identity: bytes) -> Said:
        """Returns what was said of a message."""
        return self._said.get(identity, _SILENCE)

    def found(self, identity: bytes, run: Run) -> None:
        """The queue was opened with a message."""
        if run.note != NOTHING:
            said = run.note.failed_count, run.note.annotations
            if said not in self._told.get(identity, ()):
                self._fail(f"{identity.hex()} comes back with {said}, which nobody said")
            self._said[identity] = said

    def follow(self, machine: ClassicMachine) -> None:
        """Has a machine report what consumers tell it."""
        modify, grant = machine._modify, machine._grant

        def altered(session: Session, number: int, flags: int, modified: Modified) -> None:
            consumer = session.consumers.get(number)
            if consumer is not None:
                self._on_modified(consumer, flags, modified)
            modify(session, number, flags, modified)

        def granted(consumer: Consumer | None, flags: int, body: bytes) -> None:
            if consumer is not None and consumer.limit >= 0:
                key = consumer.session, consumer.number
                limits = self._highest.get(key, 0), self._limits.get(key, 0)
                self._limits[key] = int.from_bytes(body[:8], "little")
                self._highest[key] = max(*limits, self._limits[key])
                grant(consumer, flags, body)
                if flags & FLAG_DRAIN:
                    self._limits[key] = min(self._limits[key], consumer.next_id)
            else:
                grant(consumer, flags, body)

        machine._modify = altered  # type: ignore[method-assign]
        machine._grant = granted  # type: ignore[method-assign]

    def _on_modified(self, consumer: Consumer, flags: int, body: Modified) -> None:
        key = consumer.session, consumer.number
        for first, last in zip(body.ranges[::2], body.ranges[1::2], strict=True):
            for start, run in zip(consumer.first_ids, consumer.runs, strict=True):
                for number in range(max(start, first), min(start + run.count - 1, last) + 1):
                    identity = self._given[(*key, number)]
                    failed, said = self.said_of(identity)
                    now = failed + bool(flags & FLAG_FAILED), body.annotations or said
                    self._said[identity] = now
                    self._told.setdefault(identity, set()).add(now)
                    self._due[identity] = body.due_ms
                    if flags & FLAG_UNDELIVERABLE:
                        self._avoids.setdefault(identity, set()).add(key)

    def on_looked(self) -> None:
        """Everything that was given so far was looked at."""
        self._highest.clear()

    def on_given(
        self, identity: bytes, receiver: tuple[int, int, int], said: Sequence[object], now_ms: int
    ) -> None:
        """A consumer gets a message, with what was said of it."""
        key, number = receiver[:2], receiver[2]
        self._given[receiver] = identity
        if key in self._avoids.get(identity, ()):
            self._fail(f"{identity.hex()} comes again to {key}, which called it undeliverable")
        if now_ms < self._due.get(identity, 0):
            self._fail(f"{identity.hex()} comes {self._due[identity] - now_ms} ms early")
        if key not in self._limits:
            return
        limit = max(self._limits[key], self._highest.get(key, 0))
        if number >= limit:
            self._fail(f"{key} gets message {number}, and was granted {limit}")
        if tuple(said or _SILENCE) != self.said_of(identity):
            self._fail(f"{identity.hex()} comes with {said}, and not {self.said_of(identity)}")
