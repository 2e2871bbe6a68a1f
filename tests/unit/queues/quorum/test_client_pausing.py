"""Deliveries that a channel cannot take stay with the queue, and come when there is room again."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import link_frames
from tests.unit.queues.quorum.cluster import GROUP, NODES, Cluster, Events, publish, spec, tags


def consuming(node: int) -> tuple[Cluster, Any, Events, Any]:
    """(cluster, client that consumes on a node, what it hears, client that publishes)."""
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    source, _ = cluster.nodes[1].open()
    client.subscribe(spec())
    cluster.run()
    return cluster, client, events, source


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("size", [8, 300_000])
def test_a_paused_consumer_misses_nothing(node: int, size: int) -> None:
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    source, _ = cluster.nodes[1].open()
    client.subscribe(spec())
    publish(source, 1, 3, size)
    cluster.run()
    client.pause(1)
    for first in range(4, 44, 4):
        publish(source, first, 4, size)
        cluster.run()
    assert tags(events) == [1, 2, 3]
    client.resume(1)
    cluster.run()
    assert tags(events) == list(range(1, 44))
    publish(source, 44, 2, size)
    cluster.run()
    assert tags(events) == list(range(1, 46))
    client.settle(1, (0, 44))
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.acked, machine.backlog.unacked, machine.backlog.ready()) == (45, 0, 0)


@pytest.mark.parametrize("node", [2, 4])
def test_a_consumer_that_is_paused_again_and_again(node: int) -> None:
    cluster, client, events, source = consuming(node)
    for first in range(1, 61, 5):
        publish(source, first, 5)
    deliver = events.on_deliver

    def deliver_and_pause(*arguments: object) -> None:
        deliver(*arguments)  # type: ignore[arg-type]
        client.pause(1)

    events.on_deliver = deliver_and_pause  # type: ignore[method-assign, assignment]
    cluster.run()
    for _ in range(60):
        client.resume(1)
        cluster.run()
    assert tags(events) == list(range(1, 61))


@pytest.mark.parametrize("node", [2, 4])
def test_a_paused_consumer_that_is_cancelled_gives_back(node: int) -> None:
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    source, _ = cluster.nodes[1].open()
    client.subscribe(spec())
    client.pause(1)
    publish(source, 1, 4)
    cluster.run()
    client.cancel(1)
    cluster.run()
    client.resume(1)
    client.close()
    cluster.run()
    assert tags(events) == []
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.unacked, machine.backlog.ready()) == (0, 4)


@pytest.mark.parametrize("node", [2, 4])
def test_a_cancelled_consumer_gives_back_what_was_dropped_while_it_paused(node: int) -> None:
    cluster, client, events, source = consuming(node)
    client.pause(1)
    publish(source, 1, 4)
    cluster.run()
    client.cancel(1)
    cluster.run()
    assert tags(events) == []
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.unacked, machine.backlog.ready()) == (0, 4)


def deliver_one(cluster: Cluster) -> None:
    source, target, data = cluster.links.popleft()
    _, type, _, group, a, b, c, d = link_frames.frame_header(data)
    body = data[link_frames.HEADER_SIZE :]
    cluster.nodes[target].queue.on_link_frame(source, type, group, a, b, c, d, body)


@pytest.mark.parametrize("dropped", range(1, 10))
def test_the_rest_of_what_the_state_says_is_no_word_about_what_was_dropped(dropped: int) -> None:
    """A leader says all that is checked out; the consumer goes on in the middle of that."""
    cluster, client, events, source = consuming(4)
    client.pause(1)
    for tag in range(1, 7):
        publish(source, tag, 1)
        cluster.run()
    cluster.nodes[1].queue.on_node_up(4)
    assert len(cluster.links) == 9
    for _ in range(dropped):
        deliver_one(cluster)
    client.resume(1)
    cluster.run()
    assert tags(events) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("lost", range(7))
def test_a_frame_of_the_state_that_is_lost_is_asked_for(lost: int) -> None:
    """And frames in the wrong order say nothing wrong either."""
    cluster, _, events, source = consuming(4)
    cluster.drop_frames = {link_frames.FRAME_DELIVER}
    for tag in range(1, 7):
        publish(source, tag, 1)
        cluster.run()
    cluster.drop_frames = set()
    cluster.nodes[1].queue.on_node_up(4)
    frames = [f for f in cluster.links if f[2][4] == link_frames.FRAME_DELIVER]
    assert len(frames) == 7
    cluster.links.clear()
    cluster.links.extend(frames[lost + 1 :] + frames[:lost])
    cluster.run()
    cluster.wait(1250)
    assert tags(events) == [1, 2, 3, 4, 5, 6]


def test_a_question_for_what_is_missing_is_repeated_until_it_is_answered() -> None:
    cluster, client, events, source = consuming(4)
    client.pause(1)
    publish(source, 1, 3)
    cluster.run()
    cluster.drop_frames = {link_frames.FRAME_DELIVER}
    client.resume(1)
    cluster.run()
    assert tags(events) == []
    cluster.drop_frames = set()
    cluster.wait(1250)
    assert tags(events) == [1, 2, 3]
    asked = len(cluster.frames)
    cluster.wait(5000)
    assert len(cluster.frames) == asked


def test_what_a_replica_was_behind_with_when_it_left_is_asked_for() -> None:
    """The leader sent it while the consumer was paused, and the replica's answer was older."""
    cluster, client, events, source = consuming(2)
    node = cluster.nodes[2]
    client.pause(1)
    publish(source, 1, 2)
    cluster.run()
    node.stalled = True
    publish(source, 3, 1)
    cluster.run()
    client.resume(1)
    cluster.run()
    assert tags(events) == [1, 2]
    node.own = None
    node.queue.on_replica_gone()
    cluster.run()
    assert tags(events) == [1, 2, 3]
    cluster.wait(2000)
    publish(source, 4, 1)
    cluster.run()
    assert tags(events) == [1, 2, 3, 4]


def test_a_replica_that_is_behind_hands_out_nothing_that_the_leader_took_back() -> None:
    """While its node was suspected the messages of one consumer went to another, on one channel."""
    cluster = Cluster()
    node = cluster.nodes[2]
    client, events = node.open()
    source, _ = cluster.nodes[1].open()
    client.subscribe(spec(1))
    cluster.run()
    node.stalled = True
    cluster.drop_frames = {link_frames.FRAME_DELIVER}
    publish(source, 1, 2)
    cluster.run()
    client.subscribe(spec(2, priority=5))
    cluster.run()
    leader = cluster.nodes[1].queue
    leader.on_node_down(2, definite=False)
    cluster.run()
    cluster.wait(60_500)
    cluster.drop_frames = set()
    leader.on_node_up(2)
    cluster.run()
    given = [(2, 0, 1), (2, 1, 2)]
    assert [(c, m, int.from_bytes(b[:4], "big")) for c, m, b in events.messages] == given
    node.stalled = False
    cluster.run()
    assert tags(events) == [1, 2]
    client.cancel(2)
    cluster.run()
    publish(source, 3, 2)
    cluster.run()
    assert tags(events) == [1, 2, 3, 4]


def test_what_comes_while_something_is_asked_for_is_not_forgotten() -> None:
    """The answer to the question is older than what was dropped meanwhile, and it is empty."""
    cluster, client, events, source = consuming(4)
    queue = cluster.nodes[4].queue
    client.pause(1)
    client.resume(1)
    publish(source, 1, 1)
    cluster._seal()
    cluster._apply()
    frames = [f for f in cluster.links if f[2][4] == link_frames.FRAME_DELIVER]
    cluster.links.clear()
    assert [f[1] for f in frames] == [1, 4]
    publish(source, 2, 1)
    cluster._seal()
    cluster._apply()
    # The first message is lost, the second comes before the answer that knew of neither.
    deliver_one(cluster)
    assert tags(events) == []
    final = link_frames.frame(link_frames.FRAME_DELIVER, 0, GROUP, client.session, 1, 0, 1 << 31)
    _, type, _, group, a, b, c, d = link_frames.frame_header(final)
    queue.on_link_frame(1, type, group, a, b, c, d, b"")
    cluster.run()
    assert tags(events) == [1, 2]
