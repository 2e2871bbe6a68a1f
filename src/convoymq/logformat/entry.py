"""The header of an entry, and of a WAL record of storage's own, which has the same layout.

Layout: docs/formats/entries-and-frames.md. `kernels/layout.pxd` has the same offsets for the
kernels, which write entries; a test compares the two.
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from convoymq.kernels.entries import Entry
from convoymq.model.errors import StorageFault

ENTRY_HEADER = struct.Struct("<IIQQQIBB10x")
"""length, crc32c of the bytes behind it, index, term, time, group, kind, version, spare."""
ENTRY_HEADER_SIZE = ENTRY_HEADER.size
CHECKED_FROM = 8
"""The checksum covers the bytes from here on."""
NO_GROUP = 0xFFFFFFFF
"""The group of a record that belongs to none."""

KIND_CONTROL = 128
"""Kinds from here on are storage's own. Their fields differ; docs/formats/storage.md says how."""
KIND_VOTE = 128
KIND_TABLE = 129
KIND_REMOVED = 130
KIND_VOID = 131
KIND_TAIL_MARKER = 132


def is_whole(view: memoryview, length: int, checksum: int) -> bool:
    """Returns whether the bytes are one whole record: its header says `length` and `checksum`."""
    return length == len(view) and crc32c(view[CHECKED_FROM:]) == checksum


def check_entry(data: bytes, group: int, index: int, name: str, offset: int) -> Entry:
    """Returns the entry of a group and index that was read from `offset` of a file.

    Raises:
        StorageFault: the bytes are damaged, or are another entry.
    """
    try:
        entry = Entry(data)
    except ValueError as error:
        raise StorageFault(
            f"entry {index} of group {group} is damaged: {error}", path=name, offset=offset
        ) from None
    _check_place(entry.group, entry.index, group, index, name, offset)
    return entry


def check_term(view: memoryview, group: int, index: int, name: str, offset: int) -> int:
    """Returns the term of an entry that is copied as it is. Raises StorageFault, as `check_entry`
    does."""
    length, checksum, found, term, _, owner, _, _ = ENTRY_HEADER.unpack_from(view)
    if not is_whole(view, length, checksum):
        raise StorageFault(f"entry {index} of group {group} is damaged", path=name, offset=offset)
    _check_place(owner, found, group, index, name, offset)
    return int(term)


def _check_place(owner: int, found: int, group: int, index: int, name: str, offset: int) -> None:
    if found != index or owner != group:
        raise StorageFault(
            f"entry {found} of group {owner} lies where {index} of {group} should",
            path=name,
            offset=offset,
        )
