"""Shell and client of the quorum queue, over fake hosts and links."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.model.errors import NotFound, ResourceLocked, StorageFault, Unavailable
from convoymq.queues.group_queue import NOTE_EVERY_MS, FlowLimits
from tests.unit.queues.quorum.cluster import GROUP, NODES, Cluster, publish, spec, tags


@pytest.mark.parametrize("publisher", NODES)
@pytest.mark.parametrize("consumer", NODES)
def test_every_node_publishes_and_consumes(publisher: int, consumer: int) -> None:
    cluster = Cluster()
    source, confirms = cluster.nodes[publisher].open()
    sink, deliveries = cluster.nodes[consumer].open()
    sink.subscribe(spec())
    publish(source, 1, 50)
    cluster.run()
    assert confirms.confirmed == list(range(1, 51))
    assert deliveries.heard[0] == ("subscribed", 1, None)
    assert tags(deliveries) == list(range(1, 51))
    sink.settle(1, (0, 49))
    publish(source, 51, 5)
    cluster.run()
    assert tags(deliveries) == list(range(1, 56))
    for node in (1, 2, 3):
        machine = cluster.nodes[node].own.machine  # type: ignore[union-attr]
        assert (machine.backlog.acked, machine.backlog.unacked, machine.backlog.ready()) == (
            50,
            5,
            0,
        )


def test_only_a_node_without_a_live_replica_costs_link_frames() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[2].open()
    sink.subscribe(spec())
    source, _ = cluster.nodes[3].open()
    publish(source, 1, 10)
    cluster.run()
    assert tags(deliveries) == list(range(1, 11))
    assert cluster.frames == []
    assert cluster.nodes[2].queue.delivered_local == 10


def test_the_leader_sends_while_the_replica_lags_and_repeats_are_dropped() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[2].open()
    source, _ = cluster.nodes[1].open()
    sink.subscribe(spec())
    publish(source, 1, 3)
    cluster.run()
    cluster.nodes[2].stalled = True
    publish(source, 4, 3)
    cluster.run()
    assert tags(deliveries) == [1, 2, 3, 4, 5, 6]
    sink.settle(1, (0, 5))
    cluster.run()
    cluster.nodes[2].stalled = False
    publish(source, 7, 2)
    cluster.run()
    assert tags(deliveries) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not sink.target.pending


def delivers(cluster: Cluster) -> int:
    return sum(kind == batch.FRAME_DELIVER for _, _, kind in cluster.frames)


def test_deliveries_wait_in_order_while_the_link_to_their_node_is_full() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, events = cluster.nodes[1].open()
    sink.subscribe(spec())
    cluster.run()
    leader = cluster.nodes[1]
    leader.full.add(4)
    before = delivers(cluster)
    for tag in range(1, 9):
        publish(source, tag, 1)
        cluster.run()
    assert events.confirmed == list(range(1, 9))
    assert deliveries.messages == []
    assert delivers(cluster) == before
    leader.make_room(4)
    publish(source, 9, 1)
    cluster.run()
    assert tags(deliveries) == list(range(1, 10))
    assert delivers(cluster) == before + 9


def test_what_waited_for_a_link_is_forgotten_with_the_leadership() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[2].open()
    sink.subscribe(spec())
    cluster.run()
    cluster.nodes[1].full.add(4)
    publish(source, 1, 2)
    cluster.run()
    cluster.elect(3)
    cluster.run()
    assert tags(deliveries) == [1, 2]
    frames = len(cluster.frames)
    cluster.nodes[1].make_room(4)
    cluster.run()
    assert len(cluster.frames) == frames


def test_a_client_asks_before_it_sends_much_again() -> None:
    """Silence may be slowness: a queue that has it all, applied or not, is not sent it twice."""
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 100, size=1000)
    cluster.drop_frames = {batch.FRAME_APPLIED}
    cluster.run()
    logged = sum(entry.size for entry in cluster.log)
    assert logged > 100_000
    cluster.wait(1_500)
    cluster.drop_frames = set()
    cluster.wait(10_000)
    assert events.confirmed == list(range(1, 101))
    assert sum(entry.size for entry in cluster.log) < logged + 2_000


def test_much_that_was_lost_is_sent_again_when_the_queue_says_so() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1, size=1000)
    cluster.run()
    cluster.cut = {4}
    publish(client, 2, 100, size=1000)
    cluster.run()
    cluster.cut = set()
    cluster.wait(10_000)
    assert events.confirmed == list(range(1, 102))


def test_leader_change_resends_what_was_pending_once() -> None:
    cluster = Cluster()
    source, confirms = cluster.nodes[4].open()
    sink, deliveries = cluster.nodes[4].open()
    sink.subscribe(spec())
    publish(source, 1, 3)
    cluster.run()
    cluster.elect(None)
    publish(source, 4, 3)
    cluster.run()
    publish(source, 7, 3)
    cluster.run()
    assert confirms.confirmed == [1, 2, 3]
    publish(source, 10, 1)
    cluster.elect(2)
    cluster.run()
    cluster.wait(2000)
    assert sorted(confirms.confirmed) == list(range(1, 11))
    assert tags(deliveries) == list(range(1, 11))
    assert cluster.nodes[1].own.machine.backlog.published == 10  # type: ignore[union-attr]


def test_a_gap_is_filled_without_waiting_for_a_tick() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.cut = {4}
    publish(client, 2, 1)
    cluster.run()
    cluster.cut = set()
    publish(client, 3, 1)
    cluster.run()
    assert events.confirmed == [1, 2, 3]


def test_commands_of_the_round_of_an_election_are_not_left_behind() -> None:
    """The open command reaches the new leader ahead of the older ones that are resent with it."""
    cluster = Cluster()
    client, events = cluster.nodes[2].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.elect(None)
    publish(client, 2, 1)
    cluster.run()
    publish(client, 3, 1)
    cluster.elect(3)
    cluster.run()
    assert events.confirmed == [1, 2, 3]


def test_answers_lost_with_the_old_leader_come_from_the_new_one() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[2].open()
    cluster.drop_frames = {batch.FRAME_APPLIED, batch.FRAME_DELIVER}
    sink.subscribe(spec())
    publish(source, 1, 4)
    cluster.run()
    assert deliveries.heard == []
    cluster.drop_frames = set()
    cluster.elect(3)
    cluster.run()
    assert deliveries.heard[0] == ("subscribed", 1, None)
    assert tags(deliveries) == [1, 2, 3, 4]


def test_a_gap_in_the_deliveries_is_asked_for() -> None:
    cluster = Cluster()
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[2].open()
    sink.subscribe(spec())
    cluster.run()
    cluster.drop_frames = {batch.FRAME_DELIVER}
    publish(source, 1, 2)
    cluster.run()
    cluster.drop_frames = set()
    publish(source, 3, 2)
    cluster.run()
    assert tags(deliveries) == [1, 2, 3, 4]


def test_a_lost_answer_to_get_is_asked_for_again() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 3)
    cluster.run()
    cluster.drop_frames = {batch.FRAME_APPLIED, batch.FRAME_DELIVER}
    client.get(no_ack=False)
    cluster.run()
    cluster.drop_frames = set()
    publish(client, 4, 1)
    cluster.run()
    cluster.wait(3000)
    assert [(h[0], h[1][:4], h[2], h[4]) for h in events.heard] == [("get", b"\0\0\0\1", 0, 2)]
    assert cluster.nodes[1].own.machine.backlog.unacked == 1  # type: ignore[union-attr]


def damage(cluster: Cluster, node: int, index: int) -> Any:
    """That node cannot read an entry any more; returns what makes it whole again."""
    there = cluster.nodes[node]
    read = there.read_entry

    def damaged(group: int, at: int) -> Any:
        if at == index:
            raise StorageFault(f"entry {at} is damaged", path="")
        return read(group, at)

    there.read_entry = damaged  # type: ignore[method-assign]
    return lambda: setattr(there, "read_entry", read)


def test_what_cannot_be_read_here_is_sent_by_the_leader_and_not_skipped() -> None:
    cluster = Cluster()
    source, _ = cluster.nodes[1].open()
    for number in (1, 2, 3):
        publish(source, number, 1)
        cluster.run()
    damage(cluster, 2, len(cluster.log) - 2)
    sink, deliveries = cluster.nodes[2].open()
    sink.subscribe(spec())
    cluster.run()
    assert tags(deliveries) == [1, 2, 3]


@pytest.mark.parametrize("node", [1, 4])
def test_what_the_leader_cannot_read_is_not_said_to_be_gone(node: int) -> None:
    cluster = Cluster()
    source, _ = cluster.nodes[2].open()
    for number in (1, 2, 3):
        publish(source, number, 1)
        cluster.run()
    repair = damage(cluster, 1, len(cluster.log) - 2)
    client, events = cluster.nodes[node].open()
    client.get(no_ack=False)
    sink, deliveries = cluster.nodes[node].open()
    sink.subscribe(spec())
    cluster.run()
    assert not events.heard
    repair()
    cluster.elect(2)
    publish(source, 4, 1)
    cluster.run()
    cluster.wait(2000)
    assert [h[1][:4] for h in events.heard] == [b"\0\0\0\1"]
    assert tags(deliveries) == [2, 3, 4]


@pytest.mark.parametrize("node", [1, 2, 4])
def test_get_answers_in_order_and_settles_for_no_ack(node: int) -> None:
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    publish(client, 1, 2)
    client.get(no_ack=True)
    client.get(no_ack=False)
    client.get(no_ack=False)
    cluster.run()
    assert [h[1] and h[1][:4] for h in events.heard] == [b"\0\0\0\1", b"\0\0\0\2", None]
    assert [h[4] for h in events.heard] == [1, 0, 0]
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.acked, machine.backlog.unacked) == (1, 1)


def test_cancel_purge_and_close() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    client.subscribe(spec(prefetch=2))
    publish(client, 1, 5)
    cluster.run()
    client.cancel(1)
    client.purge()
    cluster.run()
    assert ("cancel-ok", 1) in events.heard
    assert ("purged", 3, None) in events.heard
    client.close()
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.ready(), machine.sessions) == (2, {})
    assert cluster.nodes[4].queue._clients == {}


def test_refusals_become_the_errors_of_the_edge() -> None:
    cluster = Cluster(single_active=True)
    client, events = cluster.nodes[2].open()
    client.get(no_ack=False)
    cluster.run()
    assert isinstance(events.heard[0][-1], ResourceLocked)


def test_a_node_that_goes_and_comes_back_keeps_its_consumer() -> None:
    cluster = Cluster(disconnect_timeout_ms=1000)
    sink, deliveries = cluster.nodes[4].open()
    source, _ = cluster.nodes[1].open()
    sink.subscribe(spec())
    publish(source, 1, 1)
    cluster.run()
    cluster.cut = {4}
    cluster.nodes[1].queue.on_node_down(4, definite=False)
    publish(source, 2, 1)
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.unacked, machine.backlog.ready()) == (1, 1)
    cluster.wait(1500)
    assert (machine.backlog.unacked, machine.backlog.ready()) == (0, 2)
    cluster.cut = set()
    cluster.nodes[1].queue.on_node_up(4)
    cluster.run()
    assert tags(deliveries) == [1, 1, 2]
    assert [h[2] for h in deliveries.heard if h[0] == "message"] == [0, 1, 0]
    sink.settle(1, (0, 2))
    cluster.run()
    assert (machine.backlog.acked, machine.backlog.unacked) == (2, 0)


def test_a_new_leader_tells_the_queue_who_is_away() -> None:
    cluster = Cluster()
    sink, _ = cluster.nodes[4].open()
    sink.subscribe(spec())
    cluster.run()
    cluster.cut = {4}
    cluster.elect(2)
    cluster.run()
    machine = cluster.nodes[2].own.machine  # type: ignore[union-attr]
    assert list(machine.down_nodes) == [4]
    cluster.cut = set()
    cluster.elect(3)
    cluster.run()
    assert machine.down_nodes == {}


def test_a_client_whose_session_was_ended_starts_anew() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    client.subscribe(spec())
    publish(client, 1, 2)
    cluster.run()
    cluster.nodes[1].queue.on_node_down(4, definite=True)
    cluster.run()
    publish(client, 3, 2)
    cluster.run()
    cluster.wait(4000)
    assert events.refused == [3, 4]
    assert ("cancelled", 1, "lost") in events.heard
    publish(client, 5, 2)
    client.subscribe(spec(number=2))
    cluster.run()
    assert events.confirmed == [1, 2, 5, 6]
    assert tags(events)[2:] == [1, 2, 5, 6]


def test_a_new_session_is_not_told_what_became_of_the_old_one_s_messages() -> None:
    cluster = Cluster()
    source, _ = cluster.nodes[1].open()
    publish(source, 1, 4)
    client, events = cluster.nodes[4].open()
    ids = []

    def get() -> None:
        client.get(no_ack=False)
        cluster.run()
        ids.append(events.heard[-1][2])

    get()
    get()
    for times in (1, 2):
        cluster.nodes[1].queue.on_node_down(4, definite=True)
        cluster.run()
        publish(client, times, 1)
        cluster.run()
        cluster.wait(4000)
        assert len(events.refused) == times
        get()
    get()
    assert ids == sorted(set(ids))
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    held = machine.backlog.unacked
    assert held == 2
    # The messages of the first sessions are back in the queue, or in other hands.
    client.settle(0, (ids[0], ids[1]))
    client.return_(0, (ids[0], ids[0]), failed=True)
    client.discard(0, (ids[1], ids[2]))
    cluster.run()
    assert (machine.backlog.acked, machine.backlog.unacked) == (0, held)
    # One range may reach over the change.
    client.settle(0, (ids[0], ids[3]))
    cluster.run()
    assert (machine.backlog.acked, machine.backlog.unacked) == (1, held - 1)
    client.settle(0, (ids[4], ids[4]))
    cluster.run()
    assert (machine.backlog.acked, machine.backlog.unacked) == (2, 0)
    assert not client.target.pending


def test_what_a_channel_sends_on_hearing_the_end_of_its_session_goes_in_the_next() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    client.subscribe(spec())
    publish(client, 1, 1)
    cluster.run()
    client.get(no_ack=False)
    cluster.run()
    cluster.nodes[1].queue.on_node_down(4, definite=True)
    cluster.run()
    cancelled = events.on_cancelled

    def go_on(client: Any, consumer: int, reason: str) -> None:
        cancelled(client, consumer, reason)
        client.return_(consumer, (0, 0), failed=False)
        publish(client, 3, 1)

    events.on_cancelled = go_on  # type: ignore[method-assign]
    publish(client, 2, 1)
    cluster.run()
    cluster.wait(4000)
    assert events.refused == [2]
    assert events.confirmed == [1, 3]
    assert not client.target.pending


def test_deleting_answers_everything() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[2].open()
    client.subscribe(spec())
    cluster.run()
    cluster.elect(None)
    publish(client, 1, 3)
    client.get(no_ack=False)
    client.subscribe(spec(number=2))
    client.purge()
    cluster.nodes[2].queue.on_deleted()
    assert events.confirmed == [1, 2, 3]
    kinds = [h[0] for h in events.heard[1:]]
    assert kinds == ["get", "subscribed", "purged", "cancelled"]
    assert all(isinstance(h[-1], NotFound) for h in events.heard[1:4])


@pytest.mark.parametrize(
    "limits",
    [
        FlowLimits(pending_bytes_max=10_000, pending_commands_max=100),
        FlowLimits(pending_messages_max=12),
    ],
)
def test_flow_stops_the_channel_and_lets_it_go_on(limits: FlowLimits) -> None:
    cluster = Cluster(limits)
    client, events = cluster.nodes[2].open()
    cluster.elect(None)
    publish(client, 1, 20, size=1000)
    cluster.run()
    cluster.wait(250)
    assert events.flow == [True]
    cluster.elect(1)
    cluster.run()
    assert events.flow == [True, False]
    assert events.confirmed == list(range(1, 21))
    assert client.target.pending_messages == client.target.pending_bytes == 0


def test_what_all_channels_of_a_node_have_pending_is_bounded_together() -> None:
    """One message that goes to many queues is within each one's bound."""
    budget = batch.PendingBudget(10_000)
    cluster = Cluster(FlowLimits(budget=budget))
    clients = [cluster.nodes[2].open() for _ in range(4)]
    cluster.elect(None)
    for client, _ in clients:
        publish(client, 1, 4, size=1000)
    cluster.run()
    cluster.wait(250)
    assert budget.bytes > 10_000
    assert [events.flow for _, events in clients] == [[True]] * 4
    cluster.elect(1)
    cluster.run()
    cluster.wait(500)
    assert [events.flow for _, events in clients] == [[True, False]] * 4
    assert all(events.confirmed == [1, 2, 3, 4] for _, events in clients)
    assert budget.bytes == 0
    assert not budget.waiting


def test_the_bound_of_all_channels_forgets_clients_that_are_gone() -> None:
    budget = batch.PendingBudget(10_000)
    cluster = Cluster(FlowLimits(budget=budget))
    client, _ = cluster.nodes[2].open()
    cluster.elect(None)
    publish(client, 1, 20, size=1000)
    cluster.run()
    cluster.wait(250)
    assert budget.waiting == {client}
    client.close()
    assert not budget.waiting
    cluster.nodes[2].queue.on_deleted()
    del client
    gc.collect()
    assert budget.bytes == 0


async def test_ready_waits_for_a_leader() -> None:
    cluster = Cluster()
    await cluster.nodes[1].queue.ready(0.1)
    cluster.elect(None)
    with pytest.raises(Unavailable):
        await cluster.nodes[1].queue.ready(0.01)
    own = cluster.nodes[1].own
    assert own is not None
    # An election that waits for its turn does so no more.
    assert own.hurried


async def test_ready_waits_for_a_leader_that_can_commit() -> None:
    cluster = Cluster()
    own = cluster.nodes[1].own
    assert own is not None
    own.can_commit = False
    with pytest.raises(Unavailable):
        await cluster.nodes[1].queue.ready(0.01)
    waiting = asyncio.ensure_future(cluster.nodes[1].queue.ready(5.0))
    await asyncio.sleep(0)
    own.can_commit = True
    await waiting


async def test_counts_and_info_come_from_the_machine() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[1].open()
    client.subscribe(spec(prefetch=2))
    publish(client, 1, 5)
    cluster.run()
    assert await cluster.nodes[1].queue.counts() == (3, 1)
    info = cluster.nodes[1].queue.info()
    assert info["messages"] == 5
    assert info["messages_unacknowledged"] == 2
    assert info["leader"] == 1
    assert cluster.nodes[4].queue.local_counts() == (0, 0)


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
            cluster.drop_frames = {batch.FRAME_APPLIED, batch.FRAME_DELIVER}
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


@pytest.mark.provokes("quorum.delivery_limit")
def test_messages_over_the_limit_are_logged_by_the_leader_and_counted() -> None:
    """At once, then as a sum."""
    cluster = Cluster(delivery_limit=0)
    client, _ = cluster.nodes[2].open()
    client.subscribe(spec())
    publish(client, 1, 5)
    cluster.run()
    where = {"vhost": "/", "queue": "q", "group": GROUP}
    for message in range(5):
        client.return_(1, [message, message], failed=True)
        cluster.run()
    assert cluster.notes == [(1, "quorum.delivery_limit", {**where, "count": 1})]
    cluster.wait(NOTE_EVERY_MS)
    assert cluster.notes[1:] == [(1, "quorum.delivery_limit", {**where, "count": 4})]
    cluster.wait(2 * NOTE_EVERY_MS)
    assert len(cluster.notes) == 2
    assert cluster.nodes[1].queue.dropped_over_limit == 5
    assert sum(node.queue.dropped_over_limit for node in cluster.nodes.values()) == 5


@pytest.mark.provokes("quorum.reservation_expired")
def test_a_reservation_that_expires_is_logged() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[2].open()
    op = {"op": "open", "reservation": "s", "owner": "me", "ttl_ms": 1000}
    client.reservation(msgspec.msgpack.encode(op), lambda reply, error: None)
    cluster.run()
    cluster.wait(2000)
    cluster.run()
    where = {"vhost": "/", "queue": "q", "group": GROUP}
    assert cluster.notes == [(1, "quorum.reservation_expired", {**where, "reservation": "s"})]


def test_a_queue_without_a_leader_does_not_run() -> None:
    cluster = Cluster()
    queue = cluster.nodes[2].queue
    assert queue.info()["state"] == "running"
    cluster.elect(None)
    assert queue.info()["state"] == "down"
    cluster.cut = {1, 3}
    assert queue.info()["state"] == "minority"
    cluster.cut = set()
    cluster.elect(3)
    assert queue.info()["state"] == "running"


@pytest.mark.parametrize("node", NODES)
def test_credit_of_nothing_lifts_the_limit(node: int) -> None:
    cluster = Cluster()
    client, events = cluster.nodes[node].open()
    client.subscribe(spec(prefetch=2))
    publish(client, 1, 9)
    cluster.run()
    assert tags(events) == [1, 2]
    client.set_credit(1, 0)
    cluster.run()
    assert tags(events) == list(range(1, 10))


@pytest.mark.parametrize("node", NODES)
def test_settled_is_said_when_it_is_applied(node: int) -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[node].open()
    client.subscribe(spec())
    publish(client, 1, 3)
    cluster.run()
    said: list[bool] = []
    client.settle(1, (0, 0))
    client.return_(1, (1, 1), failed=False)
    client.discard(1, (2, 2))
    client.when_settled(said.append)
    assert said == []
    cluster.run()
    assert said == [True]
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.acked, machine.backlog.dropped["rejected"]) == (1, 1)


def test_settles_of_a_deleted_queue_are_answered() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[1].open()
    client.subscribe(spec())
    publish(client, 1, 1)
    cluster.run()
    said: list[bool] = []
    client.settle(1, (0, 0))
    client.when_settled(said.append)
    client.on_deleted()
    assert said == [True]
