"""Loads the cores from their Python source although they are compiled too.

The Raft core, the replica and the queue machines are ordinary Python without pointers: the same
file runs both ways, and has to give the same run. The kernels exist compiled only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = "convoymq."
COMPILED_ONLY = "convoymq.kernels."


class _SourceFinder:
    """Finds our modules by their .py file, before anybody looks for a shared object."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module of ours outside the kernels."""
        if not fullname.startswith(PACKAGE) or fullname.startswith(COMPILED_ONLY) or not path:
            return None
        for folder in path:
            source = Path(folder) / (fullname.rpartition(".")[2] + ".py")
            if source.exists():
                loader = importlib.machinery.SourceFileLoader(fullname, str(source))
                return importlib.util.spec_from_file_location(fullname, source, loader=loader)
        return None


def use_source() -> None:
    """From now on modules are loaded from source. Call before they are imported.

    Raises RuntimeError when one of them is loaded already.
    """
    for name in ("convoymq.queues.quorum.machine", "convoymq.replication.raft.core"):
        if name in sys.modules:
            raise RuntimeError(f"{name} is loaded already")
    sys.meta_path.insert(0, _SourceFinder)
