"""Consume queues: where the messages of each queue of each topic lie in the commit log.

An entry has 20 bytes: physical offset 8, size 4, tags code 8. They follow from the log: what is
lost is made anew of it. Entries wait in memory until `write_out`, and are read from files then.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable

from convoymq.rocketmq.store.commit_log import file_name
from convoymq.rocketmq.store.settings import ENTRY_BYTES
from convoymq.storage.types import Directory, File, Worker

FILES_OPEN_MAX = 256
UNWRITTEN_BYTES_MAX = 4 << 20
"""Of all queues: more than this is written out at once."""
ENTRY = struct.Struct(">qiq")
PRE_BLANK = ENTRY.pack(0, 0x7FFFFFFF, 0)
"""Before the first message of a queue that does not begin at a file's start."""
_TOPIC = re.compile(r"[%|\w-]{1,255}", re.ASCII)


def is_topic(name: str) -> bool:
    """Returns whether a topic may have a directory of this name."""
    return _TOPIC.fullmatch(name) is not None


class ConsumeQueue:
    """One queue: entries from `min` to before `max`, the last of them in memory."""

    __slots__ = ("max", "min", "path", "queue_id", "tail", "topic", "written")

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.path = f"consumequeue/{topic}/{queue_id}"
        self.min = 0
        self.max = 0
        self.written = 0
        """Entries before this one are in files."""
        self.tail = bytearray()
        """Entries from `written` on."""

    def __repr__(self) -> str:
        return f"<{self.topic}:{self.queue_id} {self.min}..{self.max}>"


class ConsumeQueues:
    """All queues.

    Args:
        file_bytes: of each file.
        log_begin: the smallest physical offset that is there.
    """

    def __init__(
        self, directory: Directory, file_bytes: int, worker: Worker, log_begin: Callable[[], int]
    ) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._worker = worker
        self._log_begin = log_begin
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._on_disk: set[tuple[str, int]] = set()
        """Queues that have a directory and were not asked for yet."""
        self._dirty: dict[tuple[str, int], ConsumeQueue] = {}
        self._unwritten_bytes = 0
        self._files: OrderedDict[str, File] = OrderedDict()
        self._unsynced: set[str] = set()
        self.load_limit = 1 << 62
        """Entries of messages from this physical offset on are cut when a queue is loaded."""

    def open(self) -> None:
        """Finds the queues that are there."""
        for topic in self._directory.list("consumequeue"):
            for queue in self._directory.list(f"consumequeue/{topic}"):
                if queue.isdigit():
                    self._on_disk.add((topic, int(queue)))

    def places(self) -> list[tuple[str, int]]:
        """Returns topic and number of all queues."""
        return sorted(self._on_disk.union(self._queues))

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Returns a queue that exists."""
        place = (topic, queue_id)
        queue = self._queues.get(place)
        if queue is None and place in self._on_disk:
            queue = self._queues[place] = ConsumeQueue(topic, queue_id)
            self._load(queue)
            self._on_disk.discard(place)
        return queue

    def append(self, topic: str, queue_id: int, offset: int, entries: bytes) -> None:
        """Adds entries, the first with number `offset`; those that are there already are passed
        over."""
        queue = self.find(topic, queue_id)
        if queue is None:
            queue = self._queues[topic, queue_id] = ConsumeQueue(topic, queue_id)
        if offset < queue.max:
            entries = entries[(queue.max - offset) * ENTRY_BYTES :]
            if not entries:
                return
        elif offset > queue.max:
            # A slave's log begins in the middle; nothing is known of what came before.
            queue.min = queue.max = queue.written = offset
            queue.tail.clear()
            self._fill(queue)
        queue.tail += entries
        queue.max += len(entries) // ENTRY_BYTES
        self._dirty[topic, queue_id] = queue
        self._unwritten_bytes += len(entries)
        if self._unwritten_bytes > UNWRITTEN_BYTES_MAX:
            self.write_out()

    def read(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """Returns at most `count` entries from number `offset` on; less at the end of a file."""
        if not queue.min <= offset < queue.max:
            return b""
        if offset >= queue.written:
            start = (offset - queue.written) * ENTRY_BYTES
            return bytes(queue.tail[start : start + count * ENTRY_BYTES])
        count = min(count, queue.written - offset)
        at = offset * ENTRY_BYTES
        base = at - at % self._file_bytes
        length = min(count * ENTRY_BYTES, base + self._file_bytes - at)
        data = self._file(f"{queue.path}/{file_name(base)}").pread(length, at - base)
        return data[: len(data) - len(data) % ENTRY_BYTES]

    def entry(self, queue: ConsumeQueue, offset: int) -> tuple[int, int, int]:
        """Returns physical offset, size and tags code of one message."""
        data = self.read(queue, offset, 1)
        return ENTRY.unpack(data) if data else (-1, 0, 0)

    # --- files

    def write_out(self) -> None:
        """Writes what waits in memory. Raises OSError: it waits on."""
        for place, queue in list(self._dirty.items()):
            self._write(queue)
            del self._dirty[place]
        self._unwritten_bytes = 0

    def _write(self, queue: ConsumeQueue) -> None:
        while queue.tail:
            at = queue.written * ENTRY_BYTES
            base = at - at % self._file_bytes
            name = f"{queue.path}/{file_name(base)}"
            part = bytes(queue.tail[: base + self._file_bytes - at])
            self._file(name, create=True).pwrite([part], at - base)
            self._unsynced.add(name)
            queue.written += len(part) // ENTRY_BYTES
            del queue.tail[: len(part)]

    def _fill(self, queue: ConsumeQueue) -> None:
        """Marks the entries of the first file that no message has."""
        at = queue.min * ENTRY_BYTES
        base = at - at % self._file_bytes
        if at > base:
            name = f"{queue.path}/{file_name(base)}"
            file = self._file(name, create=True)
            file.pwrite([PRE_BLANK * ((at - base) // ENTRY_BYTES)], 0)
            self._unsynced.add(name)

    def sync(self) -> list[File]:
        """Returns the files that are to be made durable."""
        names, self._unsynced = sorted(self._unsynced), set()
        return [self._file(name) for name in names]

    def _file(self, name: str, *, create: bool = False) -> File:
        file = self._files.get(name)
        if file is not None:
            self._files.move_to_end(name)
            return file
        is_new = create and not self._directory.exists(name)
        if is_new:
            self._directory.make(name.rpartition("/")[0])
        file = self._directory.open(name, create=is_new)
        if is_new:
            file.truncate(self._file_bytes)
            self._directory.sync(name.rpartition("/")[0])
        self._files[name] = file
        if len(self._files) > FILES_OPEN_MAX:
            self._files.popitem(last=False)
        return file

    def bases(self, queue: ConsumeQueue) -> list[int]:
        """Returns where a queue's files begin, in bytes."""
        names = self._directory.list(queue.path)
        return sorted(int(name) for name in names if name.isdigit() and len(name) == 20)

    def _load(self, queue: ConsumeQueue) -> None:
        """Finds a queue's first and last entry."""
        bases = self.bases(queue)
        if not bases:
            return
        queue.min = queue.max = queue.written = bases[0] // ENTRY_BYTES
        for base in reversed(bases):
            low, high = base // ENTRY_BYTES, (base + self._file_bytes) // ENTRY_BYTES
            queue.max = queue.written = high
            end = self._search(queue, low, high, self._is_behind)
            if end > low:
                queue.max = queue.written = end
                break
        else:
            queue.max = queue.written = queue.min
        self.correct_min(queue)

    def _is_behind(self, physical: int, size: int) -> bool:
        return size <= 0 or physical >= self.load_limit

    def correct_min(self, queue: ConsumeQueue) -> None:
        """Passes over entries whose messages are gone."""
        begin = self._log_begin()
        queue.min = self._search(
            queue, queue.min, queue.max,
            lambda physical, size: size != 0x7FFFFFFF and physical >= begin,
        )  # fmt: skip

    def _search(
        self, queue: ConsumeQueue, low: int, high: int, found: Callable[[int, int], bool]
    ) -> int:
        """Returns the first entry for which `found` is true, as it is for all behind it."""
        while low < high:
            middle = (low + high) // 2
            physical, size, _ = self.entry(queue, middle)
            if found(physical, size):
                high = middle
            else:
                low = middle + 1
        return low

    def truncate(self, physical: int) -> None:
        """Removes the entries of messages from a physical offset on."""
        for place in self.places():
            queue = self.find(*place)
            assert queue is not None
            end = self._search(queue, queue.min, queue.max, lambda at, _size: at >= physical)
            self._cut(queue, end)

    def _cut(self, queue: ConsumeQueue, end: int) -> None:
        if end >= queue.written:
            del queue.tail[(end - queue.written) * ENTRY_BYTES :]
            queue.max = end
            return
        queue.tail.clear()
        for base in self.bases(queue):
            name = f"{queue.path}/{file_name(base)}"
            at = end * ENTRY_BYTES
            if base >= at and base:
                self._files.pop(name, None)
                self._unsynced.discard(name)
                self._directory.remove(name)
            elif base + self._file_bytes > at:
                file = self._file(name)
                file.truncate(at - base)
                file.truncate(self._file_bytes)
                file.sync()
        queue.max = queue.written = end
        queue.min = min(queue.min, end)

    def delete_topic(self, topic: str) -> None:
        """Removes all queues of a topic."""
        for place in self.places():
            if place[0] == topic:
                self._on_disk.discard(place)
                self._queues.pop(place, None)
                self._dirty.pop(place, None)
        start = f"consumequeue/{topic}/"
        for name in [name for name in self._files if name.startswith(start)]:
            del self._files[name]
        self._unsynced = {name for name in self._unsynced if not name.startswith(start)}
        self._directory.remove(f"consumequeue/{topic}")

    def finish(self) -> None:
        """Makes everything durable, at once, and closes the files. Raises OSError."""
        self.write_out()
        for file in self.sync():
            file.sync()
        for file in self._files.values():
            file.close()
        self._files.clear()
