"""Which nodes shall have a mirrored queue."""

from __future__ import annotations

import pytest

from convoymq.queues.mirrored.policy import (
    CopyAge,
    MirrorPolicy,
    heir,
    master_nodes,
    policy_from,
    wanted_nodes,
)
from convoymq.replication.ring.views import founded

NAMED = {"a": 1, "b": 2, "c": 3, "d": 4}


def wanted(settings: dict[str, object], mirrors: tuple[int, ...] = (), **more: object) -> list[int]:
    running = more.get("running", (1, 2, 3, 4))
    load = more.get("load", {})
    found = wanted_nodes(
        policy_from(settings), master=1, mirrors=mirrors, running=running, named=NAMED, load=load,
        places=more.get("places", {}),
    )  # type: ignore[arg-type]  # fmt: skip
    return list(found)


def test_all_nodes_have_a_copy() -> None:
    assert wanted({"ha-mode": "all"}) == [1, 2, 3, 4]
    assert wanted({"ha-mode": "all"}, running=(1, 3)) == [1, 3]


def test_exactly_counts_the_master() -> None:
    two = {"ha-mode": "exactly", "ha-params": 2}
    assert wanted(two) == [1, 2]
    assert wanted(two, load={2: 5, 3: 1, 4: 2}) == [1, 3]
    # Those that are there stay, the oldest first.
    assert wanted(two, mirrors=(4,)) == [1, 4]
    assert wanted(two, mirrors=(3, 2)) == [1, 3]
    assert wanted({"ha-mode": "exactly", "ha-params": 9}) == [1, 2, 3, 4]


def test_named_nodes_have_a_copy_when_they_are_there() -> None:
    named = {"ha-mode": "nodes", "ha-params": ("c", "nowhere")}
    assert wanted(named) == [1, 3]
    assert wanted(named, mirrors=(2,)) == [1, 3]
    assert wanted(named, running=(1, 2)) == [1]


def test_without_a_policy_the_master_is_alone() -> None:
    assert wanted({}, mirrors=(2, 3)) == [1]


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"max-length": 3}, MirrorPolicy()),
        ({"ha-mode": "all"}, MirrorPolicy(mode="all")),
        (
            {
                "ha-mode": "nodes", "ha-params": ("a",), "ha-sync-mode": "automatic",
                "ha-sync-batch-size": 7, "ha-promote-on-shutdown": "always",
                "ha-promote-on-failure": "when-synced",
            },
            MirrorPolicy(
                mode="nodes", names=("a",), syncs_by_itself=True, sync_batch_size=7,
                promotes_on_shutdown=True, promotes_on_failure=False,
            ),
        ),
    ],
)  # fmt: skip
def test_settings_of_mirrors(settings: dict[str, object], policy: MirrorPolicy) -> None:
    assert policy_from(settings) == policy


@pytest.mark.parametrize(
    ("copies", "lenient", "forced", "node"),
    [
        # Members 1 (master, node 1), 2 and 4 are synchronised, 3 and 5 are not.
        ({2: 2, 3: 3, 4: 4}, False, False, 2),
        ({3: 3, 4: 4}, True, True, 4),
        ({1: 1, 2: 2}, False, False, 1),
        ({3: 3, 5: 5}, False, False, 0),
        ({3: 3, 5: 5}, True, False, 3),
        ({3: 3, 5: 5}, False, True, 3),
        # Copies of former rings.
        ({6: 7, 7: 8, 8: 0}, True, False, 0),
        ({6: 7, 7: 8, 8: 0}, False, True, 6),
        ({6: 7, 5: 5}, True, True, 5),
        ({8: 0}, True, True, 0),
        ({}, True, True, 0),
        # A member that came early may have stayed longest: the view says so, not its number.
        ({6: (6, 30, True), 7: (9, 12, True)}, True, True, 6),
        # One that lacked messages when it was lost lacks them still.
        ({6: (6, 12, True), 7: (9, 30, False)}, True, True, 6),
        ({6: (6, 12, False), 7: (9, 30, False)}, True, True, 7),
        ({6: (6, 12, True), 7: (9, 12, True, True)}, True, True, 7),
    ],
)
def test_the_best_copy_that_is_there_follows_a_lost_master(
    copies: dict[int, int | tuple[int, int, bool] | tuple[int, int, bool, bool]],
    lenient: bool,
    forced: bool,
    node: int,
) -> None:
    ages = {
        each: CopyAge(found) if isinstance(found, int) else CopyAge(*found)
        for each, found in copies.items()
    }
    view = founded(1, 1)
    for member in range(2, 6):
        view = view.joined(member, 1).caught_up(member)
    view = view.with_synchronised(2).with_synchronised(4)
    assert heir(view, ages, follows_unsynchronised=lenient, forced=forced) == node


LISTED = {"ha-mode": "nodes", "ha-params": ("b", "c", "elsewhere")}


@pytest.mark.parametrize(
    ("settings", "drained", "nodes"),
    [
        (LISTED, "", {2, 3}),
        (LISTED, "c", {2}),
        (LISTED, "bc", {1, 4}),
        ({"ha-mode": "nodes", "ha-params": ("elsewhere",)}, "", {1, 2, 3, 4}),
        ({"ha-mode": "all"}, "", {1, 2, 3, 4}),
        ({"ha-mode": "all"}, "ab", {3, 4}),
        ({}, "", {1, 2, 3, 4}),
    ],
)
def test_nodes_that_may_have_the_master(
    settings: dict[str, object], drained: str, nodes: set[int]
) -> None:
    named = {name: node for name, node in NAMED.items() if name not in drained}
    assert master_nodes(policy_from(settings), named) == nodes
