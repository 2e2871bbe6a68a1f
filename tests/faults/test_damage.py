"""Damaged files: found, named in the log, fetched from the others again; never served."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import StartCluster
from tests.faults.traffic import counter, declare, drain, fill, in_step, log_has, until

QUEUE = "orders"
COUNT = 3000
SIZE = 1000
VICTIM = 3
WAL_BATCH = b"CVYWALB\x02"
SMALL_FILES = {"raft.wal_max_size_bytes": "1MiB", "raft.mem_table_max_bytes": "0"}
"""With these, a backlog of a few MiB lies in segments, behind snapshots, and is read from there."""


def log_directory(cluster: LocalCluster, number: int) -> Path:
    return cluster.data / f"node-{number}" / "data" / "log"


def flip(path: Path, offset: int) -> None:
    """Turns one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def batches(path: Path) -> list[tuple[int, int]]:
    """(bytes of the records, offset) of the batches of a WAL file."""
    data = path.read_bytes()
    generation = data[8:16]
    found = []
    at = data.find(WAL_BATCH)
    while at >= 0:
        if data[at + 8 : at + 16] == generation:
            found.append((int.from_bytes(data[at + 24 : at + 32], "little"), at))
        at = data.find(WAL_BATCH, at + 8)
    return found


def wal_files(cluster: LocalCluster, number: int) -> list[Path]:
    """WAL files with some batches, oldest first."""
    found = sorted((log_directory(cluster, number) / "wal").glob("*.wal"))
    return [path for path in found if len(batches(path)) >= 3]


def segments(cluster: LocalCluster, number: int) -> list[Path]:
    return sorted((log_directory(cluster, number) / "groups" / "00000001").glob("*.seg"))


def snapshot(cluster: LocalCluster, number: int) -> Path:
    return log_directory(cluster, number) / "groups" / "00000001" / "snapshot"


def prepare(start_cluster: StartCluster) -> LocalCluster:
    """A cluster with a backlog in WAL files and segments and a snapshot on every node."""
    cluster = start_cluster(settings=SMALL_FILES)
    declare(cluster, 1, QUEUE)
    # What is consumed by then makes a snapshot worth while.
    fill(cluster, 1, QUEUE, COUNT // 2, SIZE)
    drain(cluster, 1, QUEUE, COUNT // 2, SIZE)
    fill(cluster, 1, QUEUE, COUNT, SIZE)
    until(
        lambda: (
            segments(cluster, VICTIM)
            and snapshot(cluster, VICTIM).exists()
            and wal_files(cluster, VICTIM)
        ),
        "the backlog is not in files",
    )
    return cluster


def comes_back_whole(cluster: LocalCluster) -> None:
    """The victim takes part again: with one other node gone it makes the majority, and serves."""
    cluster.start_node(VICTIM)
    cluster.wait_ready()
    in_step(cluster)
    cluster.kill(1)
    assert drain(cluster, VICTIM, QUEUE, COUNT, SIZE) == list(range(COUNT))
    assert counter(cluster, VICTIM, "deliveries_local") >= COUNT


def damage(cluster: LocalCluster, where: str, how: str) -> Path:
    """Spoils one file of the victim; returns which."""
    if where == "wal":
        path = wal_files(cluster, VICTIM)[0]
        # The largest batch holds messages; near its end lies the body of the last record. Not the
        # last batch: a flush that nothing follows could have been torn.
        size, at = max(batches(path)[:-1])
        if how == "flip":
            flip(path, at + size - 100)
        else:
            os.truncate(path, at + size - 100)
        return path
    # The newest segment: older ones may hold nothing but what was consumed.
    path = segments(cluster, VICTIM)[-1] if where == "segment" else snapshot(cluster, VICTIM)
    size = path.stat().st_size
    if how == "flip":
        flip(path, size // 2)
    else:
        os.truncate(path, size // 2)
    return path


@pytest.mark.parametrize("how", ["flip", "truncate"])
@pytest.mark.parametrize("where", ["wal", "segment", "snapshot"])
def test_damage_of_a_node_that_is_down(start_cluster: StartCluster, where: str, how: str) -> None:
    cluster = prepare(start_cluster)
    cluster.kill(VICTIM)
    path = damage(cluster, where, how)
    comes_back_whole(cluster)
    name = str(path.relative_to(log_directory(cluster, VICTIM)))
    if (where, how) == ("wal", "truncate"):
        # A file that ends early looks like a write that the crash cut off.
        assert log_has(cluster, VICTIM, "storage.torn_tail", name, '"offset"')
    elif (where, how) == ("segment", "flip"):
        # Bodies in segments are checked when they are read.
        assert log_has(cluster, VICTIM, "raft.replica_damaged", f"{name} at byte")
    else:
        assert log_has(cluster, VICTIM, "storage.damaged", name, '"offset"')


def test_damage_that_a_read_finds_is_not_served(start_cluster: StartCluster) -> None:
    cluster = prepare(start_cluster)
    for path in segments(cluster, VICTIM):
        flip(path, path.stat().st_size // 2)
    assert drain(cluster, VICTIM, QUEUE, COUNT, SIZE) == list(range(COUNT))
    assert log_has(cluster, VICTIM, "raft.replica_damaged", ".seg at byte")


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_a_wal_file_is_deleted_while_the_node_is_down(
    start_cluster: StartCluster, which: str
) -> None:
    cluster = prepare(start_cluster)
    cluster.kill(VICTIM)
    path = wal_files(cluster, VICTIM)[0 if which == "oldest" else -1]
    path.unlink()
    comes_back_whole(cluster)
    name = str(path.relative_to(log_directory(cluster, VICTIM)))
    assert log_has(cluster, VICTIM, "storage.damaged", name, "the WAL file is missing")


def test_the_whole_wal_is_deleted_while_the_node_is_down(start_cluster: StartCluster) -> None:
    cluster = prepare(start_cluster)
    cluster.kill(VICTIM)
    shutil.rmtree(log_directory(cluster, VICTIM) / "wal")
    comes_back_whole(cluster)
    assert log_has(cluster, VICTIM, "storage.damaged", "wal/manifest", "the manifest is missing")
    assert log_has(cluster, VICTIM, "raft.replica_damaged", '"group": 1')
