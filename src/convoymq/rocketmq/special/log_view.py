"""The log of a store, as the state of special services reads it."""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.acting.key_log import READ_BYTES, keys_between
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Boundary, Message


class StoreLog:
    """See `state.LogView`."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    @property
    def begin(self) -> int:
        """Returns the physical offset of the first record."""
        return self._store.min_offset

    @property
    def end(self) -> int:
        """Returns the physical offset up to which records can be read."""
        return self._store.dispatched

    def read(self, topic: str, queue: int, offset: int, count: int) -> tuple[list[Message], int]:
        """Returns messages of a queue, and the offset to go on with."""
        store = self._store
        low = store.queue_min(topic, queue)
        offset = max(offset, low)
        if offset >= store.queue_max(topic, queue):
            return [], offset
        got = store.get(topic, queue, offset, count, READ_BYTES)
        messages = [Message(record) for record in got.records]
        return messages, messages[-1].queue_offset + 1 if messages else max(got.next, offset)

    def offset_at(self, topic: str, queue: int, stored_ms: int) -> int:
        """Returns the offset of the first message that was stored at a time or later."""
        if self._store.queue_max(topic, queue) == self._store.queue_min(topic, queue):
            return self._store.queue_max(topic, queue)
        return self._store.offset_at(topic, queue, stored_ms, Boundary.LOWER)

    def keys(self, begin: int, end: int) -> Iterable[Key]:
        """Yields the keys of records between two physical offsets."""
        return keys_between(self._store, begin, end)
