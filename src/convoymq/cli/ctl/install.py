"""`convoy ctl --install-names DIR`: the tools under the names that runbooks call them by."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, UPGRADE
from convoymq.cli.ctl.failures import NO_PERMISSION, SOFTWARE

MARK = "# Made by `convoy ctl --install-names`."
LAUNCHERS = {
    "rabbitmqctl": CTL,
    "rabbitmq-queues": QUEUES,
    "rabbitmq-diagnostics": DIAGNOSTICS,
    "rabbitmq-upgrade": UPGRADE,
}


def install_names(directory: str) -> int:
    """Writes the launchers; returns the exit code. Files that it did not write stay as they are."""
    place = Path(directory)
    if not place.is_dir():
        what = "is not a directory" if place.exists() else "does not exist"
        print(f"convoy: {place} {what}: give a directory of the PATH", file=sys.stderr)
        return SOFTWARE
    foreign = [name for name in LAUNCHERS if _is_foreign(place / name)]
    if foreign:
        names = ", ".join(str(place / name) for name in foreign)
        print(f"convoy: not overwritten, because they are not launchers of convoy: {names}",
              file=sys.stderr)  # fmt: skip
        return SOFTWARE
    try:
        for name, tool in LAUNCHERS.items():
            _write(place / name, tool)
    except OSError as error:
        print(f"convoy: {error.filename}: {error.strerror}", file=sys.stderr)
        return NO_PERMISSION if isinstance(error, PermissionError) else SOFTWARE
    for name in LAUNCHERS:
        print(place / name)
    return 0


def _is_foreign(path: Path) -> bool:
    try:
        return MARK not in path.read_text(errors="replace")
    except FileNotFoundError:
        return path.is_symlink()
    except OSError:
        return True


def _write(path: Path, tool: str) -> None:
    text = (
        f'#!/bin/sh\n{MARK}\nexec "{sys.executable}" -m convoymq.cli {tool} '
        f'--script-name {path.name} "$@"\n'
    )
    fresh = path.with_name(f".{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o755), "w") as file:
        file.write(text)
    os.replace(fresh, path)
