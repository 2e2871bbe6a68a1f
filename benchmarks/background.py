"""Runs a program so that it gets only the time of a core that nobody else wants.

A control group that is idle as a whole (`cpu.idle`, Linux 5.15) does it, as
`systemd-run --scope --property=CPUWeight=idle` makes one. The idle scheduling class alone ranks a
process below the others of its session only (sched_autogroup), so the kernel's workers and other
sessions still wait for it; it is what remains where no control group may be made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

EMPTY_DEADLINE_S = 10.0
EMPTY_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Background:
    """How a program is run; `command` goes before its own."""

    command: tuple[str, ...]
    idle_group: bool


IDLE_CLASS = Background(("chrt", "--idle", "0"), False)


@contextmanager
def background(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> Iterator[Background]:
    """A way to run programs in the background; at the end they must have been stopped."""
    parents = _parents(membership.read_text(), mounts.read_text())
    group = next(filter(None, map(_idle_group, parents)), None)
    if group is None:
        yield IDLE_CLASS
        return
    # Whoever joins is a shell that then becomes the program.
    join = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    try:
        yield Background(("sh", "-c", join, "sh"), True)
    finally:
        _remove(group)


def _idle_group(parent: Path) -> Path | None:
    group = parent / f"convoy-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        # Without the controller the file is not there and can't be made.
        (group / "cpu.idle").write_text("1")
    except OSError:
        group.rmdir()
        return None
    return group


def _parents(membership: str, mounts: str) -> Iterator[Path]:
    """Directories in which this process may find the cpu controller, version 1 before 2."""
    own = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path.lstrip("/")
    for line in mounts.splitlines():
        before, after = line.split(" - ")
        kind, _, options = after.split()[:3]
        place = Path(before.split()[4])
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            yield place / own["cpu"]
        if kind == "cgroup2" and "" in own:
            # A group of version 2 that has processes can't have groups with controllers.
            yield (place / own[""]).parent if own[""] else place


def _remove(group: Path) -> None:
    deadline = time.monotonic() + EMPTY_DEADLINE_S
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(EMPTY_POLL_S)
