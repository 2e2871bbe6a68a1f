"""Options of `convoy perf` that PerfTest's users know, before a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster

PERF = [sys.executable, "-m", "convoymq.cli", "perf", "--format", "json"]


def perf(cluster: LocalCluster, *words: str) -> dict[str, object]:
    uris = [word for node in cluster.nodes for word in ("--uri", f"127.0.0.1:{node.amqp_port}")]
    ended = subprocess.run([*PERF, *uris, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def test_rates_change_over_many_queues_and_latencies_become_a_page(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    page = tmp_path / "latency.html"
    report = perf(
        cluster, "--variable-rate", "200:0.5", "--variable-rate", "0:0.2", "--count", "300",
        "--queues", "6", "--publishers", "6", "--consumers", "6", "--verify",
        "--histogram", str(page), "--label", "<b>run</b>",
    )  # fmt: skip
    assert (report["missing"], report["out_of_order"], report["duplicates"]) == (0, 0, 0)
    text = page.read_text()
    assert "&lt;b&gt;run&lt;/b&gt;" in text
    assert "<b>run" not in text
    (data,) = re.findall(r"^const data = (.*);$", text, re.MULTILINE)
    nines, confirm, whole = json.loads(data)
    assert len(nines) == len(confirm) == len(whole)
    assert confirm == sorted(confirm)
    assert confirm[0] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--variable-rate", "10"), "RATE:SECONDS"),
        (("--variable-rate", "0:1"), "more than 0"),
        (("--variable-rate", "1:1", "--rate", "5"), "exclude each other"),
    ],
)
def test_wrong_rates_are_refused(words: tuple[str, ...], text: str) -> None:
    ended = subprocess.run([*PERF, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert text in " ".join(ended.stderr.split())
