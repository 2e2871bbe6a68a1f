"""Definitions of files: imported when a node starts, and when they change."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.provocation import Observed
from tests.running import Nodes, until

QUEUE = {"vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
UPSTREAM = {"vhost": "/", "component": "federation-upstream", "name": "s", "value": {}}


def write(path: Path, **parts: Any) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(parts))
    fresh.rename(path)


def has(nodes: Nodes, name: str, number: int = 1) -> bool:
    return nodes[number].broker.tree.queues.find("/", name) is not None


@pytest.mark.provokes("definitions.imported", "definitions.not_imported")
async def test_files_are_imported_at_the_start_and_when_they_change(
    tmp_path: Path, observed: Observed
) -> None:
    place = tmp_path / "definitions"
    place.mkdir()
    write(place / "1.json", queues=[{"name": "first", **QUEUE}])
    write(place / "2.json", bindings=[{
        "source": "amq.fanout", "vhost": "/", "destination": "first", "destination_type": "queue",
        "routing_key": "", "arguments": {},
    }])  # fmt: skip
    (place / "notes.txt").write_text("no definitions")
    settings = {"definitions__local__path": str(place), "definitions__interval": "1"}
    async with Nodes(tmp_path, 1, **settings) as nodes:
        await until(lambda: has(nodes, "first"))
        write(place / "3.json", queues=[{"name": "later", **QUEUE}], parameters=[UPSTREAM])
        await until(lambda: "definitions.not_imported" in observed.events)
        assert not has(nodes, "later")
        write(place / "3.json", queues=[{"name": "later", **QUEUE}])
        await until(lambda: has(nodes, "later"))
        (place / "3.json").write_text("{")
        observed.events.pop("definitions.not_imported")
        await until(lambda: "definitions.not_imported" in observed.events)


async def test_what_was_imported_is_passed_over_and_unserved_parts_are_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "definitions.json"
    write(path, queues=[{"name": "q", **QUEUE}], parameters=[UPSTREAM])
    settings = {
        "load_definitions": str(path),
        "definitions__skip_if_unchanged": "true",
        "definitions__skip_unsupported": "true",
        "definitions__interval": "0",
    }
    nodes = Nodes(tmp_path, 1, **settings)
    async with nodes:
        await until(lambda: has(nodes, "q"))
        memory = nodes.data(1) / "definitions.imported"
        await until(memory.exists)
    written = memory.stat().st_mtime_ns
    nodes.start(1)
    await nodes.ready(1)
    edge = next(e for e in nodes[1].edges if type(e).__name__ == "ManagementEdge")
    await until(lambda: edge._files._task.done())
    assert memory.stat().st_mtime_ns == written
    await nodes.stop(1)


async def test_an_import_by_hand_leaves_out_what_is_not_served_and_lists_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "definitions.json"
    bad = {"name": "bad", **QUEUE, "arguments": {"x-queue-type": "nonsense"}}
    bound = {
        "source": "amq.fanout", "vhost": "/", "destination": "bad", "destination_type": "queue",
        "routing_key": "", "arguments": {},
    }  # fmt: skip
    good = {"name": "good", **QUEUE}
    write(path, queues=[bad, good], bindings=[bound], parameters=[UPSTREAM])
    async with Nodes(tmp_path, 1) as nodes:
        port = nodes.ports[1]["management.tcp.port"]

        def ctl(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "convoymq.cli", "ctl", "import_definitions", str(path),
                 "--url", f"http://127.0.0.1:{port}", "--formatter", "json", *words],
                capture_output=True, text=True, timeout=PATIENCE_S, env=dict(os.environ),
            )  # fmt: skip

        refused = await asyncio.to_thread(ctl)
        assert refused.returncode != 0
        assert not has(nodes, "good")
        done = await asyncio.to_thread(ctl, "--skip-unsupported")
        assert done.returncode == 0, done.stderr
        lines = [row["left_out"] for row in json.loads(done.stdout)]
        assert len(lines) == 3, lines
        assert any("component federation-upstream is not served" in line for line in lines)
        assert any("something that it needs is left out" in line for line in lines)
        assert has(nodes, "good")
