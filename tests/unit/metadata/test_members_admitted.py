"""Nodes that were let in become members of the tree's group, whatever happened meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata.members import MembershipManager


class World:
    def __init__(self, *, leads: bool = True, members: frozenset[int] = frozenset((1, 2))) -> None:
        core = SimpleNamespace(
            members=SimpleNamespace(nodes=members),
            changes=SimpleNamespace(rejoining={}),
            members_index=1,
            commit_index=1,
        )
        self.replica = SimpleNamespace(core=core, is_leader=leads)
        self.added: list[tuple[int, int, bool]] = []
        self.up = {1, 2, 3}
        tree: Any = SimpleNamespace(
            forgotten=set(),
            directories={1: "a", 2: "b", 3: "c"},
            recoveries=[],
            nodes={},
            queue_index=SimpleNamespace(by_group={}),
        )
        host: Any = SimpleNamespace(
            groups={0: self.replica},
            replica=lambda group: self.replica if group == 0 else None,
            add_member=lambda *asked, voter: self.added.append((*asked, voter)),
            on_membership_changed=None,
        )
        broker: Any = SimpleNamespace(
            node_id=1,
            is_up=lambda node: node in self.up,
        )
        store: Any = SimpleNamespace(tree=tree, watch=lambda watcher: None)
        links: Any = SimpleNamespace(forgotten=set())
        self.membership_manager = MembershipManager(broker, host, store, links, lambda: None)


def test_who_was_let_in_is_added_until_it_is_a_member() -> None:
    """The leader that answered it may have been changing members, or lost its leadership."""
    world = World()
    world.membership_manager.tick()
    world.membership_manager.tick()
    assert world.added == [(0, 3, True), (0, 3, True)]


@pytest.mark.parametrize("why", ["follower", "member", "away", "rejoining"])
def test_nobody_else_is_added(why: str) -> None:
    world = World(
        leads=why != "follower",
        members=frozenset((1, 2, 3) if why == "member" else (1, 2)),
    )
    if why == "away":
        world.up.discard(3)
    if why == "rejoining":
        world.replica.core.changes.rejoining[3] = 1
    world.membership_manager.tick()
    assert world.added == []
