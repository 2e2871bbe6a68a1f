"""Modules are imported late, also when no descriptor is left."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, resource, sys
from convoymq.model.late_imports import import_late, reserve_descriptors
import convoymq.queues.drivers
from convoymq.queues.driver import group_driver_of

assert "convoymq.queues.stream.machine" not in sys.modules
assert "convoymq.queues.quorum.machine" not in sys.modules
if sys.argv[1] == "reserve":
    reserve_descriptors()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for name in ("quorum", "stream"):
    print(type(group_driver_of(name).make_machine({})).__name__)
try:
    os.open(os.devnull, os.O_RDONLY)
except OSError:
    print("still none left")
"""


def run(mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, mode], capture_output=True, text=True, timeout=60
    )


def test_a_machine_is_imported_without_a_descriptor_left() -> None:
    done = run("reserve")
    assert done.stdout.split("\n")[:3] == ["QuorumMachine", "StreamMachine", "still none left"]


def test_without_kept_descriptors_it_is_not() -> None:
    done = run("none")
    assert done.returncode != 0
    assert "QuorumMachine" not in done.stdout
