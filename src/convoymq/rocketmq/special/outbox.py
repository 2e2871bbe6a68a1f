"""Messages that are due, until they are put: in order within a topic, tried again until stored.

Inputs are `add` (a message is due), `take` (what may be tried now), `settle` (what became of it)
and `forget` (the log shows that it was put). A topic has at most one batch in flight; when the
putting of a message fails, it and those behind it wait and are tried again, in order. Other topics
go on meanwhile: a topic that no broker takes messages of holds up no other.

Invariants: a key is in one line; a line in flight is not taken; nothing leaves but by `settle` and
`forget`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from convoymq.rocketmq.acting.escape import Key

BATCH_MAX = 256
RETRY_FIRST_MS = 100
RETRY_LAST_MS = 10_000


@dataclass(slots=True)
class Batch:
    """Messages of one topic, to be put in this order."""

    topic: str
    keys: list[Key]


@dataclass(slots=True)
class _Line:
    keys: deque[Key] = field(default_factory=deque)
    batch: Batch | None = None
    """In flight."""
    retry_ms: int = 0
    wait_ms: int = 0
    """Before the next try; 0: the last one succeeded."""


class Outbox:
    """See the module text.

    Args:
        room: messages it holds at most; `is_full` says so, the caller adds no more then.
    """

    def __init__(self, room: int = 4096) -> None:
        self._room = room
        self._lines: dict[str, _Line] = {}
        self._topics: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, key: Key) -> bool:
        return key in self._topics

    @property
    def is_full(self) -> bool:
        """Returns whether nothing more should be added."""
        return len(self._topics) >= self._room

    @property
    def is_in_flight(self) -> bool:
        """Returns whether a batch was taken and not settled."""
        return any(line.batch is not None for line in self._lines.values())

    def add(self, key: Key, topic: str) -> None:
        """Enters a message that is due; nothing happens when it is there."""
        if key not in self._topics:
            self._topics[key] = topic
            self._lines.setdefault(topic, _Line()).keys.append(key)

    def forget(self, key: Key) -> None:
        """Removes a message that this or another replica has put."""
        self._topics.pop(key, None)

    def take(self, now_ms: int) -> list[Batch]:
        """Returns a batch for each topic that has none in flight."""
        batches = []
        for topic, line in list(self._lines.items()):
            while line.keys and line.keys[0] not in self._topics:
                line.keys.popleft()
            if not line.keys and line.batch is None:
                del self._lines[topic]
            elif line.keys and line.batch is None and line.retry_ms <= now_ms:
                first = islice(line.keys, BATCH_MAX)
                keys = [key for key in first if key in self._topics]
                line.batch = Batch(topic, keys)
                batches.append(line.batch)
        return batches

    def settle(self, batch: Batch, count: int, now_ms: int) -> None:
        """A batch has ended: its first `count` messages are stored, the next one is not."""
        line = self._lines.get(batch.topic)
        if line is None or line.batch is not batch:
            return
        line.batch = None
        for key in batch.keys[:count]:
            self.forget(key)
        if count == len(batch.keys):
            line.wait_ms = 0
            return
        line.wait_ms = min(max(2 * line.wait_ms, RETRY_FIRST_MS), RETRY_LAST_MS)
        line.retry_ms = now_ms + line.wait_ms

    def clear(self) -> None:
        """Forgets everything, batches in flight too: their ends are passed over."""
        self._lines.clear()
        self._topics.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError when a message that waits is in no line, or in two."""
        found = [key for line in self._lines.values() for key in line.keys if key in self._topics]
        assert len(found) == len(set(found)) == len(self._topics)
