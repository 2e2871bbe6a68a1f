"""`convoy pipeline`, as far as it goes without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoymq.cli import pipeline
from convoymq.cli.pipeline import pipeline_app


def test_what_cannot_be_audited_is_said_before_spark_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert "there is no such file or directory" in result.output
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path)])
    assert result.exit_code == 2
    assert "no segment of a trace" in result.output


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None if name == "numpy" else object())
    result = CliRunner().invoke(pipeline_app, ["audit", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'convoymq[audit]'" in result.output
