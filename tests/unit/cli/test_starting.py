"""A start of a local cluster: its steps in words, when it is given up, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import cluster_ports

from convoymq.cli import cluster as module
from convoymq.cli.cluster import LocalCluster
from convoymq.cli.starting import reason, steps
from convoymq.model.errors import Unavailable

PORT = cluster_ports(__name__)
LOG = b"".join(
    json.dumps({"event": event, "level": level, **facts}).encode() + b"\n"
    for event, level, facts in (
        ("storage.recovered", "info", {"node": 1, "groups": 2, "entries": 3}),
        ("link.up", "info", {"peer": 2}),
        ("cluster.waiting", "warning", {"reason": "node 3 is not linked yet", "missing": [3]}),
    )
)


def test_steps_are_told_in_words() -> None:
    assert steps(b"an introduction\n" + LOG) == [
        "has read its data: 2 groups, 3 entries",
        "waits: node 3 is not linked yet",
    ]


def test_a_reason_is_the_last_error_then_the_last_step_then_the_last_lines() -> None:
    failed = {"event": "node.failed", "level": "error", "node": 1, "reason": "the disk is full"}
    assert reason(LOG + json.dumps(failed).encode()) == "node.failed: the disk is full"
    assert reason(LOG) == "the last that its log tells: waits: node 3 is not linked yet"
    assert reason(b"a\nb\nc\nImportError: no module\n") == "b | c | ImportError: no module"
    assert reason(b"") == ""


class Silent(LocalCluster):
    """Its nodes run a program instead."""

    program = "import time; time.sleep(1000)"

    def _command(self, node: module.LocalNode) -> list[str]:
        return [sys.executable, "-c", self.program]


def test_a_start_without_progress_is_given_up_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.2)
    with Silent(tmp_path, 1, PORT) as cluster:
        cluster._log_begins[1] = 0
        with open(cluster.log_file(1), "ab") as log:
            log.write(LOG)
        told: list[str] = []
        with pytest.raises(Unavailable, match=r"makes no progress .* node 3 is not linked yet"):
            cluster.wait_ready(told.append)
    assert told == ["node 1 " + step for step in steps(LOG)]


def test_a_start_that_makes_progress_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of a log, or each part of a second of work, begins the time anew."""
    monkeypatch.setattr(module, "STALLED_S", 0.5)
    monkeypatch.setattr(module, "POLL_S", 0.2)
    monkeypatch.setattr(Silent, "program", "import time; time.sleep(1000)")
    looks: list[int] = []

    def grows(cluster: LocalCluster, node: module.LocalNode) -> tuple[int, int]:
        looks.append(node.number)
        return (len(looks), 0)

    monkeypatch.setattr(LocalCluster, "_progress", grows)
    with Silent(tmp_path, 1, PORT) as cluster:
        cluster.wait_ready(stopped=lambda: len(looks) > 5)
    assert len(looks) == 6


def test_a_node_that_ends_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "program", "raise SystemExit('no such thing')")
    with (
        Silent(tmp_path, 1, PORT) as cluster,
        pytest.raises(Unavailable, match="node 1 ended: no such thing"),
    ):
        cluster.wait_ready()


def test_work_and_words_are_progress(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 1, PORT)
    node = cluster.nodes[0]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        node.pid = busy.pid
        before = cluster._progress(node)
        while cluster._progress(node) == before:
            assert busy.poll() is None
        cluster.log_file(1).parent.mkdir(parents=True)
        cluster.log_file(1).write_bytes(LOG)
        assert cluster._progress(node)[0] == len(LOG)
    finally:
        busy.kill()
        busy.wait()


def test_a_cluster_is_found_without_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`convoy up --data ./data`, then `convoy status` elsewhere, as docs/getting-started.md has
    it."""
    monkeypatch.chdir(tmp_path)

    class Named(Silent):
        def _spawn(self, node: module.LocalNode) -> None:
            arguments = ["-m", module.NODE_MODULE, "--config", str(self._config(node))]
            command = [sys.executable, "-c", self.program, *arguments]
            self._processes[node.number] = subprocess.Popen(command)
            node.pid = self._processes[node.number].pid

    with Named(tmp_path / "data", 1, PORT) as cluster:
        # What a process is called is not there yet at the very moment when it is.
        while cluster.data not in module.running_clusters():
            assert cluster._processes[1].poll() is None
        only = [cluster.data]
        monkeypatch.setattr(module, "running_clusters", lambda: only)
        assert module.find_cluster(module.DATA_DEFAULT) == cluster.data
        with pytest.raises(module.Misuse, match=f"--data with one of {cluster.data}"):
            module.find_cluster(Path("other"))
        only.append(tmp_path / "more")
        with pytest.raises(module.Misuse, match=r"--data with one of .*, .*/more"):
            module.find_cluster(module.DATA_DEFAULT)
    monkeypatch.undo()
    assert cluster.data not in module.running_clusters()
