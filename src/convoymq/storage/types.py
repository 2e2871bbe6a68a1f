"""Types of storage: configuration, the protocols it stands on, snapshots, reports.

Nothing in `storage` waits: writes of entries go through a `Flusher`, everything else that may take
long goes through a `Worker`; both answer by callback on the caller's thread. The production node
hands in threads, the simulator hands in simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from convoymq.logformat.segment import FilePlace
from convoymq.model.errors import EntryGone, StorageFault

__all__ = [
    "Damage",
    "Directory",
    "Done",
    "EntryGone",
    "File",
    "FilePlace",
    "Flusher",
    "GroupPlan",
    "Job",
    "RecoveryReport",
    "Snapshot",
    "StorageFault",
    "Told",
    "WalClient",
    "Worker",
]


Done = Callable[[BaseException | None], None]
"""Told None when something is durable, the error when it failed."""

T = TypeVar("T")

Job: TypeAlias = tuple[Callable[[], object], Callable[[Any, BaseException | None], None]]
"""Work of a `Worker`, and who is told what it returned: the two agree, whatever it is."""


class File(Protocol):
    """An open file. Every method may raise OSError."""

    name: str

    def size(self) -> int:
        """Returns the length in bytes."""

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def pwrite(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Writes all buffers back to back; not durable before `sync`."""

    def truncate(self, length: int) -> None:
        """Cuts or extends (with zeros) to the length."""

    def sync(self) -> None:
        """Makes the content written so far, and the length, durable."""

    def close(self) -> None:
        """Closes; may be called twice."""

    def place(self) -> FilePlace | None:
        """Returns how another process of this machine finds it; None = not at all."""


class Directory(Protocol):
    """A directory tree: names are relative paths with `/`."""

    def list(self, path: str = "") -> list[str]:
        """Sorted names of the files and directories in `path`; empty when it does not exist."""

    def exists(self, path: str) -> bool:
        """Returns True for files and directories."""

    def make(self, path: str) -> None:
        """Creates a directory (and those above it) when it does not exist; durable on return."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Opens for reading and writing. Raises FileNotFoundError unless `create`."""

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all in it. Nothing happens when it is gone."""

    def rename(self, old: str, new: str) -> None:
        """Atomically gives a file another name, replacing what had it."""

    def sync(self, path: str = "") -> None:
        """Makes creations, removals and renames in the directory durable."""

    def sync_all(self) -> None:
        """Makes all that can be read durable, whichever process wrote it. Raises OSError."""


class Flusher(Protocol):
    """Writes the WAL: one submission in flight, made durable, answered on the caller's thread."""

    on_completed: Callable[[object, int], None] | None
    """Called with (token, errno), errno 0 = all bytes are durable; else nothing may be assumed."""

    def submit(self, file: File, offset: int, buffers: Sequence[bytes], token: object) -> None:
        """Starts writing `buffers` back to back at `offset`. Not allowed while one is in flight."""


class Worker(Protocol):
    """Runs slow file work in order, one at a time."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Runs `work()` elsewhere, then `done(result, error)` on the caller's thread."""

    def close(self) -> None:
        """Finishes what was submitted. The last answers may never arrive."""


class Pace(Protocol):
    """Keeps bulk copies from crowding the log's flushes out of the disk. Asked by the worker."""

    def is_urgent(self) -> bool:
        """Returns whether to copy as fast as the disk takes it."""

    def rest(self, count: int) -> None:
        """Waits as long as suits `count` bytes that were just made durable."""


class NoPace:
    """For disks that nobody shares: simulated ones, and those of tools."""

    def is_urgent(self) -> bool:
        """Always."""
        return True

    def rest(self, count: int) -> None:
        """Never."""


class WalClient(Protocol):
    """A group's log as the WAL knows it: who hears when its entries and votes are durable."""

    group: int
    last_index: int
    last_term: int
    dirty: bool
    """Has entries in the open batch."""

    def entries_written(self, index: int) -> None:
        """The entries up to `index` are durable."""

    def vote_written(self, term: int, voted_for: int) -> None:
        """The vote is durable."""


Told: TypeAlias = tuple[WalClient, int, int] | Callable[[], object]
"""Receiver of the news that something is durable: a vote (log, term, voted for), or a callable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A machine's state after `index`, without message bodies."""

    index: int
    term: int
    membership: bytes
    state: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Plan of the replica for its group when a WAL file is to be emptied."""

    live_ranges: Sequence[tuple[int, int]]
    """Ascending, disjoint, inclusive index ranges whose bodies are needed; all <= applied."""
    applied: int
    """Last applied index: entries above it are always kept."""
    keep_from: int
    """Entries from here on are kept although dead (slow but connected followers need them)."""
    take_snapshot: Callable[[], Snapshot] | None
    """Makes a snapshot at `applied` now; called at most once, at once. None: not possible now."""


class LogOwner(Protocol):
    """Owner of the logs of a node: what its storage asks and tells about them."""

    def plan(self, group: int) -> GroupPlan | None:
        """Returns what may be dropped of a group when a WAL file is to be emptied; None: nothing
        may."""

    def needed_from(self, group: int) -> int:
        """Returns the first entry whose body should stay in memory: those below it are not expected
        to be read again, and are read from disk if they are."""

    def on_queued(self) -> None:
        """Something waits for a `kick` that did not before."""

    def on_damaged(self, damage: Damage) -> None:
        """A read found damage; that log serves nothing any more."""

    def on_log_failed(self, group: int, error: Exception) -> None:
        """The listener for durable entries and votes of a group has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged place found by recovery or by a read."""

    file: str
    offset: int
    group: int | None
    """None: it cannot be told whose data it was; every group with data in that file is damaged."""
    reason: str
    vote_lost: bool = False
    """The group's vote may have been lost too: it must not vote before it has caught up."""


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """Report of a recovery. Damaged groups have `log.damaged` set and serve no entries."""

    groups: int = 0
    entries: int = 0
    wal_files: int = 0
    segments: int = 0
    damages: list[Damage] = field(default_factory=list)
    fresh: bool = False
    """True if there was nothing at all: the node has no past in this directory."""
    torn_tail: tuple[str, int] | None = None
    """(file, offset) where the last WAL file was cut: writes that were never confirmed."""
    notes: list[str] = field(default_factory=list)
    """Damage that cost nothing, because a second copy was whole."""
    stale: list[str] = field(default_factory=list)
    """Remains of removed groups and half-written files that were deleted."""
