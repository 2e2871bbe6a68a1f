"""Runs command lines of `convoy`, each in a process of its own.

A process that has just started knows less than that of a test: a command that works in the one may
be wrong in a shell. Starting an interpreter and importing takes most of a command's time, so a
server does both once, and forks for each command line. It imports what the command would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

SERVER = """
import json, os, sys
import convoymq.cli.ctl.main
from convoymq.cli import main
for line in sys.stdin:
    words, directory, environment, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        for descriptor, path in zip((0, 1, 2), (os.devnull, *outputs)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stdin = open(os.devnull)
        sys.argv = ["convoy", *words]
        main()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str


class ToolProcesses:
    """The server. `directory`: where the processes run."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = {**os.environ, **environment}
        self._outputs = [directory / "stdout", directory / "stderr"]

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def run(self, *words: str) -> Ended:
        """Runs a command line to its end."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        outputs = [str(path) for path in self._outputs]
        request = [words, str(self._directory), self._environment, outputs]
        print(json.dumps(request), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return Ended(code, *(path.read_text() for path in self._outputs))
