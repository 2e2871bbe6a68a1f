"""docs/replication.md shows what is kept of `make replication`; a few seeds keep it again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from benchmarks.replication import page
from benchmarks.replication.__main__ import simulate
from benchmarks.replication.faults import FAULTS, Fault, faults_of
from benchmarks.replication.ledger import Delivered, Ledger
from benchmarks.replication.ways import WAYS, Way, broken_promises, ways_of

KEPT = page.load()
SEED = 1
QUICK = ("lost", "minority", "power", "backlog")
"""Schedules that tests run again; `make replication` runs all."""


def test_the_page_shows_what_is_kept() -> None:
    shown = page.PAGE.read_text()
    assert page.PART.findall(shown)
    assert page.filled(shown, KEPT) == shown, "run: python -m benchmarks.replication --page"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_plot_shows_what_is_kept(fault: Fault) -> None:
    drawn = (page.PLOTS / f"{fault.name}.svg").read_text()
    assert page.digest(KEPT, fault) in drawn, "run: python -m benchmarks.replication --page"


def test_every_way_went_through_every_schedule() -> None:
    expected = {
        f"{fault.name}/{way.name}/{drive}"
        for fault in FAULTS
        for way in WAYS
        for drive in page.DRIVES
        if drive == "simulated" or fault.is_real
    }
    assert set(KEPT["runs"]) == expected


@pytest.mark.parametrize("name", sorted(KEPT["runs"]))
def test_what_is_kept_is_within_what_is_promised(name: str) -> None:
    fault, way, _ = name.split("/")
    run = KEPT["runs"][name]
    assert not broken_promises(ways_of([way])[0], faults_of([fault])[0], run, name)
    assert not run["failed"]


@functools.cache
def run_of(fault: str, way: str) -> dict[str, Any]:
    return simulate(faults_of([fault])[0], ways_of([way])[0], SEED)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("fault", QUICK)
def test_promises_are_kept_again(fault: str, way: Way) -> None:
    run = run_of(fault, way.name)
    assert not broken_promises(way, faults_of([fault])[0], run, f"seed {SEED}")
    assert run["confirmed"] > 100


def test_a_slave_hands_out_nothing_that_its_master_may_not_find_again() -> None:
    # Here a slave acted with a message that its master had sent it before its own flush.
    fault = faults_of(["power"])[0]
    run = simulate(fault, ways_of(["group"])[0], 13)
    assert run["lost"] == 0
    assert run["failure"] is None


def test_what_the_page_says_to_be_lost_is_lost() -> None:
    classic, mirrored = (run_of("backlog", way) for way in ("classic", "mirrored"))
    # One copy, and its node is gone.
    assert classic["lost"] == classic["confirmed"]
    # The mirrors were restarted and have none of what was there before; one of them takes over.
    assert 0 < mirrored["lost"] < mirrored["confirmed"]


def test_a_ledger_counts() -> None:
    ledger = Ledger(holder=1)
    for number in range(4):
        ledger.published[7, number] = 2.0
        ledger.confirmed[7, number] = 2.5, 1
    for number, redelivered in ((1, False), (0, False), (1, True), (2, False), (2, False)):
        ledger.delivered.append(Delivered(3.0, 2, 1, (7, number), redelivered))
    counts = ledger.counts(faults_of(["kill"])[0])
    names = ("confirmed", "lost", "repeats", "unflagged", "reorders", "confirm_ms")
    assert [counts[name] for name in names] == [4, 1, 2, 1, 1, 500.0]
    # Node 1 is hit, and has confirms at 2.5 s only; nobody consumes before 3 s.
    assert (counts["publish_hit_s"], counts["consume_others_s"]) == (9.0, 9.0)
