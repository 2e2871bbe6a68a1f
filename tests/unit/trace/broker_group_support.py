"""The checks of broker groups without Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convoymq.model import trace as words
from convoymq.spark.audit import broker_groups
from convoymq.spark.audit.coverage import queue_facts
from convoymq.spark.audit.findings import Findings
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.plan import read_footers
from tests.unit.trace.support import rows_of

Row = dict[str, Any]


def judge(*roots: Path, injure: Callable[[list[Row]], object] = len) -> dict[str, int]:
    """Returns violations by name, doubts with a `?`, and counts."""
    rows = [row for root in roots for row in rows_of(root)]
    injure(rows)
    _, footers = read_footers(roots)
    scope = broker_groups.scope_of(queue_facts(footers), footers)
    scope.names = {row["session"]: words.name_of(row) for row in rows if row["kind"] == words.NAME}
    chosen = [row for row in rows if row["kind"] in broker_groups.KINDS]
    chosen.sort(key=lambda row: [row[name] for name in broker_groups.SORT])
    columns = {
        name: np.array([row[name] for row in chosen], np.int64) for name in broker_groups.COLUMNS
    }
    findings = Findings()
    broker_groups.follow_queues(columns, scope, findings)
    found: dict[str, int] = {}
    for what, _, k1, *_, n, text in findings.rows:
        assert isinstance(k1, int)
        assert isinstance(n, int)
        name = str(what)
        if what in ("violation", "unproved"):
            name = Invariant(k1).name.lower() + "?" * (what == "unproved")
            assert what == "unproved" or '"topic": "' in str(text)
        elif what == "fate":
            name = f"fate {k1}"
        found[name] = found.get(name, 0) + n
    return found
