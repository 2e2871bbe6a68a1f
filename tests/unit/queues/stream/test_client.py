"""Consumers and publishers of a stream: windows, places to begin, names, pauses, and their ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.model.errors import NotServed, PreconditionFailed, Unavailable
from convoymq.model.tables import Field
from convoymq.queues.interface import ConsumerSpec
from convoymq.queues.stream.client import (
    NAME_ARGUMENT,
    PULL_WAIT_MS,
    STORE_MESSAGES,
    STORE_MS,
    TURN_BYTES,
    Reader,
)
from convoymq.queues.stream.queue import KEPT_MAX
from tests.unit.queues.quorum.cluster import GROUP, Events, publish, tags
from tests.unit.queues.stream.cluster import StreamCluster, reading, start

FIRST = start("first")


def offsets(events: Events, consumer: int = 1) -> list[int]:
    return [offset for number, offset, _ in events.messages if number == consumer]


def filled(count: int, **settings: Any) -> StreamCluster:
    """A stream with messages 1 … count at offsets 0 … count - 1, each an entry of its own."""
    cluster = StreamCluster(**settings)
    client, _ = cluster.nodes[1].open()
    for tag in range(1, count + 1):
        publish(client, tag, 1)
        cluster.run()
        cluster.clock.time_ms += 1000
    return cluster


@pytest.mark.parametrize("node", [1, 2, 4])
def test_publishes_are_confirmed_on_every_node(node: int) -> None:
    cluster = StreamCluster()
    client, events = cluster.nodes[node].open()
    publish(client, 1, 5)
    cluster.run()
    assert events.confirmed == [1, 2, 3, 4, 5]
    machine = cluster.nodes[2].queue.machine()
    assert machine is not None
    assert machine.next == 5


@pytest.mark.parametrize("node", [1, 3, 4])
def test_a_consumer_gets_what_was_there_and_what_comes(node: int) -> None:
    cluster = filled(3)
    client, events = cluster.nodes[node].open()
    client.subscribe(reading(FIRST))
    assert events.heard == []
    cluster.run()
    assert events.heard[0] == ("subscribed", 1, None)
    assert tags(events) == [1, 2, 3]
    publish(cluster.nodes[2].open()[0], 4, 2)
    cluster.run()
    cluster.wait(250)
    assert tags(events) == [1, 2, 3, 4, 5]
    assert offsets(events) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("node", [1, 4])
def test_the_window_is_what_is_not_acknowledged(node: int) -> None:
    cluster = filled(10)
    client, events = cluster.nodes[node].open()
    client.subscribe(reading(FIRST, prefetch=3))
    cluster.run()
    assert offsets(events) == [0, 1, 2]
    client.settle(1, (0, 1))
    cluster.run()
    assert offsets(events) == [0, 1, 2, 3, 4]
    # A log takes nothing back: these give room, and nothing comes twice.
    client.return_(1, (2, 2), failed=True)
    client.discard(1, (3, 4))
    cluster.run()
    assert offsets(events) == list(range(8))
    client.set_credit(1, 5)
    cluster.run()
    assert offsets(events) == list(range(10))


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (None, []),
        (start("next"), []),
        (start("first"), [0, 1, 2, 3, 4]),
        (start("last"), [4]),
        (start(2), [2, 3, 4]),
        (start(0), [0, 1, 2, 3, 4]),
        (start(99), []),
        # The messages came at seconds 1000 … 1004 of this clock, which is at 1005 now.
        (Field("T", 1002), [2, 3, 4]),
        (Field("T", 1005), []),
        (start("2s"), [3, 4]),
        (start("1h"), [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("node", [2, 4])
def test_where_a_consumer_begins(node: int, at: Field | None, expected: list[int]) -> None:
    cluster = filled(5)
    client, events = cluster.nodes[node].open()
    client.subscribe(reading(at))
    cluster.run()
    assert offsets(events) == expected
    publish(cluster.nodes[1].open()[0], 6, 1)
    cluster.run()
    cluster.wait(250)
    assert offsets(events) == [*expected, 5]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (ConsumerSpec(number=1, tag="c", prefetch=0, no_ack=False), PreconditionFailed),
        (ConsumerSpec(number=1, tag="c", prefetch=5, no_ack=True), NotServed),
        (reading(start("later")), PreconditionFailed),
        (reading(start(-1)), PreconditionFailed),
        (reading(Field("t", True)), PreconditionFailed),
        (reading(FIRST, **{"x-stream-consumer-name": "n" * 256}), PreconditionFailed),
        (reading(FIRST, **{"x-stream-consumer-name": 5}), PreconditionFailed),
    ],
)
def test_what_no_stream_serves(spec: ConsumerSpec, error: type[Exception]) -> None:
    cluster = filled(1)
    client, events = cluster.nodes[1].open()
    client.subscribe(spec)
    cluster.run()
    ((_, consumer, refusal),) = events.heard
    assert consumer == 1
    assert type(refusal) is error
    client.subscribe(reading(FIRST))
    cluster.run()
    assert offsets(events) == [0]


def test_get_and_purge_are_refused() -> None:
    cluster = filled(1)
    client, events = cluster.nodes[1].open()
    client.get(no_ack=True)
    client.purge()
    cluster.run()
    assert [type(heard[-1]) for heard in events.heard] == [NotServed, NotServed]


def test_cancel_ends_deliveries_and_answers_in_order() -> None:
    cluster = filled(5)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(FIRST, prefetch=2))
    cluster.run()
    client.cancel(1)
    client.settle(1, (0, 1))
    cluster.run()
    assert events.heard[-1] == ("cancel-ok", 1)
    assert offsets(events) == [0, 1]
    # One that was not answered yet is answered first.
    client.subscribe(reading(FIRST, number=2))
    client.cancel(2)
    cluster.run()
    assert events.heard[-2:] == [("subscribed", 2, None), ("cancel-ok", 2)]
    assert offsets(events, 2) == []


@pytest.mark.parametrize("node", [1, 4])
def test_a_paused_consumer_gets_nothing_and_goes_on_where_it_was(node: int) -> None:
    cluster = filled(3)
    client, events = cluster.nodes[node].open()
    client.subscribe(reading(FIRST, prefetch=2))
    cluster.run()
    client.pause(1)
    client.settle(1, (0, 1))
    cluster.run()
    assert offsets(events) == [0, 1]
    client.resume(1)
    cluster.run()
    assert offsets(events) == [0, 1, 2]


def test_a_long_turn_is_shared_with_others() -> None:
    cluster = StreamCluster()
    client, _ = cluster.nodes[1].open()
    for tag in range(1, 7):
        publish(client, tag, 1, size=TURN_BYTES // 2)
        cluster.run()
    readers = [cluster.nodes[2].open() for _ in range(2)]
    for client, events in readers:
        client.subscribe(reading(FIRST))
        events.heard.clear()
    order: list[int] = []
    for who, (_, events) in enumerate(readers):
        heard = events.on_deliver

        def on_deliver(*a: Any, who: int = who, heard: Any = heard) -> None:
            order.append(who)
            heard(*a)

        events.on_deliver = on_deliver  # type: ignore[method-assign]
    cluster.run()
    assert order[:4] == [0, 0, 1, 1]
    assert [len(events.messages) for _, events in readers] == [6, 6]


def test_retention_takes_a_slow_consumer_along() -> None:
    cluster = filled(10, max_bytes=24, segment_bytes=8)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(start(0), prefetch=1))
    cluster.run()
    first = offsets(events)[0]
    assert first == 10 - 3
    publish(cluster.nodes[1].open()[0], 11, 1)
    publish(cluster.nodes[2].open()[0], 12, 1)
    publish(cluster.nodes[3].open()[0], 13, 1)
    cluster.run()
    client.settle(1, (first, first))
    cluster.run()
    machine = cluster.nodes[1].queue.machine()
    assert machine is not None
    assert offsets(events) == [first, machine.first]
    assert machine.first > first + 1


def test_a_consumer_of_a_node_without_a_replica_goes_to_another_member() -> None:
    cluster = filled(3)
    client, events = cluster.nodes[4].open()
    client.subscribe(reading(FIRST, prefetch=2))
    cluster.run()
    (asked,) = {target for _, target, request in cluster.asked if request[0] == "read"}
    cluster.cut.add(asked)
    if cluster.leader == asked:
        cluster.elect(next(n for n in (1, 2, 3) if n != asked))
    client.settle(1, (0, 1))
    cluster.run()
    cluster.wait(1000)
    assert offsets(events) == [0, 1, 2]


def test_a_consumer_beside_a_replica_that_is_behind_reads_the_leader() -> None:
    """It goes on where it was, and comes back when the replica has caught up."""
    cluster = filled(2)
    node = cluster.nodes[2]
    source, _ = cluster.nodes[1].open()
    client, events = node.open()
    client.subscribe(reading(FIRST))
    cluster.run()
    node.stalled = True
    publish(source, 3, 2)
    cluster.run()
    assert offsets(events) == [0, 1]
    cluster.fall_behind(2)
    cluster.wait(500)
    assert offsets(events) == [0, 1, 2, 3]
    publish(source, 5, 1)
    cluster.wait(500)
    assert offsets(events) == [0, 1, 2, 3, 4]
    assert {target for _, target, _ in cluster.asked} == {cluster.leader}
    # A consumer that comes now, too.
    late, heard = node.open()
    late.subscribe(reading(FIRST))
    cluster.wait(500)
    assert offsets(heard) == [0, 1, 2, 3, 4]
    cluster.catch_up(2)
    cluster.wait(6000)
    asked = len(cluster.asked)
    publish(source, 6, 1)
    cluster.wait(500)
    assert offsets(events) == offsets(heard) == [0, 1, 2, 3, 4, 5]
    assert len(cluster.asked) <= asked + 2


def test_a_consumer_waits_for_somebody_to_ask_and_then_gives_up() -> None:
    cluster = filled(1)
    cluster.cut.update((1, 2, 3))
    client, events = cluster.nodes[4].open()
    client.subscribe(reading(FIRST))
    cluster.wait(20_000)
    assert events.heard == []
    cluster.wait(11_000)
    ((_, _, error),) = events.heard
    assert isinstance(error, Unavailable)


def test_a_damaged_log_is_read_when_it_is_whole_again() -> None:
    cluster = filled(3)
    cluster.gone.add(2)
    client, events = cluster.nodes[2].open()
    client.subscribe(reading(FIRST))
    cluster.run()
    assert offsets(events) == [0]
    cluster.gone.clear()
    cluster.wait(250)
    assert offsets(events) == [0, 1, 2]


def test_many_idle_consumers_hold_little() -> None:
    cluster = filled(50)
    client, events = cluster.nodes[2].open()
    count = KEPT_MAX + 20
    for number in range(1, count + 1):
        client.subscribe(reading(FIRST, number=number, prefetch=number % 7 + 1))
    cluster.run()
    held = [r for r in client._readers.values() if r.chunks and r.chunks._entry is not None]
    assert len(held) == KEPT_MAX
    for number in range(1, count + 1):
        client.settle(number, (0, number % 7))
        client.set_credit(number, 100)
    cluster.run()
    for number in range(1, count + 1):
        assert offsets(events, number) == list(range(50))


def test_deletion_ends_consumers_and_confirms_publishes() -> None:
    cluster = filled(1)
    client, events = cluster.nodes[2].open()
    client.subscribe(reading(FIRST))
    cluster.run()
    publish(client, 7, 1)
    client.subscribe(reading(FIRST, number=2))
    cluster.nodes[2].queue.on_deleted()
    assert events.confirmed == [7]
    assert ("cancelled", 1, "deleted") in events.heard
    assert any(heard[:2] == ("subscribed", 2) and heard[2] for heard in events.heard)


def test_a_lost_session_ends_publishes_and_not_consumers() -> None:
    cluster = filled(2)
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    client.subscribe(reading(FIRST, prefetch=2))
    cluster.run()
    before = client.session
    cluster.nodes[1].builder.add(
        batch.CMD_SESSION_DOWN, 0, 0, 0, 0, 0, before.to_bytes(8, "little")
    )
    cluster.run()
    publish(client, 2, 1)
    cluster.wait(4000)
    assert events.refused == [2]
    assert client.session != before
    publish(client, 3, 1)
    client.settle(1, (0, 1))
    cluster.run()
    cluster.wait(250)
    assert events.confirmed == [1, 3]
    assert offsets(events) == [0, 1, 2, 3]


# --- producers -----------------------------------------------------------------------------


def produce(client: Any, name: bytes, first: int, tag: int, count: int) -> None:
    client.target.command(batch.CMD_PRODUCER, 0, len(name), 0, first.to_bytes(8, "little") + name)
    publish(client, tag, count)
    client.target.command(batch.CMD_SETTLE, 0, 0, 0)


def test_repeats_of_a_producer_are_confirmed_and_there_once() -> None:
    cluster = StreamCluster()
    client, events = cluster.nodes[4].open()
    produce(client, b"p", 0, 1, 3)
    produce(client, b"p", 1, 4, 3)
    cluster.run()
    assert events.confirmed == [1, 2, 3, 4, 5, 6]
    reader, got = cluster.nodes[1].open()
    reader.subscribe(reading(FIRST))
    cluster.run()
    assert tags(got) == [1, 2, 3, 6]


def enqueue_body(count: int) -> tuple[bytes, int]:
    """A whole ENQUEUE of empty records: its body, and where its table stands."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1, None)
    for _ in range(count):
        target.publish([b"\0\1q", b"h"], 0, 0)
    target.command(batch.CMD_SETTLE, 0, 0, 0)
    data = builder.take_entry(1, 1, 1, 1).data
    (_, _, _, _, _, arg, offset, length), _ = batch.commands(data)
    return data[offset + batch.COMMAND_SIZE : offset + length], arg


def test_an_owner_of_publishes_hears_how_many_were_repeats() -> None:
    cluster = StreamCluster()
    client, events = cluster.nodes[2].open()
    heard: list[Any] = []
    body, arg = enqueue_body(4)
    for first in (0, 2):
        name = first.to_bytes(8, "little") + b"p"
        client.target.command(batch.CMD_PRODUCER, 0, 1, 0, name)
        client.target.command(
            batch.CMD_ENQUEUE, 0, 4, arg, body, lambda *answer: heard.append(answer)
        )
    cluster.run()
    assert heard == [(0, None), (2, None)]
    assert events.confirmed == []
    machine = cluster.nodes[1].queue.machine()
    assert machine is not None
    assert machine.next == 6


def test_an_owner_of_publishes_hears_of_an_end() -> None:
    cluster = StreamCluster()
    client, _ = cluster.nodes[2].open()
    heard: list[Any] = []
    body, arg = enqueue_body(1)
    cluster.elect(None)
    client.target.command(batch.CMD_ENQUEUE, 0, 1, arg, body, lambda *a: heard.append(a))
    cluster.wait(66_000)
    ((duplicates, error),) = heard
    assert duplicates == 0
    assert isinstance(error, Unavailable)


# --- names ---------------------------------------------------------------------------------

NAMED = {"x-stream-consumer-name": "billing"}


def stored(cluster: StreamCluster, name: str = "billing") -> int | None:
    machine = cluster.nodes[3].queue.machine()
    assert machine is not None
    return machine.stored_offset(name)


def test_a_name_stores_what_is_acknowledged_without_a_hole() -> None:
    cluster = filled(10)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(FIRST, **NAMED))
    cluster.run()
    client.settle(1, (0, 3, 5, 6))
    cluster.wait(STORE_MS + 250)
    assert stored(cluster) == 3
    client.settle(1, (4, 4, 8, 8))
    cluster.wait(STORE_MS + 250)
    assert stored(cluster) == 6
    client.cancel(1)
    cluster.run()
    assert stored(cluster) == 6
    # What is acknowledged after the end counts, once all is.
    client.settle(1, (7, 7))
    client.settle(1, (9, 9))
    cluster.run()
    assert stored(cluster) == 9
    assert offsets(events) == list(range(10))


def test_what_is_sent_back_is_not_done_with() -> None:
    cluster = filled(5)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(FIRST, **NAMED))
    cluster.run()
    client.settle(1, (0, 1, 3, 4))
    client.return_(1, (2, 2), failed=False)
    client.cancel(1)
    cluster.run()
    assert stored(cluster) == 1
    client.subscribe(reading(FIRST, number=2, **NAMED))
    cluster.run()
    assert offsets(events, 2) == [2, 3, 4]


def test_a_name_begins_behind_its_offset_and_elsewhere_where_it_says() -> None:
    cluster = filled(6)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(FIRST, prefetch=4, **NAMED))
    cluster.run()
    client.settle(1, (0, 2))
    client.close()
    cluster.run()
    assert stored(cluster) == 2
    for node in (2, 4):
        client, events = cluster.nodes[node].open()
        client.subscribe(reading(FIRST, **NAMED))
        client.subscribe(reading(FIRST, number=2, **{"x-stream-consumer-name": "other"}))
        cluster.run()
        assert offsets(events) == [3, 4, 5]
        assert offsets(events, 2) == list(range(6))


def test_a_name_stores_after_many_messages() -> None:
    cluster = StreamCluster()
    client, _ = cluster.nodes[1].open()
    publish(client, 1, STORE_MESSAGES + 5, size=4)
    cluster.run()
    client, events = cluster.nodes[2].open()
    client.subscribe(reading(FIRST, prefetch=STORE_MESSAGES + 5, **NAMED))
    cluster.run()
    client.settle(1, (0, STORE_MESSAGES - 2))
    cluster.run()
    assert stored(cluster) is None
    client.settle(1, (STORE_MESSAGES - 1, STORE_MESSAGES - 1))
    cluster.run()
    assert stored(cluster) == STORE_MESSAGES - 1
    assert len(events.messages) == STORE_MESSAGES + 5


def test_acknowledgements_in_any_order_are_one_range() -> None:
    reader = Reader(1, 10, "name")
    for first, last in ((8, 9), (2, 3), (6, 6), (4, 5), (1, 1)):
        reader.acknowledge(first, last)
    assert reader.acked == [(1, 6), (8, 9)]
    assert reader.low == 0
    reader.acknowledge(0, 0)
    assert (reader.low, reader.acked) == (7, [(8, 9)])
    reader.acknowledge(7, 7)
    assert (reader.low, reader.acked) == (10, [])


def test_the_leader_is_not_needed_to_begin() -> None:
    cluster = filled(2)
    cluster.cut.add(1)
    client, events = cluster.nodes[2].open()
    client.subscribe(reading(FIRST))
    cluster.run()
    assert offsets(events) == [0, 1]
    assert GROUP == 7


def test_credit_of_nothing_lifts_the_limit_and_nobody_waits_for_settles() -> None:
    cluster = filled(10)
    client, events = cluster.nodes[1].open()
    client.subscribe(reading(FIRST, prefetch=3))
    cluster.run()
    assert offsets(events) == [0, 1, 2]
    client.set_credit(1, 0)
    cluster.run()
    assert offsets(events) == list(range(10))
    said: list[bool] = []
    client.settle(1, (0, 9))
    client.when_settled(said.append)
    assert said == [True]


def odd(record: bytes) -> bool:
    """Records begin with their tags here."""
    return int.from_bytes(record[:4], "big") % 2 == 1


@pytest.mark.parametrize("node", [1, 4])
def test_a_filter_passes_messages_over_that_use_no_credit(node: int) -> None:
    cluster = filled(8)
    client, events = cluster.nodes[node].open()
    client.subscribe(replace(reading(FIRST, prefetch=0), credited=True, wants=odd))
    cluster.run()
    client.grant(1, 2)
    cluster.run()
    cluster.wait(250)
    assert tags(events) == [1, 3]
    client.grant(1, 100, drain=True)
    cluster.run()
    cluster.wait(PULL_WAIT_MS)
    assert tags(events) == [1, 3, 5, 7]
    assert events.heard[-1] == ("credit", 1, 4, 0)


def test_what_a_filter_passes_over_is_done_with_for_a_named_consumer() -> None:
    cluster = StreamCluster()
    client, events = cluster.nodes[1].open()
    publish(client, 1, 6)
    cluster.run()
    client.subscribe(replace(reading(FIRST, **{NAME_ARGUMENT: "reader"}), wants=odd))
    cluster.run()
    assert offsets(events) == [0, 2, 4]
    reader = client._readers[1]  # type: ignore[attr-defined]
    assert reader.low == 0
    client.settle(1, [0, 0])
    assert reader.low == 2
    client.settle(1, [4, 4])
    client.settle(1, [2, 2])
    assert (reader.low, reader.acked) == (6, [])
