# cython: annotation_typing=False
"""Index of a file of a queue's log: from it a queue is recovered without reading its messages.

The log keeps the index of the file that it writes, and stores it beside a file that is full
(`00000001.idx`). Recovery reads a file whose index is missing, damaged or not of its size.

Format: `CVCI` · u16 version 1 · u16 spare · u32 CRC32C of what follows · zlib of a msgpack map, see
docs/formats/classic-queue.md.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from crc32c import crc32c

from convoymq.queues.classic.runs import FLAG_EXPIRATION
from convoymq.queues.classic.times_to_live import TimesToLive

MAGIC = b"CVCI" + struct.pack("<H", 1) + bytes(2)
_CHECKSUM = struct.Struct("<I")


@dataclass(slots=True)
class LineIndex:
    """Messages of one priority in a file."""

    start: int
    """Offset of the first record."""
    end: int = 0
    """Offset behind the last one."""
    count: int = 0
    bytes: int = 0
    pairs: array[int] = field(default_factory=lambda: array("Q"))
    """Their positions (first, last, …), ascending."""


@dataclass(slots=True)
class Copy:
    """A block that compaction moved into a file."""

    position: int
    count: int
    offset: int
    length: int
    level: int


class FileIndex:
    """See the module text."""

    def __init__(self, number: int, since: int) -> None:
        """`since`: no message before this file has a position so high or higher."""
        self.number = number
        self.next_position = since
        """Messages of a lower position that come are copies."""
        self.size = 0
        self.lines: dict[int, LineIndex] = {}
        self.copies: list[Copy] = []
        self.settled: array[int] = array("Q")
        self.transient: array[int] = array("Q")
        self.handed_out: dict[int, int] = {}
        self.times = TimesToLive()
        self.notes: list[tuple[int, int, bytes]] = []
        """(first position, last, note), oldest first: a later one takes the place of others."""
        self.expires = False
        """Some message has a time limit of its own."""
        self.unreadable = 0
        """Messages whose header is damaged."""

    def add_messages(
        self,
        position: int,
        head: bytes | memoryview,
        offset: int,
        length: int,
        level: int,
        transient: Sequence[int],
    ) -> None:
        """Adds a record; `head` is the begin of its ENQUEUE command, `offset` and `length` are its
        place."""
        count = int.from_bytes(head[24:28], "little")
        if head[5] & FLAG_EXPIRATION:
            self.expires = True
        if not count:
            return
        _extend(self.transient, transient, position)
        if position < self.next_position:
            self.copies.append(Copy(position, count, offset, length, level))
            return
        self.next_position = position + count
        line = self.lines.get(level)
        if line is None:
            line = self.lines[level] = LineIndex(offset - 32)
        line.end = offset + length
        line.count += count
        line.bytes += int.from_bytes(head[32:40], "little")
        _append(line.pairs, position, position + count - 1)

    def add_settled(self, pairs: Sequence[int]) -> None:
        """Adds positions (first, last, …) that are gone."""
        _extend(self.settled, pairs, 0)

    def add_handed_out(self, level: int, position: int) -> None:
        """Adds that positions of a level below this were handed out."""
        self.handed_out[level] = max(self.handed_out.get(level, 0), position)

    def encode(self, size: int, path: str) -> bytes:
        """Returns the index of the file at a path, which has `size` bytes."""
        fields = {
            "size": size,
            "path": path,
            "next": self.next_position,
            "lines": [
                [level, line.start, line.end, line.count, line.bytes, line.pairs.tobytes()]
                for level, line in self.lines.items()
            ],
            "copies": [[c.position, c.count, c.offset, c.length, c.level] for c in self.copies],
            "settled": self.settled.tobytes(),
            "transient": self.transient.tobytes(),
            "handed_out": list(self.handed_out.items()),
            "times": self.times.entries,
            "notes": self.notes,
            "expires": self.expires,
            "unreadable": self.unreadable,
        }
        packed = zlib.compress(msgspec.msgpack.encode(fields), 1)
        return MAGIC + _CHECKSUM.pack(crc32c(packed)) + packed


def decode_index(number: int, data: bytes, path: str) -> FileIndex | None:
    """Returns the index of the file at a path; None: damaged, or of another file."""
    start = len(MAGIC) + _CHECKSUM.size
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        return None
    packed = memoryview(data)[start:]
    if crc32c(packed) != _CHECKSUM.unpack_from(data, len(MAGIC))[0]:
        return None
    fields = msgspec.msgpack.decode(zlib.decompress(packed))
    if fields.get("path", path) != path:
        return None
    index = FileIndex(number, fields["next"])
    index.size = fields["size"]
    for level, first, end, count, body_bytes, pairs in fields["lines"]:
        index.lines[level] = LineIndex(first, end, count, body_bytes, array("Q", pairs))
    index.copies = [Copy(*copy) for copy in fields["copies"]]
    index.settled = array("Q", fields["settled"])
    index.transient = array("Q", fields["transient"])
    index.handed_out = dict(fields["handed_out"])
    for position, ttl_ms in fields.get("times", ()):
        index.times.add(position, ttl_ms)
    index.notes = [(first, last, note) for first, last, note in fields.get("notes", ())]
    index.expires = fields["expires"]
    index.unreadable = fields["unreadable"]
    return index


def _append(pairs: array[int], first: int, last: int) -> None:
    if pairs and pairs[-1] + 1 == first:
        pairs[-1] = last
    else:
        pairs.append(first)
        pairs.append(last)


def _extend(pairs: array[int], more: Sequence[int], shift: int) -> None:
    for i in range(0, len(more), 2):
        _append(pairs, more[i] + shift, more[i + 1] + shift)
