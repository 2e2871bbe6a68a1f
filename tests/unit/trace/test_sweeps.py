"""The sweeps without Spark: nothing is found in what real machines do, however the trace is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoymq.model import trace as words
from convoymq.spark.audit import messages, order
from convoymq.spark.audit.findings import LAST_ORDINAL, ORDINAL_BITS, Findings, Scope

from .support import Recording, random_log, rows_of

DECIDED = (1, 2, 3, 4, 5, 8)


def columns(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """Rows in the form in which the plan hands them to a sweep."""
    made = {}
    for name in names:
        match name:
            case "order":
                values = [
                    (row["index"] << ORDINAL_BITS)
                    + (LAST_ORDINAL if row["kind"] == words.STATE else row["ordinal"])
                    for row in rows
                ]
            case "counts":
                values = [(row["acquired"] << 32) + row["delivered"] for row in rows]
            case "command" | "first":
                values = [row["position_" + name] for row in rows]
            case "part":
                values = [row["index"] >> 3 for row in rows]
            case _:
                values = [row[name] for row in rows]
        made[name] = np.asarray(values, np.int64)
    return made


def sorted_by(found: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    at = np.lexsort([found[key] for key in reversed(keys)])
    return {name: values[at] for name, values in found.items()}


def sweep(rows: list[dict[str, Any]], scope: Scope) -> Findings:
    """Messages and order; edges between parts are not compared here."""
    findings = Findings()
    entered = [
        row
        for row in rows
        if row["kind"] in (*DECIDED, words.STATE)
        and row["kind"] != words.OWNER
        and not (row["kind"] == words.PUBLISHED and row["reason"])
        and (row["kind"] == words.STATE or within(row["index"], scope))
        and (row["kind"] != words.STATE or row["index"] == scope.state_snapshots[0])
    ]
    lives = sorted_by(columns(entered, messages.COLUMNS), (*messages.KEYS, "order"))
    messages.follow(lives, scope, findings)
    logged = [
        row
        for row in rows
        if row["kind"] in (words.PUBLISHED, words.DELIVERED, words.OWNER)
        and within(row["index"], scope)
    ]
    parts = sorted_by(columns(logged, order.LOG_COLUMNS), (*order.LOG_KEYS, "order"))
    order.follow_log(parts, scope, findings)
    return findings


def within(index: int, scope: Scope) -> bool:
    return any(start < index <= end for _, start, end in scope.covered)


def violations(findings: Findings) -> list[Any]:
    return [row for row in findings.rows if row[0] == "violation"]


SETTINGS: list[dict[str, Any]] = [{}, {"delivery_limit": 1}, {"delivery_limit": -1}]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_found_in_a_clean_trace(tmp_path: Path, seed: int) -> None:
    log = random_log(seed, purge=seed % 2 == 0)
    recording = Recording(tmp_path, **SETTINGS[seed % len(SETTINGS)])
    recording.apply(log.entries)
    recording.close()
    last = len(log.entries)
    scope = Scope((7,), (last,), ((7, 0, last),))
    findings = sweep(rows_of(tmp_path), scope)
    assert not findings.rows, "neither violations nor anything that could not be proved"


@pytest.mark.parametrize("seed", range(12))
def test_holes_are_never_taken_for_violations(tmp_path: Path, seed: int) -> None:
    """Goal: wherever the trace is cut, what is left is judged right. Random holes, and a random
    beginning."""
    rng = random.Random(seed)
    log = random_log(seed + 100, purge=False)
    recording = Recording(tmp_path)
    recording.apply(log.entries)
    recording.close()
    rows = rows_of(tmp_path)
    last = len(log.entries)
    for _ in range(6):
        start = rng.choice((0, rng.randint(1, last // 2)))
        cuts = sorted(rng.sample(range(start + 1, last), 2 * rng.randint(0, 4)))
        edges = [start, *cuts, last]
        covered = tuple((7, low, high) for low, high in zip(edges[::2], edges[1::2], strict=True))
        scope = Scope((7,), (last,), covered)
        assert not violations(sweep(rows, scope))


@pytest.mark.parametrize("seed", range(6))
def test_fates_add_up_to_the_machine(tmp_path: Path, seed: int) -> None:
    log = random_log(seed + 200, purge=False)
    recording = Recording(tmp_path)
    recording.apply(log.entries)
    totals = recording.machine.totals()
    recording.close()
    last = len(log.entries)
    scope = Scope((7,), (last,), ((7, 0, last),))
    findings = sweep(rows_of(tmp_path), scope)
    fates: dict[tuple[int, int], int] = {}
    for block in findings.blocks:
        for row in block.to_pylist():
            if row["what"] == "fate":
                key = (row["k1"], row["k2"])
                fates[key] = fates.get(key, 0) + row["n"]
                assert row["k3"] == (row["k1"] >= 3), "what is queued is in the state snapshot"
    assert fates.get((1, 0), 0) == totals["acked"]
    assert fates.get((2, words.REJECTED), 0) == totals["dropped_rejected"]
    assert fates.get((3, 0), 0) == totals["ready"]
    assert fates.get((4, 0), 0) == totals["unacked"]
