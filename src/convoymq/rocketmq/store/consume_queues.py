"""Consume queues: where the messages of each queue of each topic lie in the commit log.

An entry has 20 bytes: physical offset 8, size 4, tags code 8. They follow from the log: what is
lost is made anew of it. Entries wait in memory until they are written, beside the loop.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.commit_log import file_name
from convoymq.rocketmq.store.settings import ENTRY_BYTES
from convoymq.storage.types import Directory, File

FILES_OPEN_MAX = 256
WRITE_BYTES = 4 << 20
"""Of all queues: more than this is written out at once."""
WAITING_BYTES_MAX = 64 << 20
"""Of all queues: more than this and nothing more is put."""
HOLE_MAX = 1 << 16
"""Entries without a message that a queue may have between two."""
REMOVED_AT_ONCE = 100
"""Queues whose old files are looked for in one turn."""
ALL = 1 << 62
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


Row: TypeAlias = tuple[ConsumeQueue, str, int, bytes]
"""Entries that are to be written: queue, file, place in it, bytes."""


class ConsumeQueues:
    """All queues.

    Args:
        file_bytes: of each file.
        log_begin: the smallest physical offset that is there.
        unsynced: files that were written and are not durable.
        is_entry: whether an entry (topic, queue, offset, physical offset) is of the message there.
        begun_anew: deletes a queue that has messages, of whose topic the log has a first one again.
    """

    def __init__(
        self,
        directory: Directory,
        file_bytes: int,
        log_begin: Callable[[], int],
        is_entry: Callable[[str, int, int, int], bool],
        unsynced: set[str],
        begun_anew: Callable[[str, int], None],
    ) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._log_begin = log_begin
        self._is_entry_of = is_entry
        self._begun_anew = begun_anew
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._on_disk: set[tuple[str, int]] = set()
        """Queues that have a directory and were not asked for yet."""
        self._dirty: dict[tuple[str, int], ConsumeQueue] = {}
        """Queues with entries in memory."""
        self._waiting_bytes = 0
        self._outdated: list[ConsumeQueue] = []
        """Queues whose oldest messages may be gone."""
        self._files: OrderedDict[str, File] = OrderedDict()
        self._unsynced = unsynced
        self.load_limit = ALL
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
        over, and so are those too far behind the last one. A queue that has messages and gets
        another first one begins anew: its topic was deleted."""
        queue = self.find(topic, queue_id)
        if not offset and queue is not None and queue.max:
            physical, *_ = ENTRY.unpack_from(entries)
            if physical > self._last_of(queue):
                self._begun_anew(topic, queue_id)
                queue = None
        if queue is None:
            queue = self._queues[topic, queue_id] = ConsumeQueue(topic, queue_id)
        if offset < queue.max:
            entries = entries[(queue.max - offset) * ENTRY_BYTES :]
            if not entries:
                return
        elif offset > queue.max:
            if queue.min == queue.max and not queue.tail:
                # A slave's log begins in the middle; nothing is known of what came before.
                self._begin_at(queue, offset)
            elif offset - queue.max > HOLE_MAX:
                return
            else:
                entries = PRE_BLANK * (offset - queue.max) + entries
        queue.tail += entries
        queue.max += len(entries) // ENTRY_BYTES
        self._dirty[topic, queue_id] = queue
        self._waiting_bytes += len(entries)

    def read(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """Returns at most `count` entries from number `offset` on; less at the end of a file, none
        where a file is missing."""
        if not queue.min <= offset < queue.max:
            return b""
        if offset >= queue.written:
            start = (offset - queue.written) * ENTRY_BYTES
            return bytes(queue.tail[start : start + count * ENTRY_BYTES])
        count = min(count, queue.written - offset)
        at = offset * ENTRY_BYTES
        base = at - at % self._file_bytes
        length = min(count * ENTRY_BYTES, base + self._file_bytes - at)
        try:
            data = self._file(f"{queue.path}/{file_name(base)}").pread(length, at - base)
        except FileNotFoundError:
            return b""
        return data[: len(data) - len(data) % ENTRY_BYTES]

    def next_file(self, offset: int) -> int:
        """Returns the number of the first entry of the file behind that of an entry."""
        per_file = self._file_bytes // ENTRY_BYTES
        return offset - offset % per_file + per_file

    def entry(self, queue: ConsumeQueue, offset: int) -> tuple[int, int, int]:
        """Returns physical offset, size and tags code of one message."""
        data = self.read(queue, offset, 1)
        return ENTRY.unpack(data) if data else (-1, 0, 0)

    # --- write

    @property
    def is_due(self) -> bool:
        """Returns whether much waits to be written."""
        return self._waiting_bytes > WRITE_BYTES

    @property
    def is_full(self) -> bool:
        """Returns whether too much waits to be written."""
        return self._waiting_bytes > WAITING_BYTES_MAX

    def plan(self) -> list[Row]:
        """Returns what is to be written."""
        plan: list[Row] = []
        for queue in self._dirty.values():
            start, at, data = 0, queue.written * ENTRY_BYTES, bytes(queue.tail)
            while start < len(data):
                base = at + start - (at + start) % self._file_bytes
                stop = base + self._file_bytes - at
                name = f"{queue.path}/{file_name(base)}"
                plan.append((queue, name, at + start - base, data[start:stop]))
                start = stop
        return plan

    def write(self, plan: list[Row]) -> None:
        """Writes a plan, on any thread. Raises OSError: all of it is written again."""
        for _, name, at, entries in plan:
            file = self._make(name, at)
            try:
                file.pwrite([entries], at)
            finally:
                file.close()

    def _make(self, name: str, skipped: int) -> File:
        """Opens a file; a new one begins with `skipped` bytes that belong to no message."""
        folder = name.rpartition("/")[0]
        is_new = not self._directory.exists(name)
        if is_new:
            self._directory.make(folder)
        file = self._directory.open(name, create=is_new)
        if file.size() < self._file_bytes:
            file.truncate(self._file_bytes)
            if skipped:
                file.pwrite([PRE_BLANK * (skipped // ENTRY_BYTES)], 0)
            self._directory.sync(folder)
        return file

    def wrote(self, plan: list[Row]) -> None:
        """Reads what was written from files from now on."""
        for queue, name, _, entries in plan:
            queue.written += len(entries) // ENTRY_BYTES
            del queue.tail[: len(entries)]
            self._waiting_bytes -= len(entries)
            self._unsynced.add(name)
            if not queue.tail:
                self._dirty.pop((queue.topic, queue.queue_id), None)

    def write_now(self) -> None:
        """Writes what waits in memory, at once. Raises OSError."""
        plan = self.plan()
        self.write(plan)
        self.wrote(plan)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    # --- files

    def _file(self, name: str) -> File:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self._directory.open(name)
            if len(self._files) > FILES_OPEN_MAX:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(name)
        return file

    def _forget(self, name: str) -> None:
        """Removes a file."""
        file = self._files.pop(name, None)
        if file is not None:
            file.close()
        self._unsynced.discard(name)
        self._directory.remove(name)

    def bases(self, queue: ConsumeQueue) -> list[int]:
        """Returns where a queue's files begin, in bytes."""
        names = self._directory.list(queue.path)
        return sorted(int(name) for name in names if name.isdigit() and len(name) == 20)

    def _load(self, queue: ConsumeQueue) -> None:
        """Finds a queue's first and last entry. Raises StorageFault."""
        bases = self.bases(queue)
        if not bases:
            return
        for base in bases:
            size = self._file(f"{queue.path}/{file_name(base)}").size()
            if base % self._file_bytes or size > self._file_bytes:
                raise StorageFault(
                    f"{queue.path}/{file_name(base)} has {size} bytes, and "
                    f"mappedFileSizeConsumeQueue says {self._file_bytes}"
                )
        queue.min = bases[0] // ENTRY_BYTES
        end = queue.max = queue.written = (bases[-1] + self._file_bytes) // ENTRY_BYTES
        for base in reversed(bases):
            low = base // ENTRY_BYTES
            end = self._search(queue, low, low + self._file_bytes // ENTRY_BYTES, self._is_behind)
            if end > low:
                break
        queue.max = queue.written = end
        if end > queue.min and not self._is_entry(queue, end - 1):
            end = bisect_left(
                range(end), True, lo=queue.min, key=lambda at: not self._is_entry(queue, at)
            )
        if end < queue.max or self.load_limit < ALL:
            # What lies behind would count when the log has grown past it.
            self._cut(queue, end, is_written=True)
        self.correct_min(queue)

    def _is_behind(self, physical: int, size: int) -> bool:
        return size <= 0 or physical >= self.load_limit

    def _is_entry(self, queue: ConsumeQueue, offset: int) -> bool:
        physical, size, _ = self.entry(queue, offset)
        if physical < self._log_begin() or size == 0x7FFFFFFF:
            return True
        return self._is_entry_of(queue.topic, queue.queue_id, offset, physical)

    def correct_min(self, queue: ConsumeQueue) -> None:
        """Passes over entries whose messages are gone; not over a file that is missing."""
        begin = self._log_begin()
        queue.min = self._search(
            queue, queue.min, queue.max,
            lambda physical, size: size != 0x7FFFFFFF and (physical >= begin or not size),
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
        """Removes the entries of messages from a physical offset on. Jobs are interrupted."""
        for place in self.places():
            queue = self.find(*place)
            assert queue is not None
            end = self._search(queue, queue.min, queue.max, lambda at, _size: at >= physical)
            self._cut(queue, end)

    def _cut(self, queue: ConsumeQueue, end: int, *, is_written: bool = False) -> None:
        """Removes the entries from number `end` on; in files, too, if they may be there."""
        if end >= queue.written and not is_written:
            length = len(queue.tail)
            del queue.tail[(end - queue.written) * ENTRY_BYTES :]
            self._waiting_bytes -= length - len(queue.tail)
            queue.max = end
            return
        self._waiting_bytes -= len(queue.tail)
        queue.tail.clear()
        at = end * ENTRY_BYTES
        for base in self.bases(queue):
            name = f"{queue.path}/{file_name(base)}"
            if base > at or (base == at and end > queue.min):
                self._forget(name)
            elif base + self._file_bytes > at:
                file = self._file(name)
                file.truncate(at - base)
                file.truncate(self._file_bytes)
                self._unsynced.add(name)
        queue.max = queue.written = end
        queue.min = min(queue.min, end)

    def _begin_at(self, queue: ConsumeQueue, offset: int) -> None:
        """Has a queue without messages begin at an offset."""
        for base in self.bases(queue):
            self._forget(f"{queue.path}/{file_name(base)}")
        queue.min = queue.max = queue.written = offset

    def begin_removal(self) -> None:
        """Has files removed all of whose messages are gone, step by step (`remove_some`)."""
        self._outdated = list(self._queues.values())

    def remove_some(self) -> None:
        """Removes such files of some queues, never the last of a queue: that one is written."""
        for _ in range(min(len(self._outdated), REMOVED_AT_ONCE)):
            queue = self._outdated.pop()
            self.correct_min(queue)
            for base in self.bases(queue)[:-1]:
                if (base + self._file_bytes) // ENTRY_BYTES > queue.min:
                    break
                self._forget(f"{queue.path}/{file_name(base)}")

    def _last_of(self, queue: ConsumeQueue) -> int:
        """Returns the physical offset of the last message; -1: there is none."""
        return self.entry(queue, queue.max - 1)[0] if queue.max > queue.min else -1

    def before(self, topic: str, physical: int) -> list[tuple[str, int]]:
        """Returns the queues of a topic all of whose messages lie before a physical offset."""
        found = [(place, self.find(*place)) for place in self.places() if place[0] == topic]
        return [place for place, queue in found if queue and self._last_of(queue) < physical]

    def delete(self, topic: str, queue_id: int) -> None:
        """Removes a queue. Jobs are interrupted."""
        place = (topic, queue_id)
        self._on_disk.discard(place)
        gone = self._queues.pop(place)
        self._waiting_bytes -= len(gone.tail)
        self._dirty.pop(place, None)
        start = f"{gone.path}/"
        for name in [name for name in self._files if name.startswith(start)]:
            self._files.pop(name).close()
        self._outdated = [queue for queue in self._outdated if queue is not gone]
        self._unsynced -= {name for name in self._unsynced if name.startswith(start)}
        self._directory.remove(gone.path)
        if not self._directory.list(f"consumequeue/{topic}"):
            self._directory.remove(f"consumequeue/{topic}")
