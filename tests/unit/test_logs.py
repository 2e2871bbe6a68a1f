"""The log's file: rotated by name, readable by few."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from convoymq.logs import LogOutput


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    output = LogOutput(str(path))
    output.write("before\n")
    path.rename(tmp_path / "node.log.1")
    output.write("still there\n")
    output.reopen()
    output.write("after\n")
    assert (tmp_path / "node.log.1").read_text() == "before\nstill there\n"
    assert path.read_text() == "after\n"
    output.close()


def test_a_file_is_appended_to_and_not_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    for text in ("one\n", "two\n"):
        output = LogOutput(str(path))
        output.write(text)
        output.close()
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o007 == 0


def test_what_cannot_be_reopened_stays_in_use(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    output = LogOutput(str(directory / "node.log"))
    moved = directory.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        output.reopen()
    output.write("on\n")
    assert (moved / "node.log").read_text() == "on\n"
    output.close()


def test_standard_error_is_not_reopened(capsys: pytest.CaptureFixture[str]) -> None:
    output = LogOutput()
    output.reopen()
    output.write("x\n")
    output.flush()
    assert capsys.readouterr().err == "x\n"
    assert output.isatty() == sys.stderr.isatty()
