"""Requirements of a node on its machine: open files, memory, room on the disk, a clock.

A node looks before it starts, and `convoy up` and `convoy doctor` do. A node that starts with too
little of something says so and serves: after a full disk it has to. Only a clock that cannot be
right ends it, since its time would be in the log for ever.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

OPEN_FILES_LOW = 4096
MEMORY_LOW_BYTES = 512 << 20
DISK_LOW_BYTES = 4 << 30
YEAR_MIN = 2025
"""A clock that is not set says 1970, or the year of its firmware."""
OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `level` is ok, warning or error."""

    check: str
    level: str
    text: str

    def row(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def machine_findings(data: Path, disk_limit: int = DISK_LOW_BYTES) -> list[Finding]:
    """Runs all checks.

    Args:
        data: directory of the data, which need not exist.
        disk_limit: bytes that should be free there.
    """
    return [_open_files(), _memory(), _disk(data, disk_limit), _clock()]


def raise_open_files() -> None:
    """Raises the soft limit of open files to the hard one, where it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES_LOW and (hard == resource.RLIM_INFINITY or hard > soft):
        wanted = OPEN_FILES_LOW if hard == resource.RLIM_INFINITY else hard
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (may be raised to {hard}); connections and log files count"
    return Finding("open files", OK if soft >= OPEN_FILES_LOW else WARNING, text)


def _memory() -> Finding:
    size = machine_memory_bytes()
    level = OK if size >= MEMORY_LOW_BYTES else WARNING
    return Finding("memory", level, f"{size >> 20} MiB for this process")


def _disk(data: Path, limit: int) -> Finding:
    place = data.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding("disk", ERROR, f"{place} cannot be written")
    free = free_disk_bytes(place)
    text = f"{free >> 20} MiB in {place}"
    if free <= limit:
        return Finding("disk space", WARNING, f"{text}; {limit >> 20} MiB should be free")
    return Finding("disk space", OK, text)


def _clock() -> Finding:
    now = time.gmtime()
    if now.tm_year < YEAR_MIN:
        text = f"it says {now.tm_year}, which cannot be: set it, and keep it by NTP"
        return Finding("clock", ERROR, text)
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown"
    resolution = time.clock_getres(time.CLOCK_MONOTONIC)
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S', now)} UTC, source {name}, {resolution:g} s"
    return Finding("clock", OK, text)


def free_disk_bytes(path: Path) -> int:
    """Room for unprivileged writers where `path` lies."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def machine_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its cgroup's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total
