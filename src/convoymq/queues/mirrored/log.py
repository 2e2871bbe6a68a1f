# cython: annotation_typing=False
"""Log of a queue that may have mirrors: what is added goes to them as well.

One flush is one broadcast, unless the ring has no room: what is added meanwhile goes out in one
broadcast later. Without mirrors it is the plain log of a classic queue.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol, cast

from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.log_writer import Done
from convoymq.queues.classic.runs import Place
from convoymq.queues.mirrored.confirms import Confirms
from convoymq.queues.mirrored.instructions import (
    Applied,
    HandedOut,
    Instruction,
    Messages,
    Noted,
    Settled,
    TimeToLive,
    encode,
)


class Broadcaster(Protocol):
    """Part of `shells.ring.shell.RingMember` that a master's log needs."""

    def may_broadcast(self) -> bool:
        """Returns whether there is room for a broadcast."""

    def broadcast(self, payload: bytes) -> int:
        """Sends a payload to the mirrors; numbers rise by one."""


class BroadcastLog(ClassicLog):
    """See the module text."""

    ring: Broadcaster | None = None
    """None: there are no mirrors, and never were."""
    last_number = 0
    """Of the last broadcast."""
    holds = False
    """No file goes, and none is compacted."""
    _moving = False

    def connect(self, ring: Broadcaster) -> None:
        """From now on what is added is broadcast while mirrors take part."""
        self.ring = ring
        self.confirms = Confirms()
        self.last_number = 0
        self._outgoing: list[Instruction] = []

    def tell(self, instruction: Instruction) -> None:
        """Adds an instruction to the next broadcast, if a mirror takes part."""
        if self.ring is not None and self.confirms.stored and not self._moving:
            self._outgoing.append(instruction)

    def add_messages(
        self,
        position: int,
        command: memoryview | bytes,
        time_ms: int = 0,
        *,
        level: int = 0,
        live: int | None = None,
    ) -> Place:
        """See `ClassicLog`."""
        # First: a full file is flushed by this, and what was added before belongs to it.
        place = super().add_messages(position, command, time_ms, level=level, live=live)
        # Encoded in this round: until then the buffer stays as it is.
        self.tell(Messages(position, time_ms, cast(bytes, command)))
        return place

    def add_settled(self, pairs: Sequence[int]) -> None:
        """See `ClassicLog`."""
        super().add_settled(pairs)
        self.tell(Settled(struct.pack(f"<{len(pairs)}Q", *pairs)))

    def add_handed_out(self, position: int, level: int = 0) -> None:
        """See `ClassicLog`."""
        super().add_handed_out(position, level)
        self.tell(HandedOut(position, level))

    def add_noted(self, first: int, last: int, note: bytes) -> None:
        """See `ClassicLog`."""
        super().add_noted(first, last, note)
        self.tell(Noted(first, last, note))

    def set_time_to_live(self, position: int, ttl_ms: int | None) -> None:
        """See `ClassicLog`."""
        super().set_time_to_live(position, ttl_ms)
        self.tell(TimeToLive(position, ttl_ms))

    def add_applied(self, session: int, seq: int, refused: int) -> None:
        """Tells mirrors how far a session is; the log on disk does not say it."""
        self.tell(Applied(session, seq, refused))

    def move_messages(
        self,
        position: int,
        command: memoryview | bytes,
        time_ms: int,
        settled: Sequence[int],
        *,
        level: int = 0,
    ) -> Place:
        """See `ClassicLog`. Every copy moves what lies in its own files."""
        self._moving = True
        try:
            return super().move_messages(position, command, time_ms, settled, level=level)
        finally:
            self._moving = False

    def collect(self) -> None:
        """See `ClassicLog`."""
        if not self.holds:
            super().collect()

    def oldest_is_sparse(self) -> int | None:
        """See `ClassicLog`."""
        return None if self.holds else super().oldest_is_sparse()

    def flush(self, done: Done, *, durable: bool = True) -> bool:
        """See `ClassicLog`: `done` comes when the mirrors have it as well."""
        if self.ring is None:
            return super().flush(done, durable=durable)
        confirms = self.confirms
        write = confirms.add(self.send(), done)
        if super().flush(lambda error: confirms.on_written(write, error)):
            return True
        confirms.withdraw(write)
        return False

    @property
    def is_settled(self) -> bool:
        """See `ClassicLog`."""
        return super().is_settled and (self.ring is None or not self._outgoing)

    @property
    def has_room(self) -> bool:
        """Returns whether what is told now is sent with the next broadcast."""
        return self.ring is not None and self.ring.may_broadcast()

    def send(self) -> int:
        """Broadcasts what was added, if there is room; returns the number of the broadcast that has
        it, or will have it."""
        if self.ring is None or not self._outgoing:
            return self.last_number
        if not self.has_room:
            return self.last_number + 1
        outgoing, self._outgoing = self._outgoing, []
        self.last_number = self.ring.broadcast(encode(outgoing))
        return self.last_number
