"""Records and texts of pop consumption: checkpoints, acknowledgements, receipts, offset infos.

A *checkpoint* (tag `ck`) is stored for each pop from a queue: which messages were given out, until
when they are invisible. An *acknowledgement* (`ack`, `bAck`) is stored for each message, or for
several. Both are JSON with RocketMQ's short names, in messages for a time (`rmq_sys_wheel_timer`)
that are meant for the revive topic.

A *receipt* names a message that was given out: `start popTime invisible reviveQueue retry broker
queue [offset]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.broker.names import RETRY_PREFIX

CHECKPOINT_TAG = "ck"
ACK_TAG = "ack"
BATCH_ACK_TAG = "bAck"
POP_MAX = 32
"""Messages of one pop."""
ORDERED_REVIVE_QUEUE = 999
"""Stands for a revive queue in receipts of ordered pops, which have no checkpoints."""

NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"


class PopKey(NamedTuple):
    """Names one pop from one queue."""

    topic: str
    group: str
    queue: int
    start: int
    pop_ms: int
    broker: str


class CheckPoint(msgspec.Struct, rename={
    "start": "so", "pop_ms": "pt", "invisible_ms": "it", "bits": "bm", "count": "n", "queue": "q",
    "topic": "t", "group": "c", "revive_offset": "ro", "differences": "d", "broker": "bn",
    "put_times": "rp",
}):  # fmt: skip
    """Messages that one pop gave out; `differences` to `start` name them."""

    start: int
    pop_ms: int
    invisible_ms: int
    queue: int
    topic: str
    group: str
    count: int = 0
    bits: int = 0
    revive_offset: int = 0
    differences: list[int] | None = None
    broker: str | None = None
    put_times: str | None = None

    @property
    def revive_ms(self) -> int:
        """Returns when its messages become visible again."""
        return self.pop_ms + self.invisible_ms

    @property
    def offsets(self) -> list[int]:
        """Returns the offsets of its messages; old ones name the first and a count."""
        found = self.differences if self.differences else range(self.count)
        return [self.start + difference for difference in found][:POP_MAX]

    def key(self, own_broker: str) -> PopKey:
        """Returns its key; without a broker it belongs to the own one."""
        return PopKey(
            self.topic, self.group, self.queue, self.start, self.pop_ms, self.broker or own_broker
        )

    def unique_key(self) -> str:
        """Returns UNIQ_KEY of its record."""
        parts = (self.topic, self.queue, self.start, self.group, self.pop_ms, self.broker)
        return "@".join(map(str, (*parts, CHECKPOINT_TAG)))


class Ack(msgspec.Struct, omit_defaults=True, rename={
    "offset": "ao", "start": "so", "group": "c", "topic": "t", "queue": "q", "pop_ms": "pt",
    "broker": "bn", "offsets": "aol",
}):  # fmt: skip
    """Messages of a checkpoint that were consumed: one, or several (`offsets`)."""

    start: int
    group: str
    topic: str
    queue: int
    pop_ms: int
    offset: int = -1
    broker: str | None = None
    offsets: list[int] | None = None

    def key(self, own_broker: str) -> PopKey:
        """Returns the key of its checkpoint."""
        return PopKey(
            self.topic, self.group, self.queue, self.start, self.pop_ms, self.broker or own_broker
        )

    @property
    def all_offsets(self) -> list[int]:
        """Returns the offsets of the messages."""
        return [self.offset] if self.offsets is None else self.offsets

    def unique_key(self) -> str:
        """Returns UNIQ_KEY of its record."""
        if self.offsets is None:
            parts: tuple[object, ...] = (self.topic, self.queue, self.offset, self.group)
            parts += (self.pop_ms, self.broker, ACK_TAG)
        else:
            parts = (self.topic, self.queue, self.offsets, self.group, self.pop_ms, BATCH_ACK_TAG)
        return "@".join(map(str, parts))


class BatchAck(msgspec.Struct, rename={
    "group": "c", "topic": "t", "retry": "r", "start": "so", "queue": "q", "revive_queue": "rq",
    "pop_ms": "pt", "invisible_ms": "it", "bits": "b",
}):  # fmt: skip
    """Acknowledgements of one pop as a client sends them; bit n is offset `start + n`."""

    group: str
    topic: str
    start: int
    queue: int
    revive_queue: int
    pop_ms: int
    invisible_ms: int
    bits: bytes
    retry: str = NORMAL

    @property
    def offsets(self) -> list[int]:
        """Returns the offsets that it names."""
        found = int.from_bytes(self.bits[:POP_MAX_BITS], "little")
        return [self.start + n for n in range(found.bit_length()) if found >> n & 1]


POP_MAX_BITS = 8192
"""Bytes of bits that are looked at: filtered messages may lie between those that were given out."""


class BatchAckBody(msgspec.Struct, rename="camel"):
    """Body of a batch acknowledgement."""

    acks: list[BatchAck]
    broker_name: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """See the module text."""

    start: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    retry: str
    broker: str
    queue: int
    offset: int | None = None

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Reads one. Raises SyntaxFault."""
        parts = text.split(" ")
        try:
            start, pop_ms, invisible_ms, revive_queue = map(int, parts[:4])
            retry, broker = parts[4:6]
            queue = int(parts[6]) if len(parts) > 6 else -1
            offset = int(parts[7]) if len(parts) > 7 else None
        except ValueError:
            raise SyntaxFault(f"a receipt that cannot be read: {text:.128}") from None
        return cls(start, pop_ms, invisible_ms, revive_queue, retry, broker, queue, offset)

    def __str__(self) -> str:
        parts = (self.start, self.pop_ms, self.invisible_ms, self.revive_queue, self.retry)
        parts += (self.broker, self.queue)  # type: ignore[assignment]
        return " ".join(map(str, parts if self.offset is None else (*parts, self.offset)))


def retry_topic(topic: str, group: str, *, is_v2: bool = False) -> str:
    """Returns the topic in which unacknowledged messages of a topic come back to a group."""
    return f"{RETRY_PREFIX}{group}{'+' if is_v2 else '_'}{topic}"


def retry_flag(topic: str) -> str:
    """Returns which kind of topic this is, as receipts and infos show it."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """Returns the topic that a client means by the original topic and a flag."""
    if retry == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return retry_topic(topic, group, is_v2=retry == RETRY_V2)


def start_info(topic: str, queue: int, start: int) -> str:
    """Returns the part of `startOffsetInfo` for a queue."""
    return f"{retry_flag(topic)} {queue} {start}"


def offsets_info(topic: str, queue: int, offsets: Iterable[int]) -> str:
    """Returns the part of `msgOffsetInfo` for a queue."""
    return f"{retry_flag(topic)} {queue} {','.join(map(str, offsets))}"


def counts_info(topic: str, queue: int, counts: Sequence[tuple[int, int]]) -> str:
    """Returns the part of `orderCountInfo` for a queue.

    Args:
        counts: (offset, how often it was given out before).
    """
    flag = retry_flag(topic)
    parts = [f"{flag} qo{queue}%{offset} {count}" for offset, count in counts if count]
    least = min((count for _, count in counts), default=0)
    return ";".join([*parts, f"{flag} {queue} {least}"])
