# cython: annotation_typing=False
"""Files of a classic queue's log that its writer makes, in the writer's thread."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from convoymq.logformat.segment import FilePlace
from convoymq.storage.types import Directory, File


class NewFile:
    """A file of a log, created by its first write, in the writer's thread. So a file that cannot be
    created is a write that failed, and is tried again with the next one."""

    def __init__(self, directory: Directory, folder: str, name: str, *, sync: bool) -> None:
        self.name = name
        self._directory = directory
        self._folder = folder
        self._sync = sync
        self._file: File | None = None
        self._unwanted = False
        #: Between the writer's thread and `give_up`.
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """The log is removed: the file must not be created any more."""
        with self._lock:
            self._unwanted = True

    def _begun(self) -> File:
        with self._lock:
            if self._file is None:
                if self._unwanted:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
                self._file = self._begin()
            return self._file

    def _begin(self) -> File:
        self._directory.make(self._folder)
        file = self._directory.open(self.name, create=True)
        try:
            if file.size():
                file.truncate(0)
            if self._sync:
                self._directory.sync(self._folder)
        except OSError:
            file.close()
            raise
        return file

    def _known(self) -> File:
        if self._file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
        return self._file

    def size(self) -> int:
        """See `File`."""
        return self._known().size()

    def pread(self, length: int, offset: int) -> bytes:
        """See `File`."""
        return self._known().pread(length, offset)

    def pwrite(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """See `File`."""
        self._begun().pwrite(buffers, offset)

    def truncate(self, length: int) -> None:
        """See `File`."""
        self._known().truncate(length)

    def sync(self) -> None:
        """See `File`."""
        if self._file is not None:
            self._file.sync()

    def place(self) -> FilePlace | None:
        """See `File`."""
        return self._known().place()

    def close(self) -> None:
        """See `File`."""
        if self._file is not None:
            self._file.close()


class Names:
    """Names in a log's folder, as a file: its `sync` makes removals durable."""

    def __init__(self, directory: Directory, folder: str) -> None:
        self._directory = directory
        self._folder = folder

    def pwrite(self, _buffers: Sequence[bytes | memoryview], _offset: int) -> None:
        """Nothing: a name was removed."""

    def sync(self) -> None:
        """See `Directory`."""
        self._directory.sync(self._folder)
