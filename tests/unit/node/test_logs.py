"""The log's file: rotated by name, readable by few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.node.logs import EXIT_FAULT, LogOutput
from tests.patience import PATIENCE_S
from tests.provocation import Observed


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


NOISE = """
import logging, sys, threading, warnings
from pathlib import Path
from convoymq.node.logs import set_up
from convoymq.model.config import LogConfig

set_up(LogConfig(file=sys.argv[1], format="json"))
logging.getLogger("some.library").warning("said %s", "so")
logging.getLogger("some.library").info("not said")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Bad:
    def __del__(self):
        raise ValueError("never seen")
Bad()
"""


@pytest.mark.provokes("log.library_message")
def test_what_libraries_and_python_say_are_lines_of_the_log(
    tmp_path: Path, observed: Observed
) -> None:
    path = tmp_path / "node.log"
    done = subprocess.run(
        [sys.executable, "-c", NOISE, path], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == [*["log.library_message"] * 2, *["node.fault"] * 2]
    assert (rows[0]["library"], rows[0]["text"]) == ("some.library", "said so")
    assert "old" in rows[1]["text"]
    assert "ZeroDivisionError" in rows[2]["exception"]
    assert "never seen" in rows[3]["exception"]
    observed.log_files(tmp_path)


VIOLATED = """
import sys, threading, time
from convoymq.node.logs import set_up
from convoymq.model.config import LogConfig
from convoymq.model.errors import InvariantViolated

set_up(LogConfig(file=sys.argv[1], format="json"))

def broken():
    try:
        raise InvariantViolated("the term fell")
    except Exception:
        pass

threading.Thread(target=broken).start()
time.sleep(600)
"""


def test_a_violated_invariant_in_a_thread_ends_the_process_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    done = subprocess.run(
        [sys.executable, "-c", VIOLATED, path], capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == EXIT_FAULT
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["event"], row["message"]) == ("node.fault", "thread")
    assert "the term fell" in row["exception"]
