"""Packs: what little many groups have in a WAL file shares a file, and nothing of it is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from convoymq.logformat.pack import (
    PACK_GAP_BYTES,
    PACK_HEADER,
    PACK_MAGIC,
    SECTION_ROW,
    Section,
    pack_header,
    read_pack,
)
from convoymq.logformat.segment import SEGMENT_HEADER
from convoymq.model.config import RaftConfig
from convoymq.model.errors import EntryGone, StorageFault
from convoymq.storage import packs
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.store import RECLAIM_EVERY_TICKS
from tests.seeds import seeds
from tests.unit.storage.disk import SMALL, Node, emptied, run_until_power_loss

TINY = RaftConfig(
    wal_max_size_bytes=64 * 1024,
    segment_max_entries=16,
    segment_max_size_bytes=32 * 1024,
    mem_table_max_bytes=8 * 1024,
    read_ahead_bytes=4096,
    snapshot_min_dead_bytes=4096,
    pack_below_bytes=2048,
)


class Many(Node):
    """Many groups with little each; the WAL goes on in another file now and then."""

    def __init__(self, seed: int, disk: MemoryDirectory | None = None) -> None:
        super().__init__(seed, TINY, disk)
        self.groups = list(range(1, 13))
        self.sizes = [0, 8, 40, 100]

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.04:
            self.storage.turn_wal()
        elif choice < 0.08:
            for _ in range(RECLAIM_EVERY_TICKS):
                self.storage.tick()
        else:
            super().step()


def idle(count: int, entries: int = 2) -> Node:
    """A node with groups that have had little to do, in a pack."""
    # The table of groups is written into each file.
    node = Node(1, replace(TINY, wal_max_size_bytes=4 << 20))
    node.groups = list(range(1, count + 1))
    for group in node.groups:
        node.append(group, entries)
        node.vote(group)
    emptied(node)
    return node


def sections(node: Node) -> list[Section]:
    return [s for pack in node.storage.packs.files.values() for s in pack.sections.values()]


def pack_files(node: Node) -> list[str]:
    return [f"packs/{name}" for name in node.disk.list("packs")]


def tidy(node: Node, rounds: int = 1) -> None:
    for _ in range(rounds * RECLAIM_EVERY_TICKS):
        node.storage.tick()
        node.run()


# At random.


@pytest.mark.parametrize("seed", range(20))
def test_a_log_in_packs_holds_what_the_model_holds(seed: int) -> None:
    node = Many(seed)
    for at in range(400):
        node.step()
        if at % 80 == 0:
            node.check()
    node.run()
    node.check()
    assert node.storage.packs.written
    node.crash(lambda: True)
    node.check()


@pytest.mark.parametrize("seed", seeds(25))
def test_nothing_in_packs_is_lost_when_the_power_goes(seed: int) -> None:
    node = Many(seed)
    for _ in range(5):
        run_until_power_loss(node, 400, node.random.randint(60, 400))
        node.crash()
    node.run()
    node.check()


@pytest.mark.parametrize("seed", [2, 5])
@pytest.mark.parametrize("kept", ["nothing", "all", "some"])
def test_the_power_may_go_at_every_file_operation_about_packs(seed: int, kept: str) -> None:
    keep: dict[str, Callable[[], bool] | None] = {
        "nothing": lambda: False, "all": lambda: True, "some": None,
    }  # fmt: skip
    operation = 1
    written = 0
    while True:
        node = Many(seed)
        if not run_until_power_loss(node, 160, operation):
            break
        written += node.storage.packs.written
        node.crash(keep[kept])
        for group in list(node.groups):
            node.append(group, 1)
        emptied(node)
        node.check()
        node.crash(lambda: True)
        operation += 3
    assert written


# Files.


def test_thousands_of_idle_groups_make_few_files() -> None:
    node = idle(2000)
    assert len(node.disk.list("groups")) == 0
    assert len(pack_files(node)) <= 2000 // packs.PACK_SECTIONS + 1
    names = sorted(node.disk.names)
    for _ in range(3):
        emptied(node)
        tidy(node, 20)
    assert [n for n in sorted(node.disk.names) if not n.startswith("wal/")] == [
        n for n in names if not n.startswith("wal/")
    ]
    node.check()
    node.crash(lambda: False)
    node.check()
    assert node.report.groups == 2000


def test_a_group_with_much_keeps_files_of_its_own() -> None:
    node = Node(1, TINY)
    node.append(1, 40, 200)
    node.append(2, 2, 200)
    emptied(node)
    assert node.disk.list("groups") == ["00000001"]
    assert [section.group for section in sections(node)] == [2]
    # It grows: entries of one log in a pack, in segments, and in a pack again.
    node.append(2, 40, 200)
    emptied(node)
    node.append(2, 2, 200)
    emptied(node)
    kinds = [isinstance(segment, Section) for segment in node.storage.logs[2].segments]
    assert kinds[0]
    assert kinds[-1]
    assert not all(kinds)
    node.check()
    node.crash(lambda: False)
    node.check()
    assert node.storage.logs[2].last_index == 44


def test_packs_are_off_while_an_older_release_may_come_back() -> None:
    node = Node(1, TINY)
    node.storage.may_pack = lambda: False
    node.append(1, 2)
    emptied(node)
    assert pack_files(node) == []
    assert node.disk.list("groups") == ["00000001"]


def test_what_a_group_has_in_many_packs_is_joined() -> None:
    node = Node(1, TINY)
    node.groups = [1, 2, 3]
    for _ in range(40):
        for group in node.groups:
            node.append(group, 2, 40)
        node.run()
        for group in node.groups:
            node.models[group].applied = node.models[group].written
        emptied(node)
        node.check()
    kept = len(node.storage.logs[1].segments)
    total = sum(segment.size for segment in node.storage.logs[1].segments)
    assert kept <= packs.JOIN_SECTIONS + 2 * total // TINY.pack_below_bytes < 20
    tidy(node, 5)
    assert len(pack_files(node)) < 10
    node.check()
    node.crash(lambda: False)
    node.check()
    assert len(node.storage.logs[1].segments) == kept


def test_a_pack_that_is_half_dead_is_replaced_and_a_dead_one_removed() -> None:
    node = idle(60)
    (before,) = pack_files(node)
    for group in range(1, 40):
        node.remove(group)
    node.run()
    tidy(node)
    (after,) = pack_files(node)
    assert after != before
    assert len(sections(node)) == 21
    node.check()
    node.crash(lambda: False)
    node.check()
    for group in range(40, 61):
        node.remove(group)
    node.run()
    tidy(node)
    assert pack_files(node) == []


def test_small_packs_become_one() -> None:
    node = Node(1, TINY)
    for group in range(1, 9):
        node.append(group, 1)
        emptied(node)
    tidy(node, 3)
    assert len(pack_files(node)) < packs.SMALL_PACKS
    node.check()
    node.crash(lambda: False)
    node.check()


def test_a_removed_group_is_not_found_again_in_its_pack() -> None:
    node = idle(20)
    node.remove(7)
    for _ in range(3):
        emptied(node)
    assert node.disk.list("packs")
    for _ in range(3):
        node.crash(lambda: False)
        assert 7 not in node.storage.logs
        assert not node.report.damages
        emptied(node)


@pytest.mark.parametrize("restart", [False, True])
def test_a_group_that_comes_back_does_not_take_its_former_section(restart: bool) -> None:
    node = idle(20)
    node.storage.remove_group(7)
    for _ in range(3):
        emptied(node)
    if restart:
        node = Node(1, TINY, node.disk)
        emptied(node)
        emptied(node)
    log = node.storage.open_group(7)
    assert (log.last_index, log.era > 0) == (0, True)
    node.models.pop(7, None)
    node._listen(7, log)
    node.models[7].first_term = 9
    node.append(7, 1, term=9)
    emptied(node)
    again = Node(1, TINY, node.disk)
    assert again.storage.logs[7].last_index == 1
    assert again.storage.logs[7].entry(1).term == 9


def test_truncated_entries_leave_their_pack_before_their_successors_leave_the_wal() -> None:
    node = idle(20, entries=6)
    (before,) = pack_files(node)
    node.truncate(3, 4)
    node.truncate(4, 1)
    emptied(node)
    assert before not in pack_files(node)
    node.check()
    node.crash(lambda: False)
    node.check()
    assert [node.storage.logs[g].last_index for g in (3, 4, 5)] == [4, 1, 6]
    # Were they there still, they would come back with the section of their successors dead.
    assert sum(len(section) for section in sections(node)) == 18 * 6 + 4 + 1


def test_a_pack_is_not_replaced_before_what_made_it_dead_is_durable() -> None:
    node = idle(20)
    (before,) = pack_files(node)
    for group in range(1, 16):
        node.storage.remove_group(group)
    for _ in range(2 * RECLAIM_EVERY_TICKS):
        node.storage.tick()
        while node.worker.run():
            pass
    assert pack_files(node) == [before]
    node.crash(lambda: False)
    assert node.report.groups == 20
    node.check()


def test_a_truncation_that_nothing_has_followed_leaves_the_entries_in_a_replaced_pack() -> None:
    node = idle(60, entries=6)
    (before,) = pack_files(node)
    for group in range(1, 40):
        node.remove(group)
    node.storage.logs[50].truncate_from(4)
    node.storage.logs[51].truncate_from(1)
    tidy(node)
    assert before not in pack_files(node)
    # The power goes before anything replaces them: Raft allows that they are back.
    node.crash(lambda: False)
    assert [node.storage.logs[group].last_index for group in (50, 51, 52)] == [6, 6, 6]
    node.check()


def test_a_full_disk_holds_the_wal_file_and_nothing_else() -> None:
    node = Node(1, TINY)
    node.groups = list(range(1, 31))
    for group in node.groups:
        node.append(group, 3)
    node.run()

    def refuse(operation: str, path: str) -> None:
        if operation == "pwrite" and path.startswith("packs/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    node.disk.operation = refuse
    generation = node.storage.turn_wal()
    for _ in range(5):
        node.run()
        node.storage.tick()
    assert not node.storage.has_emptied(generation)
    node.append(5, 1)
    node.run()
    node.check()
    node.disk.operation = None
    emptied(node)
    assert node.storage.has_emptied(generation)
    assert len(sections(node)) >= 30
    node.check()
    node.crash(lambda: False)
    node.check()


def test_entries_in_packs_are_not_read_from_their_file_by_others() -> None:
    node = idle(3)
    assert node.storage.logs[1].segments
    assert node.storage.logs[1].segment_at(1) is None


# Damage.


def copy_of(disk: MemoryDirectory) -> MemoryDirectory:
    other = MemoryDirectory()
    for name, inode in disk.names.items():
        if inode is None:
            other.make(name)
        else:
            other.make(name.rpartition("/")[0])
            file = other.open(name, create=True)
            file.pwrite([bytes(inode.content)], 0)
            file.sync()
    other.durable_names = dict(other.names)
    return other


def spoiled(node: Node, start: int, length: int) -> Node:
    """The node's disk, opened anew, with zeros in a pack."""
    disk = copy_of(node.disk)
    (path,) = pack_files(node)
    inode = disk.names[path]
    assert inode is not None
    inode.content[start : start + length] = bytes(length)
    return Node(1, TINY, disk)


def damaged(node: Node) -> set[int]:
    return {group for group, log in node.storage.logs.items() if log.damaged is not None}


def test_damage_in_a_pack_hits_the_groups_that_it_lies_in() -> None:
    node = idle(40)
    (path,) = pack_files(node)
    for section in sections(node):
        hurt = spoiled(node, section.start, SEGMENT_HEADER.size)
        assert damaged(hurt) == {section.group}
        (damage,) = hurt.report.damages
        assert (damage.file, damage.offset) == (path, section.start)
        hurt = spoiled(node, section.start + section.length - 8, 16)
        assert damaged(hurt) <= {section.group, section.group - 1}
        assert section.group in damaged(hurt)
    one, two = sections(node)[10:12]
    hurt = spoiled(node, one.start + 60, two.start - one.start)
    assert damaged(hurt) == {one.group, two.group}
    for group, log in hurt.storage.logs.items():
        if log.damaged is None:
            assert log.entry(1).data == node.models[group].entries[1].data
    # Of an entry only a read notices it.
    hurt = spoiled(node, one.start + SEGMENT_HEADER.size + 50, 8)
    assert damaged(hurt) == set()
    with pytest.raises(StorageFault, match=f"group {one.group} is damaged"):
        hurt.storage.logs[one.group].entry(1)
    assert damaged(hurt) == {one.group}


def test_a_damaged_section_stays_damaged_when_its_pack_is_replaced() -> None:
    node = idle(60)
    victim = next(section for section in sections(node) if section.group == 50)
    hurt = spoiled(node, victim.start + SEGMENT_HEADER.size + 50, 8)
    for group in range(1, 40):
        hurt.storage.remove_group(group)
    hurt.run()
    tidy(hurt)
    assert len(sections(hurt)) == 21
    again = Node(1, TINY, hurt.disk)
    with pytest.raises(StorageFault, match="is damaged"):
        again.storage.logs[victim.group].entry(1)
    for group, log in again.storage.logs.items():
        if group != victim.group:
            assert log.entry(1).data == node.models[group].entries[1].data


def test_a_damaged_group_is_rebuilt_and_its_section_goes() -> None:
    node = idle(10)
    victim = sections(node)[4]
    hurt = spoiled(node, victim.start, 8)
    emptied(hurt)
    hurt = Node(1, TINY, hurt.disk)
    assert damaged(hurt) == {victim.group}
    hurt.storage.logs[victim.group].wipe()
    hurt.run()
    emptied(hurt)
    hurt = Node(1, TINY, hurt.disk)
    assert damaged(hurt) == set()
    assert hurt.storage.logs[victim.group].last_index == 0


@pytest.mark.parametrize("which", ["first", "last"])
def test_one_copy_of_a_directory_is_enough(which: str) -> None:
    node = idle(10)
    (path,) = pack_files(node)
    size = node.disk.open(path).size()
    length = PACK_HEADER.size + 10 * SECTION_ROW.size
    assert size >= 2 * length + PACK_GAP_BYTES
    for at in (0, 30, PACK_HEADER.size, length - 8):
        start = at if which == "first" else size - 8 - at
        hurt = spoiled(node, start, 8)
        assert damaged(hurt) == set()
        assert hurt.report.damages == []


def test_without_a_directory_every_group_is_damaged_until_it_is_rebuilt() -> None:
    node = idle(10)
    (path,) = pack_files(node)
    hurt = spoiled(node, 0, node.disk.open(path).size())
    assert damaged(hurt) == set(node.groups)
    assert (hurt.report.damages[0].file, hurt.report.damages[0].group) == (path, None)
    assert [hurt.storage.logs[g].term for g in node.groups] == [1] * 10
    tidy(hurt)
    assert hurt.disk.exists(path)
    # It goes when the WAL says who is damaged.
    hurt.storage.logs[1].save_vote(9, 1)
    hurt.run()
    tidy(hurt)
    assert not hurt.disk.exists(path)
    again = Node(1, TINY, hurt.disk)
    assert damaged(again) == set(node.groups)


def test_a_pack_of_another_version_or_cluster_is_refused() -> None:
    node = idle(3)
    (path,) = pack_files(node)
    inode = node.disk.names[path]
    assert inode is not None
    rows = bytes(inode.content[PACK_HEADER.size : PACK_HEADER.size + 3 * SECTION_ROW.size])
    for head, match in (
        (pack_header(rows, b"x" * 16), "cluster"),
        (_newer(rows), "version 2"),
    ):
        disk = copy_of(node.disk)
        other = disk.names[path]
        assert other is not None
        other.content[: PACK_HEADER.size] = head
        with pytest.raises(StorageFault, match=match):
            Node(1, TINY, disk)


def _newer(rows: bytes) -> bytes:
    from crc32c import crc32c

    head = bytearray(pack_header(rows, bytes(16)))
    head[7] = PACK_MAGIC[7] + 1
    head[32:36] = crc32c(bytes(head[:32])).to_bytes(4, "little")
    return bytes(head)


@pytest.mark.parametrize("seed", seeds(8))
def test_flipped_bits_in_packs_are_found_or_harmless(seed: int) -> None:
    node = Many(seed)
    for _ in range(500):
        node.step()
    emptied(node)
    node.run()
    rnd = node.random
    for path in pack_files(node):
        disk = copy_of(node.disk)
        inode = disk.names[path]
        assert inode is not None
        inode.content[rnd.randrange(len(inode.content))] ^= 1 << rnd.randrange(8)
        hurt = Many(seed, disk)
        assert len(damaged(hurt)) <= 1
        for group, log in hurt.storage.logs.items():
            for index in range(1, log.last_index + 1):
                try:
                    entry = log.entry(index)
                except (EntryGone, StorageFault):
                    continue
                assert (index, entry.term, entry.data) in node.models[group].ever


def test_a_directory_of_random_bytes_is_no_directory() -> None:
    disk = MemoryDirectory()
    rnd = Node(1).random
    from convoymq.logformat.identity import ClusterIds

    for size in (0, 8, 39, 40, 41, 79, 80, 81, 200, 5000):
        file = disk.open(f"p{size}", create=True)
        file.pwrite([rnd.randbytes(size)], 0)
        assert read_pack(file, ClusterIds()) is None


# That the tests above would notice.


def caught(node_of: Callable[[int], Node], seeds: int = 40) -> bool:
    """Whether the power loss test fails with one of the seeds."""
    for seed in range(seeds):
        node = node_of(seed)
        try:
            for _ in range(5):
                run_until_power_loss(node, 400, node.random.randint(60, 400))
                node.crash()
            node.run()
            node.check()
        except (AssertionError, KeyError, EntryGone, StorageFault):
            return True
    return False


def test_a_pack_whose_directory_is_not_synced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = MemoryDirectory.sync

    def planted(self: MemoryDirectory, path: str = "") -> None:
        if path != "packs":
            sync(self, path)

    monkeypatch.setattr(MemoryDirectory, "sync", planted)
    assert caught(Many)


def test_a_pack_that_is_removed_while_a_group_lives_in_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        packs.Packs, "_remove", _removes_too_early(packs.Packs._remove), raising=True
    )
    assert caught(Many)


def _removes_too_early(remove: Callable[..., None]) -> Callable[..., None]:
    def planted(self: packs.Packs, old: list[packs.Pack], done: Callable[..., None]) -> None:
        doomed = [*old, *[p for p in self.files.values() if len(p.sections) == 1]]
        for pack in doomed:
            pack.sections.clear()
        remove(self, list({p.number: p for p in doomed}.values()), done)

    return planted


def test_small_config_is_packed_too() -> None:
    assert SMALL.pack_below_bytes == RaftConfig().pack_below_bytes == 4096
