# cython: annotation_typing=False
"""Notes on messages of a classic queue: what their consumers have said when they gave them back
(ADR 0206).

Every run has one; a run is cut where its messages have different ones. The log says it again with
each change, and mirrors write the same records, so a note lasts as long as its message.

Messages that wait for a time, or that some consumers do not get, are set aside: neither ready nor
held. Each of the latter goes to the next consumer that may have it and has room, before what is
ready. When none is subscribed that may, it leaves as rejected; when all that must not are gone, it
is ready again.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from convoymq.messages.deaths import EXPIRED, REJECTED
from convoymq.queues.classic.handing_out import hand_out, rotate
from convoymq.queues.outcomes import FLAG_FAILED, FLAG_REJECTED, FLAG_UNDELIVERABLE, Modified

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Consumer, Run

NOTES_MAX = 65_536
"""Messages with notes. More come back without."""
AVOIDED_MAX = 256
"""Messages that some consumers do not get; more leave as rejected."""

Key = tuple[int, int]
"""(session, number) of a consumer."""


class Note(NamedTuple):
    """Words of consumers about a message."""

    failed_count: int = 0
    """Deliveries that have failed."""
    annotations: bytes = b""
    avoiding: tuple[Key, ...] = ()
    """Consumers that do not get it."""
    due_ms: int = 0
    """Time until which it waits."""


NOTHING = Note()


def pack_note(note: Note) -> bytes:
    """Returns the body of a record of the log: length, u32; msgpack; padding."""
    packed = msgspec.msgpack.encode(note)
    body = len(packed).to_bytes(4, "little") + packed
    return body + bytes(-len(body) % 8)


def unpack_note(body: bytes) -> Note:
    """Returns what `pack_note` wrote. Raises ValueError: it did not."""
    size = int.from_bytes(body[:4], "little")
    try:
        return msgspec.msgpack.decode(body[4 : 4 + size], type=Note)
    except msgspec.DecodeError as error:
        raise ValueError(f"a malformed note: {error}") from error


class Aside:
    """Messages that are set aside."""

    __slots__ = ("avoided", "count", "delayed")

    def __init__(self) -> None:
        self.delayed: list[Run] = []
        """By the time for which they wait."""
        self.avoided: list[Run] = []
        """In the order in which they came back."""
        self.count = 0

    def __iter__(self) -> Iterator[Run]:
        yield from self.delayed
        yield from self.avoided

    def __len__(self) -> int:
        """Returns the number of runs."""
        return len(self.delayed) + len(self.avoided)

    @property
    def next_due_ms(self) -> int:
        """Returns when the first run is due; 0 = none waits for a time."""
        return self.delayed[0].note.due_ms if self.delayed else 0

    def add(self, run: Run, now_ms: int) -> bool:
        """Takes a run that is to wait; False = it is not."""
        if run.note.due_ms > now_ms:
            insort(self.delayed, run, key=_due_of)
        elif run.note.avoiding:
            self.avoided.append(run)
        else:
            return False
        self.count += run.count
        return True

    def due(self, now_ms: int) -> list[Run]:
        """Takes the runs whose time has come."""
        end = bisect_right(self.delayed, now_ms, key=_due_of)
        found = self.delayed[:end]
        del self.delayed[:end]
        self.count -= sum(run.count for run in found)
        return found

    def take_avoided(self) -> list[Run]:
        """Takes all that some consumers do not get."""
        found, self.avoided = self.avoided, []
        self.count -= sum(run.count for run in found)
        return found

    def clear(self) -> list[Run]:
        """Takes everything."""
        found = [*self]
        self.delayed, self.avoided, self.count = [], [], 0
        return found


def modify(machine: ClassicMachine, consumer: Consumer, flags: int, modified: Modified) -> None:
    """MODIFY: takes messages from a consumer, with what it says of them."""
    avoids = (consumer.session, consumer.number) if flags & FLAG_UNDELIVERABLE else None
    for first, last in zip(modified.ranges[::2], modified.ranges[1::2], strict=True):
        for run in consumer.release(first, last):
            before = run.note
            avoiding = before.avoiding
            if avoids is not None and avoids not in avoiding:
                avoiding = (*avoiding, avoids)
            failed_count = before.failed_count + (flags & FLAG_FAILED)
            said = modified.annotations or before.annotations
            machine.note(run, Note(failed_count, said, avoiding, modified.due_ms))
            if flags & FLAG_REJECTED:
                machine.unsettled_count -= run.count
                machine.leave_unacknowledged(run, REJECTED)
            else:
                machine.give_back([run])


def serve_aside(machine: ClassicMachine) -> None:
    """Hands out what certain consumers do not get, or has it leave; what need not wait any more is
    ready again."""
    for run in machine.aside.due(machine.now_ms):
        machine.put_back(run)
    # Consumers of a former master may still come back.
    if machine.aside.avoided and machine.former is None:
        _serve_avoided(machine)


def _serve_avoided(machine: ClassicMachine) -> None:
    known = {(each.session, each.number) for each in machine.service}
    able = known
    if machine.limits.single_active:
        # Whoever waits to be active may wait for ever.
        active = machine.active
        able = {(active.session, active.number)} if active is not None else set()
    kept = 0
    for run in machine.aside.take_avoided():
        left: Run | None = run
        avoiding = tuple(key for key in run.note.avoiding if key in known)
        if avoiding != run.note.avoiding:
            run.note = run.note._replace(avoiding=avoiding)
        while left is not None and avoiding:
            consumer = _next_without(machine, avoiding)
            if consumer is None:
                break
            part, left = left.split(1)
            if 0 < part.expires < machine.now_ms and not machine.limits.keeps_all:
                machine.leave_unacknowledged(part, EXPIRED)
            else:
                hand_out(machine, consumer, part)
                rotate(machine, [consumer])
        if left is None:
            continue
        is_hopeless = bool(able) and able <= {*avoiding}
        if avoiding and (is_hopeless or kept + left.count > AVOIDED_MAX):
            machine.leave_unacknowledged(left, REJECTED)
        else:
            kept += left.count if avoiding else 0
            machine.put_back(left)


def _next_without(machine: ClassicMachine, avoiding: tuple[Key, ...]) -> Consumer | None:
    """Returns the next consumer that has room and may get a message."""
    for consumer in machine.service:
        is_served = not machine.limits.single_active or consumer is machine.active
        if (
            is_served
            and consumer.room() > 0
            and (consumer.session, consumer.number) not in avoiding
        ):
            return consumer
    return None


def _due_of(run: Run) -> int:
    return run.note.due_ms
