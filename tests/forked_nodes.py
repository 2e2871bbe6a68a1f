"""Local clusters whose nodes are forked off a process that has imported everything.

Such a node is ready three times as soon, for a third of the processor time: importing is most of a
start. From its first statement on it is what `convoymq.cli.serve` runs, in a process of its own.
Nodes of one number share a server, so that nodes of a cluster hash strings differently, as nodes on
machines do. Whatever is about starting, importing, memory or descriptors uses `LocalCluster`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from convoymq.cli.cluster import LocalCluster, LocalNode

ROOT = Path(__file__).parents[1]
SERVERS = 3
AT_START = ("PYTHON", "LD_")
"""Beginnings of names in the environment that count when a process starts."""


class Server:
    """A process that forks nodes."""

    def __init__(self, environment: Mapping[str, str], changes: Iterable[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking_server", *changes],
            env={**os.environ, **environment},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.lock = threading.RLock()
        atexit.register(self._end, os.getpid())

    def ask(self, request: Any) -> Any:
        """Returns the answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self.lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def _end(self, process: int) -> None:
        if os.getpid() == process:
            self._process.communicate()


@functools.cache
def server(
    _number: int, environment: tuple[tuple[str, str], ...], changes: tuple[str, ...]
) -> Server:
    """The server of a process of tests for nodes of a number, with this at their start."""
    return Server(dict(environment), changes)


class ForkedNode(subprocess.Popen[bytes]):
    """The process of a forked node, whose parent is a server."""

    def __init__(self, server: Server, *request: Any) -> None:
        self._server = server
        self.returncode: int | None = None
        self.pid = server.ask(request)

    def poll(self) -> int | None:
        """Returns the exit code; None = it runs."""
        with self._server.lock:
            if self.returncode is None:
                self.returncode = self._server.ask(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.closing(os.fdopen(os.pidfd_open(self.pid))) as handle:
                if not select.select([handle], [], [], left)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def fork_node(
    number: int,
    config: Path,
    log: Path,
    environment: Mapping[str, str],
    changes: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Starts a node without TLS; returns its process.

    Args:
        log: where its output goes, behind what is there.
        changes: modules whose `install` changes what nodes do.
    """
    counts = tuple((k, v) for k, v in sorted(environment.items()) if k.startswith(AT_START))
    parent = server(number % SERVERS, counts, changes)
    return ForkedNode(parent, str(config), str(log), dict(environment))


class ForkedCluster(LocalCluster):
    """A local cluster whose nodes are forked; those with TLS, who import more, are not."""

    changes: ClassVar[tuple[str, ...]] = ()
    """Modules whose `install` changes what the nodes do."""

    def _start(self, node: LocalNode, log: BinaryIO) -> subprocess.Popen[bytes]:
        config = self._config(node)
        if re.search("ssl|tls", config.read_text()):
            return super()._start(node, log)
        log_file, environment = Path(log.name), self._environment(node)
        return fork_node(node.number, config, log_file, environment, self.changes)

    def stop(self, allowed_s: float | None = None) -> None:
        """Kills all nodes: no test looks at the end of its cluster, and an orderly stop takes as
        much processor time as a start. With traces it is orderly: they are complete then, and
        audits read them afterwards."""
        if not any(key.startswith("trace.") for key in self.settings):
            for process in self._processes.values():
                process.kill()
        super().stop(allowed_s)
