"""What the tests of one process share: registries, the environment, settings of Python.

Which files share a process is chance under pytest-xdist. What one leaves behind makes another one
fail, in some runs, so `tests/conftest.py` compares this state before and after each file.
"""

from __future__ import annotations

import asyncio.events
import gc
import locale
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

import convoymq.broker.drivers  # noqa: F401
from convoymq.edges import registry as edges
from convoymq.messages import encodings
from convoymq.queues import driver
from convoymq.replication import versions
from convoymq.routing import queue_types
from convoymq.sim import registry as loads
from convoymq.transport import frame_kinds

# Filled when their modules are imported, which may be in the middle of a file.
versions.announced()

REGISTRIES = {
    "client protocols": (edges, "EDGES"),
    "encodings of messages": (encodings, "ENCODINGS"),
    "drivers of queue types": (driver, "_DRIVERS"),
    "rules of queue types": (queue_types, "_TYPES"),
    "replicated machines": (versions, "MACHINES"),
    "versions of machines": (versions, "_ranges"),
    "floors of versions": (versions, "FLOORS"),
    "frames of links": (frame_kinds, "LINK_FRAMES"),
    "kinds of CONTROL frames": (frame_kinds, "CONTROL_KINDS"),
    "urgent frames of links": (frame_kinds, "_urgent_types"),
    "urgent kinds of CONTROL frames": (frame_kinds, "_urgent_controls"),
    "loads of the simulator": (loads, "LOADS"),
}

SPARKS = ("JAVA_", "JDK_", "PYSPARK_", "PYTHONPATH", "PYTEST_", "SPARK_")
"""Beginnings of names in the environment that Spark has for as long as its session lasts, over
several files."""

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)

SETTINGS: dict[str, Callable[[], object]] = {
    "working directory": Path.cwd,
    "environment": lambda: {k: v for k, v in os.environ.items() if not k.startswith(SPARKS)},
    "signal handlers": lambda: [signal.getsignal(each) for each in SIGNALS],
    "event loop policy": lambda: type(getattr(asyncio.events, "_event_loop_policy", None)),
    "garbage collection": gc.isenabled,
    "disabled log levels": lambda: logging.root.manager.disable,
    "level of the root logger": lambda: logging.root.level,
    "structlog": structlog.get_config,
    "locale": lambda: locale.setlocale(locale.LC_ALL),
}

State = dict[str, Any]


def look() -> State:
    """Returns a copy of the state."""
    return _registries() | {name: setting() for name, setting in SETTINGS.items()}


def _registries() -> State:
    return {name: getattr(*place).copy() for name, place in REGISTRIES.items()}


def changes(before: State, after: State) -> list[str]:
    """Returns a line for each part of the state that differs, with the difference."""
    return [
        f"{name}: {_difference(value, after[name])}"
        for name, value in before.items()
        if value != after[name]
    ]


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, bytearray):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict):
        names = before.keys() | after.keys()
        return ", ".join(sorted(str(n) for n in names if before.get(n) != after.get(n)))
    return f"{before!r} became {after!r}"


@contextmanager
def registries_restored() -> Iterator[None]:
    """Forgets at its end what is registered meanwhile."""
    before = _registries()
    try:
        yield
    finally:
        # Other modules have the same objects.
        for name, place in REGISTRIES.items():
            found = getattr(*place)
            if isinstance(found, dict):
                found.clear()
                found.update(before[name])
            else:
                found[:] = before[name]
