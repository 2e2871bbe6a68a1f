# cython: annotation_typing=False
"""The log of one group: where its entries lie, and its share of the common write-ahead log.

An entry lies in one or two of three places:

- *memory*: the newest entries [`memory_first`, `last_index`]; bodies leave when they are written
  and the node's limit is passed or the owner forgets them;
- *WAL files*: [`base`, `last_index`], place and size packed in two arrays, 12 bytes an entry;
- *segments*: everything below `base` that is still kept; sparse below `first_index`, where only
  entries lie whose bodies the machine still needs.

Invariants: first_index - 1 <= last_index; written_index <= last_index; memory holds every entry
above written_index; [first_index, last_index] is complete.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from convoymq.kernels.entries import Entry
from convoymq.logformat.entry import KIND_VOID, KIND_VOTE, check_entry
from convoymq.logformat.pack import Section, drop_sections
from convoymq.logformat.segment import ERA_SHIFT, FilePlace, Segment, read_entries
from convoymq.logformat.wal_file import PLACE_FILE_SHIFT, PLACE_OFFSET_MASK
from convoymq.model.errors import Misuse, Refused, check
from convoymq.storage.receiver import SnapshotReceiver
from convoymq.storage.snapshots import read_snapshot, remove_former, write_snapshot
from convoymq.storage.types import (
    Damage,
    Done,
    EntryGone,
    Snapshot,
    StorageFault,
)

if TYPE_CHECKING:
    from convoymq.storage.store import Storage

NO_NODE = 256
"""Votes from here on are marks of the consensus core: no vote was given in that term."""


def _nothing(*_: object) -> None:
    """The callback of a log that nobody listens to."""


class GroupLog:
    """Entries, hard state and snapshot of one group on this node."""

    def __init__(self, store: Storage, group: int) -> None:
        self.store = store
        """The storage that the log is a part of."""
        self._wal = store.wal
        self.group = group
        self.term = 0
        self.voted_for = 0
        self.first_index = 1
        self.last_index = 0
        self.last_term = 0
        self.written_index = 0
        self.snapshot_index = 0
        self.snapshot_term = 0
        self.snapshot_membership = b""
        self.damaged: Damage | None = None
        self.removed = False
        self._truncated = False
        """The next entry replaces some that are gone from memory, but not from disk."""
        self.logged: tuple[int, int, int] | None = None
        """(last index, its term, era) as the WAL has them, while memory is ahead: a truncation or
        replacement takes effect there with what is queued next. None = as in memory."""
        self.on_written: Callable[[int, int, int], None] = _nothing
        """(group, index, term): durable up to here. Once per flush."""
        self.on_vote_written: Callable[[int, int, int], None] = _nothing
        """(group, term, voted for)."""
        self.dirty = False
        """Has entries in the WAL's open batch."""
        self.base = 1
        """Index of places[0]."""
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.segments: list[Segment] = []
        self.next_order = 1
        """Order of the next segment file; its era are the bits above ERA_SHIFT."""
        self.era = 0
        """Segments of another era are void: they belong to a log that was replaced, or to one that
        never took its place."""
        self.eras_used = 0
        self.stale_index = 0
        """Segment files still hold truncated entries from here on; 0 = none does."""
        self.stale_segments: list[Segment] = []
        """Segments that hold nothing but truncated entries."""
        self.known = False
        """The WAL on disk has a record of the group."""
        self.version = 0
        """Changes when the log is replaced: answers that belong to the former one are dropped."""
        self._run_starts: list[int] = [1]
        self._run_terms: list[int] = [0]
        self._memory: list[Entry | None] = []
        self._head = 0
        self.memory_first = 1
        """Index of the oldest entry in memory."""
        self.memory_bytes = 0
        self.remembered = False
        """Is in the store's line of logs with something in memory."""
        self._cache: dict[int, Entry] = {}
        self.cache_bytes = 0
        self.cache_used = False
        """A read hit the read-ahead since the store last looked."""
        self.compacting = False
        """The worker is rewriting segments."""
        self._snapshot_waiting: list[tuple[Snapshot, Done]] = []
        self._snapshot_submitted = 0
        self.receiver: SnapshotReceiver | None = None

    # Appending.

    def append(self, entry: Entry) -> None:
        """Adds the next entry. Durable when `on_written` says so.

        Raises:
            Misuse: it is not the next one, of a lower term, or the log cannot take entries now.
        """
        index = entry.index
        term = entry.term
        if index != self.last_index + 1 or term < self.last_term or self.receiver is not None:
            raise Misuse(
                f"group {self.group}: entry {index} of term {term} cannot follow"
                f" {self.last_index} of term {self.last_term}"
            )
        if self.damaged is not None or self.removed:
            raise Misuse(f"group {self.group}: the log is damaged or removed")
        if term != self._run_terms[-1]:
            self._run_starts.append(index)
            self._run_terms.append(term)
        data = entry.data
        size = len(data)
        self.places.append(self._wal.add_entry(self, data))
        if self._truncated:
            self._truncated = False
            self.logged = None
            self._wal.hold_files()
        self.sizes.append(size >> 3)
        self._memory.append(entry)
        self.memory_bytes += size
        self.last_index = index
        self.last_term = term
        store = self.store
        store.memory_bytes += size
        if not self.remembered:
            store.remember(self)

    def truncate_from(self, index: int) -> None:
        """Removes the entries >= index, which conflict with the leader's.

        Lasting only together with what is appended next: after a crash before that the old entries
        are back, which Raft allows. Raises InvariantViolated below the start of the log.
        """
        if index > self.last_index:
            return
        check(
            index >= self.first_index and index > self.snapshot_index,
            f"group {self.group}: truncation at {index} reaches below the log's start",
        )
        keep = self.term_at(index - 1)
        self._hold_logged()
        self._wal.notes_after(self, index)
        if index >= self.base:
            del self.places[index - self.base :]
            del self.sizes[index - self.base :]
        else:
            self._cut_segments(index)
            self.base = index
            del self.places[:]
            del self.sizes[:]
        self._drop_memory_from(index)
        self._drop_cache()
        while len(self._run_starts) > 1 and self._run_starts[-1] >= index:
            self._run_starts.pop()
            self._run_terms.pop()
        self.last_index = index - 1
        self.last_term = keep
        if self._run_terms[-1] != keep:
            # The runs begin above index - 1: the term of what precedes the log is kept apart.
            self._run_starts[-1] = index
        self.written_index = min(self.written_index, index - 1)
        self._truncated = True

    def _hold_logged(self) -> None:
        if self.logged is None:
            self.logged = (self.last_index, self.last_term, self.era)

    def void(self, index: int, term: int) -> int:
        """Has the WAL forget the entries: the log goes on behind `index`, in the present era."""
        place = self._wal.add_control(KIND_VOID, self.group, index, term, era=self.era)
        self.logged = None
        return place

    def _cut_segments(self, index: int) -> None:
        self.stale_index = min(self.stale_index or index, index)
        while self.segments and self.segments[-1].first >= index:
            self.stale_segments.append(self.segments.pop())
        if self.segments and self.segments[-1].last >= index:
            self.segments[-1].cut(index)

    def entries_written(self, index: int) -> None:
        """The WAL made the entries up to `index` durable."""
        if index <= self.written_index or self.removed:
            return
        self.written_index = index
        self.known = True
        self.on_written(self.group, index, self.term_at(index))
        if self._snapshot_waiting:
            waiting, self._snapshot_waiting = self._snapshot_waiting, []
            for snapshot, done in waiting:
                self.save_snapshot(snapshot, done)

    # Hard state.

    def save_vote(self, term: int, voted_for: int) -> None:
        """Records term and vote (0 = nobody). Durable when `on_vote_written` says so."""
        check(
            term > self.term
            or (term == self.term and self.voted_for in (0, voted_for))
            or (term == self.term and NO_NODE <= self.voted_for < voted_for),
            f"group {self.group}: vote ({term}, {voted_for}) after ({self.term}, {self.voted_for})",
        )
        self.term = term
        self.voted_for = voted_for
        self._wal.add_control(KIND_VOTE, self.group, voted_for, term)
        self._wal.tell((self, term, voted_for))

    def assume_vote(self, term: int, voted_for: int) -> None:
        """Takes a term and vote that follow from what is durable elsewhere: nothing is written."""
        check(self.term == 0, f"group {self.group}: term {self.term} is saved")
        check(self.voted_for == 0, f"group {self.group}: vote {self.voted_for} is saved")
        self.term = term
        self.voted_for = voted_for

    def vote_written(self, term: int, voted_for: int) -> None:
        """The WAL made a vote durable."""
        if not self.removed:
            self.known = True
            self.on_vote_written(self.group, term, voted_for)

    # Reading.

    def term_at(self, index: int) -> int:
        """Returns the term of an entry, of the one before the first, or of the snapshot. Raises
        EntryGone."""
        starts = self._run_starts
        if starts[-1] <= index <= self.last_index:
            return self._run_terms[-1]
        if index == 0:
            return 0
        if index == self.snapshot_index:
            return self.snapshot_term
        if not self.first_index - 1 <= index <= self.last_index or index < starts[0]:
            raise EntryGone(f"group {self.group}: the term of entry {index} is not known")
        return self._run_terms[bisect_right(starts, index) - 1]

    def entry(self, index: int) -> Entry:
        """Returns an entry, from memory or from disk with what follows it.

        Raises:
            EntryGone: it is not kept (any more), or not yet there.
            StorageFault: it is damaged; the log is `damaged` from then on.
        """
        if index >= self.memory_first:
            if index > self.last_index:
                raise EntryGone(f"group {self.group}: there is no entry {index} yet")
            found = self._memory[self._head + index - self.memory_first]
            assert found is not None
            return found
        cached = self._cache.get(index)
        if cached is not None:
            self.cache_used = True
            return cached
        entries = self._read_span(index, self.store.config.read_ahead_bytes)
        self._drop_cache()
        self._cache = {e.index: e for e in entries}
        self.cache_bytes = sum([e.size for e in entries])
        self.cache_used = True
        self.store.cached(self)
        return entries[0]

    def span(self, index: int, max_bytes: int) -> list[Entry]:
        """Returns an entry and, when it lies on disk, those of the next ones that one read of about
        `max_bytes` brings along; nothing stays in the read-ahead. Raises as `entry` does."""
        if index >= self.memory_first:
            return [self.entry(index)]
        return self._read_span(index, max_bytes)

    def has_entry(self, index: int) -> bool:
        """Returns whether `entry` would find it, without reading it."""
        if index >= self.base:
            return index <= self.last_index
        segment = self._segment_of(index)
        return segment is not None and segment.position(index) >= 0

    def entries(self, first: int, max_bytes: int) -> list[Entry]:
        """Consecutive entries from `first` on, about `max_bytes` of them, at least one if there is
        one. Raises as `entry` does; EntryGone when `first` lies below the first entry."""
        if first < self.first_index:
            raise EntryGone(f"group {self.group}: entries from {first} on are gone")
        found: list[Entry] = []
        size = 0
        index = first
        last = self.last_index
        while index <= last and (size < max_bytes or not found):
            if index < self.memory_first:
                for entry in self._read_span(index, max(max_bytes - size, 4096)):
                    if entry.index != index:
                        break
                    found.append(entry)
                    size += entry.size
                    index += 1
                continue
            at = self._head + index - self.memory_first
            held = self._memory[at]
            assert held is not None
            if found and size + held.size > max_bytes:
                break
            found.append(held)
            size += held.size
            index += 1
        return found

    def segment_at(self, index: int) -> tuple[Segment, FilePlace] | None:
        """Returns the segment that holds an entry, and its file for other processes; None when it
        lies elsewhere, in a pack as well, or the log is damaged."""
        if index >= self.base or self.damaged is not None:
            return None
        segment = self._segment_of(index)
        if segment is None or segment.position(index) < 0 or isinstance(segment, Section):
            return None  # nobody reads a file by himself that has other groups' entries, too
        try:
            place = self.store.segment_file(segment).place()
        except OSError:
            return None
        return None if place is None else (segment, place)

    def _segment_of(self, index: int) -> Segment | None:
        segments = self.segments
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if segments[middle].last < index:
                low = middle + 1
            else:
                high = middle
        if low == len(segments) or segments[low].first > index:
            return None
        return segments[low]

    def _read_span(self, index: int, limit: int) -> list[Entry]:
        """Returns the entry and what follows it closely, in one read."""
        if self.damaged is not None:
            raise StorageFault(self.damaged.reason, path=self.damaged.file)
        try:
            if index >= self.base:
                if index > self.last_index:
                    raise EntryGone(f"group {self.group}: there is no entry {index} yet")
                return self._read_wal(index, limit)
            segment = self._segment_of(index)
            position = -1 if segment is None else segment.position(index)
            if segment is None or position < 0:
                raise EntryGone(f"group {self.group}: entry {index} is gone")
            return read_entries(
                self.store.segment_file(segment), segment, self.group, position, limit
            )
        except StorageFault as fault:
            self.mark_damaged(fault)
            raise
        except OSError as error:
            unread = StorageFault(f"group {self.group}: entry {index} cannot be read: {error}")
            self.mark_damaged(unread)
            raise unread from error

    def _read_wal(self, index: int, limit: int) -> list[Entry]:
        i = index - self.base
        places = self.places
        start = places[i]
        upto = min(
            bisect_right(places, start + (limit >> 3), i), max(self.memory_first - self.base, i + 1)
        )
        useful = sum(self.sizes[i:upto])
        if useful << 3 < places[upto - 1] + self.sizes[upto - 1] - start:
            # Mostly other groups' entries lie there: do not read far.
            upto = max(i + 1, min(upto, bisect_right(places, start + (limit >> 6), i)))
        while upto > i + 1 and places[upto - 1] + self.sizes[upto - 1] - start > limit >> 3:
            upto -= 1
        span = (places[upto - 1] + self.sizes[upto - 1] - start) << 3
        file = self._wal.files[start >> PLACE_FILE_SHIFT]
        offset = (start & PLACE_OFFSET_MASK) << 3
        data = file.file.pread(span, offset)
        if len(data) != span:
            raise StorageFault("the file ends early", path=file.name, offset=offset)
        found = []
        for j in range(i, upto):
            at = (places[j] - start) << 3
            found.append(
                check_entry(
                    data[at : at + (self.sizes[j] << 3)],
                    self.group,
                    self.base + j,
                    file.name,
                    offset + at,
                )
            )
        return found

    def mark_damaged(self, fault: StorageFault) -> None:
        """Nothing of this log may be served any more, until it is wiped or replaced."""
        if self.damaged is None:
            self.damaged = Damage(
                file=fault.path, offset=fault.offset, group=self.group, reason=fault.text
            )
            self.store.on_damage(self.damaged)

    # Memory.

    def forget(self, index: int) -> None:
        """Lets the bodies of written entries up to `index` leave memory."""
        upto = min(index, self.written_index)
        count = upto - self.memory_first + 1
        if count <= 0:
            return
        memory = self._memory
        head = self._head
        freed = 0
        for at in range(head, head + count):
            entry = memory[at]
            assert entry is not None
            freed += entry.size
            memory[at] = None
        head += count
        if (head > 256 and head * 2 > len(memory)) or head == len(memory):
            del memory[:head]
            head = 0
        self._head = head
        self.memory_first = upto + 1
        self.memory_bytes -= freed
        self.store.memory_bytes -= freed

    def evict(self, wanted: int) -> None:
        """Drops written bodies, oldest first, until about `wanted` bytes are free."""
        freed = 0
        index = self.memory_first
        at = self._head
        while index <= self.written_index and freed < wanted:
            entry = self._memory[at]
            assert entry is not None
            freed += entry.size
            index += 1
            at += 1
        self.forget(index - 1)

    def _drop_memory_from(self, index: int) -> None:
        if index < self.memory_first:
            keep = self._head
            self.memory_first = index
        else:
            keep = self._head + index - self.memory_first
        freed = sum([e.size for e in self._memory[keep:] if e is not None])
        del self._memory[keep:]
        self.memory_bytes -= freed
        self.store.memory_bytes -= freed

    def _drop_cache(self) -> None:
        if self._cache:
            self.store.uncached(self)
            self._cache = {}
            self.cache_bytes = 0

    def drop_cache(self) -> None:
        """Gives the read-ahead back."""
        self._cache = {}
        self.cache_bytes = 0

    # Snapshots.

    def save_snapshot(self, snapshot: Snapshot, done: Done | None = None) -> None:
        """Saves the machine's state. The entries it covers may go with the next WAL compaction.

        It waits until the entries up to its index are written, so that bodies and state never
        contradict each other after a crash. An older one than the last saved is dropped.
        """
        answer: Done = done if done is not None else _nothing
        if snapshot.index > self.written_index:
            self._snapshot_waiting.append((snapshot, answer))
            return
        version = self.version
        era = self.era
        directory, clusters = self.store.directory, self.store.clusters
        group = self.group

        def work() -> None:
            write_snapshot(directory, group, snapshot, era, clusters.current)

        def finished(_: object, error: BaseException | None) -> None:
            if error is None and version == self.version and snapshot.index > self.snapshot_index:
                self._snapshot_saved(snapshot)
            elif error is not None and version == self.version:
                self._snapshot_submitted = self.snapshot_index
            answer(error)

        if snapshot.index <= max(self.snapshot_index, self._snapshot_submitted):
            answer(Refused(f"group {group}: there is a newer snapshot"))
            return
        self._snapshot_submitted = snapshot.index
        self.store.worker.submit(work, finished)

    def _snapshot_saved(self, snapshot: Snapshot) -> None:
        self.snapshot_index = snapshot.index
        self.snapshot_term = snapshot.term
        self.snapshot_membership = snapshot.membership

    def new_era(self) -> int:
        """Returns a number for a log that may replace this one."""
        self.eras_used += 1
        return self.eras_used

    def begin_era(self, era: int) -> None:
        """The segments from now on belong to another log than those before."""
        self.era = era
        self.eras_used = max(self.eras_used, era)
        self.next_order = era << ERA_SHIFT

    def claim_snapshot(self, index: int) -> None:
        """Snapshots up to `index` are not to be saved any more."""
        self._snapshot_submitted = index

    def read_snapshot(self) -> Snapshot | None:
        """Returns the saved snapshot, from disk. Raises StorageFault when it is damaged."""
        if not self.snapshot_index:
            return None  # a file there may be that of a former log, still to be removed
        try:
            found = read_snapshot(self.store.directory, self.group, self.store.clusters)
        except StorageFault as fault:
            self.mark_damaged(fault)
            raise
        return None if found is None else found[0]

    def receive_snapshot(self, index: int, term: int) -> SnapshotReceiver:
        """Begins to replace the log by a leader's snapshot; nothing may be appended meanwhile."""
        if self.receiver is not None:
            self.receiver.abort()
        self.receiver = SnapshotReceiver(self, index, term)
        return self.receiver

    def replaced(self, snapshot: Snapshot, segments: list[Segment]) -> None:
        """A received snapshot is durable: it is the log now."""
        self._reset(snapshot.index, snapshot.term)
        self.segments = segments
        self._snapshot_saved(snapshot)
        self.damaged = None

    def _reset(self, index: int, term: int) -> None:
        """Empties the log; the next entry is index + 1."""
        self._hold_logged()
        self._truncated = False
        self._wal.notes_after(self, 1)
        self.version += 1
        self._drop_memory_from(0)
        self._memory = []
        self._head = 0
        self._drop_cache()
        self.memory_first = self.base = self.first_index = index + 1
        self.last_index = self.written_index = index
        self.last_term = term
        self._run_starts = [index + 1]
        self._run_terms = [term]
        self.places = array("Q")
        self.sizes = array("I")
        drop_sections((*self.segments, *self.stale_segments))
        self.segments = []
        self.stale_index = 0
        self.stale_segments = []
        self.snapshot_index = 0
        self.snapshot_term = 0
        self.snapshot_membership = b""
        self._snapshot_submitted = 0
        waiting, self._snapshot_waiting = self._snapshot_waiting, []
        for _, done in waiting:
            done(Refused(f"group {self.group}: the log was replaced"))

    def wipe(self, done: Done | None = None) -> None:
        """Drops all entries and the snapshot for good; term and vote stay. Usable when done.

        What the disk refuses is repeated by `Storage.tick`; `done` hears of the first refusal, and
        of the end.
        """
        if self.receiver is not None:
            self.receiver.abort()
        self._reset(0, 0)
        self.begin_era(self.new_era())
        directory, group, era = self.store.directory, self.group, self.era
        guard = self.damaged or Damage(file="", offset=0, group=group, reason="is being wiped")
        self.damaged = guard
        answer: Done = done if done is not None else _nothing
        refused = False

        def remove() -> None:
            self.store.worker.submit(work, finished)

        def work() -> None:
            remove_former(directory, group, era, self.store.clusters)

        def finished(_: object, error: BaseException | None) -> None:
            nonlocal refused
            if error is None:
                if self.damaged is guard:
                    self.damaged = None
                answer(None)
                return
            self.store.repeat(remove)
            if not refused:
                refused = True
                answer(error)

        self._wal.seal()
        self.void(0, 0)
        # Only then: what is half removed could not be told from what was lost.
        self._wal.tell(remove)
        self._wal.kick()

    # For recovery and compaction.

    def check_invariants(self) -> None:
        """Asserts what the module text promises."""
        assert self.first_index - 1 <= self.last_index
        assert self.written_index <= self.last_index
        assert self.base + len(self.places) == self.last_index + 1 == self.base + len(self.sizes)
        held = len(self._memory) - self._head
        assert self.memory_first + held == self.last_index + 1
        assert self.memory_first <= self.written_index + 1 or self.damaged is not None
        assert self.memory_bytes == sum(e.size for e in self._memory if e is not None)
        assert all(a.last < b.first for a, b in zip(self.segments, self.segments[1:], strict=False))
        assert not self.segments or self.segments[-1].last < self.base
        assert list(self.places) == sorted(self.places)
        for index in range(self.first_index, self.last_index + 1):
            assert self.has_entry(index), index

    def set_runs(self, runs: list[tuple[int, int]]) -> None:
        """Terms of the entries as [(first index, term)], found by recovery."""
        self._run_starts = [start for start, _ in runs]
        self._run_terms = [term for _, term in runs]

    def restart_memory(self) -> None:
        """After recovery: everything is on disk, nothing in memory."""
        self._memory = []
        self._head = 0
        self.memory_first = self.last_index + 1

    def clear(self) -> None:
        """Lets everything go: the group is removed."""
        # The WAL file knows the log for as long as the file is there.
        self.on_written = self.on_vote_written = _nothing
        self._reset(0, 0)

    def moved(
        self, count: int, segments: list[Segment], keep: int, joined: Sequence[Segment] = ()
    ) -> None:
        """The first `count` entries left their WAL file; what is alive of them is in `segments`,
        and what is alive in `joined`, the last segments before."""
        if joined:
            self.segments = [segment for segment in self.segments if segment not in joined]
        del self.places[:count]
        del self.sizes[:count]
        self.base += count
        end = self.base
        self.segments += segments
        if segments and segments[-1].last >= end:
            # Truncated while they were copied.
            self._cut_segments(end)
        self.raise_first(keep)

    def truncated_meanwhile(self, index: int) -> None:
        """Segments that the worker made hold entries that were truncated while it did."""
        self._cut_segments(index)

    def raise_first(self, index: int) -> None:
        """Entries below `index` are no longer complete."""
        if index > self.first_index:
            term = self.term_at(index - 1)
            self.first_index = index
            at = max(bisect_right(self._run_starts, index - 1) - 1, 0)
            del self._run_starts[:at]
            del self._run_terms[:at]
            assert term == self.term_at(index - 1)
