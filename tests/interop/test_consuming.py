"""Consuming with pika: get, prefetch, priorities, acknowledgements, redelivery, cancellation."""

from __future__ import annotations

from typing import Any

import pika.spec  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import Inbox, eventually, fetch_all, numbered, publish_confirmed
from tests.raw_amqp import RawPeer, method_bytes

KINDS = ["quorum", "classic"]


def declare(channel: Any, names: Names, kind: str, **arguments: Any) -> str:
    queue = names.queue(kind)
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind} | arguments)
    return queue


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest, channel: Any, names: Names) -> str:
    """A durable queue of each type in turn."""
    return declare(channel, names, request.param)


@pytest.mark.parametrize("node", [0, 1, 2])
def test_messages_reach_consumers_on_every_node_in_order(
    channel: Any, queue: str, open_connection: Any, node: int
) -> None:
    inbox = Inbox(open_connection(node).channel(), queue, auto_ack=True)
    publish_confirmed(channel, queue, numbered(50))
    assert inbox.wait(50) == numbered(50)
    assert inbox.redelivered == [False] * 50


def test_get_counts_what_is_left(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, numbered(3))
    for left in (2, 1, 0):
        method, _, _ = channel.basic_get(queue)
        assert method.message_count == left
        assert (method.exchange, method.routing_key, method.redelivered) == ("", queue, False)
        channel.basic_ack(method.delivery_tag)
    assert channel.basic_get(queue) == (None, None, None)


def test_prefetch_bounds_what_is_outstanding(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, numbered(10))
    channel.basic_qos(prefetch_count=3)
    inbox = Inbox(channel, queue)
    inbox.wait(3)
    inbox.settle()
    assert inbox.bodies == numbered(3)
    channel.basic_ack(inbox.deliveries[1][0].delivery_tag, multiple=True)
    inbox.wait(5)
    inbox.settle()
    assert inbox.bodies == numbered(5)


def test_prefetch_holds_for_consumers_started_later(channel: Any, queue: str) -> None:
    channel.basic_qos(prefetch_count=2)
    first = Inbox(channel, queue)
    channel.basic_qos(prefetch_count=5)
    publish_confirmed(channel, queue, numbered(8))
    first.wait(2)
    first.settle()
    assert len(first.deliveries) == 2


def _of_kind(channel: Any, names: Names, kind: str) -> str:
    """Declares a queue; a quorum queue without saying so: declared as such it refuses a shared
    prefetch, as RabbitMQ 4.1 does."""
    if kind != "quorum":
        return declare(channel, names, kind)
    queue = names.queue()
    channel.queue_declare(queue, durable=True)
    return queue


@pytest.mark.parametrize("kind", KINDS)
def test_global_prefetch_is_shared_by_the_channel(
    channel: Any, names: Names, cluster: Cluster, kind: str
) -> None:
    if kind == "quorum" and cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ serves no channel-wide limit on quorum queues")
    queue = _of_kind(channel, names, kind)
    publish_confirmed(channel, queue, numbered(10))
    channel.basic_qos(prefetch_count=3, global_qos=True)
    boxes = [Inbox(channel, queue), Inbox(channel, queue)]

    def received() -> int:
        return sum(len(box.deliveries) for box in boxes)

    eventually(lambda: received() == 3, connection=channel.connection)
    boxes[0].settle()
    assert received() == 3
    channel.basic_ack(0, multiple=True)
    eventually(lambda: received() == 6, connection=channel.connection)


@pytest.mark.parametrize("kind", KINDS)
def test_a_global_prefetch_of_nothing_lifts_the_limit(
    channel: Any, names: Names, cluster: Cluster, kind: str
) -> None:
    if kind == "quorum" and cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ serves no channel-wide limit on quorum queues")
    queue = _of_kind(channel, names, kind)
    channel.basic_qos(prefetch_count=3, global_qos=True)
    inbox = Inbox(channel, queue)
    publish_confirmed(channel, queue, numbered(10))
    inbox.wait(3)
    channel.basic_qos(prefetch_count=0, global_qos=True)
    inbox.wait(10)
    publish_confirmed(channel, queue, numbered(10))
    inbox.wait(20)
    assert inbox.bodies == numbered(10) * 2


def test_consumers_take_turns(channel: Any, queue: str, open_connection: Any) -> None:
    boxes = []
    for node in (0, 1, 2):
        consumer = open_connection(node).channel()
        consumer.basic_qos(prefetch_count=2)
        boxes.append(Inbox(consumer, queue))
    publish_confirmed(channel, queue, numbered(6))
    for box in boxes:
        box.wait(2)
    assert sorted(body for box in boxes for body in box.bodies) == numbered(6)
    for box in boxes:
        assert box.bodies == sorted(box.bodies)


def test_higher_consumer_priority_is_served_first(
    channel: Any, queue: str, open_connection: Any
) -> None:
    low_channel, high_channel = open_connection(1).channel(), open_connection(2).channel()
    low_channel.basic_qos(prefetch_count=10)
    high_channel.basic_qos(prefetch_count=2)
    low = Inbox(low_channel, queue, arguments={"x-priority": -1})
    high = Inbox(high_channel, queue, arguments={"x-priority": 10})
    publish_confirmed(channel, queue, numbered(3))
    assert high.wait(2) == numbered(2)
    assert low.wait(1) == [b"2"]


def test_multiple_ack_covers_queues_of_the_channel(channel: Any, names: Names) -> None:
    queues = [declare(channel, names, kind) for kind in KINDS]
    tags = []
    for queue in queues:
        publish_confirmed(channel, queue, [b"m"])
        tags.append(channel.basic_get(queue)[0].delivery_tag)
    assert tags == [1, 2]
    channel.basic_ack(2, multiple=True)
    channel.basic_recover(requeue=True)
    assert [fetch_all(channel, queue) for queue in queues] == [[], []]


def test_nack_with_requeue_brings_the_message_back_flagged(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, [b"again"])
    method, _, _ = channel.basic_get(queue)
    channel.basic_nack(method.delivery_tag, requeue=True)
    inbox = Inbox(channel, queue)
    assert inbox.wait(1) == [b"again"]
    assert inbox.redelivered == [True]


def test_reject_with_requeue_brings_the_message_back(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, [b"again"])
    method, _, _ = channel.basic_get(queue)
    channel.basic_reject(method.delivery_tag, requeue=True)
    assert Inbox(channel, queue).wait(1) == [b"again"]


@pytest.mark.parametrize("how", ["nack", "reject"])
def test_rejected_without_requeue_is_gone(channel: Any, queue: str, how: str) -> None:
    publish_confirmed(channel, queue, numbered(2))
    method, _, _ = channel.basic_get(queue)
    getattr(channel, f"basic_{how}")(method.delivery_tag, requeue=False)
    assert fetch_all(channel, queue) == [b"1"]


def test_recover_requeues_everything_unacknowledged(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, numbered(3))
    channel.basic_qos(prefetch_count=3)
    inbox = Inbox(channel, queue)
    inbox.wait(3)
    channel.basic_ack(inbox.deliveries[0][0].delivery_tag)
    channel.basic_recover(requeue=True)
    inbox.wait(5)
    assert inbox.bodies[3:] == [b"1", b"2"]
    assert inbox.redelivered == [False] * 3 + [True] * 2


def test_returned_messages_are_served_before_fresh_ones(channel: Any, names: Names) -> None:
    # With a delivery limit: without one (RabbitMQ 3's default) returns go to the tail.
    queue = declare(channel, names, "quorum", **{"x-delivery-limit": 20})
    publish_confirmed(channel, queue, numbered(4))
    first, _, _ = channel.basic_get(queue)
    second, _, _ = channel.basic_get(queue)
    channel.basic_nack(second.delivery_tag)
    channel.basic_nack(first.delivery_tag)
    eventually(
        lambda: channel.queue_declare(queue, passive=True).method.message_count == 4,
        connection=channel.connection,
    )
    assert fetch_all(channel, queue) == [b"1", b"0", b"2", b"3"]


def test_closing_a_connection_requeues_in_order(
    channel: Any, queue: str, open_connection: Any
) -> None:
    publish_confirmed(channel, queue, numbered(5))
    connection = open_connection(1)
    inbox = Inbox(connection.channel(), queue)
    inbox.wait(5)
    connection.close()
    again = Inbox(channel, queue, auto_ack=True)
    assert again.wait(5) == numbered(5)
    assert again.redelivered == [True] * 5


def test_cancelled_consumer_keeps_what_it_has(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, numbered(2))
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, queue)
    inbox.wait(1)
    tag = inbox.deliveries[0][0].delivery_tag
    # pika gives back unprocessed deliveries on cancel; this one has been processed.
    channel.basic_cancel(inbox.tag)
    channel.basic_ack(tag)
    assert fetch_all(channel, queue) == [b"1"]


def test_deleting_the_queue_cancels_its_consumers(
    channel: Any, queue: str, open_connection: Any
) -> None:
    boxes = [Inbox(open_connection(node).channel(), queue) for node in (0, 1, 2)]
    channel.queue_delete(queue)
    for box in boxes:
        eventually(lambda box=box: box.cancelled, connection=box.channel.connection)  # type: ignore[misc]


def test_single_active_consumer_passes_on(channel: Any, names: Names, open_connection: Any) -> None:
    queue = declare(channel, names, "quorum", **{"x-single-active-consumer": True})
    first_connection = open_connection(1)
    first = Inbox(first_connection.channel(), queue)
    second = Inbox(open_connection(2).channel(), queue)
    publish_confirmed(channel, queue, numbered(2))
    assert first.wait(2) == numbered(2)
    assert second.bodies == []
    first_connection.close()
    assert second.wait(2) == numbered(2)
    assert second.redelivered == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_consumer_without_acks_leaves_the_rest_to_the_next(
    channel: Any, names: Names, open_connection: Any, raw_channel: RawPeer, kind: str
) -> None:
    """The active consumer does not acknowledge, and cancels before it reads, with more in flight
    than the broker buffers for it: the next one gets all that the first was not sent."""
    count = 60
    queue = declare(channel, names, kind, **{"x-single-active-consumer": True})
    publish_confirmed(channel, queue, [b"%03d" % n + bytes(400_000) for n in range(count)])
    consume = pika.spec.Basic.Consume(queue=queue, consumer_tag="first", no_ack=True)
    cancel = pika.spec.Basic.Cancel(consumer_tag="first")
    raw_channel.send_bytes(method_bytes(1, consume) + method_bytes(1, cancel))
    raw_channel.expect(pika.spec.Basic.ConsumeOk, channel=1)
    second = Inbox(open_connection(1).channel(), queue)
    first = []
    while isinstance(raw_channel.expect(object, channel=1), pika.spec.Basic.Deliver):
        first.append(int(raw_channel.content()[1][:3]))
    assert len(first) < count
    got = [int(body[:3]) for body in second.wait(count - len(first))]
    assert sorted(first + got) == list(range(count))


@pytest.mark.rabbitmq_since("4.0")
def test_message_is_dropped_after_twenty_failed_deliveries(channel: Any, names: Names) -> None:
    queue = declare(channel, names, "quorum")
    publish_confirmed(channel, queue, [b"poison"])
    seen = 0
    while True:
        method, properties, _ = channel.basic_get(queue)
        if method is None:
            break
        assert (properties.headers or {}).get("x-delivery-count", 0) == seen
        seen += 1
        channel.basic_reject(method.delivery_tag, requeue=True)
    assert seen == 21


def test_delivery_limit_of_the_queue(channel: Any, names: Names) -> None:
    queue = declare(channel, names, "quorum", **{"x-delivery-limit": 2})
    publish_confirmed(channel, queue, [b"poison"])
    inbox = Inbox(channel, queue)
    for seen in range(1, 4):
        inbox.wait(seen)
        method, properties, _ = inbox.deliveries[-1]
        assert (properties.headers or {}).get("x-delivery-count", 0) == seen - 1
        channel.basic_reject(method.delivery_tag, requeue=True)
    eventually(
        lambda: channel.queue_declare(queue, passive=True).method.message_count == 0,
        connection=channel.connection,
    )
    assert len(inbox.deliveries) == 3
