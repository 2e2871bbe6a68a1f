"""Which nodes found a cluster, which join one, and which wait: every row of the table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from convoymq.metadata.formation import (
    ASK_AGAIN_MS,
    WAIT_SAID_MS,
    Accept,
    Action,
    AskToFound,
    AskToJoin,
    Fail,
    Formation,
    Found,
    Joined,
    Resume,
    Wait,
    Withdraw,
    founding_from,
    founding_to,
)
from convoymq.transport.identity import Founding, NodeIdentity

X, Y = "c" * 32, "e" * 32


@dataclass(frozen=True)
class Told:
    """What a linked node says of itself."""

    directory: str
    cluster_id: str = ""
    candidate: str = ""
    formed: bool = True


def directory(node: int, life: int = 0) -> str:
    return f"d{life}{node:030}"


def candidate(node: int, life: int = 0) -> str:
    return f"a{life}{node:030}"


def identity(node: int, cluster: str = "", life: int = 0) -> NodeIdentity:
    return NodeIdentity(node, directory(node, life), 1, cluster, candidate(node, life))


def hello(node: int, cluster: str = "", life: int = 0) -> Told:
    return Told(directory(node, life), cluster, candidate(node, life))


def founding(*nodes: int, cluster: str = "") -> Founding:
    return Founding(
        cluster=cluster or candidate(min(nodes)),
        directories=tuple((node, directory(node)) for node in nodes),
    )


def fresh(node: int = 1, **options: Any) -> Formation:
    return Formation(identity(node), **{"peers": (1, 2, 3), **options})


def said(formation: Formation, linked: dict[int, Told]) -> Wait:
    """What the node says when nothing happens for a while."""
    formation.step(0, linked)
    (found,) = [a for a in formation.step(WAIT_SAID_MS, linked) if isinstance(a, Wait)]
    assert not [a for a in formation.step(WAIT_SAID_MS, linked) if isinstance(a, Wait)]
    return found


ALL = {2: hello(2), 3: hello(3)}


# One node.


def test_a_log_is_resumed_whatever_the_others_say() -> None:
    formation = Formation(identity(1, X), has_log=True, peers=(1, 2, 3))
    assert formation.step(0, {2: hello(2, Y)}) == [Resume((1, 2, 3))]
    assert formation.step(0, {}) == []


def test_a_log_without_a_cluster_is_refused() -> None:
    (found,) = Formation(identity(1), has_log=True).step(0, {})
    assert isinstance(found, Fail)


@pytest.mark.parametrize("own", ["", X])
def test_nodes_of_different_clusters_are_named(own: str) -> None:
    formation = Formation(identity(1, own), peers=(1, 2, 3))
    (found,) = formation.step(0, {2: hello(2, Y), 3: hello(3, X)})
    assert isinstance(found, Fail)
    assert f"node 2 is in {Y}" in found.text
    assert f"node 3 is in {X}" in found.text


def test_a_majority_does_not_found_a_cluster() -> None:
    formation = fresh()
    linked = {2: hello(2)}
    assert formation.step(0, linked) == []
    assert said(formation, linked).missing == (3,)
    assert formation.step(3_600_000, linked) == []
    assert "node 3 is not linked" in said(fresh(), linked).reason
    assert "nodes 2 and 3 are not linked" in said(fresh(), {}).reason


def test_all_configured_nodes_together_found_one() -> None:
    formation = fresh()
    expected = founding(1, 2, 3)
    assert formation.step(0, ALL) == [Accept(expected)]
    assert formation.step(0, ALL) == [AskToFound((2, 3), expected)]
    assert formation.step(1, ALL) == []
    yes = {"cluster": expected.cluster, "directory": "", "opened": False, "founded": False}
    assert formation.on_found_answer(2, yes) == []
    assert formation.step(2, ALL) == []
    assert formation.on_found_answer(3, yes) == []
    assert formation.step(3, ALL) == [Found((1, 2, 3), expected.cluster, 1)]
    assert formation.step(4, ALL) == []


def test_a_founder_that_does_not_answer_is_asked_again() -> None:
    formation = fresh()
    formation.step(0, ALL)
    formation.step(0, ALL)
    again = formation.step(ASK_AGAIN_MS, ALL)
    assert again == [AskToFound((2, 3), founding(1, 2, 3))]


def test_one_node_without_peers_founds_at_once() -> None:
    formation = Formation(identity(1))
    assert formation.step(0, {}) == [Accept(founding(1))]
    assert formation.step(0, {}) == [Found((1,), candidate(1), 1)]


def test_nodes_without_numbers_found_when_enough_are_linked() -> None:
    formation = Formation(identity(2), count=3)
    assert "2 of the 3" in said(formation, {5: hello(5)}).reason
    linked = {7: hello(7), 5: hello(5), 9: hello(9)}
    assert formation.step(0, linked) == [Accept(founding(2, 5, 7))]
    # Those with the lowest numbers do; the others join.
    late = Formation(identity(9), count=3)
    assert late.step(0, {n: hello(n) for n in (2, 5, 7)}) == [AskToJoin((2, 5, 7))]


def test_a_fresh_node_joins_whoever_has_a_cluster() -> None:
    formation = fresh()
    # Node 2 may be a founder that was linked before it was one.
    assert formation.step(0, {2: hello(2), 3: hello(3, X)}) == [AskToJoin((2, 3))]
    assert formation.step(1, {2: hello(2), 3: hello(3, X)}) == []
    assert formation.step(ASK_AGAIN_MS, {3: hello(3, X)}) == [AskToJoin((3,))]
    answer = {
        "ok": True,
        "role": "learner",
        "members": [2, 3],
        "incarnation": 7,
        "cluster_id": X,
        "groups": 12,
    }
    assert formation.on_join_answer(3, answer) == [Joined(True, (2, 3), X, 7, 12)]
    assert formation.identity == replace(identity(1, X), incarnation=7)
    assert formation.step(ASK_AGAIN_MS, {3: hello(3, X)}) == []


def test_who_is_not_among_the_configured_nodes_only_joins() -> None:
    for formation in (fresh(4), Formation(identity(4), founder=False)):
        assert formation.step(0, ALL) == [AskToJoin((2, 3))]
        assert formation.step(1, ALL) == []


def test_a_wiped_node_founds_nothing_and_asks_to_be_let_in() -> None:
    formation = Formation(identity(1, X), peers=(1, 2, 3))
    assert formation.step(0, ALL) == [AskToJoin((2, 3))]
    wait = said(formation, {2: hello(2)})
    assert "its log is empty" in wait.reason
    assert wait.missing == (3,)
    # A member that the tree has never seen has lost votes all the same.
    answer = {"ok": True, "role": "founder", "members": [1, 2], "incarnation": 5, "cluster_id": X}
    assert formation.on_join_answer(2, answer) == [Joined(False, (1, 2), X, 5, 0)]


def test_an_incarnation_never_falls_by_joining() -> None:
    formation = Formation(replace(identity(1, X), incarnation=9))
    answer = {"ok": True, "role": "wiped", "members": [1, 2], "incarnation": 5, "cluster_id": X}
    assert formation.on_join_answer(2, answer) == [Joined(False, (1, 2), X, 9, 0)]


def test_why_a_node_is_not_let_in_is_said() -> None:
    formation = fresh()
    linked = {3: hello(3, X)}
    formation.step(0, linked)
    formation.on_join_answer(3, formation.answer_join("no majority: see `convoy recover`"))
    assert "node 3: no majority: see `convoy recover`" in said(formation, linked).reason
    formation.on_join_answer(3, None, "it did not answer in time")
    changed = formation.step(WAIT_SAID_MS + 1, linked)
    assert "node 3: it did not answer in time" in changed[0].reason  # type: ignore[union-attr]


def test_an_answer_of_another_cluster_stops_a_wiped_node() -> None:
    formation = Formation(identity(1, X))
    answer = {"ok": True, "role": "learner", "members": [2], "incarnation": 5, "cluster_id": Y}
    (found,) = formation.on_join_answer(2, answer)
    assert isinstance(found, Fail)


@pytest.mark.parametrize("field", ["cluster_id", "members"])
def test_an_answer_without_a_cluster_is_no_answer(field: str) -> None:
    formation = fresh()
    answer = {"ok": True, "role": "learner", "members": [2], "incarnation": 5, "cluster_id": X}
    assert formation.on_join_answer(2, {**answer, field: None}) == []
    assert not formation.opened


# Founders that see different things.


def test_a_founder_accepts_what_another_one_begins() -> None:
    formation = fresh(2)
    answer, done = formation.on_found(founding_to(founding(1, 2, 3)), {1: hello(1)})
    assert done == [Accept(founding(1, 2, 3))]
    assert answer["cluster"] == candidate(1)
    assert (answer["opened"], answer["founded"]) == (False, False)
    assert formation.on_found(founding_to(founding(1, 2, 3)), {})[1] == []


@pytest.mark.parametrize(
    "begun",
    [
        founding(1, 2),
        founding(1, 2, 3, 4),
        Founding(cluster=X, directories=((1, directory(1)), (2, directory(2, 1)), (3, X))),
    ],
    ids=["fewer", "more", "another directory"],
)
def test_a_founding_that_is_not_its_own_is_not_accepted(begun: Founding) -> None:
    formation = fresh(2)
    answer, done = formation.on_found(founding_to(begun), {})
    assert done == []
    assert answer["cluster"] == ""
    assert answer["reason"]


def test_no_founding_is_accepted_beside_a_cluster_that_exists() -> None:
    formation = fresh(2)
    answer, done = formation.on_found(founding_to(founding(1, 2, 3)), {3: hello(3, Y)})
    assert (answer["cluster"], done) == ("", [])


def test_a_directory_accepts_once() -> None:
    formation = Formation(identity(3), count=3)
    formation.step(0, {4: hello(4), 5: hello(5)})
    assert formation.identity.cluster == candidate(3)
    answer, done = formation.on_found(founding_to(founding(1, 2, 3)), {})
    assert (answer["cluster"], answer["directory"], done) == (candidate(3), directory(3), [])
    # Who has asked gives up: that founding can never be complete.
    asker = Formation(identity(1), count=3)
    asker.step(0, {2: hello(2), 3: hello(3)})
    assert asker.on_found_answer(3, answer) == [Withdraw()]
    asker.renewed(identity(1, life=1))
    assert asker.step(0, {3: hello(3, candidate(3))}) == [AskToJoin((3,))]


def test_a_founding_is_resumed_after_a_restart() -> None:
    begun = founding(1, 2, 3)
    formation = Formation(identity(1, candidate(1)), founding=begun, peers=(1, 2, 3))
    assert formation.step(0, {2: hello(2)}) == [AskToFound((2,), begun)]
    assert said(formation, {}).missing == (2, 3)
    formation.on_found_answer(2, {"cluster": begun.cluster, "opened": True})
    assert formation.step(0, {}) == [Found((1, 2, 3), begun.cluster, 1)]


def test_a_founder_that_lost_what_it_had_logged_waits_to_be_let_in() -> None:
    begun = founding(1, 2, 3)
    options = {"founding": begun, "logged": True, "peers": (1, 2, 3)}
    emptied = Formation(identity(1, candidate(1)), **options)
    assert emptied.step(0, {2: hello(2)}) == [AskToJoin((2,))]
    resumed = Formation(identity(1, candidate(1)), has_log=True, **options)
    assert resumed.step(0, {}) == [Resume((1, 2, 3))]
    answer, _ = resumed.on_found(founding_to(begun), {})
    assert (answer["opened"], answer["founded"]) == (True, False)


def test_a_cluster_that_lives_already_is_joined_by_its_late_founder() -> None:
    begun = founding(1, 2, 3)
    formation = Formation(identity(1, candidate(1)), founding=begun, peers=(1, 2, 3))
    formation.on_found_answer(2, {"cluster": begun.cluster, "opened": True, "founded": True})
    assert formation.step(0, {2: hello(2)}) == [AskToJoin((2,))]


def test_a_founder_that_was_emptied_meanwhile_does_not_count() -> None:
    begun = founding(1, 2, 3)
    formation = Formation(identity(1, candidate(1)), founding=begun, peers=(1, 2, 3))
    linked = {2: hello(2), 3: hello(3, life=1)}
    assert formation.step(0, linked) == [AskToFound((2,), begun)]
    assert "node 3 is not the one that founded" in said(formation, linked).reason


def test_who_missed_the_founding_is_told_by_those_it_asks() -> None:
    formation = fresh(2)
    told = Formation(identity(1, candidate(1)), founding=founding(1, 2, 3), peers=(1, 2, 3))
    answer = told.answer_join("the cluster is being founded")
    assert formation.step(0, {1: hello(1, candidate(1))}) == [AskToJoin((1,))]
    assert formation.on_join_answer(1, answer) == [Accept(founding(1, 2, 3))]
    emptied = Formation(identity(2, life=1), peers=(1, 2, 3))
    assert emptied.on_join_answer(1, answer) == []


@pytest.mark.parametrize(
    "body",
    [None, {}, {"cluster": X}, {"cluster": "x", "directories": []}, {"directories": [[1, X]]},
     {"cluster": X, "directories": [[1, X], [1, X]]}],
)  # fmt: skip
def test_what_is_no_founding_is_told_apart(body: Any) -> None:
    assert founding_from(body) is None
    assert fresh().on_found(body, {})[1] == []


# All together: every order of messages between nodes that see each other at different times.


@dataclass
class Node:
    """One node and its disk."""

    formation: Formation
    log: list[Action] = field(default_factory=list)
    done: Action | None = None


class World:
    """Nodes whose requests are answered at once, unless they are not linked."""

    def __init__(self, *nodes: int, **options: Any) -> None:
        self.nodes = {n: Node(Formation(identity(n), **options)) for n in nodes}
        self.links: set[frozenset[int]] = set()
        self.lives = 0

    def linked(self, node: int) -> dict[int, Told]:
        found = {}
        for other, state in self.nodes.items():
            if frozenset((node, other)) in self.links:
                own = state.formation.identity
                opened = state.formation.opened
                found[other] = Told(own.directory, own.cluster, own.candidate, opened)
        return found

    def run(self, node: int, now: int) -> None:
        state = self.nodes[node]
        self.act(node, state.formation.step(now, self.linked(node)))

    def act(self, node: int, actions: list[Action]) -> None:
        state = self.nodes[node]
        for action in actions:
            if isinstance(action, Found | Joined | Fail):
                state.done = action
            elif isinstance(action, Withdraw):
                self.lives += 1
                state.formation.renewed(identity(node, life=self.lives))
            elif isinstance(action, AskToFound):
                for other in action.nodes:
                    body = founding_to(action.founding)
                    answer, done = self.nodes[other].formation.on_found(body, self.linked(other))
                    self.act(other, done)
                    self.act(node, state.formation.on_found_answer(other, answer))
            elif isinstance(action, AskToJoin):
                for other in action.nodes:
                    answer = self.nodes[other].formation.answer_join("not yet")
                    self.act(node, state.formation.on_join_answer(other, answer))


def clusters(world: World) -> dict[str, tuple[int, ...]]:
    found = {}
    for state in world.nodes.values():
        if isinstance(state.done, Found):
            found[state.done.cluster] = state.done.members
    return found


@pytest.mark.parametrize("seed", range(200))
def test_links_in_any_order_make_one_cluster(seed: int) -> None:
    import random

    choose = random.Random(seed)
    world = World(1, 2, 3, peers=(1, 2, 3))
    pairs = [frozenset(pair) for pair in ((1, 2), (1, 3), (2, 3))]
    for now in range(0, 20_000, 50):
        if choose.random() < 0.1:
            pair = choose.choice(pairs)
            world.links ^= {pair}
        if now > 10_000:
            world.links = set(pairs)
        world.run(choose.randint(1, 3), now)
    assert clusters(world) == {candidate(1): (1, 2, 3)}
    assert all(isinstance(state.done, Found) for state in world.nodes.values())


@pytest.mark.parametrize("seed", range(300))
def test_two_sets_that_share_a_node_never_both_make_a_cluster(seed: int) -> None:
    import random

    choose = random.Random(seed)
    world = World(1, 2, 3, 4, 5, count=3)
    pairs = [frozenset((a, b)) for a in range(1, 6) for b in range(a + 1, 6)]
    for now in range(0, 5_000, 20):
        if choose.random() < 0.3:
            world.links ^= {choose.choice(pairs)}
        world.run(choose.randint(1, 5), now)
    assert len(clusters(world)) <= 1
