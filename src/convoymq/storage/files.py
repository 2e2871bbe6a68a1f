"""Files as storage sees them: the real ones, and plain ones in memory that can lose power.

The protocols are in `types`. `MemoryDirectory` keeps, beside what a reader sees, what would survive
a power failure: content since the last `sync` of a file and names since the last `sync` of a
directory are lost or kept sector by sector, name by name, as a source of randomness decides.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from convoymq.logformat.segment import FilePlace
from convoymq.model.late_imports import import_late

IOV_MAX = 1024
SECTOR_BYTES = 512
CAPACITY_MAX = 1 << 40
"""Of a disk in memory: no bound."""


class RealFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "_path", "name")

    def __init__(self, path: str, name: str, *, create: bool) -> None:
        self._fd = -1
        self._path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o600)
        self.name = name

    def fileno(self) -> int:
        """Returns the descriptor, -1 when closed."""
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        have = len(data)
        while have < length:
            data = os.pread(self._fd, length - have, offset + have)
            if not data:
                break
            parts.append(data)
            have += len(data)
        return b"".join(parts)

    def pwrite(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        for start in range(0, len(buffers), IOV_MAX):
            views: list[bytes | memoryview] = list(buffers[start : start + IOV_MAX])
            while views:
                written = os.pwritev(self._fd, views, offset)
                offset += written
                while views and written >= len(views[0]):
                    written -= len(views[0])
                    del views[0]
                if written:
                    views[0] = memoryview(views[0])[written:]

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def place(self) -> FilePlace:
        found = os.fstat(self._fd)
        return FilePlace(os.path.abspath(self._path), found.st_dev, found.st_ino)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Readers may still hold a file that was replaced; the last one closes it.
        self.close()


class RealDirectory:
    """A directory of the operating system, created when it does not exist."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _at(self, path: str) -> str:
        # `Path` would take longer than the system call.
        return f"{self.path}/{path}" if path else str(self.path)

    def list(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    def make(self, path: str) -> None:
        made = self._at(path)
        if os.path.isdir(made):
            return
        os.makedirs(made, exist_ok=True)
        parts = path.split("/")
        for depth in range(len(parts)):
            self.sync("/".join(parts[:depth]))

    def open(self, path: str, *, create: bool = False) -> RealFile:
        return RealFile(self._at(path), path, create=create)

    def remove(self, path: str) -> None:
        name = self._at(path)
        try:
            os.unlink(name)
        except IsADirectoryError:
            # Rare, and takes the libraries of archives with it.
            import shutil

            shutil.rmtree(name, ignore_errors=True)
        except FileNotFoundError:
            pass

    def rename(self, old: str, new: str) -> None:
        os.replace(self._at(old), self._at(new))

    def sync(self, path: str = "") -> None:
        self._sync(path, os.fsync)

    def sync_all(self) -> None:
        self._sync("", _sync_file_system)

    def _sync(self, path: str, sync: Callable[[int], None]) -> None:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(fd)
        finally:
            os.close(fd)


def _sync_file_system(fd: int) -> None:
    """Writes out the file system of an open file. Raises OSError."""
    import_late("ctypes")
    import ctypes

    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(fd):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class MemoryInode:
    """Content of a file in memory: as read, as durable, and the writes between the two."""

    __slots__ = ("content", "durable", "pending")

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """(offset, bytes) of a write, (length, None) of a truncation."""

    def write(self, offset: int, data: bytes) -> None:
        """Changes what readers see."""
        _place(self.content, offset, data)
        self.pending.append((offset, data))

    def truncate(self, length: int) -> None:
        """Changes what readers see."""
        _resize(self.content, length)
        self.pending.append((length, None))

    def sync(self) -> None:
        """Everything written so far survives a crash."""
        if self.pending:
            for offset, data in self.pending:
                if data is None:
                    _resize(self.durable, offset)
                else:
                    _place(self.durable, offset, data)
            self.pending.clear()

    def crash(self, keep: Callable[[], bool]) -> None:
        """Loses power: each sector of each write since the last sync is kept or lost."""
        for offset, data in self.pending:
            if data is None:
                if keep():
                    _resize(self.durable, offset)
                continue
            at = 0
            while at < len(data):
                step = min(SECTOR_BYTES - (offset + at) % SECTOR_BYTES, len(data) - at)
                if keep():
                    _place(self.durable, offset + at, data[at : at + step])
                at += step
        self.pending.clear()
        self.content = bytearray(self.durable)


def _resize(data: bytearray, length: int) -> None:
    if length < len(data):
        del data[length:]
    else:
        data.extend(bytes(length - len(data)))


def _place(data: bytearray, offset: int, piece: bytes) -> None:
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece


class MemoryFile:
    """An open file of a `MemoryDirectory`."""

    __slots__ = ("disk", "inode", "name")

    def __init__(self, disk: MemoryDirectory, inode: MemoryInode, name: str) -> None:
        self.disk = disk
        self.inode = inode
        self.name = name

    def size(self) -> int:
        return len(self.inode.content)

    def pread(self, length: int, offset: int) -> bytes:
        self.disk.on_operation("pread", self.name)
        return bytes(self.inode.content[offset : offset + length])

    def pwrite(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        self.disk.on_operation("pwrite", self.name)
        data = b"".join(buffers)
        self.disk.reserve(self.name, offset + len(data) - len(self.inode.content))
        self.inode.write(offset, data)

    def truncate(self, length: int) -> None:
        self.disk.on_operation("truncate", self.name)
        self.disk.reserve(self.name, length - len(self.inode.content))
        self.inode.truncate(length)

    def sync(self) -> None:
        self.disk.on_operation("sync", self.name)
        self.inode.sync()

    def place(self) -> None:
        return None

    def close(self) -> None:
        pass


class _NameChange:
    """A creation (no old name), a removal (no new name) or a renaming that is not durable yet."""

    __slots__ = ("inode", "new", "old")

    def __init__(self, old: str, new: str, inode: MemoryInode | None) -> None:
        self.old = old
        self.new = new
        self.inode = inode

    def carry_out(self, names: dict[str, MemoryInode | None]) -> None:
        """Changes the names."""
        if self.old and (not self.new or names.get(self.old) is self.inode):
            names.pop(self.old, None)
        if self.new:
            names[self.new] = self.inode


class MemoryDirectory:
    """A disk in memory. `capacity` bounds the sum of all file sizes, in bytes."""

    def __init__(self, capacity: int = CAPACITY_MAX) -> None:
        self.capacity = capacity
        self.names: dict[str, MemoryInode | None] = {}
        """Path -> inode, None for a directory."""
        self._changes: list[_NameChange] = []
        self.durable_names: dict[str, MemoryInode | None] = {}
        self.operation: Callable[[str, str], None] | None = None
        """Called with (operation, path) before each one; may raise to inject a fault."""

    def on_operation(self, operation: str, path: str) -> None:
        """Gives the hook its turn."""
        if self.operation is not None:
            self.operation(operation, path)

    def used_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(len(i.content) for i in self.names.values() if i is not None)

    def reserve(self, path: str, growth: int) -> None:
        """Raises ENOSPC when a file cannot grow by that much."""
        if (
            growth > 0
            and self.capacity < CAPACITY_MAX
            and self.used_bytes() + growth > self.capacity
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def crash(self, keep: Callable[[], bool]) -> None:
        """Loses power. `keep()` decides for each unsynced sector and each unsynced name change.
        A rename happens whole or not at all.

        Files opened before are of no use afterwards.
        """
        names = self.durable_names
        for change in self._changes:
            if keep():
                change.carry_out(names)
        self._changes = []
        for name in sorted(names):
            # What lies in a directory goes with it.
            if "/" in name and name.rpartition("/")[0] not in names:
                del names[name]
        for inode in {id(i): i for i in names.values() if i is not None}.values():
            inode.crash(keep)
        self.names = names
        self.durable_names = dict(names)

    def list(self, path: str = "") -> list[str]:
        start = path + "/" if path else ""
        return sorted(
            name[len(start) :]
            for name in self.names
            if name.startswith(start) and "/" not in name[len(start) :]
        )

    def exists(self, path: str) -> bool:
        return path in self.names

    def make(self, path: str) -> None:
        self.on_operation("make", path)
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            if name not in self.names:
                # A removal that waits is of the directory that was here before.
                self._make_durable("/".join(parts[: depth - 1]))
                self.names[name] = self.durable_names[name] = None

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        inode = self.names.get(path)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self.on_operation("create", path)
            inode = self.names[path] = MemoryInode()
            self._changes.append(_NameChange("", path, inode))
        return MemoryFile(self, inode, path)

    def remove(self, path: str) -> None:
        self.on_operation("remove", path)
        for name in [n for n in self.names if n == path or n.startswith(path + "/")]:
            del self.names[name]
            self._changes.append(_NameChange(name, "", None))

    def rename(self, old: str, new: str) -> None:
        self.on_operation("rename", old)
        inode = self.names[new] = self.names.pop(old)
        self._changes.append(_NameChange(old, new, inode))

    def sync_all(self) -> None:
        self.on_operation("sync", "")
        for inode in self.names.values():
            if inode is not None:
                inode.sync()
        self.durable_names = dict(self.names)
        self._changes = []

    def sync(self, path: str = "") -> None:
        self.on_operation("sync", path)
        self._make_durable(path)

    def _make_durable(self, path: str) -> None:
        start = path + "/" if path else ""

        def inside(name: str) -> bool:
            return name.startswith(start) and "/" not in name[len(start) :]

        removed = tuple(c.old + "/" for c in self._changes if not c.new and inside(c.old))
        later = []
        for change in self._changes:
            name = change.new or change.old
            if inside(name) or (removed and name.startswith(removed)):
                change.carry_out(self.durable_names)
            else:
                later.append(change)
        self._changes = later
