"""Code blocks of a page: which there are, which of them run, and how a page is run as a whole.

A page is a session: its blocks run from top to bottom in one empty directory, the Python blocks in
one namespace, the shell blocks by `bash -eu` in the same environment. A block that can't run says
so in the line above it:

    <!-- not run: why -->

The ports of a first cluster (5672 and so on) are replaced, so that a broker of this machine is not
met. Blocks without a language are output or files, and are not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.patience import TEST_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "sh")
_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->$")
SESSION = r"""
import json, multiprocessing, shlex, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from convoymq import cli
names = {"__name__": "__main__"}
def run(words):
    if "spark" in names:
        pipelines.submit(cli._main, words).result()
    else:
        cli._main(words)
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pipelines:
    for kind, place, text in json.loads(sys.argv[1]):
        print(f"--- {place}", flush=True)
        lines = text.splitlines()
        if kind == "python":
            exec(compile(text, place, "exec"), names)
        elif all(line.startswith("convoy pipeline ") for line in lines):
            for line in lines:
                try:
                    run(shlex.split(line)[1:])
                except SystemExit as end:
                    assert not end.code, line
        else:
            subprocess.run(["bash", "-euc", text], check=True)
"""
"""Runs the blocks. The pipelines of a page share a Java: that of the page, or of a process of their
own while the page has a session, which they would end."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str
    not_run: str
    """Why it is not run; "" = it is."""

    @property
    def place(self) -> str:
        """Where it stands: `docs/spark.md:12`."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, by its path from the root of the repository."""
    found = []
    reason = ""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    k = 0
    while k < len(lines):
        opened = _FENCE.match(lines[k])
        if opened is None:
            marked = _NOT_RUN.match(lines[k])
            reason = marked[1] if marked else reason if not lines[k].strip() else ""
            k += 1
            continue
        start = k + 1
        k = next(n for n in range(start, len(lines)) if lines[n].strip() == "```")
        text = "\n".join(line.removeprefix(opened[1]) for line in lines[start:k])
        found.append(Block(page, start, opened[2], text, reason))
        reason = ""
        k += 1
    return found


def run_page(
    page: str,
    directory: Path,
    *,
    replaced: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    at: Path | None = None,
) -> str:
    """Runs the blocks of a page and returns what they print.

    Args:
        replaced: text → what stands in its place in this test, such as ports.
        at: the directory that the page is about; None = `directory`, where the output goes.
    """
    steps = []
    for block in blocks_of(page):
        if block.language in RUN and not block.not_run:
            text = block.text
            for old, new in replaced.items():
                text = text.replace(old, new)
            steps.append((block.language, block.place, text))
    assert steps, f"{page} has no block that runs"
    known = {**os.environ, **(environment or {})}
    # Commands are those of this interpreter's environment.
    known["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}"
    log = directory / "session.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", SESSION, json.dumps(steps)],
            cwd=at or directory,
            env=known,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TEST_LIMIT_S,
            check=False,
        )
    text = log.read_text("utf-8", "replace")
    assert done.returncode == 0, text[-6000:]
    return text
