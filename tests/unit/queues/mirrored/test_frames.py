"""Frames that no node of a mirrored queue sends: the link ends, and no queue does."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.kernels.link_frames import FRAME_CONTROL, frame
from convoymq.model.errors import PeerError
from convoymq.queues.mirrored.host import ASK
from convoymq.sim.mirrored.world import MirroredLoad, MirroredWorld
from convoymq.transport.frame_kinds import KIND_MIRROR_CLIENTS, KIND_MIRROR_STORED

SECONDS = 5


@pytest.fixture
def world() -> MirroredWorld:
    """All queues have their mirrors."""
    made = MirroredLoad().make_world(1, (), None)
    assert isinstance(made, MirroredWorld)
    made._begin()
    made.scheduler.run(SECONDS * 1_000_000, 1_000_000)
    return made


def master_and_mirror(world: MirroredWorld) -> tuple[int, int, int]:
    """Returns a queue, the node of its master, and a mirror's number."""
    for group, referee in world.referees.items():
        view = referee.view
        assert view is not None
        assert referee.queue is not None
        mirror = next(number for number in view.full() if number != view.master)
        return group, view.node_of(view.master), mirror
    raise AssertionError("no queue")


def test_a_broadcast_that_was_never_sent_is_not_stored(world: MirroredWorld) -> None:
    group, home, mirror = master_and_mirror(world)
    master = world.nodes[home].host.master_of(group)
    assert master is not None
    assert master.member is not None
    stored = dict(master.log.confirms.stored)
    node = master.member.view.node_of(mirror)
    number = master.log.last_number + 1
    data = frame(FRAME_CONTROL, 0, 0, group, KIND_MIRROR_STORED, number, mirror, b"")
    with pytest.raises(PeerError, match="never sent"):
        world.nodes[home].host._control.on_frame(node, data)
    assert master.log.confirms.stored == stored
    assert master.ended is None


@pytest.mark.parametrize("place", [(0, 1 << 63, 0, 0), (0, 1, 1 << 63, 0), (0, 1, 0, -1)])
def test_sessions_with_impossible_numbers_are_refused(
    world: MirroredWorld, place: tuple[int, int, int, int]
) -> None:
    group, home, mirror = master_and_mirror(world)
    master = world.nodes[home].host.master_of(group)
    assert master is not None
    assert master.member is not None
    node = master.member.view.node_of(mirror)
    places = [(node << 56 | 1, *place[1:])]
    body = msgspec.msgpack.encode([ASK, master.member.member, places])
    data = frame(FRAME_CONTROL, 0, 0, group, KIND_MIRROR_CLIENTS, 0, 0, body)
    with pytest.raises(PeerError, match="malformed clients"):
        world.nodes[home].host._control.on_frame(node, data)
    assert master.ended is None
