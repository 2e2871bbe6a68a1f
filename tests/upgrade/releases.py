"""Earlier releases of this project, built from their commits beside the code under test.

Only the compiled kernels are built, and not for speed; the rest runs from source. The result stays
in `build/releases/COMMIT`.
"""

from __future__ import annotations

import fcntl
import filecmp
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "releases"
KERNELS = Path("src/convoymq/kernels")
BUILD = """
import sys
sys.path.insert(0, "tools")
import build
build.KERNEL_LEVEL = "-O0"
sys.exit(build.main(["convoymq.kernels"]))
"""
"""Builds kernels in a quarter of the time that their release takes for `-O2`."""

PREVIOUS = "90f418b18f263110771ba457e08ca03832224b2d"
"""The commit of 0.2.0, which rolling upgrades start from."""
NEWEST = "f31bcab9b4507c4addb3668f9a20f7c0791c3312"
"""The commit of 0.3.0, whose quorum queues have version 2."""


def source_of(commit: str) -> Path:
    """Returns the tree of a release, ready to run; skips where history does not have it."""
    tree = CACHE / commit
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (tree / ".built").exists():
            shutil.rmtree(tree, ignore_errors=True)
            _extract(commit, tree)
            _build(tree)
            (tree / ".built").touch()
    return tree


def _extract(commit: str, tree: Path) -> None:
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src", "tools", "setup.py", "pyproject.toml"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip(
            f"release {commit[:10]} is not in this checkout: {archive.stderr.decode()[:200]}"
        )
    tree.mkdir()
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as content:
        content.extractall(tree, filter="data")


def _build(tree: Path) -> None:
    if _same_kernels(tree):
        for built in (ROOT / KERNELS).glob("*.so"):
            shutil.copy(built, tree / KERNELS)
        return
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _same_kernels(tree: Path) -> bool:
    """Whether what is built here was built from the same sources."""

    def sources(root: Path) -> list[str]:
        return sorted(
            path.name for path in (root / KERNELS).iterdir() if path.suffix in (".py", ".pxd")
        )

    names = sources(tree)
    if names != sources(ROOT) or not any((ROOT / KERNELS).glob("*.so")):
        return False
    _, wrong, missing = filecmp.cmpfiles(tree / KERNELS, ROOT / KERNELS, names, shallow=False)
    return not wrong and not missing
