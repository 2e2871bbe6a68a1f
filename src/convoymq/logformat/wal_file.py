"""WAL files: headers, batches, directories, the table of groups (docs/formats/storage.md)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from convoymq.logformat.entry import ENTRY_HEADER, ENTRY_HEADER_SIZE, is_whole

FILE_MAGIC = b"CVYWALF\x03"
FILE_HEADER = struct.Struct("<8sQQQQQ16sII")
"""magic+version, generation, first sequence, previous generation, its last sequence, its tail,
cluster id, crc32c of the bytes before it, spare."""
FILE_HEADER_CHECKED = 64
"""Bytes of the header that its checksum covers."""

BATCH_MAGIC = b"CVYWALB\x03"
BATCH_HEADER = struct.Struct("<8sQQQQ64sIIII")
"""magic+version, generation, sequence, bytes of records, where what the map covers begins, map of
the groups with records in the batches from there on, count of records, position in its flush,
crc32c of the directory, crc32c of the header bytes before it."""
BATCH_HEADER_BYTES = BATCH_HEADER.size
DIRECTORY_ROW = struct.Struct("<III")
"""A record's group, its size in words, and its checksum: bytes of a recycled file's former use
that a torn write left in the record's place are whole as well, but not these."""
MAP_BYTES = 64
MAP_BITS = 8 * MAP_BYTES
"""Bit `group % MAP_BITS` stands for a group."""

TABLE_ROW = struct.Struct("<IIQIIQQ")
"""A row of the table: group, voted for, term, era, flags; last index and its term as the files
before have them."""
ROW_DAMAGED = 1
ROW_VOTE_LOST = 2
ROW_IN_FILES = 4
"""The files before have entries of the group, which are not in segments yet."""

PLACE_FILE_SHIFT = 40
"""A place is a generation, and an offset in words in the bits below."""
PLACE_OFFSET_MASK = (1 << PLACE_FILE_SHIFT) - 1


def wal_name(generation: int) -> str:
    """Path of the WAL file of a generation."""
    return f"wal/{generation:016x}.wal"


def file_header(
    generation: int, first_sequence: int, previous: tuple[int, int, int], cluster: bytes
) -> bytes:
    """Returns the first bytes of a WAL file. `previous` = (generation, last sequence, tail) or
    zeros."""
    head = FILE_HEADER.pack(FILE_MAGIC, generation, first_sequence, *previous, cluster, 0, 0)
    head = head[:FILE_HEADER_CHECKED]
    return head + struct.pack("<II", crc32c(head), 0)


def batch_prefix(generation: int) -> bytes:
    """Returns the bytes with which every batch of a generation begins."""
    return BATCH_MAGIC + struct.pack("<Q", generation)


class BatchHeader(NamedTuple):
    """A valid batch header."""

    sequence: int
    length: int
    """Bytes of its records."""
    records: int
    checksum: int
    """Of the directory."""
    flush: int
    """First sequence of its flush."""
    covered_from: int
    """Position from which `map` covers the file."""
    map: int


def read_batch_header(head: bytes, generation: int) -> BatchHeader | None:
    """Returns the header, when the bytes are a valid one of that generation."""
    if len(head) < BATCH_HEADER_BYTES or head[:8] != BATCH_MAGIC:
        return None
    _, found, sequence, length, covered, groups, count, position, directory, checksum = (
        BATCH_HEADER.unpack(head)
    )
    if found != generation or crc32c(head[:-4]) != checksum:
        return None
    touched = int.from_bytes(groups, "little")
    return BatchHeader(sequence, length, count, directory, sequence - position, covered, touched)


DirectoryRow = tuple[int, int, int]
"""Group, size in words and checksum of a record."""


def directory_bytes(count: int) -> int:
    """Returns the length of the directory of so many records."""
    return (DIRECTORY_ROW.size * count + 7) & ~7


def directory_rows(directory: memoryview, count: int) -> list[DirectoryRow]:
    """Returns the rows of a directory."""
    return list(DIRECTORY_ROW.iter_unpack(directory[: DIRECTORY_ROW.size * count]))


def directory_before(data: memoryview) -> list[DirectoryRow] | None:
    """Returns the directory at the end of a whole batch's records and directory; None when there is
    none that fits."""
    for padding in (0, 4):
        at = left = len(data) - padding
        count = 0
        while at >= DIRECTORY_ROW.size:
            at -= DIRECTORY_ROW.size
            count += 1
            size = DIRECTORY_ROW.unpack_from(data, at)[1] << 3
            left -= size + DIRECTORY_ROW.size
            if size < ENTRY_HEADER_SIZE or left < 0:
                break
            if not left and directory_bytes(count) == len(data) - at:
                return directory_rows(data[at:], count)
    return None


def split_records(
    data: memoryview, rows: list[DirectoryRow]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (offset, size) of the records that are whole, (offset, group) of the others."""
    records = []
    bad = []
    offset = 0
    for group, words, checksum in rows:
        size = words << 3
        view = data[offset : min(offset + size, len(data))]
        if _is_record(view, size, group, checksum):
            records.append((offset, size))
        else:
            bad.append((offset, group))
        offset += size
    return records, bad


def _is_record(view: memoryview, size: int, group: int, listed: int) -> bool:
    if len(view) != size or size < ENTRY_HEADER_SIZE:
        return False
    length, checksum, _, _, _, owner, _, _ = ENTRY_HEADER.unpack_from(view)
    return owner == group and checksum == listed and is_whole(view, length, checksum)


def walk_records(data: memoryview) -> tuple[list[tuple[int, int]], int]:
    """Returns (offset, size) of the whole records from the start on, and where they end."""
    records = []
    at = 0
    while at + ENTRY_HEADER_SIZE <= len(data):
        length, checksum, *_ = ENTRY_HEADER.unpack_from(data, at)
        if length < ENTRY_HEADER_SIZE or length % 8 or at + length > len(data):
            break
        if not is_whole(data[at : at + length], length, checksum):
            break
        records.append((at, length))
        at += length
    return records, at


assert FILE_HEADER.size == 72
assert BATCH_HEADER_BYTES == 120
