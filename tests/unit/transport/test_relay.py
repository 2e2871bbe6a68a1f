"""Nodes whose link is cut and that reach each other through a third one."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels.link_frames import (
    FRAME_APPEND,
    FRAME_HEARTBEAT,
    FRAME_RELAY,
    HEADER_SIZE,
    frame,
    frame_header,
)
from convoymq.transport import relay
from convoymq.transport.relay import RelayTable

TICK_MS = 100
WAIT_MS = 1_000


class World:
    """Tables of some nodes, and direct links that keep their order until they are cut."""

    def __init__(self, nodes: int = 3) -> None:
        self.now = 0
        self.nodes = list(range(1, nodes + 1))
        self.incarnations = dict.fromkeys(self.nodes, 1)
        self.tables = {node: self.table(node) for node in self.nodes}
        self.linked: set[tuple[int, int]] = set()
        self.wires: dict[tuple[int, int], deque[tuple[str, Any]]] = {}
        self.told: dict[int, list[tuple[Any, ...]]] = {node: [] for node in self.nodes}
        self.frames: dict[tuple[int, int], list[int]] = {}
        self.backlog: dict[tuple[int, int], int] = {}
        self.broken: list[tuple[int, int]] = []
        for a in self.nodes:
            for b in self.nodes:
                if a < b:
                    self.link(a, b)
        self.run()

    def table(self, node: int) -> RelayTable:
        def judge(other: int, hello: bytes) -> int:
            number, incarnation = msgspec.msgpack.decode(hello)
            return incarnation if number == other else 0

        return RelayTable(
            node,
            1000 * node,
            lambda: msgspec.msgpack.encode([node, self.incarnations[node]]),
            judge,
            lambda other: self.backlog.get((node, other), 0),
            wait_ms=WAIT_MS,
            backlog_max_bytes=100,
        )

    def link(self, a: int, b: int) -> None:
        self.linked |= {(a, b), (b, a)}
        for one, two in ((a, b), (b, a)):
            self.wires[one, two] = deque()
            self.carry_out(one, self.tables[one].linked(two, self.incarnations[two], self.now))

    def cut(self, a: int, b: int) -> None:
        self.linked -= {(a, b), (b, a)}
        for one, two in ((a, b), (b, a)):
            self.wires.pop((one, two), None)
            self.carry_out(one, self.tables[one].unlinked(two, self.now))

    def carry_out(self, node: int, outputs: list[relay.Output]) -> None:
        for output in outputs:
            match output:
                case relay.Announce():
                    for other in self.nodes:
                        if (node, other) in self.linked:
                            self.wires[node, other].append(("told", self.tables[node].neighbours()))
                case relay.Send(to, data, _):
                    if (node, to) in self.linked:
                        self.wires[node, to].append(("frame", data))
                case relay.Deliver(source, data):
                    self.frames.setdefault((source, node), []).append(frame_header(data)[4])
                    self.told[node].append(("frame", source, frame_header(data)[4]))
                case relay.Break(other, _):
                    self.broken.append((node, other))
                    self.cut(node, other)
                case relay.Up(other, incarnation, _):
                    self.told[node].append(("up", other, incarnation))
                case relay.Down(other):
                    self.told[node].append(("down", other))
                case relay.Suspect(other):
                    self.told[node].append(("suspect", other))
                case relay.Unsuspect(other):
                    self.told[node].append(("unsuspect", other))

    def deliver(self, source: int, target: int) -> bool:
        wire = self.wires.get((source, target))
        if not wire:
            return False
        kind, content = wire.popleft()
        table = self.tables[target]
        if kind == "told":
            self.carry_out(target, table.heard(source, content, self.now))
        else:
            self.carry_out(target, table.on_frame(source, content, self.now))
        return True

    def run(self) -> None:
        while sum(self.deliver(a, b) for a, b in list(self.wires)):
            pass

    def pass_time(self, ms: int) -> None:
        for _ in range(0, ms, TICK_MS):
            self.now += TICK_MS
            for node in self.nodes:
                self.carry_out(node, self.tables[node].tick(self.now))
            self.run()

    def send(self, source: int, target: int, number: int, urgent: bool = False) -> bool:
        data = frame(FRAME_APPEND, 0, 0, number, 0, 0, 0)
        wrapped = self.tables[source].wrap(target, len(data), urgent)
        if wrapped is None:
            return False
        hop, header = wrapped
        self.wires[source, hop].append(("frame", header + data))
        return True


def test_a_pair_whose_link_is_cut_is_relayed_both_ways() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(WAIT_MS - TICK_MS)
    assert world.told[1] == world.told[3] == []
    assert not world.send(1, 3, 0)
    world.pass_time(2 * TICK_MS)
    assert world.told == {1: [("up", 3, 1)], 2: [], 3: [("up", 1, 1)]}
    assert (world.tables[1].hop_of(3), world.tables[3].hop_of(1)) == (2, 2)
    for number in range(5):
        assert world.send(1, 3, number)
        assert world.send(3, 1, number, urgent=True)
    world.run()
    assert world.frames == {(1, 3): [0, 1, 2, 3, 4], (3, 1): [0, 1, 2, 3, 4]}


def test_a_direct_link_replaces_the_relay() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    world.link(1, 3)
    world.run()
    assert world.told[1] == [("up", 3, 1), ("down", 3)]
    assert world.told[3] == [("up", 1, 1), ("down", 1)]
    world.pass_time(2 * WAIT_MS)
    assert len(world.told[1]) == len(world.told[3]) == 2
    assert not world.send(1, 3, 0)


def test_nodes_without_a_neighbour_in_common_are_not_reached() -> None:
    """A line of four: nothing is relayed twice."""
    world = World(4)
    for a, b in ((1, 3), (1, 4), (2, 4)):
        world.cut(a, b)
    world.pass_time(3 * WAIT_MS)
    assert world.tables[1].nodes() == [3]
    assert world.tables[4].nodes() == [2]
    data = frame(FRAME_RELAY, 0, 0, 4, 1, 0, 1, bytes(HEADER_SIZE))
    assert world.tables[3].on_frame(2, data, world.now) == []


@pytest.mark.parametrize("breaks", [(1, 2), (2, 3)])
def test_both_ends_are_down_when_the_relay_is_lost(breaks: tuple[int, int]) -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    world.cut(*breaks)
    world.run()
    assert world.told[1] == [("up", 3, 1), ("down", 3)]
    assert world.told[3] == [("up", 1, 1), ("down", 1)]


def test_another_relay_takes_over() -> None:
    world = World(4)
    world.cut(1, 4)
    world.pass_time(2 * WAIT_MS)
    assert world.tables[1].hop_of(4) == 2
    world.cut(2, 4)
    world.pass_time(2 * TICK_MS)
    assert world.told[1] == [("up", 4, 1), ("down", 4), ("up", 4, 1)]
    assert world.told[4][:3] == [("up", 1, 1), ("down", 1), ("up", 1, 1)]
    assert world.tables[1].hop_of(4) == world.tables[4].hop_of(1) == 3


def test_a_frame_that_the_relay_drops_breaks_the_pair_at_both_ends() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    world.backlog[2, 3] = 101
    assert world.send(1, 3, 1)
    assert world.send(1, 3, 2)
    world.run()
    assert world.tables[2].dropped >= 2
    assert world.frames == {}
    assert ("down", 3) in world.told[1]
    assert ("down", 1) in world.told[3]
    world.backlog.clear()
    world.pass_time(2 * TICK_MS)
    assert world.told[1][-1] == ("up", 3, 1)
    assert world.told[3][-1] == ("up", 1, 1)
    assert world.send(1, 3, 3)
    world.run()
    assert world.frames == {(1, 3): [3]}


def test_a_gap_breaks_the_pair() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    for number in (1, 2):
        assert world.send(1, 3, number)
    world.wires[1, 2].popleft()
    world.run()
    assert world.frames == {}
    assert world.told[1] == [("up", 3, 1), ("down", 3), ("up", 3, 1)]
    assert world.told[3] == [("up", 1, 1), ("down", 1), ("up", 1, 1)]


def test_whom_the_relay_suspects_is_suspected() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    world.carry_out(2, world.tables[2].suspected(3, True, world.now))
    world.run()
    assert world.told[1] == [("up", 3, 1), ("suspect", 3)]
    assert world.tables[1].is_suspected(3)
    world.carry_out(2, world.tables[2].suspected(3, False, world.now))
    world.run()
    assert world.told[1][-1] == ("unsuspect", 3)
    # Nor is anything known of a node behind a relay that is silent itself.
    world.carry_out(1, world.tables[1].suspected(2, True, world.now))
    assert world.told[1][-1] == ("suspect", 3)


def test_a_direct_link_that_is_silent_for_long_gives_way_to_a_relay() -> None:
    world = World()
    world.carry_out(1, world.tables[1].suspected(3, True, world.now))
    world.pass_time(WAIT_MS - TICK_MS)
    assert world.broken == []
    world.pass_time(TICK_MS * 3)
    assert world.broken == [(1, 3)]
    assert world.told[1] == [("up", 3, 1)]


def test_a_silent_node_that_the_others_do_not_hear_either_keeps_its_link() -> None:
    world = World()
    for node in (1, 2):
        world.carry_out(node, world.tables[node].suspected(3, True, world.now))
    world.run()
    world.pass_time(5 * WAIT_MS)
    assert world.broken == []


def test_a_node_that_starts_anew_is_another_one() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    world.cut(2, 3)
    world.run()
    world.incarnations[3] = 2
    world.tables[3] = world.table(3)
    world.told[3] = []
    world.link(2, 3)
    world.run()
    world.pass_time(2 * WAIT_MS)
    assert world.told[1] == [("up", 3, 1), ("down", 3), ("up", 3, 2)]
    assert world.told[3] == [("up", 1, 1)]


@pytest.mark.parametrize(
    "told", [None, 5, "x", [5], [[1]], [["1", 1, 0]], [[1, 2, 3, 4]], [[3, 1, None]]]
)
def test_malformed_announcements_are_ignored(told: object) -> None:
    world = World()
    world.tables[1].heard(2, told, 0)
    world.pass_time(2 * WAIT_MS)
    assert world.told[1] == []


def test_frames_of_one_link_are_not_carried_over_another() -> None:
    world = World()
    world.cut(1, 3)
    world.pass_time(2 * WAIT_MS)
    inner = frame(FRAME_HEARTBEAT, 0, 0, 0, 0, 0, 0)
    wrapped = world.tables[1].wrap(3, len(inner), False)
    assert wrapped is not None
    with pytest.raises(ValueError, match="not relayed"):
        world.tables[3].on_frame(2, wrapped[1] + inner, world.now)


STEPS = st.one_of(
    st.tuples(st.just("cut"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("link"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("full"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("suspect"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("send"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("arrive"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("time"), st.integers(1, 15), st.just(0)),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=60))
def test_frames_of_a_session_come_in_order_without_a_gap(
    steps: list[tuple[str, int, int]],
) -> None:
    """Whatever breaks, and in the end everybody is reached again."""
    world = World(4)
    epochs: dict[int, tuple[int, int, int]] = {}
    number = 0
    for step, a, b in steps:
        if step == "time":
            world.pass_time(a * TICK_MS)
        if a == b:
            continue
        up = (a, b) in world.linked
        if step == "cut" and up:
            world.cut(a, b)
        elif step == "link" and not up:
            world.link(a, b)
        elif step == "full":
            world.backlog[a, b] = 0 if world.backlog.get((a, b)) else 101
        elif step == "suspect" and up:
            silent = world.tables[a]._direct[b].suspected_since is None
            world.carry_out(a, world.tables[a].suspected(b, silent, world.now))
        elif step == "send":
            for _ in range(3):
                number += 1
                epoch = sum(event[:2] == ("up", b) for event in world.told[a])
                if world.send(a, b, number):
                    epochs[number] = (a, b, epoch)
        elif step == "arrive":
            world.deliver(a, b)
    for node in world.nodes:
        # Every run of frames between up and down is a run of one session of the sender.
        runs: dict[int, list[int]] = {}
        for event in [*world.told[node], *(("down", other) for other in world.nodes)]:
            if event[0] == "frame":
                runs.setdefault(event[1], []).append(event[2])
            elif event[0] in ("up", "down"):
                run = runs.pop(event[1], [])
                sent = [n for n, sender in epochs.items() if run and sender == epochs[run[0]]]
                assert run == sent[: len(run)]
    world.backlog.clear()
    for a in world.nodes:
        for b in world.nodes:
            if a < b and (a, b) != (1, 4) and (a, b) not in world.linked:
                world.link(a, b)
            if (a, b) in world.linked:
                world.carry_out(a, world.tables[a].suspected(b, False, world.now))
    if (1, 4) in world.linked:
        world.cut(1, 4)
    world.pass_time(3 * WAIT_MS)
    world.frames.clear()
    assert world.send(1, 4, 1)
    assert world.send(4, 1, 2)
    world.run()
    assert world.frames == {(1, 4): [1], (4, 1): [2]}
