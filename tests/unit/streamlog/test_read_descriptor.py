"""Segment read descriptors: whole index ranges of one segment, and nothing misleading."""

from __future__ import annotations

import contextlib
import random
from array import array

import msgspec
import pytest

from convoymq.kernels.entries import make_entry
from convoymq.logformat.segment import FilePlace, Segment
from convoymq.model.errors import StorageFault
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.segments import SegmentWriter
from convoymq.streamlog import read_descriptor as module
from convoymq.streamlog.chunks import ChunkIndex
from convoymq.streamlog.read_descriptor import ReadDescriptor, describe_read

GROUP = 7
PLACE = FilePlace("/somewhere/0001.seg", 3, 4)
SIZE = 40 << 10


def segment_of(first: int, last: int) -> Segment:
    count = last - first + 1
    places = array("I", range(4, 4 + 5 * count, 5))
    return Segment("1.seg", 1, array("Q", range(first, last + 1)), places, array("I", [5] * count))


def index_of(index_ranges: int, first_index: int, each: int) -> ChunkIndex:
    """Index ranges of 100 messages; one begins every `each` entries, in the middle of one."""
    chunks = ChunkIndex()
    for n in range(index_ranges):
        chunks.begin(first_index + n * each, 64, n % 3, 100 * n, SIZE, 1000 + n)
    return chunks


def test_only_index_ranges_that_end_in_the_segment_are_in_it() -> None:
    chunks = index_of(200, 10, 3)
    found = describe_read(segment_of(1, 400), PLACE, GROUP, chunks, 150, None)
    assert found is not None
    # The index range at entry 10 + 3·130 = 400 begins in it and may end elsewhere.
    assert (found.first, found.next) == (150, 100 * 130)
    assert found.chunks.offsets[0] == 100
    assert len(found.chunks) == 129
    assert (found.segment.first, found.segment.last) == (13, 400)
    assert found.index == 400


@pytest.mark.parametrize("end", [5_000, 5_001, 5_099, 5_100])
def test_what_lies_behind_the_end_is_left_out(end: int) -> None:
    found = describe_read(segment_of(1, 4000), PLACE, GROUP, index_of(200, 10, 3), 0, end)
    assert found is not None
    assert end <= found.next <= end + 100


def test_a_short_piece_is_none() -> None:
    chunks = index_of(200, 10, 3)
    assert describe_read(segment_of(1, 10 + 3 * 20), PLACE, GROUP, chunks, 0, None) is None
    assert describe_read(segment_of(1, 4000), PLACE, GROUP, chunks, 100 * 190, None) is None
    assert describe_read(segment_of(1, 4000), PLACE, GROUP, chunks, 0, 2_000) is None
    # The last index range of all may still grow.
    assert describe_read(segment_of(1, 4000), PLACE, GROUP, index_of(1, 10, 3), 0, None) is None


def test_it_is_bounded_in_bytes_and_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = index_of(200, 10, 3)
    monkeypatch.setattr(module, "BYTES_MAX", 50 * SIZE)
    found = describe_read(segment_of(1, 4000), PLACE, GROUP, chunks, 0, None)
    assert found is not None
    assert found.next == 5_000
    monkeypatch.setattr(module, "ENTRIES_MAX", 90)
    found = describe_read(segment_of(1, 4000), PLACE, GROUP, chunks, 0, None)
    assert found is not None
    assert (found.next, len(found.segment)) == (3_000, 91)


def test_packing_loses_nothing() -> None:
    for indexes in (None, array("Q", [10, 11, 12, 500, 501])):
        segment = segment_of(1, 400)
        if indexes is not None:
            segment = Segment("1.seg", 1, indexes, segment.offsets[:5], segment.sizes[:5])
        made = ReadDescriptor(PLACE, GROUP, segment, index_of(20, 10, 3), 50, 1_900)
        read = ReadDescriptor.unpack(made.pack())
        assert (read.place, read.group, read.first, read.next) == (PLACE, GROUP, 50, 1_900)
        assert read.chunks.pack() == made.chunks.pack()
        assert [read.segment.index_at(n) for n in range(len(segment))] == [
            segment.index_at(n) for n in range(len(segment))
        ]
        assert (read.segment.offsets, read.segment.sizes) == (segment.offsets, segment.sizes)


def test_malformed_ones_are_refused() -> None:
    good = ReadDescriptor(PLACE, GROUP, segment_of(1, 30), index_of(9, 1, 3), 50, 700).pack()
    fields = msgspec.msgpack.decode(good)
    words = array("Q", [5, 4]).tobytes()
    for name, value in (
        ("path", 5),
        ("device", -1),
        ("inode", 1 << 63),
        ("offset", 700),
        ("offset", -1),
        ("chunks", []),
        ("chunks", [b""] * 5),
        ("chunks", [b"1234567"] * 5),
        ("indexes", b""),
        ("indexes", fields["indexes"][:-8]),
        ("indexes", words * 15),
        ("places", fields["places"][:-1]),
        ("places", fields["places"][::-1]),
        ("sizes", bytes(len(fields["sizes"]))),
        ("sizes", b"\xff" * len(fields["sizes"])),
    ):
        with pytest.raises(ValueError, match=r"."):
            ReadDescriptor.unpack(msgspec.msgpack.encode({**fields, name: value}))
    for name in fields:
        with pytest.raises(ValueError, match=r"."):
            ReadDescriptor.unpack(
                msgspec.msgpack.encode({k: v for k, v in fields.items() if k != name})
            )
    generator = random.Random(1)
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        with contextlib.suppress(ValueError):
            ReadDescriptor.unpack(bytes(data[: generator.choice((len(data), len(data) // 2))]))


def test_entries_are_checked_one_by_one() -> None:
    directory = MemoryDirectory()
    writer = SegmentWriter(directory, GROUP, 1, 100, 1 << 20)
    entries = [make_entry(GROUP, index, 1, 5, 1, b"body-%03d" % index) for index in range(1, 21)]
    for entry in entries:
        writer.add(entry.index, entry.term, entry.data)
    (segment,) = writer.finish(1)
    file = directory.open(segment.name)
    made = ReadDescriptor(PLACE, GROUP, segment, index_of(9, 1, 3), 50, 700)
    assert [entry.data for entry in made.read(file, 3, 1 << 20)] == [e.data for e in entries[2:]]
    assert [entry.index for entry in made.read(file, 3, 1)] == [3]
    with pytest.raises(StorageFault, match="not in the descriptor"):
        made.read(file, 21, 1)
    with pytest.raises(StorageFault, match="lies where"):
        ReadDescriptor(PLACE, GROUP + 1, segment, made.chunks, 50, 700).read(file, 3, 1)
    moved = Segment("1.seg", 1, array("Q", range(2, 22)), segment.offsets, segment.sizes)
    with pytest.raises(StorageFault, match="lies where"):
        ReadDescriptor(PLACE, GROUP, moved, made.chunks, 50, 700).read(file, 3, 1)
    file.pwrite([b"\x00"], (segment.offsets[4] << 3) + 50)
    with pytest.raises(StorageFault, match="damaged"):
        made.read(file, 3, 1 << 20)
    file.truncate(100)
    with pytest.raises(StorageFault, match="ends early"):
        made.read(file, 9, 1 << 20)
