"""Messages of transactions: half messages that wait for their end, checks with their producers.

| topic | holds |
|---|---|
| `RMQ_SYS_TRANS_HALF_TOPIC` | half messages, with the queue they are meant for |
| `RMQ_SYS_TRANS_OP_HALF_TOPIC` | *ends*: queue offsets of half messages, `1,2,…` |
| `TRANS_CHECK_MAX_TIME_TOPIC` | half messages that nobody decided |

State follows from the log: a half message is open until an end, its committed message (which holds
its physical offset), or a message with its key is in the log. A commit appends the message and the
end at once; a repeated one finds the half message closed and appends nothing.

RocketMQ appends a half message again before each check, so that a commit that names the first one
and a commit that names the second one give two messages; ours keep their offset. RocketMQ counts a
check that it could not send, and gives up a message after fifteen; here a check counts when it was
sent to a producer. A slave of RocketMQ's that acts as master passes over a half message that cannot
escape after ten tries; here it waits in the outbox, in order (`outbox.py`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key
from convoymq.rocketmq.broker.names import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC, OP_TOPIC
from convoymq.rocketmq.special.levels import Done, Read
from convoymq.rocketmq.special.names import (
    CHECK_IMMUNITY_S,
    CHECK_TIMES,
    IS_PREPARED,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    TAGS,
    TRANSACTION_BITS,
    TRANSACTION_ID,
    UNIQUE_KEY,
    changed,
    to_real_queue,
    whole,
)
from convoymq.rocketmq.special.outbox import Outbox
from convoymq.rocketmq.store.types import (
    Draft,
    Message,
    SysFlag,
    encode_properties,
)

IMMUNITY_MS = 6_000
CHECK_INTERVAL_MS = 30_000
CHECKS_MAX = 15
RESERVED_MS = 72 * 3600 * 1000
OPEN_MAX = 1_000_000
ENDED_TAG = "d"


class End(IntEnum):
    """Decision of a producer about a half message; numbers as END_TRANSACTION has them."""

    UNKNOWN = 0
    COMMIT = SysFlag.COMMIT
    ROLLBACK = SysFlag.ROLLBACK


class Refused(Exception):
    """An end that names a half message wrongly. The text is RocketMQ's."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_late = is_late
        """True after the time that the message itself set: only a check decides now."""


@dataclass(slots=True)
class Half:
    """A half message that is open."""

    physical: int
    stored_ms: int
    group: str
    topic: str
    next_ms: int
    """Of the next check."""
    checks: int = 0
    immunity_ms: int = 0
    """0: the broker's."""


@dataclass(frozen=True, slots=True)
class Check:
    """A producer is to be asked."""

    offset: int
    physical: int
    group: str


class Transactions:
    """See the module text.

    Args:
        broker: whose name is in keys.
        read: reads the own store.
    """

    def __init__(
        self,
        broker: str,
        read: Read,
        *,
        immunity_ms: int = IMMUNITY_MS,
        interval_ms: int = CHECK_INTERVAL_MS,
        checks_max: int = CHECKS_MAX,
        reserved_ms: int = RESERVED_MS,
    ) -> None:
        self.outbox = Outbox(OPEN_MAX)
        self.escapes = False
        """True on an acting slave: half messages leave, and their new owner checks them."""
        self._broker = broker
        self._read = read
        self._immunity_ms = immunity_ms
        self._interval_ms = interval_ms
        self._checks_max = checks_max
        self._reserved_ms = reserved_ms
        self._open: dict[int, Half] = {}
        self._offsets: dict[int, int] = {}
        """Physical offset -> queue offset, of open ones."""
        self._due: list[tuple[int, int]] = []
        """Heap of (time of the next check, queue offset)."""
        self._done = Done()
        self._ends: deque[tuple[int, int]] = deque()
        """(Offset in the topic of ends, the largest half message that it ends), not yet passed."""
        self._ends_next = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, offset: int) -> bool:
        return offset in self._open

    @property
    def is_full(self) -> bool:
        """Returns whether no further half message should be accepted."""
        return len(self._open) >= OPEN_MAX

    # --- positions ------------------------------------------------------

    @property
    def offsets(self) -> tuple[int, int]:
        """Returns the offsets of the topics of half messages and ends that RocketMQ's group has:
        nothing below is needed."""
        return self._done.next, self._ends[0][0] if self._ends else self._ends_next

    def restore(self, half: int, ends: int) -> None:
        """Takes offsets over that are ahead of the own ones."""
        self._done.raise_to(half)
        for offset in [o for o in self._open if o < half]:
            self._close(offset)
        self._ends_next = max(self._ends_next, ends)

    # --- records of the own log ------------------------------------------------------------------

    def on_record(self, message: Message) -> None:
        """A record of the own log."""
        if message.topic == HALF_TOPIC:
            self._on_half(message)
        elif message.topic == OP_TOPIC:
            self._on_ends(message)
        elif message.sys_flag & TRANSACTION_BITS == SysFlag.COMMIT:
            offset = self._offsets.get(message.prepared_offset)
            if offset is not None:
                self._close(offset)

    def on_key(self, key: Key) -> None:
        """A half message was committed or given up, or left."""
        if key.broker == self._broker and key.topic == HALF_TOPIC:
            self._close(key.offset)

    def _on_half(self, message: Message) -> None:
        offset, properties = message.queue_offset, message.properties
        if offset in self._done or offset in self._open:
            return
        seconds = whole(properties.get(CHECK_IMMUNITY_S), -1)
        half = Half(
            message.physical,
            message.stored_ms,
            properties.get(PRODUCER_GROUP, ""),
            properties.get(REAL_TOPIC, ""),
            message.stored_ms + (self._immunity_ms if seconds < 0 else seconds * 1000),
            whole(properties.get(CHECK_TIMES), 0),
            max(seconds, 0) * 1000,
        )
        self._open[offset] = half
        self._offsets[half.physical] = offset
        heapq.heappush(self._due, (half.next_ms, offset))

    def _on_ends(self, message: Message) -> None:
        if message.queue_offset < self._ends_next:
            return
        self._ends_next = message.queue_offset + 1
        if message.properties.get(TAGS) != ENDED_TAG:
            return
        offsets = [whole(text, -1) for text in str(message.body, "ascii", "replace").split(",")]
        offsets = [offset for offset in offsets if offset >= 0]
        if not offsets:
            return
        for offset in offsets:
            self._close(offset)
        self._ends.append((message.queue_offset, max(offsets)))
        self._pass_ends()

    def _close(self, offset: int) -> None:
        half = self._open.pop(offset, None)
        if half is not None:
            del self._offsets[half.physical]
        self._done.add(offset)
        self.outbox.forget(Key(self._broker, HALF_TOPIC, 0, offset))
        self._pass_ends()

    def _pass_ends(self) -> None:
        while self._ends and self._ends[0][1] < self._done.next:
            self._ends.popleft()

    # --- ends ------------------------------------------------------------------------------------

    def end(
        self,
        half: Message | None,
        *,
        end: End,
        group: str,
        offset: int,
        is_checked: bool,
        now_ms: int,
    ) -> list[Draft]:
        """Returns the messages that a commit or rollback appends at once; none for a repeat.

        Args:
            half: the record at the physical offset that the producer names.
            offset: the queue offset that it names.
            is_checked: it answers a check.

        Raises:
            Refused: it names another message, or comes too late.
        """
        assert end is not End.UNKNOWN
        if half is None or half.topic != HALF_TOPIC:
            raise Refused("Find prepared transaction message failed")
        if half.properties.get(PRODUCER_GROUP, "") != group:
            raise Refused("The producer group wrong")
        if half.queue_offset != offset:
            raise Refused("The transaction state table offset wrong")
        if offset in self._done:
            return []
        open_one = self._open.get(offset)
        immunity_ms = open_one.immunity_ms if open_one is not None and not is_checked else 0
        if 0 < immunity_ms < now_ms - half.born_ms:
            raise Refused("", is_late=True)
        key = Key(self._broker, HALF_TOPIC, 0, offset)
        ended = Draft(
            OP_TOPIC, 0, f"{offset},".encode(),
            encode_properties({TAGS: ENDED_TAG}), born_ms=now_ms, born_host=half.born_host,
        )  # fmt: skip
        if end is End.ROLLBACK:
            return [ended]
        committed = to_real_queue(half, (IS_PREPARED,), {KEY_PROPERTY: str(key)})
        if committed is None:
            raise Refused("Find prepared transaction message failed")
        committed.sys_flag = committed.sys_flag & ~TRANSACTION_BITS | SysFlag.COMMIT
        committed.prepared_offset = half.physical
        return [committed, ended]

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Check]:
        """Returns due checks; leaving messages go to the outbox."""
        checks = []
        while self._due and self._due[0][0] <= now_ms:
            next_ms, offset = heapq.heappop(self._due)
            half = self._open.get(offset)
            if half is None or half.next_ms != next_ms:
                continue
            key = Key(self._broker, HALF_TOPIC, 0, offset)
            self._plan(half, offset, now_ms + self._interval_ms)
            if self.escapes:
                self.outbox.add(key, half.topic)
            elif half.checks >= self._checks_max or now_ms - half.stored_ms > self._reserved_ms:
                self.outbox.add(key, CHECKED_TOO_OFTEN_TOPIC)
            else:
                checks.append(Check(offset, half.physical, half.group))
        return checks

    def _plan(self, half: Half, offset: int, next_ms: int) -> None:
        half.next_ms = next_ms
        heapq.heappush(self._due, (next_ms, offset))

    def checked(self, offset: int) -> None:
        """A check was sent to a producer."""
        half = self._open.get(offset)
        if half is not None:
            half.checks += 1

    def stop(self) -> None:
        """Takes leaving messages back: the next start decides anew."""
        self.outbox.clear()

    def draft(self, key: Key, now_ms: int) -> Draft | None:
        """Returns a message of the outbox as it is put; None: it is gone, or was ended."""
        half = self._open.get(key.offset)
        messages, _ = self._read(HALF_TOPIC, 0, key.offset, 1)
        if half is None or not messages or messages[0].queue_offset != key.offset:
            return None
        message = messages[0]
        times = {CHECK_TIMES: str(half.checks)} if half.checks else {}
        if self.escapes:
            draft = to_real_queue(message, (), {IS_PREPARED: "true", **times})
            if draft is not None:
                draft.sys_flag |= SysFlag.PREPARED
            return draft
        draft = changed(message.draft(), (), times, message.properties)
        draft.topic, draft.queue_id = CHECKED_TOO_OFTEN_TOPIC, 0
        return draft

    def check_invariants(self) -> None:
        """Raises AssertionError when a half message is both open and done, or would not be looked
        at again."""
        self.outbox.check_invariants()
        assert {half.physical: offset for offset, half in self._open.items()} == self._offsets
        assert not any(offset in self._done for offset in self._open)
        planned = set(self._due)
        assert all((half.next_ms, offset) in planned for offset, half in self._open.items())


def to_half(draft: Draft, properties: Mapping[str, str]) -> Draft:
    """Returns a draft of a prepared message, as one for the topic of half messages."""
    add = {REAL_TOPIC: draft.topic, REAL_QUEUE: str(draft.queue_id)}
    unique = properties.get(UNIQUE_KEY)
    if unique:
        add[TRANSACTION_ID] = unique
    draft.sys_flag &= ~TRANSACTION_BITS
    draft.topic, draft.queue_id = HALF_TOPIC, 0
    return changed(draft, (), add, properties)
