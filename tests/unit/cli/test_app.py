"""The command line: formats, exit codes, lazy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoymq.cli.app import _versions_text, app
from convoymq.cli.doctor import run as run_checks
from convoymq.cli.serve import main as serve
from convoymq.model import config

RUNNER = CliRunner()


def test_status_without_a_cluster_says_how_to_start_one(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["status", "--data", str(tmp_path), "--format", "json"])
    assert result.exit_code == 1
    assert "convoy up" in result.stderr


def test_config_reference_is_the_page_and_config_is_json() -> None:
    assert RUNNER.invoke(app, ["config", "--reference"]).stdout == config.reference()
    found = json.loads(RUNNER.invoke(app, ["config", "--format", "json"]).stdout)
    assert found["raft"]["segment_max_entries"] == "4096"
    assert found["defaults"]["password"] == "(hidden)"


def test_doctor_reports_every_check_as_json(tmp_path: Path) -> None:
    arguments = ["doctor", "--data", str(tmp_path), "--base-port", "53500", "--format", "json"]
    result = RUNNER.invoke(app, arguments)
    found = {row["check"]: row for row in json.loads(result.stdout)}
    assert {"python", "kernels", "compiler", "java", "ports", "open files", "clock"} <= set(found)
    assert {"disk space", "disk flush", "memory"} <= set(found)
    assert all(row["level"] in ("ok", "warning", "error") for row in found.values())


def test_doctor_finds_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    levels = {f.check: f.level for f in run_checks(tmp_path / "a" / "b", 65_534, 3)}
    assert levels["ports"] == "error"
    assert levels["disk space"] in ("ok", "warning")


def test_node_checks_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "convoy.conf"
    file.write_text("node.id = 2\n")
    assert serve(["--config", str(file), "--check"]) == 0
    assert serve(["--config", str(file), "--set", "node.idd=3", "--check"]) == 2
    assert "did you mean node.id" in capsys.readouterr().err
    assert serve(["--set", "broken", "--check"]) == 2


def test_a_node_does_not_import_the_command_line_libraries() -> None:
    code = "import sys, convoymq.cli.serve, convoymq.model.config; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "rich", "click", "asyncio"} & set(done.stdout.split())


def test_versions_in_force_and_supported_fit_into_a_cell() -> None:
    assert _versions_text(None) is None
    assert (
        _versions_text(
            {
                "metadata": {"oldest": 1, "newest": 1, "in_force_min": 1, "in_force_max": 1},
                "quorum": {"oldest": 1, "newest": 3, "in_force_min": 1, "in_force_max": 2},
                "stream": {"oldest": 1, "newest": 1},
            }
        )
        == "metadata 1, quorum 1-2 (to 3)"
    )
