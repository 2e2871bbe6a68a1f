"""What a file leaves behind for the next one of its process is found, and can be forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.queues import driver
from convoymq.transport.frame_kinds import CONTROL_KINDS, FREE, control_kind
from tests.examples.queue_type.driver import RingDriver
from tests.patience import PATIENCE_S
from tests.process_state import changes, look, registries_restored


def test_what_was_registered_is_named_and_forgotten() -> None:
    before = look()
    with registries_restored():
        control_kind(FREE + 2, "left behind", "tests")
        driver.register(RingDriver())
        left = changes(before, look())
    assert {line.partition(":")[0] for line in left} == {
        "drivers of queue types",
        "rules of queue types",
        "kinds of CONTROL frames",
        "urgent kinds of CONTROL frames",
    }
    assert "drivers of queue types: ring" in left
    assert FREE + 2 not in CONTROL_KINDS
    assert changes(before, look()) == []


def test_changed_settings_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = look()
    monkeypatch.setenv("CONVOY_LEFT", "1")
    monkeypatch.chdir(tmp_path)
    left = changes(before, look())
    assert left == [
        f"working directory: {before['working directory']!r} became {tmp_path!r}",
        "environment: CONVOY_LEFT",
    ]


def test_a_file_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_left.py"
    file.write_text("import os\n\ndef test_it():\n    os.environ['CONVOY_LEFT'] = '1'\n")
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "this file leaves behind: environment: CONVOY_LEFT" in done.stdout
