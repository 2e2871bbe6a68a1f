"""The referee of a classic queue: a book of every message that was ever in it.

The book follows what the queue at its home takes in, gives out, takes back and lets go, and what
channels were told. What it asserts:

- a message that was confirmed, is persistent and in a durable queue comes back after a restart of
  the home, at its place, until it was let go; after an orderly stop also when it was not confirmed;
- nothing else comes back: no transient message, no message twice, none that was never published,
  and none that was let go once the record of that is durable;
- a restart gives no message more time to live, and none is handed out after its time;
- a message is in one pair of hands at most, and is given again only after it came back;
- what is given is the oldest ready message of the highest priority, also when it came back;
- a limit drops the oldest ready message of the lowest priority;
- messages of one priority in one command keep the order in which their channel published them;
- a message that nobody holds leaves by its time, a purge or a limit, and by nothing else;
- what a channel gets is what its home gave, once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from convoymq.messages.deaths import OVER_LENGTH
from convoymq.queues.classic.machine import ClassicMachine
from convoymq.queues.classic.runs import Block, Run
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.sim.clients import Traits
from convoymq.sim.hosted.book import Book, Given, QueueReferee


@dataclass(slots=True)
class Sent:
    """A message as its channel published it."""

    persistent: bool
    expiration_ms: int | None
    level: int = 0
    """Priority that it has in this queue."""
    confirmed: bool = False
    position: int = -1
    """Place in the queue; -1 = it never came there."""
    expires_ms: int = 0
    """The end of its time in this life of the queue; 0 = it has all the time."""
    expires_last_ms: int = 0
    """The end of its time as it was when it came."""
    lost: bool = False
    """True after a restart from which the message did not come back."""


class Ready:
    """Positions of ready messages by priority."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[int]] = {}
        self._here: dict[int, set[int]] = {}

    def add(self, level: int, position: int) -> None:
        """A message waits."""
        here = self._here.setdefault(level, set())
        if position not in here:
            here.add(position)
            heappush(self._heaps.setdefault(level, []), position)

    def remove(self, level: int, position: int) -> None:
        """A message waits no longer."""
        self._here.get(level, set()).discard(position)

    def first(self, level: int) -> int | None:
        """Returns the oldest of a priority."""
        heap, here = self._heaps.get(level, []), self._here.get(level, set())
        while heap and heap[0] not in here:
            heappop(heap)
        return heap[0] if heap else None

    def levels(self) -> list[int]:
        """Returns the priorities with messages, lowest first."""
        return sorted(level for level, here in self._here.items() if here)


class ClassicReferee(QueueReferee, Book):
    """The book of one queue.

    Args:
        has_limit: messages may be dropped at the head.
        level_max: its highest priority; 0 = it has none.
    """

    def __init__(self, name: str, *, durable: bool, has_limit: bool, level_max: int) -> None:
        QueueReferee.__init__(self, name)
        Book.__init__(self, self)
        self.level_max = level_max
        self.ready = Ready()
        self._counts: dict[tuple[int, bytes], bytes] = {}
        """(priority, channel) -> number of its last message that came in this command."""
        self.durable = durable
        self.has_limit = has_limit
        self.sent: dict[bytes, Sent] = {}
        self.gone: set[int] = set()
        """Positions whose messages are gone, and whose records of that are durable."""
        self._leaving: deque[tuple[int, list[int]]] = deque()
        """(number of a write, positions that it says are gone)"""
        self._handed: dict[tuple[int, int, int], bytes] = {}
        """(session, consumer, number) -> message, until the channel has it."""
        self._stopped = False
        self.has_failed = False
        """The disk refused something in this life of the queue."""
        self.failed_once = False
        """The disk refused something in some life: a log may have holes where nothing was safe."""

    # What channels say.

    def on_sent(self, identity: bytes, traits: Traits) -> None:
        """See `QueueReferee`."""
        level = min(traits.priority or 0, self.level_max)
        self.sent[identity] = Sent(traits.persistent, traits.expiration, level)

    def on_confirmed(self, identity: bytes) -> None:
        """See `QueueReferee`."""
        sent = self.sent[identity]
        if sent.position < 0:
            self.fail(f"{identity.hex()} was confirmed, and never came")
        if sent.lost and sent.persistent and self.durable:
            self.fail(f"{identity.hex()} was confirmed, and did not come back")
        sent.confirmed = True

    def on_received(self, receiver: tuple[int, int, int], identity: bytes, acquired: int) -> None:
        """See `QueueReferee`."""
        if self._handed.pop(receiver, None) != identity:
            session, consumer, number = receiver
            self.fail(f"consumer {consumer} of {session:x} got {identity.hex()} as {number}, which"
                      " its home did not give")  # fmt: skip

    # Lives of the queue.

    def on_disk_error(self) -> None:
        """The disk refused something."""
        self.has_failed = self.failed_once = True

    def watch(self, queue: MasterQueue) -> None:
        """The queue was opened at its home: compares what it recovered, and follows it."""
        self.queue = queue
        machine = queue.machine
        self._on_opened(machine, queue.host.now_ms())
        self.follow(queue)
        take_head, leave = machine.take_head, machine.leave_unacknowledged
        give_back, sets_aside = machine.backing.give_back, machine.sets_aside
        purge, enqueue, carry_out = machine.purge, machine._enqueue, queue._carry_out

        def enqueued(
            data: bytes, flags: int, count: int, offset: int, length: int, now_ms: int
        ) -> None:
            self._counts.clear()
            enqueue(data, flags, count, offset, length, now_ms)

        def purged() -> int:
            self.ready = Ready()
            return purge()

        def taken(limit: int) -> Run | None:
            run = take_head(limit)
            if run is not None:
                self._on_taken(run)
            return run

        def given_back(run: Run) -> None:
            for position in range(run.position, run.position + run.count):
                self.ready.add(run.block.level, position)
            give_back(run)

        def set_aside(run: Run) -> bool:
            found = sets_aside(run)
            for position in range(run.position, run.position + run.count) if found else ():
                self.ready.remove(run.block.level, position)
            return found

        def left(run: Run, reason: str) -> None:
            self._on_left(run, reason)
            leave(run, reason)

        def carried_out() -> None:
            gone = list(machine.settled)
            carry_out()
            self._leaving.append((queue._writes, gone))

        machine.backing.give_back = given_back  # type: ignore[method-assign]
        machine.sets_aside = set_aside  # type: ignore[method-assign]
        machine.purge = purged  # type: ignore[method-assign]
        machine._enqueue = enqueued  # type: ignore[method-assign]
        machine.take_head = taken  # type: ignore[method-assign]
        machine.leave_unacknowledged = left  # type: ignore[method-assign]
        queue._carry_out = carried_out  # type: ignore[method-assign]

    def on_down(self, *, stopped: bool) -> None:
        """The home is down. `stopped`: it wrote all that it had before."""
        queue = self.queue
        if queue is None:
            return
        if not self.has_failed:
            while self._leaving and (stopped or self._leaving[0][0] <= queue._flushed):
                pairs = self._leaving.popleft()[1]
                for first, last in zip(pairs[::2], pairs[1::2], strict=True):
                    self.gone.update(range(first, last + 1))
        self._leaving.clear()
        self._stopped = stopped and not self.has_failed
        self.queue = None
        self.has_failed = False
        self._handed.clear()

    def _on_opened(self, machine: ClassicMachine, now_ms: int) -> None:
        before, outcomes = self.alive, self.outcomes
        self.begin_again()
        self.ready = Ready()
        for found in self.found_in(machine):
            identity, position, level = found.identity, found.position, found.run.block.level
            self._on_recovered(position, identity, found.run.expires)
            if self.sent[identity].level != level:
                self.fail(f"{identity.hex()} comes back with priority {level}")
            self.put(identity, position)
            self.ready.add(level, position)
            self.sent[identity].lost = False
        self.missing = machine.ready_count - len(self.alive)
        if self.missing and not self.failed_once:
            self.fail(f"{self.missing} messages cannot be read back")
        for position, identity in before.items():
            sent = self.sent[identity]
            if position in self.alive:
                said = self.outcomes.said_of(identity)
                if self._stopped and said != outcomes.said_of(identity):
                    self.fail(f"{identity.hex()} comes back with {said}")
                continue
            over = sent.expires_ms and sent.expires_ms <= now_ms
            if (sent.confirmed or self._stopped) and sent.persistent and self.durable and not over:
                self.fail(f"{identity.hex()} at {position} did not come back")
            sent.lost = True

    def _on_recovered(self, position: int, identity: bytes, expires_ms: int) -> None:
        sent = self.sent.get(identity)
        if sent is None or sent.position != position:
            self.fail(f"{identity.hex()} comes back at {position}, and was {sent}")
        if not self.durable or not sent.persistent:
            self.fail(f"{identity.hex()}, which is transient, comes back")
        if position in self.gone:
            self.fail(f"{identity.hex()} at {position} comes back, and was gone for good")
        last_ms = sent.expires_last_ms
        if bool(expires_ms) != bool(last_ms) or expires_ms > last_ms:
            self.fail(f"{identity.hex()} comes back until {expires_ms}, and had {last_ms}")
        # Earlier, while the clock is set back.
        sent.expires_ms = expires_ms

    # What the queue does.

    def on_added(self, identity: bytes, position: int, block: Block) -> None:
        """See `Book`."""
        sent = self.sent[identity]
        if sent.level != block.level:
            self.fail(f"{identity.hex()} has priority {sent.level}, and comes to {block.level}")
        if identity[4:] <= self._counts.get((sent.level, identity[:4]), b""):
            self.fail(f"{identity.hex()} comes behind one that was published later")
        self._counts[sent.level, identity[:4]] = identity[4:]
        self.ready.add(sent.level, position)
        if sent.position >= 0:
            self.fail(f"{identity.hex()} comes twice")
        if position in self.alive:
            self.fail(f"position {position} is used twice")
        # Nothing is left of what was there in a former life.
        self.gone.discard(position)
        sent.position = position
        assert self.queue is not None
        # The time that is in force now stays with the message.
        ttl_ms = self.queue.machine.limits.message_ttl_ms
        times = [ms for ms in (sent.expiration_ms, ttl_ms) if ms is not None]
        sent.expires_ms = sent.expires_last_ms = block.time_ms + min(times) if times else 0

    def _on_taken(self, run: Run) -> None:
        """Messages are given to somebody."""
        for position in range(run.position, run.position + run.count):
            levels = self.ready.levels()
            if not levels or levels[-1] != run.block.level:
                self.fail(f"position {position} of priority {run.block.level} is given, {levels}")
            if self.ready.first(levels[-1]) != position:
                first = self.ready.first(levels[-1])
                self.fail(f"position {position} is given, and {first} waits")
            self.ready.remove(run.block.level, position)

    def _on_left(self, run: Run, reason: str) -> None:
        """Messages leave without an acknowledgement."""
        for position in range(run.position, run.position + run.count):
            levels = self.ready.levels()
            first = self.ready.first(levels[0]) if levels else None
            if reason == OVER_LENGTH and position in self.alive and first != position:
                self.fail(f"position {position} is too much, and {first} is older or lower")
            self.ready.remove(run.block.level, position)

    def on_given(self, given: Given, now_ms: int) -> None:
        """See `Book`."""
        super().on_given(given, now_ms)
        identity, expires_ms = given.identity, self.sent[given.identity].expires_ms
        if expires_ms and now_ms > expires_ms:
            self.fail(f"{identity.hex()} is given at {now_ms}, its time was over {expires_ms}")
        self._handed[given.receiver] = identity

    def on_gone(self, identity: bytes, position: int, now_ms: int, *, purged: bool) -> None:
        """See `Book`."""
        sent = self.sent[identity]
        self.ready.remove(sent.level, position)
        over = bool(sent.expires_ms) and sent.expires_ms <= now_ms
        over = over or self.outcomes.is_avoided(identity)
        if identity not in self.held and not (over or purged or self.has_limit):
            self.fail(f"{identity.hex()} at {position} goes, and nobody had it")

    def waits_for(self) -> str:
        """See `QueueReferee`."""
        if self.queue is None:
            return f"queue {self.name} is not open"
        return f"{len(self.alive)} messages of queue {self.name}" if self.alive else ""
