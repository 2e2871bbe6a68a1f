"""Modules are imported late, also when no descriptor is left."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

CODE = """
import os, resource, sys
from convoymq.model.late_imports import import_late, reserve_descriptors
import convoymq.broker.drivers

NAMES = ("convoymq.queues.quorum.queue", "convoymq.queues.stream.queue")
assert not set(NAMES) & set(sys.modules)
if sys.argv[1] == "reserve":
    reserve_descriptors()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
import_late(*NAMES)
print(set(NAMES) <= set(sys.modules))
try:
    os.open(os.devnull, os.O_RDONLY)
except OSError:
    print("still none left")
"""


def run(mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, mode], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_handle_is_imported_without_a_descriptor_left() -> None:
    done = run("reserve")
    assert done.stdout.split("\n")[:2] == ["True", "still none left"]


def test_without_kept_descriptors_it_is_not() -> None:
    done = run("none")
    assert done.returncode != 0
    assert "Too many open files" in done.stderr
