"""Check whether a process of this machine is known to be gone.

A refused connection proves nothing: a firewall refuses, a process that listens no more may still
run, and so may the one behind another address. A process is known to be gone when it ran on this
machine, was once seen running here under its process number and start time, and is not any more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

READ_MAX = 4096


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and the machine on which it runs."""

    machine: str = ""
    """Same machine, same boot, same process namespace; empty = not known."""
    pid: int = 0
    started: int = 0
    """Start time in clock ticks since the machine started."""


ReadStart = Callable[[int], int]
"""Returns the start time of a process that runs; 0 when there is none, or none to be seen."""


def read_start(pid: int) -> int:
    """Returns when a running process was started, in clock ticks; 0 when it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()[:READ_MAX]
    except OSError:
        return 0
    # The name in parentheses may hold anything.
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X", b"x"):
        return 0
    return int(fields[19])


def machine_key() -> str:
    """Returns what processes that can see each other's numbers have in common; "" = not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        namespace = os.readlink("/proc/self/ns/pid").encode()
    except OSError:
        return ""
    try:
        machine = Path("/etc/machine-id").read_bytes().strip()
    except OSError:
        # Containers often have none; boot and namespace are enough.
        machine = b""
    return hashlib.sha256(b"\0".join((machine, boot, namespace))).hexdigest()[:32]


def own_process() -> ProcessId:
    """Returns this process as others may look for it."""
    pid = os.getpid()
    started = read_start(pid)
    machine = machine_key() if started else ""
    return ProcessId(machine, pid, started) if machine else ProcessId()


class ProcessWatch:
    """Decides whether one peer's process is gone, from what the machine says of it.

    Args:
        own, peer: this process and the peer's.
        read: tells when a process was started.
    """

    def __init__(self, own: ProcessId, peer: ProcessId, read: ReadStart = read_start) -> None:
        self._peer = peer
        self._read = read
        # Where the system hides other users' processes, absence says nothing.
        self.sees = bool(own.machine) and own.machine == peer.machine and self._runs()

    def is_gone(self) -> bool:
        """Returns True when the process was seen and does not run any more."""
        return self.sees and not self._runs()

    def _runs(self) -> bool:
        return self._peer.started > 0 and self._read(self._peer.pid) == self._peer.started
