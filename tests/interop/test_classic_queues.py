"""What classic queues have and quorum queues lack, by pika on a cluster of three nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.conftest import CLASSIC, Names
from tests.interop.helpers import Inbox, api, eventually, fetch_all, publish_confirmed

Declare = Callable[..., str]


def publish(channel: Any, queue: str, *messages: tuple[bytes, int | None]) -> None:
    for body, priority in messages:
        properties = pika.BasicProperties(delivery_mode=2, priority=priority)
        channel.basic_publish("", queue, body, properties)


@pytest.mark.parametrize("node", [0, 1])
def test_higher_priorities_come_first(
    channel: Any, declare_classic: Declare, open_connection: Any, node: int
) -> None:
    queue = declare_classic(x_max_priority=9)
    there = open_connection(node).channel()
    publish(there, queue, (b"a", 0), (b"b", 9), (b"c", None), (b"d", 9), (b"e", 200), (b"f", 4))
    there.basic_qos(prefetch_count=10)
    assert Inbox(there, queue).wait(6) == [b"b", b"d", b"e", b"f", b"a", b"c"]


def test_a_small_prefetch_keeps_the_order_strict(channel: Any, declare_classic: Declare) -> None:
    queue = declare_classic(x_max_priority=2)
    publish(channel, queue, (b"a", 0), (b"b", 0))
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, queue)
    assert inbox.wait(1) == [b"a"]
    publish(channel, queue, (b"c", 2))
    channel.basic_ack(inbox.deliveries[0][0].delivery_tag)
    assert inbox.wait(2)[1:] == [b"c"]


def test_a_limit_drops_from_the_lowest_priority(channel: Any, declare_classic: Declare) -> None:
    queue = declare_classic(x_max_priority=5, x_max_length=2)
    publish(channel, queue, (b"a", 5), (b"b", 0), (b"c", 1), (b"d", 5))
    eventually(lambda: channel.queue_declare(queue, passive=True).method.message_count == 2)
    assert fetch_all(channel, queue) == [b"a", b"d"]


@pytest.mark.parametrize("value", [-1, 256])
def test_other_numbers_of_priorities_are_refused(channel: Any, names: Names, value: int) -> None:
    term = "value_negative" if value < 0 else "max_value_exceeded"
    queue = names.queue()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        channel.queue_declare(queue, durable=True, arguments={**CLASSIC, "x-max-priority": value})
    assert refused.value.reply_code == 406
    expected = f"invalid arg 'x-max-priority' for queue '{queue}' in vhost '/': {{{term},{value}}}"
    assert expected in refused.value.reply_text


def test_several_consumers_that_nack_restore_the_order(
    channel: Any, declare_classic: Declare, open_connection: Any
) -> None:
    queue = declare_classic()
    publish_confirmed(channel, queue, [b"%d" % n for n in range(6)])
    inboxes = []
    for node in (0, 1, 2):
        there = open_connection(node).channel()
        there.basic_qos(prefetch_count=2)
        inboxes.append(Inbox(there, queue))
        inboxes[-1].wait(2)
    for inbox in reversed(inboxes):
        inbox.channel.basic_cancel(inbox.tag)
        tag = inbox.deliveries[-1][0].delivery_tag
        inbox.channel.basic_nack(tag, multiple=True, requeue=True)
        inbox.channel.queue_declare(queue, passive=True)

    def all_back() -> bool:
        return bool(channel.queue_declare(queue, passive=True).method.message_count == 6)

    eventually(all_back)
    assert fetch_all(channel, queue) == [b"%d" % n for n in range(6)]


def test_an_exclusive_consumer_has_the_queue_for_itself(
    channel: Any, declare_classic: Declare, open_connection: Any
) -> None:
    queue = declare_classic()
    inbox = Inbox(channel, queue, exclusive=True)
    other = open_connection(1).channel()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        other.basic_consume(queue, lambda *_: None)
    assert refused.value.reply_code == 403
    channel.basic_cancel(inbox.tag)
    publish_confirmed(channel, queue, [b"x"])
    assert Inbox(open_connection(1).channel(), queue).wait(1) == [b"x"]


def test_single_active_and_consumer_priorities(
    channel: Any, declare_classic: Declare, open_connection: Any
) -> None:
    single = declare_classic("single", x_single_active_consumer=True)
    first, second = (Inbox(open_connection(n).channel(), single, auto_ack=True) for n in (0, 1))
    publish_confirmed(channel, single, [b"a", b"b"])
    assert first.wait(2) == [b"a", b"b"]
    first.channel.basic_cancel(first.tag)
    publish_confirmed(channel, single, [b"c"])
    assert second.wait(1) == [b"c"]
    plain = declare_classic("plain")
    low = Inbox(open_connection(0).channel(), plain, auto_ack=True, arguments={"x-priority": -1})
    high = Inbox(open_connection(1).channel(), plain, auto_ack=True, arguments={"x-priority": 5})
    publish_confirmed(channel, plain, [b"a", b"b"])
    assert high.wait(2) == [b"a", b"b"]
    assert low.bodies == []


@pytest.mark.parametrize("condition", ["if_unused", "if_empty"])
def test_conditions_of_deleting(
    channel: Any, declare_classic: Declare, open_connection: Any, condition: str
) -> None:
    queue = declare_classic()
    publish_confirmed(channel, queue, [b"x"])
    inbox = Inbox(channel, queue, auto_ack=condition == "if_empty")
    other = open_connection(0).channel()
    if condition == "if_empty":
        inbox.wait(1)
        channel.basic_cancel(inbox.tag)
        publish_confirmed(channel, queue, [b"y"])
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        other.queue_delete(queue, **{condition: True})
    assert refused.value.reply_code == 406
    if condition == "if_unused":
        channel.basic_cancel(inbox.tag)
    else:
        channel.queue_purge(queue)
    open_connection(0).channel().queue_delete(queue, **{condition: True})


def test_lazy_is_accepted(channel: Any, declare_classic: Declare) -> None:
    queue = declare_classic(x_queue_mode="lazy")
    publish_confirmed(channel, queue, [b"x"])
    assert fetch_all(channel, queue) == [b"x"]


def test_the_api_shows_the_backing_queue(
    channel: Any, declare_classic: Declare, cluster: Cluster
) -> None:
    queue = declare_classic()
    publish_confirmed(channel, queue, [b"%d" % n for n in range(10)])
    row = api(cluster, "GET", f"queues/%2F/{quote(queue, safe='')}")
    status = row["backing_queue_status"]
    assert (status["len"], status["q4"], status["next_seq_id"]) == (10, 10, 10)
    assert status["delta"] == ["delta", "undefined", 0, 0, "undefined"]
    assert status["target_ram_count"] == "infinity"
    assert {"q1", "q2", "q3", "avg_ingress_rate", "avg_egress_rate", "mode"} <= status.keys()
    assert (row["messages_ram"], row["messages_paged_out"]) == (10, 0)


def test_reply_queues_leave_nothing_behind(open_connection: Any, cluster: Cluster) -> None:
    """Exclusive queues of many connections, used, and dropped by delete or with the connection."""
    before = {row["name"] for row in api(cluster, "GET", "queues?columns=name")}
    for n in range(12):
        connection = open_connection(n % 3)
        there = connection.channel()
        replies = [there.queue_declare("", exclusive=True).method.queue for _ in range(20)]
        for queue in replies:
            there.basic_publish("", queue, b"reply")
        for queue in replies:
            assert Inbox(there, queue, auto_ack=True).wait(1) == [b"reply"]
        for queue in replies[::2]:
            there.queue_delete(queue)
        connection.close()

    def gone() -> bool:
        return {row["name"] for row in api(cluster, "GET", "queues?columns=name")} <= before

    eventually(gone)
