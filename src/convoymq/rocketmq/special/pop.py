"""Pop consumption: which messages were given out, until when, and which come back.

| record of the log | effect |
|---|---|
| checkpoint (`ck`) | messages are invisible; the group goes on behind them |
| acknowledgement (`ack`, `bAck`) | messages are done |
| message with the key of a checkpoint's message | it came back: it is in the retry topic |

At the end of its time a checkpoint's messages that are not done go to the outbox, and from there to
the retry topic of the group. Their key is the position of the checkpoint in the log, plus the place
of the message in it: a message comes back once, whoever crashes when. State follows from the log
alone; there is no buffer that a crash could lose. A checkpoint of another broker (it escaped to
this one) names that broker, and its messages are read from there.

RocketMQ moves checkpoints and acknowledgements by its timer to a revive topic and joins them there.
Ours are the same records in the same place, so that a slave of either kind can go on; they are
joined in memory, and only written once.

Checkpoints of a group of RocketMQ's master that are in the revive topic already are entered from
there (`on_record`), those that it has passed are left out (`pass_revived`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.broker.names import RETRY_PREFIX, TIMER_TOPIC
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.special.names import (
    FIRST_POP_TIME,
    REAL_QUEUE,
    REAL_TOPIC,
    REVIVE_TOPIC_PREFIX,
    TAGS,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQUE_KEY,
    changed,
    is_pop_record,
)
from convoymq.rocketmq.special.outbox import Outbox
from convoymq.rocketmq.special.pop_records import (
    ACK_TAG,
    BATCH_ACK_TAG,
    CHECKPOINT_TAG,
    Ack,
    CheckPoint,
    PopKey,
    retry_topic,
)
from convoymq.rocketmq.store.types import Draft, Message, encode_properties

OPEN_MAX = 1_000_000
OUTBOX_MAX = 8192


@dataclass(slots=True)
class _Open:
    checkpoint: CheckPoint
    physical: int
    """Of its record."""
    place: tuple[int, int] | None
    """Queue and offset in the revive topic."""
    done: int = 0
    """A bit for each message."""
    is_due: bool = False


class Pops:
    """See the module text.

    Args:
        broker: whose name is in keys, and in checkpoints without one.
        cluster: names the revive topic.
    """

    def __init__(self, broker: str, cluster: str, *, is_v2: bool = False) -> None:
        self.outbox = Outbox(OUTBOX_MAX)
        self.revive_topic = REVIVE_TOPIC_PREFIX + cluster
        self.positions: dict[tuple[str, str, int], int] = {}
        """(Topic, group, queue) -> offset behind the last message given out; the caller moves them
        to the offsets of consumers (`take_positions`)."""
        self._broker = broker
        self._is_v2 = is_v2
        self._open: dict[PopKey, _Open] = {}
        self._due: list[tuple[int, int, PopKey]] = []
        """Heap of (end of the time, position, key)."""
        self._by_physical: dict[int, PopKey] = {}
        self._held: dict[PopKey, int] = {}
        """Acknowledgements that are being stored."""
        self._passed: dict[int, int] = {}
        self._revived: dict[int, int] = {}
        """Queue of the revive topic -> offset behind its last checkpoint."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Returns whether nothing more should be given out."""
        return len(self._open) >= OPEN_MAX

    def first_due_ms(self, now_ms: int) -> int:
        """Returns the end of the time of the oldest open checkpoint."""
        while self._due and self._due[0][2] not in self._open:
            heapq.heappop(self._due)
        dues = (found.checkpoint.revive_ms for found in self._open.values() if found.is_due)
        return min(self._due[0][0] if self._due else now_ms, min(dues, default=now_ms), now_ms)

    # --- records of the own log ------------------------------------------------------------------

    def on_record(self, message: Message, *, since_ms: int = 0, is_saved: bool = False) -> None:
        """A record of the own log.

        Args:
            since_ms: checkpoints whose time ended before are done (at a start).
            is_saved: offsets of consumers that were saved know of it.
        """
        if not is_pop_record(message):
            return
        tag = message.properties.get(TAGS)
        try:
            if tag == CHECKPOINT_TAG:
                self._on_checkpoint(message, since_ms, is_saved=is_saved)
            elif tag in (ACK_TAG, BATCH_ACK_TAG):
                self._on_ack(json.loads(message.body, Ack))
        except SyntaxFault:
            # RocketMQ's broker passes over what it cannot read, too.
            return

    def _on_checkpoint(self, message: Message, since_ms: int, *, is_saved: bool) -> None:
        checkpoint = json.loads(message.body, CheckPoint)
        key = checkpoint.key(self._broker)
        offsets = checkpoint.offsets
        is_moved = message.topic != TIMER_TOPIC
        place = (message.queue_id, message.queue_offset) if is_moved else None
        if place is not None:
            self._revived[place[0]] = max(self._revived.get(place[0], 0), place[1] + 1)
        if place is not None and place[1] < self._passed.get(place[0], 0):
            if key in self._open:
                self._close(key)
            return
        if offsets and not is_saved and checkpoint.put_times is None and key.broker == self._broker:
            position = (key.topic, key.group, key.queue)
            self.positions[position] = max(self.positions.get(position, 0), offsets[-1] + 1)
        if not offsets or (checkpoint.revive_ms < since_ms and not is_moved):
            return
        known = self._open.get(key)
        if known is not None:
            known.place = place
            return
        done = sum(1 << n for n in range(len(offsets)) if checkpoint.bits >> n & 1)
        self._open[key] = _Open(checkpoint, message.physical, place, done)
        self._by_physical[message.physical] = key
        heapq.heappush(self._due, (checkpoint.revive_ms, message.physical, key))

    def _on_ack(self, ack: Ack) -> None:
        key = ack.key(self._broker)
        found = self._open.get(key)
        if found is not None:
            offsets = found.checkpoint.offsets
            for offset in ack.all_offsets:
                if offset in offsets:
                    self._set_done(key, found, offsets.index(offset))

    def on_key(self, key: Key) -> None:
        """A message came back, here or at another broker."""
        if key.broker != self._broker or key.topic != self.revive_topic:
            return
        self.outbox.forget(key)
        pop_key = self._by_physical.get(key.offset >> 6)
        if pop_key is not None:
            self._set_done(pop_key, self._open[pop_key], key.offset & 63)

    def _set_done(self, key: PopKey, found: _Open, index: int) -> None:
        found.done |= 1 << index
        self.outbox.forget(self._key(found, index))
        if found.done == (1 << len(found.checkpoint.offsets)) - 1:
            self._close(key)

    def _close(self, key: PopKey) -> None:
        found = self._open.pop(key)
        del self._by_physical[found.physical]

    def _key(self, found: _Open, index: int) -> Key:
        return Key(self._broker, self.revive_topic, 0, found.physical << 6 | index)

    def pass_revived(self, passed: Mapping[int, int]) -> None:
        """Enters the offsets of the revive topic below which RocketMQ's master has revived all."""
        for queue, offset in passed.items():
            self._passed[queue] = max(self._passed.get(queue, 0), offset)
        for key, found in list(self._open.items()):
            if found.place is not None and found.place[1] < self._passed.get(found.place[0], 0):
                self._close(key)

    @property
    def revived_offsets(self) -> dict[int, int]:
        """Returns queue of the revive topic -> offset below which nothing is open."""
        found = dict(self._revived)
        for opened in self._open.values():
            if opened.place is not None:
                queue, offset = opened.place
                found[queue] = min(found.get(queue, offset), offset)
        return found

    def take_positions(self) -> dict[tuple[str, str, int], int]:
        """Returns and forgets `positions`."""
        found, self.positions = self.positions, {}
        return found

    # --- requests --------------------------------------------------------------------------------

    def checkpoint(self, checkpoint: CheckPoint, revive_queue: int, now_ms: int) -> Draft:
        """Returns the record of a pop. Messages are given out when it is stored."""
        return self._record(
            CHECKPOINT_TAG, checkpoint, checkpoint.unique_key(), revive_queue,
            checkpoint.revive_ms - 1000, now_ms,
        )  # fmt: skip

    def ack(self, ack: Ack, revive_queue: int, revive_ms: int, now_ms: int) -> Draft | None:
        """Returns the record of an acknowledgement, None: all of it is done already.

        Raises:
            TooLate: the message comes back, or came back.
        """
        found = self._open.get(ack.key(self._broker))
        if found is None or found.is_due:
            if revive_ms <= now_ms:
                raise TooLate
        elif all(self._is_done(found, offset) for offset in ack.all_offsets):
            return None
        return self.ack_record(ack, revive_queue, revive_ms, now_ms)

    def ack_record(self, ack: Ack, revive_queue: int, revive_ms: int, now_ms: int) -> Draft:
        """Returns the record of an acknowledgement."""
        tag = ACK_TAG if ack.offsets is None else BATCH_ACK_TAG
        return self._record(tag, ack, ack.unique_key(), revive_queue, revive_ms, now_ms)

    def keys_of(self, ack: Ack) -> list[tuple[Key, Ack]]:
        """Returns the messages of an acknowledgement that are not done, each with its own; none
        where the checkpoint is not known."""
        found = self._open.get(ack.key(self._broker))
        if found is None:
            return []
        offsets = found.checkpoint.offsets
        return [
            (self._key(found, offsets.index(offset)), replace(ack, offset=offset, offsets=None))
            for offset in ack.all_offsets
            if not self._is_done(found, offset)
        ]

    def hold(self, ack: Ack) -> None:
        """Keeps the messages of a checkpoint away while an acknowledgement is being stored."""
        key = ack.key(self._broker)
        self._held[key] = self._held.get(key, 0) + 1

    def release(self, ack: Ack) -> None:
        """Ends a hold: the acknowledgement is stored, or failed."""
        key = ack.key(self._broker)
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]

    @staticmethod
    def _is_done(found: _Open, offset: int) -> bool:
        offsets = found.checkpoint.offsets
        return offset not in offsets or bool(found.done >> offsets.index(offset) & 1)

    def _record(
        self, tag: str, body: object, unique: str, queue: int, due_ms: int, now_ms: int
    ) -> Draft:
        properties = {
            UNIQUE_KEY: unique, TAGS: tag, TIMER_DELIVER_MS: str(due_ms),
            TIMER_OUT_MS: str((due_ms - 1) // 1000 * 1000), REAL_TOPIC: self.revive_topic,
            REAL_QUEUE: str(queue),
        }  # fmt: skip
        return Draft(
            TIMER_TOPIC, 0, msgspec.json.encode(body), encode_properties(properties), born_ms=now_ms
        )

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Enters messages whose time is over into the outbox."""
        held = []
        while self._due and self._due[0][0] <= now_ms and not self.outbox.is_full:
            entry = heapq.heappop(self._due)
            key = entry[2]
            found = self._open.get(key)
            if found is None:
                continue
            if key in self._held:
                held.append(entry)
                continue
            found.is_due = True
            topic = self.retry_topic_of(found.checkpoint)
            for index in range(len(found.checkpoint.offsets)):
                if not found.done >> index & 1:
                    self.outbox.add(self._key(found, index), topic)
        for entry in held:
            heapq.heappush(self._due, entry)

    def retry_topic_of(self, checkpoint: CheckPoint) -> str:
        """Returns where messages of a checkpoint come back."""
        if checkpoint.topic.startswith(RETRY_PREFIX):
            return checkpoint.topic
        return retry_topic(checkpoint.topic, checkpoint.group, is_v2=self._is_v2)

    def wanted(self, key: Key) -> tuple[CheckPoint, int] | None:
        """Returns the checkpoint and the offset of a message of the outbox; None: it is done."""
        pop_key = self._by_physical.get(key.offset >> 6)
        if pop_key is None:
            return None
        checkpoint = self._open[pop_key].checkpoint
        return checkpoint, checkpoint.offsets[key.offset & 63]

    def draft(self, checkpoint: CheckPoint, message: Message) -> Draft:
        """Returns a message that comes back as it is put."""
        draft = message.draft()
        draft.topic, draft.queue_id = self.retry_topic_of(checkpoint), 0
        draft.count_again()
        first = message.properties.get(FIRST_POP_TIME, str(checkpoint.pop_ms))
        return changed(draft, (), {FIRST_POP_TIME: first}, message.properties)

    def stop(self) -> None:
        """Takes returning messages back: the next start decides anew."""
        self.outbox.clear()
        for key, found in self._open.items():
            if found.is_due:
                found.is_due = False
                heapq.heappush(self._due, (found.checkpoint.revive_ms, found.physical, key))

    def check_invariants(self) -> None:
        """Raises AssertionError when an open checkpoint would never end."""
        self.outbox.check_invariants()
        assert {found.physical: key for key, found in self._open.items()} == self._by_physical
        planned = {key for _, _, key in self._due}
        for key, found in self._open.items():
            assert found.is_due or key in planned
            assert found.done < (1 << len(found.checkpoint.offsets)) - 1


class TooLate(Exception):
    """An acknowledgement whose message comes back."""
