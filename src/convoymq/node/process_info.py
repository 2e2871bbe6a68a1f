"""Resources that this process uses of its machine: for lists of nodes and for metrics. Linux's
/proc."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from convoymq import __version__
from convoymq.broker.alarms import Watermarks
from convoymq.compiled_modules import build_text
from convoymq.kernels.flusher import Flusher
from convoymq.metadata.members import OwnPlace
from convoymq.model.config import Config
from convoymq.model.json import JsonObject
from convoymq.model.process import PAGE_BYTES, RESIDENT_PAGES, THREADS, process_stat
from convoymq.transport.processes import machine_key

_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))


def open_files() -> int:
    """Returns how many file descriptors are open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno not in _OUT_OF_FILES:
            raise
        # The listing itself needs one: none is left.
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@cache
def threads_max() -> int:
    """Returns how many threads the machine may have."""
    try:
        return int(Path("/proc/sys/kernel/threads-max").read_text())
    except OSError:
        return 0


def places_info(config: Config, data_directory: Path) -> JsonObject:
    """Returns where the node keeps what, under the names of RabbitMQ's HTTP API and tools."""
    place = data_directory.absolute()
    return {
        "db_dir": str(place),
        "raft_data_directory": str(place / "log"),
        "config_files": [config.file] if config.file else [],
        "log_files": [str(Path(config.log.file).absolute()) if config.log.file else "<stderr>"],
    }


def watermark_setting(config: Config, watermarks: Watermarks) -> JsonObject:
    """Returns the memory watermark as it was set: a share of the machine's memory, or bytes as an
    operator or the configuration gave them."""
    relative = config.alarms.memory_relative
    by_share = int(relative * watermarks.machine_memory)
    if not config.alarms.memory_absolute and watermarks.memory == by_share:
        return {"relative": relative}
    return {"absolute": watermarks.memory}


def process_info(
    data_directory: Path | None = None, watermarks: Watermarks | None = None
) -> JsonObject:
    """Returns memory, files, threads, disk and build under the names that the HTTP API uses; sizes
    in bytes. Its processes are threads here."""
    stat, used = process_stat(), resource.getrusage(resource.RUSAGE_SELF)
    info: JsonObject = {
        "os_pid": str(os.getpid()),
        "build": f"{__version__}, {build_text()}, Python {sys.version.split()[0]}",
        "mem_used": stat[RESIDENT_PAGES] * PAGE_BYTES,
        "mem_limit": watermarks.memory if watermarks is not None else 0,
        "fd_used": open_files(),
        "fd_total": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "proc_used": stat[THREADS],
        "proc_total": threads_max(),
        "processors": os.cpu_count() or 1,
        "run_queue": 0,
        "gc_num": sum(each["collections"] for each in gc.get_stats()),
        "context_switches": used.ru_nvcsw + used.ru_nivcsw,
        "disk_free_limit": watermarks.disk if watermarks is not None else 0,
    }
    if data_directory is not None:
        found = os.statvfs(data_directory)
        info["disk_free"] = found.f_bavail * found.f_frsize
    return info


def io_info(flusher: Flusher) -> JsonObject:
    """Returns reads of the process from disks, and writes of the write-ahead log, each of which is
    synced; times in microseconds."""
    writes = flusher.flush_count
    info: JsonObject = {
        "io_write_count": writes,
        "io_write_bytes": flusher.flushed_bytes,
        "io_sync_count": writes,
        "io_sync_time": flusher.flush_us,
    }
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        # Some sandboxes do not show it, and there may be no file descriptor.
        return info
    known = dict(line.split(": ", 1) for line in lines)
    return {**info, "io_read_bytes": int(known["read_bytes"])}


def place_of(config: Config) -> OwnPlace:
    """Returns where this node is; what fails together with it is by default its machine."""
    node = config.node
    return OwnPlace(config.cluster.zone or machine_key(), node.machine, node.process)


def node_info(
    config: Config, data_directory: Path, watermarks: Watermarks, flusher: Flusher
) -> Callable[[], JsonObject]:
    """Returns what collects the facts of a node that lists and metrics show."""
    places = places_info(config, data_directory)

    def collect() -> JsonObject:
        setting = watermark_setting(config, watermarks)
        live = process_info(data_directory, watermarks)
        return {**live, **io_info(flusher), **places, "vm_memory_high_watermark_setting": setting}

    return collect
