"""A store's commit log, as replication sees it. Implements `replication.group.types.Log`."""

from __future__ import annotations

from convoymq.kernels.rocketmq_records import BODY, is_record
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import MAGIC_V2
from convoymq.storage.types import Done

WINDOW_BYTES = 64 << 10
"""Distance of the first look back for a message; it doubles."""
MAGIC_V1 = 0xDAA320A7
_MAGICS = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_SIZE_BYTES = 4


class StoreLog:
    """See the module text."""

    def __init__(self, store: MessageStore, file_bytes: int) -> None:
        self._store = store
        self.file_bytes = file_bytes

    @property
    def min_offset(self) -> int:
        """See `Log`."""
        return self._store.min_offset

    @property
    def max_offset(self) -> int:
        """See `Log`."""
        return self._store.max_offset

    @property
    def flushed(self) -> int:
        """See `Log`."""
        return self._store.flushed

    @property
    def stored(self) -> int:
        """See `Log`."""
        return self._store.stored

    def read_raw(self, offset: int, limit: int) -> memoryview:
        """See `Log`."""
        return self._store.read_raw(offset, limit)

    def append_raw(self, offset: int, block: bytes | memoryview) -> None:
        """See `Log`. Raises StorageFault."""
        self._store.append_raw(offset, bytes(block))
        self._store.kick()

    def when_flushed(self, offset: int, call: Done) -> None:
        """Calls when the log is stored up to an offset, or with the error of a try."""
        self._store.when_flushed(offset, call)

    def truncate(self, offset: int) -> None:
        """See `Log`. Raises OSError."""
        self._store.truncate(offset)

    def crc32c(self, start: int, end: int) -> int:
        """See `Log`."""
        found = self._store.checksum(end, end - start)
        assert found is not None, (start, end)
        return found

    def record_before(self, offset: int) -> tuple[int, int] | None:
        """See `Log`. A record is found by what it says of itself: its place and its checksum."""
        end = min(offset, self.max_offset)
        window = WINDOW_BYTES
        high = end
        while high > self.min_offset:
            low = max(self.min_offset, end - window)
            # A magic that the border divides is found in the next window.
            data = self._read(low, min(high + 8, end))
            at = len(data)
            while (at := max(data.rfind(magic, 0, at) for magic in _MAGICS)) >= 0:
                start = low + at - _SIZE_BYTES
                found = self._record(start, end)
                if found is not None:
                    return start, start + found
                at += 3
            high = low
            window *= 2
        return None

    def _record(self, start: int, end: int) -> int | None:
        """Returns the size of the message that begins at an offset and ends before another."""
        if start < self.min_offset:
            return None
        size = int.from_bytes(self._read(start, start + _SIZE_BYTES), "big")
        if not 0 < size <= min(end - start, self.file_bytes):
            return None
        record = memoryview(self._read(start, start + size))
        return size if is_record(record, start, BODY) else None

    def _read(self, start: int, end: int) -> bytes:
        parts = []
        while start < end:
            part = self._store.read_raw(start, end - start)
            if not part:
                break
            parts.append(part)
            start += len(part)
        return b"".join(parts)
