"""The walk-through of local delivery: three replicas, two consumers, step by step.

`Cluster` holds each replica's own log and lets it apply entry by entry, in the script's order; it
sends what a replica's effects address to its own node, as the queue shell does. After every group,
log, service queue and assignments of every replica are compared with the script.
"""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER
from tests.unit.queues.quorum.support import Log, expand, session_id

NODES = {"A": 1, "B": 2, "C": 3}
C1 = session_id(NODES["A"], 1)
C2 = session_id(NODES["C"], 2)
PUBLISHER = session_id(NODES["B"], 3)


class Cluster:
    """Three replicas of one queue."""

    def __init__(self, settings: dict[str, Any] | None = None, **names: int) -> None:
        self.settings = settings or {}
        self.proposed = Log()
        self.machines = {name: QuorumMachine(settings) for name in "ABC"}
        self.logs: dict[str, list[str]] = {name: [] for name in "ABC"}
        self.applied = dict.fromkeys("ABC", 0)
        self.labels: list[str] = []
        self.leader = "B"
        self.messages: dict[int, str] = {}
        self.sessions = names or {"c1": C1, "c2": C2}
        #: (sending replica, message, consumer) in order
        self.sent: list[tuple[str, str, str]] = []
        self.told: list[str] = []

    def propose(self, label: str) -> None:
        """The leader appends what a channel proposes: E, S, K, or D as in the script."""
        verb, *rest = label.split(" ", 1)[1].split(" ")
        log = self.proposed
        if verb == "E":
            log.publish(PUBLISHER, [10])
        elif verb == "S":
            priority = int(rest[1]) if len(rest) > 1 else 0
            log.checkout(self.sessions[rest[0]], 1, priority=priority)
        elif verb == "K":
            log.settle(self.sessions[rest[1]], 1, int(rest[2]), int(rest[2]))
        elif verb == "D":
            log.session_down(self.sessions[rest[0]])
        elif verb == "X":
            log.cancel(self.sessions[rest[0]], 1)
        elif verb == "N":
            log.node_down(NODES[rest[0]])
        elif verb == "U":
            log.node_up(NODES[rest[0]])
        entry = log.seal()
        assert label.startswith(f"{log.term}:{entry.index} "), label
        if verb == "E":
            self.messages[entry.index] = rest[0]
        self.labels.append(label.split(" ")[0])
        self.logs[self.leader].append(self.labels[-1])

    def replicate(self, *targets: str) -> None:
        """The leader sends the next entry to each of the targets."""
        for name in targets:
            self.logs[name].append(self.labels[len(self.logs[name])])

    def apply(self, name: str) -> None:
        """A replica applies the next entry of its log, and sends what is for its own node."""
        machine = self.machines[name]
        index = self.applied[name] + 1
        assert index <= len(self.logs[name]), "not in this replica's log yet"
        entry = self.proposed.entries[index - 1]
        self.applied[name] = index
        machine.apply(entry.index, entry.time_ms, entry.data)
        check_invariants(machine)
        self.carry_out(name)

    def carry_out(self, name: str, without_replica: frozenset[str] = frozenset()) -> None:
        """Carries out the effects for this node; a leader also for nodes without a replica."""
        machine = self.machines[name]
        nodes = {NODES[name]}
        if name == self.leader:
            nodes |= {NODES[other] for other in without_replica}
        for effect in machine.effects:
            if effect[0] == EFFECT_DELIVER and effect[1] >> 56 in nodes:
                consumer = next(c for c, s in self.sessions.items() if s == effect[1])
                self.sent.append((name, self.messages[effect[4]], consumer))
            elif effect[0] == EFFECT_APPLIED and effect[1] == PUBLISHER and name == "B":
                self.told.append(self.messages[machine.index])
        machine.effects.clear()

    def holds(self, name: str) -> list[str]:
        machine = self.machines[name]
        return [
            f"{self.messages[place[0]]}→{consumer}"
            for consumer, session in self.sessions.items()
            for _, run in machine.deliveries.holds(session, 1)
            for place in expand([run])
        ]

    def service(self, name: str) -> list[str]:
        by_session = {session: consumer for consumer, session in self.sessions.items()}
        return [by_session[session] for session, _ in self.machines[name].consumers.service_queue()]

    def queue(self, name: str) -> list[str]:
        machine = self.machines[name]
        places = expand(machine.backlog.returned.runs()) + expand(machine.backlog.fresh.runs())
        return [self.messages[place[0]] for place in places]

    def expect(self, names: str, held: str, service: str, queue: str = "") -> None:
        """Assignments, service queue and waiting messages of each of the replicas."""
        for name in names:
            assert self.holds(name) == held.split(), name
            assert self.service(name) == service.split(), name
            assert self.queue(name) == queue.split(), name
        same = {self.applied[n]: self.machines[n].state_hash() for n in names}
        for name in names:
            assert self.machines[name].state_hash() == same[self.applied[name]]

    def expect_logs(self, a: str, b: str, c: str) -> None:
        assert [self.logs[name] for name in "ABC"] == [a.split(), b.split(), c.split()]


def play_groups_1_to_6(cluster: Cluster) -> None:
    """The common part of main run and variant, asserted group by group."""
    # group 1: event 1
    cluster.propose("1:1 E m1")
    cluster.expect_logs("", "1:1", "")
    # group 2: events 2-3
    cluster.replicate("A", "C")
    cluster.expect_logs("1:1", "1:1", "1:1")
    cluster.expect("ABC", "", "")
    # group 3: events 4-5
    cluster.propose("1:2 S c1")
    cluster.apply("B")
    assert cluster.told == ["m1"]
    cluster.expect_logs("1:1", "1:1 1:2", "1:1")
    cluster.expect("B", "", "", "m1")
    cluster.expect("AC", "", "")
    # group 4: events 6-9
    cluster.replicate("A", "C")
    cluster.apply("C")
    cluster.apply("A")
    cluster.expect_logs("1:1 1:2", "1:1 1:2", "1:1 1:2")
    cluster.expect("ABC", "", "", "m1")
    # group 5: events 10-12
    cluster.apply("B")
    cluster.propose("1:3 S c2")
    cluster.propose("1:4 E m2")
    cluster.expect_logs("1:1 1:2", "1:1 1:2 1:3 1:4", "1:1 1:2")
    cluster.expect("B", "m1→c1", "c1")
    cluster.expect("AC", "", "", "m1")
    assert cluster.sent == []
    # group 6: events 13-16
    cluster.replicate("A", "C")
    cluster.apply("C")
    cluster.expect("A", "", "", "m1")
    cluster.apply("A")
    cluster.expect_logs("1:1 1:2 1:3", "1:1 1:2 1:3 1:4", "1:1 1:2 1:3")
    cluster.expect("ABC", "m1→c1", "c1")
    assert cluster.sent == [("A", "m1", "c1")]


def play_groups_7_to_9(cluster: Cluster) -> None:
    # group 7: events 17-20
    cluster.apply("B")
    cluster.replicate("A")
    cluster.propose("1:5 K m1 c1 0")
    cluster.apply("A")
    cluster.expect_logs("1:1 1:2 1:3 1:4", "1:1 1:2 1:3 1:4 1:5", "1:1 1:2 1:3")
    cluster.expect("AB", "m1→c1", "c1 c2")
    cluster.expect("C", "m1→c1", "c1")
    # group 8: events 21-23
    cluster.replicate("C")
    cluster.apply("C")
    cluster.apply("B")
    assert cluster.told == ["m1", "m2"]
    cluster.expect("B", "m1→c1 m2→c1", "c2 c1")
    cluster.expect("AC", "m1→c1", "c1 c2")
    assert cluster.sent == [("A", "m1", "c1")]
    # group 9: events 24-26; 1:5 has reached A
    cluster.replicate("A")
    cluster.apply("B")
    cluster.expect("B", "m2→c1", "c2 c1")
    cluster.apply("C")
    cluster.apply("A")
    cluster.expect("AC", "m1→c1 m2→c1", "c2 c1")
    cluster.expect_logs("1:1 1:2 1:3 1:4 1:5", "1:1 1:2 1:3 1:4 1:5", "1:1 1:2 1:3 1:4")
    assert cluster.sent == [("A", "m1", "c1"), ("A", "m2", "c1")]


def test_main_run_keeps_order_over_a_change_of_leader() -> None:
    cluster = Cluster()
    play_groups_1_to_6(cluster)
    play_groups_7_to_9(cluster)
    # groups 10 and 11: B fails, A is elected
    cluster.leader = "A"
    cluster.proposed.term = 2
    # group 12: events 29-30
    cluster.propose("2:6 E m3")
    cluster.replicate("C")
    cluster.expect_logs("1:1 1:2 1:3 1:4 1:5 2:6", "1:1 1:2 1:3 1:4 1:5", "1:1 1:2 1:3 1:4 1:5")
    cluster.expect("AC", "m1→c1 m2→c1", "c2 c1")
    # group 13: events 31-33
    cluster.replicate("C")
    cluster.apply("A")
    cluster.apply("C")
    cluster.expect_logs("1:1 1:2 1:3 1:4 1:5 2:6", "1:1 1:2 1:3 1:4 1:5", "1:1 1:2 1:3 1:4 1:5 2:6")
    cluster.expect("AC", "m2→c1", "c2 c1")
    # group 14: events 34-35
    cluster.apply("A")
    assert ("C", "m3", "c2") not in cluster.sent
    cluster.apply("C")
    cluster.expect("AC", "m2→c1 m3→c2", "c1 c2")
    assert cluster.sent == [("A", "m1", "c1"), ("A", "m2", "c1"), ("C", "m3", "c2")]


def test_variant_a_failed_consumers_messages_go_to_the_other_in_order() -> None:
    cluster = Cluster()
    play_groups_1_to_6(cluster)
    # group 7': c1's channel goes away; B proposes D c1
    cluster.apply("B")
    cluster.replicate("A")
    cluster.apply("A")
    cluster.propose("1:5 D c1")
    cluster.expect("AB", "m1→c1", "c1 c2")
    # group 8'
    cluster.replicate("A")
    cluster.replicate("C")
    cluster.apply("C")
    cluster.apply("B")
    cluster.apply("A")
    cluster.expect("AB", "m1→c1 m2→c1", "c2 c1")
    cluster.expect("C", "m1→c1", "c1 c2")
    assert cluster.sent[-1] == ("A", "m2", "c1"), "sent, but nobody is there any more"
    del cluster.sent[:]
    # group 9': the return and both assignments are one apply of the entry
    cluster.apply("B")
    cluster.apply("C")
    cluster.expect("C", "m1→c1 m2→c1", "c2 c1")
    cluster.apply("A")
    # groups 10' and 11'
    cluster.expect("AB", "m1→c2 m2→c2", "c2")
    assert cluster.sent == []
    cluster.replicate("C")
    cluster.apply("C")
    cluster.expect("ABC", "m1→c2 m2→c2", "c2")
    assert cluster.sent == [("C", "m1", "c2"), ("C", "m2", "c2")]
    for machine in cluster.machines.values():
        assert [run[5:7] for _, run in machine.deliveries.holds(C2, 1)] == [(1, 1), (1, 1)], (
            "redelivered"
        )


def test_the_leader_sends_for_a_node_without_a_replica() -> None:
    far = session_id(4, 1)
    cluster = Cluster(c1=far)
    cluster.propose("1:1 E m1")
    cluster.propose("1:2 S c1")
    cluster.replicate("A", "C")
    cluster.replicate("A", "C")
    for name in "ABC":
        machine = cluster.machines[name]
        for entry in cluster.proposed.entries:
            machine.apply(entry.index, entry.time_ms, entry.data)
        sent = [e for e in machine.effects if e[0] == EFFECT_DELIVER and e[1] >> 56 == 4]
        assert len(sent) == 1, "every replica names it; the leader alone carries it out"


def test_a_replica_that_catches_up_names_the_same_ids_as_the_leader_sent() -> None:
    """The local replica lags, the leader sends for it; what the replica sends later is a repeat."""
    cluster = Cluster()
    for label in ("1:1 S c2", "1:2 E m1", "1:3 E m2"):
        cluster.propose(label)
    for _ in range(3):
        cluster.replicate("A", "C")
        entry = cluster.proposed.entries[cluster.applied["B"]]
        cluster.applied["B"] += 1
        cluster.machines["B"].apply(entry.index, entry.time_ms, entry.data)
    by_leader = [e for e in cluster.machines["B"].effects if e[0] == EFFECT_DELIVER]
    cluster.carry_out("B", frozenset("C"))
    assert cluster.sent == [("B", "m1", "c2"), ("B", "m2", "c2")]
    machine = cluster.machines["C"]
    for entry in cluster.proposed.entries:
        machine.apply(entry.index, entry.time_ms, entry.data)
    assert [e for e in machine.effects if e[0] == EFFECT_DELIVER] == by_leader


def test_a_late_acknowledgement_after_the_pause_is_ignored() -> None:
    """c1's node is cut off, its messages return in time, c1 comes back and acknowledges."""
    cluster = Cluster()
    steps = ["1:1 S c1", "1:2 S c2", "1:3 E m1", "1:4 E m2", "1:5 N A"]
    for label in steps:
        cluster.propose(label)
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
    cluster.expect("ABC", "m1→c1 m2→c2", "c2")
    log = cluster.proposed
    log.leader(14)
    entry = log.seal(after_ms=60_001)
    cluster.labels.append(f"1:{entry.index}")
    cluster.logs["B"].append(cluster.labels[-1])
    cluster.replicate("A", "C")
    for name in "ABC":
        cluster.apply(name)
    cluster.expect("ABC", "m2→c2 m1→c2", "c2")
    for label in ("1:7 U A", "1:8 K m1 c1 0", "1:9 E m3"):
        cluster.propose(label)
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
    cluster.expect("ABC", "m2→c2 m1→c2 m3→c2", "c1 c2")
    assert cluster.machines["A"].backlog.acked == 0
    assert [run[5:7] for _, run in cluster.machines["A"].deliveries.holds(C2, 1)][1] == (1, 0)


def test_after_a_snapshot_install_what_is_checked_out_is_sent_again() -> None:
    cluster = Cluster()
    play_groups_1_to_6(cluster)
    play_groups_7_to_9(cluster)
    # C never saw anything: it gets B's state and then serves its node.
    fresh = QuorumMachine()
    fresh.restore(cluster.machines["B"].snapshot())
    assert fresh.effects == []
    assert fresh.state_hash() == cluster.machines["B"].state_hash()
    cluster.machines["A"] = fresh
    fresh.resend(NODES["A"])
    deliver = [e for e in fresh.effects if e[0] == EFFECT_DELIVER]
    assert [(e[1], e[2], e[3], cluster.messages[e[4]]) for e in deliver] == [(C1, 1, 1, "m2")]
    assert [e[2] for e in fresh.effects if e[0] == EFFECT_APPLIED][-1] == 3, "K m1 was applied"


def test_leadership_moves_between_commit_and_apply() -> None:
    """m2 is committed under B, B is gone before it applies it; A applies it as leader."""
    cluster = Cluster()
    for label in ("1:1 S c1", "1:2 E m1", "1:3 E m2"):
        cluster.propose(label)
        cluster.replicate("A", "C")
    cluster.apply("B")
    cluster.apply("B")
    cluster.leader = "A"
    for name in "AC":
        for _ in range(3):
            cluster.apply(name)
    cluster.expect("AC", "m1→c1 m2→c1", "c1")
    assert cluster.sent == [("A", "m1", "c1"), ("A", "m2", "c1")]


def test_two_consumers_on_one_node_take_turns() -> None:
    cluster = Cluster(c1=C1, c2=session_id(NODES["A"], 9))
    labels = ["1:1 S c1", "1:2 S c2", *(f"1:{i + 3} E m{i}" for i in range(4))]
    for label in labels:
        cluster.propose(label)
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
    cluster.expect("ABC", "m0→c1 m2→c1 m1→c2 m3→c2", "c1 c2")
    assert cluster.sent == [
        ("A", "m0", "c1"),
        ("A", "m1", "c2"),
        ("A", "m2", "c1"),
        ("A", "m3", "c2"),
    ]


@pytest.mark.parametrize("ending", ["D", "X"])
def test_single_active_consumer_take_over(ending: str) -> None:
    cluster = Cluster({"single_active": True})
    labels = ["1:1 E m1", "1:2 S c1", "1:3 S c2", "1:4 E m2"]
    for label in labels:
        cluster.propose(label)
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
    cluster.expect("ABC", "m1→c1 m2→c1", "c1")
    for label in ("1:5 K m1 c1 0", f"1:6 {ending} c1", "1:7 E m3"):
        cluster.propose(label)
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
    if ending == "D":
        cluster.expect("ABC", "m2→c2 m3→c2", "c2")
    else:
        # Strict: the next one begins when what the old one holds is settled.
        cluster.expect("ABC", "m2→c1", "", "m3")
        cluster.propose("1:8 K m2 c1 1")
        cluster.replicate("A", "C")
        for name in "ABC":
            cluster.apply(name)
        cluster.expect("ABC", "m3→c2", "c2")
    assert cluster.sent[-1] == ("C", "m3", "c2")
