"""From whom the audit takes each entry, and what it calls a gap."""

from __future__ import annotations

import random
from typing import Any

import pytest

from convoymq.spark.audit.coverage import Range, choose, queue_facts


def footer(node: int, incarnation: int, **facts: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "group": 1,
        "vhost": "/",
        "queue": "q",
        "type": "quorum",
        "node": node,
        "incarnation": incarnation,
        "covered": [],
        "acts": [],
        "state_snapshots": [],
        "lost": 0,
        "closed": False,
        "rows": 0,
        "number": 0,
        "previous": None,
        "members": [[node, incarnation, 1]],
    }
    return {**known, **facts}


def test_the_widest_range_goes_first_and_overlaps_are_cut() -> None:
    ranges = [Range(1, 1, 0, 10), Range(2, 1, 0, 30), Range(3, 1, 20, 50), Range(1, 2, 60, 70)]
    assert choose(ranges) == [Range(2, 1, 0, 30), Range(3, 1, 30, 50), Range(1, 2, 60, 70)]
    assert choose([]) == []


@pytest.mark.parametrize("seed", range(30))
def test_every_covered_entry_is_taken_once(seed: int) -> None:
    rng = random.Random(seed)
    ranges = []
    for _ in range(rng.randint(1, 12)):
        start = rng.randint(0, 60)
        ranges.append(Range(rng.randint(1, 3), 1, start, start + rng.randint(1, 20)))
    chosen = choose(ranges)
    taken = [index for part in chosen for index in range(part.start + 1, part.end + 1)]
    covered = {index for part in ranges for index in range(part.start + 1, part.end + 1)}
    assert taken == sorted(covered)
    for part in chosen:
        assert any(
            r.node == part.node and r.start <= part.start and part.end <= r.end for r in ranges
        )


def test_gaps_are_entries_that_nobody_has_and_time_in_which_a_node_was_not_closed() -> None:
    (facts,) = queue_facts(
        [
            footer(1, 1, covered=[[0, 10]], acts=[[0, 100]]),
            footer(1, 1, number=1, previous=[1, 0], covered=[[10, 20]], acts=[[100, 200]]),
            footer(1, 2, previous=[1, 1], covered=[[30, 40]], acts=[[300, 400]], closed=True),
            footer(2, 1, covered=[[5, 25]], acts=[[0, 150]], closed=True),
            footer(2, 2, previous=[1, 0], covered=[[35, 50]], acts=[[500, 600]]),
        ]
    )
    assert (facts.start, facts.end) == (0, 50)
    gaps = {(gap.node, gap.start, gap.end) for gap in facts.gaps}
    assert gaps == {(0, 25, 30), (1, 200, 300), (2, 600, 600)}


WHOLE = [
    footer(1, 1, acts=[[0, 100]], members=[[1, 1, 1], [2, 1, 1], [3, 0, 0]]),
    footer(1, 1, acts=[[100, 200]], number=1, previous=[1, 0], closed=True),
    footer(1, 2, acts=[[250, 300]], previous=[1, 1], closed=True),
    footer(2, 1, acts=[[0, 300]], closed=True),
]


def gaps_of(*footers: dict[str, Any]) -> list[tuple[int, int, int]]:
    (facts,) = queue_facts(footers)
    return sorted((gap.node, gap.start, gap.end) for gap in facts.gaps)


def test_every_file_that_is_missing_leaves_a_gap() -> None:
    """Files name the one before them, and the nodes that have replicas."""
    first, second, third, other = WHOLE
    assert gaps_of(*WHOLE) == []
    assert gaps_of(second, third, other) == [(1, 0, 100)]
    assert (1, 100, 250) in gaps_of(first, third, other)
    assert gaps_of(first, second, third) == [(2, 0, 300)]
    assert gaps_of(second, {**other, "members": []}) != []


def test_a_life_that_others_know_and_an_end_out_of_order_are_gaps() -> None:
    first, second, third, other = WHOLE
    told = {**other, "members": [[1, 2, 1], [2, 1, 1]]}
    assert gaps_of(first, second, third, told) == []
    assert gaps_of(first, second, told) == [(1, 200, 300)]
    open_end = {**second, "closed": False}
    assert gaps_of(first, open_end, other) == [(1, 200, 300)]
    assert gaps_of(*({**each, "members": []} for each in WHOLE)) == [(0, 0, 0)]


def test_the_last_file_of_the_node_that_ended_last_is_missed() -> None:
    """No other file reaches beyond it, but the others ended in order and this node did not."""
    first, second, third, other = WHOLE
    late = footer(2, 1, acts=[[300, 400]], number=1, previous=[1, 0], closed=True)
    assert gaps_of(first, second, third, {**other, "closed": False}, late) == []
    assert gaps_of(first, second, third, {**other, "closed": False}) == [(2, 300, 300)]
    assert gaps_of(footer(1, 1, acts=[[0, 100]])) == [], "a cluster of one node that still runs"


def test_rows_that_a_file_counts_and_lacks_are_missing() -> None:
    (facts,) = queue_facts([footer(1, 1, rows=10, found=7)])
    assert facts.missing == {"rows": 3}


def test_the_last_complete_state_snapshot_that_is_reached_counts() -> None:
    state_snapshots = [{"index": 10, "complete": 1}, {"index": 20, "complete": 0}]
    (facts,) = queue_facts([footer(1, 1, covered=[[0, 20]], state_snapshots=state_snapshots)])
    assert facts.state_snapshot is not None
    assert facts.state_snapshot["index"] == 10


def test_traces_of_two_clusters_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="one cluster at a time"):
        queue_facts([footer(1, 1), footer(1, 1, queue="other")])
