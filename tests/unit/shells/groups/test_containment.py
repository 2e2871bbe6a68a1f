"""One group of a node fails, in whatever a round does with it: it stops there and is named, the
other groups go on, and so do its members on other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from convoymq.kernels.batch import CMD_TICK
from convoymq.kernels.link_frames import FRAME_APPLIED, frame, frame_header
from convoymq.model.errors import InvariantViolated
from convoymq.replication.machine import EFFECT_TIMER, Effect
from convoymq.storage.types import StorageFault
from tests.unit.shells.groups.test_host import GROUP, ListMachine, Net, Sink

OTHER = GROUP + 1
NODES = (1, 2, 3)


class Trap:
    """Raises once, when it is set."""

    def __init__(self) -> None:
        self.place = ""
        self.error: type[Exception] = KeyError

    def at(self, place: str) -> None:
        if self.place == place:
            self.place = ""
            raise self.error("a fault of our own")


class TrappedMachine(ListMachine):
    """Has effects, and may raise where a replica asks it something."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        super().apply(index, time_ms, data)
        self.effects.append((99,))

    def session_nodes(self) -> frozenset[int]:
        self.trap.at("ask")
        return frozenset()

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        return ()


class TrappedSink(Sink):
    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap

    def on_effects(self, effects: Sequence[Effect], replica: Any) -> None:
        self.trap.at("effects")

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        self.trap.at("leader")
        super().on_leader(group, leader, term)

    def on_link_frame(self, *arguments: Any) -> None:
        self.trap.at("frame")


class Pair:
    """Three hosts with two groups; the trap is in the first of them, on node 1."""

    def __init__(self) -> None:
        self.net = Net()
        self.trap = Trap()
        for node in NODES:
            self.net._start(node)
            host = self.net.hosts[node]
            trap = self.trap if node == 1 else Trap()
            self.machines = {node: TrappedMachine(trap)}
            self.net.machines[node] = self.machines[node]
            self.net.sinks[node] = TrappedSink(trap)
            host.create_group(GROUP, NODES, self.net.machines[node], self.net.sinks[node],
                              leader_hint=1)  # fmt: skip
            host.create_group(OTHER, NODES, ListMachine(), Sink(), leader_hint=1)
            self.net._link(node)
        send = self.net.hosts[1].transport.send

        def trapped(to: int, head: bytes, body: Sequence[bytes] = ()) -> None:
            if frame_header(head)[3] == GROUP:
                self.trap.at("send")
            send(to, head, body)

        self.net.hosts[1].transport.send = trapped  # type: ignore[method-assign]
        self.net.run(3000)
        assert self.net.hosts[1].groups[GROUP].is_leader
        assert self.net.hosts[1].groups[OTHER].is_leader

    def put(self, group: int, value: int) -> None:
        self.net.hosts[1].builder_of(group).add(1, 0, 1 << 56 | 1, value, 0, value)

    def values(self, node: int) -> list[int]:
        host = self.net.hosts[node]
        machine: Any = (host.groups.get(OTHER) or host.stopped[OTHER]).machine
        return list(machine.values)

    def assert_only_the_first_stopped(self) -> None:
        host = self.net.hosts[1]
        assert list(host.stopped) == [GROUP]
        (note,) = [fields for _, event, fields in self.net.notes if event == "raft.replica_stopped"]
        assert note["group"] == GROUP
        assert "KeyError: 'a fault of our own'" in note["reason"]
        assert "Traceback" in note["error"]
        self.put(OTHER, 77)
        self.net.run(500)
        assert 77 in self.values(1)
        # The others lead the first one now, and serve this node.
        self.net.run(5000)
        assert host.leader_of(GROUP) in (2, 3)
        assert GROUP in self.net.hosts[2].groups


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.provokes("raft.replica_stopped")
@pytest.mark.parametrize("place", ["ask", "effects", "send"])
def test_a_replica_that_fails_in_a_round_stops_alone(pair: Pair, place: str) -> None:
    """While its batch is sealed, its effects are carried out, or its frames are sent."""
    pair.trap.place = place
    for value in (1, 2):
        pair.put(GROUP, value)
        pair.put(OTHER, value)
    pair.net.run(500)
    assert not pair.trap.place
    assert pair.values(1)[:2] == [1, 2]
    pair.assert_only_the_first_stopped()


def test_a_replica_that_fails_in_a_tick_stops_alone(pair: Pair) -> None:
    host = pair.net.hosts[1]
    host.active |= {GROUP, OTHER}
    pair.net.isolate(3)
    pair.net.isolate(2)
    pair.put(GROUP, 1)
    pair.net.settle()
    pair.trap.place = "send"
    host.active |= {GROUP, OTHER}
    pair.net.time += 10_000
    host.tick()
    for node in (2, 3):
        pair.net.join(node)
    pair.net.run(5000)
    pair.assert_only_the_first_stopped()


@pytest.mark.parametrize("event", ["link_down", "link_up"])
def test_a_replica_that_fails_when_a_link_changes_stops_alone(pair: Pair, event: str) -> None:
    pair.net.run(100)
    if event == "link_up":
        pair.net.isolate(3)
        pair.net.settle()
    pair.trap.place = "ask"
    if event == "link_up":
        pair.net.join(3)
    else:
        pair.net.hosts[1].on_link_down(3, definite=False)
        pair.net.hosts[1].on_link_up(3, pair.net.hosts[3].incarnation)
    pair.net.run(500)
    assert not pair.trap.place
    pair.assert_only_the_first_stopped()


def test_a_replica_that_fails_when_its_entry_is_on_disk_stops_alone(pair: Pair) -> None:
    """On a follower, which answers the leader then."""
    net = pair.net
    assert net.hosts[1].transfer_leadership(GROUP, 2)
    net.run(500)
    assert net.hosts[2].groups[GROUP].is_leader
    pair.trap.place = "send"
    net.hosts[2].builder_of(GROUP).add(1, 0, 2 << 56 | 1, 1, 0, 1)
    pair.put(OTHER, 5)
    net.run(500)
    assert 5 in pair.values(1)
    pair.assert_only_the_first_stopped()


def test_a_replica_that_fails_in_a_frame_stops_alone(pair: Pair) -> None:
    host = pair.net.hosts[1]
    pair.trap.place = "frame"
    data = frame(FRAME_APPLIED, 0, GROUP, 0, 0, 0, 0)
    with pytest.raises(KeyError) as raised:
        host.on_frame(2, data)
    host.intake.on_frame_failed(data, raised.value)
    pair.assert_only_the_first_stopped()


@pytest.mark.provokes("raft.watch_failed")
def test_a_watched_group_that_fails_forgets_its_leader_and_learns_it_again() -> None:
    net = Net()
    for node in NODES:
        net.add(node, NODES)
    net.watch(4, NODES)
    trap = Trap()
    host = net.hosts[4]
    sink = host.watched[GROUP].sink = TrappedSink(trap)
    net.run(3000)
    assert host.leader_of(GROUP) == net.leader
    trap.place = "leader"
    host.on_link_down(net.leader, definite=False)
    assert [event for node, event, _ in net.notes if node == 4] == ["raft.watch_failed"]
    host.on_link_up(net.leader, net.hosts[net.leader].incarnation)
    net.run(1000)
    assert host.leader_of(GROUP) == net.leader
    assert sink.leaders[-1] == net.leader


def test_a_damaged_log_whose_replica_fails_stops_alone(pair: Pair) -> None:
    host = pair.net.hosts[1]
    host.on_note = lambda event, fields: (
        pair.trap.at(event),
        pair.net.note(1, event, fields),
    )[1]
    pair.put(GROUP, 1)
    pair.net.run(200)
    host.groups[GROUP].log.mark_damaged(StorageFault("a test says so"))
    pair.trap.place = "raft.replica_damaged"
    pair.net.settle()
    assert not pair.trap.place
    pair.assert_only_the_first_stopped()


def test_a_replica_leaves_the_timers_of_its_machine_to_the_sink(pair: Pair) -> None:
    """Both armed one before, and every timer brought two entries."""
    machine = pair.net.machines[1]
    due = pair.net.time + 50

    machine.effects = [(EFFECT_TIMER, due)]
    pair.put(GROUP, 1)
    pair.net.run(1000)
    for seen in (pair.net.machines[node].seen for node in NODES):
        assert CMD_TICK not in [kind for kind, _ in seen]


@pytest.mark.parametrize("place", ["ask", "effects", "send"])
def test_a_violated_invariant_passes(pair: Pair, place: str) -> None:
    pair.trap.place = place
    pair.trap.error = InvariantViolated
    pair.put(GROUP, 1)
    with pytest.raises(InvariantViolated):
        pair.net.run(500)


def test_the_node_hears_of_a_write_ahead_log_that_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on the node can go on without it: nobody contains that."""
    host = pair.net.hosts[1]

    def kick() -> None:
        raise StorageFault("a fault of our own")

    monkeypatch.setattr(host, "_kick", kick)
    pair.put(GROUP, 1)
    with pytest.raises(StorageFault):
        host.end_of_round()
