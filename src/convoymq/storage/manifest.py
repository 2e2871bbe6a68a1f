"""Manifest: the WAL files that must exist (format: docs/formats/storage.md)."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Iterable

from crc32c import crc32c

from convoymq.logformat.identity import ClusterIds, check_version
from convoymq.storage.types import Directory, File

MANIFEST_NAME = "wal/manifest"
MANIFEST_NAMES = (MANIFEST_NAME, "wal/manifest.copy")
"""The same twice, written one after the other, in place: a full disk must not keep files from
going."""
MANIFEST_MAGIC = b"CVYWALM\x01"
SLOT = struct.Struct("<8sQ16sII")
"""magic+version, counter, cluster id, count of generations, spare. They follow (8 bytes each), and
the crc32c of all that."""
FILES_MAX = 1 << 24


class Manifest:
    """Generations of the WAL files that must exist.

    A file is named before anything in it is reported as written, and no longer named before it is
    removed. Used by the loop and by the worker. Methods that write raise OSError.
    """

    def __init__(self, directory: Directory, clusters: ClusterIds) -> None:
        self._directory = directory
        self._clusters = clusters
        self._lock = threading.Lock()
        self._counter = 0
        self._exists = False
        self.files: tuple[int, ...] = ()
        """In order."""
        self.held = True
        """True until `begin`: what recovery found missing must first be written to the log."""

    def load(self) -> str:
        """Reads it; returns why it cannot be read, or "". Raises StorageFault: it is of another
        cluster or version."""
        present = [name for name in MANIFEST_NAMES if self._directory.exists(name)]
        self._exists = len(present) == len(MANIFEST_NAMES)
        slots = []
        for name in present:
            slot = _read(self._directory.open(name))
            if slot is not None:
                slots.append(slot)
        if not slots:
            return "the manifest cannot be read" if present else "the manifest is missing"
        self._counter, cluster, self.files = max(slots)
        self._clusters.check(cluster, MANIFEST_NAME)
        return ""

    def begin(self, generations: Iterable[int]) -> None:
        """Names the files after recovery."""
        with self._lock:
            self._write(tuple(sorted(generations)))
            self.held = False

    def add(self, generation: int) -> None:
        """The file of that generation exists and may be used."""
        with self._lock:
            if generation not in self.files and not self.held:
                self._write(tuple(sorted((*self.files, generation))))

    def drop(self, generation: int) -> None:
        """The file of that generation holds nothing that is needed: it may go."""
        with self._lock:
            if generation in self.files:
                self._write(tuple(other for other in self.files if other != generation))

    def drop_through(self, generation: int) -> None:
        """Files up to that generation hold nothing that is needed. Those before it are named still
        where the disk refused when they were released."""
        with self._lock:
            left = tuple(other for other in self.files if other > generation)
            if left != self.files:
                self._write(left)

    def _write(self, files: tuple[int, ...]) -> None:
        self._counter += 1
        head = SLOT.pack(MANIFEST_MAGIC, self._counter, self._clusters.current, len(files), 0)
        head += array("Q", files).tobytes()
        slot = head + struct.pack("<II", crc32c(head), 0)
        for name in MANIFEST_NAMES:
            file = self._directory.open(name, create=True)
            file.pwrite([slot], 0)
            file.sync()
            file.close()
        if not self._exists:
            self._directory.sync("wal")
            self._exists = True
        self.files = files


def _read(file: File) -> tuple[int, bytes, tuple[int, ...]] | None:
    head = file.pread(SLOT.size, 0)
    if len(head) < SLOT.size:
        return None
    magic, counter, cluster, count, _ = SLOT.unpack(head)
    if magic[:7] != MANIFEST_MAGIC[:7] or count > FILES_MAX:
        return None
    body = file.pread(8 * count + 4, SLOT.size)
    file.close()
    if len(body) < 8 * count + 4:
        return None
    if crc32c(head + body[:-4]) != int.from_bytes(body[-4:], "little"):
        return None
    check_version(magic, MANIFEST_MAGIC, MANIFEST_NAME)
    return counter, cluster, tuple(array("Q", body[:-4]))
