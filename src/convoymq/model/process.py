"""State of this process in Linux's /proc, by a file that is opened once: the watcher of memory has
to work when no file can be opened any more."""

from __future__ import annotations

import os
from functools import lru_cache

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STAT_BYTES_MAX = 4096
#: Places among the numbers of `process_stat`; proc(5) counts from 1 and with name and state.
THREADS, RESIDENT_PAGES = 20 - 4, 24 - 4


@lru_cache(maxsize=1)
def _stat_file(pid: int) -> int:
    return os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)


def process_stat() -> list[int]:
    """Returns the numbers of /proc/self/stat behind the state. Opens a file at the first call."""
    # By process id: a file that was opened before a fork tells of the parent.
    data = os.pread(_stat_file(os.getpid()), STAT_BYTES_MAX, 0)
    return [int(number) for number in data[data.rindex(b")") + 3 :].split()]


def resident_bytes() -> int:
    """Returns how much memory of this process is in RAM."""
    return process_stat()[RESIDENT_PAGES] * PAGE_BYTES
