"""A channel's client of a quorum queue: resends, gaps, questions, flow; over fakes of the rest."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from convoymq.kernels import batch, link_frames
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import NotFound, ResourceLocked
from tests.unit.queues.quorum.cluster import NODES, Cluster, publish, spec, tags


def test_a_client_asks_before_it_sends_much_again() -> None:
    """Silence may be slowness: a queue that has it all, applied or not, is not sent it twice."""
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 100, size=1000)
    cluster.drop_frames = {link_frames.FRAME_APPLIED}
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
    cluster.drop_frames = {link_frames.FRAME_APPLIED, link_frames.FRAME_DELIVER}
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
    cluster.drop_frames = {link_frames.FRAME_DELIVER}
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
    cluster.drop_frames = {link_frames.FRAME_APPLIED, link_frames.FRAME_DELIVER}
    client.get(no_ack=False)
    cluster.run()
    cluster.drop_frames = set()
    publish(client, 4, 1)
    cluster.run()
    cluster.wait(3000)
    assert [(h[0], h[1][:4], h[2], h[4]) for h in events.heard] == [("get", b"\0\0\0\1", 0, 2)]
    assert cluster.nodes[1].own.machine.backlog.unacked == 1  # type: ignore[union-attr]


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
        DefaultsConfig(pending_bytes_max=10_000, publish_pending_commands=100),
        DefaultsConfig(publish_pending_messages=12),
    ],
)
def test_flow_stops_the_channel_and_lets_it_go_on(limits: DefaultsConfig) -> None:
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
    cluster = Cluster(budget=budget)
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
    cluster = Cluster(budget=budget)
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
