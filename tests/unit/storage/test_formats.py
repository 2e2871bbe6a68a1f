"""The files' bytes are what docs/formats/storage.md says, and stay readable: golden files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crc32c import crc32c

from convoymq.kernels.entries import make_entry
from convoymq.logformat.identity import ClusterIds
from convoymq.logformat.segment import segment_name
from convoymq.model.config import RaftConfig
from convoymq.model.errors import StorageFault
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.snapshots import read_snapshot, snapshot_name, write_snapshot
from convoymq.storage.store import Storage
from convoymq.storage.types import GroupPlan, Snapshot
from tests.unit.storage.disk import Owner
from tests.unit.storage.inline import InlineFlusher, InlineWorker

VECTORS = Path(__file__).parents[2] / "vectors" / "storage"
CONFIG = RaftConfig(wal_max_size_bytes=64 * 1024, wal_preallocate=False)


def written() -> MemoryDirectory:
    """A small storage with every kind of file and record."""
    disk = MemoryDirectory()
    flusher, worker = InlineFlusher(automatic=True), InlineWorker(automatic=True)
    storage = Storage(disk, flusher, worker, CONFIG)
    storage.recover()
    one, two, three = (storage.open_group(group) for group in (1, 2, 3))
    one.save_vote(3, 2)
    for index in range(1, 5):
        one.append(make_entry(1, index, 3, 1000 + index, 1, b"entry %02d" % index))
        two.append(make_entry(2, index, 1, 2000 + index, 2, b"other %02d" % index))
    three.append(make_entry(3, 1, 1, 0, 0, b""))
    storage.kick()
    one.save_snapshot(Snapshot(index=3, term=3, membership=b"members", state=b"state"))
    three.wipe()
    for index in range(5, 8):
        two.append(make_entry(2, index, 1, 0, 1, bytes(20_000)))
        storage.kick()
    storage.owner = Owner(
        plan=lambda group: GroupPlan(
            live_ranges=[(1, 1)] if group == 1 else [],
            applied=3 if group == 1 else 0,
            keep_from=4,
            take_snapshot=None,
        )
    )
    two.append(make_entry(2, 8, 1, 0, 1, bytes(20_000)))
    storage.kick()
    storage.remove_group(3)
    storage.tick()
    storage.close(lambda: None)
    return disk


def files(disk: MemoryDirectory) -> dict[str, bytes]:
    """Path -> content."""
    return {path: bytes(inode.content) for path, inode in disk.names.items() if inode is not None}


def loaded() -> MemoryDirectory:
    """A disk with the golden files."""
    disk = MemoryDirectory()
    for path in sorted(VECTORS.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(VECTORS))
            disk.make(name.rpartition("/")[0])
            file = disk.open(name, create=True)
            file.pwrite([path.read_bytes()], 0)
            file.sync()
    disk.durable_names = dict(disk.names)
    return disk


def test_what_is_written_is_the_golden_files() -> None:
    made = files(written())
    if os.environ.get("CONVOY_WRITE_VECTORS") == "1":
        for name, data in made.items():
            path = VECTORS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    assert made == files(loaded())


def test_the_golden_files_are_read() -> None:
    storage = Storage(loaded(), InlineFlusher(), InlineWorker(), CONFIG)
    report = storage.recover()
    assert not report.damages
    assert report.torn_tail is None
    one, two = storage.logs[1], storage.logs[2]
    assert sorted(storage.logs) == [1, 2]
    assert (one.term, one.voted_for) == (3, 2)
    assert (one.snapshot_index, one.snapshot_term, one.snapshot_membership) == (3, 3, b"members")
    assert [e.data[48:] for e in one.entries(one.first_index, 1 << 20)] == [b"entry 04"]
    assert one.entry(1).data[48:] == b"entry 01"
    assert two.last_index == 8
    assert two.entry(2).data[48:] == b"other 02"
    assert two.entry(8).size == 20_048


@pytest.mark.parametrize("version", [1, 9])
@pytest.mark.parametrize("kind", ["wal", "segment", "snapshot"])
def test_an_unknown_version_is_refused(kind: str, version: int) -> None:
    disk = written()
    wal = next(n for n in sorted(disk.names) if n.endswith(".wal"))
    segment = next(n for n in sorted(disk.names) if n.endswith(".seg"))
    name = {"wal": wal, "segment": segment, "snapshot": snapshot_name(1)}[kind]
    inode = disk.names[name]
    assert inode is not None
    inode.content[7] = version
    if kind == "wal":
        inode.content[64:68] = crc32c(bytes(inode.content[:64])).to_bytes(4, "little")
        with pytest.raises(StorageFault, match=f"version {version}"):
            Storage(disk, InlineFlusher(), InlineWorker(), CONFIG).recover()
    else:
        storage = Storage(disk, InlineFlusher(), InlineWorker(), CONFIG)
        report = storage.recover()
        assert [log.group for log in storage.logs.values() if log.damaged] != []
        assert f"version {version}" in report.damages[0].reason


def test_a_snapshot_is_replaced_whole_and_found_damaged() -> None:
    disk = MemoryDirectory()
    first = Snapshot(index=5, term=2, membership=b"a", state=b"x" * 1000)
    second = Snapshot(index=9, term=3, membership=b"bb", state=b"y" * 10)
    assert read_snapshot(disk, 7, ClusterIds()) is None
    write_snapshot(disk, 7, first, 0)
    assert read_snapshot(disk, 7, ClusterIds()) == (first, 0)
    write_snapshot(disk, 7, second, 4)
    assert read_snapshot(disk, 7, ClusterIds()) == (second, 4)
    inode = disk.names[snapshot_name(7)]
    assert inode is not None
    for offset in range(len(inode.content)):
        inode.content[offset] ^= 4
        with pytest.raises(StorageFault):
            read_snapshot(disk, 7, ClusterIds())
        inode.content[offset] ^= 4
    del inode.content[-1]
    with pytest.raises(StorageFault):
        read_snapshot(disk, 7, ClusterIds())


def test_orders_sort_by_era_then_number() -> None:
    assert segment_name(1, 5) < segment_name(1, 1 << 40) < segment_name(1, (1 << 40) + 1)
