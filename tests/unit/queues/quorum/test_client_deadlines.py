"""What a channel hears when nobody leads its queue: deadlines, refusals, and what still waits."""

from __future__ import annotations

import pytest

from convoymq.kernels import batch, link_frames
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import Unavailable
from tests.unit.queues.quorum.cluster import Cluster, publish, spec, tags

LIMITS = DefaultsConfig(
    operation_timeout_ms=2_000,
    publish_register_timeout_ms=5_000,
    leaderless_publish_timeout_ms=0,
    leaderless_consumer_timeout_ms=0,
)
IMPATIENT = DefaultsConfig(
    leaderless_publish_timeout_ms=3_000, leaderless_consumer_timeout_ms=4_000
)


def leaderless() -> Cluster:
    cluster = Cluster(LIMITS)
    cluster.elect(None)
    return cluster


def refusal(heard: object) -> str:
    error = heard[-1]  # type: ignore[index]
    assert isinstance(error, Unavailable)
    return error.text


@pytest.mark.parametrize("node", [1, 4])
@pytest.mark.parametrize("question", ["consume", "get", "purge"])
def test_questions_without_a_leader_are_given_up(question: str, node: int) -> None:
    cluster = leaderless()
    client, events = cluster.nodes[node].open()
    if question == "consume":
        client.subscribe(spec())
    elif question == "get":
        client.get(no_ack=False)
    else:
        client.purge()
    cluster.wait(1_500)
    assert events.heard == []
    cluster.wait(1_000)
    assert refusal(events.heard[0]).startswith("timed out ")
    assert refusal(events.heard[0]).endswith("from quorum queue 'q' in vhost '/'")
    assert len(events.heard) == 1


def test_a_given_up_question_is_not_answered_later() -> None:
    cluster = leaderless()
    client, events = cluster.nodes[2].open()
    client.subscribe(spec())
    client.get(no_ack=False)
    cluster.wait(2_500)
    assert len(events.heard) == 2
    cluster.elect(1)
    source, _ = cluster.nodes[1].open()
    publish(source, 1, 3)
    cluster.wait(2_000)
    assert len(events.heard) == 2
    client.close()
    cluster.wait(2_000)
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.ready(), machine.backlog.unacked) == (3, 0)


def test_a_cancel_without_a_leader_succeeds_and_what_comes_later_goes_back() -> None:
    cluster = Cluster(LIMITS)
    client, events = cluster.nodes[2].open()
    client.subscribe(spec())
    cluster.run()
    cluster.elect(None)
    client.cancel(1)
    cluster.wait(2_500)
    assert events.heard[-1] == ("cancel-ok", 1)
    cluster.elect(1)
    source, _ = cluster.nodes[1].open()
    publish(source, 1, 3)
    cluster.wait(1_000)
    assert events.heard[-1] == ("cancel-ok", 1)
    assert tags(events) == []


def test_publishes_that_the_queue_never_answered_are_refused_once() -> None:
    cluster = leaderless()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 3)
    cluster.wait(4_500)
    publish(client, 4, 1)
    cluster.run()
    assert (events.confirmed, events.refused) == ([], [])
    cluster.wait(1_000)
    assert (events.confirmed, events.refused) == ([], [1, 2, 3, 4])
    publish(client, 5, 1)
    cluster.elect(2)
    cluster.wait(2_000)
    assert (events.confirmed, events.refused) == ([5], [1, 2, 3, 4])
    cluster.elect(None)
    publish(client, 6, 1)
    cluster.wait(10_000)
    assert (events.confirmed, events.refused) == ([5], [1, 2, 3, 4])


def test_publishes_of_a_channel_that_was_answered_wait_as_long_as_it_takes() -> None:
    cluster = Cluster(LIMITS)
    client, events = cluster.nodes[3].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.elect(None)
    publish(client, 2, 2)
    cluster.wait(60_000)
    assert (events.confirmed, events.refused) == ([1], [])
    cluster.elect(2)
    cluster.run()
    assert (events.confirmed, events.refused) == ([1, 2, 3], [])


def test_an_idle_channel_has_its_full_time_for_its_first_publish() -> None:
    cluster = leaderless()
    client, events = cluster.nodes[1].open()
    cluster.wait(6_000)
    publish(client, 1, 1)
    cluster.wait(4_000)
    assert events.refused == []
    cluster.wait(1_500)
    assert events.refused == [1]


@pytest.mark.parametrize("answered", [True, False])
def test_publishes_into_a_queue_that_is_deleted_meanwhile_are_confirmed(answered: bool) -> None:
    cluster = Cluster(LIMITS)
    client, events = cluster.nodes[2].open()
    if answered:
        publish(client, 1, 1)
        cluster.run()
    cluster.elect(None)
    publish(client, 2, 2)
    cluster.run()
    cluster.nodes[2].queue.on_deleted()
    assert events.confirmed[-2:] == [2, 3]
    assert events.refused == []


def test_one_round_is_all_that_a_channel_exceeds_its_bound_by() -> None:
    cluster = Cluster(DefaultsConfig(pending_bytes_max=10_000, publish_pending_commands=8))
    cluster.elect(None)
    big, large = cluster.nodes[2].open()
    publish(big, 1, 20, size=1_000)
    assert large.flow == []
    cluster.nodes[2].builder.discard_unsent()
    assert large.flow == [True]
    many, often = cluster.nodes[2].open()
    for tag in range(1, 10):
        publish(many, tag, 1)
        cluster.nodes[2].builder.discard_unsent()
    assert often.flow == [True]
    cluster.elect(1)
    cluster.run()
    assert large.flow == [True, False]
    assert often.flow == [True, False]


def test_a_silent_queue_is_sent_repeats_ever_more_rarely() -> None:
    cluster = Cluster(LIMITS)
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.cut = {4}
    publish(client, 2, 1)
    cluster.run()
    resends: list[int] = []
    resend = client.resend

    def counted(after: int | None = None, *, now: bool = False) -> None:
        resends.append(cluster.clock.time_ms)
        resend(after, now=now)

    client.resend = counted  # type: ignore[method-assign]
    cluster.wait(16_000)
    assert len(resends) == 4
    cluster.cut = set()
    cluster.wait(16_000)
    assert events.confirmed == [1, 2]


@pytest.mark.parametrize("node", [1, 2, 4])
def test_publishes_without_a_leader_are_refused_in_time_and_withdrawn(node: int) -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[node].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.elect(None)
    publish(client, 2, 2)
    cluster.wait(2_500)
    assert (events.confirmed, events.refused) == ([1], [])
    cluster.wait(1_000)
    assert (events.confirmed, events.refused) == ([1], [2, 3])
    assert client.target.pending_messages == 0
    publish(client, 4, 1)
    cluster.wait(2_000)
    assert events.refused == [2, 3]
    cluster.wait(1_500)
    assert events.refused == [2, 3, 4]
    publish(client, 5, 1)
    cluster.elect(2)
    cluster.wait(2_000)
    assert (events.confirmed, events.refused) == ([1, 5], [2, 3, 4])
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert machine.backlog.ready() == 2


def test_a_refused_publish_that_is_in_the_log_already_comes_into_the_queue_once() -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    cluster.run()
    publish(client, 2, 1)
    data = cluster.nodes[4].builder.take_forward(7, 1)
    cluster.elect(None)
    cluster.wait(3_500)
    assert events.refused == [2]
    cluster.elect(1)
    cluster.nodes[1].builder.adopt(data, link_frames.HEADER_SIZE, len(data))
    publish(client, 3, 1)
    cluster.wait(2_000)
    assert (events.confirmed, events.refused) == ([1, 3], [2])
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert machine.backlog.ready() == 3


def test_refused_publishes_of_a_producer_stay_with_their_names() -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[2].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.elect(None)
    client.target.name_next(b"p", 7)
    publish(client, 2, 1)
    cluster.run()
    publish(client, 3, 1)
    cluster.wait(3_500)
    assert events.refused == [2, 3]
    assert client.target.pending_messages == 1
    cluster.elect(1)
    client.target.name_next(b"p", 7)
    publish(client, 4, 1)
    publish(client, 5, 1)
    cluster.wait(2_000)
    assert events.confirmed == [1, 4, 5]
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    # Message 7 of the producer once, and those without a name that were confirmed.
    assert machine.backlog.ready() == 3


def test_a_publish_whose_producer_was_heard_of_alone_keeps_its_name() -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    cluster.run()
    client.target.name_next(b"p", 7)
    publish(client, 2, 1)
    data = cluster.nodes[4].builder.take_forward(7, 1)
    first = batch.commands(data)[0]
    cluster.nodes[1].builder.adopt(data, first[6], first[6] + first[7])
    cluster.run()
    assert [command.type for command in client.target.pending] == [batch.CMD_ENQUEUE]
    cluster.elect(None)
    cluster.wait(3_500)
    assert events.refused == [2]
    cluster.elect(1)
    publish(client, 3, 1)
    cluster.wait(2_000)
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (events.confirmed, machine.backlog.ready()) == ([1, 3], 3)
    assert machine.producers[b"p"][0] == 7


def test_a_channel_that_was_stopped_goes_on_when_its_publishes_are_refused() -> None:
    cluster = Cluster(
        DefaultsConfig(publish_pending_messages=10, leaderless_publish_timeout_ms=3_000)
    )
    cluster.elect(None)
    client, events = cluster.nodes[2].open()
    publish(client, 1, 20)
    cluster.nodes[2].builder.discard_unsent()
    assert events.flow == [True]
    cluster.wait(3_500)
    assert (len(events.refused), events.flow) == (20, [True, False])


def test_a_short_time_without_a_leader_refuses_nothing() -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(hears_cancel=True))
    cluster.run()
    for tag in range(1, 5):
        cluster.elect(None)
        publish(client, tag, 1)
        cluster.wait(2_000)
        cluster.elect(1)
        cluster.wait(1_000)
    assert (events.confirmed, events.refused) == ([1, 2, 3, 4], [])
    assert not [heard for heard in events.heard if heard[0] == "cancelled"]


def test_consumers_that_hear_of_it_are_cancelled_without_a_leader_and_the_others_stay() -> None:
    cluster = Cluster(IMPATIENT)
    source, _ = cluster.nodes[1].open()
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(1, 1, hears_cancel=True))
    other, stays = cluster.nodes[2].open()
    other.subscribe(spec(1, 1))
    publish(source, 1, 2)
    cluster.run()
    assert (len(tags(events)), len(tags(stays))) == (1, 1)
    cluster.elect(None)
    cluster.wait(3_500)
    assert ("cancelled", 1, "no leader") not in events.heard
    cluster.wait(1_000)
    assert events.heard[-1] == ("cancelled", 1, "no leader")
    assert not [heard for heard in stays.heard if heard[0] == "cancelled"]
    # What it holds can still be settled, and nothing more comes.
    client.settle(1, (0, 0))
    cluster.elect(1)
    publish(source, 3, 4)
    cluster.wait(1_000)
    stayed = cluster.nodes[1].own.machine.backlog.ready()  # type: ignore[union-attr]
    assert (len(tags(events)), len(tags(stays)), stayed) == (1, 1, 4)
    assert events.heard.count(("cancelled", 1, "no leader")) == 1
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert machine.consumers.count == 1


def test_a_consumer_that_is_being_cancelled_without_a_leader_hears_of_it_once() -> None:
    cluster = Cluster(IMPATIENT)
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(1, hears_cancel=True))
    cluster.run()
    cluster.elect(None)
    client.cancel(1)
    cluster.wait(5_000)
    assert not [heard for heard in events.heard if heard[0] == "cancelled"]
    cluster.elect(1)
    cluster.wait(1_000)
    assert events.heard[-1] == ("cancel-ok", 1)
    assert events.heard.count(("cancel-ok", 1)) == 1
