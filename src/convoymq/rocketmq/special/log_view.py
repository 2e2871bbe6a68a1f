"""The log of a store, as the state of special services reads it."""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key, key_of
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Boundary, Message

READ_BYTES = 4 << 20
_MARK = f"{KEY_PROPERTY}\x01".encode()


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
        at = begin
        while at < end:
            block = bytes(self._store.read_raw(at, min(READ_BYTES, end - at)))
            used = 0
            for size, has_key in _records(block):
                if has_key:
                    yield from self._key_at(at + used)
                used += size
            if not used:
                # One record that is longer than what was read at once, or a blank.
                yield from self._key_at(at)
                used = int.from_bytes(block[:4], "big")
            if not used:
                return
            at += used

    def _key_at(self, physical: int) -> Iterable[Key]:
        message = self._store.message_at(physical)
        if message is not None:
            key = key_of(message.properties.get(KEY_PROPERTY, ""))
            if key is not None:
                yield key


def _records(block: bytes) -> Iterable[tuple[int, bool]]:
    """Yields the size of each whole record of a block, and whether it may have a key."""
    mark = block.find(_MARK)
    at = 0
    while at + 4 <= len(block):
        size = int.from_bytes(block[at : at + 4], "big")
        if not size or at + size > len(block):
            return
        has_key = at <= mark < at + size
        if has_key:
            mark = block.find(_MARK, at + size)
        yield size, has_key
        at += size
