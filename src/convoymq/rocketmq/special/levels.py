"""Messages with a delay level: a queue of `SCHEDULE_TOPIC_XXXX` for each level, read in order.

A level's messages are due in the order of its queue. What was delivered is told by the log itself:
a delivered message carries the key of the record that it comes from, and `on_record` sees it, here
or on a slave that copies the log. `offsets` are where RocketMQ's `delayOffset.json` has them: all
messages below were delivered; those above that were are known from the log behind the last
`persist` (`service.py` reads it again at a start).

| input | effect |
|---|---|
| `on_record` | a message with one of our keys was delivered; one of a level may be the next due |
| `tick` | reads what is due into the outbox |
| `outbox.settle` | see there |

Invariants: a level's offset never falls within one run; a message leaves once, but for a crash
between its putting and the flush of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from convoymq.rocketmq.acting.escape import Key, OffsetSet
from convoymq.rocketmq.broker.names import HALF_TOPIC, SCHEDULE_TOPIC
from convoymq.rocketmq.special.names import DELAY, REAL_TOPIC, TIMES, to_real_queue
from convoymq.rocketmq.special.outbox import Outbox
from convoymq.rocketmq.store.types import Draft, Message

READ_MAX = 32
AHEAD_MAX = 1024
"""Messages of a level between the first that was not delivered and the last that was read."""

Read: TypeAlias = Callable[[str, int, int, int], "tuple[list[Message], int]"]
"""Topic, queue, offset, count -> messages, and the offset to go on with: above the one asked for
where messages are gone, the same where there are none yet."""


class Done:
    """Offsets of a queue that are done: all below `next`, and ranges above."""

    __slots__ = ("_above", "next")

    def __init__(self, next: int = 0) -> None:
        self.next = next
        self._above = OffsetSet()

    def __contains__(self, offset: int) -> bool:
        return offset < self.next or self._above.has(offset)

    def add(self, offset: int) -> None:
        """Enters an offset."""
        if offset >= self.next:
            self._above.add(offset, offset + 1)
            self._join()

    def raise_to(self, next: int) -> None:
        """Enters all offsets below."""
        if next > self.next:
            self._above.add(self.next, next)
            self._join()

    def _join(self) -> None:
        above = self._above
        if above.firsts and above.firsts[0] <= self.next:
            self.next = above.lasts[0]
            del above.firsts[0], above.lasts[0]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Returns the deliveries above `next`."""
        return list(zip(self._above.firsts, self._above.lasts, strict=True))


class DelayLevels:
    """See the module text.

    Args:
        broker: whose name is in keys.
        delays_ms: of levels 1, 2, …
        read: reads the own store.
    """

    def __init__(self, broker: str, delays_ms: Sequence[int], read: Read) -> None:
        self.outbox = Outbox(AHEAD_MAX * len(delays_ms))
        self._broker = broker
        self._delays_ms = delays_ms
        self._read = read
        self._done = [Done() for _ in delays_ms]
        self._read_to = [0 for _ in delays_ms]
        self._next_ms = [0 for _ in delays_ms]
        """No message of the level is due before; 0: unknown."""

    # --- positions ----------------------------------------------------

    @property
    def offsets(self) -> dict[int, int]:
        """Returns level -> offset of its first message that was not delivered."""
        return {level: done.next for level, done in enumerate(self._done, 1)}

    def restore(self, offsets: Mapping[int, int]) -> None:
        """Takes offsets over that are ahead of the own ones."""
        for level, offset in offsets.items():
            if 1 <= level <= len(self._done):
                self._done[level - 1].raise_to(offset)

    # --- inputs ----------------------------------------------------------------------------------

    def on_record(self, message: Message) -> None:
        """A record of the own log."""
        if message.topic == SCHEDULE_TOPIC and message.queue_id < len(self._done):
            # It may be the only one: nothing else ends the wait of an empty level.
            self._next_ms[message.queue_id] = 0

    def on_key(self, key: Key) -> None:
        """A message was delivered, here or elsewhere."""
        if key.broker == self._broker and key.topic == SCHEDULE_TOPIC:
            if key.queue < len(self._done):
                self._done[key.queue].add(key.offset)
            self.outbox.forget(key)

    def stop(self) -> None:
        """Forgets messages that were read: the log decides at the next start."""
        self.outbox.clear()
        self._read_to = [0 for _ in self._done]
        self._next_ms = [0 for _ in self._done]

    def tick(self, now_ms: int) -> None:
        """Enters messages that are due into the outbox."""
        for queue, delay_ms in enumerate(self._delays_ms):
            if self._next_ms[queue] <= now_ms:
                self._next_ms[queue] = self._tick_level(queue, delay_ms, now_ms)

    def _tick_level(self, queue: int, delay_ms: int, now_ms: int) -> int:
        """Returns when the level is to be looked at again."""
        done = self._done[queue]
        at = max(self._read_to[queue], done.next)
        while at - done.next < AHEAD_MAX:
            messages, next_at = self._read(SCHEDULE_TOPIC, queue, at, READ_MAX)
            first = messages[0].queue_offset if messages else next_at
            if first > at:
                # What is missing before is older than the log.
                done.raise_to(first)
            for message in messages:
                offset = message.queue_offset
                due_ms = message.stored_ms + delay_ms
                # A clock that was set back must not hold messages up for longer than their delay.
                if now_ms < due_ms <= now_ms + delay_ms:
                    self._read_to[queue] = offset
                    return due_ms
                if offset not in done:
                    self._enter(Key(self._broker, SCHEDULE_TOPIC, queue, offset), message)
            if not messages and next_at == at:
                self._read_to[queue] = at
                return now_ms + delay_ms
            at = next_at
        self._read_to[queue] = at
        return 0

    def _enter(self, key: Key, message: Message) -> None:
        topic = message.properties.get(REAL_TOPIC)
        if topic is None or topic == HALF_TOPIC:
            # Nobody can say where it goes; half messages have no delay before they are committed.
            self._done[key.queue].add(key.offset)
        else:
            self.outbox.add(key, topic)

    def draft(self, key: Key, now_ms: int) -> Draft | None:
        """Returns a message of the outbox as it is put; None: it is gone."""
        messages, _ = self._read(SCHEDULE_TOPIC, key.queue, key.offset, 1)
        if not messages or messages[0].queue_offset != key.offset:
            return None
        return to_real_queue(messages[0], (DELAY, *TIMES), {})

    def check_invariants(self) -> None:
        """Raises AssertionError when offsets that are done are not told apart."""
        self.outbox.check_invariants()
        for done in self._done:
            assert all(first > done.next for first, _ in done.ranges)
            assert not done.ranges or done.ranges[-1][1] - done.next <= AHEAD_MAX
