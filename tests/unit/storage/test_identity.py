"""Files name the cluster that they belong to; those of another cluster are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from convoymq.logformat.segment import SEGMENT_MAGIC
from convoymq.logformat.wal_file import FILE_MAGIC
from convoymq.model.config import RaftConfig
from convoymq.model.errors import StorageFault
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.snapshots import SNAPSHOT_MAGIC, snapshot_name
from convoymq.storage.store import Storage
from convoymq.storage.types import GroupPlan, RecoveryReport, Snapshot
from tests.unit.storage.disk import Owner, entry_of
from tests.unit.storage.inline import InlineFlusher, InlineWorker

CONFIG = RaftConfig(wal_max_size_bytes=64 * 1024, wal_preallocate=False)
ONE, TWO = "11" * 16, "22" * 16


def opened(
    disk: MemoryDirectory, cluster: str = "", former: Sequence[str] = ()
) -> tuple[Storage, RecoveryReport]:
    storage = Storage(disk, InlineFlusher(automatic=True), InlineWorker(automatic=True), CONFIG)
    if cluster:
        storage.set_identity(cluster, former)
    return storage, storage.recover()


def fill(storage: Storage) -> None:
    """A WAL file, segments and a snapshot."""
    log = storage.open_group(1)
    log.save_vote(3, 2)
    storage.owner = Owner(
        plan=lambda group: GroupPlan(
            live_ranges=[(1, 8)], applied=8, keep_from=4, take_snapshot=None
        )
    )
    for index in range(1, 9):
        log.append(entry_of(1, index, 3, 20_000))
        storage.kick()
    log.save_snapshot(Snapshot(index=3, term=3, membership=b"members", state=b"state"))
    storage.tick()


def content(disk: MemoryDirectory, name: str) -> bytearray:
    inode = disk.names[name]
    assert inode is not None
    return inode.content


def used(disk: MemoryDirectory, ending: str) -> list[str]:
    return [name for name in sorted(disk.names) if name.endswith(ending) and content(disk, name)]


def test_every_file_carries_the_id() -> None:
    disk = MemoryDirectory()
    storage, _ = opened(disk, ONE)
    assert storage.identity == ONE
    fill(storage)
    for name, magic, at in [
        (used(disk, ".wal")[-1], FILE_MAGIC, 48),
        (used(disk, ".seg")[0], SEGMENT_MAGIC, 16),
        (snapshot_name(1), SNAPSHOT_MAGIC, 48),
    ]:
        data = content(disk, name)
        assert data[:8] == magic
        assert data[at : at + 16] == bytes.fromhex(ONE)
    again, report = opened(disk, ONE)
    assert not report.damages
    assert again.logs[1].last_index == 8


def test_the_ids_of_the_cluster_before_a_recovery_are_accepted() -> None:
    disk = MemoryDirectory()
    fill(opened(disk, ONE)[0])
    storage, report = opened(disk, TWO, [ONE])
    assert not report.damages
    assert storage.logs[1].last_index == 8
    storage.logs[1].append(entry_of(1, 9, 3))
    storage.kick()
    assert content(disk, used(disk, ".wal")[-1])[48:64] == bytes.fromhex(TWO)


@pytest.mark.parametrize("mine", ["", TWO])
def test_a_wal_file_of_another_cluster_keeps_the_node_from_starting(mine: str) -> None:
    disk = MemoryDirectory()
    fill(opened(disk, ONE)[0])
    with pytest.raises(StorageFault, match=f"belongs to cluster {ONE}") as caught:
        opened(disk, mine)
    assert caught.value.path.startswith("wal/")
    assert f"this node to {mine or 'none'}" in str(caught.value)


@pytest.mark.parametrize("what", ["segment", "snapshot"])
def test_a_file_of_another_cluster_damages_its_group(what: str) -> None:
    disk, other = MemoryDirectory(), MemoryDirectory()
    fill(opened(disk, ONE)[0])
    fill(opened(other, TWO)[0])
    name = snapshot_name(1) if what == "snapshot" else used(disk, ".seg")[0]
    disk.names[name] = other.names[name]
    storage, report = opened(disk, ONE)
    log = storage.logs[1]
    assert log.damaged is not None
    assert log.damaged.file == name
    assert not log.damaged.vote_lost
    assert (log.term, log.voted_for) == (3, 2)
    assert f"belongs to cluster {TWO}, this node to {ONE}" in report.damages[0].reason
    log.wipe()
    again, report = opened(disk, ONE)
    assert not report.damages
    assert again.logs[1].last_index == 0


def test_what_follows_a_new_identity_lies_in_a_new_file() -> None:
    disk = MemoryDirectory()
    storage, _ = opened(disk)
    storage.open_group(1).append(entry_of(1, 1, 1))
    storage.kick()
    storage.set_identity(ONE)
    storage.logs[1].append(entry_of(1, 2, 1))
    storage.kick()
    first, second = used(disk, ".wal")[:2]
    assert content(disk, first)[48:64] == bytes(16)
    assert content(disk, second)[48:64] == bytes.fromhex(ONE)
    again, report = opened(disk, ONE)
    assert not report.damages
    assert again.logs[1].last_index == 2


def test_an_id_has_32_digits() -> None:
    storage, _ = opened(MemoryDirectory())
    with pytest.raises(ValueError, match="32"):
        storage.set_identity("abcd")
