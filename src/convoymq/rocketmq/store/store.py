"""A store: puts messages into the commit log, and finds them by queue, offset, key and time.

    put, append_raw ─▶ commit log ─▶ stored ─▶ dispatched: consume queues, index, listeners

A message can be read once it is dispatched, which is when it is stored: on the disk with
SYNC_FLUSH, with the operating system else. Everything but the commit log follows from it.

Every method is called on one thread. The owner calls `kick` at the end of a turn of its loop, and
`tick` every 100 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from crc32c import crc32c

from convoymq.kernels import rocketmq_records as records
from convoymq.model.errors import StorageFault
from convoymq.model.rounds import pass_on, run_each
from convoymq.rocketmq.store.checkpoint import load
from convoymq.rocketmq.store.commit_log import READ_AHEAD_BYTES, CommitLog
from convoymq.rocketmq.store.consume_queues import ALL, ENTRY, ConsumeQueues, is_topic
from convoymq.rocketmq.store.derived import Derived
from convoymq.rocketmq.store.index import Index
from convoymq.rocketmq.store.jobs import Jobs
from convoymq.rocketmq.store.recovery import Recovery
from convoymq.rocketmq.store.settings import StoreSettings, parse_delays, parse_hours
from convoymq.rocketmq.store.types import (
    CRC_NAME,
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
    stored_ms_of,
    with_room_for_crc,
)
from convoymq.storage.types import Directory, Done, Worker

BLANK = b"\xcb\xd4\x31\x94"
GET_BYTES_MAX = 256 << 10
GET_COUNT_MAX = 32
SEEN_MAX = 16_000
"""Entries that one read looks at."""
SCAN_BYTES = 4 << 20
QUEUES_MAX = 1 << 16
LOG_PATH = "commitlog"
PAGE_BYTES = 4096
RECORD_BYTES_MAX = 64 << 20
RECORD_BYTES_MORE = 256 << 10
"""Of a record beside its body."""
HEAD_BYTES = 80
"""Of a record, up to when it was stored."""
DAMAGES_MAX = 1000
"""Damaged records that are named in one run."""
CLEAN_MS = 10_000
FILES_REMOVED_MAX = 10
DISK_RATIO_FORCED = 0.85
DISK_RATIO_FULL = 0.9
_ILLEGAL = Draft("", 0, b"")
_REFUSALS = {
    records.ILLEGAL: PutStatus.MESSAGE_ILLEGAL,
    records.PROPERTIES_TOO_LONG: PutStatus.PROPERTIES_SIZE_EXCEEDED,
}


class MessageStore:
    """See the module text.

    Args:
        directory: `storePathRootDir`.
        log_directory: `storePathCommitLog`; None: the usual place in `directory`.
        worker: writes and flushes the log.
        background: writes what follows from it, which may take longer; None: the same.
        clock: wall clock in ms: it names files of the index.
        store_host: address and port of this broker, as records have them.
        disk_used: share of the disk that is in use.
    """

    def __init__(
        self,
        directory: Directory,
        settings: StoreSettings,
        worker: Worker,
        *,
        clock: Callable[[], int],
        store_host: bytes,
        log_directory: Directory | None = None,
        background: Worker | None = None,
        disk_used: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._check = settings.checked
        self.store_host = store_host
        self._id_start = store_host.hex().upper()
        self._disk_used = disk_used
        self._delays = parse_delays(settings.delay_levels)
        jobs = Jobs(worker)
        slow_jobs = jobs if background is None else Jobs(background)
        self._jobs = {jobs, slow_jobs}
        self._log = CommitLog(
            log_directory or directory, "" if log_directory else LOG_PATH,
            settings.log_file_bytes, jobs,
            is_sync=settings.is_sync, on_stored=self._dispatch,
        )  # fmt: skip
        unsynced: set[str] = set()
        self._queues = ConsumeQueues(
            directory,
            settings.queue_file_bytes,
            lambda: self._log.begin,
            self._is_entry,
            unsynced,
            self._begun_anew,
        )
        self._index = Index(
            directory, settings.index_slots, settings.index_units, clock, unsynced,
            is_kept=settings.index_enabled,
        )  # fmt: skip
        self._derived = Derived(
            directory, self._log, self._queues, self._index, slow_jobs,
            interval_ms=settings.queue_flush_ms, unsynced=unsynced,
        )  # fmt: skip
        self._next_offsets: dict[tuple[str, int], int] = {}
        """Queue offset of the next message that is put."""
        self._undispatched: deque[tuple[int, bytes]] = deque()
        self._rest = bytearray()
        """Of a record that a master has sent in part: it follows the log, and goes into it when it
        is whole, so that what lies there is whole after a power failure or not there."""
        self._rest_wanted = 0
        self._raw_end = 0
        """Physical offset behind the last whole record of a master."""
        self._used = 0.0
        """Share of the disk that was in use when it was last asked for."""
        self._flushed_ms = 0
        self._cleaned_ms = 0
        self.on_dispatched: list[Callable[[Message], None]] = []
        """Called with each message when it can be read, in the order of the log."""
        self.on_truncated: list[Callable[[], None]] = []
        """Called when the end of the log was removed."""
        self.on_deleted: list[Callable[[str, int], None]] = []
        """Called with topic and number of a queue that was removed."""
        self.on_run: list[Callable[[Run], None]] = []
        """Called with neighbours of a queue when they can be read: cheaper than each message."""
        self._damaged: set[int] = set()
        self.on_damage: list[Callable[[Damage], None]] = []
        """Called with a record that a reader asked for and does not get."""

    # --- open and close

    def open(self) -> StoreReport:
        """Recovers. Raises StorageFault when the files are not such as these settings make."""
        report = StoreReport(was_aborted=self._directory.exists("abort"))
        for path in (LOG_PATH, "consumequeue", "index", "config"):
            self._directory.make(path)
        checkpoint = load(self._directory)
        recovery = Recovery(
            self._directory, self._log, self._queues, self._index, self._delays,
            self._check,
            max(self._settings.message_bytes_max, RECORD_BYTES_MAX) + RECORD_BYTES_MORE,
            checkpoint, report, checkpoint.log_ms,
        )  # fmt: skip
        recovery.run()
        self._derived.checkpoint = checkpoint
        self._derived.dispatched = self._raw_end = self._log.end
        self._derived.stored_ms = recovery.stored_ms
        if report.was_aborted:
            self._derived.save_now()
        self._directory.open("abort", create=True).close()
        self._directory.sync()
        return report

    def close(self) -> None:
        """Writes everything and ends in order.

        Raises:
            OSError: the next start recovers as after a crash.
        """
        with self._interrupted():
            self._log.flush_now()
            self._derived.save_now()
            self._log.close()
            self._queues.close()
            self._directory.remove("abort")
            self._directory.sync()

    @contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Has no job run meanwhile: those that wait are given up."""
        with ExitStack() as stack:
            for jobs in self._jobs:
                stack.enter_context(jobs.interrupted())
            self._index.entered(None)
            yield

    def _is_entry(self, topic: str, queue_id: int, offset: int, physical: int) -> bool:
        """Returns whether a message of a queue lies at a physical offset."""
        message = self._read(physical)
        return message is not None and (topic, queue_id, offset) == (
            message.topic, message.queue_id, message.queue_offset,
        )  # fmt: skip

    # --- put

    @property
    def max_offset(self) -> int:
        """Returns the physical offset behind the last byte, stored or not, of a whole record or
        not."""
        return self._log.end + len(self._rest)

    @property
    def min_offset(self) -> int:
        """Returns the physical offset of the first byte."""
        return self._log.begin

    @property
    def whole(self) -> int:
        """Returns the physical offset behind the last whole record."""
        return self._log.end

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
        refused = self.refusal()
        if refused is not None:
            return [Placed(refused)] * len(drafts)
        drafts = [self._checked(draft) for draft in drafts]
        placed: list[Placed] = []
        while len(placed) < len(drafts):
            physical, room = self._log.end, self._log.room
            block, rows = records.encode(
                drafts, len(placed), room, self._settings.log_file_bytes - 8, physical,
                self._next_offsets, now_ms, self.store_host, self._settings.appends_crc,
            )  # fmt: skip
            if block:
                self._append(block)
            for size, count, offset, places in rows:
                if places is None:
                    placed.append(Placed(_REFUSALS[size]))
                    continue
                ids = ",".join([f"{self._id_start}{place:016X}" for place in places])
                placed.append(Placed(PutStatus.PUT_OK, places[0], size, offset, now_ms, ids, count))
            if len(placed) < len(drafts):
                room = self._log.room
                self._append(room.to_bytes(4, "big") + BLANK + bytes(room - 8))
        return placed

    @property
    def is_disk_full(self) -> bool:
        """Returns whether too little of the disk was free when it was last asked."""
        return self._used > DISK_RATIO_FULL

    def refusal(self) -> PutStatus | None:
        """Returns why nothing can be put at the moment."""
        is_half = bool(self._rest) or self.dispatched < self._raw_end
        if is_half or self._log.failure is not None or self.is_disk_full:
            return PutStatus.SERVICE_NOT_AVAILABLE
        if self._log.is_full or self._derived.is_full:
            return PutStatus.OS_PAGE_CACHE_BUSY
        return None

    def _checked(self, draft: Draft) -> Draft:
        """Returns the draft, which is none that can be stored if it must not be."""
        place = (draft.topic, draft.queue_id)
        if len(draft.body) > self._settings.message_bytes_max:
            return _ILLEGAL
        # The queues that are in the table have been looked at.
        if place not in self._next_offsets:
            if not is_topic(draft.topic) or not 0 <= draft.queue_id < QUEUES_MAX:
                return _ILLEGAL
            self._next_offsets[place] = self.queue_max(*place)
        if self._settings.appends_crc or CRC_NAME in draft.properties:
            properties = with_room_for_crc(draft.properties, appends_crc=self._settings.appends_crc)
            return replace(draft, properties=properties)
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

    @property
    def dispatched(self) -> int:
        """Returns the physical offset up to which messages can be read."""
        return self._derived.dispatched

    def _dispatch(self) -> None:
        """Makes readable what is stored. The error of a listener is raised when all others had
        their turn with what one put has appended."""
        stored = self._log.stored
        while self._undispatched:
            start, block = self._undispatched[0]
            if start + len(block) > stored:
                return
            self._undispatched.popleft()
            _, _, _, count, stored_ms, rows, keys = records.scan(
                block, 0, start, records.UNCHECKED, self._delays
            )
            self._derived.dispatched = start + len(block)
            if count:
                self._derived.stored_ms = stored_ms
            self._index.add(keys)
            runs = [Run(*row) for row in rows]
            for run in runs:
                if is_queue(run):
                    self._queues.append(run.topic, run.queue_id, run.queue_offset, run.entries)
            run_each(runs, self._tell, pass_on)

    def _tell(self, run: Run) -> None:
        run_each(self.on_run, lambda listener: listener(run), pass_on)
        if self.on_dispatched:
            for message in self.messages(run):
                run_each(self.on_dispatched, partial(_call, message), pass_on)

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """Yields the runs of a part of the log that is stored, up to what is no record."""
        wanted = 0
        while start < end:
            limit = min(max(wanted, SCAN_BYTES), end - start)
            block = bytes(self._log.read_some(start, limit))
            before = wanted
            why, read, wanted, _, _, rows, _ = records.scan(
                block, 0, start, records.UNCHECKED, self._delays
            )
            yield from (run for row in rows if is_queue(run := Run(*row)))
            if why == records.BLANK:
                read += wanted
            if not read and not before < wanted <= RECORD_BYTES_MAX:
                return
            start += read

    def messages(self, run: Run) -> Iterator[Message]:
        """Yields the messages of a run that was just dispatched."""
        for physical, size, _ in ENTRY.iter_unpack(run.entries):
            record = self._log.read(physical, size)
            if record is not None:
                yield Message(record)

    def tick(self, now_ms: int) -> None:
        """Does what time asks for: writes, flushes, tries again, removes old files."""
        self._log.kick()
        waiting = self._log.written - self._log.flushed
        passed = now_ms - self._flushed_ms
        settings = self._settings
        is_due = passed >= settings.flush_ms and waiting >= settings.flush_pages * PAGE_BYTES
        if is_due or self._log.failure or not 0 <= passed < settings.flush_thorough_ms:
            self._flushed_ms = now_ms
            self._log.flush()
        self._derived.tick(now_ms)
        self._queues.remove_some()
        if not 0 <= now_ms - self._cleaned_ms < CLEAN_MS:
            self._cleaned_ms = now_ms
            self.clean(now_ms)

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
        return self._read(physical) if physical < self.dispatched else None

    def _read(self, physical: int) -> Message | None:
        if not self._log.begin <= physical < self._log.end:
            return None
        head = self._log.read_some(physical, PAGE_BYTES)
        size = int.from_bytes(head[:4], "big")
        record = head[:size] if size <= len(head) else self._log.read(physical, size)
        if record is None or not records.is_record(record, physical, self._check):
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
            if not entries:
                got.next = min(self._queues.next_file(offset), queue.max)
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
            record = self._log.read(physical, size, ahead=READ_AHEAD_BYTES)
            if record is None or not records.is_record(record, physical, self._check):
                if record is not None:
                    self._found_damage(physical)
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

    def _found_damage(self, physical: int) -> None:
        """Names a damaged record, once."""
        if physical in self._damaged or len(self._damaged) >= DAMAGES_MAX:
            return
        self._damaged.add(physical)
        offset = physical % self._log.size
        damage = Damage(
            file=self._log.name_of(physical - offset), offset=offset,
            reason="it is no whole record, and is passed over",
        )  # fmt: skip
        for call in self.on_damage:
            call(damage)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Returns when a message of a queue was stored; -1 when it is not there."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return -1
        physical, size, _ = self._queues.entry(queue, offset)
        if size < HEAD_BYTES or not self._log.begin <= physical < self._log.end:
            return -1
        head = self._log.read_some(physical, HEAD_BYTES)
        return stored_ms_of(head) if len(head) == HEAD_BYTES else -1

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
        found: dict[int, Message] = {}
        count = min(count, self._settings.query_count_max)
        for physical in self._index.find(records.key_hash(topic, key), begin_ms, end_ms):
            if len(found) >= count:
                break
            message = self.message_at(physical)
            if message is not None and message.topic == topic and key in message.keys:
                found[physical] = message
        return list(found.values())

    # --- replication

    def read_raw(self, offset: int, limit: int) -> memoryview:
        """Returns bytes of the log, at most `limit`; empty at its end or before its begin."""
        if not self._log.begin <= offset < self.max_offset:
            return memoryview(b"")
        if offset >= self._log.end:
            start = offset - self._log.end
            return memoryview(bytes(self._rest[start : start + limit]))
        return self._log.read_some(offset, limit)

    def append_raw(self, offset: int, block: bytes) -> None:
        """Appends bytes of another broker's log, which need not end with a whole record.

        Raises:
            StorageFault: they do not go on where this log ends, or are no records.
        """
        if offset != self.max_offset:
            if self.max_offset != self.min_offset:
                raise StorageFault(f"the log ends at {self.max_offset}, not at {offset}")
            self._log.begin_at(offset, offset)
            self._derived.dispatched = offset
        view = memoryview(block)
        while view:
            left = self._log.size - self.max_offset % self._log.size
            self._take(view[:left])
            view = view[left:]
        self._next_offsets.clear()

    def _take(self, part: memoryview) -> None:
        """Appends the whole records of what a master has sent, and keeps the rest."""
        # Not joined anew for each part of a large record.
        if self._rest and len(self._rest) + len(part) < self._rest_wanted:
            self._rest += part
            return
        start, data = self._log.end, bytes(self._rest) + part
        why, read, wanted, *_ = records.scan(data, 0, start, records.UNCHECKED, self._delays)
        left = self._log.size - (start + read) % self._log.size
        if why == records.BLANK:
            if wanted != left:
                raise StorageFault(f"a blank of {wanted} bytes at {start + read}")
            read += wanted if wanted <= len(data) - read else 0
        elif why in (records.DAMAGED, records.ZEROS) or wanted > left:
            raise StorageFault(f"no record begins at {start + read}")
        self._rest = bytearray(data[read:])
        self._rest_wanted = wanted
        if read:
            self._append(data[:read])
            self._raw_end = self._log.end

    def truncate(self, offset: int) -> None:
        """Removes the end of the log, from the begin of a record on. Raises OSError.

        What was sent in part goes as well: a slave that is to take messages itself truncates at
        `whole`.
        """
        with self._interrupted():
            self._index.truncate(offset)
            self._derived.lower(offset)
            self._queues.truncate(offset)
            self._log.truncate(offset)
        left = [(at, block[: offset - at]) for at, block in self._undispatched if at < offset]
        self._undispatched = deque(left)
        self._next_offsets.clear()
        for at, block in left:
            *_, rows, _ = records.scan(block, 0, at, records.UNCHECKED, self._delays)
            for topic, queue_id, first, count, _, _ in rows:
                self._next_offsets[topic, queue_id] = first + count
        self._rest.clear()
        self._raw_end = min(self._raw_end, offset)
        for call in self.on_truncated:
            call()

    def checksum(self, offset: int, length: int) -> int | None:
        """Returns the CRC32C of the `length` bytes before an offset; None if they are not there."""
        at = offset - length
        if at < self._log.begin or offset > self.max_offset:
            return None
        value = 0
        while at < offset:
            part = self.read_raw(at, min(offset - at, SCAN_BYTES))
            if not part:
                return None
            value = crc32c(part, value)
            at += len(part)
        return value

    def places(self) -> list[tuple[str, int]]:
        """Returns topic and number of all queues."""
        return self._queues.places()

    def topics(self) -> list[str]:
        """Returns topics that have queues."""
        return sorted({topic for topic, _ in self._queues.places()})

    # --- removal

    def delete_topic(self, topic: str, before: int = ALL) -> None:
        """Removes the queues of a topic whose messages all lie before a physical offset; their
        records go with the files of the log. Raises OSError.

        Cost: a flush. Else a start after a crash would read messages from before, and offsets of
        a new topic of this name begin anew.
        """
        for place in [place for place in self._next_offsets if place[0] == topic]:
            del self._next_offsets[place]
        gone = self._queues.before(topic, before)
        if not gone:
            return
        with self._interrupted():
            self._log.flush_now()
            for place in gone:
                self._queues.delete(*place)
            self._derived.save_now()
        for place in gone:
            self._tell_deleted(*place)

    def _begun_anew(self, topic: str, queue_id: int) -> None:
        """Removes a queue whose topic was deleted and made again: its messages say so."""
        with self._interrupted():
            self._queues.delete(topic, queue_id)
        self._tell_deleted(topic, queue_id)

    def _tell_deleted(self, topic: str, queue_id: int) -> None:
        for call in self.on_deleted:
            call(topic, queue_id)

    def clean(self, now_ms: int) -> int:
        """Removes files of the log that are too old, with what led to them. Returns how many."""
        self._used = self._disk_used()
        expired = self._expired(now_ms)
        if expired <= self._log.begin:
            return 0
        with self._interrupted():
            removed = self._log.remove_before(expired)
            self._queues.begin_removal()
            self._index.remove_before(self._log.begin)
        return removed

    def _expired(self, now_ms: int) -> int:
        """Returns where the files end that are to go."""
        settings, used = self._settings, self._used
        hour = now_ms // 3_600_000 % 24
        is_forced = used > DISK_RATIO_FORCED and settings.remove_forcibly
        is_time = hour in parse_hours(settings.delete_when)
        end = self._log.begin
        if not is_time and used * 100 <= settings.disk_ratio_max:
            return end
        # A file is as old as its last message: about as old as the first of the next file.
        for _ in range(FILES_REMOVED_MAX):
            following = end - end % self._log.size + self._log.size
            head = self._log.read_some(following, HEAD_BYTES) if following < self._log.end else b""
            if len(head) < HEAD_BYTES:
                break
            age_ms = now_ms - stored_ms_of(head)
            if not is_forced and age_ms <= settings.reserved_hours * 3_600_000:
                break
            end = following
        return end


def is_queue(run: Run) -> bool:
    """Returns whether a run's messages lie in a queue."""
    return is_topic(run.topic) and run.queue_id >= 0


def _call(message: Message, listener: Callable[[Message], None]) -> None:
    listener(message)
