"""A node that is paused for longer than its clients wait."""

from __future__ import annotations

from convoymq.queues.mirrored.partitions import PAUSE_MINORITY
from convoymq.sim.mirrored.world import MirroredLoad, MirroredWorld

BEGIN_US = 5_000_000
WAIT_US = 66_000_000


def test_clients_of_a_paused_node_are_answered_after_a_minute_and_go_on_later() -> None:
    world = MirroredLoad().make_world(6, (), None)
    assert isinstance(world, MirroredWorld)
    world.partition_handling = PAUSE_MINORITY
    world._begin()
    world.scheduler.run(BEGIN_US, 1_000_000)
    home = next(node for node in world.nodes.values() if world.leads(node))
    for other in set(world.nodes) - {home.number}:
        world.network.cut(home.number, other, breaks=False)
        world.network.cut(other, home.number, breaks=False)
    world.scheduler.run(BEGIN_US + WAIT_US // 4, 3_000_000)
    assert home.host.is_paused
    mine = [channel for channel in world.channels if channel.node == home.number]
    waiting = [channel for channel in mine if channel.unconfirmed]  # type: ignore[attr-defined]
    assert waiting
    assert not any(channel.refused for channel in waiting)  # type: ignore[attr-defined]
    world.scheduler.run(BEGIN_US + WAIT_US, 3_000_000)
    assert all(channel.refused for channel in waiting)  # type: ignore[attr-defined]
    world.quiet = True
    world._heal()
    until_us = BEGIN_US + WAIT_US
    while world._unfinished():
        assert until_us < BEGIN_US + 2 * WAIT_US, world._unfinished()
        until_us += 1_000_000
        world.scheduler.run(until_us, 3_000_000)
