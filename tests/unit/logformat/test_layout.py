"""One layout for kernels and readers: they agree on the offset of every field."""

from __future__ import annotations

import struct

from convoymq.kernels.entries import ENTRY_COMMANDS, HEADER_SIZE, make_entry
from convoymq.kernels.wal_frame import wal_batch_frame
from convoymq.logformat.entry import ENTRY_HEADER, ENTRY_HEADER_SIZE
from convoymq.logformat.wal_file import BATCH_HEADER, BATCH_MAGIC, read_batch_header


def test_an_entry_of_the_kernel_has_the_header_that_readers_know() -> None:
    data = make_entry(7, 8, 9, 10, ENTRY_COMMANDS, b"12345678").data
    length, checksum, index, term, time_ms, group, kind, version = ENTRY_HEADER.unpack_from(data)
    assert (length, index, term, time_ms, group, kind) == (len(data), 8, 9, 10, 7, 1)
    assert checksum == struct.unpack_from("<I", data, 4)[0]
    assert version == 1
    assert ENTRY_HEADER_SIZE == HEADER_SIZE


def test_a_batch_header_of_the_kernel_is_valid() -> None:
    record = make_entry(5, 1, 1, 0, ENTRY_COMMANDS, bytes(8)).data
    head, _ = wal_batch_frame(
        BATCH_MAGIC, 3, 11, 2, len(record), [5, len(record) >> 3], [record], bytearray(128), 72
    )
    found = read_batch_header(head, 3)
    assert found is not None
    assert (found.sequence, found.length, found.records, found.flush) == (11, len(record), 1, 9)
    assert found.covered_from == 72
    assert read_batch_header(head, 4) is None
    assert len(head) == BATCH_HEADER.size
