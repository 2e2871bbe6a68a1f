"""Messages for a time: the topic `rmq_sys_wheel_timer`, and which of its messages wait in memory.

A message waits in the *slot* of its second, as its queue offset (8 bytes). When the second begins,
messages are read, and each leaves at its time; RocketMQ's leave when the second is over. What is
more than two days ahead is put into the topic again before the log that holds it may go (*rolled*):
`slot_of` follows from the record alone, so that every replica of the log has the same slots. There
is no file of timers: at a start the slots are read from the topic again, from the time of the
checkpoint less the longest delay (`first_stored_ms`); what was delivered since is told by the keys
of the log's records, as with levels.

The checkpoint has RocketMQ's form (request 60). Its position in the timer log is ours in the commit
log: what slots since `read_ms` gave out lies behind it.

A message with TIMER_DEL_UNIQKEY recalls another one of the same slot.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.special.levels import Read
from convoymq.rocketmq.special.names import (
    REAL_TOPIC,
    TIMER_DELETED_KEY,
    TIMER_DEQUEUED_MS,
    TIMER_ENQUEUED_MS,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    TIMES,
    UNIQUE_KEY,
    changed,
    is_pop_record,
    time_of,
    to_real_queue,
    whole,
)
from convoymq.rocketmq.special.outbox import Outbox
from convoymq.rocketmq.store.types import Draft, Message

PRECISION_MS = 1000
DELAY_MAX_S = 3 * 24 * 3600
ROLL_MS = 2 * 24 * 3600 * 1000
TIMERS_MAX = 50_000_000
OUTBOX_MAX = 8192

_CHECKPOINT = struct.Struct(">7q")
_CHECKPOINT_OLD = struct.Struct(">4q")


@dataclass(slots=True)
class Checkpoint:
    """Progress of timers."""

    read_ms: int = 0
    """All slots before were delivered."""
    physical: int = 0
    queue_offset: int = 0
    """All messages of the topic below were delivered."""
    master_queue_offset: int = 0
    """All messages of the topic below are in slots, at the master."""
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0

    def encode(self) -> bytes:
        """Returns the 56 bytes of RocketMQ's file and of answer 60."""
        return _CHECKPOINT.pack(
            self.read_ms, self.physical, self.queue_offset, self.master_queue_offset,
            self.state_version, self.timestamp, self.counter,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Reads it; old ones have no version. Raises ValueError."""
        kind = _CHECKPOINT if len(data) >= _CHECKPOINT.size else _CHECKPOINT_OLD
        if len(data) < kind.size:
            raise ValueError(f"a checkpoint of timers has {len(data)} bytes")
        return cls(*kind.unpack_from(data))


def slot_of(out_ms: int, stored_ms: int) -> int:
    """Returns the slot of a message that was put into the topic at a time, in ms."""
    ahead_ms = out_ms - stored_ms
    if ahead_ms >= ROLL_MS:
        # Where little would be left for the last stretch, the first one is shorter.
        out_ms = stored_ms + (ROLL_MS // 2 if ahead_ms - ROLL_MS < ROLL_MS // 3 else ROLL_MS)
    return out_ms // PRECISION_MS * PRECISION_MS


def _last_slot(message: Message) -> int:
    """Returns the slot by which a message is delivered, not rolled."""
    return whole(message.properties.get(TIMER_OUT_MS), 0) // PRECISION_MS * PRECISION_MS


def _due_ms(message: Message, slot: int) -> int:
    """Returns when a message of a slot leaves: at its time, if its properties say it."""
    last = slot + PRECISION_MS
    if not any(name in message.properties for name in TIMES):
        return last
    return min(max(slot, time_of(message.properties, message.stored_ms)), last)


def _name_of(topic: str | None, properties: Mapping[str, str]) -> str:
    """Returns the name by which a message is recalled."""
    return f"{topic}+{properties.get(UNIQUE_KEY)}"


class _Ahead(NamedTuple):
    """A message whose second has begun."""

    due_ms: int
    offset: int
    topic: str
    name: str


class TimerWheel:
    """See the module text.

    Args:
        broker: whose name is in keys.
        read: reads the own store.
    """

    def __init__(self, broker: str, read: Read) -> None:
        self.outbox = Outbox(OUTBOX_MAX)
        self.count = 0
        """Messages in slots."""
        self.enqueued = 0
        """Queue offset behind the last message that was entered."""
        self.may_roll = True
        """False on an acting slave, whose log has to keep waiting messages."""
        self._broker = broker
        self._read = read
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        """Heap of the slots; some that are empty meanwhile, too."""
        self._in_outbox: dict[Key, int] = {}
        """Slot of each message that is due, or was read."""
        self._read_ahead: list[_Ahead] = []
        """Heap of messages whose second has begun."""

    @property
    def is_full(self) -> bool:
        """Returns whether no further message should be accepted."""
        return self.count >= TIMERS_MAX

    def read_ms(self, now_ms: int) -> int:
        """Returns the slot before which nothing waits."""
        first = min(self._in_outbox.values(), default=now_ms)
        return min(first, self._order[0] if self._order else now_ms, now_ms) // 1000 * 1000

    @property
    def first_offset(self) -> int:
        """Returns the offset of the first message that waits."""
        waiting = [key.offset for key in self._in_outbox]
        waiting += [offsets[0] for offsets in self._slots.values()]
        return min(waiting, default=self.enqueued)

    @staticmethod
    def first_stored_ms(read_ms: int) -> int:
        """Returns since when messages were stored that may wait in slots from a time on."""
        return read_ms - DELAY_MAX_S * 1000

    # --- inputs ----------------------------------------------------------------------------------

    def on_record(self, message: Message, *, since_ms: int = 0) -> None:
        """A record of the own log.

        Args:
            since_ms: slots before are done (at a start).
        """
        if message.topic == TIMER_TOPIC and message.queue_offset >= self.enqueued:
            self.enqueued = message.queue_offset + 1
            slot = slot_of(_last_slot(message), message.stored_ms)
            if slot >= since_ms and not is_pop_record(message):
                self._insert(slot, message.queue_offset)

    def on_key(self, key: Key) -> None:
        """A message was delivered, here or elsewhere."""
        if not self._is_own(key):
            return
        self.outbox.forget(key)
        if self._in_outbox.pop(key, None) is not None:
            return
        message = self._message(key.offset)
        if message is not None:
            last = _last_slot(message)
            for slot in {slot_of(last, message.stored_ms), last}:
                self._remove(slot, key.offset)

    def _is_own(self, key: Key) -> bool:
        return key.broker == self._broker and key.topic == TIMER_TOPIC

    def _insert(self, slot: int, offset: int) -> None:
        offsets = self._slots.get(slot)
        if offsets is None:
            offsets = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        insort(offsets, offset)
        self.count += 1

    def _remove(self, slot: int, offset: int) -> None:
        offsets = self._slots.get(slot, array("q"))
        at = bisect_left(offsets, offset)
        if at < len(offsets) and offsets[at] == offset:
            del offsets[at]
            self.count -= 1
            if not offsets:
                del self._slots[slot]
        while self._order and self._order[0] not in self._slots:
            heapq.heappop(self._order)

    def drop_before(self, read_ms: int) -> None:
        """Forgets slots that the master has done."""
        while self._order and self._order[0] < read_ms:
            self.count -= len(self._slots.pop(heapq.heappop(self._order), ()))

    def stop(self) -> None:
        """Puts due messages back into their slots."""
        self.outbox.clear()
        self._read_ahead = []
        waiting, self._in_outbox = self._in_outbox, {}
        for key, slot in waiting.items():
            self._insert(slot, key.offset)

    def tick(self, now_ms: int) -> None:
        """Enters messages that are due into the outbox."""
        while self._order and self._order[0] <= now_ms and len(self._in_outbox) < OUTBOX_MAX:
            slot = heapq.heappop(self._order)
            offsets = self._slots.pop(slot, array("q"))
            self.count -= len(offsets)
            self._enter(slot, list(offsets))
        while self._read_ahead and self._read_ahead[0].due_ms <= now_ms:
            message = heapq.heappop(self._read_ahead)
            key = self._key(message.offset)
            if key in self._in_outbox:
                self.outbox.add(key, message.topic)

    def _enter(self, slot: int, offsets: list[int]) -> None:
        messages = [m for m in map(self._message, offsets) if m is not None]
        recalled = {m.properties.get(TIMER_DELETED_KEY) for m in messages if _last_slot(m) <= slot}
        if recalled - {None}:
            self._recall(recalled)
        for message in messages:
            properties = message.properties
            due_ms = _due_ms(message, slot)
            topic = properties.get(REAL_TOPIC)
            if _last_slot(message) > slot:
                if not self.may_roll:
                    self._insert(_last_slot(message), message.queue_offset)
                    continue
                topic, due_ms = TIMER_TOPIC, slot
            elif (
                topic is None
                or TIMER_DELETED_KEY in properties
                or _name_of(topic, properties) in recalled
            ):
                continue
            offset, name = message.queue_offset, _name_of(topic, properties)
            self._in_outbox[self._key(offset)] = slot
            heapq.heappush(self._read_ahead, _Ahead(due_ms, offset, topic, name))

    def _recall(self, names: Collection[str | None]) -> None:
        """Forgets messages that were read ahead."""
        for message in self._read_ahead:
            if message.name in names:
                self._in_outbox.pop(self._key(message.offset), None)

    def _key(self, offset: int) -> Key:
        return Key(self._broker, TIMER_TOPIC, 0, offset)

    def _message(self, offset: int) -> Message | None:
        messages, _ = self._read(TIMER_TOPIC, 0, offset, 1)
        return messages[0] if messages and messages[0].queue_offset == offset else None

    def draft(self, key: Key, now_ms: int) -> Draft | None:
        """Returns a message of the outbox as it is put; None: it is gone."""
        message = self._message(key.offset)
        if message is None:
            return None
        times = {TIMER_ENQUEUED_MS: str(message.stored_ms), TIMER_DEQUEUED_MS: str(now_ms)}
        if _last_slot(message) <= self._in_outbox.get(key, 0) or not self.may_roll:
            return to_real_queue(message, (), times)
        rolled = whole(message.properties.get(TIMER_ROLL_TIMES), 0) + 1
        times[TIMER_ROLL_TIMES] = str(rolled)
        return changed(message.draft(), (), times, message.properties)

    def check_invariants(self) -> None:
        """Raises AssertionError when a slot would not be looked at."""
        self.outbox.check_invariants()
        assert set(self._slots) <= set(self._order)
        assert self.count == sum(map(len, self._slots.values()))
        for offsets in self._slots.values():
            assert all(a < b for a, b in pairwise(offsets))
