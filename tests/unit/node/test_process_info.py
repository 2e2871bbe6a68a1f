"""What a node tells of its places and watermarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.broker.alarms import Watermarks
from convoymq.edges.configuration import load
from convoymq.node.process_info import places_info, watermark_setting


def test_a_node_knows_where_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("convoy.conf").write_text("log.file = convoy.log\n")
    assert places_info(load("convoy.conf"), Path("data")) == {
        "db_dir": str(tmp_path / "data"),
        "raft_data_directory": str(tmp_path / "data" / "log"),
        "config_files": [str(tmp_path / "convoy.conf")],
        "log_files": [str(tmp_path / "convoy.log")],
    }
    found = places_info(load(), Path("data"))
    assert (found["config_files"], found["log_files"]) == ([], ["<stderr>"])


def test_a_watermark_is_told_as_it_was_set() -> None:
    share = load(flags={"vm_memory_high_watermark.relative": "0.5"})
    size = load(flags={"vm_memory_high_watermark.absolute": "70"})
    assert watermark_setting(share, Watermarks(50, 0, 100)) == {"relative": 0.5}
    assert watermark_setting(size, Watermarks(70, 0, 100)) == {"absolute": 70}
    # An operator moved it since the start.
    assert watermark_setting(share, Watermarks(80, 0, 100)) == {"absolute": 80}
