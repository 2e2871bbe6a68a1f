"""Log of administrative acts: who asked for what, from where, with what result (ADR 0205).

Each protocol has one place where it carries out requests of operators, and that place records them.
A line has the path of a request, never its body or query: there may be secrets in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import structlog

log = structlog.get_logger()

TEXT_CHARACTERS_MAX = 1024
"""Of each field: names have 255 bytes, and a path has several."""


class Output(Protocol):
    """File of the log (`node.logs.LogOutput`)."""

    path: str

    def write(self, text: str) -> None:
        """Appends text. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One request that does more than read."""

    via: str
    """Protocol, or `operator` for the administration socket."""
    user: str
    """Name of the user; "" = nobody was let in."""
    peer: str
    """Address of the client, or its user and process on this machine."""
    method: str
    path: str
    status: int
    """Status of the answer."""


class AuditLog:
    """The administrative acts of one node, as JSON lines.

    Args:
        output: the file; None: acts are not recorded.
        node: returns the name of the node.
    """

    def __init__(self, output: Output | None, node: Callable[[], str]) -> None:
        self._output = output
        self._node = node
        self._failing = False

    def record(self, act: Act) -> None:
        """Writes an act. One that cannot be written is reported once, until one can be again."""
        if self._output is None:
            return
        line = {
            "timestamp": datetime.fromtimestamp(time.time(), UTC).isoformat(),
            "node": self._node(),
            "via": act.via,
            "user": _bounded(act.user),
            "peer": _bounded(act.peer),
            "method": _bounded(act.method),
            "path": _bounded(act.path),
            "status": act.status,
            "result": _result(act.status),
        }
        try:
            self._output.write(json.dumps(line) + "\n")
            self._failing = False
        except (OSError, ValueError) as error:
            if not self._failing:
                log.error("audit.not_written", file=self._output.path, reason=str(error))
            self._failing = True


def _bounded(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "…"


def _result(status: int) -> str:
    if status < 400:
        return "done"
    return "refused" if status < 500 else "failed"
