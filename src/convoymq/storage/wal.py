# cython: annotation_typing=False
"""The write-ahead log: one per node, shared by all groups (format: docs/formats/storage.md).

Records queue up in an open *batch* during a round; `kick` hands everything queued to the flusher
when that is idle, otherwise it goes out when the running flush ends. A record's place is fixed when
it is queued, so a group's table of places never has to be corrected.

A file's life: prepared (by the worker) → current → full → emptied by WAL compaction → recycled.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from convoymq.kernels.entries import make_entry
from convoymq.kernels.wal_frame import wal_batch_frame
from convoymq.logformat.entry import (
    KIND_REMOVED,
    KIND_TABLE,
    KIND_TAIL_MARKER,
    KIND_VOID,
    NO_GROUP,
)
from convoymq.logformat.identity import ClusterIds
from convoymq.logformat.wal_file import (
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    FILE_HEADER,
    MAP_BYTES,
    PLACE_FILE_SHIFT,
    PLACE_OFFSET_MASK,
    directory_bytes,
    file_header,
    wal_name,
)
from convoymq.model.config import RaftConfig
from convoymq.model.rounds import pass_on, run_each
from convoymq.storage.manifest import Manifest
from convoymq.storage.types import Directory, File, Flusher, StorageFault, Told, WalClient, Worker

MAP_COVERS_BYTES = 64 << 10
"""A batch's map covers at least so much before it, or all of the file before it."""
TABLE_GAP_BYTES = 8 << 10
"""Lies between the two copies of the table: what destroys one spares the other."""
PREALLOCATE_CHUNK_BYTES = 256 << 10
"""Flushes wait for no more than this much of preallocation."""
_ZEROS = bytes(PREALLOCATE_CHUNK_BYTES)
"""Made once: the pages of fresh memory that is only read take no room, and need not be cleared."""
PREALLOCATE_GROWTH = 4
"""A file is prepared with so many times the size of the current one, until that is whole: what is
prepared before a fresh node's first file is full is little, and so is what it costs its flushes."""
PREALLOCATE_AHEAD = 6
"""For every byte that is logged so many are prepared at most: more than PREALLOCATE_GROWTH, so that
the file is ready in time, and no burst on the disk of who logs little."""
START_BYTES = 8 << 20
"""Preallocation starts when this part of a growing file, or half of one that does not grow, has
been filled: an idle node writes nothing."""
POOL_FILES_MAX = 1
"""Emptied files that are kept, beside the one that comes next."""


Note: TypeAlias = list[Any]
"""[log of a group, its last index, the term of that]."""


class WalFile:
    """A WAL file on disk and what lies in it."""

    __slots__ = (
        "file", "first_sequence", "generation", "groups", "name", "recovered", "size", "started",
        "tail",
    )  # fmt: skip

    def __init__(self, file: File, name: str, generation: int, size: int) -> None:
        self.file = file
        self.name = name
        self.generation = generation
        self.size = size
        """Bytes that were preallocated; 0 = it grows."""
        self.tail = FILE_HEADER.size
        self.first_sequence = 0
        self.recovered = False
        """Was found at start."""
        self.started = False
        """True when its first batch has been queued."""
        self.groups: dict[int, None] = {}
        """Groups with entries in this file."""


class Batch:
    """Records that will be written together: one header, one directory."""

    __slots__ = (
        "buffers", "directory", "dirty", "end", "file", "notes", "opening", "place", "sequence",
        "start", "votes",
    )  # fmt: skip

    def __init__(self, file: WalFile, sequence: int, opening: bytes) -> None:
        self.file = file
        self.sequence = sequence
        self.opening = opening
        """The file's header when this is the file's first batch."""
        self.start = file.tail
        self.end = file.tail + BATCH_HEADER_BYTES
        self.place = file.generation << PLACE_FILE_SHIFT
        self.buffers: list[bytes] = []
        self.directory: list[int] = []
        """Group and size in words of every record, in turn."""
        self.dirty: list[WalClient] = []
        self.votes: list[Told] = []
        """(log, term, voted for), or a callable: told when the batch is durable."""
        self.notes: list[Note] = []
        """Of each group, filled when the batch is sealed."""


class RecentGroups:
    """Groups of the last batches in a file, as every batch carries them."""

    __slots__ = ("began", "generation", "maps", "turned")

    def __init__(self) -> None:
        self.maps = bytearray(2 * MAP_BYTES)
        """The older map, and the one being filled."""
        self.generation = 0
        """Of the file."""
        self.began = 0
        self.turned = 0
        """Places in the file where the older map (`began`) and the newer one begin."""

    def reach(self, generation: int, place: int) -> None:
        """The next batch of a file is written at `place`. The maps then cover at least
        `MAP_COVERS_BYTES` before it, or all of the file that was written since the start."""
        if generation != self.generation:
            assert generation > self.generation, "batches go back to an older file"
            self.generation = generation
            self.began = self.turned = place
            self.maps[:] = bytes(2 * MAP_BYTES)
        assert place >= self.turned, "a batch lies before the one before it"
        if place - self.turned >= MAP_COVERS_BYTES:
            self.maps[:MAP_BYTES] = self.maps[MAP_BYTES:]
            self.maps[MAP_BYTES:] = bytes(MAP_BYTES)
            self.began = self.turned
            self.turned = place


class Wal:
    """Queue, flushes and files of the write-ahead log.

    Invariants: batches are written in order of their sequence; a file's batches are contiguous; at
    most one flush is in flight; nothing is reported written before its flush succeeded.
    """

    def __init__(
        self,
        directory: Directory,
        flusher: Flusher,
        worker: Worker,
        config: RaftConfig,
        table: Callable[[], tuple[int, int, bytes]],
        manifest: Manifest,
        clusters: ClusterIds,
    ) -> None:
        self._clusters = clusters
        self._turn = False
        """The next batch begins a new file."""
        self._directory = directory
        self._flusher = flusher
        self._worker = worker
        self._config = config
        self._size_max = config.wal_max_size_bytes
        self._preallocate = config.wal_preallocate
        self._table = table
        """Count of rows, last suspect, and body of the table of groups."""
        self._manifest = manifest
        self._leftovers: list[tuple[str, bool]] = []
        self._named = 0
        """Generation of the last file that the manifest was asked to name."""
        self._recent = RecentGroups()
        self.files: dict[int, WalFile] = {}
        """Generation -> file, in order: everything that holds records."""
        self.current: WalFile | None = None
        self.next_file: WalFile | None = None
        self._preparing = self._allocating = False
        self._pool: list[str] = []
        self._pool_counter = self._recycling = 0
        self._allocation_began = self._allocate_bytes = 0
        """`bytes_written` when the file under preparation was begun; how large it becomes."""
        self._piece: tuple[File, str, int] | None = None
        """The file under preparation and how far it is, while it waits for more to be logged."""
        self.generation = 0
        """Last generation given out."""
        self.sequence = 0
        """Last sequence given out."""
        self.written_sequence = 0
        self.barrier = 0
        """No file may go before the batch of this sequence is durable: it replaces or voids
        entries that the logs in memory have forgotten already."""
        self._previous = (0, 0, 0)
        self._open: Batch | None = None
        self._sealed: deque[Batch] = deque()
        self._flight: list[Batch] | None = None
        self._completing: list[Batch] = []
        """Written, but not all reported yet: a report may have its log truncated or wiped."""
        self._flight_buffers: list[bytes] = []
        self._failed = False
        """The flush in flight came back with an error and waits to be repeated."""
        self.backlog_bytes = 0
        """Queued and in flight."""
        self.blocked: StorageFault | None = None
        self.closing = False
        self._idle: list[Callable[[], None]] = []
        self._marked_sequence = self._seen_sequence = 0
        self.on_blocked: Callable[[StorageFault | None], None] = lambda fault: None
        self.on_written: Callable[[], None] = lambda: None
        self.on_queued: Callable[[], None] = lambda: None
        """Something waits for a `kick` that did not before."""
        self.on_full: Callable[[], None] = lambda: None
        """A file became full: WAL compaction may empty it once its last flush ended."""
        self.on_client_failed: Callable[[int, Exception], None] = pass_on
        """(group, error): a client failed when it was told that something is durable."""
        self.flush_count = self.bytes_written = 0
        flusher.on_completed = self._completed

    # Queueing.

    def add(self, data: bytes, group: int) -> int:
        """Queues a record (a whole number of 8 bytes) and returns its place."""
        batch = self._open
        size = len(data)
        if batch is None or (
            batch.end + size + directory_bytes(len(batch.buffers) + 1) > self._size_max
            and batch.buffers
        ):
            batch = self._open_batch(size)
        end = batch.end
        batch.buffers.append(data)
        directory = batch.directory
        directory.append(group)
        directory.append(size >> 3)
        batch.end = end + size
        self.backlog_bytes += size
        return batch.place | (end >> 3)

    def add_entry(self, log: WalClient, data: bytes) -> int:
        """As `add`, for an entry of a group that wants to hear when it is written."""
        place = self.add(data, log.group)
        if not log.dirty:
            log.dirty = True
            batch = self._open
            assert batch is not None
            batch.dirty.append(log)
        return place

    def add_control(
        self, kind: int, group: int, index: int, term: int, body: bytes = b"", *, era: int = 0
    ) -> int:
        """Queues a record of storage's own. `era` takes the place of an entry's time."""
        place = self.add(make_entry(group, index, term, era, kind, body).data, group)
        if kind in (KIND_VOID, KIND_REMOVED):
            self.hold_files()
        return place

    def hold_files(self) -> None:
        """No file may go before what is queued now is durable."""
        self.barrier = self.sequence

    def tell(self, note: Told) -> None:
        """`note` (a vote, or a callable) is told when all queued so far is durable."""
        if self._open is None:
            self.add_control(KIND_TAIL_MARKER, NO_GROUP, 0, 0)
        batch = self._open
        assert batch is not None
        batch.votes.append(note)

    def _open_batch(self, size: int) -> Batch:
        self.seal()
        current = self.current
        need = BATCH_HEADER_BYTES + size + directory_bytes(1)
        opening = b""
        if (
            current is None
            or (current.started and current.tail + need > self._size_max)
            or (current.started and self._is_outgrown(current, need))
            or (current.started and self._turn)
        ):
            try:
                current = self._begin_next_file()
            except OSError:
                # No new file can be made: the full one has to go on. Flushes tell whether it can.
                if current is None:
                    raise
            else:
                self._turn = False
        if not current.started:
            opening = file_header(
                current.generation, self.sequence + 1, self._previous, self._clusters.current
            )
        self.sequence += 1
        batch = self._open = Batch(current, self.sequence, opening)
        self.on_queued()
        if not current.started:
            current.started = True
            current.first_sequence = self.sequence
            self._put_table(batch)
        return batch

    def _put_table(self, batch: Batch) -> None:
        """Puts the table of groups into a file's first batch, twice and apart: no damaged page
        must cost every group its vote."""
        count, suspects_end, rows = self._table()
        table = make_entry(NO_GROUP, count, suspects_end, 0, KIND_TABLE, rows).data
        gap = make_entry(NO_GROUP, 0, 0, 0, KIND_TAIL_MARKER, bytes(TABLE_GAP_BYTES)).data
        for data in (table, gap, table):
            batch.buffers.append(data)
            batch.directory += (NO_GROUP, len(data) >> 3)
            batch.end += len(data)
            self.backlog_bytes += len(data)

    def turn(self) -> None:
        """Ends the current file: what is queued from now on goes to another one."""
        self.seal()
        current = self.current
        self._turn = current is not None and current.started

    def seal(self) -> None:
        """Closes the open batch: what is queued next gets a sequence of its own."""
        batch = self._open
        if batch is None:
            return
        self._open = None
        file = batch.file
        for log in batch.dirty:
            log.dirty = False
            file.groups[log.group] = None
            batch.notes.append([log, log.last_index, log.last_term])
        file.tail = batch.end + directory_bytes(len(batch.buffers))
        self._sealed.append(batch)

    def notes_after(self, log: WalClient, index: int) -> None:
        """The log loses entries >= index: batches under way must not report them."""
        batches = [*self._sealed, *self._completing]
        if self._flight is not None:
            batches += self._flight
        for batch in batches:
            for note in batch.notes:
                if note[0] is log and note[1] >= index:
                    note[1] = index - 1

    # Flushing.

    def kick(self) -> None:
        """Sends what is queued, unless a flush is under way: then it follows that one."""
        if self._flight is None and self.blocked is None and (self._open or self._sealed):
            self._submit()

    def _submit(self) -> None:
        self.seal()
        sealed = self._sealed
        first = sealed.popleft()
        batches = [first]
        while sealed and sealed[0].file is first.file:
            batches.append(sealed.popleft())
        buffers: list[bytes] = []
        start = first.start
        recent = self._recent
        for batch in batches:
            recent.reach(batch.file.generation, batch.start)
            if batch.opening:
                buffers.append(batch.opening)
                start = 0
            head, directory = wal_batch_frame(
                BATCH_MAGIC,
                batch.file.generation,
                batch.sequence,
                batch.sequence - first.sequence,
                batch.end - batch.start - BATCH_HEADER_BYTES,
                batch.directory,
                batch.buffers,
                recent.maps,
                recent.began,
            )
            buffers.append(head)
            buffers += batch.buffers
            buffers.append(directory)
        self._flight = batches
        self._flight_buffers = buffers
        self._failed = False
        self._flusher.submit(first.file.file, start, buffers, first.sequence)

    def _not_told(self, note: Told | Note, error: Exception) -> None:
        if callable(note):
            raise error
        self.on_client_failed(note[0].group, error)

    def _completed(self, token: object, code: int) -> None:
        batches = self._flight
        assert batches is not None
        assert batches[0].sequence == token
        if code:
            self._failed = True
            self._block(code, batches[0])
            return
        generation = batches[0].file.generation
        if generation != self._named and not self._name_file(batches[0]):
            return
        if self.blocked is not None:
            self.blocked = None
            self.on_blocked(None)
        self._flight = None
        self._flight_buffers = []
        self.flush_count += 1
        last = batches[-1]
        self.written_sequence = last.sequence
        if self._open or self._sealed:
            self._submit()
        self._completing = batches
        for batch in batches:
            size = batch.end - batch.start - BATCH_HEADER_BYTES
            self.backlog_bytes -= size
            self.bytes_written += size
            run_each(batch.votes, _tell_vote, self._not_told)
            run_each(batch.notes, _tell_entries, self._not_told)
        self._completing = []
        self.on_written()
        if len(self.files) > 1:
            self.on_full()
        if last.file is self.current and self._preallocate:
            self._consider_allocating()
        if self._flight is None and (self._open or self._sealed):
            self._submit()
        if self._flight is None and self._idle:
            waiting, self._idle = self._idle, []
            for callback in waiting:
                callback()

    def _name_file(self, batch: Batch) -> bool:
        """Has the manifest name the file before anything in it counts as written; False when the
        disk refuses: then the flush is repeated."""
        manifest = self._manifest
        generation = batch.file.generation
        try:
            if manifest.held:
                manifest.begin(self.files)
                self._adopt_leftovers()
            else:
                manifest.add(generation)
        except OSError as error:
            self._failed = True
            self._block(error.errno or errno.EIO, batch)
            return False
        self._named = generation
        return True

    def _block(self, code: int, batch: Batch) -> None:
        text = f"the write-ahead log cannot be written: {os.strerror(code)}"
        fault = StorageFault(text, path=batch.file.name, offset=batch.start)
        first = self.blocked is None
        self.blocked = fault
        if first:
            self.on_blocked(fault)

    def retry(self) -> None:
        """Repeats the flush that failed, whole: after a failed sync nothing may be assumed."""
        if not self._failed or self._flight is None:
            return
        self._failed = False
        first = self._flight[0]
        start = 0 if first.opening else first.start
        self._flusher.submit(first.file.file, start, self._flight_buffers, first.sequence)

    def mark_tail(self) -> None:
        """Once after traffic has ceased, writes a tail marker: nothing before it is ever torn."""
        if self.written_sequence == self.sequence and self.sequence != self._marked_sequence:
            if self._seen_sequence == self.sequence:
                self.add_control(KIND_TAIL_MARKER, NO_GROUP, 0, 0)
                self._marked_sequence = self.sequence
                self.kick()
            self._seen_sequence = self.sequence

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back when all that is queued now is durable."""
        self.kick()
        if self._flight is None:
            callback()
        else:
            self._idle.append(callback)

    # Files.

    def start(
        self,
        generation: int,
        sequence: int,
        previous: tuple[int, int, int],
        leftovers: list[tuple[str, bool]],
        *,
        damaged: bool,
    ) -> None:
        """Begins a new file after recovery, after the given last generation and sequence.

        `leftovers`: files that hold nothing needed, and whether they are whole. `damaged`: what was
        found is only in memory; the manifest and the leftovers stay until it is in the new file.
        """
        self.generation = generation
        self.sequence = sequence
        self.written_sequence = self._marked_sequence = self._seen_sequence = sequence
        self._previous = previous
        self._directory.make("wal")
        self.current = self._create_fresh()
        if self._config.wal_preallocate:
            self._begin_ahead(self.current)
        self.files[self.current.generation] = self.current
        self._leftovers = leftovers
        for name, _ in leftovers:
            self._pool_counter = max(self._pool_counter, int(name[4:].split(".")[0], 16))
        if not damaged:
            # On a full disk the first flush sees to it.
            with contextlib.suppress(OSError):
                self._write_header(self.current)
                self._manifest.begin(self.files)
                self._adopt_leftovers()
        self._prepare_next()

    def _adopt_leftovers(self) -> None:
        """Files found at start that are whole and hold nothing needed are used again."""
        directory = self._directory
        leftovers, self._leftovers = self._leftovers, []
        for name, whole in leftovers:
            if not whole or not self._pool_has_room() or not self._preallocate:
                directory.remove(name)
                continue
            pooled = name
            if not name.endswith(".free"):
                self._pool_counter += 1
                pooled = f"wal/{self._pool_counter:016x}.free"
                directory.rename(name, pooled)
            self._pool.append(pooled)
        if leftovers:
            # Before they get their next names: no file must be found under two.
            directory.sync("wal")

    def _write_header(self, fresh: WalFile) -> None:
        """Marks a file as prepared: without a header it must have lost what was in it."""
        fresh.file.pwrite([file_header(fresh.generation, 0, (0, 0, 0), self._clusters.current)], 0)
        fresh.file.sync()

    def _create_fresh(self) -> WalFile:
        self.generation += 1
        name = wal_name(self.generation)
        file = self._directory.open(name, create=True)
        file.truncate(0)
        self._directory.sync("wal")
        return WalFile(file, name, self.generation, 0)

    def _begin_ahead(self, fresh: WalFile) -> None:
        """Gives the first file of a process a few written blocks, so that it need not grow (a
        growing file costs every flush a journal commit) until a whole one is prepared."""
        size = min(START_BYTES, self._config.wal_max_size_bytes)
        with contextlib.suppress(OSError):
            # One piece, written many times: the heap would keep the pages of a large one.
            piece = _ZEROS[:size]
            whole, rest = divmod(size, len(piece))
            fresh.file.pwrite([*[piece] * whole, piece[:rest]], 0)
            fresh.file.sync()
            fresh.size = size

    def _has_better_next(self) -> bool:
        current = self.current
        return (
            self.next_file is not None
            and current is not None
            and self.next_file.size > current.size
        )

    def _is_outgrown(self, current: WalFile, need: int) -> bool:
        """The file would have to grow although a longer one is prepared."""
        return current.tail + need > current.size and self._has_better_next()

    def _begin_next_file(self) -> WalFile:
        """Makes the prepared file the current one; creates one when none is prepared."""
        prepared = self.next_file
        if prepared is None:
            prepared = self._create_fresh()
        full = self.current
        if full is not None:
            self._previous = (full.generation, self.sequence, full.tail)
        self.next_file = None
        self.current = prepared
        self.files[prepared.generation] = prepared
        self._prepare_next()
        return prepared

    def _prepare_next(self) -> None:
        """Has the worker get the next file ready: a recycled one, or an empty one."""
        if self._preparing or self.closing:
            return
        if self.next_file is not None and (self.next_file.size or not self._pool):
            return
        replaced = self.next_file
        self.next_file = None
        self._preparing = True
        recycled = self._pool.pop(0) if self._pool else None
        self.generation += 1
        generation = self.generation
        name = wal_name(generation)
        directory = self._directory

        def work() -> WalFile:
            if recycled is not None:
                directory.rename(recycled, name)
            file = directory.open(name, create=True)
            made = WalFile(file, name, generation, file.size())
            self._write_header(made)
            directory.sync("wal")
            self._manifest.add(generation)
            if replaced is not None:
                self._manifest.drop(replaced.generation)
                directory.remove(replaced.name)
            return made

        def drop() -> None:
            self._manifest.drop(generation)
            directory.remove(name)

        def done(made: WalFile | None, error: BaseException | None) -> None:
            self._preparing = False
            if made is not None and error is None:
                if self.current is not None and self.current.generation > generation:
                    # The log went on with a younger file meanwhile; order forbids this one.
                    self._worker.submit(drop, lambda _, e: None)
                else:
                    self.next_file = made
                if self._pool or self.next_file is None:
                    self._prepare_next()

        self._worker.submit(work, done)

    def _consider_allocating(self) -> None:
        current = self.current
        piece = self._piece
        if piece is not None:
            if piece[2] <= PREALLOCATE_AHEAD * (self.bytes_written - self._allocation_began):
                self._piece = None
                self._allocate(*piece)
            return
        if current is None or self._allocating or self._preparing:
            return
        whole = current.size >= self._size_max
        if whole and current.tail * 2 < self._size_max:
            return
        if self._has_better_next() or self._pool or self.closing:
            return
        self._allocating = True
        self._allocation_began = self.bytes_written
        self._pool_counter += 1
        self._allocate_bytes = min(PREALLOCATE_GROWTH * current.size or START_BYTES, self._size_max)
        self._allocate(None, f"wal/{self._pool_counter:016x}.preparing", 0)

    def _allocate(self, file: File | None, name: str, at: int) -> None:
        directory = self._directory
        size = self._allocate_bytes

        def work() -> File:
            target = file
            if target is None:
                target = directory.open(name, create=True)
                target.truncate(0)
            target.pwrite([_ZEROS[: min(PREALLOCATE_CHUNK_BYTES, size - at)]], at)
            target.sync()
            return target

        def done(target: File | None, error: BaseException | None) -> None:
            if target is None or error is not None or self.closing:
                self._allocating = False
                self._worker.submit(lambda: directory.remove(name), lambda _, e: None)
                return
            if at + PREALLOCATE_CHUNK_BYTES < size:
                self._piece = (target, name, at + PREALLOCATE_CHUNK_BYTES)
                self._consider_allocating()
                return
            self._allocating = False
            target.close()
            if not self._pool_has_room():
                # Files were emptied meanwhile.
                self._worker.submit(lambda: directory.remove(name), lambda _, e: None)
                return
            self._pool.append(name)
            self._prepare_next()

        self._worker.submit(work, done)

    def oldest_full(self) -> WalFile | None:
        """Returns the oldest file, when it may be emptied: nothing is written to it any more, and a
        younger one has a durable table of what votes it holds."""
        oldest: WalFile | None = None
        for file in self.files.values():
            if oldest is None:
                oldest = file
            elif not file.recovered:
                safe = file.started and self.written_sequence >= file.first_sequence
                return oldest if safe else None
        return None

    @property
    def files_waiting(self) -> int:
        """Full files that are not emptied yet."""
        return max(0, len(self.files) - 1)

    def release(self, file: WalFile) -> None:
        """The file holds nothing that is needed any more: recycles or removes it."""
        assert next(iter(self.files.values())) is file, "files are released oldest first"
        assert file is not self.current
        del self.files[file.generation]
        manifest = self._manifest
        recycle = (
            self._config.wal_preallocate
            and file.file.size() >= self._config.wal_max_size_bytes
            and self._pool_has_room()
            and not self.closing
        )
        name = file.name
        directory = self._directory
        if not recycle:

            def remove() -> None:
                manifest.drop_through(file.generation)
                directory.remove(name)
                directory.sync("wal")

            self._worker.submit(remove, lambda _, e: None)
            return
        self._pool_counter += 1
        self._recycling += 1
        pooled = f"wal/{self._pool_counter:016x}.free"

        def rename() -> None:
            manifest.drop_through(file.generation)
            directory.rename(name, pooled)
            directory.sync("wal")

        def done(_: object, error: BaseException | None) -> None:
            self._recycling -= 1
            if error is None:
                self._pool.append(pooled)
                self._prepare_next()

        self._worker.submit(rename, done)

    def _pool_has_room(self) -> bool:
        """Counts what the worker is about to put there (`_recycling`) as well: it may be behind."""
        return len(self._pool) + self._recycling < POOL_FILES_MAX

    def read(self, place: int, length: int) -> bytes:
        """Reads `length` bytes at a place. Raises OSError, StorageFault when cut short."""
        file = self.files[place >> PLACE_FILE_SHIFT]
        offset = (place & PLACE_OFFSET_MASK) << 3
        data = file.file.pread(length, offset)
        if len(data) != length:
            raise StorageFault("the file ends early", path=file.name, offset=offset)
        return data


def _tell_vote(note: Told) -> None:
    if callable(note):
        note()
    else:
        note[0].vote_written(note[1], note[2])


def _tell_entries(note: Note) -> None:
    note[0].entries_written(note[1])
