# cython: annotation_typing=False
"""A mirror: the copy of a queue on another node than its master's.

| state   | meaning                                                               |
| WAITING | joined the ring; what is broadcast is not for this copy yet           |
| TAKING  | takes what is broadcast, from its CUT on                              |
| SYNCING | takes the records as well that the master had before, in their order  |
| ENDED   | void, or it has become the master                                     |

The copy is a log of its own, as that of a classic queue: from it a master is opened (`MasterQueue`)
as after a restart. Beside the log lies the file `member` with the number of the ring's member that
wrote it; a copy whose number the recorded view does not have is void.

A mirror is synchronised once it has stored as many messages as the master said at the same place in
the broadcasts: it never has one that its master lacks. What is settled and not here is ignored. Old
messages may come in between new ones, after the word which of them are settled. Each broadcast of
the master is answered when it is stored: the mirror's word for one holds for all before it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec
from crc32c import crc32c

from convoymq.kernels.classic_records import level_of
from convoymq.model.errors import PeerError
from convoymq.queues.classic.log import HANDED_OUT, MESSAGES, SETTLED, ClassicLog
from convoymq.queues.classic.log_writer import Done, LogWriter
from convoymq.queues.classic.new_file import NewFile
from convoymq.queues.classic.notes import NOTES_MAX
from convoymq.queues.classic.runs import Place
from convoymq.queues.mirrored.copy_index import CopyIndex, Kept
from convoymq.queues.mirrored.instructions import (
    Applied,
    Cut,
    Depth,
    HandedOut,
    Instruction,
    Messages,
    Noted,
    Serves,
    Settled,
    Stopping,
    SyncBegin,
    Synced,
    SyncEnd,
    TimeToLive,
    decode,
)
from convoymq.queues.mirrored.policy import CopyAge
from convoymq.storage.types import Directory

T = TypeVar("T")
SESSIONS_MAX = 65_536
"""Sessions of which a mirror knows how far they are; those that were silent longest go first."""
MEMBER_FILE = "member"
SEEN_FILE = "seen"


class State(Enum):
    """See the module text."""

    WAITING = 1
    TAKING = 2
    SYNCING = 3
    ENDED = 4


class MirrorCopy:
    """See the module text.

    Args:
        member: number of the ring's member that this copy is.
        level_max: highest priority that the queue tells from lower ones.
        new_log: returns an empty log in place of the copy's.
        on_stored: called with sender and number of a broadcast that is stored, as are all before.
        on_equal: called when the copy has stored all that the master has; may be called again.
        on_failed: called when the copy cannot be written, or cannot be that of the queue.
    """

    def __init__(
        self,
        member: int,
        level_max: int,
        new_log: Callable[[], ClassicLog],
        on_stored: Callable[[int, int], None],
        on_equal: Callable[[], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.member = member
        self._level_max = level_max
        self.state = State.WAITING
        self.is_synchronised = False
        """The view in force says so."""
        self.seen = 0
        """Version of the newest view that the files name."""
        self.sessions: dict[int, int] = {}
        """Session -> seq of its last command that the master has done."""
        self.begun: dict[int, int] = {}
        """Session -> seq of its first command since the CUT: this copy may lack earlier ones."""
        self.refused: dict[int, int] = {}
        """Session -> seq of its last command whose messages the master refused, if there is one."""
        self.served: tuple[int, int] | None = None
        """Session and number of the single active consumer, (0, 0): there is none; None: the queue
        never had a consumer."""
        self.stopping_master = 0
        """The master whose node is being stopped: it did not fail."""
        self._new_log = new_log
        self._on_stored = on_stored
        self._on_equal = on_equal
        self._on_failed = on_failed
        #: (sender, number, whether it is stored, whether the copy has all) of broadcasts, oldest
        #: first.
        self._unstored: deque[list[int]] = deque()
        self._is_equal = False
        """At some place in the broadcast that is taken the copy has all that the master has."""
        self._written = [False]
        """True once what was added since the last flush is written."""
        self.log = self._new_log()
        self.index = CopyIndex()
        self.notes: dict[int, bytes] = {}
        """Position -> what consumers have said of a message, as the log has it."""
        self._settled_early: Kept | None = None
        """Positions that are settled, while older messages may still come."""

    # --- broadcasts ----------------------------------------------------------------------

    def on_broadcast(self, sender: int, number: int, payload: bytes) -> None:
        """Takes a broadcast of the master. Raises PeerError when it is malformed."""
        self._is_equal = False
        for instruction in decode(payload):
            if self.state is State.ENDED:
                return
            self._take(sender, instruction)
        entry = [sender, number, 0, self._is_equal]
        self._unstored.append(entry)
        written, self._written = self._written, [False]

        def stored(error: Exception | None) -> None:
            if self.state is State.ENDED:
                return
            if error is not None:
                self._on_failed(error)
                return
            entry[2] = 1
            written[0] = True
            self._say_stored()
            self.log.collect()

        if not self.log.flush(stored):
            entry[2] = 1
            self._say_stored()

    def _say_stored(self) -> None:
        last, is_equal = None, False
        while self._unstored and self._unstored[0][2]:
            last = self._unstored.popleft()
            is_equal = is_equal or bool(last[3])
        if last is not None:
            self._on_stored(last[0], last[1])
        if is_equal and not self.is_synchronised:
            self._on_equal()

    def _take(self, sender: int, instruction: Instruction) -> None:
        match instruction:
            case Stopping():
                self.stopping_master = sender
            case Cut(member, depth):
                if member == self.member:
                    self._cut(depth)
            case _ if self.state is State.WAITING:
                pass
            case Messages(position, time_ms, command):
                self._add(MESSAGES, position, time_ms, command)
            case Settled(pairs):
                self._add(SETTLED, 0, 0, pairs)
            case HandedOut(position, level):
                self._add(HANDED_OUT, position, level, b"")
            case Applied(session, seq, refused):
                self._note_session(session, seq, refused)
            case Depth(depth):
                self._compare(depth)
            case Serves(session, number):
                self.served = session, number
            case Noted(first, last, note):
                self._note(first, last, note)
            case TimeToLive(position, ttl_ms):
                self.log.times.add(position, ttl_ms)
            case SyncBegin(members):
                if self.member in members:
                    self.state = State.SYNCING
                    self._settled_early = Kept(0, 1 << 62, Place(0, 0, 0), 0, [True])
            case Synced(kind, position, time_ms, body):
                if self.state is State.SYNCING:
                    self._add(kind, position, time_ms, body)
            case SyncEnd(depth):
                self.state = State.TAKING
                self._settled_early = None
                self._compare(depth)

    def _cut(self, depth: int) -> None:
        if not self.is_synchronised and len(self.index):
            # What this copy has of a former master may be more than the new one has.
            self.log.remove()
            self.log = self._new_log()
            self.index = CopyIndex()
            self.notes.clear()
        if not self.is_synchronised:
            self.sessions.clear()
            self.begun.clear()
            self.refused.clear()
            # It had all that a former master had.
            for entry in self._unstored:
                entry[3] = False
        self.state = State.TAKING
        self._compare(depth)

    def _add(self, kind: int, position: int, time_ms: int, body: bytes) -> None:
        """Adds a record to the copy's log."""
        if kind == MESSAGES:
            count = int.from_bytes(body[24:28], "little")
            self._note_session(*struct.unpack_from("<QQ", body, 8))
            if not self.index.has(position, count):
                level = level_of(body, 0, self._level_max)
                place = self.log.add_messages(position, body, time_ms, level=level)
                self.index.add(position, count, place, time_ms, self._written)
                if self._settled_early is not None:
                    early = self._settled_early.settled_within(position, position + count - 1)
                    self._settle([number for pair in early for number in pair])
        elif kind == SETTLED:
            self._settle(struct.unpack(f"<{len(body) // 8}Q", body))
        else:
            self.log.add_handed_out(position, min(time_ms, self._level_max))

    def _note(self, first: int, last: int, note: bytes) -> None:
        """Adds what consumers have said of messages that are here."""
        for low, high in self.index.living(first, last):
            if len(self.notes) + high - low < NOTES_MAX:
                self.log.add_noted(low, high, note)
                self.notes.update(dict.fromkeys(range(low, high + 1), note))

    def _settle(self, words: Sequence[int]) -> None:
        here: list[int] = []
        for i in range(0, len(words), 2):
            if self._settled_early is not None:
                self._settled_early.settle(words[i], words[i + 1])
            gone, free = self.index.settle(words[i], words[i + 1])
            if gone:
                here += words[i : i + 2]
            if self.notes:
                for position in self._noted(words[i], words[i + 1]):
                    del self.notes[position]
            for file, count in free:
                self.log.drop(file, count)
        if here:
            self.log.add_settled(here)
            self._compact()

    def _compact(self) -> None:
        """See `LocalQueue._compact`."""
        sparse = self.log.oldest_is_sparse()
        if sparse is None:
            return
        blocks = self.index.blocks_in(sparse)
        if not all(block.written[0] for block in blocks):
            return
        for block in blocks:
            old = block.place
            dead = [position for pair in block.dead for position in pair]
            body = self.log.read(old)
            block.place = self.log.move_messages(
                block.position, body, block.time_ms, dead, level=level_of(body, 0, self._level_max)
            )
            block.written = self._written
            for position in self._noted(block.position, block.position + block.count - 1):
                self.log.add_noted(position, position, self.notes[position])
            self.log.drop(old.file, block.live)

    def _noted(self, first: int, last: int) -> list[int]:
        """Returns the positions of a range with notes."""
        if last - first < len(self.notes):
            return [position for position in range(first, last + 1) if position in self.notes]
        return [position for position in self.notes if first <= position <= last]

    def _note_session(self, session: int, seq: int, refused: int = 0) -> None:
        self.sessions[session] = max(seq, self.sessions.pop(session, 0))
        self.begun[session] = min(seq, self.begun.get(session, seq))
        if refused:
            self.refused[session] = refused
        if len(self.sessions) > SESSIONS_MAX:
            oldest = next(iter(self.sessions))
            del self.sessions[oldest], self.begun[oldest]
            self.refused.pop(oldest, None)

    def _compare(self, depth: int) -> None:
        if self.index.messages > depth:
            self._on_failed(PeerError(f"{self.index.messages} messages, and {depth} at the master"))
        self._is_equal = self._is_equal or self.index.messages == depth

    # --- end -----------------------------------------------------------------------------

    def known(self) -> dict[int, tuple[int, int, int]]:
        """Returns session -> (first, last) seq of its commands whose messages this copy has, and
        seq of the last one that was refused."""
        begun = {} if self.is_synchronised else self.begun
        return {
            session: (begun.get(session, 0), last, self.refused.get(session, 0))
            for session, last in self.sessions.items()
        }

    def end(self, *, removes: bool) -> None:
        """The copy is void (`removes`), or goes on as the master's files."""
        self.state = State.ENDED
        if removes:
            self.log.remove()
        else:
            self.log.close()


def write_member(
    files: Directory,
    writer: LogWriter,
    group: int,
    number: int,
    version: int,
    done: Done,
) -> None:
    """Writes which member's copy the files of a queue are, durably; `done` comes after it."""
    file = NewFile(files, str(group), f"{group}/{MEMBER_FILE}", sync=True)
    content = msgspec.msgpack.encode([number, version])
    writer.write(file, 0, [_checksum(file.name, content), content], True, done)
    writer.retire(file)


def write_seen(files: Directory, writer: LogWriter, group: int, age: CopyAge) -> None:
    """Writes the newest view that a copy was part of. Not flushed: it is asked for only when
    several nodes are lost, and what is older then takes a copy for older than it is."""
    file = NewFile(files, str(group), f"{group}/{SEEN_FILE}", sync=False)
    content = msgspec.msgpack.encode(age)
    writer.write(file, 0, [_checksum(file.name, content), content], False, lambda _error: None)
    writer.retire(file)


def read_member(files: Directory, group: int) -> int | None:
    """Returns the number of the member that wrote the files of a queue; None: there is none, or
    the file is damaged."""
    found = _read(files, f"{group}/{MEMBER_FILE}", tuple[int, int])
    return found[0] if found is not None else None


def read_age(files: Directory, group: int) -> CopyAge:
    """Returns how new the files of a queue are."""
    number = read_member(files, group) or 0
    seen = _read(files, f"{group}/{SEEN_FILE}", CopyAge)
    return seen if seen is not None and seen.member == number else CopyAge(number)


def _checksum(path: str, content: bytes) -> bytes:
    """Returns what stands before the content of a file, which is that path's."""
    return struct.pack("<I", crc32c(content, crc32c(path.encode())))


def _read(files: Directory, path: str, kind: type[T]) -> T | None:
    try:
        file = files.open(path)
    except OSError:
        return None
    try:
        data = file.pread(file.size(), 0)
        if data[:4] != _checksum(path, data[4:]):
            return None
        return msgspec.msgpack.decode(data[4:], type=kind)
    except msgspec.DecodeError:
        return None
    finally:
        file.close()
