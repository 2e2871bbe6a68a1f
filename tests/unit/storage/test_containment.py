"""Damage is contained to the groups that it may have hit; their votes are never made up."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from convoymq.logformat.entry import ENTRY_HEADER, NO_GROUP
from convoymq.logformat.wal_file import BATCH_HEADER, FILE_HEADER, directory_bytes
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.manifest import MANIFEST_NAME, MANIFEST_NAMES
from convoymq.storage.types import EntryGone, Snapshot
from tests.unit.storage.disk import Node
from tests.unit.storage.test_damage import copy_of, filled

GROUPS = 24
NEAR_BYTES = 160 << 10
"""A batch's map covers at most so much: two times 64 KiB, and the batches at their ends."""


def busy(seed: int, *, size: int, files: int = 1) -> Node:
    """Many groups that take turns: each is busy for a while, all have voted."""
    node = Node(seed, config=Node().config.__class__(wal_max_size_bytes=size))
    node.groups = list(range(1, GROUPS + 1))
    node.storage.owner = None
    rnd = node.random
    while len(node.storage.wal.files) < files or node.storage.wal.current.tail < size * 2 // 3:  # type: ignore[union-attr]
        group = rnd.choice(node.groups)
        for _ in range(rnd.randint(1, 6)):
            action = rnd.random()
            if action < 0.7:
                node.append(group, rnd.randint(1, 5), rnd.choice([40, 400, 3000]))
            elif action < 0.85:
                node.vote(group)
            else:
                node.log(group)
                node.truncate(group, node.models[group].last - rnd.randint(0, 3))
            node.run()
    node.storage.tick()
    node.storage.tick()
    node.run()
    return node


def records(data: bytes, limit: int) -> Iterator[tuple[int, int, int]]:
    """(group, offset, end) of all records."""
    at = FILE_HEADER.size
    while at < limit:
        *_, count, _, _, _ = BATCH_HEADER.unpack_from(data, at)
        record = at + BATCH_HEADER.size
        for _ in range(count):
            fields = ENTRY_HEADER.unpack_from(data, record)
            yield fields[5], record, record + fields[0]
            record += fields[0]
        at = record + directory_bytes(count)


def spoil(disk: MemoryDirectory, name: str, start: int, end: int, rnd: random.Random) -> None:
    """Overwrites a region, behind everybody's back."""
    inode = disk.names[name]
    assert inode is not None
    piece = bytes(end - start) if rnd.random() < 0.5 else rnd.randbytes(end - start)
    inode.content[start:end] = piece
    inode.durable = bytearray(inode.content)


def check(hurt: Node, truth: Node) -> set[int]:
    """Whole groups equal the truth, damaged ones serve nothing; returns the damaged ones."""
    damaged = set()
    for group, model in truth.models.items():
        log = hurt.storage.logs.get(group)
        if log is None:
            log = hurt.storage.open_group(group)
            if not (model.last or model.vote != (0, 0)):
                continue
            assert log.damaged is not None, group
        if log.damaged is None or not log.damaged.vote_lost:
            assert (log.term, log.voted_for) == model.vote, group
        if log.damaged is not None:
            damaged.add(group)
            assert log.last_index == 0
            continue
        log.check_invariants()
        assert log.last_index == model.last
        for index in range(1, model.last + 1):
            assert log.entry(index).data == model.entries[index].data
            assert log.term_at(index) == model.entries[index].term
    return damaged


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_region_of_the_last_file_hits_the_groups_near_it(seed: int) -> None:
    node = busy(seed, size=1 << 20)
    rnd = random.Random(seed)
    current = node.storage.wal.current
    assert current is not None
    inode = node.disk.names[current.name]
    assert inode is not None
    data = bytes(inode.content)
    for _ in range(4):
        disk = copy_of(node.disk)
        length = rnd.randint(1024, 8192)
        # Not the end: what nothing follows may have been torn.
        start = rnd.choice([0, rnd.randrange(current.tail - length - 1000)])
        spoil(disk, current.name, start, start + length, rnd)
        hurt = Node(disk=disk, config=node.config)
        damaged = check(hurt, node)
        near = {
            group
            for group, begin, end in records(data, current.tail)
            if start - NEAR_BYTES < end and begin < start + length + 20_000
        }
        assert damaged <= near, (start, length, hurt.report)
        for group in damaged:
            log = hurt.storage.logs[group]
            assert log.damaged is not None
            log.save_vote(log.term + 1, 1)
            log.wipe()
        hurt.run()
        again = Node(disk=disk, config=node.config)
        for group, log in again.storage.logs.items():
            if group not in damaged:
                assert log.damaged is None, again.report
                assert log.last_index == node.models[group].last
            else:
                assert (log.last_index, log.damaged) == (0, None)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_region_of_an_earlier_file_hits_whom_the_next_table_does_not_acquit(
    seed: int,
) -> None:
    node = busy(seed, size=128 << 10, files=3)
    rnd = random.Random(seed)
    for file in list(node.storage.wal.files.values())[:-1]:
        inode = node.disk.names[file.name]
        assert inode is not None
        data = bytes(inode.content)
        disk = copy_of(node.disk)
        length = rnd.randint(1024, 8192)
        start = rnd.choice([0, rnd.randrange(file.tail - length), file.tail - length])
        spoil(disk, file.name, start, start + length, rnd)
        hurt = Node(disk=disk, config=node.config)
        damaged = check(hurt, node)
        # Batches are up to 20 kB: all records of those that the region touches are gone.
        hit = {
            group
            for group, begin, end in records(data, file.tail)
            if group != NO_GROUP and begin < start + length + 20_000 and end > start - 20_000
        }
        lost = {log.group for log in hurt.storage.logs.values() if log.damaged}
        assert lost == damaged
        assert damaged <= hit | _written_after(data, file.tail, start), (start, length)
        for group in damaged:
            found = hurt.storage.logs[group].damaged
            assert found is not None
            assert not found.vote_lost, "the next table has it"


def _written_after(data: bytes, tail: int, start: int) -> set[int]:
    """Groups near the region whose later entries do not prove that they are whole."""
    return {
        group
        for group, begin, end in records(data, tail)
        if end > start - NEAR_BYTES and begin < start + NEAR_BYTES
    }


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_a_missing_file_is_named_and_its_groups_are_damaged(which: int) -> None:
    node = busy(3, size=128 << 10, files=4)
    file = list(node.storage.wal.files.values())[which]
    disk = copy_of(node.disk)
    disk.remove(file.name)
    disk.sync("wal")
    inode = node.disk.names[file.name]
    assert inode is not None
    inside = {g for g, _, _ in records(bytes(inode.content), file.tail) if g != NO_GROUP}
    hurt = Node(disk=disk, config=node.config)
    assert [d.file for d in hurt.report.damages] == [file.name] or which == 0
    assert any(d.file == file.name and "missing" in d.reason for d in hurt.report.damages)
    damaged = check(hurt, node)
    if which != -1:
        assert damaged <= inside
        assert damaged
        assert not any(log.damaged.vote_lost for log in hurt.storage.logs.values() if log.damaged)
    else:
        assert damaged == set(node.models)
        assert all(log.damaged.vote_lost for log in hurt.storage.logs.values() if log.damaged)
    # Nothing was made durable since: it is found again.
    again = Node(disk=copy_of(disk), config=node.config)
    assert check(again, node) == damaged
    # What was found survives although the names of the files fit now.
    hurt.storage.open_group(99).save_vote(1, 1)
    hurt.run()
    later = Node(disk=disk, config=node.config)
    for group in node.models:
        log = later.storage.logs.get(group) or later.storage.open_group(group)
        assert (log.damaged is not None) == (group in damaged)
        if log.damaged and which == -1:
            assert log.damaged.vote_lost


def test_a_deleted_wal_leaves_no_group_its_vote() -> None:
    node = filled(60, close=False)
    for group in (1, 2, 3):
        node.append(group, 60, 900)
        node.run()
        node.models[group].applied = node.models[group].written
    node.storage.tick()
    node.run()
    present = [int(name, 16) for name in node.disk.list("groups")]
    assert present
    node.disk.remove("wal")
    hurt = Node(disk=node.disk)
    assert not hurt.report.fresh
    assert hurt.report.damages[0].file == MANIFEST_NAME
    for group in [*present, 1, 2, 3, 700]:
        log = hurt.storage.open_group(group)
        assert log.damaged is not None
        assert log.damaged.vote_lost
        assert log.last_index == 0
    # The metadata know which groups there have been; later ones are new, after a restart too.
    hurt.storage.limit_suspects(800)
    assert hurt.storage.open_group(800).damaged is not None
    assert hurt.storage.open_group(801).damaged is None
    hurt.vote(1)
    hurt.run()
    again = Node(disk=hurt.disk)
    assert again.storage.open_group(799).damaged is not None
    assert again.storage.open_group(802).damaged is None


def test_a_lost_manifest_is_damage_and_a_damaged_copy_of_it_is_not() -> None:
    node = filled(3, close=True)
    disk = copy_of(node.disk)
    inode = disk.names[MANIFEST_NAME]
    assert inode is not None
    inode.content[0:512] = bytes(512)
    assert not Node(disk=disk).report.damages
    disk = copy_of(node.disk)
    disk.remove(MANIFEST_NAME)
    assert not Node(disk=copy_of(disk)).report.damages
    disk.remove(MANIFEST_NAMES[1])
    hurt = Node(disk=disk)
    assert [d.file for d in hurt.report.damages] == [MANIFEST_NAME]
    assert all(log.damaged and log.damaged.vote_lost for log in hurt.storage.logs.values())


def test_an_empty_directory_is_fresh_and_a_used_one_is_not() -> None:
    node = Node()
    assert node.report.fresh
    assert not node.report.damages
    node.append(1)
    node.run()
    assert not node.crash().fresh


def test_files_of_a_group_that_the_wal_does_not_know_are_damage() -> None:
    node = filled(4, close=True)
    node.disk.make("groups/00000009")
    node.disk.open("groups/00000009/snapshot", create=True).sync()
    node.disk.sync("groups/00000009")
    hurt = Node(disk=node.disk)
    log = hurt.storage.logs[9]
    assert log.damaged is not None
    assert log.damaged.vote_lost
    assert [d.group for d in hurt.report.damages if d.group != 9] == []
    assert hurt.storage.logs[1].damaged is None


def test_entries_after_a_hole_do_not_heal_what_the_hole_replaced() -> None:
    node = Node()
    node.storage.owner = None
    node.append(1, 9)
    node.append(2, 1)
    node.run()
    before = node.storage.wal.current.tail  # type: ignore[union-attr]
    node.truncate(1, 4)
    node.run()
    after = node.storage.wal.current.tail  # type: ignore[union-attr]
    node.append(1, 2)
    node.run()
    for _ in range(3):
        node.append(2, 1)
        node.run()
    name = node.storage.wal.current.name  # type: ignore[union-attr]
    spoil(node.disk, name, before, after, random.Random(1))
    hurt = Node(disk=node.disk)
    assert hurt.storage.logs[1].damaged is not None
    with pytest.raises(EntryGone):
        hurt.storage.logs[1].entry(5)


def test_a_snapshot_does_not_stand_in_for_messages_in_a_missing_file() -> None:
    """Snapshots hold no bodies: entries below one that lay in the missing file are needed still.
    Found by the simulator, seed 5000005."""
    node = Node(5, config=Node().config.__class__(wal_max_size_bytes=128 << 10))
    node.storage.owner = None
    node.append(1, 5, 400)
    node.run()
    first = next(iter(node.storage.wal.files.values()))
    while len(node.storage.wal.files) < 2:
        node.append(2, 4, 3000)
        node.run()
    log = node.log(1)
    plan = node.models[1]
    plan.applied = plan.last
    snapshot = Snapshot(index=plan.last, term=log.last_term, membership=b"m1", state=b"s")
    log.save_snapshot(snapshot)
    node.run()
    assert log.snapshot_index == log.last_index
    disk = copy_of(node.disk)
    disk.remove(first.name)
    disk.sync("wal")
    hurt = Node(disk=disk, config=node.config)
    assert hurt.storage.logs[1].damaged is not None
    assert not hurt.storage.logs[1].damaged.vote_lost
