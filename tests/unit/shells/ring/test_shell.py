"""The shell of rings: nodes with a link between each two, and a tree that takes every proposal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from convoymq.kernels.link_frames import FRAME_CONTROL, frame
from convoymq.model.errors import BrokerError, PeerError
from convoymq.replication.ring.types import Frame, Progress
from convoymq.replication.ring.views import RingView, founded
from convoymq.shells.capacity import Waiting
from convoymq.shells.ring.frames import QUESTION_BODY, encode
from convoymq.shells.ring.shell import (
    FAIL_AFTER_MS,
    OTHERS_AFTER_MS,
    Answer,
    RingMember,
    RingParts,
    RingRecord,
    RingShell,
)
from convoymq.sim.clock import NodeClock, Process, Scheduler
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_RING


@dataclass(frozen=True)
class Record:
    vhost: str = "/"
    name: str = "q"
    group: int = 1
    view: RingView | None = None


class Sink:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.received: list[tuple[int, int, bytes]] = []
        self.complete = 0
        self.views: list[int] = []
        self.expelled = False

    def on_broadcast(self, sender: int, number: int, payload: bytes) -> None:
        self.received.append((sender, number, payload))

    def on_complete(self, number: int) -> None:
        self.complete = number

    def on_view(self, view: RingView) -> None:
        self.views.append(view.version)

    def on_expelled(self) -> None:
        self.expelled = True


class Node:
    """One node. Implements `Transport`."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.full: set[int] = set()
        self.waiting: list[Waiting] = []
        self.has_majority = True
        self.dirty = False
        self.sent: list[bytes] = []
        self.control = ControlPlane(number, self)
        self.shell = RingShell(
            RingParts(
                node=number,
                incarnation=world.incarnation,
                clock=NodeClock(world.scheduler, Process(f"node{number}")),
                control=self.control,
                propose=self.propose,
                has_majority=lambda: self.has_majority,
                wanted=lambda: setattr(self, "dirty", True),
                await_room=lambda node, item: self.waiting.append(item),
                window_bytes=100,
            )
        )
        self.sink = Sink(self)
        self.member: RingMember | None = None

    def propose(self, record: RingRecord, view: RingView, answer: Answer) -> None:
        self.world.proposals.append((self.number, view, answer))

    def take(self, record: Record) -> None:
        self.shell.take_record(record)
        own = record.view.live_at(self.number) if record.view is not None else None
        if self.member is None and own is not None and own.incarnation == self.world.incarnation:
            self.member = self.shell.open(record, own.number, self.sink)

    def send(self, node: int, frame: bytes, body: tuple[bytes, ...] = ()) -> None:
        data = b"".join((frame, *body))
        self.sent.append(data)
        if self.is_connected(node):
            self.world.frames.append((self.number, node, data))

    def is_connected(self, node: int) -> bool:
        return {self.number, node} not in self.world.cut

    def backlog_bytes(self, node: int) -> int:
        return 0


class World:
    def __init__(self, nodes: int = 3, incarnation: int = 1) -> None:
        self.scheduler = Scheduler(1)
        self.incarnation = incarnation
        self.cut: list[set[int]] = []
        self.frames: list[tuple[int, int, bytes]] = []
        self.proposals: list[tuple[int, RingView, Answer]] = []
        self.record = Record()
        self.nodes = {number: Node(self, number) for number in range(1, nodes + 1)}

    def record_view(self, view: RingView) -> None:
        self.record = replace(self.record, view=view)
        for node in self.nodes.values():
            node.take(self.record)

    def settle(self, *, decides: bool = True) -> None:
        """Carries frames, ends rounds, and records proposals, until nothing is left to do."""
        while True:
            dirty = [node for node in self.nodes.values() if node.dirty]
            for node in dirty:
                node.dirty = False
                node.shell.end_of_round()
            if self.frames:
                source, target, data = self.frames.pop(0)
                if target in self.nodes:
                    self.nodes[target].control.on_frame(source, data)
            elif self.proposals and decides:
                self.decide(self.proposals.pop(0))
            elif not dirty:
                return

    def decide(self, proposal: tuple[int, RingView, Answer]) -> None:
        _, view, answer = proposal
        known = self.record.view
        is_next = view.version == (known.version if known is not None else 0) + 1
        if is_next:
            self.record_view(view)
        answer(is_next, None)

    def after(self, ms: int) -> None:
        self.scheduler.run(self.scheduler.now_us + ms * 1000, 10_000)
        self.settle()

    def stop(self, number: int) -> None:
        """A node is gone, and the others know."""
        self.nodes.pop(number)
        for each in self.nodes:
            self.cut.append({each, number})
            self.nodes[each].shell.on_node_down(number)

    def member(self, number: int) -> RingMember:
        found = self.nodes[number].member
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    """Three full members, numbered as their nodes."""
    made = World()
    made.record_view(founded(1, 1))
    for node in (2, 3):
        assert made.record.view is not None
        made.record_view(made.record.view.joined(node, 1))
        made.settle()
    assert made.record.view is not None
    assert made.record.view.full() == [1, 2, 3]
    return made


def test_a_ring_of_one_member_completes_at_the_end_of_the_round() -> None:
    world = World(1)
    world.record_view(founded(1, 1))
    assert world.member(1).broadcast(b"a") == 1
    assert world.nodes[1].sink.complete == 0
    world.settle()
    assert world.nodes[1].sink.complete == 1
    assert world.nodes[1].sent == []


def test_broadcasts_of_a_round_are_one_frame_and_complete_when_all_have_them(world: World) -> None:
    for node in world.nodes.values():
        node.sent.clear()
    world.member(2).broadcast(b"a")
    world.member(2).broadcast(b"b")
    world.settle()
    assert world.nodes[1].sink.received == [(2, 1, b"a"), (2, 2, b"b")]
    assert world.nodes[3].sink.received == world.nodes[1].sink.received
    assert world.nodes[2].sink.complete == 2
    # Publish round and acknowledgement round; the latter ends before its beginning.
    assert [len(world.nodes[n].sent) for n in (1, 2, 3)] == [1, 2, 2]


def test_a_member_waits_for_the_window(world: World) -> None:
    member = world.member(1)
    assert member.may_broadcast()
    member.broadcast(bytes(100))
    assert not member.may_broadcast()
    world.settle()
    assert world.nodes[1].sink.complete == 1
    assert member.may_broadcast()


def test_frames_wait_while_a_link_is_full(world: World) -> None:
    node = world.nodes[1]
    right = world.member(1).core.right()
    node.full.add(right)
    node.sent.clear()
    world.member(1).broadcast(b"a")
    world.settle()
    assert node.sent == []
    node.full.clear()
    for item in node.waiting:
        item.on_room(right)
    world.settle()
    assert node.sink.complete == 1


def test_what_a_broken_link_lost_comes_when_it_stands_again(world: World) -> None:
    right = world.member(1).core.right()
    world.cut.append({1, right})
    world.member(1).broadcast(b"a")
    world.settle()
    assert world.nodes[right].sink.received == []
    world.cut.clear()
    for one, other in ((1, right), (right, 1)):
        world.nodes[one].shell.on_node_up(other)
    world.settle()
    assert world.nodes[right].sink.received == [(1, 1, b"a")]
    assert world.nodes[1].sink.complete == 1


def proposer_of_a_failure(world: World, failed: int) -> tuple[int, int]:
    """Stops a node; returns who proposes that, and after how long."""
    world.stop(failed)
    waited_ms = 0
    while not world.proposals:
        world.scheduler.run(world.scheduler.now_us + 100_000, 10_000)
        waited_ms += 100
        world.settle(decides=False)
    return world.proposals[0][0], waited_ms


def test_the_right_neighbour_proposes_a_failure(world: World) -> None:
    right = world.member(1).core.right()
    proposer, waited_ms = proposer_of_a_failure(world, 1)
    assert proposer == right
    assert FAIL_AFTER_MS <= waited_ms < OTHERS_AFTER_MS
    world.settle()
    assert world.record.view is not None
    assert world.record.view.ring == (2, 3) or world.record.view.ring == (3, 2), "and erased"


def test_another_member_proposes_a_failure_when_the_neighbour_cannot(world: World) -> None:
    right = world.member(1).core.right()
    world.nodes[right].has_majority = False
    proposer, waited_ms = proposer_of_a_failure(world, 1)
    assert proposer not in (1, right)
    assert waited_ms >= OTHERS_AFTER_MS


def test_a_node_that_comes_back_in_time_stays(world: World) -> None:
    world.nodes[2].shell.on_suspect(1)
    world.nodes[3].shell.on_suspect(1)
    world.cut += [{1, 2}, {1, 3}]
    world.after(FAIL_AFTER_MS // 2)
    world.cut.clear()
    for node in (2, 3):
        world.nodes[node].shell.on_node_up(1)
    world.after(2 * OTHERS_AFTER_MS)
    assert world.record.view is not None
    assert world.record.view.full() == [1, 2, 3]


def test_without_a_majority_nothing_is_proposed(world: World) -> None:
    for node in world.nodes.values():
        node.has_majority = False
    world.stop(1)
    world.after(2 * OTHERS_AFTER_MS)
    assert world.record.view is not None
    assert world.record.view.full() == [1, 2, 3]
    world.nodes[2].has_majority = True
    world.after(OTHERS_AFTER_MS)
    assert world.record.view.full() == [2, 3]


@pytest.mark.parametrize("error", [None, BrokerError("no majority")])
def test_a_proposal_without_effect_is_made_again(world: World, error: BrokerError | None) -> None:
    world.stop(1)
    world.scheduler.run(world.scheduler.now_us + FAIL_AFTER_MS * 2000, 10_000)
    (_, view, answer) = world.proposals.pop()
    answer(None if error else False, error)
    world.after(1_000)
    assert world.record.view is not None
    assert world.record.view.full() == view.full() == [2, 3]


def test_a_node_that_starts_again_is_no_member_any_more() -> None:
    world = World(2, incarnation=2)
    view = founded(1, 1).joined(2, 1)
    world.record_view(view.caught_up(2))
    assert world.nodes[1].member is None
    world.settle()
    assert world.record.view is not None
    assert len(world.record.view.live) == 1, "the last full one is for its owner to judge"


def test_an_expelled_member_is_closed(world: World) -> None:
    member = world.member(2)
    member.propose(member.view.with_failed(2))
    world.settle()
    assert world.nodes[2].sink.expelled
    world.nodes[2].shell.mark_dirty(member)
    world.settle()
    assert world.record.view is not None
    assert world.record.view.full() == [1, 3]
    world.member(1).broadcast(b"a")
    world.settle()
    assert world.nodes[2].sink.received == []
    assert world.nodes[1].sink.complete == 1


def test_a_closed_ring_takes_no_frames(world: World) -> None:
    world.nodes[2].shell.close(1)
    world.member(1).broadcast(b"a")
    world.settle()
    assert world.nodes[2].sink.received == []
    assert world.nodes[1].sink.complete == 0


def ring_frame(sender: int, receiver: int, body: bytes, version: int = 3) -> bytes:
    return frame(FRAME_CONTROL, 0, 0, 1, KIND_RING, sender << 32 | receiver, version, body)


def test_frames_of_others_are_not_taken(world: World) -> None:
    node = world.nodes[2]
    with pytest.raises(PeerError, match="as member 1"):
        node.control.on_frame(3, ring_frame(1, 2, QUESTION_BODY))
    with pytest.raises(PeerError):
        node.control.on_frame(1, ring_frame(1, 2, b"nonsense"))
    node.dirty = False
    node.control.on_frame(1, ring_frame(1, 9, QUESTION_BODY))
    assert not node.dirty, "it is for a former member of the node"


def test_stop_ends_the_timer(world: World) -> None:
    world.stop(1)
    shell = world.nodes[2].shell
    assert shell._timer is not None
    shell.stop()
    world.nodes.pop(2)
    world.after(2 * FAIL_AFTER_MS)
    assert all(proposer != 2 for proposer, _, _ in world.proposals)


@pytest.mark.parametrize("catch_up", [False, True])
@pytest.mark.parametrize("last", [2, (1 << 64) - 1])
def test_broadcasts_that_a_member_never_sent_are_refused(
    world: World, last: int, catch_up: bool
) -> None:
    node, member = world.nodes[2], world.member(2)
    member.broadcast(b"a")
    world.settle()
    left = member.view.left_of(2)
    nonsense = Frame(
        version=member.view.version,
        catch_up=catch_up,
        progress=(
            Progress(sender=left, complete=0, last=1, payloads=(b"b",)),
            Progress(sender=2, complete=0, last=last),
        ),
    )
    with pytest.raises(PeerError, match="its home has 1"):
        node.control.on_frame(left, ring_frame(left, 2, b"".join(encode(nonsense))))
    assert node.sink.received == [], "nothing of the frame"
    member.core.check_invariants()
    world.member(left).broadcast(b"c")
    world.settle()
    assert node.sink.received == [(left, 1, b"c")]
    assert world.nodes[left].sink.complete == 1


def test_broadcasts_that_a_newcomer_never_sent_are_refused() -> None:
    world = World(2)
    world.record_view(founded(1, 1))
    assert world.record.view is not None
    world.record_view(world.record.view.joined(2, 1))
    member = world.member(2)
    nonsense = Frame(
        version=member.view.version,
        catch_up=True,
        progress=(Progress(sender=2, complete=(1 << 64) - 1, last=(1 << 64) - 1),),
    )
    with pytest.raises(PeerError, match="its home has 0"):
        world.nodes[2].control.on_frame(1, ring_frame(1, 2, b"".join(encode(nonsense)), 2))
    world.settle()
    assert member.broadcast(b"a") == 1
    world.settle()
    assert world.nodes[1].sink.received == [(2, 1, b"a")]
