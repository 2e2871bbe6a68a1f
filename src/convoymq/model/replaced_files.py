"""Files that are replaced as a whole, durably."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file, or makes it: after a crash it is the old or the new one, and the new one
    once this returns.

    Args:
        mode: of a new file, before the umask.

    Raises OSError.
    """
    fresh = path.with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(fresh, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
