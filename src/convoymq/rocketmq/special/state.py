"""All special services of a broker as one state that follows from its log.

    log ──records──▶ levels · timers · transactions · pops ──outboxes──▶ puts ──keys──▶ log

Every replica keeps the state: `on_record` is called with the records of system topics, `catch_up`
looks for keys in what the log has got since. A master and an acting slave *run* besides: `tick`
gives out what is due. What they put carries the key of its record, so that no replica gives it out
again, whoever crashes when.

Saved are offsets and a checkpoint, with one rule: all that was given out before the checkpoint's
position in the log is part of what is saved; `open` reads what comes behind it again. Where a log
was cut before that position, it is read as a whole: it says all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.broker.names import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from convoymq.rocketmq.special.levels import DelayLevels
from convoymq.rocketmq.special.names import REVIVE_TOPIC_PREFIX
from convoymq.rocketmq.special.outbox import Batch
from convoymq.rocketmq.special.pop import Pops
from convoymq.rocketmq.special.transactions import Check, Transactions
from convoymq.rocketmq.special.wheel import Checkpoint, TimerWheel
from convoymq.rocketmq.store.types import Message

READ_MAX = 256
MARGIN_MS = 10_000
"""A message may come into the log so long after the time that its slot was chosen by."""
SAMPLES_MAX = 1024


class LogView(Protocol):
    """The own log."""

    @property
    def begin(self) -> int:
        """Returns the physical offset of the first record."""

    @property
    def end(self) -> int:
        """Returns the physical offset up to which records can be read."""

    def read(self, topic: str, queue: int, offset: int, count: int) -> tuple[list[Message], int]:
        """See `levels.Read`."""

    def offset_at(self, topic: str, queue: int, stored_ms: int) -> int:
        """Returns the offset of the first message that was stored at a time or later."""

    def keys(self, begin: int, end: int) -> Iterable[Key]:
        """Yields the keys of records between two physical offsets."""


Part: TypeAlias = "DelayLevels | TimerWheel | Transactions | Pops"


@dataclass(slots=True)
class Saved:
    """Part of the state that files hold."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    levels: Mapping[int, int] = field(default_factory=dict)
    half: int = 0
    ends: int = 0
    revived: Mapping[int, int] = field(default_factory=dict)
    """Queue of the revive topic -> offset."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Offsets at a time."""

    now_ms: int
    end: int
    """Of the log."""
    levels: Mapping[int, int]
    half: int
    ends: int
    revived: Mapping[int, int]


class SpecialState:
    """See the module text."""

    def __init__(
        self,
        log: LogView,
        levels: DelayLevels,
        wheel: TimerWheel,
        transactions: Transactions,
        pops: Pops,
    ) -> None:
        self.levels = levels
        self.wheel = wheel
        self.transactions = transactions
        self.pops = pops
        self.parts: Sequence[Part] = (levels, wheel, transactions, pops)
        self.is_running = False
        self._log = log
        self._scanned = 0
        """Physical offset up to which keys were looked for."""
        self._samples: deque[_Sample] = deque()
        """Oldest first."""
        self._counter = 0

    # --- the log ---------------------------------------------------------------------------------

    def open(self, saved: Saved) -> None:
        """Makes the state of the saved one and the log behind it."""
        if saved.checkpoint.physical > self._log.end:
            saved = Saved()
        checkpoint = saved.checkpoint
        since_ms = checkpoint.read_ms
        self._counter = checkpoint.counter
        self._scanned = min(max(checkpoint.physical, self._log.begin), self._log.end)
        self.levels.restore(saved.levels)
        self.transactions.restore(saved.half, saved.ends)
        self.pops.pass_revived(saved.revived)
        wheel = self.wheel
        wheel.enqueued = self._log.offset_at(TIMER_TOPIC, 0, wheel.first_stored_ms(since_ms))
        for message in self._messages(TIMER_TOPIC, 0, wheel.enqueued):
            wheel.on_record(message, since_ms=since_ms)
            is_saved = message.physical < self._scanned
            self.pops.on_record(message, since_ms=since_ms, is_saved=is_saved)
        for queue, offset in saved.revived.items():
            for message in self._messages(self.pops.revive_topic, queue, offset):
                self.pops.on_record(message)
        for topic, offset in ((HALF_TOPIC, saved.half), (OP_TOPIC, saved.ends)):
            for message in self._messages(topic, 0, offset):
                self.transactions.on_record(message)
        self.catch_up()
        begin = min(max(checkpoint.physical, self._log.begin), self._log.end)
        self._samples.append(_Sample(0, begin, saved.levels, saved.half, saved.ends, saved.revived))

    def _messages(self, topic: str, queue: int, offset: int) -> Iterable[Message]:
        while True:
            messages, following = self._log.read(topic, queue, offset, READ_MAX)
            yield from messages
            if following == offset:
                return
            offset = following

    def on_record(self, message: Message) -> None:
        """A record of a system topic that the log has got."""
        topic = message.topic
        if topic == SCHEDULE_TOPIC:
            self.levels.on_record(message)
        elif topic == TIMER_TOPIC:
            self.wheel.on_record(message)
            self.pops.on_record(message)
        elif topic in (HALF_TOPIC, OP_TOPIC):
            self.transactions.on_record(message)
        elif topic.startswith(REVIVE_TOPIC_PREFIX):
            self.pops.on_record(message)

    def catch_up(self) -> None:
        """Enters the keys of records that the log has got."""
        end = self._log.end
        if end > self._scanned:
            for key in self._log.keys(self._scanned, end):
                self.on_key(key)
            self._scanned = end

    def on_key(self, key: Key) -> None:
        """A record was dealt with, here or elsewhere."""
        for part in self.parts:
            part.on_key(key)

    def on_left(self, broker: str, table: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Records were dealt with elsewhere: `topic:queue` -> ranges, as `escape.KeyTable` has
        them."""
        for source, ranges in table.items():
            topic, _, queue = source.rpartition(":")
            for first, last in ranges:
                for offset in range(first, last):
                    self.on_key(Key(broker, topic, int(queue), offset))

    # --- running ---------------------------------------------------------------------------------

    def start(self, *, is_acting: bool) -> None:
        """Begins to give out due messages."""
        self.catch_up()
        self.wheel.may_roll = not is_acting
        self.transactions.escapes = is_acting
        self.is_running = True

    def stop(self) -> None:
        """Ends. Batches in flight have to be settled before the next start."""
        self.is_running = False
        for part in self.parts:
            part.stop()

    @property
    def is_in_flight(self) -> bool:
        """Returns whether batches were not settled yet."""
        return any(part.outbox.is_in_flight for part in self.parts)

    def tick(self, now_ms: int) -> tuple[list[tuple[Part, Batch]], list[Check]]:
        """Returns due messages and due checks."""
        self._sample(now_ms)
        if not self.is_running:
            return [], []
        self.levels.tick(now_ms)
        self.wheel.tick(now_ms)
        self.pops.tick(now_ms)
        checks = self.transactions.tick(now_ms)
        return [(part, batch) for part in self.parts for batch in part.outbox.take(now_ms)], checks

    def settle(self, part: Part, batch: Batch, count: int, now_ms: int) -> None:
        """A batch has ended: its first `count` messages are stored, or gone."""
        for key in batch.keys[:count]:
            part.on_key(key)
        part.outbox.settle(batch, count, now_ms)

    # --- saved states ---------------------------------------------------------------------------

    def _sample(self, now_ms: int) -> None:
        if now_ms - self._samples[-1].now_ms < 1000:
            return
        if not self.is_running:
            self.catch_up()
        self._samples.append(
            _Sample(
                now_ms,
                self._log.end,
                self.levels.offsets,
                *self.transactions.offsets,
                self.pops.revived_offsets,
            )
        )
        if len(self._samples) > SAMPLES_MAX:
            # Coarser: a position that is too low is only read again.
            self._samples = deque(list(self._samples)[::2])

    def saved(self, now_ms: int) -> Saved:
        """Returns what to save now: offsets are those that belong to the checkpoint's position, so
        that a log that loses its end keeps what they say."""
        if not self.is_running:
            self.catch_up()
        read_ms = min(self.wheel.read_ms(now_ms), self.pops.first_due_ms(now_ms))
        read_ms = max(0, min(read_ms, now_ms - MARGIN_MS)) // 1000 * 1000
        while len(self._samples) > 1 and self._samples[1].now_ms <= read_ms:
            self._samples.popleft()
        self._counter += 1
        enqueued = self.wheel.enqueued
        then = self._samples[0]
        return Saved(
            Checkpoint(
                read_ms, then.end, min(self.wheel.first_offset, enqueued), enqueued,
                0, now_ms, self._counter,
            ),
            then.levels, then.half, then.ends, then.revived,
        )  # fmt: skip

    def take_over(self, saved: Saved) -> None:
        """Enters a master's saved positions that are ahead of this state."""
        self.levels.restore(saved.levels)
        self.transactions.restore(saved.half, saved.ends)
        self.pops.pass_revived(saved.revived)
        self.wheel.drop_before(saved.checkpoint.read_ms)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for part in self.parts:
            part.check_invariants()
