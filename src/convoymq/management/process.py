"""What this process uses of its machine: for lists of nodes and for metrics. Linux's /proc."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_info(
    data_directory: Path | None = None, memory_limit: int = 0, disk_limit: int = 0
) -> dict[str, Any]:
    """Returns memory, files and disk under the names that the HTTP API uses; sizes in bytes."""
    statm = Path("/proc/self/statm").read_text().split()
    files = os.listdir("/proc/self/fd")
    info: dict[str, Any] = {
        "os_pid": str(os.getpid()),
        "mem_used": int(statm[1]) * PAGE_BYTES,
        "mem_limit": memory_limit,
        "fd_used": len(files),
        "fd_total": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "proc_used": 1,
        "proc_total": 1,
        "processors": os.cpu_count() or 1,
        "run_queue": 0,
        "disk_free_limit": disk_limit,
    }
    if data_directory is not None:
        found = os.statvfs(data_directory)
        info["disk_free"] = found.f_bavail * found.f_frsize
    return info
