"""Runs `convoy perf`, the one load tool for every system, and checks what it reports."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

PERF = (sys.executable, "-m", "convoymq.cli.perf")
CHOSEN_PERF = "CONVOY_PERF"
"""Variable with the command of another build's load tool."""
SLACK_S = 180.0
"""How much longer than its own windows a run may take (declaring, draining, a slow machine)."""


class LoadFailed(Exception):
    """The load tool gave no result; the text holds its last words."""


@dataclass(slots=True)
class Load:
    """One run of the load tool against a cluster: where each role connects, and how much."""

    declare: str
    publish: list[str]
    consume: list[str]
    pids: list[int]
    size: int = 1024
    seconds: float = 8.0
    warmup: float = 2.0
    options: dict[str, str | int | float] = field(default_factory=dict)
    flags: tuple[str, ...] = ("persistent", "verify")

    def command(self) -> list[str]:
        """The argument list of the run."""
        chosen = os.environ.get(CHOSEN_PERF)
        words = [*(shlex.split(chosen) if chosen else PERF), "--format", "json"]
        words += ["--uri", self.declare, "--decl-uri", self.declare]
        for name, uris in (("pub-uri", self.publish), ("cons-uri", self.consume)):
            for uri in uris:
                words += [f"--{name}", uri]
        values: dict[str, str | int | float] = {
            "queue-type": "quorum",
            "size": self.size,
            "seconds": self.seconds,
            "warmup": self.warmup,
            "pids": ",".join(map(str, self.pids)),
        }
        for name, value in (values | self.options).items():
            words += [f"--{name}", str(value)]
        return words + [f"--{flag}" for flag in self.flags]

    def run(self) -> dict[str, Any]:
        """Run to the end. Returns: the tool's JSON object. Raises LoadFailed."""
        limit = self.seconds + self.warmup + SLACK_S
        try:
            done = subprocess.run(
                self.command(), capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"no result after {limit:.0f} s") from None
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise LoadFailed(f"exit code {done.returncode}: {done.stderr.strip()[-400:]}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def broken_promises(result: dict[str, Any]) -> list[str]:
    """What a run's counters say against the broker: loss, disorder, unexplained repeats."""
    found = []
    for key in ("missing", "out_of_order", "bad", "foreign"):
        if result.get(key, 0):
            found.append(f"{key} {result[key]}")
    explained = result.get("redelivered", 0) + result.get("resent", 0)
    if result.get("duplicates", 0) > explained and not result.get("reconnects", 0):
        found.append(f"duplicates {result['duplicates']}")
    return found
