"""Segment read descriptors: where a process of the node's machine finds a piece of a stream.

A segment file never changes under its name's inode: it is written whole, and replaced or removed
whole. So a client on the same machine that may open it can take a stream's messages from it as the
node itself would, while the node does nothing (ADR 0014). A descriptor says which file that is,
where in it the entries lie, and which of their messages are the stream's: whole index ranges
(`chunks`), all of them applied here.

Packed it is a map in MessagePack; the table is in docs/formats/columnar-protocol.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Annotated

import msgspec

from convoymq.kernels.entries import Entry
from convoymq.logformat.segment import FilePlace, Readable, Segment, read_entries
from convoymq.model.errors import StorageFault
from convoymq.model.words import words_from_bytes, words_to_bytes
from convoymq.streamlog.chunks import ChunkIndex

BYTES_MAX = 64 << 20
"""Bodies of one descriptor, about. More would let clients read on for long what retention drops."""
ENTRIES_MAX = 16_384
"""Entries of one descriptor, about: the answer stays small."""
BYTES_MIN = 1 << 20
"""A shorter piece is not worth the way to its file."""

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    device: _Natural
    inode: _Natural
    group: _Natural
    offset: _Natural
    next: _Natural
    chunks: list[bytes]
    indexes: bytes
    places: bytes
    sizes: bytes


@dataclass(frozen=True, slots=True)
class ReadDescriptor:
    """Index ranges of one segment. Stands in for the machine where a `ChunkReader` reads them."""

    place: FilePlace
    group: int
    segment: Segment
    chunks: ChunkIndex
    first: int
    """The offset of the first message."""
    next: int
    """The offset behind the last one."""

    @property
    def index(self) -> int:
        """Returns the last entry."""
        return self.segment.last

    def read(self, file: Readable, index: int, max_bytes: int) -> list[Entry]:
        """Returns an entry and some that follow it. Raises StorageFault: they are not what they
        were when the descriptor was made. OSError."""
        position = self.segment.position(index)
        if position < 0:
            raise StorageFault(f"entry {index} is not in the descriptor", path=file.name)
        return read_entries(file, self.segment, self.group, position, max_bytes)

    def pack(self) -> bytes:
        """For a client."""
        segment = self.segment
        indexes = segment.indexes
        return msgspec.msgpack.encode(
            _Packed(
                path=self.place.path,
                device=self.place.device,
                inode=self.place.inode,
                group=self.group,
                offset=self.first,
                next=self.next,
                chunks=self.chunks.pack(),
                indexes=words_to_bytes(
                    array("Q", range(segment.first, segment.last + 1))
                    if indexes is None
                    else indexes
                ),
                places=words_to_bytes(segment.offsets),
                sizes=words_to_bytes(segment.sizes),
            )
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> ReadDescriptor:
        """Decodes what `pack` made. Raises ValueError for anything else."""
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
        except msgspec.DecodeError as error:
            raise ValueError(f"descriptor: {error}") from None
        chunks = ChunkIndex()
        chunks.unpack(packed.chunks)
        indexes = words_from_bytes(packed.indexes)
        places = words_from_bytes(packed.places, typecode="I")
        sizes = words_from_bytes(packed.sizes, typecode="I")
        if not len(chunks) or not 0 < len(indexes) == len(places) == len(sizes):
            raise ValueError("descriptor: columns of different lengths, or without rows")
        ends = [place + size for place, size in zip(places, sizes, strict=True)]
        ascends = all(map(int.__le__, ends, places[1:])) and min(sizes) > 0
        if not ascends or not all(map(int.__lt__, indexes, indexes[1:])):
            raise ValueError("descriptor: entries that do not ascend")
        if not chunks.offsets[0] <= packed.offset < packed.next:
            raise ValueError("descriptor: messages that are not in it")
        place = FilePlace(packed.path, packed.device, packed.inode)
        segment = Segment(packed.path, 0, indexes, places, sizes)
        return cls(place, packed.group, segment, chunks, packed.offset, packed.next)


def describe_read(
    segment: Segment, place: FilePlace, group: int, chunks: ChunkIndex, offset: int, end: int | None
) -> ReadDescriptor | None:
    """Returns the index ranges from that of `offset` on which lie in a segment, up to the one of
    `end`; None when they are too few to be worth it.

    Args:
        chunks: the stream's index; it holds `offset`.
    """
    first = chunks.find(offset)
    index = chunks.indexes[first]
    # An index range is over where the next one begins; whether the last one is, nobody knows.
    last = bisect_right(chunks.indexes, min(segment.last, index + ENTRIES_MAX)) - 1
    if end is not None:
        last = min(last, bisect_left(chunks.offsets, end))
    size = 0
    upto = first
    while upto < last and size < BYTES_MAX:
        size += chunks.sizes[upto]
        upto += 1
    if size < BYTES_MIN:
        return None
    low, high = segment.position(index), segment.lower(chunks.indexes[upto] + 1)
    part = Segment(
        segment.name,
        segment.order,
        array("Q", [segment.index_at(at) for at in range(low, high)]),
        segment.offsets[low:high],
        segment.sizes[low:high],
    )
    return ReadDescriptor(
        place, group, part, chunks.part(first, upto), offset, chunks.offsets[upto]
    )
