"""Imports modules while the process runs, for the first that needs them.

What most nodes do not use takes no memory on them that way. An import opens files, and fails in any
way when no descriptor is left: so a node keeps some for it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

DESCRIPTORS = 3
"""An import has a folder, a file of code and what it imports itself open at a time."""

_spare: list[int] = []


def reserve_descriptors() -> None:
    """Keeps descriptors for imports from now on; as many as there are."""
    with contextlib.suppress(OSError):
        while len(_spare) < DESCRIPTORS:
            _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def import_late(*names: str) -> None:
    """Imports modules, with the descriptors that were kept for it."""
    if all(name in sys.modules for name in names):
        return
    reserved = bool(_spare)
    while _spare:
        os.close(_spare.pop())
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        if reserved:
            reserve_descriptors()
