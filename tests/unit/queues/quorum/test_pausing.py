"""Deliveries that a channel cannot take stay with the queue, and come when there is room again."""

from __future__ import annotations

import pytest

from tests.unit.queues.quorum.cluster import NODES, Cluster, publish, spec, tags


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
    assert (machine.acked, machine.unacked, machine.ready) == (45, 0, 0)


@pytest.mark.parametrize("node", [2, 4])
def test_a_consumer_that_is_paused_again_and_again(node: int) -> None:
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    source, _ = cluster.nodes[1].open()
    client.subscribe(spec())
    cluster.run()
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
    assert (machine.unacked, machine.ready) == (0, 4)
