"""The archive of classes makes tests faster; a test that goes without it is as green."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.spark.java import JavaMissing, java_home
from tests.spark import quick_start


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What makes the archive, in a directory of this test's own."""
    try:
        java_home()
    except JavaMissing as error:
        pytest.skip(str(error))
    made = tmp_path / "program.py"
    monkeypatch.setattr(quick_start, "PROGRAM", made)
    monkeypatch.setattr(quick_start, "DIRECTORY", tmp_path / "archives")
    return made


@pytest.mark.parametrize(
    "text", ["raise SystemExit('broken')", "import time; time.sleep(1000)", ""]
)
def test_sparks_start_without_an_archive_that_could_not_be_made(
    program: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick_start, "PATIENCE_S", 1.0 if "sleep" in text else 60.0)
    program.write_text(text)
    made = quick_start._archive.__wrapped__
    assert made(("-Xlog:disable",)) == ()
    assert "without an archive" in capsys.readouterr().err
    # Every process of the tests asks: only the first one tries.
    assert made(("-Xlog:disable",)) == ()
    assert capsys.readouterr().err == ""
