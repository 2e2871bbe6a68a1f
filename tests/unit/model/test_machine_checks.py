"""Checks of the machine before a node starts."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.edges.configuration import load
from convoymq.model import machine_checks
from convoymq.model.config import ConfigError
from convoymq.model.machine_checks import machine_findings, raise_open_files
from convoymq.node import preflight


def levels(data: Path, limit: int = 0) -> dict[str, str]:
    return {finding.check: finding.level for finding in machine_findings(data, limit)}


def test_a_directory_that_is_not_there_is_judged_by_what_is_above_it(tmp_path: Path) -> None:
    assert levels(tmp_path / "not" / "yet")["disk space"] == "ok"
    assert levels(tmp_path, 1 << 60)["disk space"] == "warning"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert levels(tmp_path / "data")["disk"] == "error"


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))

    def set_to(_kind: int, wanted: tuple[int, int]) -> None:
        limits[:] = wanted

    monkeypatch.setattr(resource, "setrlimit", set_to)
    raise_open_files()
    assert limits == [1024, 1024]
    assert levels(tmp_path)["open files"] == "warning"
    limits[:] = [256, resource.RLIM_INFINITY]
    raise_open_files()
    assert limits[0] == machine_checks.OPEN_FILES_LOW
    assert levels(tmp_path)["open files"] == "ok"


@pytest.mark.provokes("node.machine_low")
def test_a_node_says_what_is_low_and_ends_for_a_clock_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, observed: Any
) -> None:
    config = load(flags={"data_dir": str(tmp_path), "disk_free_limit.absolute": "1000TB"})
    preflight.check_machine(config)
    monkeypatch.setattr(machine_checks, "machine_memory_bytes", lambda: 1 << 20)
    preflight.check_machine(config)
    monkeypatch.setattr(time, "gmtime", lambda: SimpleNamespace(tm_year=1970))
    with pytest.raises(ConfigError, match="clock: it says 1970, which cannot be"):
        preflight.check_machine(config)
