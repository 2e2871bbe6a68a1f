"""What the simulator's faults may spoil."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from convoymq.logformat.wal_file import (
    BATCH_HEADER,
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    FILE_HEADER,
    FILE_MAGIC,
    MAP_BYTES,
)
from convoymq.sim.faults import PlannedLoad
from convoymq.sim.group_faults import last_flush
from convoymq.sim.loads import load_class
from convoymq.sim.registry import LOADS

GENERATION = 7
RECORDS = 64
SEEDS = 60
PLANNED = [name for name in LOADS if issubclass(load_class(name), PlannedLoad)]


def wal_file(*positions: int) -> bytearray:
    """A WAL file with batches that have these positions in their flushes."""
    data = bytearray(FILE_HEADER.pack(FILE_MAGIC, GENERATION, 1, 0, 0, 0, bytes(16), 0, 0))
    for sequence, position in enumerate(positions, start=1):
        head = BATCH_HEADER.pack(
            *(BATCH_MAGIC, GENERATION, sequence, RECORDS, 0, bytes(MAP_BYTES), 0, position, 0, 0)
        )[:-4]
        data += head + crc32c(head).to_bytes(4, "little") + bytes(RECORDS)
    return data


def start_of(number: int) -> int:
    return FILE_HEADER.size + number * (BATCH_HEADER_BYTES + RECORDS)


def test_the_last_flush_begins_with_its_first_batch() -> None:
    assert last_flush(bytes(wal_file(0))) == 0
    assert last_flush(bytes(wal_file(0, 0, 0))) == start_of(2)
    assert last_flush(bytes(wal_file(0, 0, 1, 2))) == start_of(1)


def test_a_flush_with_a_torn_header_tells_nothing_of_what_was_before() -> None:
    data = wal_file(0, 0, 0)
    torn = start_of(2) + BATCH_HEADER_BYTES // 2
    assert last_flush(bytes(data[:torn] + bytes(len(data) - torn))) == start_of(1)
    assert last_flush(bytes(data[:torn])) == start_of(1)


@pytest.mark.parametrize("name", PLANNED)
def test_seeds_draw_every_kind_of_fault_of_their_load(name: str) -> None:
    kinds = load_class(name).kinds
    load = load_class(name)()
    assert isinstance(load, PlannedLoad)
    drawn = frozenset[str]().union(*(load.make_plan(seed, None).faults for seed in range(SEEDS)))
    assert not set(kinds) - drawn
