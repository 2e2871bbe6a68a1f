"""CPU time and memory of broker processes, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of a measured window."""

    broker_cpu_s: float
    broker_rss_bytes: int
    client_cpu_s: float
    other_cpu_s: float


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process so far, in seconds; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def machine_cpu_seconds() -> float:
    """Busy time of all cores since boot, in seconds."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) * _TICK_S


class BrokerProcesses:
    """Meters the given processes between `start` and `stop`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._begin: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._own = (0.0, 0.0)
        self._machine = (0.0, 0.0)
        self._rss = 0

    def _own_cpu(self) -> float:
        times = os.times()
        return times.user + times.system

    def start(self) -> None:
        """Begins the window."""
        self._begin = {pid: cpu_seconds(pid) or 0.0 for pid in self._pids}
        self._last = dict(self._begin)
        self._own = (self._own_cpu(), 0.0)
        self._machine = (machine_cpu_seconds(), 0.0)

    def mark(self) -> None:
        """Remembers what was used so far, for processes that are about to be killed."""
        for pid in self._pids:
            used = cpu_seconds(pid)
            if used is not None:
                self._last[pid] = used

    def stop(self) -> None:
        """Ends the window."""
        self.mark()
        self._own = (self._own[0], self._own_cpu())
        self._machine = (self._machine[0], machine_cpu_seconds())
        self._rss = sum(resident_bytes(pid) for pid in self._pids)

    def usage(self) -> Usage:
        """Returns the cost of the window."""
        broker = sum(self._last.get(pid, 0.0) - self._begin.get(pid, 0.0) for pid in self._pids)
        client = max(0.0, self._own[1] - self._own[0])
        machine = max(0.0, self._machine[1] - self._machine[0])
        return Usage(broker, self._rss, client, max(0.0, machine - broker - client))
