"""Flipped bits at every kind of place: found, named, never served; the other groups go on."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator

import pytest
from crc32c import crc32c

from convoymq.logformat.entry import ENTRY_HEADER
from convoymq.logformat.wal_file import (
    BATCH_HEADER,
    DIRECTORY_ROW,
    FILE_HEADER,
    PLACE_FILE_SHIFT,
    PLACE_OFFSET_MASK,
    directory_bytes,
    wal_name,
)
from convoymq.model.errors import StorageFault
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.log import GroupLog
from convoymq.storage.snapshots import snapshot_name
from convoymq.storage.store import Storage
from convoymq.storage.types import Damage, EntryGone
from tests.unit.storage.disk import Node, Owner


def flip(disk: MemoryDirectory, path: str, offset: int, bit: int = 0) -> None:
    """Turns one bit of a file, behind everybody's back."""
    inode = disk.names[path]
    assert inode is not None
    inode.content[offset] ^= 1 << bit
    inode.durable[offset] ^= 1 << bit


def copy_of(disk: MemoryDirectory) -> MemoryDirectory:
    """The same disk, to be damaged."""
    made = MemoryDirectory()
    for path, inode in disk.names.items():
        if inode is None:
            made.make(path)
        else:
            file = made.open(path, create=True)
            file.pwrite([bytes(inode.content)], 0)
            file.sync()
    made.durable_names = dict(made.names)
    return made


def place_of(log: GroupLog, index: int) -> tuple[str, int]:
    """(file, offset) of an entry in the WAL."""
    place = log.places[index - log.base]
    return wal_name(place >> PLACE_FILE_SHIFT), (place & PLACE_OFFSET_MASK) << 3


def filled(rounds: int, *, close: bool) -> Node:
    """Three groups with some batches in the WAL, some more votes."""
    node = Node()
    for i in range(rounds):
        for group in (1, 2, 3):
            node.append(group, 2, 80 + 8 * group)
        if i % 3 == 0:
            node.vote(1 + i % 2)
        node.run()
    if close:
        node.storage.close(lambda: None)
        node.run()
    return node


def places(data: bytes) -> Iterator[tuple[str, int]]:
    """(what lies there, offset) of every interesting byte of a WAL file with whole batches."""
    for offset in range(68):
        yield "file header", offset
    at = FILE_HEADER.size
    while at + BATCH_HEADER.size <= len(data) and data[at : at + 7] == b"CVYWALB":
        *_, count, _, _, _ = BATCH_HEADER.unpack_from(data, at)
        for offset in range(at, at + BATCH_HEADER.size):
            yield "batch header", offset
        record = at + BATCH_HEADER.size
        for _ in range(count):
            size = ENTRY_HEADER.unpack_from(data, record)[0]
            for offset in [*range(record, record + 38), record + size - 1]:
                yield "record", offset
            record += size
        for offset in range(record, record + DIRECTORY_ROW.size * count):
            yield "directory", offset
        at = record + directory_bytes(count)


def test_a_flipped_bit_is_never_served_and_hits_one_group() -> None:
    node = filled(5, close=True)
    name = "wal/" + node.disk.list("wal")[0]
    inode = node.disk.names[name]
    assert inode is not None
    data = bytes(inode.content)
    kinds: dict[str, int] = {}
    for kind, offset in places(data):
        kinds[kind] = kinds.get(kind, 0) + 1
        disk = copy_of(node.disk)
        flip(disk, name, offset, offset % 8)
        hurt = Node(disk=disk)
        damaged = {group for group, log in hurt.storage.logs.items() if log.damaged}
        assert len(damaged) <= 1, (kind, offset, hurt.report)
        if kind != "record":
            assert not damaged, (kind, offset, hurt.report)
        for group in (1, 2, 3):
            log = hurt.storage.logs[group]
            if group in damaged:
                assert hurt.report.damages[0].file == name
                assert log.last_index == 0
                with pytest.raises((EntryGone, StorageFault)):
                    log.entry(1)
                continue
            model = node.models[group]
            assert log.last_index == model.last, (kind, offset, hurt.report)
            assert (log.term, log.voted_for) == model.vote, (kind, offset)
            for index in range(1, model.last + 1):
                assert log.entry(index).data == model.entries[index].data
    assert set(kinds) == {"file header", "batch header", "record", "directory"}


def test_damage_in_the_last_flush_is_cut_as_torn_without_a_tail_marker() -> None:
    node = filled(3, close=False)
    last = node.storage.wal.current
    assert last is not None
    flip(node.disk, last.name, last.tail - 100)
    hurt = Node(disk=node.disk)
    assert hurt.report.torn_tail is not None
    assert hurt.report.torn_tail[0] == last.name
    assert not hurt.report.damages
    assert hurt.storage.logs[1].last_index == 4


def test_after_a_tail_marker_damage_in_the_last_flush_is_found() -> None:
    node = filled(3, close=False)
    current = node.storage.wal.current
    assert current is not None
    at = current.tail - 100
    node.storage.tick()
    node.storage.tick()
    node.run()
    flip(node.disk, current.name, at)
    hurt = Node(disk=node.disk)
    assert [d.group for d in hurt.report.damages if d.group is not None] != []
    assert hurt.report.torn_tail is None


def test_an_idle_node_writes_one_tail_marker_and_then_nothing() -> None:
    node = filled(1, close=False)
    for _ in range(3):
        node.storage.tick()
        node.run()
    flushes = node.storage.wal.flush_count
    for _ in range(50):
        node.storage.tick()
        node.run()
    assert node.storage.wal.flush_count == flushes


def test_a_file_cut_short_is_damage_when_a_younger_one_knows_its_end() -> None:
    node = filled(40, close=False)
    names = node.disk.list("wal")
    assert len(node.storage.wal.files) > 0
    node.storage.owner = None
    for group in (1, 2, 3):
        node.append(group, 200, 400)
        node.run()
    files = list(node.storage.wal.files.values())
    assert len(files) >= 3, names
    middle = files[-2]
    inode = node.disk.names[middle.name]
    assert inode is not None
    del inode.content[middle.tail - 8 :]
    del inode.durable[middle.tail - 8 :]
    hurt = Node(disk=node.disk)
    assert any(d.file == middle.name for d in hurt.report.damages)


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_in_a_segment_or_snapshot_hits_one_group(seed: int) -> None:
    rnd = random.Random(seed)
    node = Node(seed)
    for _ in range(6):
        for group in (1, 2, 3):
            node.append(group, 20, 480)
            node.run()
            node.models[group].applied = node.models[group].written
            node.models[group].dead = set(range(2, node.models[group].applied - 5))
    node.storage.tick()
    node.run()
    files = [
        path
        for path, inode in node.disk.names.items()
        if path.startswith("groups/") and inode is not None
    ]
    assert any(path.endswith(".seg") for path in files)
    assert any(path.endswith("snapshot") for path in files)
    for path in files:
        disk = copy_of(node.disk)
        inode = disk.names[path]
        assert inode is not None
        flip(disk, path, rnd.randrange(len(inode.content)), rnd.randrange(8))
        hurt = Node(disk=disk)
        group = int(path.split("/")[1], 16)
        found = {g for g, log in hurt.storage.logs.items() if log.damaged}
        assert found <= {group}
        for g, log in hurt.storage.logs.items():
            for index in range(1, log.last_index + 1):
                try:
                    entry = log.entry(index)
                except (EntryGone, StorageFault):
                    continue
                assert entry.data == node.models[g].entries[index].data
        assert all(log.damaged is None for g, log in hurt.storage.logs.items() if g != group)


def test_a_damaged_read_marks_the_log_and_tells() -> None:
    node = filled(4, close=True)
    node = Node(disk=node.disk)
    seen: list[Damage] = []
    node.storage.owner = Owner(on_damaged=seen.append)
    log = node.storage.logs[2]
    name, offset = place_of(log, log.last_index)
    flip(node.disk, name, offset + 60)
    with pytest.raises(StorageFault, match="damaged"):
        log.entry(log.last_index)
    assert log.damaged is not None
    assert seen == [log.damaged]
    assert seen[0].file == name


def test_a_wiped_log_starts_again_and_keeps_its_vote() -> None:
    node = filled(4, close=True)
    log = node.storage.logs[2]
    vote = (log.term, log.voted_for)
    name, offset = place_of(log, log.last_index)
    flip(node.disk, name, offset + 60)
    node = Node(disk=node.disk)
    log = node.storage.logs[2]
    assert log.damaged is not None
    done: list[BaseException | None] = []
    log.wipe(done.append)
    node.run()
    assert done == [None]
    assert node.storage.logs[2].damaged is None
    assert (log.last_index, log.first_index) == (0, 1)
    node.models[2].__init__()  # type: ignore[misc]
    node.append(2, 1, term=9)
    node.run()
    again = Node(disk=node.disk)
    assert again.storage.logs[2].damaged is None
    assert again.storage.logs[2].last_index == 1
    assert again.storage.logs[2].entry(1).term == 9
    assert (again.storage.logs[2].term, again.storage.logs[2].voted_for) == vote


def test_a_wipe_that_the_disk_refuses_is_repeated() -> None:
    node = filled(4, close=True)
    name, offset = place_of(node.storage.logs[2], 1)
    flip(node.disk, name, offset + 60)
    # A file of the damaged log, which the wipe has to remove.
    remains = snapshot_name(2)
    node.disk.make("groups/00000002")
    node.disk.open(remains, create=True).sync()
    node = Node(disk=node.disk)
    log = node.storage.logs[2]
    assert log.damaged is not None
    refusals = 0

    def refuse(operation: str, path: str) -> None:
        nonlocal refusals
        if (operation, path) == ("remove", remains):
            refusals += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    node.disk.operation = refuse
    done: list[BaseException | None] = []
    log.wipe(done.append)
    for _ in range(3):
        node.run()
        node.storage.tick()
    node.run()
    assert refusals == 4
    assert [type(error) for error in done] == [OSError]
    assert log.damaged is not None
    node.disk.operation = None
    node.storage.tick()
    node.run()
    assert done[1:] == [None]
    assert log.damaged is None
    assert not node.disk.exists(remains)
    node.storage.tick()
    node.run()
    assert len(done) == 2


def test_recovery_reads_random_bytes_without_falling_over() -> None:
    rnd = random.Random(5)
    for _ in range(200):
        node = filled(2, close=bool(rnd.randrange(2)))
        name = "wal/" + node.disk.list("wal")[0]
        inode = node.disk.names[name]
        assert inode is not None
        for _ in range(rnd.randrange(1, 6)):
            at = rnd.randrange(len(inode.content))
            piece = rnd.randbytes(rnd.randrange(1, 64))
            inode.content[at : at + len(piece)] = piece
        inode.durable = bytearray(inode.content)
        hurt: Storage = Node(disk=node.disk).storage
        for group, log in hurt.logs.items():
            if group not in node.models:
                continue
            for index in range(1, log.last_index + 1):
                entry = log.entry(index)
                assert entry.data == node.models[group].entries[index].data


def test_a_batch_whose_header_and_a_record_are_damaged_hits_one_group() -> None:
    node = filled(4, close=True)
    log = node.storage.logs[2]
    name, offset = place_of(log, log.last_index)
    inode = node.disk.names[name]
    assert inode is not None
    start = bytes(inode.content).rindex(b"CVYWALB", 0, offset)
    flip(node.disk, name, start + 20)
    flip(node.disk, name, offset + 60)
    hurt = Node(disk=node.disk)
    assert {group for group, log in hurt.storage.logs.items() if log.damaged} == {2}


def test_when_nobody_can_say_whose_records_were_hit_every_group_is_damaged() -> None:
    node = filled(4, close=True)
    current = node.storage.wal.current
    assert current is not None
    inode = node.disk.names[current.name]
    assert inode is not None
    data = inode.content
    # The last batch (the tail marker) stays, but its map does not reach so far.
    last = bytes(data).rindex(b"CVYWALB")
    data[FILE_HEADER.size : last] = bytes(last - FILE_HEADER.size)
    data[last + 32 : last + 40] = last.to_bytes(8, "little")
    data[last + 116 : last + 120] = crc32c(bytes(data[last : last + 116])).to_bytes(4, "little")
    hurt = Node(disk=node.disk)
    damage = hurt.report.damages[0]
    assert damage.group is None
    assert "cannot be told whose" in damage.reason
    for group in (1, 2, 3):
        log = hurt.storage.open_group(group)
        assert log.damaged is not None
        assert log.damaged.vote_lost
        assert log.last_index == 0
