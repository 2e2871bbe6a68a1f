"""Memory and disk of the machine, and the alarms that block publishers when they run low."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time

import structlog

from convoymq.broker.alarms import Watermarks
from convoymq.broker.facade import Broker
from convoymq.kernels.sockets import free_heap_bytes, trim_malloc
from convoymq.model.config import Config
from convoymq.model.machine_checks import free_disk_bytes, machine_memory_bytes
from convoymq.model.process import resident_bytes

FREE_HEAP_MAX = 48 << 20
HEAP_SHARE = 0.002
"""So much of the processor goes into counting the unused bytes of the heap at most."""


class ResourceWatch:
    """Looks at memory and disk from time to time, and sets the broker's alarms.

    Args:
        path: where the node keeps its data.
        watermarks: where the alarms begin; looked at every time.
        is_storage_blocked: whether the log cannot be written.
    """

    def __init__(
        self,
        *,
        config: Config,
        broker: Broker,
        path: Path,
        watermarks: Watermarks,
        is_storage_blocked: Callable[[], bool],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.watermarks = watermarks
        self._alarms = config.alarms
        self._broker = broker
        self._path = path
        self._is_storage_blocked = is_storage_blocked
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._free_before = 0
        self._trims_at = 0.0
        self._on: set[str] = set()

    def look(self) -> None:
        """Looks now, and again after the configured interval."""
        self.stop()
        self._timer = self._loop.call_later(self._alarms.interval_ms / 1000, self.look)
        used = resident_bytes()
        if perf_counter() >= self._trims_at:
            self._trim_heap()
        limit = self.watermarks.memory
        self._alarm("memory", used > limit, used=used, limit=limit)
        room = free_disk_bytes(self._path)
        limit = self.watermarks.disk
        self._alarm("disk", room < limit or self._is_storage_blocked(), free=room, limit=limit)

    def _trim_heap(self) -> None:
        """Gives memory back that was unused for a whole interval: that of a drained backlog, not of
        the ebb of a busy round. To count it takes long where a large heap is fragmented."""
        began = thread_time()
        free_heap = free_heap_bytes()
        if min(free_heap, self._free_before) > FREE_HEAP_MAX:
            trim_malloc()
            free_heap = 0
        self._free_before = free_heap
        self._trims_at = perf_counter() + (thread_time() - began) / HEAP_SHARE

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _alarm(self, name: str, on: bool, **facts: int) -> None:
        if on == (name in self._on):
            return
        (self._on.add if on else self._on.discard)(name)
        log = self._log.warning if on else self._log.info
        log("alarm.memory" if name == "memory" else "alarm.disk", on=on, **facts)
        self._broker.alarms.set(name, on)


def watermarks(config: Config) -> Watermarks:
    """Returns the thresholds of the alarms by the configuration."""
    return Watermarks(memory_limit(config), config.alarms.disk_absolute, machine_memory_bytes())


def memory_limit(config: Config) -> int:
    """Returns the number of bytes above which publishers are blocked."""
    alarms = config.alarms
    return alarms.memory_absolute or int(alarms.memory_relative * machine_memory_bytes())
