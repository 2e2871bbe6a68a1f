"""Faults of clusters of Raft groups: lost and damaged copies, changes of members and leaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from crc32c import crc32c

from convoymq.logformat.wal_file import BATCH_HEADER, BATCH_HEADER_BYTES, BATCH_MAGIC, FILE_HEADER
from convoymq.sim.faults import Injector
from convoymq.sim.group_node import GroupNode

if TYPE_CHECKING:
    from convoymq.sim.group_world import GroupWorld

PAGE_BYTES = 4096


def last_flush(data: bytes) -> int:
    """Returns where the last flush of a WAL file begins that another one preceded, 0 = there is
    none.

    One that a crash cut short in its first header does not count: nothing can be told from it.
    """
    needle = BATCH_MAGIC + data[8:16]
    at = data.rfind(needle)
    while at > FILE_HEADER.size:
        head = data[at : at + BATCH_HEADER_BYTES]
        if len(head) == BATCH_HEADER_BYTES:
            *_, position, _, checksum = BATCH_HEADER.unpack(head)
            if position == 0 and crc32c(head[:-4]) == checksum:
                return at
        at = data.rfind(needle, 0, at)
    return 0


class GroupInjector(Injector):
    """Injects faults into a `GroupWorld`."""

    world: GroupWorld

    def moments(self) -> dict[str, Callable[[], None]]:
        return {
            **super().moments(),
            "wipe": self._wipe,
            "rot": self._rot,
            "rot_page": self._rot_page,
            "lose_wal_file": self._lose_wal_file,
            "membership": self._membership,
            "transfer": self._transfer,
        }

    def _node(self) -> GroupNode | None:
        node = super()._node()
        assert node is None or isinstance(node, GroupNode)
        return node

    def _wipe(self) -> None:
        node = self._node()
        if node is not None and self.world.may_lose(node.number):
            self.world.trace.fault("wipe", node.name)
            self.world.crash(node, restart_us=self._outage_us(), keep=0.0, wipe=True)

    def _rot(self) -> None:
        node = self._node()
        if node is None or not self.world.may_lose(node.number):
            return
        disk = node.disk
        full = node.full_wal_files()
        able = []
        for name, inode in disk.names.items():
            if (
                inode is not None
                and len(inode.durable) > 64
                and (name in full or not name.startswith("wal/"))
            ):
                able.append(name)
        if not able:
            return
        path = self.world.scheduler.rng.choice(sorted(able))
        inode = disk.names[path]
        assert inode is not None
        offset = self.world.scheduler.between(0, len(inode.durable) - 1)
        bit = self.world.scheduler.between(0, 7)
        self.world.trace.fault("rot", node.name, f"{path} byte {offset} bit {bit}")
        self.world.excuse(node.number)
        disk.rot(path, offset, bit)

    def _rot_page(self) -> None:
        """Spoils a page of a WAL file, often with a batch's header and directory in it."""
        node = self._node()
        if node is None or not self.world.may_lose(node.number):
            return
        scheduler = self.world.scheduler
        full = node.full_wal_files()
        able = []
        for name, inode in sorted(node.disk.names.items()):
            if inode is None or not name.startswith("wal/") or not name.endswith(".wal"):
                continue
            # In the newest file a later flush must tell the damage from a torn end.
            end = len(inode.durable) if name in full else last_flush(bytes(inode.durable))
            if end > 0:
                able.append((name, end))
        if not able:
            return
        path, end = scheduler.rng.choice(able)
        start = scheduler.between(0, (end - 1) // PAGE_BYTES) * PAGE_BYTES
        if scheduler.chance(0.5):
            start = max(0, min(start + scheduler.between(0, PAGE_BYTES - 1), end - 1))
        length = min(PAGE_BYTES, end - start)
        self.world.trace.fault("rot_page", node.name, f"{path} bytes {start} to {start + length}")
        self.world.excuse(node.number)
        node.disk.spoil(path, start, length)

    def _lose_wal_file(self) -> None:
        node = self._node()
        if node is None or not self.world.may_lose(node.number):
            return
        self.world.excuse(node.number)
        self._down("lose_wal_file", node, keep=1.0)
        files = [name for name in sorted(node.disk.names) if name.endswith(".wal")]
        if files:
            path = self.world.scheduler.rng.choice(files)
            self.world.trace.add(node.name, f"{path} is gone")
            node.disk.lose(path)

    def _membership(self) -> None:
        groups = self.world.group_numbers()
        if groups:
            group = self.world.scheduler.rng.choice(groups)
            self.world.change_membership(group)

    def _transfer(self) -> None:
        node = self._node()
        if node is not None:
            for group in self.world.leads(node):
                if node.host.transfer_leadership(group):
                    self.world.trace.fault("transfer", node.name, f"group {group}")
