"""Quorum queues and their clients under random faults: nothing is lost, repeated or reordered."""

from __future__ import annotations

import random
from typing import Any

import pytest

from convoymq.kernels import link_frames
from tests.unit.queues.quorum.cluster import NODES, Cluster, publish, spec, tags


class Faults:
    """One random run: publishers, consumers, and what goes wrong, from a seed."""

    def __init__(self, seed: int, sinks: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(delivery_limit=-1)
        self.sources = [self.cluster.nodes[self.rng.choice(NODES)].open() for _ in range(2)]
        self.sinks = [self.cluster.nodes[self.rng.choice(NODES)].open() for _ in range(sinks)]
        self.tag = 0
        self.done = [0] * sinks
        for client, _ in self.sinks:
            client.subscribe(spec(prefetch=self.rng.choice([1, 3, 50])))

    def publish(self) -> None:
        for client, _ in self.sources:
            count = self.rng.randint(1, 5)
            publish(client, self.tag + 1, count)
            self.tag += count

    def trouble(self) -> None:
        """One of the things that go wrong."""
        rng, cluster = self.rng, self.cluster
        kind = rng.choice(["drop", "drop", "mend", "mend", "stall", "snapshot", "none", "elect"])
        if kind == "drop":
            cluster.drop_frames = {link_frames.FRAME_APPLIED, link_frames.FRAME_DELIVER}
        elif kind == "mend":
            cluster.drop_frames = set()
        elif kind == "stall":
            node = rng.choice([n for n in (1, 2, 3) if n != cluster.leader])
            cluster.nodes[node].stalled ^= True
        elif kind == "snapshot" and cluster.leader is not None:
            node = rng.choice([n for n in (1, 2, 3) if n != cluster.leader])
            cluster.install_snapshot(node)
            cluster.nodes[node].stalled = False
        elif kind == "none":
            cluster.elect(None)
        else:
            able = [n for n in (1, 2, 3) if not cluster.nodes[n].stalled]
            cluster.elect(rng.choice(able) if able else None)

    def mend(self) -> None:
        self.cluster.drop_frames = set()
        for node in self.cluster.nodes.values():
            node.stalled = False
        self.cluster.elect(1)
        self.cluster.run()

    def machine(self) -> Any:
        hashes = {n.own.machine.state_hash() for n in self.cluster.nodes.values() if n.own}
        assert len(hashes) == 1
        return self.cluster.nodes[1].own.machine  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_repeated_or_reordered_under_faults(seed: int) -> None:
    run = Faults(seed, 2)
    rng, cluster = run.rng, run.cluster
    for _ in range(60):
        action = rng.random()
        if action < 0.4:
            run.publish()
        elif action < 0.7:
            for i, (client, events) in enumerate(run.sinks):
                if len(events.messages) > run.done[i]:
                    first = events.messages[run.done[i]][1]
                    run.done[i] = rng.randint(run.done[i] + 1, len(events.messages))
                    client.settle(1, (first, events.messages[run.done[i] - 1][1]))
        else:
            run.trouble()
        if rng.random() < 0.7:
            cluster.run()
    run.mend()
    for _ in range(400):
        cluster.wait(1250)
        for i, (client, events) in enumerate(run.sinks):
            for _, message_id, _ in events.messages[run.done[i] :]:
                client.settle(1, (message_id, message_id))
            run.done[i] = len(events.messages)
        cluster.run()
        if sum(run.done) >= run.tag:
            break
    cluster.wait(1250)
    assert sorted(t for _, e in run.sources for t in e.confirmed) == list(range(1, run.tag + 1))
    assert sorted(t for _, e in run.sinks for t in tags(e)) == list(range(1, run.tag + 1))
    for _, events in run.sinks:
        ids = [message_id for _, message_id, _ in events.messages]
        assert ids == sorted(set(ids))
    machine = run.machine()
    assert (machine.backlog.acked, machine.backlog.unacked, machine.backlog.ready()) == (
        run.tag,
        0,
        0,
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_message_is_settled_once_with_returns_gets_and_closed_channels(seed: int) -> None:
    run = Faults(seed, 3)
    rng, cluster = run.rng, run.cluster
    gets = 0
    for _ in range(60):
        action = rng.random()
        i = rng.randrange(len(run.sinks))
        client, events = run.sinks[i]
        if action < 0.3:
            run.publish()
        elif action < 0.5:
            for _, message_id, _ in events.messages[run.done[i] :]:
                if rng.random() < 0.3:
                    client.return_(1, (message_id, message_id), failed=rng.random() < 0.5)
                else:
                    client.settle(1, (message_id, message_id))
            run.done[i] = len(events.messages)
        elif action < 0.6:
            run.sources[0][0].get(no_ack=True)
            gets += 1
        elif action < 0.65:
            client.close()
            run.sinks[i] = cluster.nodes[rng.choice(NODES)].open()
            run.sinks[i][0].subscribe(spec(prefetch=5))
            run.done[i] = 0
        else:
            run.trouble()
        if rng.random() < 0.7:
            cluster.run()
    run.mend()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    for _ in range(400):
        cluster.wait(1250)
        for i, (client, events) in enumerate(run.sinks):
            for _, message_id, _ in events.messages[run.done[i] :]:
                client.settle(1, (message_id, message_id))
            run.done[i] = len(events.messages)
        cluster.run()
        if machine.backlog.acked == run.tag:
            break
    cluster.wait(10_000)
    machine = run.machine()
    assert (machine.backlog.acked, machine.backlog.unacked, machine.backlog.ready()) == (
        run.tag,
        0,
        0,
    )
    assert sorted(t for _, e in run.sources for t in e.confirmed) == list(range(1, run.tag + 1))
    assert len([h for h in run.sources[0][1].heard if h[0] == "get"]) == gets
    assert not any(
        c.is_waiting() for n in cluster.nodes.values() for c in n.queue._clients.values()
    )
    assert len(machine.sessions) == sum(len(n.queue._clients) for n in cluster.nodes.values())
