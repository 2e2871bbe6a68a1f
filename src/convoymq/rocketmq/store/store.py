"""A store: puts messages into the commit log, and finds them by queue, offset, key and time.

    put, append_raw ─▶ commit log ─▶ stored ─▶ dispatched: consume queues, index, listeners

A message can be read once it is dispatched, which is when it is stored: on the disk with
SYNC_FLUSH, with the operating system else. Everything but the commit log follows from it.

Every method is called on one thread. The owner calls `kick` at the end of a turn of its loop, and
`tick` every 100 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from crc32c import crc32c

from convoymq.kernels import rocketmq_records as records
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.commit_log import CommitLog, file_name
from convoymq.rocketmq.store.consume_queues import ENTRY, ConsumeQueues, is_topic
from convoymq.rocketmq.store.settings import StoreSettings, parse_delays
from convoymq.rocketmq.store.types import (
    Boundary,
    Damage,
    Draft,
    GetStatus,
    Got,
    Matches,
    Message,
    Placed,
    PutStatus,
    Run,
    StoreReport,
)
from convoymq.storage.types import Directory, Done, File, Worker

BLANK = b"\xcb\xd4\x31\x94"
GET_BYTES_MAX = 256 << 10
GET_COUNT_MAX = 32
SEEN_MAX = 16_000
"""Entries that one read looks at."""
SCAN_BYTES = 4 << 20
QUEUES_MAX = 1 << 16
_REFUSALS = {
    records.ILLEGAL: PutStatus.MESSAGE_ILLEGAL,
    records.PROPERTIES_TOO_LONG: PutStatus.PROPERTIES_SIZE_EXCEEDED,
}


class MessageStore:
    """See the module text.

    Args:
        directory: `storePathRootDir`.
        clock: wall clock in ms.
        store_host: address and port of this broker, as records have them.
    """

    def __init__(
        self,
        directory: Directory,
        settings: StoreSettings,
        worker: Worker,
        *,
        clock: Callable[[], int],
        store_host: bytes,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._worker = worker
        self._clock = clock
        self.store_host = store_host
        self._delays = parse_delays(settings.delay_levels)
        self._log = CommitLog(
            directory, "commitlog", settings.log_file_bytes, worker,
            is_sync=settings.is_sync, on_stored=self._dispatch,
        )  # fmt: skip
        self._queues = ConsumeQueues(
            directory, settings.queue_file_bytes, worker, lambda: self._log.begin
        )
        self._next_offsets: dict[tuple[str, int], int] = {}
        """Queue offset of the next message that is put."""
        self._undispatched: deque[tuple[int, bytes]] = deque()
        self.dispatched = 0
        """Physical offset up to which messages can be read."""
        self._rest = bytearray()
        """Of a record that a master has sent in part."""
        self._rest_wanted = 0
        self._raw_end = 0
        """Physical offset behind the last whole record of a master."""
        self.on_dispatched: list[Callable[[Message], None]] = []
        """Called with each message when it can be read, in the order of the log."""
        self.on_run: list[Callable[[Run], None]] = []
        """Called with neighbours of a queue when they can be read: cheaper than each message."""

    # --- open and close

    def open(self) -> StoreReport:
        """Recovers. Raises StorageFault when the files are not such as these settings make."""
        report = StoreReport(was_aborted=self._directory.exists("abort"))
        for path in ("commitlog", "consumequeue", "index", "config"):
            self._directory.make(path)
        bases = self._log.bases()
        report.is_fresh = not bases
        begin = bases[0] if bases else 0
        self._log.begin_at(begin, begin)
        self._queues.open()
        self._queues.load_limit = begin
        self._recover(bases, begin, report)
        self._directory.open("abort", create=True).close()
        self._directory.sync()
        return report

    def _recover(self, bases: list[int], begin: int, report: StoreReport) -> None:
        """Reads the log from a file's begin on: dispatches what is whole, cuts the rest."""
        size = self._settings.log_file_bytes
        end = begin
        for base in bases:
            if base != end:
                break
            file = self._directory.open(f"commitlog/{file_name(base)}")
            if file.size() != size:
                raise StorageFault(
                    f"commitlog/{file_name(base)} has {file.size()} bytes, and "
                    f"mappedFileSizeCommitLog says {size}"
                )
            end, reason = self._recover_file(file, base, report)
            file.close()
            if end < base + size:
                if reason:
                    report.damages.append(
                        Damage(
                            file=f"commitlog/{file_name(base)}", offset=end - base, reason=reason
                        )
                    )
                break
        last = bases[-1] + size if bases else end
        self._log.begin_at(begin, max(last, end))
        self._log.truncate(end)
        self._log.begin_at(begin, end)
        self._queues.load_limit = end
        self.dispatched = end

    def _recover_file(self, file: File, base: int, report: StoreReport) -> tuple[int, str]:
        """Returns where the whole records of a file end, and why if it is damage."""
        size = self._settings.log_file_bytes
        at = 0
        want = SCAN_BYTES
        while at < size:
            data = file.pread(min(want, size - at), at)
            why, read, length, count, _stored, runs, _keys = records.scan(
                data, 0, base + at, True, self._delays
            )
            report.records_checked += count
            for run in runs:
                self._enter(Run(*run))
            at += read
            if why == records.ENDED or (why == records.CUT and read and length <= size - at):
                want = max(SCAN_BYTES, length)
                continue
            if why == records.CUT and at + len(data) - read < size and length <= size - at:
                want = max(2 * want, length)
                continue
            if why == records.BLANK and length == size - at:
                return base + size, ""
            if why == records.ZEROS:
                return base + at, ""
            return base + at, "no whole record lies here"
        return base + size, ""

    def close(self) -> None:
        """Writes everything and ends in order. No job of the worker may be under way.

        Raises:
            OSError: the next start recovers as after a crash.
        """
        self._log.finish()
        self._dispatch()
        self._queues.finish()
        self._directory.remove("abort")
        self._directory.sync()

    # --- put

    @property
    def max_offset(self) -> int:
        """Returns the physical offset behind the last byte, stored or not."""
        return self._log.end

    @property
    def min_offset(self) -> int:
        """Returns the physical offset of the first byte."""
        return self._log.begin

    @property
    def whole(self) -> int:
        """Returns the physical offset behind the last whole record."""
        return self._log.end - len(self._rest)

    @property
    def flushed(self) -> int:
        """Returns up to where the log is on the disk."""
        return self._log.flushed

    @property
    def stored(self) -> int:
        """Returns up to where the log is stored, as `flushDiskType` says."""
        return self._log.stored

    def put(self, drafts: Sequence[Draft], now_ms: int) -> list[Placed]:
        """Appends messages: `kick` stores them. Those of one draft get consecutive offsets."""
        if self._log.failure is not None or self._rest or self.dispatched < self._raw_end:
            return [Placed(PutStatus.SERVICE_NOT_AVAILABLE)] * len(drafts)
        if self._log.is_full:
            return [Placed(PutStatus.OS_PAGE_CACHE_BUSY)] * len(drafts)
        drafts = [self._checked(draft) for draft in drafts]
        placed: list[Placed] = []
        while len(placed) < len(drafts):
            physical, room = self._log.end, self._log.room
            block, rows = records.encode(
                drafts, len(placed), room, self._settings.log_file_bytes - 8, physical,
                self._next_offsets, now_ms, self.store_host,
            )  # fmt: skip
            if block:
                self._append(block)
            for size, count, offset, places in rows:
                if places is None:
                    placed.append(Placed(_REFUSALS[size]))
                    continue
                ids = ",".join(f"{self._id_start}{place:016X}" for place in places)
                placed.append(Placed(PutStatus.PUT_OK, places[0], size, offset, now_ms, ids, count))
            if len(placed) < len(drafts):
                room = self._log.room
                self._append(room.to_bytes(4, "big") + BLANK + bytes(room - 8))
        return placed

    @property
    def _id_start(self) -> str:
        return self.store_host.hex().upper()

    def _checked(self, draft: Draft) -> Draft:
        """Returns the draft, which is none that can be stored if it must not be."""
        place = (draft.topic, draft.queue_id)
        if (
            not is_topic(draft.topic)
            or not 0 <= draft.queue_id < QUEUES_MAX
            or len(draft.body) > self._settings.message_bytes_max
        ):
            return Draft("", 0, b"")
        if place not in self._next_offsets:
            self._next_offsets[place] = self.queue_max(*place)
        return draft

    def _append(self, block: bytes) -> None:
        self._undispatched.append((self._log.end, block))
        self._log.append(block)

    def when_flushed(self, offset: int, call: Done) -> None:
        """Calls when the log is stored up to an offset: with None, or with the error of a try that
        failed, in which case the message may still be stored later."""
        self._log.when_stored(offset, call)

    def kick(self) -> None:
        """Writes what was put: one flush for all of it."""
        self._log.kick()

    # --- dispatch

    def _dispatch(self) -> None:
        """Makes readable what is stored."""
        stored = self._log.stored
        while self._undispatched:
            start, block = self._undispatched[0]
            if start + len(block) > stored:
                return
            self._undispatched.popleft()
            *_, runs, _keys = records.scan(block, 0, start, False, self._delays)
            self.dispatched = start + len(block)
            for row in runs:
                run = Run(*row)
                self._enter(run)
                for listener in self.on_run:
                    listener(run)
                if self.on_dispatched:
                    for message in self.messages(run):
                        for call in self.on_dispatched:
                            call(message)

    def _enter(self, run: Run) -> None:
        if is_topic(run.topic) and 0 <= run.queue_id < QUEUES_MAX:
            self._queues.append(run.topic, run.queue_id, run.queue_offset, run.entries)

    def messages(self, run: Run) -> Iterable[Message]:
        """Yields the messages of a run that was just dispatched."""
        for physical, size, _ in ENTRY.iter_unpack(run.entries):
            record = self._log.read(physical, size)
            if record is not None:
                yield Message(record)

    def tick(self, now_ms: int) -> None:
        """Does what time asks for: flushes, retries."""
        self._log.kick()
        self._log.flush()
        self._queues.write_out()

    # --- read

    def queue_max(self, topic: str, queue_id: int) -> int:
        """Returns the queue offset of the next message."""
        queue = self._queues.find(topic, queue_id)
        return 0 if queue is None else queue.max

    def queue_min(self, topic: str, queue_id: int) -> int:
        """Returns the queue offset of the first message."""
        queue = self._queues.find(topic, queue_id)
        return 0 if queue is None else queue.min

    def message_at(self, physical: int) -> Message | None:
        """Returns the message whose record begins at an offset; None when none does."""
        head = self._log.read(physical, 8)
        if head is None or physical >= self.dispatched:
            return None
        record = self._log.read(physical, int.from_bytes(head[:4], "big"))
        if record is None or not records.is_record(record, physical):
            return None
        return Message(record)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        count: int,
        bytes_max: int = GET_BYTES_MAX,
        matches: Matches | None = None,
    ) -> Got:
        """Returns records of a queue from an offset on: at least one if one matches.

        Args:
            count: of records at most; GET_COUNT_MAX bounds it.
            matches: which of them the reader wants.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return Got(GetStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        got = Got(GetStatus.NO_MESSAGE_IN_QUEUE, 0, queue.min, queue.max)
        if queue.max == 0:
            return got
        if offset < queue.min:
            got.status, got.next = GetStatus.OFFSET_TOO_SMALL, queue.min
        elif offset == queue.max:
            got.status, got.next = GetStatus.OFFSET_OVERFLOW_ONE, offset
        elif offset > queue.max:
            got.status, got.next = GetStatus.OFFSET_OVERFLOW_BADLY, queue.max
        else:
            entries = self._queues.read(queue, offset, SEEN_MAX if matches else count)
            self._collect(got, entries, offset, min(count, GET_COUNT_MAX), bytes_max, matches)
        return got

    def _collect(
        self, got: Got, entries: bytes, offset: int, count: int, bytes_max: int,
        matches: Matches | None,
    ) -> None:  # fmt: skip
        got.status, got.next = GetStatus.OFFSET_FOUND_NULL, offset
        total = 0
        for physical, size, code in ENTRY.iter_unpack(entries):
            if len(got.records) >= count or (total and total + size > bytes_max):
                return
            got.next += 1
            if matches is not None and not matches(code, None):
                if not total:
                    got.status = GetStatus.NO_MATCHED_MESSAGE
                continue
            record = self._log.read(physical, size)
            if record is None or not records.is_record(record, physical):
                if not total:
                    got.status = GetStatus.MESSAGE_WAS_REMOVING
                continue
            if matches is not None and not matches(code, Message(record)):
                if not total:
                    got.status = GetStatus.NO_MATCHED_MESSAGE
                continue
            got.status = GetStatus.FOUND
            got.records.append(record)
            total += size

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Returns when a message of a queue was stored; -1 when it is not there."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return -1
        physical, size, _ = self._queues.entry(queue, offset)
        record = self._log.read(physical, size) if physical >= 0 else None
        return -1 if record is None else Message(record).stored_ms

    def earliest_time(self, topic: str, queue_id: int) -> int:
        """Returns when the first message of a queue was stored; -1 without one."""
        return self.store_time(topic, queue_id, self.queue_min(topic, queue_id))

    def offset_at(
        self, topic: str, queue_id: int, ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """Returns the queue offset that a time stands for."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or queue.min == queue.max:
            return 0
        low, high = queue.min, queue.max
        while low < high:
            middle = (low + high) // 2
            stored = self.store_time(topic, queue_id, middle)
            if stored < ms if boundary is Boundary.LOWER else stored <= ms:
                low = middle + 1
            else:
                high = middle
        if boundary is Boundary.LOWER:
            return low
        return low - 1 if low > queue.min else 0

    def query(self, topic: str, key: str, count: int, begin_ms: int, end_ms: int) -> list[Message]:
        """Returns messages with a key (KEYS, UNIQ_KEY), newest first."""
        return []

    # --- replication

    def read_raw(self, offset: int, limit: int) -> memoryview:
        """Returns bytes of the log, at most `limit`; empty at its end or before its begin."""
        if not self._log.begin <= offset < self._log.end:
            return memoryview(b"")
        return self._log.read_some(offset, limit)

    def append_raw(self, offset: int, block: bytes) -> None:
        """Appends bytes of another broker's log, which need not end with a whole record.

        Raises:
            StorageFault: they do not go on where this log ends, or are no records.
        """
        if offset != self._log.end:
            if self._log.end != self._log.begin or self._rest:
                raise StorageFault(f"the log ends at {self._log.end}, not at {offset}")
            self._log.begin_at(offset, offset)
            self.dispatched = offset
        size = self._settings.log_file_bytes
        view = memoryview(block)
        while view:
            part = bytes(view[: size - self._log.end % size])
            self._take(part)
            self._log.append(part)
            view = view[len(part) :]
        self._next_offsets.clear()

    def _take(self, part: bytes) -> None:
        """Finds the whole records of what a master has sent: they are dispatched when stored."""
        start = self._log.end - len(self._rest)
        # Not joined anew for each part of a large record.
        if self._rest and len(self._rest) + len(part) < self._rest_wanted:
            self._rest += part
            return
        data = bytes(self._rest) + part if self._rest else part
        why, read, wanted, *_ = records.scan(data, 0, start, False, self._delays)
        left = self._settings.log_file_bytes - (start + read) % self._settings.log_file_bytes
        if why == records.BLANK:
            if wanted != left:
                raise StorageFault(f"a blank of {wanted} bytes at {start + read}")
            read += wanted if wanted <= len(data) - read else 0
        elif why in (records.DAMAGED, records.ZEROS) or wanted > left:
            raise StorageFault(f"no record begins at {start + read}")
        self._rest = bytearray(data[read:])
        self._rest_wanted = wanted
        if read:
            self._undispatched.append((start, data[:read]))
            self._raw_end = start + read

    def truncate(self, offset: int) -> None:
        """Removes the end of the log, from the begin of a record on. Raises OSError.

        What was sent in part goes as well: a slave that is to take messages itself truncates at
        `whole`.
        """
        self._log.truncate(offset)
        self._queues.truncate(offset)
        self._next_offsets.clear()
        left = [(start, block[: offset - start]) for start, block in self._undispatched]
        self._undispatched = deque(row for row in left if row[1] and row[0] < offset)
        self._rest.clear()
        self._raw_end = min(self._raw_end, offset)
        self.dispatched = min(self.dispatched, offset)

    def checksum(self, offset: int, length: int) -> int | None:
        """Returns the CRC32C of the `length` bytes before an offset; None if they are not there."""
        at = offset - length
        if at < self._log.begin or offset > self._log.end:
            return None
        value = 0
        while at < offset:
            part = self._log.read_some(at, min(offset - at, SCAN_BYTES))
            if not part:
                return None
            value = crc32c(part, value)
            at += len(part)
        return value

    def topics(self) -> list[str]:
        """Returns topics that have queues."""
        return sorted({topic for topic, _ in self._queues.places()})

    def delete_topic(self, topic: str) -> None:
        """Removes a topic's queues; its records go with the files of the log."""
        self._queues.delete_topic(topic)
        for place in [place for place in self._next_offsets if place[0] == topic]:
            del self._next_offsets[place]

    def clean(self, now_ms: int) -> int:
        """Removes files that are too old. Returns how many."""
        return 0
