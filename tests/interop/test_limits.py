"""Time limits, lengths and priorities of quorum queues, by pika on a cluster of three nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import (
    Inbox,
    api,
    eventually,
    fetch_all,
    publish_confirmed,
)
from tests.patience import PATIENCE_S

QUORUM = {"x-queue-type": "quorum"}
NODES = (0, 1, 2)


@pytest.fixture
def declare(connection: Any, names: Names) -> Callable[..., str]:
    """Declares a quorum queue with arguments: `declare(x_message_ttl=5)`. A cluster that has only
    just begun may need a moment before it takes them."""

    def made(**arguments: object) -> str:
        queue = names.queue(f"q{len(names.queues)}")
        spelt = {name.replace("_", "-"): value for name, value in arguments.items()}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            channel = connection.channel()
            try:
                channel.queue_declare(queue, durable=True, arguments={**QUORUM, **spelt})
            except pika.exceptions.ChannelClosedByBroker:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            channel.close()
            return queue

    return made


def length(channel: Any, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def with_priority(priority: int | None) -> pika.BasicProperties:
    return pika.BasicProperties(delivery_mode=2, priority=priority)


def publish_until_refused(channel: Any, queue: str, most: int) -> int:
    """How many messages are confirmed before one is not. Raises AssertionError."""
    for count in range(most):
        try:
            channel.basic_publish("", queue, b"x")
        except pika.exceptions.NackError:
            return count
    raise AssertionError(f"{most} messages were taken")


def test_expired_messages_leave_behind_one_that_lives(
    declare: Callable[..., str], open_connection: Callable[[int], Any]
) -> None:
    """With expiry by due time; their dead letters come while what stands before them waits."""
    letters = declare()
    dead = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": letters}
    queue = declare(x_message_expiry="due", **dead)
    plain = declare(**dead)
    channel = open_connection(1).channel()
    channel.confirm_delivery()
    for name in (plain, queue):
        channel.basic_publish("", name, b"lives", with_priority(None))
        for body in (b"1", b"2"):
            late = pika.BasicProperties(delivery_mode=2, expiration="300")
            channel.basic_publish("", name, body, late)
        channel.basic_publish("", name, b"lives too", with_priority(None))
    eventually(lambda: length(channel, queue) == 2)
    eventually(lambda: length(channel, letters) == 2)
    assert length(channel, plain) == 4
    reasons = []
    for _ in range(2):
        _, properties, body = channel.basic_get(letters, auto_ack=True)
        [death] = properties.headers["x-death"]
        reasons.append((body, death["reason"], death["queue"]))
    assert reasons == [(b"1", "expired", queue), (b"2", "expired", queue)]
    assert fetch_all(channel, queue) == [b"lives", b"lives too"]


@pytest.mark.parametrize("node", NODES)
def test_messages_of_a_queue_with_a_ttl_go_in_time(
    declare: Callable[..., str], open_connection: Callable[[int], Any], node: int
) -> None:
    queue = declare(x_message_ttl=300)
    channel = open_connection(node).channel()
    publish_confirmed(channel, queue, [b"a", b"b"])
    eventually(lambda: length(channel, queue) == 0)


def test_an_expiration_counts_where_it_is_shorter(
    channel: Any, declare: Callable[..., str]
) -> None:
    queue = declare(x_message_ttl=600_000)
    short = pika.BasicProperties(delivery_mode=2, expiration="200")
    publish_confirmed(channel, queue, [b"short"], properties=short)
    publish_confirmed(channel, queue, [b"long"])
    eventually(lambda: length(channel, queue) == 1)
    assert fetch_all(channel, queue) == [b"long"]


def test_ttl_0_reaches_only_who_waits(channel: Any, declare: Callable[..., str]) -> None:
    queue = declare()
    now = pika.BasicProperties(delivery_mode=2, expiration="0")
    publish_confirmed(channel, queue, [b"lost"], properties=now)
    eventually(lambda: length(channel, queue) == 0)
    inbox = Inbox(channel, queue)
    publish_confirmed(channel, queue, [b"seen"], properties=now)
    assert inbox.wait(1) == [b"seen"]


def test_a_requeue_keeps_the_time(
    channel: Any, declare: Callable[..., str], open_connection: Callable[[int], Any]
) -> None:
    queue = declare(x_message_ttl=1_000)
    publish_confirmed(channel, queue, [b"x"])
    holder = open_connection(1).channel()
    inbox = Inbox(holder, queue)
    inbox.wait(1)
    holder.basic_cancel(inbox.tag)
    time.sleep(1.1)
    # It is held, so it does not expire; it does when it comes back.
    holder.basic_nack(inbox.deliveries[0][0].delivery_tag, requeue=True)
    eventually(lambda: length(channel, queue) == 0, connection=holder.connection)
    assert fetch_all(channel, queue) == []


def is_gone(cluster: Cluster, queue: str) -> bool:
    """A passive declaration would renew the queue."""
    return all(row["name"] != queue for row in api(cluster, "GET", "queues"))


def test_an_unused_queue_goes(channel: Any, cluster: Cluster, declare: Callable[..., str]) -> None:
    queue = declare(x_expires=500)
    eventually(lambda: is_gone(cluster, queue))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        channel.queue_declare(queue, passive=True)
    assert refused.value.reply_code == 404


def test_a_queue_with_a_consumer_stays(
    channel: Any, cluster: Cluster, declare: Callable[..., str]
) -> None:
    queue = declare(x_expires=5_000)
    inbox = Inbox(channel, queue)
    other = declare(x_expires=5_500)
    eventually(lambda: is_gone(cluster, other))
    publish_confirmed(channel, queue, [b"x"])
    inbox.wait(1)


def test_drop_head_keeps_the_newest(channel: Any, declare: Callable[..., str]) -> None:
    queue = declare(x_max_length=3)
    publish_confirmed(channel, queue, [b"%d" % number for number in range(6)])
    assert fetch_all(channel, queue) == [b"3", b"4", b"5"]


def test_drop_head_by_bytes(channel: Any, declare: Callable[..., str]) -> None:
    queue = declare(x_max_length_bytes=25)
    publish_confirmed(channel, queue, [b"%010d" % number for number in range(5)])
    assert fetch_all(channel, queue) == [b"%010d" % number for number in (3, 4)]


@pytest.mark.parametrize("node", NODES)
def test_a_full_queue_refuses_and_takes_again(
    declare: Callable[..., str], open_connection: Callable[[int], Any], node: int
) -> None:
    queue = declare(x_max_length=10, x_overflow="reject-publish")
    channel = open_connection(node).channel()
    channel.confirm_delivery()
    assert publish_until_refused(channel, queue, 1_000) >= 11
    # Another connection hears it, too, whatever its node.
    for other in NODES:
        late = open_connection(other).channel()
        late.confirm_delivery()
        publish_until_refused(late, queue, 1_000)
    while length(channel, queue) > 8:
        channel.basic_get(queue, auto_ack=True)

    def is_taken() -> bool:
        try:
            channel.basic_publish("", queue, b"again")
        except pika.exceptions.NackError:
            return False
        return True

    eventually(is_taken)


def test_the_rest_of_a_route_gets_what_a_full_queue_refuses(
    channel: Any, declare: Callable[..., str], names: Names
) -> None:
    full = declare(x_max_length=0, x_overflow="reject-publish")
    free = declare()
    exchange = names.exchange()
    channel.exchange_declare(exchange, "fanout")
    for queue in (full, free):
        channel.queue_bind(queue, exchange)
    channel.confirm_delivery()
    publish_until_refused(channel, full, 1_000)
    before = length(channel, free)
    with pytest.raises(pika.exceptions.NackError):
        channel.basic_publish(exchange, "", b"x")
    eventually(lambda: length(channel, free) == before + 1)


def test_higher_priorities_come_first_and_returns_before_them(
    channel: Any, declare: Callable[..., str]
) -> None:
    queue = declare(x_priority_mode="strict")
    channel.confirm_delivery()
    for priority in (1, None, 31, 4, 0, 255, 9):
        body = str(priority).encode()
        channel.basic_publish("", queue, body, properties=with_priority(priority))
    first, _, body = channel.basic_get(queue)
    assert body == b"31"
    channel.basic_nack(first.delivery_tag, requeue=True)
    channel.basic_publish("", queue, b"30", properties=with_priority(30))
    assert fetch_all(channel, queue) == [b"31", b"255", b"30", b"9", b"None", b"4", b"1", b"0"]


@pytest.mark.parametrize(
    ("name", "value"), [("x-message-ttl", -1), ("x-expires", 0), ("x-overflow", "bogus")]
)
def test_values_that_make_no_sense_are_refused(
    channel: Any, names: Names, name: str, value: object
) -> None:
    queue = names.queue()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match=f"invalid arg '{name}'"):
        channel.queue_declare(queue, durable=True, arguments={**QUORUM, name: value})


def test_what_is_asked_must_be_the_same_when_declared_again(
    channel: Any, declare: Callable[..., str], cluster: Cluster
) -> None:
    queue = declare(x_message_ttl=5_000)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="inequivalent arg"):
        channel.queue_declare(queue, durable=True, arguments=QUORUM)
