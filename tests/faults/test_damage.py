"""Damaged files: found, named in the log, fetched from the others again; never served."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.logformat.wal_file import BATCH_HEADER, BATCH_MAGIC, FILE_HEADER
from tests.faults.conftest import StartCluster
from tests.faults.traffic import counter, declare, drain, fill, in_step, log_has, until

QUEUE = "orders"
COUNT = 3000
SIZE = 1000
VICTIM = 3
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


@dataclass(frozen=True)
class FoundBatch:
    """A batch of a WAL file."""

    offset: int
    size: int
    """Bytes of its records."""
    sequence: int
    flush: int
    """Sequence of the first batch of its flush."""


def batches(path: Path) -> list[FoundBatch]:
    """The batches of a WAL file, in order."""
    data = path.read_bytes()
    generation = int(path.stem, 16)
    found = []
    at = data.find(BATCH_MAGIC)
    while at >= 0:
        head = data[at : at + BATCH_HEADER.size]
        if len(head) == BATCH_HEADER.size:
            _, owner, sequence, size, _, _, _, position, *_ = BATCH_HEADER.unpack(head)
            if owner == generation:
                found.append(FoundBatch(at, size, sequence, sequence - position))
        at = data.find(BATCH_MAGIC, at + 8)
    return found


def wal_files(cluster: LocalCluster, number: int) -> list[Path]:
    """The WAL files in use, oldest first; prepared ones have no first batch yet."""
    found = []
    for path in sorted((log_directory(cluster, number) / "wal").glob("*.wal")):
        with contextlib.suppress(FileNotFoundError, struct.error):
            with open(path, "rb") as file:
                head = file.read(FILE_HEADER.size)
            _, generation, first, *_ = FILE_HEADER.unpack(head)
            if generation == int(path.stem, 16) and first:
                found.append(path)
    return found


def spoilable(path: Path) -> list[FoundBatch]:
    """Batches with messages that cannot be torn, because a flush followed them. Not the file's
    first one: it begins with the table of groups, which is there twice."""
    found = batches(path)
    newest = max((batch.flush for batch in found), default=0)
    return [batch for batch in found[1:] if batch.size > SIZE and batch.sequence < newest]


def segments(cluster: LocalCluster, number: int) -> list[Path]:
    return sorted((log_directory(cluster, number) / "groups" / "00000001").glob("*.seg"))


def snapshot(cluster: LocalCluster, number: int) -> Path:
    return log_directory(cluster, number) / "groups" / "00000001" / "snapshot"


def prepare(start_cluster: StartCluster) -> tuple[LocalCluster, int]:
    """A cluster with a backlog in segments, a snapshot and the newest WAL file of every node, and
    how many messages the queue has."""
    cluster = start_cluster(settings=SMALL_FILES)
    declare(cluster, 1, QUEUE)

    def some_passed() -> bool:
        fill(cluster, 1, QUEUE, COUNT // 2, SIZE)
        drain(cluster, 1, QUEUE, COUNT // 2, SIZE)
        return snapshot(cluster, VICTIM).exists()

    # What is consumed makes a snapshot worth while. The victim saves none while it has applied more
    # than it has written itself, which a slow disk makes likely.
    until(some_passed, "what was consumed is behind no snapshot")
    fill(cluster, 1, QUEUE, COUNT, SIZE)
    until(lambda: segments(cluster, VICTIM), "the backlog is not in files")
    # How many batches the backlog was, and which files they are in, depends on the disk's speed.
    # What comes now is one flush for each message.
    count = COUNT
    in_step(cluster)
    while not spoilable(wal_files(cluster, VICTIM)[-1]):
        assert count < 2 * COUNT
        fill(cluster, 1, QUEUE, 1, SIZE, first=count)
        count += 1
        in_step(cluster)
    return cluster, count


def comes_back_whole(cluster: LocalCluster, count: int) -> None:
    """The victim takes part again: with one other node gone it makes the majority, and serves."""
    cluster.start_node(VICTIM)
    cluster.wait_ready()
    in_step(cluster)
    cluster.kill(1)
    assert drain(cluster, VICTIM, QUEUE, count, SIZE) == list(range(count))
    assert counter(cluster, VICTIM, "deliveries_local") >= count


def damage(cluster: LocalCluster, where: str, how: str) -> Path:
    """Spoils one file of the victim; returns which."""
    if where == "wal":
        # The last file: only its end can look torn.
        path = wal_files(cluster, VICTIM)[-1]
        spoilt = spoilable(path)[0]
        # Near the end lies the body of the last record.
        at = spoilt.offset + spoilt.size - 100
        if how == "flip":
            flip(path, at)
        else:
            os.truncate(path, at)
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
    cluster, count = prepare(start_cluster)
    cluster.kill(VICTIM)
    path = damage(cluster, where, how)
    comes_back_whole(cluster, count)
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
    cluster, count = prepare(start_cluster)
    for path in segments(cluster, VICTIM):
        flip(path, path.stat().st_size // 2)
    assert drain(cluster, VICTIM, QUEUE, count, SIZE) == list(range(count))
    assert log_has(cluster, VICTIM, "raft.replica_damaged", ".seg at byte")


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_a_wal_file_is_deleted_while_the_node_is_down(
    start_cluster: StartCluster, which: str
) -> None:
    cluster, count = prepare(start_cluster)
    cluster.kill(VICTIM)
    path = wal_files(cluster, VICTIM)[0 if which == "oldest" else -1]
    path.unlink()
    comes_back_whole(cluster, count)
    name = str(path.relative_to(log_directory(cluster, VICTIM)))
    assert log_has(cluster, VICTIM, "storage.damaged", name, "the WAL file is missing")


def test_the_whole_wal_is_deleted_while_the_node_is_down(start_cluster: StartCluster) -> None:
    cluster, count = prepare(start_cluster)
    cluster.kill(VICTIM)
    shutil.rmtree(log_directory(cluster, VICTIM) / "wal")
    comes_back_whole(cluster, count)
    assert log_has(cluster, VICTIM, "storage.damaged", "wal/manifest", "the manifest is missing")
    assert log_has(cluster, VICTIM, "raft.replica_damaged", '"group": 1')
