"""What a machine of two processes costs beside one of one: processor time of the brokers a message.

    python benchmarks/scale.py                                 three rounds of every case
    python benchmarks/scale.py --case replicated --rounds 1 --seconds 2

A round runs one process and two processes in turn, each with two queues, two publishers and two
consumers of 1 KiB messages, on queues of one replica on one machine (`single`) and on queues of
three replicas on three machines (`replicated`). The result is CPU-microseconds a message, with
which docs/scale.md computes what more cores do; rates of machines that share cores with their
clients say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from convoymq.cli.cluster import LocalCluster
from convoymq.compiled_modules import build_text

BASE_PORT = 21_600
CASES = {"single": 1, "replicated": 3}
"""Name -> machines, and replicas of a queue."""
PROCESSES = (1, 2)
LOAD = ("--queues", "2", "--publishers", "2", "--consumers", "2", "--persistent", "--verify")


def measure(machines: int, processes: int, seconds: float) -> float:
    """Returns CPU-microseconds of the brokers for each message of one run, at a fresh cluster."""
    with (
        tempfile.TemporaryDirectory() as place,
        LocalCluster(Path(place), machines, BASE_PORT, {}, processes) as cluster,
    ):
        cluster.wait_ready()
        uris = [word for node in cluster.nodes for word in ("--uri", node.uri)]
        command = [sys.executable, "-m", "convoymq.cli.perf", *uris, *LOAD]
        command += ["--declare-args", f"x-quorum-initial-group-size={machines}"]
        command += ["--seconds", str(seconds), "--format", "json"]
        command += ["--pids", ",".join(map(str, cluster.pids()))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"convoy perf: {done.stderr or done.stdout}")
    found: float = json.loads(done.stdout)["broker_cpu_s_per_1M"]
    return found


def shown(values: Sequence[float]) -> str:
    """Returns a median with its range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def main() -> None:
    """Runs the cases, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    table = Table("case", "processes", "CPU-µs a message", "beside one process", title=build_text())
    for case in options.case or CASES:
        costs: dict[int, list[float]] = {processes: [] for processes in PROCESSES}
        for _ in range(options.rounds):
            for processes in PROCESSES:
                costs[processes].append(measure(CASES[case], processes, options.seconds))
        for processes in PROCESSES:
            ratios = [each / one for each, one in zip(costs[processes], costs[1], strict=True)]
            table.add_row(case, str(processes), shown(costs[processes]), shown(ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
